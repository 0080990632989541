//! Reads one call while it is streamed.

use std::collections::HashMap;

use serde::de::IgnoredAny;
use serde_json::Value;

use super::format::{CallSyntax, ToolFormat};
use super::json_extent::JsonExtent;
use super::literal::{LiteralMatch, begins_with};
use super::python::{self, PythonText};
use super::tagged;
use super::tool::Tool;
use super::value_end::value_end;

/// How far a call was read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Progress {
    /// It goes on.
    More,
    /// This is no call.
    Broken,
    /// It has ended.
    Complete,
    /// The answer was cut within it.
    Cut,
}

/// The part of a call that is read next.
#[derive(Clone, Debug)]
enum Part {
    Opening,
    Name,
    AfterName,
    /// A field of an object, or the object's end.
    Field,
    /// The value of a field, and where it begins.
    FieldValue {
        key: String,
        extent: JsonExtent,
        scanned: usize,
        from: usize,
    },
    /// Arguments in JSON.
    Arguments {
        extent: JsonExtent,
    },
    /// An argument between tags, or the call's end.
    Parameter,
    /// A keyword argument, or the bracket after the last one.
    Keyword,
    /// A program, which has no end but that of the answer.
    Program,
    Close,
}

/// Fields in which models write names and arguments, whatever the template says.
const NAME_FIELDS: [&str; 3] = ["name", "tool_name", "function"];
const ARGUMENT_FIELDS: [&str; 3] = ["arguments", "parameters", "args"];

/// Tools that take programs.
const PROGRAM_TOOLS: [&str; 3] = ["python", "code_interpreter", "ipython"];

/// A call that is being read.
#[derive(Clone, Debug)]
pub(super) struct CallReader {
    /// All of its text.
    pub(super) raw: String,
    /// The part of it that was read.
    at: usize,
    part: Part,
    /// The text before the call, and others that are as good.
    openings: Vec<String>,
    /// The function's name, once it is known.
    pub(super) name: Option<String>,
    /// The JSON text of the arguments so far.
    pub(super) arguments: String,
    /// The number of bytes of them that were given away.
    pub(super) given: usize,
    /// Whether the name was.
    pub(super) head_given: bool,
}

impl CallReader {
    /// The first call of a section, or a further one.
    pub(super) fn new(format: &ToolFormat, is_first: bool) -> CallReader {
        let mut openings = vec![if is_first { format.opening() } else { format.call_open.clone() }];
        if is_first {
            let without_list = openings.iter().find_map(|text| text.trim_end().strip_suffix('['));
            openings.extend(without_list.map(str::to_owned).filter(|text| !text.trim().is_empty()));
            openings.extend(format.alternative_open.clone());
        }
        CallReader {
            raw: String::new(),
            at: 0,
            part: Part::Opening,
            openings,
            name: None,
            arguments: String::new(),
            given: 0,
            head_given: false,
        }
    }

    /// The text after the call.
    pub(super) fn rest(&self) -> &str {
        self.raw.get(self.at..).unwrap_or_default()
    }

    /// Whether it waits for nothing but a text after its arguments, or for the end of the answer.
    pub(super) fn is_closing(&self) -> bool {
        matches!(self.part, Part::Close | Part::Program)
    }

    /// Takes all of its text as its own: there is nothing after it.
    pub(super) fn take_rest(&mut self) {
        self.at = self.raw.len();
    }

    /// Whether the arguments are an object. Numbers may be out of range.
    pub(super) fn is_valid(&self) -> bool {
        let is_object = serde_json::from_str::<HashMap<String, IgnoredAny>>(&self.arguments).is_ok();
        self.name.as_ref().is_some_and(|name| !name.is_empty()) && is_object
    }

    /// Completes arguments of which a part was given away, after whole ones.
    pub(super) fn close_arguments(&mut self) {
        let end = if self.arguments.is_empty() { "{}" } else { "}" };
        self.arguments.push_str(end);
        if !self.is_valid() {
            self.arguments.truncate(self.arguments.len() - end.len());
        }
    }

    /// Reads as far as possible; with `ended`, nothing follows.
    pub(super) fn advance(&mut self, format: &ToolFormat, tools: &[Tool], ended: bool) -> Progress {
        loop {
            let before = self.at;
            let part = std::mem::replace(&mut self.part, Part::Close);
            let progress = match part {
                Part::Opening => self.opening(format, ended),
                Part::Name => self.read_name(format, ended),
                Part::AfterName => self.after_name(format, ended),
                Part::Field => self.field(format, ended),
                Part::FieldValue { key, extent, scanned, from } => {
                    self.field_value(format, key, extent, (scanned, from))
                }
                Part::Arguments { extent } => self.json_arguments(extent),
                Part::Parameter => self.parameter(format, tools, ended),
                Part::Keyword => self.keyword(tools, ended),
                Part::Program => self.program(tools, ended),
                Part::Close => {
                    if self.arguments.is_empty() {
                        // JSON at the beginning of an answer is a call only if it has arguments.
                        if format.trigger().is_none() {
                            return Progress::Broken;
                        }
                        "{}".clone_into(&mut self.arguments);
                    }
                    match begins_with(self.rest(), &format.call_close, ended) {
                        LiteralMatch::Whole(length) => self.at += length,
                        LiteralMatch::Partial => return Progress::More,
                        // It may be missing.
                        LiteralMatch::Missing => {}
                    }
                    return Progress::Complete;
                }
            };
            match progress {
                Some(Progress::More) if ended => return self.cut(),
                Some(progress) => return progress,
                None => debug_assert!(self.at >= before, "reading goes forward"),
            }
        }
    }

    /// The end of the answer within a call: that of the call if only texts after its arguments are missing.
    fn cut(&mut self) -> Progress {
        match self.is_valid() {
            true => {
                self.at = self.raw.len();
                Progress::Complete
            }
            false => Progress::Broken,
        }
    }

    fn go(&mut self, part: Part) -> Option<Progress> {
        self.part = part;
        None
    }

    fn wait(&mut self, part: Part) -> Option<Progress> {
        self.part = part;
        Some(Progress::More)
    }

    fn skip_spaces(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start().len();
    }

    fn opening(&mut self, format: &ToolFormat, ended: bool) -> Option<Progress> {
        let matches: Vec<LiteralMatch> =
            self.openings.iter().map(|opening| begins_with(self.rest(), opening, ended)).collect();
        // A longer one may follow.
        if matches.contains(&LiteralMatch::Partial) {
            return self.wait(Part::Opening);
        }
        let length = |found: &LiteralMatch| match found {
            LiteralMatch::Whole(length) => Some(*length),
            LiteralMatch::Partial | LiteralMatch::Missing => None,
        };
        let whole = matches.iter().enumerate().filter_map(|(at, found)| Some((length(found)?, at))).max();
        let Some((length, whole)) = whole else { return Some(Progress::Broken) };
        let start = self.at;
        self.at += length;
        let is_alternative = self.openings.get(whole) == format.alternative_open.as_ref();
        if let CallSyntax::Object { .. } = format.syntax {
            self.skip_spaces();
            return match self.rest().chars().next() {
                Some('{') => {
                    self.at += 1;
                    self.go(Part::Field)
                }
                None => {
                    self.at = start;
                    self.wait(Part::Opening)
                }
                Some(_) if is_alternative => self.go(Part::Program),
                Some(_) => Some(Progress::Broken),
            };
        }
        self.go(Part::Name)
    }

    fn read_name(&mut self, format: &ToolFormat, ended: bool) -> Option<Progress> {
        let is_end = |letter: char| {
            letter.is_whitespace() || "<>{}[]()\"'=".contains(letter) || crate::marks::MARKS.contains(&letter)
        };
        self.skip_spaces();
        let end = self.rest().find(is_end);
        match end {
            Some(0) => Some(Progress::Broken),
            Some(end) => {
                let name = self.rest().get(..end).unwrap_or_default();
                let name = match &format.syntax {
                    CallSyntax::Identified { prefix, mark, .. } => name_in_identifier(name, prefix, mark),
                    _ => name,
                };
                self.name = Some(name.to_owned());
                self.at += end;
                self.go(Part::AfterName)
            }
            None if ended => Some(Progress::Broken),
            None => self.wait(Part::Name),
        }
    }

    fn after_name(&mut self, format: &ToolFormat, ended: bool) -> Option<Progress> {
        let (text, next): (&str, Part) = match &format.syntax {
            CallSyntax::Named { between } => (between, Part::Arguments { extent: JsonExtent::default() }),
            CallSyntax::Identified { between, .. } => {
                (between, Part::Arguments { extent: JsonExtent::default() })
            }
            CallSyntax::Pythonic => ("(", Part::Keyword),
            CallSyntax::Tagged { head, .. } => (head, Part::Parameter),
            CallSyntax::Object { .. } => return Some(Progress::Broken),
        };
        match begins_with(self.rest(), text, ended) {
            LiteralMatch::Whole(length) => {
                self.at += length;
                if matches!(next, Part::Arguments { .. }) {
                    self.skip_spaces();
                    match self.rest().chars().next() {
                        Some('{') => {}
                        Some(_) => return Some(Progress::Broken),
                        None => {
                            self.at -= length.min(self.at);
                            return self.wait(Part::AfterName);
                        }
                    }
                }
                self.go(next)
            }
            LiteralMatch::Partial => self.wait(Part::AfterName),
            LiteralMatch::Missing => Some(Progress::Broken),
        }
    }

    fn json_arguments(&mut self, mut extent: JsonExtent) -> Option<Progress> {
        let found = extent.push(self.rest());
        let length = found.unwrap_or(self.rest().len());
        let text = self.rest().get(..length).unwrap_or_default().to_owned();
        self.arguments.push_str(&text);
        self.at += length;
        match found {
            Some(_) => self.go(Part::Close),
            None => self.wait(Part::Arguments { extent }),
        }
    }

    fn field(&mut self, format: &ToolFormat, ended: bool) -> Option<Progress> {
        let rest = self.rest();
        let trimmed = rest.trim_start_matches(|letter: char| letter.is_whitespace() || letter == ',');
        let at = self.at + rest.len() - trimmed.len();
        match trimmed.chars().next() {
            None => return self.wait(Part::Field),
            Some('}') => {
                self.at = at + 1;
                return self.go(Part::Close);
            }
            Some('"') => {}
            Some(_) => return Some(Progress::Broken),
        }
        let Some(end) = JsonExtent::default().push(trimmed) else { return self.wait(Part::Field) };
        let Some(key) = trimmed.get(..end).and_then(|text| serde_json::from_str::<String>(text).ok()) else {
            return Some(Progress::Broken);
        };
        match begins_with(trimmed.get(end..).unwrap_or_default(), ":", ended) {
            LiteralMatch::Whole(length) => {
                self.at = at + end + length;
                let key = self.field_name(format, key);
                self.go(Part::FieldValue {
                    key,
                    extent: JsonExtent::default(),
                    scanned: self.at,
                    from: self.at,
                })
            }
            LiteralMatch::Partial => self.wait(Part::Field),
            LiteralMatch::Missing => Some(Progress::Broken),
        }
    }

    /// `name`, `arguments`, or nothing for another field.
    fn field_name(&self, format: &ToolFormat, key: String) -> String {
        let CallSyntax::Object { name, arguments, .. } = &format.syntax else { return String::new() };
        let is = |own: &String, known: &[&str]| key == *own || known.contains(&key.as_str());
        match () {
            () if is(name, &NAME_FIELDS) && self.name.is_none() => "name".to_owned(),
            () if is(arguments, &ARGUMENT_FIELDS) && self.arguments.is_empty() => "arguments".to_owned(),
            () => String::new(),
        }
    }

    fn field_value(
        &mut self,
        format: &ToolFormat,
        key: String,
        mut extent: JsonExtent,
        (scanned, from): (usize, usize),
    ) -> Option<Progress> {
        let new = self.raw.get(scanned..).unwrap_or_default();
        let found = extent.push(new);
        let end = scanned + found.unwrap_or(new.len());
        // Arguments are given away as they arrive, as far as they are an object.
        let value = self.raw.get(from..end).unwrap_or_default().trim_start();
        let is_streamed = key == "arguments" && value.starts_with('{');
        if is_streamed && self.arguments.is_empty() {
            value.clone_into(&mut self.arguments);
        } else if is_streamed {
            self.arguments.push_str(self.raw.get(scanned..end).unwrap_or_default());
        }
        if found.is_none() {
            return self.wait(Part::FieldValue { key, extent, scanned: end, from });
        }
        let value = value.to_owned();
        self.at = end;
        let CallSyntax::Object { .. } = format.syntax else { return Some(Progress::Broken) };
        match key.as_str() {
            "name" => match serde_json::from_str(&value) {
                Ok(name) => self.name = Some(name),
                Err(_) => return Some(Progress::Broken),
            },
            "arguments" if !is_streamed => match serde_json::from_str(&value) {
                Ok(Value::String(text)) => self.arguments = text,
                Ok(Value::Null) => {}
                _ => return Some(Progress::Broken),
            },
            _ => {}
        }
        self.go(Part::Field)
    }

    fn parameter<'f>(&mut self, format: &'f ToolFormat, tools: &[Tool], ended: bool) -> Option<Progress> {
        let CallSyntax::Tagged { open, between, json_between, close, .. } = &format.syntax else {
            return Some(Progress::Broken);
        };
        let rest = self.rest();
        match begins_with(rest, open, ended) {
            LiteralMatch::Partial => self.wait(Part::Parameter),
            LiteralMatch::Missing => {
                let is_end = begins_with(rest, &format.call_close, ended);
                if matches!(is_end, LiteralMatch::Partial) {
                    return self.wait(Part::Parameter);
                }
                let end = if self.arguments.is_empty() { "{}" } else { "}" };
                self.arguments.push_str(end);
                self.go(Part::Close)
            }
            LiteralMatch::Whole(length) => {
                let inner = rest.get(length..).unwrap_or_default();
                let marks = [Some((between, false)), json_between.as_ref().map(|mark| (mark, true))];
                let find = |(mark, is_json): (&'f String, bool)| {
                    let at = inner.find(mark.trim()).filter(|_| !mark.trim().is_empty())?;
                    Some((at, mark, is_json))
                };
                let first = marks.into_iter().flatten().filter_map(find).min_by_key(|(at, ..)| *at);
                let Some((at, between, is_json)) = first else {
                    return self.wait(Part::Parameter);
                };
                let (key, value) = (
                    inner.get(..at).unwrap_or_default(),
                    inner.get(at + between.trim().len()..).unwrap_or_default(),
                );
                let spaces = between.get(between.trim_end().len()..).unwrap_or_default();
                let begin = value.strip_prefix(spaces).unwrap_or(value);
                let core = close.trim();
                let key = key.trim().to_owned();
                let tool = tools.iter().find(|tool| Some(&tool.name) == self.name.as_ref());
                let spaces = close.get(..close.len() - close.trim_start().len()).unwrap_or_default();
                let value_before = |end: usize| {
                    let text = begin.get(..end).unwrap_or_default();
                    text.strip_suffix(spaces).unwrap_or(text)
                };
                let begins_json = || match json_between {
                    Some(_) => is_json,
                    None => {
                        tagged::begins_json(tool, &key, value_before(begin.find(core).unwrap_or(0)), begin)
                    }
                };
                let Some(end) = value_end(begin, core, ended, begins_json) else {
                    return self.wait(Part::Parameter);
                };
                let text = value_before(end);
                let value = match json_between {
                    Some(_) if is_json => tagged::json(text),
                    Some(_) => Value::from(text).to_string(),
                    None => tagged::value(tool, &key, text),
                };
                let after = begin.get(end + core.len()..).unwrap_or_default().len();
                let first = if self.arguments.is_empty() { "{" } else { ", " };
                self.at = self.raw.len() - after;
                self.arguments.push_str(&format!("{first}{}: {value}", Value::from(key)));
                self.go(Part::Parameter)
            }
        }
    }

    fn keyword(&mut self, tools: &[Tool], ended: bool) -> Option<Progress> {
        let rest = self.rest();
        let trimmed = rest.trim_start_matches(python::is_between);
        let at = self.at + rest.len() - trimmed.len();
        let tool = tools.iter().find(|tool| Some(&tool.name) == self.name.as_ref());
        let names: Vec<&str> = tool.into_iter().flat_map(Tool::parameter_names).collect();
        match python::keyword(trimmed, &names, ended) {
            PythonText::Wrong if trimmed.starts_with(')') => {
                self.at = at + 1;
                let end = if self.arguments.is_empty() { "{}" } else { "}" };
                self.arguments.push_str(end);
                self.go(Part::Close)
            }
            PythonText::Whole((name, value), length) => {
                let first = if self.arguments.is_empty() { "{" } else { ", " };
                self.at = at + length;
                self.arguments.push_str(&format!("{first}{}: {value}", Value::from(name)));
                self.go(Part::Keyword)
            }
            PythonText::Partial => self.wait(Part::Keyword),
            PythonText::Wrong => Some(Progress::Broken),
        }
    }

    /// `name.call(key="value")`, or a program for a tool that takes one.
    fn program(&mut self, tools: &[Tool], ended: bool) -> Option<Progress> {
        if !ended {
            return self.wait(Part::Program);
        }
        let text = self.rest().trim();
        let (name, arguments) = match built_in_call(text) {
            Some(call) => call,
            None => {
                let tool = tools.iter().find(|tool| PROGRAM_TOOLS.contains(&tool.name.as_str()));
                let Some(tool) = tool else { return Some(Progress::Broken) };
                (tool.name.clone(), serde_json::json!({ "code": text }))
            }
        };
        (self.name, self.arguments) = (Some(name), arguments.to_string());
        self.at = self.raw.len();
        Some(Progress::Complete)
    }
}

/// The name in an identifier such as `functions.weather:0`; models leave out what is before or behind it at times.
fn name_in_identifier<'a>(identifier: &'a str, prefix: &str, mark: &str) -> &'a str {
    let name = identifier.strip_prefix(prefix).unwrap_or(identifier);
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    name.rsplit_once(mark).filter(|(_, number)| is_number(number)).map_or(name, |(name, _)| name)
}

/// A call such as `brave_search.call(query="rain in Bern")`.
fn built_in_call(text: &str) -> Option<(String, Value)> {
    let (name, rest) = text.split_once(".call(")?;
    let mut inner = rest.trim_end().strip_suffix(')')?.trim();
    let is_name = |name: &str| {
        !name.is_empty() && name.chars().all(|letter| letter.is_alphanumeric() || matches!(letter, '_' | '-'))
    };
    let mut arguments = serde_json::Map::new();
    while !inner.is_empty() {
        let (key, value) = inner.split_once('=')?;
        let mut values = serde_json::Deserializer::from_str(value).into_iter::<Value>();
        let found = values.next()?.ok()?;
        inner = value.get(values.byte_offset()..)?.trim_start();
        inner = inner.strip_prefix(',').unwrap_or(inner).trim_start();
        if !is_name(key.trim()) {
            return None;
        }
        arguments.insert(key.trim().to_owned(), found);
    }
    is_name(name).then(|| (name.to_owned(), arguments.into()))
}

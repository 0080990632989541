//! Tells calls from text in streamed output.

use std::sync::Arc;

use serde_json::Value;

use super::call_reader::{CallReader, Progress};
use super::format::{CallSyntax, ToolFormat};
use super::literal::{LiteralMatch, begins_with};
use super::tool::Tool;
use crate::marks::{MARKS, TOKEN_MARK};
use crate::template::ToolCall;

/// A part of a call.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ToolCallPiece {
    /// The number of the call in its answer, from 0.
    pub index: usize,
    /// The name of the function, in the call's first piece.
    pub name: Option<String>,
    /// The next part of the arguments' JSON text.
    pub arguments: String,
}

impl ToolCallPiece {
    /// The calls that pieces are parts of. Arguments that are no JSON, since the answer was cut, stay text.
    pub fn join(pieces: &[ToolCallPiece]) -> Vec<ToolCall> {
        let mut calls: Vec<(String, String)> = Vec::new();
        for piece in pieces {
            match (calls.get_mut(piece.index), &piece.name) {
                (Some((_, arguments)), _) => arguments.push_str(&piece.arguments),
                (None, name) => calls.push((name.clone().unwrap_or_default(), piece.arguments.clone())),
            }
        }
        let call = |(name, text): (String, String)| {
            let arguments = serde_json::from_str(&text);
            ToolCall::new(name, arguments.unwrap_or_else(|_| Value::String(text)))
        };
        calls.into_iter().map(call).collect()
    }
}

/// Text that was told apart.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ToolText {
    /// Text that is no part of a call.
    pub text: String,
    /// Parts of calls.
    pub calls: Vec<ToolCallPiece>,
}

/// The position in the output.
#[derive(Clone, Debug)]
enum Position {
    Text,
    Call(Box<CallReader>),
    /// After a call, where another one may follow.
    AfterCall,
}

/// The fewest bytes at the end of an output that are taken for the beginning of a call that was cut.
const LEAST_CUT: usize = 3;

/// Tells calls from text while the output is streamed. It never fails: what is not a call is text.
///
/// Without [`with_certain_calls`](Self::with_certain_calls) a call is held back until it is complete, since it may turn out to
/// be text. With it, or with [`finish_cut`](Self::finish_cut), a call that the end of the output cuts keeps the arguments that were
/// generated, or is dropped if its name is not complete: no part of it is text.
#[derive(Clone, Debug)]
pub struct ToolCallParser {
    format: Arc<ToolFormat>,
    tools: Arc<[Tool]>,
    /// Texts with which a call begins anywhere.
    triggers: Vec<String>,
    /// Whether a call without a trigger may begin an answer.
    is_anchored: bool,
    certain: bool,
    /// Whether the output was cut at its end.
    cut: bool,
    position: Position,
    held: String,
    /// White space that is text only if text follows.
    spaces: String,
    has_text: bool,
    calls: usize,
}

impl ToolCallParser {
    /// A parser at the beginning of an answer. The tools say which arguments are texts where the format does not.
    pub fn new(format: Arc<ToolFormat>, tools: Arc<[Tool]>) -> ToolCallParser {
        let trigger = format.trigger();
        let is_anchored = trigger.is_none();
        let alternative = format.alternative_open.clone().map(|text| text.trim().to_owned());
        let triggers = trigger.into_iter().chain(alternative).collect();
        ToolCallParser {
            format,
            tools,
            triggers,
            is_anchored,
            certain: false,
            cut: false,
            position: Position::Text,
            held: String::new(),
            spaces: String::new(),
            has_text: false,
            calls: 0,
        }
    }

    /// For output that a grammar constrains: a call that has begun is one, and is given away as it arrives.
    #[must_use]
    pub fn with_certain_calls(self) -> ToolCallParser {
        ToolCallParser { certain: true, ..self }
    }

    /// With triggers that only tokens are, where they are in a list: those in text are text.
    #[must_use]
    pub(crate) fn with_tokens(mut self, is_token: impl Fn(&str) -> bool) -> ToolCallParser {
        for trigger in &mut self.triggers {
            if is_token(trigger) {
                trigger.insert(0, TOKEN_MARK);
            }
        }
        self
    }

    /// The format.
    pub fn format(&self) -> &ToolFormat {
        &self.format
    }

    /// The number of calls so far.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Adds text, and returns what is certain.
    pub fn push(&mut self, text: &str) -> ToolText {
        let mut out = ToolText::default();
        self.held.push_str(text);
        self.run(&mut out, false);
        out
    }

    /// Whether the latest text is a part of a call, or may be.
    pub(crate) fn is_calling(&self) -> bool {
        !matches!(self.position, Position::Text) || !self.held.is_empty()
    }

    /// The rest at the end of output that a limit or a stop string has cut: a call that has begun would have been completed.
    pub fn finish_cut(&mut self) -> ToolText {
        self.cut = true;
        self.finish()
    }

    /// The rest at the end of the output.
    pub fn finish(&mut self) -> ToolText {
        let mut out = ToolText::default();
        self.run(&mut out, true);
        let spaces = std::mem::take(&mut self.spaces);
        if self.calls == 0 {
            out.text.push_str(&spaces);
        }
        out
    }

    fn run(&mut self, out: &mut ToolText, ended: bool) {
        loop {
            let goes_on = match std::mem::replace(&mut self.position, Position::Text) {
                Position::Text => self.text(out, ended),
                Position::Call(reader) => self.call(*reader, out, ended),
                Position::AfterCall => self.after_call(ended),
            };
            if !goes_on {
                return;
            }
        }
    }

    /// Text up to a call; whether there is more to do.
    fn text(&mut self, out: &mut ToolText, ended: bool) -> bool {
        if self.is_anchored && !self.has_text {
            match self.anchored(ended) {
                LiteralMatch::Whole(_) => return self.begin(),
                LiteralMatch::Partial => return false,
                LiteralMatch::Missing => {}
            }
            if ended
                && self.may_be_cut(self.held.trim_start())
                && self.anchored(false) == LiteralMatch::Partial
            {
                self.held.clear();
                return false;
            }
        }
        let found = self.triggers.iter().filter_map(|trigger| self.held.find(trigger)).min();
        if let Some(at) = found {
            let call = self.held.split_off(at);
            let before = std::mem::replace(&mut self.held, call);
            self.emit(&before, out);
            return self.begin();
        }
        let uncertain = self.uncertain();
        let hold = match ended {
            true if self.may_be_cut(self.held.get(uncertain..).unwrap_or_default()) => {
                self.held.truncate(uncertain);
                uncertain
            }
            true => self.held.len(),
            false => uncertain,
        };
        let rest = self.held.split_off(hold);
        let certain = std::mem::replace(&mut self.held, rest);
        self.emit(&certain, out);
        false
    }

    /// Whether a text that may become a call would have become one, had the output not been cut.
    fn may_be_cut(&self, text: &str) -> bool {
        // A call without any text before it may just be text, up to the end of the name.
        let is_named =
            |tool: &Tool| text.strip_prefix(tool.name.as_str()).is_some_and(|rest| !rest.is_empty());
        let is_marked = !self.is_anchored || !self.format.opening().trim().is_empty();
        let is_certain = self.certain || self.cut && (is_marked || self.tools.iter().any(is_named));
        is_certain && text.trim_end().len() >= LEAST_CUT
    }

    /// The position from which the held text may become a trigger.
    fn uncertain(&self) -> usize {
        let is_start = |at: &usize| {
            let end = self.held.get(*at..).unwrap_or_default();
            self.triggers.iter().any(|trigger| trigger.starts_with(end))
        };
        let longest = self.triggers.iter().map(String::len).max().unwrap_or(0);
        let from = self.held.len().saturating_sub(longest);
        let mut places = (from..self.held.len()).filter(|at| self.held.is_char_boundary(*at));
        places.find(is_start).unwrap_or(self.held.len())
    }

    /// Whether the answer begins with a call that has no text before it.
    fn anchored(&self, ended: bool) -> LiteralMatch {
        let held = self.held.trim_start();
        let starts: Vec<String> = match &self.format.syntax {
            CallSyntax::Object { name, .. } => vec![format!("{{\"{name}\":")],
            CallSyntax::Named { between } => {
                self.tools.iter().map(|tool| format!("{}{between}{{", tool.name)).collect()
            }
            CallSyntax::Identified { prefix, mark, .. } => {
                self.tools.iter().map(|tool| format!("{prefix}{}{mark}", tool.name)).collect()
            }
            CallSyntax::Pythonic => self.tools.iter().map(|tool| format!("{}(", tool.name)).collect(),
            CallSyntax::Tagged { head, .. } => {
                self.tools.iter().map(|tool| format!("{}{head}", tool.name)).collect()
            }
        };
        let opening = self.format.opening();
        let matches = starts.iter().map(|start| begins_with(held, &format!("{opening}{start}"), ended));
        let matches: Vec<LiteralMatch> = matches.collect();
        if let Some(whole) = matches.iter().find(|found| matches!(found, LiteralMatch::Whole(_))) {
            return *whole;
        }
        match held.is_empty() && !ended || matches.contains(&LiteralMatch::Partial) {
            true => LiteralMatch::Partial,
            false => LiteralMatch::Missing,
        }
    }

    fn begin(&mut self) -> bool {
        self.position = Position::Call(Box::new(CallReader::new(&self.format, true)));
        true
    }

    /// White space at the end is held back: before a call it is no text.
    fn emit(&mut self, text: &str, out: &mut ToolText) {
        let kept = text.trim_end();
        if !kept.is_empty() {
            self.has_text = true;
            let spaces = std::mem::take(&mut self.spaces);
            out.text.extend(spaces.chars().chain(kept.chars()).filter(|letter| !MARKS.contains(letter)));
        }
        self.spaces.push_str(text.get(kept.len()..).unwrap_or_default());
    }

    fn call(&mut self, mut reader: CallReader, out: &mut ToolText, ended: bool) -> bool {
        // Only the text after the call has marks.
        let held = std::mem::take(&mut self.held);
        let mut new = held.as_str();
        let (mut progress, after) = loop {
            let (part, rest) =
                new.split_once(TOKEN_MARK).map_or((new, None), |(part, rest)| (part, Some(rest)));
            reader.raw.push_str(part);
            let progress = reader.advance(&self.format, &self.tools, false);
            match rest {
                Some(rest) if progress == Progress::More => new = rest,
                rest => break (progress, rest.map(|rest| format!("{TOKEN_MARK}{rest}")).unwrap_or_default()),
            }
        };
        if ended && progress == Progress::More {
            progress = match (self.certain || self.cut) && !reader.is_closing() {
                true => Progress::Cut,
                false => reader.advance(&self.format, &self.tools, true),
            };
            if progress != Progress::Broken {
                reader.take_rest();
            }
        }
        let is_call = match progress {
            Progress::More => self.certain,
            Progress::Cut => reader.name.is_some() && (self.certain || self.is_known(&reader)),
            Progress::Complete => reader.is_valid() && self.is_known(&reader) || reader.head_given,
            Progress::Broken => {
                reader.close_arguments();
                reader.head_given
            }
        };
        if is_call {
            self.give(&mut reader, out);
        }
        match progress {
            Progress::More => {
                self.position = Position::Call(Box::new(reader));
                return false;
            }
            Progress::Cut => {
                self.spaces.clear();
                self.calls += usize::from(is_call);
                return false;
            }
            Progress::Complete | Progress::Broken if is_call => {
                self.spaces.clear();
                self.calls += 1;
                self.held = format!("{}{after}", reader.rest());
                self.position = Position::AfterCall;
            }
            Progress::Complete | Progress::Broken => {
                // No call after all. A call can still begin after its first character.
                let raw = std::mem::take(&mut reader.raw);
                let (first, rest) = raw.split_at(raw.chars().next().map_or(0, char::len_utf8));
                self.emit(first, out);
                self.has_text = true;
                self.held = format!("{rest}{after}");
            }
        }
        true
    }

    /// Whether a call without any text around it, which may just be JSON, is one of the tools'.
    fn is_known(&self, reader: &CallReader) -> bool {
        let alternative = self.format.alternative_open.as_deref();
        let is_marked = alternative.is_some_and(|open| reader.raw.trim_start().starts_with(open.trim()));
        let is_tool = |name: &String| self.tools.iter().any(|tool| tool.name == *name);
        !self.is_anchored || is_marked || self.tools.is_empty() || reader.name.as_ref().is_some_and(is_tool)
    }

    /// Gives away what is known of a call.
    fn give(&mut self, reader: &mut CallReader, out: &mut ToolText) {
        let Some(name) = &reader.name else { return };
        let arguments = reader.arguments.get(reader.given..).unwrap_or_default();
        if reader.head_given && arguments.is_empty() {
            return;
        }
        let name = (!reader.head_given).then(|| name.clone());
        out.calls.push(ToolCallPiece { index: self.calls, name, arguments: arguments.to_owned() });
        (reader.given, reader.head_given) = (reader.arguments.len(), true);
    }

    fn after_call(&mut self, ended: bool) -> bool {
        let held = self.held.trim_start();
        if held.is_empty() {
            self.position = if ended { Position::Text } else { Position::AfterCall };
            return false;
        }
        let separator = self.format.separator.as_deref().unwrap_or_default().trim();
        let section_close = self.format.section_close.trim();
        let call_open = self.format.call_open.trim();
        let mut waits = false;
        let mut find = |text: &str| -> Option<usize> {
            if text.is_empty() {
                return None;
            }
            match begins_with(held, text, false) {
                LiteralMatch::Whole(length) => Some(length),
                LiteralMatch::Partial => {
                    waits = true;
                    None
                }
                LiteralMatch::Missing => None,
            }
        };
        let marked = |trigger: &String| trigger.trim_start_matches(TOKEN_MARK).to_owned();
        if self.triggers.iter().map(marked).any(|trigger| find(&trigger).is_some()) {
            held.to_owned().clone_into(&mut self.held);
            return self.begin();
        }
        if let Some(length) = find(separator) {
            held.get(length..).unwrap_or_default().to_owned().clone_into(&mut self.held);
            self.position = Position::Call(Box::new(CallReader::new(&self.format, false)));
            return true;
        }
        if let Some(length) = find(section_close) {
            held.get(length..).unwrap_or_default().to_owned().clone_into(&mut self.held);
            self.spaces.clear();
            return true;
        }
        if find(call_open).is_some() {
            held.to_owned().clone_into(&mut self.held);
            self.position = Position::Call(Box::new(CallReader::new(&self.format, false)));
            return true;
        }
        if waits && ended {
            // The output was cut within the text around calls.
            self.held.clear();
            return false;
        }
        if waits {
            self.position = Position::AfterCall;
            return false;
        }
        self.has_text = true;
        true
    }
}

//! Finds the format of calls in a chat template: it is rendered with calls whose names and arguments are known.

use serde_json::{Map, Value, json};

use super::atoms::{common_prefix, common_suffix};
use super::format::{CallSyntax, TemplateSupport, ToolFormat};
use super::{known, python};
use crate::reasoning::ReasoningFormat;
use crate::template::{ChatTemplate, Message, TemplateArguments, ToolCall};

const NAMES: [&str; 2] = ["probe_first", "probe_second"];
const TEXTS: [&str; 2] = ["first text", "other text"];
const NUMBERS: [&str; 2] = ["31", "42"];
const KEYS: [&str; 2] = ["alpha", "beta"];
const LONG_IDS: [&str; 2] = ["call_000000000000000000000001", "call_000000000000000000000002"];
const SHORT_IDS: [&str; 2] = ["probe0001", "probe0002"];
/// An answer and a result, which no template writes by itself.
const ANSWER: &str = "\u{e000}answer";
const RESULT: &str = "\u{e000}result";

impl ToolFormat {
    /// The format of a chat template. `ends` are the texts of end-of-generation tokens, which are no part of calls.
    pub fn of_template(template: &ChatTemplate, ends: &[&str]) -> ToolFormat {
        if known::is_harmony(template) {
            return known::harmony();
        }
        if let Some(format) = known::kimi(template) {
            return format;
        }
        let has_tools = template.reads("tools");
        let found =
            known::llama4(template).or_else(|| attempts().find_map(|attempt| attempt.format(template, ends)));
        let mentioned =
            || known::mentioned(template).filter(|format| has_tools || format.template.tools_in_system);
        let format = found.or_else(mentioned).unwrap_or_else(known::described);
        let support = TemplateSupport {
            tools: has_tools,
            results: format.template.results || writes_results(template, &format.template),
            ..format.template
        };
        let alternative_open = known::alternative_open(template, &format.syntax);
        ToolFormat { template: support, alternative_open, ..format }
    }
}

/// One way to show calls to a template.
#[derive(Clone, Copy)]
struct Attempt {
    calls: usize,
    text_arguments: bool,
    short_ids: bool,
}

fn attempts() -> impl Iterator<Item = Attempt> {
    let ways = [(false, false), (false, true), (true, false), (true, true)];
    let ways = ways.into_iter().flat_map(|way| [2, 1].map(|calls| (calls, way)));
    ways.map(|(calls, (text_arguments, short_ids))| Attempt { calls, text_arguments, short_ids })
}

/// A call in a rendered message.
struct FoundCall {
    start: usize,
    end: usize,
    syntax: CallSyntax,
}

impl Attempt {
    fn calls(self) -> Vec<ToolCall> {
        let ids = if self.short_ids { SHORT_IDS } else { LONG_IDS };
        let call = |((name, id), (text, number)): ((&&str, &str), (&&str, &&str))| {
            let arguments = arguments(text, number);
            let arguments = if self.text_arguments { arguments.to_string().into() } else { arguments };
            ToolCall { id: Some(id.to_owned()), ..ToolCall::new(*name, arguments) }
        };
        let values = TEXTS.iter().zip(&NUMBERS);
        NAMES.iter().zip(ids).zip(values).map(call).take(self.calls).collect()
    }

    fn format(self, template: &ChatTemplate, ends: &[&str]) -> Option<ToolFormat> {
        let answer = |content: &str, calls: Vec<ToolCall>| {
            let message = Message { tool_calls: calls, ..Message::new("assistant", content) };
            render(template, vec![Message::new("user", "question"), message])
        };
        let with_calls = answer("", self.calls())?;
        let with_text = answer(ANSWER, Vec::new())?;
        // What both have in common is not a part of the calls.
        let header = common_prefix(&with_calls, &with_text);
        let footer = common_suffix(&with_calls, &with_text);
        let region = with_calls.get(header..with_calls.len().checked_sub(footer)?)?;
        let region = match template.reasoning() {
            Some(ReasoningFormat::Markers { close, .. }) => {
                region.split_once(close.as_ref()).map_or(region, |(_, after)| after)
            }
            _ => region,
        };
        let mut calls: Vec<FoundCall> = Vec::new();
        for number in 0..self.calls {
            let from = calls.last().map_or(0, |call| call.end);
            calls.push(find_call(region, from, number)?);
        }
        let format = segmented(region, &calls, ends)?;
        let support = TemplateSupport {
            calls: true,
            text_arguments: self.text_arguments,
            short_ids: self.short_ids,
            ..TemplateSupport::default()
        };
        Some(ToolFormat { template: support, ..format })
    }
}

fn arguments(text: &str, number: &str) -> Value {
    let [text_key, number_key] = KEYS;
    json!({ text_key: text, number_key: number.parse::<i64>().unwrap_or_default() })
}

fn render(template: &ChatTemplate, messages: Vec<Message>) -> Option<String> {
    let tool = |name: &str| {
        let [text, number] = KEYS;
        let properties = json!({ text: { "type": "string", "description": "a text" }, number: { "type": "integer", "description": "a number" } });
        let parameters = json!({ "type": "object", "properties": properties, "required": KEYS });
        json!({ "type": "function", "function": { "name": name, "description": "a tool", "parameters": parameters } })
    };
    let mut variables = Map::new();
    variables.insert("tools".to_owned(), NAMES.iter().map(|name| tool(name)).collect());
    let arguments = TemplateArguments { add_generation_prompt: false, variables };
    template.render_with(&messages, &arguments).ok()
}

/// Whether the template writes messages of the role `tool`.
fn writes_results(template: &ChatTemplate, support: &TemplateSupport) -> bool {
    let attempt = Attempt { calls: 1, text_arguments: support.text_arguments, short_ids: support.short_ids };
    let calls = attempt.calls();
    let id = calls.first().and_then(|call| call.id.clone());
    let result = Message {
        tool_call_id: id,
        name: NAMES.first().map(|name| (*name).to_owned()),
        ..Message::new("tool", RESULT)
    };
    let call = Message { tool_calls: calls, ..Message::new("assistant", "") };
    let rendered = render(template, vec![Message::new("user", "question"), call, result]);
    rendered.is_some_and(|text| text.contains(RESULT))
}

/// Finds a call after a position.
fn find_call(region: &str, from: usize, number: usize) -> Option<FoundCall> {
    let name = NAMES.get(number)?;
    let (text, figure) = (TEXTS.get(number)?, NUMBERS.get(number)?);
    let wanted = arguments(text, figure);
    let at = from + region.get(from..)?.find(name)?;
    let after = at + name.len();
    find_object(region, from, at, name, &wanted)
        .or_else(|| find_named(region, at, after, &wanted))
        .or_else(|| find_tagged(region, at, after, text, figure))
        .or_else(|| find_pythonic(region, at, after, &wanted))
}

/// The innermost JSON object around the name that has the arguments, too.
fn find_object(region: &str, from: usize, at: usize, name: &str, wanted: &Value) -> Option<FoundCall> {
    let starts = region.get(from..at)?.rmatch_indices('{').map(|(start, _)| from + start);
    for start in starts {
        let Some((Value::Object(object), length)) = first_value(region.get(start..)?) else { continue };
        let is_arguments = |value: &Value| {
            let text = value.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok());
            value == wanted || text.as_ref() == Some(wanted)
        };
        let key = |is: &dyn Fn(&Value) -> bool| {
            object.iter().find(|(_, value)| is(value)).map(|(key, _)| key.clone())
        };
        let (Some(name_key), Some(arguments_key)) = (key(&|value| value == name), key(&is_arguments)) else {
            continue;
        };
        let counts = |value: &Value| match value {
            Value::String(text) => {
                !text.is_empty() && text.len() < 3 && text.bytes().all(|byte| byte.is_ascii_digit())
            }
            _ => false,
        };
        let before = object.iter().take_while(|(key, _)| **key != name_key);
        let counter = before.filter(|(_, value)| counts(value)).map(|(key, _)| key.clone()).next();
        let syntax = CallSyntax::Object { name: name_key, arguments: arguments_key, counter };
        return Some(FoundCall { start, end: start + length, syntax });
    }
    None
}

/// The name, and the arguments as JSON after it.
fn find_named(region: &str, at: usize, after: usize, wanted: &Value) -> Option<FoundCall> {
    let brace = after + region.get(after..)?.find('{')?;
    let (found, length) = first_value(region.get(brace..)?)?;
    if found != *wanted {
        return None;
    }
    let between = region.get(after..brace)?.to_owned();
    // Another call's name would be in between.
    let is_own = between.len() < 100 && !NAMES.iter().any(|name| between.contains(name));
    is_own.then_some(FoundCall { start: at, end: brace + length, syntax: CallSyntax::Named { between } })
}

/// The name, and keyword arguments after it.
fn find_pythonic(region: &str, at: usize, after: usize, wanted: &Value) -> Option<FoundCall> {
    let (found, length) = python::keywords(region.get(after..)?)?;
    let is_own = Value::Object(found) == *wanted;
    is_own.then_some(FoundCall { start: at, end: after + length, syntax: CallSyntax::Pythonic })
}

/// The name, and each argument between tags.
fn find_tagged(region: &str, at: usize, after: usize, text: &str, figure: &str) -> Option<FoundCall> {
    let find = |from: usize, what: &str| -> Option<(usize, usize)> {
        let start = from + region.get(from..)?.find(what)?;
        Some((start, start + what.len()))
    };
    let [text_key, number_key] = KEYS;
    let first_key = find(after, text_key)?;
    let first_value = find(first_key.1, text)?;
    let second_key = find(first_value.1, number_key)?;
    let second_value = find(second_key.1, figure)?;
    let head = region.get(after..first_key.0)?;
    let step = region.get(first_value.1..second_key.0)?;
    let between = region.get(first_key.1..first_value.0)?;
    let other = region.get(second_key.1..second_value.0)?;
    // Both say where the name ends, and one of them that JSON follows.
    let is_same_end =
        other.chars().next() == between.chars().next() && other.len().abs_diff(between.len()) < 8;
    if between.is_empty() || other.is_empty() || (other != between && !is_same_end) {
        return None;
    }
    let json_between = (other != between).then(|| other.to_owned());
    let common = common_suffix(head, step);
    let open = head.get(head.len() - common..)?.trim_start();
    let close = step.strip_suffix(open)?;
    let head = head.strip_suffix(open)?;
    if close.trim().is_empty() || open.trim().is_empty() {
        return None;
    }
    let rest = region.get(second_value.1..)?;
    let end = [close, close.trim_end()].into_iter().find(|close| rest.starts_with(close))?;
    let syntax = CallSyntax::Tagged {
        head: head.to_owned(),
        open: open.to_owned(),
        between: between.to_owned(),
        json_between,
        close: close.to_owned(),
    };
    Some(FoundCall { start: at, end: second_value.1 + end.len(), syntax })
}

/// The JSON value that a text begins with, and its length.
fn first_value(text: &str) -> Option<(Value, usize)> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    let value = values.next()?.ok()?;
    Some((value, values.byte_offset()))
}

/// Tells the text around all calls from that around each of them.
fn segmented(region: &str, calls: &[FoundCall], ends: &[&str]) -> Option<ToolFormat> {
    let (first, last) = (calls.first()?, calls.last()?);
    let opening = region.get(..first.start)?.trim_start();
    let closing = region.get(last.end..)?;
    let cut = ends.iter().filter(|end| !end.is_empty()).filter_map(|end| closing.find(end)).min();
    let closing = closing.get(..cut.unwrap_or(closing.len()))?.trim_end();
    let format = ToolFormat::object(opening, closing);
    let format = ToolFormat { syntax: first.syntax.clone(), separator: None, ..format };
    let [_, second] = calls else { return Some(format) };
    let between = region.get(first.end..second.start)?;
    let common = common_suffix(opening, between);
    let call_open = opening.get(opening.len() - common..)?.trim_start();
    let between = between.strip_suffix(call_open)?;
    let call_close = between.get(..common_prefix(between, closing))?;
    Some(ToolFormat {
        section_open: opening.strip_suffix(call_open)?.to_owned(),
        section_close: closing.strip_prefix(call_close)?.to_owned(),
        call_open: call_open.to_owned(),
        call_close: call_close.to_owned(),
        separator: Some(between.strip_prefix(call_close)?.to_owned()),
        ..format
    })
}

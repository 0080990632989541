//! Conversations with tools as a template can write them.

use serde_json::Value;

use super::format::{CallSyntax, ToolFormat};
use super::python;
use crate::template::{Message, ToolCall};

impl ToolFormat {
    /// The messages as the template wants them: the tools described, and earlier calls and results written as text, as far as it
    /// does not do so by itself.
    pub fn conversation(&self, messages: &[Message], tools: &[Value]) -> Vec<Message> {
        let mut all: Vec<Message> = Vec::with_capacity(messages.len() + 1);
        let mut identifiers = Identifiers::default();
        for message in messages {
            let mut message = self.message(message);
            if let CallSyntax::Identified { prefix, mark, .. } = &self.syntax
                && self.template.identifiers
            {
                identifiers.set(&mut message, prefix, mark);
            }
            let is_result =
                |message: &Message| message.role == "user" && message.content.starts_with(RESULT_OPEN);
            match all.last_mut() {
                // Templates without results want users and assistants to alternate.
                Some(last) if is_result(last) && is_result(&message) => {
                    last.content.push('\n');
                    last.content.push_str(&message.content);
                }
                _ => all.push(message),
            }
        }
        if tools.is_empty() || self.template.tools {
            return all;
        }
        if all.first().is_none_or(|message| message.role != "system") {
            all.insert(0, Message::new("system", ""));
        }
        if let Some(system) = all.first_mut() {
            match self.template.tools_in_system {
                true => system.tools = Some(Value::from(functions(tools)).to_string()),
                false => {
                    let space = if system.content.is_empty() { "" } else { "\n\n" };
                    system.content.push_str(space);
                    system.content.push_str(&self.description(tools));
                }
            }
        }
        all
    }

    fn message(&self, message: &Message) -> Message {
        let mut message = message.clone();
        let identifier = |id: &mut Option<String>| {
            if let Some(id) = id.as_mut().filter(|_| self.template.short_ids) {
                *id = short_id(id);
            }
        };
        identifier(&mut message.tool_call_id);
        for call in &mut message.tool_calls {
            identifier(&mut call.id);
            // A client may leave it out; templates that want one fail without.
            if self.template.short_ids && call.id.is_none() {
                call.id = Some(short_id(&call.name));
            }
            if self.template.text_arguments && !call.arguments.is_string() {
                call.arguments = call.arguments.to_string().into();
            }
        }
        if !self.template.calls && !message.tool_calls.is_empty() {
            let space = if message.content.is_empty() { "" } else { "\n" };
            message.content.push_str(space);
            message.content.push_str(&self.written(&message.tool_calls));
            message.tool_calls.clear();
        }
        if !self.template.results && message.role == "tool" {
            "user".clone_into(&mut message.role);
            message.content = format!("{RESULT_OPEN}{}\n</tool_response>", message.content);
        }
        message
    }

    /// Calls as the model writes them.
    pub(super) fn written(&self, calls: &[ToolCall]) -> String {
        let call = |(number, call): (usize, &ToolCall)| {
            let text = match &self.syntax {
                CallSyntax::Object { name, arguments, counter } => {
                    let count = counter
                        .as_ref()
                        .map(|counter| format!("{}: \"{number}\", ", Value::from(counter.as_str())));
                    let [name_field, arguments_field] =
                        [name, arguments].map(|field| Value::from(field.as_str()));
                    let (name, count) = (Value::from(call.name.as_str()), count.unwrap_or_default());
                    format!(
                        "{{{count}{name_field}: {name}, {arguments_field}: {}}}",
                        json_text(&call.arguments)
                    )
                }
                CallSyntax::Named { between } => {
                    format!("{}{between}{}", call.name, json_text(&call.arguments))
                }
                CallSyntax::Identified { prefix, mark, between } => {
                    format!("{prefix}{}{mark}{number}{between}{}", call.name, json_text(&call.arguments))
                }
                CallSyntax::Pythonic => {
                    let arguments = call.arguments.as_object().map(python::written).unwrap_or_default();
                    format!("{}({arguments})", call.name)
                }
                CallSyntax::Tagged { head, open, between, json_between, close } => {
                    let empty = serde_json::Map::new();
                    let arguments = call.arguments.as_object().unwrap_or(&empty);
                    let mut text = format!("{}{head}", call.name);
                    for (name, value) in arguments {
                        let between = json_between.as_ref().filter(|_| !value.is_string()).unwrap_or(between);
                        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                        text.push_str(&format!("{open}{name}{between}{value}{close}"));
                    }
                    text
                }
            };
            format!("{}{text}{}", self.call_open, self.call_close)
        };
        let calls: Vec<String> = calls.iter().enumerate().map(call).collect();
        let separator = self.separator.as_deref().unwrap_or("\n");
        format!("{}{}{}", self.section_open, calls.join(separator), self.section_close)
    }

    /// Instructions for a model whose template knows no tools.
    fn description(&self, tools: &[Value]) -> String {
        let functions: Vec<String> = functions(tools).iter().map(Value::to_string).collect();
        let example = ToolCall::new("FUNCTION", serde_json::json!({ "ARGUMENT": "VALUE" }));
        format!(
            "You can call functions. The functions, each with the JSON schema of its arguments:\n{}\n\nTo call a function, \
             answer with:\n{}\nThe result comes in the next message. Call a function only if it helps; otherwise answer in \
             plain text.",
            functions.join("\n"),
            self.written(&[example]),
        )
    }
}

/// Identifiers of calls as the model writes them, numbered through the whole conversation.
#[derive(Default)]
struct Identifiers {
    /// Those of clients, and what became of them.
    known: Vec<(Option<String>, String)>,
}

impl Identifiers {
    fn set(&mut self, message: &mut Message, prefix: &str, mark: &str) {
        for call in &mut message.tool_calls {
            let own = format!("{prefix}{}{mark}{}", call.name, self.known.len());
            self.known.push((call.id.replace(own.clone()), own));
        }
        if let Some(id) = &mut message.tool_call_id {
            let found = self.known.iter().rev().find(|(client, _)| client.as_ref() == Some(id));
            if let Some((_, own)) = found {
                own.clone_into(id);
            }
        }
    }
}

/// Before a result in a message of the user.
const RESULT_OPEN: &str = "<tool_response>\n";

/// The definitions of functions alone.
fn functions(tools: &[Value]) -> Vec<Value> {
    tools.iter().map(|tool| tool.get("function").unwrap_or(tool).clone()).collect()
}

/// Arguments as JSON, whether they are text already or not.
fn json_text(arguments: &Value) -> String {
    arguments.as_str().map_or_else(|| arguments.to_string(), str::to_owned)
}

/// Nine letters and digits for an identifier, always the same ones.
fn short_id(id: &str) -> String {
    if id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return id.to_owned();
    }
    // FNV-1a: short, and the same in every run.
    let hash = id
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{:09x}", hash & 0xf_ffff_ffff)
}

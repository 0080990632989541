//! Messages of a conversation, and what else a template is given.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

/// A message of a conversation. In JSON, it is one of OpenAI's interface.
///
/// ```
/// use quadriga_llm::template::{Message, ToolCall};
/// use serde_json::json;
///
/// let call = Message {
///     reasoning_content: Some("I need the weather.".into()),
///     tool_calls: vec![ToolCall::new("weather", json!({"city": "Bern"}))],
///     ..Message::new("assistant", "")
/// };
/// let result = Message { name: Some("weather".into()), ..Message::new("tool", "12 °C, rain") };
/// # assert!(!call.trusted && result.tool_calls.is_empty());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The role: `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// The text; for the model's own messages, without its reasoning.
    #[serde(default, deserialize_with = "text_or_null")]
    pub content: String,
    /// The model's reasoning before the text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The model's calls of tools.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The call that a `tool` message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The name of the tool that a `tool` message comes from, or of a participant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Definitions of tools as JSON text, for templates that read them in the system message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tools: Option<String>,
    /// Whether control tokens that are spelled out in the content become those tokens. Not for text from users or
    /// documents: it could end its turn and begin one of the system.
    #[serde(skip)]
    pub trusted: bool,
}

/// A call of a tool by the model. Templates see it in OpenAI's format, with `id`, `type` and `function`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "CallObject", into = "CallObject")]
pub struct ToolCall {
    /// The call's identifier, to which a `tool` message refers.
    pub id: Option<String>,
    /// The name of the function.
    pub name: String,
    /// The arguments by name, as published templates expect them; some also take them as a string of JSON.
    pub arguments: Value,
}

impl ToolCall {
    /// A call without an identifier.
    pub fn new(name: impl Into<String>, arguments: Value) -> ToolCall {
        ToolCall { id: None, name: name.into(), arguments }
    }
}

/// A call in OpenAI's format.
#[derive(Serialize, Deserialize)]
struct CallObject {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", default)]
    kind: String,
    function: FunctionObject,
}

#[derive(Serialize, Deserialize)]
struct FunctionObject {
    name: String,
    #[serde(default)]
    arguments: Value,
}

impl From<CallObject> for ToolCall {
    fn from(call: CallObject) -> ToolCall {
        ToolCall { id: call.id, name: call.function.name, arguments: call.function.arguments }
    }
}

impl From<ToolCall> for CallObject {
    fn from(call: ToolCall) -> CallObject {
        let function = FunctionObject { name: call.name, arguments: call.arguments };
        CallObject { id: call.id, kind: "function".to_owned(), function }
    }
}

/// A text; `null`, which messages with calls of tools have, is empty.
fn text_or_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// The variables of a template besides the messages.
///
/// ```
/// use quadriga_llm::template::{ChatTemplate, Message, TemplateArguments};
/// use serde_json::json;
///
/// let source = "{{ messages[0].content }}{% if enable_thinking is false %} /no_think{% endif %}";
/// let mut arguments = TemplateArguments::default();
/// arguments.variables.insert("enable_thinking".into(), json!(false));
/// let template = ChatTemplate::new(source, "", "")?;
/// assert_eq!(template.render_with(&[Message::new("user", "Hi")], &arguments)?, "Hi /no_think");
/// # Ok::<(), quadriga_llm::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateArguments {
    /// Whether the prompt ends with the header of the assistant's answer.
    pub add_generation_prompt: bool,
    /// Keyword arguments, such as `enable_thinking` or `reasoning_effort`, and the lists `tools` and `documents`. The
    /// last two are `none` if they are missing. `messages` and the texts of tokens cannot be replaced.
    pub variables: Map<String, Value>,
}

impl Default for TemplateArguments {
    fn default() -> TemplateArguments {
        TemplateArguments { add_generation_prompt: true, variables: Map::new() }
    }
}

impl TemplateArguments {
    /// With other texts in the variables.
    pub(super) fn map_texts(&self, map: &dyn Fn(&str) -> String) -> TemplateArguments {
        TemplateArguments { variables: mapped_object(&self.variables, map), ..self.clone() }
    }

    /// The number of bytes of the variables' texts.
    pub(super) fn size(&self) -> usize {
        self.variables.iter().map(|(name, value)| name.len() + size(value)).sum()
    }
}

impl Message {
    /// A message whose content is plain text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: content.into(), ..Message::default() }
    }

    /// A message whose content may contain control tokens.
    pub fn trusted(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { trusted: true, ..Message::new(role, content) }
    }

    /// The message with other texts; the role stays.
    pub(super) fn map_texts(&self, map: &dyn Fn(&str) -> String) -> Message {
        let optional = |text: &Option<String>| text.as_deref().map(map);
        let call = |call: &ToolCall| ToolCall {
            id: optional(&call.id),
            name: map(&call.name),
            arguments: mapped(&call.arguments, map),
        };
        Message {
            role: self.role.clone(),
            content: map(&self.content),
            reasoning_content: optional(&self.reasoning_content),
            tool_calls: self.tool_calls.iter().map(call).collect(),
            tool_call_id: optional(&self.tool_call_id),
            name: optional(&self.name),
            tools: optional(&self.tools),
            trusted: self.trusted,
        }
    }

    /// Whether a condition holds for all texts but the role.
    pub(super) fn all_texts(&self, condition: impl Fn(&str) -> bool) -> bool {
        let all = std::cell::Cell::new(true);
        self.map_texts(&|text| {
            all.set(all.get() && condition(text));
            String::new()
        });
        all.get()
    }

    /// The number of bytes of all texts.
    pub(super) fn size(&self) -> usize {
        let optional = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        let call = |call: &ToolCall| optional(&call.id) + call.name.len() + size(&call.arguments);
        let texts = [&self.reasoning_content, &self.tool_call_id, &self.name, &self.tools];
        self.role.len()
            + self.content.len()
            + texts.into_iter().map(optional).sum::<usize>()
            + self.tool_calls.iter().map(call).sum::<usize>()
    }
}

/// A value with other texts, names of fields included.
fn mapped(value: &Value, map: &dyn Fn(&str) -> String) -> Value {
    match value {
        Value::String(text) => Value::String(map(text)),
        Value::Array(items) => items.iter().map(|item| mapped(item, map)).collect(),
        Value::Object(fields) => Value::Object(mapped_object(fields, map)),
        other => other.clone(),
    }
}

fn mapped_object(fields: &Map<String, Value>, map: &dyn Fn(&str) -> String) -> Map<String, Value> {
    fields.iter().map(|(name, value)| (map(name), mapped(value, map))).collect()
}

/// The number of bytes of a value's texts.
fn size(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(size).sum(),
        Value::Object(fields) => fields.iter().map(|(name, value)| name.len() + size(value)).sum(),
        _ => 0,
    }
}

//! Messages made of blocks, as the messages that templates know.

use quadriga_llm::template::{Message, ToolCall};
use serde_json::{Map, Value};

use super::system::system;
use crate::error::{ApiError, quoted};
use crate::fields::Fields;

/// The conversation of a request.
pub(super) fn conversation(fields: &Fields<'_>) -> Result<Vec<Message>, ApiError> {
    const NAME: &str = "messages";
    let list = fields.objects(NAME)?.ok_or_else(|| fields.missing(NAME))?;
    if list.is_empty() {
        return Err(fields.error(NAME, "is empty; it must have a message"));
    }
    let mut all = Conversation { messages: Vec::new() };
    if let Some(text) = system(fields)? {
        all.messages.push(Message::new("system", text));
    }
    for message in &list {
        let known = ["user", "assistant", "system"];
        let role = message.one_of("role", &known)?.ok_or_else(|| message.missing("role"))?;
        match message.value("content") {
            None => return Err(message.missing("content")),
            Some(Value::String(text)) => all.text(role, text),
            Some(Value::Array(_)) => {
                for block in message.objects("content")?.unwrap_or_default() {
                    all.block(role, &block)?;
                }
            }
            Some(_) => return Err(message.error("content", "must be a string or a list of blocks")),
        }
    }
    if all.messages.iter().all(|message| message.role == "system") {
        return Err(fields.error(NAME, "has no text; it must have a message of the user"));
    }
    Ok(all.messages)
}

struct Conversation {
    messages: Vec<Message>,
}

impl Conversation {
    /// The message to which a block of this role belongs: turns of one role that follow each other are one.
    fn open(&mut self, role: &str) -> &mut Message {
        // Most templates have a system prompt at the beginning only: later ones are said by the user.
        let at_start = self.messages.iter().all(|message| message.role == "system");
        let role = if role == "system" && !at_start { "user" } else { role };
        let is_open = self.messages.last().is_some_and(|last| last.role == role);
        if !is_open {
            self.messages.push(Message::new(role, ""));
        }
        let last = self.messages.len() - 1;
        #[allow(clippy::indexing_slicing, reason = "there is a last one")]
        &mut self.messages[last]
    }

    fn text(&mut self, role: &str, text: &str) {
        let message = self.open(role);
        if !message.content.is_empty() && !text.is_empty() {
            message.content.push('\n');
        }
        message.content.push_str(text);
    }

    fn block(&mut self, role: &str, block: &Fields<'_>) -> Result<(), ApiError> {
        let kind = block.required_text("type")?;
        match (kind, role) {
            ("text" | "document" | "search_result", _) => self.text(role, &block_text(block)?),
            ("thinking", "assistant") => {
                let text = block.required_text("thinking")?;
                let reasoning = &mut self.open(role).reasoning_content;
                reasoning.get_or_insert_default().push_str(text);
            }
            // Only the server that wrote it can read it.
            ("redacted_thinking", "assistant") => {}
            ("tool_use", "assistant") => {
                let call = ToolCall {
                    id: Some(block.required_text("id")?.to_owned()),
                    name: block.required_text("name")?.to_owned(),
                    arguments: Value::Object(block.map("input")?.cloned().unwrap_or_else(Map::new)),
                };
                self.open(role).tool_calls.push(call);
            }
            ("tool_result", "user") => self.tool_result(block)?,
            // What Anthropic's servers did, which the model has said in its text.
            (kind, _) if is_of_server_tool(kind) => {}
            _ => {
                let problem =
                    format!("is {} in a message of the {role}; the model takes text only", quoted(kind));
                return Err(block.error("type", problem));
            }
        }
        Ok(())
    }

    fn tool_result(&mut self, block: &Fields<'_>) -> Result<(), ApiError> {
        let id = block.required_text("tool_use_id")?;
        let mut text = match block.value("content") {
            None => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(Value::Array(_)) => {
                let blocks = block.objects("content")?.unwrap_or_default();
                let texts = blocks.iter().filter_map(|block| result_text(block).transpose());
                texts.collect::<Result<Vec<_>, _>>()?.join("\n")
            }
            Some(_) => return Err(block.error("content", "must be a string or a list of blocks")),
        };
        // Templates have no other place for it.
        if block.flag("is_error")?.unwrap_or(false) && !text.to_lowercase().starts_with("error") {
            text.insert_str(0, "Error: ");
        }
        let mut calls = self.messages.iter().flat_map(|message| &message.tool_calls).rev();
        let name = calls.find(|call| call.id.as_deref() == Some(id)).map(|call| call.name.clone());
        self.messages.push(Message { tool_call_id: Some(id.to_owned()), name, ..Message::new("tool", text) });
        Ok(())
    }
}

/// Whether a block is a call of a tool that Anthropic's servers run, or the result of one: `server_tool_use`,
/// `web_search_tool_result`, `mcp_tool_use` and others.
fn is_of_server_tool(kind: &str) -> bool {
    kind.ends_with("_tool_use") || kind.ends_with("_tool_result") || kind == "container_upload"
}

/// The text of a block in a result, if it has one.
fn result_text(block: &Fields<'_>) -> Result<Option<String>, ApiError> {
    match block.required_text("type")? {
        // A search for tools has found it.
        "tool_reference" => Ok(Some(format!("Tool available: {}", block.required_text("tool_name")?))),
        kind if is_of_server_tool(kind) => Ok(None),
        _ => block_text(block).map(Some),
    }
}

/// The text of a block that has some.
fn block_text(block: &Fields<'_>) -> Result<String, ApiError> {
    let kind = block.required_text("type")?;
    match kind {
        "text" => Ok(block.required_text("text")?.to_owned()),
        "document" => {
            let source = block.object("source")?.ok_or_else(|| block.missing("source"))?;
            let text = match source.required_text("type")? {
                "text" => source.required_text("data")?.to_owned(),
                "content" => content_text(&source)?,
                kind => {
                    return Err(
                        source.error("type", format!("is {}; the model takes text only", quoted(kind)))
                    );
                }
            };
            Ok(titled(block.text("title")?, &text))
        }
        "search_result" => Ok(titled(block.text("title")?, &content_text(block)?)),
        _ => Err(block.error("type", format!("is {}; the model takes text only", quoted(kind)))),
    }
}

fn content_text(fields: &Fields<'_>) -> Result<String, ApiError> {
    match fields.value("content") {
        Some(Value::String(text)) => Ok(text.clone()),
        _ => {
            let blocks = fields.objects("content")?.ok_or_else(|| fields.missing("content"))?;
            Ok(blocks
                .iter()
                .map(|block| block.required_text("text"))
                .collect::<Result<Vec<_>, _>>()?
                .join("\n"))
        }
    }
}

fn titled(title: Option<&str>, text: &str) -> String {
    match title {
        Some(title) => format!("{title}\n\n{text}"),
        None => text.to_owned(),
    }
}

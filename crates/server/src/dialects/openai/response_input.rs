//! The input of `/v1/responses`: a text, or items that become the messages of a conversation.

use quadriga_llm::template::{Message, ToolCall};
use serde_json::{Value, json};

use super::messages;
use crate::dialects::format_fields;
use crate::error::{ApiError, quoted};
use crate::fields::Fields;

/// The conversation of a request.
pub(crate) fn conversation(fields: &Fields<'_>) -> Result<Vec<Message>, ApiError> {
    let mut all = Vec::new();
    if let Some(instructions) = fields.text("instructions")? {
        all.push(Message::new("system", instructions));
    }
    match fields.value("input").ok_or_else(|| fields.missing("input"))? {
        Value::String(text) => all.push(Message::new("user", text.clone())),
        _ => {
            let items = fields.objects("input")?.unwrap_or_default();
            if items.is_empty() {
                return Err(fields.error("input", "is empty; it must have an item"));
            }
            items.iter().try_for_each(|item| add_item(item, &mut all))?;
        }
    }
    Ok(all)
}

fn add_item(item: &Fields<'_>, all: &mut Vec<Message>) -> Result<(), ApiError> {
    match item.text("type")?.unwrap_or("message") {
        "message" => {
            let known = ["system", "developer", "user", "assistant"];
            let role = item.one_of("role", &known)?.ok_or_else(|| item.missing("role"))?;
            let content = messages::content(item, "content")?.ok_or_else(|| item.missing("content"))?;
            match role {
                "assistant" => assistant(all).content.push_str(&content),
                "developer" => all.push(Message::new("system", content)),
                role => all.push(Message::new(role, content)),
            }
        }
        "reasoning" => {
            let text = reasoning_text(item)?;
            // It belongs to the message that follows.
            let message = Message { reasoning_content: Some(text), ..Message::new("assistant", "") };
            all.push(message);
        }
        "function_call" => {
            let call = ToolCall {
                id: item.text("call_id")?.map(str::to_owned),
                name: item.required_text("name")?.to_owned(),
                arguments: messages::arguments(item, "arguments")?,
            };
            assistant(all).tool_calls.push(call);
        }
        "function_call_output" => {
            let content = messages::content(item, "output")?.ok_or_else(|| item.missing("output"))?;
            let id = item.required_text("call_id")?;
            let calls = all.iter().flat_map(|message| &message.tool_calls);
            let name =
                calls.filter(|call| call.id.as_deref() == Some(id)).map(|call| call.name.clone()).next_back();
            all.push(Message { tool_call_id: Some(id.to_owned()), name, ..Message::new("tool", content) });
        }
        "item_reference" => {
            return Err(item.error("type", "is \"item_reference\"; items are not stored, send them again"));
        }
        kind => return Err(item.error("type", format!("is {}, which is not supported", quoted(kind)))),
    }
    Ok(())
}

/// The assistant's message that is being put together of several items.
fn assistant(all: &mut Vec<Message>) -> &mut Message {
    let is_open = all.last().is_some_and(|last| last.role == "assistant");
    if !is_open {
        all.push(Message::new("assistant", ""));
    }
    let last = all.len() - 1;
    #[allow(clippy::indexing_slicing, reason = "there is a last one")]
    &mut all[last]
}

fn reasoning_text(item: &Fields<'_>) -> Result<String, ApiError> {
    let texts = |name: &str| -> Result<Vec<&str>, ApiError> {
        let parts = item.objects(name)?.unwrap_or_default();
        parts.iter().map(|part| Ok(part.text("text")?.unwrap_or_default())).collect()
    };
    let (content, summary) = (texts("content")?, texts("summary")?);
    Ok(if content.is_empty() { summary } else { content }.join("\n"))
}

/// The tools of a request in the format that templates know; those that only OpenAI can run are skipped.
pub(crate) fn tools(fields: &Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let mut all = Vec::new();
    for tool in fields.objects("tools")?.unwrap_or_default() {
        if tool.required_text("type")? != "function" {
            continue;
        }
        let name = format_fields::tool_name(&tool)?;
        let parameters = tool.map("parameters")?;
        let mut function = json!({ "name": name, "parameters": parameters });
        if let Some(object) = function.as_object_mut() {
            let description = tool.text("description")?.map(Value::from);
            let strict = tool.flag("strict")?.map(Value::from);
            let own = [("description", description), ("strict", strict)];
            object.extend(own.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))));
        }
        all.push(json!({ "type": "function", "function": function }));
    }
    Ok(all)
}

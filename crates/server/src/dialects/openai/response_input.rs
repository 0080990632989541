//! The input of `/v1/responses`: a text, or items that become the messages of a conversation.

use quadriga_llm::template::{Message, ToolCall};
use serde_json::{Value, json};

use super::messages;
use crate::dialects::format_fields;
use crate::error::{ApiError, quoted};
use crate::fields::Fields;
use crate::openapi::schema::{any_object, any_of, list, one_of, request, text};

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
                "assistant" => add_text(&mut assistant(all).content, &content),
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
        "custom_tool_call" => {
            let input = item.text("input")?.unwrap_or_default();
            let call = ToolCall {
                id: item.text("call_id")?.map(str::to_owned),
                name: item.required_text("name")?.to_owned(),
                arguments: json!({ "input": input }),
            };
            assistant(all).tool_calls.push(call);
        }
        "local_shell_call" => {
            let call = ToolCall {
                id: shell_call(item)?.map(str::to_owned),
                name: "local_shell".to_owned(),
                arguments: Value::Object(item.map("action")?.cloned().unwrap_or_default()),
            };
            assistant(all).tool_calls.push(call);
        }
        "function_call_output" | "custom_tool_call_output" => {
            add_result(item, item.required_text("call_id")?, all)?;
        }
        "local_shell_call_output" => {
            let id = shell_call(item)?.ok_or_else(|| item.missing("call_id"))?;
            add_result(item, id, all)?;
        }
        // What another agent said.
        "agent_message" => {
            let text = agent_text(item)?;
            if !text.is_empty() {
                all.push(Message::new("user", text));
            }
        }
        kind if is_of_hosted_tool(kind) => {}
        "item_reference" => {
            return Err(item.error("type", "is \"item_reference\"; items are not stored, send them again"));
        }
        kind => return Err(item.error("type", format!("is {}, which is not supported", quoted(kind)))),
    }
    Ok(())
}

/// Adds the text of a further message of the assistant, which is a paragraph of its own: an announcement, and then the answer.
fn add_text(all: &mut String, text: &str) {
    if !all.is_empty() && !text.is_empty() {
        all.push_str("\n\n");
    }
    all.push_str(text);
}

/// Items that are told by what the model said of them, or that only OpenAI's servers can read.
const SKIPPED: [&str; 16] = [
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "computer_call",
    "computer_call_output",
    "image_generation_call",
    "mcp_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "tool_search_call",
    "tool_search_output",
    "compaction",
    "compaction_summary",
    "context_compaction",
    "additional_tools",
];

/// Whether an item is of a tool that OpenAI's servers run, or of their bookkeeping.
fn is_of_hosted_tool(kind: &str) -> bool {
    kind.starts_with("mcp_") || SKIPPED.contains(&kind)
}

/// The identifier of a call of the shell, which its result may have under another name.
fn shell_call<'a>(item: &Fields<'a>) -> Result<Option<&'a str>, ApiError> {
    let (call, own) = (item.text("call_id")?, item.text("id")?);
    Ok(call.or(own))
}

/// Adds the result of the call with this identifier.
fn add_result(item: &Fields<'_>, id: &str, all: &mut Vec<Message>) -> Result<(), ApiError> {
    let content = messages::content(item, "output")?.ok_or_else(|| item.missing("output"))?;
    let calls = all.iter().flat_map(|message| &message.tool_calls);
    let name = calls.filter(|call| call.id.as_deref() == Some(id)).map(|call| call.name.clone()).next_back();
    all.push(Message { tool_call_id: Some(id.to_owned()), name, ..Message::new("tool", content) });
    Ok(())
}

/// The texts of an agent's message; other parts are for OpenAI's servers.
fn agent_text(item: &Fields<'_>) -> Result<String, ApiError> {
    if let Some(Value::String(text)) = item.value("content") {
        return Ok(text.clone());
    }
    let parts = item.objects("content")?.unwrap_or_default();
    let texts = parts.iter().filter_map(|part| part.text("text").transpose());
    Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
}

/// The schema of the items that are neither messages nor calls of functions.
pub(crate) fn other_items_schema() -> Vec<Value> {
    let content = messages::content_schema();
    let skipped = request(&["type"], json!({ "type": one_of(&SKIPPED) }), []);
    let custom =
        json!({ "type": one_of(&["custom_tool_call"]), "call_id": text(), "name": text(), "input": text() });
    let custom_output =
        json!({ "type": one_of(&["custom_tool_call_output"]), "call_id": text(), "output": content.clone() });
    let shell = json!({ "type": one_of(&["local_shell_call"]), "call_id": text(), "id": text(), "action": any_object() });
    let shell_output = |name: &str| {
        let fields =
            json!({ "type": one_of(&["local_shell_call_output"]), name: text(), "output": content.clone() });
        request(&["type", name, "output"], fields, [])
    };
    let part = request(&[], json!({ "text": text() }), []);
    let agent = json!({ "type": one_of(&["agent_message"]), "content": any_of([text(), list(part)]) });
    vec![
        skipped,
        request(&["type", "name"], custom, []),
        request(&["type", "call_id", "output"], custom_output, []),
        request(&["type"], shell, []),
        shell_output("call_id"),
        shell_output("id"),
        request(&["type"], agent, []),
    ]
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

/// Tools that only OpenAI can run, or that have no schema.
const LEFT_OUT: [&str; 14] = [
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "custom",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "namespace",
    "shell",
    "tool_search",
    "web_search",
    "web_search_preview",
];

/// The tools of a request in the format that templates know. Those that only OpenAI can run, and those without a schema, are
/// skipped: clients offer them to every model.
pub(crate) fn tools(fields: &Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let mut all = Vec::new();
    for tool in fields.objects("tools")?.unwrap_or_default() {
        let kind = tool.required_text("type")?;
        if kind != "function" {
            // What a client writes is not for the log, unless it is a known name.
            let kind = LEFT_OUT.iter().find(|known| **known == kind).copied().unwrap_or("unknown");
            tracing::info!(kind, "a tool that is no function is left out");
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

//! Tools, and which of them may or must be called.

use serde_json::{Value, json};

use crate::constraint::ToolChoice;
use crate::dialects::format_fields;
use crate::error::{ApiError, quoted};
use crate::fields::Fields;

/// The tools in the format that templates know. Those that Anthropic's own servers run are skipped.
pub(super) fn tools(fields: &Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let mut all = Vec::new();
    for tool in fields.objects("tools")?.unwrap_or_default() {
        if tool.text("type")?.is_some_and(|kind| kind != "custom") {
            continue;
        }
        let name = format_fields::tool_name(&tool)?;
        let schema = tool.map("input_schema")?.ok_or_else(|| tool.missing("input_schema"))?;
        let mut function = json!({ "name": name, "parameters": schema });
        let description = tool.text("description")?.map(Value::from);
        let strict = tool.flag("strict")?.map(Value::from);
        if let Some(object) = function.as_object_mut() {
            let own = [("description", description), ("strict", strict)];
            object.extend(own.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))));
        }
        all.push(json!({ "type": "function", "function": function }));
    }
    Ok(all)
}

/// Which tools may or must be called, and whether several may be.
pub(super) fn choice(fields: &Fields<'_>, tools: &[Value]) -> Result<(ToolChoice, bool), ApiError> {
    let Some(choice) = fields.object("tool_choice")? else { return Ok((ToolChoice::Auto, true)) };
    let known = ["auto", "any", "tool", "none"];
    let kind = choice.one_of("type", &known)?.ok_or_else(|| choice.missing("type"))?;
    let disabled = choice.flag("disable_parallel_tool_use")?;
    let wanted = match kind {
        "any" if tools.is_empty() => {
            return Err(choice.error("type", "is \"any\", but there are no tools"));
        }
        "any" => ToolChoice::Required,
        "none" => ToolChoice::None,
        "tool" => {
            let name = choice.required_text("name")?;
            if !tools.iter().any(|tool| tool.pointer("/function/name") == Some(&json!(name))) {
                return Err(choice.error("name", format!("is {}, which is none of the tools", quoted(name))));
            }
            ToolChoice::Named(name.to_owned())
        }
        _ => ToolChoice::Auto,
    };
    let parallel = disabled.map_or_else(|| wanted.calls_several(), |disabled| !disabled);
    Ok((wanted, parallel))
}

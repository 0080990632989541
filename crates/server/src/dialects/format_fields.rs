//! The form of an answer and the tools that it may call, by the names that OpenAI and llama-server share.

use serde_json::{Value, json};

use crate::constraint::{Constraint, ToolChoice};
use crate::error::ApiError;
use crate::fields::Fields;

/// The form that `response_format`, `json_schema` or `grammar` ask for.
pub fn constraint(fields: &Fields<'_>) -> Result<Constraint, ApiError> {
    if let Some(format) = fields.object("response_format")? {
        let known = ["text", "json_object", "json_schema"];
        match format.one_of("type", &known)?.ok_or_else(|| format.missing("type"))? {
            "json_object" => {
                return Ok(match format.value("schema") {
                    Some(schema) => Constraint::JsonSchema(schema.clone()),
                    None => Constraint::JsonObject,
                });
            }
            "json_schema" => {
                let named = format.object("json_schema")?.ok_or_else(|| format.missing("json_schema"))?;
                let schema = named.value("schema").ok_or_else(|| named.missing("schema"))?;
                return Ok(Constraint::JsonSchema(schema.clone()));
            }
            _ => {}
        }
    }
    if let Some(schema) = fields.value("json_schema") {
        return Ok(Constraint::JsonSchema(schema.clone()));
    }
    Ok(match fields.text("grammar")?.filter(|grammar| !grammar.is_empty()) {
        Some(grammar) => Constraint::Gbnf(grammar.to_owned()),
        None => Constraint::None,
    })
}

/// The definitions of tools, in the format that templates know.
pub fn tools(fields: &Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let Some(tools) = fields.objects("tools")? else { return Ok(Vec::new()) };
    let tool = |tool: &Fields<'_>| {
        let kind = tool.text("type")?.unwrap_or("function");
        if kind != "function" {
            return Err(tool.error("type", format!("is {kind:?}; only functions are supported")));
        }
        let function = tool.object("function")?.ok_or_else(|| tool.missing("function"))?;
        let name = function.required_text("name")?;
        function.map("parameters")?;
        let mut definition = json!({ "name": name });
        if let Some(object) = definition.as_object_mut() {
            let fields = ["description", "parameters", "strict"];
            let own = fields.iter().filter_map(|name| Some((*name, function.value(name)?)));
            object.extend(own.map(|(name, value)| (name.to_owned(), value.clone())));
        }
        Ok(json!({ "type": "function", "function": definition }))
    };
    tools.iter().map(tool).collect()
}

/// Which of the tools may or must be called.
pub fn tool_choice(fields: &Fields<'_>, tools: &[Value]) -> Result<ToolChoice, ApiError> {
    const NAME: &str = "tool_choice";
    let has = |name: &str| tools.iter().any(|tool| tool.pointer("/function/name") == Some(&json!(name)));
    let choice = match fields.value(NAME) {
        None => ToolChoice::Auto,
        Some(Value::String(_)) => {
            match fields.one_of(NAME, &["none", "auto", "required"])?.unwrap_or_default() {
                "none" => ToolChoice::None,
                "required" => ToolChoice::Required,
                _ => ToolChoice::Auto,
            }
        }
        Some(value) => {
            let choice = Fields::of(value, &fields.place(NAME))?;
            match choice.text("type")? {
                Some("function") | None => {
                    // The Responses interface has the name in the object itself.
                    let function = choice.object("function")?.unwrap_or_else(|| choice.clone());
                    let name = function.required_text("name")?;
                    if !has(name) {
                        return Err(
                            function.error("name", format!("is {name:?}, which is none of the tools"))
                        );
                    }
                    ToolChoice::Named(name.to_owned())
                }
                Some("allowed_tools") => {
                    let allowed = choice.object("allowed_tools")?.unwrap_or_else(|| choice.clone());
                    match allowed.one_of("mode", &["auto", "required"])? {
                        Some("required") => ToolChoice::Required,
                        _ => ToolChoice::Auto,
                    }
                }
                Some(kind) => return Err(choice.error("type", format!("is {kind:?}; it must be function"))),
            }
        }
    };
    if choice == ToolChoice::Required && tools.is_empty() {
        return Err(fields.error(NAME, "is \"required\", but there are no tools"));
    }
    Ok(choice)
}

//! Keeps answers in the form that a request asks for: schemas and grammars, calls of tools, budgets of reasoning.

use quadriga_llm::constraint::{Grammar, unknown_format};
use quadriga_llm::serving::Request;
use quadriga_llm::tools::{self, Tool, ToolRules};
use quadriga_llm::{Error, Model};
use serde_json::{Value, json};

use crate::constraint::{Constraint, ToolChoice};
use crate::error::{ApiError, quoted};
use crate::generation::{Generation, Prompt};

/// Adds to a request what keeps its answer in form. False if that was cancelled.
pub(crate) fn constrain(
    model: &Model,
    generation: &Generation,
    request: &mut Request,
) -> Result<bool, ApiError> {
    let tools = callable_tools(generation);
    let constrained = match tools.is_empty() {
        true => match grammar(&generation.constraint) {
            Some(grammar) => request.constrain(model, &grammar),
            None => Ok(()),
        },
        false => constrain_tools(model, generation, &tools, request)?,
    };
    match constrained {
        Ok(()) => {}
        Err(Error::Cancelled) => return Ok(false),
        Err(error) => return Err(error_of(error, generation)),
    }
    if let Some(budget) = generation.reasoning_budget {
        request.limit_reasoning(model, budget)?;
    }
    Ok(true)
}

/// A schema or grammar that cannot be compiled is the caller's error.
fn error_of(error: Error, generation: &Generation) -> ApiError {
    // Without a form of the answer, it is the schema of a tool.
    let field = match generation.constraint {
        Constraint::None => Some("tools"),
        _ => generation.constraint_field,
    };
    match field.filter(|_| matches!(error, Error::Grammar { .. })) {
        Some(field) => ApiError::field(field, format!("is refused: {error}")),
        None => error.into(),
    }
}

/// The arguments of a tool are an object: a schema of anything else is an error.
pub(crate) fn check_tools(generation: &Generation) -> Result<(), ApiError> {
    const OTHERS: [&str; 6] = ["array", "string", "number", "integer", "boolean", "null"];
    let Prompt::Chat(chat) = &generation.prompt else { return Ok(()) };
    for (number, tool) in chat.tools.iter().enumerate() {
        let kind = tool.pointer("/function/parameters/type").and_then(Value::as_str);
        if let Some(kind) = kind.filter(|kind| OTHERS.contains(kind)) {
            let problem = format!("has parameters of type {kind:?}; they must be an object");
            return Err(ApiError::field(format!("tools[{number}]"), problem));
        }
        let function = tool.get("function");
        if function.and_then(|function| function.get("strict")) == Some(&Value::Bool(true))
            && let Some(parameters) = function.and_then(|function| function.get("parameters"))
        {
            check_formats(&format!("tools[{number}]"), parameters)?;
        }
    }
    Ok(())
}

/// Refuses formats in a strict schema that are not known: they would not be enforced.
pub(crate) fn check_formats(field: &str, schema: &Value) -> Result<(), ApiError> {
    match unknown_format(schema) {
        Some(format) => {
            let problem = format!("is strict, and its format {} is not known", quoted(format));
            Err(ApiError::field(field, problem))
        }
        None => Ok(()),
    }
}

/// Whether the template is shown the tools of a request, and its answer may call them.
pub(crate) fn uses_tools(generation: &Generation) -> bool {
    match &generation.prompt {
        Prompt::Chat(chat) => !chat.tools.is_empty() && generation.tool_choice != ToolChoice::None,
        Prompt::Text(_) | Prompt::Tokens(_) | Prompt::Mixed(_) => false,
    }
}

/// The tools that may be called.
fn callable_tools(generation: &Generation) -> Vec<Tool> {
    let Prompt::Chat(chat) = &generation.prompt else { return Vec::new() };
    let is_callable = |tool: &Tool| match &generation.tool_choice {
        ToolChoice::None => false,
        ToolChoice::Named(name) => tool.name == *name,
        ToolChoice::Allowed { names, .. } => names.contains(&tool.name),
        ToolChoice::Auto | ToolChoice::Required => true,
    };
    chat.tools.iter().filter_map(Tool::from_json).filter(is_callable).collect()
}

fn constrain_tools(
    model: &Model,
    generation: &Generation,
    callable: &[Tool],
    request: &mut Request,
) -> Result<Result<(), Error>, ApiError> {
    let choice = match &generation.tool_choice {
        ToolChoice::Required | ToolChoice::Allowed { required: true, .. } => tools::ToolChoice::Required,
        ToolChoice::Named(name) => tools::ToolChoice::Named(name.clone()),
        _ => tools::ToolChoice::Auto,
    };
    let schema: Option<Value> = match &generation.constraint {
        Constraint::None => None,
        Constraint::JsonObject => Some(json!({ "type": "object" })),
        Constraint::JsonSchema(schema) => Some(schema.clone()),
        Constraint::Choices(choices) => Some(json!({ "enum": choices })),
        Constraint::Regex(_) | Constraint::Lark(_) | Constraint::Gbnf(_) => {
            let Some(field) = generation.constraint_field else {
                let problem = "cannot be combined with the grammar that the server was started with";
                return Err(ApiError::field("tools", problem));
            };
            return Err(ApiError::field(
                field,
                "cannot be combined with tools; use a JSON schema, or no tools",
            ));
        }
    };
    let rules = ToolRules {
        tools: callable,
        choice,
        parallel: generation.parallel_tool_calls,
        answer: schema.as_ref(),
    };
    Ok(request.constrain_tools(model, &rules))
}

fn grammar(constraint: &Constraint) -> Option<Grammar> {
    Some(match constraint {
        Constraint::None => return None,
        Constraint::JsonObject => Grammar::JsonObject,
        Constraint::JsonSchema(schema) => Grammar::JsonSchema(schema.clone()),
        Constraint::Regex(pattern) => Grammar::Regex(pattern.clone()),
        Constraint::Lark(source) => Grammar::Lark(source.clone()),
        Constraint::Gbnf(source) => Grammar::Gbnf(source.clone()),
        Constraint::Choices(choices) => Grammar::Choices(choices.clone()),
    })
}

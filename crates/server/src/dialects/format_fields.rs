//! The form of an answer and the tools that it may call, by the names that OpenAI and llama-server share.

use serde_json::{Value, json};

use super::vllm_fields;
use crate::constraint::{Constraint, ToolChoice};
use crate::error::{ApiError, quoted};
use crate::fields::Fields;
use crate::hooks::check_formats;
use crate::openapi::schema::{
    self, any_object, any_of, filled_list, flag, list, one_of, request, text, with, with_field,
};

/// The form that `response_format`, `json_schema` or `grammar` ask for, or the fields that vLLM has for the same.
pub fn constraint(fields: &Fields<'_>) -> Result<Constraint, ApiError> {
    check_alone(fields, FIELDS)?;
    // Wrong values are found whichever field counts.
    let syntax = fields.one_of(SYNTAX, SYNTAXES)?;
    white_space(fields, "guided_")?;
    if let Some(format) = fields.object("response_format")? {
        let known = ["text", "json_object", "json_schema", "regex", "grammar"];
        match format.one_of("type", &known)?.ok_or_else(|| format.missing("type"))? {
            "json_object" => {
                return Ok(match format.schema("schema")? {
                    Some(schema) => Constraint::JsonSchema(schema),
                    None => Constraint::JsonObject,
                });
            }
            "json_schema" => {
                // llama-server's own form has the schema beside the type.
                if let (None, Some(schema)) = (format.object("json_schema")?, format.schema("schema")?) {
                    return Ok(Constraint::JsonSchema(schema));
                }
                let named = format.object("json_schema")?.ok_or_else(|| format.missing("json_schema"))?;
                let schema = named.schema("schema")?.ok_or_else(|| named.missing("schema"))?;
                named.text("name")?;
                if named.flag("strict")? == Some(true) {
                    check_formats(&named.place("schema"), &schema)?;
                }
                return Ok(Constraint::JsonSchema(schema));
            }
            "regex" => {
                let pattern = format.text("pattern")?.or(format.text("regex")?);
                return Ok(Constraint::Regex(pattern.ok_or_else(|| format.missing("pattern"))?.to_owned()));
            }
            "grammar" => {
                let source = format.required_text("grammar")?;
                return Ok(grammar(source, format.one_of("syntax", SYNTAXES)?));
            }
            _ => {}
        }
    }
    if let Some(outputs) = fields.object("structured_outputs")? {
        check_alone(&outputs, &["json", "json_object", "regex", "choice", "grammar"])?;
        vllm_fields::refuse(&outputs, REFUSED_OUTPUTS)?;
        if let Some(constraint) = guided(&outputs, "")? {
            return Ok(constraint);
        }
    }
    if let Some(constraint) = guided(fields, "guided_")? {
        return Ok(constraint);
    }
    let grammar_text = fields.text("grammar")?.filter(|grammar| !grammar.is_empty());
    if let Some(schema) = fields.schema("json_schema")? {
        return Ok(Constraint::JsonSchema(schema));
    }
    Ok(match grammar_text {
        Some(source) => grammar(source, syntax),
        None => Constraint::None,
    })
}

/// Fields of `structured_outputs` that are refused, unless their value turns them off.
const REFUSED_OUTPUTS: &[&str] = &["structural_tag", "disable_additional_properties"];

/// Fields that ask for a form, in the order in which they count.
const FIELDS: &[&str] = &[
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_json_object",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "grammar",
];

/// Refuses two forms of one answer, only one of which could be kept.
fn check_alone(fields: &Fields<'_>, names: &[&str]) -> Result<(), ApiError> {
    let asks = |name: &&&str| match fields.value(name) {
        None | Some(Value::Bool(false)) => false,
        // Forms that are none.
        Some(Value::String(text)) => !text.is_empty(),
        Some(Value::Object(object)) if **name == "response_format" => {
            object.get("type").and_then(Value::as_str) != Some("text")
        }
        Some(Value::Object(object)) if **name == "structured_outputs" => !object.is_empty(),
        Some(_) => true,
    };
    let mut asking = names.iter().filter(asks);
    match (asking.next(), asking.next()) {
        (Some(first), Some(second)) => {
            Err(fields.error(second, format!("cannot be used together with {}", fields.place(first))))
        }
        _ => Ok(()),
    }
}

/// The field that [`constraint`] reads, for errors.
pub fn constraint_field(fields: &Fields<'_>) -> Option<&'static str> {
    FIELDS.iter().find(|name| fields.has(name)).copied()
}

/// The notations of grammars, and the field that names the one of `grammar` and `guided_grammar`.
const SYNTAXES: &[&str] = &["gbnf", "lark"];
const SYNTAX: &str = "grammar_syntax";

/// A grammar in the notation that is named. Without a name it is in Lark, if it says so as llama-server's users write it, or if
/// it has Lark's first rule; otherwise in GBNF.
fn grammar(source: &str, syntax: Option<&str>) -> Constraint {
    let is_first_rule = |line: &str| {
        // A mark says how Lark's tree has the rule, which makes no difference here.
        let line = line.trim_start().trim_start_matches(['?', '!']);
        let Some(rest) = line.strip_prefix("start") else { return false };
        // Lark has attributes in brackets there, GBNF `::=`.
        let rest = match rest.strip_prefix('[').and_then(|attributes| attributes.split_once(']')) {
            Some((_, rest)) => rest,
            None => rest,
        };
        rest.trim_start().strip_prefix(':').is_some_and(|rule| !rule.starts_with(":="))
    };
    let is_lark = match syntax {
        Some(syntax) => syntax == "lark",
        None => source.trim_start().starts_with("%llguidance") || source.lines().any(is_first_rule),
    };
    match is_lark {
        true => Constraint::Lark(source.to_owned()),
        false => Constraint::Gbnf(source.to_owned()),
    }
}

/// The fields of vLLM, with a prefix.
fn guided(fields: &Fields<'_>, prefix: &str) -> Result<Option<Constraint>, ApiError> {
    let name = |field: &str| format!("{prefix}{field}");
    let white_space = white_space(fields, prefix)?;
    let syntax = fields.one_of(if prefix.is_empty() { "syntax" } else { SYNTAX }, SYNTAXES)?;
    if let Some(schema) = fields.value(&name("json")) {
        // A schema may be JSON text, too.
        let schema = match schema {
            Value::String(text) => serde_json::from_str::<Value>(text)
                .map_err(|error| fields.error(&name("json"), format!("is no JSON: {error}")))?,
            Value::Object(_) => schema.clone(),
            _ => return Err(fields.error(&name("json"), "must be an object, or the text of one")),
        };
        return Ok(Some(Constraint::JsonSchema(with_white_space(schema, white_space))));
    }
    if fields.flag(&name("json_object"))? == Some(true) {
        return Ok(Some(match white_space {
            Some(_) => Constraint::JsonSchema(with_white_space(json!({ "type": "object" }), white_space)),
            None => Constraint::JsonObject,
        }));
    }
    if let Some(pattern) = fields.text(&name("regex"))? {
        return Ok(Some(Constraint::Regex(pattern.to_owned())));
    }
    if let Some(choices) = fields.texts(&name("choice"))? {
        return Ok(Some(Constraint::Choices(choices)));
    }
    Ok(fields.text(&name("grammar"))?.map(|source| grammar(source, syntax)))
}

/// How JSON is spaced, if vLLM's fields say so: settings of the schema's compiler.
fn white_space(fields: &Fields<'_>, prefix: &str) -> Result<Option<Value>, ApiError> {
    let pattern = fields.text(&format!("{prefix}whitespace_pattern"))?;
    Ok(match fields.flag(&format!("{prefix}disable_any_whitespace"))? {
        Some(true) => Some(json!({ "whitespace_flexible": false, "coerce_one_of": true })),
        _ => pattern.map(|pattern| json!({ "whitespace_pattern": pattern, "coerce_one_of": true })),
    })
}

/// A schema with settings of its compiler, unless it has some of its own.
fn with_white_space(mut schema: Value, settings: Option<Value>) -> Value {
    if let (Some(fields), Some(settings)) = (schema.as_object_mut(), settings) {
        fields.entry("x-guidance").or_insert(settings);
    }
    schema
}

/// The name of a tool: one that models write as a whole, and that all templates keep.
pub(crate) fn tool_name<'f>(tool: &Fields<'f>) -> Result<&'f str, ApiError> {
    let name = tool.required_text("name")?;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_.:/-".contains(&byte);
    match (1..=128).contains(&name.len()) && name.bytes().all(is_plain) {
        true => Ok(name),
        false => {
            let shown: String = name.chars().take(64).collect();
            let problem =
                format!("is {shown:?}; it must have 1 to 128 letters, digits and characters of \"_-.:/\"");
            Err(tool.error("name", problem))
        }
    }
}

/// Names that `tools` and `tool_choice` had once.
const OLD_NAMES: [(&str, &str); 2] = [("functions", "tools"), ("function_call", "tool_choice")];

/// Refuses tools by the names that OpenAI's interface had for them once.
pub(crate) fn refuse_old_names(fields: &Fields<'_>) -> Result<(), ApiError> {
    match OLD_NAMES.iter().find(|(name, _)| fields.has(name)) {
        Some((name, instead)) => Err(fields.error(name, format!("is not supported any more; use {instead}"))),
        None => Ok(()),
    }
}

/// The definitions of tools, in the format that templates know.
pub fn tools(fields: &Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let Some(tools) = fields.objects("tools")? else { return Ok(Vec::new()) };
    let tool = |tool: &Fields<'_>| {
        let kind = tool.text("type")?.unwrap_or("function");
        if kind != "function" {
            return Err(tool.error("type", format!("is {}; only functions are supported", quoted(kind))));
        }
        let function = tool.object("function")?.ok_or_else(|| tool.missing("function"))?;
        let name = tool_name(&function)?;
        function.text("description")?;
        function.map("parameters")?;
        function.flag("strict")?;
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
        Some(_) => {
            let choice = fields.object(NAME)?.ok_or_else(|| fields.missing(NAME))?;
            match choice.text("type")? {
                Some("function") | None => {
                    // The Responses interface has the name in the object itself.
                    let function = choice.object("function")?.unwrap_or_else(|| choice.clone());
                    let name = function.required_text("name")?;
                    if !has(name) {
                        return Err(function
                            .error("name", format!("is {}, which is none of the tools", quoted(name))));
                    }
                    ToolChoice::Named(name.to_owned())
                }
                Some("allowed_tools") => {
                    let allowed = choice.object("allowed_tools")?.unwrap_or_else(|| choice.clone());
                    let required = allowed.one_of("mode", &["auto", "required"])? == Some("required");
                    let tools = allowed.objects("tools")?.ok_or_else(|| allowed.missing("tools"))?;
                    let mut names = Vec::new();
                    for tool in tools {
                        let function = tool.object("function")?.unwrap_or_else(|| tool.clone());
                        let name = function.required_text("name")?;
                        if !has(name) {
                            return Err(function
                                .error("name", format!("is {}, which is none of the tools", quoted(name))));
                        }
                        names.push(name.to_owned());
                    }
                    if names.is_empty() {
                        return Err(allowed.error("tools", "is empty; \"none\" in place of it forbids calls"));
                    }
                    ToolChoice::Allowed { names, required }
                }
                Some(kind) => {
                    return Err(choice.error("type", format!("is {}; it must be function", quoted(kind))));
                }
            }
        }
    };
    if choice == ToolChoice::Required && tools.is_empty() {
        return Err(fields.error(NAME, "is \"required\", but there are no tools"));
    }
    Ok(choice)
}

/// The schema of the fields that ask for a form of the answer, by llama-server's and vLLM's names.
pub(crate) fn grammar_schema() -> Value {
    let schema = || any_of([any_object(), text()]);
    let choices = || any_of([text(), filled_list(text())]);
    let outputs = json!({
        "json": schema(),
        "json_object": flag(),
        "regex": text(),
        "choice": choices(),
        "grammar": text(),
        "syntax": one_of(SYNTAXES),
        "whitespace_pattern": text(),
        "disable_any_whitespace": flag(),
    });
    json!({
        "grammar": text(),
        "grammar_syntax": one_of(SYNTAXES),
        "json_schema": any_object(),
        "guided_json": schema(),
        "guided_json_object": flag(),
        "guided_regex": text(),
        "guided_choice": choices(),
        "guided_grammar": text(),
        "guided_whitespace_pattern": text(),
        "guided_disable_any_whitespace": flag(),
        "structured_outputs": request(&[], outputs, [vllm_fields::refused_schema(REFUSED_OUTPUTS)]),
    })
}

/// The schema of `tool_choice`: the name of a function is in an object of its own or not, and so are those that are allowed.
pub(crate) fn tool_choice_schema() -> Value {
    let kind = || one_of(&["function"]);
    let flat =
        request(&["name"], json!({ "type": kind(), "function": { "type": "null" }, "name": text() }), []);
    let named = request(&["name"], json!({ "name": text() }), []);
    let nested = request(&["function"], json!({ "type": kind(), "function": named }), []);
    let tool = any_of([
        request(&["name"], json!({ "function": { "type": "null" }, "name": text() }), []),
        request(&["function"], json!({ "function": request(&["name"], json!({ "name": text() }), []) }), []),
    ]);
    let of_tools = json!({ "mode": one_of(&["auto", "required"]), "tools": filled_list(tool) });
    let allowed = request(&["tools"], of_tools.clone(), []);
    let of_type = |fields: Value, required: &[&str]| {
        with_field(request(required, fields, []), "type", one_of(&["allowed_tools"]))
    };
    let outside =
        with_field(of_type(of_tools, &["type", "tools"]), "allowed_tools", json!({ "type": "null" }));
    let inside = of_type(json!({ "allowed_tools": allowed }), &["type", "allowed_tools"]);
    any_of([one_of(&["none", "auto", "required"]), nested, flat, outside, inside])
}

/// The schema of a list of tools.
pub(crate) fn tools_schema() -> Value {
    let function = request(
        &["name"],
        json!({ "name": schema::tool_name(), "description": text(), "parameters": any_object(), "strict": flag() }),
        [],
    );
    list(request(&["function"], json!({ "type": one_of(&["function"]), "function": function }), []))
}

/// The schema of the fields about tools and the form of the answer.
pub(crate) fn schema() -> Value {
    let fields = json!({
        "tools": tools_schema(),
        "tool_choice": tool_choice_schema(),
        "parallel_tool_calls": flag(),
    });
    let old: Value = OLD_NAMES.iter().map(|(name, _)| ((*name).to_owned(), schema::null())).collect();
    with(with(fields, old), response_format_schema())
}

/// The schema of `response_format`.
pub(crate) fn response_format_schema() -> Value {
    let schema =
        request(&["schema"], json!({ "name": text(), "schema": any_object(), "strict": flag() }), []);
    let format = any_of([
        request(&["type"], json!({ "type": one_of(&["text"]) }), []),
        request(&["type"], json!({ "type": one_of(&["json_object"]), "schema": any_object() }), []),
        request(
            &["type", "json_schema"],
            json!({ "type": one_of(&["json_schema"]), "json_schema": schema }),
            [],
        ),
        request(
            &["type", "schema"],
            json!({ "type": one_of(&["json_schema"]), "json_schema": { "type": "null" }, "schema": any_object() }),
            [],
        ),
        request(&["type", "pattern"], json!({ "type": one_of(&["regex"]), "pattern": text() }), []),
        request(&["type", "regex"], json!({ "type": one_of(&["regex"]), "regex": text() }), []),
        request(
            &["type", "grammar"],
            json!({ "type": one_of(&["grammar"]), "grammar": text(), "syntax": one_of(SYNTAXES) }),
            [],
        ),
    ]);
    json!({ "response_format": format })
}

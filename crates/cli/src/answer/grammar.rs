//! Options that constrain answers.

use std::path::PathBuf;

use quadriga_llm::constraint::Grammar;
use serde_json::Value;

use super::{CONSTRAINTS, read_text};
use crate::failure::{Failure, Outcome};

/// What answers must be; at most one of them.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(multiple = false)]
pub(crate) struct GrammarOptions {
    /// Answer with JSON of this schema: the schema itself or the file that it is in; {} for any JSON
    #[arg(short = 'j', long, value_name = "JSON|FILE", allow_hyphen_values = true, help_heading = CONSTRAINTS)]
    json_schema: Option<String>,
    /// Answer with JSON of the schema in this file, also -jf
    #[arg(long, value_name = "FILE", help_heading = CONSTRAINTS)]
    json_schema_file: Option<PathBuf>,
    /// Answer with a text of this grammar, in llama.cpp's GBNF
    #[arg(long, value_name = "GBNF", allow_hyphen_values = true, help_heading = CONSTRAINTS)]
    grammar: Option<String>,
    /// Answer with a text of the grammar in this file
    #[arg(long, value_name = "FILE", help_heading = CONSTRAINTS)]
    grammar_file: Option<PathBuf>,
}

impl GrammarOptions {
    /// Whether there is one.
    pub(super) fn is_given(&self) -> bool {
        self.grammar.is_some()
            || self.grammar_file.is_some()
            || self.json_schema.is_some()
            || self.json_schema_file.is_some()
    }

    /// The grammar, if there is one.
    pub(super) fn grammar(&self) -> Outcome<Option<Grammar>> {
        if let Some(text) = &self.json_schema {
            return schema_or_file(text).map(Some);
        }
        if let Some(path) = &self.json_schema_file {
            let name = path.display().to_string();
            return schema(&read_text(path)?, &name).map(Some);
        }
        if let Some(text) = &self.grammar {
            return Ok(Some(Grammar::Gbnf(text.clone())));
        }
        let Some(path) = &self.grammar_file else { return Ok(None) };
        read_text(path).map(|text| Some(Grammar::Gbnf(text)))
    }
}

/// A schema is an object or a boolean; anything else is the name of a file.
fn schema_or_file(text: &str) -> Outcome<Grammar> {
    let trimmed = text.trim();
    match trimmed.starts_with('{') || ["true", "false"].contains(&trimmed) {
        true => schema(text, "--json-schema"),
        false => schema(&read_text(text.as_ref())?, text),
    }
}

fn schema(text: &str, name: &str) -> Outcome<Grammar> {
    let schema: Result<Value, _> = serde_json::from_str(text);
    schema
        .map(Grammar::JsonSchema)
        .map_err(|error| Failure::Usage(format!("{name}: no JSON schema: {error}")))
}

/// The grammar that fields of a request ask for: OpenAI's `response_format`, and llama-server's `json_schema` and `grammar`.
/// The reason if they are wrong.
pub(crate) fn of_fields<'v>(field: impl Fn(&str) -> Option<&'v Value>) -> Result<Option<Grammar>, String> {
    let found: Vec<Grammar> = [
        field("response_format").map(response_format).transpose()?.flatten(),
        field("json_schema").map(|schema| Grammar::JsonSchema(schema.clone())),
        match field("grammar") {
            None => None,
            Some(Value::String(text)) if text.is_empty() => None,
            Some(Value::String(text)) => Some(Grammar::Gbnf(text.clone())),
            Some(_) => return Err("\"grammar\" must be a string".to_owned()),
        },
    ]
    .into_iter()
    .flatten()
    .collect();
    match found.as_slice() {
        [] => Ok(None),
        [only] => Ok(Some(only.clone())),
        _ => Err("it has several of \"response_format\", \"json_schema\" and \"grammar\"".to_owned()),
    }
}

fn response_format(format: &Value) -> Result<Option<Grammar>, String> {
    let wrong = |reason: &str| Err(format!("\"response_format\": {reason}"));
    let field = |name: &str| format.get(name).filter(|value| !value.is_null());
    match field("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(match field("schema") {
            Some(schema) => Grammar::JsonSchema(schema.clone()),
            None => Grammar::JsonObject,
        })),
        Some("json_schema") => {
            match field("json_schema").and_then(|named| named.get("schema")).or(field("schema")) {
                Some(schema) => Ok(Some(Grammar::JsonSchema(schema.clone()))),
                None => wrong("\"json_schema.schema\" is missing"),
            }
        }
        Some(other) => wrong(&format!("the type {other:?} is not text, json_object or json_schema")),
        None => wrong("\"type\" is missing"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_of_requests_ask_for_grammars() {
        let of =
            |body: Value| of_fields(|name| body.get(name)).map_err(|reason| json!({ name(&body): reason }));
        fn name(body: &Value) -> String {
            body.to_string()
        }
        let schema = json!({ "type": "integer" });
        let wanted = Ok(Some(Grammar::JsonSchema(schema.clone())));
        for body in [
            json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "n", "schema": schema } } }),
            json!({ "response_format": { "type": "json_object", "schema": schema } }),
            json!({ "json_schema": schema }),
        ] {
            assert_eq!(of(body), wanted);
        }
        assert_eq!(
            of(json!({ "response_format": { "type": "json_object" } })),
            Ok(Some(Grammar::JsonObject))
        );
        assert_eq!(
            of(json!({ "grammar": "root ::= \"a\"" })),
            Ok(Some(Grammar::Gbnf("root ::= \"a\"".into())))
        );
        for body in [json!({}), json!({ "response_format": { "type": "text" } }), json!({ "grammar": "" })] {
            assert_eq!(of(body), Ok(None));
        }
        for body in [
            json!({ "response_format": {} }),
            json!({ "response_format": { "type": "yaml" } }),
            json!({ "response_format": { "type": "json_schema" } }),
            json!({ "grammar": 3 }),
            json!({ "grammar": "root ::= \"a\"", "json_schema": {} }),
        ] {
            assert!(of(body.clone()).is_err(), "{body}");
        }
    }
}

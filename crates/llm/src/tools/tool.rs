//! Functions that a model may call.

use serde_json::{Value, json};

/// A function that a model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments, an object.
    pub parameters: Value,
    /// Whether a schema that cannot be enforced is an error. Otherwise the parts of it that cannot be are left out.
    pub strict: bool,
}

impl Tool {
    /// A tool in OpenAI's format: `{"type": "function", "function": {"name": …, "parameters": …}}`, or the inner object alone.
    ///
    /// ```
    /// use quadriga_llm::tools::Tool;
    /// use serde_json::json;
    ///
    /// let tool = Tool::from_json(&json!({ "type": "function", "function": { "name": "now" } })).unwrap();
    /// assert_eq!((tool.name.as_str(), &tool.parameters), ("now", &json!({ "type": "object" })));
    /// ```
    pub fn from_json(definition: &Value) -> Option<Tool> {
        let function = definition.get("function").unwrap_or(definition);
        let mut parameters = function.get("parameters").filter(|value| value.is_object()).cloned();
        if let Some(object) = parameters.as_mut().and_then(Value::as_object_mut) {
            let says = ["type", "$ref", "anyOf", "oneOf", "allOf"];
            if !says.iter().any(|keyword| object.contains_key(*keyword)) {
                object.insert("type".to_owned(), "object".into());
            }
        }
        Some(Tool {
            name: function.get("name")?.as_str()?.to_owned(),
            parameters: parameters.unwrap_or_else(|| json!({ "type": "object" })),
            strict: function.get("strict").and_then(Value::as_bool).unwrap_or(false),
        })
    }

    /// The names of its parameters.
    pub(super) fn parameter_names(&self) -> impl Iterator<Item = &str> {
        let properties = self.parameters.get("properties").and_then(Value::as_object);
        properties.into_iter().flat_map(|properties| properties.keys().map(String::as_str))
    }

    /// The schema of a parameter.
    pub(super) fn parameter(&self, name: &str) -> Option<&Value> {
        self.parameters.get("properties")?.get(name)
    }

    /// The schema of a parameter, with the definitions of the whole schema, to which its references are.
    pub(super) fn with_definitions(&self, schema: &Value) -> Value {
        let mut schema = schema.clone();
        if !refers(&schema) {
            return schema;
        }
        for definitions in ["$defs", "definitions"] {
            let own = self.parameters.get(definitions);
            if let (Some(own), Some(schema)) = (own, schema.as_object_mut()) {
                schema.insert(definitions.to_owned(), own.clone());
            }
        }
        schema
    }
}

/// Whether a schema may refer to definitions: copies of them cost much where there are many.
fn refers(schema: &Value) -> bool {
    let mut left = vec![schema];
    while let Some(part) = left.pop() {
        match part {
            Value::Object(fields) if fields.contains_key("$ref") => return true,
            Value::Object(fields) => left.extend(fields.values()),
            Value::Array(items) => left.extend(items),
            _ => {}
        }
    }
    false
}

/// Which of the tools may or must be called.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// None of them.
    None,
    /// At least one.
    Required,
    /// The one of this name.
    Named(String),
}

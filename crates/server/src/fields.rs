//! Reads the fields of a JSON object: a wrong one is an error that names it, `null` is absent, unknown ones are ignored.

use serde_json::{Map, Value};

use crate::error::{ApiError, quoted};
use crate::field_log::RouteFieldLog;

/// The fields of a JSON object at a place in the request.
#[derive(Clone, Debug)]
pub struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// The place with a dot behind it, or nothing.
    prefix: String,
    /// Notes the names of fields that are asked for.
    log: Option<&'a RouteFieldLog>,
}

impl<'a> Fields<'a> {
    /// The fields of the request's body.
    pub fn new(object: &'a Map<String, Value>) -> Fields<'a> {
        Fields { object, prefix: String::new(), log: None }
    }

    /// The same, with a log of the names that are asked for.
    #[must_use]
    pub fn logged(self, log: Option<&'a RouteFieldLog>) -> Fields<'a> {
        Fields { log, ..self }
    }

    /// The fields of an object within this one, at a place such as `messages[0]`.
    fn of(&self, value: &'a Value, place: &str) -> Result<Fields<'a>, ApiError> {
        let object = value.as_object().ok_or_else(|| wrong(place, value, "an object"))?;
        Ok(Fields { object, prefix: format!("{place}."), log: self.log })
    }

    /// The fields of an object that is an element of the list in a field.
    pub fn element(&self, name: &str, index: usize, value: &'a Value) -> Result<Fields<'a>, ApiError> {
        self.of(value, &format!("{}[{index}]", self.place(name)))
    }

    /// The full name of a field, as errors have it.
    pub fn place(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// A field that is there and not null.
    pub fn value(&self, name: &str) -> Option<&'a Value> {
        if let Some(log) = self.log {
            log.note(&self.place(name));
        }
        self.object.get(name).filter(|value| !value.is_null())
    }

    /// Whether a field is there and not null.
    pub fn has(&self, name: &str) -> bool {
        self.value(name).is_some()
    }

    /// An error about a field.
    pub fn error(&self, name: &str, problem: impl std::fmt::Display) -> ApiError {
        ApiError::field(self.place(name), problem)
    }

    /// The error of a field that must be there.
    pub fn missing(&self, name: &str) -> ApiError {
        self.error(name, "is required")
    }

    fn read<T>(
        &self,
        name: &str,
        wanted: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.value(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| wrong(&self.place(name), value, wanted))
    }

    /// A string.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.read(name, "a string", Value::as_str)
    }

    /// A string that must be there.
    pub fn required_text(&self, name: &str) -> Result<&'a str, ApiError> {
        self.text(name)?.ok_or_else(|| self.missing(name))
    }

    /// A string that is one of those listed.
    pub fn one_of(&self, name: &str, known: &[&str]) -> Result<Option<&'a str>, ApiError> {
        match self.text(name)? {
            Some(text) if !known.contains(&text) => {
                Err(self.error(name, format!("is {}; it must be {}", quoted(text), known.join(", "))))
            }
            text => Ok(text),
        }
    }

    /// A finite number.
    pub fn number(&self, name: &str) -> Result<Option<f64>, ApiError> {
        self.read(name, "a number", Value::as_f64)
    }

    /// A number as samplers have it: one that is finite with 32 bits, too.
    pub fn float(&self, name: &str) -> Result<Option<f32>, ApiError> {
        self.read(name, "a number from -1e30 to 1e30", |value| {
            value.as_f64().filter(|number| number.abs() <= LARGEST_FLOAT).map(|number| number as f32)
        })
    }

    /// A whole number of any sign. One that is written as `3.0` is whole, too.
    pub fn integer(&self, name: &str) -> Result<Option<i64>, ApiError> {
        self.read(name, "a whole number", whole)
    }

    /// A whole number that is not negative.
    pub fn count(&self, name: &str) -> Result<Option<usize>, ApiError> {
        self.read(name, "a whole number that is not negative", |value| {
            whole(value).and_then(|number| usize::try_from(number).ok())
        })
    }

    /// `true` or `false`.
    pub fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", Value::as_bool)
    }

    /// A list.
    pub fn list(&self, name: &str) -> Result<Option<&'a [Value]>, ApiError> {
        self.read(name, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    /// A list of objects, each with its place.
    pub fn objects(&self, name: &str) -> Result<Option<Vec<Fields<'a>>>, ApiError> {
        let Some(list) = self.list(name)? else { return Ok(None) };
        let each = list.iter().enumerate().map(|(index, value)| self.element(name, index, value));
        each.collect::<Result<_, _>>().map(Some)
    }

    /// An object.
    pub fn object(&self, name: &str) -> Result<Option<Fields<'a>>, ApiError> {
        self.value(name).map(|value| self.of(value, &self.place(name))).transpose()
    }

    /// An object, as it is.
    pub fn map(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.read(name, "an object", Value::as_object)
    }

    /// A JSON schema, which is an object.
    pub fn schema(&self, name: &str) -> Result<Option<Value>, ApiError> {
        Ok(self.map(name)?.map(|schema| Value::Object(schema.clone())))
    }

    /// A string, or a list of them.
    pub fn texts(&self, name: &str) -> Result<Option<Vec<String>>, ApiError> {
        self.read(name, "a string or a list of strings", |value| match value {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(list) => list.iter().map(|text| text.as_str().map(str::to_owned)).collect(),
            _ => None,
        })
    }
}

/// The largest whole number that is read: larger ones are not exact in all clients.
const LARGEST: i64 = 9_000_000_000_000_000;

/// The largest number that samplers take.
const LARGEST_FLOAT: f64 = 1e30;

fn whole(value: &Value) -> Option<i64> {
    let float = || {
        let number = value.as_f64()?;
        (number.fract() == 0.0 && number.abs() <= LARGEST as f64).then_some(number as i64)
    };
    value.as_i64().or_else(float).filter(|number| (-LARGEST..=LARGEST).contains(number))
}

/// An error about a value of another type than the wanted one.
fn wrong(place: &str, value: &Value, wanted: &str) -> ApiError {
    ApiError::field(place, format!("must be {wanted}, not {}", type_name(value)))
}

/// The type of a value, or the value itself if it is short.
fn type_name(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(_) => "a string".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn wrong_values_are_named_with_their_place() {
        let value = json!({"a": null, "n": -1, "list": [{"x": "no"}], "whole": 3.0, "half": 0.5});
        let fields = Fields::new(value.as_object().unwrap());
        assert_eq!(fields.text("a"), Ok(None));
        assert_eq!(fields.count("whole"), Ok(Some(3)));
        let error = fields.count("n").unwrap_err();
        assert_eq!(error.param.as_deref(), Some("n"));
        assert_eq!(error.message, "n must be a whole number that is not negative, not -1");
        assert!(fields.count("half").is_err());
        let inner = fields.objects("list").unwrap().unwrap();
        let error = inner.first().unwrap().flag("x").unwrap_err();
        assert_eq!(error.message, "list[0].x must be true or false, not a string");
        assert_eq!(fields.object("n").unwrap_err().param.as_deref(), Some("n"));
    }
}

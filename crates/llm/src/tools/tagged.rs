//! Arguments between tags, as JSON.

use std::collections::BTreeSet;

use serde::de::IgnoredAny;
use serde_json::Value;

use super::text_patterns::expressions;
use super::tool::Tool;

/// Schemas within schemas that are looked at to find out how a value is written.
const MAX_DEPTH: usize = 8;
/// The most forms of one value; a schema with more of them is written as JSON.
const MAX_FORMS: usize = 256;

/// The greatest length of a text that is enforced.
const MAX_LENGTH: u64 = 1000;

/// Keywords that say nothing about which values a schema allows.
const ANNOTATIONS: [&str; 8] =
    ["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"];

/// What a schema says of a text.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct TextRules {
    /// The fewest characters.
    pub(super) least: u64,
    /// The most characters.
    pub(super) most: Option<u64>,
    /// Regular expressions that it matches as a whole.
    pub(super) expressions: Vec<String>,
    /// Why the rest of what the schema says is not enforced.
    pub(super) unenforced: Option<String>,
}

/// Keywords that say more of a text than rules have.
const UNENFORCED: [&str; 4] = ["anyOf", "oneOf", "not", "if"];

impl TextRules {
    fn of(schema: &Value, tool: &Tool) -> TextRules {
        let mut rules = TextRules::default();
        rules.add(schema, tool, &mut BTreeSet::new(), 0);
        // Automata of greater lengths are too large.
        if rules.least.max(rules.most.unwrap_or(0)) > MAX_LENGTH
            || rules.most.is_some_and(|most| most < rules.least)
        {
            (rules.least, rules.most) = (0, None);
        }
        rules
    }

    /// Adds what a schema says that holds, too. References that were followed say nothing new.
    fn add<'t>(&mut self, schema: &'t Value, tool: &'t Tool, followed: &mut BTreeSet<&'t str>, depth: usize) {
        let length = |keyword: &str| schema.get(keyword).and_then(Value::as_u64);
        self.least = self.least.max(length("minLength").unwrap_or(0));
        self.most = self.most.into_iter().chain(length("maxLength")).min();
        match expressions(schema) {
            Ok(expressions) => self.expressions.extend(expressions),
            Err(reason) => self.unenforced = Some(reason),
        }
        // Those of a text itself are values of their own.
        let lists_values = depth > 0 && (schema.get("enum").is_some() || schema.get("const").is_some());
        if lists_values
            || depth >= MAX_DEPTH
            || UNENFORCED.iter().any(|keyword| schema.get(keyword).is_some())
        {
            let reason =
                "values and alternatives beside the type of a text cannot be enforced without quotes";
            self.unenforced = Some(reason.to_owned());
            return;
        }
        let members = schema.get("allOf").and_then(Value::as_array).into_iter().flatten();
        let reference = schema.get("$ref").and_then(Value::as_str).filter(|name| followed.insert(name));
        let target = reference.and_then(|name| tool.parameters.pointer(name.strip_prefix('#')?));
        members.chain(target).for_each(|part| self.add(part, tool, followed, depth + 1));
    }

    /// Whether any text is fine.
    #[cfg(feature = "constraint")]
    pub(super) fn is_free(&self) -> bool {
        self.least == 0 && self.most.is_none() && self.expressions.is_empty()
    }
}

/// How a value that a schema allows is written between tags.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum ValueForm {
    /// A text, as it is.
    Text(TextRules),
    /// This text, as it is.
    Exact(String),
    /// JSON of this schema.
    Json(Value),
}

impl ValueForm {
    /// Whether it is JSON of a value without parts, which is told from a text by reading it.
    pub(super) fn is_scalar(&self) -> bool {
        let ValueForm::Json(schema) = self else { return false };
        let is_plain = |value: &Value| !value.is_object() && !value.is_array();
        let names = types(schema);
        match (schema.get("const"), schema.get("enum").and_then(Value::as_array)) {
            (Some(value), _) => is_plain(value),
            (None, Some(values)) => values.iter().all(is_plain),
            (None, None) => !names.is_empty() && !names.iter().any(|name| ["object", "array"].contains(name)),
        }
    }

    /// Whether it is JSON that allows a value, as far as the value's type and bounds say.
    fn accepts(&self, value: &Value) -> bool {
        let ValueForm::Json(schema) = self else { return false };
        let is_type = |name: &&str| match *name {
            "null" => value.is_null(),
            "boolean" => value.is_boolean(),
            "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
            "number" => value.is_number(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            _ => false,
        };
        let within = |keyword: &str, holds: fn(f64, f64) -> bool| {
            let (bound, number) = (schema.get(keyword).and_then(Value::as_f64), value.as_f64());
            bound.zip(number).is_none_or(|(bound, number)| holds(number, bound))
        };
        let names = types(schema);
        let values = schema.get("enum").and_then(Value::as_array);
        (names.is_empty() || names.iter().any(is_type))
            && values.is_none_or(|values| values.contains(value))
            && schema.get("const").is_none_or(|only| only == value)
            && within("minimum", |number, bound| number >= bound)
            && within("maximum", |number, bound| number <= bound)
            && within("exclusiveMinimum", |number, bound| number > bound)
            && within("exclusiveMaximum", |number, bound| number < bound)
    }
}

/// How the values that a parameter's schema allows are written: texts as they are, other values as JSON.
pub(super) fn forms(schema: &Value, tool: &Tool) -> Vec<ValueForm> {
    let mut all = Vec::new();
    match collect(schema, tool, 0, &mut all) {
        Some(()) if !all.is_empty() => all,
        _ => vec![ValueForm::Json(tool.with_definitions(schema))],
    }
}

/// Adds the forms of a schema; `None` if there are too many of them.
fn collect(schema: &Value, tool: &Tool, depth: usize, all: &mut Vec<ValueForm>) -> Option<()> {
    let only = |keyword: &str| {
        let fields = schema.as_object().into_iter().flatten();
        fields.map(|(name, _)| name.as_str()).all(|name| name == keyword || ANNOTATIONS.contains(&name))
    };
    let changed = |keyword: &str, value: Value| {
        let mut changed = schema.clone();
        if let Some(fields) = changed.as_object_mut() {
            fields.insert(keyword.to_owned(), value);
        }
        ValueForm::Json(tool.with_definitions(&changed))
    };
    let names = types(schema);
    let takes_text = names.is_empty() || names.contains(&"string");
    let values = schema.get("enum").and_then(Value::as_array).filter(|values| !values.is_empty());
    if let Some(text) = schema.get("const").and_then(Value::as_str).filter(|_| takes_text) {
        all.push(ValueForm::Exact(text.to_owned()));
    } else if let Some(values) = values.filter(|_| schema.get("const").is_none()) {
        let (texts, others): (Vec<&Value>, Vec<&Value>) = values.iter().partition(|value| value.is_string());
        let texts = texts.into_iter().filter(|_| takes_text).filter_map(Value::as_str);
        all.extend(texts.map(|text| ValueForm::Exact(text.to_owned())));
        if !others.is_empty() && names != ["string"] {
            all.push(changed("enum", others.into_iter().cloned().collect()));
        }
    } else if names.contains(&"string") && schema.get("const").is_none() {
        let rules = TextRules::of(schema, tool);
        all.push(match rules.most {
            Some(0) => ValueForm::Exact(String::new()),
            _ => ValueForm::Text(rules),
        });
        let others: Vec<&str> = names.into_iter().filter(|name| *name != "string").collect();
        if !others.is_empty() {
            all.push(changed("type", others.into()));
        }
    } else if let Some(inner) = alternatives(schema, tool, only).filter(|_| depth < MAX_DEPTH) {
        for schema in inner {
            collect(schema, tool, depth + 1, all)?;
        }
    } else {
        all.push(ValueForm::Json(tool.with_definitions(schema)));
    }
    (all.len() <= MAX_FORMS).then_some(())
}

/// The schemas of which a schema that has no keyword but this one allows the values.
fn alternatives<'a>(
    schema: &'a Value,
    tool: &'a Tool,
    only: impl Fn(&str) -> bool,
) -> Option<Vec<&'a Value>> {
    if let Some(reference) = schema.get("$ref").and_then(Value::as_str).filter(|_| only("$ref")) {
        let target = tool.parameters.pointer(reference.strip_prefix('#')?)?;
        return target.is_object().then(|| vec![target]);
    }
    let list = |keyword: &str| {
        let inner = schema.get(keyword).and_then(Value::as_array).filter(|_| only(keyword))?;
        (!inner.is_empty() && (keyword != "allOf" || inner.len() == 1)).then(|| inner.iter().collect())
    };
    ["anyOf", "oneOf", "allOf"].into_iter().find_map(list)
}

/// The types that a schema names.
fn types(schema: &Value) -> Vec<&str> {
    match schema.get("type") {
        Some(Value::String(name)) => vec![name.as_str()],
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

/// The JSON text of an argument that is marked as JSON.
pub(super) fn json(text: &str) -> String {
    read(text).map_or_else(|| as_it_is(text), |(_, json)| json)
}

/// The JSON text of an argument that is written between tags: texts are written as they are, other values as JSON.
pub(super) fn value(tool: Option<&Tool>, name: &str, text: &str) -> String {
    let known = tool.and_then(|tool| Some(forms(tool.parameter(name)?, tool)));
    let Some((value, json)) = read(text) else { return as_it_is(text) };
    let Some(forms) = known else {
        return if value.is_string() { as_it_is(text) } else { json };
    };
    let is_exact = |text: &str| forms.contains(&ValueForm::Exact(text.to_owned()));
    let takes_text = forms.iter().any(|form| matches!(form, ValueForm::Text(_)));
    let takes_json = forms.iter().any(|form| matches!(form, ValueForm::Json(_)));
    let is_json = match &value {
        _ if is_exact(text) => false,
        Value::String(inner) => is_exact(inner) || takes_json && !takes_text,
        value => takes_json && (!takes_text || forms.iter().any(|form| form.accepts(value))),
    };
    if is_json { json } else { as_it_is(text) }
}

/// Whether a value that begins as JSON does is JSON for the schema of its parameter; `text` is what it would be otherwise.
pub(super) fn begins_json(tool: Option<&Tool>, name: &str, text: &str, begin: &str) -> bool {
    let known = tool.and_then(|tool| Some(forms(tool.parameter(name)?, tool)));
    // Any text may be the value of a parameter that is not known.
    let Some(forms) = known else { return false };
    if forms.contains(&ValueForm::Exact(text.to_owned())) {
        return false;
    }
    let takes_text = forms.iter().any(|form| matches!(form, ValueForm::Text(_)));
    let takes_parts = forms.iter().any(|form| matches!(form, ValueForm::Json(_)) && !form.is_scalar());
    takes_parts && (!takes_text || begin.trim_start().starts_with(['{', '[']))
}

fn as_it_is(text: &str) -> String {
    Value::from(text).to_string()
}

/// The value of a JSON text, and the text. The value of a text with numbers out of range is null.
fn read(text: &str) -> Option<(Value, String)> {
    match serde_json::from_str::<Value>(text.trim()) {
        Ok(value) => Some((value.clone(), value.to_string())),
        Err(_) => {
            serde_json::from_str::<IgnoredAny>(text.trim()).ok()?;
            Some((Value::Null, text.trim().to_owned()))
        }
    }
}

//! Prompts that are continued: texts, tokens, both mixed, and lists of those.

use serde_json::{Value, json};

use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::{Prompt, PromptPart};
use crate::model::ServedModel;
use crate::openapi::schema::{any_of, filled_list, request, text, token};

/// The most prompts of a request.
const MAX_PROMPTS: usize = 2048;

/// The schema of such a field.
pub(crate) fn schema() -> Value {
    let mixed = || filled_list(any_of([text(), token()]));
    let media = json!({ "prompt_string": text(), "multimodal_data": { "type": "array", "maxItems": 0 } });
    let with_media = || request(&["prompt_string"], media.clone(), []);
    any_of([text(), filled_list(any_of([text(), token(), mixed(), with_media()])), with_media()])
}

/// The prompts of a field: a text; tokens and texts, which are one prompt if there is a token among them; a list of prompts.
pub(crate) fn prompts(fields: &Fields<'_>, name: &str) -> Result<Vec<Prompt>, ApiError> {
    let wrong = || {
        fields.error(
            name,
            "must be a text, a list of tokens (which may have texts among them), or a list of such",
        )
    };
    let one = |(index, value): (usize, &Value)| match value {
        Value::String(text) => Ok(Prompt::Text(text.clone())),
        Value::Array(list) if list.is_empty() => Err(fields.error(name, "has an empty prompt")),
        Value::Array(list) => mixed(list).ok_or_else(wrong),
        Value::Object(_) => with_media(&fields.element(name, index, value)?),
        _ => Err(wrong()),
    };
    match fields.value(name).ok_or_else(|| fields.missing(name))? {
        Value::Array(list) if list.is_empty() => Err(fields.error(name, "is empty")),
        Value::Array(list) if list.iter().any(Value::is_number) && list.iter().all(is_part) => {
            Ok(vec![mixed(list).ok_or_else(wrong)?])
        }
        Value::Array(list) if list.len() > MAX_PROMPTS => {
            Err(fields.error(name, format!("has {} prompts; at most {MAX_PROMPTS} are allowed", list.len())))
        }
        Value::Array(list) => list.iter().enumerate().map(one).collect(),
        Value::Object(_) => {
            let prompt = fields.object(name)?.map(|prompt| with_media(&prompt)).transpose()?;
            Ok(prompt.into_iter().collect())
        }
        value => Ok(vec![one((0, value))?]),
    }
}

fn is_part(value: &Value) -> bool {
    value.is_number() || value.is_string()
}

fn mixed(list: &[Value]) -> Option<Prompt> {
    let number = |value: &Value| value.as_u64().and_then(|token| u32::try_from(token).ok());
    if let Some(tokens) = list.iter().map(number).collect::<Option<Vec<u32>>>() {
        return Some(Prompt::Tokens(tokens));
    }
    let part = |value: &Value| match value {
        Value::String(text) => Some(PromptPart::Text(text.clone())),
        value => number(value).map(PromptPart::Token),
    };
    list.iter().map(part).collect::<Option<Vec<_>>>().map(Prompt::Mixed)
}

/// A prompt with a place for images and sounds, of which there must be none.
fn with_media(fields: &Fields<'_>) -> Result<Prompt, ApiError> {
    if fields.list("multimodal_data")?.is_some_and(|list| !list.is_empty()) {
        return Err(fields.error("multimodal_data", "is not supported: the model takes text only"));
    }
    Ok(Prompt::Text(fields.required_text("prompt_string")?.to_owned()))
}

/// A prompt as a text.
pub(crate) fn shown(served: &ServedModel, prompt: &Prompt) -> String {
    let part = |part: &PromptPart| match part {
        PromptPart::Text(text) | PromptPart::Plain(text) => text.clone(),
        PromptPart::Token(token) => served.token_text(*token),
    };
    match prompt {
        Prompt::Text(text) => text.clone(),
        Prompt::Tokens(tokens) => {
            let bytes: Vec<u8> = tokens.iter().flat_map(|token| served.token_bytes(*token)).collect();
            String::from_utf8_lossy(&bytes).into_owned()
        }
        Prompt::Mixed(parts) => parts.iter().map(part).collect(),
        Prompt::Chat(_) => String::new(),
    }
}

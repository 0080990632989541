//! `/v1/embeddings`.

use std::sync::Arc;

use axum::response::Response;
use quadriga_llm::{Pooling, text_tokens};
use serde_json::{Value, json};

use crate::call::Call;
use crate::embedding::EmbeddingTask;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::model::ServedModel;
use crate::openapi::schema::{any_of, filled_list, token, with};
use crate::operation::caller::TokenNeed;
use crate::prompt::unknown_token;

/// The most texts of a request.
const MAX_TEXTS: usize = 2048;

/// A request for embeddings.
#[derive(Clone, Debug)]
pub struct EmbeddingRequest {
    /// The texts.
    pub texts: Vec<TextInput>,
    /// Whether vectors are bytes in base64.
    pub base64: bool,
    /// The length of the vectors, if it is not the model's.
    pub dimensions: Option<usize>,
}

/// A text that is embedded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TextInput {
    /// A text.
    Text(String),
    /// Its tokens.
    Tokens(Vec<u32>),
}

impl TextInput {
    /// Its tokens.
    ///
    /// # Errors
    /// It does not fit in the context.
    pub fn tokens(self, served: &ServedModel) -> Result<Vec<u32>, ApiError> {
        match self {
            TextInput::Text(text) => {
                served.check_length(text.len())?;
                Ok(text_tokens(&served.model, &text)?)
            }
            TextInput::Tokens(tokens) => Ok(tokens),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            TextInput::Text(text) => text.len(),
            TextInput::Tokens(_) => 0,
        }
    }
}

/// The tokens of texts, found beside the threads that serve connections.
pub(crate) async fn tokenized(
    served: &Arc<ServedModel>,
    texts: Vec<TextInput>,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let bytes = texts.iter().map(TextInput::bytes).sum();
    let of_model = Arc::clone(served);
    let work = move || texts.into_iter().map(|text| text.tokens(&of_model)).collect();
    served.tokenizing(bytes, work).await?
}

/// The request that the fields of a body are.
pub fn parse(fields: &Fields<'_>, served: &Arc<ServedModel>) -> Result<EmbeddingRequest, ApiError> {
    if served.pooling() == Pooling::None {
        let message = "--pooling none has a vector for each token, for which only /embedding has a form";
        return Err(ApiError::invalid(message));
    }
    let base64 = fields.one_of("encoding_format", &["float", "base64"])? == Some("base64");
    let dimensions = fields.count("dimensions")?;
    let width = served.model.hyperparameters().width;
    if let Some(wanted) = dimensions.filter(|wanted| *wanted == 0 || *wanted > width) {
        return Err(fields.error("dimensions", format!("is {wanted}; the model's embeddings have {width}")));
    }
    Ok(EmbeddingRequest { texts: inputs(fields, "input", served)?, base64, dimensions })
}

/// Computes a vector for each text.
pub async fn embeddings(call: Call) -> Result<Response, ApiError> {
    let served = call.model().await?;
    let EmbeddingRequest { texts, base64, dimensions } = parse(&call.fields(), &served)?;
    let usage = call.caller.enter()?;
    let texts = tokenized(&served, texts).await?;
    let tokens: usize = texts.iter().map(Vec::len).sum();
    usage.reserve(TokenNeed::exact(tokens))?;
    let mut vectors = served.embed(EmbeddingTask::Embed, texts, call.caller.client(), usage).await?;
    if let Some(dimensions) = dimensions {
        vectors.iter_mut().for_each(|vector| shorten(vector, dimensions));
    }
    let data: Vec<Value> = vectors
        .iter()
        .enumerate()
        .map(|(index, vector)| {
            let embedding = if base64 { base64_text(vector).into() } else { json!(vector) };
            json!({ "object": "embedding", "index": index, "embedding": embedding })
        })
        .collect();
    Ok(vectors.written(&json!({
        "object": "list",
        "model": served.name,
        "data": data,
        "usage": { "prompt_tokens": tokens, "total_tokens": tokens },
    })))
}

/// The texts of a field: a text, tokens, or a list of either.
pub(crate) fn inputs(
    fields: &Fields<'_>,
    name: &str,
    served: &ServedModel,
) -> Result<Vec<TextInput>, ApiError> {
    let texts = unchecked_inputs(fields, name)?;
    let count = served.model.hyperparameters().vocabulary;
    let tokens = texts.iter().flat_map(|text| match text {
        TextInput::Text(_) => &[][..],
        TextInput::Tokens(tokens) => tokens,
    });
    match tokens.into_iter().find(|token| **token as usize >= count) {
        Some(token) => Err(unknown_token(&fields.place(name), *token, count)),
        None => Ok(texts),
    }
}

fn unchecked_inputs(fields: &Fields<'_>, name: &str) -> Result<Vec<TextInput>, ApiError> {
    let wrong = || fields.error(name, "must be a text, a list of tokens, or a list of such");
    let token = |value: &Value| value.as_u64().and_then(|token| u32::try_from(token).ok());
    let tokens = |list: &[Value]| list.iter().map(token).collect::<Option<Vec<u32>>>();
    let one = |value: &Value| match value {
        Value::String(text) if text.is_empty() => Err(fields.error(name, "has an empty text")),
        Value::String(text) => Ok(TextInput::Text(text.clone())),
        Value::Array(list) if list.is_empty() => Err(fields.error(name, "has an empty text")),
        Value::Array(list) => tokens(list).map(TextInput::Tokens).ok_or_else(wrong),
        _ => Err(wrong()),
    };
    match fields.value(name).ok_or_else(|| fields.missing(name))? {
        Value::Array(list) if list.is_empty() => Err(fields.error(name, "is empty")),
        Value::Array(list) => match tokens(list) {
            Some(tokens) => Ok(vec![TextInput::Tokens(tokens)]),
            None if list.len() > MAX_TEXTS => {
                Err(fields.error(name, format!("has {} texts; at most {MAX_TEXTS} are allowed", list.len())))
            }
            None => list.iter().map(one).collect(),
        },
        value => Ok(vec![one(value)?]),
    }
}

/// The schema of such a field.
pub(crate) fn input_schema() -> Value {
    let one = || json!({ "type": "string", "minLength": 1 });
    let tokens = || filled_list(token());
    let texts = with(filled_list(any_of([one(), tokens()])), json!({ "maxItems": MAX_TEXTS }));
    any_of([one(), tokens(), texts])
}

/// The first elements of a vector, which are an embedding of models that were trained so, scaled to length 1.
pub(crate) fn shorten(vector: &mut Vec<f32>, dimensions: usize) {
    vector.truncate(dimensions);
    let length = vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
}

/// A vector of little-endian numbers in base64, for which OpenAI's libraries ask by themselves.
fn base64_text(vector: &[f32]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
    let letter = |number: u32| LETTERS.get((number & 63) as usize).map_or('=', |letter| char::from(*letter));
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let number = group.iter().fold(0u32, |number, byte| number << 8 | u32::from(*byte));
        let number = number << (8 * (3 - group.len()));
        for place in 0..4 {
            let is_padding = place > group.len();
            text.push(if is_padding { '=' } else { letter(number >> (18 - 6 * place)) });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_little_endian() {
        assert_eq!(base64_text(&[1.0]), "AACAPw==");
        assert_eq!(base64_text(&[1.0, -2.5]), "AACAPwAAIMA=");
        assert_eq!(base64_text(&[1.0, -2.5, 0.0]), "AACAPwAAIMAAAAAA");
    }
}

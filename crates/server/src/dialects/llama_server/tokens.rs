//! `/tokenize` and `/detokenize`.

use axum::Json;
use serde_json::{Value, json};

use crate::call::Call;
use crate::error::ApiError;
use crate::model::ServedModel;
use crate::openapi::schema::{answer, any_of, filled_list, flag, list, request, text, token};

/// The tokens of a text, or of texts and tokens.
pub(super) async fn tokenize(call: Call) -> Result<Json<Value>, ApiError> {
    const NAME: &str = "content";
    let served = call.model().await?;
    let fields = call.fields();
    let add_special = fields.flag("add_special")?.unwrap_or(false);
    let parse_special = fields.flag("parse_special")?.unwrap_or(true);
    let with_pieces = fields.flag("with_pieces")?.unwrap_or(false);
    let wrong = fields.error(NAME, "must be a text, or a list of texts and tokens");
    let parts: Vec<Value> = match fields.value(NAME) {
        None => return Err(fields.missing(NAME)),
        Some(Value::Array(parts)) => parts.clone(),
        Some(Value::String(text)) => vec![text.as_str().into()],
        Some(_) => return Err(wrong),
    };
    let count = served.model.tokenizer()?.token_count();
    let of_model = std::sync::Arc::clone(&served);
    let tokenize = move || {
        let tokenizer = of_model.model.tokenizer()?;
        let mut tokens = Vec::new();
        for (number, part) in parts.iter().enumerate() {
            let number_of = || part.as_u64().and_then(|token| u32::try_from(token).ok());
            match part {
                Value::String(text) if add_special && number == 0 => {
                    tokens.extend(tokenizer.encode_prompt(text, parse_special));
                }
                Value::String(text) => tokens.extend(tokenizer.encode(text, parse_special)),
                _ => tokens.push(number_of().ok_or_else(|| wrong.clone())?),
            }
        }
        Ok::<_, ApiError>(tokens)
    };
    let tokens = served.blocking(tokenize).await??;
    if let Some(token) = tokens.iter().find(|token| **token as usize >= count) {
        return Err(fields.error(NAME, format!("has the token {token}; the vocabulary has {count}")));
    }
    let shown: Vec<Value> = match with_pieces {
        true => tokens.iter().map(|token| piece(&served, *token)).collect(),
        false => tokens.into_iter().map(Value::from).collect(),
    };
    Ok(Json(json!({ "tokens": shown })))
}

/// A token with its text, or with its bytes if they are a part of a character.
fn piece(served: &ServedModel, token: u32) -> Value {
    let bytes = served.token_bytes(token);
    let piece = match std::str::from_utf8(&bytes) {
        Ok(text) => text.into(),
        Err(_) => json!(bytes),
    };
    json!({ "id": token, "piece": piece })
}

/// The text of tokens, with the names of control tokens.
pub(super) async fn detokenize(call: Call) -> Result<Json<Value>, ApiError> {
    const NAME: &str = "tokens";
    let served = call.model().await?;
    let fields = call.fields();
    let list = fields.list(NAME)?.ok_or_else(|| fields.missing(NAME))?;
    let count = served.model.tokenizer()?.token_count();
    let mut bytes = Vec::new();
    for value in list {
        let token = value.as_u64().and_then(|token| u32::try_from(token).ok());
        let token = token.ok_or_else(|| fields.error(NAME, "must be a list of tokens"))?;
        if token as usize >= count {
            return Err(fields.error(NAME, format!("has the token {token}; the vocabulary has {count}")));
        }
        bytes.extend(served.token_bytes(token));
    }
    Ok(Json(json!({ "content": String::from_utf8_lossy(&bytes) })))
}

/// The body of `/tokenize`.
pub(super) fn tokenize_schema() -> Value {
    let fields = json!({
        "content": any_of([text(), list(any_of([text(), token()]))]),
        "add_special": flag(),
        "parse_special": flag(),
        "with_pieces": flag(),
        "model": text(),
    });
    request(&["content"], fields, [])
}

/// The answer of `/tokenize`.
pub(super) fn tokens_schema() -> Value {
    let piece = json!({ "id": token(), "piece": any_of([text(), filled_list(token())]) });
    answer(json!({ "tokens": list(any_of([token(), answer(piece)])) }))
}

/// The body of `/detokenize`.
pub(super) fn detokenize_schema() -> Value {
    request(&["tokens"], json!({ "tokens": list(token()), "model": text() }), [])
}

/// The answer of `/detokenize`.
pub(super) fn content_schema() -> Value {
    answer(json!({ "content": text() }))
}

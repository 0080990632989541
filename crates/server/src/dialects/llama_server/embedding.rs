//! `/embedding`: a vector for each text, in llama-server's own form.

use axum::response::Response;
use quadriga_llm::Pooling;
use serde_json::{Value, json};

use crate::call::Call;
use crate::dialects::openai::embeddings;
use crate::dialects::openai::schemas;
use crate::embedding::EmbeddingTask;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::model::ServedModel;
use crate::openapi::schema::{answer, any_of, count, list, number, request, text, with, with_field};
use crate::operation::caller::TokenNeed;

/// The norm of vectors that are left as they are.
const UNSCALED: i64 = -1;

/// Computes a vector for each text.
pub(super) async fn embedding(call: Call) -> Result<Response, ApiError> {
    let served = call.model().await?;
    let (texts, norm) = parse(&call.fields(), &served)?;
    let usage = call.caller.enter()?;
    let texts = embeddings::tokenized(&served, texts).await?;
    usage.reserve(TokenNeed::exact(texts.iter().map(Vec::len).sum()))?;
    let task = if norm == UNSCALED { EmbeddingTask::EmbedUnscaled } else { EmbeddingTask::Embed };
    let vectors = served.embed(task, texts, call.caller.client(), usage).await?;
    let width = served.model.hyperparameters().width;
    let data: Vec<Value> = vectors
        .iter()
        .enumerate()
        .map(|(index, vector)| {
            // There is one for each token without pooling.
            let each = match served.pooling() {
                Pooling::None => vector.chunks(width.max(1)).map(<[f32]>::to_vec).collect(),
                _ => vec![vector.clone()],
            };
            let each: Vec<Vec<f32>> = each.into_iter().map(|vector| normalized(vector, norm)).collect();
            json!({ "index": index, "embedding": each })
        })
        .collect();
    Ok(vectors.written(&data.into()))
}

/// The texts of a request, and the norm of their vectors.
pub(crate) fn parse(
    fields: &Fields<'_>,
    served: &ServedModel,
) -> Result<(Vec<embeddings::TextInput>, i64), ApiError> {
    let name = if fields.has("content") { "content" } else { "input" };
    if name == "content" && fields.has("input") {
        return Err(fields.error("input", "cannot be used together with content"));
    }
    let norm = fields.integer("embd_normalize")?.unwrap_or(2);
    if norm < UNSCALED {
        return Err(
            fields.error("embd_normalize", "must be -1 for vectors as they are, or a norm of 0 or more")
        );
    }
    Ok((embeddings::inputs(fields, name, served)?, norm))
}

/// `/embeddings`: texts in `content` are for llama-server's form, those in `input` for OpenAI's.
pub(super) async fn embedding_or_openai(call: Call) -> Result<Response, ApiError> {
    match call.fields().has("content") {
        true => embedding(call).await,
        false => embeddings::embeddings(call).await,
    }
}

/// A vector of length 1 by another norm: the largest element is 32,760 for 0, else the norm of this number.
fn normalized(vector: Vec<f32>, norm: i64) -> Vec<f32> {
    let size = match norm {
        2 | UNSCALED => return vector,
        0 => vector.iter().fold(0.0_f64, |most, value| most.max(f64::from(value.abs()))) / 32760.0,
        norm => {
            let sum: f64 = vector.iter().map(|value| f64::from(value.abs()).powf(norm as f64)).sum();
            sum.powf(1.0 / norm as f64)
        }
    };
    if size == 0.0 || !size.is_finite() {
        return vector;
    }
    vector.iter().map(|value| (f64::from(*value) / size) as f32).collect()
}

/// The body.
pub(super) fn request_schema() -> Value {
    let texts = embeddings::input_schema();
    let fields = json!({
        "content": texts.clone(),
        "input": texts,
        "embd_normalize": norm_schema(),
        "model": text(),
    });
    let either = json!({ "anyOf": [{ "required": ["content"] }, { "required": ["input"] }] });
    with(request(&[], fields, []), either)
}

fn norm_schema() -> Value {
    json!({ "type": "integer", "minimum": UNSCALED, "maximum": 9_000_000_000_000_000_i64 })
}

/// The answer.
pub(super) fn answer_schema() -> Value {
    list(answer(json!({ "index": count(), "embedding": list(list(number())) })))
}

/// The answer of `/embeddings`.
pub(super) fn either_schema() -> Value {
    any_of([answer_schema(), schemas::embeddings()])
}

/// The body of `/embeddings`.
pub(super) fn either_request_schema() -> Value {
    let own = request(
        &["content"],
        json!({
            "content": embeddings::input_schema(),
            "input": { "type": "null" },
            "embd_normalize": norm_schema(),
            "model": text(),
        }),
        [],
    );
    let openai = with_field(schemas::embedding_request(), "content", json!({ "type": "null" }));
    any_of([own, openai])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norms_are_those_of_llama_server() {
        let vector = || vec![0.6, -0.8];
        assert_eq!(normalized(vector(), 2), [0.6, -0.8]);
        assert_eq!(normalized(vector(), 0), [24570.0, -32760.0]);
        let sum: f32 = normalized(vector(), 1).iter().map(|value| value.abs()).sum();
        assert!((sum - 1.0).abs() < 1e-6, "{sum}");
    }
}

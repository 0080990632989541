//! `/api/embed`, and the older `/api/embeddings`.

use std::time::Instant;

use axum::Json;
use quadriga_llm::{cut_tokens, text_tokens};
use serde_json::{Value, json};

use super::request_fields::{keep_alive, model};
use crate::call::Call;
use crate::dialects::openai::embeddings::shorten;
use crate::embedding::EmbeddingTask;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::model::ServedModel;
use crate::operation::caller::TokenNeed;

/// The most texts of a request.
const MAX_TEXTS: usize = 2048;

/// The tokens of each text of a request, and the length of its vectors, if it is not the model's.
pub fn parse(fields: &Fields<'_>, served: &ServedModel) -> Result<(Vec<Vec<u32>>, Option<usize>), ApiError> {
    const NAME: &str = "input";
    fields.map("options")?;
    let texts = fields.texts(NAME)?.ok_or_else(|| fields.missing(NAME))?;
    if texts.len() > MAX_TEXTS {
        return Err(fields.error(NAME, format!("has {} texts; at most {MAX_TEXTS} are allowed", texts.len())));
    }
    let dimensions = fields.count("dimensions")?.filter(|count| *count > 0);
    let width = served.model.hyperparameters().width;
    if let Some(wanted) = dimensions.filter(|wanted| *wanted > width) {
        return Err(fields.error("dimensions", format!("is {wanted}; the model's embeddings have {width}")));
    }
    let cuts = fields.flag("truncate")?.unwrap_or(false);
    let mut tokens = Vec::new();
    for text in &texts {
        let mut of_text = text_tokens(&served.model, text)?;
        if of_text.is_empty() {
            return Err(fields.error(NAME, "has an empty text"));
        }
        if cuts {
            cut_tokens(&served.model, &mut of_text, served.context());
        }
        tokens.push(of_text);
    }
    Ok((tokens, dimensions))
}

/// A vector for each text. A text that is too long is an error, unless `truncate` asks to cut it.
pub(super) async fn embed(call: Call) -> Result<Json<Value>, ApiError> {
    let started = Instant::now();
    let served = model(&call).await?;
    let load = started.elapsed();
    let fields = call.fields();
    let keep = keep_alive(&fields)?;
    let (tokens, dimensions) = parse(&fields, &served)?;
    let count: usize = tokens.iter().map(Vec::len).sum();
    keep.apply(&call, &served)?;
    let usage = call.caller.begin(TokenNeed::exact(count))?;
    let mut vectors = match tokens.is_empty() {
        true => Vec::new(),
        false => served.embed(EmbeddingTask::Embed, tokens, call.caller.client()).await?,
    };
    usage.charge(count);
    if let Some(dimensions) = dimensions {
        vectors.iter_mut().for_each(|vector| shorten(vector, dimensions));
    }
    let name = fields.text("model")?.unwrap_or(&served.name);
    Ok(Json(json!({
        "model": name,
        "embeddings": vectors,
        "total_duration": started.elapsed().as_nanos() as u64,
        "load_duration": load.as_nanos() as u64,
        "prompt_eval_count": count,
    })))
}

/// The vector of a text; of none, an empty one.
pub(super) async fn embeddings(call: Call) -> Result<Json<Value>, ApiError> {
    let served = model(&call).await?;
    let fields = call.fields();
    let keep = keep_alive(&fields)?;
    let text = fields.text("prompt")?.unwrap_or_default();
    keep.apply(&call, &served)?;
    if text.is_empty() {
        return Ok(Json(json!({ "embedding": [] })));
    }
    let tokens = text_tokens(&served.model, text)?;
    let count = tokens.len();
    let usage = call.caller.begin(TokenNeed::exact(count))?;
    let vectors = served.embed(EmbeddingTask::Embed, vec![tokens], call.caller.client()).await?;
    usage.charge(count);
    Ok(Json(json!({ "embedding": vectors.first() })))
}

//! `/api/embed`, and the older `/api/embeddings`.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::response::Response;
use quadriga_llm::{Pooling, cut_tokens, text_tokens};
use serde_json::{Value, json};

use super::request_fields::{keep_alive, model};
use crate::call::Call;
use crate::dialects::openai::embeddings::shorten;
use crate::embed::Embedded;
use crate::embedding::EmbeddingTask;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::model::ServedModel;
use crate::operation::caller::TokenNeed;

/// The most texts of a request.
const MAX_TEXTS: usize = 2048;

/// The field with the texts.
const NAME: &str = "input";

/// A request for embeddings.
#[derive(Clone, Debug)]
pub struct EmbedRequest {
    texts: Vec<String>,
    /// Whether texts that are too long are cut.
    cuts: bool,
    /// The length of the vectors, if it is not the model's.
    dimensions: Option<usize>,
}

impl EmbedRequest {
    /// The tokens of each text.
    ///
    /// # Errors
    /// A text is empty, or too long.
    pub fn tokens(&self, served: &ServedModel) -> Result<Vec<Vec<u32>>, ApiError> {
        let of_text = |text: &String| {
            let mut text = text.as_str();
            if self.cuts {
                // A little more than can be in the context, as the end of the text decides how its last words are divided.
                let most = served.longest_token().saturating_mul(served.context() + 16);
                text = text.get(..text.floor_char_boundary(most)).unwrap_or(text);
            } else {
                served.check_length(text.len())?;
            }
            let mut tokens = text_tokens(&served.model, text)?;
            if tokens.is_empty() {
                return Err(ApiError::field(NAME, "has an empty text"));
            }
            if self.cuts {
                cut_tokens(&served.model, &mut tokens, served.context());
            }
            Ok(tokens)
        };
        self.texts.iter().map(of_text).collect()
    }

    /// The same, found beside the threads that serve connections.
    async fn tokenized(self, served: &Arc<ServedModel>) -> Result<Vec<Vec<u32>>, ApiError> {
        let of_model = Arc::clone(served);
        let bytes = self.texts.iter().map(String::len).sum();
        served.tokenizing(bytes, move || self.tokens(&of_model)).await?
    }
}

/// The request that the fields of a body are.
pub fn parse(fields: &Fields<'_>, served: &ServedModel) -> Result<EmbedRequest, ApiError> {
    check_pooling(served)?;
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
    Ok(EmbedRequest { texts, cuts, dimensions })
}

/// Refuses a model that has a vector for each token.
fn check_pooling(served: &ServedModel) -> Result<(), ApiError> {
    match served.pooling() {
        Pooling::None => {
            let message = "--pooling none has a vector for each token, for which only /embedding has a form";
            Err(ApiError::invalid(message))
        }
        _ => Ok(()),
    }
}

/// A vector for each text. A text that is too long is an error, unless `truncate` asks to cut it.
pub(super) async fn embed(call: Call) -> Result<Response, ApiError> {
    let started = Instant::now();
    let served = model(&call).await?;
    let load = started.elapsed();
    let fields = call.fields();
    let keep = keep_alive(&fields)?;
    let wanted = parse(&fields, &served)?;
    let dimensions = wanted.dimensions;
    let usage = call.caller.enter()?;
    let tokens = wanted.tokenized(&served).await?;
    let count: usize = tokens.iter().map(Vec::len).sum();
    keep.apply(&call, &served)?;
    usage.reserve(TokenNeed::exact(count))?;
    let mut vectors = match tokens.is_empty() {
        true => Embedded::default(),
        false => served.embed(EmbeddingTask::Embed, tokens, call.caller.client(), usage).await?,
    };
    if let Some(dimensions) = dimensions {
        vectors.iter_mut().for_each(|vector| shorten(vector, dimensions));
    }
    let name = fields.text("model")?.unwrap_or(&served.name);
    let answer = json!({
        "model": name,
        "embeddings": *vectors,
        "total_duration": started.elapsed().as_nanos() as u64,
        "load_duration": load.as_nanos() as u64,
        "prompt_eval_count": count,
    });
    Ok(vectors.written(&answer))
}

/// The request for the vector of one text, or of none.
pub(crate) fn parse_one(fields: &Fields<'_>) -> Result<EmbedRequest, ApiError> {
    let text = fields.text("prompt")?.filter(|text| !text.is_empty());
    Ok(EmbedRequest { texts: text.map(str::to_owned).into_iter().collect(), cuts: false, dimensions: None })
}

/// The vector of a text; of none, an empty one.
pub(super) async fn embeddings(call: Call) -> Result<Json<Value>, ApiError> {
    let served = model(&call).await?;
    let fields = call.fields();
    let keep = keep_alive(&fields)?;
    check_pooling(&served)?;
    let wanted = parse_one(&fields)?;
    keep.apply(&call, &served)?;
    if wanted.texts.is_empty() {
        return Ok(Json(json!({ "embedding": [] })));
    }
    let usage = call.caller.enter()?;
    let tokens = wanted.tokenized(&served).await?;
    usage.reserve(TokenNeed::exact(tokens.iter().map(Vec::len).sum()))?;
    let vectors = served.embed(EmbeddingTask::Embed, tokens, call.caller.client(), usage).await?;
    Ok(Json(json!({ "embedding": vectors.first() })))
}

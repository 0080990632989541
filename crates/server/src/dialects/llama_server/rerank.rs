//! `/rerank`: documents by how well they answer a query, in Jina's form or, with `texts`, in that of TEI.

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use quadriga_llm::{can_rank, pair_tokens};
use serde_json::{Value, json};

use crate::call::Call;
use crate::embedding::EmbeddingTask;
use crate::error::{ApiError, ErrorKind};
use crate::fields::Fields;
use crate::model::ServedModel;
use crate::openapi::schema::{self, answer, any_of, count, flag, list, number, text};
use crate::operation::caller::TokenNeed;

/// The most documents of a request.
const MAX_DOCUMENTS: usize = 2048;

/// A request for an order of documents.
#[derive(Clone, Debug)]
pub struct RankRequest {
    /// What the documents are to answer.
    query: String,
    documents: Vec<String>,
    /// Whether it has the form of TEI.
    is_tei: bool,
    /// The number of best documents that are returned.
    most: usize,
    /// Whether their texts are.
    with_texts: bool,
}

impl RankRequest {
    /// The tokens of the query with each document.
    pub fn pairs(&self, served: &ServedModel) -> Result<Vec<Vec<u32>>, ApiError> {
        let pair = |document: &String| {
            served.check_length(self.query.len() + document.len())?;
            Ok(pair_tokens(&served.model, &self.query, document)?)
        };
        self.documents.iter().map(pair).collect()
    }
}

/// The request that the fields of a body are.
pub fn parse(fields: &Fields<'_>) -> Result<RankRequest, ApiError> {
    let query = fields.required_text("query")?;
    let is_tei = fields.has("texts");
    if is_tei && fields.has("documents") {
        return Err(fields.error("documents", "cannot be used together with texts"));
    }
    let documents = documents(fields, if is_tei { "texts" } else { "documents" })?;
    let most = fields.count("top_n")?.unwrap_or(usize::MAX);
    let (of_tei, of_others) = (fields.flag("return_text")?, fields.flag("return_documents")?);
    let with_texts = if is_tei { of_tei } else { of_others }.unwrap_or(false);
    Ok(RankRequest { query: query.to_owned(), documents, is_tei, most, with_texts })
}

/// Sorts documents.
pub(super) async fn rerank(call: Call) -> Result<Response, ApiError> {
    let served = call.model().await?;
    let wanted = parse(&call.fields())?;
    if !can_rank(&served.model) {
        let message = format!("{} cannot rank: it has no classification head", served.name);
        return Err(ApiError::new(ErrorKind::Unsupported, message));
    }
    let usage = call.caller.enter()?;
    let of_model = Arc::clone(&served);
    let bytes = wanted.documents.iter().map(|document| wanted.query.len() + document.len()).sum();
    let work = move || wanted.pairs(&of_model).map(|pairs| (wanted, pairs));
    let (wanted, pairs) = served.tokenizing(bytes, work).await??;
    let RankRequest { documents, is_tei, most, with_texts, .. } = wanted;
    let tokens: usize = pairs.iter().map(Vec::len).sum();
    usage.reserve(TokenNeed::exact(tokens))?;
    let scores = served.embed(EmbeddingTask::Rank, pairs, call.caller.client(), usage).await?;
    let scores = scores.iter().map(|score| score.first().copied().unwrap_or(f32::NEG_INFINITY));
    let mut sorted: Vec<(usize, f32)> = scores.enumerate().collect();
    sorted.sort_by(|a, b| b.1.total_cmp(&a.1));
    sorted.truncate(most);
    let result = |(index, score): &(usize, f32)| {
        let text = documents.get(*index).filter(|_| with_texts);
        match (is_tei, text) {
            (true, None) => json!({ "index": index, "score": score }),
            (true, Some(text)) => json!({ "index": index, "score": score, "text": text }),
            (false, None) => json!({ "index": index, "relevance_score": score }),
            (false, Some(text)) => {
                json!({ "index": index, "relevance_score": score, "document": { "text": text } })
            }
        }
    };
    let results: Vec<Value> = sorted.iter().map(result).collect();
    if is_tei {
        return Ok(Json(Value::from(results)).into_response());
    }
    Ok(Json(json!({
        "model": served.name,
        "object": "list",
        "usage": { "prompt_tokens": tokens, "total_tokens": tokens },
        "results": results,
    }))
    .into_response())
}

/// Texts, or objects with a text.
fn documents(fields: &Fields<'_>, name: &str) -> Result<Vec<String>, ApiError> {
    let list = fields.list(name)?.ok_or_else(|| fields.missing(name))?;
    if list.is_empty() || list.len() > MAX_DOCUMENTS {
        return Err(fields.error(name, format!("must have from 1 to {MAX_DOCUMENTS} documents")));
    }
    let text = |(index, value): (usize, &Value)| match value {
        Value::String(text) => Ok(text.clone()),
        Value::Object(_) => Ok(fields.element(name, index, value)?.required_text("text")?.to_owned()),
        _ => Err(fields.error(name, "must be a list of texts")),
    };
    list.iter().enumerate().map(text).collect()
}

/// The body.
pub(super) fn request_schema() -> Value {
    let document = any_of([text(), schema::request(&["text"], json!({ "text": text() }), [])]);
    let documents = schema::with(list(document), json!({ "minItems": 1, "maxItems": MAX_DOCUMENTS }));
    let fields = json!({
        "query": text(),
        "documents": documents.clone(),
        "texts": documents,
        "top_n": count(),
        "return_documents": flag(),
        "return_text": flag(),
        "model": text(),
    });
    let either = json!({ "anyOf": [{ "required": ["documents"] }, { "required": ["texts"] }] });
    schema::with(schema::request(&["query"], fields, []), either)
}

/// The answer in both forms.
pub(super) fn answer_schema() -> Value {
    let own = answer(json!({ "index": count(), "relevance_score": number() }));
    let tei = answer(json!({ "index": count(), "score": number() }));
    any_of([answer(json!({ "model": text(), "results": list(own) })), list(tei)])
}

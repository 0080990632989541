//! `/v1/models`.

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use serde_json::{Value, json};

use crate::app::App;
use crate::error::{ApiError, ErrorKind};
use crate::model::ServedModel;
use crate::registry::ListedModel;

/// All models.
pub async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let data: Vec<Value> = app.models().list().iter().map(describe_listed).collect();
    Json(json!({ "object": "list", "data": data }))
}

/// One model.
pub async fn retrieve(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    // A name that is no text is none of any model.
    let Path(name) = name.map_err(|error| ApiError::field("model", format!("is no name: {error}")))?;
    let all = app.models().list();
    let is_alias =
        |listed: &ListedModel| listed.entry.as_ref().is_some_and(|entry| entry.aliases.contains(&name));
    let found =
        all.iter().find(|listed| listed.name == name).or_else(|| all.iter().find(|one| is_alias(one)));
    if found.is_none() && name == "sse" {
        // llama-server's stream of what models are doing.
        let message = "/models/sse is not supported: ask /models or /status";
        return Err(ApiError::new(ErrorKind::Unsupported, message));
    }
    found.map(|listed| Json(describe_listed(listed))).ok_or_else(|| ApiError::model_not_found(&name))
}

/// A model that is loaded, or what is known of one that is not.
fn describe_listed(listed: &ListedModel) -> Value {
    let aliases = listed.entry.as_ref().map(|entry| entry.aliases.clone()).unwrap_or_default();
    if let Some(served) = &listed.served {
        return describe(served, &aliases);
    }
    let modified = listed.entry.as_ref().and_then(|entry| entry.modified);
    let seconds =
        modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map_or(0, |time| time.as_secs());
    json!({
        "id": listed.name,
        "object": "model",
        "created": seconds,
        "owned_by": "quadriga",
        "aliases": aliases,
        "status": { "value": listed.state.name(), "failed": listed.failure.is_some() },
    })
}

fn describe(served: &ServedModel, aliases: &[String]) -> Value {
    let hyper = served.model.hyperparameters();
    let file = served.model.file();
    let vocabulary = served.model.tokenizer().map(|tokenizer| tokenizer.vocabulary().model.clone());
    let parameters: u64 = file.tensors().map(|tensor| tensor.shape().elements() as u64).sum();
    json!({
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "quadriga",
        "aliases": aliases,
        "max_model_len": served.context(),
        "status": { "value": "loaded" },
        "meta": {
            "vocab_type": vocabulary.ok(),
            "n_vocab": hyper.vocabulary,
            "n_ctx": served.context(),
            "n_ctx_train": hyper.context,
            "n_embd": hyper.width,
            "n_params": parameters,
            "size": file.byte_len(),
        },
    })
}

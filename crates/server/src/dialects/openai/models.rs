//! `/v1/models`.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use serde_json::{Value, json};

use crate::app::App;
use crate::dialects::time::rfc3339;
use crate::error::ApiError;
use crate::model::ServedModel;
use crate::registry::{ListedModel, ModelState};

/// All models.
pub async fn list(State(app): State<Arc<App>>, headers: HeaderMap) -> Json<Value> {
    app.models().refresh().await;
    let is_router = app.models().is_router();
    let describe = |listed: &ListedModel| in_form(describe_listed(listed, is_router), &headers);
    let data: Vec<Value> = app.models().list().iter().map(describe).collect();
    let mut all = json!({ "object": "list", "data": data });
    if let Some(object) = all.as_object_mut().filter(|_| is_of_anthropic(&headers)) {
        let id = |model: Option<&Value>| model.and_then(|model| model.get("id")).cloned();
        let ends = [("first_id", id(data.first())), ("last_id", id(data.last()))];
        object.extend(ends.map(|(name, id)| (name.to_owned(), id.unwrap_or_default())));
        object.insert("has_more".to_owned(), false.into());
    }
    Json(all)
}

/// Whether a client of Anthropic asks, whose models have other fields.
fn is_of_anthropic(headers: &HeaderMap) -> bool {
    headers.contains_key("anthropic-version")
}

/// The description of a model for whoever asks: for clients of Anthropic with the fields that they read.
fn in_form(mut model: Value, headers: &HeaderMap) -> Value {
    let created = Duration::from_secs(model.get("created").and_then(Value::as_u64).unwrap_or(0));
    let name = model.get("id").cloned().unwrap_or_default();
    if let Some(object) = model.as_object_mut().filter(|_| is_of_anthropic(headers)) {
        object.insert("type".to_owned(), "model".into());
        object.insert("display_name".to_owned(), name);
        object.insert("created_at".to_owned(), rfc3339(created).into());
    }
    model
}

/// One model.
pub async fn retrieve(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    // A name that is no text is none of any model.
    let Path(name) = name.map_err(|error| ApiError::field("model", format!("is no name: {error}")))?;
    app.models().refresh().await;
    let all = app.models().list();
    let is_alias =
        |listed: &ListedModel| listed.entry.as_ref().is_some_and(|entry| entry.aliases.contains(&name));
    let found =
        all.iter().find(|listed| listed.name == name).or_else(|| all.iter().find(|one| is_alias(one)));
    found
        .map(|listed| Json(in_form(describe_listed(listed, app.models().is_router()), &headers)))
        .ok_or_else(|| ApiError::model_not_found(&name))
}

/// A model that is loaded, or what is known of one that is not. Clients of llama-server take a server for one of several models, whose
/// changes they follow, if its models have a status.
fn describe_listed(listed: &ListedModel, is_router: bool) -> Value {
    let aliases = listed.entry.as_ref().map(|entry| entry.aliases.clone()).unwrap_or_default();
    let mut model = match &listed.served {
        Some(served) => describe(served, &aliases),
        None => describe_unloaded(listed, &aliases),
    };
    if let Some(object) = model.as_object_mut().filter(|_| is_router) {
        let status = match listed.state {
            ModelState::Loaded => json!({ "value": listed.state.name() }),
            _ => json!({ "value": listed.state.name(), "failed": listed.failure.is_some() }),
        };
        let architecture = json!({ "input_modalities": ["text"], "output_modalities": ["text"] });
        object.extend([("status".to_owned(), status), ("architecture".to_owned(), architecture)]);
    }
    model
}

fn describe_unloaded(listed: &ListedModel, aliases: &[String]) -> Value {
    let modified = listed.entry.as_ref().and_then(|entry| entry.modified);
    let seconds =
        modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map_or(0, |time| time.as_secs());
    json!({
        "id": listed.name,
        "object": "model",
        "created": seconds,
        "owned_by": "quadriga",
        "aliases": aliases,
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

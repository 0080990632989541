//! `/v1/models`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};

use crate::app::App;
use crate::error::ApiError;
use crate::model::ServedModel;

/// All models.
pub async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let data: Vec<Value> = app.models().loaded().iter().map(|served| describe(served)).collect();
    Json(json!({ "object": "list", "data": data }))
}

/// One model.
pub async fn retrieve(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let all = app.models().loaded();
    let found = all.iter().find(|served| served.name == name);
    found.map(|served| Json(describe(served))).ok_or_else(|| ApiError::model_not_found(&name))
}

fn describe(served: &ServedModel) -> Value {
    let hyper = served.model.hyperparameters();
    let file = served.model.file();
    let vocabulary = served.model.tokenizer().map(|tokenizer| tokenizer.vocabulary().model.clone());
    let parameters: u64 = file.tensors().map(|tensor| tensor.shape().elements() as u64).sum();
    json!({
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "quadriga",
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

//! `/props`: the model, and the defaults of requests.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Query, Request, State};
use quadriga_gguf::Summary;
use serde_json::{Value, json};

use super::completion_answer::generation_settings;
use crate::app::App;
use crate::body;
use crate::dialects::openai::FINGERPRINT;
use crate::error::ApiError;
use crate::generation::{Generation, Prompt};
use crate::model::ServedModel;
use crate::openapi::schema::{answer, any_object, count, flag, list, text};
use crate::template_abilities::TemplateAbilities;

/// Properties of the model that `?model=` names, or of the first one.
pub(super) async fn properties(
    State(app): State<Arc<App>>,
    Query(mut query): Query<BTreeMap<String, String>>,
) -> Result<Json<Value>, ApiError> {
    let first = || app.models().loaded().first().map(|served| served.name.clone());
    let name = query.remove("model").or_else(first);
    let served = app.models().find_loaded(name.as_deref()).await?;
    Ok(Json(describe(&served)))
}

fn describe(served: &ServedModel) -> Value {
    let defaults = Generation {
        sampling: served.defaults.sampling.clone(),
        max_tokens: served.defaults.max_tokens,
        stops: served.defaults.stops.clone(),
        ..Generation::new(Prompt::Tokens(Vec::new()))
    };
    let file = served.model.file();
    let template = served.model.template();
    let name = |token: Option<u32>| token.map(|token| served.token_text(token)).unwrap_or_default();
    let vocabulary = served.model.tokenizer().ok().map(|tokenizer| tokenizer.vocabulary());
    let source = template.map(|template| template.source()).unwrap_or_default();
    let found = || template.map(TemplateAbilities::of).unwrap_or_default();
    let abilities = *served.template_abilities.get_or_init(found);
    json!({
        "default_generation_settings": {
            "n_ctx": served.context(),
            "params": generation_settings(&defaults),
        },
        "total_slots": served.options.engine.sequences,
        "model_alias": served.name,
        "model_path": file.paths().next().map(|path| path.display().to_string()).unwrap_or_default(),
        "model_ftype": Summary::of(file).file_type.unwrap_or_default(),
        "chat_template": source,
        "chat_template_caps": {
            "supports_string_content": abilities.string_content,
            "supports_system_role": abilities.system_role,
            "supports_tools": abilities.tools,
            "supports_tool_calls": abilities.tool_calls,
            "supports_parallel_tool_calls": abilities.parallel_tool_calls,
            "supports_object_arguments": abilities.object_arguments,
            "supports_preserve_reasoning": abilities.preserve_reasoning,
        },
        "modalities": { "vision": false, "audio": false },
        "bos_token": name(vocabulary.and_then(|vocabulary| vocabulary.bos)),
        "eos_token": name(vocabulary.and_then(|vocabulary| vocabulary.eos)),
        "build_info": FINGERPRINT,
        "is_sleeping": false,
    })
}

/// Those of `--lora` are a part of the model, and have no scales that could be changed: none is listed.
pub(super) async fn adapters() -> Json<Value> {
    Json(json!([]))
}

/// Sets the scales of adapters, none of which can be changed: a list that names none is accepted.
pub(super) async fn set_adapters(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let (body, _room) = body::read_value(request, &app).await?;
    check_adapters(&body)?;
    Ok(Json(json!({ "success": true })))
}

/// Refuses a list that names adapters.
pub(crate) fn check_adapters(body: &Value) -> Result<(), ApiError> {
    let Value::Array(adapters) = body else {
        return Err(ApiError::invalid("the body must be a list of adapters"));
    };
    match adapters.first() {
        None => Ok(()),
        Some(adapter) => {
            let id = adapter.get("id").cloned().unwrap_or(Value::Null);
            Err(ApiError::field(
                "[0].id",
                format!(
                    "is {id}; adapters are a part of the model (--lora), and their scales cannot be changed"
                ),
            ))
        }
    }
}

/// The answer of a change of adapters.
pub(super) fn success_schema() -> Value {
    answer(json!({ "success": flag() }))
}

/// The answer of `/props`.
pub(super) fn schema() -> Value {
    answer(json!({
        "default_generation_settings": answer(json!({ "n_ctx": count(), "params": any_object() })),
        "total_slots": count(),
        "model_alias": text(),
        "model_path": text(),
        "chat_template": text(),
        "chat_template_caps": json!({ "type": "object", "additionalProperties": flag() }),
        "modalities": answer(json!({ "vision": flag(), "audio": flag() })),
        "bos_token": text(),
        "eos_token": text(),
        "build_info": text(),
        "is_sleeping": flag(),
    }))
}

/// The answer of `/lora-adapters`.
pub(super) fn adapters_schema() -> Value {
    list(any_object())
}

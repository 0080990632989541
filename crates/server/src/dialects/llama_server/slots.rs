//! `/slots`: the sequences that are being computed, and room for others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::extract::{Query, State};
use serde_json::{Value, json};

use super::completion_answer::settings;
use crate::app::App;
use crate::error::{ApiError, ErrorKind};
use crate::model::{FlightOptions, ServedModel};
use crate::observed::ObservedModel;
use crate::openapi::schema::{answer, any_object, count, flag, integer, list, text};

/// The slots of all models, or of the one that `?model=` names.
pub(super) async fn slots(
    State(app): State<Arc<App>>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Result<Json<Value>, ApiError> {
    if !app.interface().slots {
        return Err(ApiError::new(ErrorKind::Unsupported, "/slots is disabled (--no-slots)"));
    }
    let named = match query.get("model") {
        Some(name) => Some(app.models().describe(Some(name)).await?),
        None => None,
    };
    let is_asked = |served: &&ObservedModel| named.as_ref().is_none_or(|named| named.name == served.name);
    let loaded = app.models().loaded();
    let all: Vec<Value> = loaded.iter().filter(is_asked).flat_map(|served| of_model(served)).collect();
    let wants_room = query.get("fail_on_no_slot").is_some_and(|value| value == "1");
    let is_free = |slot: &Value| slot.get("is_processing") == Some(&json!(false));
    if wants_room && !all.iter().any(is_free) {
        return Err(ApiError::new(ErrorKind::Unavailable, "no slot available"));
    }
    Ok(Json(all.into()))
}

fn of_model(served: &ServedModel) -> Vec<Value> {
    let flights = served.in_flight();
    (0..served.options.engine.sequences)
        .map(|id| {
            let flight = flights.iter().find(|(_, flight)| flight.slot.held() == Some(id));
            let options = flight.and_then(|(_, flight)| flight.options.as_deref());
            let params = options.map_or_else(|| json!({}), params);
            let decoded = flight.map_or(0, |(_, flight)| flight.generated.load(Ordering::Relaxed));
            json!({
                "id": id,
                "model": served.name,
                "id_task": flight.map_or(-1, |(number, _)| i64::try_from(*number).unwrap_or(-1)),
                "n_ctx": served.context(),
                "speculative": served.options.lookup > 0,
                "is_processing": flight.is_some(),
                "n_prompt_tokens": flight.map_or(0, |(_, flight)| flight.prompt_tokens),
                "params": params,
                "next_token": { "has_next_token": flight.is_some(), "n_decoded": decoded },
            })
        })
        .collect()
}

/// The options of an answer by llama-server's names.
fn params(options: &FlightOptions) -> Value {
    settings(&options.sampling, options.max_tokens, &options.stops, options.logprobs)
}

/// The answer.
pub(super) fn schema() -> Value {
    list(answer(
        json!({ "id": count(), "model": text(), "id_task": integer(), "n_ctx": count(), "is_processing": flag(), "params": any_object() }),
    ))
}

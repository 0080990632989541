//! What the server is doing: `/health`, `/status`, `/metrics`, and pictures of the plan.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::extract::{Query, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::app::App;
use crate::call::Call;
use crate::error::{ApiError, ErrorKind};
use crate::fields::Fields;
use crate::model::{PlanPictures, ServedModel};
use crate::openapi::schema::{answer, count, flag, list, nullable, number, one_of, request, text};
use crate::openapi::{Answer, DescribedRoutes, Group, Operation};
use crate::operation::exposition::Exposition;
use crate::operation::process;

/// The routes.
pub(crate) fn routes() -> DescribedRoutes {
    let group = Group::Server;
    let get = |id, summary, answer| Operation { id, group, summary, request: None, answer };
    let change = |id, summary| Operation {
        id,
        group,
        summary,
        request: Some(model_request),
        answer: Answer::Json(success),
    };
    DescribedRoutes::default()
        .get(
            &["/health", "/v1/health", "/ready"],
            health,
            get("health", "Whether the server takes requests", Answer::Json(health_schema)),
        )
        .get(&["/status"], status, get("status", "What the server is doing", Answer::Json(status_schema)))
        .get(
            &["/metrics"],
            metrics,
            get(
                "metrics",
                "Counters and histograms in the text format of Prometheus",
                Answer::Text("text/plain"),
            ),
        )
        .get(
            &["/plan.svg"],
            plan_svg,
            get("planSvg", "The plan of a loaded model as a drawing", Answer::Text("image/svg+xml")),
        )
        .get(&["/plan"], plan, get("plan", "The plan of a loaded model as a page", Answer::Text("text/html")))
        .post(
            &["/models/load"],
            load_model,
            change("loadModel", "Loads a model, and answers once that is done"),
        )
        .post(
            &["/models/unload"],
            unload_model,
            change("unloadModel", "Unloads a model; answers that it is generating are finished"),
        )
}

fn health_schema() -> Value {
    answer(json!({ "status": one_of(&["ok"]) }))
}

fn model_request() -> Value {
    request(&["model"], json!({ "model": text() }), [])
}

fn success() -> Value {
    answer(json!({ "success": flag() }))
}

/// The first model's state, and that of all.
fn status_schema() -> Value {
    let unloaded = json!({ "model": text(), "state": text(), "failure": nullable(&text()) });
    answer(json!({
        "model": nullable(&text()),
        "uptime_s": number(),
        "version": text(),
        "models": list(model_schema()),
        "unloaded": list(answer(unloaded)),
    }))
}

fn model_schema() -> Value {
    let one = json!({
        "id": count(),
        "state": one_of(&["running", "waiting"]),
        "prompt_tokens": count(),
        "generated_tokens": count(),
        "age_s": number(),
    });
    let cache = json!({
        "slots": count(),
        "lookups": count(),
        "hits": count(),
        "uploads": count(),
        "bytes": count(),
    });
    answer(json!({
        "model": text(),
        "created": count(),
        "context": count(),
        "steps": count(),
        "running": count(),
        "waiting": count(),
        "pages": answer(json!({ "total": count(), "used": count(), "cached": count() })),
        "host_bytes": count(),
        "computed_tokens": count(),
        "cached_tokens": count(),
        "preempted": count(),
        "guessed": count(),
        "guessed_right": count(),
        "expert_cache": nullable(&answer(cache)),
        "tok_s": number(),
        "requests": list(answer(one)),
    }))
}

async fn health(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    if app.is_stopping() {
        return Err(ApiError::new(ErrorKind::Unavailable, "the server is stopping"));
    }
    if app.is_starting() {
        return Err(ApiError::new(ErrorKind::Unavailable, "Loading model"));
    }
    if let Some(reason) = app.models().unusable() {
        return Err(ApiError::new(ErrorKind::Unavailable, reason));
    }
    Ok(Json(json!({ "status": "ok" })))
}

async fn status(State(app): State<Arc<App>>) -> Json<Value> {
    app.models().refresh().await;
    let models = app.models().loaded();
    let all: Vec<Value> = models.iter().map(|served| model_status(served)).collect();
    let unloaded = app.models().list().into_iter().filter(|listed| listed.served.is_none());
    let unloaded: Vec<Value> = unloaded
        .map(
            |listed| json!({ "model": listed.name, "state": listed.state.name(), "failure": listed.failure }),
        )
        .collect();
    // The first model is described at the top, too: most servers have one.
    let mut status = all.first().cloned().unwrap_or_else(|| json!({ "model": null }));
    if let Some(object) = status.as_object_mut() {
        object.insert("uptime_s".to_owned(), app.started().elapsed().as_secs_f64().into());
        object.insert("version".to_owned(), env!("CARGO_PKG_VERSION").into());
        object.insert("models".to_owned(), all.into());
        object.insert("unloaded".to_owned(), unloaded.into());
    }
    Json(status)
}

fn model_status(served: &ServedModel) -> Value {
    let state = served.state();
    let requests: Vec<Value> = served
        .in_flight()
        .iter()
        .map(|(number, flight)| {
            let generated = flight.generated.load(Ordering::Relaxed);
            // Those whose prompt is being computed have a slot, too.
            let running = flight.slot.number().is_some();
            json!({
                "id": number,
                "state": if running { "running" } else { "waiting" },
                "prompt_tokens": flight.prompt_tokens,
                "generated_tokens": generated,
                "age_s": flight.since.elapsed().as_secs_f64(),
            })
        })
        .collect();
    json!({
        "model": served.name,
        "created": served.created,
        "context": served.context(),
        "steps": state.steps,
        "running": state.running,
        "waiting": state.waiting,
        "pages": { "total": state.pages, "used": state.used_pages, "cached": state.cached_pages },
        "host_bytes": state.host_bytes,
        "computed_tokens": state.computed,
        "cached_tokens": state.cached,
        "preempted": state.preempted,
        "guessed": state.guessed,
        "guessed_right": state.guessed_right,
        "expert_cache": state.expert_cache,
        "tok_s": served.metrics.tokens_per_second(),
        "requests": requests,
    })
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let mut out = Exposition::default();
    let in_use = app.models().in_use();
    for (name, metrics) in app.models().metrics() {
        let states: Vec<_> =
            in_use.iter().filter(|served| served.name == name).map(|served| served.state()).collect();
        metrics.write(&name, &states, &mut out);
    }
    app.requests().write(&mut out);
    let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    out.sample(
        "quadriga:runtime_tasks",
        "gauge",
        "Tasks that live: one for each connection, and a few",
        "",
        tasks,
    );
    process::write(&mut out);
    let text = out.text();
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// The model that a body names.
pub(crate) fn named_model<'f>(fields: &Fields<'f>) -> Result<&'f str, ApiError> {
    fields.required_text("model")
}

/// Loads the model that the body names, and answers once that is done.
async fn load_model(call: Call) -> Result<Json<Value>, ApiError> {
    let fields = call.fields();
    call.app.models().load_named(named_model(&fields)?).await?;
    Ok(Json(json!({ "success": true })))
}

/// Unloads the model that the body names; answers that it is generating are finished.
async fn unload_model(call: Call) -> Result<Json<Value>, ApiError> {
    call.app.models().refresh().await;
    call.app.models().unload(named_model(&call.fields())?)?;
    Ok(Json(json!({ "success": true })))
}

/// The part of a URL behind `?`.
type QueryFields = Query<BTreeMap<String, String>>;

async fn plan_svg(State(app): State<Arc<App>>, query: QueryFields) -> Result<Response, ApiError> {
    let pictures = pictures(&app, &query).await?;
    // A picture that is opened by itself may style itself, and nothing else.
    let headers = [
        (header::CONTENT_TYPE, "image/svg+xml"),
        (header::CONTENT_SECURITY_POLICY, "default-src 'none'; style-src 'unsafe-inline'"),
    ];
    Ok((headers, pictures.svg).into_response())
}

async fn plan(State(app): State<Arc<App>>, query: QueryFields) -> Result<Response, ApiError> {
    let pictures = pictures(&app, &query).await?;
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (
            header::CONTENT_SECURITY_POLICY,
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; sandbox allow-scripts",
        ),
    ];
    Ok((headers, pictures.html).into_response())
}

/// Those of the model that `?model=` names, or of the first one that has some.
async fn pictures(app: &App, query: &QueryFields) -> Result<PlanPictures, ApiError> {
    let models = match query.get("model") {
        Some(name) => app.models().describe(Some(name)).await?.served.into_iter().collect(),
        None => app.models().loaded(),
    };
    let found = models.iter().find_map(|served| served.pictures.clone());
    found.ok_or_else(|| ApiError::new(ErrorKind::NotFound, "there is no picture of the plan"))
}

//! All routes, and what every request goes through.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{Method, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use bytes::Bytes;

use crate::app::App;
use crate::dialects::{Dialect, anthropic, llama_server, ollama, openai};
use crate::error::{ApiError, ErrorKind};
use crate::openapi::schema::any_object;
use crate::openapi::{Answer, DescribedRoutes, Group, Operation};
use crate::operation::auth::Keys;
use crate::{page, passage, status};

/// All routes with their descriptions.
pub(crate) fn described() -> DescribedRoutes {
    DescribedRoutes::default()
        .merge(openai::routes())
        .merge(anthropic::routes())
        .merge(ollama::routes())
        .merge(llama_server::routes())
        .merge(status::routes())
        .describe(
            "get",
            &["/openapi.json"],
            Operation {
                id: "openapi",
                group: Group::Server,
                summary: "This description",
                request: None,
                answer: Answer::Json(any_object),
            },
        )
}

/// The server's routes.
pub(crate) fn router(app: &Arc<App>) -> Router {
    let described = described();
    let prefix = &app.interface().prefix;
    let document = described.document(prefix, |path| Dialect::of_path(path).error_schema());
    let document = Bytes::from(document.to_string());
    let openapi = move || async move { ([(header::CONTENT_TYPE, "application/json")], document) };
    let routes = Router::new()
        .merge(page::routes())
        .merge(described.into_router())
        .route("/openapi.json", get(openapi))
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(Arc::clone(app), refuse_when_stopping))
        .layer(middleware::from_fn_with_state(Arc::clone(app), check_key))
        .layer(middleware::from_fn_with_state(Arc::clone(app), passage::check_origin))
        .layer(middleware::from_fn_with_state(Arc::clone(app), passage::check_host))
        .layer(middleware::from_fn_with_state(Arc::clone(app), passage::finish))
        .with_state(Arc::clone(app));
    match app.interface().prefix.as_str() {
        "" => routes,
        prefix => {
            let nothing = Router::new()
                .fallback(not_found)
                .layer(middleware::from_fn_with_state(Arc::clone(app), passage::finish));
            Router::new().nest_service(prefix, routes).fallback_service(nothing)
        }
    }
}

/// Routes of Ollama that change models.
const MODEL_ROUTES: [&str; 5] = ["/api/pull", "/api/push", "/api/copy", "/api/delete", "/api/create"];

async fn not_found(request: Request) -> ApiError {
    let path = request.uri().path();
    if MODEL_ROUTES.contains(&path) {
        let message = format!(
            "{path} is not supported: models are GGUF files of --models-dir, which `quadriga pull` downloads"
        );
        return ApiError::new(ErrorKind::Unsupported, message);
    }
    if let Some((_, instead)) = ABSENT.iter().find(|(absent, _)| is_below(path, absent)) {
        return ApiError::new(ErrorKind::Unsupported, format!("{path} is not supported: {instead}"));
    }
    ApiError::new(ErrorKind::NotFound, format!("no route {} {}", request.method(), path))
}

/// Routes of llama-server that are not there, with what there is instead. Those below them are not there either.
const ABSENT: [(&str, &str); 4] = [
    ("/slots", "slots are not saved one by one; prefixes are kept by --cache-ram and --cache-file"),
    ("/v1/stream", "a client that lost its connection asks again, and finds its prompt in the KV cache"),
    ("/v1/streams", "a client that lost its connection asks again, and finds its prompt in the KV cache"),
    ("/v1/chat/completions/control", "a client that closes its connection ends its answer"),
];

/// Whether a path is another one, or one below it.
fn is_below(path: &str, other: &str) -> bool {
    path.strip_prefix(other).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

async fn wrong_method(request: Request) -> ApiError {
    let message = format!("{} has no method {}", request.uri().path(), request.method());
    ApiError::new(ErrorKind::Method, message)
}

/// A server that is about to stop answers what it has begun, and nothing else.
async fn refuse_when_stopping(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    if app.is_stopping() && request.method() == Method::POST {
        let error = ApiError::new(ErrorKind::Unavailable, "the server is stopping");
        return error.retry_after(std::time::Duration::from_secs(5)).into_response();
    }
    next.run(request).await
}

/// Routes that everybody may read.
const PUBLIC: &[&str] = &["/", "/health", "/v1/health", "/ready"];

/// Finds out who asks, or refuses the request.
async fn check_key(
    State(app): State<Arc<App>>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let path = request.uri().path();
    let public = PUBLIC.contains(&path) || request.method() == Method::OPTIONS || page::is_asset(path);
    match app.keys().caller(request.headers()) {
        Some(caller) => {
            request.extensions_mut().insert(caller.with_answer_memory(app.answer_memory()));
        }
        None if public => {}
        None => {
            let message = match Keys::are_in(request.headers()) {
                true => "invalid API key",
                false => "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
            };
            return Err(ApiError::new(ErrorKind::Authentication, message));
        }
    }
    Ok(next.run(request).await)
}

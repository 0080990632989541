//! All routes, and what every request goes through.

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};

use crate::app::App;
use crate::call::new_id;
use crate::dialects::{Dialect, openai};
use crate::error::{ApiError, ErrorKind};
use crate::{page, status};

/// The header that identifies a request in logs of both sides.
const REQUEST_ID: &str = "x-request-id";

/// The server's routes.
pub(crate) fn router(app: &Arc<App>) -> Router {
    Router::new()
        .merge(page::routes())
        .merge(status::routes())
        .merge(openai::routes())
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(Arc::clone(app), refuse_when_stopping))
        .layer(middleware::from_fn_with_state(Arc::clone(app), check_key))
        .layer(middleware::from_fn(finish))
        .with_state(Arc::clone(app))
}

async fn not_found() -> ApiError {
    ApiError::new(ErrorKind::NotFound, "File Not Found")
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
            request.extensions_mut().insert(caller);
        }
        None if public => {}
        None => {
            let message = "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY";
            return Err(ApiError::new(ErrorKind::Authentication, message));
        }
    }
    Ok(next.run(request).await)
}

/// Gives every request an identifier, writes errors in the form of its dialect, and logs it.
async fn finish(request: Request, next: Next) -> Response {
    let started = Instant::now();
    let dialect = Dialect::of_path(request.uri().path());
    let id = request_id(&request);
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let mut response = next.run(request).await;
    let error = response.extensions_mut().remove::<ApiError>();
    if let Some(error) = &error {
        let body = dialect.error_body(error, Some(&id)).to_string();
        *response.body_mut() = Body::from(body);
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    }
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    let milliseconds = started.elapsed().as_millis() as u64;
    tracing::info!(
        request = id,
        method = %method,
        path,
        status = response.status().as_u16(),
        milliseconds,
        error = error.as_ref().map(|error| error.message.as_str()),
        "request"
    );
    response
}

/// The client's own identifier, if it is a sane one, or a new one.
fn request_id(request: &Request) -> String {
    let own = request.headers().get(REQUEST_ID).and_then(|value| value.to_str().ok());
    let is_sane = |id: &&str| {
        !id.is_empty() && id.len() <= 128 && id.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'"')
    };
    own.filter(is_sane).map_or_else(|| new_id("req_"), str::to_owned)
}

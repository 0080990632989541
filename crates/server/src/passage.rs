//! What every request passes on its way in and out: its origin is checked, it gets an identifier, a span and a line in the log, and
//! its error the form of its dialect.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tracing::{Instrument, Span};

use crate::app::App;
use crate::body::PROMPTS;
use crate::call::{RequestId, new_id};
use crate::dialects::Dialect;
use crate::error::{ApiError, ErrorKind};
use crate::operation::exchange::{OpenAnswer, StreamProbe};
use crate::operation::hosts;
use crate::operation::origins::is_foreign;
use crate::stream::StreamFailure;

/// The header that identifies a request in logs of both sides.
const REQUEST_ID: &str = "x-request-id";

/// The name of the same header for clients of Anthropic's interface.
const ANTHROPIC_REQUEST_ID: &str = "request-id";

/// Characters of a text of the client's that the log has: paths and names of fields are shorter.
const LOGGED: usize = 200;

/// Refuses requests under the name of another site, with which a browser would be made to use the server of its machine.
pub(crate) async fn check_host(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let local = app.is_local() && app.keys().count() == 0;
    hosts::check(&request, local, app.hosts(), app.origins())?;
    Ok(next.run(request).await)
}

/// Answers a browser's question whether a page may use the server, and refuses requests of pages that may not: a browser would
/// send them even if it does not show the answer.
pub(crate) async fn check_origin(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let Some(origin) = request.headers().get(header::ORIGIN).cloned() else { return next.run(request).await };
    let Some(allowed) = app.origins().allowed(&origin) else {
        let changes = !matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
        if changes && is_foreign(&origin, request.headers()) {
            let origin = String::from_utf8_lossy(origin.as_bytes());
            let message =
                format!("pages of {origin} may not use this server; --cors-origins {origin} allows it");
            return ApiError::new(ErrorKind::Forbidden, message).into_response();
        }
        return next.run(request).await;
    };
    let asks = request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let wanted = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let mut response = if asks { StatusCode::NO_CONTENT.into_response() } else { next.run(request).await };
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
    headers.append(header::VARY, HeaderValue::from_static("origin"));
    if asks {
        let methods = HeaderValue::from_static("GET, POST, DELETE, OPTIONS");
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
        if let Some(wanted) = wanted {
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted);
        }
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("86400"));
    } else {
        let exposed = HeaderValue::from_static("x-request-id, request-id, retry-after");
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
    }
    response
}

/// Gives every request an identifier, writes errors in the form of its dialect, and logs the request once its answer is complete.
pub(crate) async fn finish(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let dialect = Dialect::of_path(request.uri().path());
    let id = request_id(&request);
    request.extensions_mut().insert(RequestId(id.clone()));
    let span = tracing::info_span!(
        "request",
        id,
        method = %request.method(),
        path = beginning(request.uri().path()),
        status = tracing::field::Empty,
        traceparent = request.headers().get("traceparent").and_then(|value| value.to_str().ok()).map(beginning),
    );
    app.requests().begin();
    let is_head = request.method() == Method::HEAD;
    let answer = request.extensions_mut().remove::<Arc<OpenAnswer>>();
    let mut record = RequestRecord {
        app,
        answer,
        span: span.clone(),
        started: Instant::now(),
        status: None,
        error: None,
        field: None,
        failure: None,
        sent: 0,
        complete: false,
    };
    let mut response = next.run(request).instrument(span).await;
    let error = response.extensions_mut().remove::<ApiError>();
    if let Some(error) = &error {
        // The message may have values of the request in it.
        tracing::info!(target: PROMPTS, reason = error.message, "request refused");
        let body = dialect.error_body(error, Some(&id)).to_string();
        *response.body_mut() = Body::from(body);
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    }
    if let Ok(value) = HeaderValue::from_str(&id) {
        if matches!(dialect, Dialect::Anthropic) {
            response.headers_mut().insert(ANTHROPIC_REQUEST_ID, value.clone());
        }
        response.headers_mut().insert(REQUEST_ID, value);
    }
    record.status = Some(response.status().as_u16());
    record.field =
        error.as_ref().and_then(|error| error.param.as_deref().map(|field| beginning(field).to_owned()));
    record.error = error.map(|error| error.logged().to_owned());
    record.failure = response.extensions_mut().remove::<StreamFailure>();
    if let Some(answer) = &record.answer {
        answer.note_reply(response.extensions_mut().remove::<StreamProbe>());
    }
    // Nobody polls a body that is empty, or that the method or the status leaves out.
    record.complete = is_head || http_body::Body::is_end_stream(response.body());
    response.map(|body| Body::new(RecordedBody { body, record }))
}

/// The beginning of a text that a client has chosen, for the log.
fn beginning(text: &str) -> &str {
    text.char_indices().nth(LOGGED).and_then(|(end, _)| text.get(..end)).unwrap_or(text)
}

/// The client's own identifier, if it is a sane one, or a new one.
fn request_id(request: &Request) -> String {
    let own = request.headers().get(REQUEST_ID).and_then(|value| value.to_str().ok());
    let is_sane = |id: &&str| {
        !id.is_empty() && id.len() <= 128 && id.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'"')
    };
    own.filter(is_sane).map_or_else(|| new_id("req_"), str::to_owned)
}

/// A request until its answer is complete, or its client is gone.
struct RequestRecord {
    app: Arc<App>,
    /// Tells the connection that it is not complete.
    answer: Option<Arc<OpenAnswer>>,
    span: Span,
    started: Instant,
    /// `None` as long as there is no answer.
    status: Option<u16>,
    error: Option<String>,
    /// The field that is wrong.
    field: Option<String>,
    /// Why a stream failed that had begun.
    failure: Option<StreamFailure>,
    sent: u64,
    complete: bool,
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        self.app.requests().end(self.status);
        let _entered = self.span.enter();
        if let Some(status) = self.status {
            self.span.record("status", status);
        }
        let failure = self.failure.as_ref().and_then(StreamFailure::reason);
        let milliseconds = self.started.elapsed().as_millis() as u64;
        tracing::info!(
            status = self.status,
            milliseconds,
            bytes = self.sent,
            error = self.error.as_deref().or(failure),
            field = self.field,
            "{}",
            match (self.complete, failure) {
                (true, None) => "answered",
                (true, Some(_)) => "the stream ended with an error",
                (false, _) => "the client is gone",
            },
        );
    }
}

/// A body that is polled within the span of its request.
struct RecordedBody {
    body: Body,
    record: RequestRecord,
}

impl http_body::Body for RecordedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let span = self.record.span.clone();
        let _entered = span.enter();
        let frame = Pin::new(&mut self.body).poll_frame(context);
        match &frame {
            Poll::Ready(Some(Ok(frame))) => {
                self.record.sent += frame.data_ref().map_or(0, |data| data.len() as u64);
                self.record.complete |= self.body.is_end_stream();
            }
            Poll::Ready(None) => self.record.complete = true,
            Poll::Ready(Some(Err(_))) | Poll::Pending => {}
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

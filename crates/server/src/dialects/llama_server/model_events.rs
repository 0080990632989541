//! `/models/sse`: what becomes of the models of a server that has several.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use bytes::Bytes;
use serde_json::{Value, json};

use crate::app::App;
use crate::error::{ApiError, ErrorKind};
use crate::model_changes::{Learned, ModelChange, ModelState, Subscription};
use crate::operation::exchange::StreamProbe;
use crate::stream::{Chunks, StreamBuffer, StreamFormat, streamed};

/// Streams a line for each model that is loaded or unloaded from now on.
pub(super) async fn follow(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    app.models().refresh().await;
    if !app.models().is_router() {
        let message = "/models/sse is for servers of several models (--models-dir): this one has one";
        return Err(ApiError::new(ErrorKind::Unsupported, message));
    }
    let too_many = || {
        let message = "too many clients follow /models/sse; ask /models or /status";
        ApiError::new(ErrorKind::TooMany, message).retry_after(Duration::from_secs(60))
    };
    let subscription = app.models().subscribe().ok_or_else(too_many)?;
    let probe = StreamProbe::default();
    let events = ModelEvents { subscription, app, probe: Arc::clone(&probe) };
    Ok(streamed(events, StreamFormat::Events, probe))
}

/// The events of one client. Those that it has not read yet are not kept for it.
struct ModelEvents {
    subscription: Subscription,
    app: Arc<App>,
    probe: StreamProbe,
}

impl Chunks for ModelEvents {
    async fn next(mut self) -> Option<(Bytes, ModelEvents)> {
        let mut out = StreamBuffer::new(StreamFormat::Events);
        tokio::select! {
            biased;
            () = self.app.stopped() => return None,
            learned = self.subscription.next() => out.json(&event(&learned?)),
            () = tokio::time::sleep(self.app.limits().ping) => out.comment("ping"),
            () = self.probe.notified() => out.comment("ping"),
        }
        Some((out.into_bytes(), self))
    }
}

/// The event of llama-server for a change. Clients look at all models again after that of a list that was read anew.
fn event(learned: &Learned) -> Value {
    let ModelChange { model, state, failed } = match learned {
        Learned::Change(change) => change,
        Learned::Missed => return json!({ "model": "*", "event": "models_reload" }),
    };
    let mut data = json!({ "status": state.name() });
    if let Some(data) = data.as_object_mut().filter(|_| *state == ModelState::Unloaded) {
        data.insert("exit_code".to_owned(), i32::from(*failed).into());
    }
    json!({ "model": model, "event": "status_change", "data": data })
}

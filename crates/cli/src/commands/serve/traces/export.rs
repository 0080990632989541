//! Sends spans to a collector, over OTLP in JSON.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::record::SpanRecord;
use crate::failure::{Failure, Outcome};

/// The time that a collector has to answer.
const COLLECTOR_TIME: Duration = Duration::from_secs(10);

/// Spans are sent after so long, or when there are so many.
const EXPORT_EVERY: Duration = Duration::from_secs(2);
const EXPORT_SPANS: usize = 512;

/// What the thread that sends gets.
pub(super) enum Message {
    Span(Box<SpanRecord>),
    /// Sends what is left, and ends.
    Stop,
}

/// Where spans go.
pub(super) struct Collector {
    agent: ureq::Agent,
    url: String,
    headers: Vec<(String, String)>,
    service: String,
}

impl Collector {
    /// The collector of the command line, or of OpenTelemetry's own variables; `None` if there is none.
    pub(super) fn find(endpoint: Option<&str>) -> Outcome<Option<Collector>> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let whole = variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT");
        let base = endpoint.map(str::to_owned).or_else(|| variable("OTEL_EXPORTER_OTLP_ENDPOINT"));
        let url = match (endpoint.is_none().then_some(whole).flatten(), base) {
            (Some(whole), _) => whole,
            (None, Some(base)) => {
                let base = base.trim_end_matches('/');
                if base.ends_with("/v1/traces") { base.to_owned() } else { format!("{base}/v1/traces") }
            }
            (None, None) => return Ok(None),
        };
        if !url.starts_with("http://") && !url.starts_with("https://")
            || url.parse::<ureq::http::Uri>().is_err()
        {
            let wanted = "must be the address of a collector, such as http://127.0.0.1:4318";
            return Err(Failure::Usage(format!("--otlp-endpoint {url:?}: {wanted}")));
        }
        let headers = variable("OTEL_EXPORTER_OTLP_HEADERS").unwrap_or_default();
        let pair = |pair: &str| {
            let (name, value) = pair.split_once('=')?;
            Some((name.trim().to_owned(), value.trim().to_owned()))
        };
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(COLLECTOR_TIME))
            .user_agent(concat!("quadriga/", env!("CARGO_PKG_VERSION")))
            .build();
        Ok(Some(Collector {
            agent: config.new_agent(),
            url,
            headers: headers.split(',').filter_map(pair).collect(),
            service: variable("OTEL_SERVICE_NAME").unwrap_or_else(|| "quadriga".to_owned()),
        }))
    }

    /// Sends spans until it is told to stop.
    pub(super) fn run(self, inbox: &Receiver<Message>) {
        let mut spans: Vec<Value> = Vec::new();
        let mut due = Instant::now() + EXPORT_EVERY;
        let mut is_reached = true;
        loop {
            let stopped = match inbox.recv_timeout(due.saturating_duration_since(Instant::now())) {
                Ok(Message::Span(span)) => {
                    spans.push(span.json());
                    false
                }
                Err(RecvTimeoutError::Timeout) => false,
                Ok(Message::Stop) | Err(RecvTimeoutError::Disconnected) => true,
            };
            if stopped || spans.len() >= EXPORT_SPANS || Instant::now() >= due {
                self.export(std::mem::take(&mut spans), &mut is_reached);
                due = Instant::now() + EXPORT_EVERY;
            }
            if stopped {
                return;
            }
        }
    }

    /// Sends spans. Those of a collector that does not answer are lost, which is said once.
    fn export(&self, spans: Vec<Value>, is_reached: &mut bool) {
        if spans.is_empty() {
            return;
        }
        let count = spans.len();
        let attribute = |key: &str, value: &str| json!({ "key": key, "value": { "stringValue": value } });
        let resource = json!({
            "attributes": [
                attribute("service.name", &self.service),
                attribute("service.version", env!("CARGO_PKG_VERSION")),
            ],
        });
        let scope = json!({ "name": "quadriga", "version": env!("CARGO_PKG_VERSION") });
        let body = json!({
            "resourceSpans": [{ "resource": resource, "scopeSpans": [{ "scope": scope, "spans": spans }] }],
        });
        let mut request = self.agent.post(&self.url).header("content-type", "application/json");
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let sent = request.send(body.to_string());
        if let Err(error) = &sent
            && *is_reached
        {
            tracing::warn!(collector = self.url, %error, spans = count, "traces are not sent");
        }
        *is_reached = sent.is_ok();
    }
}

//! Traces of requests for a collector of OpenTelemetry: a span for each request, and spans for the stages of its answer.
//!
//! They are made of what the server tells the log: its span `request`, and its event `generated`. Neither has a prompt in it.

mod export;
mod record;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::LookupSpan;

use self::export::{Collector, Message};
use self::record::{Fields, SpanRecord, TraceParent};
use crate::failure::{Failure, Outcome};

/// The most spans that wait to be sent; further ones are dropped.
const WAITING_SPANS: usize = 8192;

/// What sends spans until it is dropped, and then those that are left.
pub(super) struct Traces(Option<(SyncSender<Message>, JoinHandle<()>)>);

impl Drop for Traces {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.0.take() {
            // If the thread has ended, nothing is left to send.
            let _ = sender.send(Message::Stop);
            let _ = thread.join();
        }
    }
}

/// Sends spans to a collector such as `http://127.0.0.1:4318`: this one, or that of OpenTelemetry's own variables.
pub(super) fn layer<S>(endpoint: Option<&str>) -> Outcome<(Option<impl Layer<S> + use<S>>, Traces)>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let Some(collector) = Collector::find(endpoint)? else { return Ok((None, Traces(None))) };
    let (sender, inbox) = sync_channel(WAITING_SPANS);
    let thread = std::thread::Builder::new().name("quadriga-traces".to_owned());
    let thread = thread.spawn(move || collector.run(&inbox));
    let thread = thread.map_err(|error| Failure::Message(format!("cannot start a thread: {error}")))?;
    let own = filter_fn(|metadata| {
        let target = metadata.target();
        target.starts_with("quadriga_server")
            && target != quadriga_server::body::PROMPTS
            && *metadata.level() <= Level::INFO
    });
    let layer = TraceLayer { sender: sender.clone(), random: RandomNumbers::new() };
    Ok((Some(layer.with_filter(own)), Traces(Some((sender, thread)))))
}

/// Makes spans for the collector of what the server logs.
struct TraceLayer {
    sender: SyncSender<Message>,
    random: RandomNumbers,
}

impl TraceLayer {
    fn send(&self, record: SpanRecord) {
        // A collector that is too slow loses spans; requests do not wait for it.
        let _ = self.sender.try_send(Message::Span(Box::new(record)));
    }

    /// The stages of an answer that is complete now: waiting, computing the prompt, and generating.
    fn stages(&self, parent: &SpanRecord, fields: &Fields) {
        let end = SystemTime::now();
        let time = |name: &str| Duration::from_secs_f64(fields.number(name).unwrap_or(0.0).max(0.0) / 1e3);
        let first_token = end - time("decode_ms");
        let submitted = first_token - time("first_token_ms");
        let started = submitted + time("queue_ms").min(time("first_token_ms"));
        let prompt =
            [("prompt_tokens", "gen_ai.usage.input_tokens"), ("cached_tokens", "quadriga.cached_tokens")];
        let answer = [("answer_tokens", "gen_ai.usage.output_tokens")];
        let reasons = fields.listed("finish", "gen_ai.response.finish_reasons");
        let model = [("model", "gen_ai.request.model")];
        let stages: [(&'static str, _, _, &[_], _); 3] = [
            ("queue", submitted, started, &[], None),
            ("prefill", started, first_token, &prompt, None),
            ("decode", first_token, end, &answer, reasons),
        ];
        for (name, start, end, attributes, more) in stages {
            let attributes = model.iter().chain(attributes);
            let attributes = attributes.filter_map(|(from, to)| fields.attribute(from, to));
            self.send(SpanRecord {
                name,
                is_server: false,
                trace: parent.trace,
                id: self.random.next(),
                parent: Some(parent.id),
                start,
                end: Some(end),
                attributes: attributes.chain(more).collect(),
                failed: false,
                sampled: parent.sampled,
            });
        }
    }
}

impl<S> Layer<S> for TraceLayer
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id).filter(|span| span.name() == "request") else { return };
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let parent = fields.text("traceparent").and_then(TraceParent::parse);
        let names = [
            ("id", "http.request.header.x-request-id"),
            ("method", "http.request.method"),
            ("path", "url.path"),
        ];
        let random = || u128::from(self.random.next()) << 64 | u128::from(self.random.next());
        span.extensions_mut().insert(SpanRecord {
            name: "request",
            is_server: true,
            trace: parent.map_or_else(random, |parent| parent.trace),
            id: self.random.next(),
            parent: parent.map(|parent| parent.span),
            start: SystemTime::now(),
            end: None,
            attributes: names.iter().filter_map(|(from, to)| fields.attribute(from, to)).collect(),
            failed: false,
            sampled: parent.is_none_or(|parent| parent.sampled),
        });
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut fields = Fields::default();
        values.record(&mut fields);
        if let Some(record) = span.extensions_mut().get_mut::<SpanRecord>() {
            record.failed |= fields.number("status").is_some_and(|status| status >= 500.0);
            record.attributes.extend(fields.attribute("status", "http.response.status_code"));
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        if fields.text("message") != Some("generated") {
            return;
        }
        let mut spans = context.event_scope(event).into_iter().flatten();
        if let Some(span) = spans.find(|span| span.name() == "request")
            && let Some(record) = span.extensions().get::<SpanRecord>().filter(|record| record.sampled)
        {
            self.stages(record, &fields);
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let record = context.span(&id).and_then(|span| span.extensions_mut().remove::<SpanRecord>());
        if let Some(record) = record.filter(|record| record.sampled) {
            self.send(SpanRecord { end: Some(SystemTime::now()), ..record });
        }
    }
}

/// Numbers for traces and spans: different in every run, and never 0.
struct RandomNumbers {
    hasher: std::hash::RandomState,
    next: AtomicU64,
}

impl RandomNumbers {
    fn new() -> RandomNumbers {
        RandomNumbers { hasher: std::hash::RandomState::new(), next: AtomicU64::new(0) }
    }

    fn next(&self) -> u64 {
        use std::hash::BuildHasher;
        self.hasher.hash_one(self.next.fetch_add(1, Ordering::Relaxed)).max(1)
    }
}

//! What is logged of a request.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use crate::common::{Setup, TestServer, hello, json, with};
use quadriga_server::body::PROMPTS;
use quadriga_server::{App, Keys, Limits, ModelRegistry, Origins};
use quadriga_sim::{FaultPoint, Sim};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The lines that this program logs.
static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps the fields of events as `name=value`.
struct Keeper;

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.push_str(&format!("{}={value:?} ", field.name()));
    }
}

impl Subscriber for Keeper {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // What `--log-prompts` asks for is another target.
        let target = metadata.target();
        target.starts_with("quadriga_server") && target != PROMPTS && *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        LINES.lock().unwrap().push(line.0);
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// A stream that failed after its first byte has a status of success, and its line in the log says that it failed, and why.
#[test]
fn a_stream_that_fails_is_logged_with_its_error() {
    tracing::subscriber::set_global_default(Keeper).unwrap();
    // The name is in the error, by which its line is found among those of other tests.
    let sim = Sim::new("sim:logged").device();
    let registry = ModelRegistry::with(Setup::default().served_on("small", Arc::clone(&sim) as _));
    let app = App::new(registry, Keys::default(), Limits::default());
    let server = TestServer::of(app.with_origins(Origins::parse("https://a.example")));
    // Text of a request is in no line, and only the beginning of it in the answer.
    let role = format!("secret{}", "x".repeat(300_000));
    for body in [
        json!({ "messages": [{ "role": role, "content": "x" }] }),
        json!({ "messages": [{ "role": "user", "content": [{ "type": role }] }] }),
        json!({ "messages": [{ "role": "user", "content": "x" }], "response_format": { "type": role } }),
        json!({ "messages": [{ "role": "user", "content": "x" }], "grammar": role }),
    ] {
        let answer = server.post("/v1/chat/completions", &body);
        assert!(answer.status == 400 && answer.body.len() < 3000, "{}", answer.body.len());
    }
    let tools = json!([{ "type": "secret_tool" }, { "type": "web_search" }]);
    server.post("/v1/responses", &json!({ "input": "x", "max_output_tokens": 1, "tools": tools })).ok();
    let body = with(hello(), json!({ "max_tokens": 400, "stream": true }));
    let mut stream = server.client().stream("/v1/chat/completions", &body);
    assert!(stream.chunk().is_some());
    sim.lose(FaultPoint::Run, 1);
    assert!(stream.answer().text().contains("sim:logged"));
    // An answer without a body is complete, although nobody asks for its body.
    let asks =
        server.client().header("origin", "https://a.example").header("access-control-request-method", "POST");
    assert_eq!(asks.send("OPTIONS", "/v1/chat/completions", b"").answer().status, 204);
    // When it has ended, everything is logged.
    drop(server);
    let lines = LINES.lock().unwrap();
    let line = lines.iter().find(|line| line.contains("sim:logged")).expect("no line about the error");
    assert!(line.contains("status=200") && line.contains("error=") && line.contains("lost"), "{line}");
    assert!(line.contains("the stream ended with an error"), "{line}");
    assert!(lines.iter().all(|line| !line.contains("secret") && line.len() < 1000));
    assert!(lines.iter().any(|line| line.contains("left out") && line.contains("web_search")), "{lines:?}");
    let refused =
        lines.iter().any(|line| line.contains("messages[0].role") && line.contains("invalid request"));
    assert!(refused, "{lines:?}");
    let preflights: Vec<&String> = lines.iter().filter(|line| line.contains("status=204")).collect();
    assert!(
        !preflights.is_empty() && preflights.iter().all(|line| line.contains("answered")),
        "{preflights:?}"
    );
}

//! Clients that go away while their answer is computed: it ends with the current step, whatever the answer's form is. The
//! engine is held between two steps, so that steps are counted and not time.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Waker};

use quadriga_server::body::JsonBody;
use quadriga_server::operation::caller::Caller;
use quadriga_server::{ServedModel, requests};

use crate::common::gate::Gate;
use crate::common::{Setup, Stream, TestServer, Value, hello, json, model, with};

/// A prompt of more tokens than a step computes.
fn long(fields: &[(&str, Value)]) -> Value {
    let text = "a b c ".repeat(60);
    let messages = json!([{ "role": "user", "content": text }]);
    let mut body =
        json!({ "model": "small", "prompt": text, "messages": messages, "max_tokens": 40, "seed": 1 });
    body["options"] = json!({ "num_predict": 5, "temperature": 0, "ignore_eos": true });
    for (name, value) in fields {
        body[*name] = value.clone();
    }
    body
}

fn send(server: &TestServer, path: &str, more: &str, body: &Value) -> TcpStream {
    send_with(server, path, more, body, "")
}

/// Sends a request, and further bytes behind it.
fn send_with(server: &TestServer, path: &str, more: &str, body: &Value, behind: &str) -> TcpStream {
    let body = body.to_string();
    let head =
        format!("POST {path} HTTP/1.1\r\nhost: localhost\r\n{more}content-length: {}\r\n\r\n", body.len());
    let mut stream = server.client().connect();
    stream.write_all((head + &body + behind).as_bytes()).unwrap();
    stream
}

/// Waits until an answer beside the gate's is being computed.
fn begin(served: &Arc<ServedModel>, gate: &Gate) {
    while served.in_flight().is_empty() {
        std::thread::yield_now();
    }
    gate.step();
    while served.state().running < 2 {
        gate.step();
    }
}

/// Looks many times whether the server has given up all answers.
#[track_caller]
fn assert_given_up(server: &TestServer, served: &ServedModel, what: &str) {
    for _ in 0..3000 {
        if served.in_flight().is_empty() {
            return;
        }
        assert_eq!(server.get("/health").status, 200);
    }
    panic!("{what}: the client is gone, and its answer is still being computed");
}

#[test]
fn a_dropped_connection_ends_its_answer_within_one_step() {
    let stream = [("stream", json!(true))];
    let cases = [
        ("/v1/chat/completions", "", long(&[])),
        // The server has sent something, but nothing of the answer.
        ("/v1/chat/completions", "expect: 100-continue\r\n", long(&[])),
        ("/v1/embeddings", "", json!({ "input": "a b c ".repeat(60) })),
        // Before the first token, nothing is written that could fail.
        ("/completion", "", long(&stream)),
        ("/v1/completions", "", long(&stream)),
        ("/api/generate", "", long(&stream)),
    ];
    for (path, more, body) in cases {
        let server = TestServer::start();
        let served = server.app.models().loaded().pop().unwrap();
        let gate = Gate::new(&served);
        let mut client = send(&server, path, more, &body);
        if !more.is_empty() {
            let mut interim = [0; 25];
            client.read_exact(&mut interim).unwrap();
            assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
        }
        begin(&served.to_used(), &gate);
        if body["stream"] == true {
            // All that was sent: a connection with bytes that nobody has read is reset at once.
            let stream = Stream::of(client);
            assert_eq!(stream.status, 200);
            drop(stream);
        } else {
            drop(client);
        }
        assert_given_up(&server, &served, path);
        // No step was computed meanwhile, and none is computed for it from now on.
        gate.step();
        assert_eq!(served.state().running, 1, "{path}");
        drop((gate, served));
        server.assert_idle();
    }
}

/// Rates of tokens and of the time for them would not go together otherwise.
#[test]
fn answers_that_are_given_up_count_as_far_as_they_were_computed() {
    let server = TestServer::start();
    let served = server.app.models().loaded().pop().unwrap();
    let gate = Gate::new(&served);
    let body = long(&[("stream", json!(true)), ("ignore_eos", json!(true))]);
    let client = send(&server, "/v1/completions", "", &body);
    begin(&served.to_used(), &gate);
    let generated = || -> usize {
        served.in_flight().iter().map(|(_, flight)| flight.generated.load(Ordering::Relaxed)).sum()
    };
    let stream = Stream::of(client);
    while generated() < 5 {
        gate.step();
    }
    let tokens = generated();
    drop(stream);
    assert_given_up(&server, &served, "it");
    // The engine hears of it.
    gate.step();
    let text = server.get("/metrics").text();
    let metric = |name: &str| -> f64 {
        let line = text.lines().find(|line| line.starts_with(&format!("llamacpp:{name}{{"))).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    let prompt =
        server.post("/tokenize", &json!({ "prompt": body["prompt"] })).ok()["count"].as_f64().unwrap();
    assert_eq!(metric("prompt_tokens_total") + metric("prompt_tokens_cached_total"), prompt);
    // The step that was being looked at may have brought one more.
    let predicted = metric("tokens_predicted_total") as usize;
    assert!((tokens..=tokens + 1).contains(&predicted), "{predicted} instead of {tokens}");
    for name in [
        "prompt_seconds_total",
        "tokens_predicted_seconds_total",
        "prompt_tokens_seconds",
        "predicted_tokens_seconds",
    ] {
        assert!(metric(name) > 0.0, "{name}: {text}");
    }
}

/// What may follow a request: an end of a line that older clients send, and another request.
const BEHIND: [&str; 2] = ["\r\n", "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"];

#[test]
fn bytes_behind_a_request_hide_nobody_who_left() {
    let paths = [("/v1/chat/completions", false), ("/v1/embeddings", false), ("/completion", true)];
    for (path, streams) in paths {
        for behind in BEHIND {
            let server = TestServer::start();
            let served = server.app.models().loaded().pop().unwrap();
            let gate = Gate::new(&served);
            let body = long(&[("input", json!("a b c ".repeat(60))), ("stream", json!(streams))]);
            let client = send_with(&server, path, "", &body, behind);
            begin(&served.to_used(), &gate);
            if streams {
                let stream = Stream::of(client);
                assert_eq!(stream.status, 200);
                drop(stream);
            } else {
                drop(client);
            }
            assert_given_up(&server, &served, &format!("{path} and {behind:?}"));
            gate.step();
            assert_eq!(served.state().running, 1, "{path} and {behind:?}");
            drop((gate, served));
            server.assert_idle();
        }
    }
}

/// One that has only ended its side gets all answers, whatever it sent.
#[test]
fn bytes_behind_a_request_hide_nobody_who_stays() {
    for behind in BEHIND {
        let server = TestServer::start();
        let served = server.app.models().loaded().pop().unwrap();
        let gate = Gate::new(&served);
        let body = long(&[("max_tokens", json!(5)), ("ignore_eos", json!(true))]);
        let mut client = send_with(&server, "/v1/chat/completions", "", &body, behind);
        begin(&served.to_used(), &gate);
        client.shutdown(Shutdown::Write).unwrap();
        // The server has seen that, and asks whether the client is still there.
        let mut interim = [0; 25];
        client.read_exact(&mut interim).unwrap();
        assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
        drop((gate, served));
        let mut rest = String::new();
        client.read_to_string(&mut rest).unwrap();
        let answers = rest.matches("HTTP/1.1 200 OK").count();
        assert_eq!(answers, if behind.starts_with("GET") { 2 } else { 1 }, "{rest}");
        assert!(rest.contains("\"finish_reason\":\"length\"") && !rest.contains("100 Continue"), "{rest}");
        server.assert_idle();
    }
}

/// The engine accepts a request between two steps, and whoever asked hears of it later, or never.
#[test]
fn a_request_that_was_accepted_unheard_is_cancelled() {
    let served = Arc::new(Setup::default().served());
    let gate = Gate::new(&served);
    let body = JsonBody::parse(long(&[]).to_string().as_bytes()).unwrap();
    let generation = requests::parse("/v1/chat/completions", &body, &served).unwrap().remove(0);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    let _entered = runtime.enter();
    let caller = Caller::default();
    let mut answer = Box::pin(served.generate(generation, &caller));
    let mut context = Context::from_waker(Waker::noop());
    while served.in_flight().is_empty() {
        assert!(answer.as_mut().poll(&mut context).is_pending());
    }
    gate.step();
    assert_eq!(served.state().running, 2);
    drop(answer);
    gate.step();
    assert_eq!(served.state().running, 1);
}

/// One that has only ended its side gets what others get.
#[test]
fn a_client_that_ended_its_side_gets_its_stream() {
    for path in ["/completion", "/v1/chat/completions", "/v1/messages", "/api/chat"] {
        let server = TestServer::start();
        let more = [
            ("stream", json!(true)),
            ("max_tokens", json!(5)),
            ("temperature", json!(0)),
            ("ignore_eos", json!(true)),
        ];
        let body = long(&more);
        let whole = server.post(path, &body).text();
        let served = server.app.models().loaded().pop().unwrap();
        let gate = Gate::new(&served);
        let client = send(&server, path, "connection: close\r\n", &body);
        begin(&served.to_used(), &gate);
        // Once it has begun to answer, it asks within the answer whether the client is still there.
        let mut stream = Stream::of(client.try_clone().unwrap());
        client.shutdown(Shutdown::Write).unwrap();
        let mut all = Vec::new();
        let heard = |all: &[u8]| all.ends_with(b": ping\n\n") || all.ends_with(b" ");
        while !heard(&all) {
            all.extend(stream.chunk().unwrap());
        }
        drop((gate, served));
        while let Some(chunk) = stream.chunk() {
            all.extend(chunk);
        }
        let text = String::from_utf8(all).unwrap();
        let events =
            |text: &str| text.lines().filter(|line| line.len() > 1 && !line.starts_with(':')).count();
        assert_eq!(events(&text), events(&whole), "{path}: {text}");
        if path.starts_with("/api") {
            let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
            assert_eq!(last["done"], true);
            assert!(text.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()), "{text}");
        }
        server.assert_idle();
    }
}

/// A schema that is not strict, with a pattern in every property that cannot be compiled: they are found one after another.
fn tools_to_relax(name: &str) -> Value {
    let properties = (0..60).map(|at| {
        let pattern = if at % 2 == 0 { "a(?=b)" } else { "^[a-c]{2,40}$" };
        (format!("{name}_{at}"), json!({ "type": "string", "pattern": pattern }))
    });
    let properties: serde_json::Map<String, Value> = properties.collect();
    let function = json!({ "name": "odd", "parameters": { "type": "object", "properties": properties } });
    json!([{ "type": "function", "function": function }])
}

#[test]
fn grammars_of_a_client_that_left_are_not_compiled() {
    let model = model::small();
    let server = Setup { model: model.clone(), ..Setup::default() }.start();
    let engine = model.constraints().unwrap();
    let body = |name: &str| {
        let messages = json!([{ "role": "user", "content": "x" }]);
        json!({ "model": "small", "messages": messages, "max_tokens": 3, "tools": tools_to_relax(name),
            "tool_choice": "required" })
    };
    let answer = server.post("/v1/chat/completions", &body("stays"));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let (_, whole) = engine.compiling();
    assert!(whole > 40, "{whole}");
    let client = send(&server, "/v1/chat/completions", "", &body("leaves"));
    while engine.compiling().1 < whole + 2 {
        std::thread::yield_now();
    }
    drop(client);
    // It ends when all of its work has ended.
    drop(server);
    let (running, all) = engine.compiling();
    assert!(all - whole < whole, "{all} in all, of which one request needs {whole}");
    // The slots are free again.
    while engine.compiling().0 > 0 {
        std::thread::yield_now();
    }
    assert!(running <= 1, "{running}");
    engine.compile(&quadriga_llm::constraint::Grammar::JsonObject).unwrap();
}

/// The times of an answer that nobody waits for to the end count, too.
#[test]
fn the_first_token_is_timed_when_it_is_there() {
    let server = TestServer::start();
    let body = with(hello(), json!({ "stream": true, "max_tokens": 400 }));
    let mut stream = server.client().stream("/v1/chat/completions", &body);
    // The first has the role, the second a text.
    assert!(stream.chunk().is_some() && stream.chunk().is_some());
    drop(stream);
    server.assert_idle();
    let text = server.get("/metrics").text();
    assert!(text.contains("finished_reason=\"abort\"} 1"), "it was complete before: {text}");
    for name in ["time_to_first_token_seconds", "request_queue_time_seconds"] {
        assert!(text.contains(&format!("vllm:{name}_count{{model_name=\"small\"}} 1\n")), "{name}: {text}");
    }
}

//! `quadriga serve --otlp-endpoint`: a collector gets the spans of a request, in the trace that the client names.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
#![cfg(all(unix, feature = "otel"))]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};

use crate::common::Fixture;
use serde_json::{Value, json};

/// Reads a request or an answer: its head and its body.
fn message(stream: &TcpStream) -> (String, Vec<u8>) {
    let mut reader = BufReader::new(stream);
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let before = head.len();
        reader.read_line(&mut head).unwrap();
        let line = head[before..].trim().to_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    (head, body)
}

#[test]
fn a_collector_gets_the_stages_of_a_request() {
    let collector = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", collector.local_addr().unwrap());
    let (sender, exported) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in collector.incoming().flatten() {
            let (head, body) = message(&stream);
            let answer = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}";
            // Before the answer: once the server has that, it ends, and the test looks.
            if sender.send((head, body)).is_err() {
                return;
            }
            (&stream).write_all(answer.as_bytes()).unwrap();
        }
    });
    let fixture = Fixture::with_template("{% for m in messages %}{{ m.content }}{% endfor %}");
    let mut command = fixture
        .command("serve", &["--port", "0", "-c", "256", "--log-level", "warn", "--otlp-endpoint", &endpoint]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    let mut log = String::new();
    let address = loop {
        assert!(lines.read_line(&mut log).unwrap() > 0, "it ended: {log}");
        if let Some((_, url)) = log.split_once("served at http://") {
            break url.split(' ').next().unwrap().to_owned();
        }
    };
    let (trace, parent) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
    let body =
        json!({ "messages": [{ "role": "user", "content": "sesame" }], "max_tokens": 4, "ignore_eos": true })
            .to_string();
    // The client of the second one says that its trace is not recorded.
    let unrecorded = "1bf7651916cd43dd8448eb211c80319c";
    for traceparent in [format!("00-{trace}-{parent}-01"), format!("00-{unrecorded}-{parent}-00")] {
        let mut stream = TcpStream::connect(&address).unwrap();
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntraceparent: {traceparent}\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all((head + &body).as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    // What is left is sent when the server ends.
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    assert!(child.wait().unwrap().success());
    let mut spans: Vec<Value> = Vec::new();
    for (head, body) in exported.try_iter() {
        assert!(head.starts_with("POST /v1/traces "), "{head}");
        let text = String::from_utf8(body).unwrap();
        assert!(!text.contains("sesame"), "prompts are nobody's business: {text}");
        let body: Value = serde_json::from_str(&text).unwrap();
        for resource in body["resourceSpans"].as_array().unwrap() {
            assert!(resource["resource"].to_string().contains("quadriga"), "{resource}");
            for scope in resource["scopeSpans"].as_array().unwrap() {
                spans.extend(scope["spans"].as_array().unwrap().iter().cloned());
            }
        }
    }
    let of = |name: &str| {
        let found = spans.iter().find(|span| span["name"] == name && span["traceId"] == trace);
        found.unwrap_or_else(|| panic!("no span {name}: {spans:#?}"))
    };
    let time = |span: &Value, field: &str| span[field].as_str().unwrap().parse::<u64>().unwrap();
    assert!(spans.iter().all(|span| span["traceId"] != unrecorded), "{spans:#?}");
    let request = of("request");
    let status = json!({ "key": "http.response.status_code", "value": { "intValue": "200" } });
    assert!(request["attributes"].as_array().unwrap().contains(&status), "{request}");
    assert_eq!(request["parentSpanId"], parent);
    let stages = ["queue", "prefill", "decode"].map(of);
    for stage in stages {
        assert_eq!(stage["parentSpanId"], request["spanId"], "{stage}");
        assert!(time(stage, "startTimeUnixNano") <= time(stage, "endTimeUnixNano"), "{stage}");
    }
    for pair in stages.windows(2) {
        assert_eq!(pair[0]["endTimeUnixNano"], pair[1]["startTimeUnixNano"]);
    }
    assert!(stages[2].to_string().contains("gen_ai.usage.output_tokens"), "{}", stages[2]);
    // Names, of which there may be several by OpenTelemetry's conventions.
    let reasons = json!({ "key": "gen_ai.response.finish_reasons", "value": { "arrayValue": { "values": [{ "stringValue": "length" }] } } });
    assert!(stages[2]["attributes"].as_array().unwrap().contains(&reasons), "{}", stages[2]);
}

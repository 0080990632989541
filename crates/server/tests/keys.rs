//! API keys and their limits.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::common::gate::Gate;
use crate::common::{Setup, TestServer, Value, hello, json, with};
use quadriga_server::body::JsonBody;
use quadriga_server::error::ErrorKind;
use quadriga_server::generation::GenerationEvent;
use quadriga_server::operation::caller::{Caller, KeyLimits, TokenNeed};
use quadriga_server::running::MAX_UNREAD;
use quadriga_server::{Keys, requests};

const CHAT: &str = "/v1/chat/completions";

#[test]
fn only_holders_of_a_key_may_ask() {
    let server =
        Setup { keys: Keys::new(vec!["secret".to_owned()], None).unwrap(), ..Setup::default() }.start();
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.get("/").status, 200);
    for path in ["/v1/models", "/status", "/metrics", "/nothing"] {
        let answer = server.get(path);
        assert_eq!(answer.status, 401, "{path}");
    }
    assert_eq!(server.post(CHAT, &hello()).json()["error"]["code"], "invalid_api_key");
    for (name, value) in
        [("authorization", "Bearer secret"), ("authorization", "secret"), ("x-api-key", "secret")]
    {
        server.client().header(name, value).post(CHAT, &hello()).ok();
    }
    for wrong in ["Bearer secre", "Bearer secret2", "Bearer", ""] {
        assert_eq!(server.client().header("authorization", wrong).post(CHAT, &hello()).status, 401);
    }
}

#[test]
fn keys_of_a_file_have_limits_and_are_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    std::fs::write(&path, "# ours\nsmall tokens-per-minute=50\none concurrent=1\n").unwrap();
    let server =
        Setup { keys: Keys::new(Vec::new(), Some(path.clone())).unwrap(), ..Setup::default() }.start();
    let small = || server.client().header("x-api-key", "small");
    small().post(CHAT, &hello()).ok();
    let answer = small().post(CHAT, &hello());
    assert_eq!(answer.status, 429, "{}", answer.text());
    assert!(answer.header("retry-after").unwrap().parse::<u64>().unwrap() <= 60);
    let wrong = server.client().header("x-api-key", "other").post(CHAT, &hello());
    assert!(wrong.status == 401 && wrong.text().contains("invalid API key"), "{}", wrong.text());
    let long = small().post(CHAT, &with(hello(), json!({ "max_tokens": 500 })));
    assert!(long.status == 400 && long.header("retry-after").is_none(), "{}", long.text());
    assert!(long.text().contains("lower max_tokens"), "{}", long.text());
    let one = || server.client().header("x-api-key", "one");
    let endless = with(hello(), json!({ "max_tokens": 480, "ignore_eos": true, "stream": true }));
    let mut first = one().stream(CHAT, &endless);
    assert!(first.chunk().is_some());
    assert_eq!(one().post(CHAT, &hello()).status, 429);
    drop(first);
    std::fs::write(&path, "small\n").unwrap();
    server.app.keys().reload().unwrap();
    small().post(CHAT, &hello()).ok();
    assert_eq!(one().post(CHAT, &hello()).status, 401);
    // A wrong file changes nothing.
    std::fs::write(&path, "").unwrap();
    assert!(server.app.keys().reload().unwrap_err().contains("has no key"));
    small().post(CHAT, &hello()).ok();
}

/// Requests that run at the same time cannot use more together than one after the other.
#[test]
fn tokens_are_reserved_when_a_request_begins() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    std::fs::write(&path, "key tokens-per-minute=600\n").unwrap();
    let server = Setup { keys: Keys::new(Vec::new(), Some(path)).unwrap(), ..Setup::default() }.start();
    let ask = |body| server.client().header("x-api-key", "key").stream(CHAT, &body);
    let endless = with(hello(), json!({ "max_tokens": 400, "stream": true }));
    let answers: Vec<_> = (0..12).map(|_| ask(endless.clone())).collect();
    let statuses: Vec<u16> = answers.iter().map(|answer| answer.status).collect();
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 1, "{statuses:?}");
    assert_eq!(statuses.iter().filter(|status| **status == 429).count(), 11, "{statuses:?}");
    // What the first one leaves may be used.
    assert_eq!(ask(hello()).status, 200);
}

/// Answers that end early were computed as far as they go.
#[test]
fn answers_that_fail_count() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    std::fs::write(&path, "key tokens-per-minute=300\nfree\n").unwrap();
    let server = Setup { keys: Keys::new(Vec::new(), Some(path)).unwrap(), ..Setup::default() }.start();
    let client = |key| server.client().header("x-api-key", key);
    let usage = client("free").post(CHAT, &hello()).ok()["usage"].clone();
    let prompt = usage["prompt_tokens"].as_u64().unwrap();
    let served = server.app.models().loaded().pop().unwrap();
    while !served.in_flight().is_empty() {}
    let gate = Gate::new(&served);
    let failed = std::thread::scope(|scope| {
        let body = with(hello(), json!({ "max_tokens": 200 }));
        let waiting = scope.spawn(move || client("key").post(CHAT, &body).text());
        while served.in_flight().is_empty() {}
        gate.step();
        while served.state().running < 2 {
            gate.step();
        }
        served.service().unwrap().fail_all();
        drop(gate);
        waiting.join().unwrap()
    });
    assert!(failed.contains("stopped before the answer was complete"), "{failed}");
    // The connection of the answer may still have it.
    while !served.in_flight().is_empty() {}
    // As much as there would be without it.
    let refused = client("key").post(CHAT, &with(hello(), json!({ "max_tokens": 300 - prompt })));
    assert_eq!(refused.status, 429, "{}", refused.text());
    let left: u64 =
        refused.text().split("of which ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!(left <= 300 - prompt, "{left} are left, and the prompt alone has {prompt}");
}

#[test]
fn answers_that_nobody_reads_count() {
    let mut setup = Setup::default();
    setup.batcher.engine.context = 4096;
    let served = Arc::new(setup.served());
    const CHOICES: usize = 2;
    const MINUTE: usize = 100_000;
    let body = with(hello(), json!({ "n": CHOICES, "max_tokens": MAX_UNREAD + 500 }));
    let body = JsonBody::parse(body.to_string().as_bytes()).unwrap();
    let mut generation = requests::parse(CHAT, &body, &served).unwrap().remove(0);
    generation.streamed = true;
    let caller = Caller::new(1, KeyLimits { tokens_per_minute: Some(MINUTE as u64), concurrent: None });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    let tokens = runtime.block_on(async {
        let mut running = served.generate(generation, &caller).await.unwrap();
        let generated = || {
            let all = served.in_flight();
            all.iter().map(|(_, flight)| flight.generated.load(Ordering::Relaxed)).sum::<usize>()
        };
        while generated() <= MAX_UNREAD {}
        // Nobody reads, and all end.
        while served.state().running + served.state().waiting > 0 {}
        let tokens = generated() + CHOICES * running.prompt_tokens();
        let mut is_said = false;
        while let Some(event) = running.next().await {
            if let GenerationEvent::Failed(error) = event {
                assert!(error.message.contains("did not read them"), "{error}");
                is_said = true;
            }
        }
        assert!(is_said);
        tokens
    });
    assert!(tokens > CHOICES * MAX_UNREAD, "{tokens}");
    // All of that is used, and no more.
    let rest = MINUTE - tokens;
    let error = caller.begin(TokenNeed::exact(rest + 1)).unwrap_err();
    assert_eq!(error.kind, ErrorKind::TooMany, "{error}");
    assert!(caller.begin(TokenNeed::exact(rest)).is_ok());
}

/// A server with so many lanes and a key of 1,000 tokens a minute.
fn limited(lanes: usize) -> (tempfile::TempDir, TestServer) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keys");
    std::fs::write(&path, "key tokens-per-minute=1000\n").unwrap();
    let mut setup = Setup { keys: Keys::new(Vec::new(), Some(path)).unwrap(), ..Setup::default() };
    setup.batcher.engine.sequences = lanes;
    (folder, setup.start())
}

/// Asserts that the key has exactly so many tokens left, and uses them.
#[track_caller]
fn assert_left(server: &TestServer, left: usize) {
    let embed = |tokens: usize| {
        let texts: Vec<Vec<u32>> = vec![5; tokens].chunks(500).map(<[u32]>::to_vec).collect();
        server.client().header("x-api-key", "key").post("/v1/embeddings", &json!({ "input": texts }))
    };
    let more = embed(left + 1);
    // More than the limit can never be had.
    assert!([400, 429].contains(&more.status), "{}", more.text());
    let all = embed(left);
    assert_eq!(all.status, 200, "{}", all.text());
}

/// Sends a request whose answer nobody reads.
fn unread(server: &TestServer, path: &str, body: &Value) -> TcpStream {
    let mut stream = server.client().connect();
    let body = body.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: key\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).unwrap();
    stream
}

#[test]
fn embeddings_whose_client_leaves_count_as_far_as_they_were_computed() {
    let (_folder, server) = limited(2);
    let served = server.app.models().loaded().pop().unwrap();
    let gate = Gate::new(&served);
    let texts: Vec<String> = (0..4).map(|_| "x".repeat(200)).collect();
    let stream = unread(&server, "/v1/embeddings", &json!({ "input": texts }));
    let computed = || {
        let all = served.in_flight();
        all.iter().map(|(_, flight)| flight.computed.load(Ordering::Relaxed)).sum::<usize>()
    };
    while served.in_flight().is_empty() {}
    while computed() == 0 {
        gate.step();
    }
    let computed = computed();
    drop(stream);
    while !served.in_flight().is_empty() {}
    drop(gate);
    assert_left(&server, 1000 - computed);
}

#[test]
fn requests_that_only_waited_do_not_count() {
    let (_folder, server) = limited(1);
    let served = server.app.models().loaded().pop().unwrap();
    // The only lane is taken.
    let gate = Gate::new(&served);
    let stream = unread(&server, CHAT, &with(hello(), json!({ "max_tokens": 10 })));
    while served.in_flight().is_empty() {}
    while served.state().waiting == 0 {
        gate.step();
    }
    drop(stream);
    while !served.in_flight().is_empty() {}
    drop(gate);
    assert_left(&server, 1000);
}

/// A request without `max_tokens` gets what the key has left, and no more.
#[test]
fn answers_without_a_limit_end_with_the_tokens_of_the_key() {
    for choices in [1, 3] {
        let (_folder, server) = limited(4);
        let key = || server.client().header("x-api-key", "key");
        // 800 of the 1,000 are used.
        let texts = vec![vec![5; 400]; 2];
        key().post("/v1/embeddings", &json!({ "input": texts })).ok();
        let body = with(hello(), json!({ "max_tokens": null, "n": choices }));
        let answer = key().post(CHAT, &body).ok();
        for choice in answer["choices"].as_array().unwrap() {
            assert_eq!(choice["finish_reason"], "length", "{answer}");
        }
        let prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap();
        let generated = answer["usage"]["completion_tokens"].as_u64().unwrap();
        // Each choice computes the prompt.
        assert_eq!(choices * prompt + generated, 200, "{answer}");
        let refused = key().post(CHAT, &body);
        assert_eq!(refused.status, 429, "{}", refused.text());
    }
}

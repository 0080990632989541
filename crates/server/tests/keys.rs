//! API keys and their limits.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Setup, hello, json, with};
use quadriga_server::Keys;

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
    let long = small().post(CHAT, &with(hello(), json!({ "max_tokens": 500 })));
    assert!(long.status == 429 && long.text().contains("lower max_tokens"), "{}", long.text());
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

//! Connections that end early, are malformed, or carry too much; shutdown.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::io::{Read, Write};
use std::net::Shutdown;

use crate::common::{Client, Setup, TestServer, hello, json, with};

const CHAT: &str = "/v1/chat/completions";

/// A request whose answer takes many steps.
fn endless() -> crate::common::Value {
    with(hello(), json!({ "max_tokens": 480, "ignore_eos": true, "stream": true }))
}

#[test]
fn a_dropped_stream_frees_its_pages() {
    let server = TestServer::start();
    for _ in 0..3 {
        let mut stream = server.client().stream(CHAT, &endless());
        assert_eq!(stream.status, 200);
        assert!(stream.chunk().is_some());
        drop(stream);
    }
    server.assert_idle();
}

#[test]
fn a_dropped_request_without_a_stream_is_cancelled() {
    let server = TestServer::start();
    let body = with(endless(), json!({ "stream": false, "n": 4 })).to_string();
    let mut stream = server.client().connect();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    // Until some of the answer has been generated.
    while server.get("/status").ok()["requests"][0]["generated_tokens"]
        .as_u64()
        .is_none_or(|tokens| tokens < 5)
    {}
    drop(stream);
    server.assert_idle();
    let metrics = server.get("/metrics").text();
    assert!(metrics.contains("finished_reason=\"abort\"} 4"), "{metrics}");
}

#[test]
fn garbage_is_answered_or_cut_and_hurts_nobody() {
    let server = TestServer::start();
    let client = server.client();
    // Only a request that has no end gets no answer.
    let cases: [(&[u8], &str); 7] = [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "400"),
        (b"GET / HTTP/9.9\r\n\r\n", "400"),
        (b"\r\n\r\n\r\n\0\0\0", "400"),
        (b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n", "4"),
        (b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: ten\r\n\r\n", "400"),
        (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
            "400",
        ),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ", ""),
    ];
    for (bytes, status) in cases {
        let answer = client.raw(bytes);
        let text = String::from_utf8_lossy(&answer).into_owned();
        let found = text.split(' ').nth(1).unwrap_or_default();
        assert!(found.starts_with(status) && found.is_empty() == status.is_empty(), "{bytes:?}: {text}");
    }
    let mut long = b"GET /health HTTP/1.1\r\nhost: localhost\r\n".to_vec();
    long.extend(format!("x: {}\r\n\r\n", "y".repeat(1 << 20)).bytes());
    let text = String::from_utf8_lossy(&client.raw(&long)).into_owned();
    // What was not read of it may reset the connection before the answer is read.
    assert!(text.is_empty() || text.starts_with("HTTP/1.1 431"), "{text}");
    assert_eq!(server.get("/health").ok()["status"], "ok");
}

#[test]
fn large_and_deep_bodies_are_refused() {
    let server = TestServer::start();
    let mut stream = server.client().connect();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", 100 << 20);
    stream.write_all(head.as_bytes()).unwrap();
    let answer = crate::common::Stream::of(stream.try_clone().unwrap());
    assert_eq!(answer.status, 413);
    drop((answer, stream));
    // Without a length, it is counted.
    let mut stream = server.client().connect();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    let part = vec![b' '; 1 << 20];
    for _ in 0..40 {
        let sent = write!(stream, "{:x}\r\n", part.len()).and_then(|()| stream.write_all(&part));
        if sent.and_then(|()| stream.write_all(b"\r\n")).is_err() {
            break;
        }
    }
    let mut text = [0; 12];
    stream.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"HTTP/1.1 413");
    let deep = format!("{{\"messages\":{}", "[".repeat(1 << 17));
    let answer = server.client().send("POST", CHAT, deep.as_bytes()).answer();
    assert_eq!(answer.status, 400);
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("recursion limit"));
    for body in ["", "{", "[]", "nonsense", "\u{feff}{}"] {
        assert_eq!(server.client().send("POST", CHAT, body.as_bytes()).answer().status, 400, "{body:?}");
    }
    server.assert_idle();
}

/// A client may end its side once it has sent its request, as `nc -N` does, and still gets the answer.
#[test]
fn a_half_closed_connection_gets_its_answer() {
    let server = TestServer::start();
    for streams in [false, true] {
        let body = with(hello(), json!({ "max_tokens": 100, "stream": streams })).to_string();
        let head =
            format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", body.len());
        let mut stream = server.client().connect();
        stream.write_all((head + &body).as_bytes()).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut all = String::new();
        stream.read_to_string(&mut all).unwrap();
        assert!(all.contains("HTTP/1.1 200 OK"), "{all}");
        assert!(all.contains(if streams { "data: [DONE]" } else { "\"finish_reason\":\"length\"" }), "{all}");
        // Nothing but answers before the answer comes first.
        let first = all.split("HTTP/1.1 200 OK").next().unwrap();
        assert_eq!(first.replace("HTTP/1.1 100 Continue\r\n\r\n", ""), "");
    }
    server.assert_idle();
}

#[test]
fn a_half_closed_connection_does_not_hang() {
    let server = TestServer::start();
    let body = endless().to_string();
    let mut stream = server.client().connect();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut all = String::new();
    stream.read_to_string(&mut all).unwrap();
    assert!(all.contains("data: [DONE]"), "{all}");
    // Half of a body is an error, and the rest is not waited for.
    let chunked =
        format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nff\r\n");
    let of_length = format!("the connection ended after 10 of {} bytes of the body", body.len());
    for (head, wanted) in [(head, of_length.as_str()), (chunked, "ended after 10 bytes of the body")] {
        let mut stream = server.client().connect();
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(&body.as_bytes()[..10]).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut all = String::new();
        stream.read_to_string(&mut all).unwrap();
        let answer = all.trim_start_matches("HTTP/1.1 100 Continue\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains(wanted), "{all}");
    }
    server.assert_idle();
}

#[test]
fn a_slow_body_is_timed_out() {
    let mut setup = Setup::default();
    setup.limits.body_time = std::time::Duration::from_millis(20);
    let server = setup.start();
    let mut stream = server.client().connect();
    stream
        .write_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        .unwrap();
    let answer = crate::common::Stream::of(stream).answer();
    assert_eq!(answer.status, 408);
    // Its time began anew with the byte that came.
    assert!(answer.text().contains("no more of the body arrived within 20ms"), "{}", answer.text());
}

#[test]
fn unknown_routes_and_methods_have_the_dialects_form() {
    let server = TestServer::start();
    let answer = server.get("/nothing");
    assert_eq!(
        (answer.status, answer.json()["error"]["message"].clone()),
        (404, json!("no route GET /nothing"))
    );
    let answer = server.get("/api/nothing");
    assert_eq!((answer.status, answer.json()), (404, json!({ "error": "no route GET /api/nothing" })));
    let answer = server.get("/v1/messages/nothing");
    assert_eq!(answer.json()["error"]["type"], "not_found_error");
    assert_eq!(answer.json()["request_id"].as_str(), answer.header("x-request-id"));
    assert_eq!(server.get(CHAT).status, 405);
    let own = server.client().header("x-request-id", "mine").get("/health");
    assert_eq!(own.header("x-request-id"), Some("mine"));
}

#[test]
fn names_that_are_no_text_are_refused_in_the_dialects_form() {
    let server = TestServer::start();
    for path in ["/v1/models/%ff%fe", "/models/%80"] {
        let answer = server.get(path);
        assert_eq!(answer.status, 400, "{}", answer.text());
        assert_eq!(answer.json()["error"]["param"], "model", "{}", answer.text());
    }
}

/// A proxy may have read another body than the server would.
#[test]
fn bodies_in_other_codings_are_refused_by_name() {
    let server = TestServer::start();
    let body = "{\"content\":\"hi\"}";
    let chunked = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    let ask = |headers: &str, body: &str| {
        let head =
            format!("POST /tokenize HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n");
        String::from_utf8(server.client().raw((head + body).as_bytes())).unwrap()
    };
    let length = format!("content-length: {}\r\n", body.len());
    for (headers, body, named) in [
        ("transfer-encoding: gzip, chunked\r\n", &chunked, "transfer-encoding"),
        ("transfer-encoding: chunked, chunked\r\n", &chunked, "transfer-encoding"),
        ("transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n", &chunked, "transfer-encoding"),
        (&format!("content-encoding: gzip\r\n{length}"), &body.to_owned(), "content-encoding"),
    ] {
        let answer = ask(headers, body);
        assert!(answer.contains("HTTP/1.1 400") && answer.contains(named), "{headers}: {answer}");
    }
    for (headers, body) in [
        ("transfer-encoding: Chunked\r\n", &chunked),
        (&format!("content-encoding: identity\r\n{length}"), &body.to_owned()),
    ] {
        let answer = ask(headers, body);
        assert!(answer.contains("HTTP/1.1 200"), "{headers}: {answer}");
    }
}

#[test]
fn the_page_is_for_browsers() {
    let server = TestServer::start();
    assert_eq!(server.get("/").text(), "Ollama is running");
    let browser = || server.client().header("accept", "text/html,*/*");
    let page = browser().get("/");
    assert_eq!(page.header("content-type"), Some("text/html; charset=utf-8"));
    assert!(page.header("content-security-policy").unwrap().starts_with("default-src 'none'"));
    let tag = page.header("etag").unwrap().to_owned();
    assert_eq!(browser().header("if-none-match", &tag).get("/").status, 304);
}

#[test]
fn stopping_finishes_answers_and_refuses_others() {
    let mut server = TestServer::start();
    let mut stream = server.client().stream(CHAT, &with(endless(), json!({ "max_tokens": 100 })));
    assert!(stream.chunk().is_some());
    server.stop();
    let answer = stream.answer();
    assert!(answer.text().ends_with("data: [DONE]\n\n"), "{}", answer.text());
    server.join();
    let address = server.address;
    assert!(std::net::TcpStream::connect(address).is_err());
    let _ = Client::new(address);
}

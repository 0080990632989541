//! TLS, Unix sockets, pages of other origins, time-outs and the bounded queue.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
#![cfg(unix)]

mod common;

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::{Setup, TestServer, Value, hello, json, with};
use quadriga_server::{Hosts, Keys, ListenAddress, Origins, TlsFiles};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};

const CHAT: &str = "/v1/chat/completions";
const GET_HEALTH: &[u8] = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";

/// Copies one of two certificates of localhost and its key, which serve no other purpose, and returns the certificate.
fn certify(folder: &Path, name: &str) -> CertificateDer<'static> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let certificate = data.join(format!("{name}-certificate.pem"));
    std::fs::copy(data.join(format!("{name}-key.pem")), folder.join("key.pem")).unwrap();
    std::fs::copy(&certificate, folder.join("cert.pem")).unwrap();
    CertificateDer::from_pem_file(certificate).unwrap()
}

/// The answer to a request over TLS, from a server with this certificate.
fn get_secure(server: &TestServer, trusted: &CertificateDer<'static>) -> std::io::Result<String> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(trusted.clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let session = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = rustls::StreamOwned::new(session, server.client().connect());
    stream.write_all(GET_HEALTH)?;
    let mut text = String::new();
    match stream.read_to_string(&mut text) {
        // Not every close is announced.
        Err(error) if error.kind() != std::io::ErrorKind::UnexpectedEof => Err(error),
        _ => Ok(text),
    }
}

#[test]
fn connections_are_encrypted_and_certificates_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let first = certify(folder.path(), "first");
    let open = || TlsFiles::open(folder.path().join("cert.pem"), folder.path().join("key.pem"));
    let setup = Setup::default();
    let server = TestServer::of(setup.app().with_tls(open().unwrap()));
    assert!(get_secure(&server, &first).unwrap().starts_with("HTTP/1.1 200"));
    // Plain HTTP is no TLS.
    let plain = server.client().raw(GET_HEALTH);
    assert!(!plain.starts_with(b"HTTP"), "{plain:?}");
    // A file that is half written changes nothing.
    let key = std::fs::read(folder.path().join("key.pem")).unwrap();
    std::fs::write(folder.path().join("key.pem"), &key[..40]).unwrap();
    assert!(open().unwrap_err().contains("key.pem"));
    assert!(get_secure(&server, &first).unwrap().starts_with("HTTP/1.1 200"));
    let second = certify(folder.path(), "second");
    assert!(get_secure(&server, &second).unwrap().starts_with("HTTP/1.1 200"));
    assert!(get_secure(&server, &first).is_err());
}

/// A server at a Unix socket.
fn at_socket(setup: Setup, path: &Path) -> TestServer {
    TestServer::at(setup.app(), ListenAddress::Unix { path: path.to_owned(), mode: 0o600 })
}

fn ask(path: &Path, bytes: &[u8]) -> String {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(bytes).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn a_unix_socket_is_private_and_replaces_one_left_behind() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("q.sock");
    // As a killed server leaves it.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let mut server = at_socket(Setup::default(), &path);
    assert!(ask(&path, GET_HEALTH).starts_with("HTTP/1.1 200"));
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    // One that is in use is not taken away.
    let taken = std::panic::catch_unwind(|| at_socket(Setup::default(), &path));
    assert!(taken.is_err());
    assert!(ask(&path, GET_HEALTH).starts_with("HTTP/1.1 200"));
    // It has its mode before anybody can connect, and what that took is gone.
    let names =
        || -> Vec<_> { folder.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect() };
    assert_eq!(names(), ["q.sock"]);
    server.stop();
    server.join();
    assert!(!path.exists() && names().is_empty());
    // Nor is any other file.
    std::fs::write(&path, "text").unwrap();
    assert!(std::panic::catch_unwind(|| at_socket(Setup::default(), &path)).is_err());
    assert_eq!((std::fs::read_to_string(&path).unwrap(), names().len()), ("text".to_owned(), 1));
}

/// A server that ends takes away its own socket, not that of its successor.
#[test]
fn the_socket_of_a_successor_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("q.sock");
    let mut first = at_socket(Setup::default(), &path);
    std::fs::remove_file(&path).unwrap();
    let _second = at_socket(Setup::default(), &path);
    first.stop();
    first.join();
    assert!(ask(&path, GET_HEALTH).starts_with("HTTP/1.1 200"));
}

#[test]
fn a_client_that_does_not_read_is_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("q.sock");
    let mut setup = Setup::default();
    setup.limits.write_time = Duration::from_millis(20);
    let server = at_socket(setup, &path);
    // More than the buffers of the socket hold.
    let body = with(
        hello(),
        json!({ "max_tokens": 480, "n": 4, "stream": true, "logprobs": true, "top_logprobs": 20 }),
    );
    let body = body.to_string();
    let mut stream = UnixStream::connect(&path).unwrap();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    // Until the server has given up; the stream stays open on this side.
    let status = || {
        let text = ask(&path, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        let line =
            text.lines().find(|line| line.starts_with("quadriga:http_requests_active")).unwrap().to_owned();
        line.rsplit(' ').next().unwrap().parse::<u32>().unwrap()
    };
    while server.app.requests().active() == 0 {}
    // This request itself is the one that is left.
    while status() > 1 {}
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    assert!(!rest.ends_with(b"0\r\n\r\n"), "the answer was complete: {} bytes", rest.len());
    for served in server.app.models().loaded() {
        // It ends with the step that is being computed.
        while served.state().running > 0 {}
        assert_eq!((served.state().running, served.state().used_pages), (0, 0));
    }
}

#[test]
fn a_slow_header_is_timed_out() {
    let mut setup = Setup::default();
    setup.limits.header_time = Duration::from_millis(20);
    let server = setup.start();
    let mut stream = server.client().connect();
    stream.write_all(b"GET /health HTTP/1.1\r\nhost:").unwrap();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty() || rest.starts_with(b"HTTP/1.1 408"), "{rest:?}");
}

#[test]
fn pages_of_other_origins_are_refused_unless_allowed() {
    let page =
        |server: &TestServer, origin: &str| server.client().header("origin", origin).post(CHAT, &hello());
    let server = TestServer::start();
    let foreign = page(&server, "https://evil.example");
    assert_eq!(foreign.status, 403);
    assert!(foreign.json()["error"]["message"].as_str().unwrap().contains("--cors-origins"));
    for own in ["http://localhost", "http://127.0.0.1:3000"] {
        let answer = page(&server, own);
        assert_eq!((answer.status, answer.header("access-control-allow-origin")), (200, None), "{own}");
    }
    let preflight = |server: &TestServer, origin: &str| {
        let client = server.client().header("origin", origin).header("access-control-request-method", "POST");
        client
            .header("access-control-request-headers", "authorization, x-any")
            .send("OPTIONS", CHAT, b"")
            .answer()
    };
    assert_eq!(preflight(&server, "https://a.example").header("access-control-allow-origin"), None);
    let origins = Origins::parse("https://a.example");
    let server = TestServer::of(Setup::default().app().with_origins(origins));
    let asked = preflight(&server, "https://a.example");
    assert_eq!((asked.status, asked.header("access-control-allow-origin")), (204, Some("https://a.example")));
    assert_eq!(asked.header("access-control-allow-headers"), Some("authorization, x-any"));
    let answer = page(&server, "https://a.example");
    assert_eq!(
        (answer.status, answer.header("access-control-allow-origin")),
        (200, Some("https://a.example"))
    );
    assert_eq!(page(&server, "https://b.example").status, 403);
}

/// A page can have the name of its own site resolved to this machine: the browser takes the server for the site's then.
#[test]
fn names_of_other_sites_are_refused_on_the_loopback_interface() {
    let send = |server: &TestServer, request: &str| {
        let (mut stream, mut text) = (server.client().connect(), String::new());
        stream.write_all(request.as_bytes()).unwrap();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    let ask = |server: &TestServer, host: &str| {
        send(server, &format!("GET /v1/models HTTP/1.1\r\n{host}connection: close\r\n\r\n"))
    };
    let server = TestServer::start();
    let refused = ask(&server, "host: evil.example:8080\r\n");
    assert!(refused.starts_with("HTTP/1.1 403"), "{refused}");
    assert!(refused.contains("--allowed-hosts evil.example"), "{refused}");
    let absolute =
        "GET http://evil.example/v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let absolute = send(&server, absolute);
    assert!(absolute.starts_with("HTTP/1.1 403"), "{absolute}");
    for host in ["", "host: localhost\r\nhost: evil.example\r\n"] {
        let wrong = ask(&server, host);
        assert!(wrong.starts_with("HTTP/1.1 400"), "{host:?}: {wrong}");
    }
    for host in ["localhost", "LocalHost:1234", "127.0.0.1:8080", "[::1]:8080", "192.168.1.2"] {
        let answer = ask(&server, &format!("host: {host}\r\n"));
        assert!(answer.starts_with("HTTP/1.1 200"), "{host}: {answer}");
    }
    let app = Setup::default().app().with_hosts(Hosts::parse("own.example"));
    let server = TestServer::of(app.with_origins(Origins::parse("https://page.example")));
    for (host, status) in [("own.example", 200), ("page.example:80", 200), ("evil.example", 403)] {
        let answer = ask(&server, &format!("host: {host}\r\n"));
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{host}: {answer}");
    }
    // A key protects it from pages, which do not know it.
    let keys = Keys::new(vec!["secret".to_owned()], None).unwrap();
    let server = Setup { keys, ..Setup::default() }.start();
    let answer = ask(&server, "host: own.example\r\nx-api-key: secret\r\n");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[test]
fn requests_for_which_there_is_room_do_not_wait_in_the_queue() {
    let mut setup = Setup::default();
    setup.batcher.queue = 1;
    let server = setup.start();
    for choices in [2, 5] {
        let whole = server.post(CHAT, &with(hello(), json!({ "n": choices }))).ok();
        assert_eq!(whole["choices"].as_array().unwrap().len(), choices);
    }
    let refused = server.post(CHAT, &with(hello(), json!({ "n": 6 })));
    assert_eq!(refused.status, 400, "four run and one waits at most: {}", refused.text());
    server.assert_idle();
}

#[test]
fn a_full_queue_is_429_with_the_time_to_wait() {
    let mut setup = Setup::default();
    setup.batcher.queue = 2;
    setup.batcher.engine.sequences = 1;
    let server = setup.start();
    let endless = with(hello(), json!({ "max_tokens": 480, "stream": true }));
    let mut running = server.client().stream(CHAT, &endless);
    assert!(running.chunk().is_some());
    let waiting: Vec<_> = (0..2)
        .map(|_| {
            let stream = server.client().stream(CHAT, &endless);
            assert_eq!(stream.status, 200);
            stream
        })
        .collect();
    let refused = server.post(CHAT, &hello());
    assert_eq!(refused.status, 429, "{}", refused.text());
    assert!(refused.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
    drop((running, waiting));
    server.assert_idle();
    server.post(CHAT, &hello()).ok();
}

#[test]
fn a_server_that_drains_says_that_it_is_not_ready() {
    let mut server = TestServer::start();
    let endless = with(hello(), json!({ "max_tokens": 480, "stream": true }));
    // One that never asks for anything does not hold it up for long.
    let idle = server.client().connect();
    let mut stream = server.client().stream(CHAT, &endless);
    assert!(stream.chunk().is_some());
    server.stop();
    while !server.app.is_stopping() {}
    let health = server.get("/health");
    assert_eq!((health.status, server.post(CHAT, &hello()).status), (503, 503));
    assert!(stream.answer().text().ends_with("data: [DONE]\n\n"));
    server.join();
    drop(idle);
}

#[test]
fn answers_that_take_too_long_are_cut_at_the_deadline() {
    // A model that was unloaded goes on with its answers, and ends them, too.
    for unloads in [false, true] {
        let mut setup = Setup::default();
        setup.limits.drain = Duration::ZERO;
        let mut server = setup.start();
        let mut stream =
            server.client().stream(CHAT, &with(hello(), json!({ "max_tokens": 480, "stream": true })));
        assert!(stream.chunk().is_some());
        if unloads {
            server.app.models().unload("small").unwrap();
        }
        server.stop();
        let mut rest = Vec::new();
        while let Some(chunk) = stream.chunk() {
            rest.extend(chunk);
        }
        let rest = String::from_utf8(rest).unwrap();
        assert!(rest.contains("the server stopped before the answer was complete"), "{rest}");
        assert!(!rest.contains("[DONE]"), "{rest}");
        server.join();
    }
}

#[test]
fn tokens_that_nobody_reads_end_their_answer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("q.sock");
    let mut setup = Setup::default();
    setup.batcher.engine.context = 8192;
    // Not this limit ends it, however slow the machine is.
    setup.limits.write_time = Duration::from_secs(3600);
    let server = at_socket(setup, &path);
    let body = json!({ "max_tokens": 8000, "n": 4, "stream": true, "logprobs": true, "top_logprobs": 20 });
    let body = with(hello(), body).to_string();
    let mut stream = UnixStream::connect(&path).unwrap();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).unwrap();
    let served = server.app.models().loaded().pop().unwrap();
    while served.state().running == 0 {}
    // It ends although nothing was read: its sequence is free for others.
    while served.state().running > 0 {}
    assert_eq!(served.state().used_pages, 0);
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("tokens waited for a client that did not read them"), "{}", rest.len());
    assert!(!rest.contains("[DONE]"));
    let tokens = rest.matches("\"delta\"").count();
    // So many of each answer; control tokens have no text, and no event of their own.
    assert!((6000..16_000).contains(&tokens), "{tokens}");
}

/// Small values take many times their bytes. One body takes a quarter of the memory for all.
#[test]
fn bodies_of_many_values_are_too_large() {
    let mut setup = Setup::default();
    setup.limits.body_memory = 800_000;
    let server = setup.start();
    let filled = |more: Value| with(hello(), json!({ "metadata": more }));
    for many in [json!(vec![0; 2000]), json!(vec![json!([]); 500]), json!("x".repeat(210_000))] {
        let answer = server.post(CHAT, &filled(many));
        assert_eq!(answer.status, 413, "{}", answer.text());
        assert!(answer.text().contains("all bodies"), "{}", answer.text());
    }
    // Before the rest of them has come.
    let mut stream = server.client().connect();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n");
    stream.write_all((head + &"[".repeat(200)).as_bytes()).unwrap();
    let answer = common::Stream::of(stream).answer();
    assert_eq!(answer.status, 400, "{}", answer.text());
    assert!(answer.text().contains("lists and objects within each other"), "{}", answer.text());
    // In a text they are letters.
    server.post(CHAT, &filled(json!({ "a": ",[{".repeat(20_000) }))).ok();
    server.post(CHAT, &hello()).ok();
}

/// Bodies that stand still take the room of their bytes only, and all of them share it.
#[test]
fn bodies_of_all_requests_share_a_limit() {
    let mut setup = Setup::default();
    setup.limits.body_memory = 400_000;
    let server = setup.start();
    let wanted = |count: usize| json!({ "content": "x".repeat(count) });
    // Its values would take more than everything.
    let standing = |text: &str| {
        let mut stream = server.client().connect();
        let head = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n";
        stream.write_all((head.to_owned() + text).as_bytes()).unwrap();
        stream
    };
    let lists: Vec<_> = (0..40).map(|_| standing(&format!("{{\"a\":[{}", "[],".repeat(100)))).collect();
    while server.app.requests().active() < lists.len() {}
    server.post("/tokenize", &wanted(80_000)).ok();
    let long: Vec<_> = (0..5).map(|_| standing(&format!("{{\"content\":\"{}", "x".repeat(70_000)))).collect();
    let refused =
        (0..10_000).map(|_| server.post("/tokenize", &wanted(80_000))).find(|one| one.status != 200);
    let refused = refused.unwrap();
    assert_eq!(refused.status, 429, "{}", refused.text());
    assert!(refused.header("retry-after").is_some() && refused.text().contains("other requests"));
    server.post("/tokenize", &wanted(100)).ok();
    drop(long);
    assert!((0..10_000).any(|_| server.post("/tokenize", &wanted(80_000)).status == 200));
}

#[test]
fn memory_is_given_back_when_there_is_nothing_to_do() {
    let released = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counter = Arc::clone(&released);
    let release = move || {
        counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    };
    let server = TestServer::of(Setup::default().app().with_memory_release(Box::new(release)));
    let times = || released.load(std::sync::atomic::Ordering::Relaxed);
    while times() == 0 {
        std::thread::yield_now();
    }
    // Again, once there is more of it.
    let before = times();
    let more = vec![1u8; 256 << 20];
    while times() == before {
        std::thread::yield_now();
    }
    assert_eq!(more.last(), Some(&1));
    drop(server);
}

//! What `quadriga serve` does and says before the first request.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
#![cfg(unix)]

use std::process::Command;

use serde_json::{Value, json};

use crate::common::{Fixture, output, quadriga};
use crate::serve::{Running, TEMPLATE, serve};

/// Containers and units log JSON, and may ask for errors only.
#[test]
fn no_level_of_the_log_hides_that_no_key_is_asked_for() {
    let fixture = Fixture::new(&[]);
    for level in [&["--log-level", "error"][..], &["-lv", "1"]] {
        let mut command = fixture.command("serve", &["--host", "0.0.0.0", "--log-format", "json"]);
        // It ends before it listens.
        command.args(["--tls-cert", "/missing.pem", "--tls-key", "/missing.pem"]).args(level);
        let error = output(&mut command).failed_usage().err;
        let first: Value = serde_json::from_str(error.lines().next().unwrap()).unwrap();
        assert_eq!(first["level"], "WARN", "{error}");
        assert!(first["message"].as_str().unwrap().contains("everybody who reaches 0.0.0.0"), "{error}");
        assert!(first["timestamp"].as_str().unwrap().starts_with("20"), "{error}");
    }
}

/// Shells limit a process to 1,024 descriptors.
#[test]
#[cfg(target_os = "linux")]
fn the_limit_of_descriptors_is_raised() {
    let fixture = Fixture::new(&[]);
    let serve = fixture.command("serve", &["--port", "0", "-c", "64"]);
    let mut shell = Command::new("sh");
    // The shell is replaced by the server, and so its number is the server's.
    let script = "ulimit -Sn 64; echo $$ > \"$0\"; exec \"$@\"";
    let number = fixture.path("number");
    shell.args(["-c", script]).arg(&number).arg(serve.get_program()).args(serve.get_args());
    shell.envs(serve.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let _server = Running::start(&mut shell);
    let number = std::fs::read_to_string(number).unwrap();
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", number.trim())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let fields: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(fields[3], fields[4], "{line}");
}

/// The allocator keeps what is free at the end of all arenas but the first, so that there must be no other: also none of a thread that
/// was there before the command.
#[test]
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn all_threads_allocate_from_one_arena() {
    const ARENA: usize = 64 << 20;
    let fixture = Fixture::new(&[]);
    let server = Running::start(&mut fixture.command("serve", &["--port", "0", "-c", "64"]));
    let body = json!({ "prompt": "x", "max_tokens": 3 }).to_string();
    assert_eq!(server.ask("POST", "/v1/completions", "", &body).0, 200);
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", server.process())).unwrap();
    let ranges = maps.lines().map(|line| {
        let (range, rest) = line.split_once(' ').unwrap();
        let (start, end) = range.split_once('-').unwrap();
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        (number(start), number(end), &rest[..4])
    });
    // An arena begins at a multiple of its size; what it does not use yet cannot be accessed.
    let ranges: Vec<_> = ranges.collect();
    let arena = ranges.windows(2).find(|pair| {
        let ((start, end, access), (next, last, unused)) = (pair[0], pair[1]);
        start % ARENA == 0 && access == "rw-p" && (end, unused) == (next, "---p") && last == start + ARENA
    });
    assert_eq!(arena, None, "{maps}");
}

#[test]
fn models_of_a_folder_have_aliases() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a.gguf", "b.gguf"] {
        output(quadriga(["synth", "-o"]).arg(folder.path().join(name))).success();
    }
    let serve = |aliases: &str| {
        let mut command = quadriga(["serve", "--port", "0", "-c", "64", "--alias", aliases, "--models-dir"]);
        command.arg(folder.path());
        command
    };
    let server = Running::start(&mut serve("claude-x=b,other=a"));
    let body = json!({ "model": "claude-x", "prompt": "x", "max_tokens": 1 }).to_string();
    let (status, text) = server.ask("POST", "/v1/completions", "", &body);
    assert_eq!(status, 200, "{text}");
    let loaded = server.ask("GET", "/status", "", "").1;
    assert_eq!(serde_json::from_str::<Value>(&loaded).unwrap()["model"], "b");
    let error = output(&mut serve("x=c")).failed_usage().err;
    assert!(error.contains("there is no model c"), "{error}");
}

#[test]
fn a_server_whose_only_model_does_not_fit_does_not_start() {
    let fixture = Fixture::new(&["--layers", "24", "--width", "512"]);
    let refused = |flags: &[&str]| {
        let command = &mut fixture.command("serve", &["--port", "0", "-q"]);
        output(command.args(flags))
            .failed(1, &["does not fit", "cpu needs", "--kv-tokens", "(-c)", "--parallel"]);
    };
    refused(&["-c", "64", "--kv-tokens", "40000000"]);
    refused(&["-c", "40000000"]);
    // What the defaults reserve is no reason.
    Running::start(&mut fixture.command("serve", &["--port", "0"]));
}

/// Whoever reads the log as JSON gets nothing else, whether the server runs or not.
#[test]
fn every_line_of_a_log_in_json_is_json() {
    let fixture = Fixture::with_template(TEMPLATE);
    let lines = |log: &str| -> Vec<Value> {
        let parse =
            |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}\n{log}"));
        log.lines().map(parse).collect()
    };
    let flags = ["--log-format", "json", "--host", "0.0.0.0", "-fa", "off"];
    let server = serve(&fixture, &flags);
    let busy = server.address.rsplit(':').next().unwrap().to_owned();
    let failed = output(
        fixture
            .command("serve", &["-c", "2048", "--log-format", "json", "--port", &busy])
            .args(["--host", "0.0.0.0"]),
    );
    let last = lines(&failed.err).pop().unwrap();
    assert_eq!((failed.code, last["level"].as_str()), (Some(1), Some("ERROR")), "{last}");
    assert!(last["message"].as_str().unwrap().contains("cannot listen"), "{last}");
    server.signal("TERM");
    let (_, log) = server.wait();
    let lines = lines(&log);
    let has = |level: &str, words: &str| {
        lines.iter().any(|line| {
            line["level"] == level && line["message"].as_str().unwrap_or_default().contains(words)
        })
    };
    assert!(has("WARN", "everybody who reaches"), "{log}");
    assert!(has("INFO", "is served at") && has("INFO", "-fa off has no effect"), "{log}");
    // Where nothing is logged, it is still said why the server did not start.
    let silent = output(
        &mut fixture.command("serve", &["--log-format", "json", "--log-level", "off", "-m", "none.gguf"]),
    );
    assert!(silent.code == Some(1) && silent.err.contains("none.gguf"), "{silent:?}");
}

#[test]
fn wrong_options_are_errors() {
    let fixture = Fixture::new(&[]);
    let refused = |flags: &[&str], part: &str| {
        let failed = output(&mut fixture.command("serve", flags));
        assert!(failed.code != Some(0) && failed.err.contains(part), "{failed:?}");
    };
    refused(&["--tls-cert", "x.pem"], "--tls-key");
    refused(&["--tls-cert", "x.pem", "--tls-key", "y.pem"], "x.pem");
    refused(&["--ssl-cert-file", "x.pem", "--ssl-key-file", "y.pem"], "x.pem");
    refused(&["--api-key-file", "no/such/file"], "no/such/file");
    refused(&["--models-dir", "no/such/folder"], "no/such/folder");
    refused(&["--host", "no/such/folder/q.sock"], "q.sock");
    refused(&["--host", "no/such/folder/qsock"], "qsock");
    refused(&["no-such-model.gguf"], "is not a model");
    refused(&["--socket-mode", "999"], "octal");
    refused(&["--single-turn"], "quadriga chat");
    refused(&["--api-prefix", "llm"], "/llm");
    refused(&["--api-prefix", "/{x}"], "/llm");
    refused(&["--reasoning-format", "some"], "deepseek-legacy");
    refused(&["--pooling", "median"], "mean, cls, last");
    refused(&["--pooling", "rank", "--port", "0"], "classification head");
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/../server/tests/data/first");
    let [certificate, key] = ["certificate", "key"].map(|name| format!("{data}-{name}.pem"));
    refused(&["--tls-cert", &certificate, "--tls-key", &certificate], "it holds a certificate");
    refused(&["--tls-cert", &key, "--tls-key", &key], "it holds a private key");
    output(&mut quadriga(["serve", "--port", "0", "-m", "none.gguf"])).failed(1, &["none.gguf"]);
    // Whoever listens where others can reach it without a key is warned.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    refused(&["--port", &port], "cannot listen at 127.0.0.1");
    refused(&["--host", "no.such.host.invalid"], "no.such.host.invalid");
}

#[test]
fn another_address_without_a_key_is_warned_about() {
    let fixture = Fixture::new(&[]);
    let server = serve(&fixture, &["--host", "0.0.0.0"]);
    server.signal("TERM");
    assert!(server.wait().1.contains("WARNING: everybody who reaches 0.0.0.0"));
    let server = serve(&fixture, &["--host", "0.0.0.0", "--api-key", "k"]);
    server.signal("TERM");
    assert!(!server.wait().1.contains("WARNING"));
}

#[test]
fn forms_that_cannot_be_kept_and_caches_without_room_are_refused_at_the_start() {
    let fixture = Fixture::with_template(TEMPLATE);
    for (flags, reason) in [
        (["--json-schema", "{\"not\": {}}"], "JSON schema"),
        (["--grammar", "root ::= missing"], "missing"),
        (["--cache-ram", "100"], "100M"),
    ] {
        let output = fixture.command("serve", &["--port", "0", "-c", "64"]).args(flags).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && error.contains(reason), "{flags:?}: {error}");
    }
}

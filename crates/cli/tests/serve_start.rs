//! What `quadriga serve` does and says before the first request.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
#![cfg(unix)]

use std::process::Command;

use serde_json::{Value, json};

use crate::common::{Fixture, output, quadriga};
use crate::serve::Running;

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

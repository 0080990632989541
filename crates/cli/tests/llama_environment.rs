//! Environment variables of llama-server, which containers are configured by.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
#![cfg(unix)]

use serde_json::Value;

use crate::common::{Fixture, output};
use crate::serve::Running;

const KEY: &str = "authorization: Bearer secret\r\n";

#[test]
fn a_key_of_the_environment_is_asked_for() {
    let fixture = Fixture::new(&[]);
    let mut command = fixture.command("serve", &["-c", "64"]);
    command.env("LLAMA_API_KEY", "secret").env("LLAMA_ARG_PORT", "0").env("LLAMA_ARG_CTX_SIZE", "32");
    command
        .env("LLAMA_ARG_ALIAS", "named")
        .env("LLAMA_ARG_NO_ENDPOINT_SLOTS", "1")
        .env("LLAMA_ARG_JINJA", "0");
    command
        .env("LLAMA_ARG_NO_SUCH", "x")
        .env("LLAMA_ARG_MMPROJ", "x.gguf")
        .env("LLAMA_ARG_MODEL", "absent.gguf");
    let server = Running::start(&mut command);
    assert_eq!(server.ask("GET", "/v1/models", "", "").0, 401);
    let (status, models) = server.ask("GET", "/v1/models", KEY, "");
    assert_eq!(status, 200);
    assert!(models.contains("\"named\""), "{models}");
    // The command line wins.
    let properties: Value = serde_json::from_str(&server.ask("GET", "/props", KEY, "").1).unwrap();
    assert_eq!(properties["default_generation_settings"]["n_ctx"], 64, "{properties}");
    assert_ne!(server.ask("GET", "/slots", KEY, "").0, 200);
    server.signal("TERM");
    let (_, log) = server.wait();
    for part in ["LLAMA_ARG_NO_SUCH has no effect", "LLAMA_ARG_MMPROJ has no effect: vision"] {
        assert!(log.contains(part), "{part} in {log}");
    }
    assert_eq!(log.matches("WARNING").count(), 2, "{log}");
    assert!(!log.contains("secret"), "{log}");
}

#[test]
fn keys_of_the_command_line_replace_those_of_the_environment() {
    let fixture = Fixture::new(&[]);
    let mut command = fixture.command("serve", &["-c", "64", "--port", "0", "--api-key", "other"]);
    let server = Running::start(command.env("LLAMA_API_KEY", "secret"));
    assert_eq!(server.ask("GET", "/v1/models", KEY, "").0, 401);
    assert_eq!(server.ask("GET", "/v1/models", "authorization: Bearer other\r\n", "").0, 200);
}

#[test]
fn wrong_values_of_variables_are_named() {
    let fixture = Fixture::new(&[]);
    for (name, value, part) in [
        ("LLAMA_ARG_PORT", "eighty", "--port"),
        ("LLAMA_ARG_WEBUI", "maybe", "must be 1 or 0"),
        ("LLAMA_ARG_THINK_BUDGET", "-2", "-1 for no limit"),
    ] {
        let failed = output(fixture.command("serve", &[]).env(name, value)).failed_usage();
        assert!(failed.err.contains(part) && failed.err.contains(name), "{failed:?}");
    }
    // Other commands are not configured by them.
    let mut run = fixture.command("run", &["-n", "1", "hi"]);
    output(run.env("LLAMA_ARG_PORT", "eighty").env("LLAMA_ARG_CTX_SIZE", "x")).success();
    output(&mut fixture.command("serve", &["-hff", "a.gguf"])).failed(2, &["-hff", "ORG/REPO:QUANT"]);
}

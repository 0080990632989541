//! Ctrl-C at every stage: exit code 130, and no partial files.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
#![cfg(unix)]

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::common::{Fixture, quadriga};

fn start(command: &mut Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn interrupt(child: &Child) {
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
}

/// A named pipe: opening one end blocks until the other is opened.
fn fifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn while_fetching() {
    let folder = tempfile::tempdir().unwrap();
    let (pip, begun, cache) =
        (folder.path().join("pip"), folder.path().join("begun"), folder.path().join("cache"));
    fifo(&begun);
    fs::write(&pip, format!("#!/bin/sh\necho > '{}'\nexec sleep 600\n", begun.display())).unwrap();
    fs::set_permissions(&pip, fs::Permissions::from_mode(0o755)).unwrap();
    let child = start(quadriga(["run", "hi", "--cache-dir"]).arg(&cache).env("QUADRIGA_PIP", &pip));
    fs::read(&begun).unwrap();
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let left: Vec<_> = fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| name == ".fetch.lock"), "{left:?}");
}

#[test]
fn while_waiting_for_the_prompt() {
    let fixture = Fixture::new(&[]);
    fifo(&fixture.path("prompt"));
    let child = start(fixture.command("run", &["-f"]).arg(fixture.path("prompt")));
    let writer = fs::File::create(fixture.path("prompt")).unwrap();
    interrupt(&child);
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(130));
    drop(writer);
}

#[test]
fn while_answering() {
    let fixture = Fixture::new(&[]);
    let mut child = start(&mut fixture.command("run", &["hi", "--temp", "0", "-c", "65536"]));
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut [0]).unwrap();
    interrupt(&child);
    let mut text = Vec::new();
    out.read_to_end(&mut text).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    // The answer so far, and the summary.
    assert!(text.ends_with(b"\n") && String::from_utf8_lossy(&output.stderr).contains("tok/s"), "{output:?}");
}

#[test]
fn an_answer_in_a_chat_stops_and_the_chat_continues() {
    let fixture = Fixture::new(&[]);
    let mut command = fixture.command("chat", &["--temp", "0", "-c", "65536"]);
    let mut child = start(command.stdin(Stdio::piped()));
    let (mut input, mut out) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    input.write_all(b"hi\n").unwrap();
    out.read_exact(&mut [0]).unwrap();
    interrupt(&child);
    input.write_all(b"/stats\n").unwrap();
    drop(input);
    out.read_to_end(&mut Vec::new()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("1 answer ·"), "{output:?}");
}

#[test]
fn while_writing_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.gguf");
    let mut child = start(quadriga(["synth", "--preset", "7b", "-o"]).arg(&path));
    while fs::read_dir(folder.path()).unwrap().next().is_none() && child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    assert!(fs::read_dir(folder.path()).unwrap().next().is_none());
}

//! Where output goes: files appear whole, links are followed, and what is no file is never replaced by one.
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::fs;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::Path;
use std::process::Command;

use crate::common::{Fixture, output, quadriga};

fn pipe(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn a_trace_is_written_into_a_pipe_and_through_a_link() {
    let fixture = Fixture::new(&[]);
    let (fifo, link, target) =
        ["fifo", "link", "target.json"].map(|name| fixture.folder.path().join(name)).into();
    pipe(&fifo);
    let reader = Command::new("cat").arg(&fifo).stdout(std::process::Stdio::piped()).spawn().unwrap();
    output(fixture.command("run", &["hi", "-n", "2", "--trace"]).arg(&fifo)).success();
    let text = reader.wait_with_output().unwrap().stdout;
    assert!(serde_json::from_slice::<serde_json::Value>(&text).unwrap()["traceEvents"].is_array());
    assert!(fs::symlink_metadata(&fifo).unwrap().file_type().is_fifo());

    fs::write(&target, "old").unwrap();
    symlink(&target, &link).unwrap();
    output(fixture.command("run", &["hi", "-n", "2", "--trace"]).arg(&link)).success();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(fs::read_to_string(&target).unwrap().contains("traceEvents"));
}

#[test]
fn models_and_prompt_caches_do_not_replace_pipes() {
    let fixture = Fixture::new(&[]);
    let (fifo, link, target) =
        ["fifo", "link", "target.kvc"].map(|name| fixture.folder.path().join(name)).into();
    pipe(&fifo);
    output(quadriga(["synth", "-o"]).arg(&fifo)).failed(1, &["fifo", "not a regular file"]);
    output(fixture.command("run", &["hi", "-n", "2", "--prompt-cache"]).arg(&fifo))
        .failed(1, &["fifo", "not a regular file"]);
    assert!(fs::symlink_metadata(&fifo).unwrap().file_type().is_fifo());

    output(fixture.command("run", &["hi", "-n", "2", "--prompt-cache"]).arg(&target)).success();
    let size = fs::metadata(&target).unwrap().len();
    symlink(&target, &link).unwrap();
    output(fixture.command("run", &["hi there", "-n", "2", "--prompt-cache"]).arg(&link)).success();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(fs::metadata(&target).unwrap().len() > size, "the file behind the link is updated");
}

#[test]
fn no_output_replaces_a_model() {
    let fixture = Fixture::new(&[]);
    let before = fs::read(&fixture.model).unwrap();
    for line in [["run", "hi", "-n", "2", "--trace"].as_slice(), &["plan", "--json"], &["plan", "--svg"]] {
        let mut command = fixture.command(line[0], &line[1..]);
        let refused = output(command.arg(&fixture.model));
        assert_eq!(refused.code, Some(1), "{refused:?}");
        assert!(refused.err.contains("it is a model (GGUF); choose another name"), "{refused:?}");
    }
    assert!(fs::read(&fixture.model).unwrap() == before);
}

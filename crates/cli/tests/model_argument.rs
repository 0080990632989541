//! A model file among the texts of `run` and `embed`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Fixture, output, quadriga};

#[test]
fn a_gguf_file_of_any_name_is_the_model() {
    let fixture = Fixture::new(&[]);
    let blob = fixture.path("sha256-1234");
    std::fs::copy(&fixture.model, &blob).unwrap();
    let flags = ["hi", "--temp", "0", "-n", "8", "-q"];
    let by_option = output(&mut fixture.command("run", &flags)).success().out;
    assert_eq!(output(quadriga(["run"]).arg(&blob).args(flags)).success().out, by_option);
}

#[test]
fn a_name_that_is_no_file_does_not_become_part_of_a_prompt() {
    let fixture = Fixture::new(&[]);
    for words in [&["llama3.2", "hi"][..], &["gemma3:4b", "hi", "there"], &["qwen3"], &["./models/x", "hi"]] {
        output(quadriga(["run"]).args(words)).failed(2, &[words[0], "neither a GGUF file", ".gguf", "-p"]);
    }
    let missing = fixture.path("not here.gguf");
    output(quadriga(["run"]).arg(&missing).arg("hi")).failed(1, &["not here.gguf"]);
    output(quadriga(["serve"]).arg(&missing)).failed(1, &["not here.gguf"]);
    std::fs::write(fixture.path("notes"), "some text").unwrap();
    output(quadriga(["run"]).arg(fixture.path("notes")).arg("hi")).failed(2, &["is not a GGUF file"]);
    // With -m there is no doubt.
    for words in [&["llama3.2", "hi"][..], &["Explain", "gravity"]] {
        let joined = output(fixture.command("run", &["-n", "1", "--json", "-q"]).args(words)).success().out;
        let joined: serde_json::Value = serde_json::from_str(&joined).unwrap();
        assert_eq!(joined["prompt"]["tokens"], words.join(" ").len());
        assert_eq!(joined["model"], "tiny");
    }
}

#[test]
fn the_summary_names_the_model() {
    let fixture = Fixture::new(&[]);
    let run = output(&mut fixture.command("run", &["hi", "-n", "2"])).success();
    assert!(run.err.contains("\ntiny · load "), "{run:?}");
    let chat = crate::common::output_with_input(&mut fixture.command("chat", &["-n", "1"]), b"").success();
    assert!(chat.err.contains("tiny · loaded in"), "{chat:?}");
    for text in [run.err, chat.err] {
        assert!(text.contains("the model has no chat template"), "{text}");
    }
}

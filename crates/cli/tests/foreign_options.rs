//! Options and commands of llama.cpp and Ollama: understood, or refused with what there is instead.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Fixture, output, quadriga};
use serde_json::Value;

fn run(fixture: &Fixture, flags: &[&str]) -> Value {
    let out = output(fixture.command("run", &["-n", "3", "--temp", "0", "--json", "-q"]).args(flags));
    serde_json::from_str(&out.success().out).unwrap()
}

#[test]
fn a_mode_of_color_is_no_part_of_the_prompt() {
    let fixture = Fixture::new(&[]);
    for flags in
        [&["--color", "on", "hi"][..], &["--color", "hi"], &["--color=off", "hi"], &["hi", "--color", "auto"]]
    {
        assert_eq!(run(&fixture, flags)["prompt"]["tokens"], "hi".len(), "{flags:?}");
    }
}

#[test]
fn the_last_of_repeated_options_counts() {
    let fixture = Fixture::new(&[]);
    assert_eq!(run(&fixture, &["hi", "-n", "2", "-n", "5", "--raw", "--raw"])["answer"]["tokens"], 5);
}

#[test]
fn options_that_change_no_answer_are_accepted_with_a_note() {
    let fixture = Fixture::new(&[]);
    let flags = ["--log-disable", "--prio", "2", "--cpu-mask=ff", "hi"];
    assert_eq!(run(&fixture, &flags)["prompt"]["tokens"], "hi".len());
    let noted = output(fixture.command("run", &["-n", "1"]).args(flags)).success();
    for part in ["--log-disable has no effect", "--prio has no effect", "--cpu-mask has no effect"] {
        assert!(noted.err.contains(part), "{noted:?}");
    }
}

#[test]
fn known_options_and_commands_are_refused_with_an_alternative() {
    let fixture = Fixture::new(&[]);
    for (flags, part) in [
        (&["--mmproj", "x.gguf"][..], "vision"),
        (&["--lora-scaled", "x.gguf"], "--lora FILE=SCALE"),
        (&["-nkvo"], "-ngl N"),
        (&["--override-kv", "a=int:1"], "quadriga quantize"),
        (&["--gpu-memory-utilization", "0.5"], "--vram-budget"),
        (&["--tensor-parallel-size=2"], "--parallelism tensor"),
        (&["--rope-scaling", "yarn"], "RoPE"),
        (&["--reasoning-format", "none"], "--reasoning show"),
        (&["--chat-template", "chatml"], "--chat-template-file"),
        (&["--device", "CUDA77"], "cuda:77"),
    ] {
        let failed = output(fixture.command("run", flags).arg("hi"));
        assert!(failed.code != Some(0) && failed.err.contains(part), "{failed:?}");
        assert_eq!(failed.err.trim_end().lines().count(), 1, "{failed:?}");
    }
    for (command, part) in [("ps", "loads its own"), ("create", "--system")] {
        output(&mut quadriga([command])).failed(2, &["no command", part]);
    }
    output(&mut quadriga(["--list-devices"])).failed(2, &["`quadriga devices`"]);
    // The parser's advice would make the option a part of the prompt.
    let unknown = output(fixture.command("run", &["--no-such-flag"]).arg("hi")).failed_usage();
    assert!(!unknown.err.contains("as a value"), "{unknown:?}");
}

#[test]
fn templates_and_system_prompts_come_from_files() {
    let fixture = Fixture::with_template("[{{ messages[-1].content }}]");
    let file = fixture.path("template.jinja");
    std::fs::write(&file, "{% for m in messages %}<{{ m.content }}>{% endfor %}!!").unwrap();
    let template = ["--chat-template-file", file.to_str().unwrap()];
    assert_eq!(run(&fixture, &["hi"])["prompt"]["tokens"], "[hi]".len());
    assert_eq!(run(&fixture, &["hi", template[0], template[1]])["prompt"]["tokens"], "<hi>!!".len());
    let inline = ["hi", "--chat-template", "{{ messages[0].content }}...."];
    assert_eq!(run(&fixture, &inline)["prompt"]["tokens"], "hi....".len());
    let system = fixture.path("system");
    std::fs::write(&system, "Be brief.").unwrap();
    let flags = ["hi", template[0], template[1], "-sysf", system.to_str().unwrap()];
    assert_eq!(run(&fixture, &flags)["prompt"]["tokens"], "<Be brief.><hi>!!".len());
    output(&mut fixture.command("run", &["hi", "-sysf", "no/such/file"])).failed(1, &["no/such/file"]);
    std::fs::write(&file, "{% for %}").unwrap();
    output(fixture.command("run", &["hi"]).args(template)).failed(1, &["chat template"]);
}

#[test]
fn spellings_of_the_model_tools_are_understood_or_answered() {
    let fixture = Fixture::new(&[]);
    let model = fixture.model.to_str().unwrap();
    let text = fixture.path("text.txt");
    std::fs::write(&text, "The quick brown fox jumps over the lazy dog. ".repeat(4)).unwrap();
    let text = text.to_str().unwrap();
    let [matrix, part, whole] = ["i.gguf", "part", "whole.gguf"].map(|name| fixture.path(name));
    let [matrix, part, whole] = [&matrix, &part, &whole].map(|path| path.to_str().unwrap());
    let flags = ["-c", "32", "--chunks", "-1", "-ofreq", "2", "--process-output", "--no-ppl", "-o", matrix];
    output(quadriga(["imatrix", model, "-f", text]).args(flags)).success();
    let flags = ["-q", "-c", "32", "--chunks", "-1", "-f"];
    let by_file = output(quadriga(["perplexity", model]).args(flags).arg(text)).success().out;
    let content = std::fs::read(text).unwrap();
    let mut piped = quadriga(["perplexity", model]);
    let piped = crate::common::output_with_input(piped.args(flags).arg("-"), &content).success().out;
    assert_eq!(piped, by_file);
    output(&mut quadriga(["split", "--split", "--split-max-tensors", "8", model, part])).success();
    let first = std::fs::read_dir(fixture.folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let first = first.into_iter().find(|path| path.to_str().unwrap().contains("part-00001")).unwrap();
    output(quadriga(["merge", "--merge"]).arg(&first).arg(whole)).success();
    assert_eq!(std::fs::read(whole).unwrap(), std::fs::read(model).unwrap());
    let classes = output(&mut quadriga(["convert", "--print-supported-models"])).success().out;
    assert!(classes.contains("LlamaForCausalLM"), "{classes}");
    for (line, part) in [
        (&["perplexity", model, "-f", text, "--kl-divergence"][..], "quadriga compare A B"),
        (&["imatrix", "--show-statistics", "--in-file", matrix], "inspect --tensors"),
        (&["convert", "folder", "--vocab-only"], "no weights"),
        (&["inspect", "org/tiny-GGUF"], "-hf ORG/REPO"),
        (&["run", "-m", "org/tiny-GGUF", "hi"], "-hf ORG/REPO"),
    ] {
        let failed = output(&mut quadriga(line));
        assert!(failed.code != Some(0) && failed.err.contains(part), "{line:?}: {failed:?}");
    }
}

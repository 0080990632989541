//! Options and commands of llama.cpp and Ollama: understood, or refused with what there is instead.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;

use common::{Fixture, output, quadriga};
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
fn known_options_and_commands_are_refused_with_an_alternative() {
    let fixture = Fixture::new(&[]);
    for (flags, part) in [
        (&["--mmproj", "x.gguf"][..], "vision"),
        (&["--lora-scaled", "x.gguf"], "--lora FILE=SCALE"),
        (&["-ts", "3,1"], "--device"),
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

//! `quadriga run` and `quadriga chat`: what a user gets.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;

use common::{Stage, end, end_with_input, quadriga};

#[test]
fn the_prompt_comes_from_an_argument_an_option_a_file_or_standard_input() {
    let stage = Stage::new(&[]);
    let flags = ["--temp", "0", "-n", "8", "-q"];
    let by_argument = end(stage.command("run", &flags).arg("good morning")).well();
    assert!(by_argument.out.trim().len() > 1 && by_argument.err.is_empty(), "{by_argument:?}");
    let by_option = end(stage.command("run", &flags).args(["-p", "good morning"])).well();
    std::fs::write(stage.path("prompt"), "good morning").unwrap();
    let by_file = end(stage.command("run", &flags).arg("-f").arg(stage.path("prompt"))).well();
    let by_input = end_with_input(&mut stage.command("run", &flags), b"good morning").well();
    assert!([by_option.out, by_file.out, by_input.out].iter().all(|out| *out == by_argument.out));
}

#[test]
fn the_same_seed_gives_the_same_answer_with_any_number_of_threads() {
    let stage = Stage::new(&["--type", "f16"]);
    let run = |flags: &[&str]| {
        let mut command = stage.command("run", &["-n", "12", "-q", "-s", "7", "a somewhat longer prompt"]);
        end(command.args(flags)).well().out
    };
    let plain = run(&[]);
    for flags in [&["-t", "1"][..], &["-t", "3"], &["-ngl", "0"], &["-ngl=0"]] {
        assert_eq!(run(flags), plain, "{flags:?}");
    }
}

#[test]
fn a_summary_of_speed_and_memory_goes_to_standard_error() {
    let stage = Stage::new(&[]);
    let ended = end(&mut stage.command("run", &["hello", "-n", "4", "--temp", "0"])).well();
    for part in ["load", "prompt 5 tokens", "answer 4 tokens", "tok/s", "memory: cpu", "cache"] {
        assert!(ended.err.contains(part), "{part}: {ended:?}");
    }
}

#[test]
fn json_has_the_answer_and_its_numbers() {
    let stage = Stage::new(&[]);
    let flags = ["hello", "-n", "4", "--temp", "0", "--json", "-q", "-s", "9"];
    let object: serde_json::Value =
        serde_json::from_str(&end(&mut stage.command("run", &flags)).well().out).unwrap();
    assert_eq!(object["finish"], "length");
    assert_eq!((&object["answer"]["tokens"], &object["prompt"]["tokens"]), (&4.into(), &5.into()));
    assert_eq!(object["seed"], 9);
    assert_eq!(object["backends"][0]["backend"], "cpu");
}

#[test]
fn a_chat_answers_lines_and_knows_commands() {
    let stage = Stage::new(&[]);
    let mut command = stage.command("chat", &["-n", "5", "--temp", "0"]);
    let ended = end_with_input(&mut command, b"hi\n\n/stats\n/reset\nhi\n/what\n/help\n").well();
    assert!(ended.out.len() > 2, "{ended:?}");
    for part in ["1 answers", "2 answers", "memory: cpu", "no command /what", "/reset", "forgotten"] {
        assert!(ended.err.contains(part), "{part}: {ended:?}");
    }
}

#[test]
fn a_full_context_ends_an_answer_and_is_said() {
    let stage = Stage::new(&["--vocab", "300"]);
    let ended = end(&mut stage.command("run", &["hello", "-c", "16", "--temp", "0", "-q"])).well();
    assert!(ended.err.contains("the context of 16 tokens is full"), "{ended:?}");
}

#[test]
fn help_fits_a_screen() {
    let help = end(&mut quadriga(["help"])).well().out;
    assert!(help.lines().count() <= 24 && help.lines().all(|line| line.chars().count() <= 80), "{help}");
    for word in ["run", "chat", "bench", "plan", "inspect", "devices", "eval", "check", "synth", "130"] {
        assert!(help.contains(word), "{word}: {help}");
    }
}

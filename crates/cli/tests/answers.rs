//! Output of `quadriga run` and `quadriga chat`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;

use common::{Fixture, output, output_with_input, quadriga};

#[test]
fn the_prompt_comes_from_an_argument_an_option_a_file_or_stdin() {
    let fixture = Fixture::new(&[]);
    let flags = ["--temp", "0", "-n", "8", "-q"];
    let by_argument = output(fixture.command("run", &flags).arg("good morning")).success();
    assert!(by_argument.out.trim().len() > 1 && by_argument.err.is_empty(), "{by_argument:?}");
    let by_option = output(fixture.command("run", &flags).args(["-p", "good morning"])).success();
    std::fs::write(fixture.path("prompt"), "good morning").unwrap();
    let by_file = output(fixture.command("run", &flags).arg("-f").arg(fixture.path("prompt"))).success();
    let by_input = output_with_input(&mut fixture.command("run", &flags), b"good morning").success();
    assert!([by_option.out, by_file.out, by_input.out].iter().all(|out| *out == by_argument.out));
}

#[test]
fn the_same_seed_gives_the_same_answer_with_any_number_of_threads() {
    let fixture = Fixture::new(&["--type", "f16"]);
    let run = |flags: &[&str]| {
        let mut command = fixture.command("run", &["-n", "12", "-q", "-s", "7", "a somewhat longer prompt"]);
        output(command.args(flags)).success().out
    };
    let plain = run(&[]);
    for flags in [&["-t", "1"][..], &["-t", "3"], &["-ngl", "0"], &["-ngl=0"]] {
        assert_eq!(run(flags), plain, "{flags:?}");
    }
}

#[test]
fn a_summary_of_speed_and_memory_goes_to_stderr() {
    let fixture = Fixture::new(&[]);
    let output = output(&mut fixture.command("run", &["hello", "-n", "4", "--temp", "0"])).success();
    for part in ["load", "prompt 5 tokens", "answer 4 tokens", "tok/s", "memory: cpu", "cache"] {
        assert!(output.err.contains(part), "{part}: {output:?}");
    }
}

#[test]
fn json_has_the_answer_speed_and_memory() {
    let fixture = Fixture::new(&[]);
    let flags = ["hello", "-n", "4", "--temp", "0", "--json", "-q", "-s", "9"];
    let object: serde_json::Value =
        serde_json::from_str(&output(&mut fixture.command("run", &flags)).success().out).unwrap();
    assert_eq!(object["finish"], "length");
    assert_eq!((&object["answer"]["tokens"], &object["prompt"]["tokens"]), (&4.into(), &5.into()));
    assert_eq!(object["seed"], 9);
    assert_eq!(object["backends"][0]["backend"], "cpu");
}

#[test]
fn a_chat_answers_lines_and_has_commands() {
    let fixture = Fixture::new(&[]);
    let mut command = fixture.command("chat", &["-n", "5", "--temp", "0"]);
    let output = output_with_input(&mut command, b"hi\n\n/stats\n/reset\nhi\n/what\n/help\n").success();
    assert!(output.out.len() > 2, "{output:?}");
    for part in ["1 answer ·", "2 answers ·", "memory: cpu", "Unknown command /what", "/reset", "cleared"] {
        assert!(output.err.contains(part), "{part}: {output:?}");
    }
}

#[test]
fn a_full_context_ends_an_answer_with_a_warning() {
    let fixture = Fixture::new(&["--vocab", "300"]);
    let output = output(&mut fixture.command("run", &["hello", "-c", "16", "--temp", "0", "-q"])).success();
    assert!(output.err.contains("the context of 16 tokens is full"), "{output:?}");
}

#[test]
fn counts_of_one_are_singular() {
    let fixture = Fixture::new(&[]);
    let output = output(&mut fixture.command("run", &["h", "-n", "1", "--temp", "0"])).success();
    assert!(output.err.contains("prompt 1 token,") && output.err.contains("answer 1 token,"), "{output:?}");
}

#[test]
fn options_are_grouped_and_defaults_are_in_brackets() {
    let help = output(&mut quadriga(["run", "--help"])).success().out;
    for part in ["Model options:", "Sampling options:", "Device options:", "Profiling options:"] {
        assert!(help.contains(part), "{part}: {help}");
    }
    for part in ["temperature, 0 for greedy decoding [default: 0.8]", "Random seed [default: random]"] {
        assert!(help.contains(part), "{part}: {help}");
    }
}

#[test]
fn help_fits_a_screen() {
    let help = output(&mut quadriga(["help"])).success().out;
    assert!(help.lines().count() <= 24 && help.lines().all(|line| line.chars().count() <= 80), "{help}");
    for word in ["run", "chat", "bench", "plan", "inspect", "devices", "eval", "check", "synth", "130"] {
        assert!(help.contains(word), "{word}: {help}");
    }
}

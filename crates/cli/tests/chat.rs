//! Conversations with `quadriga chat`, piped into the command.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{CommandOutput, Fixture, output, output_with_input};
use quadriga_gguf::File;
use serde_json::Value;

fn chat(fixture: &Fixture, flags: &[&str], input: &str) -> CommandOutput {
    output_with_input(&mut fixture.command("chat", flags), input.as_bytes())
}

/// The messages of a file that `/save` wrote: roles and texts.
fn saved(fixture: &Fixture, name: &str) -> Vec<(String, String)> {
    let text = std::fs::read_to_string(fixture.path(name)).unwrap();
    let json: Value = serde_json::from_str(&text).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    json["messages"].as_array().unwrap().iter().map(|m| (text(&m["role"]), text(&m["content"]))).collect()
}

fn roles(messages: &[(String, String)]) -> Vec<&str> {
    messages.iter().map(|(role, _)| role.as_str()).collect()
}

/// A model with a chat template.
fn with_template() -> Fixture {
    Fixture::with_template("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
}

#[test]
fn a_full_context_drops_the_oldest_turns_and_says_so_once() {
    let fixture = Fixture::new(&[]);
    let file = fixture.path("c.json");
    let lines: String = (0..12).map(|number| format!("message number {number:2}\n")).collect();
    let input = format!("{lines}/save {}\n", file.display());
    let output = chat(&fixture, &["-c", "64", "-n", "8", "--temp", "0"], &input).success();
    assert!(output.err.contains("12 answers ·"), "{output:?}");
    assert_eq!(output.err.matches("the oldest messages are dropped").count(), 1, "{output:?}");
    let messages = saved(&fixture, "c.json");
    // 17 tokens of a message, 8 of an answer: two turns and room for an answer fit 64.
    assert!((2..=4).contains(&messages.len()), "{messages:?}");
    assert_eq!(messages[0].0, "user");
    assert_eq!(messages[messages.len() - 2].1, "message number 11");
}

#[test]
fn the_system_prompt_stays_when_turns_are_dropped() {
    let fixture = with_template();
    let file = fixture.path("c.json");
    let lines: String = (0..8).map(|number| format!("message number {number:2}\n")).collect();
    let input = format!("{lines}/save {}\n/system\n/system Be long.\n/system\n", file.display());
    let flags = ["-c", "128", "-n", "8", "--temp", "0", "-sys", "Be brief."];
    let output = chat(&fixture, &flags, &input).success();
    assert!(output.err.contains("the oldest messages are dropped"), "{output:?}");
    let messages = saved(&fixture, "c.json");
    assert_eq!(messages[0], ("system".to_owned(), "Be brief.".to_owned()));
    assert_eq!(messages[1].0, "user");
    for part in ["System prompt: Be brief.", "System prompt: Be long."] {
        assert!(output.err.contains(part), "{part}: {output:?}");
    }
    assert!(!output.err.contains("no effect"), "{output:?}");
    let other = chat(&fixture, &["-n", "12", "--temp", "0", "-q"], "hi\n").success().out;
    let system = chat(&fixture, &["-n", "12", "--temp", "0", "-q"], "/system Be brief.\nhi\n").success().out;
    assert_ne!(system, other);
}

#[test]
fn a_question_that_fails_does_not_stay_in_the_conversation() {
    let fixture = Fixture::new(&[]);
    let flags = ["-c", "64", "-n", "8", "--temp", "0", "-q"];
    let input = format!("{}\nhi\n/save {}\n", "long ".repeat(40), fixture.path("c.json").display());
    let output = chat(&fixture, &flags, &input).success();
    for part in ["do not fit the context of 64", "-c", "removed from the conversation"] {
        assert!(output.err.contains(part), "{part}: {output:?}");
    }
    let messages = saved(&fixture, "c.json");
    assert_eq!(roles(&messages), ["user", "assistant"]);
    assert_eq!(messages[0].1, "hi");
    assert_eq!(output.out, chat(&fixture, &flags, "hi\n").success().out);
}

#[test]
fn answers_can_be_regenerated_and_undone() {
    let fixture = Fixture::new(&[]);
    let [first, second, third] = ["a.json", "b.json", "c.json"].map(|name| fixture.path(name));
    let input = format!(
        "hi\n/save {}\n/regen\n/save {}\n/undo\n/save {}\n/undo\n/regen\n",
        first.display(),
        second.display(),
        third.display()
    );
    let output = chat(&fixture, &["-n", "16", "-s", "3", "--temp", "2"], &input).success();
    let (first, second) = (saved(&fixture, "a.json"), saved(&fixture, "b.json"));
    assert_eq!((roles(&first), roles(&second)), (vec!["user", "assistant"], vec!["user", "assistant"]));
    assert_eq!(first[0], second[0]);
    assert_ne!(first[1], second[1]);
    assert!(saved(&fixture, "c.json").is_empty());
    for part in ["Removed: hi", "There is nothing to undo.", "There is no message to answer again."] {
        assert!(output.err.contains(part), "{part}: {output:?}");
    }
}

#[test]
fn a_conversation_continues_from_a_file() {
    let fixture = Fixture::new(&[]);
    let flags = ["-n", "8", "--temp", "0", "-q"];
    let paths = ["whole.json", "part.json", "rest.json"].map(|name| fixture.path(name).display().to_string());
    let [whole, part, rest] = &paths;
    chat(&fixture, &flags, &format!("one\ntwo\n/save {whole}\n")).success();
    chat(&fixture, &flags, &format!("one\n/save {part}\n")).success();
    chat(&fixture, &flags, &format!("/load {part}\ntwo\n/save {rest}\n")).success();
    assert_eq!(saved(&fixture, "rest.json"), saved(&fixture, "whole.json"));
    let missing = chat(&fixture, &flags, "/load no/such/file\n/save no/such/folder/x\n/load\nhi\n").success();
    for text in ["cannot read no/such/file", "cannot create no/such/folder/x", "/load needs a file"] {
        assert!(missing.err.contains(text), "{text}: {missing:?}");
    }
    assert!(missing.out.len() > 1, "{missing:?}");
}

#[test]
fn options_can_be_set() {
    let fixture = Fixture::new(&[]);
    let greedy = chat(&fixture, &["-n", "12", "--temp", "0", "-q"], "hi\n").success().out;
    let input = "/set temp 0\n/set n 12\nhi\n/stats\n";
    let set = chat(&fixture, &["-n", "3", "--temp", "2", "-s", "1"], input).success();
    assert_eq!(set.out, greedy);
    assert!(set.err.contains("generation 12 tokens"), "{set:?}");
    let seeded = |input: &str| chat(&fixture, &["-n", "12", "--temp", "2", "-q"], input).success().out;
    assert_eq!(seeded("/set seed 5\nhi\n"), seeded("/set seed 5\nhi\n"));
    let wrong = chat(&fixture, &["-n", "3", "-q"], "/set temp x\n/set nothing 1\n/set temp\nhi\n").success();
    for part in
        ["/set temp x: must be a number of 0 or more", "no option nothing", "/set needs a name and a value"]
    {
        assert!(wrong.err.contains(part), "{part}: {wrong:?}");
    }
    assert!(wrong.out.len() > 1, "{wrong:?}");
    let listed =
        chat(&fixture, &["-n", "3", "-q", "--logit-bias", "5+1"], "/set top-k 7\n/set\n").success().err;
    let value = |name: &str| {
        let mut lines = listed.lines().filter_map(|line| line.split_once(' '));
        lines.find(|(found, _)| *found == name).map(|(_, value)| value.trim())
    };
    let values = ["predict", "top-k", "temp", "logit-bias", "stop"].map(value);
    assert_eq!(values, ["3", "7", "0.8", "5+1", "none"].map(Some), "{listed}");
}

#[test]
fn a_logit_bias_and_the_system_prompt_can_be_removed() {
    let fixture = with_template();
    let flags = ["-n", "12", "--temp", "0", "-q"];
    let out = |flags: &[&str], input: &str| chat(&fixture, flags, input).success().out;
    let plain = out(&flags, "hi\n");
    let biased: Vec<&str> = flags.iter().copied().chain(["--logit-bias", "9+1000"]).collect();
    assert_ne!(out(&biased, "hi\n"), plain);
    assert_eq!(out(&biased, "/set logit-bias none\nhi\n"), plain);
    let system: Vec<&str> = flags.iter().copied().chain(["-sys", "Be brief."]).collect();
    assert_ne!(out(&system, "hi\n"), plain);
    assert_eq!(out(&system, "/system \"\"\nhi\n"), plain);
    assert_eq!(out(&system, "/set system \"\"\nhi\n"), plain);
    let shown = chat(&fixture, &system, "/system\n/system \"\"\n/system\n").success().err;
    assert_eq!(shown, "System prompt: Be brief.\nThere is no system prompt.\n");
}

#[test]
fn several_turns_can_be_undone_at_once() {
    let fixture = Fixture::new(&[]);
    let path = fixture.path("c.json").display().to_string();
    let input = format!("one\ntwo\nthree\n/undo 2\n/save {path}\n/undo 0\n/undo x\n/undo 5\n");
    let output = chat(&fixture, &["-n", "2", "--temp", "0", "-q"], &input).success();
    let messages = saved(&fixture, "c.json");
    assert_eq!((messages.len(), messages[0].1.as_str()), (2, "one"));
    let notes: Vec<&str> = output.err.lines().collect();
    assert_eq!(notes[..2], ["Removed: three", "Removed: two"], "{output:?}");
    assert!(notes[3].contains("/undo 0") && notes[4].contains("/undo x"), "{output:?}");
    assert_eq!(notes[5..], ["Removed: one", "There is nothing else to undo."], "{output:?}");
}

#[test]
fn quotes_join_lines_to_one_message() {
    let fixture = Fixture::new(&[]);
    let path = fixture.path("c.json");
    let input = format!("\"\"\"\nfirst line\n/second line\n\"\"\"\nthird\n/save {}\n", path.display());
    chat(&fixture, &["-n", "2", "--temp", "0", "-q"], &input).success();
    let messages = saved(&fixture, "c.json");
    let asked: Vec<&str> = messages.iter().filter(|m| m.0 == "user").map(|m| m.1.as_str()).collect();
    assert_eq!(asked, ["first line\n/second line", "third"]);
}

#[test]
fn a_single_turn_ends_after_one_answer() {
    let fixture = Fixture::new(&[]);
    let run =
        output(&mut fixture.command("run", &["-n", "8", "--temp", "0", "-q", "-p", "hi"])).success().out;
    let flags = ["-n", "8", "--temp", "0", "-q", "-st"];
    assert_eq!(chat(&fixture, &flags, "hi\nho\n").success().out, run);
    assert_eq!(chat(&fixture, &[&flags[..], &["-p", "hi"]].concat(), "ho\n").success().out, run);
}

/// Lines that arrive faster than they are read, as pasted ones do, are all read; a bracketed paste is one message.
#[test]
#[cfg(target_os = "linux")]
fn pasted_lines_are_not_lost_on_a_terminal() {
    let fixture = Fixture::new(&[]);
    let path = fixture.path("c.json");
    let (binary, model) = (env!("CARGO_BIN_EXE_quadriga"), fixture.model.display());
    if std::process::Command::new("script").arg("--version").output().is_err() {
        eprintln!("skipped: the program `script` is not installed");
        return;
    }
    // `script` of util-linux runs a command on a terminal of its own.
    let mut script = std::process::Command::new("script");
    script.args(["-qec", &format!("'{binary}' chat -m '{model}' -n 2 --temp 0 -q"), "/dev/null"]);
    script.env("TERM", "xterm");
    let input = format!("one\ntwo\n\x1b[200~three\nfour\x1b[201~\n/save {}\n/exit\n", path.display());
    let output = output_with_input(&mut script, input.as_bytes()).success();
    let messages = saved(&fixture, "c.json");
    let asked: Vec<&str> = messages.iter().filter(|m| m.0 == "user").map(|m| m.1.as_str()).collect();
    assert_eq!(asked, ["one", "two", "three\nfour"], "{output:?}");
}

/// A long prompt shows its progress on a terminal, unless that is to be quiet.
#[test]
#[cfg(target_os = "linux")]
fn the_progress_of_a_long_prompt_is_shown_on_a_terminal() {
    let fixture = Fixture::new(&[]);
    if std::process::Command::new("script").arg("--version").output().is_err() {
        eprintln!("skipped: the program `script` is not installed");
        return;
    }
    let (binary, model) = (env!("CARGO_BIN_EXE_quadriga"), fixture.model.display());
    let words = ["word"; 80].join(" ");
    let shown = |flags: &str| {
        let mut script = std::process::Command::new("script");
        let run = format!("'{binary}' run -m '{model}' -b 4 -n 2 --temp 0 {flags} -p '{words}'");
        script.args(["-qec", &run, "/dev/null"]).env("TERM", "xterm");
        output_with_input(&mut script, b"").success().out
    };
    let progress = shown("");
    // `prompt [###---] 4/400 tokens 1s`
    let of_prompt = progress.split("prompt [").skip(1);
    let totals: Vec<usize> = of_prompt
        .filter_map(|bar| bar.split_once(" tokens")?.0.rsplit_once('/')?.1.parse().ok())
        .filter(|total| *total > 0)
        .collect();
    assert!(totals.first().is_some_and(|total| (80..2000).contains(total)), "{progress:?}");
    assert!(totals.iter().all(|total| Some(total) == totals.first()), "{totals:?}");
    let quiet = shown("-q");
    assert!(!quiet.contains("prompt [") && !quiet.contains(" tokens"), "{quiet:?}");
}

/// What cannot be answered again stays, and nothing is removed where there is no message.
#[test]
fn a_failed_regeneration_keeps_message_and_answer() {
    let fixture = Fixture::new(&[]);
    let [before, after, answer, undone] = ["before.json", "after.json", "answer.json", "undone.json"]
        .map(|name| fixture.path(name).display().to_string());
    let input = format!("one\n/save {before}\n/set logit-bias 99999+1\n/regen\n/save {after}\ntwo\n");
    let output = chat(&fixture, &["-n", "4", "--temp", "0"], &input).success();
    assert_eq!(output.err.matches("(the conversation is unchanged)").count(), 1, "{output:?}");
    assert_eq!(
        output.err.matches("(the message was removed from the conversation)").count(),
        1,
        "{output:?}"
    );
    let messages = saved(&fixture, "before.json");
    assert_eq!((messages.len(), &messages), (2, &saved(&fixture, "after.json")));
    // Roles out of turn are refused, and the conversation stays.
    std::fs::write(&answer, r#"{"messages": [{"role": "assistant", "content": "yes"}]}"#).unwrap();
    let input = format!("/undo\n/regen\n/load {before}\n/load {answer}\n/save {undone}\n");
    let output = chat(&fixture, &[], &input).success();
    for part in ["nothing to undo", "no message", "answer.json is no conversation", "instead of \"user\""] {
        assert!(output.err.contains(part), "{part}: {output:?}");
    }
    assert_eq!(saved(&fixture, "undone.json"), messages);
}

#[test]
fn quiet_silences_notes_about_the_context() {
    let fixture = Fixture::new(&[]);
    let lines: String = (0..4).map(|number| format!("message number {number:2}\n")).collect();
    let notes = |flags: &[&str]| {
        let flags = [&["-c", "32", "--temp", "0", "--ignore-eos"], flags].concat();
        chat(&fixture, &flags, &lines).success().err
    };
    let loud = notes(&[]);
    assert!(loud.contains("oldest messages are dropped") && loud.contains("the answer ends here"), "{loud}");
    assert_eq!(notes(&["-q"]), "");
}

#[test]
fn the_end_token_can_be_ignored_from_now_on() {
    let fixture = Fixture::new(&[]);
    let file = File::read(&fixture.model).unwrap();
    let end: u32 = file.get("tokenizer.ggml.eos_token_id").unwrap();
    // The bias makes the end token the first one; a ban of it wins.
    let bias = format!("{end}+1000");
    let out = |input: &str| {
        let flags = ["-n", "4", "--temp", "0", "-q", "--logit-bias", &bias];
        let output = chat(&fixture, &flags, input).success();
        assert_eq!(output.err, "", "{input}");
        output.out
    };
    assert_eq!(out("hi\n"), "\n");
    assert!(out("/set ignore-eos\nhi\n").trim_end().len() > 1);
    assert_eq!(out("/set ignore-eos on\nhi\n"), out("/set --ignore-eos\nhi\n"));
    assert_eq!(out("/set ignore-eos on\n/set ignore-eos off\nhi\n"), "\n");
}

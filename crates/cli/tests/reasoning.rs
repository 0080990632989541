//! Reasoning of models: shown, hidden or off.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Fixture, output, output_with_input};
use serde_json::Value;

/// Opens reasoning at the end of the prompt, unless it is asked not to. A random model does not close it.
const THINKING: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.reasoning_content %}({{ m.reasoning_content | length }}){% endif %}{% endfor %}[assistant]{{ '<think></think>' if enable_thinking is false else '<think>' }}";

const FLAGS: [&str; 7] = ["hello", "-n", "9", "--temp", "0", "-q", "--ignore-eos"];

#[test]
fn reasoning_is_not_part_of_the_answer() {
    let fixture = Fixture::with_template(THINKING);
    let json = |flags: &[&str]| -> Value {
        let out = output(fixture.command("run", &FLAGS).arg("--json").args(flags)).success().out;
        serde_json::from_str(&out).unwrap()
    };
    let shown = json(&[]);
    assert_eq!(shown["text"], "", "{shown}");
    let reasoning = shown["reasoning"].as_str().unwrap();
    assert!(!reasoning.is_empty());
    assert_eq!(json(&["--reasoning", "hide"])["reasoning"], reasoning, "it is generated all the same");
    let off = json(&["--reasoning", "off"]);
    assert!(off["reasoning"].is_null() && !off["text"].as_str().unwrap().is_empty(), "{off}");
    let argument = json(&["--chat-template-kwargs", r#"{"enable_thinking": false}"#]);
    assert_eq!(argument["text"], off["text"]);
    // Arguments that are given count more.
    let both = json(&["--reasoning", "off", "--chat-template-kwargs", r#"{"enable_thinking": true}"#]);
    assert_eq!(both["reasoning"], reasoning);
    let raw = json(&["--raw"]);
    assert!(raw["reasoning"].is_null(), "{raw}");
    // Without a terminal, reasoning is printed between markers, with the answer only if that is asked for.
    let plain = |flags: &[&str]| output(fixture.command("run", &FLAGS).args(flags)).success();
    let marked = format!("<think>\n{reasoning}\n</think>\n\n");
    for show in ["show", "on"] {
        let shown = plain(&["--reasoning", show]);
        assert_eq!((shown.out, shown.err.as_str()), (format!("{marked}\n"), ""));
    }
    for flags in [&[][..], &["--reasoning", "hide"]] {
        let hidden = plain(flags);
        assert_eq!(hidden.out, "\n");
        for part in ["no answer: all 9 tokens were reasoning", "-n", "--reasoning show"] {
            assert!(hidden.err.contains(part), "{part}: {hidden:?}");
        }
    }
    let aside = output(fixture.command("run", &FLAGS[..5]).arg("--ignore-eos")).success();
    assert!(
        aside.out == "\n" && aside.err.starts_with("<think>\n") && aside.err.contains("\n</think>\n\n"),
        "{aside:?}"
    );
}

#[test]
fn reasoning_has_a_budget() {
    let fixture = Fixture::with_template(THINKING);
    let json = |flags: &[&str]| -> Value {
        let flags = [&["-n", "40", "--temp", "0", "-q", "--ignore-eos", "--json"], flags].concat();
        let out = output(fixture.command("run", &["hello"]).args(flags)).success().out;
        serde_json::from_str(&out).unwrap()
    };
    let (all, limited) = (json(&["--reasoning-budget", "-1"]), json(&["--reasoning-budget", "5"]));
    let (whole, part) = (all["reasoning"].as_str().unwrap(), limited["reasoning"].as_str().unwrap());
    assert!(all["text"] == "" && !limited["text"].as_str().unwrap().is_empty(), "{all} {limited}");
    assert!(
        !part.is_empty() && part.len() < whole.len() && whole.starts_with(part.trim_end()),
        "{part:?} of {whole:?}"
    );
    // Beside a grammar, which holds behind the reasoning, where any text is allowed, but no bytes that are none.
    let both = json(&["--reasoning-budget", "5", "--grammar", "root ::= \"yes\""]);
    let part = both["reasoning"].as_str().unwrap();
    assert_eq!(both["text"], "yes");
    assert!(!part.is_empty() && part.len() < whole.len(), "{part:?} of {whole:?}");
    let off = json(&["--reasoning-budget", "0"]);
    assert_eq!((&off["text"], &off["reasoning"]), (&json(&["--reasoning", "off"])["text"], &Value::Null));
    let input = b"hello\n/set reasoning-budget 5\nagain\n";
    let file = fixture.path("budget.json");
    let save = format!("/save {}\n", file.display());
    let flags = ["-n", "40", "--temp", "0", "-q", "--ignore-eos"];
    output_with_input(&mut fixture.command("chat", &flags), &[&input[..], save.as_bytes()].concat())
        .success();
    let saved: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let messages = saved["messages"].as_array().unwrap();
    assert!(messages[1]["content"] == "" && messages[3]["content"] != "", "{saved}");
}

#[test]
fn options_without_effect_on_the_template_are_reported() {
    let plain = Fixture::with_template("{{ messages[0].content }}");
    let run =
        |fixture: &Fixture, flags: &[&str]| output(fixture.command("run", &FLAGS).args(flags)).success().err;
    let kwargs = ["--chat-template-kwargs", r#"{"enable_thinkin": false}"#];
    let off = ["--reasoning", "off"];
    assert!(
        run(&plain, &off).contains("--reasoning off has no effect: the chat template knows no reasoning")
    );
    assert!(
        run(&plain, &kwargs)
            .contains(r#""enable_thinkin" has no effect: the chat template does not read it"#)
    );
    assert!(run(&plain, &[&off[..], &["--raw"]].concat()).contains("--reasoning off has no effect: --raw"));
    assert!(
        run(&Fixture::new(&[]), &kwargs).contains("--chat-template-kwargs has no effect: there is no chat")
    );
    let thinking = Fixture::with_template(THINKING);
    assert_eq!(run(&thinking, &["--reasoning", "off"]), "");
}

#[test]
fn templates_that_always_reason_are_reported() {
    let fixture =
        Fixture::with_template("{{ messages[0].content }}<think>{# </think> #}{{ '</think>'[:0] }}");
    let output =
        output(fixture.command("run", &["hello", "-n", "2", "--reasoning", "off"]).arg("-q")).success();
    assert!(output.err.contains("cannot turn reasoning off"), "{output:?}");
    let wrong = fixture.command("run", &["hello", "--chat-template-kwargs", "[]"]).output().unwrap();
    let text = String::from_utf8(wrong.stderr).unwrap();
    assert!(!wrong.status.success() && text.contains("must be a JSON object"), "{text}");
}

#[test]
fn a_chat_keeps_reasoning_out_of_the_messages() {
    let fixture = Fixture::with_template(THINKING);
    let file = fixture.path("c.json");
    let input = format!("hello\n/set reasoning off\nagain\n/save {}\n", file.display());
    let flags = ["-n", "6", "--temp", "0", "-q", "--ignore-eos"];
    output_with_input(&mut fixture.command("chat", &flags), input.as_bytes()).success();
    let saved: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let messages = saved["messages"].as_array().unwrap();
    assert_eq!(messages.len(), 4, "{saved}");
    assert_eq!(messages[1]["content"], "");
    assert!(!messages[1]["reasoning_content"].as_str().unwrap().is_empty());
    assert!(
        !messages[3]["content"].as_str().unwrap().is_empty() && messages[3]["reasoning_content"].is_null()
    );
}

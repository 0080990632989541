//! Answers under a JSON schema or a grammar: options of `run` and `chat`, and fields of `batch`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Fixture, output, output_with_input};
use serde_json::{Value, json};

const SCHEMA: &str = r#"{"type": "object", "properties": {"city": {"type": "string", "maxLength": 8},
    "people": {"type": "integer", "minimum": 1, "maximum": 99}}, "required": ["city", "people"], "additionalProperties": false}"#;

fn is_city(text: &str) -> bool {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
    let fields = value.as_object().unwrap();
    fields.len() == 2
        && fields["city"].as_str().unwrap().chars().count() <= 8
        && (1..=99).contains(&fields["people"].as_i64().unwrap())
}

#[test]
fn answers_satisfy_the_schema() {
    let fixture = Fixture::new(&[]);
    let file = fixture.path("schema.json");
    std::fs::write(&file, SCHEMA).unwrap();
    let file = file.to_str().unwrap();
    for (seed, flags) in
        [["--json-schema", SCHEMA], ["-j", file], ["-jf", file], ["--json-schema-file", file]]
            .iter()
            .enumerate()
    {
        let seed = seed.to_string();
        let mut command = fixture.command("run", &["hello", "-q", "-s", &seed, "-c", "512"]);
        let text = output(command.args(flags)).success().out;
        assert!(is_city(&text), "{flags:?}: {text}");
    }
    let mut command = fixture.command("chat", &["-q", "-s", "7", "-c", "512", "-j", SCHEMA]);
    let chat = output_with_input(&mut command, b"hello\nagain\n");
    let text = chat.success().out;
    let mut answers = serde_json::Deserializer::from_str(&text).into_iter::<Value>();
    for _ in 0..2 {
        assert!(is_city(&answers.next().unwrap().unwrap().to_string()), "{text}");
    }
}

#[test]
fn answers_belong_to_the_grammar() {
    let fixture = Fixture::new(&[]);
    let file = fixture.path("list.gbnf");
    std::fs::write(&file, "root ::= item{2}\nitem ::= \"- \" [a-z]{3} \"\\n\"").unwrap();
    let run = |flags: &[&str]| {
        output(fixture.command("run", &["hello", "-q", "-s", "3"]).args(flags)).success().out
    };
    let list = run(&["--grammar-file", file.to_str().unwrap()]);
    let lines: Vec<&str> = list.trim_end().lines().collect();
    assert!(lines.len() == 2 && lines.iter().all(|line| line.len() == 5 && line.starts_with("- ")), "{list}");
    assert!(["yes\n", "no\n"].contains(&run(&["--grammar", "root ::= \"yes\" | \"no\""]).as_str()));
}

#[test]
fn a_grammar_begins_after_the_reasoning() {
    // The prompt ends within reasoning, and a grammar that allowed none would begin at once.
    let fixture =
        Fixture::with_template("{% for m in messages %}{{ m.content }}{% endfor %}<think>{# </think> #}");
    let mut command =
        fixture.command("run", &["hi", "-q", "-s", "3", "-n", "8", "--json", "--grammar", "root ::= \"7\""]);
    let answer: Value = serde_json::from_str(&output(&mut command).success().out).unwrap();
    assert!(answer["text"] == "" && answer["reasoning"].as_str().unwrap().len() > 1, "{answer}");
}

#[test]
fn requests_of_a_batch_have_their_own_grammars() {
    let fixture = Fixture::new(&[]);
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    let requests = [
        json!({ "prompt": "a", "response_format": { "type": "json_schema", "json_schema": { "name": "city", "schema": schema } } }),
        json!({ "prompt": "b", "json_schema": schema }),
        json!({ "prompt": "c", "grammar": "root ::= [0-9]{3}" }),
        json!({ "prompt": "d", "response_format": { "type": "text" } }),
        json!({ "prompt": "e", "grammar": "root ::= (" }),
        json!({ "prompt": "f", "json_schema": { "type": "octet" } }),
        json!({ "prompt": "g", "response_format": { "type": "xml" } }),
    ];
    let lines: String = requests.iter().map(|request| format!("{request}\n")).collect();
    let mut command = fixture
        .command("batch", &["-", "-q", "-s", "1", "-c", "512", "--grammar", "root ::= \"z\"", "--raw"]);
    let out = output_with_input(&mut command, lines.as_bytes());
    let results: Vec<Value> = out.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(
        is_city(results[0]["text"].as_str().unwrap()) && is_city(results[1]["text"].as_str().unwrap()),
        "{results:?}"
    );
    assert_eq!(results[2]["text"].as_str().unwrap().parse::<u32>().unwrap() / 1000, 0);
    assert_eq!(results[3]["text"], "z", "the command's own");
    for (index, part) in [(4, "line 1, column 10"), (5, "octet"), (6, "xml")] {
        assert!(results[index]["error"].as_str().unwrap().contains(part), "{}", results[index]);
    }
}

#[test]
fn wrong_grammars_are_usage_errors() {
    let fixture = Fixture::new(&[]);
    for (flags, code, parts) in [
        (&["--grammar", "x"][..], 2, &["GBNF grammar", "line 1, column 2"][..]),
        (&["--json-schema", "{\"type\": 3}"], 2, &["JSON schema", "type"]),
        (&["-j", "{"], 2, &["--json-schema", "no JSON schema"]),
        (&["-jf", "no/such/file"], 1, &["no/such/file"]),
        (&["-j", "no/such/file"], 1, &["no/such/file"]),
    ] {
        output(fixture.command("run", &["hi"]).args(flags)).failed(code, parts);
    }
    output(&mut fixture.command("run", &["hi", "-j", "{}", "--grammar", "x"])).failed_usage();
}

//! `quadriga batch`: requests in, results out, in their order, also after an interruption.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;

use common::{Fixture, output, output_with_input};
use serde_json::{Value, json};

fn lines(values: &[Value]) -> String {
    values.iter().map(|value| format!("{value}\n")).collect()
}

fn requests() -> String {
    let mut all: Vec<Value> = (0..12)
        .map(|n| json!({ "id": format!("r{n}"), "prompt": format!("Tell me {n}"), "max_tokens": 3 + n % 4 }))
        .collect();
    all.push(json!({ "messages": [{ "role": "user", "content": "hi" }], "temperature": 0, "max_tokens": 4 }));
    all.push(json!({ "custom_id": 7, "body": { "prompt": "hello", "max_tokens": 2, "logprobs": true, "top_logprobs": 2 } }));
    lines(&all)
}

fn results(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

const FLAGS: [&str; 6] = ["-q", "-s", "1", "-c", "128", "--raw"];

#[test]
fn results_have_the_order_of_requests_and_do_not_depend_on_their_neighbours() {
    let fixture = Fixture::new(&["--type", "f32"]);
    let run = |parallel: &str| {
        let mut command = fixture.command("batch", &["-", "--parallel", parallel]);
        output_with_input(command.args(FLAGS), requests().as_bytes()).success().out
    };
    let together = run("8");
    let found = results(&together);
    assert_eq!(found.len(), 14);
    for (index, result) in found.iter().enumerate() {
        assert_eq!(result["index"], index);
        assert!(
            result["text"].is_string() && result["usage"]["prompt_tokens"].as_u64().unwrap() > 0,
            "{result}"
        );
    }
    assert_eq!((&found[3]["id"], &found[13]["id"]), (&json!("r3"), &json!(7)));
    assert_eq!(found[13]["logprobs"].as_array().unwrap()[0]["top"].as_array().unwrap().len(), 2);
    let texts = |out: &str| results(out).iter().map(|result| result["text"].clone()).collect::<Vec<_>>();
    assert_eq!(texts(&run("1")), texts(&together));
}

#[test]
fn a_batch_goes_on_after_the_results_that_are_there() {
    let fixture = Fixture::new(&["--type", "f32"]);
    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    std::fs::write(&input, requests()).unwrap();
    let run = || {
        let mut command = fixture.command("batch", &[]);
        output(command.arg(&input).arg("-o").arg(&out).args(FLAGS))
    };
    run().success();
    let whole = std::fs::read_to_string(&out).unwrap();
    // Cut in the middle of the sixth line, as a crash may leave it.
    let kept: usize = whole.lines().take(5).map(|line| line.len() + 1).sum();
    std::fs::write(&out, &whole.as_bytes()[..kept + 9]).unwrap();
    run().success();
    let texts = |text: &str| results(text).iter().map(|result| result["text"].clone()).collect::<Vec<_>>();
    assert_eq!(texts(&std::fs::read_to_string(&out).unwrap()), texts(&whole));
    // Nothing is left to do, and nothing changes.
    let before = std::fs::read(&out).unwrap();
    run().success();
    assert_eq!(std::fs::read(&out).unwrap(), before);
    std::fs::write(&out, "{\"other\": 1}\n").unwrap();
    run().failed(1, &["out.jsonl", "line 1", "--overwrite"]);
    std::fs::write(
        &out,
        whole.clone() + &whole.lines().last().unwrap().replace("\"index\":13", "\"index\":14") + "\n",
    )
    .unwrap();
    run().failed(1, &["15 results", "14 requests"]);
}

#[test]
fn wrong_requests_have_an_error_for_a_result() {
    let fixture = Fixture::new(&["--type", "f32"]);
    let input = [
        "{\"prompt\": \"good\", \"max_tokens\": 2}",
        "no json",
        "{\"text\": 1}",
        "{\"prompt\": 5}",
        "{\"prompt\": \"a\", \"temperature\": \"hot\"}",
        "{\"prompt\": \"a\", \"temperature\": -2}",
        "{\"prompt\": \"a\", \"max_tokens\": -1}",
        "{\"prompt\": \"a\", \"stop\": [1]}",
        "{\"messages\": [{\"content\": \"no role\"}]}",
        "",
        "{\"prompt\": \"good\", \"max_tokens\": 1}",
    ]
    .join("\n");
    let long = format!("{input}\n{}\n", json!({ "prompt": "word ".repeat(400), "id": "long" }));
    let mut command = fixture.command("batch", &["-"]);
    let done = output_with_input(command.args(FLAGS), long.as_bytes());
    assert_eq!(done.code, Some(1), "{done:?}");
    assert!(done.err.contains("9 requests failed"), "{done:?}");
    let found = results(&done.out);
    let has = |index: usize, part: &str| {
        let error = found[index]["error"].as_str().unwrap_or_default();
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    };
    assert!(found[0]["text"].is_string() && found[9]["text"].is_string());
    has(1, "line 2");
    has(2, "neither");
    has(3, "\"prompt\" must be a string");
    has(4, "\"temperature\" must be a number");
    has(5, "temperature");
    has(6, "\"max_tokens\"");
    has(7, "\"stop\"");
    has(8, "role");
    has(10, "context");
    assert_eq!(found[10]["id"], "long");
}

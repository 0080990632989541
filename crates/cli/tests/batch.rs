//! `quadriga batch`: requests in, results out, in their order, also after an interruption.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use crate::common::{Fixture, answer_of_run, output, output_with_input, windowed_prompts};
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
fn models_with_sliding_windows_answer_many_as_run_answers_one() {
    for (architecture, window) in [("gpt-oss", 128), ("gemma3", 512)] {
        let fixture = Fixture::new(&["--arch", architecture, "--type", "f32"]);
        let prompts = windowed_prompts(window);
        let wanted: Vec<Value> = prompts.iter().map(|prompt| answer_of_run(&fixture, prompt)).collect();
        let requests: Vec<Value> = prompts
            .iter()
            .map(|prompt| json!({ "prompt": prompt, "max_tokens": 16, "temperature": 0 }))
            .collect();
        // Two at once, too: the others find prefixes of those before them.
        for flags in [&["-q", "--raw"][..], &["-q", "--raw", "--parallel", "2"]] {
            let mut command = fixture.command("batch", &["-"]);
            let done = output_with_input(command.args(flags), lines(&requests).as_bytes()).success();
            let texts: Vec<Value> = results(&done.out).iter().map(|result| result["text"].clone()).collect();
            assert_eq!(texts, wanted, "{architecture} {flags:?}");
        }
    }
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
    has(1, "line 2: ");
    has(2, "neither");
    has(3, "\"prompt\" must be a string");
    has(4, "\"temperature\" must be a number");
    has(5, "temperature");
    has(6, "\"max_tokens\"");
    has(7, "\"stop\"");
    has(8, "role");
    has(10, "context");
    // A line without a request counts as a line, not as a request.
    has(10, "line 12: ");
    assert_eq!(found[10]["id"], "long");
}

#[test]
fn files_that_are_not_results_are_left_alone() {
    let fixture = Fixture::new(&["--type", "f32"]);
    let (input, out) = (fixture.path("in.jsonl"), fixture.path("out.jsonl"));
    std::fs::write(&input, requests()).unwrap();
    let run = |out: &std::path::Path, more: &[&str]| {
        output(fixture.command("batch", more).arg(&input).arg("-o").arg(out).args(FLAGS))
    };
    // Not even where they have no line end that would tell a result from its beginning.
    for text in ["notes", "{\"other\": ", "{\"index\":0}\n"] {
        std::fs::write(&out, text).unwrap();
        run(&out, &[]).failed(1, &["out.jsonl", "--overwrite"]);
        assert_eq!(std::fs::read_to_string(&out).unwrap(), text);
    }
    // Nor with --overwrite, if nothing comes of the batch.
    std::fs::write(&out, "notes").unwrap();
    let mut command = fixture.command("batch", &["--overwrite", "--temp", "-1"]);
    assert_ne!(output(command.arg(&input).arg("-o").arg(&out)).code, Some(0));
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "notes");
    run(&input, &["--overwrite"]).failed(2, &["in.jsonl", "same file"]);
    assert_eq!(std::fs::read_to_string(&input).unwrap(), requests());
    let model = std::fs::read(&fixture.model).unwrap();
    run(&fixture.model, &["--overwrite"]).failed(1, &["tiny.gguf", "is a model"]);
    assert!(std::fs::read(&fixture.model).unwrap() == model);
    run(&out, &["--overwrite"]).success();
    assert_eq!(results(&std::fs::read_to_string(&out).unwrap()).len(), 14);
}

#[test]
fn results_of_another_batch_and_earlier_failures_are_noticed() {
    let fixture = Fixture::new(&["--type", "f32"]);
    let (input, out) = (fixture.path("in.jsonl"), fixture.path("out.jsonl"));
    let run = |input: &str| {
        std::fs::write(fixture.path("in.jsonl"), input).unwrap();
        output(fixture.command("batch", &[]).arg(fixture.path("in.jsonl")).arg("-o").arg(&out).args(FLAGS))
    };
    let request = |id: &str| json!({ "id": id, "prompt": "a", "max_tokens": 1 });
    run(&lines(&[request("a"), request("b")])).success();
    let before = std::fs::read(&out).unwrap();
    run(&lines(&[request("a"), request("c"), request("d")])).failed(1, &["\"c\"", "\"b\"", "another batch"]);
    assert_eq!(std::fs::read(&out).unwrap(), before);
    run(&lines(&[request("a"), request("b"), json!({ "id": "e" })])).failed(1, &["1 request failed"]);
    // Of a batch that goes on, too.
    run(&lines(&[request("a"), request("b"), json!({ "id": "e" }), request("f")]))
        .failed(1, &["1 request failed"]);
    assert_eq!(results(&std::fs::read_to_string(&out).unwrap()).len(), 4);
    drop(input);
}

#[test]
fn results_go_to_streams_and_any_bytes_may_come() {
    let fixture = Fixture::new(&["--type", "f32"]);
    let input = b"{\"prompt\": \"a\", \"max_tokens\": 1}\n\xff\xfe\n{\"prompt\": \"b\", \"max_tokens\": 1}";
    let mut command = fixture.command("batch", &["-", "-o", "-"]);
    let done = output_with_input(command.args(FLAGS), input);
    let found = results(&done.out);
    assert_eq!((done.code, found.len()), (Some(1), 3), "{done:?}");
    assert!(found[1]["error"].as_str().unwrap().contains("line 2: not UTF-8"));
    assert!(found[2]["text"].is_string());
    #[cfg(unix)]
    {
        let mut command = fixture.command("batch", &["-", "-o", "/dev/null", "--overwrite"]);
        output_with_input(command.args(FLAGS), requests().as_bytes()).success();
    }
}

#[test]
fn look_up_and_draft_models_change_no_result() {
    let fixture = Fixture::new(&["--type", "f32"]);
    let other = Fixture::new(&["--type", "f32", "--seed", "9"]);
    let run = |more: &[&str]| {
        let mut command = fixture.command("batch", &["-"]);
        let flags = ["-s", "1", "-c", "128", "--raw", "--parallel", "3"];
        output_with_input(command.args(flags).args(more), requests().as_bytes()).success()
    };
    let texts = |out: &str| results(out).iter().map(|result| result["text"].clone()).collect::<Vec<_>>();
    let plain = run(&["-q"]).out;
    let [same, different] = [&fixture.model, &other.model].map(|path| path.to_str().unwrap().to_owned());
    for (option, value) in [("--lookup", "4"), ("-md", same.as_str()), ("--draft", different.as_str())] {
        let done = run(&[option, value]);
        assert_eq!(texts(&done.out), texts(&plain), "{option} {value}");
    }
    let mut wrong = fixture.command("batch", &["-", "--draft", "missing.gguf"]);
    output_with_input(wrong.args(FLAGS), b"").failed(1, &["missing.gguf"]);
}

#[test]
fn more_requests_than_any_queue_are_answered() {
    let fixture = Fixture::new(&["--type", "f32"]);
    let request = json!({ "prompt": "a", "max_tokens": 1, "temperature": 0 });
    let input = lines(&vec![request; 1300]);
    let mut command = fixture.command("batch", &["-", "--parallel", "600", "--kv-tokens", "4096"]);
    let done = output_with_input(command.args(FLAGS), input.as_bytes()).success();
    assert_eq!(results(&done.out).len(), 1300);
}

#[cfg(unix)]
#[test]
fn a_result_comes_while_the_next_request_is_waited_for() {
    let fixture = Fixture::new(&["--type", "f32"]);
    let mut command = fixture.command("batch", &["-"]);
    let mut child = command
        .args(FLAGS)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut ask = |id: u32| {
        input.write_all(lines(&[json!({ "prompt": "a", "id": id, "max_tokens": 2 })]).as_bytes()).unwrap();
        input.flush().unwrap();
    };
    let mut answer = || {
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        serde_json::from_str::<Value>(&line).ok()
    };
    ask(7);
    assert_eq!(answer().unwrap()["id"], 7);
    // A model that fails ends the batch: the request has no result, and can be answered another time.
    std::fs::OpenOptions::new().write(true).open(&fixture.model).unwrap().set_len(1000).unwrap();
    ask(8);
    assert_eq!(answer(), None);
    let ended = child.wait_with_output().unwrap();
    let err = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(1), "{err}");
    assert!(err.contains("request 1") && err.contains("again"), "{err}");
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_a_batch_that_waits_for_requests() {
    let fixture = Fixture::new(&["--type", "f32"]);
    let mut command = fixture.command("batch", &["-"]);
    let mut child = command
        .args(FLAGS)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"{\"prompt\": \"a\", \"max_tokens\": 1}\n").unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let kill = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(kill.unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    drop(input);
}

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
    // The last request has OpenAI's form, and so has its result.
    let text = |result: &Value| match result.get("response") {
        Some(response) => response["body"]["choices"][0]["text"].clone(),
        None => result["text"].clone(),
    };
    for (index, result) in found.iter().enumerate() {
        assert_eq!(result["index"], index);
        let usage = result.get("usage").unwrap_or(&result["response"]["body"]["usage"]);
        assert!(text(result).is_string() && usage["prompt_tokens"].as_u64().unwrap() > 0, "{result}");
    }
    assert_eq!((&found[3]["id"], &found[13]["custom_id"]), (&json!("r3"), &json!(7)));
    // As OpenAI's clients read those of completions.
    let choice = &found[13]["response"]["body"]["choices"][0];
    let list = |name: &str| choice["logprobs"][name].as_array().unwrap_or_else(|| panic!("{choice}")).clone();
    let tokens: Vec<String> = list("tokens").iter().map(|token| token.as_str().unwrap().to_owned()).collect();
    assert!((1..=2).contains(&tokens.len()), "{choice}");
    assert!(list("token_logprobs").iter().all(|logprob| logprob.as_f64().unwrap() <= 0.0), "{choice}");
    for (top, token) in list("top_logprobs").iter().zip(&tokens) {
        assert!(top.as_object().unwrap().contains_key(token), "{choice}");
    }
    assert_eq!(list("text_offset")[0], 0, "{choice}");
    let texts = |out: &str| results(out).iter().map(text).collect::<Vec<_>>();
    assert_eq!(texts(&run("1")), texts(&together));
}

#[test]
fn a_request_with_a_field_that_has_no_effect_is_an_error() {
    let fixture = Fixture::new(&["--type", "f32"]);
    let requests = [
        json!({ "prompt": "hi", "max_tokens": 2, "n": 3 }),
        json!({ "prompt": "hi", "max_tokens": 2, "tools": [] }),
        json!({ "prompt": "hi", "max_tokenz": 2 }),
        json!({ "custom_id": 1, "bodi": 2, "body": { "prompt": "hi", "max_tokens": 2 } }),
        json!({ "prompt": "hi", "max_tokens": 2, "n": 1, "stream": false, "tools": null, "model": "any", "user": "me" }),
        json!({ "custom_id": 1, "method": "POST", "url": "/v1/completions", "body": { "prompt": "hi", "max_tokens": 2 } }),
    ];
    let mut command = fixture.command("batch", &["-"]);
    let done = output_with_input(command.args(FLAGS), lines(&requests).as_bytes());
    let found = results(&done.out);
    assert_eq!(found.len(), requests.len());
    for (result, name) in found.iter().zip(["n", "tools", "max_tokenz", "bodi"]) {
        // A request with a body has OpenAI's form of an error.
        let error = result["error"].as_str().or(result["error"]["message"].as_str()).unwrap();
        assert!(error.contains(&format!("{name:?}")), "{result}");
    }
    assert!(found[4]["text"].is_string(), "{found:?}");
    assert!(found[5]["response"]["body"]["choices"][0]["text"].is_string(), "{found:?}");
}

/// As the server answers them: a completion continues its text, without the chat template and with the control tokens in it.
#[test]
fn completions_of_openai_continue_their_text() {
    let fixture = Fixture::with_template("<turn>{{ messages[0].content }}</turn>");
    let prompt = "Tell me<eos>more";
    let own = json!({ "prompt": prompt, "max_tokens": 8, "temperature": 0 });
    let line = |url: Option<&str>, body: &Value| json!({ "custom_id": 1, "method": "POST", "url": url, "body": body });
    let chat =
        json!({ "messages": [{ "role": "user", "content": prompt }], "max_tokens": 8, "temperature": 0 });
    let run = |requests: &[Value], flags: &[&str]| {
        let mut command = fixture.command("batch", &["-", "-q", "-c", "128"]);
        results(&output_with_input(command.args(flags), lines(requests).as_bytes()).out)
    };
    let found = run(
        &[
            line(Some("/v1/completions"), &own),
            line(None, &own),
            line(Some("/v1/chat/completions"), &chat),
            own.clone(),
            line(Some("/v1/embeddings"), &own),
            line(Some("/v1/chat/completions"), &own),
            line(Some("/v1/completions"), &chat),
        ],
        &[],
    );
    let answer = |result: &Value| {
        let body = &result["response"]["body"];
        let text = body["choices"][0].get("text").unwrap_or(&body["choices"][0]["message"]["content"]);
        (text.clone(), body["usage"]["prompt_tokens"].clone())
    };
    let with_logprobs = line(
        Some("/v1/chat/completions"),
        &json!({ "messages": chat["messages"], "max_tokens": 2,
        "logprobs": true, "top_logprobs": 2 }),
    );
    let with_logprobs =
        &run(&[with_logprobs], &[])[0]["response"]["body"]["choices"][0]["logprobs"]["content"][0];
    assert!(with_logprobs["token"].is_string(), "{with_logprobs}");
    assert_eq!(with_logprobs["top_logprobs"].as_array().unwrap().len(), 2, "{with_logprobs}");
    let of_own = |result: &Value| (result["text"].clone(), result["usage"]["prompt_tokens"].clone());
    let raw = of_own(&run(std::slice::from_ref(&own), &["--raw", "--special"])[0]);
    assert!(raw.0.is_string(), "{raw:?}");
    assert_eq!((answer(&found[0]), answer(&found[1])), (raw.clone(), raw.clone()));
    assert_eq!(answer(&found[2]), of_own(&found[3]), "a prompt of its own is a message");
    assert!(of_own(&found[3]).1.as_u64() > raw.1.as_u64(), "{found:?}");
    for (result, part) in found[4..].iter().zip(["\"/v1/embeddings\"", "\"messages\"", "\"prompt\""]) {
        let error = result["error"]["message"].as_str().unwrap();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn options_that_recurrent_layers_leave_without_effect_are_named() {
    let fixture = Fixture::new(&["--arch", "qwen35", "--type", "f32"]);
    let file = fixture.path("prefixes");
    let flags = ["-", "--cache-ram", "64M", "--lookup", "4", "-c", "128", "--raw", "--cache-file"];
    let request = lines(&[json!({ "prompt": "hi", "max_tokens": 2 })]);
    let done = output_with_input(fixture.command("batch", &flags).arg(&file), request.as_bytes()).success();
    for name in ["--cache-ram", "--cache-file", "--lookup"] {
        assert!(done.err.contains(&format!("{name} has no effect")), "{}", done.err);
    }
    assert!(!file.exists());
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
    has(1, "line 2: it is no JSON: ");
    has(2, "unknown field \"text\"");
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
    let other = json!({ "id": "b", "prompt": "another", "max_tokens": 1 });
    run(&lines(&[request("a"), other])).failed(1, &["line 2", "another request", "--overwrite"]);
    let another_model = Fixture::new(&["--type", "f32", "--seed", "9"]);
    let command = &mut another_model.command("batch", &[]);
    std::fs::write(fixture.path("in.jsonl"), lines(&[request("a"), request("b")])).unwrap();
    output(command.arg(fixture.path("in.jsonl")).arg("-o").arg(&out).args(FLAGS))
        .failed(1, &["line 1", "another model", "--overwrite"]);
    assert_eq!(std::fs::read(&out).unwrap(), before);
    run(&lines(&[request("a"), request("b"), json!({ "id": "e" })])).failed(1, &["1 request failed"]);
    // Of a batch that goes on, too.
    run(&lines(&[request("a"), request("b"), json!({ "id": "e" }), request("f")]))
        .failed(1, &["1 request failed"]);
    assert_eq!(results(&std::fs::read_to_string(&out).unwrap()).len(), 4);
    drop(input);
}

/// As on a full disk: a message, and a batch that goes on later.
#[cfg(unix)]
#[test]
fn a_limit_on_the_size_of_files_is_an_error() {
    let fixture = Fixture::new(&["--type", "f32"]);
    let (input, out) = (fixture.path("in.jsonl"), fixture.path("out.jsonl"));
    std::fs::write(&input, requests()).unwrap();
    let command = fixture.command("batch", &[]);
    let mut limited = std::process::Command::new("sh");
    limited
        .args(["-c", "ulimit -f 1; exec \"$0\" \"$@\""])
        .arg(command.get_program())
        .args(command.get_args());
    limited.arg(&input).arg("-o").arg(&out).args(FLAGS);
    output(&mut limited).failed(1, &["out.jsonl", "File too large"]);
    output(fixture.command("batch", &[]).arg(&input).arg("-o").arg(&out).args(FLAGS)).success();
    assert_eq!(results(&std::fs::read_to_string(&out).unwrap()).len(), 14);
}

#[test]
fn failed_requests_are_answered_again_on_demand() {
    let fixture = Fixture::new(&["--type", "f32"]);
    let out = fixture.path("out.jsonl");
    let run = |input: &str, flags: &[&str]| {
        std::fs::write(fixture.path("in.jsonl"), input).unwrap();
        let mut command = fixture.command("batch", &[]);
        output(
            command
                .arg(fixture.path("in.jsonl"))
                .arg("-o")
                .arg(&out)
                .args(["-q", "-s", "1", "--raw"])
                .args(flags),
        )
    };
    let text = || std::fs::read_to_string(&out).unwrap();
    let good = |id: &str| json!({ "id": id, "prompt": "a", "max_tokens": 2, "logprobs": 2 }).to_string();
    let long = json!({ "prompt": "word ".repeat(100), "max_tokens": 2 }).to_string();
    let first = [good("a"), "no json".to_owned(), good("b"), long.clone(), good("c")].join("\n");
    run(&first, &["-c", "128"])
        .failed(1, &["2 requests failed", "line 2", "it is no JSON", "--retry-failed"]);
    let before: Vec<String> = text().lines().map(str::to_owned).collect();
    // Without the flag, errors are results like others.
    run(&first, &["-c", "2048"]).failed(1, &["2 requests failed"]);
    assert_eq!(text().lines().collect::<Vec<_>>(), before);
    // Nothing is lost if it ends before all results are there again.
    run(&[good("a"), good("x")].join("\n"), &["-c", "128", "--retry-failed"])
        .failed(1, &["5 results", "2 requests"]);
    run(&[good("a"), good("x"), good("other")].join("\n"), &["-c", "128", "--retry-failed"])
        .failed(1, &["\"other\""]);
    assert_eq!(text().lines().collect::<Vec<_>>(), before);
    let files = std::fs::read_dir(fixture.folder.path()).unwrap().count();
    // The corrected line is answered; what fails again has an error again; new requests follow.
    let second = [good("a"), good("x"), good("b"), long.clone(), good("c"), good("d")].join("\n");
    run(&second, &["-c", "128", "--retry-failed"]).failed(1, &["1 request failed"]);
    let after: Vec<String> = text().lines().map(str::to_owned).collect();
    assert_eq!(after.len(), 6);
    for kept in [0, 2, 4] {
        assert_eq!(after[kept], before[kept]);
    }
    let parsed = results(&text());
    assert_eq!((&parsed[1]["id"], &parsed[5]["id"]), (&json!("x"), &json!("d")));
    assert!(parsed[1]["text"].is_string() && parsed[3]["error"].is_string(), "{parsed:?}");
    // With a larger context, all is well.
    run(&second, &["-c", "2048", "--retry-failed"]).success();
    assert!(results(&text()).iter().all(|result| result["text"].is_string()));
    run(&second, &["-c", "2048", "--retry-failed"]).success();
    assert_eq!(std::fs::read_dir(fixture.folder.path()).unwrap().count(), files);
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

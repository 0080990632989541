//! `quadriga serve` as a process: signals, logs, models of a folder, encoders, and what it refuses.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
#![cfg(unix)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::ops::ControlFlow;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::common::{Fixture, answer_of_run, output, quadriga, windowed_prompts};
use quadriga_llm::default_model;
use serde_json::{Value, json};

pub(crate) const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";

/// A server that runs, and what it logs.
pub(crate) struct Running {
    child: Child,
    pub(crate) address: String,
    log: Option<JoinHandle<String>>,
}

impl Running {
    /// The number of its process.
    pub(crate) fn process(&self) -> u32 {
        self.child.id()
    }

    /// Starts a server, and waits until it is ready.
    pub(crate) fn start(command: &mut Command) -> Running {
        let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let mut log = String::new();
        let address = loop {
            let before = log.len();
            assert!(lines.read_line(&mut log).unwrap() > 0, "it ended: {log}");
            if let Some((_, url)) = log[before..].split_once(" is served at ") {
                let url = url.split(' ').next().unwrap();
                break url.trim_start_matches("http://").to_owned();
            }
        };
        // A pipe that nobody reads would stop the server.
        let log = std::thread::spawn(move || {
            lines.read_to_string(&mut log).unwrap();
            log
        });
        Running { child, address, log: Some(log) }
    }

    pub(crate) fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &id]).status().unwrap().success());
    }

    pub(crate) fn wait(mut self) -> (ExitStatus, String) {
        let status = self.child.wait().unwrap();
        (status, self.log.take().unwrap().join().unwrap())
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> TcpStream {
        let mut stream = self.connect();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}content-length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
        stream
    }

    pub(crate) fn ask(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
        let mut text = String::new();
        self.send(method, path, headers, body).read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, text) = self.ask("POST", path, "", &body.to_string());
        (status, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A test that fails leaves no process behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn hello() -> Value {
    json!({ "messages": [{ "role": "user", "content": "sesame" }], "max_tokens": 4 })
}

pub(crate) fn serve(fixture: &Fixture, flags: &[&str]) -> Running {
    Running::start(fixture.command("serve", &["--port", "0", "-c", "2048"]).args(flags))
}

#[test]
fn sigterm_finishes_answers_and_ends_with_0() {
    let fixture = Fixture::with_template(TEMPLATE);
    let server = serve(&fixture, &["--log-format", "json"]);
    let endless = json!({ "messages": [{ "role": "user", "content": "sesame" }], "max_tokens": 1500, "stream": true,
        "ignore_eos": true });
    let mut stream =
        server.send("POST", "/v1/chat/completions", "x-request-id: mine\r\n", &endless.to_string());
    stream.read_exact(&mut [0; 400]).unwrap();
    server.signal("TERM");
    // Until it has heard of it, it is ready; then it says that it is not, or has ended already.
    while TcpStream::connect(&server.address).is_ok_and(|mut stream| {
        let _ = stream.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        let mut text = String::new();
        stream.read_to_string(&mut text).is_ok() && text.starts_with("HTTP/1.1 200")
    }) {}
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: [DONE]"), "{rest}");
    let (status, log) = server.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    // Every line of the log is JSON, requests are in it, and prompts are not.
    let lines: Vec<Value> = log
        .lines()
        .filter(|line| line.starts_with('{'))
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let answered = lines.iter().find(|line| line["message"] == "answered" && line["span"]["id"] == "mine");
    assert_eq!(answered.unwrap_or_else(|| panic!("{log}"))["status"], 200);
    assert!(
        lines.iter().any(|line| line["message"] == "generated" && line["answer_tokens"] == 1500),
        "{log}"
    );
    assert!(!log.contains("sesame"), "{log}");
}

/// The default model is fetched under a guard against Ctrl-C of its own.
#[test]
fn ctrl_c_finishes_answers_of_the_default_model_and_ends_with_0() {
    default_model::fetch(None, &mut |_| ControlFlow::Continue(())).unwrap();
    let mut command = quadriga(["serve", "--port", "0", "-c", "512", "-t", "1"]);
    let server = Running::start(&mut command);
    let long = json!({ "prompt": "One, two,", "max_tokens": 200, "stream": true, "ignore_eos": true });
    let mut stream = server.send("POST", "/v1/completions", "", &long.to_string());
    stream.read_exact(&mut [0; 400]).unwrap();
    server.signal("INT");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    let (status, log) = server.wait();
    assert!(rest.contains("data: [DONE]"), "{rest} {log}");
    assert_eq!(status.code(), Some(0), "{log}");
}

#[test]
fn prompts_are_logged_only_if_asked_for() {
    let fixture = Fixture::with_template(TEMPLATE);
    let server = serve(&fixture, &["--log-prompts"]);
    assert_eq!(server.post("/v1/chat/completions", &hello()).0, 200);
    server.signal("INT");
    let (status, log) = server.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("sesame"), "{log}");
}

/// 0 is what the model was trained with, not a smaller default.
#[test]
fn the_context_is_that_of_the_training_unless_it_is_given() {
    let fixture = Fixture::new(&["--context", "6144"]);
    for flags in [&["-c", "0"][..], &[]] {
        let mut command = fixture.command("serve", &["--port", "0"]);
        let server = Running::start(command.args(flags));
        let (_, text) = server.ask("GET", "/status", "", "");
        let status: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(status["context"], 6144, "{flags:?}");
    }
    let (_, text) = serve(&fixture, &[]).ask("GET", "/status", "", "");
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["context"], 2048);
}

/// The allocator keeps what requests needed. The server gives it back when it has nothing to do.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[test]
fn memory_of_requests_is_given_back() {
    let fixture = Fixture::with_template(TEMPLATE);
    let server = serve(&fixture, &[]);
    let resident = || {
        let text = std::fs::read_to_string(format!("/proc/{}/statm", server.child.id())).unwrap();
        text.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    };
    assert_eq!(server.post("/v1/chat/completions", &hello()).0, 200);
    let before = resident();
    // Each of the answers has a grammar of its own.
    let words: Vec<String> = (0..8000).map(|number| format!("word {number}")).collect();
    let mut body = hello();
    body["n"] = json!(128);
    body["guided_json"] = json!({ "enum": words });
    assert_eq!(server.post("/v1/chat/completions", &body).0, 200);
    let most = 64 << 20;
    for _ in 0..3000 {
        if resident() < before + most {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{before} bytes became {}", resident());
}

/// A sample of `/metrics` without labels.
fn sample(server: &Running, name: &str) -> f64 {
    let (_, text) = server.ask("GET", "/metrics", "", "");
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
    line.unwrap_or_else(|| panic!("{name} in {text}")).parse().unwrap()
}

/// Clients that vanish leave no tasks, threads or connections behind. Threads that prepared requests end after some idle seconds.
#[cfg(target_os = "linux")]
#[test]
fn clients_that_vanish_leave_no_tasks_and_threads() {
    const NAMES: [&str; 3] = ["process_threads", "quadriga:runtime_tasks", "quadriga:http_connections_open"];
    let fixture = Fixture::with_template(TEMPLATE);
    let server = serve(&fixture, &[]);
    let counts = || NAMES.map(|name| sample(&server, name));
    // Whatever is begun with the first answer.
    assert_eq!(server.post("/v1/chat/completions", &hello()).0, 200);
    // Its connection may be closing still.
    let mut before = counts();
    for _ in 0..3000 {
        if before[2] == 1.0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
        before = counts();
    }
    assert!(before[0] > 1.0 && before[1] >= 1.0 && before[2] == 1.0, "{before:?}");
    let endless =
        json!({ "messages": [{ "role": "user", "content": "sesame" }], "max_tokens": 2000, "stream": true,
        "ignore_eos": true })
        .to_string();
    let mut clients: Vec<TcpStream> =
        (0..24).map(|_| server.send("POST", "/v1/chat/completions", "", &endless)).collect();
    for client in clients.iter_mut().step_by(2) {
        client.read_exact(&mut [0; 200]).unwrap();
    }
    let during = counts();
    assert!(during[1] > before[1] + 20.0 && during[2] > before[2] + 20.0, "{before:?} became {during:?}");
    drop(clients);
    let mut after = counts();
    for _ in 0..6000 {
        if after.iter().zip(&before).all(|(after, before)| after <= before) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
        after = counts();
    }
    panic!("{before:?} became {after:?}");
}

/// `--reasoning-format none` leaves reasoning in the text; a request may say otherwise.
#[test]
fn reasoning_is_where_the_flag_says() {
    let template =
        format!("{TEMPLATE}{{% if add_generation_prompt %}}<think>\n{{% endif %}}{{# </think> #}}");
    let fixture = Fixture::with_template(&template);
    let server = serve(&fixture, &["--reasoning-format", "none", "-s", "3"]);
    let ask = |format: Value| {
        let mut body = hello();
        body["reasoning_format"] = format;
        let (status, answer) = server.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["message"].clone()
    };
    let inline = ask(Value::Null);
    assert!(inline["content"].as_str().unwrap().starts_with("<think>\n"), "{inline}");
    assert!(inline.get("reasoning_content").is_none(), "{inline}");
    let apart = ask(json!("deepseek"));
    assert_eq!(apart["content"], "");
    let thought = apart["reasoning_content"].as_str().unwrap();
    assert_eq!(format!("<think>\n{thought}"), inline["content"].as_str().unwrap());
}

/// A budget of the command line or the environment holds for requests that name none, and reasoning that is off is off although the
/// template has no switch.
#[test]
fn reasoning_is_as_long_as_the_flag_says() {
    let template =
        format!("{TEMPLATE}{{% if add_generation_prompt %}}<think>\n{{% endif %}}{{# </think> #}}");
    let fixture = Fixture::with_template(&template);
    let ask = |server: &Running, budget: Value| {
        let mut body = hello();
        (body["max_tokens"], body["reasoning_budget_tokens"]) = (json!(40), budget);
        body["ignore_eos"] = json!(true);
        let (status, answer) = server.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap()
    };
    let flagged = serve(&fixture, &["--reasoning-budget", "6"]);
    let mut command = fixture.command("serve", &["--port", "0", "-c", "2048"]);
    let named = Running::start(command.env("LLAMA_ARG_THINK_BUDGET", "6"));
    for server in [&flagged, &named] {
        let (limited, unlimited) = (ask(server, Value::Null), ask(server, json!(-1)));
        assert!((6..30).contains(&limited) && unlimited == 40, "{limited} {unlimited}");
        assert_eq!(ask(server, json!(0)), 0);
    }
    for flags in [["--reasoning", "off"], ["--reasoning-budget", "0"]] {
        let server = serve(&fixture, &flags);
        assert_eq!((ask(&server, Value::Null), ask(&server, json!(-1))), (0, 40), "{flags:?}");
    }
}

/// `--pooling` decides how embeddings are made of the vectors of tokens, of models that generate text and of encoders.
#[test]
fn pooling_is_that_of_the_flag() {
    let decoder = Fixture::with_template(TEMPLATE);
    let embed = |fixture: &Fixture, pooling: &str| -> Value {
        let printed =
            output(&mut fixture.command("embed", &["sesame", "--pooling", pooling, "-q"])).success();
        let printed: Value = serde_json::from_str(&printed.out).unwrap();
        printed["embeddings"][0]["embedding"].clone()
    };
    let close = |a: &Value, b: &Value| {
        let numbers = |value: &Value| -> Vec<f64> {
            let flat = value.as_array().unwrap().iter().flat_map(|one| match one {
                Value::Array(inner) => inner.clone(),
                one => vec![one.clone()],
            });
            flat.map(|number| number.as_f64().unwrap()).collect()
        };
        let (a, b) = (numbers(a), numbers(b));
        assert!(a.len() == b.len() && !a.is_empty(), "{} and {}", a.len(), b.len());
        a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-4)
    };
    for pooling in ["mean", "cls", "last"] {
        let server = serve(&decoder, &["--pooling", pooling]);
        let (status, answer) = server.post("/v1/embeddings", &json!({ "input": "sesame" }));
        assert_eq!(status, 200, "{answer}");
        let found = &answer["data"][0]["embedding"];
        assert!(close(found, &embed(&decoder, pooling)), "{pooling}");
        if pooling == "mean" {
            assert!(!close(found, &embed(&decoder, "last")));
        }
    }
    let server = serve(&decoder, &["--pooling", "none"]);
    let (status, answer) = server.post("/v1/embeddings", &json!({ "input": "sesame" }));
    assert!(
        status == 400 && answer["error"]["message"].as_str().unwrap().contains("--pooling none"),
        "{answer}"
    );
    let (status, answer) = server.post("/embedding", &json!({ "content": "sesame" }));
    assert_eq!(status, 200, "{answer}");
    let rows = answer[0]["embedding"].as_array().unwrap();
    assert!(rows.len() > 1, "{answer}");
    assert!(close(&answer[0]["embedding"], &embed(&decoder, "none")));
}

#[test]
fn sighup_reads_keys_again() {
    let fixture = Fixture::with_template(TEMPLATE);
    let keys = fixture.path("keys");
    std::fs::write(&keys, "first\n").unwrap();
    let server = serve(&fixture, &["--api-key-file", keys.to_str().unwrap()]);
    let status =
        |key: &str| server.ask("GET", "/v1/models", &format!("authorization: Bearer {key}\r\n"), "").0;
    assert_eq!((status("first"), status("second")), (200, 401));
    std::fs::write(&keys, "second\n").unwrap();
    server.signal("HUP");
    while status("second") != 200 {}
    assert_eq!(status("first"), 401);
}

#[test]
fn a_killed_server_starts_again_at_the_same_place() {
    let fixture = Fixture::with_template(TEMPLATE);
    let cache = fixture.path("prefixes");
    let flags = ["--cache-file", cache.to_str().unwrap(), "--kv-tokens", "2048"];
    let server = serve(&fixture, &flags);
    let (_, first) = server.post("/v1/chat/completions", &hello());
    let endless = json!({ "messages": [{ "role": "user", "content": "sesame" }], "max_tokens": 1500, "stream": true,
        "ignore_eos": true });
    let mut stream = server.send("POST", "/v1/chat/completions", "", &endless.to_string());
    stream.read_exact(&mut [0; 400]).unwrap();
    server.signal("KILL");
    let mut rest = Vec::new();
    // The connection ends; the client is not left waiting.
    let _ = stream.read_to_end(&mut rest);
    let port = server.address.rsplit(':').next().unwrap().to_owned();
    assert_eq!(server.wait().0.code(), None);
    let mut command = fixture.command("serve", &["--port", &port, "-c", "2048"]);
    let server = Running::start(command.args(flags));
    let (status, again) = server.post("/v1/chat/completions", &with_seed(hello()));
    assert_eq!(status, 200, "{again}");
    assert_eq!(again["usage"]["prompt_tokens"], first["usage"]["prompt_tokens"]);
}

#[test]
fn a_server_that_was_stopped_goes_on_with_conversations() {
    let fixture = Fixture::with_template(TEMPLATE);
    let cache = fixture.path("prefixes");
    let flags = ["--cache-file", cache.to_str().unwrap(), "--cache-ram", "64M", "--kv-tokens", "2048"];
    let long =
        json!({ "messages": [{ "role": "user", "content": "open sesame ".repeat(40) }], "max_tokens": 4 });
    let cached = |server: &Running| {
        let (status, answer) = server.post("/v1/chat/completions", &long);
        assert_eq!(status, 200, "{answer}");
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    let server = serve(&fixture, &flags);
    assert_eq!(cached(&server), 0);
    let found = cached(&server);
    assert!(found >= 64, "{found} tokens");
    server.signal("TERM");
    assert!(server.wait().0.success());
    assert_eq!(cached(&serve(&fixture, &flags)), found);
}

fn with_seed(mut body: Value) -> Value {
    body["seed"] = 1.into();
    body
}

#[test]
fn models_of_a_folder_are_loaded_when_they_are_named() {
    let fixture = Fixture::with_template(TEMPLATE);
    let bert = Fixture::new(&["--arch", "bert", "--context", "64"]);
    std::fs::create_dir(fixture.path("models")).unwrap();
    std::fs::rename(&fixture.model, fixture.path("models/text.gguf")).unwrap();
    std::fs::create_dir(fixture.path("models/encoders")).unwrap();
    std::fs::rename(&bert.model, fixture.path("models/encoders/bert.gguf")).unwrap();
    std::fs::write(fixture.path("models/damaged.gguf"), "GGUF").unwrap();
    let folder = fixture.path("models");
    let mut command = quadriga(["serve", "--port", "0", "-c", "64", "--models-dir"]);
    let server = Running::start(command.arg(&folder));
    // Ollama's clients see all of them, with what their files say.
    let tags: Value = serde_json::from_str(&server.ask("GET", "/api/tags", "", "").1).unwrap();
    let seen: Vec<_> = tags["models"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| (&model["name"], &model["details"]["family"]))
        .collect();
    let (bert, damaged, text) = (json!("bert"), json!("damaged"), json!("text"));
    assert_eq!(seen, [(&bert, &json!("bert")), (&damaged, &json!("")), (&text, &json!("llama"))], "{tags}");
    assert_eq!(tags["models"][0]["capabilities"], json!(["embedding"]));
    let digests: std::collections::BTreeSet<&str> =
        tags["models"].as_array().unwrap().iter().map(|model| model["digest"].as_str().unwrap()).collect();
    assert!(digests.len() == 3 && digests.iter().all(|digest| digest.len() == 64), "{tags}");
    let (status, shown) = server.post("/api/show", &json!({ "model": "text" }));
    assert_eq!((status, &shown["model_info"]["general.architecture"]), (200, &json!("llama")), "{shown}");
    assert_eq!(server.ask("GET", "/api/ps", "", "").1, "{\"models\":[]}");
    let mut chat = hello();
    chat["model"] = "text".into();
    let (status, answer) = server.post("/v1/chat/completions", &chat);
    assert_eq!((status, &answer["model"]), (200, &json!("text")), "{answer}");
    // An encoder embeds, and says that it cannot answer.
    let (status, answer) =
        server.post("/v1/embeddings", &json!({ "model": "bert", "input": ["a cat", "a dog"] }));
    assert_eq!((status, answer["data"].as_array().map(Vec::len)), (200, Some(2)), "{answer}");
    let vectors = [-1, 2].map(|norm| {
        let body = json!({ "model": "bert", "content": "a cat", "embd_normalize": norm });
        let vector = server.post("/embedding", &body).1[0]["embedding"][0].clone();
        vector.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect::<Vec<f64>>()
    });
    let length = vectors[0].iter().map(|x| x * x).sum::<f64>().sqrt();
    let is_scaled =
        vectors[0].iter().zip(&vectors[1]).all(|(own, scaled)| (own / length - scaled).abs() < 1e-5);
    assert!((length - 1.0).abs() > 0.01 && is_scaled, "{length}: {vectors:?}");
    chat["model"] = "bert".into();
    let (status, answer) = server.post("/v1/chat/completions", &chat);
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(status == 501 && message.contains("/v1/embeddings"), "{status}: {answer}");
    // So does a model for text.
    let (status, answer) = server.post("/v1/embeddings", &json!({ "model": "text", "input": "a cat" }));
    let length: f64 =
        answer["data"][0]["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap().powi(2)).sum();
    assert!(status == 200 && (length - 1.0).abs() < 1e-4, "{answer}");
    let (status, answer) = server.post("/models/load", &json!({ "model": "damaged" }));
    assert_eq!(status, 500, "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().contains("damaged.gguf"), "{answer}");
    assert_eq!(server.post("/models/load", &json!({ "model": "none" })).0, 404);
    assert_eq!(server.post("/models/unload", &json!({ "model": "text" })).0, 200);
}

/// Layers with a window have pages of their own, of which several requests use some at once; and prefixes are found with them.
#[test]
fn models_with_sliding_windows_answer_many_as_run_answers_one() {
    for (architecture, window) in [("gpt-oss", 128), ("gemma3", 512)] {
        let fixture = Fixture::new(&["--arch", architecture, "--type", "f32"]);
        let prompts = windowed_prompts(window);
        let wanted: Vec<Value> = prompts.iter().map(|prompt| answer_of_run(&fixture, prompt)).collect();
        let server = Running::start(&mut fixture.command("serve", &["--port", "0"]));
        let body = |prompt: &str| json!({ "prompt": prompt, "n_predict": 16, "temperature": 0 }).to_string();
        // The second time, prefixes of all of them are there.
        for round in 0..2 {
            let streams: Vec<TcpStream> =
                prompts.iter().map(|prompt| server.send("POST", "/completion", "", &body(prompt))).collect();
            for (index, mut stream) in streams.into_iter().enumerate() {
                let mut text = String::new();
                stream.read_to_string(&mut text).unwrap();
                let answer: Value = serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap();
                assert_eq!(answer["content"], wanted[index], "{architecture}, {round}: {answer}");
            }
        }
    }
}

#[test]
fn a_model_that_is_loaded_again_is_divided_again() {
    let fixture = Fixture::new(&["--width", "128", "--heads", "4", "--kv-heads", "4"]);
    let server = serve(&fixture, &["--device", "sim:0,sim:1", "-sm", "row", "-ngl", "all"]);
    let ask = || {
        let (status, answer) =
            server.post("/completion", &json!({ "prompt": "hi", "n_predict": 4, "temperature": 0 }));
        assert_eq!(status, 200, "{answer}");
        answer["content"].clone()
    };
    let sums = || server.ask("GET", "/plan", "", "").1.matches("all_reduce").count();
    let first = (ask(), sums());
    assert!(first.1 > 0);
    assert_eq!(server.post("/models/unload", &json!({ "model": "tiny" })).0, 200);
    assert_eq!((ask(), sums()), first, "the first GPU alone has nothing to add up");
}

/// A broken file pushes no loaded model out, and files of one name have names of their own.
#[test]
fn models_of_a_folder_hide_and_push_out_no_other() {
    let fixture = Fixture::with_template(TEMPLATE);
    let folder = fixture.path("models");
    for inner in ["a", "b"] {
        std::fs::create_dir_all(folder.join(inner)).unwrap();
        std::fs::copy(&fixture.model, folder.join(inner).join("same.gguf")).unwrap();
    }
    std::fs::write(folder.join("damaged.gguf"), "GGUF").unwrap();
    let whole = std::fs::read(&fixture.model).unwrap();
    std::fs::write(folder.join("cut.gguf"), &whole[..whole.len() / 2]).unwrap();
    let flags = ["--models-max", "1", "--alias", "first,second", "--models-dir"];
    let mut command = fixture.command("serve", &["--port", "0", "-c", "64"]);
    let server = Running::start(command.args(flags).arg(&folder));
    let listed = || -> Vec<(String, String)> {
        let list: Value = serde_json::from_str(&server.ask("GET", "/v1/models", "", "").1).unwrap();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let all = list["data"].as_array().unwrap();
        all.iter().map(|model| (text(&model["id"]), text(&model["status"]["value"]))).collect()
    };
    let names: Vec<String> = listed().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["a/same", "b/same", "cut", "damaged", "first"]);
    let loaded = || -> Vec<String> {
        listed().into_iter().filter(|(_, state)| state == "loaded").map(|(name, _)| name).collect()
    };
    for name in ["damaged", "cut"] {
        let (status, answer) = server.post("/models/load", &json!({ "model": name }));
        assert_eq!((status, loaded()), (500, vec!["first".to_owned()]), "{answer}");
    }
    let model = |name: &str| {
        let mut body = hello();
        body["model"] = name.into();
        server.post("/v1/chat/completions", &body).1["model"].clone()
    };
    assert_eq!(model("second"), "first");
    assert_eq!(model("b/same"), "b/same");
    assert_eq!(loaded(), ["b/same"]);
    assert_eq!(server.ask("GET", "/v1/models/b%2Fsame", "", "").0, 200);
}

/// Flags that users of llama-server bring along.
#[test]
fn flags_of_llama_server_are_understood() {
    let fixture = Fixture::with_template(TEMPLATE);
    let flags = ["-v", "--no-webui", "--no-slots", "--api-prefix", "/llm/", "--reasoning-format", "auto"];
    let server = serve(&fixture, &flags);
    let html = "accept: text/html\r\n";
    let (status, text) = server.ask("GET", "/llm/", html, "");
    assert_eq!((status, text.as_str()), (200, "Ollama is running"));
    assert_eq!(server.ask("GET", "/llm/app.js", "", "").0, 404);
    assert_eq!(server.ask("GET", "/llm/slots", "", "").0, 501);
    assert_eq!(server.ask("GET", "/llm/health", "", "").0, 200);
    let (status, answer) = server.post("/llm/v1/chat/completions", &hello());
    assert_eq!(status, 200, "{answer}");
    for path in ["/v1/models", "/", "/llmx/health"] {
        assert_eq!(server.ask("GET", path, "", "").0, 404, "{path}");
    }
    // Errors have the form of their interface.
    let (status, answer) = server.post("/llm/api/chat", &json!({ "messages": 5 }));
    assert!(status == 400 && answer["error"].is_string(), "{answer}");
    server.signal("TERM");
    let (_, log) = server.wait();
    assert!(log.contains("DEBUG") && !log.contains("no effect"), "{log}");
    let server = serve(&fixture, &["-lv", "2", "--cache-reuse", "256"]);
    let (_, page) = server.ask("GET", "/", html, "");
    assert!(page.contains("<html"), "{page}");
    server.signal("TERM");
    let (_, log) = server.wait();
    assert!(!log.contains("answered") && log.contains("--cache-reuse has no effect"), "{log}");
    let help = output(&mut quadriga(["serve", "--help"])).success().out;
    assert!(!help.contains("--single-turn") && help.contains("--no-webui"), "{help}");
    assert!(output(&mut quadriga(["chat", "--help"])).success().out.contains("--single-turn"));
}

#[test]
fn a_model_that_needs_more_memory_than_there_is_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, flags: &[&str]| {
        let path = folder.path().join(name);
        output(quadriga(["synth", "-o"]).arg(&path).args(flags)).success();
    };
    write("small.gguf", &["--layers", "1", "--width", "64"]);
    write("large.gguf", &["--layers", "24", "--width", "512"]);
    // A KV cache of a size that one of them can afford.
    let mut command =
        quadriga(["serve", "--port", "0", "-c", "64", "--kv-tokens", "16000000", "--models-dir"]);
    let server = Running::start(command.arg(folder.path()));
    let (status, answer) = server.post("/models/load", &json!({ "model": "large" }));
    assert_eq!(status, 503, "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().contains("MiB are free"), "{answer}");
}

#[test]
fn a_reranker_sorts_documents_as_embed_does() {
    let fixture = Fixture::reranker();
    let texts = ["aaa", "zzzzzz", "query"];
    let flags = [&texts[..], &["--query", "query", "-q"]].concat();
    let printed = output(&mut fixture.command("embed", &flags)).success();
    let printed: Value = serde_json::from_str(&printed.out).unwrap();
    let rounded = |score: &Value| (score.as_f64().unwrap() * 1e4).round();
    let wanted: Vec<_> = printed["ranking"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["index"].clone(), rounded(&one["score"])))
        .collect();
    let server = Running::start(&mut fixture.command("serve", &["--port", "0"]));
    for path in ["/rerank", "/v1/rerank", "/reranking"] {
        let (status, answer) = server.post(path, &json!({ "query": "query", "documents": texts }));
        let results = answer["results"].as_array().unwrap_or_else(|| panic!("{status}: {answer}"));
        let found: Vec<_> =
            results.iter().map(|one| (one["index"].clone(), rounded(&one["relevance_score"]))).collect();
        assert_eq!(found, wanted, "{answer}");
        assert!(answer["usage"]["prompt_tokens"].as_u64().unwrap() > 12, "{answer}");
    }
    // In the form of text-embeddings-inference, and only the best.
    let body = json!({ "query": "query", "texts": texts, "top_n": 1, "return_text": true });
    let (_, best) = server.post("/rerank", &body);
    let first = wanted[0].0.as_u64().unwrap() as usize;
    assert_eq!((best.as_array().unwrap().len(), &best[0]["text"]), (1, &json!(texts[first])), "{best}");
    let (status, answer) = server.post("/rerank", &json!({ "query": "q", "documents": [] }));
    assert_eq!(status, 400, "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().starts_with("documents"), "{answer}");
}

/// The flags of llama-server that say what answers are, and who may ask.
#[test]
fn flags_hold_for_requests_that_say_nothing_else() {
    let fixture = Fixture::with_template(TEMPLATE);
    let flags = ["--grammar", "root ::= [a-z]{30}", "-s", "7", "--temp", "3", "--api-key", "k1,k2"];
    let server = serve(&fixture, &flags);
    let body = json!({ "messages": [{ "role": "user", "content": "sesame" }] }).to_string();
    let ask = |key: &str| {
        let (status, text) =
            server.ask("POST", "/v1/chat/completions", &format!("x-api-key: {key}\r\n"), &body);
        let answer: Value = serde_json::from_str(&text).unwrap();
        (status, answer["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned())
    };
    let (first, second) = (ask("k1"), ask("k2"));
    assert_eq!(first.0, 200);
    assert!(first.1.len() == 30 && first.1.bytes().all(|byte| byte.is_ascii_lowercase()), "{first:?}");
    assert_eq!(first, second, "they have one seed");
    assert_eq!(ask("k1,k2").0, 401);
}

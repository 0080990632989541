//! The command on several ranks, under both families of MPI. `scripts/mpi-tests` installs them and runs this.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;
#[path = "mpi/exact.rs"]
mod exact;
#[path = "mpi/faults.rs"]
mod faults;
#[path = "../../cluster/tests/hold/mod.rs"]
mod hold;
#[path = "mpi/killed.rs"]
mod killed;
#[path = "mpi/loading.rs"]
mod loading;
#[path = "mpi/memory.rs"]
mod memory;
#[path = "mpi/uneven.rs"]
mod uneven;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use common::{CommandOutput, Fixture, quadriga};

/// The installed families, by the folder of each.
fn families() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/mpi");
    let folders = ["mpich", "openmpi"].map(|family| root.join(family));
    let found: Vec<PathBuf> =
        folders.into_iter().filter(|folder| folder.join("bin/mpirun").exists()).collect();
    let required = std::env::var_os("QUADRIGA_REQUIRE_MPI").is_some();
    assert!(!required || found.len() == 2, "both families are required in {}: {found:?}", root.display());
    if found.is_empty() {
        eprintln!("not run: no MPI in {}; scripts/mpi-tests installs both families", root.display());
    }
    found
}

/// The command on several ranks, with one thread each.
fn mpirun<'a>(family: &Path, ranks: usize, arguments: impl IntoIterator<Item = &'a str>) -> Command {
    mpirun_with(family, &[], ranks, arguments)
}

/// The same, with options of the launcher.
fn mpirun_with<'a>(
    family: &Path,
    options: &[&str],
    ranks: usize,
    arguments: impl IntoIterator<Item = &'a str>,
) -> Command {
    mpirun_of(family, options, ranks, &[], arguments)
}

/// The same, with a program before the command.
fn mpirun_of<'a>(
    family: &Path,
    options: &[&str],
    ranks: usize,
    before: &[&str],
    arguments: impl IntoIterator<Item = &'a str>,
) -> Command {
    let mut command = Command::new(family.join("bin/mpirun"));
    if family.ends_with("openmpi") {
        command.args(["--oversubscribe", "--bind-to", "none"]);
    }
    command
        .args(options)
        .args(["-n", &ranks.to_string()])
        .args(before)
        .arg(env!("CARGO_BIN_EXE_quadriga"))
        .args(arguments)
        .args(["-t", "1"])
        // The library is found beside the launcher.
        .env(
            "PATH",
            format!("{}:{}", family.join("bin").display(), std::env::var("PATH").unwrap_or_default()),
        )
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .env_remove("QUADRIGA_CACHE")
        .stdin(Stdio::null());
    command
}

/// When a rank that is silent is lost with `--rank-timeout 2`: heartbeats are looked for every eighth of that time.
const NOTICED: Duration = Duration::from_millis(2250);
/// How long the others may take to tell each other and to end, with room for a busy machine.
const TOLD: Duration = Duration::from_secs(15);

const QUESTION: [&str; 6] = ["run", "-p", "What is gravity?", "--temp", "0", "-n"];

#[test]
fn every_division_answers_as_one_process_and_prints_once() {
    let question = QUESTION.into_iter().chain(["16", "-q"]);
    let families = families();
    if families.is_empty() {
        return;
    }
    let alone = CommandOutput::from(quadriga(question.clone()).output().unwrap()).success().out;
    assert!(alone.contains("Gravity"), "{alone}");
    for family in families {
        for (ranks, how) in
            [(1, "auto"), (2, "tensor"), (2, "pipeline"), (4, "tensor=2,pipeline=2"), (4, "auto")]
        {
            for shared in ["1", "0"] {
                let mut command = mpirun(&family, ranks, question.clone().chain(["--parallelism", how]));
                let output = command.env("QUADRIGA_MPI_SHARED_MEMORY", shared).output().unwrap();
                let output = CommandOutput::from(output).success();
                assert_eq!(output.out, alone, "{} with {ranks} ranks, {how}: {output:?}", family.display());
            }
        }
    }
}

/// With batches that a pipeline does not cut further, its results are the same bits.
#[test]
fn a_pipeline_of_the_default_model_has_the_bits_of_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    let cases = folder.path().join("cases.jsonl");
    let text = "Gravity is a force that pulls things with mass towards each other. ".repeat(12);
    let case = serde_json::json!({ "name": "a", "kind": "nll", "ctx": 128, "text": text });
    std::fs::write(&cases, case.to_string()).unwrap();
    let arguments = ["eval", cases.to_str().unwrap(), "-c", "256", "-b", "64"];
    for family in families() {
        let (wanted, _) = scores(&mut mpirun(&family, 1, arguments));
        for ranks in [2, 4] {
            let divided = arguments.into_iter().chain(["--parallelism", "pipeline"]);
            let (found, _) = scores(&mut mpirun(&family, ranks, divided));
            assert_eq!(found, wanted, "{ranks} ranks");
        }
    }
}

/// Experts of quantized blocks, as most files have them: sums in another order, after which activations may be rounded otherwise.
#[test]
fn a_quantized_mixture_is_divided_among_four_ranks() {
    let fixture = Fixture::new(&[
        "--arch",
        "qwen2moe",
        "--type",
        "q8_0",
        "--layers",
        "4",
        "--heads",
        "4",
        "--kv-heads",
        "4",
        "--width",
        "128",
        "--ffn",
        "128",
        "--experts",
        "8",
        "--seed",
        "5",
    ]);
    let cases = fixture.path("case.jsonl");
    let case = r#"{"name": "a", "kind": "nll", "ctx": 16, "text": "a quantized mixture of experts, divided among four ranks"}"#;
    std::fs::write(&cases, case).unwrap();
    let arguments = ["eval", cases.to_str().unwrap(), "-m", fixture.model.to_str().unwrap(), "-c", "128"];
    for family in families() {
        let (text, wanted) = scores(&mut mpirun(&family, 1, arguments));
        for how in ["tensor=4", "tensor=2,pipeline=2", "pipeline=4"] {
            let divided = arguments.into_iter().chain(["--parallelism", how]);
            let (found_text, found) = scores(&mut mpirun(&family, 4, divided));
            if how == "pipeline=4" {
                assert_eq!(found_text, text, "a pipeline has the same bits");
            }
            assert!(wanted.len() > 1 && found.len() == wanted.len(), "{how}: {text}");
            for (found, wanted) in found.iter().zip(&wanted) {
                assert!((found - wanted).abs() <= 1e-3 * wanted.abs().max(1.0), "{how}: {found} {wanted}");
            }
        }
    }
}

/// The log-probabilities of a text, which `eval` prints for a case.
fn scores(command: &mut Command) -> (String, Vec<f64>) {
    let output = CommandOutput::from(command.output().unwrap()).success();
    let result: serde_json::Value = serde_json::from_str(output.out.trim()).unwrap();
    let mut numbers = Vec::new();
    let mut rest = vec![&result];
    while let Some(value) = rest.pop() {
        match value {
            serde_json::Value::Number(number) => numbers.push(number.as_f64().unwrap()),
            serde_json::Value::Array(values) => rest.extend(values),
            serde_json::Value::Object(fields) => rest.extend(fields.values()),
            _ => {}
        }
    }
    (output.out, numbers)
}

/// Experts; and models with windows, sinks, linear attention and convolutions, fused matrices and norms over all heads.
#[test]
fn architectures_are_divided_among_ranks() {
    for architecture in ["qwen2moe", "gpt-oss", "qwen35moe", "gemma3", "phi3", "lfm2", "olmo2"] {
        let fixture =
            Fixture::new(&["--arch", architecture, "--type", "f32", "--layers", "4", "--seed", "5"]);
        let cases = fixture.path("case.jsonl");
        let case = r#"{"name": "a", "kind": "nll", "ctx": 16, "text": "a mixture of experts, divided among several ranks"}"#;
        std::fs::write(&cases, case).unwrap();
        let arguments = ["eval", cases.to_str().unwrap(), "-m", fixture.model.to_str().unwrap(), "-c", "128"];
        for family in families() {
            let mut alone = mpirun(&family, 1, arguments);
            let (text, wanted) = scores(&mut alone);
            assert!(wanted.len() > 1, "{text}");
            for (ranks, how) in [(2, "tensor"), (2, "pipeline"), (4, "pipeline"), (4, "tensor=2,pipeline=2")]
            {
                let divided = arguments.into_iter().chain(["--parallelism", how]);
                let (found_text, found) = scores(&mut mpirun(&family, ranks, divided));
                if how == "pipeline" {
                    assert_eq!(found_text, text, "{architecture} on {ranks} ranks");
                }
                assert_eq!(found.len(), wanted.len());
                for (found, wanted) in found.iter().zip(&wanted) {
                    assert!(
                        (found - wanted).abs() <= 1e-4 * wanted.abs().max(1.0),
                        "{architecture} on {ranks}, {how}: {found} {wanted}"
                    );
                }
            }
        }
    }
}

#[test]
fn what_ranks_cannot_do_is_said_once_with_the_numbers() {
    for family in families() {
        let arguments = QUESTION.into_iter().chain(["4", "--parallelism", "tensor"]);
        let output = CommandOutput::from(mpirun(&family, 4, arguments).output().unwrap());
        assert_ne!(output.code, Some(0), "{output:?}");
        let lines: Vec<&str> = output.err.lines().filter(|line| line.contains("quadriga: several")).collect();
        assert_eq!(lines.len(), 1, "{output:?}");
        assert!(lines[0].contains("3 KV heads") && lines[0].contains("for 4 ranks"), "{output:?}");
        let refused = CommandOutput::from(mpirun(&family, 2, ["perplexity", "-f", "text"]).output().unwrap());
        assert_ne!(refused.code, Some(0), "{refused:?}");
        assert!(refused.err.contains("does not run on several ranks yet"), "{refused:?}");
    }
}

#[test]
fn a_prompt_cache_has_the_parts_of_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    for family in families() {
        for how in ["tensor", "pipeline"] {
            let name = format!("{}-{how}", family.file_name().unwrap().to_str().unwrap());
            let file = folder.path().join(name);
            let cached = ["8", "--parallelism", how, "--prompt-cache", file.to_str().unwrap()];
            let run = || {
                let mut command = mpirun(&family, 2, QUESTION.into_iter().chain(cached));
                CommandOutput::from(command.output().unwrap()).success()
            };
            let (first, second) = (run(), run());
            assert_eq!(first.out, second.out);
            assert!(!first.err.contains("from the prompt cache"), "{first:?}");
            assert!(second.err.contains("from the prompt cache"), "{second:?}");
        }
    }
}

/// A server on ranks.
struct Served {
    child: Child,
    address: String,
    /// What it still writes to stderr.
    log: BufReader<ChildStderr>,
}

impl Served {
    /// On two ranks, of which each notices soon when the other is silent.
    fn start(family: &Path, options: &[&str]) -> Served {
        Served::start_with(family, &[], 2, &[&["--rank-timeout", "2"], options].concat())
    }

    /// On so many ranks, with options of the launcher.
    fn start_with(family: &Path, launcher: &[&str], ranks: usize, options: &[&str]) -> Served {
        let arguments = ["serve", "--port", "0", "-c", "4096"].into_iter().chain(options.iter().copied());
        Served::of(mpirun_with(family, launcher, ranks, arguments))
    }

    /// What a command serves.
    fn of(mut command: Command) -> Served {
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut seen = String::new();
        let address = loop {
            let mut line = String::new();
            assert!(log.read_line(&mut line).unwrap() > 0, "{seen}");
            if let Some((_, url)) = line.split_once("is served at http://") {
                break url.split_whitespace().next().unwrap().to_owned();
            }
            seen.push_str(&line);
        };
        Served { child, address, log }
    }

    /// Asks for a completion; the whole answer comes when the connection closes.
    fn ask(&self, prompt: &str, tokens: usize) -> TcpStream {
        let body = format!(
            r#"{{"prompt": "{prompt}", "max_tokens": {tokens}, "temperature": 0, "ignore_eos": true}}"#
        );
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(
            stream,
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        stream
    }

    /// Waits for the end; the exit code and the rest of stderr.
    fn end(mut self) -> (Option<i32>, String) {
        let mut rest = String::new();
        self.log.read_to_string(&mut rest).unwrap();
        (self.child.wait().unwrap().code(), rest)
    }
}

fn whole(mut stream: TcpStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// The same, where the connection may be cut.
fn whole_or_cut(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    drop(stream.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

fn send_signal(signal: &str, process: u32) {
    assert!(Command::new("kill").args([signal, &process.to_string()]).status().unwrap().success());
}

/// Tells a server to end; its exit code and the rest of stderr, also if it ended before.
fn terminated(served: Served, process: u32) -> (Option<i32>, String) {
    Command::new("kill").args(["-TERM", &process.to_string()]).status().unwrap();
    served.end()
}

#[test]
fn a_server_on_ranks_answers_many_at_once_and_ends_when_it_is_told_to() {
    for family in families() {
        let served = Served::start_with(&family, &[], 2, &["--parallelism", "pipeline"]);
        let prompts = ["The capital of France is", "One, two, three,", "The sky is"];
        let one_by_one: Vec<String> = prompts.iter().map(|prompt| whole(served.ask(prompt, 12))).collect();
        let streams: Vec<TcpStream> = prompts.iter().map(|prompt| served.ask(prompt, 12)).collect();
        for (stream, wanted) in streams.into_iter().zip(&one_by_one) {
            let text = |answer: &str| {
                answer.split_once("\"text\":").unwrap().1.split_once(",").unwrap().0.to_owned()
            };
            assert!(wanted.starts_with("HTTP/1.1 200"), "{wanted}");
            assert_eq!(text(&whole(stream)), text(wanted));
        }
        assert!(one_by_one[0].contains("Paris"), "{}", one_by_one[0]);
        let ranks = ranks_below(served.child.id());
        // Supervisors and schedulers send it to every process: answers are finished all the same.
        let answer = served.ask("One, two, three,", 60);
        send_signal("-TERM", ranks[1]);
        assert!(whole(answer).starts_with("HTTP/1.1 200"), "an answer after SIGTERM of the second rank");
        let (code, rest) = terminated(served, ranks[0]);
        assert_eq!(code, Some(0), "{rest}");
    }
}

/// The other ranks follow one engine, which no client may take away.
#[test]
fn a_client_cannot_take_the_model_of_ranks_away() {
    let fixture = Fixture::new(&["--layers", "2", "--heads", "4", "--kv-heads", "4"]);
    let model = ["-m", fixture.model.to_str().unwrap(), "--alias", "m", "--sleep-idle-seconds", "0"];
    for family in families() {
        for how in ["tensor", "pipeline"] {
            let served = Served::start(&family, &[&model[..], &["--parallelism", how]].concat());
            let post = |path: &str, body: &str| {
                let mut stream = TcpStream::connect(&served.address).unwrap();
                let length = body.len();
                let head = format!(
                    "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
                );
                write!(stream, "{head}{body}").unwrap();
                whole(stream)
            };
            for (path, body) in [
                ("/models/unload", r#"{"model": "m"}"#),
                ("/api/generate", r#"{"model": "m", "keep_alive": 0}"#),
            ] {
                let refused = post(path, body);
                assert!(refused.starts_with("HTTP/1.1 501"), "{how}, {path}: {refused}");
                assert!(refused.contains("ranks follow the engine"), "{how}, {path}: {refused}");
            }
            for keep in ["0", "\"1ms\""] {
                let options = r#"{"num_predict": 4, "ignore_eos": true}"#;
                let body = format!(
                    r#"{{"model": "m", "prompt": "hello", "stream": false, "keep_alive": {keep}, "options": {options}}}"#
                );
                let answer = post("/api/generate", &body);
                assert!(answer.starts_with("HTTP/1.1 200"), "{how}: {answer}");
            }
            let first = ranks_below(served.child.id())[0];
            let (code, rest) = terminated(served, first);
            assert_eq!(code, Some(0), "{how}: {rest}");
        }
    }
}

/// Only the first rank has standard input and files.
#[test]
fn files_of_a_command_are_read_by_the_first_rank_only() {
    let fixture = Fixture::new(&["--layers", "2", "--heads", "4", "--kv-heads", "4"]);
    let model = fixture.model.to_str().unwrap();
    let (here, elsewhere) = (fixture.path("here"), fixture.path("elsewhere"));
    std::fs::write(&here, "hello").unwrap();
    let case = r#"{"name": "a", "kind": "greedy", "text": "a", "n": 2}"#;
    let cases = fixture.path("cases.jsonl");
    std::fs::write(&cases, case).unwrap();
    let [here, elsewhere, cases] = [&here, &elsewhere, &cases].map(|path| path.to_str().unwrap());
    for family in families() {
        for (command, own) in
            [("run", [["-f", here], ["-f", elsewhere]]), ("eval", [[cases, "-q"], [elsewhere, "-q"]])]
        {
            let options = ["-m", model, "-c", "64"];
            let options =
                if command == "run" { [&options[..], &["-n", "4"]].concat() } else { options.to_vec() };
            let [first, second] = own.map(|own| [&[command], &own[..], &options[..]].concat());
            let mut ranks = mpirun(&family, 1, first);
            ranks.args([":", "-n", "1", env!("CARGO_BIN_EXE_quadriga")]).args(second).args(["-t", "1"]);
            let output = CommandOutput::from(ranks.output().unwrap()).success();
            assert!(!output.out.trim().is_empty(), "{command}: {output:?}");
        }
        if family.ends_with("openmpi") {
            // It does not pass on the end of standard input.
            continue;
        }
        let arguments = ["eval", "-", "-m", model, "-c", "64"];
        let mut ranks = mpirun(&family, 2, arguments);
        let mut child =
            ranks.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(case.as_bytes()).unwrap();
        let output = CommandOutput::from(child.wait_with_output().unwrap()).success();
        assert_eq!(output.out.lines().count(), 1, "{output:?}");
    }
}

#[test]
fn ranks_embed_texts_as_one_process_does() {
    let arguments = ["embed", "-q", "A cat eats fish.", "Stocks fell.", "a"];
    for family in families() {
        let vectors = |mut command: Command| -> Vec<f64> {
            let output = CommandOutput::from(command.stdin(Stdio::null()).output().unwrap()).success();
            let answer: serde_json::Value = serde_json::from_str(output.out.trim()).unwrap();
            let (mut numbers, mut rest) = (Vec::new(), vec![&answer]);
            while let Some(value) = rest.pop() {
                match value {
                    serde_json::Value::Number(number) => numbers.push(number.as_f64().unwrap()),
                    serde_json::Value::Array(values) => rest.extend(values),
                    serde_json::Value::Object(fields) => rest.extend(fields.values()),
                    _ => {}
                }
            }
            numbers
        };
        let wanted = vectors(quadriga(arguments.into_iter().chain(["-t", "1"])));
        assert!(wanted.len() > 3 * 576, "{}", wanted.len());
        for (ranks, how, most) in [(1, "auto", 1e-6), (2, "pipeline", 1e-6), (2, "tensor", 1e-2)] {
            let arguments = arguments.into_iter().chain(["--parallelism", how]);
            let found = vectors(mpirun(&family, ranks, arguments));
            assert_eq!(found.len(), wanted.len());
            let off = found.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(off <= most, "{ranks} ranks, {how}: {off}");
        }
    }
}

#[test]
fn a_batch_on_ranks_writes_what_one_process_writes() {
    let fixture = Fixture::new(&["--type", "f32", "--layers", "4"]);
    let lines: Vec<String> =
        (0..6).map(|i| format!(r#"{{"prompt": "request {i}", "max_tokens": {}}}"#, 3 + i)).collect();
    let input = fixture.path("requests.jsonl");
    std::fs::write(&input, lines.join("\n")).unwrap();
    let model = fixture.model.to_str().unwrap();
    for family in families() {
        let run = |ranks: usize, how: &str| {
            let arguments = ["batch", input.to_str().unwrap(), "-m", model, "-q", "--temp", "0"];
            // Few pages, so that prefixes go to the host memory of the first rank.
            let kept = ["--cache-ram", "1G", "--kv-tokens", "256", "--parallel", "2", "--parallelism", how];
            let arguments = arguments.into_iter().chain(kept);
            CommandOutput::from(mpirun(&family, ranks, arguments).output().unwrap()).success().out
        };
        let alone = run(1, "auto");
        assert_eq!(alone.lines().count(), 6, "{alone}");
        for (ranks, how) in [(2, "pipeline"), (2, "tensor"), (4, "tensor=2")] {
            assert_eq!(run(ranks, how), alone, "{ranks} ranks, {how}");
        }
    }
}

#[test]
fn requests_that_arrive_at_random_are_measured_on_ranks() {
    let fixture = Fixture::new(&["--type", "f32", "--layers", "4", "--no-vocab"]);
    let model = fixture.model.to_str().unwrap();
    for family in families() {
        for (ranks, how) in [(2, "pipeline"), (2, "tensor"), (4, "tensor=2")] {
            let flags =
                ["bench", "--arrivals", "1000", "--requests", "9", "-p", "70", "--shared", "64", "-n", "5"];
            let more = ["--beside", "1", "--parallel", "4", "--json", "-m", model, "--parallelism", how];
            let output = mpirun(&family, ranks, flags.into_iter().chain(more)).output().unwrap();
            let output = CommandOutput::from(output).success();
            let json: serde_json::Value = serde_json::from_str(&output.out).unwrap();
            assert_eq!((json["requests"].as_u64(), json["beside"].as_u64()), (Some(9), Some(1)), "{json}");
            for times in ["first_token_ms", "between_tokens_ms", "beside_ms"] {
                assert!(json[times]["p50"].as_f64().unwrap() > 0.0, "{ranks} ranks, {how}: {json}");
            }
            assert!(json["cached_tokens"].as_u64().unwrap() >= 64, "{ranks} ranks, {how}: {json}");
        }
    }
}

#[test]
fn a_rank_that_hangs_ends_the_command_with_an_error_that_names_it() {
    for family in families() {
        let arguments =
            QUESTION.into_iter().chain(["4000", "-c", "8192", "--ignore-eos", "--rank-timeout", "2"]);
        let mut child =
            mpirun(&family, 2, arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // The answer has begun.
        let mut out = BufReader::new(child.stdout.take().unwrap());
        assert!(out.fill_buf().is_ok_and(|bytes| !bytes.is_empty()));
        let second = ranks_below(child.id());
        assert_eq!(second.len(), 2, "the processes of both ranks");
        send_signal("-STOP", second[1]);
        let stopped = Instant::now();
        std::io::copy(&mut out, &mut std::io::sink()).unwrap();
        let output = CommandOutput::from(child.wait_with_output().unwrap());
        assert!(stopped.elapsed() < NOTICED + TOLD, "{:?}: {output:?}", stopped.elapsed());
        assert_ne!(output.code, Some(0), "{output:?}");
        assert!(output.err.contains("rank 1 on ") && output.err.contains("is lost"), "{output:?}");
    }
}

/// The processes of the command below a process, in the order of their ranks.
fn ranks_below(root: u32) -> Vec<u32> {
    let mut parents = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        let Some((name, rest)) = stat.rsplit_once(')') else { continue };
        let parent = rest.split_whitespace().nth(1).and_then(|parent| parent.parse::<u32>().ok());
        parents.push((pid, parent.unwrap_or(0), name.contains("(quadriga")));
    }
    let mut below = vec![root];
    let mut seen = 0;
    while let Some(parent) = below.get(seen).copied() {
        below.extend(parents.iter().filter(|(_, of, _)| *of == parent).map(|(pid, ..)| *pid));
        seen += 1;
    }
    let mut ranks: Vec<u32> =
        parents.iter().filter(|(pid, _, rank)| *rank && below.contains(pid)).map(|(pid, ..)| *pid).collect();
    ranks.sort_by_key(|rank| rank_of(*rank));
    ranks
}

/// The number that the launcher gave to a process.
fn rank_of(process: u32) -> Option<usize> {
    let environment = std::fs::read(format!("/proc/{process}/environ")).ok()?;
    let variables = environment.split(|byte| *byte == 0);
    let mut numbers = variables.filter_map(|variable| {
        let (name, value) = std::str::from_utf8(variable).ok()?.split_once('=')?;
        ["PMI_RANK", "OMPI_COMM_WORLD_RANK"].contains(&name).then(|| value.parse().ok()).flatten()
    });
    numbers.next()
}

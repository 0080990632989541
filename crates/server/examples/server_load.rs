//! Load on a server, on loopback only: see `bench/server-load`.
//!
//! `storm ADDRESS CLIENTS TOKENS` lets clients ask at the same time, 30 % of which go away at random; `streams ADDRESS COUNT SECONDS` keeps
//! so many streams busy, and watches the server's memory; `overhead MODEL STREAMS` compares the server with its engine alone;
//! `streaming TOKENS` measures what a streamed token costs with a device that computes nothing. Each ends with an error if its aim is
//! missed.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a benchmark"
)]

#[path = "../tests/common/load.rs"]
mod load;
#[allow(dead_code, unreachable_pub, reason = "the tests use all of it")]
#[path = "../tests/common/model.rs"]
mod model;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{Batcher, BatcherOptions, Event, Request, Response, Service};
use quadriga_llm::{EngineOptions, GeneratorOptions, Model};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_server::{App, Keys, Limits, ModelRegistry, ServedModel, Server};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use load::{Storm, Workers, all_ended, get, metric, settle};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    match words.as_slice() {
        ["storm", address, clients, tokens] => {
            let clients = clients.parse().unwrap();
            let storm = Storm { clients, leaving: 0.3, tokens: tokens.parse().unwrap(), seed: 1 };
            runtime.block_on(storms(address.parse().unwrap(), storm));
        }
        ["streams", address, count, seconds] => {
            let time = Duration::from_secs(seconds.parse().unwrap());
            runtime.block_on(streams(address.parse().unwrap(), count.parse().unwrap(), time));
        }
        ["overhead", path, streams] => overhead(path, streams.parse().unwrap()),
        ["streaming", tokens] => streaming(tokens.parse().unwrap()),
        _ => panic!(
            "storm ADDRESS CLIENTS TOKENS | streams ADDRESS COUNT SECONDS | overhead MODEL STREAMS | streaming TOKENS"
        ),
    }
}

/// Prompts that take all pages of the KV cache, whose memory is resident only once it was used.
async fn fill(address: SocketAddr) {
    const PROMPTS: usize = 32;
    const TOKENS: usize = 700;
    let mut set = tokio::task::JoinSet::new();
    for number in 0..PROMPTS {
        // Tokens that every vocabulary has, in an order of its own.
        let token = |at: usize| 50 + (number * 7 + at * at + at / 3) % 100;
        let prompt: Vec<usize> = (0..TOKENS).map(token).collect();
        let body = serde_json::json!({ "prompt": prompt, "max_tokens": 1 });
        set.spawn(async move {
            completion(address, body.to_string()).await;
        });
    }
    all_ended(set).await.unwrap();
    let status: serde_json::Value = serde_json::from_str(&get(address, "/status").await.unwrap()).unwrap();
    let [total, used, cached] = ["total", "used", "cached"]
        .map(|name| status["pages"][name].as_u64().unwrap_or_else(|| panic!("{status}")));
    println!("of {total} pages {} were used", used + cached);
    assert!(
        (used + cached) * 100 >= total * 95,
        "the KV cache is not full: start the server with fewer --kv-tokens"
    );
}

/// The most that memory may grow, in percent.
const GROWTH: f64 = 1.0;

/// The most that the server may cost over its engine, in percent.
const OVERHEAD: f64 = 3.0;

/// The sample that has the memory of the server.
const MEMORY: &str = "process_resident_memory_bytes";

/// The least memory that a server without requests comes down to. It gives memory back some time after the last answer, and again when
/// the threads that it needed have ended.
async fn rest(address: SocketAddr) -> f64 {
    let mut least = f64::INFINITY;
    for _ in 0..if cfg!(debug_assertions) { 4 } else { 40 } {
        tokio::time::sleep(Duration::from_secs(1)).await;
        least = least.min(metric(address, MEMORY).await.unwrap());
    }
    least
}

/// Storms after the first, which has the server keep plans of the sizes of steps that storms come to.
const STORMS: u64 = 5;

/// Storms on a server whose KV cache is full: what the server has after the first one is what it must come back to after the others.
async fn storms(address: SocketAddr, storm: Storm) {
    fill(address).await;
    let empty = rest(address).await;
    println!("before: {:.1} MB resident", empty / 1e6);
    let workers = Workers::of(address).await.unwrap();
    let (mut before, mut most) = (None, 0_f64);
    for seed in 1..=1 + STORMS {
        let started = Instant::now();
        let report = Storm { seed, ..storm }.run(address).await;
        let left = settle(address, &workers).await.unwrap();
        let memory = rest(address).await;
        let descriptors = metric(address, "process_open_fds").await.unwrap();
        println!(
            "seed {seed}: {} complete, {} refused with 429, {} left, {} errors; {:.0} s; {:.1} MB resident ({:+.2} %), {descriptors} descriptors",
            report.complete,
            report.refused,
            report.left,
            report.errors.len(),
            started.elapsed().as_secs_f64(),
            memory / 1e6,
            (memory / empty - 1.0) * 100.0,
        );
        assert_eq!(report.errors.first(), None);
        assert_eq!(left, None);
        let (first, open) = *before.get_or_insert((memory, descriptors));
        assert_eq!(open, descriptors, "descriptors leaked");
        let growth = (memory / first - 1.0) * 100.0;
        println!("  {growth:+.2} % beside the first");
        most = most.max(growth);
    }
    assert!(most < GROWTH, "memory grew by {most:.2} %");
}

/// Streams that are begun again when they end, for some time. The median of the server's memory in the last tenth of it is compared with
/// the one in the second tenth: single samples differ by more than what is looked for. The KV cache is full from the beginning.
async fn streams(address: SocketAddr, count: usize, time: Duration) {
    fill(address).await;
    rest(address).await;
    let workers = Workers::of(address).await.unwrap();
    let started = Instant::now();
    let ending = started + time;
    let tokens = Arc::new(AtomicU64::new(0));
    let mut all = tokio::task::JoinSet::new();
    for number in 0..count {
        let tokens = Arc::clone(&tokens);
        all.spawn(async move {
            while Instant::now() < ending {
                let body = serde_json::json!({
                    "messages": [{ "role": "user", "content": format!("Tell story {number}.") }],
                    "max_tokens": 200, "stream": true, "ignore_eos": true, "seed": number,
                });
                tokens.fetch_add(stream(address, &body).await, Ordering::Relaxed);
            }
        });
    }
    // While it is busy: a server without requests gives memory back. Some streams are between two answers at any time.
    let (mut samples, mut most) = (Vec::new(), 0_f64);
    while Instant::now() < ending {
        samples.push((started.elapsed(), metric(address, MEMORY).await.unwrap()));
        most = most.max(metric(address, "llamacpp:requests_processing").await.unwrap());
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    all_ended(all).await.unwrap();
    let left = settle(address, &workers).await.unwrap();
    let tenths: Vec<f64> = (0..10).map(|tenth| median(&samples, time * tenth / 10, time / 10)).collect();
    let shown: Vec<String> = tenths.iter().map(|bytes| format!("{:.1}", bytes / 1e6)).collect();
    let drift = (tenths[9] / tenths[1] - 1.0) * 100.0;
    let tokens = tokens.load(Ordering::Relaxed);
    println!(
        "{count} streams for {} s: {tokens} tokens, {:.1} tok/s; MB in tenths of the time: {}: {drift:+.2} %",
        time.as_secs(),
        tokens as f64 / time.as_secs_f64(),
        shown.join(" "),
    );
    assert_eq!(left, None);
    assert!(drift < GROWTH, "memory drifts");
    assert!(
        most >= count as f64,
        "of {count} streams at most {most} were computed at once: start it with --parallel {count}"
    );
}

/// The median of the samples of some time.
fn median(samples: &[(Duration, f64)], from: Duration, length: Duration) -> f64 {
    let of_time = samples.iter().filter(|(at, _)| *at >= from && *at < from + length);
    let mut values: Vec<f64> = of_time.map(|(_, value)| *value).collect();
    assert!(!values.is_empty(), "the server did not say its memory");
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The tokens of a streamed answer, which is read to its end.
async fn stream(address: SocketAddr, body: &serde_json::Value) -> u64 {
    let body = body.to_string();
    let mut socket = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all(head.as_bytes()).await.unwrap();
    socket.write_all(body.as_bytes()).await.unwrap();
    let mut lines = BufReader::with_capacity(64 << 10, socket);
    let (mut line, mut tokens, mut done) = (Vec::new(), 0, false);
    let mut last = String::new();
    loop {
        line.clear();
        if lines.read_until(b'\n', &mut line).await.unwrap() == 0 {
            break;
        }
        tokens += u64::from(line.starts_with(b"data: {"));
        done |= line.starts_with(b"data: [DONE]");
        if line.len() > 8 {
            last = String::from_utf8_lossy(&line).into_owned();
        }
    }
    assert!(done, "the stream was cut: {last}");
    tokens
}

fn batcher(model: Model, backend: Arc<dyn Backend>, streams: usize, context: usize) -> Batcher {
    let engine = EngineOptions { sequences: streams, batch: 512, context, ..EngineOptions::default() };
    let options = BatcherOptions { engine, token_time: None, ..BatcherOptions::default() };
    Batcher::new(model, &Scheduler::new([backend]), options, &mut |_| {}).unwrap()
}

/// A server in this process, with a runtime of its own whose threads have a name.
fn start(served: ServedModel) -> (SocketAddr, quadriga_server::StopHandle, std::thread::JoinHandle<()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("quadriga-http")
        .enable_all()
        .build()
        .unwrap();
    let app = App::new(ModelRegistry::with(served), Keys::default(), Limits::default());
    let server = runtime.block_on(Server::bind(app, SocketAddr::from(([127, 0, 0, 1], 0)))).unwrap();
    let (address, (stop, stopped)) = (server.address().unwrap(), Server::stop_handle());
    let thread = std::thread::spawn(move || runtime.block_on(server.run(stopped)));
    (address, stop, thread)
}

/// Tokens of each stream when the server is compared with its engine.
const COMPARED: usize = 64;

/// Pairs of runs in which the server is compared with its engine. The first pair is not counted.
const PAIRS: usize = 7;

/// Alternates between the engine alone and the server with the same requests: the same prompts, sampling options and numbers of tokens,
/// and whichever was second comes first in the next pair.
fn overhead(path: &str, streams: usize) {
    let model = Model::open(path).unwrap();
    let backend: Arc<dyn Backend> = Arc::new(quadriga_cpu::Backend::builder().build().unwrap());
    let make = || batcher(model.clone(), Arc::clone(&backend), streams, 1024);
    let alone = Service::start(make()).unwrap();
    let served = ServedModel::start("model", make(), GeneratorOptions::default(), None).unwrap();
    let (address, stop, thread) = start(served);
    let clients = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut ratios = Vec::new();
    for pair in 0..PAIRS {
        let prompts: Vec<String> =
            (0..streams).map(|number| format!("Story {pair}.{number} about a lighthouse:")).collect();
        let mut times = [0.0; 2];
        for turn in 0..2 {
            let of_server = (pair + turn) % 2 == 1;
            let started = Instant::now();
            let tokens = match of_server {
                true => clients.block_on(server_tokens(address, &prompts)),
                false => engine_tokens(&alone, &model, &prompts),
            };
            times[usize::from(of_server)] = started.elapsed().as_secs_f64();
            assert_eq!(tokens, (streams * COMPARED) as u64, "an answer is short");
        }
        let [engine, server] = times;
        println!(
            "pair {pair}: engine {engine:.3} s, server {server:.3} s, {:+.2} %",
            (server / engine - 1.0) * 100.0
        );
        if pair > 0 {
            ratios.push(server / engine);
        }
    }
    ratios.sort_by(f64::total_cmp);
    let middle = (ratios[ratios.len() / 2] + ratios[(ratios.len() - 1) / 2]) / 2.0;
    let overhead = (middle - 1.0) * 100.0;
    println!("median overhead at {streams} streams: {overhead:+.2} %");
    assert!(overhead <= OVERHEAD, "the overhead is more than {OVERHEAD} %");
    stop.stop();
    thread.join().unwrap();
}

/// Tokens of the engine's answers to prompts that are all there at once.
fn engine_tokens(service: &Service, model: &Model, prompts: &[String]) -> u64 {
    let sampling =
        SamplingOptions { temperature: 0.0, ignore_eos: true, ..GeneratorOptions::default().sampling };
    let request = |prompt: &String| Request {
        sampling: sampling.clone(),
        max_tokens: Some(COMPARED),
        ..Request::new(model.tokenizer().unwrap().encode_prompt(prompt, true))
    };
    let all: Vec<_> = prompts.iter().map(|prompt| service.submit(request(prompt)).unwrap()).collect();
    let tokens =
        |events: Response| events.filter(|event| matches!(event, Event::Token { .. })).count() as u64;
    all.into_iter().map(tokens).sum()
}

/// The same of the server's, which are streamed.
async fn server_tokens(address: SocketAddr, prompts: &[String]) -> u64 {
    let mut set = tokio::task::JoinSet::new();
    for prompt in prompts {
        let body = serde_json::json!({
            "prompt": prompt, "max_tokens": COMPARED, "stream": true, "ignore_eos": true, "temperature": 0,
            "stream_options": { "include_usage": true },
        });
        set.spawn(completion(address, body.to_string()));
    }
    let mut sum = 0;
    while let Some(tokens) = set.join_next().await {
        sum += tokens.unwrap();
    }
    sum
}

/// The number of tokens of a streamed completion, as its last chunk has it.
async fn completion(address: SocketAddr, body: String) -> u64 {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all(head.as_bytes()).await.unwrap();
    socket.write_all(body.as_bytes()).await.unwrap();
    let mut text = Vec::new();
    tokio::io::AsyncReadExt::read_to_end(&mut socket, &mut text).await.unwrap();
    let text = String::from_utf8_lossy(&text);
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    let (_, rest) = text.rsplit_once("\"completion_tokens\":").unwrap_or_else(|| panic!("{text}"));
    rest.split(|letter: char| !letter.is_ascii_digit()).next().unwrap().parse().unwrap()
}

/// Streams of a device that computes nothing: the processor time of the threads that serve connections is that of streaming.
fn streaming(tokens: u64) {
    const STREAMS: usize = 32;
    let backend = quadriga_sim::Sim::new("sim:0").without_computing().build();
    let served = batcher(model::small(), backend, STREAMS, 4096);
    let served = ServedModel::start("sim", served, GeneratorOptions::default(), None).unwrap();
    let (address, stop, thread) = start(served);
    let clients = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let started = Instant::now();
    let before = thread_seconds("quadriga-http");
    let counted = Arc::new(AtomicU64::new(0));
    clients.block_on(async {
        let mut set = tokio::task::JoinSet::new();
        for _ in 0..STREAMS {
            let counted = Arc::clone(&counted);
            set.spawn(async move {
                while counted.load(Ordering::Relaxed) < tokens {
                    // With a grammar the host samples from all logits: the device has not computed which tokens are best.
                    let body = serde_json::json!({
                        "messages": [{ "role": "user", "content": "hello" }],
                        "max_tokens": 1000, "stream": true, "ignore_eos": true, "grammar": "root ::= [a-z]*",
                    });
                    counted.fetch_add(stream(address, &body).await, Ordering::Relaxed);
                }
            });
        }
        all_ended(set).await.unwrap();
    });
    let seconds = thread_seconds("quadriga-http") - before;
    let (count, wall) = (counted.load(Ordering::Relaxed), started.elapsed().as_secs_f64());
    println!(
        "{count} tokens in {wall:.2} s ({:.0} tok/s), {seconds:.2} s of processor time of the threads that serve connections: {:.1} µs a token, {:.0} tok/s on one core",
        count as f64 / wall,
        seconds * 1e6 / count as f64,
        count as f64 / seconds
    );
    assert!(count as f64 / seconds >= 5000.0, "streaming is too slow");
    stop.stop();
    thread.join().unwrap();
}

/// Processor time of this process's threads of a name.
fn thread_seconds(name: &str) -> f64 {
    // Linux reports times in hundredths of a second.
    const TICKS: f64 = 100.0;
    let mut sum = 0.0;
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let Ok(stat) = std::fs::read_to_string(task.path().join("stat")) else { continue };
        let Some((head, rest)) = stat.rsplit_once(") ") else { continue };
        if head.contains(name) {
            let fields: Vec<&str> = rest.split(' ').collect();
            let ticks: f64 = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
            sum += ticks / TICKS;
        }
    }
    sum
}

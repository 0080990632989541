//! Load on a server, on loopback only: see `bench/server-load`.
//!
//! `storm ADDRESS CLIENTS TOKENS STREAMS` lets clients ask at the same time, 30 % of which go away at random, and compares the server's
//! memory with what it was before the first of them had come, when no more than so many streams had asked at a time; `streams ADDRESS COUNT
//! SECONDS` keeps so many streams busy, and watches the server's memory; `overhead MODEL STREAMS` compares the server with its engine alone;
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

use quadriga_conformance::Rng;
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{Batcher, BatcherOptions, Event, EventSink, Request, Service};
use quadriga_llm::{EngineOptions, GeneratorOptions, Model};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_server::{App, Keys, Limits, ModelRegistry, ServedModel, Server};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use load::{Storm, Workers, all_ended, get, metric, settle};

/// As `quadriga serve` does: what is measured is what users have.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn use_one_arena() {
    // SAFETY: it changes a number that is read when an arena is made.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn use_one_arena() {}

fn main() {
    use_one_arena();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    match words.as_slice() {
        ["storm", address, clients, tokens, streams] => {
            let clients = clients.parse().unwrap();
            let storm = Storm { clients, leaving: 0.3, tokens: tokens.parse().unwrap(), seed: 1 };
            runtime.block_on(storms(address.parse().unwrap(), storm, streams.parse().unwrap()));
        }
        ["streams", address, count, seconds] => {
            let time = Duration::from_secs(seconds.parse().unwrap());
            runtime.block_on(streams(address.parse().unwrap(), count.parse().unwrap(), time));
        }
        ["overhead", path, streams] => overhead(path, streams.parse().unwrap()),
        ["streaming", tokens] => streaming(tokens.parse().unwrap()),
        _ => panic!(
            "storm ADDRESS CLIENTS TOKENS STREAMS | streams ADDRESS COUNT SECONDS | overhead MODEL STREAMS | streaming TOKENS"
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

/// The most by which the steps of both sides may differ, in percent.
const STEPS: f64 = 3.0;

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

/// Storms, each of which must leave the server as it was.
const STORMS: u64 = 6;

/// Rounds of ordinary requests before the first storm.
const ROUNDS: u64 = 8;

/// As many requests at a time as the server computes, all of which are answered: it has served before the first storm comes, and has what
/// it keeps for that.
async fn warm(address: SocketAddr, storm: Storm, streams: usize) {
    for round in 0..ROUNDS {
        let ordinary = Storm { clients: streams, leaving: 0.0, seed: 1000 + round, ..storm };
        let report = ordinary.run(address).await;
        assert_eq!((report.complete, report.errors.first()), (streams, None));
    }
}

/// Answers that the server has ended because their client went away.
async fn cancelled(address: SocketAddr) -> f64 {
    let text = get(address, "/metrics").await.unwrap();
    let is_wanted =
        |line: &&str| line.starts_with("vllm:request_success_total") && line.contains("\"abort\"");
    let counts =
        text.lines().filter(is_wanted).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    counts.sum()
}

/// Storms on a server whose KV cache is full and which has answered ordinary requests: what it has then is what it must come back to
/// after each storm, the first one included.
async fn storms(address: SocketAddr, storm: Storm, streams: usize) {
    fill(address).await;
    warm(address, storm, streams).await;
    let workers = Workers::of(address).await.unwrap();
    assert_eq!(settle(address, &workers).await.unwrap(), None);
    let before = rest(address).await;
    let open = metric(address, "process_open_fds").await.unwrap();
    println!("before: {:.1} MB resident, {open} descriptors", before / 1e6);
    let (mut most, leaving) = (0_f64, storm.leaving_clients());
    for seed in 1..=STORMS {
        let (started, gone) = (Instant::now(), cancelled(address).await);
        let report = Storm { seed, ..storm }.run(address).await;
        let left = settle(address, &workers).await.unwrap();
        let gone = cancelled(address).await - gone;
        let memory = rest(address).await;
        let descriptors = metric(address, "process_open_fds").await.unwrap();
        let growth = (memory / before - 1.0) * 100.0;
        println!(
            "seed {seed}: {} complete, {} refused with 429, {} left ({gone} answers were cancelled), {} errors; {:.0} s; {:.1} MB resident ({growth:+.2} %), {descriptors} descriptors",
            report.complete,
            report.refused,
            report.left,
            report.errors.len(),
            started.elapsed().as_secs_f64(),
            memory / 1e6,
        );
        assert_eq!(report.errors.first(), None);
        assert_eq!(left, None);
        // One that reads may have its whole answer with the event that it waits for.
        let missing = leaving.saturating_sub(report.left);
        assert!(missing * 50 <= leaving, "{missing} of {leaving} clients did not go away");
        assert_eq!(open, descriptors, "descriptors leaked");
        most = most.max(growth);
    }
    println!("at most {most:+.2} % beside the server before the storms");
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

/// Tokens of a prompt, and of an answer, when the server is compared with its engine: each varies by half. With equal lengths, requests that
/// begin together end together for ever after, which takes less time than any other order, and the side that began so would win.
const PROMPT: usize = 32;
const ANSWER: usize = 64;

/// Slices of each side. The first is not counted.
const SLICES: usize = 9;

/// Requests of a stream within a slice, on average.
const REQUESTS: usize = 4;

/// A request that either side is asked.
#[derive(Clone)]
struct Asked {
    prompt: Vec<u32>,
    tokens: usize,
}

/// Whom streams ask.
#[derive(Clone)]
enum Side {
    Engine(Arc<Service>),
    Server(SocketAddr),
}

impl Side {
    /// The number of tokens of an answer.
    async fn tokens(&self, asked: Asked) -> u64 {
        match self {
            Side::Engine(service) => engine_tokens(service, asked).await,
            Side::Server(address) => {
                let body = serde_json::json!({
                    "prompt": asked.prompt, "max_tokens": asked.tokens, "stream": true, "ignore_eos": true,
                    "temperature": 0, "stream_options": { "include_usage": true },
                });
                completion(*address, body.to_string()).await
            }
        }
    }

    /// The steps that its engine has made.
    async fn steps(&self) -> u64 {
        match self {
            Side::Engine(service) => service.state().steps,
            Side::Server(address) => {
                let status = get(*address, "/status").await.unwrap();
                let status: serde_json::Value = serde_json::from_str(&status).unwrap();
                status["steps"].as_u64().unwrap()
            }
        }
    }

    /// Lets so many streams ask one request after the other, until all are answered.
    async fn run(&self, asked: &[Asked], streams: usize) {
        let rest = Arc::new(std::sync::Mutex::new(asked.to_vec()));
        let mut set = tokio::task::JoinSet::new();
        for _ in 0..streams {
            let (side, rest) = (self.clone(), Arc::clone(&rest));
            set.spawn(async move {
                loop {
                    let Some(asked) = rest.lock().unwrap().pop() else { break };
                    let wanted = asked.tokens as u64;
                    assert_eq!(side.tokens(asked).await, wanted, "an answer is short");
                }
            });
        }
        all_ended(set).await.unwrap();
    }
}

/// Compares the server with its engine alone. Both get the same requests, from as many streams that ask again as soon as they have their
/// answer: their requests come in the same way, and steps are composed alike. The sides take turns, and whichever was second comes
/// first in the next slice. What the clients of the server compute is a part of its time.
fn overhead(path: &str, streams: usize) {
    let model = Model::open(path).unwrap();
    let backend: Arc<dyn Backend> = Arc::new(quadriga_cpu::Backend::builder().build().unwrap());
    let make = || batcher(model.clone(), Arc::clone(&backend), streams, 1024);
    let served = ServedModel::start("model", make(), GeneratorOptions::default(), None).unwrap();
    let (address, stop, thread) = start(served);
    let sides = [Side::Engine(Arc::new(Service::start(make()).unwrap())), Side::Server(address)];
    let clients = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (vocabulary, mut rng) = (model.hyperparameters().vocabulary, Rng::new(1));
    let (mut ratios, mut sums, mut steps, mut connections) = (Vec::new(), [0.0; 2], [0; 2], 0.0);
    for slice in 0..SLICES {
        let around = |middle: usize, rng: &mut Rng| rng.range(middle / 2, middle + middle / 2);
        let asked: Vec<Asked> = (0..streams * REQUESTS)
            .map(|_| Asked {
                prompt: (0..around(PROMPT, &mut rng))
                    .map(|_| rng.range(10, vocabulary - 10) as u32)
                    .collect(),
                tokens: around(ANSWER, &mut rng),
            })
            .collect();
        let mut times = [0.0; 2];
        for turn in 0..2 {
            let number = (slice + turn) % 2;
            let side = &sides[number];
            let (before, busy) = (clients.block_on(side.steps()), thread_seconds("quadriga-http"));
            let started = Instant::now();
            clients.block_on(side.run(&asked, streams));
            times[number] = started.elapsed().as_secs_f64();
            if slice > 0 {
                steps[number] += clients.block_on(side.steps()) - before;
                connections += thread_seconds("quadriga-http") - busy;
            }
        }
        let [engine, server] = times;
        println!(
            "slice {slice}: engine {engine:.3} s, server {server:.3} s, {:+.2} %",
            (server / engine - 1.0) * 100.0
        );
        if slice > 0 {
            ratios.push((server / engine - 1.0) * 100.0);
            sums = [sums[0] + engine, sums[1] + server];
        }
    }
    ratios.sort_by(f64::total_cmp);
    let overhead = (sums[1] / sums[0] - 1.0) * 100.0;
    println!(
        "overhead at {streams} streams: {overhead:+.2} % of {:.1} s ({:+.2} to {:+.2} % of single slices); {} and {} steps; threads that serve connections: {connections:.2} s of processor time, {:.2} %",
        sums[0],
        ratios[0],
        ratios[ratios.len() - 1],
        steps[0],
        steps[1],
        connections / sums[1] * 100.0
    );
    let difference = steps[1].abs_diff(steps[0]) as f64 / steps[0] as f64 * 100.0;
    assert!(
        difference <= STEPS,
        "the sides made steps of different sizes, {difference:.2} % more or fewer: times do not compare"
    );
    assert!(overhead <= OVERHEAD, "the overhead is more than {OVERHEAD} %");
    stop.stop();
    thread.join().unwrap();
}

/// Tokens of the engine's answer.
async fn engine_tokens(service: &Service, asked: Asked) -> u64 {
    let sampling =
        SamplingOptions { temperature: 0.0, ignore_eos: true, ..GeneratorOptions::default().sampling };
    let request = Request { sampling, max_tokens: Some(asked.tokens), ..Request::new(asked.prompt) };
    let (sender, mut events) = tokio::sync::mpsc::unbounded_channel();
    let sink: EventSink = Box::new(move |event| sender.send(event).is_ok());
    service.submit_to(vec![(request, sink)], |ids| ids.is_ok()).unwrap();
    let mut tokens = 0;
    while let Some(event) = events.recv().await {
        tokens += u64::from(matches!(event, Event::Token { .. }));
    }
    tokens
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

//! Many clients at once, some of which go away at random. Loopback only.
#![allow(dead_code, unreachable_pub, reason = "each program uses a part")]

use std::net::SocketAddr;
use std::time::Duration;

use quadriga_conformance::Rng;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// A client that waits for longer than this has found a server that hangs.
const HANGS: Duration = Duration::from_secs(600);

/// What clients do.
#[derive(Clone, Copy, Debug)]
pub struct Storm {
    pub clients: usize,
    /// The share of clients that go away before they have their answer: so many do, also of those that are refused at first.
    pub leaving: f64,
    /// The most tokens of an answer.
    pub tokens: usize,
    pub seed: u64,
}

/// What became of clients.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct StormReport {
    /// Answers that were complete.
    pub complete: usize,
    /// Requests that were refused with 429.
    pub refused: usize,
    /// Clients that went away.
    pub left: usize,
    /// Whatever else happened.
    pub errors: Vec<String>,
}

/// When a client goes away.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Leaving {
    Never,
    /// After so many bytes of the request.
    Sending(usize),
    /// After so many events of the answer, which has more; at once after the request was sent if there are none.
    Reading(usize),
}

/// The time after which a client that is to go away asks again if it was refused.
const BACKOFF: Duration = Duration::from_millis(100);

enum Ending {
    Complete,
    Refused,
    Left,
}

impl Storm {
    /// Lets all clients ask at the same time.
    pub async fn run(self, address: SocketAddr) -> StormReport {
        assert!(address.ip().is_loopback());
        let mut rng = Rng::new(self.seed);
        let mut clients = JoinSet::new();
        let mut left = self.leaving_clients();
        for number in 0..self.clients {
            // Each of those that are left has the same chance.
            let leaves = below(&mut rng, self.clients - number) < left;
            left -= usize::from(leaves);
            let (request, stream, leaving) = self.request(number, leaves, &mut rng);
            clients.spawn(async move {
                let ending = tokio::time::timeout(HANGS, client(address, request, stream, leaving)).await;
                ending.unwrap_or_else(|_| Err("the server hangs".to_owned()))
            });
        }
        let mut report = StormReport::default();
        while let Some(ended) = clients.join_next().await {
            match ended.map_err(|error| error.to_string()).and_then(|ending| ending) {
                Ok(Ending::Complete) => report.complete += 1,
                Ok(Ending::Refused) => report.refused += 1,
                Ok(Ending::Left) => report.left += 1,
                Err(error) => report.errors.push(error),
            }
        }
        report
    }

    /// The number of clients that go away.
    pub fn leaving_clients(&self) -> usize {
        (self.clients as f64 * self.leaving).round() as usize
    }

    /// The request of a client, whether its answer is streamed, and when the client goes away.
    fn request(&self, number: usize, leaves: bool, rng: &mut Rng) -> (Vec<u8>, bool, Leaving) {
        let words = ["the", "cat", "sat", "on", "a", "mat", "and", "then"];
        let count = 1 + below(rng, 40);
        let text: Vec<&str> = (0..count).map(|_| words[below(rng, words.len())]).collect();
        let tokens = 1 + below(rng, self.tokens);
        // Whoever goes away while it reads has read at most half of its answer, of which some tokens may have no text.
        let reads = leaves && below(rng, 3) > 0;
        let events = if reads { below(rng, 1 + tokens / 2) } else { 0 };
        let stream = events > 0 || below(rng, 4) > 0;
        let body = serde_json::json!({
            "messages": [{ "role": "user", "content": text.join(" ") }],
            "max_tokens": tokens,
            "stream": stream,
            "ignore_eos": leaves,
            "seed": number,
        });
        let body = body.to_string();
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        let request = [head.as_bytes(), body.as_bytes()].concat();
        let leaving = match (leaves, reads) {
            (false, _) => Leaving::Never,
            (true, true) => Leaving::Reading(events),
            (true, false) => Leaving::Sending(below(rng, request.len())),
        };
        (request, stream, leaving)
    }
}

fn below(rng: &mut Rng, limit: usize) -> usize {
    (rng.uniform(0.0, limit as f64) as usize).min(limit.saturating_sub(1))
}

async fn client(
    address: SocketAddr,
    request: Vec<u8>,
    stream: bool,
    leaving: Leaving,
) -> Result<Ending, String> {
    loop {
        match attempt(address, &request, stream, leaving).await? {
            // It has nothing yet that it could leave.
            Ending::Refused if leaving != Leaving::Never => tokio::time::sleep(BACKOFF).await,
            ending => return Ok(ending),
        }
    }
}

async fn attempt(
    address: SocketAddr,
    request: &[u8],
    stream: bool,
    leaving: Leaving,
) -> Result<Ending, String> {
    let failed = |error: std::io::Error| error.to_string();
    let mut socket = TcpStream::connect(address).await.map_err(failed)?;
    if let Leaving::Sending(bytes) = leaving {
        let _ = socket.write_all(&request[..bytes]).await;
        return Ok(Ending::Left);
    }
    socket.write_all(request).await.map_err(failed)?;
    let mut reader = BufReader::new(socket);
    let mut line = String::new();
    if leaving == Leaving::Reading(0) {
        return Ok(Ending::Left);
    }
    reader.read_line(&mut line).await.map_err(failed)?;
    let status = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let (mut text, mut events) = (Vec::new(), 0);
    loop {
        let before = text.len();
        if reader.read_until(b'\n', &mut text).await.map_err(failed)? == 0 {
            break;
        }
        events += usize::from(text[before..].starts_with(b"data: {"));
        // What else has come is not looked at.
        if status == "200" && leaving == Leaving::Reading(events) {
            return Ok(Ending::Left);
        }
    }
    let text = String::from_utf8_lossy(&text);
    match status.as_str() {
        "429" => Ok(Ending::Refused),
        "200" if stream && !text.contains("data: [DONE]") => Err(format!("the stream was cut: {text}")),
        "200" if !stream && !text.contains("finish_reason") => Err(format!("the answer was cut: {text}")),
        "200" => Ok(Ending::Complete),
        _ => Err(format!("{line}{text}")),
    }
}

/// Waits for all tasks. An error if any of them did not end well, with the first reason.
pub async fn all_ended(mut tasks: JoinSet<()>) -> Result<(), String> {
    let (mut failed, mut first) = (0, None);
    while let Some(ended) = tasks.join_next().await {
        if let Err(error) = ended {
            failed += 1;
            first.get_or_insert(error);
        }
    }
    first.map_or(Ok(()), |first| Err(format!("{failed} tasks failed, the first: {first}")))
}

/// The body of a GET request.
pub async fn get(address: SocketAddr, path: &str) -> std::io::Result<String> {
    let mut socket = TcpStream::connect(address).await?;
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await?;
    let mut text = String::new();
    socket.read_to_string(&mut text).await?;
    Ok(text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default())
}

/// A sample of `/metrics`, by the beginning of its line.
pub async fn metric(address: SocketAddr, name: &str) -> std::io::Result<f64> {
    let text = get(address, "/metrics").await?;
    let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
    Ok(line.rsplit(' ').next().and_then(|value| value.parse().ok()).unwrap_or(f64::NAN))
}

/// What serves clients, the one that asks included.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Workers {
    /// Open connections.
    pub connections: f64,
    /// Tasks of the server's runtime.
    pub tasks: f64,
    /// Threads of the server's process.
    pub threads: f64,
}

impl Workers {
    /// Those of a server.
    pub async fn of(address: SocketAddr) -> std::io::Result<Workers> {
        Ok(Workers {
            connections: metric(address, "quadriga:http_connections_open").await?,
            tasks: metric(address, "quadriga:runtime_tasks").await?,
            threads: metric(address, "process_threads").await?,
        })
    }

    /// Whether there are no more than others, and no connection but the one that asks. A sample that is missing is more. Those who ask
    /// keep threads from ending that answer them in turns.
    fn is_back_to(&self, before: &Workers) -> bool {
        self.connections <= 1.0
            && self.tasks <= before.tasks
            && self.threads <= before.threads + ASKED_THREADS
    }
}

/// Asks for the state until nothing is being computed, no other connection is open, and there are no more tasks and threads than
/// before. Returns what is still in use then, in words, if anything is.
pub async fn settle(address: SocketAddr, before: &Workers) -> std::io::Result<Option<String>> {
    let is_idle = |status: &serde_json::Value| {
        status["running"] == 0 && status["waiting"] == 0 && status["requests"] == serde_json::json!([])
    };
    for _ in 0..LOOKS {
        let status: serde_json::Value =
            serde_json::from_str(&get(address, "/status").await?).unwrap_or_default();
        if is_idle(&status) && Workers::of(address).await?.is_back_to(before) {
            let pages = &status["pages"]["used"];
            return Ok((*pages != 0).then(|| format!("{pages} pages are in use")));
        }
    }
    let (status, after) = (get(address, "/status").await?, Workers::of(address).await?);
    Ok(Some(format!("still busy: {before:?} became {after:?}, {status}")))
}

/// Threads that may answer one who asks without a pause.
const ASKED_THREADS: f64 = 2.0;

/// How often it is looked whether a server has settled. Threads that prepared requests end after ten idle seconds.
const LOOKS: usize = 200_000;

//! Generates very many tokens for random requests, and shows that memory does not grow:
//!
//! ```sh
//! bench/soak [--tokens 1000000] [--sequences 16] [--seed 1] [--model MODEL.gguf] [--draft MODEL.gguf] [--caches on]
//! ```
//!
//! Requests arrive at random, begin alike or not, have several choices, guesses and stop strings, and some are cancelled; the KV cache
//! is small enough for sequences to be put back, and so is the host memory for prefixes: some go to a cache file. After every step,
//! pages, lanes and prefixes are checked, and nothing may have failed. Once a tenth of the tokens is generated, memory may grow by 2 %
//! at most.
//!
//! With a draft model, that guesses tokens beside look-up. With `--caches off`, prefixes stay in the KV cache: layers with a sliding
//! window have pages of their own then, which they give back as the window moves.
#![allow(clippy::indexing_slicing, reason = "an example")]

use std::error::Error;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use quadriga_llm::placement::Placement;
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{Batcher, BatcherOptions, CacheFile, Event, Request, RequestId};
use quadriga_llm::{EngineOptions, Model, default_model};

struct Options {
    model: Option<PathBuf>,
    draft: Option<PathBuf>,
    caches: bool,
    tokens: u64,
    sequences: usize,
    seed: u64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = options()?;
    let path = match &options.model {
        Some(path) => path.clone(),
        None => default_model::fetch(None, &mut |_| ControlFlow::Continue(()))?,
    };
    let model = Model::open(path)?;
    // Sequences of up to 1,024 tokens, and room for a third of that: some are put back.
    let sequences = options.sequences;
    let engine = EngineOptions { context: 1024, sequences, pages: 6 * sequences, ..EngineOptions::default() };
    let folder = tempfile::tempdir()?;
    let file = CacheFile { path: folder.path().join("prefixes"), bytes: 64 << 20 };
    let batching = BatcherOptions {
        engine,
        cache_ram: if options.caches { 8 << 20 } else { 0 },
        cache_file: options.caches.then_some(file),
        lookup: 4,
        draft: if options.draft.is_some() { 4 } else { 0 },
        token_time: None,
        ..BatcherOptions::default()
    };
    let mut batching = batching.for_model(&model)?;
    let placement = Placement::default();
    let placed = placement.plan(&model, &placement.open_devices()?, &batching.engine)?;
    batching.engine = placed.engine_options(&batching.engine);
    let mut batcher = Batcher::new(model, &placed.scheduler, batching, &mut |_| {})?;
    if let Some(path) = &options.draft {
        batcher.set_draft(Model::open(path)?, &placed.scheduler, &mut |_| {})?;
    }
    let mut soak = Soak { random: Random(options.seed | 1), open: Vec::new(), tokens: 0, ended: [0; 3] };
    let started = Instant::now();
    let (mut next_line, mut settled) = (0, None);
    println!("{:>12} {:>10} {:>12} {:>8} {:>9}", "tokens", "seconds", "memory KiB", "ended", "put back");
    while soak.tokens < options.tokens {
        soak.step(&mut batcher, sequences)?;
        if soak.tokens >= next_line {
            let (memory, state) = (resident_kib().unwrap_or(0), batcher.state());
            let seconds = started.elapsed().as_secs_f64();
            let [ended, ..] = soak.ended;
            println!("{:>12} {seconds:>10.1} {memory:>12} {ended:>8} {:>9}", soak.tokens, state.preempted);
            if settled.is_none() && soak.tokens * 10 >= options.tokens {
                settled = Some(memory);
            }
            next_line += (options.tokens / 40).max(1);
        }
    }
    batcher.cancel_all();
    batcher.check()?;
    let state = batcher.state();
    if state.used_pages > 0 {
        return Err(format!("{} pages are still in use", state.used_pages).into());
    }
    let memory = resident_kib().unwrap_or(0);
    let [ended, cancelled, failed] = soak.ended;
    println!(
        "{} tokens, {:.0} a second; {ended} requests ended, {cancelled} were cancelled, {} put back; {} prompt tokens found",
        soak.tokens,
        soak.tokens as f64 / started.elapsed().as_secs_f64(),
        state.preempted,
        state.cached
    );
    let settled = settled.unwrap_or(memory);
    println!(
        "{} of {} guesses were right; {} pages in the cache file",
        state.guessed_right, state.guessed, state.file_pages
    );
    println!("memory: {settled} KiB after a tenth, {memory} KiB at the end");
    if failed > 0 {
        return Err(format!("{failed} requests failed").into());
    }
    if memory > settled + settled / 50 {
        return Err("memory grows".into());
    }
    Ok(())
}

/// The requests on their way.
struct Soak {
    random: Random,
    open: Vec<RequestId>,
    tokens: u64,
    /// Requests that ended, were cancelled, failed.
    ended: [u64; 3],
}

impl Soak {
    /// Submits and cancels some requests, and computes a step.
    fn step(&mut self, batcher: &mut Batcher, sequences: usize) -> Result<(), Box<dyn Error>> {
        while self.open.len() < 2 * sequences {
            let choices = if self.random.below(8) == 0 { 3 } else { 1 };
            let prompt = self.prompt(batcher.model().hyperparameters().vocabulary);
            let requests = (0..choices).map(|_| self.request(prompt.clone())).collect();
            self.open.extend(batcher.submit_choices(requests)?);
        }
        if self.random.below(100) == 0 {
            let at = self.random.below(self.open.len());
            let id = self.open.swap_remove(at);
            batcher.cancel(id);
            self.ended[1] += 1;
        }
        let events = batcher.step();
        let state = batcher.state();
        let failures = [state.failed_steps, state.failed_page_moves, state.failed_guesses];
        if failures != [0; 3] {
            return Err(
                format!("failed steps, moves of pages, guesses of the draft model: {failures:?}").into()
            );
        }
        for (id, event) in events {
            match event {
                Event::Token { .. } => self.tokens += 1,
                Event::Finished(_) => self.end(id, 0),
                Event::Failed(error) => {
                    println!("{error}");
                    self.end(id, 2);
                }
                Event::Prompt { .. } | Event::Embedding { .. } | Event::Progress { .. } => {}
            }
        }
        Ok(batcher.check()?)
    }

    fn end(&mut self, id: RequestId, how: usize) {
        self.open.retain(|open| *open != id);
        self.ended[how] += 1;
    }

    /// One of a few beginnings, of up to four pages, and something of its own.
    fn prompt(&mut self, vocabulary: usize) -> Vec<u32> {
        let (beginning, shared) = (self.random.below(6), 64 * self.random.below(5));
        let token = |k: usize| ((k * 37 + beginning * 1009 + 11) % vocabulary) as u32;
        let mut prompt: Vec<u32> = (0..shared).map(token).collect();
        let own = 1 + self.random.below(100);
        prompt.extend((0..own).map(|_| self.random.below(vocabulary) as u32));
        prompt
    }

    fn request(&mut self, prompt: Vec<u32>) -> Request {
        let temperature = if self.random.below(2) == 0 { 0.0 } else { 0.9 };
        let seed = self.random.below(1 << 30) as u64;
        Request {
            sampling: SamplingOptions { temperature, seed, ..SamplingOptions::default() },
            max_tokens: Some(1 + self.random.below(400)),
            stops: if self.random.below(4) == 0 { vec!["\n\n".to_owned()] } else { Vec::new() },
            priority: self.random.below(2) as i32,
            client: self.random.below(5) as u64,
            past_end: self.random.below(2) == 0,
            ..Request::new(prompt)
        }
    }
}

/// Random numbers (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 16) % end.max(1) as u64) as usize
    }
}

/// The memory of this process that is in RAM; `None` where the system does not say.
fn resident_kib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

fn options() -> Result<Options, Box<dyn Error>> {
    let mut options =
        Options { model: None, draft: None, caches: true, tokens: 1_000_000, sequences: 16, seed: 1 };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{name} needs a value"))?;
        match name.as_str() {
            "--model" => options.model = Some(value.into()),
            "--draft" => options.draft = Some(value.into()),
            "--caches" if matches!(value.as_str(), "on" | "off") => options.caches = value == "on",
            "--caches" => return Err(format!("--caches {value}: it is on or off").into()),
            "--tokens" => options.tokens = value.parse()?,
            "--sequences" => options.sequences = value.parse()?,
            "--seed" => options.seed = value.parse()?,
            _ => {
                return Err(format!(
                    "{name}: not an option; there are --model, --draft, --caches, --tokens, --sequences and --seed"
                )
                .into());
            }
        }
    }
    Ok(options)
}

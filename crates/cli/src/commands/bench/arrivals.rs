//! `quadriga bench --arrivals`: requests that arrive at random times, as on a server.

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::time::{Duration, Instant};

use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{Batcher, Event, Request, RequestId};
use quadriga_llm::{EngineOptions, RequestLoad};
use quadriga_view::format::plural;
use serde_json::{Value, json};

use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::serving_options::ServingOptions;
use crate::terminal;

/// What is measured.
pub(super) struct ArrivalTest<'a> {
    /// Requests a second, on average.
    pub(super) rate: f64,
    pub(super) requests: usize,
    /// Tokens of each prompt, of those the ones that all prompts begin with, and tokens to generate.
    pub(super) prompt: usize,
    pub(super) shared: usize,
    pub(super) generate: usize,
    /// Sequences that are generated all the while.
    pub(super) beside: usize,
    /// Whether everything is run once before it is measured.
    pub(super) warm_up: bool,
    pub(super) serving: &'a ServingOptions,
}

/// Tokens of the prompts of sequences that are generated all the while.
const PROMPT_BESIDE: usize = 16;

/// The times of a request, in seconds.
struct Times {
    arrived: Instant,
    first: Option<f64>,
    latest: Instant,
    between: Vec<f64>,
}

/// Measures, and prints a table or JSON.
pub(super) fn bench(
    test: &ArrivalTest<'_>,
    model: &ModelOptions,
    as_json: bool,
    out: &mut dyn Write,
) -> Outcome {
    if test.prompt <= test.shared || test.generate == 0 {
        return Err(Failure::Usage("--arrivals needs -p above --shared, and -n above 0".to_owned()));
    }
    let (opened, opening) = model.with_load(RequestLoad::up_to(test.serving.parallel)).open()?;
    let needed = test.prompt.saturating_add(test.generate).saturating_add(1);
    let engine = EngineOptions { greedy: true, ..model.engine() };
    let context = if engine.context == 0 { needed } else { engine.context };
    if context < needed {
        return Err(Failure::Usage(format!("-c {context}: the context does not hold {needed} tokens")));
    }
    let devices = model.open_devices()?;
    let options = test.serving.batcher(&opened, EngineOptions { context, ..engine }, &devices)?;
    let prepared = model.place_on(opened, opening, &options.engine, Some(devices))?;
    let (mut batcher, _) = test.serving.load(model, &prepared, options)?;
    if test.warm_up {
        run(&mut batcher, test)?;
        batcher.clear_prefixes();
    }
    let before = batcher.state();
    let Run { times, beside, started, ended } = run(&mut batcher, test)?;
    let seconds = ended.duration_since(started).as_secs_f64();
    let first: Vec<f64> = times.iter().filter_map(|times| times.first).collect();
    let between: Vec<f64> = times.iter().flat_map(|times| times.between.iter().copied()).collect();
    let tokens = first.len() + between.len() + beside.len();
    let speed = tokens as f64 / seconds.max(1e-9);
    let state = batcher.state();
    let (cached, preempted) = (state.cached - before.cached, state.preempted - before.preempted);
    if as_json {
        let object = json!({
            "rate": test.rate, "requests": test.requests, "prompt": test.prompt, "shared": test.shared,
            "generate": test.generate, "seconds": seconds, "tok_s": speed, "model": prepared.title(),
            "backends": prepared.devices.names(), "cached_tokens": cached, "preempted": preempted,
            "first_token_ms": percentiles(&first), "between_tokens_ms": percentiles(&between),
            "beside": test.beside, "beside_ms": percentiles(&beside),
        });
        return Ok(writeln!(out, "{}", terminal::json(&object))?);
    }
    if !model.quiet {
        let requests = plural(test.requests, "request", "requests");
        writeln!(out, "{requests}, {} a second, in {seconds:.1} s: {speed:.1} tok/s", test.rate)?;
        writeln!(out, "{} of prompts found in the KV cache\n", plural(cached as usize, "token", "tokens"))?;
    }
    writeln!(out, "{:20} {:>10} {:>10} {:>10}", "milliseconds", "p50", "p95", "p99")?;
    let all = [("to the first token", &first), ("between tokens", &between), ("beside them", &beside)];
    for (name, values) in all.into_iter().take(if test.beside > 0 { 3 } else { 2 }) {
        let [a, b, c] = [50.0, 95.0, 99.0].map(|percent| percentile(values, percent));
        writeln!(out, "{name:20} {a:>10.2} {b:>10.2} {c:>10.2}")?;
    }
    Ok(())
}

/// What a run measured.
struct Run {
    /// Of each request that arrived.
    times: Vec<Times>,
    /// Seconds between tokens of the sequences that were generated all the while.
    beside: Vec<f64>,
    started: Instant,
    ended: Instant,
}

/// Submits requests when they are due, and computes steps.
fn run(batcher: &mut Batcher, test: &ArrivalTest<'_>) -> Outcome<Run> {
    let vocabulary = batcher.model().hyperparameters().vocabulary.clamp(1, 40_000);
    let greedy = SamplingOptions { temperature: 0.0, ..SamplingOptions::default() };
    let request = |prompt: Vec<u32>, max_tokens: Option<usize>| Request {
        sampling: greedy.clone(),
        max_tokens,
        past_end: true,
        ..Request::new(prompt)
    };
    let mut latest: HashMap<RequestId, Instant> = HashMap::new();
    for stream in 0..test.beside {
        let prompt = (0..PROMPT_BESIDE).map(|k| ((k * 41 + stream * 103 + 5) % vocabulary) as u32).collect();
        latest.insert(batcher.submit(request(prompt, None))?, Instant::now());
    }
    let mut generating = HashSet::new();
    while generating.len() < test.beside {
        let tokens = batcher.step().into_iter().filter(|(_, event)| matches!(event, Event::Token { .. }));
        generating.extend(tokens.map(|(id, _)| id));
        if !batcher.is_busy() {
            return Err(Failure::Message("the sequences beside ended before all were started".to_owned()));
        }
    }
    let mut due = arrivals(test.rate, test.requests).into_iter().enumerate().peekable();
    let mut times: HashMap<RequestId, Times> = HashMap::new();
    let mut beside = Vec::new();
    let started = Instant::now();
    latest.values_mut().for_each(|latest| *latest = started);
    let (mut ended, mut unfinished) = (started, test.requests);
    while unfinished > 0 {
        while let Some((number, at)) = due.next_if(|(_, at)| started.elapsed() >= *at || !batcher.is_busy()) {
            // Nothing to compute before it arrives.
            let early = at.saturating_sub(started.elapsed());
            if !early.is_zero() {
                std::thread::sleep(early);
            }
            let token = |k: usize| {
                let own = if k < test.shared { 0 } else { (number + 1) * 101 };
                ((k * 37 + own + 11) % vocabulary) as u32
            };
            let prompt: Vec<u32> = (0..test.prompt).map(token).collect();
            let arrived = started + at;
            let id = batcher.submit(request(prompt, Some(test.generate)))?;
            times.insert(id, Times { arrived, first: None, latest: arrived, between: Vec::new() });
        }
        let events = batcher.step();
        ended = Instant::now();
        for (id, event) in events {
            match event {
                Event::Token { .. } => {
                    if let Some(latest) = latest.get_mut(&id) {
                        beside.push(ended.duration_since(*latest).as_secs_f64());
                        *latest = ended;
                    }
                    let Some(times) = times.get_mut(&id) else { continue };
                    let since = ended.duration_since(times.latest).as_secs_f64();
                    match times.first {
                        None => times.first = Some(ended.duration_since(times.arrived).as_secs_f64()),
                        Some(_) => times.between.push(since),
                    }
                    times.latest = ended;
                }
                Event::Finished(_) if times.contains_key(&id) => unfinished -= 1,
                Event::Failed(error) => return Err(Failure::Message(error.to_string())),
                _ => {}
            }
        }
    }
    batcher.cancel_all();
    Ok(Run { times: times.into_values().collect(), beside, started, ended })
}

/// The times at which requests arrive: a Poisson process, the same in every run.
fn arrivals(rate: f64, count: usize) -> Vec<Duration> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut at = 0.0;
    (0..count)
        .map(|_| {
            // xorshift
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let uniform = ((state >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
            at += -uniform.ln() / rate;
            Duration::try_from_secs_f64(at).unwrap_or(Duration::MAX)
        })
        .collect()
}

/// The nearest value that so many percent of the values do not exceed.
fn percentile(values: &[f64], percent: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
    1000.0 * sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

fn percentiles(values: &[f64]) -> Value {
    json!({ "p50": percentile(values, 50.0), "p95": percentile(values, 95.0), "p99": percentile(values, 99.0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let values: Vec<f64> = (1..=200).rev().map(|value| f64::from(value) / 1000.0).collect();
        let rounded = |percent| percentile(&values, percent).round() as i64;
        assert_eq!([rounded(50.0), rounded(95.0), rounded(99.0)], [100, 190, 198]);
        assert_eq!(percentile(&[], 50.0), 0.0);
    }

    #[test]
    fn requests_arrive_at_the_rate_on_average() {
        let times = arrivals(20.0, 4000);
        assert!(times.is_sorted());
        let seconds = times.last().unwrap().as_secs_f64();
        assert!((170.0..230.0).contains(&seconds), "{seconds}");
    }
}

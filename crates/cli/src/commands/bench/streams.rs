//! `quadriga bench --streams`: tokens per second of many sequences together.

use std::io::Write;
use std::time::Instant;

use quadriga_graph::PAGE_SLOTS;
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{Batcher, BatcherOptions, Event, Request};
use quadriga_llm::{EngineOptions, RequestLoad};
use quadriga_view::format::plural;
use serde_json::json;

use super::samples::Samples;
use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::prepared_model::Prepared;
use crate::{size, terminal};

/// What is measured.
pub(super) struct StreamTest<'a> {
    /// Numbers of sequences.
    pub(super) streams: &'a [usize],
    /// Tokens of each prompt, and tokens to generate for each.
    pub(super) prompt: usize,
    pub(super) generate: usize,
    pub(super) rounds: usize,
    pub(super) warm_up: bool,
}

/// The fewest tokens of prompts in a step of a pipeline.
const SMALL_PART: usize = 32;

/// The speeds of one number of sequences.
struct Speeds {
    prefill: Samples,
    decode: Samples,
}

/// Measures, and prints a table or JSON.
pub(super) fn bench(
    test: &StreamTest<'_>,
    model: &ModelOptions,
    as_json: bool,
    out: &mut dyn Write,
) -> Outcome {
    if test.prompt == 0 || test.generate == 0 {
        return Err(Failure::Usage("--streams needs -p and -n above 0".to_owned()));
    }
    let most = test.streams.iter().copied().max().unwrap_or(1);
    let fewest = test.streams.iter().copied().min().unwrap_or(1);
    let (opened, opening) = model.with_load(RequestLoad { fewest, most }).open()?;
    let engine = EngineOptions { sequences: most, ..model.engine() };
    // While the last prompts are computed, the first sequences generate already. Stages of a pipeline compute prompts in small parts.
    let spare = match opened.ranks().is_some_and(|ranks| ranks.grid().pipeline > 1) {
        true => SMALL_PART,
        false => engine.batch.saturating_sub(most).max(1),
    };
    let context = test
        .prompt
        .saturating_add(test.generate)
        .saturating_add(most.saturating_mul(test.prompt).div_ceil(spare))
        .saturating_add(2);
    if engine.context != 0 && engine.context < context {
        return Err(Failure::Usage(format!(
            "-c {}: the context does not hold {context} tokens",
            engine.context
        )));
    }
    let pages = most.saturating_mul(context.div_ceil(PAGE_SLOTS));
    let engine = EngineOptions { context, pages, ..engine };
    let options = BatcherOptions { engine, token_time: None, queue: most, ..BatcherOptions::default() };
    let options = options.for_model(&opened)?;
    let prepared = model.place(opened, opening, &options.engine)?;
    let (mut batcher, load_seconds) = prepared.batcher(options)?;
    let mut results = Vec::new();
    for streams in test.streams {
        let mut speeds = Speeds {
            prefill: Samples::new(streams.saturating_mul(test.prompt)),
            decode: Samples::new(streams.saturating_mul(test.generate)),
        };
        for round in usize::from(!test.warm_up)..=test.rounds {
            let [prefill, decode] = measure(&mut batcher, *streams, test)?;
            // Round 0 is the warm-up.
            if round > 0 {
                speeds.prefill.speeds.push(speeds.prefill.tokens as f64 / prefill.max(1e-9));
                speeds.decode.speeds.push(speeds.decode.tokens as f64 / decode.max(1e-9));
            }
        }
        results.push((*streams, speeds));
    }
    if as_json {
        return print_json(&prepared, test, &results, load_seconds, out);
    }
    if !model.quiet {
        let cpu = prepared.devices.cpu();
        let bytes: u64 = prepared.model.file().tensors().map(|tensor| tensor.byte_len() as u64).sum();
        let names: Vec<String> = prepared.devices.names().iter().map(ToString::to_string).collect();
        let threads = plural(cpu.threads(), "thread", "threads");
        writeln!(out, "model    {} ({})", terminal::escaped(&prepared.title()), size::text(bytes))?;
        writeln!(out, "devices  {} ({threads}, {})", names.join(", "), cpu.isa())?;
        writeln!(out, "load     {load_seconds:.2} s\n")?;
    }
    let (prefill, decode) = (format!("pp{} tok/s", test.prompt), format!("tg{} tok/s", test.generate));
    writeln!(out, "{:>7} {prefill:>14} {:>8} {decode:>14} {:>8}", "streams", "spread", "spread")?;
    for (streams, Speeds { prefill, decode }) in &results {
        let spread = |samples: &Samples| {
            samples.spread().map_or_else(|| "-".to_owned(), |spread| format!("{:.1} %", spread * 100.0))
        };
        let (first, second) = (prefill.median(), decode.median());
        writeln!(
            out,
            "{streams:>7} {first:>14.1} {:>8} {second:>14.1} {:>8}",
            spread(prefill),
            spread(decode)
        )?;
    }
    Ok(())
}

/// Seconds until every sequence has its first token, and of the steps that then generate as many as are asked for.
fn measure(batcher: &mut Batcher, streams: usize, test: &StreamTest<'_>) -> Outcome<[f64; 2]> {
    let vocabulary = batcher.model().hyperparameters().vocabulary.clamp(1, 40_000);
    let greedy = SamplingOptions { temperature: 0.0, ..SamplingOptions::default() };
    batcher.clear_prefixes();
    for stream in 0..streams {
        let prompt = (0..test.prompt).map(|k| ((k * 37 + stream * 101 + 11) % vocabulary) as u32).collect();
        // Nothing is shared, although prompts may begin alike.
        let salt = stream as u64;
        let request = Request { sampling: greedy.clone(), salt, past_end: true, ..Request::new(prompt) };
        batcher.submit(request)?;
    }
    let mut first = std::collections::HashSet::new();
    let started = Instant::now();
    while first.len() < streams {
        for (id, event) in batcher.step() {
            check(&event)?;
            if matches!(event, Event::Token { .. }) {
                first.insert(id);
            }
        }
        if !batcher.is_busy() {
            return Err(Failure::Message("the sequences ended before all were started".to_owned()));
        }
    }
    let prefill = started.elapsed().as_secs_f64();
    let started = Instant::now();
    // A step is one of all sequences, or a micro-batch of some.
    let mut generated = 0;
    while generated < streams.saturating_mul(test.generate) {
        for (_, event) in batcher.step() {
            check(&event)?;
            generated += usize::from(matches!(event, Event::Token { .. }));
        }
    }
    let decode = started.elapsed().as_secs_f64();
    batcher.cancel_all();
    Ok([prefill, decode])
}

fn check(event: &Event) -> Outcome {
    match event {
        Event::Failed(error) => Err(Failure::Message(error.to_string())),
        Event::Finished(_) => Err(Failure::Message("a sequence ended before the measurement".to_owned())),
        _ => Ok(()),
    }
}

fn print_json(
    prepared: &Prepared,
    test: &StreamTest<'_>,
    results: &[(usize, Speeds)],
    load_seconds: f64,
    out: &mut dyn Write,
) -> Outcome {
    let streams: Vec<_> = results
        .iter()
        .map(|(streams, Speeds { prefill, decode })| {
            json!({
                "n": streams,
                "prefill_tok_s": prefill.median(),
                "decode_tok_s": decode.median(),
                "prefill": prefill.json(),
                "decode": decode.json(),
            })
        })
        .collect();
    let cpu = prepared.devices.cpu();
    let object = json!({
        "streams": streams,
        "prompt": test.prompt,
        "generate": test.generate,
        "rounds": test.rounds,
        "threads": cpu.threads(),
        "isa": cpu.isa().name(),
        "model": prepared.title(),
        "backends": prepared.devices.names(),
        "memory": prepared.backend_memory(),
        "load_seconds": load_seconds,
    });
    Ok(writeln!(out, "{}", terminal::json(&object))?)
}

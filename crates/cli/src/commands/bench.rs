//! `quadriga bench`: tokens per second of prompt processing and text generation.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Instant;

use quadriga_llm::placement::Devices;
use quadriga_llm::{Engine, EngineOptions};
use quadriga_view::format::plural;
use serde_json::{Value, json};

use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::recording::{RecordOptions, Recording};
use crate::{size, terminal, values};

/// Arguments of `quadriga bench`.
#[derive(clap::Args)]
pub(crate) struct BenchArgs {
    /// Number of prompt tokens, 0 to skip
    #[arg(
        short = 'p',
        long = "n-prompt",
        value_name = "N",
        default_value_t = 512,
        allow_negative_numbers = true,
        value_parser = values::whole
    )]
    prompt: usize,
    /// Number of tokens to generate, 0 to skip
    #[arg(
        short = 'n',
        long = "n-gen",
        value_name = "N",
        default_value_t = 128,
        allow_negative_numbers = true,
        value_parser = values::whole
    )]
    generate: usize,
    /// Number of tokens in the KV cache before the measurement
    #[arg(
        short = 'd',
        long = "n-depth",
        value_name = "N",
        default_value_t = 0,
        allow_negative_numbers = true,
        value_parser = values::whole
    )]
    depth: usize,
    /// Number of repetitions, after one warm-up
    #[arg(
        short,
        long,
        value_name = "N",
        default_value_t = 5,
        allow_negative_numbers = true,
        value_parser = values::at_least_one
    )]
    rounds: usize,
    /// Copy the logits of every token to the host, as sampling does, instead of computing the argmax on the device
    #[arg(long)]
    logits: bool,
    /// GGUF file, as with -m
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    file: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
    #[command(flatten)]
    record: RecordOptions,
    /// Print the results as JSON
    #[arg(long)]
    json: bool,
}

/// Tokens per second of all rounds.
struct Samples {
    tokens: usize,
    speeds: Vec<f64>,
}

impl Samples {
    fn new(tokens: usize) -> Samples {
        Samples { tokens, speeds: Vec::new() }
    }

    fn median(&self) -> f64 {
        let mut sorted = self.speeds.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let upper = sorted.get(middle).copied().unwrap_or(0.0);
        if sorted.len() % 2 == 1 {
            return upper;
        }
        let lower = middle.checked_sub(1).and_then(|at| sorted.get(at)).copied().unwrap_or(0.0);
        (lower + upper) / 2.0
    }

    /// Difference between the fastest and the slowest round, relative to the median; none of a single round.
    fn spread(&self) -> Option<f64> {
        if self.speeds.len() < 2 {
            return None;
        }
        let fastest = self.speeds.iter().copied().fold(0.0, f64::max);
        let slowest = self.speeds.iter().copied().fold(f64::INFINITY, f64::min);
        Some((fastest - slowest) / self.median().max(1e-9))
    }

    fn json(&self) -> Value {
        if self.tokens == 0 {
            return Value::Null;
        }
        json!({ "n": self.tokens, "tok_s": self.median(), "spread": self.spread(), "samples": self.speeds })
    }
}

/// Measures and prints the speeds.
pub(crate) fn bench(arguments: &BenchArgs) -> Outcome {
    let BenchArgs { prompt, generate, depth, rounds, .. } = arguments;
    if *prompt == 0 && *generate == 0 {
        return Err(Failure::Usage("nothing to measure: -p 0 and -n 0; one of them must be above 0".into()));
    }
    let model = &arguments.model.with_file(arguments.file.as_deref());
    let mut options = EngineOptions { greedy: !arguments.logits, ..model.engine() };
    let needed = depth.saturating_add(*prompt.max(generate));
    if options.context == 0 {
        options.context = needed;
    } else if options.context < needed {
        return Err(Failure::Usage(format!(
            "-c {}: the context does not hold {}",
            options.context,
            plural(needed, "token", "tokens")
        )));
    }
    let prepared = model.prepare(&options)?;
    let free = |devices: &Devices| -> Vec<Option<u64>> {
        devices.backends().iter().map(|backend| backend.device().free_bytes).collect()
    };
    let before = free(&prepared.devices);
    let recording = arguments.record.start(model, &prepared)?;
    let (mut engine, load_seconds) = prepared.engine()?;
    engine.observe(recording.as_ref().map(Recording::observer));
    let (mut prompts, mut generations) = (Samples::new(*prompt), Samples::new(*generate));
    let some = tokens(&engine, needed);
    if *depth > 0 {
        engine.feed(some.get(..*depth).unwrap_or_default())?;
        engine.checkpoint(0)?;
    }
    for round in 0..=*rounds {
        let mut measure = |samples: &mut Samples, batched: bool| -> Outcome {
            if samples.tokens == 0 {
                return Ok(());
            }
            let kept = engine.truncate(0, *depth);
            if let Some(missing) = some.get(kept..*depth).filter(|missing| !missing.is_empty()) {
                engine.feed(missing)?;
                engine.wait()?;
            }
            let fed = some.get(..samples.tokens).unwrap_or_default();
            let started = Instant::now();
            if batched {
                engine.feed(fed)?;
            } else if engine.options().greedy {
                continue_greedily(&mut engine, fed)?;
            } else {
                fed.iter().try_for_each(|token| engine.feed(&[*token]))?;
            }
            engine.wait()?;
            // Round 0 is the warm-up.
            if round > 0 {
                samples.speeds.push(samples.tokens as f64 / started.elapsed().as_secs_f64().max(1e-9));
            }
            Ok(())
        };
        measure(&mut prompts, true)?;
        measure(&mut generations, false)?;
    }
    // Memory taken from each device as the device reports it: buffers and the driver's own.
    let taken: Vec<Option<u64>> = before
        .iter()
        .zip(free(&prepared.devices))
        .map(|(before, after)| Some(before.as_ref()?.saturating_sub(after?)))
        .collect();
    let statistics = recording.map(Recording::finish).transpose()?.flatten();
    let file = prepared.model.file();
    let name = file.find::<&str>("general.name").ok().flatten().unwrap_or("model").to_owned();
    let bytes: u64 = file.tensors().map(|tensor| tensor.byte_len() as u64).sum();
    let cpu = prepared.devices.cpu();
    let mut out = io::stdout().lock();
    if arguments.json {
        let object = json!({
            "pp": prompts.json(),
            "tg": generations.json(),
            "depth": depth,
            "rounds": rounds,
            "argmax": if engine.options().greedy { "device" } else { "none" },
            "threads": cpu.threads(),
            "isa": cpu.isa().name(),
            "model": name,
            "model_bytes": bytes,
            "backends": prepared.devices.names(),
            "memory": prepared.forecast.bytes(),
            "taken": taken,
            "load_seconds": load_seconds,
            "stats": statistics,
        });
        writeln!(out, "{}", terminal::json(&object))?;
        return Ok(());
    }
    if !model.quiet {
        writeln!(out, "model    {} ({})", name.escape_debug(), size::text(bytes))?;
        writeln!(
            out,
            "devices  {} ({}, {})",
            prepared.devices.names().join(", "),
            plural(cpu.threads(), "thread", "threads"),
            cpu.isa()
        )?;
        writeln!(out, "load     {load_seconds:.2} s\n")?;
    }
    writeln!(out, "{:12} {:>10} {:>8}", "test", "tok/s", "spread")?;
    let after = if *depth > 0 { format!(" @ {depth}") } else { String::new() };
    for (test, samples) in [("pp", &prompts), ("tg", &generations)] {
        if samples.tokens > 0 {
            let spread =
                samples.spread().map_or_else(|| "-".to_owned(), |spread| format!("{:.1} %", spread * 100.0));
            let (name, speed) = (format!("{test}{}{after}", samples.tokens), samples.median());
            writeln!(out, "{name:12} {speed:>10.2} {spread:>8}")?;
        }
    }
    if let Some(statistics) = statistics {
        note!("\n{statistics}");
    }
    Ok(())
}

/// Feeds the first token, then as many argmax tokens of the engine as there are others.
fn continue_greedily(engine: &mut Engine, fed: &[u32]) -> Outcome {
    let Some((first, rest)) = fed.split_first() else { return Ok(()) };
    engine.feed(&[*first])?;
    for _ in rest {
        engine.run_ahead()?;
        let token = engine.argmax(0)?;
        engine.feed(&[token])?;
    }
    Ok(())
}

/// A fixed sequence of varied ordinary tokens, the same for every engine that is compared.
fn tokens(engine: &Engine, count: usize) -> Vec<u32> {
    let vocabulary = engine.model().hyperparameters().vocabulary.clamp(1, 40_000);
    (0..count).map(|k| ((k * 37 + 11) % vocabulary) as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_count_is_between_the_middle_two() {
        let of = |speeds: &[f64]| Samples { tokens: 1, speeds: speeds.to_vec() };
        assert_eq!(of(&[3.0, 1.0]).median(), 2.0);
        assert_eq!(of(&[9.0, 1.0, 4.0, 2.0]).median(), 3.0);
        assert_eq!(of(&[5.0, 1.0, 4.0]).median(), 4.0);
        assert_eq!(of(&[5.0]).median(), 5.0);
        assert_eq!(of(&[]).median(), 0.0);
    }

    #[test]
    fn the_spread_is_relative_to_the_median() {
        let samples = Samples { tokens: 7, speeds: vec![8.0, 10.0, 11.0] };
        assert!((samples.spread().unwrap() - 0.3).abs() < 1e-12);
        let json = samples.json();
        assert_eq!((&json["n"], &json["tok_s"]), (&7.into(), &10.0.into()));
        assert!(Samples::new(0).json().is_null());
        let once = Samples { tokens: 7, speeds: vec![8.0] };
        assert!(once.spread().is_none() && once.json()["spread"].is_null());
    }
}

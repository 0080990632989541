//! The end of `quadriga quantize`: the result against the input on a short text; and the memory that a model needs beside
//! its weights.

use std::path::{Path, PathBuf};
use std::time::Duration;

use quadriga_gguf::File;
use quadriga_llm::{Engine, EngineOptions};
use quadriga_models::quality::chunk_tokens;
use quadriga_models::quantize::{QuantizePlan, Sensitivities};

use super::{QuantizeArgs, Target};
use crate::commands::compare::judge;
use crate::commands::perplexity::read_text;
use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::{interrupt, size};

/// A text on which models are compared: prose, code and numbers.
const TEXT: &str = include_str!("check.txt");

/// Tokens of a chunk, and the most chunks.
const CHUNK: usize = 128;
const CHUNKS: usize = 2;

/// The memory within which models are compared, unless the user says otherwise.
const MEMORY: u64 = 1 << 30;

/// What the process takes beside models.
const PROCESS: u64 = 48 << 20;

/// Prints how far the output, of these files, is from the input. What cannot be run is not compared, nor what would take more
/// memory than quantizing may.
pub(super) fn check(arguments: &QuantizeArgs, target: &Target, paths: &[PathBuf]) -> Outcome {
    let Some(output) = paths.first() else { return Ok(()) };
    let model = ModelOptions::on("cpu", target.threads, None, None);
    let limit = arguments.memory.unwrap_or(MEMORY);
    let needed = needed_memory(&model, &[&arguments.input, output], limit);
    if needed.is_ok_and(|needed| needed > limit) {
        note!(
            "quadriga: the result was not compared with the input: both models take more than the {} of --memory; \
             `quadriga compare {} {} -f TEXT` compares them all the same",
            size::text(limit),
            arguments.input.display(),
            output.display()
        );
        return Ok(());
    }
    let text = match &arguments.check_text {
        Some(path) => read_text(path)?,
        None => TEXT.to_owned(),
    };
    match judge(&model, (&arguments.input, output), &text, (CHUNK, CHUNKS)) {
        Ok(found) => {
            note!(
                "against the input, on {} tokens: KL divergence {:.5} (99 % {:.5}), same most probable token {:.1} %, \
                 perplexity × {:.4} (`quadriga compare` measures more)",
                found.tokens,
                found.divergence,
                found.quantile99,
                100.0 * found.same_top.mean,
                found.ratio.mean
            );
            Ok(())
        }
        Err(Failure::Interrupted) => Err(Failure::Interrupted),
        Err(Failure::Message(reason) | Failure::Usage(reason)) => {
            note!("quadriga: the result was not compared with the input: {reason}");
            Ok(())
        }
        Err(other) => Err(other),
    }
}

/// An error if the output, of these files, cannot be loaded while the input can: keys that were overridden describe another model.
pub(super) fn check_loadable(input: &Path, paths: &[PathBuf]) -> Outcome {
    let Some(output) = paths.first() else { return Ok(()) };
    let load = |path: &Path| -> Outcome {
        let model = ModelOptions::on("cpu", Some(1), Some(path.to_owned()), None);
        model.prepare(&EngineOptions { context: CHUNK, ..model.engine() }).map(drop)
    };
    match load(output) {
        Err(Failure::Message(reason) | Failure::Usage(reason)) if load(input).is_ok() => {
            Err(Failure::Message(format!(
                "wrote {}, which cannot be loaded with the keys of --override-kv, and was kept: {reason}",
                output.display()
            )))
        }
        _ => Ok(()),
    }
}

/// The memory that running models takes at most: their files, as pages that are mapped count, and what is computed with.
/// Once it is past the limit, it is not counted to its end.
fn needed_memory(options: &ModelOptions, paths: &[&PathBuf], limit: u64) -> Outcome<u64> {
    let mut needed = PROCESS;
    for path in paths {
        needed += File::open(path)?.byte_len();
    }
    for path in paths {
        if needed > limit {
            break;
        }
        let model = options.with_file(Some(path));
        let engine = EngineOptions { output_rows: usize::MAX, context: CHUNK, ..model.engine() };
        let prepared = model.prepare(&engine)?;
        needed += prepared.placed.forecast.bytes().iter().map(|backend| backend.total()).sum::<u64>();
    }
    Ok(needed)
}

/// Measures how much the input reacts to errors of its tensors; `None` if it cannot be run, or takes more memory than it may.
pub(super) fn sensitivities(
    arguments: &QuantizeArgs,
    target: &Target,
    plan: &QuantizePlan,
) -> Outcome<Option<Sensitivities>> {
    let text = match &arguments.check_text {
        Some(path) => read_text(path)?,
        None => TEXT.to_owned(),
    };
    let options = ModelOptions::on("cpu", target.threads, Some(arguments.input.clone()), None);
    // If the model cannot be opened, the run below reports why.
    let is_allowed = match arguments.memory {
        Some(limit) => {
            !needed_memory(&options, &[&arguments.input], limit).is_ok_and(|needed| needed > limit)
        }
        None => options.fits(&arguments.input).unwrap_or(true),
    };
    if !is_allowed {
        if !arguments.quiet {
            let limit = match arguments.memory {
                Some(limit) => format!("the {} of --memory", size::text(limit)),
                None => "is free".to_owned(),
            };
            note!(
                "quadriga: all tensors count alike, because running the model takes more memory than {limit}"
            );
        }
        return Ok(None);
    }
    let measure = || -> Outcome<Sensitivities> {
        let (model, _) = options.open()?;
        let tokens = chunk_tokens(model.tokenizer()?, &text, CHUNK);
        let tokens = tokens.get(..CHUNK).unwrap_or(&tokens);
        let engine_options = EngineOptions { output_rows: usize::MAX, context: CHUNK, ..options.engine() };
        let mut engine = |model| -> Outcome<Engine> {
            Ok(options.place(model, Duration::ZERO, &engine_options)?.engine()?.0)
        };
        let ctrl_c = interrupt::catch_writing();
        let bar = (!arguments.quiet).then(|| indicatif::ProgressBar::new(0));
        let measured = Sensitivities::measure(&model, plan, tokens, &mut engine, &mut |done, total| {
            if let Some(bar) = &bar {
                bar.set_message("measuring the model's sensitivity to errors");
                bar.set_length(total as u64);
                bar.set_position(done as u64);
            }
            !ctrl_c.is_pressed()
        });
        if let Some(bar) = &bar {
            bar.finish_and_clear();
        }
        if ctrl_c.is_pressed() { Err(Failure::Interrupted) } else { measured }
    };
    match measure() {
        Ok(measured) => Ok(Some(measured)),
        Err(Failure::Message(reason) | Failure::Usage(reason)) => {
            if !arguments.quiet {
                note!("quadriga: all tensors count alike, because the model cannot be run: {reason}");
            }
            Ok(None)
        }
        Err(other) => Err(other),
    }
}

/// The bytes of KV cache and buffers with which a model runs with this context.
pub(super) fn memory_beside_weights(input: &Path, context: usize) -> Outcome<u64> {
    let model = ModelOptions::on("cpu", None, Some(input.to_owned()), None);
    let prepared = model.prepare(&EngineOptions { context, ..model.engine() })?;
    let bytes = prepared.placed.forecast.bytes();
    Ok(bytes.iter().map(|backend| backend.total().saturating_sub(backend.weights)).sum())
}

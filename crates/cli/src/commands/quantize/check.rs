//! The end of `quadriga quantize`: the result against the input on a short text; and the memory that a model needs beside
//! its weights.

use std::path::Path;
use std::time::Duration;

use quadriga_llm::{Engine, EngineOptions};
use quadriga_models::quantize::{QuantizePlan, Sensitivities};

use super::{QuantizeArgs, Target};
use crate::commands::compare::judge;
use crate::commands::perplexity::read_text;
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::model_options::ModelOptions;

/// A text on which models are compared: prose, code and numbers.
const TEXT: &str = include_str!("check.txt");

/// Tokens of a chunk, and the most chunks.
const CHUNK: usize = 128;
const CHUNKS: usize = 2;

/// Prints how far the output is from the input. What cannot be run, such as a part of a model, is not compared.
pub(super) fn check(arguments: &QuantizeArgs, target: &Target) -> Outcome {
    let text = match &arguments.check_text {
        Some(path) => read_text(path)?,
        None => TEXT.to_owned(),
    };
    let model = ModelOptions::on("cpu", target.threads, None, None);
    match judge(&model, (&arguments.input, &target.output), &text, (CHUNK, CHUNKS)) {
        Ok(found) => {
            if !arguments.quiet {
                note!(
                    "against the input, on {} tokens: KL divergence {:.5} (99 % {:.5}), same most probable token {:.1} %, \
                     perplexity × {:.4} (`quadriga compare` measures more)",
                    found.tokens,
                    found.divergence,
                    found.quantile99,
                    100.0 * found.same_top.mean,
                    found.ratio.mean
                );
            }
            Ok(())
        }
        Err(Failure::Interrupted) => Err(Failure::Interrupted),
        Err(Failure::Message(reason) | Failure::Usage(reason)) => {
            if !arguments.quiet {
                note!("quadriga: the result was not compared with the input: {reason}");
            }
            Ok(())
        }
        Err(other) => Err(other),
    }
}

/// Measures how much the input reacts to errors of its tensors; `None` if it cannot be run.
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
    let measure = || -> Outcome<Sensitivities> {
        let (model, _) = options.open()?;
        let tokens = model.tokenizer()?.encode(&text, false);
        let tokens = tokens.get(..CHUNK).unwrap_or(&tokens);
        let engine_options = EngineOptions { output_rows: usize::MAX, context: CHUNK, ..options.engine() };
        let mut engine = |model| -> Outcome<Engine> {
            Ok(options.place(model, Duration::ZERO, &engine_options)?.engine()?.0)
        };
        let ctrl_c = interrupt::catch();
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

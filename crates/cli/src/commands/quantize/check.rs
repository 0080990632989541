//! The end of `quadriga quantize`: the result against the input on a short text; and the memory that a model needs beside
//! its weights.

use std::path::Path;

use quadriga_llm::EngineOptions;

use super::{QuantizeArgs, Target};
use crate::commands::compare::judge;
use crate::commands::perplexity::read_text;
use crate::failure::{Failure, Outcome};
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

/// The bytes of KV cache and buffers with which a model runs with this context.
pub(super) fn memory_beside_weights(input: &Path, context: usize) -> Outcome<u64> {
    let model = ModelOptions::on("cpu", None, Some(input.to_owned()), None);
    let prepared = model.prepare(&EngineOptions { context, ..model.engine() })?;
    let bytes = prepared.placed.forecast.bytes();
    Ok(bytes.iter().map(|backend| backend.total().saturating_sub(backend.weights)).sum())
}

//! `quadriga neurons`: counts how often each neuron of a model is active.

use std::path::PathBuf;

use quadriga_llm::{BatchToken, Engine, EngineOptions};
use quadriga_view::format::plural;

use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::{interrupt, piped_input};

/// Arguments of `quadriga neurons`.
#[derive(clap::Args)]
pub(crate) struct NeuronsArgs {
    /// File with the text
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// File for the counts, which belong to this model
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
}

/// Writes the counts, and prints what they show.
pub(crate) fn neurons(arguments: &NeuronsArgs) -> Outcome {
    let bytes =
        std::fs::read(&arguments.file).map_err(|error| Failure::file("read", &arguments.file, &error))?;
    let text = piped_input::text(bytes, &arguments.file.display().to_string())?;
    let mut options = EngineOptions { output_rows: usize::MAX, ..arguments.model.engine() };
    options.neurons.observe = true;
    let prepared = arguments.model.prepare(&options)?;
    if !prepared.model.hyperparameters().rectified && options.neurons.gate_threshold() == 0.0 {
        return Err(Failure::Usage(
            "the model's neurons are always active: its feed-forward networks are not rectified".to_owned(),
        ));
    }
    let tokens = prepared.model.tokenizer()?.encode(&text, false);
    let (mut engine, _) = prepared.engine()?;
    let ctrl_c = interrupt::catch();
    let context = engine.options().context.max(1);
    for chunk in tokens.chunks(context) {
        if ctrl_c.is_pressed() {
            return Err(Failure::Interrupted);
        }
        feed(&mut engine, chunk)?;
    }
    let Some(counts) = engine.neuron_counts().filter(|counts| counts.tokens > 0) else {
        return Err(Failure::Usage(format!("{} has no text", arguments.file.display())));
    };
    counts.write(&arguments.output, &prepared.model)?;
    note!(
        "wrote {}: {}, {:.1} % of the neurons active; a quarter of them make {:.0} % of the activations",
        arguments.output.display(),
        plural(counts.tokens as usize, "token", "tokens"),
        100.0 * counts.active_share(),
        100.0 * counts.share_of_most_active(0.25)
    );
    Ok(())
}

/// Computes tokens from the beginning. Every one is an output: the last layer computes those only.
fn feed(engine: &mut Engine, tokens: &[u32]) -> Outcome {
    engine.truncate(0, 0);
    let batch: Vec<BatchToken> =
        tokens.iter().map(|token| BatchToken { sequence: 0, token: *token, output: true }).collect();
    Ok(engine.extend(&batch)?)
}

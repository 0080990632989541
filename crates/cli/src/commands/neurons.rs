//! `quadriga neurons`: counts how often each neuron of a model is active.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use quadriga_llm::{BatchToken, Engine, EngineOptions, NeuronCounts};
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
    /// File for the counts, which belong to this model [default: the model's name with .neurons at its end]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Counts of another text: prints how well the neurons that are most active by them serve this one
    #[arg(long, value_name = "COUNTS")]
    compare: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
}

/// Writes the counts, and prints what they show.
pub(crate) fn neurons(arguments: &NeuronsArgs) -> Outcome {
    let bytes =
        std::fs::read(&arguments.file).map_err(|error| Failure::file("read", &arguments.file, &error))?;
    let text = piped_input::text(bytes, &arguments.file.display().to_string())?;
    // Hidden states in place of logits: the last layer computes the rows of outputs only.
    let (logits, hidden, output_rows) = (false, true, usize::MAX);
    let mut options = EngineOptions { logits, hidden, output_rows, ..arguments.model.engine() };
    options.neurons.observe = true;
    let prepared = arguments.model.prepare(&options)?;
    if !prepared.model.hyperparameters().rectified && options.neurons.gate_threshold() == 0.0 {
        return Err(Failure::Usage(
            "the model's neurons are always active: its feed-forward networks are not rectified".to_owned(),
        ));
    }
    let others = match &arguments.compare {
        Some(path) => Some(NeuronCounts::open(path, &prepared.model)?),
        None => None,
    };
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
    let output = match &arguments.output {
        Some(output) => output.clone(),
        None => default_output(&arguments.model.path()?),
    };
    let Some(counts) = engine.neuron_counts().filter(|counts| counts.tokens > 0) else {
        return Err(Failure::Usage(format!("{} has no text", arguments.file.display())));
    };
    counts.write(&output, &prepared.model)?;
    note!(
        "wrote {}: {}, {:.1} % of the neurons active; a quarter of them make {:.0} % of the activations",
        output.display(),
        plural(counts.tokens as usize, "token", "tokens"),
        100.0 * counts.active_share(),
        100.0 * counts.share_of_most_active(0.25)
    );
    for share in SHARES.into_iter().filter(|_| others.is_some()) {
        let found = others.as_ref().map_or(0.0, |others| counts.share_of_most_active_by(others, share));
        let best = counts.share_of_most_active(share);
        note!(
            "{:2.0} % of the neurons, chosen by the other counts: {:.1} % of the activations, {:.1} % of the best choice's",
            100.0 * share,
            100.0 * found,
            100.0 * found / best.max(f64::MIN_POSITIVE)
        );
    }
    Ok(())
}

/// The shares of neurons for which counts are compared.
const SHARES: [f64; 3] = [0.1, 0.25, 0.5];

/// A file in the current folder, named after the model.
fn default_output(model: &Path) -> PathBuf {
    let name = model.file_name().unwrap_or_else(|| OsStr::new("model"));
    Path::new(name).with_extension("neurons")
}

/// Computes tokens from the beginning, batch by batch, so that no more than one batch's outputs are kept. Every token is an
/// output: the last layer computes those only.
fn feed(engine: &mut Engine, tokens: &[u32]) -> Outcome {
    engine.truncate(0, 0);
    let size = engine.options().batch.max(1);
    for chunk in tokens.chunks(size) {
        let row = |token: &u32| BatchToken { sequence: 0, token: *token, output: true };
        engine.extend(&chunk.iter().map(row).collect::<Vec<_>>())?;
    }
    Ok(())
}

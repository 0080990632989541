//! `quadriga lora`: merges LoRA adapters into a model file.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressStyle};
use quadriga_gguf::File;
use quadriga_models::check_output;
use quadriga_models::lora::{self, LoraError};
use quadriga_view::format::plural;

use crate::failure::{Failure, Outcome};
use crate::hub_model::HubModel;
use crate::interrupt;

/// Arguments of `quadriga lora`.
#[derive(clap::Args)]
pub(crate) struct LoraArgs {
    /// GGUF file of the model, or the word default
    #[arg(short, long, value_name = "FILE", required_unless_present = "hf_repo", conflicts_with = "hf_repo")]
    model: Option<PathBuf>,
    #[command(flatten)]
    hub: HubModel,
    /// LoRA adapter (GGUF, or a folder of PEFT), with an optional scale; repeatable
    #[arg(long, value_name = "FILE[=SCALE]", required = true)]
    lora: Vec<String>,
    /// GGUF file to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Print no progress
    #[arg(short, long)]
    quiet: bool,
}

/// Merges the adapters.
pub(crate) fn lora(arguments: &LoraArgs) -> Outcome {
    let adapter_files = crate::lora::files(&arguments.lora)?;
    let model = arguments.hub.path(arguments.model.as_deref().unwrap_or(Path::new("")), arguments.quiet)?;
    check_output(&arguments.output, adapter_files.iter().chain([&model]))?;
    let adapters = crate::lora::open(&arguments.lora, &File::open(&model)?)?;
    let ctrl_c = interrupt::catch_writing();
    let bar = if arguments.quiet { ProgressBar::hidden() } else { ProgressBar::new(0) };
    let style = ProgressStyle::with_template("merging [{wide_bar}] {pos}/{len} tensors {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let merged = lora::merge(&model, &adapters, &arguments.output, &mut |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
        if ctrl_c.is_pressed() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    bar.finish_and_clear();
    let count = merged?;
    if !arguments.quiet {
        note!("wrote {}: {} changed", arguments.output.display(), plural(count, "tensor", "tensors"));
    }
    Ok(())
}

impl From<LoraError> for Failure {
    fn from(error: LoraError) -> Failure {
        match error {
            LoraError::Cancelled => Failure::Interrupted,
            other => Failure::Message(other.to_string()),
        }
    }
}

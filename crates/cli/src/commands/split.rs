//! `quadriga split` and `quadriga merge`: GGUF files in parts.

use std::path::{Path, PathBuf};

use quadriga_models::shards::{self, ShardError, SplitLimits};
use quadriga_view::format::plural;

use crate::failure::{Failure, Outcome};
use crate::hub_model::HubModel;
use crate::{interrupt, size};

/// Arguments of `quadriga split`.
#[derive(clap::Args)]
pub(crate) struct SplitArgs {
    /// GGUF file, or the word default; left out with -hf
    file: PathBuf,
    /// Beginning of the names of the parts: PREFIX-00001-of-00003.gguf
    #[arg(required_unless_present = "hf_repo")]
    prefix: Option<PathBuf>,
    #[command(flatten)]
    hub: HubModel,
    /// Most tensors in a part [default: 128, or any number with --split-max-size]
    #[arg(long, value_name = "N", value_parser = crate::values::at_least_one)]
    split_max_tensors: Option<usize>,
    /// Most bytes of tensors in a part, such as 2G; a larger tensor has a part of its own
    #[arg(long, value_name = "SIZE", value_parser = size::parse_positive)]
    split_max_size: Option<u64>,
    /// Write no tensors into the first part
    #[arg(long)]
    no_tensor_first_split: bool,
    /// Print the parts and write nothing
    #[arg(long)]
    dry_run: bool,
    /// llama.cpp's name for what this command does
    #[arg(long = "split", hide = true)]
    named: bool,
}

/// Arguments of `quadriga merge`.
#[derive(clap::Args)]
pub(crate) struct MergeArgs {
    /// Any part of the model; left out with -hf
    part: PathBuf,
    /// GGUF file to write
    #[arg(required_unless_present = "hf_repo")]
    output: Option<PathBuf>,
    #[command(flatten)]
    hub: HubModel,
    /// llama.cpp's name for what this command does
    #[arg(long = "merge", hide = true)]
    named: bool,
}

/// Splits a file.
pub(crate) fn split(arguments: &SplitArgs) -> Outcome {
    let default =
        if arguments.split_max_size.is_some() { usize::MAX } else { SplitLimits::default().tensors };
    let limits = SplitLimits {
        tensors: arguments.split_max_tensors.unwrap_or(default),
        bytes: arguments.split_max_size.unwrap_or(u64::MAX),
        keys_apart: arguments.no_tensor_first_split,
    };
    let (file, prefix) = input_and_output(&arguments.hub, &arguments.file, arguments.prefix.as_deref())?;
    if arguments.dry_run {
        for (number, (tensors, bytes)) in (1..).zip(shards::plan_split(&file, &limits)?) {
            note!("part {number}: {}, {}", plural(tensors, "tensor", "tensors"), size::text(bytes));
        }
        return Ok(());
    }
    let ctrl_c = interrupt::catch_writing();
    for path in shards::split(&file, prefix, &limits, &|| ctrl_c.is_pressed())? {
        note!("wrote {}", path.display());
    }
    Ok(())
}

/// Merges the parts of a model.
pub(crate) fn merge(arguments: &MergeArgs) -> Outcome {
    let (part, output) = input_and_output(&arguments.hub, &arguments.part, arguments.output.as_deref())?;
    let ctrl_c = interrupt::catch_writing();
    shards::merge(&part, output, &|| ctrl_c.is_pressed())?;
    note!("wrote {}", output.display());
    Ok(())
}

/// What is read and what is written: with a model of the hub, the only argument is the latter.
fn input_and_output<'a>(
    hub: &HubModel,
    first: &'a Path,
    second: Option<&'a Path>,
) -> Outcome<(PathBuf, &'a Path)> {
    let output = match (hub.is_given(), second) {
        (false, Some(output)) => output,
        (true, None) => first,
        (true, Some(_)) => {
            return Err(Failure::Usage(format!(
                "-hf names the model: leave {} out, or -hf",
                first.display()
            )));
        }
        (false, None) => return Err(Failure::Usage("the output is missing".to_owned())),
    };
    Ok((hub.path(first, false)?, output))
}

impl From<ShardError> for Failure {
    fn from(error: ShardError) -> Failure {
        match error {
            ShardError::Cancelled => Failure::Interrupted,
            other => Failure::Message(other.to_string()),
        }
    }
}

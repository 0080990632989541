//! `quadriga convert`: a folder of safetensors, a repository of the hub, or an adapter of PEFT to a GGUF file.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressStyle};
use quadriga_gguf::{File, Summary};
use quadriga_models::convert::{self, ConvertError, ConvertOptions, TargetType};
use quadriga_models::hub::{Hub, HubError, RemoteFile, RepositoryName};
use quadriga_models::lora;
use quadriga_view::format::plural;

use crate::failure::{Failure, Outcome};
use crate::hub::HubAccess;
use crate::{interrupt, size, values};

/// Arguments of `quadriga convert`.
#[derive(clap::Args)]
pub(crate) struct ConvertArgs {
    /// Folder with config.json, .safetensors files and a tokenizer, or a repository of the hub (ORG/REPO)
    #[arg(value_name = "FOLDER|REPO", required_unless_present = "classes")]
    model: Option<String>,
    /// GGUF file to write
    #[arg(short, long, alias = "outfile", value_name = "FILE", required_unless_present = "classes")]
    output: Option<PathBuf>,
    /// Convert a LoRA adapter of PEFT in FOLDER, which belongs to this GGUF file
    #[arg(long, value_name = "FILE", requires = "model", conflicts_with_all = ["target", "pre", "name", "no_vocab"])]
    base: Option<PathBuf>,
    /// Type of the matrices [default: that of the safetensors files]
    #[arg(long = "type", alias = "outtype", value_name = "TYPE", value_parser = target)]
    target: Option<TargetType>,
    /// Pre-tokenizer, where its rules are not recognised: a name of tokenizer.ggml.pre
    #[arg(long, value_name = "NAME")]
    pre: Option<String>,
    /// Model name in the file [default: the folder's name]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Write no vocabulary: the model can be benchmarked, but not used with text
    #[arg(long)]
    no_vocab: bool,
    /// Memory for the pieces of tensors that are converted at once
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = size::parse)]
    memory: u64,
    /// Number of threads [default: number of cores]
    #[arg(short, long, value_name = "N", allow_negative_numbers = true, value_parser = values::threads)]
    threads: Option<usize>,
    /// List the classes of models that can be converted, with the architecture of each
    #[arg(long, conflicts_with_all = ["model", "output"])]
    classes: bool,
    /// Use models in the cache only [default: HF_HUB_OFFLINE]
    #[arg(long)]
    offline: bool,
    /// Folder of downloaded models [default: QUADRIGA_CACHE, or the user's cache folder]
    #[arg(long, value_name = "FOLDER")]
    cache_dir: Option<PathBuf>,
    /// Print no progress
    #[arg(short, long)]
    quiet: bool,
}

fn target(name: &str) -> Result<TargetType, String> {
    TargetType::from_name(name).ok_or_else(|| format!("must be one of {}", TargetType::names().join(", ")))
}

/// Converts a model and prints a summary.
pub(crate) fn convert(arguments: &ConvertArgs) -> Outcome {
    if arguments.classes {
        let mut classes: Vec<_> = convert::classes().collect();
        classes.sort_unstable();
        for (class, architecture) in classes {
            use std::io::Write as _;
            writeln!(std::io::stdout(), "{class:<40} {architecture}")?;
        }
        return Ok(());
    }
    let (Some(model), Some(output)) = (&arguments.model, &arguments.output) else { return Ok(()) };
    if let Some(base) = &arguments.base {
        let count = lora::convert(Path::new(model), base, output)?;
        if !arguments.quiet {
            let matrices = plural(count, "matrix", "matrices");
            note!("wrote {}: a LoRA adapter for {matrices}", output.display());
        }
        return Ok(());
    }
    let folder = arguments.folder(model)?;
    if folder.join("adapter_config.json").is_file() && !folder.join("config.json").is_file() {
        let reason =
            "a LoRA adapter of PEFT is converted with --base MODEL.gguf, the model that it belongs to";
        return Err(Failure::Usage(format!("{model}: {reason}")));
    }
    let default = ConvertOptions::default();
    let options = ConvertOptions {
        target: arguments.target,
        pre_tokenizer: arguments.pre.clone(),
        vocabulary: !arguments.no_vocab,
        // The folder of a downloaded repository is named after its commit.
        name: arguments.name.clone().or_else(|| (!Path::new(model).is_dir()).then(|| last_part(model))),
        memory: arguments.memory.max(1 << 20),
        threads: arguments.threads.unwrap_or(default.threads),
    };
    let ctrl_c = interrupt::catch_writing();
    let bar = if arguments.quiet { ProgressBar::hidden() } else { ProgressBar::new(0) };
    let style = ProgressStyle::with_template("converting [{wide_bar}] {percent}% {eta} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let converted = convert::convert(&folder, output, &options, &mut |progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.done);
        bar.set_message(progress.tensor.to_owned());
        if ctrl_c.is_pressed() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    bar.finish_and_clear();
    let report = converted?;
    if !arguments.quiet {
        report.notes.iter().for_each(|text| note!("quadriga: {text}"));
        let file = File::open(output)?;
        let summary = Summary::of(&file);
        let types: Vec<String> = summary.types.iter().map(|total| total.dtype.to_string()).collect();
        note!(
            "wrote {}: {}, {} tensors, {:.1} M parameters, {}, {}",
            output.display(),
            report.architecture,
            report.tensors,
            summary.parameters as f64 / 1e6,
            types.join(" and "),
            size::text(summary.file_bytes)
        );
    }
    Ok(())
}

fn last_part(name: &str) -> String {
    let name = name.split([':', '@']).next().unwrap_or(name);
    name.rsplit('/').next().unwrap_or(name).to_owned()
}

impl ConvertArgs {
    /// The folder of the model; a repository is downloaded.
    fn folder(&self, model: &str) -> Outcome<PathBuf> {
        let path = Path::new(model);
        if path.is_dir() {
            return Ok(path.to_owned());
        }
        let name: RepositoryName = match model.parse() {
            Ok(name) if !path.exists() => name,
            _ => {
                return Err(Failure::Usage(format!(
                    "{model} is neither a folder nor the name of a repository (ORG/REPO)"
                )));
            }
        };
        let access = HubAccess { cache: self.cache_dir.as_deref(), offline: self.offline, quiet: self.quiet };
        let settings = access.settings()?;
        if settings.offline {
            let found = access.cache()?.find_folder(&name, "config.json");
            return found.ok_or_else(|| HubError::Offline { repository: name.path() }.into());
        }
        let hub = Hub::new(settings)?;
        let listing = hub.list(&name)?;
        let files: Vec<RemoteFile> =
            listing.files.iter().filter(|file| belongs(&file.name)).cloned().collect();
        if !files.iter().any(|file| file.name.ends_with(".safetensors")) {
            return Err(Failure::Message(format!("{} has no .safetensors files", name.path())));
        }
        access.download(&hub, &name, &listing, &files)?;
        Ok(hub.cache().snapshot(&name, &listing.commit))
    }
}

/// Whether a file of a repository is needed for a conversion.
fn belongs(name: &str) -> bool {
    let tokenizer = ["tokenizer.model", "chat_template.jinja", "modules.json", "1_Pooling/config.json"];
    let json = name.ends_with(".json") && !name.contains('/');
    let weights = name.ends_with(".safetensors") && !name.contains('/') && !name.starts_with("consolidated");
    weights || json || tokenizer.contains(&name)
}

impl From<ConvertError> for Failure {
    fn from(error: ConvertError) -> Failure {
        match error {
            ConvertError::Cancelled => Failure::Interrupted,
            other => Failure::Message(other.to_string()),
        }
    }
}

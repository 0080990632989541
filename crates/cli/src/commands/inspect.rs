//! `quadriga inspect`: metadata and tensors of a GGUF file.

use std::collections::BTreeMap;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use quadriga_gguf::{File, Summary, Tensor, Value};
use quadriga_llm::{Error, LayerShape, models};
use quadriga_view::format::plural;
use serde_json::{Map, json};

use crate::failure::{Failure, Outcome};
use crate::hub::HubAccess;
use crate::model_options::ModelOptions;
use crate::terminal::{self, Escaping};
use crate::{fetch, file_hint, size};

/// Arguments of `quadriga inspect`.
#[derive(clap::Args)]
pub(crate) struct InspectArgs {
    /// GGUF file; of a split model, any of its parts; or the word default
    #[arg(required_unless_present_any = ["architectures", "hf_repo"])]
    file: Option<PathBuf>,
    /// Model of Hugging Face's hub, also -hf: only its header is downloaded, unless it is in the cache
    #[arg(long, value_name = "ORG/REPO[:QUANT]", conflicts_with = "file")]
    hf_repo: Option<String>,
    /// Use models in the cache only [default: HF_HUB_OFFLINE]
    #[arg(long)]
    offline: bool,
    /// Folder of downloaded models
    #[arg(long, value_name = "FOLDER")]
    cache_dir: Option<PathBuf>,
    /// List the architectures that are supported, with well-known models of each
    #[arg(long, conflicts_with_all = ["file", "hf_repo", "tensors", "json"])]
    architectures: bool,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// Print all metadata and tensors as JSON
    #[arg(long)]
    json: bool,
}

/// Prints a summary of a model file, optionally with a table of its tensors, or everything as JSON.
pub(crate) fn inspect(arguments: &InspectArgs) -> Outcome {
    let mut out = BufWriter::new(io::stdout().lock());
    let mut folder = None;
    let hub_file = match &arguments.hf_repo {
        Some(name) => {
            let access =
                HubAccess { cache: arguments.cache_dir.as_deref(), offline: arguments.offline, quiet: true };
            let options = ModelOptions::detected(arguments.cache_dir.clone());
            let (path, kept) = access.header(name, &|outline| options.fits(outline))?;
            folder = kept;
            Some(path)
        }
        None => None,
    };
    let named = arguments.file.as_ref();
    let named =
        named.map(|path| fetch::model_path(path, arguments.cache_dir.as_deref(), true)).transpose()?;
    let Some(path) = named.as_ref().or(hub_file.as_ref()) else {
        print_architectures(&mut out)?;
        return Ok(out.flush()?);
    };
    let file = File::open(path).map_err(|error| match file_hint::hint(path) {
        Some(hint) => Failure::Message(format!("{error}; {hint}")),
        None => error.into(),
    })?;
    if arguments.json {
        print_json(&file, &mut out)?;
    } else {
        print_text(&file, arguments.tensors, &mut Escaping(&mut out))?;
    }
    drop(folder);
    Ok(out.flush()?)
}

fn print_text(file: &File, tensors: bool, out: &mut impl Write) -> io::Result<()> {
    write!(out, "{}", Summary::of(file))?;
    for (label, text) in details(file) {
        writeln!(out, "{label:<16} {text}")?;
    }
    if !tensors {
        return Ok(());
    }
    // Escaped, so that names cannot contain terminal control sequences.
    let name = |tensor: &Tensor<'_>| tensor.name().escape_debug().to_string();
    let width = file.tensors().map(|tensor| name(&tensor).chars().count()).max().unwrap_or(0).clamp(4, 60);
    writeln!(out, "\n{:width$}  {:8} {:>24} {:>14} {:>14}", "name", "type", "shape", "bytes", "offset")?;
    for tensor in file.tensors() {
        let (name, dtype, shape) = (name(&tensor), tensor.dtype(), tensor.shape().to_string());
        let (bytes, offset) = (tensor.byte_len(), tensor.offset());
        writeln!(out, "{name:width$}  {dtype:8} {shape:>24} {bytes:>14} {offset:>14}")?;
    }
    Ok(())
}

fn print_architectures(out: &mut impl Write) -> io::Result<()> {
    let mut names: Vec<&str> = models::architectures().collect();
    names.sort_unstable();
    for name in names {
        writeln!(out, "{name:<14} {}", models::known_models(name).unwrap_or_default())?;
    }
    Ok(())
}

/// Whether the model can be run, and what is special in its layers.
fn details(file: &File) -> Vec<(&'static str, String)> {
    let hyper = match models::hyperparameters(file) {
        Ok(hyper) => hyper,
        Err(Error::UnsupportedArchitecture { name, .. }) => {
            let text =
                format!("no: architecture {name:?} is not supported yet (see inspect --architectures)");
            return vec![("supported", text)];
        }
        Err(error) => return vec![("supported", format!("no: {error}"))],
    };
    let layers = hyper.layers.len();
    let count = |holds: &dyn Fn(&LayerShape) -> bool| {
        let found = hyper.layers.iter().filter(|layer| holds(layer)).count();
        format!("{found} of {}", plural(layers, "layer", "layers"))
    };
    let mut lines = vec![("supported", "yes".to_owned())];
    if hyper.encoder {
        lines.push(("encoder", "yes, for embeddings (quadriga embed)".to_owned()));
    }
    if let Some(pooling) = hyper.pooling {
        lines.push(("pooling", pooling.name().to_owned()));
    }
    if let Some(window) = hyper.window() {
        let layers = count(&|layer| layer.attention && layer.window.is_some());
        let kind = if hyper.chunked_windows { "attention chunks" } else { "sliding window" };
        lines.push((kind, format!("{window} tokens in {layers}")));
    }
    if let Some(experts) = hyper.layers.iter().find_map(|layer| layer.experts) {
        let shared = match experts.shared_width {
            0 => String::new(),
            width => format!(", and one of width {width} for all tokens"),
        };
        let layers = count(&|layer| layer.experts.is_some());
        lines.push((
            "experts",
            format!("{} of {} of width {}{shared}, in {layers}", experts.used, experts.count, experts.width),
        ));
    }
    if let Some(latent) = hyper.latent {
        let (rank, rotated) = (latent.rank, latent.rotated);
        let text = format!("rank {rank}, {rotated} rotated elements, cached as one vector");
        lines.push(("latent attention", text));
    }
    if let Some(shape) = &hyper.recurrent {
        let bytes = 4 * (shape.conv_state() + shape.linear_state()) as u64;
        let layers = count(&|layer| !layer.attention);
        lines.push(("recurrent", format!("{layers}, a state of {} each", size::text(bytes))));
    }
    lines
}

fn print_json(file: &File, out: &mut impl Write) -> io::Result<()> {
    let summary = Summary::of(file);
    let types: Map<_, _> = summary
        .types
        .iter()
        .map(|total| {
            let numbers =
                json!({ "tensors": total.tensors, "parameters": total.parameters, "bytes": total.bytes });
            (total.dtype.to_string(), numbers)
        })
        .collect();
    let tensors: Vec<_> = file
        .tensors()
        .map(|tensor| {
            json!({
                "name": tensor.name(),
                "type": tensor.dtype().name(),
                "shape": tensor.shape().dims(),
                "bytes": tensor.byte_len(),
                "offset": tensor.offset(),
                "part": tensor.part(),
            })
        })
        .collect();
    let metadata: Map<_, _> = file.metadata().map(|(key, value)| (key.to_owned(), to_json(value))).collect();
    let everything = json!({
        "version": summary.version,
        "alignment": file.alignment(),
        "parts": file.paths().map(|path| path.to_string_lossy()).collect::<Vec<_>>(),
        "file_bytes": summary.file_bytes,
        "architecture": summary.architecture,
        "details": details(file).into_iter().collect::<BTreeMap<_, _>>(),
        "name": summary.name,
        "quantization": summary.file_type,
        "parameters": summary.parameters,
        "tensor_bytes": summary.tensor_bytes,
        "types": types,
        "tokenizer": summary.tokenizer.map(|tokenizer| json!({
            "model": tokenizer.model,
            "pre": tokenizer.pre,
            "tokens": tokenizer.tokens,
            "merges": tokenizer.merges,
            "special": tokenizer.special.into_iter().collect::<BTreeMap<_, _>>(),
            "chat_template": tokenizer.chat_template,
        })),
        "metadata": metadata,
        "tensors": tensors,
    });
    writeln!(out, "{}", terminal::json(&serde_json::to_string_pretty(&everything)?))
}

/// A metadata value as JSON; NaN and infinities become null.
fn to_json(value: Value<'_>) -> serde_json::Value {
    match value {
        Value::U8(value) => value.into(),
        Value::I8(value) => value.into(),
        Value::U16(value) => value.into(),
        Value::I16(value) => value.into(),
        Value::U32(value) => value.into(),
        Value::I32(value) => value.into(),
        // Through its shortest decimal form: 0.1, not 0.10000000149011612.
        Value::F32(value) => value.to_string().parse::<f64>().map_or(serde_json::Value::Null, Into::into),
        Value::Bool(value) => value.into(),
        Value::String(value) => value.into(),
        Value::Array(array) => array.iter().map(to_json).collect(),
        Value::U64(value) => value.into(),
        Value::I64(value) => value.into(),
        Value::F64(value) => value.into(),
    }
}

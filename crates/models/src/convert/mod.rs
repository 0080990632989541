//! Safetensors folders to GGUF.
//!
//! A folder has `config.json`, one or several `.safetensors` files, and `tokenizer.json` or `tokenizer.model`. Its class in
//! `config.json` names a family (families/), which says what the keys and tensors of the GGUF file are made of. Before anything is
//! written, the result is compared with the tensors that the model's graph uses, so that nothing is missing, and nothing is
//! left over. Tensors are read, changed and written in pieces: memory does not grow with the model.

mod builder;
mod common;
mod config;
mod encode;
mod error;
mod families;
mod output;
mod peft;
mod plan;
mod safetensors;
mod source;
mod tokenizer;
mod write;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

pub use self::config::Config;
pub use self::encode::TargetType;
pub use self::error::{ConvertError, ConvertResult};
pub(crate) use self::peft::{is_peft, read_peft};
use self::plan::ConversionPlan;
pub use self::safetensors::{SafeTensor, SafeType, SafetensorsFile, parse_header};
pub use self::tokenizer::{ConvertedVocabulary, TokenKind, VocabularyToken, parse_tokenizer_json};

/// Options of a conversion.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// The type of the matrices [default: that of the safetensors files].
    pub target: Option<TargetType>,
    /// The name of the pre-tokenizer, where its rules are not recognised.
    pub pre_tokenizer: Option<String>,
    /// Whether the file gets a vocabulary.
    pub vocabulary: bool,
    /// `general.name` [default: the folder's name].
    pub name: Option<String>,
    /// The most bytes of memory that pieces of tensors take. A matrix that has to be transposed is read as a whole, by as many
    /// threads as there is memory for, at least one.
    pub memory: u64,
    /// How many threads convert.
    pub threads: usize,
}

impl Default for ConvertOptions {
    fn default() -> ConvertOptions {
        ConvertOptions {
            target: None,
            pre_tokenizer: None,
            vocabulary: true,
            name: None,
            memory: 512 << 20,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// The progress of a conversion, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvertProgress<'a> {
    /// The tensor that is written.
    pub tensor: &'a str,
    /// Elements written so far.
    pub done: u64,
    /// All elements.
    pub total: u64,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConvertReport {
    /// The architecture's name in GGUF files.
    pub architecture: &'static str,
    /// The number of tensors.
    pub tensors: usize,
    /// What the user should know about the result.
    pub notes: Vec<String>,
}

/// A function that is told of progress; returning `Break` ends the conversion and leaves no file.
pub type ConvertObserver<'a> = dyn FnMut(ConvertProgress<'_>) -> ControlFlow<()> + 'a;

/// Converts the model in a folder to a GGUF file, which replaces `output` only when it is complete.
///
/// ```no_run
/// use std::ops::ControlFlow;
/// use quadriga_models::convert::{ConvertOptions, convert};
///
/// let options = ConvertOptions::default();
/// convert("SmolLM2-135M".as_ref(), "model.gguf".as_ref(), &options, &mut |_| ControlFlow::Continue(()))?;
/// # Ok::<(), quadriga_models::convert::ConvertError>(())
/// ```
pub fn convert(
    folder: &Path,
    output: &Path,
    options: &ConvertOptions,
    observer: &mut ConvertObserver<'_>,
) -> ConvertResult<ConvertReport> {
    crate::check_output(output, sources(folder))?;
    let mut plan = ConversionPlan::new(folder, options)?;
    let notes = std::mem::take(&mut plan.notes);
    let report = ConvertReport { architecture: plan.architecture, tensors: plan.tensors.len(), notes };
    write::write(plan, output, options, observer)?;
    Ok(report)
}

/// The files of a folder, and of those in it; GGUF files are results of earlier conversions.
fn sources(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let list = |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
    let inner = move |path: PathBuf| if path.is_dir() { list(&path).collect() } else { vec![path] };
    let all = list(folder).flat_map(inner);
    all.filter(|path| path.extension().is_none_or(|end| end != "gguf"))
}

/// The classes of `config.json` that can be converted, with the architecture of each.
pub fn classes() -> impl Iterator<Item = (&'static str, &'static str)> {
    families::classes()
}

//! Errors of conversion: each names the file and the place in it.

use std::io;
use std::path::{Path, PathBuf};

/// The result of functions of this module.
pub type ConvertResult<T> = Result<T, ConvertError>;

/// Why a model could not be converted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum ConvertError {
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{} is not a folder with config.json and .safetensors files", path.display())]
    NotAModel { path: PathBuf },
    #[error("{file}, {place}: {reason}")]
    Invalid { file: String, place: String, reason: String },
    #[error("{file} has no {key}, which models of architecture {architecture} need")]
    MissingKey { file: String, key: String, architecture: String },
    #[error(
        "architecture {name:?} of config.json is not supported: there is no table of its tensors; known are {}",
        known.join(", ")
    )]
    Architecture { name: String, known: Vec<&'static str> },
    #[error("config.json: {key} is {value}, which is not supported for architecture {architecture}")]
    Unsupported { key: String, value: String, architecture: String },
    #[error(
        "tensor {name:?} has no place in architecture {architecture}; the model has more than its configuration says"
    )]
    UnknownTensor { name: String, architecture: String },
    #[error("tensor {name:?} of architecture {architecture} is missing")]
    MissingTensor { name: String, architecture: String },
    #[error("tensor {name:?} should have the shape {expected}, but has {found:?}")]
    Shape { name: String, expected: String, found: Vec<usize> },
    #[error("{} is no regular file, but a pipe, device or folder", path.display())]
    NotRegular { path: PathBuf },
    #[error(
        "the tokenizer has {tokens} tokens, but the embedding only {rows} rows: token {id}, {text:?}, has none; the \
         tokenizer belongs to another model, or the embedding was not resized when tokens were added"
    )]
    TokensBeyondRows { tokens: usize, rows: usize, id: usize, text: String },
    #[error("the tokenizer is not supported: {missing}")]
    Tokenizer { missing: String },
    #[error(
        "the pre-tokenizer is unknown: {rules}; --pre NAME names one that splits text in the same way ({known})"
    )]
    PreTokenizer { rules: String, known: String },
    #[error(transparent)]
    Gguf(#[from] quadriga_gguf::Error),
    #[error(transparent)]
    Model(#[from] quadriga_llm::Error),
    #[error(transparent)]
    Output(#[from] crate::OutputIsInput),
    #[error("tensor {tensor:?} has values that are not finite (first in row {row}): the files are damaged")]
    NotFinite { tensor: String, row: usize },
    #[error(
        "tensor {tensor:?} has the value {value} in row {row}, which {dtype} cannot hold; convert to BF16 or F32"
    )]
    Overflow { tensor: String, row: usize, value: f32, dtype: quadriga_graph::DType },
    #[error("cancelled")]
    Cancelled,
}

/// Whether there is a file of this name; an error if it is no regular one, which is not opened: a pipe would wait for its
/// writer, and a device may have no end.
pub(super) fn is_regular(path: &Path) -> ConvertResult<bool> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => Ok(true),
        Ok(_) => Err(ConvertError::NotRegular { path: path.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(ConvertError::Io { action: "read", path: path.to_owned(), source }),
    }
}

/// An error at a place of a file.
pub(super) fn invalid(
    file: impl Into<String>,
    place: impl Into<String>,
    reason: impl Into<String>,
) -> ConvertError {
    ConvertError::Invalid { file: file.into(), place: place.into(), reason: reason.into() }
}

/// An error of the file system.
pub(super) fn io_error(
    action: &'static str,
    path: impl Into<PathBuf>,
) -> impl FnOnce(io::Error) -> ConvertError {
    let path = path.into();
    move |source| ConvertError::Io { action, path, source }
}

//! Errors of importance matrices.

use std::path::PathBuf;

/// Why an importance matrix could not be read, merged or computed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum ImportanceError {
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} is no importance matrix: {place}: {reason}", path.display())]
    Format { path: PathBuf, place: String, reason: String },
    #[error(
        "the importance matrices of tensor {tensor:?} have {ours} and {theirs} numbers: they belong to different models"
    )]
    Merge { tensor: String, ours: usize, theirs: usize },
    #[error("{} cannot be continued: it is of {what}; choose another file with -o", path.display())]
    OtherText { path: PathBuf, what: String },
    #[error(
        "{} cannot be continued: it does not say with which chunk of the text it begins; --from-chunk N says it, 0 for the first",
        path.display()
    )]
    UnknownStart { path: PathBuf },
    #[error("the text has {found} tokens; one chunk needs {expected}")]
    ShortText { found: usize, expected: usize },
    #[error(
        "the activations of tensor {tensor:?} are not finite: the model is damaged, or its context is too long"
    )]
    NotFinite { tensor: String },
    #[error("cancelled")]
    Cancelled,
}

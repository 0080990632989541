//! The crate's error: one variant per module, each with an error of its own.

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model file could not be got, converted, quantized or judged.
///
/// Each module has an error type of its own, which this one wraps.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A model file could not be read or written.
    #[error(transparent)]
    Gguf(#[from] quadriga_gguf::Error),
    /// A model could not be opened or run.
    #[error(transparent)]
    Model(#[from] quadriga_llm::Error),
}

//! The crate's error: one variant per module, each with an error of its own in a file here.

mod importance;
mod quality;
mod quantize;

pub use importance::ImportanceError;
pub use quality::QualityError;
pub use quantize::QuantizeError;

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
    /// A file could not be quantized.
    #[error(transparent)]
    Quantize(#[from] QuantizeError),
    /// Models could not be judged.
    #[error(transparent)]
    Quality(#[from] QualityError),
    /// An importance matrix could not be read, merged or computed.
    #[error(transparent)]
    Importance(#[from] ImportanceError),
    /// The output is one of the inputs.
    #[error(transparent)]
    Output(#[from] crate::OutputIsInput),
    /// A model could not be got from a hub.
    #[error(transparent)]
    Hub(#[from] crate::hub::HubError),
}

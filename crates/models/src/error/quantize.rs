//! Errors of quantization.

use std::path::PathBuf;

use quadriga_graph::DType;

/// Why a file could not be quantized.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum QuantizeError {
    #[error("type {name:?} is unknown: {known}")]
    UnknownType { name: String, known: String },
    #[error(
        "tensor {tensor:?} is already {dtype}; quantizing it again loses quality, --allow-requantize does it"
    )]
    Requantize { tensor: String, dtype: DType },
    #[error("tensor {tensor:?} has the type {dtype}, which cannot be dequantized")]
    NotComputable { tensor: String, dtype: DType },
    #[error("no tensor can be quantized to {dtype}")]
    NotATarget { dtype: DType },
    #[error("tensor {tensor:?} has values that are not finite (first in row {row}): the file is damaged")]
    NotFinite { tensor: String, row: usize },
    #[error("{text:?} is not REGEX=TYPE: {reason}")]
    TensorType { text: String, reason: String },
    #[error("{text:?} is not KEY=TYPE:VALUE: {reason}")]
    Override { text: String, reason: String },
    #[error("the value for {key} does not fit in its type, {kind}")]
    OverrideType { key: String, kind: quadriga_gguf::ValueType },
    #[error(
        "the importance matrix has {found} numbers for tensor {tensor:?}, which has {expected} columns in {matrices} \
         matrices: it was computed with another model"
    )]
    Importance { tensor: String, found: usize, expected: usize, matrices: usize },
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} has changed while it was being quantized; start again", path.display())]
    Changed { path: PathBuf },
    #[error(
        "the model needs at least {smallest} bytes with the smallest types, more than the {limit} that it must fit in"
    )]
    TooSmall { smallest: u64, limit: u64 },
    #[error("--keep-split needs an output name that ends in .gguf, not {}", path.display())]
    SplitName { path: PathBuf },
    #[error(
        "tensor {tensor:?} has the value {value} in row {row}, which {dtype} cannot hold; BF16 and F32 can: \
         --tensor-type {tensor}=BF16"
    )]
    Overflow { tensor: String, row: usize, value: f32, dtype: DType },
    #[error("{text:?} is no list of layers: {reason}")]
    Prune { text: String, reason: String },
    #[error("layer {layer} cannot be pruned: the model has the layers 0 to {last}")]
    PrunedLayer { layer: usize, last: usize },
    #[error("all {layers} layers would be pruned; a model needs at least one")]
    PrunedAll { layers: usize },
    #[error("the input has no tensor {name:?}: the plan is that of another file")]
    OtherFile { name: String },
    #[error("cannot {action} {}: {source}", path.display())]
    Part { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error("cancelled")]
    Cancelled,
}

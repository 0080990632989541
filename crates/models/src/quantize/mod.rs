//! Quantizes model files: block formats, mixes of types, and types chosen to fit a size.
//!
//! [`QuantizePlan`] decides the type of every tensor, [`quantize_file`] computes and writes. The searches for scales are in
//! [`quantize_rows`], for one type at a time.

mod file_type;
mod fit;
mod kernels;
mod mix;
mod options;
mod pipeline;
mod plan;
mod prune;
mod range;
mod rows;
mod sensitivity;
mod write;

pub use crate::error::QuantizeError;
pub use file_type::FileType;
pub use fit::{FitBasis, fit};
pub use kernels::{Instructions, is_target, quantize_rows, quantize_rows_with};
pub use mix::{Mix, MixModel, fallback, is_quantizable};
pub use options::{QuantizeOptions, TensorType, parse_override, parse_type};
pub use plan::{QuantizePlan, TensorPlan};
pub use prune::PrunedLayers;
pub(crate) use range::{RowsError, check_range, quantize_in_range};
pub(crate) use rows::{RowReader, first_not_finite, squared_error};
pub use sensitivity::Sensitivities;
pub use write::{QuantizeHooks, WrittenTensor, output_paths, quantize_file};

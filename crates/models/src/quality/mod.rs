//! Judges models: perplexity, KL divergence and error per tensor.

mod page;
mod statistics;
mod tensors;
mod text;
mod vocabulary;

pub use crate::error::QualityError;
pub use page::error_page;
pub use statistics::Estimate;
pub use tensors::{TensorError, UnpairedTensors, compare_tensors};
pub use text::{Perplexity, ScoredTokens, TextComparison, chunk_tokens, compare_texts, perplexity};
pub use vocabulary::check_vocabularies;

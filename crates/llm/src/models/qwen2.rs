//! Qwen 2: Llama's layers, with biases on queries, keys and values (added wherever a file has them) and RoPE that pairs
//! the two halves of a head (set in the hyperparameters by architecture).

use super::builder::ModelBuilder;
use super::llama;
use crate::Result;

pub(super) fn build(model: &ModelBuilder<'_>) -> Result<()> {
    llama::build(model)
}

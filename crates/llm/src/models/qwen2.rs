//! Qwen 2: Llama's blocks, with biases on queries, keys and values (which every part takes where a file has them)
//! and the two halves of a head turned together (which the file's architecture decides).

use super::llama;
use super::parts::Parts;
use crate::Result;

pub(super) fn build(model: &Parts<'_>) -> Result<()> {
    llama::build(model)
}

//! Qwen 3 (dense): Llama's layers, with an RMS norm of each query and key head before RoPE.

use quadriga_graph::{Gate, Pairing};

use super::architecture::Architecture;
use super::builder::ModelBuilder;
use super::llama;
use crate::Result;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "qwen3",
    models: "Qwen 3 (dense), Qwen3 Embedding",
    pairing: Pairing::Half,
    read: llama::read_dense,
    build,
    ..llama::ARCHITECTURE
};

fn build(model: &ModelBuilder<'_>) -> Result<()> {
    let mut x = model.embed()?;
    for layer in model.layers() {
        let normed = layer.norm("attn_norm", x)?;
        let (query, key, value) = layer.query_key_value(normed)?;
        let query = layer.rope(layer.norm("attn_q_norm", query)?);
        let key = layer.rope(layer.norm("attn_k_norm", key)?);
        x = layer.output_rows(x);
        let Some(attended) = layer.attention(query, key, value)? else { return Ok(()) };
        x = layer.residual(x, attended);
        let normed = layer.norm("ffn_norm", x)?;
        x = layer.residual(x, layer.feed_forward(normed, Gate::Swiglu)?);
    }
    model.finish(x)
}

//! Qwen 3: Llama's layers, with an RMS norm of each query and key head before RoPE.

use super::builder::ModelBuilder;
use crate::Result;

pub(super) fn build(model: &ModelBuilder<'_>) -> Result<()> {
    let mut x = model.embed();
    for layer in model.layers() {
        let normed = layer.norm("attn_norm", x)?;
        let (query, key, value) = layer.query_key_value(normed)?;
        let query = layer.rope(layer.head_norm("attn_q_norm", query)?)?;
        let key = layer.rope(layer.head_norm("attn_k_norm", key)?)?;
        let Some((attended, residual)) = layer.attention(query, key, value, x)? else { return Ok(()) };
        x = residual.add(attended);
        let normed = layer.norm("ffn_norm", x)?;
        x = x.add(layer.gated_feed_forward(normed)?);
    }
    model.finish(x)
}

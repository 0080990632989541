//! Llama: pre-norm layers of grouped-query attention and a gated feed-forward network.

use super::builder::ModelBuilder;
use crate::Result;

pub(super) fn build(model: &ModelBuilder<'_>) -> Result<()> {
    let mut x = model.embed();
    for layer in model.layers() {
        let normed = layer.norm("attn_norm", x)?;
        let (query, key, value) = layer.query_key_value(normed)?;
        let query = layer.rope(query)?;
        let key = layer.rope(key)?;
        let Some((attended, residual)) = layer.attention(query, key, value, x)? else { return Ok(()) };
        x = residual.add(attended);
        let normed = layer.norm("ffn_norm", x)?;
        x = x.add(layer.gated_feed_forward(normed)?);
    }
    model.finish(x)
}

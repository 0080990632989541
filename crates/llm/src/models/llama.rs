//! Llama: pre-norm blocks of grouped-query attention and a gated feed-forward layer.

use super::parts::Parts;
use crate::Result;

pub(super) fn build(model: &Parts<'_>) -> Result<()> {
    let mut x = model.embed();
    for block in model.blocks() {
        let normed = block.norm("attn_norm", x)?;
        let (query, key, value) = block.query_key_value(normed)?;
        let query = block.rope(query)?;
        let key = block.rope(key)?;
        let Some((attended, residual)) = block.attention(query, key, value, x)? else { return Ok(()) };
        x = residual.add(attended);
        let normed = block.norm("ffn_norm", x)?;
        x = x.add(block.gated_feed_forward(normed)?);
    }
    model.finish(x)
}

//! Qwen 3: Llama's blocks, with each query and key head brought to unit root mean square before it is turned.

use super::parts::Parts;
use crate::Result;

pub(super) fn build(model: &Parts<'_>) -> Result<()> {
    let mut x = model.embed();
    for block in model.blocks() {
        let normed = block.norm("attn_norm", x)?;
        let (query, key, value) = block.query_key_value(normed)?;
        let query = block.rope(block.head_norm("attn_q_norm", query)?)?;
        let key = block.rope(block.head_norm("attn_k_norm", key)?)?;
        let Some((attended, residual)) = block.attention(query, key, value, x)? else { return Ok(()) };
        x = residual.add(attended);
        let normed = block.norm("ffn_norm", x)?;
        x = x.add(block.gated_feed_forward(normed)?);
    }
    model.finish(x)
}

//! The size of a KV cache in pages, where no option says it.

use quadriga_graph::PAGE_SLOTS;

/// Tokens of the KV cache, all sequences together, unless `--kv-tokens` says otherwise.
pub(crate) const DEFAULT_TOKENS: usize = 16_384;

/// The pages of a KV cache for so many sequences of up to `context` tokens.
pub(crate) fn pages_of(context: usize, parallel: usize, kv_tokens: Option<usize>) -> usize {
    let all = context.saturating_mul(parallel);
    kv_tokens.unwrap_or_else(|| all.min(DEFAULT_TOKENS.max(context))).div_ceil(PAGE_SLOTS)
}

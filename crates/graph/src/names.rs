//! Tensor names that carry meaning: GGUF's convention for the layers of a model.

/// The layer that a tensor belongs to by its name: weights, state and nodes of layer 3 are called `blk.3` or `blk.3.…`,
/// as in GGUF files.
///
/// ```
/// use quadriga_graph::layer_of;
///
/// assert_eq!(layer_of("blk.3.attn_q.weight"), Some(3));
/// assert_eq!(layer_of("output.weight"), None);
/// ```
pub fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

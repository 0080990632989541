//! Rows of a model's KV caches and recurrent states: the memory that ranks divide beside the weights.

use quadriga_graph::DType;

use super::{Hyperparameters, LayerShape, RecurrentShape};

/// The limit for a context size that comes from the model file: the KV cache is allocated for all of it.
pub(crate) const DEFAULT_CONTEXT: usize = 4096;

/// The rows that each layer remembers tokens by, and their types.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CacheRows {
    /// KV-cache slots of layers that keep the whole context.
    pub full: usize,
    /// Those of layers with a sliding window.
    pub windows: usize,
    /// States of recurrent layers.
    pub states: usize,
    /// The element type of keys.
    pub keys: DType,
    /// The element type of values.
    pub values: DType,
}

impl CacheRows {
    /// Those of one sequence with the default context, where nothing else is known. Layers with a window have no more than it.
    pub(crate) fn of_one_sequence(hyper: &Hyperparameters) -> CacheRows {
        let full = hyper.context.min(DEFAULT_CONTEXT);
        let windows = hyper.window().map_or(full, |window| window.min(full));
        CacheRows { full, windows, states: 1, keys: DType::F16, values: DType::F16 }
    }

    /// Bytes of a layer's KV cache, or of its states.
    pub(crate) fn layer_bytes(&self, hyper: &Hyperparameters, layer: &LayerShape) -> f64 {
        if hyper.encoder || layer.shares_cache_of.is_some() {
            return 0.0;
        }
        if !layer.attention {
            let state = |shape: &RecurrentShape| shape.conv_state() + shape.linear_state();
            let elements = hyper.recurrent.as_ref().map_or(0, state);
            return self.states as f64 * (elements * size_of::<f32>()) as f64;
        }
        let bytes = |dtype: DType, width: usize| dtype.row_bytes(width).unwrap_or(0) as f64;
        // Keys and values of latent attention are made of one vector.
        let values = match hyper.has_latent_cache() {
            true => 0.0,
            false => bytes(self.values, layer.value_width()),
        };
        let rows = if layer.window.is_some() { self.windows } else { self.full };
        rows as f64 * (bytes(self.keys, layer.key_width()) + values)
    }
}

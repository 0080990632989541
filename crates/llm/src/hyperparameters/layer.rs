//! Everything that may differ from layer to layer.

use quadriga_graph::Rope;

use super::experts::Experts;
use super::keys::{Keys, MAX_COUNT};
use crate::Result;

/// The shape of one layer.
#[derive(Clone, PartialEq, Debug)]
pub struct LayerShape {
    /// Whether the layer has attention, and thus a part of the KV cache.
    pub attention: bool,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of a query or key head.
    pub key_length: usize,
    /// Elements of a value head.
    pub value_length: usize,
    /// The width of the dense feed-forward network; 0 if there is none.
    pub feed_forward: usize,
    /// The mixture of experts that takes the place of a dense feed-forward network, if there is one.
    pub experts: Option<Experts>,
    /// Standard deviations above the mean up to which the gates of the feed-forward network count as 0, if they are cut.
    pub gate_cut: Option<f32>,
    /// The size of the sliding attention window, if there is one: the number of positions that a query attends to, up
    /// to its own. It is the same in all layers that have one.
    pub window: Option<usize>,
    /// The layer whose keys and values this one attends to, if it has no KV cache of its own.
    pub shares_cache_of: Option<usize>,
    /// Rotary position embedding of queries and keys, if there is one.
    pub rope: Option<Rope>,
}

/// What some layers remember tokens by: their graph has inputs for each of these.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct LayerCaches {
    /// KV caches of all positions.
    pub(crate) full: bool,
    /// KV caches of layers with a sliding window.
    pub(crate) windows: bool,
    /// Recurrent states.
    pub(crate) recurrent: bool,
}

impl LayerShape {
    /// Elements of one token's queries.
    pub fn query_width(&self) -> usize {
        self.heads * self.key_length
    }

    /// Elements of one token's keys.
    pub fn key_width(&self) -> usize {
        self.kv_heads * self.key_length
    }

    /// Elements of one token's values.
    pub fn value_width(&self) -> usize {
        self.kv_heads * self.value_length
    }

    /// An error unless the layer's attention is possible; `width` is the embedding length.
    pub(super) fn check(&self, keys: &Keys<'_>, width: usize) -> Result<()> {
        if !self.attention {
            return Ok(());
        }
        let LayerShape { heads, kv_heads, .. } = *self;
        let holds = (1..=width).contains(&heads);
        keys.check("attention.head_count", heads, holds, "at least 1 and at most the embedding length")?;
        let divides = kv_heads > 0 && heads.is_multiple_of(kv_heads);
        keys.check("attention.head_count_kv", kv_heads, divides, "a divisor of the head count")?;
        for (key, length) in
            [("attention.key_length", self.key_length), ("attention.value_length", self.value_length)]
        {
            keys.check(key, length, length > 0, "at least 1")?;
            let product = heads as u64 * length as u64;
            let wanted = "smaller: the product of heads and head length is too large";
            keys.check(key, length, product <= MAX_COUNT, wanted)?;
        }
        Ok(())
    }
}

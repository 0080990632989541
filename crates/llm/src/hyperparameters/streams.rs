//! Keys of Gemma 3n: parallel residual streams, inputs of each layer, gates that are cut, and layers without a KV cache of
//! their own.

use super::Hyperparameters;
use super::keys::{Keys, MAX_COUNT};
use crate::Result;

/// Several residual streams, of which a layer computes the first and predicts the others (AltUp).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ParallelStreams {
    /// The number of streams; at least 2.
    pub count: usize,
    /// Elements of the vector that each layer has of a token besides.
    pub layer_input: usize,
    /// The rank of the matrix beside attention (LAuReL).
    pub laurel_rank: usize,
}

/// The number of streams where the file has none.
const STREAMS: usize = 4;
/// The width of a layer's inputs where the file has none.
const LAYER_INPUT: usize = 256;
/// The rank of LAuReL's matrices in all models.
const LAUREL_RANK: usize = 64;
/// Layers with a KV cache of their own where the file does not say how many share one.
const OWN_CACHES: usize = 20;
/// Layers whose gates are cut, and at how many standard deviations, where the file has none: 95 % of them become 0.
const CUT_LAYERS: usize = 10;
const CUT: f32 = 1.644_853_4;

impl Hyperparameters {
    /// Reads the shape of the streams.
    pub(crate) fn read_streams(&mut self, keys: &Keys<'_>) -> Result<()> {
        let key = "altup.num_inputs";
        let count = keys.find_count(key)?.unwrap_or(STREAMS);
        keys.check(key, count, (2..=16).contains(&count), "from 2 to 16")?;
        let key = "altup.active_idx";
        let active = keys.find_count_or_zero(key)?.unwrap_or(0);
        keys.check(key, active, active == 0, "0")?;
        let key = "embedding_length_per_layer_input";
        let layer_input = keys.find_count(key)?.unwrap_or(LAYER_INPUT);
        let fits = layer_input as u64 * self.layers.len() as u64 <= MAX_COUNT;
        keys.check(key, layer_input, fits, "smaller: the inputs of all layers are too many")?;
        self.streams = Some(ParallelStreams { count, layer_input, laurel_rank: LAUREL_RANK });
        Ok(())
    }

    /// Reads how far each layer's gates are cut.
    pub(crate) fn read_gate_cuts(&mut self, keys: &Keys<'_>) -> Result<()> {
        let key = "activation_sparsity_scale";
        let cuts = keys.find_floats(key, self.blocks)?;
        for (index, layer) in self.layers.iter_mut().enumerate() {
            layer.gate_cut = match &cuts {
                None => (index < CUT_LAYERS).then_some(CUT),
                Some(cuts) => {
                    let cut = cuts.get(index).copied().unwrap_or(0.0);
                    if cut.is_nan() || cut == f32::INFINITY {
                        return Err(keys.wrong(
                            key,
                            cut,
                            "finite, or at most 0 for layers whose gates are not cut",
                        ));
                    }
                    Some(cut).filter(|cut| *cut > 0.0)
                }
            };
        }
        Ok(())
    }

    /// Reads which layers attend to the keys and values of an earlier one: the last of their kind, with a window or without,
    /// that has a KV cache of its own. The windows must be known.
    pub(crate) fn read_shared_caches(&mut self, keys: &Keys<'_>) -> Result<()> {
        let (key, layers) = ("attention.shared_kv_layers", self.layers.len());
        let shared = keys.find_count_or_zero(key)?.unwrap_or(layers.saturating_sub(OWN_CACHES));
        keys.check(key, shared, shared < layers, "smaller than the number of layers")?;
        let own = layers - shared;
        for index in own..layers {
            let has_window =
                |layer: usize| self.layers.get(layer).is_some_and(|layer| layer.window.is_some());
            let source = (0..own).rev().find(|earlier| has_window(*earlier) == has_window(index));
            let wanted = "smaller: no earlier layer has such a window";
            keys.check(key, shared, source.is_some(), wanted)?;
            if let Some(layer) = self.layers.get_mut(index) {
                layer.shares_cache_of = source;
            }
        }
        Ok(())
    }

    /// The number of layers up to the last that remembers tokens: later ones need no token that is not an output.
    pub(crate) fn remembering_layers(&self) -> usize {
        let own = self.layers.iter().rposition(|layer| layer.shares_cache_of.is_none());
        own.map_or(0, |last| last + 1)
    }
}

//! What ranks divide: the weights of each layer, and its KV cache or states.

use std::ops::Range;

use quadriga_gguf::{File, Tensor};

use super::layer_parts::{bytes_of, refused};
use super::stages::{LayerCost, balanced_stages};
use super::step_load::{StepLoad, WeightWork, slot_bytes};
use crate::Result;
use crate::hyperparameters::{CacheRows, Hyperparameters, LayerShape};

/// The weights of a layer.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub(super) struct LayerWeights {
    /// Bytes in memory.
    pub(super) held: f64,
    work: WeightWork,
}

impl LayerWeights {
    /// Bytes that a token reads, of experts those that it uses.
    pub(super) fn read(&self) -> f64 {
        self.work.read(1.0)
    }
}

/// A model before it is divided, with the bytes of its layers.
#[derive(Debug)]
pub(crate) struct WholeModel<'a> {
    pub(super) file: &'a File,
    pub(super) hyper: &'a Hyperparameters,
    /// The weights of each layer.
    pub(super) weights: Vec<LayerWeights>,
    /// Bytes of each layer's KV cache or states.
    pub(super) caches: Vec<f64>,
}

impl<'a> WholeModel<'a> {
    pub(crate) fn new(file: &'a File, hyper: &'a Hyperparameters, cache: &CacheRows) -> WholeModel<'a> {
        let mut weights = vec![LayerWeights::default(); hyper.layers.len()];
        for tensor in file.tensors() {
            let layer = tensor
                .name()
                .strip_prefix("blk.")
                .and_then(|name| name.split_once('.')?.0.parse::<usize>().ok());
            let shape = layer.and_then(|layer| hyper.layers.get(layer));
            let used =
                |shape: &LayerShape| shape.experts.map_or(1.0, |of| of.used as f64 / of.count.max(1) as f64);
            let share = shape.filter(|_| tensor.name().contains("_exps.")).map(used);
            let Some(LayerWeights { held, work }) = layer.and_then(|layer| weights.get_mut(layer)) else {
                continue;
            };
            let bytes = tensor.byte_len() as f64;
            *held += bytes;
            work.operations += share.unwrap_or(1.0) * operations(&tensor);
            match share {
                Some(used) => (work.experts, work.used) = (work.experts + bytes, used),
                None => work.dense += bytes,
            }
        }
        let caches = hyper.layers.iter().map(|layer| cache.layer_bytes(hyper, layer)).collect();
        WholeModel { file, hyper, weights, caches }
    }

    /// Bytes of the embedding, and of the output matrix, which may be the embedding.
    fn matrices(&self) -> (f64, f64) {
        let head = head_tensor(self.file).map_or(0.0, |head| head.byte_len() as f64);
        (bytes_of(self.file, "token_embd.weight"), head)
    }

    /// Whether the output matrix is the embedding.
    pub(super) fn is_tied(&self) -> bool {
        self.file.find_tensor("output.weight").is_none()
    }

    /// Bytes of the embedding and of the output matrix that the first and the last of the stages hold.
    pub(super) fn held_matrices(&self, is_first: bool, is_last: bool) -> f64 {
        let (embedding, head) = self.matrices();
        let again = if is_first && self.is_tied() { 0.0 } else { head };
        (if is_first { embedding } else { 0.0 }) + if is_last { again } else { 0.0 }
    }

    /// How many times as many bytes of some layers' weights so many tokens read at once as one does: more experts, and else no more.
    pub(super) fn growth(&self, layers: &Range<usize>, tokens: f64) -> f64 {
        let layers = self.weights.get(layers.clone()).unwrap_or_default();
        let read = |tokens: f64| layers.iter().map(|layer| layer.work.read(tokens)).sum::<f64>();
        match read(1.0) {
            one if one > 0.0 => read(tokens) / one,
            _ => 1.0,
        }
    }

    /// How many times as much the operations of some layers cost for each of so many tokens at once as for one alone.
    pub(super) fn slowness(&self, layers: &Range<usize>, tokens: f64) -> f64 {
        let layers = self.weights.get(layers.clone()).unwrap_or_default();
        let of = |tokens: f64| layers.iter().map(|layer| layer.work.arithmetic(tokens)).sum::<f64>();
        match of(1.0) {
            one if one > 0.0 => of(tokens) / one,
            _ => 1.0,
        }
    }

    /// Weights, KV cache and states of some layers.
    pub(super) fn held(&self, layers: &Range<usize>) -> f64 {
        let weights = self.weights.get(layers.clone()).unwrap_or_default().iter().map(|layer| layer.held);
        weights.chain(self.caches.get(layers.clone()).unwrap_or_default().iter().copied()).sum()
    }

    /// Weights, KV cache and states of the whole model, on one rank.
    pub(super) fn all_held(&self) -> f64 {
        self.held(&(0..self.weights.len())) + self.held_matrices(true, true)
    }

    /// The layers of each stage of a pipeline, balanced by the time that a step takes, the bytes of their tensors and caches, and the stages'
    /// speeds: the first stage has the embedding, too, and the last one the output matrix.
    pub(super) fn layer_ranges(&self, speeds: &[f64], load: &StepLoad) -> Result<Vec<Range<usize>>> {
        let (hyper, size) = (self.hyper, speeds.len());
        let count = hyper.layers.len();
        if size == 1 {
            return Ok(std::iter::once(0..count).collect());
        }
        if hyper.encoder {
            return Err(refused(format!("encoders such as {} run on one rank", hyper.architecture)));
        }
        if hyper.streams.is_some() || hyper.layers.iter().any(|layer| layer.shares_cache_of.is_some()) {
            return Err(refused(format!("the layers of {} cannot be divided", hyper.architecture)));
        }
        if count < size {
            return Err(refused(format!("{count} layers for {size} stages")));
        }
        let (embedding, head) = self.matrices();
        let work = WeightWork {
            dense: head,
            operations: head_tensor(self.file).as_ref().map_or(0.0, operations),
            ..WeightWork::default()
        };
        // Of the embedding, a token reads a row.
        let ends =
            (LayerCost { time: 0.0, held: embedding }, LayerCost { time: load.results(&work), held: head });
        let cost = |((weights, cache), shape): ((&LayerWeights, &f64), &LayerShape)| LayerCost {
            time: load.weights(&weights.work) + load.cache(slot_bytes(shape)),
            held: weights.held + cache,
        };
        let layers: Vec<LayerCost> =
            self.weights.iter().zip(&self.caches).zip(&hyper.layers).map(cost).collect();
        Ok(balanced_stages(&layers, ends, self.all_held(), speeds))
    }
}

/// Operations of a product with a tensor for each token.
fn operations(tensor: &Tensor<'_>) -> f64 {
    2.0 * tensor.element_count() as f64
}

/// The output matrix, which may be the embedding.
pub(super) fn head_tensor(file: &File) -> Option<Tensor<'_>> {
    file.find_tensor("output.weight").or_else(|| file.find_tensor("token_embd.weight"))
}

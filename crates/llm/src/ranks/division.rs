//! Which heads, feed-forward columns, experts, vocabulary rows or layers each rank has.
//!
//! Boundaries are at whole blocks of quantized rows; between those, work is balanced by the bytes of the weights.

use std::ops::Range;

use quadriga_gguf::File;

use super::Cut;
use super::stages::{LayerBytes, balanced_stages};
use crate::hyperparameters::{Hyperparameters, LayerShape};
use crate::{Error, Result};

/// Architectures whose layers consist of the parts that [`TensorDivision::cut`] names.
const DIVISIBLE: &[&str] =
    &["llama", "qwen2", "qwen3", "gemma", "granite", "smollm3", "qwen2moe", "qwen3moe", "granitemoe"];

/// Vocabulary rows that stay together: those that the CPU backend packs as a group.
const ROW_GROUP: usize = 16;

/// A rank's part of every layer of a stage.
#[derive(Debug)]
pub(super) struct TensorDivision {
    rank: usize,
    layers: Vec<LayerDivision>,
    /// The vocabulary rows of each rank.
    vocabulary: Vec<Range<usize>>,
    /// The bytes of the stage's layers that a token reads on the rank that reads most.
    heaviest: f64,
}

/// A rank's part of a layer.
#[derive(Debug)]
struct LayerDivision {
    /// The whole layer.
    shape: LayerShape,
    kv_heads: Range<usize>,
    /// Columns of the dense feed-forward network, or of the expert that all tokens use.
    feed_forward: Range<usize>,
    /// Those of the other experts that the rank has.
    experts: Range<usize>,
}

fn refused(reason: impl Into<String>) -> Error {
    Error::Ranks { reason: reason.into() }
}

impl TensorDivision {
    pub(super) fn new(
        file: &File,
        hyper: &Hyperparameters,
        stage: &Range<usize>,
        rank: usize,
        size: usize,
    ) -> Result<TensorDivision> {
        check(file, hyper)?;
        let mut loads = vec![0.0; size];
        let mut layers = Vec::new();
        for (index, shape) in hyper.layers.iter().enumerate() {
            let mut elsewhere = vec![0.0; size];
            let loads = if stage.contains(&index) { &mut loads } else { &mut elsewhere };
            let [heads, columns, experts] = divide_layer(file, index, shape, size, loads)?;
            let part = |ranges: &[Range<usize>]| ranges.get(rank).cloned().unwrap_or_default();
            layers.push(LayerDivision {
                shape: shape.clone(),
                kv_heads: part(&heads),
                feed_forward: part(&columns),
                experts: part(&experts),
            });
        }
        let head =
            if file.find_tensor("output.weight").is_some() { "output.weight" } else { "token_embd.weight" };
        let bytes = bytes_of(file, head);
        let group = if hyper.vocabulary >= ROW_GROUP * size { ROW_GROUP } else { 1 };
        let groups = hyper.vocabulary.div_ceil(group);
        if groups < size {
            return Err(refused(format!("{} tokens cannot be divided among {size} ranks", hyper.vocabulary)));
        }
        let vocabulary = balanced(groups, bytes / groups as f64, &loads)
            .into_iter()
            .map(|range| range.start * group..(range.end * group).min(hyper.vocabulary))
            .collect();
        let heaviest = loads.iter().copied().fold(0.0, f64::max);
        Ok(TensorDivision { rank, layers, vocabulary, heaviest })
    }

    /// The hyperparameters of this rank's part.
    pub(super) fn hyperparameters(&self, whole: &Hyperparameters) -> Hyperparameters {
        let mut hyper = whole.clone();
        for (layer, division) in hyper.layers.iter_mut().zip(&self.layers) {
            layer.heads = division.kv_heads.len() * division.queries();
            layer.kv_heads = division.kv_heads.len();
            match &mut layer.experts {
                Some(experts) => experts.shared_width = division.feed_forward.len(),
                None => layer.feed_forward = division.feed_forward.len(),
            }
        }
        hyper
    }

    /// The experts of a layer that this rank has, if the layer has some.
    pub(super) fn experts(&self, layer: usize) -> Option<Range<usize>> {
        let layer = self.layers.get(layer)?;
        layer.shape.experts.map(|_| layer.experts.clone())
    }

    pub(super) fn heaviest(&self) -> f64 {
        self.heaviest
    }

    pub(super) fn vocabulary(&self) -> Range<usize> {
        self.vocabulary.get(self.rank).cloned().unwrap_or_default()
    }

    pub(super) fn vocabulary_lengths(&self) -> Vec<usize> {
        self.vocabulary.iter().map(ExactSizeIterator::len).collect()
    }

    /// What this rank has of the layers of a stage, in words.
    pub(super) fn describe(&self, stage: &Range<usize>) -> String {
        let layers = self.layers.get(stage.clone()).unwrap_or_default();
        let sum = |of: fn(&LayerDivision) -> usize| layers.iter().map(of).sum::<usize>();
        let parts = [
            (sum(|layer| layer.kv_heads.len()), sum(|layer| layer.shape.kv_heads), "KV heads"),
            (sum(|layer| layer.feed_forward.len()), sum(LayerDivision::width), "feed-forward columns"),
            (sum(|layer| layer.experts.len()), sum(LayerDivision::expert_count), "experts"),
        ];
        let parts = parts.iter().filter(|(_, all, _)| *all > 0);
        let parts: Vec<String> = parts.map(|(own, all, what)| format!("{own} of {all} {what}")).collect();
        let rows = self.vocabulary();
        format!("{}, vocabulary rows {} to {}", parts.join(", "), rows.start, rows.end.saturating_sub(1))
    }

    /// The part of a tensor that this rank has; `None` if it has all of it.
    pub(super) fn cut(&self, name: &str) -> Option<Cut> {
        if matches!(name, "token_embd.weight" | "output.weight" | "output.bias") {
            return Some(Cut::Rows(self.vocabulary()));
        }
        let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
        let layer = self.layers.get(layer.parse::<usize>().ok()?)?;
        let (part, kind) = part.rsplit_once('.')?;
        let times = |range: &Range<usize>, each: usize| range.start * each..range.end * each;
        let LayerShape { key_length, value_length, .. } = layer.shape;
        let queries = layer.queries();
        match (part, kind) {
            ("attn_q", "weight" | "bias") => Some(Cut::Rows(times(&layer.kv_heads, queries * key_length))),
            ("attn_k", "weight" | "bias") => Some(Cut::Rows(times(&layer.kv_heads, key_length))),
            ("attn_v", "weight" | "bias") => Some(Cut::Rows(times(&layer.kv_heads, value_length))),
            ("attn_output", "weight") => Some(Cut::Columns(times(&layer.kv_heads, queries * value_length))),
            ("ffn_gate" | "ffn_up" | "ffn_gate_shexp" | "ffn_up_shexp", "weight" | "bias") => {
                Some(Cut::Rows(layer.feed_forward.clone()))
            }
            ("ffn_down" | "ffn_down_shexp", "weight") => Some(Cut::Columns(layer.feed_forward.clone())),
            ("ffn_gate_exps" | "ffn_up_exps" | "ffn_down_exps" | "ffn_gate_up_exps", "weight" | "bias") => {
                Some(Cut::Rows(layer.experts.clone()))
            }
            _ => None,
        }
    }
}

impl LayerDivision {
    /// Query heads of a KV head.
    fn queries(&self) -> usize {
        self.shape.heads / self.shape.kv_heads.max(1)
    }

    /// All columns of the dense feed-forward network, or of the expert that all tokens use.
    fn width(&self) -> usize {
        self.shape.experts.map_or(self.shape.feed_forward, |experts| experts.shared_width)
    }

    fn expert_count(&self) -> usize {
        self.shape.experts.map_or(0, |experts| experts.count)
    }
}

/// An error if a model's parts are not all known.
fn check(file: &File, hyper: &Hyperparameters) -> Result<()> {
    if !DIVISIBLE.contains(&hyper.architecture) {
        return Err(refused(format!(
            "tensor parallelism is known for {}, not for {}; a pipeline can be",
            DIVISIBLE.join(", "),
            hyper.architecture
        )));
    }
    let known = hyper.layers.iter().all(|layer| {
        let feeds = layer.experts.is_some() || layer.feed_forward > 0;
        layer.attention && feeds && layer.window.is_none() && layer.shares_cache_of.is_none()
    });
    if !known || hyper.attention_sinks || hyper.predictor_threshold.is_some() {
        return Err(refused("sliding windows and predictors cannot be divided yet; a pipeline can be"));
    }
    for (index, layer) in hyper.layers.iter().enumerate() {
        let has = |part: &str| file.find_tensor(&format!("blk.{index}.{part}")).is_some();
        let parts = ["attn_qkv.weight", "ffn_down_t.weight", "ffn_down_shexp.bias"];
        if let Some(part) = parts.into_iter().find(|part| has(part)) {
            return Err(refused(format!("blk.{index}.{part} cannot be divided; a pipeline can be")));
        }
        if layer.experts.is_none() && !has("ffn_gate.weight") {
            return Err(refused("gate and up in one matrix cannot be divided; a pipeline can be"));
        }
    }
    Ok(())
}

fn bytes_of(file: &File, name: &str) -> f64 {
    file.find_tensor(name).map_or(0.0, |tensor| tensor.data().len() as f64)
}

/// How many columns of a matrix stay together.
fn block_of(file: &File, name: &str) -> usize {
    file.find_tensor(name).map_or(1, |tensor| tensor.dtype().block_len())
}

/// What each rank has of something.
type RankRanges = Vec<Range<usize>>;

/// The KV heads, feed-forward columns and experts of each rank; adds the bytes that a token reads of each to its load.
fn divide_layer(
    file: &File,
    index: usize,
    shape: &LayerShape,
    size: usize,
    loads: &mut [f64],
) -> Result<[RankRanges; 3]> {
    let name = |part: &str| format!("blk.{index}.{part}.weight");
    let block = block_of(file, &name("attn_output"));
    let columns = shape.heads / shape.kv_heads.max(1) * shape.value_length;
    // The fewest heads whose columns are whole blocks.
    let together = (1..=shape.kv_heads).find(|heads| (heads * columns).is_multiple_of(block));
    let together = together.unwrap_or(shape.kv_heads.max(1));
    let units = shape.kv_heads.div_ceil(together);
    if units < size {
        return Err(refused(format!(
            "layer {index} has {} KV heads of {columns} columns in blocks of {block}: {units} parts for {size} ranks; a pipeline can be divided by layers",
            shape.kv_heads
        )));
    }
    let heads: Vec<Range<usize>> = (0..size)
        .map(|rank| {
            let at = |rank: usize| (rank * units / size * together).min(shape.kv_heads);
            at(rank)..if rank + 1 == size { shape.kv_heads } else { at(rank + 1) }
        })
        .collect();
    let attention: f64 =
        ["attn_q", "attn_k", "attn_v", "attn_output"].iter().map(|part| bytes_of(file, &name(part))).sum();
    let own: Vec<f64> =
        heads.iter().map(|heads| attention * heads.len() as f64 / shape.kv_heads.max(1) as f64).collect();
    let (mut own, nothing) = (own, || vec![0..0; size]);
    let mut experts = nothing();
    let mut names = ["ffn_gate", "ffn_up", "ffn_down"];
    let mut width = shape.feed_forward;
    if let Some(mixture) = shape.experts {
        if mixture.count < size {
            return Err(refused(format!(
                "layer {index} has {} experts for {size} ranks; a pipeline can be divided by layers",
                mixture.count
            )));
        }
        let parts = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps"];
        let bytes: f64 = parts.iter().map(|part| bytes_of(file, &name(part))).sum();
        // Of all experts, a token reads those that it uses.
        let each = bytes / mixture.count.max(1) as f64 * mixture.used as f64 / mixture.count.max(1) as f64;
        experts = balanced(mixture.count, each, &own);
        for (own, range) in own.iter_mut().zip(&experts) {
            *own += each * range.len() as f64;
        }
        names = ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"];
        width = mixture.shared_width;
    }
    let mut columns = nothing();
    if width > 0 {
        let [_, _, down] = names;
        let block = block_of(file, &name(down));
        let units = width / block.max(1);
        if units < size || !width.is_multiple_of(block) {
            return Err(refused(format!(
                "layer {index} has {width} feed-forward columns in blocks of {block}: {units} parts for {size} ranks; a pipeline can be divided by layers"
            )));
        }
        let bytes: f64 = names.iter().map(|part| bytes_of(file, &name(part))).sum();
        let ranges = balanced(units, bytes / units as f64, &own);
        for (own, range) in own.iter_mut().zip(&ranges) {
            *own += bytes * range.len() as f64 / units as f64;
        }
        columns = ranges.iter().map(|range| range.start * block..range.end * block).collect();
    }
    loads.iter_mut().zip(&own).for_each(|(load, own)| *load += own);
    Ok([heads, columns, experts])
}

/// Units of equal load for ranks that have some load already, so that all have about the same; at least one unit for each.
fn balanced(units: usize, each: f64, loads: &[f64]) -> Vec<Range<usize>> {
    if each <= 0.0 {
        return balanced(units, 1.0, &vec![0.0; loads.len()]);
    }
    let size = loads.len().max(1);
    let target = (loads.iter().sum::<f64>() + each * units as f64) / size as f64;
    let wanted: Vec<f64> = loads.iter().map(|load| (target - load).max(0.0) / each).collect();
    let scale = units as f64 / wanted.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let (mut sum, mut start) = (0.0, 0);
    let mut ranges = Vec::new();
    for (rank, wanted) in wanted.iter().enumerate() {
        sum += wanted * scale;
        let left = size - rank - 1;
        let end = if left == 0 {
            units
        } else {
            (sum.round() as usize).clamp(start + 1, units.saturating_sub(left))
        };
        ranges.push(start..end);
        start = end;
    }
    ranges
}

/// The bytes of each layer.
pub(super) fn layer_bytes(file: &File, hyper: &Hyperparameters) -> Vec<LayerBytes> {
    let mut bytes = vec![LayerBytes::default(); hyper.layers.len()];
    for tensor in file.tensors() {
        let layer =
            tensor.name().strip_prefix("blk.").and_then(|name| name.split_once('.')?.0.parse::<usize>().ok());
        let shape = layer.and_then(|layer| hyper.layers.get(layer));
        let used =
            |shape: &LayerShape| shape.experts.map_or(1.0, |of| of.used as f64 / of.count.max(1) as f64);
        let share = shape.filter(|_| tensor.name().contains("_exps.")).map_or(1.0, used);
        if let Some(bytes) = layer.and_then(|layer| bytes.get_mut(layer)) {
            bytes.held += tensor.data().len() as f64;
            bytes.read += share * tensor.data().len() as f64;
        }
    }
    bytes
}

/// The layers of each stage of a pipeline, balanced by the bytes of their tensors: the first stage has the embedding, too, and the
/// last one the output matrix.
pub(super) fn layer_ranges(file: &File, hyper: &Hyperparameters, size: usize) -> Result<Vec<Range<usize>>> {
    let count = hyper.layers.len();
    if size == 1 {
        return Ok(std::iter::once(0..count).collect());
    }
    if hyper.encoder
        || hyper.streams.is_some()
        || hyper.layers.iter().any(|layer| layer.shares_cache_of.is_some())
    {
        return Err(refused(format!("the layers of {} cannot be divided", hyper.architecture)));
    }
    if hyper.recurrent.is_some() || hyper.window().is_some() {
        return Err(refused("recurrent layers and sliding windows cannot be divided yet"));
    }
    if count < size {
        return Err(refused(format!("{count} layers for {size} stages")));
    }
    let embedding = bytes_of(file, "token_embd.weight");
    let head = match file.find_tensor("output.weight") {
        Some(_) => bytes_of(file, "output.weight"),
        None => embedding,
    };
    // Of the embedding, a token reads a row.
    let ends = (LayerBytes { read: 0.0, held: embedding }, LayerBytes { read: head, held: head });
    Ok(balanced_stages(&layer_bytes(file, hyper), ends, size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_balance_what_ranks_have_already() {
        assert_eq!(balanced(6, 10.0, &[0.0, 0.0]), [0..3, 3..6]);
        assert_eq!(balanced(6, 10.0, &[20.0, 0.0]), [0..2, 2..6]);
        assert_eq!(balanced(3, 1.0, &[100.0, 0.0, 0.0]), [0..1, 1..2, 2..3], "each has at least one");
        assert_eq!(balanced(7, 0.0, &[0.0]).first(), Some(&(0..7)));
        let many = balanced(1000, 1.0, &[5.0, 30.0, 0.0, 100.0]);
        assert_eq!((many[0].start, many[3].end), (0, 1000));
        assert!(many.windows(2).all(|pair| pair[0].end == pair[1].start));
    }
}

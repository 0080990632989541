//! Which heads, feed-forward columns, vocabulary rows or layers each rank has.
//!
//! Boundaries are at whole blocks of quantized rows; between those, work is balanced by the bytes of the weights.

use std::ops::Range;

use quadriga_gguf::File;

use super::Cut;
use crate::hyperparameters::{Hyperparameters, LayerShape};
use crate::{Error, Result};

/// Architectures whose layers consist of the parts that [`TensorDivision::cut`] names.
const DIVISIBLE: &[&str] = &["llama", "qwen2", "qwen3", "gemma", "granite", "smollm3"];

/// Vocabulary rows that stay together: those that the CPU backend packs as a group.
const ROW_GROUP: usize = 16;

/// A rank's part of every layer.
#[derive(Debug)]
pub(super) struct TensorDivision {
    rank: usize,
    layers: Vec<LayerDivision>,
    /// The vocabulary rows of each rank.
    vocabulary: Vec<Range<usize>>,
}

/// A rank's part of a layer.
#[derive(Debug)]
struct LayerDivision {
    /// The whole layer.
    shape: LayerShape,
    kv_heads: Range<usize>,
    feed_forward: Range<usize>,
}

fn refused(reason: impl Into<String>) -> Error {
    Error::Ranks { reason: reason.into() }
}

impl TensorDivision {
    pub(super) fn new(
        file: &File,
        hyper: &Hyperparameters,
        rank: usize,
        size: usize,
    ) -> Result<TensorDivision> {
        check(file, hyper)?;
        let mut loads = vec![0.0; size];
        let mut layers = Vec::new();
        for (index, shape) in hyper.layers.iter().enumerate() {
            let (heads, columns) = divide_layer(file, index, shape, size, &mut loads)?;
            let part = |ranges: &[Range<usize>]| ranges.get(rank).cloned().unwrap_or_default();
            layers.push(LayerDivision {
                shape: shape.clone(),
                kv_heads: part(&heads),
                feed_forward: part(&columns),
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
        Ok(TensorDivision { rank, layers, vocabulary })
    }

    /// The hyperparameters of this rank's part.
    pub(super) fn hyperparameters(&self, whole: &Hyperparameters) -> Hyperparameters {
        let mut hyper = whole.clone();
        for (layer, division) in hyper.layers.iter_mut().zip(&self.layers) {
            layer.heads = division.kv_heads.len() * division.queries();
            layer.kv_heads = division.kv_heads.len();
            layer.feed_forward = division.feed_forward.len();
        }
        hyper
    }

    pub(super) fn vocabulary(&self) -> Range<usize> {
        self.vocabulary.get(self.rank).cloned().unwrap_or_default()
    }

    pub(super) fn vocabulary_lengths(&self) -> Vec<usize> {
        self.vocabulary.iter().map(ExactSizeIterator::len).collect()
    }

    pub(super) fn describe(&self) -> String {
        let heads: usize = self.layers.iter().map(|layer| layer.kv_heads.len()).sum();
        let of: usize = self.layers.iter().map(|layer| layer.shape.kv_heads).sum();
        let columns: usize = self.layers.iter().map(|layer| layer.feed_forward.len()).sum();
        let all: usize = self.layers.iter().map(|layer| layer.shape.feed_forward).sum();
        let rows = self.vocabulary();
        format!(
            "{heads} of {of} KV heads and {columns} of {all} feed-forward columns of all layers, vocabulary rows {} to {}",
            rows.start,
            rows.end.saturating_sub(1)
        )
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
            ("ffn_gate" | "ffn_up", "weight" | "bias") => Some(Cut::Rows(layer.feed_forward.clone())),
            ("ffn_down", "weight") => Some(Cut::Columns(layer.feed_forward.clone())),
            _ => None,
        }
    }
}

impl LayerDivision {
    /// Query heads of a KV head.
    fn queries(&self) -> usize {
        self.shape.heads / self.shape.kv_heads.max(1)
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
        let plain = layer.attention && layer.experts.is_none() && layer.feed_forward > 0;
        plain && layer.window.is_none() && layer.shares_cache_of.is_none()
    });
    if !known || hyper.attention_sinks || hyper.predictor_threshold.is_some() {
        return Err(refused(
            "experts, sliding windows and predictors cannot be divided yet; a pipeline can be",
        ));
    }
    for part in ["attn_qkv.weight", "ffn_down_t.weight"] {
        if file.find_tensor(&format!("blk.0.{part}")).is_some() {
            return Err(refused(format!("{part} cannot be divided; a pipeline can be")));
        }
    }
    match file.find_tensor("blk.0.ffn_gate.weight") {
        Some(_) => Ok(()),
        None => Err(refused("gate and up in one matrix cannot be divided; a pipeline can be")),
    }
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

/// The KV heads and feed-forward columns of each rank; adds the bytes of each to its load.
fn divide_layer(
    file: &File,
    index: usize,
    shape: &LayerShape,
    size: usize,
    loads: &mut [f64],
) -> Result<(RankRanges, RankRanges)> {
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
    let block = block_of(file, &name("ffn_down"));
    let units = shape.feed_forward / block.max(1);
    if units < size || !shape.feed_forward.is_multiple_of(block) {
        return Err(refused(format!(
            "layer {index} has {} feed-forward columns in blocks of {block}: {units} parts for {size} ranks; a pipeline can be divided by layers",
            shape.feed_forward
        )));
    }
    let feed_forward: f64 =
        ["ffn_gate", "ffn_up", "ffn_down"].iter().map(|part| bytes_of(file, &name(part))).sum();
    let ranges = balanced(units, feed_forward / units as f64, &own);
    for ((load, own), range) in loads.iter_mut().zip(&own).zip(&ranges) {
        *load += own + feed_forward * range.len() as f64 / units as f64;
    }
    let ranges = ranges.iter().map(|range| range.start * block..range.end * block).collect();
    Ok((heads, ranges))
}

/// Units of equal load for ranks that have some load already, so that all have about the same; at least one unit for each.
fn balanced(units: usize, each: f64, loads: &[f64]) -> Vec<Range<usize>> {
    let size = loads.len().max(1);
    let target = (loads.iter().sum::<f64>() + each * units as f64) / size as f64;
    let wanted: Vec<f64> =
        loads.iter().map(|load| (target - load).max(0.0) / each.max(f64::MIN_POSITIVE)).collect();
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

/// The layers of each rank of a pipeline, balanced by the bytes of their tensors; the last rank has the output matrix, too.
pub(super) fn layer_ranges(file: &File, hyper: &Hyperparameters, size: usize) -> Result<Vec<Range<usize>>> {
    if hyper.encoder
        || hyper.streams.is_some()
        || hyper.layers.iter().any(|layer| layer.shares_cache_of.is_some())
    {
        return Err(refused(format!("the layers of {} cannot be divided", hyper.architecture)));
    }
    if hyper.recurrent.is_some() || hyper.window().is_some() {
        return Err(refused("recurrent layers and sliding windows cannot be divided yet"));
    }
    let count = hyper.layers.len();
    if count < size {
        return Err(refused(format!("{count} layers for {size} ranks")));
    }
    let mut bytes = vec![0.0; count];
    for tensor in file.tensors() {
        let layer =
            tensor.name().strip_prefix("blk.").and_then(|name| name.split_once('.')?.0.parse::<usize>().ok());
        if let Some(bytes) = layer.and_then(|layer| bytes.get_mut(layer)) {
            *bytes += tensor.data().len() as f64;
        }
    }
    let head =
        if file.find_tensor("output.weight").is_some() { "output.weight" } else { "token_embd.weight" };
    let each = (bytes.iter().sum::<f64>() + bytes_of(file, head)) / size as f64;
    let (mut start, mut sum) = (0, 0.0);
    let mut ranges = Vec::new();
    for rank in 0..size {
        let most = count - (size - rank - 1);
        let mut end = start;
        // A layer belongs to the rank that computes most of it.
        while end < most
            && (end == start || sum + bytes.get(end).unwrap_or(&0.0) / 2.0 <= each * (rank + 1) as f64)
        {
            sum += bytes.get(end).unwrap_or(&0.0);
            end += 1;
        }
        let end = if rank + 1 == size { count } else { end };
        ranges.push(start..end);
        start = end;
    }
    Ok(ranges)
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

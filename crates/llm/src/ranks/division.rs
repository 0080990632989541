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
const DIVISIBLE: &[&str] = &[
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "granite",
    "smollm3",
    "qwen2moe",
    "qwen3moe",
    "granitemoe",
    "deepseek2",
];

/// Vocabulary rows that stay together: those that the CPU backend packs as a group.
const ROW_GROUP: usize = 16;

/// A rank's part of every layer of a stage.
#[derive(Debug)]
pub(super) struct TensorDivision {
    rank: usize,
    layers: Vec<LayerDivision>,
    /// The vocabulary rows of each rank.
    vocabulary: Vec<Range<usize>>,
    /// The bytes of the stage's layers that a token reads on the rank that takes longest, as many as a rank of mean speed reads in that
    /// time.
    heaviest: f64,
}

/// A rank's part of a layer.
#[derive(Debug)]
struct LayerDivision {
    /// The whole layer.
    shape: LayerShape,
    /// What ranks divide of its attention.
    attention: HeadGroups,
    /// The groups of heads that the rank has.
    groups: Range<usize>,
    /// Columns of the dense feed-forward network, or of the expert that all tokens use.
    feed_forward: Range<usize>,
    /// Those of the other experts that the rank has.
    experts: Range<usize>,
}

/// Groups of heads that are not divided: a KV head with its queries, or one head of latent attention, whose cache all ranks have.
#[derive(Clone, Copy, Debug)]
struct HeadGroups {
    count: usize,
    /// The queries of a group.
    queries: usize,
    /// The heads of the KV cache are divided, too.
    cached: bool,
    /// Elements of a query, and of what `attn_output` has of it.
    key_length: usize,
    value_length: usize,
    /// Rows of a head's keys and values in one matrix, with latent attention.
    both: usize,
}

impl HeadGroups {
    fn of(hyper: &Hyperparameters, shape: &LayerShape) -> HeadGroups {
        let LayerShape { heads, kv_heads, key_length, value_length, .. } = *shape;
        match hyper.latent {
            None => HeadGroups {
                count: kv_heads,
                queries: heads / kv_heads.max(1),
                cached: true,
                key_length,
                value_length,
                both: 0,
            },
            Some(latent) => HeadGroups {
                count: heads,
                queries: 1,
                cached: false,
                key_length: latent.key_length(),
                value_length: latent.value_length,
                both: latent.plain + latent.value_length,
            },
        }
    }

    fn name(&self) -> &'static str {
        if self.cached { "KV heads" } else { "heads" }
    }
}

fn refused(reason: impl Into<String>) -> Error {
    Error::Ranks { reason: reason.into() }
}

impl TensorDivision {
    /// The part of one of several ranks that have these speeds.
    pub(super) fn new(
        file: &File,
        hyper: &Hyperparameters,
        stage: &Range<usize>,
        rank: usize,
        speeds: &[f64],
    ) -> Result<TensorDivision> {
        check(file, hyper)?;
        let size = speeds.len();
        let mut loads = vec![0.0; size];
        let mut layers = Vec::new();
        for (index, shape) in hyper.layers.iter().enumerate() {
            let mut elsewhere = vec![0.0; size];
            let loads = if stage.contains(&index) { &mut loads } else { &mut elsewhere };
            let attention = HeadGroups::of(hyper, shape);
            let [groups, columns, experts] = divide_layer(file, index, (shape, attention), speeds, loads)?;
            let part = |ranges: &[Range<usize>]| ranges.get(rank).cloned().unwrap_or_default();
            layers.push(LayerDivision {
                shape: shape.clone(),
                attention,
                groups: part(&groups),
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
        let vocabulary = balanced(groups, bytes / groups as f64, &loads, speeds)
            .into_iter()
            .map(|range| range.start * group..(range.end * group).min(hyper.vocabulary))
            .collect();
        let mean = speeds.iter().sum::<f64>() / size.max(1) as f64;
        let heaviest = loads.iter().zip(speeds).map(|(load, speed)| load * mean / speed).fold(0.0, f64::max);
        Ok(TensorDivision { rank, layers, vocabulary, heaviest })
    }

    /// The hyperparameters of this rank's part.
    pub(super) fn hyperparameters(&self, whole: &Hyperparameters) -> Hyperparameters {
        let mut hyper = whole.clone();
        for (layer, division) in hyper.layers.iter_mut().zip(&self.layers) {
            layer.heads = division.groups.len() * division.attention.queries;
            if division.attention.cached {
                layer.kv_heads = division.groups.len();
            }
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
        let heads = layers.first().map_or("heads", |layer| layer.attention.name());
        let parts = [
            (sum(|layer| layer.groups.len()), sum(|layer| layer.attention.count), heads),
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
        let HeadGroups { queries, key_length, value_length, both, .. } = layer.attention;
        let heads = |each: usize| times(&layer.groups, each);
        match (part, kind) {
            ("attn_q" | "attn_q_b", "weight" | "bias") => Some(Cut::Rows(heads(queries * key_length))),
            ("attn_k", "weight" | "bias") => Some(Cut::Rows(heads(key_length))),
            ("attn_v", "weight" | "bias") => Some(Cut::Rows(heads(value_length))),
            ("attn_kv_b", "weight") => Some(Cut::Rows(heads(both))),
            ("attn_k_b" | "attn_v_b", "weight") => Some(Cut::Rows(heads(1))),
            ("attn_output", "weight") => Some(Cut::Columns(heads(queries * value_length))),
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
    (shape, attention): (&LayerShape, HeadGroups),
    speeds: &[f64],
    loads: &mut [f64],
) -> Result<[RankRanges; 3]> {
    let size = speeds.len();
    let name = |part: &str| format!("blk.{index}.{part}.weight");
    let block = block_of(file, &name("attn_output"));
    let (count, columns) = (attention.count, attention.queries * attention.value_length);
    // The fewest groups whose columns are whole blocks.
    let together = (1..=count).find(|groups| (groups * columns).is_multiple_of(block));
    let together = together.unwrap_or(count.max(1));
    let units = count.div_ceil(together);
    if units < size {
        return Err(refused(format!(
            "layer {index} has {count} {} of {columns} columns in blocks of {block}: {units} parts for {size} ranks; a pipeline can be divided by layers",
            attention.name()
        )));
    }
    let groups: Vec<Range<usize>> = balanced(units, 1.0, &vec![0.0; size], speeds)
        .into_iter()
        .map(|range| (range.start * together)..(range.end * together).min(count))
        .collect();
    let parts =
        ["attn_q", "attn_q_b", "attn_k", "attn_v", "attn_kv_b", "attn_k_b", "attn_v_b", "attn_output"];
    let bytes: f64 = parts.iter().map(|part| bytes_of(file, &name(part))).sum();
    let own: Vec<f64> =
        groups.iter().map(|groups| bytes * groups.len() as f64 / count.max(1) as f64).collect();
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
        experts = balanced(mixture.count, each, &own, speeds);
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
        let ranges = balanced(units, bytes / units as f64, &own, speeds);
        for (own, range) in own.iter_mut().zip(&ranges) {
            *own += bytes * range.len() as f64 / units as f64;
        }
        columns = ranges.iter().map(|range| range.start * block..range.end * block).collect();
    }
    loads.iter_mut().zip(&own).for_each(|(load, own)| *load += own);
    Ok([groups, columns, experts])
}

/// Units of equal load for ranks that have some load already, so that all have loads in proportion to their speeds; at least one unit
/// for each.
fn balanced(units: usize, each: f64, loads: &[f64], speeds: &[f64]) -> Vec<Range<usize>> {
    if each <= 0.0 {
        return balanced(units, 1.0, &vec![0.0; loads.len()], speeds);
    }
    let size = loads.len().max(1);
    let all = (loads.iter().sum::<f64>() + each * units as f64) / speeds.iter().sum::<f64>();
    let wanted: Vec<f64> =
        loads.iter().zip(speeds).map(|(load, speed)| (all * speed - load).max(0.0) / each).collect();
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

/// The layers of each stage of a pipeline, balanced by the bytes of their tensors and the stages' speeds: the first stage has the embedding, too, and the
/// last one the output matrix.
pub(super) fn layer_ranges(
    file: &File,
    hyper: &Hyperparameters,
    speeds: &[f64],
) -> Result<Vec<Range<usize>>> {
    let (count, size) = (hyper.layers.len(), speeds.len());
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
    Ok(balanced_stages(&layer_bytes(file, hyper), ends, speeds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_balance_what_ranks_have_already() {
        assert_eq!(balanced(6, 10.0, &[0.0, 0.0], &[1.0; 2]), [0..3, 3..6]);
        assert_eq!(balanced(6, 10.0, &[20.0, 0.0], &[1.0; 2]), [0..2, 2..6]);
        assert_eq!(
            balanced(3, 1.0, &[100.0, 0.0, 0.0], &[1.0; 3]),
            [0..1, 1..2, 2..3],
            "each has at least one"
        );
        assert_eq!(balanced(7, 0.0, &[0.0], &[1.0]).first(), Some(&(0..7)));
        assert_eq!(balanced(8, 10.0, &[0.0, 0.0], &[3.0, 1.0]), [0..6, 6..8]);
        assert_eq!(balanced(8, 10.0, &[0.0, 40.0], &[2.0, 1.0]), [0..7, 7..8]);
        let many = balanced(1000, 1.0, &[5.0, 30.0, 0.0, 100.0], &[1.0; 4]);
        assert_eq!((many[0].start, many[3].end), (0, 1000));
        assert!(many.windows(2).all(|pair| pair[0].end == pair[1].start));
    }
}

//! Which heads, feed-forward columns, experts, vocabulary rows or layers each rank has.
//!
//! Boundaries are at whole blocks of quantized rows; between those, work is balanced by the bytes of the weights. Ranks wait for each
//! other after attention and after the feed-forward network, so each is balanced by itself, as far as memory allows.

use std::ops::Range;

use quadriga_gguf::{File, Tensor};
use quadriga_graph::DType;

use super::Cut;
use super::layer_parts::{
    HeadGroups, LayerParts, LayerRanges, RankRanges, balanced, bytes_of, refused, slowest,
};
use super::stages::{LayerBytes, MOST_HELD, balanced_stages};
use crate::Result;
use crate::hyperparameters::{Hyperparameters, LayerShape};

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

/// How far parts that can be divided finely make up for those that cannot, in the divisions that are compared: by nothing, with which
/// ranks wait least for each other, to all of it, with which they hold alike.
const SHARES: [f64; 5] = [0.0, 0.25, 0.5, 0.75, 1.0];

/// A rank's part of every layer of a stage.
#[derive(Debug)]
pub(super) struct TensorDivision {
    rank: usize,
    layers: Vec<LayerDivision>,
    /// The vocabulary rows of each rank.
    vocabulary: Vec<Range<usize>>,
    /// Bytes that a rank of mean speed reads in the time of the stage's layers: after each part of a layer all wait for the slowest.
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
    /// The share of the heads that the slowest rank has, as of a rank of mean speed.
    slowest_share: f64,
    /// Columns of the dense feed-forward network, or of the expert that all tokens use.
    feed_forward: Range<usize>,
    /// Those of the other experts that the rank has.
    experts: Range<usize>,
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
        let mut parts = Vec::new();
        for (index, shape) in hyper.layers.iter().enumerate() {
            parts.push(LayerParts::new(file, index, shape, HeadGroups::of(hyper, shape), size)?);
        }
        let vocabulary = VocabularyRows::new(file, hyper, size)?;
        let choice = Choice::best(&parts, &vocabulary, stage, speeds);
        let part = |ranges: &[Range<usize>]| ranges.get(rank).cloned().unwrap_or_default();
        let layer = |(shape, ranges): (&LayerShape, &LayerRanges)| LayerDivision {
            shape: shape.clone(),
            attention: HeadGroups::of(hyper, shape),
            groups: part(&ranges.groups),
            slowest_share: slowest_share(&ranges.groups, speeds),
            feed_forward: part(&ranges.columns),
            experts: part(&ranges.experts),
        };
        let layers = hyper.layers.iter().zip(&choice.layers).map(layer).collect();
        Ok(TensorDivision { rank, layers, vocabulary: choice.vocabulary, heaviest: choice.in_layers })
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

    /// Bytes of each slot of the KV cache that a rank of mean speed reads in the time of the attention of a stage's layers.
    pub(super) fn heaviest_slot(&self, stage: &Range<usize>) -> f64 {
        let of = |layer: &LayerDivision| {
            // A latent cache is whole on every rank.
            let share = if layer.attention.cached { layer.slowest_share } else { 1.0 };
            share * slot_bytes(&layer.shape)
        };
        self.layers.get(stage.clone()).unwrap_or_default().iter().map(of).sum()
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

/// Rows of the embedding and of the output matrix, in groups.
struct VocabularyRows {
    rows: usize,
    group: usize,
    /// Bytes of a group that all tokens read, and that are held.
    read: f64,
    held: f64,
}

impl VocabularyRows {
    fn new(file: &File, hyper: &Hyperparameters, size: usize) -> Result<VocabularyRows> {
        let rows = hyper.vocabulary;
        let group = if rows >= ROW_GROUP * size { ROW_GROUP } else { 1 };
        let groups = rows.div_ceil(group);
        if groups < size {
            return Err(refused(format!("{rows} tokens cannot be divided among {size} ranks")));
        }
        let (embedding, output) = (bytes_of(file, "token_embd.weight"), bytes_of(file, "output.weight"));
        let read = if output > 0.0 { output } else { embedding } / groups as f64;
        Ok(VocabularyRows { rows, group, read, held: (embedding + output) / groups as f64 })
    }

    /// The groups of each rank, where they make up for a share of what ranks hold otherwise.
    fn divide(&self, held: &[f64], speeds: &[f64], share: f64) -> RankRanges {
        let loads: Vec<f64> = held.iter().map(|held| held * share).collect();
        balanced(self.rows.div_ceil(self.group), self.held, &loads, speeds)
    }
}

/// A division of all layers and of the vocabulary among the ranks of a stage.
struct Choice {
    layers: Vec<LayerRanges>,
    vocabulary: RankRanges,
    /// Bytes that ranks of mean speed read in the time of a token's layers: after each part of a layer all wait for the slowest.
    in_layers: f64,
}

impl Choice {
    /// The division with which a token takes least, of those with which no rank holds more than its share of the memory and 5 %; if
    /// there is none, the one with which the rank that exceeds it most holds least.
    fn best(
        parts: &[LayerParts],
        vocabulary: &VocabularyRows,
        stage: &Range<usize>,
        speeds: &[f64],
    ) -> Choice {
        let mut best = (f64::INFINITY, 0.0, Vec::new());
        for share in SHARES {
            let layers: Vec<LayerRanges> = parts.iter().map(|parts| parts.divide(speeds, share)).collect();
            let own = layers.get(stage.clone()).unwrap_or_default();
            let sums = |add: &dyn Fn(usize) -> f64| (0..speeds.len()).map(add).collect::<Vec<f64>>();
            let at = |values: &[f64], rank: usize| values.get(rank).copied().unwrap_or(0.0);
            let held = sums(&|rank| own.iter().map(|layer| at(&layer.held, rank)).sum());
            let in_layers: f64 =
                own.iter().flat_map(|layer| &layer.read).map(|read| slowest(read, speeds)).sum();
            for of_rows in SHARES {
                let rows = vocabulary.divide(&held, speeds, of_rows);
                let count = |rank: usize| rows.get(rank).map_or(0, ExactSizeIterator::len) as f64;
                let read = sums(&|rank| count(rank) * vocabulary.read);
                let held = sums(&|rank| at(&held, rank) + count(rank) * vocabulary.held);
                let mean = held.iter().sum::<f64>() / speeds.len().max(1) as f64;
                let excess = slowest(&held, speeds) / mean.max(f64::MIN_POSITIVE);
                let time = in_layers + slowest(&read, speeds);
                // A rank that holds too much is worse than any time, which all that is read bounds.
                let cost = if excess > MOST_HELD { f64::MAX.sqrt() * excess } else { time };
                if cost < best.0 {
                    best = (cost, share, rows);
                }
            }
        }
        let (_, share, rows) = best;
        let layers: Vec<LayerRanges> = parts.iter().map(|parts| parts.divide(speeds, share)).collect();
        let own = layers.get(stage.clone()).unwrap_or_default();
        let in_layers = own.iter().flat_map(|layer| &layer.read).map(|read| slowest(read, speeds)).sum();
        let VocabularyRows { rows: all, group, .. } = *vocabulary;
        let vocabulary =
            rows.into_iter().map(|range| range.start * group..(range.end * group).min(all)).collect();
        Choice { layers, vocabulary, in_layers }
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

/// The share of all heads that the rank with most of them for its speed has, as of a rank of mean speed.
fn slowest_share(groups: &[Range<usize>], speeds: &[f64]) -> f64 {
    let own: Vec<f64> = groups.iter().map(|groups| groups.len() as f64).collect();
    slowest(&own, speeds) / own.iter().sum::<f64>().max(1.0)
}

/// Bytes of a slot of a layer's KV cache, as F16.
pub(super) fn slot_bytes(layer: &LayerShape) -> f64 {
    let elements = if layer.attention { layer.key_width() + layer.value_width() } else { 0 };
    (elements * DType::F16.block_bytes()) as f64
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

/// The output matrix, which may be the embedding.
pub(super) fn head_tensor(file: &File) -> Option<Tensor<'_>> {
    file.find_tensor("output.weight").or_else(|| file.find_tensor("token_embd.weight"))
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
    let head = head_tensor(file).map_or(0.0, |head| head.byte_len() as f64);
    // Of the embedding, a token reads a row.
    let ends = (LayerBytes { read: 0.0, held: embedding }, LayerBytes { read: head, held: head });
    Ok(balanced_stages(&layer_bytes(file, hyper), ends, speeds))
}

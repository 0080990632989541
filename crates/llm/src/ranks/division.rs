//! Which heads, feed-forward columns, experts, vocabulary rows or layers each rank has.
//!
//! Boundaries are at whole blocks of quantized rows; between those, work is balanced by the bytes of the weights. Ranks wait for each
//! other after attention and after the feed-forward network, so each is balanced by itself, as far as memory allows.

use std::ops::Range;

use quadriga_gguf::{File, Tensor};
use quadriga_graph::DType;

use super::Cut;
use super::cuts::{Along, ArchitectureCuts, PartCut, Unit, is_summed};
use super::layer_parts::{LayerParts, LayerRanges, RankRanges, balanced, bytes_of, refused, slowest};
use super::layer_units::{GroupKind, LayerUnits, Together};
use super::stages::{LayerBytes, MOST_HELD, balanced_stages};
use crate::Result;
use crate::hyperparameters::{Hyperparameters, LayerShape};

/// Vocabulary rows that stay together: those that the CPU backend packs as a group.
const ROW_GROUP: usize = 16;

/// How far parts that can be divided finely make up for those that cannot, in the divisions that are compared: by nothing, with which
/// ranks wait least for each other, to all of it, with which they hold alike.
const SHARES: [f64; 5] = [0.0, 0.25, 0.5, 0.75, 1.0];

/// A rank's part of every layer of a stage.
#[derive(Debug)]
pub(super) struct TensorDivision {
    rank: usize,
    cuts: &'static ArchitectureCuts,
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
    units: LayerUnits,
    /// The groups of heads or channels that the rank has.
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
        let (cuts, size) = (check(file, hyper)?, speeds.len());
        let layers = || hyper.layers.iter().enumerate();
        let units: Vec<LayerUnits> =
            layers().map(|layer| LayerUnits::of(file, hyper, cuts, layer, size)).collect();
        let mut together: Vec<Together> = Vec::new();
        for ((index, shape), units) in layers().zip(&units) {
            together.push(units.together(file, index, cuts.mixer(shape.attention)));
        }
        // One shape describes all recurrent layers: they are divided alike.
        let is_recurrent = |(layer, _): &(&LayerShape, &Together)| !layer.attention;
        let recurrent = hyper.layers.iter().zip(&together).filter(is_recurrent);
        let common = recurrent.map(|(_, together)| *together).max_by_key(|together| together.groups);
        let mut parts = Vec::new();
        for (((index, shape), units), together) in layers().zip(&units).zip(together) {
            let together = common.filter(|_| !shape.attention).unwrap_or(together);
            parts.push(LayerParts::new(file, (index, shape), (units, cuts), together, size)?);
        }
        let vocabulary = VocabularyRows::new(file, hyper, size)?;
        let choice = Choice::best(&parts, &vocabulary, stage, speeds);
        let part = |ranges: &[Range<usize>]| ranges.get(rank).cloned().unwrap_or_default();
        let layer = |((shape, units), ranges): ((&LayerShape, LayerUnits), &LayerRanges)| LayerDivision {
            shape: shape.clone(),
            units,
            groups: part(&ranges.groups),
            slowest_share: slowest_share(&ranges.groups, speeds),
            feed_forward: part(&ranges.columns),
            experts: part(&ranges.experts),
        };
        let layers = hyper.layers.iter().zip(units).zip(&choice.layers).map(layer).collect();
        Ok(TensorDivision { rank, cuts, layers, vocabulary: choice.vocabulary, heaviest: choice.in_layers })
    }

    /// The hyperparameters of this rank's part.
    pub(super) fn hyperparameters(&self, whole: &Hyperparameters) -> Hyperparameters {
        let mut hyper = whole.clone();
        for (layer, division) in hyper.layers.iter_mut().zip(&self.layers) {
            let own = division.groups.len();
            match (division.units.kind, &mut hyper.recurrent) {
                (GroupKind::LinearHeads, Some(recurrent)) => {
                    if let Some(linear) = &mut recurrent.linear {
                        linear.key_heads = own;
                        linear.value_heads = own * division.units.value_heads;
                        recurrent.conv_width = 2 * linear.key_width() + linear.value_width();
                    }
                }
                (GroupKind::Channels, Some(recurrent)) => recurrent.conv_width = own,
                _ => layer.heads = own * division.units.queries,
            }
            if division.units.kind == GroupKind::KeyValueHeads {
                layer.kv_heads = division.units.key_heads(&division.groups).0.len();
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

    /// Whether several ranks have the same keys and values: their KV cache is more than a share each.
    pub(super) fn shares_keys(&self) -> bool {
        self.layers.iter().any(|layer| layer.units.shares_keys())
    }

    pub(super) fn heaviest(&self) -> f64 {
        self.heaviest
    }

    /// Bytes of each slot of the KV cache that a rank of mean speed reads in the time of the attention of a stage's layers.
    pub(super) fn heaviest_slot(&self, stage: &Range<usize>) -> f64 {
        let of = |layer: &LayerDivision| {
            // A latent cache is whole on every rank.
            let is_divided = layer.units.kind == GroupKind::KeyValueHeads;
            let share = if is_divided { layer.slowest_share } else { 1.0 };
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
        let mut parts: Vec<(usize, usize, &str)> = Vec::new();
        for kind in GroupKind::ALL {
            let layers = layers.iter().filter(|layer| layer.units.kind == kind);
            let sums = layers.fold((0, 0), |(own, all), layer| {
                let (heads, count) = layer.units.key_heads(&layer.groups);
                (own + heads.len(), all + count)
            });
            parts.push((sums.0, sums.1, kind.name()));
        }
        parts.extend([
            (sum(|layer| layer.feed_forward.len()), sum(|layer| layer.units.columns), "feed-forward columns"),
            (sum(|layer| layer.experts.len()), sum(|layer| layer.units.experts), "experts"),
        ]);
        let parts = parts.iter().filter(|(_, all, _)| *all > 0);
        let parts: Vec<String> = parts.map(|(own, all, what)| format!("{own} of {all} {what}")).collect();
        let rows = self.vocabulary();
        format!("{}, vocabulary rows {} to {}", parts.join(", "), rows.start, rows.end.saturating_sub(1))
    }

    /// The part of a tensor that this rank has; `None` if it has all of it.
    pub(super) fn cut(&self, name: &str) -> Option<Cut> {
        if matches!(name, "token_embd.weight" | "output.weight" | "output.bias") {
            return Some(Cut::Rows(vec![self.vocabulary()]));
        }
        let (layer, cut, kind) = self.find(name)?;
        let ranges = layer.units.ranges(cut.units, |unit| layer.own(unit));
        match (cut.along, kind) {
            (Along::Rows, "weight" | "bias" | "") => Some(Cut::Rows(ranges)),
            (Along::Columns, "weight") => Some(Cut::Columns(ranges)),
            _ => None,
        }
    }

    /// Whether the products of a matrix are parts of a sum over all ranks.
    pub(super) fn is_summed(&self, name: &str) -> bool {
        self.find(&format!("{name}.weight")).is_some_and(|(_, cut, _)| is_summed(cut))
    }

    /// The layer of a tensor, how it is cut, and what of its part it is: `weight`, `bias`, or nothing where the name has none.
    fn find<'n>(&self, name: &'n str) -> Option<(&LayerDivision, &'static PartCut, &'n str)> {
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        let layer = self.layers.get(layer.parse::<usize>().ok()?)?;
        let (part, kind) = rest.rsplit_once('.').unwrap_or((rest, ""));
        let mut cuts = self.cuts.mixer(layer.shape.attention).chain(layer.units.network());
        Some((layer, cuts.find(|cut| cut.part == part)?, kind))
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
    /// The groups, columns or experts of the rank.
    fn own(&self, unit: Unit) -> &Range<usize> {
        match unit {
            Unit::Columns => &self.feed_forward,
            Unit::Experts => &self.experts,
            _ => &self.groups,
        }
    }
}

/// The tensors that ranks divide; an error if a model's parts are not all known.
fn check(file: &File, hyper: &Hyperparameters) -> Result<&'static ArchitectureCuts> {
    let Some(cuts) = ArchitectureCuts::find(hyper.architecture) else {
        return Err(refused(format!(
            "tensor parallelism is known for {}, not for {}; a pipeline may be",
            ArchitectureCuts::names().join(", "),
            hyper.architecture
        )));
    };
    if hyper.predictor_threshold.is_some() {
        return Err(refused("predictors of neurons cannot be divided; a pipeline can be"));
    }
    for (index, layer) in hyper.layers.iter().enumerate() {
        let known = cuts.mixer(layer.attention).next().is_some();
        if !known || layer.shares_cache_of.is_some() {
            return Err(refused(format!("the parts of layer {index} cannot be divided; a pipeline may be")));
        }
        // Every rank would add it.
        let bias = format!("blk.{index}.ffn_down_shexp.bias");
        if file.find_tensor(&bias).is_some() {
            return Err(refused(format!("{bias} cannot be divided; a pipeline can be")));
        }
    }
    Ok(cuts)
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
    if count < size {
        return Err(refused(format!("{count} layers for {size} stages")));
    }
    let embedding = bytes_of(file, "token_embd.weight");
    let head = head_tensor(file).map_or(0.0, |head| head.byte_len() as f64);
    // Of the embedding, a token reads a row.
    let ends = (LayerBytes { read: 0.0, held: embedding }, LayerBytes { read: head, held: head });
    Ok(balanced_stages(&layer_bytes(file, hyper), ends, speeds))
}

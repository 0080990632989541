//! Which heads, feed-forward columns, experts, vocabulary rows or layers each rank has.
//!
//! Boundaries are at whole blocks of quantized rows; between those, work is balanced by the bytes of the weights. Ranks wait for each
//! other after attention and after the feed-forward network, so each is balanced by itself, as far as memory allows.

use std::ops::Range;

use quadriga_gguf::File;

use super::Cut;
use super::comparison::within_share;
use super::cuts::{Along, ArchitectureCuts, PartCut, Unit, is_summed};
use super::layer_parts::{LayerParts, LayerRanges, RankRanges, balanced, refused, slowest};
use super::layer_units::{GroupKind, LayerUnits, Together};
use super::step_load::slot_bytes;
use super::whole_model::WholeModel;
use crate::Result;
use crate::hyperparameters::{Hyperparameters, LayerShape};

/// Vocabulary rows that stay together: those that the CPU backend packs as a group.
const ROW_GROUP: usize = 16;

/// How far parts that can be divided finely make up for those that cannot, in the divisions that are compared: by nothing, with which
/// ranks wait least for each other, to all of it, with which they hold alike.
const SHARES: [f64; 5] = [0.0, 0.25, 0.5, 0.75, 1.0];
/// The same of the vocabulary, whose rows are the finest parts.
const ROW_SHARES: [f64; 9] = [0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0];

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
    /// Bytes of weights, KV cache and states that the rank with most of them for its speed holds, as of a rank of mean speed.
    most_held: f64,
    /// Bytes of weights and KV cache that each rank of the stage holds.
    held: Vec<f64>,
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
        whole: &WholeModel<'_>,
        stage: &Range<usize>,
        rank: usize,
        speeds: &[f64],
    ) -> Result<TensorDivision> {
        let (file, hyper) = (whole.file, whole.hyper);
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
            let weights = whole.weights.get(index).map_or(0.0, |bytes| bytes.held);
            let bytes = (weights, whole.caches.get(index).copied().unwrap_or(0.0));
            parts.push(LayerParts::new(file, (index, shape), (units, cuts), bytes, together, size)?);
        }
        let vocabulary = VocabularyRows::new(whole, stage, size)?;
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
        let Choice { vocabulary, in_layers: heaviest, most_held, held, .. } = choice;
        Ok(TensorDivision { rank, cuts, layers, vocabulary, heaviest, most_held, held })
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

    /// Why ranks cannot hold equal parts of a stage's layers, if that is so.
    pub(super) fn why_uneven(&self, stage: &Range<usize>) -> Option<String> {
        let size = self.vocabulary.len().max(1);
        self.layers.get(stage.clone()).unwrap_or_default().iter().find_map(|layer| {
            let (kind, name) = (layer.units.kind, layer.units.kind.name());
            let (_, heads) = layer.units.key_heads(&layer.groups);
            match kind {
                _ if layer.units.shares_keys() => {
                    Some(format!("{heads} {name} are fewer than {size} ranks: several have the same"))
                }
                GroupKind::LatentHeads => Some("every rank has all of the latent KV cache".to_owned()),
                _ if !heads.is_multiple_of(size) => {
                    Some(format!("{heads} {name} cannot be divided evenly among {size} ranks"))
                }
                _ => None,
            }
        })
    }

    pub(super) fn heaviest(&self) -> f64 {
        self.heaviest
    }

    pub(super) fn most_held(&self) -> f64 {
        self.most_held
    }

    /// Bytes of weights and KV cache that each rank of the stage holds.
    pub(super) fn held(&self) -> &[f64] {
        &self.held
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
        // What a rank has of each layer, and how much there is.
        let mut kinds: Vec<(Vec<[usize; 2]>, &str)> = Vec::new();
        for kind in GroupKind::ALL {
            let layers = layers.iter().filter(|layer| layer.units.kind == kind);
            let heads = layers.map(|layer| {
                let (heads, count) = layer.units.key_heads(&layer.groups);
                [heads.len(), count]
            });
            kinds.push((heads.collect(), kind.name()));
        }
        let columns = layers.iter().map(|layer| [layer.feed_forward.len(), layer.units.columns]);
        kinds.push((columns.collect(), "feed-forward columns"));
        let experts = layers.iter().map(|layer| [layer.experts.len(), layer.units.experts]);
        kinds.push((experts.collect(), "experts"));
        let parts: Vec<String> =
            kinds.iter().filter_map(|(of_layers, what)| part_text(of_layers, what)).collect();
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
    /// Bytes of a group that all tokens read, and that are held: those of the matrices that the stage has.
    read: f64,
    held: f64,
}

impl VocabularyRows {
    fn new(whole: &WholeModel<'_>, stage: &Range<usize>, size: usize) -> Result<VocabularyRows> {
        let rows = whole.hyper.vocabulary;
        let group = if rows >= ROW_GROUP * size { ROW_GROUP } else { 1 };
        let groups = rows.div_ceil(group);
        if groups < size {
            return Err(refused(format!("{rows} tokens cannot be divided among {size} ranks")));
        }
        let (is_first, is_last) = (stage.start == 0, stage.end == whole.hyper.layers.len());
        let read = whole.held_matrices(false, is_last) / groups as f64;
        Ok(VocabularyRows { rows, group, read, held: whole.held_matrices(is_first, is_last) / groups as f64 })
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
    /// Bytes that each rank holds.
    held: Vec<f64>,
    /// Bytes that the rank holds which holds most for its speed, as of a rank of mean speed.
    most_held: f64,
}

/// One of the divisions that are compared.
struct Candidate {
    share: f64,
    rows: RankRanges,
    held: Vec<f64>,
    most_held: f64,
}

impl Choice {
    /// The division with which a token takes least, or one with which it takes little more and no rank holds more than its share of
    /// the weights and the KV cache and 5 %.
    fn best(
        parts: &[LayerParts],
        vocabulary: &VocabularyRows,
        stage: &Range<usize>,
        speeds: &[f64],
    ) -> Choice {
        let (mut found, mut costs) = (Vec::new(), Vec::new());
        for share in SHARES {
            let layers: Vec<LayerRanges> = parts.iter().map(|parts| parts.divide(speeds, share)).collect();
            let own = layers.get(stage.clone()).unwrap_or_default();
            let sums = |add: &dyn Fn(usize) -> f64| (0..speeds.len()).map(add).collect::<Vec<f64>>();
            let at = |values: &[f64], rank: usize| values.get(rank).copied().unwrap_or(0.0);
            let held = sums(&|rank| own.iter().map(|layer| at(&layer.held, rank)).sum());
            let in_layers = seconds_of(own, speeds);
            for of_rows in ROW_SHARES {
                let rows = vocabulary.divide(&held, speeds, of_rows);
                let count = |rank: usize| rows.get(rank).map_or(0, ExactSizeIterator::len) as f64;
                let read = sums(&|rank| count(rank) * vocabulary.read);
                let held = sums(&|rank| at(&held, rank) + count(rank) * vocabulary.held);
                let mean = held.iter().sum::<f64>() / speeds.len().max(1) as f64;
                let most_held = slowest(&held, speeds);
                costs.push((in_layers + slowest(&read, speeds), most_held / mean.max(f64::MIN_POSITIVE)));
                found.push(Candidate { share, rows, held, most_held });
            }
        }
        let best = within_share(&costs).filter(|best| *best < found.len());
        let best = best.map(|best| found.swap_remove(best));
        let none = || Candidate { share: 0.0, rows: Vec::new(), held: Vec::new(), most_held: 0.0 };
        let Candidate { share, rows, held, most_held } = best.unwrap_or_else(none);
        let layers: Vec<LayerRanges> = parts.iter().map(|parts| parts.divide(speeds, share)).collect();
        let in_layers = seconds_of(layers.get(stage.clone()).unwrap_or_default(), speeds);
        let VocabularyRows { rows: all, group, .. } = *vocabulary;
        let vocabulary =
            rows.into_iter().map(|range| range.start * group..(range.end * group).min(all)).collect();
        Choice { layers, vocabulary, in_layers, held, most_held }
    }
}

/// What a token takes in some layers, as bytes that a rank of mean speed reads: after each part of a layer all wait for the slowest.
fn seconds_of(layers: &[LayerRanges], speeds: &[f64]) -> f64 {
    layers.iter().flat_map(|layer| &layer.read).map(|read| slowest(read, speeds)).sum()
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
    if hyper.encoder {
        return Err(refused(format!("encoders such as {} run on one rank", hyper.architecture)));
    }
    let Some(cuts) = ArchitectureCuts::find(hyper.architecture) else {
        return Err(refused(format!(
            "tensor parallelism is known for {}, not for {}",
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
            return Err(refused(format!("the parts of layer {index} cannot be divided")));
        }
        // Every rank would add it.
        let bias = format!("blk.{index}.ffn_down_shexp.bias");
        if file.find_tensor(&bias).is_some() {
            return Err(refused(format!("{bias} cannot be divided; a pipeline can be")));
        }
    }
    Ok(cuts)
}

/// What a rank has of layers, each with how much there is: of each layer if all are alike, else in all. `None` if there is nothing.
fn part_text(of_layers: &[[usize; 2]], what: &str) -> Option<String> {
    let mut there = of_layers.iter().filter(|[_, all]| *all > 0);
    let first = there.next()?;
    let alike = there.all(|layer| layer == first);
    let [own, all] = match alike {
        true => *first,
        false => of_layers.iter().fold([0, 0], |sum, layer| [sum[0] + layer[0], sum[1] + layer[1]]),
    };
    Some(format!("{own} of {all} {what}{}", if alike { "" } else { " in all" }))
}

/// The share of all heads that the rank with most of them for its speed has, as of a rank of mean speed.
fn slowest_share(groups: &[Range<usize>], speeds: &[f64]) -> f64 {
    let own: Vec<f64> = groups.iter().map(|groups| groups.len() as f64).collect();
    slowest(&own, speeds) / own.iter().sum::<f64>().max(1.0)
}

//! What a layer consists of, in units that ranks divide.

use std::ops::Range;

use quadriga_gguf::File;

use super::cuts::{Along, ArchitectureCuts, PartCut, Unit, network};
use crate::hyperparameters::{Hyperparameters, LayerShape, RecurrentShape};

/// The groups that ranks divide a layer's attention by, or what it has in place of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum GroupKind {
    /// A KV head with its queries.
    KeyValueHeads,
    /// One head of latent attention, whose cache all ranks have.
    LatentHeads,
    /// A key head of linear attention with its value heads.
    LinearHeads,
    /// A channel of a short convolution.
    Channels,
}

impl GroupKind {
    pub(super) const ALL: [GroupKind; 4] =
        [GroupKind::KeyValueHeads, GroupKind::LatentHeads, GroupKind::LinearHeads, GroupKind::Channels];

    pub(super) fn name(self) -> &'static str {
        match self {
            GroupKind::KeyValueHeads => "KV heads",
            GroupKind::LatentHeads => "heads",
            GroupKind::LinearHeads => "key heads of linear attention",
            GroupKind::Channels => "channels of convolutions",
        }
    }
}

/// What a layer consists of, in units that ranks divide.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerUnits {
    pub(super) kind: GroupKind,
    /// Groups that are not divided.
    pub(super) groups: usize,
    /// Neighbouring groups that have the same keys and values: with fewer KV heads than ranks, several have one, and some of its queries
    /// each.
    sharing: usize,
    /// The query heads of a group.
    pub(super) queries: usize,
    key_length: usize,
    value_length: usize,
    /// Rows of a head's keys and values in one matrix, with latent attention.
    both: usize,
    /// The value heads of a key head of linear attention.
    pub(super) value_heads: usize,
    /// Whether those are apart from each other.
    tiled: bool,
    /// Columns of the dense feed-forward network, or of the expert that all tokens use.
    pub(super) columns: usize,
    /// The other experts.
    pub(super) experts: usize,
    has_experts: bool,
    /// Gate and up are one matrix.
    fused_gate: bool,
}

impl LayerUnits {
    pub(super) fn of(
        file: &File,
        hyper: &Hyperparameters,
        cuts: &ArchitectureCuts,
        (index, shape): (usize, &LayerShape),
        size: usize,
    ) -> LayerUnits {
        let LayerShape { heads, kv_heads, key_length, value_length, feed_forward, .. } = *shape;
        let rows = |part: &str| {
            let tensor = file.find_tensor(&format!("blk.{index}.{part}.weight"))?;
            tensor.shape().dims().first().copied()
        };
        let (has_experts, gated) = (shape.experts.is_some(), rows("ffn_gate").is_some());
        let queries = heads / kv_heads.max(1);
        // Several ranks for each KV head.
        let several = size.checked_div(kv_heads).filter(|each| *each * kv_heads == size && *each > 1);
        let several = several.filter(|each| queries.is_multiple_of(*each) && cuts.may_share_keys());
        let sharing = several.unwrap_or(1);
        let plain = LayerUnits {
            kind: GroupKind::KeyValueHeads,
            groups: kv_heads * sharing,
            sharing,
            queries: queries / sharing,
            key_length,
            value_length,
            both: 0,
            value_heads: 0,
            tiled: cuts.tiled,
            columns: shape.experts.map_or(feed_forward, |experts| experts.shared_width),
            experts: shape.experts.map_or(0, |experts| experts.count),
            has_experts,
            fused_gate: !has_experts && !gated && rows("ffn_up") == Some(2 * feed_forward),
        };
        match (&hyper.recurrent, hyper.latent) {
            (Some(RecurrentShape { linear: Some(linear), .. }), _) if !shape.attention => LayerUnits {
                kind: GroupKind::LinearHeads,
                groups: linear.key_heads,
                sharing: 1,
                key_length: linear.key_length,
                value_length: linear.value_length,
                value_heads: linear.value_heads / linear.key_heads.max(1),
                ..plain
            },
            (Some(RecurrentShape { conv_width, .. }), _) if !shape.attention => {
                LayerUnits { kind: GroupKind::Channels, groups: *conv_width, sharing: 1, ..plain }
            }
            (_, Some(latent)) => LayerUnits {
                kind: GroupKind::LatentHeads,
                groups: heads,
                sharing: 1,
                queries: 1,
                key_length: latent.key_length(),
                value_length: latent.value_length,
                both: latent.plain + latent.value_length,
                ..plain
            },
            _ => plain,
        }
    }

    /// The tensors of the feed-forward network.
    pub(super) fn network(&self) -> &'static [PartCut] {
        network(self.has_experts, self.fused_gate)
    }

    /// The groups that a unit counts by, the elements of each, and how often the elements of all groups follow each other.
    fn extent(&self, unit: Unit) -> (usize, usize, usize) {
        let LayerUnits { groups, queries, key_length, value_length, value_heads, .. } = *self;
        let by_value_heads = |each: usize| match self.tiled {
            true => (groups, each, value_heads),
            false => (groups, value_heads * each, 1),
        };
        let heads = groups / self.sharing.max(1);
        let each = match unit {
            Unit::Keys => return (heads, key_length, 1),
            Unit::KeyHeads => return (heads, 1, 1),
            Unit::Values => return (heads, value_length, 1),
            Unit::Columns => return (self.columns, 1, 1),
            Unit::Experts => return (self.experts, 1, 1),
            Unit::LinearValues => return by_value_heads(value_length),
            Unit::LinearHeads => return by_value_heads(1),
            Unit::LinearRates => 2 * value_heads,
            Unit::LinearGroups => 2 * (key_length + value_heads * value_length),
            Unit::LinearKeys => key_length,
            Unit::Queries => queries * key_length,
            Unit::GatedQueries => 2 * queries * key_length,
            Unit::Heads => queries,
            Unit::Channels | Unit::LinearKeyHeads => 1,
            Unit::Attended => queries * value_length,
            Unit::KeysAndValues => self.both,
        };
        (groups, each, 1)
    }

    /// Whether several groups have the same keys and values.
    pub(super) fn shares_keys(&self) -> bool {
        self.sharing > 1
    }

    /// How often the ranks hold the layer's KV cache together; `None` if each has all of it.
    pub(super) fn cache_copies(&self) -> Option<usize> {
        (self.kind != GroupKind::LatentHeads).then_some(self.sharing)
    }

    /// The heads of keys and values that some groups have, and all of them.
    pub(super) fn key_heads(&self, groups: &Range<usize>) -> (Range<usize>, usize) {
        let sharing = self.sharing.max(1);
        (groups.start / sharing..groups.end.div_ceil(sharing), self.groups / sharing)
    }

    /// How often the ranks hold a tensor together: once, but for keys and values that several have.
    pub(super) fn copies(&self, cut: &PartCut) -> f64 {
        let (mut held, mut all) = (0, 0);
        for unit in cut.units {
            let (groups, each, repeats) = self.extent(*unit);
            let copies = if unit.is_of_keys() { self.sharing } else { 1 };
            held += copies * groups * each * repeats;
            all += groups * each * repeats;
        }
        held as f64 / all.max(1) as f64
    }

    /// The elements that some groups have of a dimension which consists of these units.
    pub(super) fn ranges<'r>(
        &self,
        units: &[Unit],
        own: impl Fn(Unit) -> &'r Range<usize>,
    ) -> Vec<Range<usize>> {
        let (mut first, mut ranges) = (0, Vec::new());
        for unit in units {
            let ((groups, each, repeats), own) = (self.extent(*unit), own(*unit));
            let own = if unit.is_of_keys() { self.key_heads(own).0 } else { own.clone() };
            for repeat in 0..repeats {
                let at = |group: usize| first + (repeat * groups + group) * each;
                ranges.push(at(own.start)..at(own.end));
            }
            first += repeats * groups * each;
        }
        ranges
    }

    /// The fewest groups whose columns in every matrix are whole blocks, with the matrix that decides it: its columns of a group, and
    /// its blocks.
    pub(super) fn together(
        &self,
        file: &File,
        index: usize,
        cuts: impl Iterator<Item = &'static PartCut>,
    ) -> Together {
        let mut all = Together { groups: 1, columns: 0, block: 1 };
        for cut in cuts.filter(|cut| cut.along == Along::Columns) {
            let block = block_of(file, index, cut.part);
            let Some((groups, each, repeats)) = cut.units.first().map(|unit| self.extent(*unit)) else {
                continue;
            };
            // Where the groups' columns follow each other again, the last ones end with a block, too.
            let fits = |count: &usize| {
                (count * each).is_multiple_of(block) && (repeats == 1 || groups.is_multiple_of(*count))
            };
            let fewest = (1..=groups).find(fits).unwrap_or(groups.max(1));
            if fewest >= all.groups {
                all = Together { groups: fewest, columns: each, block };
            }
        }
        all
    }
}

/// Groups that stay together because their columns share a quantized block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Together {
    pub(super) groups: usize,
    pub(super) columns: usize,
    pub(super) block: usize,
}

/// The elements of a block of one of a layer's matrices; 1 if there is none.
pub(super) fn block_of(file: &File, index: usize, part: &str) -> usize {
    let tensor = file.find_tensor(&format!("blk.{index}.{part}.weight"));
    tensor.map_or(1, |tensor| tensor.dtype().block_len()).max(1)
}

//! What of a layer can be divided among ranks, and how it is.

use std::ops::Range;

use quadriga_gguf::File;

use super::cuts::{Along, ArchitectureCuts, PartCut, Unit};
use super::layer_units::{GroupKind, LayerUnits, Together, block_of};
use crate::hyperparameters::LayerShape;
use crate::{Error, Result};

pub(super) fn refused(reason: impl Into<String>) -> Error {
    Error::Ranks { reason: reason.into() }
}

/// The bytes of a tensor; 0 if there is none.
pub(super) fn bytes_of(file: &File, name: &str) -> f64 {
    file.find_tensor(name).map_or(0.0, |tensor| tensor.byte_len() as f64)
}

/// Parts of a layer that ranks divide, with their bytes. Ranks compute attention, wait for each other to sum it up, and do the same with
/// the feed-forward network.
#[derive(Debug)]
pub(super) struct LayerParts {
    /// Groups of heads, of which some stay together because their columns share a quantized block.
    heads: usize,
    together: usize,
    attention_bytes: f64,
    /// Bytes of the KV cache or of states, which the heads have.
    cache_bytes: f64,
    /// Bytes that every rank has: of tensors that are not cut, and of a latent KV cache.
    common_bytes: f64,
    experts: Option<ExpertParts>,
    columns: Option<ColumnParts>,
}

/// Experts that are not divided.
#[derive(Debug)]
struct ExpertParts {
    count: usize,
    /// Bytes of an expert.
    held: f64,
    /// Of those, what a token is expected to read.
    read: f64,
}

/// Columns of a feed-forward network, in quantized blocks.
#[derive(Debug)]
struct ColumnParts {
    blocks: usize,
    block: usize,
    bytes: f64,
}

/// What each rank has of something.
pub(super) type RankRanges = Vec<Range<usize>>;

/// What each rank has of a layer.
#[derive(Debug)]
pub(super) struct LayerRanges {
    /// Groups of heads.
    pub(super) groups: RankRanges,
    pub(super) columns: RankRanges,
    pub(super) experts: RankRanges,
    /// Bytes that a token reads of the rank's attention and of its feed-forward network.
    pub(super) read: [Vec<f64>; 2],
    /// Bytes of the rank's parts.
    pub(super) held: Vec<f64>,
}

impl LayerParts {
    /// The parts of a layer, if there are enough of each for so many ranks.
    pub(super) fn new(
        file: &File,
        (index, shape): (usize, &LayerShape),
        (units, cuts): (&LayerUnits, &ArchitectureCuts),
        (weights, cache): (f64, f64),
        together: Together,
        size: usize,
    ) -> Result<LayerParts> {
        let of_cut =
            |cut: &PartCut| units.copies(cut) * bytes_of(file, &format!("blk.{index}.{}.weight", cut.part));
        let bytes = |cuts: &mut dyn Iterator<Item = &'static PartCut>| -> f64 { cuts.map(of_cut).sum() };
        let (heads, Together { groups: together, columns, block }) = (units.groups, together);
        let parts = heads.div_ceil(together.max(1));
        if parts < size {
            // Which numbers of ranks several of them could have one KV head with.
            let shared = match units.kind {
                GroupKind::KeyValueHeads if cuts.may_share_keys() && heads < size => format!(
                    " (several ranks have one KV head where their number is a multiple of the KV heads, and the {} queries of each divide evenly)",
                    units.queries
                ),
                _ => String::new(),
            };
            return Err(refused(format!(
                "layer {index} has {heads} {} of {columns} columns in blocks of {block}: {parts} parts for {size} ranks{shared}; a pipeline can be divided by layers",
                units.kind.name()
            )));
        }
        let attention_bytes = bytes(&mut cuts.mixer(shape.attention));
        let is_cut = cuts.mixer(shape.attention).chain(units.network());
        let cut: f64 = is_cut.map(|cut| bytes_of(file, &format!("blk.{index}.{}.weight", cut.part))).sum();
        let copies = units.cache_copies();
        let cache_bytes = copies.map_or(0.0, |copies| copies as f64 * cache);
        let common_bytes = (weights - cut).max(0.0) + if copies.is_none() { cache } else { 0.0 };
        let network = |unit: Unit| units.network().iter().filter(move |cut| cut.units.contains(&unit));
        let mut experts = None;
        if let Some(mixture) = shape.experts {
            let count = mixture.count;
            if count < size {
                return Err(refused(format!(
                    "layer {index} has {count} experts for {size} ranks; a pipeline can be divided by layers"
                )));
            }
            let held = bytes(&mut network(Unit::Experts)) / count.max(1) as f64;
            let read = held * mixture.used as f64 / count.max(1) as f64;
            experts = Some(ExpertParts { count, held, read });
        }
        let (width, mut columns) = (units.columns, None);
        if width > 0 {
            let by_columns = network(Unit::Columns).filter(|cut| cut.along == Along::Columns);
            let block = by_columns.map(|cut| block_of(file, index, cut.part)).max().unwrap_or(1);
            let blocks = width / block;
            // Of an expert that all tokens use, some ranks may have nothing: they have others.
            let least = if experts.is_some() { 1 } else { size };
            if blocks < least || !width.is_multiple_of(block) {
                return Err(refused(format!(
                    "layer {index} has {width} feed-forward columns in blocks of {block}: {blocks} parts for {size} ranks; a pipeline can be divided by layers"
                )));
            }
            columns = Some(ColumnParts { blocks, block, bytes: bytes(&mut network(Unit::Columns)) });
        }
        Ok(LayerParts { heads, together, attention_bytes, cache_bytes, common_bytes, experts, columns })
    }

    /// Divides the layer among ranks of these speeds. The feed-forward network makes up for a share of what ranks have more or less of
    /// attention, from 0, with which ranks wait least for each other, to 1, with which all hold alike with their KV caches.
    pub(super) fn divide(&self, speeds: &[f64], share: f64) -> LayerRanges {
        let none = || vec![0..0; speeds.len()];
        let units = self.heads.div_ceil(self.together);
        let groups: RankRanges = balanced(units, 1.0, &vec![0.0; speeds.len()], speeds)
            .into_iter()
            .map(|range| (range.start * self.together)..(range.end * self.together).min(self.heads))
            .collect();
        let of_heads = |groups: &Range<usize>| groups.len() as f64 / self.heads.max(1) as f64;
        let attention: Vec<f64> =
            groups.iter().map(|groups| self.attention_bytes * of_heads(groups)).collect();
        let cache: Vec<f64> = groups.iter().map(|groups| self.cache_bytes * of_heads(groups)).collect();
        let mut held: Vec<f64> = attention
            .iter()
            .zip(&cache)
            .map(|(attention, cache)| attention + cache + self.common_bytes)
            .collect();
        let mut network = vec![0.0; speeds.len()];
        // Of a network of which tokens read less than it holds, the cache counts for as much less.
        let loads = |network: &[f64], read: f64| -> Vec<f64> {
            let held = attention.iter().zip(&cache).map(|(attention, cache)| attention + read * cache);
            held.zip(network).map(|(held, network)| share * held + network).collect()
        };
        let experts = self.experts.as_ref().map(|experts| {
            let read = experts.read / experts.held.max(f64::MIN_POSITIVE);
            let ranges = balanced(experts.count, experts.read, &loads(&network, read), speeds);
            for ((range, network), held) in ranges.iter().zip(&mut network).zip(&mut held) {
                *network += experts.read * range.len() as f64;
                *held += experts.held * range.len() as f64;
            }
            ranges
        });
        let columns = self.columns.as_ref().map(|columns| {
            let each = columns.bytes / columns.blocks.max(1) as f64;
            let ranges = match columns.blocks < speeds.len() {
                true => one_each(columns.blocks, speeds.len()),
                false => balanced(columns.blocks, each, &loads(&network, 1.0), speeds),
            };
            for ((range, network), held) in ranges.iter().zip(&mut network).zip(&mut held) {
                *network += each * range.len() as f64;
                *held += each * range.len() as f64;
            }
            let elements = |range: Range<usize>| range.start * columns.block..range.end * columns.block;
            ranges.into_iter().map(elements).collect()
        });
        LayerRanges {
            groups,
            columns: columns.unwrap_or_else(none),
            experts: experts.unwrap_or_else(none),
            read: [attention, network],
            held,
        }
    }
}

/// Units of equal load for ranks that have some load already, so that all have loads in proportion to their speeds; at least one unit
/// for each.
pub(super) fn balanced(units: usize, each: f64, loads: &[f64], speeds: &[f64]) -> RankRanges {
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

/// Fewer units than ranks: one for each of the first.
fn one_each(units: usize, ranks: usize) -> RankRanges {
    (0..ranks).map(|rank| rank.min(units)..(rank + 1).min(units)).collect()
}

/// How long the slowest of ranks takes for its load, as that of a rank of mean speed.
pub(super) fn slowest(loads: &[f64], speeds: &[f64]) -> f64 {
    let mean = speeds.iter().sum::<f64>() / speeds.len().max(1) as f64;
    loads.iter().zip(speeds).map(|(load, speed)| load * mean / speed).fold(0.0, f64::max)
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
        assert_eq!(one_each(2, 4), [0..1, 1..2, 2..2, 2..2]);
        let many = balanced(1000, 1.0, &[5.0, 30.0, 0.0, 100.0], &[1.0; 4]);
        assert_eq!((many[0].start, many[3].end), (0, 1000));
        assert!(many.windows(2).all(|pair| pair[0].end == pair[1].start));
    }

    /// Three groups of heads for two ranks, and 48 blocks of columns.
    fn odd_heads() -> LayerParts {
        LayerParts {
            heads: 3,
            together: 1,
            attention_bytes: 30.0,
            cache_bytes: 0.0,
            common_bytes: 0.0,
            experts: None,
            columns: Some(ColumnParts { blocks: 48, block: 32, bytes: 96.0 }),
        }
    }

    #[test]
    fn columns_are_even_or_make_up_for_heads() {
        let even = odd_heads().divide(&[1.0; 2], 0.0);
        assert_eq!((even.groups, even.columns), (vec![0..2, 2..3], vec![0..768, 768..1536]));
        assert_eq!((even.read, even.held), ([vec![20.0, 10.0], vec![48.0, 48.0]], vec![68.0, 58.0]));
        let alike = odd_heads().divide(&[1.0; 2], 1.0);
        assert_eq!(alike.held.iter().sum::<f64>(), 126.0);
        assert!((alike.held[0] - alike.held[1]).abs() <= 4.0, "{alike:?}");
        assert!(alike.columns[0].len() < alike.columns[1].len(), "{alike:?}");
    }

    #[test]
    fn columns_make_up_for_the_kv_cache_of_heads() {
        let parts = LayerParts { cache_bytes: 24.0, common_bytes: 5.0, ..odd_heads() };
        let even = parts.divide(&[1.0; 2], 0.0);
        assert_eq!((even.held, even.columns[0].len()), (vec![89.0, 71.0], 768), "every rank has 5 more");
        let alike = parts.divide(&[1.0; 2], 1.0);
        assert!((alike.held[0] - alike.held[1]).abs() <= 4.0, "{alike:?}");
        assert_eq!(alike.read[0], [20.0, 10.0], "the cache is not read as weights are");
    }

    #[test]
    fn experts_count_as_much_as_tokens_read_of_them() {
        let parts = LayerParts {
            heads: 2,
            together: 1,
            attention_bytes: 8.0,
            cache_bytes: 0.0,
            common_bytes: 0.0,
            experts: Some(ExpertParts { count: 8, held: 10.0, read: 2.5 }),
            columns: Some(ColumnParts { blocks: 4, block: 1, bytes: 4.0 }),
        };
        let found = parts.divide(&[1.0, 3.0], 0.0);
        assert_eq!((found.groups, found.experts), (vec![0..1, 1..2], vec![0..2, 2..8]));
        assert_eq!(found.columns, [0..1, 1..4]);
        assert_eq!((found.read, found.held), ([vec![4.0, 4.0], vec![6.0, 18.0]], vec![25.0, 67.0]));
        assert_eq!(slowest(&[6.0, 18.0], &[1.0, 3.0]), 12.0);
    }
}

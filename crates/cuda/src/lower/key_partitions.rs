//! How attention partitions keys among blocks.

use super::grouped_attention::GROUPED_ROWS;
use super::long_attention::{self, MIN_KEYS};
use super::scratch;
use crate::inner::MAX_COUNTERS;

/// The fewest keys of a partition: as many as a block has in flight, or two tiles.
const MIN_PARTITION: u64 = 128;
/// Queries of a block of attention_mma.cu.
pub(super) const TILE: u64 = 64;
/// The fewest queries for which that kernel is faster than a block per query.
pub(super) const MIN_MMA_QUERIES: u64 = 16;
/// The largest grid in y and z, plus one.
const GRID: u64 = 1 << 16;

/// The queries, keys and values of a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct AttentionExtents {
    pub(super) batch: u64,
    pub(super) heads: u64,
    /// Heads of the keys and values.
    pub(super) groups: u64,
    pub(super) queries: u64,
    pub(super) keys: u64,
    /// Elements of a value.
    pub(super) e: usize,
}

/// How keys are partitioned among blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct KeyPartitions {
    /// Queries of all heads.
    lines: u64,
    /// Keys of a partition.
    pub(super) keys: u64,
    pub(super) count: u64,
}

impl KeyPartitions {
    /// Enough partitions to fill the device twice; not many more, since each costs memory for a partial result.
    fn of(blocks: u64, of: &AttentionExtents, multiprocessors: u32) -> KeyPartitions {
        let max = if blocks > MAX_COUNTERS as u64 {
            1
        } else {
            (2 * u64::from(multiprocessors) / blocks.max(1)).max(1)
        };
        let keys = of.keys.max(1).div_ceil(max).next_multiple_of(MIN_PARTITION);
        let lines = of.batch * of.heads * of.queries;
        KeyPartitions { lines, keys, count: of.keys.div_ceil(keys).max(1) }
    }

    /// For kernels with a block per query and head.
    pub(super) fn per_query(of: &AttentionExtents, multiprocessors: u32) -> KeyPartitions {
        KeyPartitions::of(of.batch * of.heads * of.queries, of, multiprocessors)
    }

    /// For attention_mma.cu; `None` if it cannot, or need not, compute so many queries.
    pub(super) fn per_tile(of: &AttentionExtents, multiprocessors: u32) -> Option<KeyPartitions> {
        let tiles = of.queries.div_ceil(TILE);
        let cut = KeyPartitions::of(of.batch * of.heads * tiles, of, multiprocessors);
        let fits = tiles < GRID && of.batch * cut.count < GRID && of.keys < 1 << 31;
        (of.queries >= MIN_MMA_QUERIES && fits).then_some(cut)
    }

    /// For attention_grouped.cu with blocks of `rows` pairs of query and head; `None` if it cannot compute so many.
    pub(super) fn per_group(of: &AttentionExtents, rows: u64, multiprocessors: u32) -> Option<KeyPartitions> {
        let tiles = of.groups_rows().div_ceil(rows);
        let cut = KeyPartitions::of(of.batch * of.groups * tiles, of, multiprocessors);
        let fits = tiles < GRID && of.batch * cut.count < GRID && of.keys < 1 << 31;
        fits.then_some(cut)
    }

    /// For attention_decode.cu; `None` if it is not for such extents. The keys of a partition follow from the visible span:
    /// what is said here is a lower bound.
    pub(super) fn per_long_group(of: &AttentionExtents, multiprocessors: u32) -> Option<KeyPartitions> {
        let shared = of.heads.checked_div(of.groups).filter(|n| n * of.groups == of.heads)?;
        let is_long = of.batch * of.queries == 1
            && (MIN_KEYS..1 << 31).contains(&of.keys)
            && (1..=long_attention::MAX_SHARED_HEADS).contains(&shared)
            && of.groups < GRID
            && of.groups <= MAX_COUNTERS as u64;
        let most = 2 * u64::from(multiprocessors) / of.groups.max(1);
        let count = most.min(of.keys / MIN_PARTITION).max(1);
        is_long.then_some(KeyPartitions { lines: of.heads, keys: of.keys.div_ceil(count), count })
    }

    /// The most bytes of partial results, with whichever kernel.
    pub(super) fn max_bytes(of: &AttentionExtents, multiprocessors: u32) -> usize {
        let groups = GROUPED_ROWS.map(|rows| KeyPartitions::per_group(of, rows, multiprocessors));
        let others = [
            KeyPartitions::per_tile(of, multiprocessors),
            KeyPartitions::per_long_group(of, multiprocessors),
        ];
        let cuts = groups.into_iter().chain(others).flatten();
        let queries = KeyPartitions::per_query(of, multiprocessors);
        cuts.chain([queries]).map(|cut| cut.bytes(of.e)).max().unwrap_or(0)
    }

    /// Bytes of the partial results, of `e` elements; none for a single partition.
    pub(super) fn bytes(&self, e: usize) -> usize {
        if self.count > 1 {
            scratch::total_bytes([(self.lines * self.count) as usize * (e + 2) * 4])
        } else {
            0
        }
    }
}

impl AttentionExtents {
    /// Pairs of query and head in a group.
    pub(super) fn groups_rows(&self) -> u64 {
        self.queries * (self.heads / self.groups.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MULTIPROCESSORS: u32 = 132;

    fn extents([batch, heads, queries]: [u64; 3], keys: u64) -> AttentionExtents {
        AttentionExtents { batch, heads, groups: 1, queries, keys, e: 128 }
    }

    #[test]
    fn many_queries_use_tensor_cores_and_partitions_fill_the_device() {
        let tiles = |queries, keys| KeyPartitions::per_tile(&extents(queries, keys), MULTIPROCESSORS);
        assert_eq!(tiles([1, 32, 15], 512), None, "few queries");
        // 32 heads of 8 tiles are enough blocks.
        assert_eq!(tiles([1, 32, 512], 512), Some(KeyPartitions { lines: 32 * 512, keys: 512, count: 1 }));
        // 9 heads of one tile are not: their keys are partitioned, with at least two tiles each.
        assert_eq!(tiles([1, 9, 40], 4096).unwrap().count, 16);
        assert_eq!(tiles([1, 9, 40], 256).unwrap(), KeyPartitions { lines: 360, keys: 128, count: 2 });
        assert_eq!(tiles([1, 1, 64], 1 << 31), None, "more keys than an int counts");
    }

    #[test]
    fn no_kernel_needs_more_than_the_forecast() {
        for queries in [[1, 9, 40], [1, 32, 512], [2, 4, 17], [1, 128, 1], [1, 4, 1], [1, 8, 1]] {
            let of = extents(queries, 4096);
            let max = KeyPartitions::max_bytes(&of, MULTIPROCESSORS);
            let tiles = KeyPartitions::per_tile(&of, MULTIPROCESSORS);
            let long = KeyPartitions::per_long_group(&of, MULTIPROCESSORS);
            let groups = GROUPED_ROWS.map(|rows| KeyPartitions::per_group(&of, rows, MULTIPROCESSORS));
            for cut in [tiles, long].into_iter().chain(groups).flatten() {
                assert!(cut.bytes(of.e) <= max, "{queries:?}: {cut:?} of {max}");
            }
        }
    }

    #[test]
    fn partitions_fill_the_device_twice_and_cost_memory_only_if_there_are_several() {
        let of = |blocks, keys| KeyPartitions::of(blocks, &extents([blocks, 1, 1], keys), MULTIPROCESSORS);
        // 264 blocks are wanted: 29 partitions for each of 9, of whole multiples of 128 keys.
        assert_eq!(of(9, 4096), KeyPartitions { lines: 9, keys: 256, count: 16 });
        assert_eq!(of(9, 1 << 20), KeyPartitions { lines: 9, keys: 36_224, count: 29 });
        assert_eq!(of(264, 4096).count, 1);
        assert_eq!(of(132, 4096).count, 2);
        // Each block has a counter where there are several partitions.
        let counters = MAX_COUNTERS as u64;
        let many = |blocks| KeyPartitions::of(blocks, &extents([blocks, 1, 1], 1 << 20), u32::MAX).count;
        assert!(many(counters) > 1 && many(counters + 1) == 1);
        let query = KeyPartitions::per_query(&extents([2, 3, 5], 4096), MULTIPROCESSORS);
        assert_eq!(query, KeyPartitions { lines: 30, keys: 512, count: 8 });
        // Each partial result has two numbers beside its elements.
        assert_eq!(query.bytes(62), scratch::total_bytes([30 * 8 * 64 * 4]));
        assert_eq!(KeyPartitions { count: 1, ..query }.bytes(62), 0);
    }

    #[test]
    fn tiles_are_limited_by_the_grid() {
        let tiles =
            |queries, keys| KeyPartitions::per_tile(&extents(queries, keys), MULTIPROCESSORS).is_some();
        assert!(tiles([1, 1, 64 * 65_535], 512) && !tiles([1, 1, 64 * 65_535 + 1], 512));
        assert!(tiles([65_535, 1, 16], 512) && !tiles([65_536, 1, 16], 512));
        assert!(tiles([1, 1, 16], (1 << 31) - 1) && !tiles([1, 1, 16], 1 << 31));
        // Batches of partitions are one dimension of the grid; two heads of two tiles are four blocks.
        let cut = KeyPartitions::per_tile(&extents([2, 2, 65], 1 << 20), MULTIPROCESSORS).unwrap();
        assert_eq!((cut.lines, cut.count), (260, 33));
    }

    #[test]
    fn one_query_over_many_keys_fills_the_device_by_heads_of_the_keys() {
        let of = |heads, groups, queries, keys| {
            let of = AttentionExtents { groups, ..extents([1, heads, queries], keys) };
            KeyPartitions::per_long_group(&of, MULTIPROCESSORS).map(|cut| (cut.lines, cut.count))
        };
        assert_eq!(of(32, 8, 1, 16_384), Some((32, 33)));
        assert_eq!(of(32, 32, 1, 16_384), Some((32, 8)));
        assert_eq!(of(4, 1, 1, 4096), Some((4, 32)), "at least 128 keys");
        assert_eq!(of(32, 8, 1, MIN_KEYS - 1), None, "few keys");
        assert_eq!(of(32, 8, 1, 1), None, "one key");
        assert_eq!(of(32, 8, 2, 16_384), None, "two queries");
        assert_eq!(of(36, 4, 1, 16_384), None, "nine heads share one of the keys");
        assert_eq!(of(32, 8, 1, 1 << 31), None, "more keys than an int counts");
    }

    #[test]
    fn groups_count_the_heads_of_a_group_as_rows() {
        let of = AttentionExtents { groups: 2, ..extents([1, 32, 1], 4096) };
        assert_eq!(of.groups_rows(), 16);
        // Two blocks of 16 rows, and 132 partitions for each, of at least 128 keys.
        let cut = KeyPartitions::per_group(&of, 16, MULTIPROCESSORS).unwrap();
        assert_eq!(cut, KeyPartitions { lines: 32, keys: 128, count: 32 });
        let long = AttentionExtents { keys: 1 << 31, ..of };
        assert_eq!(KeyPartitions::per_group(&long, 16, MULTIPROCESSORS), None);
        let many = AttentionExtents { queries: 16 * 65_536, heads: 2, ..of };
        assert_eq!(KeyPartitions::per_group(&many, 16, MULTIPROCESSORS), None);
    }
}

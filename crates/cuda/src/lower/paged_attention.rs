//! Attention through page tables, of queries of several sequences. See `kernels/attention_paged.cu`.

use std::ffi::CStr;

use quadriga_graph::{DType, NodeId, PAGE_SLOTS, Tensor};
use quadriga_runtime::BackendError;

use super::attention::AttentionWork;
use super::lowering::Lowering;
use super::scratch;
use crate::inner::MAX_COUNTERS;
use crate::kernels::KernelFile;
use crate::launch::{Argument, Launch, TensorArg, has_dense_rows};

/// Keys and values of these many elements have kernels: for a query at a time, and for tiles of queries.
const DEPTHS: [(usize, [&CStr; 2]); 4] = [
    (64, [c"k_attention_paged_64", c"k_attention_mma_paged_64"]),
    (80, [c"k_attention_paged_80", c"k_attention_mma_paged_80"]),
    (96, [c"k_attention_paged_96", c"k_attention_mma_paged_96"]),
    (128, [c"k_attention_paged_128", c"k_attention_mma_paged_128"]),
];
/// Queries of a tile.
const TILE: usize = 64;
/// The most query heads that share a head of the keys: rows of a tensor-core tile.
const MAX_GROUP: usize = 16;
/// The fewest keys of a partition, and the most partitions of a sequence.
const MIN_PARTITION: usize = 512;
const MAX_PARTITIONS: usize = 32;
/// The most queries whose keys are partitioned: with more, a block takes all keys of its query, or of a tile of them.
const MAX_PARTITIONED: usize = 256;

#[repr(C)]
#[derive(Clone, Copy)]
struct PagedWork {
    work: AttentionWork,
    pages: TensorArg,
    fault_table: u32,
    fault_page: u32,
    has_tiles: u32,
    unused: u32,
}

// SAFETY: `struct PagedWork` of pages.cuh has the same fields in the same order.
unsafe impl Argument for PagedWork {}

/// How the keys of each query are partitioned. With up to 256 queries it depends on the length of the page table alone, so
/// that a query's result does not depend on the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PagedPartitions {
    keys: usize,
    count: usize,
}

impl PagedPartitions {
    /// For so many queries, and tables of so many pages.
    pub(super) fn of(queries: usize, pages: usize) -> PagedPartitions {
        let all = pages.max(1) * PAGE_SLOTS;
        let keys = match queries <= MAX_PARTITIONED {
            true => all.div_ceil(MAX_PARTITIONS).next_multiple_of(PAGE_SLOTS).max(MIN_PARTITION),
            false => all,
        };
        PagedPartitions { keys, count: all.div_ceil(keys) }
    }

    /// Bytes of the partial results of so many queries of all heads, of `e` elements.
    pub(super) fn bytes(&self, lines: usize, e: usize) -> usize {
        match self.count {
            0 | 1 => 0,
            count => scratch::total_bytes([lines.saturating_mul(count * (e + 2) * 4)]),
        }
    }
}

/// Whether there is a kernel for these queries, keys and values.
pub(super) fn has_kernel(q: &Tensor, k: &Tensor, v: &Tensor) -> bool {
    let [b, heads, _, d] = q.dims4();
    let [_, groups, _, e] = v.dims4();
    let is_cached = |t: &Tensor| {
        let alignment = match t.dtype() {
            DType::F16 | DType::BF16 => 16,
            DType::Q8_0 | DType::Q5_1 | DType::Q4_0 => 2,
            _ => return false,
        };
        let [s0, s1, s2, s3] = t.strides();
        s3 == t.dtype().block_bytes() && [s0, s1, s2, t.offset()].iter().all(|n| n.is_multiple_of(alignment))
    };
    let [s0, s1, s2, s3] = q.strides();
    let has_pairs = s3 == 4 && [s0, s1, s2, q.offset()].iter().all(|n| n.is_multiple_of(8));
    b == 1
        && has_pairs
        && d == e
        && k.shape().cols() == d
        && DEPTHS.iter().any(|(depth, _)| *depth == d)
        && heads <= MAX_GROUP * groups
        && is_cached(k)
        && is_cached(v)
}

impl Lowering<'_> {
    /// Attention of queries that find their keys through a page table.
    pub(super) fn paged_attention(
        &mut self,
        node: NodeId,
        mut work: AttentionWork,
        pages: TensorArg,
    ) -> Result<(), BackendError> {
        let [_, heads, queries, d] = work.q.dims.map(|n| n as usize);
        let groups = work.k.dims[1] as usize;
        let cut = PagedPartitions::of(queries, pages.dims[3] as usize);
        work.partial = match cut.bytes(queries * heads, d) {
            0 => 0,
            bytes => {
                self.uses_counters = true;
                self.scratch(node, [bytes])?[0]
            }
        };
        (work.partition, work.partitions) = (cut.keys as i64, cut.count as i64);
        let missing = || self.failed(node, "there is no kernel for heads of this size");
        let [name, tile_name] =
            DEPTHS.iter().find(|(depth, _)| *depth == d).map(|(_, names)| *names).ok_or_else(missing)?;
        let pairs = queries * groups;
        let fill = (4 * self.inner.context.multiprocessors as usize).div_ceil(pairs.max(1));
        // A counter for each query and head of the keys tells which block is the last.
        let blocks = if pairs > MAX_COUNTERS { 1 } else { cut.count.min(fill).max(1) };
        // Two buffers, each of a page of keys and one of values.
        let shared = (4 * PAGE_SLOTS * (2 * d + 16)) as u32;
        let kernels = &self.inner.kernels;
        let function = kernels.function_with_shared_memory(KernelFile::AttentionPaged, name, shared)?;
        let tiles = kernels.function_with_shared_memory(KernelFile::AttentionMma, tile_name, shared)?;
        let (_, fault_table) = self.fault(node, "a row of the page table is out of range");
        let (_, fault_page) = self.fault(node, "an entry of the page table is out of range");
        // Each kernel leaves to the other what it does not compute: which tiles are of one sequence is known on the device.
        let is_long = self.inner.trial_kernels && queries > MAX_PARTITIONED;
        let has_tiles = is_long && has_dense_rows(&work.out, DType::F32, 8);
        let job = PagedWork { work, pages, fault_table, fault_page, has_tiles: has_tiles.into(), unused: 0 };
        if has_tiles {
            let grid = [heads as u32, queries.div_ceil(TILE) as u32, 1];
            self.push(Launch::new(tiles, grid, 128).shared_bytes(shared).dependent().arg(job));
        }
        let grid = [blocks as u32, groups as u32, queries as u32];
        self.push(Launch::new(function, grid, 128).shared_bytes(shared).dependent().arg(job));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_depend_on_the_table_alone_up_to_256_queries() {
        for queries in [1, 7, 256] {
            assert_eq!(PagedPartitions::of(queries, 4), PagedPartitions { keys: 512, count: 1 });
            assert_eq!(PagedPartitions::of(queries, 64), PagedPartitions { keys: 512, count: 8 });
            assert_eq!(PagedPartitions::of(queries, 2048), PagedPartitions { keys: 4096, count: 32 });
            assert_eq!(PagedPartitions::of(queries, 257), PagedPartitions { keys: 576, count: 29 });
        }
        assert_eq!(PagedPartitions::of(257, 2048), PagedPartitions { keys: 2048 * 64, count: 1 });
    }

    #[test]
    fn partial_results_have_values_maximum_and_sum() {
        assert_eq!(PagedPartitions::of(3, 64).bytes(3 * 32, 128), 3 * 32 * 8 * 130 * 4);
        assert_eq!(PagedPartitions::of(300, 64).bytes(300 * 32, 128), 0);
    }
}

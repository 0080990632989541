//! Attention through page tables, of queries of several sequences. See `kernels/attention_paged.cu`; wide heads and large
//! groups are in `kernels/attention_grouped.cu`, and all that tensor cores do not take in `kernels/attention.cu`.

use std::ffi::CStr;

use quadriga_graph::{DType, NodeId, PAGE_SLOTS};
use quadriga_runtime::BackendError;

use super::attention::{AttentionWork, MMA_COMPUTE_CAPABILITY};
use super::grouped_attention::{GroupedKernel, TILE_ROWS, is_cached};
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
/// Queries of a tile of `k_attention_mma_paged`.
const TILE: usize = 64;
/// The fewest queries of which those of a prompt are taken together by the kernels of attention_grouped.cu.
const MIN_TILED: usize = 64;
/// The most query heads that share a head of the keys: rows of a tensor-core tile.
const MAX_GROUP: usize = 16;
/// The fewest keys of a partition, and the most partitions of a sequence: for values of at most so many elements.
const PARTITIONS: [(usize, usize, usize); 3] = [(128, 512, 32), (256, 256, 32), (usize::MAX, 256, 16)];
/// The most queries whose keys are partitioned: with more, a block takes all keys of its query, or of a tile of them.
const MAX_PARTITIONED: usize = 256;
/// The largest grid in y and z.
const MAX_GRID: usize = 65_535;

#[repr(C)]
#[derive(Clone, Copy)]
struct PagedWork {
    work: AttentionWork,
    pages: TensorArg,
    fault_table: u32,
    fault_page: u32,
    tile: u32,
    takes_tiles: u32,
    first: u32,
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
    /// For so many queries and heads, tables of so many pages, and values of `e` elements.
    pub(super) fn of([queries, heads]: [usize; 2], pages: usize, e: usize) -> PagedPartitions {
        let all = pages.max(1) * PAGE_SLOTS;
        let limits = PARTITIONS.iter().find(|(most, ..)| e <= *most);
        let keys = match limits {
            // A counter for each query and head tells which block is the last.
            Some((_, fewest, most)) if queries <= MAX_PARTITIONED && heads <= MAX_COUNTERS => {
                all.div_ceil(*most).next_multiple_of(PAGE_SLOTS).max(*fewest)
            }
            _ => all,
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

/// Whether heads of these elements, and groups of so many of them, are for attention_paged.cu.
pub(super) fn is_narrow([d, e]: [usize; 2], heads: usize, groups: usize) -> bool {
    d == e && DEPTHS.iter().any(|(depth, _)| *depth == d) && heads <= MAX_GROUP * groups
}

impl PagedWork {
    /// Queries, heads, and heads of the keys.
    fn extents(&self) -> [usize; 3] {
        let [_, heads, queries, _] = self.work.q.dims;
        [queries, heads, self.work.k.dims[1]].map(|n| n as usize)
    }

    /// Elements of keys and values.
    fn widths(&self) -> [usize; 2] {
        [self.work.k.dims[3], self.work.v.dims[3]].map(|n| n as usize)
    }

    /// The most blocks, or queries, of a launch, if each needs so many counters.
    fn most_at_once(&self, counters: usize) -> usize {
        match self.work.partitions {
            0 | 1 => MAX_GRID,
            _ => (MAX_COUNTERS / counters.max(1)).clamp(1, MAX_GRID),
        }
    }
}

impl Lowering<'_> {
    /// Attention of queries that find their keys through a page table.
    pub(super) fn paged_attention(
        &mut self,
        node: NodeId,
        mut work: AttentionWork,
        pages: TensorArg,
    ) -> Result<(), BackendError> {
        let [_, heads, queries, _] = work.q.dims.map(|n| n as usize);
        let e = work.v.dims[3] as usize;
        let cut = PagedPartitions::of([queries, heads], pages.dims[3] as usize, e);
        work.partial = match cut.bytes(queries * heads, e) {
            0 => 0,
            bytes => {
                self.uses_counters = true;
                self.scratch(node, [bytes])?[0]
            }
        };
        (work.partition, work.partitions) = (cut.keys as i64, cut.count as i64);
        let (_, fault_table) = self.fault(node, "a row of the page table is out of range");
        let (_, fault_page) = self.fault(node, "an entry of the page table is out of range");
        let job =
            PagedWork { work, pages, fault_table, fault_page, tile: 0, takes_tiles: 0, first: 0, unused: 0 };
        if self.inner.context.compute_capability < MMA_COMPUTE_CAPABILITY {
            return self.plain_paged_attention(job);
        }
        if let Some(names) = narrow_kernels(&job) {
            return self.narrow_paged_attention(job, names);
        }
        let of = |rows: usize| {
            let tensors = [&work.q, &work.k, &work.v, &work.out];
            let shared_bytes = self.inner.context.shared_bytes_per_block;
            GroupedKernel::through_pages(tensors, rows as u64, shared_bytes)
        };
        let group = heads / (work.k.dims[1] as usize).max(1);
        match of(group) {
            Some(kernel) => {
                let tiles = of(TILE_ROWS as usize).filter(|kernel| kernel.rows == TILE_ROWS);
                self.grouped_paged_attention(job, kernel, tiles)
            }
            None => self.plain_paged_attention(job),
        }
    }

    /// A block for each query and head of the keys; of many queries, for each tile of those of a sequence and each head.
    fn narrow_paged_attention(
        &mut self,
        job: PagedWork,
        [name, tile_name]: [&CStr; 2],
    ) -> Result<(), BackendError> {
        let ([queries, heads, groups], [d, _]) = (job.extents(), job.widths());
        let pairs = queries * groups;
        let fill = (4 * self.inner.context.multiprocessors as usize).div_ceil(pairs.max(1));
        // A counter for each query and head of the keys tells which block is the last.
        let partitions = job.work.partitions as usize;
        let blocks = if pairs > MAX_COUNTERS { 1 } else { partitions.min(fill).max(1) };
        // Two buffers, each of a page of keys and one of values.
        let shared = (4 * PAGE_SLOTS * (2 * d + 16)) as u32;
        let kernels = &self.inner.kernels;
        let function = kernels.function_with_shared_memory(KernelFile::AttentionPaged, name, shared)?;
        let tiles = kernels.function_with_shared_memory(KernelFile::AttentionMma, tile_name, shared)?;
        // Each kernel leaves to the other what it does not compute: which tiles are of one sequence is known on the device.
        let has_tiles = queries > MAX_PARTITIONED && has_dense_rows(&job.work.out, DType::F32, 8);
        let job = PagedWork { tile: if has_tiles { TILE as u32 } else { 0 }, ..job };
        if has_tiles {
            let grid = [heads as u32, queries.div_ceil(TILE) as u32, 1];
            self.push(Launch::new(tiles, grid, 128).shared_bytes(shared).dependent().arg(job));
        }
        let grid = [blocks as u32, groups as u32, queries as u32];
        self.push(Launch::new(function, grid, 128).shared_bytes(shared).dependent().arg(job));
        Ok(())
    }

    /// A block for each query, head of the keys and partition, or several for large groups; of many queries, for each tile of
    /// those of a sequence.
    fn grouped_paged_attention(
        &mut self,
        job: PagedWork,
        kernel: GroupedKernel,
        tiles: Option<GroupedKernel>,
    ) -> Result<(), BackendError> {
        let [queries, heads, groups] = job.extents();
        let group = heads / groups.max(1);
        let tile = TILE_ROWS as usize / group.max(1);
        let tiles = tiles.filter(|_| tile > 1 && queries >= MIN_TILED);
        let job = PagedWork { tile: if tiles.is_some() { tile as u32 } else { 0 }, ..job };
        if let Some(kernel) = tiles {
            let job = PagedWork { takes_tiles: 1, ..job };
            self.push_grouped(job, kernel, queries.div_ceil(tile))?;
        }
        self.push_grouped(job, kernel, queries * group.div_ceil(kernel.rows as usize))
    }

    fn push_grouped(
        &mut self,
        job: PagedWork,
        kernel: GroupedKernel,
        blocks: usize,
    ) -> Result<(), BackendError> {
        let [_, _, groups] = job.extents();
        let shared = kernel.shared_bytes();
        let kernels = &self.inner.kernels;
        let function =
            kernels.function_with_shared_memory(KernelFile::AttentionGrouped, kernel.name, shared)?;
        let most = job.most_at_once(groups);
        for first in (0..blocks).step_by(most) {
            let job = PagedWork { first: first as u32, ..job };
            let grid = [groups as u32, (blocks - first).min(most) as u32, job.work.partitions as u32];
            self.push(Launch::new(function, grid, 256).shared_bytes(shared).dependent().arg(job));
        }
        Ok(())
    }

    /// A block for each query, head and partition.
    fn plain_paged_attention(&mut self, job: PagedWork) -> Result<(), BackendError> {
        const WARPS: u32 = 4;
        let ([queries, heads, _], [d, e]) = (job.extents(), job.widths());
        let name = if d.max(e) <= 128 { c"k_attention_plain_paged" } else { c"k_attention_plain_paged_wide" };
        let function = self.function(KernelFile::Attention, name)?;
        let shared = WARPS * (2 + e as u32) * 4;
        let most = job.most_at_once(heads);
        for first in (0..queries).step_by(most) {
            let job = PagedWork { first: first as u32, ..job };
            let grid = [job.work.partitions as u32, heads as u32, (queries - first).min(most) as u32];
            let launch = Launch::new(function, grid, WARPS * 32);
            self.push(launch.shared_bytes(shared).dependent().arg(job));
        }
        Ok(())
    }
}

/// The kernels of attention_paged.cu and attention_mma.cu, if there are some for these heads.
fn narrow_kernels(job: &PagedWork) -> Option<[&'static CStr; 2]> {
    let ([_, heads, groups], [d, e]) = (job.extents(), job.widths());
    let AttentionWork { q, k, v, .. } = &job.work;
    let is_dense = has_dense_rows(q, DType::F32, 8) && is_cached(k) && is_cached(v);
    let names = DEPTHS.iter().find(|(depth, _)| *depth == d).map(|(_, names)| *names);
    names.filter(|_| is_dense && is_narrow([d, e], heads, groups))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_depend_on_the_table_alone_up_to_256_queries() {
        for queries in [1, 7, 256] {
            let of = |pages, e| PagedPartitions::of([queries, 8], pages, e);
            assert_eq!(of(4, 128), PagedPartitions { keys: 512, count: 1 });
            assert_eq!(of(64, 128), PagedPartitions { keys: 512, count: 8 });
            assert_eq!(of(2048, 128), PagedPartitions { keys: 4096, count: 32 });
            assert_eq!(of(257, 128), PagedPartitions { keys: 576, count: 29 });
            assert_eq!(of(64, 256), PagedPartitions { keys: 256, count: 16 });
            assert_eq!(of(2048, 512), PagedPartitions { keys: 8192, count: 16 });
        }
        let alone = PagedPartitions { keys: 2048 * 64, count: 1 };
        assert_eq!(PagedPartitions::of([257, 8], 2048, 128), alone);
        assert_eq!(PagedPartitions::of([1, MAX_COUNTERS + 1], 2048, 128), alone, "more heads than counters");
    }

    #[test]
    fn partial_results_have_values_maximum_and_sum() {
        assert_eq!(PagedPartitions::of([3, 32], 64, 128).bytes(3 * 32, 128), 3 * 32 * 8 * 130 * 4);
        assert_eq!(PagedPartitions::of([300, 32], 64, 128).bytes(300 * 32, 128), 0);
    }
}

//! Attention. Where there are too few queries to fill the device, keys are partitioned among blocks, and the last block
//! merges the partial results (flash-decoding). Many queries use tensor cores.

use std::ffi::CStr;

use quadriga_graph::{Attention, DType, NodeId};
use quadriga_runtime::BackendError;

use super::decode_attention::{DecodeAttention, DecodeAttentionSearch};
use super::lowering::Lowering;
use super::rope::RopeArg;
use super::scratch;
use crate::inner::MAX_COUNTERS;
use crate::kernels::KernelFile;
use crate::launch::{Argument, Launch, TensorArg};

/// The fewest keys of a partition: as many as a block has in flight, or two tiles.
const MIN_PARTITION: u64 = 128;
/// Queries of a block of the tensor-core kernel.
const TILE: u64 = 64;
/// The fewest queries for which it is faster.
const MIN_MMA_QUERIES: u64 = 16;
/// The compute capability that it needs.
const MMA_COMPUTE_CAPABILITY: (i32, i32) = (8, 0);

/// How keys are partitioned among blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct KeyPartitions {
    queries: u64,
    /// Keys of a partition.
    keys: u64,
    count: u64,
}

impl KeyPartitions {
    /// Enough partitions to fill the device twice; not many more, since each costs memory for a partial result.
    fn of(blocks: u64, queries: u64, keys: u64, multiprocessors: u32) -> KeyPartitions {
        let max = if blocks > MAX_COUNTERS as u64 {
            1
        } else {
            (2 * u64::from(multiprocessors) / blocks.max(1)).max(1)
        };
        let length = keys.max(1).div_ceil(max).next_multiple_of(MIN_PARTITION);
        KeyPartitions { queries, keys: length, count: keys.div_ceil(length).max(1) }
    }

    /// For kernels with a block per query and head; `[b, h, t]` are the extents of the queries.
    fn per_query([b, h, t]: [u64; 3], keys: u64, multiprocessors: u32) -> KeyPartitions {
        KeyPartitions::of(b * h * t, b * h * t, keys, multiprocessors)
    }

    /// For the tensor-core kernel; `None` if it cannot, or need not, compute so many queries.
    fn per_tile([b, h, t]: [u64; 3], keys: u64, multiprocessors: u32) -> Option<KeyPartitions> {
        let cut = KeyPartitions::of(b * h * t.div_ceil(TILE), b * h * t, keys, multiprocessors);
        let fits = t.div_ceil(TILE) < 1 << 16 && b * cut.count < 1 << 16 && keys < 1 << 31;
        (t >= MIN_MMA_QUERIES && fits).then_some(cut)
    }

    /// The most bytes of partial results of `e` elements, with whichever kernel.
    pub(super) fn max_bytes(queries: [u64; 3], keys: u64, e: usize, multiprocessors: u32) -> usize {
        let tiles = KeyPartitions::per_tile(queries, keys, multiprocessors).map_or(0, |cut| cut.bytes(e));
        KeyPartitions::per_query(queries, keys, multiprocessors).bytes(e).max(tiles)
    }

    /// Bytes of the partial results, of `e` elements; none for a single partition.
    fn bytes(&self, e: usize) -> usize {
        if self.count > 1 {
            scratch::total_bytes([(self.queries * self.count) as usize * (e + 2) * 4])
        } else {
            0
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct AttentionWork {
    q: TensorArg,
    k: TensorArg,
    v: TensorArg,
    mask: TensorArg,
    spans: TensorArg,
    out: TensorArg,
    partial: u64,
    counters: u64,
    scale: f32,
    soft_cap: f32,
    partition: i64,
    partitions: i64,
    fault_word: u64,
    fault: u32,
}

// SAFETY: `struct AttentionWork` of attention.cuh has the same fields in the same order.
unsafe impl Argument for AttentionWork {}

/// The current token of decode attention.
#[repr(C)]
#[derive(Clone, Copy)]
struct DecodeToken {
    q: u64,
    k: u64,
    v: u64,
    position: u64,
    row: u64,
    factors: TensorArg,
    rope: RopeArg,
    fault_keys: u32,
    fault_values: u32,
}

// SAFETY: `struct DecodeToken` of attention.cu has the same fields in the same order.
unsafe impl Argument for DecodeToken {}

impl Lowering<'_> {
    /// Finds decode attention in the split, and moves its rows to scratch memory from `base` on: by the plan, the
    /// result of attention may have the place of its rows, which are no longer needed once RoPE and the cache writes
    /// are done.
    pub(super) fn find_decode_attention(&mut self, base: u64, bytes: usize) -> Result<(), BackendError> {
        if !self.inner.fusion {
            return Ok(());
        }
        let readers = |storage| self.readers(storage).len();
        let search = DecodeAttentionSearch {
            graph: self.graph,
            nodes: self.split.nodes,
            kept: self.split.kept,
            readers: &readers,
        };
        for group in search.matches() {
            let [query, key, value] =
                [group.query, group.key, group.value].map(|row| self.tensor(row).bytes());
            let inputs = self.graph.inputs(group.attention);
            let (Some(q), Some(k), Some(v)) = (inputs.first(), inputs.get(1), inputs.get(2)) else {
                continue;
            };
            let caches = [(*k, group.write_keys), (*v, group.write_values)];
            let mut same = true;
            for (attended, write) in caches {
                let Some(written) = self.graph.inputs(write).first().copied() else { continue };
                same &= self.place(write, attended)?.1 == self.place(write, written)?.1;
            }
            let mut all = [TensorArg::default(); 3];
            for (id, slot) in [*q, *k, *v].into_iter().zip(&mut all) {
                *slot = self.tensor_arg(group.attention, id)?;
            }
            let [mut q, k, v] = all;
            // The kernel reads the query from scratch memory: its place in the plan does not matter.
            (q.address, q.strides) = (0, [0, 0, 0, 4]);
            let heads = q.dims[1] as u64;
            let few = heads <= 2 * u64::from(self.inner.context.multiprocessors);
            let sizes = [query, key, value];
            if !same || !few || f16_kernel(&q, &k, &v, false).is_none() || scratch::total_bytes(sizes) > bytes
            {
                continue;
            }
            let mut at = base;
            for (row, size) in [group.query, group.key, group.value].into_iter().zip(sizes) {
                self.moved.insert(self.graph[row].storage(), at);
                at += scratch::aligned(size) as u64;
            }
            group.fused.into_iter().for_each(|node| self.fuse(node));
            self.decode_attention.insert(group.attention, group);
        }
        Ok(())
    }

    pub(super) fn attention(&mut self, node: NodeId, parameters: &Attention) -> Result<(), BackendError> {
        let (inputs, out) = self.operands(node)?;
        let mut given = inputs.into_iter();
        let (Some(q), Some(k), Some(v)) = (given.next(), given.next(), given.next()) else {
            return Err(self.failed(node, "three inputs are needed"));
        };
        let mut optional = |present: bool| present.then(|| given.next()).flatten().unwrap_or_default();
        let mask = optional(parameters.mask);
        let spans: TensorArg = optional(parameters.spans);
        let [b, h, t, _] = q.dims;
        let [_, _, keys, e] = v.dims;
        let multiprocessors = self.inner.context.multiprocessors;
        let extents = [b as u64, h as u64, t as u64];
        let queries = (b * h * t) as u64;
        let grid = |n: i64| u32::try_from(n).unwrap_or(u32::MAX);
        let context = &self.inner.context;
        // Two buffers, each of a tile of keys and a tile of values.
        let shared = grid(e).saturating_mul(2).saturating_add(16).saturating_mul(4 * TILE as u32);
        let has_mma =
            context.compute_capability >= MMA_COMPUTE_CAPABILITY && shared <= context.shared_bytes_per_block;
        let by_tiles = match mma_kernel(&q, &k, &v, &out) {
            Some(name) if has_mma => {
                KeyPartitions::per_tile(extents, keys as u64, multiprocessors).map(|cut| (name, cut))
            }
            _ => None,
        };
        let cut = match by_tiles {
            Some((_, cut)) => cut,
            None => KeyPartitions::per_query(extents, keys as u64, multiprocessors),
        };
        let partial = match cut.bytes(e as usize) {
            0 => 0,
            bytes => {
                self.uses_counters = true;
                self.scratch(node, [bytes])?[0]
            }
        };
        let many = queries > 2 * u64::from(multiprocessors);
        let warps: u32 = if many { 4 } else { 8 };
        let (fault_word, fault) = self.fault(node, "a span of visible keys is out of range");
        let work = AttentionWork {
            q,
            k,
            v,
            mask,
            spans,
            out,
            partial,
            counters: self.inner.counters.address(),
            scale: parameters.scale,
            soft_cap: parameters.soft_cap.unwrap_or(0.0),
            partition: cut.keys as i64,
            partitions: cut.count as i64,
            fault_word,
            fault,
        };
        if let Some((name, _)) = by_tiles {
            let function =
                self.inner.kernels.function_with_shared_memory(KernelFile::AttentionMma, name, shared)?;
            let size = [grid(h), grid(t).div_ceil(TILE as u32), grid(b) * cut.count as u32];
            self.push(Launch::new(function, size, 128).shared_bytes(shared).dependent().arg(work));
            return Ok(());
        }
        let group = self.decode_attention.get(&node).copied();
        let warps = if group.is_some() && k.dims[3] < 256 { 4 } else { warps };
        let name = match group {
            Some(_) if k.dims[3] == 64 => c"k_attention_decode_64",
            Some(_) if k.dims[3] == 128 => c"k_attention_decode_128",
            Some(_) => c"k_attention_decode_256",
            None => f16_kernel(&q, &k, &v, many).unwrap_or(c"k_attention"),
        };
        let function = self.function(KernelFile::Attention, name)?;
        let shared = (2 * warps + warps * grid(e)) * 4;
        let launch = Launch::new(function, [cut.count as u32, grid(h), grid(b * t)], warps * 32);
        let launch = launch.shared_bytes(shared).dependent().arg(work);
        match group {
            None => self.push(launch),
            Some(group) => {
                let token = self.decode_token(node, &group)?;
                self.push(launch.arg(token));
            }
        }
        Ok(())
    }

    fn decode_token(&mut self, node: NodeId, group: &DecodeAttention) -> Result<DecodeToken, BackendError> {
        let reason = "a row index is out of range";
        let (_, fault_keys) = self.fault(group.write_keys, reason);
        let (_, fault_values) = self.fault(group.write_values, reason);
        Ok(DecodeToken {
            q: self.place(node, group.query)?.1,
            k: self.place(node, group.key)?.1,
            v: self.place(node, group.value)?.1,
            position: self.place(node, group.positions)?.1,
            row: self.place(node, group.ids)?.1,
            factors: match group.factors {
                Some(factors) => self.tensor_arg(node, factors)?,
                None => TensorArg::default(),
            },
            rope: RopeArg::new(&group.rope),
            fault_keys,
            fault_values,
        })
    }
}

/// Whether the rows of a tensor are contiguous, and start at multiples of `alignment`.
fn has_dense_rows(t: &TensorArg, dtype: DType, alignment: u64) -> bool {
    t.dtype == dtype.id()
        && t.strides[3] == dtype.block_bytes() as i64
        && t.address.is_multiple_of(alignment)
        && t.strides.iter().take(3).all(|stride| stride % alignment as i64 == 0)
}

/// The kernel for f16 keys and values, if there is one for their head size and their rows are aligned for 16-byte
/// loads.
fn f16_kernel(q: &TensorArg, k: &TensorArg, v: &TensorArg, many: bool) -> Option<&'static CStr> {
    let name = match (k.dims[3], many) {
        (64, false) => c"k_attention_f16_64",
        (128, false) => c"k_attention_f16_128",
        (256, false) => c"k_attention_f16_256",
        (64, true) => c"k_attention_f16_64_many",
        (128, true) => c"k_attention_f16_128_many",
        (256, true) => c"k_attention_f16_256_many",
        _ => return None,
    };
    let whole = |t: &TensorArg, dtype: DType| t.dims[3] == k.dims[3] && has_dense_rows(t, dtype, 16);
    (whole(q, DType::F32) && whole(k, DType::F16) && whole(v, DType::F16)).then_some(name)
}

/// The tensor-core kernel for f16 or Q8_0 keys and values, if there is one for their head size.
fn mma_kernel(q: &TensorArg, k: &TensorArg, v: &TensorArg, out: &TensorArg) -> Option<&'static CStr> {
    let name = match k.dims[3] {
        64 => c"k_attention_mma_64",
        80 => c"k_attention_mma_80",
        96 => c"k_attention_mma_96",
        128 => c"k_attention_mma_128",
        _ => return None,
    };
    let whole = |t: &TensorArg| has_dense_rows(t, DType::F32, 8);
    let cached = |t: &TensorArg| {
        let known = has_dense_rows(t, DType::F16, 16) || has_dense_rows(t, DType::Q8_0, 2);
        known && t.dims[3] == k.dims[3]
    };
    (whole(q) && whole(out) && cached(k) && cached(v)).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MULTIPROCESSORS: u32 = 132;

    #[test]
    fn many_queries_use_tensor_cores_and_partitions_fill_the_device() {
        let tiles = |queries, keys| KeyPartitions::per_tile(queries, keys, MULTIPROCESSORS);
        assert_eq!(tiles([1, 32, 15], 512), None, "few queries");
        // 32 heads of 8 tiles are enough blocks.
        assert_eq!(tiles([1, 32, 512], 512), Some(KeyPartitions { queries: 32 * 512, keys: 512, count: 1 }));
        // 9 heads of one tile are not: their keys are partitioned, with at least two tiles each.
        assert_eq!(tiles([1, 9, 40], 4096).unwrap().count, 16);
        assert_eq!(tiles([1, 9, 40], 256).unwrap(), KeyPartitions { queries: 360, keys: 128, count: 2 });
        assert_eq!(tiles([1, 1, 64], 1 << 31), None, "more keys than an int counts");
        for queries in [[1, 9, 40], [1, 32, 512], [2, 4, 17]] {
            let max = KeyPartitions::max_bytes(queries, 4096, 128, MULTIPROCESSORS);
            let taken = tiles(queries, 4096).unwrap().bytes(128);
            assert!(taken <= max, "{queries:?}: {taken} of {max}");
        }
    }

    #[test]
    fn tensor_cores_take_f16_and_q8_0_of_some_head_sizes() {
        let rows = |dtype: DType, cols: i64| {
            let row = dtype.row_bytes(cols as usize).unwrap() as i64;
            TensorArg {
                address: 1 << 20,
                dtype: dtype.id(),
                reserved: 0,
                dims: [1, 2, 64, cols],
                strides: [128 * row, 64 * row, row, dtype.block_bytes() as i64],
            }
        };
        let with = |k: TensorArg, v: TensorArg| {
            mma_kernel(&rows(DType::F32, k.dims[3]), &k, &v, &rows(DType::F32, k.dims[3])).is_some()
        };
        for cols in [64, 80, 96, 128] {
            assert!(with(rows(DType::F16, cols), rows(DType::F16, cols)), "{cols}");
        }
        assert!(with(rows(DType::Q8_0, 64), rows(DType::F16, 64)));
        assert!(with(rows(DType::Q8_0, 128), rows(DType::Q8_0, 128)));
        assert!(!with(rows(DType::F32, 64), rows(DType::F32, 64)), "f32 cache");
        assert!(!with(rows(DType::F16, 40), rows(DType::F16, 40)), "unsupported head size");
        assert!(!with(rows(DType::F16, 64), rows(DType::F16, 128)), "two head sizes");
        let shifted = TensorArg { address: (1 << 20) + 2, ..rows(DType::F16, 64) };
        assert!(!with(shifted, rows(DType::F16, 64)), "misaligned rows");
    }

    #[test]
    fn partitions_fill_the_device_twice_and_cost_memory_only_if_there_are_several() {
        let of = |blocks, keys| KeyPartitions::of(blocks, blocks, keys, MULTIPROCESSORS);
        // 264 blocks are wanted: 29 partitions for each of 9, of whole multiples of 128 keys.
        assert_eq!(of(9, 4096), KeyPartitions { queries: 9, keys: 256, count: 16 });
        assert_eq!(of(9, 1 << 20), KeyPartitions { queries: 9, keys: 36_224, count: 29 });
        assert_eq!(of(264, 4096).count, 1);
        assert_eq!(of(132, 4096).count, 2);
        // Each block has a counter where there are several partitions.
        let counters = MAX_COUNTERS as u64;
        let many = |blocks| KeyPartitions::of(blocks, blocks, 1 << 20, u32::MAX).count;
        assert!(many(counters) > 1 && many(counters + 1) == 1);
        let query = KeyPartitions::per_query([2, 3, 5], 4096, MULTIPROCESSORS);
        assert_eq!(query, KeyPartitions { queries: 30, keys: 512, count: 8 });
        // Each partial result has two numbers beside its elements.
        assert_eq!(query.bytes(62), scratch::total_bytes([30 * 8 * 64 * 4]));
        assert_eq!(KeyPartitions { count: 1, ..query }.bytes(62), 0);
        let max = KeyPartitions::max_bytes([2, 3, 5], 4096, 62, MULTIPROCESSORS);
        assert_eq!(max, query.bytes(62), "too few queries for tiles");
    }

    #[test]
    fn tiles_are_limited_by_the_grid() {
        let tiles = |queries, keys| KeyPartitions::per_tile(queries, keys, MULTIPROCESSORS).is_some();
        assert!(tiles([1, 1, 64 * 65_535], 512) && !tiles([1, 1, 64 * 65_535 + 1], 512));
        assert!(tiles([65_535, 1, 16], 512) && !tiles([65_536, 1, 16], 512));
        assert!(tiles([1, 1, 16], (1 << 31) - 1) && !tiles([1, 1, 16], 1 << 31));
        // Batches of partitions are one dimension of the grid; two heads of two tiles are four blocks.
        let cut = KeyPartitions::per_tile([2, 2, 65], 1 << 20, MULTIPROCESSORS).unwrap();
        assert_eq!((cut.queries, cut.count), (260, 33));
    }

    #[test]
    fn rows_are_dense_if_type_distance_and_address_allow_wide_loads() {
        let row = TensorArg {
            address: 1 << 20,
            dtype: DType::F16.id(),
            reserved: 0,
            dims: [1, 2, 64, 64],
            strides: [16_384, 8192, 128, 2],
        };
        assert!(has_dense_rows(&row, DType::F16, 16));
        for other in [
            TensorArg { dtype: DType::F32.id(), ..row },
            TensorArg { strides: [16_384, 8192, 128, 4], ..row },
            TensorArg { strides: [16_384, 8192, 136, 2], ..row },
            TensorArg { address: row.address + 8, ..row },
        ] {
            assert!(!has_dense_rows(&other, DType::F16, 16), "{other:?}");
        }
        let query = TensorArg { dtype: DType::F32.id(), strides: [32_768, 16_384, 256, 4], ..row };
        let name = |q: TensorArg, k: TensorArg, v: TensorArg, many: bool| {
            f16_kernel(&q, &k, &v, many).and_then(|name| name.to_str().ok())
        };
        assert_eq!(name(query, row, row, false), Some("k_attention_f16_64"));
        assert_eq!(name(query, row, row, true), Some("k_attention_f16_64_many"));
        let wide = |t: TensorArg| TensorArg { dims: [1, 2, 64, 128], ..t };
        assert_eq!(name(wide(query), wide(row), wide(row), false), Some("k_attention_f16_128"));
        assert_eq!(name(query, row, wide(row), false), None);
        assert_eq!(name(wide(query), row, row, false), None);
        assert_eq!(name(row, row, row, false), None, "queries are F32");
        assert_eq!(name(query, query, row, false), None, "keys are F16");
        assert!(mma_kernel(&query, &row, &row, &query).is_some());
        for [q, k, v, out] in [[&row, &row, &row, &query], [&query, &row, &row, &row]] {
            assert_eq!(mma_kernel(q, k, v, out), None);
        }
    }
}

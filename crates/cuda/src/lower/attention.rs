//! Attention. Where there are too few queries to fill the device, keys are partitioned among blocks, and the last block
//! merges the partial results (flash-decoding). Many queries, wide heads and quantized caches use tensor cores.

use std::ffi::CStr;

use quadriga_graph::{Attention, DType, NodeId};
use quadriga_runtime::BackendError;

use super::decode_attention::{DecodeAttention, DecodeAttentionSearch, HeadNorm};
use super::grouped_attention::{GroupedKernel, is_cached};
use super::key_partitions::{AttentionExtents, KeyPartitions, MIN_MMA_QUERIES, TILE};
use super::long_attention::{self, LongKernel};
use super::lowering::Lowering;
use super::rope::RopeArg;
use super::scratch;
use crate::kernels::KernelFile;
use crate::launch::{Argument, Launch, TensorArg, has_dense_rows};

/// The compute capability that the tensor-core kernels need.
pub(super) const MMA_COMPUTE_CAPABILITY: (i32, i32) = (8, 0);

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct AttentionWork {
    pub(super) q: TensorArg,
    pub(super) k: TensorArg,
    pub(super) v: TensorArg,
    mask: TensorArg,
    spans: TensorArg,
    pub(super) out: TensorArg,
    pub(super) partial: u64,
    sinks: u64,
    counters: u64,
    scale: f32,
    soft_cap: f32,
    pub(super) partition: i64,
    pub(super) partitions: i64,
    fault_word: u64,
    fault: u32,
}

// SAFETY: `struct AttentionWork` of attention.cuh has the same fields in the same order.
unsafe impl Argument for AttentionWork {}

/// A launch of a tensor-core kernel.
struct AttentionPlan {
    file: KernelFile,
    name: &'static CStr,
    shared_bytes: u32,
    threads: u32,
    /// The grid in x and y; in z there are batches and partitions.
    blocks: [u32; 2],
    cut: KeyPartitions,
}

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
    query_norm: u64,
    key_norm: u64,
    query_eps: f32,
    key_eps: f32,
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
            group.fused.iter().for_each(|node| self.fuse(*node));
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
        let sinks = optional(parameters.sinks).address;
        let pages = optional(parameters.pages);
        let [b, h, t, _] = q.dims;
        let [_, groups, keys, e] = v.dims;
        let extents = AttentionExtents {
            batch: b as u64,
            heads: h as u64,
            groups: groups as u64,
            queries: t as u64,
            keys: keys as u64,
            e: e as usize,
        };
        let (fault_word, fault) = self.fault(node, "a span of visible keys is out of range");
        let mut work = AttentionWork {
            q,
            k,
            v,
            mask,
            spans,
            out,
            partial: 0,
            sinks,
            counters: self.inner.counters.address(),
            scale: parameters.scale,
            soft_cap: parameters.soft_cap.unwrap_or(0.0),
            partition: 0,
            partitions: 0,
            fault_word,
            fault,
        };
        if parameters.pages {
            return self.paged_attention(node, work, pages);
        }
        let group = self.decode_attention.get(&node).cloned();
        let plan = match &group {
            None => self.attention_plan([&q, &k, &v, &out], &extents),
            Some(_) => None,
        };
        let multiprocessors = self.inner.context.multiprocessors;
        let long = group.as_ref().and_then(|group| self.long_plan(group, &extents, k.dims[3]));
        let cut = match (&plan, &long) {
            (Some(plan), _) => plan.cut,
            (None, Some((_, cut))) => *cut,
            (None, None) => KeyPartitions::per_query(&extents, multiprocessors),
        };
        let partial = match cut.bytes(e as usize) {
            0 => 0,
            bytes => {
                self.uses_counters = true;
                self.scratch(node, [bytes])?[0]
            }
        };
        (work.partial, work.partition, work.partitions) = (partial, cut.keys as i64, cut.count as i64);
        let grid = |n: i64| u32::try_from(n).unwrap_or(u32::MAX);
        if let Some(plan) = plan {
            let function =
                self.inner.kernels.function_with_shared_memory(plan.file, plan.name, plan.shared_bytes)?;
            let [x, y] = plan.blocks;
            let launch = Launch::new(function, [x, y, grid(b) * cut.count as u32], plan.threads);
            self.push(launch.shared_bytes(plan.shared_bytes).dependent().arg(work));
            return Ok(());
        }
        if let (Some(group), Some((kernel, cut))) = (&group, long) {
            let LongKernel { name, shared_bytes } = kernel;
            let kernels = &self.inner.kernels;
            let function =
                kernels.function_with_shared_memory(KernelFile::AttentionDecode, name, shared_bytes)?;
            let token = self.decode_token(node, group)?;
            let blocks = [cut.count as u32, grid(groups), 1];
            let launch = Launch::new(function, blocks, long_attention::THREADS).shared_bytes(shared_bytes);
            self.push(launch.dependent().arg(work).arg(token));
            return Ok(());
        }
        let many = (b * h * t) as u64 > 2 * u64::from(multiprocessors);
        let warps = match &group {
            Some(_) if k.dims[3] < 256 => 4,
            Some(_) => 8,
            None if many => 4,
            None => 8,
        };
        let name = match &group {
            Some(group) => decode_kernel(k.dims[3], group.query_norm.is_some() || group.key_norm.is_some()),
            None => f16_kernel(&q, &k, &v, many).unwrap_or_else(|| generic_kernel(&k, &v)),
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

    /// The tensor-core kernel of a node; `None` if others are faster, or alone take its operands.
    fn attention_plan(&self, tensors: [&TensorArg; 4], extents: &AttentionExtents) -> Option<AttentionPlan> {
        let context = &self.inner.context;
        if context.compute_capability < MMA_COMPUTE_CAPABILITY {
            return None;
        }
        let [q, k, v, out] = tensors;
        let multiprocessors = context.multiprocessors;
        // Two buffers, each of a tile of keys and a tile of values.
        let shared_bytes =
            (extents.e as u32).saturating_mul(2).saturating_add(16).saturating_mul(4 * TILE as u32);
        if let Some(name) = mma_kernel(q, k, v, out)
            && shared_bytes <= context.shared_bytes_per_block
            && let Some(cut) = KeyPartitions::per_tile(extents, multiprocessors)
        {
            let blocks = [extents.heads as u32, extents.queries.div_ceil(TILE) as u32];
            let file = KernelFile::AttentionMma;
            return Some(AttentionPlan { file, name, shared_bytes, threads: 128, blocks, cut });
        }
        // With few queries, the kernels for f16 are faster.
        if extents.queries < MIN_MMA_QUERIES && f16_kernel(q, k, v, false).is_some() {
            return None;
        }
        let kernel = GroupedKernel::of(tensors, context.shared_bytes_per_block)?;
        let cut = KeyPartitions::per_group(extents, kernel.rows, multiprocessors)?;
        let blocks = [extents.groups as u32, extents.groups_rows().div_ceil(kernel.rows) as u32];
        Some(AttentionPlan {
            file: KernelFile::AttentionGrouped,
            name: kernel.name,
            shared_bytes: kernel.shared_bytes(),
            threads: 256,
            blocks,
            cut,
        })
    }

    /// The kernel of decode attention over a long cache; `None` if others are faster, or alone take its operands.
    fn long_plan(
        &self,
        group: &DecodeAttention,
        extents: &AttentionExtents,
        d: i64,
    ) -> Option<(LongKernel, KeyPartitions)> {
        let context = &self.inner.context;
        let normed = group.query_norm.is_some() || group.key_norm.is_some();
        let kernel = LongKernel::of(d, normed, context.shared_bytes_per_block)
            .filter(|_| context.compute_capability >= MMA_COMPUTE_CAPABILITY)?;
        Some((kernel, KeyPartitions::per_long_group(extents, context.multiprocessors)?))
    }

    fn decode_token(&mut self, node: NodeId, group: &DecodeAttention) -> Result<DecodeToken, BackendError> {
        let reason = "a row index is out of range";
        let (_, fault_keys) = self.fault(group.write_keys, reason);
        let (_, fault_values) = self.fault(group.write_values, reason);
        let mut weight = |norm: Option<HeadNorm>| match norm {
            Some(norm) => Ok(self.place(node, norm.weight)?.1),
            None => Ok::<u64, BackendError>(0),
        };
        let (query_norm, key_norm) = (weight(group.query_norm)?, weight(group.key_norm)?);
        let eps = |norm: Option<HeadNorm>| norm.map_or(0.0, |norm| norm.eps);
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
            query_norm,
            key_norm,
            query_eps: eps(group.query_norm),
            key_eps: eps(group.key_norm),
        })
    }
}

/// The kernel of decode attention for heads of `d` elements, with a norm of query or key.
fn decode_kernel(d: i64, normed: bool) -> &'static CStr {
    match (d, normed) {
        (64, false) => c"k_attention_decode_64",
        (128, false) => c"k_attention_decode_128",
        (_, false) => c"k_attention_decode_256",
        (64, true) => c"k_attention_decode_64_normed",
        (128, true) => c"k_attention_decode_128_normed",
        (_, true) => c"k_attention_decode_256_normed",
    }
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

/// The kernel for all types.
fn generic_kernel(k: &TensorArg, v: &TensorArg) -> &'static CStr {
    if k.dims[3].max(v.dims[3]) <= 128 { c"k_attention" } else { c"k_attention_wide" }
}

/// The tensor-core kernel for many queries, if there is one for their head size.
fn mma_kernel(q: &TensorArg, k: &TensorArg, v: &TensorArg, out: &TensorArg) -> Option<&'static CStr> {
    let name = match k.dims[3] {
        64 => c"k_attention_mma_64",
        80 => c"k_attention_mma_80",
        96 => c"k_attention_mma_96",
        128 => c"k_attention_mma_128",
        _ => return None,
    };
    let whole = |t: &TensorArg| has_dense_rows(t, DType::F32, 8);
    let cached = |t: &TensorArg| is_cached(t) && t.dims[3] == k.dims[3];
    (whole(q) && whole(out) && cached(k) && cached(v)).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_cores_take_cache_types_of_some_head_sizes() {
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
        for dtype in [DType::Q8_0, DType::Q5_1, DType::Q4_0, DType::BF16] {
            assert!(with(rows(dtype, 128), rows(dtype, 128)), "{dtype}");
        }
        assert!(!with(rows(DType::F32, 64), rows(DType::F32, 64)), "f32 cache");
        assert!(!with(rows(DType::F16, 40), rows(DType::F16, 40)), "unsupported head size");
        assert!(!with(rows(DType::F16, 64), rows(DType::F16, 128)), "two head sizes");
        let shifted = TensorArg { address: (1 << 20) + 2, ..rows(DType::F16, 64) };
        assert!(!with(shifted, rows(DType::F16, 64)), "misaligned rows");
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

//! Rotary position embedding (RoPE), alone or fused with the KV-cache write.

use quadriga_graph::{NodeId, Op, Pairing, Rope, TensorId, TensorKind};
use quadriga_runtime::BackendError;

use super::lowering::Lowering;
use crate::buffer::overlap;
use crate::kernels::KernelFile;
use crate::launch::{Argument, Launch, TensorArg, is_plain};

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct RopeArg {
    dims: i32,
    half_split: i32,
    base: f32,
    scale: f32,
    ext_factor: f32,
    attn_factor: f32,
    low: f32,
    high: f32,
}

// SAFETY: `struct Rope` of rope.cuh has the same fields in the same order.
unsafe impl Argument for RopeArg {}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RopeSetRows {
    q: TensorArg,
    out: TensorArg,
    k: TensorArg,
    v: TensorArg,
    keys: TensorArg,
    values: TensorArg,
    positions: TensorArg,
    ids: TensorArg,
    factors: TensorArg,
    rope: RopeArg,
    fault_word: u64,
    fault_keys: u32,
    fault_values: u32,
}

// SAFETY: `struct RopeSetRows` of rope.cu has the same fields in the same order.
unsafe impl Argument for RopeSetRows {}

impl RopeArg {
    pub(super) fn new(rope: &Rope) -> RopeArg {
        let (low, high) = if rope.ext_factor == 0.0 { (0.0, 0.0) } else { rope.yarn_range() };
        RopeArg {
            dims: rope.dims as i32,
            half_split: i32::from(rope.pairing == Pairing::Half),
            base: rope.base,
            scale: rope.scale,
            ext_factor: rope.ext_factor,
            attn_factor: rope.attn_factor,
            low: low as f32,
            high: high as f32,
        }
    }
}

/// The fewest tokens for one block per token.
const MIN_BATCH_TOKENS: i64 = 64;

/// The nodes that are fused with RoPE of the queries: RoPE of the keys, and the writes of keys and values.
struct RopeGroup {
    keys: NodeId,
    write_keys: NodeId,
    write_values: NodeId,
}

impl Lowering<'_> {
    pub(super) fn rope(&mut self, at: usize, node: NodeId, rope: &Rope) -> Result<(), BackendError> {
        if let Some(group) = self.rope_group(at, node)
            && self.rope_set_rows(node, rope, &group)?
        {
            return Ok(());
        }
        let (inputs, out) = self.operands(node)?;
        let x = inputs.first().copied().unwrap_or_default();
        let positions = inputs.get(1).copied().unwrap_or_default();
        let factors = inputs.get(2).copied().unwrap_or_default();
        let threads = x.rows() * (x.dims[3] as u64 - rope.dims as u64 / 2);
        let launch = Launch::over(self.function(KernelFile::Rope, c"k_rope")?, threads).dependent();
        self.push(launch.arg(x).arg(positions).arg(factors).arg(out).arg(RopeArg::new(rope)));
        Ok(())
    }

    /// The three nodes after RoPE of the queries in an attention layer.
    fn rope_group(&self, at: usize, node: NodeId) -> Option<RopeGroup> {
        if !self.inner.fusion {
            return None;
        }
        let mut later = self.later(at);
        let (keys, write_keys, write_values) = (later.next()?, later.next()?, later.next()?);
        let graph = self.graph;
        let alike = graph[keys].op() == graph[node].op()
            && graph.inputs(keys).get(1..) == graph.inputs(node).get(1..);
        let [_, rotated, ids] = *graph.inputs(write_keys) else { return None };
        let [_, _, other_ids] = *graph.inputs(write_values) else { return None };
        let writes = [write_keys, write_values].iter().all(|n| matches!(graph[*n].op(), Op::SetRows));
        let produced = graph[keys].output();
        // The kernel reads frequency factors before the previous kernel is complete.
        let fixed = graph.inputs(node).get(2).is_none_or(|factors| {
            matches!(graph[graph[*factors].storage()].kind(), TensorKind::Weight | TensorKind::Constant)
        });
        let fits = alike
            && writes
            && fixed
            && ids == other_ids
            && graph[rotated].storage() == produced
            && graph[rotated].is_contiguous()
            && self.readers(produced).len() == 1
            && !(self.split.kept)(produced);
        fits.then_some(RopeGroup { keys, write_keys, write_values })
    }

    fn rope_set_rows(&mut self, node: NodeId, rope: &Rope, group: &RopeGroup) -> Result<bool, BackendError> {
        let graph = self.graph;
        let input = |node: NodeId, at: usize| graph.inputs(node).get(at).copied();
        let ids = [
            input(node, 0),
            Some(graph[node].output()),
            input(group.keys, 0),
            input(group.write_values, 1),
            input(group.write_keys, 0),
            input(group.write_values, 0),
            input(node, 1),
            input(group.write_keys, 2),
        ];
        let mut all = [TensorArg::default(); 8];
        for (id, slot) in ids.iter().zip(&mut all) {
            let Some(id) = id else { return Ok(false) };
            *slot = self.tensor_arg(node, *id)?;
        }
        let factors = match input(node, 2) {
            Some(id) => self.tensor_arg(node, id)?,
            None => TensorArg::default(),
        };
        let [q, out, k, v, keys, values, positions, rows] = all;
        let tokens = q.dims[1];
        let width = k.dims[2] * k.dims[3];
        let cache = |t: &TensorArg, width: i64| {
            t.dims[0] == 1
                && t.dims[1] == 1
                && t.dims[3] == width
                && quadriga_graph::DType::from_id(t.dtype).is_some_and(is_plain)
        };
        let fits = q.dims[0] == 1
            && k.dims[0] == 1
            && k.dims[1] == tokens
            && v.dims == [1, 1, tokens, v.dims[3]]
            && rows.dims == [1, 1, 1, tokens]
            && cache(&keys, width)
            && cache(&values, v.dims[3]);
        let bytes = |at: usize| -> usize {
            ids.get(at).copied().flatten().map_or(0, |id: TensorId| graph[id].bytes())
        };
        // The rotated queries are written while all inputs are still read.
        let in_place = q.address == out.address && q.strides == out.strides;
        let apart = |t: &TensorArg, at: usize| !overlap(out.address, bytes(1), t.address, bytes(at));
        if !fits || !(in_place || apart(&q, 0)) || !apart(&k, 2) || !apart(&v, 3) {
            return Ok(false);
        }
        let pairs = |t: &TensorArg| t.rows() * (t.dims[3] as u64 - rope.dims as u64 / 2);
        let threads = pairs(&q) + pairs(&k) + v.elements();
        if threads > i32::MAX as u64 {
            return Ok(false);
        }
        let reason = "a row index is out of range";
        let (fault_word, fault_keys) = self.fault(group.write_keys, reason);
        let (_, fault_values) = self.fault(group.write_values, reason);
        let work = RopeSetRows {
            q,
            out,
            k,
            v,
            keys,
            values,
            positions,
            ids: rows,
            factors,
            rope: RopeArg::new(rope),
            fault_word,
            fault_keys,
            fault_values,
        };
        let launch = if tokens >= MIN_BATCH_TOKENS && q.dims[3] == k.dims[3] && q.dims[3] <= 256 {
            Launch::new(
                self.function(KernelFile::Rope, c"k_rope_set_rows_batch")?,
                [tokens as u32, 1, 1],
                256,
            )
        } else {
            let blocks = threads.div_ceil(128) as u32;
            Launch::new(self.function(KernelFile::Rope, c"k_rope_set_rows")?, [blocks, 1, 1], 128)
        };
        self.push(launch.dependent().arg(work));
        [group.keys, group.write_keys, group.write_values].into_iter().for_each(|node| self.fuse(node));
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fading_range_is_passed_with_yarn_only() {
        let plain = Rope { original_context: 4096, ..Rope::new(128, Pairing::Adjacent, 1e4) };
        let arg = RopeArg::new(&plain);
        assert_eq!((arg.dims, arg.half_split, arg.low, arg.high), (128, 0, 0.0, 0.0));
        let yarn = Rope { ext_factor: 1.0, pairing: Pairing::Half, ..plain };
        let arg = RopeArg::new(&yarn);
        assert_eq!((arg.half_split, arg.low, arg.high), (1, 20.0, 46.0));
    }
}

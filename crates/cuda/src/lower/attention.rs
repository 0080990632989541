//! Attention: pieces of the keys side by side, the last of which merges them.

use std::ffi::CStr;

use quadriga_graph::{Attention, DType, NodeId};
use quadriga_runtime::BackendError;

use super::Lowering;
use super::fresh::Group;
use super::rope::Parameters;
use super::scratch::together;
use crate::backend::COUNTERS;
use crate::kernels::File;
use crate::launch::{Argument, Described, Launch};

/// Fewest keys in a piece: as many as the threads of a block take at once.
const LEAST_PIECE: u64 = 128;

/// How the keys are cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Pieces {
    queries: u64,
    /// Keys of a piece.
    piece: u64,
    count: u64,
}

impl Pieces {
    /// Enough blocks to fill the device twice; a piece's result costs memory, so not many more.
    pub(super) fn of(queries: u64, keys: u64, multiprocessors: u32) -> Pieces {
        let most = if queries > COUNTERS as u64 {
            1
        } else {
            (2 * u64::from(multiprocessors) / queries.max(1)).max(1)
        };
        let piece = keys.max(1).div_ceil(most).next_multiple_of(LEAST_PIECE);
        Pieces { queries, piece, count: keys.div_ceil(piece).max(1) }
    }

    /// Bytes of the pieces' results, of `e` elements, where there are several.
    pub(super) fn bytes(&self, e: usize) -> usize {
        if self.count > 1 { together([(self.queries * self.count) as usize * (e + 2) * 4]) } else { 0 }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Work {
    q: Described,
    k: Described,
    v: Described,
    mask: Described,
    spans: Described,
    out: Described,
    partial: u64,
    counters: u64,
    scale: f32,
    soft_cap: f32,
    piece: i64,
    pieces: i64,
    faults: u64,
    fault: u32,
}

// SAFETY: `struct Work` of attention.cu has the same fields in the same order.
unsafe impl Argument for Work {}

/// The token under way, where attention takes it along.
#[repr(C)]
#[derive(Clone, Copy)]
struct Fresh {
    q: u64,
    k: u64,
    v: u64,
    position: u64,
    row: u64,
    factors: Described,
    rope: Parameters,
    fault_keys: u32,
    fault_values: u32,
}

// SAFETY: `struct Fresh` of attention.cu has the same fields in the same order.
unsafe impl Argument for Fresh {}

impl Lowering<'_> {
    pub(super) fn attention(&mut self, node: NodeId, parameters: &Attention) -> Result<(), BackendError> {
        let (inputs, out) = self.operands(node)?;
        let mut given = inputs.into_iter();
        let (Some(q), Some(k), Some(v)) = (given.next(), given.next(), given.next()) else {
            return Err(self.failed(node, "three inputs are needed"));
        };
        let mut optional = |present: bool| present.then(|| given.next()).flatten().unwrap_or_default();
        let mask = optional(parameters.mask);
        let spans: Described = optional(parameters.spans);
        let [b, h, t, _] = q.dims;
        let [_, _, keys, e] = v.dims;
        let multiprocessors = self.shared.context.multiprocessors;
        let queries = (b * h * t) as u64;
        let cut = Pieces::of(queries, keys as u64, multiprocessors);
        let (piece, pieces) = (cut.piece, cut.count);
        let partial = match cut.bytes(e as usize) {
            0 => 0,
            bytes => {
                self.counts = true;
                self.scratch(node, [bytes])?[0]
            }
        };
        let many = queries > 2 * u64::from(multiprocessors);
        let warps: u32 = if many { 4 } else { 8 };
        let (faults, fault) = self.fault(node, "a span of visible keys is out of range");
        let grid = |n: i64| u32::try_from(n).unwrap_or(u32::MAX);
        let work = Work {
            q,
            k,
            v,
            mask,
            spans,
            out,
            partial,
            counters: self.shared.counters.address(),
            scale: parameters.scale,
            soft_cap: parameters.soft_cap.unwrap_or(0.0),
            piece: piece as i64,
            pieces: pieces as i64,
            faults,
            fault,
        };
        let group = self.fresh.get(&node).copied();
        let warps = if group.is_some() && k.dims[3] < 256 { 4 } else { warps };
        let name = match group {
            Some(_) if k.dims[3] == 64 => c"k_attention_64_fresh",
            Some(_) if k.dims[3] == 128 => c"k_attention_128_fresh",
            Some(_) => c"k_attention_256_fresh",
            None => half_rows(&q, &k, &v, many).unwrap_or(c"k_attention"),
        };
        let function = self.function(File::Attention, name)?;
        let shared = (2 * warps + warps * grid(e)) * 4;
        let launch = Launch::new(function, [pieces as u32, grid(h), grid(b * t)], warps * 32);
        let launch = launch.shared(shared).early().arg(work);
        match group {
            None => self.push(launch),
            Some(group) => {
                let fresh = self.fresh_token(node, &group)?;
                self.push(launch.arg(fresh));
            }
        }
        Ok(())
    }

    fn fresh_token(&mut self, node: NodeId, group: &Group) -> Result<Fresh, BackendError> {
        let reason = "a row index is out of range";
        let (_, fault_keys) = self.fault(group.write_keys, reason);
        let (_, fault_values) = self.fault(group.write_values, reason);
        Ok(Fresh {
            q: self.place(node, group.query)?.1,
            k: self.place(node, group.key)?.1,
            v: self.place(node, group.value)?.1,
            position: self.place(node, group.positions)?.1,
            row: self.place(node, group.ids)?.1,
            factors: match group.factors {
                Some(factors) => self.described(node, factors)?,
                None => Described::default(),
            },
            rope: Parameters::new(&group.rope),
            fault_keys,
            fault_values,
        })
    }
}

/// The kernel for f16 keys and values whose rows can be loaded whole, where there is one for their length.
pub(super) fn half_rows(q: &Described, k: &Described, v: &Described, many: bool) -> Option<&'static CStr> {
    let name = match (k.dims[3], many) {
        (64, false) => c"k_attention_64",
        (128, false) => c"k_attention_128",
        (256, false) => c"k_attention_256",
        (64, true) => c"k_attention_64_many",
        (128, true) => c"k_attention_128_many",
        (256, true) => c"k_attention_256_many",
        _ => return None,
    };
    let aligned = |t: &Described| {
        t.address.is_multiple_of(16) && t.strides.iter().take(3).all(|stride| stride % 16 == 0)
    };
    let dense = |t: &Described, dtype: DType| {
        t.dtype == dtype.id()
            && t.dims[3] == k.dims[3]
            && t.strides[3] == dtype.block_bytes() as i64
            && aligned(t)
    };
    (dense(q, DType::F32) && dense(k, DType::F16) && dense(v, DType::F16)).then_some(name)
}

//! Attention: pieces of the keys side by side, the last of which merges them. Many queries go by tiles, on tensor cores.

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

/// Fewest keys in a piece: as many as the threads of a block take at once, or two tiles.
const LEAST_PIECE: u64 = 128;
/// Queries that a block of tiles takes, and the fewest that are worth it.
const TILE: u64 = 64;
const LEAST_QUERIES: u64 = 16;
/// The first compute capability whose tensor cores the tiles are for.
const TENSOR_CORES: (i32, i32) = (8, 0);

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
    fn of(blocks: u64, queries: u64, keys: u64, multiprocessors: u32) -> Pieces {
        let most = if blocks > COUNTERS as u64 {
            1
        } else {
            (2 * u64::from(multiprocessors) / blocks.max(1)).max(1)
        };
        let piece = keys.max(1).div_ceil(most).next_multiple_of(LEAST_PIECE);
        Pieces { queries, piece, count: keys.div_ceil(piece).max(1) }
    }

    /// Where each query of each head has a block; `[b, h, t]` are the queries' extents.
    fn of_rows([b, h, t]: [u64; 3], keys: u64, multiprocessors: u32) -> Pieces {
        Pieces::of(b * h * t, b * h * t, keys, multiprocessors)
    }

    /// Where so many queries of each head share one that it pays.
    fn of_tiles([b, h, t]: [u64; 3], keys: u64, multiprocessors: u32) -> Option<Pieces> {
        let cut = Pieces::of(b * h * t.div_ceil(TILE), b * h * t, keys, multiprocessors);
        let fits = t.div_ceil(TILE) < 1 << 16 && b * cut.count < 1 << 16 && keys < 1 << 31;
        (t >= LEAST_QUERIES && fits).then_some(cut)
    }

    /// The most bytes that the results of pieces of `e` elements take, whichever way it goes.
    pub(super) fn most_bytes(queries: [u64; 3], keys: u64, e: usize, multiprocessors: u32) -> usize {
        let tiles = Pieces::of_tiles(queries, keys, multiprocessors).map_or(0, |cut| cut.bytes(e));
        Pieces::of_rows(queries, keys, multiprocessors).bytes(e).max(tiles)
    }

    /// Bytes of the pieces' results, of `e` elements, where there are several.
    fn bytes(&self, e: usize) -> usize {
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
        let extents = [b as u64, h as u64, t as u64];
        let queries = (b * h * t) as u64;
        let by_tiles = match tiles(&q, &k, &v, &out) {
            Some(name) if self.shared.context.compute_capability >= TENSOR_CORES => {
                Pieces::of_tiles(extents, keys as u64, multiprocessors).map(|cut| (name, cut))
            }
            _ => None,
        };
        let cut = match by_tiles {
            Some((_, cut)) => cut,
            None => Pieces::of_rows(extents, keys as u64, multiprocessors),
        };
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
        if let Some((name, _)) = by_tiles {
            // Keys and values, twice.
            let shared = 4 * TILE as u32 * (2 * grid(e) + 16);
            let function = self.shared.kernels.large_function(File::Tiles, name, shared)?;
            let size = [grid(h), grid(t).div_ceil(TILE as u32), grid(b) * pieces as u32];
            self.push(Launch::new(function, size, 128).shared(shared).early().arg(work));
            return Ok(());
        }
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

/// Whether the rows of a tensor lie dense, and start at multiples of so many bytes.
fn rows_dense(t: &Described, dtype: DType, alignment: u64) -> bool {
    t.dtype == dtype.id()
        && t.strides[3] == dtype.block_bytes() as i64
        && t.address.is_multiple_of(alignment)
        && t.strides.iter().take(3).all(|stride| stride % alignment as i64 == 0)
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
    let whole = |t: &Described, dtype: DType| t.dims[3] == k.dims[3] && rows_dense(t, dtype, 16);
    (whole(q, DType::F32) && whole(k, DType::F16) && whole(v, DType::F16)).then_some(name)
}

/// The kernel that takes f16 or Q8_0 keys and values by tiles, where there is one for the length of their rows.
fn tiles(q: &Described, k: &Described, v: &Described, out: &Described) -> Option<&'static CStr> {
    let name = match k.dims[3] {
        64 => c"k_attention_tiles_64",
        80 => c"k_attention_tiles_80",
        96 => c"k_attention_tiles_96",
        128 => c"k_attention_tiles_128",
        _ => return None,
    };
    let whole = |t: &Described| rows_dense(t, DType::F32, 8);
    let cached = |t: &Described| {
        let known = rows_dense(t, DType::F16, 16) || rows_dense(t, DType::Q8_0, 2);
        known && t.dims[3] == k.dims[3]
    };
    (whole(q) && whole(out) && cached(k) && cached(v)).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MULTIPROCESSORS: u32 = 132;

    #[test]
    fn many_queries_go_by_tiles_whose_pieces_fill_the_device() {
        let tiles = |queries, keys| Pieces::of_tiles(queries, keys, MULTIPROCESSORS);
        assert_eq!(tiles([1, 32, 15], 512), None, "few queries");
        // 32 heads of 8 tiles are enough blocks.
        assert_eq!(tiles([1, 32, 512], 512), Some(Pieces { queries: 32 * 512, piece: 512, count: 1 }));
        // 9 heads of one tile are not: their keys are cut, but not into less than two tiles.
        assert_eq!(tiles([1, 9, 40], 4096).unwrap().count, 16);
        assert_eq!(tiles([1, 9, 40], 256).unwrap(), Pieces { queries: 360, piece: 128, count: 2 });
        assert_eq!(tiles([1, 1, 64], 1 << 31), None, "keys that have no number");
        for queries in [[1, 9, 40], [1, 32, 512], [2, 4, 17]] {
            let most = Pieces::most_bytes(queries, 4096, 128, MULTIPROCESSORS);
            let taken = tiles(queries, 4096).unwrap().bytes(128);
            assert!(taken <= most, "{queries:?}: {taken} of {most}");
        }
    }

    #[test]
    fn tiles_take_halves_and_eight_bits_of_some_lengths() {
        let rows = |dtype: DType, cols: i64| {
            let row = dtype.row_bytes(cols as usize).unwrap() as i64;
            Described {
                address: 1 << 20,
                dtype: dtype.id(),
                packed: 0,
                dims: [1, 2, 64, cols],
                strides: [128 * row, 64 * row, row, dtype.block_bytes() as i64],
            }
        };
        let with = |k: Described, v: Described| {
            tiles(&rows(DType::F32, k.dims[3]), &k, &v, &rows(DType::F32, k.dims[3])).is_some()
        };
        for cols in [64, 80, 96, 128] {
            assert!(with(rows(DType::F16, cols), rows(DType::F16, cols)), "{cols}");
        }
        assert!(with(rows(DType::Q8_0, 64), rows(DType::F16, 64)));
        assert!(with(rows(DType::Q8_0, 128), rows(DType::Q8_0, 128)));
        assert!(!with(rows(DType::F32, 64), rows(DType::F32, 64)), "full precision");
        assert!(!with(rows(DType::F16, 40), rows(DType::F16, 40)), "another length");
        assert!(!with(rows(DType::F16, 64), rows(DType::F16, 128)), "two lengths");
        let shifted = Described { address: (1 << 20) + 2, ..rows(DType::F16, 64) };
        assert!(!with(shifted, rows(DType::F16, 64)), "rows that cannot be loaded whole");
    }
}

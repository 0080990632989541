//! Attention of many queries with AMX tiles, in bf16 with f32 sums.
//!
//! First keys and values are turned into tiles, once for all queries: chunks of 64 cells, filled up with zeros.
//!
//! ```text
//! keys    [kv head][chunk][4 groups of 16 cells][key_width / 32]  tile: row p = elements 2p, 2p + 1 of the 16 cells
//! values  [kv head][chunk][value_width / 16 ][2 halves of 32 cells]  tile: row p = cells 2p, 2p + 1 of 16 elements
//! ```
//!
//! Then each unit takes one head and 32 queries (two strips of 16), chunk by chunk: scores by tiles into scratch
//! memory, softmax on vectors, weights as tiles, and sums by tiles. The softmax takes most of the time.

use std::arch::x86_64::*;

use quadriga_graph::DType;

use super::tile::masked;
use super::{Attention, Rows, Shape};
use crate::isa::{Amx, Isa};
use crate::kernels::KernelError;
use crate::kernels::matmul::amx as tile;
use crate::kernels::vec::simd::{Lanes16, Simd};
use crate::kernels::vec::{self, exp, tanh};
use crate::pool::Worker;

const TILE: usize = 1024;
/// Cells of a chunk.
const CHUNK: usize = 64;
/// Queries of a unit.
const BLOCK: usize = 32;

/// Whether tiles are worth it. They round to bf16, which is too coarse for keys and values in f32.
pub(super) fn suits(shape: &Shape) -> bool {
    let rounded = |dtype| dtype != DType::F32;
    shape.tokens >= 16
        && shape.cells > 0
        && shape.key_width > 0
        && rounded(shape.key_type)
        && rounded(shape.value_type)
}

/// Sizes in tiles and bytes.
#[derive(Clone, Copy)]
struct Sizes {
    chunks: usize,
    /// Tiles of a strip of queries, and of 16 keys.
    key_tiles: usize,
    /// Elements of a padded row of results, a multiple of 32.
    value_pad: usize,
    /// Bytes of one chunk of one head.
    key_chunk: usize,
    value_chunk: usize,
}

impl Sizes {
    fn new(shape: &Shape) -> Option<Sizes> {
        let key_tiles = shape.key_width.div_ceil(32);
        let value_pad = shape.value_width.checked_next_multiple_of(32)?;
        Some(Sizes {
            chunks: shape.cells.div_ceil(CHUNK),
            key_tiles,
            value_pad,
            key_chunk: key_tiles.checked_mul(CHUNK / 16 * TILE)?,
            value_chunk: (value_pad / 16).checked_mul(CHUNK / 32 * TILE)?,
        })
    }
}

/// Bytes of scratch memory for one thread, and of keys and values as tiles.
pub(super) fn bytes(shape: &Shape) -> Option<[usize; 2]> {
    let sizes = Sizes::new(shape)?;
    let rows = sizes.key_tiles.checked_mul(2 * TILE)?.checked_add(sizes.value_pad.checked_mul(BLOCK * 4)?)?;
    let scratch = rows.checked_add(BLOCK * CHUNK * 4 + 4 * TILE + BLOCK * 8)?;
    let chunk = sizes.key_chunk.checked_add(sizes.value_chunk)?;
    Some([scratch, shape.kv_heads.checked_mul(sizes.chunks)?.checked_mul(chunk)?])
}

/// Computes; see [`Attention::run`].
pub(super) fn run(
    token: Amx,
    attention: &Attention<'_>,
    worker: &Worker<'_>,
    scratch: *mut u8,
    tiles: *mut u8,
) -> Result<(), KernelError> {
    let shape = &attention.shape;
    let sizes =
        Sizes::new(shape).ok_or(KernelError::TooLarge { rows: shape.tokens, columns: shape.cells })?;
    let values = tiles.wrapping_add(shape.kv_heads * sizes.chunks * sizes.key_chunk);
    let (first, last) = (0..shape.tokens).fold((shape.cells, 0), |(first, last), token| {
        let (begin, end) = attention.span(token);
        if begin < end { (first.min(begin), last.max(end)) } else { (first, last) }
    });
    let visible = if first < last { first / CHUNK..last.div_ceil(CHUNK) } else { 0..0 };
    worker.chunks(shape.kv_heads * visible.len(), |i| {
        let (head, chunk) = (i % shape.kv_heads, visible.start + i / shape.kv_heads);
        let at = head * sizes.chunks + chunk;
        // SAFETY: the token proves the instructions; each chunk of tiles belongs to one chunk of work.
        unsafe {
            key_tiles(attention, &sizes, head, chunk, tiles.add(at * sizes.key_chunk));
            value_tiles(attention, &sizes, head, chunk, values.add(at * sizes.value_chunk));
        }
    });
    worker.barrier()?;
    let blocks = shape.tokens.div_ceil(BLOCK);
    worker.chunks(shape.heads * blocks, |i| {
        // Late queries see the most cells under a causal span: they go first.
        let (head, block) = (i % shape.heads, blocks - 1 - i / shape.heads);
        // SAFETY: the token proves the instructions; scratch memory is the worker's own, results are the unit's.
        unsafe {
            tile::configure(token);
            unit(attention, &sizes, head, block, scratch, tiles, values);
            tile::release(token);
        }
    });
    Ok(())
}

/// Widens a row of keys or values to f32; zeros past its end, and for cells that are not there.
unsafe fn widened(
    isa: Isa,
    dtype: DType,
    rows: &Rows,
    head: usize,
    cell: usize,
    width: usize,
    out: &mut [f32],
) {
    out.fill(0.0);
    if let Some(out) = out.get_mut(..width) {
        // SAFETY: promised by the caller.
        unsafe { vec::load_row(isa, dtype, rows.row(cell, head), out) };
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn key_tiles(attention: &Attention<'_>, sizes: &Sizes, head: usize, chunk: usize, out: *mut u8) {
    let shape = &attention.shape;
    let mut row = vec![0.0_f32; sizes.key_tiles * 32];
    for index in 0..CHUNK {
        let cell = chunk * CHUNK + index;
        if cell < shape.cells {
            // SAFETY: the cell is there.
            unsafe {
                widened(
                    attention.isa,
                    shape.key_type,
                    &attention.memory.keys,
                    head,
                    cell,
                    shape.key_width,
                    &mut row,
                );
            }
        } else {
            row.fill(0.0);
        }
        let group = out.wrapping_add(index / 16 * sizes.key_tiles * TILE);
        for (t, values) in row.as_chunks::<32>().0.iter().enumerate() {
            // SAFETY: 32 values; sixteen pairs, one in each row of the tile.
            unsafe {
                let (low, high) =
                    (_mm512_loadu_ps(values.as_ptr()), _mm512_loadu_ps(values.as_ptr().add(16)));
                let pairs: [u32; 16] = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
                let column = group.add(t * TILE + index % 16 * 4).cast::<u32>();
                for (p, pair) in pairs.iter().enumerate() {
                    column.add(16 * p).write(*pair);
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn value_tiles(attention: &Attention<'_>, sizes: &Sizes, head: usize, chunk: usize, out: *mut u8) {
    let shape = &attention.shape;
    let order = tile::pair_order();
    let mut rows = [const { Vec::new() }; 2];
    rows.iter_mut().for_each(|row| row.resize(sizes.value_pad, 0.0_f32));
    for pair in 0..CHUNK / 2 {
        for (i, row) in rows.iter_mut().enumerate() {
            let cell = chunk * CHUNK + 2 * pair + i;
            if cell < shape.cells {
                let width = shape.value_width;
                // SAFETY: the cell is there.
                unsafe {
                    widened(
                        attention.isa,
                        shape.value_type,
                        &attention.memory.values,
                        head,
                        cell,
                        width,
                        row,
                    );
                }
            } else {
                row.fill(0.0);
            }
        }
        let [even, odd] = &rows;
        for (n, (even, odd)) in even.as_chunks::<16>().0.iter().zip(odd.as_chunks::<16>().0).enumerate() {
            // SAFETY: sixteen values each; row `pair % 16` of the tile of this column and half chunk.
            unsafe {
                let both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(odd.as_ptr()), _mm512_loadu_ps(even.as_ptr()));
                let both = _mm512_permutexvar_epi16(order, std::mem::transmute::<__m512bh, __m512i>(both));
                let place = out.add((2 * n + pair / 16) * TILE + pair % 16 * 64);
                _mm512_storeu_si512(place.cast(), both);
            }
        }
    }
}

/// The parts of a thread's scratch memory.
#[derive(Clone, Copy)]
struct Scratch {
    /// Two strips of query tiles.
    queries: *mut u8,
    /// `[32][64]` scores.
    scores: *mut f32,
    /// Two strips of two tiles of weights.
    weights: *mut u8,
    /// `[32][value_pad]` sums.
    sums: *mut f32,
    /// Largest score and total of each row.
    state: *mut f32,
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn unit(
    attention: &Attention<'_>,
    sizes: &Sizes,
    head: usize,
    block: usize,
    scratch: *mut u8,
    keys: *const u8,
    values: *const u8,
) {
    let (shape, memory) = (&attention.shape, &attention.memory);
    let kv_head = head / attention.plan.group;
    let first_token = block * BLOCK;
    let tokens = BLOCK.min(shape.tokens - first_token);
    let at = |bytes: usize| scratch.wrapping_add(bytes);
    let query_bytes = 2 * sizes.key_tiles * TILE;
    let sum_bytes = BLOCK * sizes.value_pad * 4;
    let scratch = Scratch {
        queries: scratch,
        weights: at(query_bytes),
        scores: at(query_bytes + 4 * TILE).cast(),
        sums: at(query_bytes + 4 * TILE + BLOCK * CHUNK * 4).cast(),
        state: at(query_bytes + 4 * TILE + BLOCK * CHUNK * 4 + sum_bytes).cast(),
    };
    // SAFETY: all addresses are inside the scratch memory, the tiles, or rows promised by the attention's maker.
    unsafe {
        let (mut begin, mut end) = (shape.cells, 0);
        for row in 0..BLOCK {
            *scratch.state.add(2 * row) = f32::NEG_INFINITY;
            *scratch.state.add(2 * row + 1) = 0.0;
            let inside = row < tokens;
            if inside {
                let (first, last) = attention.span(first_token + row);
                if first < last {
                    (begin, end) = (begin.min(first), end.max(last));
                }
            }
            let source = memory.queries.row(first_token + row, head).cast::<f32>();
            for t in 0..sizes.key_tiles {
                let part = |first: usize| {
                    let left = if inside { shape.key_width.saturating_sub(first).min(16) } else { 0 };
                    let mask = ((1_u32 << left) - 1) as __mmask16;
                    let v = _mm512_maskz_loadu_ps(mask, source.wrapping_add(first));
                    _mm512_mul_ps(v, _mm512_set1_ps(shape.scale))
                };
                let pair = _mm512_cvtne2ps_pbh(part(32 * t + 16), part(32 * t));
                let place = scratch.queries.add((row / 16 * sizes.key_tiles + t) * TILE + row % 16 * 64);
                place.cast::<__m512bh>().write_unaligned(pair);
            }
        }
        std::ptr::write_bytes(scratch.sums, 0, BLOCK * sizes.value_pad);
        let strip = sizes.key_tiles * TILE;
        let queries = [scratch.queries.cast_const(), scratch.queries.add(strip).cast_const()];
        let mut chunk = begin / CHUNK;
        while chunk * CHUNK < end {
            let cells = chunk * CHUNK..((chunk + 1) * CHUNK).min(shape.cells);
            if !(first_token..first_token + tokens).any(|token| attention.sees(token, head, cells.clone())) {
                chunk += 1;
                continue;
            }
            let place = kv_head * sizes.chunks + chunk;
            let k = keys.add(place * sizes.key_chunk);
            for pair in 0..2 {
                let groups = [k.add(2 * pair * strip), k.add((2 * pair + 1) * strip)];
                tile::tile_2x2(queries, groups, sizes.key_tiles);
                tile::store_2x2(scratch.scores.add(32 * pair), CHUNK);
            }
            for row in 0..BLOCK {
                soften(attention, sizes, scratch, head, first_token, tokens, row, chunk * CHUNK);
            }
            let v = values.add(place * sizes.value_chunk);
            let weights = [scratch.weights.cast_const(), scratch.weights.add(2 * TILE).cast_const()];
            for column in (0..sizes.value_pad / 16).step_by(2) {
                let sums = scratch.sums.add(16 * column);
                let columns = [v.add(2 * column * TILE), v.add(2 * (column + 1) * TILE)];
                tile::load_2x2(sums, sizes.value_pad);
                tile::tile_2x2_more(weights, columns, 2);
                tile::store_2x2(sums, sizes.value_pad);
            }
            chunk += 1;
        }
        for row in 0..tokens {
            let total = *scratch.state.add(2 * row + 1);
            let factor = if total > 0.0 { 1.0 / total } else { 0.0 };
            let sums = scratch.sums.add(row * sizes.value_pad);
            let out = memory.output.row(first_token + row, head).cast::<f32>().cast_mut();
            for first in (0..shape.value_width).step_by(16) {
                let mask = ((1_u32 << (shape.value_width - first).min(16)) - 1) as __mmask16;
                let v = _mm512_mul_ps(_mm512_loadu_ps(sums.add(first)), _mm512_set1_ps(factor));
                _mm512_mask_storeu_ps(out.add(first), mask, v);
            }
        }
    }
}

/// Caps and masks a row of 64 scores, turns them into bf16 weights, and keeps the row's state.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
#[expect(clippy::too_many_arguments, reason = "a kernel: a row's place in unit and chunk")]
unsafe fn soften(
    attention: &Attention<'_>,
    sizes: &Sizes,
    scratch: Scratch,
    head: usize,
    first_token: usize,
    tokens: usize,
    row: usize,
    cell: usize,
) {
    type S = Lanes16;
    // SAFETY: as in `unit`.
    unsafe {
        let weights = scratch.weights.add(row / 16 * 2 * TILE + row % 16 * 64);
        let none = || {
            _mm512_storeu_si512(weights.cast(), _mm512_setzero_si512());
            _mm512_storeu_si512(weights.add(TILE).cast(), _mm512_setzero_si512());
        };
        let token = first_token + row;
        let (first, last) = attention.span(token.min(attention.shape.tokens - 1));
        if row >= tokens || last <= cell || first >= cell + CHUNK || first >= last {
            return none();
        }
        let scores = scratch.scores.add(row * CHUNK);
        if let Some(cap) = attention.shape.soft_cap {
            for i in (0..CHUNK).step_by(16) {
                let v = tanh::<S>(S::mul(S::load(scores.add(i)), S::splat(1.0 / cap)));
                S::store(scores.add(i), S::mul(v, S::splat(cap)));
            }
        }
        if let Some(mask) = attention.memory.mask {
            let mask_row = mask.rows.row(token, head);
            for i in 0..CHUNK.min(attention.shape.cells - cell) {
                *scores.add(i) += masked(&mask, mask_row, cell + i);
            }
        }
        for i in 0..first.saturating_sub(cell) {
            *scores.add(i) = f32::NEG_INFINITY;
        }
        for i in (last - cell).min(CHUNK)..CHUNK {
            *scores.add(i) = f32::NEG_INFINITY;
        }
        let v = [0, 16, 32, 48].map(|i| _mm512_loadu_ps(scores.add(i)));
        let most = S::largest(S::max(S::max(v[0], v[1]), S::max(v[2], v[3])));
        let state = scratch.state.add(2 * row);
        let before = *state;
        if most == f32::NEG_INFINITY {
            return none();
        }
        let largest = most.max(before);
        let largest_lanes = S::splat(largest);
        let p0 = exp::<S>(S::sub(v[0], largest_lanes));
        let p1 = exp::<S>(S::sub(v[1], largest_lanes));
        let p2 = exp::<S>(S::sub(v[2], largest_lanes));
        let p3 = exp::<S>(S::sub(v[3], largest_lanes));
        weights.cast::<__m512bh>().write_unaligned(_mm512_cvtne2ps_pbh(p1, p0));
        weights.add(TILE).cast::<__m512bh>().write_unaligned(_mm512_cvtne2ps_pbh(p3, p2));
        let total = S::sum(S::add(S::add(p0, p1), S::add(p2, p3)));
        if largest > before {
            // Earlier weights were relative to a smaller largest score.
            let factor = if before == f32::NEG_INFINITY { 0.0 } else { (before - largest).exp() };
            *state = largest;
            *state.add(1) = *state.add(1) * factor + total;
            let sums = scratch.sums.add(row * sizes.value_pad);
            for i in (0..sizes.value_pad).step_by(16) {
                S::store(sums.add(i), S::mul(S::load(sums.add(i)), S::splat(factor)));
            }
        } else {
            *state.add(1) += total;
        }
    }
}

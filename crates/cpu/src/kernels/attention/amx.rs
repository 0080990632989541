//! Attention of many queries with AMX tiles, in bf16 with f32 sums.
//!
//! First keys and values are turned into tiles, once for all queries: chunks of 128 cells, filled up with zeros.
//!
//! ```text
//! keys    [kv head][chunk][8 groups of 16 cells][key_width / 32]     tile: row = cell, 32 of its elements
//! values  [kv head][chunk][value_width / 16 ][4 parts of 32 cells]   tile: row = element, its value in 32 cells
//! ```
//!
//! Then each unit takes one head and 32 queries (two strips of 16), chunk by chunk, of the last one as many parts of 32 cells as it sees. Everything is turned on its side, so that
//! a vector holds one number of each of the 16 queries of a strip, and softmax needs no sums across a vector:
//!
//! ```text
//! scores   (128 cells × 32 queries) = keys · queries         queries as tiles: row p = elements 2p, 2p + 1 of 16 queries
//! weights  = 2 ^ (scores − reference), as tiles:            row p = cells 2p, 2p + 1 of 16 queries
//! sums     (elements × 32 queries) += values · weights
//! ```
//!
//! Queries are multiplied by log₂ e beforehand: powers of two take half the work of powers of e. A query's reference is its largest
//! score up to some chunk; it follows the largest only when that has grown by more than [`SLACK`], so that sums rarely have
//! to be made smaller.

use std::arch::x86_64::*;
use std::ops::Range;

use quadriga_graph::DType;

use super::tile::masked;
use super::{Attention, Rows, Shape};
use crate::isa::{Amx, Isa};
use crate::kernels::KernelError;
use crate::kernels::matmul::amx as tile;
use crate::kernels::vec::simd::{Lanes16, Simd};
use crate::kernels::vec::{self, tanh};
use crate::pool::Worker;

const TILE: usize = 1024;
/// Cells of a chunk.
const CHUNK: usize = 128;
/// Cells of a part: tiles of values and weights are of that many.
const PART: usize = 32;
/// Parts of a chunk.
const PARTS: usize = CHUNK / PART;
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
            value_chunk: (value_pad / 16).checked_mul(PARTS * TILE)?,
        })
    }
}

/// Bytes of scratch memory for one thread, and of keys and values as tiles.
pub(super) fn bytes(shape: &Shape) -> Option<[usize; 2]> {
    let sizes = Sizes::new(shape)?;
    let scratch = Scratch::bytes(&sizes)?;
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
                let keys = &attention.memory.keys;
                widened(attention.isa, shape.key_type, keys, head, cell, shape.key_width, &mut row);
            }
        } else {
            row.fill(0.0);
        }
        let group = out.wrapping_add(index / 16 * sizes.key_tiles * TILE);
        for (t, values) in row.as_chunks::<32>().0.iter().enumerate() {
            // SAFETY: 32 values, one row of a tile.
            unsafe {
                let (low, high) =
                    (_mm512_loadu_ps(values.as_ptr()), _mm512_loadu_ps(values.as_ptr().add(16)));
                let place = group.add(t * TILE + index % 16 * 64);
                place.cast::<__m512bh>().write_unaligned(_mm512_cvtne2ps_pbh(high, low));
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn value_tiles(attention: &Attention<'_>, sizes: &Sizes, head: usize, chunk: usize, out: *mut u8) {
    let shape = &attention.shape;
    let pad = sizes.value_pad;
    let mut rows = vec![0.0_f32; PART * pad];
    let mut columns = [0.0_f32; 2 * 16 * 16];
    for part in 0..PARTS {
        for (index, row) in rows.chunks_exact_mut(pad).enumerate() {
            let cell = chunk * CHUNK + PART * part + index;
            if cell < shape.cells {
                // SAFETY: the cell is there.
                unsafe {
                    let values = &attention.memory.values;
                    widened(attention.isa, shape.value_type, values, head, cell, shape.value_width, row);
                }
            } else {
                row.fill(0.0);
            }
        }
        for group in 0..pad / 16 {
            // SAFETY: 32 rows of `pad` values; sixteen columns of 32 values; the tile of these elements and this part.
            unsafe {
                let from = rows.as_ptr().add(16 * group);
                Lanes16::transpose(from, pad, columns.as_mut_ptr(), 32);
                Lanes16::transpose(from.add(16 * pad), pad, columns.as_mut_ptr().add(16), 32);
                let tile = out.add((PARTS * group + part) * TILE);
                for (element, cells) in columns.as_chunks::<32>().0.iter().enumerate() {
                    let (low, high) =
                        (_mm512_loadu_ps(cells.as_ptr()), _mm512_loadu_ps(cells.as_ptr().add(16)));
                    let place = tile.add(64 * element).cast::<__m512bh>();
                    place.write_unaligned(_mm512_cvtne2ps_pbh(high, low));
                }
            }
        }
    }
}

/// The parts of a thread's scratch memory.
#[derive(Clone, Copy)]
struct Scratch {
    /// Two strips of query tiles.
    queries: *mut u8,
    /// Two strips of a tile of weights for each part.
    weights: *mut u8,
    /// `[128][32]` scores.
    scores: *mut f32,
    /// `[value_pad][32]` sums.
    sums: *mut f32,
    /// `[32]` references, then `[32]` sums of weights.
    state: *mut f32,
    /// `[32]` first cells, then `[32]` ends of the cells that queries see.
    spans: *mut i32,
}

impl Scratch {
    /// Bytes of scratch memory.
    fn bytes(sizes: &Sizes) -> Option<usize> {
        let rows =
            sizes.key_tiles.checked_mul(2 * TILE)?.checked_add(sizes.value_pad.checked_mul(BLOCK * 4)?)?;
        rows.checked_add(2 * PARTS * TILE + BLOCK * (CHUNK + 4) * 4)
    }

    fn new(memory: *mut u8, sizes: &Sizes) -> Scratch {
        let mut at = memory;
        let mut take = |bytes: usize| {
            let here = at;
            at = at.wrapping_add(bytes);
            here
        };
        Scratch {
            queries: take(2 * sizes.key_tiles * TILE),
            weights: take(2 * PARTS * TILE),
            scores: take(BLOCK * CHUNK * 4).cast(),
            sums: take(BLOCK * sizes.value_pad * 4).cast(),
            state: take(2 * BLOCK * 4).cast(),
            spans: take(2 * BLOCK * 4).cast(),
        }
    }
}

/// How much larger than its reference a score may be, as a power of two.
const SLACK: f32 = 8.0;

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
    let shape = &attention.shape;
    let kv_head = head / attention.plan.group;
    let first_token = block * BLOCK;
    let tokens = BLOCK.min(shape.tokens - first_token);
    let scratch = Scratch::new(scratch, sizes);
    // SAFETY: all addresses are inside the scratch memory, the tiles, or rows promised by the attention's maker.
    unsafe {
        let (mut begin, mut end) = (shape.cells, 0);
        for row in 0..BLOCK {
            *scratch.state.add(row) = f32::NEG_INFINITY;
            *scratch.state.add(BLOCK + row) = 0.0;
            let (first, last) = if row < tokens { attention.span(first_token + row) } else { (0, 0) };
            if first < last {
                (begin, end) = (begin.min(first), end.max(last));
            }
            // Cells are counted in 31 bits: spans are.
            *scratch.spans.add(row) = i32::try_from(first).unwrap_or(i32::MAX);
            *scratch.spans.add(BLOCK + row) = i32::try_from(last).unwrap_or(i32::MAX);
        }
        query_tiles(attention, sizes, &scratch, head, first_token, tokens);
        std::ptr::write_bytes(scratch.sums, 0, BLOCK * sizes.value_pad);
        let strip = sizes.key_tiles * TILE;
        let queries = [scratch.queries.cast_const(), scratch.queries.add(strip).cast_const()];
        let weights = [scratch.weights.cast_const(), scratch.weights.add(PARTS * TILE).cast_const()];
        let mut chunk = begin / CHUNK;
        while chunk * CHUNK < end {
            let cell = chunk * CHUNK;
            let cells = cell..(cell + CHUNK).min(shape.cells);
            if !(first_token..first_token + tokens).any(|token| attention.sees(token, head, cells.clone())) {
                chunk += 1;
                continue;
            }
            let place = kv_head * sizes.chunks + chunk;
            let k = keys.add(place * sizes.key_chunk);
            let parts = (end - cell).div_ceil(PART).min(PARTS);
            for part in 0..parts {
                let groups = [k.add(2 * part * strip), k.add((2 * part + 1) * strip)];
                tile::tile_2x2(groups, queries, sizes.key_tiles);
                tile::store_2x2(scratch.scores.add(PART * part * BLOCK), BLOCK);
            }
            for strip in 0..BLOCK / 16 {
                mask(attention, &scratch, head, first_token, tokens, strip, cell..cell + parts * PART);
                soften(sizes, &scratch, strip, parts * PART);
            }
            let v = values.add(place * sizes.value_chunk);
            for group in (0..sizes.value_pad / 16).step_by(2) {
                let sums = scratch.sums.add(16 * group * BLOCK);
                let elements = [v.add(PARTS * group * TILE), v.add(PARTS * (group + 1) * TILE)];
                tile::load_2x2(sums, BLOCK);
                tile::tile_2x2_more(elements, weights, parts);
                tile::store_2x2(sums, BLOCK);
            }
            chunk += 1;
        }
        write(attention, sizes, &scratch, head, first_token, tokens);
    }
}

/// Turns the queries of a unit into tiles, scaled, with zeros past their ends and for those that are not there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn query_tiles(
    attention: &Attention<'_>,
    sizes: &Sizes,
    scratch: &Scratch,
    head: usize,
    first_token: usize,
    tokens: usize,
) {
    let shape = &attention.shape;
    // A cap works on powers of e.
    let scale = if shape.soft_cap.is_some() { shape.scale } else { shape.scale * std::f32::consts::LOG2_E };
    let order = tile::pair_order();
    let (rows, columns) = (scratch.scores, scratch.scores.wrapping_add(256));
    // SAFETY: as in `unit`; the scores are not yet used and have room for two blocks of 16 × 16.
    unsafe {
        for strip in 0..BLOCK / 16 {
            for sixteen in 0..2 * sizes.key_tiles {
                let left = shape.key_width.saturating_sub(16 * sixteen).min(16);
                for row in 0..16 {
                    let inside = 16 * strip + row < tokens;
                    let lanes = ((1_u32 << if inside { left } else { 0 }) - 1) as __mmask16;
                    let token = first_token + 16 * strip + row;
                    let from = attention.memory.queries.row(token, head).cast::<f32>();
                    let v = _mm512_maskz_loadu_ps(lanes, from.wrapping_add(16 * sixteen));
                    _mm512_storeu_ps(rows.add(16 * row), _mm512_mul_ps(v, _mm512_set1_ps(scale)));
                }
                Lanes16::transpose(rows, 16, columns, 16);
                let tile = scratch.queries.add((strip * sizes.key_tiles + sixteen / 2) * TILE);
                for pair in 0..8 {
                    let even = _mm512_loadu_ps(columns.add(32 * pair));
                    let odd = _mm512_loadu_ps(columns.add(32 * pair + 16));
                    _mm512_storeu_si512(
                        tile.add(64 * (8 * (sixteen % 2) + pair)).cast(),
                        paired(order, even, odd),
                    );
                }
            }
        }
    }
}

/// Two vectors as pairs of bf16, in the order of [`tile::pair_order`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn paired(order: __m512i, even: __m512, odd: __m512) -> __m512i {
    // SAFETY: both are 64 bytes.
    let both: __m512i = unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(odd, even)) };
    _mm512_permutexvar_epi16(order, both)
}

/// Caps and masks the scores of a strip with these cells.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn mask(
    attention: &Attention<'_>,
    scratch: &Scratch,
    head: usize,
    first_token: usize,
    tokens: usize,
    strip: usize,
    cells: Range<usize>,
) {
    type S = Lanes16;
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // SAFETY: as in `unit`.
    unsafe {
        let scores = scratch.scores.add(16 * strip);
        if let Some(cap) = attention.shape.soft_cap {
            for i in 0..cells.len() {
                let place = scores.add(i * BLOCK);
                let v = tanh::<S>(S::mul(S::load(place), S::splat(1.0 / cap)));
                S::store(place, S::mul(v, S::splat(cap * LOG2_E)));
            }
        }
        if let Some(mask) = attention.memory.mask {
            for row in 0..16.min(tokens.saturating_sub(16 * strip)) {
                let from = mask.rows.row(first_token + 16 * strip + row, head);
                for i in 0..cells.len().min(attention.shape.cells - cells.start) {
                    *scores.add(i * BLOCK + row) += LOG2_E * masked(&mask, from, cells.start + i);
                }
            }
        }
        let first = _mm512_loadu_si512(scratch.spans.add(16 * strip).cast());
        let last = _mm512_loadu_si512(scratch.spans.add(BLOCK + 16 * strip).cast());
        let (cell, end) = (cells.start as i32, cells.end as i32);
        let before = _mm512_cmpgt_epi32_mask(first, _mm512_set1_epi32(cell));
        let after = _mm512_cmplt_epi32_mask(last, _mm512_set1_epi32(end));
        if before | after != 0 {
            for i in 0..cells.len() {
                let cell = _mm512_set1_epi32(cell + i as i32);
                let hidden = _mm512_cmpgt_epi32_mask(first, cell) | _mm512_cmple_epi32_mask(last, cell);
                _mm512_mask_storeu_ps(scores.add(i * BLOCK), hidden, _mm512_set1_ps(f32::NEG_INFINITY));
            }
        }
    }
}

/// Turns the scores of a strip with `cells` cells, a multiple of [`PART`], into weights and keeps its queries' state.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn soften(sizes: &Sizes, scratch: &Scratch, strip: usize, cells: usize) {
    let order = tile::pair_order();
    // SAFETY: as in `unit`.
    unsafe {
        let scores = scratch.scores.add(16 * strip).cast_const();
        let at = |cell: usize| _mm512_loadu_ps(scores.add(cell * BLOCK));
        let mut most = [at(0), at(1), at(2), at(3)];
        for four in 1..cells / 4 {
            for (i, most) in most.iter_mut().enumerate() {
                *most = _mm512_max_ps(*most, at(4 * four + i));
            }
        }
        let most = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
        let (reference, total) = (scratch.state.add(16 * strip), scratch.state.add(BLOCK + 16 * strip));
        let before = _mm512_loadu_ps(reference);
        let mut sum = _mm512_loadu_ps(total);
        let grown = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(most, _mm512_add_ps(before, _mm512_set1_ps(SLACK)));
        let mut now = before;
        if grown != 0 {
            now = _mm512_mask_mov_ps(before, grown, most);
            _mm512_storeu_ps(reference, now);
            // Earlier weights were relative to a smaller reference; there are none where it was −∞.
            let factor = _mm512_mask_mov_ps(_mm512_set1_ps(1.0), grown, power(_mm512_sub_ps(before, now)));
            sum = _mm512_mul_ps(sum, factor);
            for element in 0..sizes.value_pad {
                let place = scratch.sums.add(element * BLOCK + 16 * strip);
                _mm512_storeu_ps(place, _mm512_mul_ps(_mm512_loadu_ps(place), factor));
            }
        }
        // A query that has seen nothing yet has only scores of −∞: any other reference gives weights of zero.
        let nothing = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(now, _mm512_set1_ps(f32::NEG_INFINITY));
        let now = _mm512_mask_mov_ps(now, nothing, _mm512_setzero_ps());
        let mut sums = [sum, _mm512_setzero_ps()];
        let weights = scratch.weights.add(strip * PARTS * TILE);
        for pair in 0..cells / 2 {
            let even = power(_mm512_sub_ps(at(2 * pair), now));
            let odd = power(_mm512_sub_ps(at(2 * pair + 1), now));
            sums = [_mm512_add_ps(sums[0], even), _mm512_add_ps(sums[1], odd)];
            _mm512_storeu_si512(weights.add(64 * pair).cast(), paired(order, even, odd));
        }
        _mm512_storeu_ps(total, _mm512_add_ps(sums[0], sums[1]));
    }
}

/// `2ˣ` for x ≤ 100: relative error below 2⁻¹⁸, which is well below that of a weight in bf16; 0 below −126.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn power(x: __m512) -> __m512 {
    // Numbers too small to be normal would take the CPU a hundred times as long. What is not a number passes through.
    let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(-126.0));
    // What is above the next smaller whole number; `scalef` takes that number itself.
    let r = _mm512_reduce_ps::<1>(x);
    let mut p = _mm512_set1_ps(0.013_534_167);
    for c in [0.052_011_465, 0.241_442_75, 0.693_003_84, 1.000_002_6] {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    }
    _mm512_maskz_scalef_ps(normal, p, x)
}

/// Writes the results of a unit: sums ÷ total.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn write(
    attention: &Attention<'_>,
    sizes: &Sizes,
    scratch: &Scratch,
    head: usize,
    first_token: usize,
    tokens: usize,
) {
    let width = attention.shape.value_width;
    // SAFETY: as in `unit`; scores are no longer used and have room for a block of 16 × 16.
    unsafe {
        for strip in 0..BLOCK / 16 {
            let total = _mm512_loadu_ps(scratch.state.add(BLOCK + 16 * strip));
            let some = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(total, _mm512_setzero_ps());
            let factor = _mm512_maskz_div_ps(some, _mm512_set1_ps(1.0), total);
            for group in 0..sizes.value_pad / 16 {
                let from = scratch.sums.add(16 * group * BLOCK + 16 * strip);
                for element in 0..16 {
                    let place = from.add(element * BLOCK);
                    _mm512_storeu_ps(place, _mm512_mul_ps(_mm512_loadu_ps(place), factor));
                }
                Lanes16::transpose(from, BLOCK, scratch.scores, 16);
                let left = width.saturating_sub(16 * group).min(16);
                let lanes = ((1_u32 << left) - 1) as __mmask16;
                for row in 0..16.min(tokens.saturating_sub(16 * strip)) {
                    let out = attention.memory.output.row(first_token + 16 * strip + row, head);
                    let out = out.cast::<f32>().cast_mut().wrapping_add(16 * group);
                    _mm512_mask_storeu_ps(out, lanes, _mm512_loadu_ps(scratch.scores.add(16 * row)));
                }
            }
        }
    }
}

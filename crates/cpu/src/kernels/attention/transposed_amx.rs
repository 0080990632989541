//! Attention of many queries with AMX tiles, in bf16 with f32 sums.
//!
//! First keys and values are converted to tiles, once for all queries: chunks of 128 slots, padded with zeros.
//!
//! ```text
//! keys    [kv head][chunk][8 groups of 16 slots][key_width / 32]     tile: row = slot, 32 of its elements
//! values  [kv head][chunk][value_width / 16 ][4 parts of 32 slots]   tile: row = element, its value in 32 slots
//! ```
//!
//! Then each unit takes one head and 32 queries, chunk by chunk (see transposed.rs); of the last chunk, only the parts of
//! 32 slots that it sees:
//!
//! ```text
//! queries  [2 strips of 16 queries][key_width / 32]  tile: row p = elements 2p, 2p + 1 of the 16 queries
//! weights  [2 strips of 16 queries][4 parts]         tile: row p = slots 2p, 2p + 1 of the 16 queries
//! ```

use std::arch::x86_64::*;

use quadriga_graph::DType;

use super::cache_tile::CacheSide;
use super::query_run::QueryRun;
use super::transposed::{self, BLOCK, TransposedUnit, load_widened};
use super::{Attention, AttentionShape, MANY_TOKENS};
use crate::isa::Amx;
use crate::kernels::KernelError;
use crate::kernels::matmul::amx as tile;
use crate::kernels::vec::simd::{Lanes16, Simd};
use crate::pool::Worker;

const TILE: usize = 1024;
/// Slots of a chunk.
const CHUNK: usize = 128;
/// Slots of a part, which is one tile of values or weights.
const PART: usize = 32;
/// Parts of a chunk.
const PARTS: usize = CHUNK / PART;

/// Whether to use tiles. They round to bf16, which is too coarse for keys and values in f32.
pub(super) fn is_supported(shape: &AttentionShape) -> bool {
    let rounded = |dtype| dtype != DType::F32;
    shape.tokens >= MANY_TOKENS
        && shape.slots > 0
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
    fn new(shape: &AttentionShape) -> Option<Sizes> {
        let key_tiles = shape.key_width.div_ceil(32);
        let value_pad = shape.value_width.checked_next_multiple_of(32)?;
        Some(Sizes {
            chunks: shape.slots.div_ceil(CHUNK),
            key_tiles,
            value_pad,
            key_chunk: key_tiles.checked_mul(CHUNK / 16 * TILE)?,
            value_chunk: (value_pad / 16).checked_mul(PARTS * TILE)?,
        })
    }
}

/// Bytes of scratch memory for one thread, and of keys and values as tiles.
pub(super) fn bytes(shape: &AttentionShape) -> Option<[usize; 2]> {
    let sizes = Sizes::new(shape)?;
    let tiles = sizes.key_tiles.checked_add(PARTS)?.checked_mul(2 * TILE)?;
    let scratch = tiles.checked_add(transposed::bytes(CHUNK, sizes.value_pad)?)?;
    let chunk = sizes.key_chunk.checked_add(sizes.value_chunk)?;
    Some([scratch, shape.kv_heads.checked_mul(sizes.chunks)?.checked_mul(chunk)?])
}

/// Computes a run; see [`Attention::run`].
pub(super) fn run(
    token: Amx,
    attention: &Attention<'_>,
    run: &QueryRun,
    worker: &Worker<'_>,
    scratch: *mut u8,
    tiles: *mut u8,
) -> Result<(), KernelError> {
    let shape = &attention.shape;
    let sizes =
        Sizes::new(shape).ok_or(KernelError::TooLarge { rows: shape.tokens, columns: shape.slots })?;
    let values = tiles.wrapping_add(shape.kv_heads * sizes.chunks * sizes.key_chunk);
    let visible = run.slots.start / CHUNK..run.slots.end.div_ceil(CHUNK);
    worker.chunks(shape.kv_heads * visible.len(), |i| {
        let (head, chunk) = (i % shape.kv_heads, visible.start + i / shape.kv_heads);
        let at = head * sizes.chunks + chunk;
        // SAFETY: the token proves the instructions; each chunk of tiles belongs to one chunk of work.
        unsafe {
            key_tiles(attention, run, &sizes, [head, chunk], tiles.add(at * sizes.key_chunk));
            value_tiles(attention, run, &sizes, [head, chunk], values.add(at * sizes.value_chunk));
        }
    });
    worker.barrier()?;
    let blocks = run.tokens.len().div_ceil(BLOCK);
    worker.chunks(shape.heads * blocks, |i| {
        // Under causal spans, late queries see the most slots: they go first.
        let (head, block) = (i % shape.heads, blocks - 1 - i / shape.heads);
        // SAFETY: the token proves the instructions; scratch memory is the worker's own, results are the unit's.
        unsafe {
            tile::configure(token);
            unit(attention, run, &sizes, [head, block], scratch, [tiles, values].map(<*mut u8>::cast_const));
            tile::release(token);
        }
    });
    Ok(())
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn key_tiles(
    attention: &Attention<'_>,
    run: &QueryRun,
    sizes: &Sizes,
    [head, chunk]: [usize; 2],
    out: *mut u8,
) {
    let mut row = vec![0.0_f32; sizes.key_tiles * 32];
    for index in 0..CHUNK {
        let slot = chunk * CHUNK + index;
        // SAFETY: rows of keys are valid.
        unsafe { load_widened(attention, run, CacheSide::Keys, head, slot, &mut row) };
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
unsafe fn value_tiles(
    attention: &Attention<'_>,
    run: &QueryRun,
    sizes: &Sizes,
    [head, chunk]: [usize; 2],
    out: *mut u8,
) {
    let pad = sizes.value_pad;
    let mut rows = vec![0.0_f32; PART * pad];
    let mut columns = [0.0_f32; 2 * 16 * 16];
    for part in 0..PARTS {
        for (index, row) in rows.chunks_exact_mut(pad).enumerate() {
            let slot = chunk * CHUNK + PART * part + index;
            // SAFETY: rows of values are valid.
            unsafe { load_widened(attention, run, CacheSide::Values, head, slot, row) };
        }
        for group in 0..pad / 16 {
            // SAFETY: 32 rows of `pad` values; sixteen columns of 32 values; the tile of these elements and this part.
            unsafe {
                let from = rows.as_ptr().add(16 * group);
                Lanes16::transpose(from, pad, columns.as_mut_ptr(), 32);
                Lanes16::transpose(from.add(16 * pad), pad, columns.as_mut_ptr().add(16), 32);
                let tile = out.add((PARTS * group + part) * TILE);
                for (element, slots) in columns.as_chunks::<32>().0.iter().enumerate() {
                    let (low, high) =
                        (_mm512_loadu_ps(slots.as_ptr()), _mm512_loadu_ps(slots.as_ptr().add(16)));
                    let place = tile.add(64 * element).cast::<__m512bh>();
                    place.write_unaligned(_mm512_cvtne2ps_pbh(high, low));
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")]
unsafe fn unit(
    attention: &Attention<'_>,
    run: &QueryRun,
    sizes: &Sizes,
    [head, block]: [usize; 2],
    scratch: *mut u8,
    [keys, values]: [*const u8; 2],
) {
    let shape = &attention.shape;
    let kv_head = head / attention.plan.group;
    // Two strips of query tiles, two strips of weight tiles (one per part), and the memory of the `TransposedUnit`.
    let strip = sizes.key_tiles * TILE;
    let queries = [scratch, scratch.wrapping_add(strip)];
    let weights = [0, 1].map(|i| scratch.wrapping_add(2 * strip + i * PARTS * TILE));
    let memory = scratch.wrapping_add(2 * strip + 2 * PARTS * TILE);
    let unit = TransposedUnit::new(attention, run, [head, block], memory, CHUNK, sizes.value_pad);
    let order = tile::pair_order();
    let pair = |to: *mut u8, even, odd| {
        // SAFETY: a row of a tile of queries or weights.
        unsafe { _mm512_storeu_si512(to.cast(), paired(order, even, odd)) };
    };
    // SAFETY: all addresses are inside the scratch memory, the tiles, or rows that the caller of `Attention::new` promised.
    unsafe {
        let visible = unit.begin();
        unit.queries(2 * sizes.key_tiles, |strip, sixteen, columns| {
            let tile = if strip == 0 { queries[0] } else { queries[1] }.add(sixteen / 2 * TILE);
            for i in 0..8 {
                let even = _mm512_loadu_ps(columns.add(32 * i));
                let odd = _mm512_loadu_ps(columns.add(32 * i + 16));
                pair(tile.add(64 * (8 * (sixteen % 2) + i)), even, odd);
            }
        });
        for chunk in visible.start / CHUNK..visible.end.div_ceil(CHUNK) {
            let slot = chunk * CHUNK;
            if !unit.sees(&(slot..(slot + CHUNK).min(shape.slots))) {
                continue;
            }
            let parts = (visible.end - slot).div_ceil(PART).min(PARTS);
            let place = kv_head * sizes.chunks + chunk;
            let k = keys.add(place * sizes.key_chunk);
            for part in 0..parts {
                let groups = [k.add(2 * part * strip), k.add((2 * part + 1) * strip)];
                tile::tile_2x2(groups, queries.map(<*mut u8>::cast_const), sizes.key_tiles);
                tile::store_2x2(unit.scores.add(PART * part * BLOCK), BLOCK);
            }
            for (strip, weights) in weights.into_iter().enumerate() {
                unit.mask(strip, &(slot..slot + parts * PART));
                unit.softmax_weights::<false>(strip, parts * PART, |i, even, odd| {
                    pair(weights.add(64 * i), even, odd)
                });
            }
            let v = values.add(place * sizes.value_chunk);
            for group in (0..sizes.value_pad / 16).step_by(2) {
                let sums = unit.sums.add(16 * group * BLOCK);
                let elements = [v.add(PARTS * group * TILE), v.add(PARTS * (group + 1) * TILE)];
                tile::load_2x2(sums, BLOCK);
                tile::tile_2x2_more(elements, weights.map(<*mut u8>::cast_const), parts);
                tile::store_2x2(sums, BLOCK);
            }
        }
        unit.write();
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

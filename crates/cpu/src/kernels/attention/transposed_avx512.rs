//! Attention of many queries with AVX-512, in f32.
//!
//! A unit takes 32 queries and the heads that share a key head (or one of them, if units are few), 64 slots at a time
//! (see transposed.rs), whose keys and values are widened into scratch memory. Both matmuls keep eight rows of 32 sums
//! in registers, and broadcast one number of a key or value to a vector:
//!
//! ```text
//! scores  8 slots × 32 queries      over the elements of a key: a slot's element × the element of 32 queries
//! sums    8 elements × 32 queries   over the slots: an element of a slot's value × the slot's weights of 32 queries
//! ```

use std::arch::x86_64::*;
use std::ops::Range;

use super::cache_tile::CacheSide;
use super::query_run::QueryRun;
use super::transposed::{self, BLOCK, TransposedUnit, load_widened};
use super::{Attention, AttentionShape, MANY_TOKENS};
use crate::isa::Avx512;
use crate::kernels::KernelError;
use crate::pool::Worker;

/// Slots of a chunk.
const CHUNK: usize = 64;

/// Rows of sums that are kept in registers.
const ROWS: usize = 8;

/// Whether there are enough queries to fill the lanes.
pub(super) fn is_supported(shape: &AttentionShape) -> bool {
    shape.tokens >= MANY_TOKENS && shape.slots > 0 && shape.key_width > 0 && shape.value_width > 0
}

/// Elements of padded rows of keys and of values.
fn pads(shape: &AttentionShape) -> Option<[usize; 2]> {
    Some([shape.key_width.checked_next_multiple_of(16)?, shape.value_width.checked_next_multiple_of(16)?])
}

/// Bytes of scratch memory for one thread.
pub(super) fn bytes(shape: &AttentionShape) -> Option<usize> {
    let [key_pad, value_pad] = pads(shape)?;
    let group = shape.heads / shape.kv_heads.max(1);
    let rows = key_pad.checked_add(value_pad)?.checked_mul(CHUNK * 4)?;
    head_bytes([key_pad, value_pad])?.checked_mul(group)?.checked_add(rows)
}

/// Bytes of scratch memory for one head of a unit.
fn head_bytes([key_pad, value_pad]: [usize; 2]) -> Option<usize> {
    key_pad.checked_mul(BLOCK * 4)?.checked_add(transposed::bytes(CHUNK, value_pad)?)
}

/// Computes a run; see [`Attention::run`].
pub(super) fn run(
    _token: Avx512,
    attention: &Attention<'_>,
    run: &QueryRun,
    worker: &Worker<'_>,
    scratch: *mut u8,
) -> Result<(), KernelError> {
    let shape = &attention.shape;
    let too_large = || KernelError::TooLarge { rows: shape.tokens, columns: shape.slots };
    let pads = pads(shape).ok_or_else(too_large)?;
    let bytes = head_bytes(pads).ok_or_else(too_large)?;
    let blocks = run.tokens.len().div_ceil(BLOCK);
    let shared = shape.kv_heads * blocks >= 4 * worker.threads();
    let heads = if shared { attention.plan.group } else { 1 };
    let strips = shape.heads / heads.max(1);
    worker.chunks(strips * blocks, |i| {
        // Under causal spans, late queries see the most slots: they go first.
        let (strip, block) = (i % strips, blocks - 1 - i / strips);
        // SAFETY: the token proves the instructions; scratch memory is the worker's own, results are the unit's.
        unsafe { unit(attention, run, pads, strip * heads..(strip + 1) * heads, block, scratch, bytes) };
    });
    Ok(())
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn unit(
    attention: &Attention<'_>,
    run: &QueryRun,
    [key_pad, value_pad]: [usize; 2],
    heads: Range<usize>,
    block: usize,
    scratch: *mut u8,
    head_bytes: usize,
) {
    let kv_head = heads.start / attention.plan.group;
    // A chunk of keys, one of values; then for each head `[key_pad][32]` elements of its queries, and the memory of its
    // `TransposedUnit`.
    let keys = scratch.cast::<f32>();
    let values = keys.wrapping_add(CHUNK * key_pad);
    let first = values.wrapping_add(CHUNK * value_pad).cast::<u8>();
    let part = |head: usize| {
        let queries = first.wrapping_add((head - heads.start) * head_bytes).cast::<f32>();
        let memory = queries.wrapping_add(key_pad * BLOCK).cast();
        (queries, TransposedUnit::new(attention, run, [head, block], memory, CHUNK, value_pad))
    };
    // SAFETY: all addresses are inside the scratch memory, or in rows that the caller of `Attention::new` promised.
    unsafe {
        let mut visible = 0..0;
        for (queries, unit) in heads.clone().map(part) {
            visible = unit.begin();
            unit.queries(key_pad / 16, |strip, sixteen, columns| {
                for i in 0..16 {
                    let place = queries.add((16 * sixteen + i) * BLOCK + 16 * strip);
                    _mm512_storeu_ps(place, _mm512_loadu_ps(columns.add(16 * i)));
                }
            });
        }
        for slot in (visible.start / CHUNK * CHUNK..visible.end).step_by(CHUNK) {
            let slots = (visible.end - slot).min(CHUNK).next_multiple_of(ROWS);
            for i in 0..slots {
                let row = std::slice::from_raw_parts_mut(keys.add(i * key_pad), key_pad);
                load_widened(attention, run, CacheSide::Keys, kv_head, slot + i, row);
                let row = std::slice::from_raw_parts_mut(values.add(i * value_pad), value_pad);
                load_widened(attention, run, CacheSide::Values, kv_head, slot + i, row);
            }
            for (queries, unit) in heads.clone().map(part) {
                if !unit.sees(&(slot..(slot + CHUNK).min(attention.shape.slots))) {
                    continue;
                }
                for i in (0..slots).step_by(ROWS) {
                    let scores = unit.scores.add(i * BLOCK);
                    std::ptr::write_bytes(scores, 0, ROWS * BLOCK);
                    multiply(keys.add(i * key_pad), [key_pad, 1], queries, key_pad, scores);
                }
                for strip in 0..BLOCK / 16 {
                    unit.mask(strip, &(slot..slot + slots));
                    unit.softmax_weights::<true>(strip, slots, |i, even, odd| {
                        let place = unit.scores.add(2 * i * BLOCK + 16 * strip);
                        _mm512_storeu_ps(place, even);
                        _mm512_storeu_ps(place.add(BLOCK), odd);
                    });
                }
                for i in (0..value_pad).step_by(ROWS) {
                    multiply(values.add(i), [1, value_pad], unit.scores, slots, unit.sums.add(i * BLOCK));
                }
            }
        }
        for (_, unit) in heads.clone().map(part) {
            unit.write();
        }
    }
}

/// Adds to eight rows of 32 sums: over `count` rows of 32 numbers, each times a number for each row of sums. That of
/// row `r` and step `i` is at `r × strides[0] + i × strides[1]`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
unsafe fn multiply(numbers: *const f32, strides: [usize; 2], rows: *const f32, count: usize, sums: *mut f32) {
    // SAFETY: promised by the caller.
    unsafe {
        let mut sum = [[_mm512_setzero_ps(); 2]; ROWS];
        for (r, [low, high]) in sum.iter_mut().enumerate() {
            *low = _mm512_loadu_ps(sums.add(r * BLOCK));
            *high = _mm512_loadu_ps(sums.add(r * BLOCK + 16));
        }
        for i in 0..count {
            let row = rows.add(i * BLOCK);
            let (a, b) = (_mm512_loadu_ps(row), _mm512_loadu_ps(row.add(16)));
            let numbers = numbers.add(i * strides[1]);
            for (r, [low, high]) in sum.iter_mut().enumerate() {
                let number = _mm512_set1_ps(*numbers.add(r * strides[0]));
                (*low, *high) = (_mm512_fmadd_ps(number, a, *low), _mm512_fmadd_ps(number, b, *high));
            }
        }
        for (r, [low, high]) in sum.into_iter().enumerate() {
            _mm512_storeu_ps(sums.add(r * BLOCK), low);
            _mm512_storeu_ps(sums.add(r * BLOCK + 16), high);
        }
    }
}

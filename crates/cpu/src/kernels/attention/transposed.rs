//! Online softmax for many queries, transposed: one query per SIMD lane.
//!
//! A unit takes one head and 32 queries (two strips of 16), one chunk of slots after another. All matrices are transposed:
//! a vector holds one number of each of the 16 queries of a strip, so that softmax needs no horizontal reductions:
//!
//! ```text
//! scores   (slots × 32 queries)    = keys · queries
//! weights                          = 2 ^ (scores − reference)
//! sums     (elements × 32 queries) += values · weights
//! ```
//!
//! Queries are multiplied by log₂ e beforehand: 2ˣ costs half as much as eˣ. A query's reference is its largest score at
//! some earlier chunk; it is updated only when the maximum has grown by more than [`SLACK`], so that sums are rarely
//! rescaled.

use std::arch::x86_64::*;
use std::ops::Range;

use super::Attention;
use super::cache_tile::CacheSide;
use super::query_run::QueryRun;
use super::slot_tile::masked;
use crate::kernels::vec::simd::{Lanes16, Simd};
use crate::kernels::vec::{self, tanh};

/// Queries per unit.
pub(super) const BLOCK: usize = 32;

/// How far a score may exceed its reference, in powers of two.
const SLACK: f32 = 8.0;

/// A unit of work: its queries, and a thread's scratch memory for it.
#[derive(Clone, Copy)]
pub(super) struct TransposedUnit<'a> {
    attention: &'a Attention<'a>,
    head: usize,
    first_token: usize,
    /// At most [`BLOCK`].
    tokens: usize,
    /// Elements of a padded row of results, a multiple of 16.
    value_pad: usize,
    /// `[slots of a chunk][32]` scores.
    pub(super) scores: *mut f32,
    /// `[value_pad][32]` sums.
    pub(super) sums: *mut f32,
    /// `[32]` references, then `[32]` sums of weights.
    state: *mut f32,
    /// `[32]` first visible slots, then `[32]` ends.
    spans: *mut i32,
}

/// Bytes of scratch memory for a unit with chunks of `chunk` slots, at least 16.
pub(super) fn bytes(chunk: usize, value_pad: usize) -> Option<usize> {
    value_pad.checked_add(chunk + 4)?.checked_mul(BLOCK * 4)
}

impl<'a> TransposedUnit<'a> {
    /// The unit of a head and a block of a run's queries, in memory of [`bytes`].
    pub(super) fn new(
        attention: &'a Attention<'a>,
        run: &QueryRun,
        [head, block]: [usize; 2],
        memory: *mut u8,
        chunk: usize,
        value_pad: usize,
    ) -> TransposedUnit<'a> {
        let first_token = run.tokens.start + block * BLOCK;
        let tokens = BLOCK.min(run.tokens.end - first_token);
        let scores = memory.cast::<f32>();
        let sums = scores.wrapping_add(chunk * BLOCK);
        let state = sums.wrapping_add(value_pad * BLOCK);
        let spans = state.wrapping_add(2 * BLOCK).cast();
        TransposedUnit { attention, head, first_token, tokens, value_pad, scores, sums, state, spans }
    }

    /// Initializes the unit's state. Returns the range of slots that any query sees.
    ///
    /// # Safety
    /// The scratch memory must be valid, and used by this unit alone.
    pub(super) unsafe fn begin(&self) -> Range<usize> {
        let (mut begin, mut end) = (self.attention.shape.slots, 0);
        let [sink, weight] = self.attention.sink(self.head);
        // SAFETY: promised by the caller.
        unsafe {
            for row in 0..BLOCK {
                *self.state.add(row) = std::f32::consts::LOG2_E * sink;
                *self.state.add(BLOCK + row) = weight;
                let inside = row < self.tokens;
                let (first, last) = if inside { self.attention.span(self.first_token + row) } else { (0, 0) };
                if first < last {
                    (begin, end) = (begin.min(first), end.max(last));
                }
                // Spans fit 31 bits.
                *self.spans.add(row) = i32::try_from(first).unwrap_or(i32::MAX);
                *self.spans.add(BLOCK + row) = i32::try_from(last).unwrap_or(i32::MAX);
            }
            std::ptr::write_bytes(self.sums, 0, BLOCK * self.value_pad);
        }
        begin..end.max(begin)
    }

    /// Whether any query sees any of these slots.
    pub(super) fn sees(&self, slots: &Range<usize>) -> bool {
        let tokens = self.first_token..self.first_token + self.tokens;
        tokens.into_iter().any(|token| self.attention.sees(token, self.head, slots.clone()))
    }

    /// Calls `keep(strip, i, columns)` with elements `16 i..16 i + 16` of the queries of a strip, for all of
    /// `sixteens`: each element is a vector. Queries are scaled, and padded with zeros in both dimensions.
    ///
    /// # Safety
    /// As for [`begin`](TransposedUnit::begin); the scores must not be in use; the CPU must have AVX-512.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    pub(super) unsafe fn queries(&self, sixteens: usize, mut keep: impl FnMut(usize, usize, *const f32)) {
        let shape = &self.attention.shape;
        // The soft cap needs scores in powers of e.
        let scale =
            if shape.soft_cap.is_some() { shape.scale } else { shape.scale * std::f32::consts::LOG2_E };
        let (rows, columns) = (self.scores, self.scores.wrapping_add(256));
        // SAFETY: promised by the caller; the scores have room for two blocks of 16 × 16; the rows of queries are valid.
        unsafe {
            for (strip, sixteen) in (0..BLOCK / 16).flat_map(|strip| (0..sixteens).map(move |i| (strip, i))) {
                let left = shape.key_width.saturating_sub(16 * sixteen).min(16);
                for row in 0..16 {
                    let inside = 16 * strip + row < self.tokens;
                    let lanes = ((1_u32 << if inside { left } else { 0 }) - 1) as __mmask16;
                    let token = self.first_token + 16 * strip + row;
                    let from = self.attention.memory.queries.row(token, self.head).cast::<f32>();
                    let v = _mm512_maskz_loadu_ps(lanes, from.wrapping_add(16 * sixteen));
                    _mm512_storeu_ps(rows.add(16 * row), _mm512_mul_ps(v, _mm512_set1_ps(scale)));
                }
                Lanes16::transpose(rows, 16, columns, 16);
                keep(strip, sixteen, columns);
            }
        }
    }

    /// Applies soft cap, mask and spans to the scores of a strip with these slots.
    ///
    /// # Safety
    /// As for [`begin`](TransposedUnit::begin); the CPU must have AVX-512.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    pub(super) unsafe fn mask(&self, strip: usize, slots: &Range<usize>) {
        type S = Lanes16;
        const LOG2_E: f32 = std::f32::consts::LOG2_E;
        // SAFETY: promised by the caller; the mask has these rows.
        unsafe {
            let scores = self.scores.add(16 * strip);
            if let Some(cap) = self.attention.shape.soft_cap {
                for i in 0..slots.len() {
                    let place = scores.add(i * BLOCK);
                    let v = tanh::<S>(S::mul(S::load(place), S::splat(1.0 / cap)));
                    S::store(place, S::mul(v, S::splat(cap * LOG2_E)));
                }
            }
            if let Some(mask) = self.attention.memory.mask {
                for row in 0..16.min(self.tokens.saturating_sub(16 * strip)) {
                    let from = mask.rows.row(self.first_token + 16 * strip + row, self.head);
                    for i in 0..slots.len().min(self.attention.shape.slots - slots.start) {
                        *scores.add(i * BLOCK + row) += LOG2_E * masked(&mask, from, slots.start + i);
                    }
                }
            }
            let first = _mm512_loadu_si512(self.spans.add(16 * strip).cast());
            let last = _mm512_loadu_si512(self.spans.add(BLOCK + 16 * strip).cast());
            let (slot, end) = (slots.start as i32, slots.end as i32);
            let before = _mm512_cmpgt_epi32_mask(first, _mm512_set1_epi32(slot));
            let after = _mm512_cmplt_epi32_mask(last, _mm512_set1_epi32(end));
            if before | after != 0 {
                for i in 0..slots.len() {
                    let slot = _mm512_set1_epi32(slot + i as i32);
                    let hidden = _mm512_cmpgt_epi32_mask(first, slot) | _mm512_cmple_epi32_mask(last, slot);
                    _mm512_mask_storeu_ps(scores.add(i * BLOCK), hidden, _mm512_set1_ps(f32::NEG_INFINITY));
                }
            }
        }
    }

    /// Converts the scores of a strip with `slots` slots, a multiple of four, to weights, and updates its queries' state.
    /// Calls `keep(i, even, odd)` with the weights of slots `2 i` and `2 i + 1`.
    ///
    /// # Safety
    /// As for [`begin`](TransposedUnit::begin); the CPU must have AVX-512.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    pub(super) unsafe fn softmax_weights<const EXACT: bool>(
        &self,
        strip: usize,
        slots: usize,
        mut keep: impl FnMut(usize, __m512, __m512),
    ) {
        // SAFETY: promised by the caller.
        unsafe {
            let scores = self.scores.add(16 * strip).cast_const();
            let at = |slot: usize| _mm512_loadu_ps(scores.add(slot * BLOCK));
            let mut most = [at(0), at(1), at(2), at(3)];
            for four in 1..slots / 4 {
                for (i, most) in most.iter_mut().enumerate() {
                    *most = _mm512_max_ps(*most, at(4 * four + i));
                }
            }
            let most = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
            let (reference, total) = (self.state.add(16 * strip), self.state.add(BLOCK + 16 * strip));
            let before = _mm512_loadu_ps(reference);
            let mut sum = _mm512_loadu_ps(total);
            let grown = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(most, _mm512_add_ps(before, _mm512_set1_ps(SLACK)));
            let mut now = before;
            if grown != 0 {
                now = _mm512_mask_mov_ps(before, grown, most);
                _mm512_storeu_ps(reference, now);
                // Earlier weights were relative to a smaller reference; there are none where it was −∞.
                let factor = _mm512_mask_mov_ps(
                    _mm512_set1_ps(1.0),
                    grown,
                    power::<EXACT>(_mm512_sub_ps(before, now)),
                );
                sum = _mm512_mul_ps(sum, factor);
                for element in 0..self.value_pad {
                    let place = self.sums.add(element * BLOCK + 16 * strip);
                    _mm512_storeu_ps(place, _mm512_mul_ps(_mm512_loadu_ps(place), factor));
                }
            }
            // A query that has seen no slot yet has only scores of −∞: any finite reference gives weights of zero.
            let nothing = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(now, _mm512_set1_ps(f32::NEG_INFINITY));
            let now = _mm512_mask_mov_ps(now, nothing, _mm512_setzero_ps());
            let mut sums = [sum, _mm512_setzero_ps()];
            for pair in 0..slots / 2 {
                let even = power::<EXACT>(_mm512_sub_ps(at(2 * pair), now));
                let odd = power::<EXACT>(_mm512_sub_ps(at(2 * pair + 1), now));
                sums = [_mm512_add_ps(sums[0], even), _mm512_add_ps(sums[1], odd)];
                keep(pair, even, odd);
            }
            _mm512_storeu_ps(total, _mm512_add_ps(sums[0], sums[1]));
        }
    }

    /// Writes the results: sums ÷ total.
    ///
    /// # Safety
    /// As for [`begin`](TransposedUnit::begin); the scores must not be in use; the CPU must have AVX-512.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    pub(super) unsafe fn write(&self) {
        let width = self.attention.shape.value_width;
        // SAFETY: promised by the caller; scores have room for a block of 16 × 16; the rows of results are valid.
        unsafe {
            for strip in 0..BLOCK / 16 {
                let total = _mm512_loadu_ps(self.state.add(BLOCK + 16 * strip));
                // Without visible slots, zeros; a NaN stays one.
                let some = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(total, _mm512_setzero_ps());
                let factor = _mm512_maskz_div_ps(some, _mm512_set1_ps(1.0), total);
                for group in 0..self.value_pad / 16 {
                    let from = self.sums.add(16 * group * BLOCK + 16 * strip);
                    for element in 0..16 {
                        let place = from.add(element * BLOCK);
                        _mm512_storeu_ps(place, _mm512_mul_ps(_mm512_loadu_ps(place), factor));
                    }
                    Lanes16::transpose(from, BLOCK, self.scores, 16);
                    let left = width.saturating_sub(16 * group).min(16);
                    let lanes = ((1_u32 << left) - 1) as __mmask16;
                    for row in 0..16.min(self.tokens.saturating_sub(16 * strip)) {
                        let out =
                            self.attention.memory.output.row(self.first_token + 16 * strip + row, self.head);
                        let out = out.cast::<f32>().cast_mut().wrapping_add(16 * group);
                        _mm512_mask_storeu_ps(out, lanes, _mm512_loadu_ps(self.scores.add(16 * row)));
                    }
                }
            }
        }
    }
}

/// `2ˣ` for x ≤ 100, 0 below −126: relative error below 2⁻²³ with `EXACT`, otherwise below 2⁻¹⁸, well below that of a
/// weight in bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn power<const EXACT: bool>(x: __m512) -> __m512 {
    // Subnormal results would cost a hundred times as much. NaN passes through.
    let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(-126.0));
    // The fractional part; `scalef` applies the integer part.
    let r = _mm512_reduce_ps::<1>(x);
    let horner = |first: f32, rest: &[f32]| {
        let add = |p, c: &f32| _mm512_fmadd_ps(p, r, _mm512_set1_ps(*c));
        rest.iter().fold(_mm512_set1_ps(first), add)
    };
    let p = if EXACT {
        horner(0.001_877_576_6, &[0.008_989_34, 0.055_826_318, 0.240_153_62, 0.693_153_1, 0.999_999_94])
    } else {
        horner(0.013_534_167, &[0.052_011_465, 0.241_442_75, 0.693_003_84, 1.000_002_6])
    };
    _mm512_maskz_scalef_ps(normal, p, x)
}

/// Widens a row of keys or values to f32; pads it with zeros, also past the last slot that a query of the run sees.
///
/// # Safety
/// The row must be valid unless the slot is past the last.
pub(super) unsafe fn load_widened(
    attention: &Attention<'_>,
    run: &QueryRun,
    side: CacheSide,
    head: usize,
    slot: usize,
    out: &mut [f32],
) {
    let (rows, dtype, width) = side.rows(attention);
    let there = if slot < run.slots.end { width.min(out.len()) } else { 0 };
    let (row, rest) = out.split_at_mut(there);
    rest.fill(0.0);
    if there > 0 {
        // SAFETY: promised by the caller.
        unsafe {
            vec::load_row(attention.isa, dtype, rows.row(attention.cache_row(run.table, slot), head), row)
        };
    }
}

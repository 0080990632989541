//! The gated delta rule of recurrent layers.

use super::vec::simd::{Simd, dispatch};
use crate::isa::Isa;

/// Columns of a state that are computed together. Its columns are independent of each other: those of a strip stay in the
/// cache for all tokens.
pub(crate) const STRIP: usize = 64;

/// One token of the gated delta rule, for the columns of a strip.
#[derive(Clone, Copy)]
pub(crate) struct DeltaToken<'a> {
    /// As many elements as the state has rows.
    pub(crate) query: &'a [f32],
    /// Likewise.
    pub(crate) key: &'a [f32],
    pub(crate) value: &'a [f32; STRIP],
    /// The factor of the state.
    pub(crate) decay: f32,
    /// The rate at which the state learns.
    pub(crate) beta: f32,
    /// The factor of the result.
    pub(crate) scale: f32,
    /// Whether the state learns the difference to what it yields for the key, instead of the value.
    pub(crate) delta: bool,
}

/// Updates the strip of a state, and returns what it yields for the query:
/// `state ← decay · state + key ⊗ beta (value − decay · keyᵀ state)`, `result = scale · queryᵀ state`; without the delta
/// rule `state ← decay · state + key ⊗ beta value`.
pub(crate) fn delta_rule(isa: Isa, state: &mut [[f32; STRIP]], token: &DeltaToken<'_>) -> [f32; STRIP] {
    let mut result = [0.0; STRIP];
    let rows = state.len().min(token.query.len()).min(token.key.len());
    let (state, out) = (state.as_mut_ptr().cast::<f32>(), result.as_mut_ptr());
    dispatch!(isa, delta_rule_with(state: *mut f32, rows: usize, token: &DeltaToken<'_>, out: *mut f32) -> ());
    result
}

#[inline(always)]
unsafe fn delta_rule_with<S: Simd>(state: *mut f32, rows: usize, token: &DeltaToken<'_>, out: *mut f32) {
    let (query, key, value) = (token.query.as_ptr(), token.key.as_ptr(), token.value.as_ptr());
    for first in (0..STRIP).step_by(4 * S::N) {
        // SAFETY: rows of a strip, and as many elements of query and key; the caller promised the instructions.
        unsafe {
            let (decay, beta, scale) = (S::splat(token.decay), S::splat(token.beta), S::splat(token.scale));
            let mut sums = [S::splat(0.0); 4];
            // Without the delta rule, nothing is subtracted from the values.
            for row in 0..if token.delta { rows } else { 0 } {
                let (from, k) = (state.add(row * STRIP + first), S::splat(*key.add(row)));
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = S::fma(k, S::load(from.add(v * S::N)), *sum);
                }
            }
            let mut change = sums;
            for (v, change) in change.iter_mut().enumerate() {
                let predicted = S::mul(decay, *change);
                *change = S::mul(beta, S::sub(S::load(value.add(first + v * S::N)), predicted));
            }
            sums = [S::splat(0.0); 4];
            for row in 0..rows {
                let at = state.add(row * STRIP + first);
                let (k, q) = (S::splat(*key.add(row)), S::splat(*query.add(row)));
                for (v, (sum, change)) in sums.iter_mut().zip(change).enumerate() {
                    let place = at.add(v * S::N);
                    let new = S::fma(k, change, S::mul(decay, S::load(place)));
                    S::store(place, new);
                    *sum = S::fma(q, new, *sum);
                }
            }
            for (v, sum) in sums.into_iter().enumerate() {
                S::store(out.add(first + v * S::N), S::mul(scale, sum));
            }
        }
    }
}

//! The gated delta rule of several tokens at once.
//!
//! With decays `a(t)`, let `D(t, i)` be the product of those after token `i` up to `t`, and `F(t)` that of all of the chunk up
//! to `t`. From a state `S`, what the state learns from token `t` is
//! `u(t) = b(t) · (v(t) − F(t) · Sᵀ k(t) − Σ D(t, i) · (k(i) · k(t)) · u(i))` over `i < t`. Then the results are
//! `scale · (F(t) · Sᵀ q(t) + Σ D(t, i) · (q(t) · k(i)) · u(i))` over `i ≤ t`, and the state after the chunk is
//! `F(last) · S + Σ k(i) ⊗ D(last, i) · u(i)`: two products of matrices with the state, instead of two passes over it for
//! each token. Without the delta rule, `u(t) = b(t) · v(t)`.

use super::recurrent::STRIP;
use super::vec::simd::{Simd, dispatch};
use crate::isa::Isa;

/// Tokens of a chunk: with more, the products of pairs of them cost more than is gained.
pub(crate) const CHUNK: usize = 16;

/// Rows, and vectors of a row, that are computed together.
const ROWS: usize = 4;
const VECTORS: usize = 2;

/// The tokens of a chunk, for the columns of a strip. A chunk of fewer tokens has keys, queries, values and betas of 0 and
/// decays of 1 in place of those that it lacks.
pub(crate) struct DeltaChunk<'a> {
    /// The keys, then the queries: `2 · CHUNK` rows of as many elements as the state has rows.
    pub(crate) rows: &'a [f32],
    pub(crate) values: &'a [[f32; STRIP]; CHUNK],
    /// The factors of the state.
    pub(crate) decays: [f32; CHUNK],
    /// The rates at which the state learns.
    pub(crate) betas: [f32; CHUNK],
    /// The factor of the results.
    pub(crate) scale: f32,
    /// Whether the state learns the difference to what it yields for the key, instead of the value.
    pub(crate) delta: bool,
}

/// Updates the strip of a state by a chunk of tokens, and returns what it yields for the queries.
pub(crate) fn delta_chunk(
    isa: Isa,
    state: &mut [[f32; STRIP]],
    chunk: &DeltaChunk<'_>,
) -> [[f32; STRIP]; CHUNK] {
    let mut results = [[0.0; STRIP]; CHUNK];
    let depth = state.len();
    if chunk.rows.len() < 2 * CHUNK * depth {
        return results;
    }
    let (state, out) = (state.as_mut_ptr().cast::<f32>(), results.as_mut_ptr().cast::<f32>());
    dispatch!(isa, delta_chunk_with(state: *mut f32, depth: usize, chunk: &DeltaChunk<'_>, out: *mut f32) -> ());
    results
}

/// Factors of what is learned from earlier tokens: in what is learned from later ones, and in their results.
struct Pairs {
    learned: [[f32; CHUNK]; CHUNK],
    results: [[f32; CHUNK]; CHUNK],
    /// `F(t)`
    from: [f32; CHUNK],
    /// `D(last, t)`
    to: [f32; CHUNK],
}

impl Pairs {
    /// # Safety
    /// The rows have `depth` elements each; the CPU has the instructions.
    #[inline(always)]
    unsafe fn of<S: Simd>(chunk: &DeltaChunk<'_>, depth: usize) -> Pairs {
        let zero = [[0.0; CHUNK]; CHUNK];
        let mut pairs = Pairs { learned: zero, results: zero, from: [0.0; CHUNK], to: [0.0; CHUNK] };
        let keys = chunk.rows.as_ptr();
        let [mut all, mut rest] = [1.0; 2];
        for (from, decay) in pairs.from.iter_mut().zip(chunk.decays) {
            all *= decay;
            *from = all;
        }
        for (to, decay) in pairs.to.iter_mut().zip(chunk.decays).rev() {
            *to = rest;
            rest *= decay;
        }
        for (t, (learned, results)) in pairs.learned.iter_mut().zip(&mut pairs.results).enumerate() {
            let mut decay = 1.0;
            let each = learned.iter_mut().zip(results).zip(chunk.decays).enumerate();
            for (i, ((learned, result), own)) in each.take(t + 1).rev() {
                // SAFETY: keys and queries are `CHUNK` rows each.
                unsafe {
                    let key = keys.add(i * depth);
                    *result = decay * dot::<S>(keys.add((CHUNK + t) * depth), key, depth);
                    if i < t && chunk.delta {
                        *learned = decay * dot::<S>(keys.add(t * depth), key, depth);
                    }
                }
                decay *= own;
            }
        }
        pairs
    }
}

/// # Safety
/// Both have `len` elements; the CPU has the instructions.
#[inline(always)]
unsafe fn dot<S: Simd>(a: *const f32, b: *const f32, len: usize) -> f32 {
    let whole = len - len % S::N;
    // SAFETY: promised by the caller.
    unsafe {
        let mut sum = S::splat(0.0);
        for first in (0..whole).step_by(S::N) {
            sum = S::fma(S::load(a.add(first)), S::load(b.add(first)), sum);
        }
        if whole < len {
            let rest = len - whole;
            sum = S::fma(S::load_part(a.add(whole), rest), S::load_part(b.add(whole), rest), sum);
        }
        S::sum(sum)
    }
}

#[inline(always)]
unsafe fn delta_chunk_with<S: Simd>(state: *mut f32, depth: usize, chunk: &DeltaChunk<'_>, out: *mut f32) {
    let mut known = [[0.0; STRIP]; 2 * CHUNK];
    let mut learned = [[0.0; STRIP]; CHUNK];
    // SAFETY: `depth` rows of a strip, and as many elements of every key and query; the caller promised the instructions.
    unsafe {
        let pairs = Pairs::of::<S>(chunk, depth);
        let (known, learned) = (known.as_mut_ptr().cast::<f32>(), learned.as_mut_ptr().cast::<f32>());
        // Without the delta rule, nothing is subtracted from the values.
        let first = if chunk.delta { 0 } else { CHUNK };
        yields::<S>(state, depth, chunk.rows.as_ptr(), first, known);
        for column in (0..STRIP).step_by(VECTORS * S::N) {
            learn::<S>(chunk, &pairs, known.add(column), learned.add(column), out.add(column), column);
        }
        update::<S>(state, depth, chunk.rows.as_ptr(), pairs.from[CHUNK - 1], learned);
    }
}

/// What a state yields for the keys and queries from row `first` on.
///
/// # Safety
/// As for [`delta_chunk_with`]; `known` has room for all of them.
#[inline(always)]
unsafe fn yields<S: Simd>(state: *const f32, depth: usize, rows: *const f32, first: usize, known: *mut f32) {
    for column in (0..STRIP).step_by(VECTORS * S::N) {
        for row in (first..2 * CHUNK).step_by(ROWS) {
            // SAFETY: promised by the caller.
            unsafe {
                let mut sums = [[S::splat(0.0); VECTORS]; ROWS];
                for d in 0..depth {
                    let at = state.add(d * STRIP + column);
                    let values = [S::load(at), S::load(at.add(S::N))];
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let factor = S::splat(*rows.add((row + r) * depth + d));
                        for (sum, value) in sums.iter_mut().zip(values) {
                            *sum = S::fma(factor, value, *sum);
                        }
                    }
                }
                for (r, sums) in sums.into_iter().enumerate() {
                    for (v, sum) in sums.into_iter().enumerate() {
                        S::store(known.add((row + r) * STRIP + column + v * S::N), sum);
                    }
                }
            }
        }
    }
}

/// Some columns of what is learned, faded to the end of the chunk, and of the results.
///
/// # Safety
/// The pointers are at these columns of strips for all tokens; the CPU has the instructions.
#[inline(always)]
unsafe fn learn<S: Simd>(
    chunk: &DeltaChunk<'_>,
    pairs: &Pairs,
    known: *const f32,
    learned: *mut f32,
    out: *mut f32,
    column: usize,
) {
    let each =
        chunk.values.iter().zip(chunk.betas).zip(pairs.learned.iter().zip(&pairs.results)).zip(pairs.from);
    // SAFETY: promised by the caller.
    unsafe {
        for (t, (((value, beta), (in_learned, in_results)), from)) in each.enumerate() {
            let (from, value) = (S::splat(from), value.as_ptr().add(column));
            for v in 0..VECTORS {
                let at = v * S::N;
                let mut sum = S::load(value.add(at));
                let mut result = S::mul(from, S::load(known.add((CHUNK + t) * STRIP + at)));
                if chunk.delta {
                    sum = S::fma(S::sub(S::splat(0.0), from), S::load(known.add(t * STRIP + at)), sum);
                }
                for (i, (in_learned, in_results)) in in_learned.iter().zip(in_results).enumerate().take(t) {
                    let earlier = S::load(learned.add(i * STRIP + at));
                    sum = S::fma(S::splat(-*in_learned), earlier, sum);
                    result = S::fma(S::splat(*in_results), earlier, result);
                }
                let sum = S::mul(S::splat(beta), sum);
                let own = in_results.get(t).copied().unwrap_or(0.0);
                S::store(learned.add(t * STRIP + at), sum);
                S::store(
                    out.add(t * STRIP + at),
                    S::mul(S::splat(chunk.scale), S::fma(S::splat(own), sum, result)),
                );
            }
        }
        for (t, to) in pairs.to.into_iter().enumerate() {
            for v in 0..VECTORS {
                let at = learned.add(t * STRIP + v * S::N);
                S::store(at, S::mul(S::splat(to), S::load(at)));
            }
        }
    }
}

/// Adds what was learned to the state, which has faded.
///
/// # Safety
/// As for [`delta_chunk_with`]; `learned` has a strip for each token.
#[inline(always)]
unsafe fn update<S: Simd>(state: *mut f32, depth: usize, keys: *const f32, fade: f32, learned: *const f32) {
    // SAFETY: promised by the caller.
    unsafe {
        let fade = S::splat(fade);
        for column in (0..STRIP).step_by(VECTORS * S::N) {
            let mut d = 0;
            while d + ROWS <= depth {
                let mut sums = [[S::splat(0.0); VECTORS]; ROWS];
                for (r, sums) in sums.iter_mut().enumerate() {
                    for (v, sum) in sums.iter_mut().enumerate() {
                        *sum = S::mul(fade, S::load(state.add((d + r) * STRIP + column + v * S::N)));
                    }
                }
                for t in 0..CHUNK {
                    let at = learned.add(t * STRIP + column);
                    let values = [S::load(at), S::load(at.add(S::N))];
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let factor = S::splat(*keys.add(t * depth + d + r));
                        for (sum, value) in sums.iter_mut().zip(values) {
                            *sum = S::fma(factor, value, *sum);
                        }
                    }
                }
                for (r, sums) in sums.into_iter().enumerate() {
                    for (v, sum) in sums.into_iter().enumerate() {
                        S::store(state.add((d + r) * STRIP + column + v * S::N), sum);
                    }
                }
                d += ROWS;
            }
            for d in d..depth {
                for v in 0..VECTORS {
                    let at = state.add(d * STRIP + column + v * S::N);
                    let mut sum = S::mul(fade, S::load(at));
                    for t in 0..CHUNK {
                        let value = S::load(learned.add(t * STRIP + column + v * S::N));
                        sum = S::fma(S::splat(*keys.add(t * depth + d)), value, sum);
                    }
                    S::store(at, sum);
                }
            }
        }
    }
}

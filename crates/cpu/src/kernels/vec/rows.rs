//! Operations on whole rows: sums, norms, softmax, RoPE.

use super::functions::exp;
use super::simd::{Simd, dispatch};
use crate::isa::Isa;

/// The term that [`fold`] sums.
#[derive(Clone, Copy)]
enum Term {
    Value,
    Square,
    Product,
}

/// Four independent sums, so that additions do not wait for each other.
#[inline(always)]
unsafe fn fold<S: Simd>(term: Term, a: *const f32, b: *const f32, count: usize) -> f32 {
    // SAFETY: promised by the caller.
    unsafe {
        let mut sums = [S::splat(0.0); 4];
        let whole = count - count % (4 * S::N);
        for first in (0..whole).step_by(4 * S::N) {
            for (i, sum) in sums.iter_mut().enumerate() {
                let at = first + i * S::N;
                *sum = add_term::<S>(term, *sum, S::load(a.add(at)), S::load(b.add(at)));
            }
        }
        let mut at = whole;
        while at + S::N <= count {
            sums[0] = add_term::<S>(term, sums[0], S::load(a.add(at)), S::load(b.add(at)));
            at += S::N;
        }
        if at < count {
            let left = count - at;
            let (x, y) = (S::load_part(a.add(at), left), S::load_part(b.add(at), left));
            sums[1] = add_term::<S>(term, sums[1], x, y);
        }
        S::sum(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])))
    }
}

#[inline(always)]
unsafe fn add_term<S: Simd>(term: Term, sum: S::V, a: S::V, b: S::V) -> S::V {
    // SAFETY: promised by the caller.
    unsafe {
        match term {
            Term::Value => S::add(sum, a),
            Term::Square => S::fma(a, a, sum),
            Term::Product => S::fma(a, b, sum),
        }
    }
}

fn fold_with(isa: Isa, term: Term, a: &[f32], b: &[f32]) -> f32 {
    let count = a.len().min(b.len());
    let (a, b) = (a.as_ptr(), b.as_ptr());
    dispatch!(isa, fold(term: Term, a: *const f32, b: *const f32, count: usize) -> f32)
}

/// `Σ x`
pub fn sum(isa: Isa, x: &[f32]) -> f32 {
    fold_with(isa, Term::Value, x, x)
}

/// `Σ x²`
pub fn sum_of_squares(isa: Isa, x: &[f32]) -> f32 {
    fold_with(isa, Term::Square, x, x)
}

/// `Σ a b`, over as many elements as the shorter slice has.
pub fn dot(isa: Isa, a: &[f32], b: &[f32]) -> f32 {
    fold_with(isa, Term::Product, a, b)
}

/// The largest element; −∞ of an empty slice.
pub fn largest(isa: Isa, x: &[f32]) -> f32 {
    #[inline(always)]
    unsafe fn body<S: Simd>(x: *const f32, count: usize) -> f32 {
        // SAFETY: promised by the caller.
        unsafe {
            let mut most = S::splat(f32::NEG_INFINITY);
            let whole = count - count % S::N;
            for i in (0..whole).step_by(S::N) {
                most = S::max(S::load(x.add(i)), most);
            }
            (whole..count).fold(S::largest(most), |most, i| most.max(*x.add(i)))
        }
    }
    let (x, count) = (x.as_ptr(), x.len());
    dispatch!(isa, body(x: *const f32, count: usize) -> f32)
}

/// `sums[i] = a[i] × b[i] + sums[i]`, for as many elements as the shortest slice has.
pub fn multiply_add(isa: Isa, a: &[f32], b: &[f32], sums: &mut [f32]) {
    #[inline(always)]
    unsafe fn body<S: Simd>(a: *const f32, b: *const f32, sums: *mut f32, count: usize) {
        // SAFETY: promised by the caller.
        unsafe {
            let whole = count - count % S::N;
            for i in (0..whole).step_by(S::N) {
                let sum = S::fma(S::load(a.add(i)), S::load(b.add(i)), S::load(sums.add(i)));
                S::store(sums.add(i), sum);
            }
            if whole < count {
                let load = |from: *const f32| S::load_part(from.add(whole), count - whole);
                let sum = S::fma(load(a), load(b), load(sums));
                S::store_part(sums.add(whole), sum, count - whole);
            }
        }
    }
    let count = a.len().min(b.len()).min(sums.len());
    let (a, b, sums) = (a.as_ptr(), b.as_ptr(), sums.as_mut_ptr());
    dispatch!(isa, body(a: *const f32, b: *const f32, sums: *mut f32, count: usize) -> ())
}

/// `x[i] = x[i] × factor`
pub fn scale(isa: Isa, x: &mut [f32], factor: f32) {
    #[inline(always)]
    unsafe fn body<S: Simd>(x: *mut f32, factor: f32, count: usize) {
        // SAFETY: promised by the caller.
        unsafe {
            let whole = count - count % S::N;
            for i in (0..whole).step_by(S::N) {
                S::store(x.add(i), S::mul(S::load(x.add(i)), S::splat(factor)));
            }
            (whole..count).for_each(|i| *x.add(i) *= factor);
        }
    }
    let (x, count) = (x.as_mut_ptr(), x.len());
    dispatch!(isa, body(x: *mut f32, factor: f32, count: usize) -> ())
}

/// `y[i] = y[i] + factor × x[i]`, for as many elements as the shorter slice has.
pub fn axpy(isa: Isa, factor: f32, x: &[f32], y: &mut [f32]) {
    #[inline(always)]
    unsafe fn body<S: Simd>(factor: f32, x: *const f32, y: *mut f32, count: usize) {
        // SAFETY: promised by the caller.
        unsafe {
            let whole = count - count % S::N;
            let factor = S::splat(factor);
            for i in (0..whole).step_by(S::N) {
                S::store(y.add(i), S::fma(factor, S::load(x.add(i)), S::load(y.add(i))));
            }
            if whole < count {
                let left = count - whole;
                let v = S::fma(factor, S::load_part(x.add(whole), left), S::load_part(y.add(whole), left));
                S::store_part(y.add(whole), v, left);
            }
        }
    }
    let count = x.len().min(y.len());
    let (x, y) = (x.as_ptr(), y.as_mut_ptr());
    dispatch!(isa, body(factor: f32, x: *const f32, y: *mut f32, count: usize) -> ())
}

/// `out = x / √(mean(x²) + eps) · weight` over one row; without weights, they count as 1. Relative error of an element
/// below (8 + n / 2l) · 2⁻²⁴, with n elements and l lanes.
///
/// The slices must be of one length; shorter ones shorten the row.
pub fn rms_norm(isa: Isa, x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]) {
    let count = x.len().min(out.len()).min(weight.map_or(usize::MAX, <[f32]>::len));
    // SAFETY: the slices hold that many elements, and `out` overlaps none.
    unsafe {
        let weight = weight.map_or(std::ptr::null(), <[f32]>::as_ptr);
        rms_norm_add(
            isa,
            std::ptr::null(),
            x.as_ptr(),
            std::ptr::null_mut(),
            weight,
            eps,
            out.as_mut_ptr(),
            count,
        );
    }
}

/// A residual addition and the norm after it, in one pass over the row: `sum = a + x`, `out = norm(sum) · weight`.
///
/// `a`, `sum` and `weight` may be null: nothing is added, the sum is not stored, weights are 1.
///
/// # Safety
/// `count` elements must be readable or writable at each address that is not null. `sum` may be the same as `a` or
/// `x`, and `out` as `x` or `sum` (or `a`, if `sum` is null); apart from that, results overlap nothing.
#[expect(clippy::too_many_arguments, reason = "a fused kernel: five rows and their parameters")]
pub unsafe fn rms_norm_add(
    isa: Isa,
    a: *const f32,
    x: *const f32,
    sum: *mut f32,
    weight: *const f32,
    eps: f32,
    out: *mut f32,
    count: usize,
) {
    #[inline(always)]
    unsafe fn body<S: Simd>(
        a: *const f32,
        x: *const f32,
        sum: *mut f32,
        weight: *const f32,
        eps: f32,
        out: *mut f32,
        count: usize,
    ) {
        // SAFETY: promised by the caller; the sum is written to `out` first, and scaled there.
        unsafe {
            let mut squares = [S::splat(0.0); 2];
            let whole = count - count % S::N;
            let mut at = 0;
            while at < count {
                let left = count - at;
                let load = |from: *const f32| {
                    if at < whole { S::load(from.add(at)) } else { S::load_part(from.add(at), left) }
                };
                let mut v = load(x);
                if !a.is_null() {
                    v = S::add(load(a), v);
                }
                for to in [sum, out] {
                    if to.is_null() {
                    } else if at < whole {
                        S::store(to.add(at), v);
                    } else {
                        S::store_part(to.add(at), v, left);
                    }
                }
                squares.swap(0, 1);
                squares[0] = S::fma(v, v, squares[0]);
                at += S::N;
            }
            let mean = S::sum(S::add(squares[0], squares[1])) / count as f32;
            let factor = S::splat(1.0 / (mean + eps).sqrt());
            let mut at = 0;
            while at < count {
                let left = count - at;
                let load = |from: *const f32| {
                    if at < whole { S::load(from.add(at)) } else { S::load_part(from.add(at), left) }
                };
                let mut v = S::mul(load(out), factor);
                if !weight.is_null() {
                    v = S::mul(v, load(weight));
                }
                if at < whole {
                    S::store(out.add(at), v);
                } else {
                    S::store_part(out.add(at), v, left);
                }
                at += S::N;
            }
        }
    }
    dispatch!(isa, body(a: *const f32, x: *const f32, sum: *mut f32, weight: *const f32, eps: f32, out: *mut f32, count: usize) -> ())
}

/// `x = eˣ / Σ eˣ` over one row; a row of −∞ becomes zeros. Relative error of an element d below the largest:
/// (16 + n / l + d) · 2⁻²⁴, with n elements and l lanes.
pub fn softmax(isa: Isa, x: &mut [f32]) {
    #[inline(always)]
    unsafe fn body<S: Simd>(x: *mut f32, count: usize, most: f32) -> f32 {
        // SAFETY: promised by the caller.
        unsafe {
            let mut total = S::splat(0.0);
            let whole = count - count % S::N;
            for i in (0..whole).step_by(S::N) {
                let e = exp::<S>(S::sub(S::load(x.add(i)), S::splat(most)));
                S::store(x.add(i), e);
                total = S::add(total, e);
            }
            let mut total = S::sum(total);
            if whole < count {
                let left = count - whole;
                let e = exp::<S>(S::sub(S::load_part(x.add(whole), left), S::splat(most)));
                S::store_part(x.add(whole), e, left);
                (whole..count).for_each(|i| total += *x.add(i));
            }
            total
        }
    }
    let most = largest(isa, x);
    if most == f32::NEG_INFINITY && !x.iter().any(|value| value.is_nan()) {
        x.fill(0.0);
        return;
    }
    let total = {
        let (x, count) = (x.as_mut_ptr(), x.len());
        dispatch!(isa, body(x: *mut f32, count: usize, most: f32) -> f32)
    };
    scale(isa, x, 1.0 / total);
}

/// Applies RoPE to one row: rotates each pair `x[i], x[j] → x[i] cos − x[j] sin, x[i] sin + x[j] cos`.
///
/// There are as many pairs as `cos` and `sin` have elements (the shorter). With `adjacent` pair `p` is elements `2p`
/// and `2p + 1`, else `p` and `p + pairs`. Elements past the pairs, and rows with fewer elements, stay as they are.
/// Error below 3 · 2⁻²⁴ times the length of the pair, for exactly rounded `cos` and `sin`.
pub fn rope(isa: Isa, x: &mut [f32], cos: &[f32], sin: &[f32], adjacent: bool) {
    #[inline(always)]
    unsafe fn body<S: Simd>(x: *mut f32, cos: *const f32, sin: *const f32, pairs: usize) {
        // SAFETY: promised by the caller.
        unsafe {
            let whole = pairs - pairs % S::N;
            for i in (0..whole).step_by(S::N) {
                let (a, b) = (S::load(x.add(i)), S::load(x.add(pairs + i)));
                let (c, s) = (S::load(cos.add(i)), S::load(sin.add(i)));
                S::store(x.add(i), S::sub(S::mul(a, c), S::mul(b, s)));
                S::store(x.add(pairs + i), S::fma(a, s, S::mul(b, c)));
            }
            for i in whole..pairs {
                let (a, b, c, s) = (*x.add(i), *x.add(pairs + i), *cos.add(i), *sin.add(i));
                *x.add(i) = a * c - b * s;
                *x.add(pairs + i) = a * s + b * c;
            }
        }
    }
    let pairs = cos.len().min(sin.len());
    if x.len() < 2 * pairs {
        return;
    }
    // The compiler vectorizes adjacent pairs by itself.
    #[inline(always)]
    unsafe fn adjacent_pairs<S: Simd>(x: &mut [f32], cos: &[f32], sin: &[f32]) {
        for ((pair, c), s) in x.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
            let [a, b] = *pair;
            *pair = [a * c - b * s, a * s + b * c];
        }
    }
    if adjacent {
        return dispatch!(isa, adjacent_pairs(x: &mut [f32], cos: &[f32], sin: &[f32]) -> ());
    }
    let (x, cos, sin) = (x.as_mut_ptr(), cos.as_ptr(), sin.as_ptr());
    dispatch!(isa, body(x: *mut f32, cos: *const f32, sin: *const f32, pairs: usize) -> ())
}

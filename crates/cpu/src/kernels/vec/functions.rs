//! Elementary functions on vectors, with their error bounds (checked against f64 in `tests/vec.rs`).

use quadriga_graph::Gate;

use super::simd::Simd;

/// `eˣ`: relative error below 2⁻²²; 0 below −87.33 (where f32 results become subnormal), infinity above 88.72.
///
/// # Safety
/// The CPU must have the instruction set of `S`.
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    // eˣ = 2ⁿ eʳ with n = round(x / ln 2) and |r| ≤ ln 2 / 2; ln 2 is taken off in two parts.
    // SAFETY: promised by the caller.
    unsafe {
        // `min` and `max` return their second operand if either is NaN, so that NaN passes through.
        let limited = S::min(S::splat(89.0), S::max(S::splat(-88.0), x));
        let n = S::round(S::mul(limited, S::splat(std::f32::consts::LOG2_E)));
        let r = S::fma(n, S::splat(-0.693_145_75), limited);
        let r = S::fma(n, S::splat(-1.428_606_8e-6), r);
        let mut p = S::splat(1.0 / 5040.0);
        for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            p = S::fma(p, r, S::splat(c));
        }
        S::keep_if_at_least(S::scale_by_power(p, n), x, -87.33)
    }
}

/// `1 / (1 + e⁻ˣ)`: relative error below 2⁻²¹ for x > −87.
///
/// # Safety
/// The CPU must have the instruction set of `S`.
#[inline(always)]
pub(crate) unsafe fn sigmoid<S: Simd>(x: S::V) -> S::V {
    // SAFETY: promised by the caller.
    unsafe {
        let e = exp::<S>(S::sub(S::splat(0.0), x));
        S::div(S::splat(1.0), S::add(S::splat(1.0), e))
    }
}

/// Hyperbolic tangent: absolute error below 2⁻²², relative error below 2⁻²⁰.
///
/// # Safety
/// The CPU must have the instruction set of `S`.
#[inline(always)]
pub(crate) unsafe fn tanh<S: Simd>(x: S::V) -> S::V {
    // Large |x|: 1 − 2 / (e²ˣ + 1), which cancels for small ones; there an odd polynomial over an even one.
    // SAFETY: promised by the caller.
    unsafe {
        let limited = S::min(S::splat(9.0), S::max(S::splat(-9.0), x));
        let s = S::mul(limited, limited);
        let horner = |coefficients: &[f32]| {
            let mut p = S::splat(0.0);
            for c in coefficients {
                p = S::fma(p, s, S::splat(*c));
            }
            p
        };
        // A rational approximation of degree 13 over 6 on [−9, 9].
        let numerator = horner(&[
            -2.760_768_5e-16,
            2.000_188e-13,
            -8.604_672e-11,
            5.122_297e-8,
            1.485_722_4e-5,
            6.372_619e-4,
            4.893_524_6e-3,
        ]);
        let denominator = horner(&[1.198_258_4e-6, 1.185_347_1e-4, 2.268_434_6e-3, 4.893_525e-3]);
        S::div(S::mul(limited, numerator), denominator)
    }
}

/// A function of one number.
pub(super) trait VectorFunction {
    /// # Safety
    /// The CPU must have the instruction set of `S`.
    unsafe fn apply<S: Simd>(x: S::V) -> S::V;
}

/// A function of two numbers.
pub(super) trait Function2 {
    /// # Safety
    /// The CPU must have the instruction set of `S`.
    unsafe fn apply<S: Simd>(a: S::V, b: S::V) -> S::V;
}

macro_rules! functions {
    ($trait:ident: $($name:ident($($x:ident),*) = $body:expr;)*) => {
        $(
            pub(super) struct $name;
            impl $trait for $name {
                #[inline(always)]
                unsafe fn apply<S: Simd>($($x: S::V),*) -> S::V {
                    // SAFETY: promised by the caller.
                    unsafe { $body }
                }
            }
        )*
    };
}

functions! { VectorFunction:
    Exp(x) = exp::<S>(x);
    Sigmoid(x) = sigmoid::<S>(x);
    Silu(x) = S::mul(x, sigmoid::<S>(x));
    Tanh(x) = tanh::<S>(x);
    Gelu(x) = {
        // ½ x (1 + tanh(√(2/π) (x + 0.044715 x³))) = x · sigmoid(2 √(2/π) (x + 0.044715 x³))
        let cubic = S::fma(S::mul(S::splat(0.044_715), x), S::mul(x, x), x);
        S::mul(x, sigmoid::<S>(S::mul(S::splat(1.595_769_2), cubic)))
    };
    GeluQuick(x) = S::mul(x, sigmoid::<S>(S::mul(S::splat(1.702), x)));
    Relu(x) = S::max(S::splat(0.0), x);
    Square(x) = S::mul(x, x);
}

functions! { Function2:
    Add(a, b) = S::add(a, b);
    Sub(a, b) = S::sub(a, b);
    Mul(a, b) = S::mul(a, b);
    Div(a, b) = S::div(a, b);
    Swiglu(a, b) = S::mul(Silu::apply::<S>(a), b);
    Geglu(a, b) = S::mul(Gelu::apply::<S>(a), b);
    Reglu(a, b) = S::mul(Relu::apply::<S>(a), b);
    SwigluOai(a, b) = {
        // `min` and `max` return their second operand if either is NaN, so that NaN passes through.
        let limit = S::splat(Gate::OAI_LIMIT);
        let gate = S::min(limit, a);
        let up = S::max(S::splat(-Gate::OAI_LIMIT), S::min(limit, b));
        let activated = S::mul(gate, sigmoid::<S>(S::mul(S::splat(Gate::OAI_ALPHA), gate)));
        S::mul(activated, S::add(up, S::splat(1.0)))
    };
}

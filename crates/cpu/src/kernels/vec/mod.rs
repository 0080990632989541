//! SIMD functions on rows of `f32`: elementwise functions, sums, norms, softmax, RoPE, conversions.
//!
//! Each takes the [`Isa`] whose instructions to use. Element-wise functions give the same bits however a row is cut
//! into pieces; sums are taken in a fixed order for a given instruction set.
//!
//! How far results are from exact ones (`tests/vec.rs` measures all of it against f64; u = 2⁻²⁴ is half a unit in the
//! last place, n the length of a row, l the lanes of a vector: 1, 8 or 16):
//!
//! | function | error |
//! |---|---|
//! | `exp` | 2⁻²² relative for −87.3 ≤ x ≤ 87.3; 0 below, where results would be subnormal |
//! | `sigmoid`, `silu`, `swiglu` | 2⁻²¹, 2⁻²⁰, 2⁻¹⁹ relative for \|x\| ≤ 87 |
//! | `tanh` | 2⁻²⁰ relative |
//! | `gelu`, both forms | 2⁻²⁰ · max(1, \|x\|) absolute |
//! | `rms_norm` | (8 + n / 2l) u relative, of each element |
//! | `softmax` | (16 + n / l + d) u relative, of an element d below the largest |
//! | `rope` | 3 u · √(a² + b²) absolute, of a pair (a, b) and exactly rounded sines and cosines |
//! | conversions | exact, or rounded to the nearest |

mod convert;
mod functions;
mod prefetch;
mod quantize;
mod row_sums;
mod row_tiles;
mod rows;
pub(crate) mod simd;

pub(crate) use convert::load_elements;
pub(crate) use functions::{exp, tanh};
pub(crate) use prefetch::prefetch;
pub(crate) use row_sums::{RowMatrix, axpy_rows, count_active, dot_row, list_active, reads_rows_of};
pub(crate) use row_tiles::{add_tile_products, add_tile_rows, tile_stride};

pub use convert::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16, load_row};
pub use quantize::quantize_row;
pub use rows::{
    axpy, dot, largest, multiply_add, rms_norm, rms_norm_add, rope, scale, softmax, sum, sum_of_squares,
};

use functions::{Function2, VectorFunction};
use simd::{Simd, dispatch};

use quadriga_graph::Gate;

use crate::isa::Isa;

/// A function of one number; errors are relative unless said otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Map {
    /// `eˣ`, error below 2⁻²²
    Exp,
    /// `1 / (1 + e⁻ˣ)`, error below 2⁻²¹
    Sigmoid,
    /// `x · sigmoid(x)`, error below 2⁻²⁰
    Silu,
    /// hyperbolic tangent, error below 2⁻²⁰
    Tanh,
    /// Gaussian error linear unit by the tanh formula, absolute error below 2⁻²⁰ · max(1, |x|)
    Gelu,
    /// `x · sigmoid(1.702 x)`, error below 2⁻²⁰ · max(1, |x|)
    GeluQuick,
    /// `max(x, 0)`
    Relu,
    /// `x²`
    Square,
}

/// A function of two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zip {
    /// `a + b`
    Add,
    /// `a − b`
    Sub,
    /// `a · b`
    Mul,
    /// `a / b`
    Div,
    /// `silu(a) · b`
    Swiglu,
    /// `gelu(a) · b`
    Geglu,
    /// `max(a, 0) · b`
    Reglu,
    /// gpt-oss's clamped SwiGLU of `a` and `b`
    SwigluOai,
}

impl Zip {
    /// The function of a gated linear unit.
    pub const fn of(gate: Gate) -> Zip {
        match gate {
            Gate::Swiglu => Zip::Swiglu,
            Gate::Geglu => Zip::Geglu,
            Gate::Reglu => Zip::Reglu,
            Gate::SwigluOai => Zip::SwigluOai,
        }
    }
}

/// `out[i] = f(x[i])`, for as many elements as the shorter slice has.
pub fn map(isa: Isa, function: Map, x: &[f32], out: &mut [f32]) {
    // SAFETY: both slices hold that many elements, and do not overlap.
    unsafe { map_raw(isa, function, x.as_ptr(), out.as_mut_ptr(), x.len().min(out.len())) }
}

/// `x[i] = f(x[i])`
pub fn map_in_place(isa: Isa, function: Map, x: &mut [f32]) {
    // SAFETY: the slice holds that many elements; each is read before it is written.
    unsafe { map_raw(isa, function, x.as_ptr(), x.as_mut_ptr(), x.len()) }
}

/// `out[i] = f(x[i])`
///
/// # Safety
/// `count` elements must be readable and writable; the two ranges must be the same or not overlap.
pub unsafe fn map_raw(isa: Isa, function: Map, x: *const f32, out: *mut f32, count: usize) {
    #[inline(always)]
    unsafe fn body<S: Simd>(function: Map, x: *const f32, out: *mut f32, count: usize) {
        // SAFETY: promised by the caller.
        unsafe {
            match function {
                Map::Exp => each::<S, functions::Exp>(x, out, count),
                Map::Sigmoid => each::<S, functions::Sigmoid>(x, out, count),
                Map::Silu => each::<S, functions::Silu>(x, out, count),
                Map::Tanh => each::<S, functions::Tanh>(x, out, count),
                Map::Gelu => each::<S, functions::Gelu>(x, out, count),
                Map::GeluQuick => each::<S, functions::GeluQuick>(x, out, count),
                Map::Relu => each::<S, functions::Relu>(x, out, count),
                Map::Square => each::<S, functions::Square>(x, out, count),
            }
        }
    }
    dispatch!(isa, body(function: Map, x: *const f32, out: *mut f32, count: usize) -> ())
}

#[inline(always)]
unsafe fn each<S: Simd, F: VectorFunction>(x: *const f32, out: *mut f32, count: usize) {
    let whole = count - count % S::N;
    // SAFETY: promised by the caller.
    unsafe {
        for i in (0..whole).step_by(S::N) {
            S::store(out.add(i), F::apply::<S>(S::load(x.add(i))));
        }
        if whole < count {
            let v = S::load_part(x.add(whole), count - whole);
            S::store_part(out.add(whole), F::apply::<S>(v), count - whole);
        }
    }
}

/// `out[i] = f(a[i], b[i])`, for as many elements as the shortest slice has.
pub fn zip(isa: Isa, function: Zip, a: &[f32], b: &[f32], out: &mut [f32]) {
    let count = a.len().min(b.len()).min(out.len());
    // SAFETY: the slices hold that many elements, and `out` does not overlap the others.
    unsafe { zip_raw(isa, function, a.as_ptr(), b.as_ptr(), out.as_mut_ptr(), count) }
}

/// `out[i] = f(a[i], b[i])`
///
/// # Safety
/// `count` elements must be readable and writable; `out` must be the same as `a` or `b`, or not overlap them.
pub unsafe fn zip_raw(isa: Isa, function: Zip, a: *const f32, b: *const f32, out: *mut f32, count: usize) {
    #[inline(always)]
    unsafe fn body<S: Simd>(function: Zip, a: *const f32, b: *const f32, out: *mut f32, count: usize) {
        // SAFETY: promised by the caller.
        unsafe {
            match function {
                Zip::Add => each2::<S, functions::Add>(a, b, out, count),
                Zip::Sub => each2::<S, functions::Sub>(a, b, out, count),
                Zip::Mul => each2::<S, functions::Mul>(a, b, out, count),
                Zip::Div => each2::<S, functions::Div>(a, b, out, count),
                Zip::Swiglu => each2::<S, functions::Swiglu>(a, b, out, count),
                Zip::Geglu => each2::<S, functions::Geglu>(a, b, out, count),
                Zip::Reglu => each2::<S, functions::Reglu>(a, b, out, count),
                Zip::SwigluOai => each2::<S, functions::SwigluOai>(a, b, out, count),
            }
        }
    }
    dispatch!(isa, body(function: Zip, a: *const f32, b: *const f32, out: *mut f32, count: usize) -> ())
}

#[inline(always)]
unsafe fn each2<S: Simd, F: Function2>(a: *const f32, b: *const f32, out: *mut f32, count: usize) {
    let whole = count - count % S::N;
    // SAFETY: promised by the caller.
    unsafe {
        for i in (0..whole).step_by(S::N) {
            S::store(out.add(i), F::apply::<S>(S::load(a.add(i)), S::load(b.add(i))));
        }
        if whole < count {
            let left = count - whole;
            let v = F::apply::<S>(S::load_part(a.add(whole), left), S::load_part(b.add(whole), left));
            S::store_part(out.add(whole), v, left);
        }
    }
}

//! How close a backend's outputs must come to the oracle's.

use std::fmt;

use quadriga_graph::{DType, Tensor};

use crate::oracle::{Fault, decode_all};

/// How close results must come.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Tolerance {
    /// Every value the same.
    Exact,
    /// The normalised mean squared error, `Σ (found − right)² / Σ right²`, at most this.
    Nmse(f64),
}

impl Tolerance {
    /// What everything is held to that is not listed here.
    pub const DEFAULT: Tolerance = Tolerance::Nmse(1e-7);
    /// Products and attention with types smaller than F32: activations may be rounded to match.
    pub const QUANTIZED: Tolerance = Tolerance::Nmse(5e-4);
    /// Results in F16: one unit in the last place makes up to 2.4e-7.
    pub const HALF: Tolerance = Tolerance::Nmse(1e-6);

    /// Exact for plain types. For quantized ones, values that lie between two codes may fall either way: room for
    /// a few of those, but not for another way of rounding.
    pub fn written(dtype: DType) -> Tolerance {
        match dtype {
            DType::Q8_0 => Tolerance::Nmse(2e-5),
            _ if dtype.is_quantized() => Tolerance::Nmse(2e-3),
            _ => Tolerance::Exact,
        }
    }

    /// The one for an operation whose result has type `dtype`: [`Tolerance::HALF`] for F16, else the default.
    pub fn of_result(dtype: DType) -> Tolerance {
        if dtype == DType::F16 { Tolerance::HALF } else { Tolerance::DEFAULT }
    }
}

/// Why an output was not right.
#[derive(Clone, PartialEq, Debug)]
pub enum Wrong {
    /// The number of bytes is not that of the tensor.
    Length {
        /// What type and shape ask for.
        expected: usize,
        /// What came.
        found: usize,
    },
    /// The bytes cannot be read as the type.
    Type(Fault),
    /// One value is not a number, infinite, or different where it must not be.
    Value {
        /// Which element, in row-major order.
        index: usize,
        /// The right value.
        expected: f64,
        /// The value found.
        found: f64,
    },
    /// Too far from the right values on the whole.
    Error {
        /// The normalised mean squared error.
        nmse: f64,
        /// What is allowed.
        allowed: f64,
    },
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wrong::Length { expected, found } => write!(f, "{found} bytes where {expected} are right"),
            Wrong::Type(fault) => write!(f, "{fault}"),
            Wrong::Value { index, expected, found } => {
                write!(f, "element {index} is {found} where {expected} is right")
            }
            Wrong::Error { nmse, allowed } => write!(f, "NMSE {nmse:.2e}, allowed {allowed:.0e}"),
        }
    }
}

/// Compares the bytes of an output, contiguous in its type, with the right values; returns the normalised mean
/// squared error.
pub fn judge(tensor: &Tensor, expected: &[f64], found: &[u8], tolerance: Tolerance) -> Result<f64, Wrong> {
    let dtype = tensor.dtype();
    let bytes = tensor.shape().contiguous(dtype).map_or(0, |(_, bytes)| bytes);
    if found.len() != bytes {
        return Err(Wrong::Length { expected: bytes, found: found.len() });
    }
    let found = decode_all(dtype, found).map_err(Wrong::Type)?;
    let exact = tolerance == Tolerance::Exact || dtype.is_integer();
    let (mut error, mut energy) = (0.0, 0.0);
    for (index, (expected, found)) in expected.iter().zip(&found).enumerate() {
        // What overflows F32 is infinite to a backend.
        let expected = if (*expected as f32).is_infinite() { f64::from(*expected as f32) } else { *expected };
        let wrong = Wrong::Value { index, expected, found: *found };
        if expected.is_nan() && found.is_nan() || expected == *found {
            energy += if expected.is_finite() { expected * expected } else { 0.0 };
            continue;
        }
        // A right value is exact only up to the rounding of its type.
        let same = dtype == DType::F32 && expected as f32 == *found as f32;
        if !found.is_finite() || !expected.is_finite() || (exact && !same) {
            return Err(wrong);
        }
        error += (found - expected) * (found - expected);
        energy += expected * expected;
    }
    let nmse = if energy > 0.0 { error / energy } else { error };
    match tolerance {
        Tolerance::Nmse(allowed) if nmse > allowed => Err(Wrong::Error { nmse, allowed }),
        _ => Ok(nmse),
    }
}

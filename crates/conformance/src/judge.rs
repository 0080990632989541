//! Comparison of a backend's outputs with the oracle's.

use std::fmt;

use quadriga_graph::{DType, Tensor};

use crate::oracle::{EvalError, decode_all};

/// The tolerated error of a result.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Tolerance {
    /// Every value must be equal.
    Exact,
    /// The normalized mean squared error, `Σ (found − expected)² / Σ expected²`, must be at most this.
    Nmse(f64),
}

impl Tolerance {
    /// The default.
    pub const DEFAULT: Tolerance = Tolerance::Nmse(1e-7);
    /// Matrix multiplication and attention with types smaller than F32: kernels may round activations.
    pub const QUANTIZED: Tolerance = Tolerance::Nmse(5e-4);
    /// Results in F16: one unit in the last place is up to 2.4e-7.
    pub const HALF: Tolerance = Tolerance::Nmse(1e-6);

    /// The tolerance of results that are written in type `dtype`: exact for plain types. For quantized types, a value
    /// halfway between two quants may round either way: room for a few of those, not for another rounding method.
    pub fn written(dtype: DType) -> Tolerance {
        match dtype {
            DType::Q8_0 => Tolerance::Nmse(2e-5),
            _ if dtype.is_quantized() => Tolerance::Nmse(2e-3),
            _ => Tolerance::Exact,
        }
    }

    /// The tolerance of an operation whose result has type `dtype`: [`Tolerance::HALF`] for F16, else the default.
    pub fn of_result(dtype: DType) -> Tolerance {
        if dtype == DType::F16 { Tolerance::HALF } else { Tolerance::DEFAULT }
    }
}

/// How an output differs from the expected one.
#[derive(Clone, PartialEq, Debug)]
pub enum Mismatch {
    /// The number of bytes is not that of the tensor.
    Length {
        /// The size that type and shape require.
        expected: usize,
        /// The size found.
        found: usize,
    },
    /// The bytes cannot be read as the type.
    Type(EvalError),
    /// A value differs where it must be exact, or is not finite where the expected value is.
    Value {
        /// Which element, in row-major order.
        index: usize,
        /// The expected value.
        expected: f64,
        /// The value found.
        found: f64,
    },
    /// The error over all values exceeds the tolerance.
    Error {
        /// The normalized mean squared error.
        nmse: f64,
        /// The tolerance.
        allowed: f64,
    },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mismatch::Length { expected, found } => write!(f, "{found} bytes instead of {expected}"),
            Mismatch::Type(error) => write!(f, "{error}"),
            Mismatch::Value { index, expected, found } => {
                write!(f, "element {index} is {found} instead of {expected}")
            }
            Mismatch::Error { nmse, allowed } => write!(f, "NMSE {nmse:.2e}, allowed {allowed:.0e}"),
        }
    }
}

/// Compares an output, contiguous bytes of its type, with the expected values; returns the normalized mean squared
/// error.
pub fn judge(tensor: &Tensor, expected: &[f64], found: &[u8], tolerance: Tolerance) -> Result<f64, Mismatch> {
    let dtype = tensor.dtype();
    let bytes = tensor.shape().contiguous(dtype).map_or(0, |(_, bytes)| bytes);
    if found.len() != bytes {
        return Err(Mismatch::Length { expected: bytes, found: found.len() });
    }
    let found = decode_all(dtype, found).map_err(Mismatch::Type)?;
    let exact = tolerance == Tolerance::Exact || dtype.is_integer();
    let (mut error, mut energy) = (0.0, 0.0);
    for (index, (expected, found)) in expected.iter().zip(&found).enumerate() {
        // A value that overflows F32 is infinite in a backend.
        let expected = if (*expected as f32).is_infinite() { f64::from(*expected as f32) } else { *expected };
        let mismatch = Mismatch::Value { index, expected, found: *found };
        if expected.is_nan() && found.is_nan() || expected == *found {
            energy += if expected.is_finite() { expected * expected } else { 0.0 };
            continue;
        }
        // The expected value is compared after rounding to the type.
        let same = dtype == DType::F32 && expected as f32 == *found as f32;
        if !found.is_finite() || !expected.is_finite() || (exact && !same) {
            return Err(mismatch);
        }
        error += (found - expected) * (found - expected);
        energy += expected * expected;
    }
    let nmse = if energy > 0.0 { error / energy } else { error };
    match tolerance {
        Tolerance::Nmse(allowed) if nmse > allowed => Err(Mismatch::Error { nmse, allowed }),
        _ => Ok(nmse),
    }
}

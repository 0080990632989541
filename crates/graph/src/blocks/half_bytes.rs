//! A 16-bit float without alignment.

use std::fmt;

use bytemuck::{Pod, Zeroable};
use half::f16;

/// An IEEE half-precision number as its two little-endian bytes, so that it has alignment 1.
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct HalfBytes(pub [u8; 2]);

impl HalfBytes {
    /// The number as `f32`, exactly.
    #[inline]
    pub fn to_f32(self) -> f32 {
        f16::from_le_bytes(self.0).to_f32()
    }

    /// The nearest finite number: out-of-range values saturate, NaN becomes zero.
    #[inline]
    pub fn from_f32_finite(value: f32) -> Self {
        let limit = f16::MAX.to_f32();
        let finite = if value.is_nan() { 0.0 } else { value.clamp(-limit, limit) };
        HalfBytes(f16::from_f32(finite).to_le_bytes())
    }
}

impl fmt::Debug for HalfBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.to_f32(), f)
    }
}

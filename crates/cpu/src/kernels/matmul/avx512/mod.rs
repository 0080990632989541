//! AVX-512 kernels, and the loading of packed weights for them: sixteen rows, a group, at a time.
//!
//! Every type becomes eight vectors of unsigned bytes and, for each block or half block, `d` and `m` of sixteen rows:
//! a weight is `d q + m`. Kernels that sum over a superblock multiply with the super-scales once.

pub(super) mod f32;
pub(super) mod int16;
pub(super) mod int8x2;
mod int8x2_dot;
mod int8x2_gemv;
pub(super) mod prepare;

use std::arch::x86_64::*;

use super::format::PackedFormat;
use super::quants::{QuantLoads, QuantStorage};
use super::scales::{Affine, ScaleLoads, ScaleStorage};
use super::simd::avx512::negative;

/// A packed format as AVX-512 kernels see it.
pub(super) trait Avx512Format: PackedFormat<Quants: QuantLoads, Scales: ScaleLoads> {
    /// A block.
    ///
    /// # Safety
    /// The superblock must be readable, `block < BLOCKS`, and the CPU must have AVX-512 with VBMI and GFNI.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,f16c")]
    unsafe fn quants(superblock: *const u8, block: usize) -> [__m512i; 8] {
        // SAFETY: the block lies inside the superblock.
        unsafe { Self::Quants::load_avx512(superblock.add(block * Self::Quants::BYTES)) }
    }

    /// `d` and `m` of a block.
    ///
    /// # Safety
    /// As [`Avx512Format::quants`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn scales(superblock: *const u8, block: usize) -> Affine<__m512> {
        // SAFETY: the scales follow the quants of all blocks.
        unsafe {
            let sub = Self::Scales::sub_scales(Self::scales_of(superblock), block);
            if Self::BLOCKS > 1 {
                let [d, m] = Self::super_scales(superblock);
                Affine { d: sub.d.map(|s| _mm512_mul_ps(d, s)), m: sub.m.map(|s| _mm512_mul_ps(m, s)) }
            } else if Self::Scales::HAS_MIN {
                sub
            } else {
                Affine { d: sub.d, m: sub.m.map(|d| negative(Self::ZERO_POINT, d)) }
            }
        }
    }

    /// The super-scales of `d` and `m`, where a superblock has eight blocks.
    ///
    /// # Safety
    /// As [`Avx512Format::quants`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn super_scales(superblock: *const u8) -> [__m512; 2] {
        // SAFETY: promised by the caller.
        let [d, m] = unsafe { Self::Scales::super_scales(Self::scales_of(superblock)) };
        if Self::Scales::HAS_MIN { [d, m] } else { [d, negative(Self::ZERO_POINT, m)] }
    }

    /// Where the scales of a superblock start.
    #[inline]
    fn scales_of(superblock: *const u8) -> *const u8 {
        superblock.wrapping_add(Self::BLOCKS * Self::Quants::BYTES)
    }
}

impl<F: PackedFormat<Quants: QuantLoads, Scales: ScaleLoads>> Avx512Format for F {}

//! AVX2 kernels, and the loading of packed weights for them: eight rows of a group at a time.
//!
//! Quants of up to 7 bits stay unsigned, as `maddubs` wants one side; wider ones are loaded signed, and the kernel
//! moves their sign to the activations.

pub(super) mod f32;
pub(super) mod int16;
pub(super) mod int8x2;
pub(super) mod prepare;

use std::arch::x86_64::*;

use super::format::PackedFormat;
use super::quants::{QuantLoads, QuantStorage};
use super::scales::{Affine, ScaleLoads, ScaleStorage};
use super::simd::avx2::negative;

/// A packed format as AVX2 kernels see it.
trait Avx2Format: PackedFormat<Quants: QuantLoads, Scales: ScaleLoads> {
    /// Whether loaded quants are signed: 128 less than packed.
    const SIGNED: bool = Self::Quants::RANGE[1] > 127;
    /// The smallest and the largest loaded quant.
    const RANGE: [i32; 2] = {
        let [least, most] = Self::Quants::RANGE;
        if Self::SIGNED { [least - 128, most - 128] } else { [least, most] }
    };
    /// The loaded quant that stands for 0, unless there are minimums.
    const LOADED_ZERO: i32 = Self::ZERO_POINT - if Self::SIGNED { 128 } else { 0 };
    /// Whether `m` can differ from 0.
    const HAS_M: bool = Self::Scales::HAS_MIN || Self::LOADED_ZERO != 0;
    /// How many results of `maddubs` can be added in 16 bits, each at most 2 × 127 × the largest quant: 1, 2, 4 or 8.
    const MADDUBS_RUN: usize = {
        let [least, most] = Self::RANGE;
        let largest = if -least > most { -least } else { most };
        let count = i16::MAX as i32 / (2 * 127 * largest);
        if count >= 8 { 8 } else { 1 << count.ilog2() }
    };

    /// Rows `8 octet..8 octet + 8` of a block.
    ///
    /// # Safety
    /// The superblock must be readable, `block < BLOCKS`, `octet < 2`, and the CPU must have AVX2, FMA and F16C.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn quants(superblock: *const u8, block: usize, octet: usize) -> [__m256i; 8] {
        // SAFETY: the block lies inside the superblock.
        unsafe { Self::Quants::load_avx2(superblock.add(block * Self::Quants::BYTES), octet) }
    }

    /// `d` and `m` of these rows.
    ///
    /// # Safety
    /// As [`Avx2Format::quants`].
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scales(superblock: *const u8, block: usize, octet: usize) -> Affine<__m256> {
        // SAFETY: the scales follow the quants of all blocks.
        let affine = unsafe {
            Self::Scales::load_avx2(superblock.add(Self::BLOCKS * Self::Quants::BYTES), block, octet)
        };
        if Self::Scales::HAS_MIN {
            return affine;
        }
        let m =
            affine.m.map(|d| if Self::HAS_M { negative(Self::LOADED_ZERO, d) } else { _mm256_setzero_ps() });
        Affine { d: affine.d, m }
    }
}

impl<F: PackedFormat<Quants: QuantLoads, Scales: ScaleLoads>> Avx2Format for F {}

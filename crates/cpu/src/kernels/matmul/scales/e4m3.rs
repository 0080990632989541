//! The storage of 8-bit floats as scales: NVFP4.
#![expect(clippy::indexing_slicing, reason = "a superblock has four scales for each row")]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use quadriga_graph::blocks::BlockNVFP4;

#[cfg(target_arch = "x86_64")]
use super::{Affine, ScaleLoads};
use super::{ScaleRow, ScaleStorage};
use crate::kernels::matmul::quant_row::QuantRow;

/// A float of 4 bits of exponent and 3 of mantissa for 16 columns, halved because the levels of FP4 are doubled.
pub(in crate::kernels::matmul) struct E4M3Scale16;

impl ScaleStorage for E4M3Scale16 {
    const BYTES: usize = 64;
    const PER_16: bool = true;

    /// Bit 7 counts for nothing, and NaN as 0, so that loads need not distinguish them.
    fn pack(row: &QuantRow, scales: &mut ScaleRow<&mut [u8]>) {
        for i in 0..4 {
            let scale = row.sub_scales[i];
            scales.set_byte(16 * i, if scale == 0x7f { 0 } else { scale & 0x7f });
        }
    }

    fn unpack(scales: &ScaleRow<&[u8]>, row: &mut QuantRow) {
        (0..4).for_each(|i| row.sub_scales[i] = scales.byte(16 * i));
    }

    fn weight(row: &QuantRow, _scales: [f32; 2], column: usize, quant: f32) -> f32 {
        // A NaN with bit 7 set is a number in the file format.
        let scale = row.sub_scales[column / 16] | 0x80;
        BlockNVFP4::decode_scale(scale) * quant
    }
}

#[cfg(target_arch = "x86_64")]
impl ScaleLoads for E4M3Scale16 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_avx2(scales: *const u8, block: usize, octet: usize) -> Affine<__m256> {
        Affine::scales([0, 16].map(|half| {
            // SAFETY: promised by the caller.
            let codes = unsafe { _mm_loadl_epi64(scales.add(32 * block + half + 8 * octet).cast()) };
            // The bits are those of an f16 that is 2⁸ times smaller.
            let halves = _mm_slli_epi16::<7>(_mm_cvtepu8_epi16(codes));
            _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(128.0))
        }))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn sub_scales(scales: *const u8, block: usize) -> Affine<__m512> {
        Affine::scales([0, 16].map(|half| {
            // SAFETY: promised by the caller.
            let codes = unsafe { _mm_loadu_si128(scales.add(32 * block + half).cast()) };
            let halves = _mm256_slli_epi16::<7>(_mm256_cvtepu8_epi16(codes));
            _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(128.0))
        }))
    }
}

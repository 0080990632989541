//! Storages of the scales of code books: an f16 super-scale, and sub-scales `2 s + 1` for 16 or 32 columns, of which
//! the four bits of `s` are stored.
#![expect(clippy::indexing_slicing, reason = "a superblock has at most 16 sub-scales")]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::marker::PhantomData;

use quadriga_graph::blocks::GridBlock;

#[cfg(target_arch = "x86_64")]
use super::{Affine, ScaleLoads};
use super::{F16Scale, ScaleRow, ScaleStorage};
use crate::kernels::matmul::quant_row::QuantRow;
#[cfg(target_arch = "x86_64")]
use crate::kernels::matmul::simd::{avx2, avx512};

/// Sub-scales for `SPAN` columns, 16 or 32, of the blocks `B`.
pub(in crate::kernels::matmul) struct GridScale<B, const SPAN: usize>(PhantomData<B>);

impl<B: GridBlock, const SPAN: usize> GridScale<B, SPAN> {
    /// Words and bits of the sub-scales of block `block`, of columns 0..16 and 16..32.
    #[cfg(target_arch = "x86_64")]
    const fn places(block: usize) -> (usize, [usize; 2]) {
        match SPAN {
            16 => (block / 4, [block % 4 * 8, block % 4 * 8 + 4]),
            _ => (0, [block * 4; 2]),
        }
    }
}

impl<B: GridBlock, const SPAN: usize> ScaleStorage for GridScale<B, SPAN> {
    const BYTES: usize = 32 + 64 * (32 / SPAN);
    const PER_16: bool = SPAN == 16;

    fn pack(row: &QuantRow, scales: &mut ScaleRow<&mut [u8]>) {
        F16Scale::pack(row, scales);
        for i in 0..256 / SPAN {
            scales.or_word(32, i / 8, u32::from(row.sub_scales[i * SPAN / 16]) << (i % 8 * 4));
        }
    }

    fn unpack(scales: &ScaleRow<&[u8]>, row: &mut QuantRow) {
        F16Scale::unpack(scales, row);
        for (i, s) in row.sub_scales.iter_mut().enumerate() {
            let field = i * 16 / SPAN;
            *s = (scales.word(32, field / 8) >> (field % 8 * 4)) as u8 & 15;
        }
    }

    fn weight(row: &QuantRow, [d, _]: [f32; 2], column: usize, quant: f32) -> f32 {
        d * (2.0 * f32::from(row.sub_scales[column / 16]) + 1.0) * B::UNIT * quant
    }
}

#[cfg(target_arch = "x86_64")]
impl<B: GridBlock, const SPAN: usize> ScaleLoads for GridScale<B, SPAN> {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_avx2(scales: *const u8, block: usize, octet: usize) -> Affine<__m256> {
        let (word, bits) = Self::places(block);
        // SAFETY: promised by the caller.
        let (d, word) =
            unsafe { (avx2::load_f16(scales, octet), avx2::load_word(scales.add(32), word, octet)) };
        let d = _mm256_mul_ps(d, _mm256_set1_ps(B::UNIT));
        Affine::scales(bits.map(|bits| {
            // 2 s + 1: the field one bit to the left, and bit 0 set.
            let field = if bits == 0 { avx2::left(word, 1) } else { avx2::right(word, bits - 1) };
            avx2::scale(d, avx2::or_masked(_mm256_set1_epi32(1), field, _mm256_set1_epi32(30)))
        }))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn super_scales(scales: *const u8) -> [__m512; 2] {
        // SAFETY: promised by the caller.
        [_mm512_mul_ps(unsafe { avx512::load_f16(scales) }, _mm512_set1_ps(B::UNIT)); 2]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn sub_scales(scales: *const u8, block: usize) -> Affine<__m512> {
        let (word, bits) = Self::places(block);
        // SAFETY: promised by the caller.
        let word = unsafe { avx512::plane(scales.add(32), word) };
        Affine::scales(bits.map(|bits| {
            // 2 s + 1: the field one bit to the left, and bit 0 set.
            let field = if bits == 0 { avx512::left(word, 1) } else { avx512::right(word, bits - 1) };
            let odd = avx512::or_masked(_mm512_set1_epi32(1), field, _mm512_set1_epi32(30));
            _mm512_cvtepi32_ps(odd)
        }))
    }
}

//! Storages of scales in two levels: f16 super-scales for 256 columns, integer sub-scales for 16 or 32.
#![expect(clippy::indexing_slicing, reason = "a superblock has at most 16 sub-scales")]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

#[cfg(target_arch = "x86_64")]
use super::{Affine, ScaleLoads};
use super::{F16Scale, F16ScaleMin, ScaleRow, ScaleStorage};
use crate::kernels::matmul::quant_row::QuantRow;
#[cfg(target_arch = "x86_64")]
use crate::kernels::matmul::simd::{avx2, avx512};

/// 6-bit scales and minimums for 32 columns, f16 super-scales of both: Q4_K and Q5_K.
pub(in crate::kernels::matmul) struct K6ScaleMin;

impl ScaleStorage for K6ScaleMin {
    const BYTES: usize = 64 + 192;
    const HAS_MIN: bool = true;

    fn pack(row: &QuantRow, scales: &mut ScaleRow<&mut [u8]>) {
        F16ScaleMin::pack(row, scales);
        let fields = row.sub_scales.iter().take(8).chain(row.sub_mins.iter().take(8));
        for (i, field) in fields.map(|field| u32::from(*field)).enumerate() {
            if i < 15 {
                scales.or_word(64, i / 5, field << (6 * (i % 5)));
            } else {
                (0..3).for_each(|w| scales.or_word(64, w, ((field >> (2 * w)) & 3) << 30));
            }
        }
    }

    fn unpack(scales: &ScaleRow<&[u8]>, row: &mut QuantRow) {
        F16ScaleMin::unpack(scales, row);
        let word = |index| scales.word(64, index);
        let field = |i: usize| match i {
            0..15 => (word(i / 5) >> (6 * (i % 5))) & 63,
            _ => word(0) >> 30 | (word(1) >> 30) << 2 | (word(2) >> 30) << 4,
        };
        for i in 0..8 {
            (row.sub_scales[i], row.sub_mins[i]) = (field(i) as u8, field(8 + i) as u8);
        }
    }

    fn weight(row: &QuantRow, [d, dmin]: [f32; 2], column: usize, quant: f32) -> f32 {
        let (s, t) = (row.sub_scales[column / 32], row.sub_mins[column / 32]);
        d * f32::from(s) * quant - dmin * f32::from(t)
    }
}

#[cfg(target_arch = "x86_64")]
impl ScaleLoads for K6ScaleMin {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_avx2(scales: *const u8, block: usize, octet: usize) -> Affine<__m256> {
        let field = |i: usize| {
            // SAFETY: promised by the caller: three words of every row.
            let word = |w: usize| unsafe { avx2::load_word(scales.add(64), w, octet) };
            if i < 15 {
                return _mm256_and_si256(avx2::right(word(i / 5), 6 * (i % 5)), _mm256_set1_epi32(63));
            }
            let high = avx2::left(avx2::right(word(2), 30), 4);
            let middle = avx2::right(word(1), 28);
            let low = avx2::or_masked(avx2::right(word(0), 30), middle, _mm256_set1_epi32(12));
            _mm256_or_si256(high, low)
        };
        // SAFETY: promised by the caller.
        let (d, dmin) = unsafe { (avx2::load_f16(scales, octet), avx2::load_f16(scales.add(32), octet)) };
        let d = avx2::scale(d, field(block));
        let m = avx2::scale(avx2::negative(1, dmin), field(8 + block));
        Affine { d: [d; 2], m: [m; 2] }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn super_scales(scales: *const u8) -> [__m512; 2] {
        // SAFETY: promised by the caller.
        unsafe { [avx512::load_f16(scales), avx512::negative(1, avx512::load_f16(scales.add(32)))] }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn sub_scales(scales: *const u8, block: usize) -> Affine<__m512> {
        let field = |i: usize| {
            // SAFETY: promised by the caller: three words of every row.
            let word = |w: usize| unsafe { avx512::plane(scales.add(64), w) };
            let bits = if i < 15 {
                _mm512_and_si512(avx512::right(word(i / 5), 6 * (i % 5)), _mm512_set1_epi32(63))
            } else {
                let high = _mm512_slli_epi32::<4>(avx512::right(word(2), 30));
                let middle = _mm512_srli_epi32::<28>(word(1));
                let low = avx512::or_masked(high, middle, _mm512_set1_epi32(12));
                _mm512_or_si512(low, avx512::right(word(0), 30))
            };
            _mm512_cvtepi32_ps(bits)
        };
        Affine { d: [field(block); 2], m: [field(8 + block); 2] }
    }
}

/// Signed 6-bit scales for 16 columns, an f16 super-scale: Q3_K. `QuantRow::sub_scales` are offset by 32.
pub(in crate::kernels::matmul) struct K6Scale16;

impl ScaleStorage for K6Scale16 {
    const BYTES: usize = 32 + 192;
    const PER_16: bool = true;

    fn pack(row: &QuantRow, scales: &mut ScaleRow<&mut [u8]>) {
        F16Scale::pack(row, scales);
        for (i, s) in row.sub_scales.iter().enumerate() {
            let (block, column, field) = (i / 2, 16 * (i % 2), u32::from(s ^ 32));
            if block < 6 {
                scales.or_word(32, block % 3, field << (column + 10 - 6 * (block / 3)));
            } else {
                scales.or_word(32, block - 6, (field >> 2) << column);
                scales.or_word(32, 2, (field & 3) << (column + 2 * (block - 6)));
            }
        }
    }

    fn unpack(scales: &ScaleRow<&[u8]>, row: &mut QuantRow) {
        F16Scale::unpack(scales, row);
        let word = |index| scales.word(32, index);
        for (i, s) in row.sub_scales.iter_mut().enumerate() {
            let (block, column) = (i / 2, 16 * (i % 2));
            let field = if block < 6 {
                word(block % 3) >> (column + 10 - 6 * (block / 3))
            } else {
                let low = (word(2) >> (column + 2 * (block - 6))) & 3;
                (word(block - 6) >> column & 15) << 2 | low
            };
            *s = (field & 63) as u8 ^ 32;
        }
    }

    fn weight(row: &QuantRow, [d, _]: [f32; 2], column: usize, quant: f32) -> f32 {
        d * (f32::from(row.sub_scales[column / 16]) - 32.0) * quant
    }
}

#[cfg(target_arch = "x86_64")]
impl ScaleLoads for K6Scale16 {
    const I16_PAIRS: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_avx2(scales: *const u8, block: usize, octet: usize) -> Affine<__m256> {
        // SAFETY: promised by the caller: three words of every row.
        let word = |w: usize| unsafe { avx2::load_word(scales.add(32), w, octet) };
        // Shifts the field to the top of its half of the word.
        let top = match block {
            0..3 => word(block),
            3..6 => _mm256_slli_epi16::<6>(word(block - 3)),
            _ => {
                let low = _mm256_sll_epi16(word(2), _mm_cvtsi64_si128(10 - 2 * (block as i64 - 6)));
                avx2::or_masked(_mm256_slli_epi16::<12>(word(block - 6)), low, _mm256_set1_epi16(0x0c00))
            }
        };
        // SAFETY: promised by the caller.
        let d = unsafe { avx2::load_f16(scales, octet) };
        let [low, high] = [avx2::left(top, 16), top].map(|top| _mm256_srai_epi32::<26>(top));
        Affine::scales([avx2::scale(d, low), avx2::scale(d, high)])
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn super_scales(scales: *const u8) -> [__m512; 2] {
        // SAFETY: promised by the caller.
        [unsafe { avx512::load_f16(scales) }; 2]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn sub_scales(scales: *const u8, block: usize) -> Affine<__m512> {
        // SAFETY: promised by the caller.
        Affine::scales(avx512::widen_pairs(unsafe { Self::i16_pairs(scales, block) }))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn i16_pairs(scales: *const u8, block: usize) -> __m512i {
        // SAFETY: promised by the caller: three words of every row.
        let word = |w: usize| unsafe { avx512::plane(scales.add(32), w) };
        // Shifts the field to the top of its half of the word.
        let top = match block {
            0..3 => word(block),
            3..6 => _mm512_slli_epi16::<6>(word(block - 3)),
            _ => {
                let low = _mm512_sll_epi16(word(2), _mm_cvtsi64_si128(10 - 2 * (block as i64 - 6)));
                avx512::or_masked(_mm512_slli_epi16::<12>(word(block - 6)), low, _mm512_set1_epi16(0x0c00))
            }
        };
        _mm512_srai_epi16::<10>(top)
    }
}

/// i8 scales for 16 columns, an f16 super-scale: Q6_K.
pub(in crate::kernels::matmul) struct I8Scale16;

impl ScaleStorage for I8Scale16 {
    const BYTES: usize = 32 + 256;
    const PER_16: bool = true;

    fn pack(row: &QuantRow, scales: &mut ScaleRow<&mut [u8]>) {
        F16Scale::pack(row, scales);
        (0..16).for_each(|i| scales.set_byte(32 + 16 * i, row.sub_scales[i]));
    }

    fn unpack(scales: &ScaleRow<&[u8]>, row: &mut QuantRow) {
        F16Scale::unpack(scales, row);
        (0..16).for_each(|i| row.sub_scales[i] = scales.byte(32 + 16 * i));
    }

    fn weight(row: &QuantRow, [d, _]: [f32; 2], column: usize, quant: f32) -> f32 {
        d * f32::from(row.sub_scales[column / 16] as i8) * quant
    }
}

#[cfg(target_arch = "x86_64")]
impl ScaleLoads for I8Scale16 {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_avx2(scales: *const u8, block: usize, octet: usize) -> Affine<__m256> {
        // SAFETY: promised by the caller.
        let (d, low, high) = unsafe {
            let at = scales.add(32 + 32 * block + 8 * octet);
            let signed = |at: *const u8| _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast()));
            (avx2::load_f16(scales, octet), signed(at), signed(at.add(16)))
        };
        Affine::scales([avx2::scale(d, low), avx2::scale(d, high)])
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn super_scales(scales: *const u8) -> [__m512; 2] {
        // SAFETY: promised by the caller.
        [unsafe { avx512::load_f16(scales) }; 2]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn sub_scales(scales: *const u8, block: usize) -> Affine<__m512> {
        // SAFETY: promised by the caller.
        Affine::scales([0, 16].map(|half| unsafe {
            let at = scales.add(32 + 32 * block + half);
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast())))
        }))
    }
}

/// 4-bit scales and minimums for 16 columns, f16 super-scales of both: Q2_K.
pub(in crate::kernels::matmul) struct K4ScaleMin16;

impl ScaleStorage for K4ScaleMin16 {
    const BYTES: usize = 64 + 256;
    const PER_16: bool = true;
    const HAS_MIN: bool = true;

    fn pack(row: &QuantRow, scales: &mut ScaleRow<&mut [u8]>) {
        F16ScaleMin::pack(row, scales);
        for i in 0..16 {
            let (s, t) = (u32::from(row.sub_scales[i]), u32::from(row.sub_mins[i]));
            scales.or_word(64, i / 8, s << (16 * (i % 2) + 4 * (i / 2 % 4)));
            scales.or_word(64, 2 + i / 8, t << (8 * (i % 4) + 4 * (i / 4 % 2)));
        }
    }

    fn unpack(scales: &ScaleRow<&[u8]>, row: &mut QuantRow) {
        F16ScaleMin::unpack(scales, row);
        for i in 0..16 {
            let (s, t) = (scales.word(64, i / 8), scales.word(64, 2 + i / 8));
            row.sub_scales[i] = (s >> (16 * (i % 2) + 4 * (i / 2 % 4))) as u8 & 15;
            row.sub_mins[i] = (t >> (8 * (i % 4) + 4 * (i / 4 % 2))) as u8 & 15;
        }
    }

    fn weight(row: &QuantRow, [d, dmin]: [f32; 2], column: usize, quant: f32) -> f32 {
        let (s, t) = (row.sub_scales[column / 16], row.sub_mins[column / 16]);
        d * f32::from(s) * quant - dmin * f32::from(t)
    }
}

#[cfg(target_arch = "x86_64")]
impl ScaleLoads for K4ScaleMin16 {
    const I16_PAIRS: bool = true;
    const MIN_BYTES: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_avx2(scales: *const u8, block: usize, octet: usize) -> Affine<__m256> {
        // SAFETY: promised by the caller: four words of every row.
        let (d, dmin, s, t) = unsafe {
            let word = |w: usize, bits: usize| {
                avx2::right(avx2::load_word(scales.add(64), w + block / 4, octet), bits)
            };
            let (s, t) = (word(0, 4 * (block % 4)), word(2, 16 * (block % 2) + 4 * (block / 2 % 2)));
            (avx2::load_f16(scales, octet), avx2::load_f16(scales.add(32), octet), s, t)
        };
        let low = |a| _mm256_and_si256(a, _mm256_set1_epi32(15));
        let dmin = avx2::negative(1, dmin);
        Affine {
            d: [avx2::scale(d, low(s)), avx2::scale(d, low(avx2::right(s, 16)))],
            m: [avx2::scale(dmin, low(t)), avx2::scale(dmin, low(avx2::right(t, 8)))],
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn super_scales(scales: *const u8) -> [__m512; 2] {
        // SAFETY: promised by the caller.
        unsafe { [avx512::load_f16(scales), avx512::negative(1, avx512::load_f16(scales.add(32)))] }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn sub_scales(scales: *const u8, block: usize) -> Affine<__m512> {
        // SAFETY: promised by the caller.
        let (s, t) = unsafe {
            let t = avx512::plane(scales.add(64), 2 + block / 4);
            (Self::i16_pairs(scales, block), avx512::right(t, 16 * (block % 2) + 4 * (block / 2 % 2)))
        };
        let four = |a| _mm512_cvtepi32_ps(_mm512_and_si512(a, _mm512_set1_epi32(15)));
        Affine { d: avx512::widen_pairs(s), m: [four(t), four(_mm512_srli_epi32::<8>(t))] }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn i16_pairs(scales: *const u8, block: usize) -> __m512i {
        // SAFETY: promised by the caller: four words of every row.
        let word = unsafe { avx512::plane(scales.add(64), block / 4) };
        let field = _mm512_srl_epi16(word, _mm_cvtsi64_si128(4 * (block as i64 % 4)));
        if block % 4 == 3 { field } else { _mm512_and_si512(field, _mm512_set1_epi16(15)) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,gfni,f16c")]
    unsafe fn min_bytes(scales: *const u8) -> [__m512i; 4] {
        // SAFETY: promised by the caller: four words of every row.
        let (a, b) = unsafe { (avx512::plane(scales.add(64), 2), avx512::plane(scales.add(64), 3)) };
        let low = |v| _mm512_and_si512(v, _mm512_set1_epi8(15));
        let high = |v| avx512::move_bits!(v, (4, 0, 4), (0, 0, 0));
        [low(a), high(a), low(b), high(b)]
    }
}

/// Signed 6-bit scales for 32 columns, an f16 super-scale: IQ4_XS. `QuantRow::sub_scales` are offset by 32.
pub(in crate::kernels::matmul) struct K6Scale;

impl ScaleStorage for K6Scale {
    const BYTES: usize = 32 + 96;

    fn pack(row: &QuantRow, scales: &mut ScaleRow<&mut [u8]>) {
        F16Scale::pack(row, scales);
        let field = |i: usize| u32::from(row.sub_scales[i] ^ 32);
        (0..5).for_each(|i| scales.or_word(32, 0, field(i) << (2 + 6 * i)));
        scales.or_word(32, 0, field(7) & 3);
        scales.set_u16(96, (field(7) >> 2 | field(5) << 4 | field(6) << 10) as u16);
    }

    fn unpack(scales: &ScaleRow<&[u8]>, row: &mut QuantRow) {
        F16Scale::unpack(scales, row);
        let (long, short) = (scales.word(32, 0), u32::from(scales.u16(96)));
        let s = &mut row.sub_scales;
        (0..5).for_each(|i| s[i] = (long >> (2 + 6 * i) & 63) as u8 ^ 32);
        s[5] = (short >> 4 & 63) as u8 ^ 32;
        s[6] = (short >> 10) as u8 ^ 32;
        s[7] = ((short & 15) << 2 | long & 3) as u8 ^ 32;
    }

    fn weight(row: &QuantRow, [d, _]: [f32; 2], column: usize, quant: f32) -> f32 {
        d * (f32::from(row.sub_scales[column / 32]) - 32.0) * quant
    }
}

#[cfg(target_arch = "x86_64")]
impl ScaleLoads for K6Scale {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load_avx2(scales: *const u8, block: usize, octet: usize) -> Affine<__m256> {
        // SAFETY: promised by the caller: a 32-bit and a 16-bit word of every row.
        let (d, long, short) = unsafe {
            let short = _mm_loadu_si128(scales.add(96 + 16 * octet).cast());
            let long = avx2::load_word(scales.add(32), 0, octet);
            (avx2::load_f16(scales, octet), long, _mm256_cvtepu16_epi32(short))
        };
        // Shifts the field to the top of its lane.
        let top = match block {
            0..5 => avx2::left(long, 24 - 6 * block),
            5..7 => avx2::left(short, 22 - 6 * (block - 5)),
            _ => {
                let low = avx2::left(long, 26);
                avx2::or_masked(avx2::left(short, 28), low, _mm256_set1_epi32(0x0c00_0000))
            }
        };
        Affine::scales([avx2::scale(d, _mm256_srai_epi32::<26>(top)); 2])
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn super_scales(scales: *const u8) -> [__m512; 2] {
        // SAFETY: promised by the caller.
        [unsafe { avx512::load_f16(scales) }; 2]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn sub_scales(scales: *const u8, block: usize) -> Affine<__m512> {
        // SAFETY: promised by the caller: a 32-bit and a 16-bit word of every row.
        let (long, short) = unsafe {
            let short = _mm256_loadu_si256(scales.add(96).cast());
            (avx512::plane(scales.add(32), 0), _mm512_cvtepu16_epi32(short))
        };
        // Shifts the field to the top of its lane.
        let top = match block {
            0..5 => avx512::left(long, 24 - 6 * block),
            5..7 => avx512::left(short, 22 - 6 * (block - 5)),
            _ => {
                let low = avx512::left(long, 26);
                avx512::or_masked(avx512::left(short, 28), low, _mm512_set1_epi32(0x0c00_0000))
            }
        };
        Affine::scales([_mm512_cvtepi32_ps(_mm512_srai_epi32::<26>(top)); 2])
    }
}

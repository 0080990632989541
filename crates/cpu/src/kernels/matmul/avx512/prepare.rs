//! Conversion of activations to every format: AVX-512.

use std::arch::x86_64::*;
use std::ops::Range;

use crate::isa::Avx512;
use crate::kernels::matmul::activations::{
    Activations, DIGITS, INT8X2_MAX, INT16_MAX, INT16_SPAN, quant_scale,
};
use crate::kernels::matmul::format::{BLOCK, GROUP};
use crate::kernels::matmul::view::{Input, InputType};

/// The elements of a row at `mask`, of sixteen, as `f32`; the others are 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn load(element: InputType, row: *const u8, first: usize, mask: __mmask16) -> __m512 {
    // SAFETY: the caller promises that the elements at the mask are inside the row.
    unsafe {
        match element {
            InputType::F32 => _mm512_maskz_loadu_ps(mask, row.cast::<f32>().add(first)),
            InputType::F16 => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, row.cast::<i16>().add(first))),
        }
    }
}

/// The largest magnitude; NaN if any value is NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn largest(values: &[__m512]) -> f32 {
    let mut most = _mm512_setzero_ps();
    let mut nan = 0;
    for value in values {
        most = _mm512_max_ps(most, _mm512_abs_ps(*value));
        nan |= _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(*value, *value);
    }
    if nan == 0 { _mm512_reduce_max_ps(most) } else { f32::NAN }
}

/// Quantizes one row to `Int8x2` with a scale for `span` columns: 32 or 256.
pub(in crate::kernels::matmul) fn int8x2_row(
    _token: Avx512,
    activations: &Activations<'_>,
    input: &Input<'_>,
    row: usize,
    span: usize,
) {
    // SAFETY: the token proves the instructions; the shapes were compared by `Activations::prepare`.
    unsafe {
        if span == BLOCK {
            int8x2_row_inner::<1>(activations, input, row);
        } else {
            int8x2_row_inner::<8>(activations, input, row);
        }
    }
}

/// `BLOCKS` blocks share a scale.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn int8x2_row_inner<const BLOCKS: usize>(
    activations: &Activations<'_>,
    input: &Input<'_>,
    row: usize,
) {
    let out = activations.int8x2_row(row);
    let source = input.row(row);
    for first in (0..activations.columns() / BLOCK).step_by(BLOCKS) {
        // SAFETY: the row has these blocks in the input, and places for them in the activations.
        unsafe {
            let values: [[__m512; 2]; BLOCKS] = std::array::from_fn(|i| match source {
                Some(source) => [0, 16].map(|k| load(input.element(), source, (first + i) * BLOCK + k, !0)),
                None => [_mm512_setzero_ps(); 2],
            });
            let (scale, inverse) = quant_scale(largest(values.as_flattened()), INT8X2_MAX);
            let inverse = _mm512_set1_ps(inverse);
            let mut half_sums = [0_i64; BLOCKS];
            for ((block, values), half_sums) in (first..).zip(values).zip(&mut half_sums) {
                let x = values.map(|value| _mm512_cvtps_epi32(_mm512_mul_ps(value, inverse)));
                let high = x.map(|x| _mm512_srai_epi32::<7>(_mm512_add_epi32(x, _mm512_set1_epi32(64))));
                let rest = [
                    _mm512_sub_epi32(x[0], _mm512_slli_epi32::<7>(high[0])),
                    _mm512_sub_epi32(x[1], _mm512_slli_epi32::<7>(high[1])),
                ];
                let bytes = pack_i8(high, rest);
                _mm512_storeu_si512(out.quants.add(2 * block * BLOCK).cast(), bytes);
                let sums = sums_of_bytes(bytes);
                if BLOCKS > 1 {
                    _mm_storel_epi64(out.byte_sums.add(4 * block).cast(), _mm_packs_epi32(sums, sums));
                }
                // 128 × the sums of the high bytes + those of the low ones, for the two halves of the block.
                let whole = _mm_add_epi32(_mm_slli_epi32::<7>(sums), _mm_unpackhi_epi64(sums, sums));
                *half_sums = _mm_cvtsi128_si64(whole);
                let halves = _mm_mul_ps(_mm_cvtepi32_ps(whole), _mm_set1_ps(scale));
                let [low, high, ..]: [f32; 4] = std::mem::transmute(halves);
                *out.scales.add(block) = scale;
                *out.sums.add(block) = low + high;
                *out.half_sums.add(2 * block) = low;
                *out.half_sums.add(2 * block + 1) = high;
            }
            if BLOCKS == 8 {
                let sums = _mm512_loadu_si512(half_sums.as_ptr().cast());
                write_digits(sums, out.digits.add(first / BLOCKS * DIGITS));
            }
        }
    }
}

/// Writes sixteen integers as three signed digits in base 128 each, the highest first.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn write_digits(numbers: __m512i, out: *mut i8) {
    let rounded = |a| _mm512_srai_epi32::<7>(_mm512_add_epi32(a, _mm512_set1_epi32(64)));
    let upper = rounded(numbers);
    let highest = rounded(upper);
    let middle = _mm512_sub_epi32(upper, _mm512_slli_epi32::<7>(highest));
    let lowest = _mm512_sub_epi32(numbers, _mm512_slli_epi32::<7>(upper));
    for (i, digit) in [highest, middle, lowest].into_iter().enumerate() {
        // SAFETY: promised by the caller: places for three times sixteen digits.
        unsafe { _mm_storeu_si128(out.add(16 * i).cast(), _mm512_cvtsepi32_epi8(digit)) };
    }
}

/// Packs vectors of sixteen integers into 32 high bytes and then 32 low bytes, in order, with saturation.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn pack_i8(high: [__m512i; 2], low: [__m512i; 2]) -> __m512i {
    let high = _mm512_packs_epi32(high[0], high[1]);
    let low = _mm512_packs_epi32(low[0], low[1]);
    // Each quarter now holds four bytes of each of the four vectors.
    let mixed = _mm512_packs_epi16(high, low);
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_permutexvar_epi32(order, mixed)
}

/// The sums of the four quarters of a vector of signed bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512vnni")]
fn sums_of_bytes(bytes: __m512i) -> __m128i {
    let four = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
    let two = _mm512_add_epi32(four, _mm512_shuffle_epi32::<0b01_00_11_10>(four));
    let one = _mm512_add_epi32(two, _mm512_shuffle_epi32::<0b10_11_00_01>(two));
    _mm512_castsi512_si128(_mm512_maskz_compress_epi32(0x1111, one))
}

/// Quantizes one row to `Int16`.
pub(in crate::kernels::matmul) fn int16_row(
    _token: Avx512,
    activations: &Activations<'_>,
    input: &Input<'_>,
    row: usize,
) {
    // SAFETY: the token proves the instructions; the shapes were compared by `Activations::prepare`.
    unsafe { int16_row_inner(activations, input, row) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn int16_row_inner(activations: &Activations<'_>, input: &Input<'_>, row: usize) {
    let source = input.row(row);
    for first in (0..activations.columns()).step_by(INT16_SPAN) {
        let count = INT16_SPAN.min(activations.columns() - first);
        let (quants, place) = activations.int16_row(row, first / INT16_SPAN);
        let mut values = [_mm512_setzero_ps(); INT16_SPAN / 16];
        if let Some(source) = source {
            for (i, value) in values.iter_mut().enumerate().take(count / 16) {
                // SAFETY: the row has these columns.
                *value = unsafe { load(input.element(), source, first + 16 * i, !0) };
            }
        }
        let (scale, inverse) = quant_scale(largest(&values), INT16_MAX);
        let inverse = _mm512_set1_ps(inverse);
        for (i, value) in values.into_iter().enumerate() {
            let x = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(value, inverse)));
            // SAFETY: every row has room for a whole span.
            unsafe { _mm256_storeu_si256(quants.add(16 * i).cast(), x) };
        }
        // SAFETY: a scale for each row and span.
        unsafe { *place = scale };
    }
}

/// Transposes up to sixteen rows into a panel.
pub(in crate::kernels::matmul) fn f32_panel(
    _token: Avx512,
    activations: &Activations<'_>,
    input: &Input<'_>,
    rows: Range<usize>,
) {
    // SAFETY: the token proves the instructions; the shapes were compared by `Activations::prepare`.
    unsafe { f32_panel_inner(activations, input, rows) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn f32_panel_inner(activations: &Activations<'_>, input: &Input<'_>, rows: Range<usize>) {
    let (panel, count) = activations.f32_panel(rows.start);
    let columns = activations.columns();
    let lanes = ((1_u32 << count) - 1) as __mmask16;
    for first in (0..columns).step_by(16) {
        let width = 16.min(columns - first);
        let mut values = [_mm512_setzero_ps(); 16];
        for (value, row) in values.iter_mut().zip(rows.clone()) {
            if let Some(source) = input.row(row) {
                // SAFETY: the mask leaves out elements past the end of the row.
                *value = unsafe { load(input.element(), source, first, ((1_u32 << width) - 1) as __mmask16) };
            }
        }
        for (i, column) in transposed(values).into_iter().enumerate().take(width) {
            // SAFETY: the panel holds `count` values for each column, and the mask leaves out what is beyond.
            unsafe { _mm512_mask_storeu_ps(panel.add((first + i) * count), lanes, column) };
        }
    }
}

/// Transposes sixteen rows.
#[inline]
#[target_feature(enable = "avx512f")]
fn transposed(rows: [__m512; 16]) -> [__m512; 16] {
    /// Transposes 4 × 4 numbers in each 128-bit quarter.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn quarters(a: __m512, b: __m512, c: __m512, d: __m512) -> [__m512; 4] {
        let [ab, cd] = [(a, b), (c, d)].map(|(a, b)| {
            [_mm512_castps_pd(_mm512_unpacklo_ps(a, b)), _mm512_castps_pd(_mm512_unpackhi_ps(a, b))]
        });
        [
            _mm512_castpd_ps(_mm512_unpacklo_pd(ab[0], cd[0])),
            _mm512_castpd_ps(_mm512_unpackhi_pd(ab[0], cd[0])),
            _mm512_castpd_ps(_mm512_unpacklo_pd(ab[1], cd[1])),
            _mm512_castpd_ps(_mm512_unpackhi_pd(ab[1], cd[1])),
        ]
    }
    let [r0, r1, r2, r3, r4, r5, r6, r7, r8, r9, r10, r11, r12, r13, r14, r15] = rows;
    let (a, b) = (quarters(r0, r1, r2, r3), quarters(r4, r5, r6, r7));
    let (c, d) = (quarters(r8, r9, r10, r11), quarters(r12, r13, r14, r15));
    let mut columns = [_mm512_setzero_ps(); 16];
    for (i, (((a, b), c), d)) in a.into_iter().zip(b).zip(c).zip(d).enumerate() {
        // Quarters 0 and 2, and 1 and 3, of each.
        let (even_ab, even_cd) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0x88>(c, d));
        let (odd_ab, odd_cd) = (_mm512_shuffle_f32x4::<0xdd>(a, b), _mm512_shuffle_f32x4::<0xdd>(c, d));
        let four = [
            _mm512_shuffle_f32x4::<0x88>(even_ab, even_cd),
            _mm512_shuffle_f32x4::<0x88>(odd_ab, odd_cd),
            _mm512_shuffle_f32x4::<0xdd>(even_ab, even_cd),
            _mm512_shuffle_f32x4::<0xdd>(odd_ab, odd_cd),
        ];
        for (place, column) in columns.iter_mut().skip(i).step_by(4).zip(four) {
            *place = column;
        }
    }
    columns
}

/// Writes the bf16 tiles of up to sixteen rows; `rows` starts at a multiple of 16.
pub(in crate::kernels::matmul) fn bf16_tile_rows(
    _token: Avx512,
    activations: &Activations<'_>,
    input: &Input<'_>,
    rows: Range<usize>,
) {
    // SAFETY: the token proves the instructions; the shapes were compared by `Activations::prepare`.
    unsafe { bf16_tile_rows_inner(activations, input, rows) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn bf16_tile_rows_inner(activations: &Activations<'_>, input: &Input<'_>, rows: Range<usize>) {
    let tiles = activations.bf16_tiles(rows.start / GROUP);
    let columns = activations.columns();
    for lane in 0..GROUP {
        let source = if lane < rows.len() { input.row(rows.start + lane) } else { None };
        for tile in 0..columns.div_ceil(BLOCK) {
            let first = tile * BLOCK;
            let left = columns - first;
            let mask = |left: usize| if left >= 16 { !0 } else { ((1_u32 << left) - 1) as __mmask16 };
            // SAFETY: the masks leave out elements past the end of the row; the tile is inside the activations.
            unsafe {
                let [low, high] = match source {
                    Some(source) => [
                        load(input.element(), source, first, mask(left)),
                        load(input.element(), source, first + 16, mask(left.saturating_sub(16))),
                    ],
                    None => [_mm512_setzero_ps(); 2],
                };
                let pair = _mm512_cvtne2ps_pbh(high, low);
                let place = tiles.add(tile * 1024 + lane * 64).cast::<__m512bh>();
                place.write_unaligned(pair);
            }
        }
    }
}

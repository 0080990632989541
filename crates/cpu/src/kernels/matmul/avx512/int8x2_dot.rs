//! What a block of weights adds to the sums of a row of `Int8x2` activations: shared by GEMV and GEMM, so that a row's
//! result is the same bits in both.

use std::arch::asm;
use std::arch::x86_64::*;

use super::Avx512Format;
use crate::kernels::matmul::Task;
use crate::kernels::matmul::activations::{DIGITS, Int8x2Row};
use crate::kernels::matmul::format::{BLOCK, GROUP};
use crate::kernels::matmul::scales::{Affine, ScaleLoads, ScaleStorage};

/// Writes sixteen results of a row, or as many as there are weight rows.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn store(task: &Task<'_>, group: usize, row: usize, sums: __m512) {
    let first = group * GROUP;
    let count = GROUP.min(task.layout.rows() - first);
    let mask = ((1_u32 << count) - 1) as __mmask16;
    if let Some(out) = task.output.row(row) {
        // SAFETY: the mask leaves out columns past the end of the row.
        unsafe { _mm512_mask_storeu_ps(out.add(first), mask, sums) };
    }
}

/// The integer dot products of half a block with the high and with the low bytes of the activations of each row, from
/// activations `4 first` on, added to `sums`. Rows alternate, so that their dependency chains do not wait for each other.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn half_dots<const ROWS: usize>(
    mut sums: [[__m512i; 2]; ROWS],
    quants: &[__m512i; 4],
    x: &[Int8x2Row; ROWS],
    block: usize,
    first: usize,
) -> [[__m512i; 2]; ROWS] {
    for (i, q) in quants.iter().enumerate() {
        for ([high, low], x) in sums.iter_mut().zip(x) {
            // SAFETY: promised by the caller: a block of activations is 64 bytes.
            unsafe {
                let at = x.quants.add(2 * block * BLOCK).cast::<i32>().add(first + i).cast_const();
                *high = _mm512_dpbusd_epi32(*high, *q, _mm512_set1_epi32(at.read_unaligned()));
                *low = _mm512_dpbusd_epi32(*low, *q, _mm512_set1_epi32(at.add(8).read_unaligned()));
            }
        }
    }
    sums
}

/// The quants of the two halves of a block.
#[inline]
#[target_feature(enable = "avx512f")]
fn halves([a, b, c, d, e, f, g, h]: &[__m512i; 8]) -> [[__m512i; 4]; 2] {
    [[*a, *b, *c, *d], [*e, *f, *g, *h]]
}

/// The dot product with 15-bit activations, as numbers.
#[inline]
#[target_feature(enable = "avx512f")]
fn joined([high, low]: [__m512i; 2]) -> __m512 {
    _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<7>(high), low))
}

/// The dot products of a block with each row.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn whole_dots<const ROWS: usize>(
    quants: &[__m512i; 8],
    x: &[Int8x2Row; ROWS],
    block: usize,
) -> [__m512; ROWS] {
    let zeros = [[_mm512_setzero_si512(); 2]; ROWS];
    let [first, second] = halves(quants);
    // SAFETY: promised by the caller.
    unsafe {
        let dots = half_dots(zeros, &first, x, block, 0);
        if ROWS > 4 {
            return half_dots(dots, &second, x, block, 4).map(|dots| joined(dots));
        }
        // Few rows have their dependency chains short.
        let others = half_dots(zeros, &second, x, block, 4);
        std::array::from_fn(|r| match (dots.get(r), others.get(r)) {
            (Some([a, b]), Some([c, d])) => joined([_mm512_add_epi32(*a, *c), _mm512_add_epi32(*b, *d)]),
            _ => _mm512_setzero_ps(),
        })
    }
}

/// Adds a block's, or half block's, dot product with a row, times its scales, to sixteen sums: those of `d` and those of
/// `m`.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn add_scaled_dot<F: Avx512Format>(
    sums: [__m512; 2],
    dot: __m512,
    half: usize,
    affine: &Affine<__m512>,
    x: &Int8x2Row,
    block: usize,
) -> [__m512; 2] {
    // SAFETY: the row has this block.
    unsafe {
        let dot = _mm512_mul_ps(dot, _mm512_set1_ps(*x.scales.add(block)));
        add_sub_scaled_dot::<F>(sums, dot, half, affine, x, block)
    }
}

/// As [`add_scaled_dot`], without the activations' scale, which is the same for a whole superblock.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn add_sub_scaled_dot<F: Avx512Format>(
    [main, rest]: [__m512; 2],
    dot: __m512,
    half: usize,
    affine: &Affine<__m512>,
    x: &Int8x2Row,
    block: usize,
) -> [__m512; 2] {
    let (d, m) = if half == 0 { (affine.d[0], affine.m[0]) } else { (affine.d[1], affine.m[1]) };
    // SAFETY: the row has this block.
    let sum =
        unsafe { if F::Scales::PER_16 { *x.half_sums.add(2 * block + half) } else { *x.sums.add(block) } };
    [_mm512_fmadd_ps(dot, d, main), _mm512_fmadd_ps(m, _mm512_set1_ps(sum), rest)]
}

/// Adds a block with its scales to sixteen sums of each row. `SCALED` says whether the activations' scale is one of them;
/// otherwise it is the same for a whole superblock.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
pub(super) unsafe fn add_block<F: Avx512Format, const ROWS: usize, const SCALED: bool>(
    sums: &mut [[__m512; 2]; ROWS],
    quants: &[__m512i; 8],
    affine: &Affine<__m512>,
    x: &[Int8x2Row; ROWS],
    block: usize,
) {
    // SAFETY: the rows have this block.
    unsafe {
        if !F::Scales::PER_16 {
            let dots = whole_dots(quants, x, block);
            for ((sums, x), dot) in sums.iter_mut().zip(x).zip(dots) {
                *sums = if SCALED {
                    add_scaled_dot::<F>(*sums, dot, 0, affine, x, block)
                } else {
                    add_sub_scaled_dot::<F>(*sums, dot, 0, affine, x, block)
                };
            }
            return;
        }
        for (half, quants) in halves(quants).iter().enumerate() {
            let dots = half_dots([[_mm512_setzero_si512(); 2]; ROWS], quants, x, block, 4 * half);
            for ((sums, x), dot) in sums.iter_mut().zip(x).zip(dots) {
                *sums = if SCALED {
                    add_scaled_dot::<F>(*sums, joined(dot), half, affine, x, block)
                } else {
                    add_sub_scaled_dot::<F>(*sums, joined(dot), half, affine, x, block)
                };
            }
        }
    }
}

/// Adds a superblock, given what [`add_block`] made of its blocks, to sixteen sums; `first` is the first of
/// its blocks in the row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
pub(super) unsafe fn finish_superblock<F: Avx512Format>(
    sums: [__m512; 2],
    parts: [__m512; 2],
    superblock: *const u8,
    x: &Int8x2Row,
    first: usize,
) -> [__m512; 2] {
    // SAFETY: promised by the caller.
    unsafe {
        let [d, m] = F::super_scales(superblock);
        let d = _mm512_mul_ps(d, _mm512_set1_ps(*x.scales.add(first)));
        [_mm512_fmadd_ps(d, parts[0], sums[0]), _mm512_fmadd_ps(m, parts[1], sums[1])]
    }
}

/// Adds the sub-scales of a block times its dot products with each row, and times the sums of the activations unless
/// [`dot_digits`] does that for the superblock: for the high and the low byte of the activations each, in integers.
///
/// A dot product of 16 columns is at most 16 × 7 × 127 in size. A superblock's sixteen of them with sub-scales of at
/// most 32 are below 2²³, and below 2³⁰ when shifted by the low byte's 7 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
pub(super) unsafe fn add_pairs_block<F: Avx512Format, const ROWS: usize>(
    parts: &mut [[__m512i; 4]; ROWS],
    quants: &[__m512i; 8],
    sub: __m512i,
    x: &[Int8x2Row; ROWS],
    block: usize,
) {
    let zeros = [[_mm512_setzero_si512(); 2]; ROWS];
    let [first, second] = halves(quants);
    // SAFETY: the rows have this block.
    unsafe {
        let dots = half_dots(zeros, &first, x, block, 0);
        let others = half_dots(zeros, &second, x, block, 4);
        for (((parts, x), [a, b]), [c, d]) in parts.iter_mut().zip(x).zip(dots).zip(others) {
            parts[0] = add_products(parts[0], pair(a, c), sub);
            parts[1] = add_products(parts[1], pair(b, d), sub);
            if !F::Scales::MIN_BYTES {
                let sums = x.byte_sums.add(4 * block).cast::<i32>();
                let sum = |i: usize| _mm512_set1_epi32(sums.add(i).read_unaligned());
                parts[2] = add_products(parts[2], sub, sum(0));
                parts[3] = add_products(parts[3], sub, sum(1));
            }
        }
    }
}

/// Adds a superblock, given what [`add_pairs_block`] made of its blocks, to sixteen sums; `first` is the first of its
/// blocks in the row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,gfni,f16c")]
pub(super) unsafe fn finish_pairs<F: Avx512Format>(
    sums: [__m512; 2],
    [main, main_low, rest, rest_low]: [__m512i; 4],
    superblock: *const u8,
    x: &Int8x2Row,
    first: usize,
) -> [__m512; 2] {
    let whole = |high, low| _mm512_add_epi32(_mm512_slli_epi32::<7>(high), low);
    // SAFETY: promised by the caller.
    unsafe {
        let [d, m] = F::super_scales(superblock);
        let scale = _mm512_set1_ps(*x.scales.add(first));
        let rest = if F::Scales::MIN_BYTES {
            let sub_mins = F::Scales::min_bytes(F::scales_of(superblock));
            dot_digits(&sub_mins, x.digits.add(first / F::BLOCKS * DIGITS))
        } else {
            whole(rest, rest_low)
        };
        let (main, rest) = (_mm512_cvtepi32_ps(whole(main, main_low)), _mm512_cvtepi32_ps(rest));
        [
            _mm512_fmadd_ps(_mm512_mul_ps(d, scale), main, sums[0]),
            _mm512_fmadd_ps(_mm512_mul_ps(m, scale), rest, sums[1]),
        ]
    }
}

/// The dot product of the minimums' sub-scales of sixteen half blocks, as bytes, with the sums of their activations, as
/// three digits each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn dot_digits(sub_mins: &[__m512i; 4], digits: *const i8) -> __m512i {
    let mut sum = _mm512_setzero_si512();
    for digit in 0..3 {
        sum = _mm512_slli_epi32::<7>(sum);
        for (i, sub_mins) in sub_mins.iter().enumerate() {
            // SAFETY: promised by the caller: three times sixteen digits.
            let four = unsafe { digits.cast::<i32>().add(4 * digit + i).read_unaligned() };
            sum = _mm512_dpbusd_epi32(sum, *sub_mins, _mm512_set1_epi32(four));
        }
    }
    sum
}

/// The low 16 bits of each lane of `low`, and those of `high` above them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn pair(low: __m512i, high: __m512i) -> __m512i {
    let places = _mm512_broadcast_i32x4(_mm_set_epi8(13, 12, 0, 0, 9, 8, 0, 0, 5, 4, 0, 0, 1, 0, 0, 0));
    let mut pair = low;
    // SAFETY: works on registers. In assembly, because the compiler emits three instructions for it.
    unsafe {
        asm!(
            "vpshufb {pair}{{{mask}}}, {high}, {places}",
            pair = inout(zmm_reg) pair,
            mask = in(kreg) 0xcccc_cccc_cccc_cccc_u64,
            high = in(zmm_reg) high,
            places = in(zmm_reg) places,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    pair
}

/// Adds the products of the two 16-bit numbers of each lane to 32-bit sums.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn add_products(mut sums: __m512i, a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: works on registers. In assembly, because the compiler splits it into two instructions.
    unsafe {
        asm!(
            "vpdpwssd {sums}, {a}, {b}",
            sums = inout(zmm_reg) sums,
            a = in(zmm_reg) a,
            b = in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

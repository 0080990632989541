//! SIMD vectors of `f32` behind one trait: kernels are written once and compiled for each instruction set.
//!
//! Code that is generic over [`Simd`] is `#[inline(always)]` and reached through a function with the right target
//! features (see [`dispatch`]), so that every operation becomes one instruction.

/// Operations on a vector of [`Simd::N`] `f32`.
///
/// # Safety
/// All methods need the CPU to have the instruction set; pointers must be good for the elements read or written, at
/// any alignment.
pub(crate) unsafe trait Simd: Copy {
    /// A vector.
    type V: Copy;
    /// Partial sums of four vectors.
    type Four: Copy;
    /// Elements of a vector.
    const N: usize;
    /// Vector registers.
    const REGISTERS: usize;

    unsafe fn splat(value: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    /// The first `count < N` elements; the others are 0.
    unsafe fn load_part(from: *const f32, count: usize) -> Self::V;
    unsafe fn store(to: *mut f32, v: Self::V);
    /// Stores the first `count < N` elements.
    unsafe fn store_part(to: *mut f32, v: Self::V, count: usize);
    unsafe fn load_f16(from: *const u16) -> Self::V;
    unsafe fn store_f16(to: *mut u16, v: Self::V);
    unsafe fn load_bf16(from: *const u16) -> Self::V;
    unsafe fn load_i8(from: *const i8) -> Self::V;
    /// One f16 in all elements.
    unsafe fn splat_f16(from: *const u16) -> Self::V;
    /// Two vectors of a Q4_0 block's 32 elements, from `at` on, a multiple of `2 N`: `quants` are its sixteen bytes, which have
    /// the low, then the high four bits.
    unsafe fn load_q4_0(scale: Self::V, quants: *const u8, at: usize) -> [Self::V; 2];
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a × b + c`, rounded once where the CPU can.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; `b` if either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; `b` if either is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn round(a: Self::V) -> Self::V;
    unsafe fn floor(a: Self::V) -> Self::V;
    /// `a × 2^n` for whole `n` with a normal result.
    unsafe fn scale_by_power(a: Self::V, n: Self::V) -> Self::V;
    /// `a` where `x ≥ limit`, else 0.
    unsafe fn keep_if_at_least(a: Self::V, x: Self::V, limit: f32) -> Self::V;
    /// A bit for each element: whether it is not 0.
    unsafe fn not_zero(a: Self::V) -> u32;
    /// Whether `a > b` in any element.
    unsafe fn any_above(a: Self::V, b: Self::V) -> bool;
    unsafe fn sum(a: Self::V) -> f32;
    unsafe fn largest(a: Self::V) -> f32;
    /// Prefetches the cache line at an address, which need not be valid, into the L2 cache.
    unsafe fn prefetch(at: *const u8);
    /// Partial sums of four vectors, for [`sums16`](Simd::sums16).
    unsafe fn fold4(v: [Self::V; 4]) -> Self::Four;
    /// The sums of sixteen vectors, folded by fours.
    unsafe fn sums16(v: [Self::Four; 4], to: *mut f32);
    /// Transposes `N` rows of `N` elements; `from_row` and `to_row` are the distances of rows in elements.
    unsafe fn transpose(from: *const f32, from_row: usize, to: *mut f32, to_row: usize);
}

/// One element at a time, on any CPU.
#[derive(Clone, Copy)]
pub(crate) struct Plain;

// SAFETY: plain Rust; pointers are promised by the caller.
unsafe impl Simd for Plain {
    type V = f32;
    type Four = [f32; 4];
    const N: usize = 1;
    const REGISTERS: usize = 16;

    #[inline(always)]
    unsafe fn splat(value: f32) -> f32 {
        value
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> f32 {
        // SAFETY: promised by the caller.
        unsafe { from.read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_part(_from: *const f32, _count: usize) -> f32 {
        0.0
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: f32) {
        // SAFETY: promised by the caller.
        unsafe { to.write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn store_part(_to: *mut f32, _v: f32, _count: usize) {}
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> f32 {
        // SAFETY: promised by the caller.
        half::f16::from_bits(unsafe { from.read_unaligned() }).to_f32()
    }
    #[inline(always)]
    unsafe fn store_f16(to: *mut u16, v: f32) {
        // SAFETY: promised by the caller.
        unsafe { to.write_unaligned(half::f16::from_f32(v).to_bits()) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> f32 {
        // SAFETY: promised by the caller.
        half::bf16::from_bits(unsafe { from.read_unaligned() }).to_f32()
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> f32 {
        // SAFETY: promised by the caller.
        f32::from(unsafe { *from })
    }
    #[inline(always)]
    unsafe fn splat_f16(from: *const u16) -> f32 {
        // SAFETY: promised by the caller.
        half::f16::from_bits(unsafe { from.read_unaligned() }).to_f32()
    }
    #[inline(always)]
    unsafe fn load_q4_0(scale: f32, quants: *const u8, at: usize) -> [f32; 2] {
        let shift = if at < 16 { 0 } else { 4 };
        // SAFETY: promised by the caller.
        [0, 1].map(|i| scale * (f32::from(unsafe { *quants.add(at % 16 + i) } >> shift & 15) - 8.0))
    }
    #[inline(always)]
    unsafe fn add(a: f32, b: f32) -> f32 {
        a + b
    }
    #[inline(always)]
    unsafe fn sub(a: f32, b: f32) -> f32 {
        a - b
    }
    #[inline(always)]
    unsafe fn mul(a: f32, b: f32) -> f32 {
        a * b
    }
    #[inline(always)]
    unsafe fn div(a: f32, b: f32) -> f32 {
        a / b
    }
    #[inline(always)]
    unsafe fn fma(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
    #[inline(always)]
    unsafe fn max(a: f32, b: f32) -> f32 {
        if a > b { a } else { b }
    }
    #[inline(always)]
    unsafe fn min(a: f32, b: f32) -> f32 {
        if a < b { a } else { b }
    }
    #[inline(always)]
    unsafe fn round(a: f32) -> f32 {
        a.round_ties_even()
    }
    #[inline(always)]
    unsafe fn floor(a: f32) -> f32 {
        a.floor()
    }
    #[inline(always)]
    unsafe fn scale_by_power(a: f32, n: f32) -> f32 {
        // Two steps, so that powers at the ends of the range stay normal.
        let n = n as i32;
        let power = |n: i32| f32::from_bits(((127 + n) as u32) << 23);
        a * power(n / 2) * power(n - n / 2)
    }
    #[inline(always)]
    unsafe fn keep_if_at_least(a: f32, x: f32, limit: f32) -> f32 {
        if x < limit { 0.0 } else { a }
    }
    #[inline(always)]
    unsafe fn not_zero(a: f32) -> u32 {
        u32::from(a != 0.0)
    }
    #[inline(always)]
    unsafe fn any_above(a: f32, b: f32) -> bool {
        a > b
    }
    #[inline(always)]
    unsafe fn sum(a: f32) -> f32 {
        a
    }
    #[inline(always)]
    unsafe fn largest(a: f32) -> f32 {
        a
    }
    #[inline(always)]
    unsafe fn prefetch(_at: *const u8) {}
    #[inline(always)]
    unsafe fn fold4(v: [f32; 4]) -> [f32; 4] {
        v
    }
    #[inline(always)]
    unsafe fn sums16(v: [[f32; 4]; 4], to: *mut f32) {
        for (i, four) in v.into_iter().enumerate() {
            // SAFETY: promised by the caller.
            unsafe { to.add(4 * i).cast::<[f32; 4]>().write_unaligned(four) }
        }
    }
    #[inline(always)]
    unsafe fn transpose(from: *const f32, _from_row: usize, to: *mut f32, _to_row: usize) {
        // SAFETY: promised by the caller.
        unsafe { to.write(from.read()) }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Lanes8, Lanes16};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::Simd;

    /// AVX2, FMA and F16C: eight elements.
    #[derive(Clone, Copy)]
    pub(crate) struct Lanes8;

    /// AVX-512: sixteen elements.
    #[derive(Clone, Copy)]
    pub(crate) struct Lanes16;

    /// Implements operations that are one intrinsic each.
    macro_rules! intrinsics {
        ($($name:ident ( $($argument:ident : $type:ty),* ) -> $result:ty = $body:expr;)*) => {
            $(
                #[inline(always)]
                unsafe fn $name($($argument: $type),*) -> $result {
                    // SAFETY: promised by the caller.
                    unsafe { $body }
                }
            )*
        };
    }

    /// All bits set in the first `count` lanes.
    #[inline(always)]
    unsafe fn mask8(count: usize) -> __m256i {
        // SAFETY: promised by the caller.
        unsafe {
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lanes)
        }
    }

    // SAFETY: each method is the instruction of its name; pointers are promised by the caller.
    unsafe impl Simd for Lanes8 {
        type V = __m256;
        type Four = __m256;
        const N: usize = 8;
        const REGISTERS: usize = 16;

        intrinsics! {
            splat(value: f32) -> __m256 = _mm256_set1_ps(value);
            load(from: *const f32) -> __m256 = _mm256_loadu_ps(from);
            load_part(from: *const f32, count: usize) -> __m256 = _mm256_maskload_ps(from, mask8(count));
            store(to: *mut f32, v: __m256) -> () = _mm256_storeu_ps(to, v);
            store_part(to: *mut f32, v: __m256, count: usize) -> () = _mm256_maskstore_ps(to, mask8(count), v);
            load_f16(from: *const u16) -> __m256 = _mm256_cvtph_ps(_mm_loadu_si128(from.cast()));
            store_f16(to: *mut u16, v: __m256) -> () =
                _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v));
            load_bf16(from: *const u16) -> __m256 = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(
                _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()))));
            load_i8(from: *const i8) -> __m256 =
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast())));
            splat_f16(from: *const u16) -> __m256 =
                _mm256_cvtph_ps(_mm_set1_epi16(from.read_unaligned().cast_signed()));
            add(a: __m256, b: __m256) -> __m256 = _mm256_add_ps(a, b);
            sub(a: __m256, b: __m256) -> __m256 = _mm256_sub_ps(a, b);
            mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
            div(a: __m256, b: __m256) -> __m256 = _mm256_div_ps(a, b);
            fma(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
            prefetch(at: *const u8) -> () = _mm_prefetch::<_MM_HINT_T1>(at.cast());
            max(a: __m256, b: __m256) -> __m256 = _mm256_max_ps(a, b);
            min(a: __m256, b: __m256) -> __m256 = _mm256_min_ps(a, b);
            round(a: __m256) -> __m256 =
                _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
            floor(a: __m256) -> __m256 = _mm256_floor_ps(a);
            keep_if_at_least(a: __m256, x: __m256, limit: f32) -> __m256 =
                _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(limit)), a);
            not_zero(a: __m256) -> u32 =
                _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_NEQ_UQ>(a, _mm256_setzero_ps())).cast_unsigned();
            any_above(a: __m256, b: __m256) -> bool =
                _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(a, b)) != 0;
        }

        #[inline(always)]
        unsafe fn load_q4_0(scale: __m256, quants: *const u8, at: usize) -> [__m256; 2] {
            // SAFETY: promised by the caller.
            unsafe {
                let bytes = _mm_srl_epi16(_mm_loadu_si128(quants.cast()), _mm_cvtsi32_si128(at as i32 / 4));
                let quants = _mm_sub_epi8(_mm_and_si128(bytes, _mm_set1_epi8(15)), _mm_set1_epi8(8));
                let (low, high) =
                    (_mm256_cvtepi8_epi32(quants), _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(quants)));
                [
                    _mm256_mul_ps(scale, _mm256_cvtepi32_ps(low)),
                    _mm256_mul_ps(scale, _mm256_cvtepi32_ps(high)),
                ]
            }
        }
        #[inline(always)]
        unsafe fn scale_by_power(a: __m256, n: __m256) -> __m256 {
            // SAFETY: promised by the caller. Two steps, so that powers at the ends of the range stay normal.
            unsafe {
                let n = _mm256_cvtps_epi32(n);
                let half = _mm256_srai_epi32::<1>(n);
                let power = |n| {
                    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))))
                };
                _mm256_mul_ps(_mm256_mul_ps(a, power(half)), power(_mm256_sub_epi32(n, half)))
            }
        }
        #[inline(always)]
        unsafe fn sum(a: __m256) -> f32 {
            // SAFETY: promised by the caller.
            unsafe {
                let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
                let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
                _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps::<1>(a, a)))
            }
        }
        #[inline(always)]
        unsafe fn largest(a: __m256) -> f32 {
            // SAFETY: promised by the caller.
            unsafe {
                let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
                let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
                _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps::<1>(a, a)))
            }
        }
        #[inline(always)]
        unsafe fn fold4(v: [__m256; 4]) -> __m256 {
            // SAFETY: promised by the caller.
            unsafe { _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3])) }
        }
        #[inline(always)]
        unsafe fn sums16(v: [__m256; 4], to: *mut f32) {
            // SAFETY: promised by the caller.
            unsafe {
                let [a, b, c, d] = v;
                let low = _mm256_permute2f128_ps::<0x20>(a, b);
                _mm256_storeu_ps(to, _mm256_add_ps(low, _mm256_permute2f128_ps::<0x31>(a, b)));
                let low = _mm256_permute2f128_ps::<0x20>(c, d);
                _mm256_storeu_ps(to.add(8), _mm256_add_ps(low, _mm256_permute2f128_ps::<0x31>(c, d)));
            }
        }
        #[inline(always)]
        unsafe fn transpose(from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
            // SAFETY: promised by the caller; arrays of eight.
            unsafe {
                for half in 0..2 {
                    // Columns 4 half .. 4 half + 4, of rows 0–3 in the low lane and of rows 4–7 in the high one.
                    let mut rows = [_mm256_setzero_ps(); 4];
                    for (i, row) in rows.iter_mut().enumerate() {
                        let low = _mm_loadu_ps(from.add(i * from_row + 4 * half));
                        let high = _mm_loadu_ps(from.add((i + 4) * from_row + 4 * half));
                        *row = _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(low), high);
                    }
                    let [a, b, c, d] = rows;
                    let (ab, cd) = (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
                    let (ab2, cd2) = (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
                    let to = to.add(4 * half * to_row);
                    _mm256_storeu_ps(to, _mm256_shuffle_ps::<0x44>(ab, cd));
                    _mm256_storeu_ps(to.add(to_row), _mm256_shuffle_ps::<0xee>(ab, cd));
                    _mm256_storeu_ps(to.add(2 * to_row), _mm256_shuffle_ps::<0x44>(ab2, cd2));
                    _mm256_storeu_ps(to.add(3 * to_row), _mm256_shuffle_ps::<0xee>(ab2, cd2));
                }
            }
        }
    }

    /// Sixteen f16 from memory. The intrinsic becomes a load and a conversion between registers, which takes two
    /// vector operations; from memory it is one.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn widen_f16(from: *const u16) -> __m512 {
        let out: __m512;
        // SAFETY: reads 32 bytes; the caller promised them and the instruction set.
        unsafe {
            std::arch::asm!(
                "vcvtph2ps {out}, ymmword ptr [{from}]",
                out = lateout(zmm_reg) out,
                from = in(reg) from,
                options(pure, readonly, nostack, preserves_flags)
            );
        }
        out
    }

    #[inline(always)]
    const fn mask16(count: usize) -> __mmask16 {
        ((1_u32 << count) - 1) as __mmask16
    }

    // SAFETY: each method is the instruction of its name; pointers are promised by the caller.
    unsafe impl Simd for Lanes16 {
        type V = __m512;
        type Four = __m512;
        const N: usize = 16;
        const REGISTERS: usize = 32;

        intrinsics! {
            splat(value: f32) -> __m512 = _mm512_set1_ps(value);
            load(from: *const f32) -> __m512 = _mm512_loadu_ps(from);
            load_part(from: *const f32, count: usize) -> __m512 = _mm512_maskz_loadu_ps(mask16(count), from);
            store(to: *mut f32, v: __m512) -> () = _mm512_storeu_ps(to, v);
            store_part(to: *mut f32, v: __m512, count: usize) -> () = _mm512_mask_storeu_ps(to, mask16(count), v);
            load_f16(from: *const u16) -> __m512 = widen_f16(from);
            store_f16(to: *mut u16, v: __m512) -> () =
                _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v));
            load_bf16(from: *const u16) -> __m512 = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(
                _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()))));
            load_i8(from: *const i8) -> __m512 =
                _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())));
            splat_f16(from: *const u16) -> __m512 =
                _mm512_cvtph_ps(_mm256_set1_epi16(from.read_unaligned().cast_signed()));
            add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
            sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
            mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
            div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
            fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
            prefetch(at: *const u8) -> () = _mm_prefetch::<_MM_HINT_T1>(at.cast());
            max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
            min(a: __m512, b: __m512) -> __m512 = _mm512_min_ps(a, b);
            round(a: __m512) -> __m512 =
                _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
            floor(a: __m512) -> __m512 =
                _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(a);
            scale_by_power(a: __m512, n: __m512) -> __m512 = _mm512_scalef_ps(a, n);
            keep_if_at_least(a: __m512, x: __m512, limit: f32) -> __m512 =
                _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(limit)), a);
            not_zero(a: __m512) -> u32 =
                u32::from(_mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(a, _mm512_setzero_ps()));
            any_above(a: __m512, b: __m512) -> bool = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b) != 0;
            sum(a: __m512) -> f32 = _mm512_reduce_add_ps(a);
            largest(a: __m512) -> f32 = _mm512_reduce_max_ps(a);
        }

        #[inline(always)]
        unsafe fn load_q4_0(scale: __m512, quants: *const u8, _at: usize) -> [__m512; 2] {
            // SAFETY: promised by the caller; `at` is 0. Of an index, the permutation uses the low four bits.
            unsafe {
                let levels = _mm512_setr_ps(
                    -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0,
                );
                let (levels, bytes) =
                    (_mm512_mul_ps(scale, levels), _mm512_cvtepu8_epi32(_mm_loadu_si128(quants.cast())));
                let high = _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(bytes), levels);
                [_mm512_permutexvar_ps(bytes, levels), high]
            }
        }
        #[inline(always)]
        unsafe fn fold4(v: [__m512; 4]) -> __m512 {
            // SAFETY: promised by the caller.
            unsafe {
                let [a, b, c, d] = v;
                let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
                let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
                let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
                // Element i of each 128-bit lane: the sum of that lane of vector i.
                let low = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
                _mm512_add_ps(low, _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)))
            }
        }
        #[inline(always)]
        unsafe fn sums16(v: [__m512; 4], to: *mut f32) {
            // SAFETY: promised by the caller.
            unsafe {
                let [a, b, c, d] = v;
                // Lanes a0 + a2, a1 + a3, b0 + b2, b1 + b3, and likewise for c and d.
                let ab =
                    _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
                let cd =
                    _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xee>(c, d));
                let even = _mm512_shuffle_f32x4::<0x88>(ab, cd);
                _mm512_storeu_ps(to, _mm512_add_ps(even, _mm512_shuffle_f32x4::<0xdd>(ab, cd)));
            }
        }
        #[inline(always)]
        unsafe fn transpose(from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
            // SAFETY: promised by the caller.
            unsafe {
                // For each four rows, and c in 0..4: lane l holds element 4 l + c of the rows. (No closures: they would
                // not have the target features.)
                let mut fours = [[_mm512_setzero_ps(); 4]; 4];
                for (i, four) in fours.iter_mut().enumerate() {
                    let first = from.add(4 * i * from_row);
                    let (a, b) = (_mm512_loadu_ps(first), _mm512_loadu_ps(first.add(from_row)));
                    let (c, d) =
                        (_mm512_loadu_ps(first.add(2 * from_row)), _mm512_loadu_ps(first.add(3 * from_row)));
                    let ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
                    let cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
                    let ab2 = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
                    let cd2 = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
                    *four = [
                        _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                        _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)),
                        _mm512_castpd_ps(_mm512_unpacklo_pd(ab2, cd2)),
                        _mm512_castpd_ps(_mm512_unpackhi_pd(ab2, cd2)),
                    ];
                }
                let [p, q, r, s] = fours;
                let fours = p.into_iter().zip(q).zip(r.into_iter().zip(s));
                for (c, ((p, q), (r, s))) in fours.enumerate() {
                    let (even, odd) =
                        (_mm512_shuffle_f32x4::<0x88>(p, q), _mm512_shuffle_f32x4::<0xdd>(p, q));
                    let (even2, odd2) =
                        (_mm512_shuffle_f32x4::<0x88>(r, s), _mm512_shuffle_f32x4::<0xdd>(r, s));
                    let to = to.add(c * to_row);
                    _mm512_storeu_ps(to, _mm512_shuffle_f32x4::<0x88>(even, even2));
                    _mm512_storeu_ps(to.add(4 * to_row), _mm512_shuffle_f32x4::<0x88>(odd, odd2));
                    _mm512_storeu_ps(to.add(8 * to_row), _mm512_shuffle_f32x4::<0xdd>(even, even2));
                    _mm512_storeu_ps(to.add(12 * to_row), _mm512_shuffle_f32x4::<0xdd>(odd, odd2));
                }
            }
        }
    }
}

/// Runs a generic body for the instruction set: `dispatch!(isa, body(arguments))` calls `body::<S>(arguments)` inside a
/// function that has the target features of `S`. The arguments are named variables with their types.
macro_rules! dispatch {
    ($isa:expr, $body:ident ( $($argument:ident : $type:ty),* ) -> $result:ty) => {{
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
            unsafe fn wide($($argument: $type),*) -> $result {
                // SAFETY: promised by the caller; the target features are those of the lanes.
                unsafe { $body::<$crate::kernels::vec::simd::Lanes16>($($argument),*) }
            }
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn narrow($($argument: $type),*) -> $result {
                // SAFETY: promised by the caller; the target features are those of the lanes.
                unsafe { $body::<$crate::kernels::vec::simd::Lanes8>($($argument),*) }
            }
            match $isa {
                // SAFETY: the token in the instruction set proves that the CPU has it; the rest is the body's.
                $crate::isa::Isa::Amx(_) | $crate::isa::Isa::Avx512(_) => unsafe { wide($($argument),*) },
                // SAFETY: as above.
                $crate::isa::Isa::Avx2(_) | $crate::isa::Isa::AvxVnni(_) => unsafe { narrow($($argument),*) },
                // SAFETY: plain Rust; the rest is the body's.
                $crate::isa::Isa::Scalar => unsafe { $body::<$crate::kernels::vec::simd::Plain>($($argument),*) },
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = $isa;
            // SAFETY: plain Rust; the rest is the body's.
            unsafe { $body::<$crate::kernels::vec::simd::Plain>($($argument),*) }
        }
    }};
}
pub(crate) use dispatch;

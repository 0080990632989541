//! Eight floats at a time: the operations that the searches need, portable and with AVX2.
//!
//! Both compute the same bits: no operation is fused, and no sum is reordered. The portable version is the judge of the
//! other one. A value of [`Avx2`] exists only where the CPU has the instructions, and vectors come from it alone, which
//! is what makes the methods of vectors safe.

use std::ops::{Add, Div, Mul, Sub};

/// An instruction set: makes vectors.
pub(super) trait Simd: Copy {
    /// Eight floats.
    type F: Lanes;
    /// Eight times one number.
    fn splat(self, value: f32) -> Self::F;
    /// Eight numbers from memory.
    fn load(self, values: &[f32; 8]) -> Self::F;
    /// Eight rows of eight numbers, transposed.
    fn transpose(self, rows: [&[f32; 8]; 8]) -> [Self::F; 8];
}

/// Operations on eight floats.
pub(super) trait Lanes:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// The numbers.
    fn store(self) -> [f32; 8];
    /// The smaller numbers; `other` where one is NaN.
    fn min(self, other: Self) -> Self;
    /// The larger numbers; `other` where one is NaN.
    fn max(self, other: Self) -> Self;
    /// The nearest integers, ties to even.
    fn round(self) -> Self;
    /// The magnitudes.
    fn abs(self) -> Self;
    /// A mask: all bits set where `self < other`.
    fn less(self, other: Self) -> Self;
    /// The bits that are set in both.
    fn and(self, other: Self) -> Self;
    /// `then` where the mask is set, else `otherwise`.
    fn select(mask: Self, then: Self, otherwise: Self) -> Self;
    /// Per lane, four numbers from 0 to 255 as bytes.
    fn bytes(four: [Self; 4]) -> [[u8; 4]; 8];

    /// The sum of the lanes, first to last.
    #[inline(always)]
    fn sum(self) -> f32 {
        self.store().iter().sum()
    }
}

/// Plain Rust.
#[derive(Clone, Copy)]
pub(super) struct Portable;

/// Eight floats in an array.
#[derive(Clone, Copy)]
pub(super) struct Array([f32; 8]);

impl Array {
    #[inline(always)]
    fn zip(self, other: Array, operation: impl Fn(f32, f32) -> f32) -> Array {
        let mut result = self.0;
        for (a, b) in result.iter_mut().zip(other.0) {
            *a = operation(*a, b);
        }
        Array(result)
    }
}

macro_rules! array_operator {
    ($($trait:ident $method:ident $operator:tt)*) => {$(
        impl $trait for Array {
            type Output = Array;
            #[inline(always)]
            fn $method(self, other: Array) -> Array {
                self.zip(other, |a, b| a $operator b)
            }
        }
    )*};
}
array_operator! { Add add + Sub sub - Mul mul * Div div / }

impl Simd for Portable {
    type F = Array;

    #[inline(always)]
    fn splat(self, value: f32) -> Array {
        Array([value; 8])
    }

    #[inline(always)]
    fn load(self, values: &[f32; 8]) -> Array {
        Array(*values)
    }

    #[inline(always)]
    fn transpose(self, rows: [&[f32; 8]; 8]) -> [Array; 8] {
        let mut columns = [[0.0; 8]; 8];
        for (r, row) in rows.iter().enumerate() {
            for (column, value) in columns.iter_mut().zip(row.iter()) {
                if let Some(place) = column.get_mut(r) {
                    *place = *value;
                }
            }
        }
        columns.map(Array)
    }
}

impl Lanes for Array {
    #[inline(always)]
    fn store(self) -> [f32; 8] {
        self.0
    }

    #[inline(always)]
    fn min(self, other: Array) -> Array {
        self.zip(other, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn max(self, other: Array) -> Array {
        self.zip(other, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn round(self) -> Array {
        Array(self.0.map(f32::round_ties_even))
    }

    #[inline(always)]
    fn abs(self) -> Array {
        Array(self.0.map(f32::abs))
    }

    #[inline(always)]
    fn less(self, other: Array) -> Array {
        self.zip(other, |a, b| f32::from_bits(if a < b { u32::MAX } else { 0 }))
    }

    #[inline(always)]
    fn and(self, other: Array) -> Array {
        self.zip(other, |a, b| f32::from_bits(a.to_bits() & b.to_bits()))
    }

    #[inline(always)]
    fn select(mask: Array, then: Array, otherwise: Array) -> Array {
        let chosen = mask.zip(then, |mask, then| f32::from_bits(mask.to_bits() & then.to_bits()));
        let rest = mask.zip(otherwise, |mask, other| f32::from_bits(!mask.to_bits() & other.to_bits()));
        chosen.zip(rest, |a, b| f32::from_bits(a.to_bits() | b.to_bits()))
    }

    #[inline(always)]
    fn bytes(four: [Array; 4]) -> [[u8; 4]; 8] {
        let mut bytes = [[0; 4]; 8];
        for (i, lanes) in four.iter().enumerate() {
            for (bytes, value) in bytes.iter_mut().zip(lanes.0) {
                if let Some(byte) = bytes.get_mut(i) {
                    *byte = value as u8;
                }
            }
        }
        bytes
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::Avx2;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::ops::{Add, Div, Mul, Sub};

    use super::{Lanes, Simd};

    /// AVX2; a value of this type proves that the CPU has it.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx2(());

    impl Avx2 {
        /// AVX2, if the CPU has it.
        pub(in super::super) fn detect() -> Option<Avx2> {
            is_x86_feature_detected!("avx2").then_some(Avx2(()))
        }
    }

    /// Eight floats in a register; made from an [`Avx2`] only.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Register(__m256);

    macro_rules! register_operator {
        ($($trait:ident $method:ident $intrinsic:ident)*) => {$(
            impl $trait for Register {
                type Output = Register;
                #[inline(always)]
                fn $method(self, other: Register) -> Register {
                    // SAFETY: a `Register` exists only where the CPU has AVX2.
                    Register(unsafe { $intrinsic(self.0, other.0) })
                }
            }
        )*};
    }
    register_operator! { Add add _mm256_add_ps Sub sub _mm256_sub_ps Mul mul _mm256_mul_ps Div div _mm256_div_ps }

    impl Simd for Avx2 {
        type F = Register;

        #[inline(always)]
        fn splat(self, value: f32) -> Register {
            // SAFETY: `self` proves that the CPU has AVX2.
            Register(unsafe { _mm256_set1_ps(value) })
        }

        #[inline(always)]
        fn load(self, values: &[f32; 8]) -> Register {
            // SAFETY: `self` proves that the CPU has AVX2; the array has the eight floats that are read.
            Register(unsafe { _mm256_loadu_ps(values.as_ptr()) })
        }

        #[inline(always)]
        fn transpose(self, rows: [&[f32; 8]; 8]) -> [Register; 8] {
            let [a, b, c, d, e, f, g, h] = rows;
            let (a, b, c, d) = (self.load(a).0, self.load(b).0, self.load(c).0, self.load(d).0);
            let (e, f, g, h) = (self.load(e).0, self.load(f).0, self.load(g).0, self.load(h).0);
            // SAFETY: `self` proves that the CPU has AVX2.
            unsafe {
                // Pairs of rows, interleaved; then fours; then the halves of the registers are exchanged.
                let (ab0, ab1) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
                let (cd0, cd1) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
                let (ef0, ef1) = (_mm256_unpacklo_ps(e, f), _mm256_unpackhi_ps(e, f));
                let (gh0, gh1) = (_mm256_unpacklo_ps(g, h), _mm256_unpackhi_ps(g, h));
                let low = [
                    _mm256_shuffle_ps::<0x44>(ab0, cd0),
                    _mm256_shuffle_ps::<0xee>(ab0, cd0),
                    _mm256_shuffle_ps::<0x44>(ab1, cd1),
                    _mm256_shuffle_ps::<0xee>(ab1, cd1),
                ];
                let high = [
                    _mm256_shuffle_ps::<0x44>(ef0, gh0),
                    _mm256_shuffle_ps::<0xee>(ef0, gh0),
                    _mm256_shuffle_ps::<0x44>(ef1, gh1),
                    _mm256_shuffle_ps::<0xee>(ef1, gh1),
                ];
                let [l0, l1, l2, l3] = low;
                let [h0, h1, h2, h3] = high;
                [
                    Register(_mm256_permute2f128_ps::<0x20>(l0, h0)),
                    Register(_mm256_permute2f128_ps::<0x20>(l1, h1)),
                    Register(_mm256_permute2f128_ps::<0x20>(l2, h2)),
                    Register(_mm256_permute2f128_ps::<0x20>(l3, h3)),
                    Register(_mm256_permute2f128_ps::<0x31>(l0, h0)),
                    Register(_mm256_permute2f128_ps::<0x31>(l1, h1)),
                    Register(_mm256_permute2f128_ps::<0x31>(l2, h2)),
                    Register(_mm256_permute2f128_ps::<0x31>(l3, h3)),
                ]
            }
        }
    }

    impl Lanes for Register {
        #[inline(always)]
        fn store(self) -> [f32; 8] {
            let mut values = [0.0; 8];
            // SAFETY: a `Register` exists only where the CPU has AVX2; the array has room for the eight floats.
            unsafe { _mm256_storeu_ps(values.as_mut_ptr(), self.0) };
            values
        }

        #[inline(always)]
        fn min(self, other: Register) -> Register {
            // SAFETY: a `Register` exists only where the CPU has AVX2.
            Register(unsafe { _mm256_min_ps(self.0, other.0) })
        }

        #[inline(always)]
        fn max(self, other: Register) -> Register {
            // SAFETY: a `Register` exists only where the CPU has AVX2.
            Register(unsafe { _mm256_max_ps(self.0, other.0) })
        }

        #[inline(always)]
        fn round(self) -> Register {
            // SAFETY: a `Register` exists only where the CPU has AVX2.
            Register(unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0) })
        }

        #[inline(always)]
        fn abs(self) -> Register {
            // SAFETY: a `Register` exists only where the CPU has AVX2.
            Register(unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0) })
        }

        #[inline(always)]
        fn less(self, other: Register) -> Register {
            // SAFETY: a `Register` exists only where the CPU has AVX2.
            Register(unsafe { _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, other.0) })
        }

        #[inline(always)]
        fn and(self, other: Register) -> Register {
            // SAFETY: a `Register` exists only where the CPU has AVX2.
            Register(unsafe { _mm256_and_ps(self.0, other.0) })
        }

        #[inline(always)]
        fn select(mask: Register, then: Register, otherwise: Register) -> Register {
            // SAFETY: a `Register` exists only where the CPU has AVX2.
            Register(unsafe { _mm256_blendv_ps(otherwise.0, then.0, mask.0) })
        }

        #[inline(always)]
        fn bytes(four: [Register; 4]) -> [[u8; 4]; 8] {
            let mut words = [[0; 4]; 8];
            // SAFETY: a `Register` exists only where the CPU has AVX2; the array has room for the eight words.
            unsafe {
                let [a, b, c, d] = four;
                let (a, b) = (_mm256_cvttps_epi32(a.0), _mm256_cvttps_epi32(b.0));
                let (c, d) = (_mm256_cvttps_epi32(c.0), _mm256_cvttps_epi32(d.0));
                let low = _mm256_or_si256(a, _mm256_slli_epi32::<8>(b));
                let high = _mm256_or_si256(_mm256_slli_epi32::<16>(c), _mm256_slli_epi32::<24>(d));
                _mm256_storeu_si256((&raw mut words).cast(), _mm256_or_si256(low, high));
            }
            words
        }
    }
}

//! Taking packed cells apart with AVX2, eight rows at a time (the layouts are drawn in [`format`](super::format)).
//!
//! A weight is `d q + m`. Quants of up to 6 bits stay unsigned, as `maddubs` wants one side; wider ones are made
//! signed, and the kernel moves their sign to the activations.

use std::arch::x86_64::*;

use quadriga_graph::blocks::{IQ4_LEVELS, MXFP4_LEVELS};

/// `d` and `m` of eight rows, for columns 0..16 and 16..32 of a block; both the same where a block has one scale.
#[derive(Clone, Copy)]
pub(super) struct Affine {
    pub(super) d: [__m256; 2],
    pub(super) m: [__m256; 2],
}

/// A way to store quants.
pub(super) trait Quants {
    const BYTES: usize;
    /// The least and the largest quant.
    const RANGE: [f32; 2];
    /// Whether the bytes are signed.
    const SIGNED: bool;
    /// How many products of pairs can be added in 16 bits: pairs are at most 2 × 127 × the largest quant.
    const RUN: usize;
    /// Reads eight rows of a block; `block` points at the first of them.
    ///
    /// # Safety
    /// The block must be readable, and the CPU must have AVX2.
    unsafe fn load(block: *const u8) -> [__m256i; 8];
}

/// A way to store scales.
pub(super) trait Scales {
    /// Bytes of a cell's scales.
    const BYTES: usize;
    const HALVES: bool;
    /// Whether `m` can differ from 0.
    const MINIMUM: bool;
    /// Reads the scales of rows `8 half..8 half + 8` of a block.
    ///
    /// # Safety
    /// The scales must be readable, and the CPU must have AVX2 and F16C.
    unsafe fn load(scales: *const u8, block: usize, half: usize) -> Affine;
}

pub(super) struct Cell<Q, S, const BLOCKS: usize>(std::marker::PhantomData<(Q, S)>);

/// What a kernel needs to know of a packed type.
pub(super) trait Packed {
    const BLOCKS: usize;
    const BYTES: usize;
    const RANGE: [f32; 2];
    const HALVES: bool;
    const MINIMUM: bool;
    const SIGNED: bool;
    const RUN: usize;
    /// # Safety
    /// The cell must be readable, `block < BLOCKS`, `half < 2`, and the CPU must have AVX2 and F16C.
    unsafe fn quants(cell: *const u8, block: usize, half: usize) -> [__m256i; 8];
    /// # Safety
    /// As [`Packed::quants`].
    unsafe fn scales(cell: *const u8, block: usize, half: usize) -> Affine;
}

impl<Q: Quants, S: Scales, const BLOCKS: usize> Packed for Cell<Q, S, BLOCKS> {
    const BLOCKS: usize = BLOCKS;
    const BYTES: usize = BLOCKS * Q::BYTES + S::BYTES;
    const RANGE: [f32; 2] = Q::RANGE;
    const HALVES: bool = S::HALVES;
    const MINIMUM: bool = S::MINIMUM;
    const SIGNED: bool = Q::SIGNED;
    const RUN: usize = Q::RUN;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn quants(cell: *const u8, block: usize, half: usize) -> [__m256i; 8] {
        // SAFETY: the block lies inside the cell; half of each vector belongs to eight rows.
        unsafe { Q::load(cell.add(block * Q::BYTES + 32 * half)) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scales(cell: *const u8, block: usize, half: usize) -> Affine {
        // SAFETY: the scales follow the quants of all blocks.
        unsafe { S::load(cell.add(BLOCKS * Q::BYTES), block, half) }
    }
}

pub(super) struct Byte;
pub(super) struct Nibble;
pub(super) struct NibbleOne;
pub(super) struct NibbleTwo;
pub(super) struct Two;
pub(super) struct Three;
pub(super) struct LevelsIq4;
pub(super) struct LevelsMx;

const MX_OFFSET: i32 = 12;

pub(super) struct Half<const OFFSET: i32>;
pub(super) struct HalfMinimum;
pub(super) struct Exponent;
pub(super) struct SixPair;
pub(super) struct SixTwice;
pub(super) struct ByteTwice;
pub(super) struct NibbleTwice;
pub(super) struct Six;

pub(super) type Q4_0 = Cell<Nibble, Half<8>, 1>;
pub(super) type Q4_1 = Cell<Nibble, HalfMinimum, 1>;
pub(super) type Q5_0 = Cell<NibbleOne, Half<16>, 1>;
pub(super) type Q5_1 = Cell<NibbleOne, HalfMinimum, 1>;
pub(super) type Q8_0 = Cell<Byte, Half<0>, 1>;
pub(super) type Q2K = Cell<Two, NibbleTwice, 8>;
pub(super) type Q3K = Cell<Three, SixTwice, 8>;
pub(super) type Q4K = Cell<Nibble, SixPair, 8>;
pub(super) type Q5K = Cell<NibbleOne, SixPair, 8>;
pub(super) type Q6K = Cell<NibbleTwo, ByteTwice, 8>;
pub(super) type Iq4Nl = Cell<LevelsIq4, Half<0>, 1>;
pub(super) type Iq4Xs = Cell<LevelsIq4, Six, 8>;
pub(super) type Mxfp4 = Cell<LevelsMx, Exponent, 1>;

#[inline]
#[target_feature(enable = "avx2")]
unsafe fn vector(block: *const u8, index: usize) -> __m256i {
    // SAFETY: promised by the caller.
    unsafe { _mm256_loadu_si256(block.add(64 * index).cast()) }
}

/// A shift right by `shift`, or left for negative shifts; bits that cross bytes must be masked away.
#[inline]
#[target_feature(enable = "avx2")]
fn shifted(a: __m256i, shift: i32) -> __m256i {
    if shift >= 0 {
        _mm256_srl_epi16(a, _mm_cvtsi32_si128(shift))
    } else {
        _mm256_sll_epi16(a, _mm_cvtsi32_si128(-shift))
    }
}

/// `a | (b & mask)`
#[inline]
#[target_feature(enable = "avx2")]
fn or_masked(a: __m256i, b: __m256i, mask: __m256i) -> __m256i {
    _mm256_or_si256(a, _mm256_and_si256(b, mask))
}

impl Quants for Byte {
    const RANGE: [f32; 2] = [-128.0, 127.0];
    const BYTES: usize = 512;
    const SIGNED: bool = true;
    const RUN: usize = 1;
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(block: *const u8) -> [__m256i; 8] {
        let mut q = [_mm256_setzero_si256(); 8];
        for (v, q) in q.iter_mut().enumerate() {
            // SAFETY: eight vectors of the block.
            *q = _mm256_xor_si256(unsafe { vector(block, v) }, _mm256_set1_epi8(-128));
        }
        q
    }
}

impl Quants for Nibble {
    const RANGE: [f32; 2] = [0.0, 15.0];
    const BYTES: usize = 256;
    const SIGNED: bool = false;
    const RUN: usize = 8;
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(block: *const u8) -> [__m256i; 8] {
        let mask = _mm256_set1_epi8(15);
        let mut q = [_mm256_setzero_si256(); 8];
        let (low, high) = q.split_at_mut(4);
        for (v, (low, high)) in low.iter_mut().zip(high).enumerate() {
            // SAFETY: four vectors of the block.
            let both = unsafe { vector(block, v) };
            *low = _mm256_and_si256(both, mask);
            *high = _mm256_and_si256(_mm256_srli_epi16::<4>(both), mask);
        }
        q
    }
}

impl Quants for NibbleOne {
    const RANGE: [f32; 2] = [0.0, 31.0];
    const BYTES: usize = 320;
    const SIGNED: bool = false;
    const RUN: usize = 4;
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(block: *const u8) -> [__m256i; 8] {
        // SAFETY: the nibbles come first, then one vector of fifth bits.
        let (mut q, bits) = unsafe { (Nibble::load(block), vector(block, 4)) };
        for (v, q) in q.iter_mut().enumerate() {
            *q = or_masked(*q, shifted(bits, (v as i32 ^ 4) - 4), _mm256_set1_epi8(16));
        }
        q
    }
}

impl Quants for NibbleTwo {
    const RANGE: [f32; 2] = [0.0, 63.0];
    const BYTES: usize = 384;
    const SIGNED: bool = false;
    const RUN: usize = 2;
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(block: *const u8) -> [__m256i; 8] {
        // SAFETY: the nibbles come first, then two vectors of high bits.
        let (mut q, bits) = unsafe { (Nibble::load(block), [vector(block, 4), vector(block, 5)]) };
        for (v, q) in q.iter_mut().enumerate() {
            let bits = if v / 2 % 2 == 0 { bits[0] } else { bits[1] };
            let from = 2 * (v as i32 % 2) + if v < 4 { 4 } else { 0 };
            *q = or_masked(*q, shifted(bits, from - 4), _mm256_set1_epi8(0x30));
        }
        q
    }
}

impl Quants for Two {
    const RANGE: [f32; 2] = [0.0, 3.0];
    const BYTES: usize = 128;
    const SIGNED: bool = false;
    const RUN: usize = 8;
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(block: *const u8) -> [__m256i; 8] {
        // SAFETY: two vectors of the block.
        let bits = unsafe { [vector(block, 0), vector(block, 1)] };
        let mut q = [_mm256_setzero_si256(); 8];
        for (v, q) in q.iter_mut().enumerate() {
            let bits = if v < 4 { bits[0] } else { bits[1] };
            *q = _mm256_and_si256(shifted(bits, 2 * (v as i32 % 4)), _mm256_set1_epi8(3));
        }
        q
    }
}

impl Quants for Three {
    const RANGE: [f32; 2] = [0.0, 7.0];
    const BYTES: usize = 192;
    const SIGNED: bool = false;
    const RUN: usize = 8;
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(block: *const u8) -> [__m256i; 8] {
        // SAFETY: three vectors of the block.
        let (a, b, c) = unsafe { (vector(block, 0), vector(block, 1), vector(block, 2)) };
        let three = |v, shift| _mm256_and_si256(shifted(v, shift), _mm256_set1_epi8(7));
        let two = |v| _mm256_and_si256(shifted(v, 6), _mm256_set1_epi8(3));
        let third = |shift| _mm256_and_si256(shifted(c, shift), _mm256_set1_epi8(4));
        [
            three(a, 0),
            three(b, 0),
            three(c, 0),
            three(a, 3),
            three(b, 3),
            three(c, 5),
            _mm256_or_si256(two(a), third(1)),
            _mm256_or_si256(two(b), third(2)),
        ]
    }
}

#[inline]
#[target_feature(enable = "avx2")]
unsafe fn levels(block: *const u8, table: &[i8; 16], offset: i8) -> [__m256i; 8] {
    // SAFETY: promised by the caller; the table is 16 bytes long.
    let (mut q, table) = unsafe { (Nibble::load(block), _mm_loadu_si128(table.as_ptr().cast())) };
    let table = _mm256_broadcastsi128_si256(_mm_add_epi8(table, _mm_set1_epi8(offset)));
    for q in &mut q {
        *q = _mm256_shuffle_epi8(table, *q);
    }
    q
}

impl Quants for LevelsIq4 {
    const RANGE: [f32; 2] = [-127.0, 113.0];
    const BYTES: usize = 256;
    const SIGNED: bool = true;
    const RUN: usize = 1;
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(block: *const u8) -> [__m256i; 8] {
        // SAFETY: promised by the caller.
        unsafe { levels(block, &IQ4_LEVELS, 0) }
    }
}

impl Quants for LevelsMx {
    const RANGE: [f32; 2] = [0.0, 24.0];
    const BYTES: usize = 256;
    const SIGNED: bool = false;
    const RUN: usize = 4;
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(block: *const u8) -> [__m256i; 8] {
        // SAFETY: promised by the caller.
        unsafe { levels(block, &MXFP4_LEVELS, MX_OFFSET as i8) }
    }
}

/// Eight `f16` of an array over the rows.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn halves(array: *const u8, half: usize) -> __m256 {
    // SAFETY: promised by the caller.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(array.add(16 * half).cast())) }
}

/// Eight bytes of an array over the rows.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn bytes(array: *const u8, half: usize) -> __m256i {
    // SAFETY: promised by the caller.
    unsafe { _mm256_cvtepu8_epi32(_mm_loadl_epi64(array.add(8 * half).cast())) }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn minus(offset: i32, d: __m256) -> __m256 {
    _mm256_mul_ps(_mm256_set1_ps(-(offset as f32)), d)
}

/// `d s`
#[inline]
#[target_feature(enable = "avx2,fma")]
fn scaled(d: __m256, s: __m256i) -> __m256 {
    _mm256_mul_ps(d, _mm256_cvtepi32_ps(s))
}

/// A word of 32 bits of eight rows, of those that start at the address.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn words(at: *const u8, index: usize, half: usize) -> __m256i {
    // SAFETY: promised by the caller.
    unsafe { _mm256_loadu_si256(at.add(64 * index + 32 * half).cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn right(a: __m256i, bits: usize) -> __m256i {
    _mm256_srl_epi32(a, _mm_cvtsi64_si128(bits as i64))
}

#[inline]
#[target_feature(enable = "avx2")]
fn left(a: __m256i, bits: usize) -> __m256i {
    _mm256_sll_epi32(a, _mm_cvtsi64_si128(bits as i64))
}

impl<const OFFSET: i32> Scales for Half<OFFSET> {
    const BYTES: usize = 32;
    const HALVES: bool = false;
    const MINIMUM: bool = OFFSET != 0;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(scales: *const u8, _block: usize, half: usize) -> Affine {
        // SAFETY: promised by the caller.
        let d = unsafe { halves(scales, half) };
        Affine { d: [d; 2], m: [minus(OFFSET, d); 2] }
    }
}

impl Scales for HalfMinimum {
    const BYTES: usize = 64;
    const HALVES: bool = false;
    const MINIMUM: bool = true;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(scales: *const u8, _block: usize, half: usize) -> Affine {
        // SAFETY: promised by the caller.
        unsafe { Affine { d: [halves(scales, half); 2], m: [halves(scales.add(32), half); 2] } }
    }
}

impl Scales for Exponent {
    const BYTES: usize = 16;
    const HALVES: bool = false;
    const MINIMUM: bool = true;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(scales: *const u8, _block: usize, half: usize) -> Affine {
        // SAFETY: promised by the caller.
        let exponent = unsafe { bytes(scales, half) };
        // 2^(e - 128); the two smallest, which f32 holds as subnormals, become 0.
        let one = _mm256_set1_epi32(1);
        let bits = _mm256_slli_epi32::<23>(_mm256_sub_epi32(_mm256_max_epi32(exponent, one), one));
        let d = _mm256_castsi256_ps(bits);
        Affine { d: [d; 2], m: [minus(MX_OFFSET, d); 2] }
    }
}

impl Scales for SixPair {
    const BYTES: usize = 64 + 192;
    const HALVES: bool = false;
    const MINIMUM: bool = true;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(scales: *const u8, block: usize, half: usize) -> Affine {
        let number = |i: usize| {
            // SAFETY: promised by the caller: three words of every row.
            let word = |w: usize| unsafe { words(scales.add(64), w, half) };
            if i < 15 {
                return _mm256_and_si256(right(word(i / 5), 6 * (i % 5)), _mm256_set1_epi32(63));
            }
            let high = left(right(word(2), 30), 4);
            let low = or_masked(right(word(0), 30), right(word(1), 28), _mm256_set1_epi32(12));
            _mm256_or_si256(high, low)
        };
        // SAFETY: promised by the caller.
        let (d, dm) = unsafe { (halves(scales, half), halves(scales.add(32), half)) };
        let (d, m) = (scaled(d, number(block)), scaled(minus(1, dm), number(8 + block)));
        Affine { d: [d; 2], m: [m; 2] }
    }
}

impl Scales for SixTwice {
    const BYTES: usize = 32 + 192;
    const HALVES: bool = true;
    const MINIMUM: bool = true;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(scales: *const u8, block: usize, half: usize) -> Affine {
        // SAFETY: promised by the caller: three words of every row.
        let word = |w: usize| unsafe { words(scales.add(32), w, half) };
        // The number is brought to the top of its half of the word.
        let top = match block {
            0..3 => word(block),
            3..6 => _mm256_slli_epi16::<6>(word(block - 3)),
            _ => {
                let low = _mm256_sll_epi16(word(2), _mm_cvtsi64_si128(10 - 2 * (block as i64 - 6)));
                or_masked(_mm256_slli_epi16::<12>(word(block - 6)), low, _mm256_set1_epi16(0x0c00))
            }
        };
        // SAFETY: promised by the caller.
        let d = unsafe { halves(scales, half) };
        let d = [scaled(d, _mm256_srai_epi32::<26>(left(top, 16))), scaled(d, _mm256_srai_epi32::<26>(top))];
        Affine { d, m: [minus(4, d[0]), minus(4, d[1])] }
    }
}

impl Scales for ByteTwice {
    const BYTES: usize = 32 + 256;
    const HALVES: bool = true;
    const MINIMUM: bool = true;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(scales: *const u8, block: usize, half: usize) -> Affine {
        // SAFETY: promised by the caller.
        let (d, s, t) = unsafe {
            let at = scales.add(32 + 32 * block + 8 * half);
            let signed = |at: *const u8| _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast()));
            (halves(scales, half), signed(at), signed(at.add(16)))
        };
        let d = [scaled(d, s), scaled(d, t)];
        Affine { d, m: [minus(32, d[0]), minus(32, d[1])] }
    }
}

impl Scales for NibbleTwice {
    const BYTES: usize = 64 + 256;
    const HALVES: bool = true;
    const MINIMUM: bool = true;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(scales: *const u8, block: usize, half: usize) -> Affine {
        // SAFETY: promised by the caller: four words of every row.
        let (d, dm, s, t) = unsafe {
            let word = |w: usize, bits: usize| right(words(scales.add(64), w + block / 4, half), bits);
            let (s, t) = (word(0, 4 * (block % 4)), word(2, 16 * (block % 2) + 4 * (block / 2 % 2)));
            (halves(scales, half), halves(scales.add(32), half), s, t)
        };
        let low = |a| _mm256_and_si256(a, _mm256_set1_epi32(15));
        let dm = minus(1, dm);
        Affine {
            d: [scaled(d, low(s)), scaled(d, low(right(s, 16)))],
            m: [scaled(dm, low(t)), scaled(dm, low(right(t, 8)))],
        }
    }
}

impl Scales for Six {
    const BYTES: usize = 32 + 96;
    const HALVES: bool = false;
    const MINIMUM: bool = false;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(scales: *const u8, block: usize, half: usize) -> Affine {
        // SAFETY: promised by the caller: a word of 32 bits and one of 16 bits of every row.
        let (d, long, short) = unsafe {
            let short = _mm_loadu_si128(scales.add(96 + 16 * half).cast());
            (halves(scales, half), words(scales.add(32), 0, half), _mm256_cvtepu16_epi32(short))
        };
        // The number is brought to the top of its lane.
        let top = match block {
            0..5 => left(long, 24 - 6 * block),
            5..7 => left(short, 22 - 6 * (block - 5)),
            _ => or_masked(left(short, 28), left(long, 26), _mm256_set1_epi32(0x0c00_0000)),
        };
        Affine { d: [scaled(d, _mm256_srai_epi32::<26>(top)); 2], m: [_mm256_setzero_ps(); 2] }
    }
}

//! Taking packed cells apart with AVX-512 (the layouts are drawn in [`format`](super::format)).
//!
//! Every type becomes the same thing: eight vectors of unsigned bytes, and per block (or half block) the `d` and `m`
//! of sixteen rows, so that a weight is `d q + m`. Where eight blocks share scales, `d` and `m` are products of those,
//! the *head*, and of small integers, the *steps*: kernels that sum over a cell multiply with the head once.

use std::arch::x86_64::*;

use quadriga_graph::blocks::{IQ4_LEVELS, MXFP4_LEVELS};

/// `d` and `m` of sixteen rows, for columns 0..16 and 16..32 of a block; both the same where a block has one scale.
#[derive(Clone, Copy)]
pub(super) struct Affine {
    pub(super) d: [__m512; 2],
    pub(super) m: [__m512; 2],
}

/// A way to store quants.
pub(super) trait Quants {
    const BYTES: usize;
    /// The least and the largest quant.
    const RANGE: [f32; 2];
    /// Reads the `BYTES` bytes of a block.
    ///
    /// # Safety
    /// They must be readable, and the CPU must have AVX-512.
    unsafe fn load(block: *const u8) -> [__m512i; 8];
}

/// A way to store scales.
pub(super) trait Scales {
    /// Bytes of a cell's scales.
    const BYTES: usize;
    /// Whether the two halves of a block have scales of their own.
    const HALVES: bool;
    /// Whether the steps of two half blocks can be read as two 16-bit integers.
    const PAIRS: bool = false;
    /// Whether the steps of `m` can be read as bytes.
    const BYTES_OF_M: bool = false;

    /// What the steps of `d` and `m` are to be multiplied with; ones where the steps are `d` and `m` themselves.
    ///
    /// # Safety
    /// `BYTES` bytes must be readable, and the CPU must have AVX-512.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn head(_scales: *const u8) -> [__m512; 2] {
        [_mm512_set1_ps(1.0); 2]
    }

    /// The steps of a block of the cell whose scales start at the address.
    ///
    /// # Safety
    /// As [`Scales::head`].
    unsafe fn steps(scales: *const u8, block: usize) -> Affine;

    /// The steps of `d` as 16-bit integers: of columns 0..16 in the low half of each lane, of 16..32 in the high half.
    /// Those of `m` are the same unless they can be read as bytes. Zeros unless there are [`PAIRS`](Scales::PAIRS).
    ///
    /// # Safety
    /// As [`Scales::head`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn pairs(_scales: *const u8, _block: usize) -> __m512i {
        _mm512_setzero_si512()
    }

    /// The steps of `m` of a whole cell as bytes: byte i of vector v is that of half block 4 v + i. Zeros unless there
    /// are [`BYTES_OF_M`](Scales::BYTES_OF_M).
    ///
    /// # Safety
    /// As [`Scales::head`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,gfni,f16c")]
    unsafe fn bytes_of_m(_scales: *const u8) -> [__m512i; 4] {
        [_mm512_setzero_si512(); 4]
    }
}

/// A packed type: cells of `BLOCKS` blocks.
pub(super) struct Cell<Q, S, const BLOCKS: usize>(std::marker::PhantomData<(Q, S)>);

/// What a kernel needs to know of a packed type.
pub(super) trait Packed {
    const BLOCKS: usize;
    const BYTES: usize;
    const RANGE: [f32; 2];
    const HALVES: bool;
    const PAIRS: bool;
    type Scales: Scales;
    /// # Safety
    /// The cell must be readable, `block < BLOCKS`, and the CPU must have AVX-512.
    unsafe fn quants(cell: *const u8, block: usize) -> [__m512i; 8];
    /// `d` and `m` of a block.
    ///
    /// # Safety
    /// As [`Packed::quants`].
    unsafe fn scales(cell: *const u8, block: usize) -> Affine;
    /// Where the scales of a cell start.
    fn scales_of(cell: *const u8) -> *const u8;
}

impl<Q: Quants, S: Scales, const BLOCKS: usize> Packed for Cell<Q, S, BLOCKS> {
    const BLOCKS: usize = BLOCKS;
    const BYTES: usize = BLOCKS * Q::BYTES + S::BYTES;
    const RANGE: [f32; 2] = Q::RANGE;
    const HALVES: bool = S::HALVES;
    const PAIRS: bool = S::PAIRS;
    type Scales = S;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,f16c")]
    unsafe fn quants(cell: *const u8, block: usize) -> [__m512i; 8] {
        // SAFETY: the block lies inside the cell.
        unsafe { Q::load(cell.add(block * Q::BYTES)) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn scales(cell: *const u8, block: usize) -> Affine {
        // SAFETY: the scales follow the quants of all blocks.
        unsafe {
            let steps = S::steps(Self::scales_of(cell), block);
            if BLOCKS == 1 {
                return steps;
            }
            let [d, m] = S::head(Self::scales_of(cell));
            Affine { d: steps.d.map(|s| _mm512_mul_ps(d, s)), m: steps.m.map(|s| _mm512_mul_ps(m, s)) }
        }
    }

    #[inline]
    fn scales_of(cell: *const u8) -> *const u8 {
        cell.wrapping_add(BLOCKS * Q::BYTES)
    }
}

pub(super) struct Byte;
pub(super) struct Nibble;
pub(super) struct NibbleOne;
pub(super) struct NibbleTwo;
pub(super) struct Two;
pub(super) struct Three;
/// Nibbles that stand for the levels of IQ4, offset by 128.
pub(super) struct LevelsIq4;
/// Nibbles that stand for the levels of MXFP4, offset by 12.
pub(super) struct LevelsMx;

/// What is added to the levels of MXFP4 to make them unsigned.
pub(super) const MX_OFFSET: i32 = 12;

/// One `f16` scale for a block; quants are offset by `OFFSET`.
pub(super) struct Half<const OFFSET: i32>;
pub(super) struct HalfMinimum;
/// Powers of two, halved; quants are offset by [`MX_OFFSET`].
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
pub(super) type Q8_0 = Cell<Byte, Half<128>, 1>;
pub(super) type Q2K = Cell<Two, NibbleTwice, 8>;
pub(super) type Q3K = Cell<Three, SixTwice, 8>;
pub(super) type Q4K = Cell<Nibble, SixPair, 8>;
pub(super) type Q5K = Cell<NibbleOne, SixPair, 8>;
pub(super) type Q6K = Cell<NibbleTwo, ByteTwice, 8>;
pub(super) type Iq4Nl = Cell<LevelsIq4, Half<128>, 1>;
pub(super) type Iq4Xs = Cell<LevelsIq4, Six, 8>;
pub(super) type Mxfp4 = Cell<LevelsMx, Exponent, 1>;

/// Calls `$function::<P>($arguments)` with the packed type of a dtype; does nothing for other types.
macro_rules! with_packed {
    ($dtype:expr, $function:ident ( $($argument:expr),* )) => {
        match $dtype {
            DType::Q4_0 => $function::<unpack::Q4_0>($($argument),*),
            DType::Q4_1 => $function::<unpack::Q4_1>($($argument),*),
            DType::Q5_0 => $function::<unpack::Q5_0>($($argument),*),
            DType::Q5_1 => $function::<unpack::Q5_1>($($argument),*),
            DType::Q8_0 => $function::<unpack::Q8_0>($($argument),*),
            DType::Q2_K => $function::<unpack::Q2K>($($argument),*),
            DType::Q3_K => $function::<unpack::Q3K>($($argument),*),
            DType::Q4_K => $function::<unpack::Q4K>($($argument),*),
            DType::Q5_K => $function::<unpack::Q5K>($($argument),*),
            DType::Q6_K => $function::<unpack::Q6K>($($argument),*),
            DType::IQ4_NL => $function::<unpack::Iq4Nl>($($argument),*),
            DType::IQ4_XS => $function::<unpack::Iq4Xs>($($argument),*),
            DType::MXFP4 => $function::<unpack::Mxfp4>($($argument),*),
            _ => {}
        }
    };
}
pub(super) use with_packed;

#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn vector(block: *const u8, index: usize) -> __m512i {
    // SAFETY: promised by the caller.
    unsafe { _mm512_loadu_si512(block.add(64 * index).cast()) }
}

/// The linear map of the bits of a byte that moves `count` bits from bit `from` to bit `to`, for each of the parts.
const fn moving(parts: [(usize, usize, usize); 2]) -> i64 {
    let mut rows = [0_u8; 8];
    let mut part = 0;
    while part < 2 {
        #[expect(clippy::indexing_slicing, reason = "part < 2; bits of a byte are below 8")]
        {
            let (from, to, count) = parts[part];
            let mut i = 0;
            while i < count {
                // The row for bit 0 is the last.
                rows[7 - (to + i)] = 1 << (from + i);
                i += 1;
            }
        }
        part += 1;
    }
    i64::from_le_bytes(rows)
}

/// Moves bits of each byte as [`moving`] says; all others become 0.
macro_rules! moved {
    ($a:expr, $first:expr, $second:expr) => {
        _mm512_gf2p8affine_epi64_epi8::<0>($a, _mm512_set1_epi64(const { moving([$first, $second]) }))
    };
}

/// `(a & mask) | (b & !mask)`
#[inline]
#[target_feature(enable = "avx512f")]
fn chosen(a: __m512i, b: __m512i, mask: u8) -> __m512i {
    _mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi8(mask.cast_signed()), a, b)
}

/// `a | (b & mask)` in one instruction.
#[inline]
#[target_feature(enable = "avx512f")]
fn or_masked(a: __m512i, b: __m512i, mask: __m512i) -> __m512i {
    _mm512_ternarylogic_epi32::<0b1111_1000>(a, b, mask)
}

impl Quants for Byte {
    const RANGE: [f32; 2] = [0.0, 255.0];
    const BYTES: usize = 512;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load(block: *const u8) -> [__m512i; 8] {
        // SAFETY: eight vectors of the block.
        std::array::from_fn(|v| unsafe { vector(block, v) })
    }
}

impl Quants for Nibble {
    const RANGE: [f32; 2] = [0.0, 15.0];
    const BYTES: usize = 256;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,gfni")]
    unsafe fn load(block: *const u8) -> [__m512i; 8] {
        let mask = _mm512_set1_epi8(15);
        // SAFETY: four vectors of the block.
        let [a, b, c, d]: [__m512i; 4] = std::array::from_fn(|v| unsafe { vector(block, v) });
        let low = |v| _mm512_and_si512(v, mask);
        let high = |v| moved!(v, (4, 0, 4), (0, 0, 0));
        [low(a), low(b), low(c), low(d), high(a), high(b), high(c), high(d)]
    }
}

impl Quants for NibbleOne {
    const RANGE: [f32; 2] = [0.0, 31.0];
    const BYTES: usize = 320;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,gfni")]
    unsafe fn load(block: *const u8) -> [__m512i; 8] {
        // SAFETY: the nibbles come first, then one vector of fifth bits.
        let ([a, b, c, d], bits): ([__m512i; 4], _) =
            unsafe { (std::array::from_fn(|v| vector(block, v)), vector(block, 4)) };
        let low = |v| chosen(v, bits, 0x0f);
        let high = |v| chosen(v, bits, 0xf0);
        [
            moved!(low(a), (0, 0, 4), (4, 4, 1)),
            moved!(low(b), (0, 0, 4), (5, 4, 1)),
            moved!(low(c), (0, 0, 4), (6, 4, 1)),
            moved!(low(d), (0, 0, 4), (7, 4, 1)),
            moved!(high(a), (4, 0, 4), (0, 4, 1)),
            moved!(high(b), (4, 0, 4), (1, 4, 1)),
            moved!(high(c), (4, 0, 4), (2, 4, 1)),
            moved!(high(d), (4, 0, 4), (3, 4, 1)),
        ]
    }
}

impl Quants for NibbleTwo {
    const RANGE: [f32; 2] = [0.0, 63.0];
    const BYTES: usize = 384;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,gfni")]
    unsafe fn load(block: *const u8) -> [__m512i; 8] {
        // SAFETY: the nibbles come first, then two vectors of high bits.
        let [a, b, c, d, first, second]: [__m512i; 6] = std::array::from_fn(|v| unsafe { vector(block, v) });
        let low = |v, bits| chosen(v, bits, 0x0f);
        let high = |v, bits| chosen(v, bits, 0xf0);
        [
            moved!(low(a, first), (0, 0, 4), (4, 4, 2)),
            moved!(low(b, first), (0, 0, 4), (6, 4, 2)),
            moved!(low(c, second), (0, 0, 4), (4, 4, 2)),
            moved!(low(d, second), (0, 0, 4), (6, 4, 2)),
            moved!(high(a, first), (4, 0, 4), (0, 4, 2)),
            moved!(high(b, first), (4, 0, 4), (2, 4, 2)),
            moved!(high(c, second), (4, 0, 4), (0, 4, 2)),
            moved!(high(d, second), (4, 0, 4), (2, 4, 2)),
        ]
    }
}

impl Quants for Two {
    const RANGE: [f32; 2] = [0.0, 3.0];
    const BYTES: usize = 128;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,gfni")]
    unsafe fn load(block: *const u8) -> [__m512i; 8] {
        // SAFETY: two vectors of the block.
        let (a, b) = unsafe { (vector(block, 0), vector(block, 1)) };
        let mask = _mm512_set1_epi8(3);
        [
            _mm512_and_si512(a, mask),
            moved!(a, (2, 0, 2), (0, 0, 0)),
            moved!(a, (4, 0, 2), (0, 0, 0)),
            moved!(a, (6, 0, 2), (0, 0, 0)),
            _mm512_and_si512(b, mask),
            moved!(b, (2, 0, 2), (0, 0, 0)),
            moved!(b, (4, 0, 2), (0, 0, 0)),
            moved!(b, (6, 0, 2), (0, 0, 0)),
        ]
    }
}

impl Quants for Three {
    const RANGE: [f32; 2] = [0.0, 7.0];
    const BYTES: usize = 192;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,gfni")]
    unsafe fn load(block: *const u8) -> [__m512i; 8] {
        // SAFETY: three vectors of the block.
        let (a, b, c) = unsafe { (vector(block, 0), vector(block, 1), vector(block, 2)) };
        let mask = _mm512_set1_epi8(7);
        [
            _mm512_and_si512(a, mask),
            _mm512_and_si512(b, mask),
            _mm512_and_si512(c, mask),
            moved!(a, (3, 0, 3), (0, 0, 0)),
            moved!(b, (3, 0, 3), (0, 0, 0)),
            moved!(c, (5, 0, 3), (0, 0, 0)),
            moved!(chosen(a, c, 0xc0), (6, 0, 2), (3, 2, 1)),
            moved!(chosen(b, c, 0xc0), (6, 0, 2), (4, 2, 1)),
        ]
    }
}

/// Nibbles looked up in a table of bytes. Only the low bits of an index count: four copies of the table let the other
/// nibble of the byte be whatever it is.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
unsafe fn levels(block: *const u8, table: [i8; 16]) -> [__m512i; 8] {
    // SAFETY: promised by the caller: four vectors; the table is 16 bytes long.
    let ([a, b, c, d], table): ([__m512i; 4], _) =
        unsafe { (std::array::from_fn(|v| vector(block, v)), _mm_loadu_si128(table.as_ptr().cast())) };
    let table = _mm512_broadcast_i32x4(table);
    let low = |v| _mm512_permutexvar_epi8(v, table);
    let high = |v| _mm512_permutexvar_epi8(_mm512_srli_epi16::<4>(v), table);
    [low(a), low(b), low(c), low(d), high(a), high(b), high(c), high(d)]
}

const fn offset_levels(levels: [i8; 16], offset: i32) -> [i8; 16] {
    let mut out = [0; 16];
    let mut i = 0;
    while i < 16 {
        #[expect(clippy::indexing_slicing, reason = "i < 16")]
        {
            out[i] = (levels[i] as i32 + offset) as u8 as i8;
        }
        i += 1;
    }
    out
}

impl Quants for LevelsIq4 {
    const RANGE: [f32; 2] = [1.0, 241.0];
    const BYTES: usize = 256;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    unsafe fn load(block: *const u8) -> [__m512i; 8] {
        // SAFETY: promised by the caller.
        unsafe { levels(block, const { offset_levels(IQ4_LEVELS, 128) }) }
    }
}

impl Quants for LevelsMx {
    const RANGE: [f32; 2] = [0.0, 24.0];
    const BYTES: usize = 256;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    unsafe fn load(block: *const u8) -> [__m512i; 8] {
        // SAFETY: promised by the caller.
        unsafe { levels(block, const { offset_levels(MXFP4_LEVELS, MX_OFFSET) }) }
    }
}

/// Sixteen `f16` as `f32`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn halves(at: *const u8) -> __m512 {
    // SAFETY: promised by the caller.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}

/// `-offset × d`
#[inline]
#[target_feature(enable = "avx512f")]
fn minus(offset: i32, d: __m512) -> __m512 {
    _mm512_mul_ps(_mm512_set1_ps(-(offset as f32)), d)
}

/// A word of 32 bits of every row, of those that start at the address.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn words(at: *const u8, index: usize) -> __m512i {
    // SAFETY: promised by the caller.
    unsafe { vector(at, index) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn right(a: __m512i, bits: usize) -> __m512i {
    _mm512_srl_epi32(a, _mm_cvtsi64_si128(bits as i64))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn left(a: __m512i, bits: usize) -> __m512i {
    _mm512_sll_epi32(a, _mm_cvtsi64_si128(bits as i64))
}

/// The signed numbers in the six highest bits of each lane.
#[inline]
#[target_feature(enable = "avx512f")]
fn highest_six(a: __m512i) -> __m512 {
    _mm512_cvtepi32_ps(_mm512_srai_epi32::<26>(a))
}

/// As the numbers in the low and the high half of each lane, which are signed.
#[inline]
#[target_feature(enable = "avx512f")]
fn halves_of(pairs: __m512i) -> [__m512; 2] {
    let low = _mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(pairs));
    [_mm512_cvtepi32_ps(low), _mm512_cvtepi32_ps(_mm512_srai_epi32::<16>(pairs))]
}

impl<const OFFSET: i32> Scales for Half<OFFSET> {
    const BYTES: usize = 32;
    const HALVES: bool = false;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn steps(scales: *const u8, _block: usize) -> Affine {
        // SAFETY: promised by the caller.
        let d = unsafe { halves(scales) };
        Affine { d: [d; 2], m: [minus(OFFSET, d); 2] }
    }
}

impl Scales for HalfMinimum {
    const BYTES: usize = 64;
    const HALVES: bool = false;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn steps(scales: *const u8, _block: usize) -> Affine {
        // SAFETY: promised by the caller.
        unsafe { Affine { d: [halves(scales); 2], m: [halves(scales.add(32)); 2] } }
    }
}

impl Scales for Exponent {
    const BYTES: usize = 16;
    const HALVES: bool = false;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn steps(scales: *const u8, _block: usize) -> Affine {
        // SAFETY: promised by the caller.
        let exponent = unsafe { _mm_loadu_si128(scales.cast()) };
        // 2^(e - 128); the two smallest, which f32 holds as subnormals, become 0.
        let exponent = _mm512_cvtepu8_epi32(_mm_subs_epu8(exponent, _mm_set1_epi8(1)));
        let d = _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent));
        Affine { d: [d; 2], m: [minus(MX_OFFSET, d); 2] }
    }
}

impl Scales for SixPair {
    const BYTES: usize = 64 + 192;
    const HALVES: bool = false;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn head(scales: *const u8) -> [__m512; 2] {
        // SAFETY: promised by the caller.
        unsafe { [halves(scales), minus(1, halves(scales.add(32)))] }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn steps(scales: *const u8, block: usize) -> Affine {
        let number = |i: usize| {
            // SAFETY: promised by the caller: three words of every row.
            let word = |w: usize| unsafe { words(scales.add(64), w) };
            let bits = if i < 15 {
                _mm512_and_si512(right(word(i / 5), 6 * (i % 5)), _mm512_set1_epi32(63))
            } else {
                let high = _mm512_slli_epi32::<4>(right(word(2), 30));
                let middle = _mm512_srli_epi32::<28>(word(1));
                let low = or_masked(high, middle, _mm512_set1_epi32(12));
                _mm512_or_si512(low, right(word(0), 30))
            };
            _mm512_cvtepi32_ps(bits)
        };
        Affine { d: [number(block); 2], m: [number(8 + block); 2] }
    }
}

impl Scales for SixTwice {
    const BYTES: usize = 32 + 192;
    const HALVES: bool = true;
    const PAIRS: bool = true;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn head(scales: *const u8) -> [__m512; 2] {
        // SAFETY: promised by the caller.
        let d = unsafe { halves(scales) };
        [d, minus(4, d)]
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn steps(scales: *const u8, block: usize) -> Affine {
        // SAFETY: promised by the caller.
        let steps = halves_of(unsafe { Self::pairs(scales, block) });
        Affine { d: steps, m: steps }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn pairs(scales: *const u8, block: usize) -> __m512i {
        // SAFETY: promised by the caller: three words of every row.
        let word = |w: usize| unsafe { words(scales.add(32), w) };
        // The number is brought to the top of its half.
        let top = match block {
            0..3 => word(block),
            3..6 => _mm512_slli_epi16::<6>(word(block - 3)),
            _ => {
                let low = _mm512_sll_epi16(word(2), _mm_cvtsi64_si128(10 - 2 * (block as i64 - 6)));
                or_masked(_mm512_slli_epi16::<12>(word(block - 6)), low, _mm512_set1_epi16(0x0c00))
            }
        };
        _mm512_srai_epi16::<10>(top)
    }
}

impl Scales for ByteTwice {
    const BYTES: usize = 32 + 256;
    const HALVES: bool = true;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn head(scales: *const u8) -> [__m512; 2] {
        // SAFETY: promised by the caller.
        let d = unsafe { halves(scales) };
        [d, minus(32, d)]
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn steps(scales: *const u8, block: usize) -> Affine {
        // SAFETY: promised by the caller.
        let steps = [0, 16].map(|half| unsafe {
            let at = scales.add(32 + 32 * block + half);
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast())))
        });
        Affine { d: steps, m: steps }
    }
}

impl Scales for NibbleTwice {
    const BYTES: usize = 64 + 256;
    const HALVES: bool = true;
    const PAIRS: bool = true;
    const BYTES_OF_M: bool = true;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn head(scales: *const u8) -> [__m512; 2] {
        // SAFETY: promised by the caller.
        unsafe { [halves(scales), minus(1, halves(scales.add(32)))] }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn steps(scales: *const u8, block: usize) -> Affine {
        // SAFETY: promised by the caller.
        let (s, t) = unsafe {
            let t = words(scales.add(64), 2 + block / 4);
            (Self::pairs(scales, block), right(t, 16 * (block % 2) + 4 * (block / 2 % 2)))
        };
        let four = |a| _mm512_cvtepi32_ps(_mm512_and_si512(a, _mm512_set1_epi32(15)));
        Affine { d: halves_of(s), m: [four(t), four(_mm512_srli_epi32::<8>(t))] }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn pairs(scales: *const u8, block: usize) -> __m512i {
        // SAFETY: promised by the caller: four words of every row.
        let word = unsafe { words(scales.add(64), block / 4) };
        let number = _mm512_srl_epi16(word, _mm_cvtsi64_si128(4 * (block as i64 % 4)));
        if block % 4 == 3 { number } else { _mm512_and_si512(number, _mm512_set1_epi16(15)) }
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,gfni,f16c")]
    unsafe fn bytes_of_m(scales: *const u8) -> [__m512i; 4] {
        // SAFETY: promised by the caller: four words of every row.
        let (a, b) = unsafe { (words(scales.add(64), 2), words(scales.add(64), 3)) };
        let low = |v| _mm512_and_si512(v, _mm512_set1_epi8(15));
        let high = |v| moved!(v, (4, 0, 4), (0, 0, 0));
        [low(a), high(a), low(b), high(b)]
    }
}

impl Scales for Six {
    const BYTES: usize = 32 + 96;
    const HALVES: bool = false;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn head(scales: *const u8) -> [__m512; 2] {
        // SAFETY: promised by the caller.
        let d = unsafe { halves(scales) };
        [d, minus(128, d)]
    }
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn steps(scales: *const u8, block: usize) -> Affine {
        // SAFETY: promised by the caller: a word of 32 bits and one of 16 bits of every row.
        let (long, short) = unsafe {
            let short = _mm256_loadu_si256(scales.add(96).cast());
            (words(scales.add(32), 0), _mm512_cvtepu16_epi32(short))
        };
        // The number is brought to the top of its lane.
        let top = match block {
            0..5 => left(long, 24 - 6 * block),
            5..7 => left(short, 22 - 6 * (block - 5)),
            _ => or_masked(left(short, 28), left(long, 26), _mm512_set1_epi32(0x0c00_0000)),
        };
        Affine { d: [highest_six(top); 2], m: [highest_six(top); 2] }
    }
}

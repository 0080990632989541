//! Taking packed cells apart with AVX-512 (the layouts are drawn in [`format`](super::format)).
//!
//! Every type becomes the same thing: eight vectors of unsigned bytes, and per block (or half block) the `d` and `m`
//! of sixteen rows, so that a weight is `d q + m`.

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
    /// Bytes at the head, and for each block.
    const HEAD: usize;
    const EACH: usize;
    /// Whether the two halves of a block have scales of their own.
    const HALVES: bool;
    /// Reads the scales of a block of the cell whose scales start at the address.
    ///
    /// # Safety
    /// `HEAD + (block + 1) × EACH` bytes must be readable, and the CPU must have AVX-512.
    unsafe fn load(scales: *const u8, block: usize) -> Affine;
}

/// A packed type: cells of `BLOCKS` blocks.
pub(super) struct Cell<Q, S, const BLOCKS: usize>(std::marker::PhantomData<(Q, S)>);

/// What a kernel needs to know of a packed type.
pub(super) trait Packed {
    const BLOCKS: usize;
    const BYTES: usize;
    const RANGE: [f32; 2];
    const HALVES: bool;
    /// # Safety
    /// The cell must be readable, `block < BLOCKS`, and the CPU must have AVX-512.
    unsafe fn quants(cell: *const u8, block: usize) -> [__m512i; 8];
    /// # Safety
    /// As [`Packed::quants`].
    unsafe fn scales(cell: *const u8, block: usize) -> Affine;
}

impl<Q: Quants, S: Scales, const BLOCKS: usize> Packed for Cell<Q, S, BLOCKS> {
    const BLOCKS: usize = BLOCKS;
    const BYTES: usize = BLOCKS * (Q::BYTES + S::EACH) + S::HEAD;
    const RANGE: [f32; 2] = Q::RANGE;
    const HALVES: bool = S::HALVES;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn quants(cell: *const u8, block: usize) -> [__m512i; 8] {
        // SAFETY: the block lies inside the cell.
        unsafe { Q::load(cell.add(block * Q::BYTES)) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    unsafe fn scales(cell: *const u8, block: usize) -> Affine {
        // SAFETY: the scales follow the quants of all blocks.
        unsafe { S::load(cell.add(BLOCKS * Q::BYTES), block) }
    }
}

pub(super) struct Byte;
pub(super) struct Nibble;
pub(super) struct NibbleOne;
pub(super) struct NibbleTwo;
pub(super) struct Two;
pub(super) struct TwoOne;
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
pub(super) type Q3K = Cell<TwoOne, SixTwice, 8>;
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

/// `(a >> shift) & mask`, or `a << -shift` for negative shifts, by bytes; bits that cross bytes are masked away.
macro_rules! shifted {
    ($a:expr, $shift:expr) => {{
        let shift: i32 = $shift;
        if shift >= 0 {
            _mm512_srl_epi16($a, _mm_cvtsi32_si128(shift))
        } else {
            _mm512_sll_epi16($a, _mm_cvtsi32_si128(-shift))
        }
    }};
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
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load(block: *const u8) -> [__m512i; 8] {
        let mask = _mm512_set1_epi8(15);
        // SAFETY: four vectors of the block.
        let packed: [__m512i; 4] = std::array::from_fn(|v| unsafe { vector(block, v) });
        let [a, b, c, d] = packed;
        let low = |v| _mm512_and_si512(v, mask);
        let high = |v| _mm512_and_si512(_mm512_srli_epi16::<4>(v), mask);
        [low(a), low(b), low(c), low(d), high(a), high(b), high(c), high(d)]
    }
}

impl Quants for NibbleOne {
    const RANGE: [f32; 2] = [0.0, 31.0];
    const BYTES: usize = 320;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load(block: *const u8) -> [__m512i; 8] {
        // SAFETY: the nibbles come first, then one vector of fifth bits.
        let (mut q, bits) = unsafe { (Nibble::load(block), vector(block, 4)) };
        let mask = _mm512_set1_epi8(16);
        for (v, q) in q.iter_mut().enumerate() {
            *q = or_masked(*q, shifted!(bits, v as i32 - 4), mask);
        }
        q
    }
}

impl Quants for NibbleTwo {
    const RANGE: [f32; 2] = [0.0, 63.0];
    const BYTES: usize = 384;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load(block: *const u8) -> [__m512i; 8] {
        // SAFETY: the nibbles come first, then two vectors of high bits.
        let (mut q, bits) = unsafe { (Nibble::load(block), [vector(block, 4), vector(block, 5)]) };
        let mask = _mm512_set1_epi8(0x30);
        for (v, q) in q.iter_mut().enumerate() {
            let bits = if v < 4 { bits[0] } else { bits[1] };
            *q = or_masked(*q, shifted!(bits, 2 * (v as i32 % 4) - 4), mask);
        }
        q
    }
}

impl Quants for Two {
    const RANGE: [f32; 2] = [0.0, 3.0];
    const BYTES: usize = 128;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load(block: *const u8) -> [__m512i; 8] {
        // SAFETY: two vectors of the block.
        let bits = unsafe { [vector(block, 0), vector(block, 1)] };
        let mask = _mm512_set1_epi8(3);
        std::array::from_fn(|v| {
            let bits = if v < 4 { bits[0] } else { bits[1] };
            _mm512_and_si512(shifted!(bits, 2 * (v as i32 % 4)), mask)
        })
    }
}

impl Quants for TwoOne {
    const RANGE: [f32; 2] = [0.0, 7.0];
    const BYTES: usize = 192;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load(block: *const u8) -> [__m512i; 8] {
        // SAFETY: the pairs of bits come first, then one vector of third bits.
        let (mut q, bits) = unsafe { (Two::load(block), vector(block, 2)) };
        let mask = _mm512_set1_epi8(4);
        for (v, q) in q.iter_mut().enumerate() {
            *q = or_masked(*q, shifted!(bits, v as i32 - 2), mask);
        }
        q
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn levels(block: *const u8, table: [i8; 16]) -> [__m512i; 8] {
    // SAFETY: promised by the caller; the table is 16 bytes long.
    let (q, table) = unsafe { (Nibble::load(block), _mm_loadu_si128(table.as_ptr().cast())) };
    let table = _mm512_broadcast_i32x4(table);
    q.map(|q| _mm512_shuffle_epi8(table, q))
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
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn load(block: *const u8) -> [__m512i; 8] {
        // SAFETY: promised by the caller.
        unsafe { levels(block, const { offset_levels(IQ4_LEVELS, 128) }) }
    }
}

impl Quants for LevelsMx {
    const RANGE: [f32; 2] = [0.0, 24.0];
    const BYTES: usize = 256;
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
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

/// Sixteen bytes as integers.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn bytes(at: *const u8) -> __m512i {
    // SAFETY: promised by the caller.
    unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast())) }
}

/// `-offset × d`
#[inline]
#[target_feature(enable = "avx512f")]
fn minus(offset: i32, d: __m512) -> __m512 {
    _mm512_mul_ps(_mm512_set1_ps(-(offset as f32)), d)
}

/// The pairs of 6-bit numbers of sixteen rows.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn six_pairs(at: *const u8) -> [__m512i; 2] {
    // SAFETY: promised by the caller: 24 bytes.
    let (low, high) = unsafe { (bytes(at), _mm_loadl_epi64(at.add(16).cast())) };
    // Rows 0..8 use the low half of each byte of `high`, rows 8..16 the high half.
    let high = _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(high, _mm_srli_epi16::<4>(high)));
    let four = _mm512_set1_epi32(15);
    let two = _mm512_set1_epi32(0x30);
    [
        or_masked(_mm512_and_si512(low, four), _mm512_slli_epi32::<4>(high), two),
        or_masked(_mm512_srli_epi32::<4>(low), _mm512_slli_epi32::<2>(high), two),
    ]
}

impl<const OFFSET: i32> Scales for Half<OFFSET> {
    const HEAD: usize = 0;
    const EACH: usize = 32;
    const HALVES: bool = false;
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn load(scales: *const u8, _block: usize) -> Affine {
        // SAFETY: promised by the caller.
        let d = unsafe { halves(scales) };
        Affine { d: [d; 2], m: [minus(OFFSET, d); 2] }
    }
}

impl Scales for HalfMinimum {
    const HEAD: usize = 0;
    const EACH: usize = 64;
    const HALVES: bool = false;
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn load(scales: *const u8, _block: usize) -> Affine {
        // SAFETY: promised by the caller.
        unsafe { Affine { d: [halves(scales); 2], m: [halves(scales.add(32)); 2] } }
    }
}

impl Scales for Exponent {
    const HEAD: usize = 0;
    const EACH: usize = 16;
    const HALVES: bool = false;
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn load(scales: *const u8, _block: usize) -> Affine {
        // SAFETY: promised by the caller.
        let exponent = unsafe { bytes(scales) };
        // 2^(e - 128); the two smallest, which f32 holds as subnormals, become 0.
        let one = _mm512_set1_epi32(1);
        let bits = _mm512_slli_epi32::<23>(_mm512_sub_epi32(_mm512_max_epi32(exponent, one), one));
        let d = _mm512_castsi512_ps(bits);
        Affine { d: [d; 2], m: [minus(MX_OFFSET, d); 2] }
    }
}

impl Scales for SixPair {
    const HEAD: usize = 64;
    const EACH: usize = 24;
    const HALVES: bool = false;
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn load(scales: *const u8, block: usize) -> Affine {
        // SAFETY: promised by the caller.
        let (d, dm, [s, t]) =
            unsafe { (halves(scales), halves(scales.add(32)), six_pairs(scales.add(64 + 24 * block))) };
        let d = _mm512_mul_ps(d, _mm512_cvtepi32_ps(s));
        let m = _mm512_fnmadd_ps(dm, _mm512_cvtepi32_ps(t), _mm512_setzero_ps());
        Affine { d: [d; 2], m: [m; 2] }
    }
}

impl Scales for SixTwice {
    const HEAD: usize = 32;
    const EACH: usize = 24;
    const HALVES: bool = true;
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn load(scales: *const u8, block: usize) -> Affine {
        // SAFETY: promised by the caller.
        let (d, pairs) = unsafe { (halves(scales), six_pairs(scales.add(32 + 24 * block))) };
        let d =
            pairs.map(|s| _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_sub_epi32(s, _mm512_set1_epi32(32)))));
        Affine { d, m: d.map(|d| minus(4, d)) }
    }
}

impl Scales for ByteTwice {
    const HEAD: usize = 32;
    const EACH: usize = 32;
    const HALVES: bool = true;
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn load(scales: *const u8, block: usize) -> Affine {
        // SAFETY: promised by the caller.
        let (d, s) = unsafe {
            let at = scales.add(32 + 32 * block);
            (halves(scales), [_mm_loadu_si128(at.cast()), _mm_loadu_si128(at.add(16).cast())])
        };
        let d = s.map(|s| _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(s))));
        Affine { d, m: d.map(|d| minus(32, d)) }
    }
}

impl Scales for NibbleTwice {
    const HEAD: usize = 64;
    const EACH: usize = 32;
    const HALVES: bool = true;
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn load(scales: *const u8, block: usize) -> Affine {
        // SAFETY: promised by the caller.
        let (d, dm, s) = unsafe {
            let at = scales.add(64 + 32 * block);
            (halves(scales), halves(scales.add(32)), [bytes(at), bytes(at.add(16))])
        };
        let four = _mm512_set1_epi32(15);
        Affine {
            d: s.map(|s| _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_and_si512(s, four)))),
            m: s.map(|s| {
                _mm512_fnmadd_ps(dm, _mm512_cvtepi32_ps(_mm512_srli_epi32::<4>(s)), _mm512_setzero_ps())
            }),
        }
    }
}

impl Scales for Six {
    const HEAD: usize = 32;
    const EACH: usize = 12;
    const HALVES: bool = false;
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    unsafe fn load(scales: *const u8, block: usize) -> Affine {
        // SAFETY: promised by the caller: 12 bytes, of which 8 and then 4 are read.
        let (d, low, high) = unsafe {
            let at = scales.add(32 + 12 * block);
            (halves(scales), _mm_loadl_epi64(at.cast()), at.add(8).cast::<i32>().read_unaligned())
        };
        let low = _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(low, _mm_srli_epi16::<4>(low)));
        let low = _mm512_and_si512(low, _mm512_set1_epi32(15));
        // Byte r mod 4 holds the bits of rows r, r + 4, …: shift each copy of the four bytes into place.
        let high = _mm_set_epi32(high >> 2, high, high << 2, high << 4);
        let high = _mm512_cvtepu8_epi32(high);
        let s = or_masked(low, high, _mm512_set1_epi32(0x30));
        let d = _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_sub_epi32(s, _mm512_set1_epi32(32))));
        Affine { d: [d; 2], m: [minus(128, d); 2] }
    }
}

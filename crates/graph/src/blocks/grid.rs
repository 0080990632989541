//! The formats whose elements are indices into a code book: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S.
//!
//! Eight (IQ1, IQ2) or four (IQ3) neighbouring elements are one entry of the code book: a code for each. In IQ2 and IQ3
//! a code stands for a magnitude, and every element has a sign of its own. In IQ1 the codes stand for −1, 0 and 1, and
//! all elements of an entry are shifted up or down by an eighth. With levels that are integers, all seven formats are
//!
//! ```text
//! value = scale × (2 × group scale + 1) × unit × level(code, sign)
//! ```

#![expect(
    clippy::indexing_slicing,
    reason = "indices into code books have as many bits as the book needs; others are taken modulo the length"
)]
#![allow(non_camel_case_types, reason = "the names are those of the file format")]

use bytemuck::{Pod, Zeroable};

use super::block::{Block, block_format};
use super::code_books::{
    IQ1_GRID, IQ2_LEVELS, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_S_LEVELS, IQ3_XXS_GRID,
    IQ3_XXS_LEVELS,
};
use super::half_bytes::HalfBytes;

/// A block of 256 elements that are indices into a code book.
pub trait GridBlock: Block<Values = [f32; 256]> {
    /// The code book: each entry has the codes of [`ENTRY_LEN`](GridBlock::ENTRY_LEN) elements, the first in the
    /// lowest bits.
    const BOOK: &'static [u16];
    /// The elements of an entry: 8 or 4.
    const ENTRY_LEN: usize;
    /// The level of an element, by its code times two plus its sign bit.
    const LEVELS: [i8; 16];
    /// The factor that makes the levels integers: a power of two.
    const UNIT: f32;

    /// The factor of all group scales.
    fn scale(&self) -> HalfBytes;

    /// The index of entry `entry`, modulo the number of entries of a block, in the code book.
    fn index(&self, entry: usize) -> usize;

    /// The sign bits of the eight elements from `8 × octet`, modulo 256, the first in bit 0.
    fn signs(&self, octet: usize) -> u8;

    /// The scale of the sixteen elements from `16 × group`, modulo 256: 0 to 15.
    fn group_scale(&self, group: usize) -> u8;

    /// The level of element `i % 256`.
    #[inline]
    fn level(&self, i: usize) -> i8 {
        let bits = 16 / Self::ENTRY_LEN;
        let entry = Self::BOOK[self.index(i / Self::ENTRY_LEN)];
        let code = usize::from(entry) >> (i % Self::ENTRY_LEN * bits) & ((1 << bits) - 1);
        let sign = usize::from(self.signs(i / 8) >> (i % 8) & 1);
        Self::LEVELS[code << 1 & 15 | sign]
    }
}

/// Dequantizes the 256 elements. All products are exact.
#[inline]
fn dequantize<B: GridBlock>(block: &B, out: &mut [f32; 256]) {
    let scale = block.scale().to_f32();
    for (group, values) in out.chunks_exact_mut(16).enumerate() {
        let group_scale = scale * (2.0 * f32::from(block.group_scale(group)) + 1.0) * B::UNIT;
        for (i, value) in values.iter_mut().enumerate() {
            *value = group_scale * f32::from(block.level(16 * group + i));
        }
    }
}

/// The levels of codes that stand for magnitudes: plus and minus each of them.
const fn signed(magnitudes: &[i8]) -> [i8; 16] {
    let (mut levels, mut code) = ([0; 16], 0);
    while code < magnitudes.len() {
        levels[2 * code] = magnitudes[code];
        levels[2 * code + 1] = -magnitudes[code];
        code += 1;
    }
    levels
}

/// The levels of codes that stand for −1, 0 and 1, in eighths, each shifted up and down by one.
const SHIFTED: [i8; 16] = [-7, -9, 1, -1, 9, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Eight sign bits of which seven are stored: the number of negative signs is even.
fn even_signs(seven: u8) -> u8 {
    let seven = seven & 0x7f;
    seven | (seven.count_ones() as u8 & 1) << 7
}

/// Number `i`, modulo their count, of 4-bit numbers in bytes.
fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 2 % bytes.len()] >> (i % 2 * 4) & 0x0f
}

/// Implements [`Block`] with the generic dequantization.
macro_rules! grid_format {
    ($block:ident, $dtype:ident, 256 elements in $bytes:literal bytes) => {
        block_format!($block, $dtype, 256 elements in $bytes bytes);

        impl $block {
            /// Dequantizes the 256 elements.
            #[inline]
            pub fn dequantize(&self, out: &mut [f32; 256]) {
                dequantize(self, out);
            }
        }
    };
}

/// 2 bits per element, 8 groups of 32 elements.
///
/// ```text
/// byte  0       2                                              66
///       | scale | 8 groups: 4 indices | signs and group scale  |
///       |  f16  |           4 bytes   | 4 × 7 bit, 4 bit       |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIQ2_XXS {
    /// The factor of all group scales.
    pub scale: HalfBytes,
    /// Per group: four indices, then a little-endian number of four times seven signs and, on top, the scale.
    pub groups: [[[u8; 4]; 2]; 8],
}
grid_format!(BlockIQ2_XXS, IQ2_XXS, 256 elements in 66 bytes);

impl GridBlock for BlockIQ2_XXS {
    const BOOK: &'static [u16] = &IQ2_XXS_GRID;
    const ENTRY_LEN: usize = 8;
    const LEVELS: [i8; 16] = signed(&IQ2_LEVELS);
    const UNIT: f32 = 0.125;

    fn scale(&self) -> HalfBytes {
        self.scale
    }

    fn index(&self, entry: usize) -> usize {
        usize::from(self.groups[entry / 4 % 8][0][entry % 4])
    }

    fn signs(&self, octet: usize) -> u8 {
        even_signs((u32::from_le_bytes(self.groups[octet / 4 % 8][1]) >> (octet % 4 * 7)) as u8)
    }

    fn group_scale(&self, group: usize) -> u8 {
        self.groups[group / 2 % 8][1][3] >> 4
    }
}

/// 2.3 bits per element, 16 groups of 16 elements.
///
/// ```text
/// byte  0       2                               66               74
///       | scale | indices and signs             | group scales   |
///       |  f16  | 32 × (9 bit index, 7 bit sign) | 16 × 4 bit    |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIQ2_XS {
    /// The factor of all group scales.
    pub scale: HalfBytes,
    /// Little-endian numbers: the index in bits 0–8, seven signs above.
    pub entries: [[u8; 2]; 32],
    /// The scales of the groups, two per byte.
    pub group_scales: [u8; 8],
}
grid_format!(BlockIQ2_XS, IQ2_XS, 256 elements in 74 bytes);

impl GridBlock for BlockIQ2_XS {
    const BOOK: &'static [u16] = &IQ2_XS_GRID;
    const ENTRY_LEN: usize = 8;
    const LEVELS: [i8; 16] = signed(&IQ2_LEVELS);
    const UNIT: f32 = 0.125;

    fn scale(&self) -> HalfBytes {
        self.scale
    }

    fn index(&self, entry: usize) -> usize {
        usize::from(u16::from_le_bytes(self.entries[entry % 32]) & 511)
    }

    fn signs(&self, octet: usize) -> u8 {
        even_signs(self.entries[octet % 32][1] >> 1)
    }

    fn group_scale(&self, group: usize) -> u8 {
        nibble(&self.group_scales, group)
    }
}

/// 2.5 bits per element, 16 groups of 16 elements.
///
/// ```text
/// byte  0       2             34             66             74             82
///       | scale | indices low | signs        | indices high | group scales |
///       |  f16  | 32 × 8 bit  | 256 × 1 bit  | 32 × 2 bit   | 16 × 4 bit   |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIQ2_S {
    /// The factor of all group scales.
    pub scale: HalfBytes,
    /// The low eight bits of the indices.
    pub indices: [u8; 32],
    /// The signs, one bit per element.
    pub signs: [u8; 32],
    /// The two high bits of the indices, four per byte.
    pub indices_high: [u8; 8],
    /// The scales of the groups, two per byte.
    pub group_scales: [u8; 8],
}
grid_format!(BlockIQ2_S, IQ2_S, 256 elements in 82 bytes);

impl GridBlock for BlockIQ2_S {
    const BOOK: &'static [u16] = &IQ2_S_GRID;
    const ENTRY_LEN: usize = 8;
    const LEVELS: [i8; 16] = signed(&IQ2_LEVELS);
    const UNIT: f32 = 0.125;

    fn scale(&self) -> HalfBytes {
        self.scale
    }

    fn index(&self, entry: usize) -> usize {
        let high = self.indices_high[entry / 4 % 8] >> (entry % 4 * 2) & 3;
        usize::from(self.indices[entry % 32]) | usize::from(high) << 8
    }

    fn signs(&self, octet: usize) -> u8 {
        self.signs[octet % 32]
    }

    fn group_scale(&self, group: usize) -> u8 {
        nibble(&self.group_scales, group)
    }
}

/// 3 bits per element, 8 groups of 32 elements.
///
/// ```text
/// byte  0       2             66                                   98
///       | scale | indices     | 8 groups: signs and group scale    |
///       |  f16  | 64 × 8 bit  |           4 × 7 bit, 4 bit         |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIQ3_XXS {
    /// The factor of all group scales.
    pub scale: HalfBytes,
    /// The indices.
    pub indices: [u8; 64],
    /// Per group: a little-endian number of four times seven signs and, on top, the scale.
    pub groups: [[u8; 4]; 8],
}
grid_format!(BlockIQ3_XXS, IQ3_XXS, 256 elements in 98 bytes);

impl GridBlock for BlockIQ3_XXS {
    const BOOK: &'static [u16] = &IQ3_XXS_GRID;
    const ENTRY_LEN: usize = 4;
    const LEVELS: [i8; 16] = signed(&IQ3_XXS_LEVELS);
    const UNIT: f32 = 0.25;

    fn scale(&self) -> HalfBytes {
        self.scale
    }

    fn index(&self, entry: usize) -> usize {
        usize::from(self.indices[entry % 64])
    }

    fn signs(&self, octet: usize) -> u8 {
        even_signs((u32::from_le_bytes(self.groups[octet / 4 % 8]) >> (octet % 4 * 7)) as u8)
    }

    fn group_scale(&self, group: usize) -> u8 {
        self.groups[group / 2 % 8][3] >> 4
    }
}

/// 3.4 bits per element, 8 groups of 32 elements.
///
/// ```text
/// byte  0       2             66             74             106            110
///       | scale | indices low | indices high | signs        | group scales |
///       |  f16  | 64 × 8 bit  | 64 × 1 bit   | 256 × 1 bit  | 8 × 4 bit    |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIQ3_S {
    /// The factor of all group scales.
    pub scale: HalfBytes,
    /// The low eight bits of the indices.
    pub indices: [u8; 64],
    /// The highest bit of the indices, eight per byte.
    pub indices_high: [u8; 8],
    /// The signs, one bit per element.
    pub signs: [u8; 32],
    /// The scales of the groups, two per byte.
    pub group_scales: [u8; 4],
}
grid_format!(BlockIQ3_S, IQ3_S, 256 elements in 110 bytes);

impl GridBlock for BlockIQ3_S {
    const BOOK: &'static [u16] = &IQ3_S_GRID;
    const ENTRY_LEN: usize = 4;
    const LEVELS: [i8; 16] = signed(&IQ3_S_LEVELS);
    const UNIT: f32 = 1.0;

    fn scale(&self) -> HalfBytes {
        self.scale
    }

    fn index(&self, entry: usize) -> usize {
        let high = self.indices_high[entry / 8 % 8] >> (entry % 8) & 1;
        usize::from(self.indices[entry % 64]) | usize::from(high) << 8
    }

    fn signs(&self, octet: usize) -> u8 {
        self.signs[octet % 32]
    }

    fn group_scale(&self, group: usize) -> u8 {
        nibble(&self.group_scales, group / 2)
    }
}

/// 1.5 bits per element, 8 groups of 32 elements, each shifted as a whole.
///
/// ```text
/// byte  0       2             34                                                   50
///       | scale | indices low | 8 groups: indices high, group scale, shifted down  |
///       |  f16  | 32 × 8 bit  |           4 × 3 bit,    3 bit,       1 bit         |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIQ1_S {
    /// The factor of all group scales.
    pub scale: HalfBytes,
    /// The low eight bits of the indices.
    pub indices: [u8; 32],
    /// Per group, a little-endian number: the three high bits of four indices, the scale, and the direction of the
    /// shift.
    pub groups: [[u8; 2]; 8],
}
grid_format!(BlockIQ1_S, IQ1_S, 256 elements in 50 bytes);

impl GridBlock for BlockIQ1_S {
    const BOOK: &'static [u16] = &IQ1_GRID;
    const ENTRY_LEN: usize = 8;
    const LEVELS: [i8; 16] = SHIFTED;
    const UNIT: f32 = 0.125;

    fn scale(&self) -> HalfBytes {
        self.scale
    }

    fn index(&self, entry: usize) -> usize {
        let high = u16::from_le_bytes(self.groups[entry / 4 % 8]) >> (entry % 4 * 3) & 7;
        usize::from(self.indices[entry % 32]) | usize::from(high) << 8
    }

    fn signs(&self, octet: usize) -> u8 {
        if self.groups[octet / 4 % 8][1] & 0x80 == 0 { 0 } else { 0xff }
    }

    fn group_scale(&self, group: usize) -> u8 {
        self.groups[group / 2 % 8][1] >> 4 & 7
    }
}

/// 1.75 bits per element, 16 groups of 16 elements, of which each half is shifted as a whole.
///
/// ```text
/// byte  0             32                                        48                                       56
///       | indices low | 32 entries: indices high, shifted down  | 4 times: group scales, bits of scale  |
///       | 32 × 8 bit  |             3 bit,        1 bit         |          4 × 3 bit,    4 bit          |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockIQ1_M {
    /// The low eight bits of the indices.
    pub indices: [u8; 32],
    /// Per entry, two to a byte: the three high bits of the index, and the direction of the shift.
    pub indices_high: [u8; 16],
    /// Four little-endian numbers: the scales of four groups, and on top four bits of the f16 factor of all group
    /// scales, the lowest first.
    pub group_scales: [[u8; 2]; 4],
}
grid_format!(BlockIQ1_M, IQ1_M, 256 elements in 56 bytes);

impl GridBlock for BlockIQ1_M {
    const BOOK: &'static [u16] = &IQ1_GRID;
    const ENTRY_LEN: usize = 8;
    const LEVELS: [i8; 16] = SHIFTED;
    const UNIT: f32 = 0.125;

    fn scale(&self) -> HalfBytes {
        let [a, b, c, d] = self.group_scales.map(|bytes| bytes[1] >> 4);
        HalfBytes([a | b << 4, c | d << 4])
    }

    fn index(&self, entry: usize) -> usize {
        let high = nibble(&self.indices_high, entry) & 7;
        usize::from(self.indices[entry % 32]) | usize::from(high) << 8
    }

    fn signs(&self, octet: usize) -> u8 {
        if nibble(&self.indices_high, octet) & 8 == 0 { 0 } else { 0xff }
    }

    fn group_scale(&self, group: usize) -> u8 {
        (u16::from_le_bytes(self.group_scales[group / 4 % 4]) >> (group % 4 * 3) & 7) as u8
    }
}

impl BlockIQ1_M {
    /// Sets the factor of all group scales.
    pub fn set_scale(&mut self, scale: HalfBytes) {
        let bits = u16::from_le_bytes(scale.0);
        for (i, bytes) in self.group_scales.iter_mut().enumerate() {
            bytes[1] = bytes[1] & 0x0f | ((bits >> (4 * i) & 0x0f) as u8) << 4;
        }
    }
}

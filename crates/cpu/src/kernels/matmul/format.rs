//! How quantized weights are laid out once packed: one layout per type, the same for every instruction set.
//!
//! Rows are taken sixteen at a time and columns thirty-two at a time. Such a *block* stores its quants so that the
//! four bytes of one 32-bit lane are four neighbouring columns of one row, and a 512-bit vector holds four columns of
//! all sixteen rows. That is what VNNI's dot product wants, and a block is also half of an AMX int8 tile:
//!
//! ```text
//! vector v (v = 0..8), lane r (r = 0..16), byte i (i = 0..4)  =  row r, column 4 v + i
//!
//!            lane 0          lane 1                lane 15
//! vector 0 | r0: c0 c1 c2 c3 | r1: c0 c1 c2 c3 | … | r15: c0 c1 c2 c3 |
//! vector 1 | r0: c4 c5 c6 c7 | …
//! ```
//!
//! Narrow quants are stored as planes of 64-byte vectors; "vector v" below is what vector v of the block is made of:
//!
//! ```text
//! Byte       8 planes: the byte itself                                                          512 bytes
//! Nibble     4 planes: vector v in the low half of each byte, vector v + 4 in the high half     256
//! NibbleOne  Nibble, then 1 plane: bit 4 of vector v is bit v + 4 of each byte (mod 8)          320
//! NibbleTwo  Nibble, then 2 planes: bits 4 and 5 of vectors 0 1 2 3 are in the high halves,     384
//!            those of vectors 4 5 6 7 in the low halves: two in the first plane, two in the next
//! Two        2 planes: bits 2 (v mod 4) of plane v / 4 are vector v                             128
//! Three      3 planes, from bit 7 down:                                                         192
//!            plane 0 | vector 6, bits 1 0 | vector 3 | vector 0 |
//!            plane 1 | vector 7, bits 1 0 | vector 4 | vector 1 |
//!            plane 2 | vector 5 | vector 7, bit 2 | vector 6, bit 2 | vector 2 |
//! ```
//!
//! What the high half of a byte needs from another plane lies in that plane's low half, and the other way round: one
//! instruction puts the two halves together, and one more (a linear map of bits) moves every bit into its place.
//!
//! A *cell* is one block (types with 32 columns to a scale) or eight (types with 256), all quants first and then the
//! scales of the sixteen rows, each kind as an array over the rows:
//!
//! ```text
//! Half         d: f16 × 16                                                             32 bytes
//! HalfMinimum  d: f16 × 16, m: f16 × 16                                                64
//! Exponent     e: u8 × 16                                                              16
//! SixPair      d: f16 × 16, dm: f16 × 16; three words of 32 bits × 16                  64 + 192
//!              number i = 0..15 (s of block i, t of block i - 8): word i / 5, from bit 6 (i mod 5);
//!              number 15: bits 30 and 31 of the three words, the lowest first
//! SixTwice     d: f16 × 16; three words of 32 bits × 16; signed numbers; low half of a word: 32 + 192
//!              columns 0..16, high half: columns 16..32. In each half:
//!              bits 10..16 of word i: block i; bits 4..10 of word i: block 3 + i;
//!              block 6: bits 0..4 of word 0, then bits 0..2 of word 2; block 7: bits 0..4 of word 1, 2..4 of word 2
//! ByteTwice    d: f16 × 16; per block s0: i8 × 16, s1: i8 × 16                         32 + 8 × 32
//! NibbleTwice  d, dm: f16 × 16; four words of 32 bits × 16, of four bits for each half block: 64 + 256
//!              words 0 and 1, s: blocks 0..4 and 4..8, from the low end; columns 0..16 in the low half of the word,
//!              columns 16..32 in the high half
//!              words 2 and 3, t: half blocks 0..8 and 8..16: i and i + 4 in the two halves of byte i
//! Six          d: f16 × 16; a word of 32 bits × 16, a word of 16 bits × 16; signed:     32 + 96
//!              number i = 0..5: bits from 2 + 6 i of the first; 5 and 6: bits from 4 and 10 of the second;
//!              7: bits 0..4 of the second, then bits 0..2 of the first
//! ```
//!
//! A number in parts has its high bits in the part named first. Words of a kind follow each other: word 0 of all rows,
//! word 1 of all rows.
//!
//! A packed matrix is exactly as long as the file's, apart from the last group of rows, which is filled up with zeros.

use quadriga_graph::DType;

/// Rows stored together.
pub const GROUP: usize = 16;

/// Columns of one block.
pub const BLOCK: usize = 32;

/// How the quants of a block are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quants {
    Two,
    Three,
    Nibble,
    NibbleOne,
    NibbleTwo,
    Byte,
}

impl Quants {
    pub(super) const fn bytes(self) -> usize {
        match self {
            Quants::Two => 128,
            Quants::Three => 192,
            Quants::Nibble => 256,
            Quants::NibbleOne => 320,
            Quants::NibbleTwo => 384,
            Quants::Byte => 512,
        }
    }
}

/// How the scales of a cell are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scales {
    Half,
    HalfMinimum,
    Exponent,
    SixPair,
    SixTwice,
    ByteTwice,
    NibbleTwice,
    Six,
}

impl Scales {
    /// Bytes of a cell's scales.
    pub(super) const fn bytes(self) -> usize {
        match self {
            Scales::Exponent => 16,
            Scales::Half => 32,
            Scales::HalfMinimum => 64,
            Scales::Six => 32 + 96,
            Scales::SixTwice => 32 + 192,
            Scales::SixPair => 64 + 192,
            Scales::ByteTwice => 32 + 256,
            Scales::NibbleTwice => 64 + 256,
        }
    }
}

/// The packed form of one quantized type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Format {
    pub(super) quants: Quants,
    pub(super) scales: Scales,
    /// Blocks of a cell: 1 or 8.
    pub(super) blocks: usize,
    /// What a quant stands for, when it is an index into a table.
    pub(super) levels: Option<&'static [i8; 16]>,
    /// What is taken off a quant to give a signed number.
    pub(super) offset: u8,
}

impl Format {
    /// The format of a type, if it is a quantized type that can be computed with.
    pub(super) const fn of(dtype: DType) -> Option<Format> {
        use quadriga_graph::blocks::{IQ4_LEVELS, MXFP4_LEVELS};
        const fn format(quants: Quants, scales: Scales, blocks: usize, offset: u8) -> Option<Format> {
            Some(Format { quants, scales, blocks, levels: None, offset })
        }
        const fn table(scales: Scales, blocks: usize, levels: &'static [i8; 16]) -> Option<Format> {
            Some(Format { quants: Quants::Nibble, scales, blocks, levels: Some(levels), offset: 0 })
        }
        match dtype {
            DType::Q4_0 => format(Quants::Nibble, Scales::Half, 1, 8),
            DType::Q4_1 => format(Quants::Nibble, Scales::HalfMinimum, 1, 0),
            DType::Q5_0 => format(Quants::NibbleOne, Scales::Half, 1, 16),
            DType::Q5_1 => format(Quants::NibbleOne, Scales::HalfMinimum, 1, 0),
            DType::Q8_0 => format(Quants::Byte, Scales::Half, 1, 128),
            DType::Q2_K => format(Quants::Two, Scales::NibbleTwice, 8, 0),
            DType::Q3_K => format(Quants::Three, Scales::SixTwice, 8, 4),
            DType::Q4_K => format(Quants::Nibble, Scales::SixPair, 8, 0),
            DType::Q5_K => format(Quants::NibbleOne, Scales::SixPair, 8, 0),
            DType::Q6_K => format(Quants::NibbleTwo, Scales::ByteTwice, 8, 32),
            DType::IQ4_NL => table(Scales::Half, 1, &IQ4_LEVELS),
            DType::IQ4_XS => table(Scales::Six, 8, &IQ4_LEVELS),
            DType::MXFP4 => table(Scales::Exponent, 1, &MXFP4_LEVELS),
            _ => None,
        }
    }

    /// Columns of a cell.
    pub(super) const fn columns(&self) -> usize {
        self.blocks * BLOCK
    }

    /// Bytes of a cell.
    pub(super) const fn cell_bytes(&self) -> usize {
        self.blocks * self.quants.bytes() + self.scales.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_is_as_long_as_sixteen_blocks_of_the_file() {
        let mut formats = 0;
        for dtype in DType::all() {
            if let Some(format) = Format::of(dtype) {
                assert_eq!(format.columns(), dtype.block_len(), "{dtype}");
                assert_eq!(format.cell_bytes(), GROUP * dtype.block_bytes(), "{dtype}");
                formats += 1;
            }
            assert_eq!(Format::of(dtype).is_some(), dtype.is_quantized() && dtype.is_computable(), "{dtype}");
        }
        assert_eq!(formats, 13);
    }
}

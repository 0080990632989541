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
//! Narrow quants are stored as planes of 64-byte vectors:
//!
//! ```text
//! Byte       8 vectors: the byte itself                                                         512 bytes
//! Nibble     4 vectors: vector v in the low half of each byte, vector v + 4 in the high half    256
//! NibbleOne  Nibble, then 1 vector: bit v of each byte is bit 4 of vector v                     320
//! NibbleTwo  Nibble, then 2 vectors: bits 2 (v mod 4) of vector v / 4 are bits 4, 5 of vector v 384
//! Two        2 vectors: bits 2 (v mod 4) of vector v / 4 are vector v                           128
//! TwoOne     Two, then 1 vector: bit v of each byte is bit 2 of vector v                        192
//! ```
//!
//! A *cell* is one block (types with 32 columns to a scale) or eight (types with 256), all quants first and then the
//! scales of the sixteen rows, each kind as an array over the rows:
//!
//! ```text
//! Half         d: f16 × 16                                                             32 bytes a block
//! HalfMinimum  d: f16 × 16, m: f16 × 16                                                64
//! Exponent     e: u8 × 16                                                              16
//! SixPair      d: f16 × 16, dm: f16 × 16; per block 24 bytes of pairs (s, t)           64 + 8 × 24 a cell
//! SixTwice     d: f16 × 16; per block 24 bytes of pairs (s of columns 0..16, of 16..32) 32 + 8 × 24
//! ByteTwice    d: f16 × 16; per block s0: i8 × 16, s1: i8 × 16                         32 + 8 × 32
//! NibbleTwice  d, dm: f16 × 16; per block u8 × 16 (s low, t high) for columns 0..16,
//!              then the same for 16..32                                                64 + 8 × 32
//! Six          d: f16 × 16; per block 8 bytes: low 4 bits of row r and r + 8, 4 bytes:
//!              high 2 bits of rows r, r + 4, r + 8, r + 12                             32 + 8 × 12
//!
//! pairs: 16 bytes: low 4 bits of a | low 4 bits of b << 4, by row; 8 bytes: high 2 bits of a and b of row r,
//!        then of row r + 8, from the low end
//! ```
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
    TwoOne,
    Nibble,
    NibbleOne,
    NibbleTwo,
    Byte,
}

impl Quants {
    pub(super) const fn bytes(self) -> usize {
        match self {
            Quants::Two => 128,
            Quants::TwoOne => 192,
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
    /// Bytes at the head of a cell's scales, and bytes for each block after it.
    pub(super) const fn bytes(self) -> (usize, usize) {
        match self {
            Scales::Half => (0, 32),
            Scales::HalfMinimum => (0, 64),
            Scales::Exponent => (0, 16),
            Scales::SixPair => (64, 24),
            Scales::SixTwice => (32, 24),
            Scales::ByteTwice => (32, 32),
            Scales::NibbleTwice => (64, 32),
            Scales::Six => (32, 12),
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
            DType::Q3_K => format(Quants::TwoOne, Scales::SixTwice, 8, 4),
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
        let (head, each) = self.scales.bytes();
        self.blocks * (self.quants.bytes() + each) + head
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

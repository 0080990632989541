//! Rows of quantized weights as integers, between a file and its packed form.
#![expect(clippy::indexing_slicing, reason = "a row has 256 quants, eight blocks")]

/// Rows of weights packed together.
pub const GROUP: usize = 16;

/// Columns of a block.
pub const BLOCK: usize = 32;

/// One row of a superblock, as integers.
pub(super) struct QuantRow {
    /// Quants as packed: unsigned, or codes of a lookup table; for code books see `grid_quants`.
    pub(super) quants: [u8; 256],
    /// The bits of the f16 scale or super-scale `d`; for MXFP4 the exponent.
    pub(super) scale: u16,
    /// The bits of the f16 minimum `m`, or of the super-scale of minimums `dmin`.
    pub(super) min: u16,
    /// Scales and minimums of 16 or 32 columns each; signed 6-bit scales are offset by 32. For code books and NVFP4, of
    /// 16 columns.
    pub(super) sub_scales: [u8; 16],
    pub(super) sub_mins: [u8; 16],
}

impl QuantRow {
    pub(super) const fn new() -> QuantRow {
        QuantRow { quants: [0; 256], scale: 0, min: 0, sub_scales: [0; 16], sub_mins: [0; 16] }
    }

    /// Sets 32 quants from the file's nibbles: byte i has columns i and i + 16.
    pub(super) fn set_nibbles(&mut self, block: usize, nibbles: &[u8; 16]) {
        for (i, byte) in nibbles.iter().enumerate() {
            self.quants[block * BLOCK + i] = byte & 15;
            self.quants[block * BLOCK + i + 16] = byte >> 4;
        }
    }

    pub(super) fn set_quants(&mut self, count: usize, quant: impl Fn(usize) -> u8) {
        for (i, place) in self.quants.iter_mut().enumerate().take(count) {
            *place = quant(i);
        }
    }
}

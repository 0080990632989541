//! Packed formats of the quantized weight types: one description per type, the same for every instruction set.
//!
//! Rows are packed in groups of sixteen ([`GROUP`]), and columns in blocks of thirty-two ([`BLOCK`]). A *superblock* is
//! sixteen blocks of the file, one of each row of a group: one block of columns (types with 32 columns to a scale), two
//! (NVFP4) or eight (256 columns to a scale). It stores the quants of all its blocks (see `quants` and `grid_quants`)
//! and then their scales (see `scales`). A packed matrix is exactly as long as the file's, apart from the last group of
//! rows, which is filled up with zeros. The exceptions are TQ1_0, whose digits become 2-bit quants (22 % longer), and
//! code books whose files omit signs or have spare bits for scales (4 to 11 %): unpacking costs less so.
//!
//! The table `formats!` below is all that the backend knows of a weight type: kernels are generic over
//! `PackedFormat`, and `with_format!` instantiates them for a [`DType`]. A new type is a new row of the table, and a
//! new storage in `quants` or `scales` if it needs one.
#![expect(
    clippy::indexing_slicing,
    reason = "blocks and superblocks have the lengths of their format, which the callers have checked"
)]

use bytemuck::pod_read_unaligned;
use quadriga_graph::{DType, blocks};

use super::grid_quants::GridQuants;
use super::lut_quants::{Fp4Levels, Iq4Levels, Lut, Q4Lut};
pub(super) use super::quant_row::QuantRow;
pub use super::quant_row::{BLOCK, GROUP};
use super::quants::{Q2, Q3, Q4, Q5, Q6, Q8, QuantStorage};
use super::scales::{
    E4M3Scale16, E8M0Scale, F16Scale, F16Scale256, F16ScaleMin, GridScale, I8Scale16, K4ScaleMin16, K6Scale,
    K6Scale16, K6ScaleMin, ScaleRow, ScaleStorage,
};

impl QuantRow {
    /// Writes row `row` of a superblock; the row's bits must be 0.
    fn pack<F: PackedFormat>(&self, superblock: &mut [u8], row: usize) {
        let (blocks, scales) = superblock.split_at_mut(F::BLOCKS * F::Quants::BYTES);
        let quants = self.quants.chunks_exact(BLOCK);
        for (block, quants) in blocks.chunks_exact_mut(F::Quants::BYTES).zip(quants) {
            F::Quants::pack(quants, block, row);
        }
        F::Scales::pack(self, &mut ScaleRow { scales, row });
    }

    /// Reads row `row` of a superblock.
    fn unpack<F: PackedFormat>(&mut self, superblock: &[u8], row: usize) {
        let (blocks, scales) = superblock.split_at(F::BLOCKS * F::Quants::BYTES);
        let quants = self.quants.chunks_exact_mut(BLOCK);
        for (block, quants) in blocks.chunks_exact(F::Quants::BYTES).zip(quants) {
            F::Quants::unpack(block, row, quants);
        }
        F::Scales::unpack(&ScaleRow { scales, row }, self);
    }
}

/// The packed format of a weight type. A weight is `d q + m`, with a quant `q` and the scales `d` and `m`.
pub(super) trait PackedFormat: Sized {
    /// The storage of the quants of a block.
    type Quants: QuantStorage;
    /// The storage of the scales of a superblock.
    type Scales: ScaleStorage;
    /// Blocks of a superblock: 1, 2 or 8.
    const BLOCKS: usize;
    /// The quant that stands for 0, unless there are minimums: `m = -ZERO_POINT × d`.
    const ZERO_POINT: i32;
    /// Columns of a superblock.
    const COLUMNS: usize = Self::BLOCKS * BLOCK;
    /// Bytes of a superblock.
    const BYTES: usize = Self::BLOCKS * Self::Quants::BYTES + Self::Scales::BYTES;

    /// Writes a block of the file as row `row` of a superblock, in which the row's bits are 0.
    fn pack_block(block: &[u8], superblock: &mut [u8], row: usize, buffer: &mut QuantRow);

    /// The weights of row `row` of a superblock: the same numbers as `blocks::dequantize` gives.
    fn dequantize(superblock: &[u8], row: usize, buffer: &mut QuantRow, out: &mut [f32]) {
        buffer.unpack::<Self>(superblock, row);
        let scales = Self::Scales::decode(buffer);
        for (column, value) in out.iter_mut().enumerate().take(Self::COLUMNS) {
            let quant = Self::Quants::value(buffer.quants[column], Self::ZERO_POINT);
            *value = Self::Scales::weight(buffer, scales, column, quant as f32);
        }
    }
}

/// Copies a block of the file that is the row's f16 scales and then 16 bytes of nibbles, each with columns i and i +
/// 16: these are the row's lanes of the four planes of [`Q4`].
fn copy_nibbles<F: PackedFormat>(block: &[u8], superblock: &mut [u8], row: usize) {
    let (scales, nibbles) = block.split_at(block.len() - BLOCK / 2);
    let (planes, places) = superblock.split_at_mut(F::Quants::BYTES);
    for (plane, four) in planes.chunks_exact_mut(4 * GROUP).zip(nibbles.chunks_exact(4)) {
        plane[4 * row..4 * row + 4].copy_from_slice(four);
    }
    for (place, half) in places.chunks_exact_mut(2 * GROUP).zip(scales.chunks_exact(2)) {
        place[2 * row..2 * row + 2].copy_from_slice(half);
    }
}

/// Makes a [`PackedFormat`] of each row, and the macro `with_format!`. The last column says how a block of the file
/// becomes a [`QuantRow`]; `copied` if it need not ([`copy_nibbles`]).
macro_rules! formats {
    ($d:tt $($name:ident: $quants:ty, $scales:ty, $blocks:literal, $zero_point:expr, $from_file:tt;)*) => {
        $(
            #[doc = concat!("The packed format of [`DType::", stringify!($name), "`].")]
            #[allow(non_camel_case_types, reason = "the name of the type")]
            pub(super) struct $name;

            impl PackedFormat for $name {
                type Quants = $quants;
                type Scales = $scales;
                const BLOCKS: usize = $blocks;
                const ZERO_POINT: i32 = $zero_point;

                formats!(@pack $from_file);
            }
        )*

        /// `with_format!(dtype, F => body, else other)`: the body with `F` as the packed format of a type, or the other
        /// expression if it has none.
        macro_rules! with_format {
            ($d dtype:expr, $d format:ident => $d body:expr, else $d other:expr) => {
                match $d dtype {
                    $(quadriga_graph::DType::$name => {
                        type $d format = $crate::kernels::matmul::format::$name;
                        $d body
                    })*
                    _ => $d other,
                }
            };
        }
        pub(super) use with_format;
    };
    (@pack copied) => {
        fn pack_block(block: &[u8], superblock: &mut [u8], row: usize, _buffer: &mut QuantRow) {
            copy_nibbles::<Self>(block, superblock, row);
        }
    };
    (@pack (|$block:ident: $type:ty, $row:ident| $read:block)) => {
        fn pack_block(block: &[u8], superblock: &mut [u8], row: usize, buffer: &mut QuantRow) {
            let $block: $type = pod_read_unaligned(block);
            let $row = &mut *buffer;
            $read
            buffer.pack::<Self>(superblock, row);
        }
    };
}

formats! { $
    Q4_0: Q4, F16Scale, 1, 8, copied;
    Q4_1: Q4, F16ScaleMin, 1, 0, copied;
    Q5_0: Q5, F16Scale, 1, 16, (|block: blocks::BlockQ5_0, row| {
        row.scale = bits(block.scale);
        row.set_quants(32, |i| (block.quant(i) + 16) as u8);
    });
    Q5_1: Q5, F16ScaleMin, 1, 0, (|block: blocks::BlockQ5_1, row| {
        (row.scale, row.min) = (bits(block.scale), bits(block.minimum));
        row.set_quants(32, |i| block.quant(i));
    });
    Q8_0: Q8, F16Scale, 1, 128, (|block: blocks::BlockQ8_0, row| {
        row.scale = bits(block.scale);
        row.set_quants(32, |i| block.quants[i] as u8 ^ 0x80);
    });
    Q2_K: Q2, K4ScaleMin16, 8, 0, (|block: blocks::BlockQ2_K, row| {
        (row.scale, row.min) = (bits(block.scale), bits(block.min_scale));
        row.set_quants(256, |i| block.quant(i));
        for i in 0..16 {
            (row.sub_scales[i], row.sub_mins[i]) = block.group_scale_and_minimum(i);
        }
    });
    Q3_K: Q3, K6Scale16, 8, 4, (|block: blocks::BlockQ3_K, row| {
        row.scale = bits(block.scale);
        row.set_quants(256, |i| (block.quant(i) + 4) as u8);
        (0..16).for_each(|i| row.sub_scales[i] = (block.group_scale(i) + 32) as u8);
    });
    Q4_K: Q4, K6ScaleMin, 8, 0, (|block: blocks::BlockQ4_K, row| {
        (row.scale, row.min) = (bits(block.scale), bits(block.min_scale));
        row.set_quants(256, |i| block.quant(i));
        for i in 0..8 {
            (row.sub_scales[i], row.sub_mins[i]) = block.group_scales.get(i);
        }
    });
    Q5_K: Q5, K6ScaleMin, 8, 0, (|block: blocks::BlockQ5_K, row| {
        (row.scale, row.min) = (bits(block.scale), bits(block.min_scale));
        row.set_quants(256, |i| block.quant(i));
        for i in 0..8 {
            (row.sub_scales[i], row.sub_mins[i]) = block.group_scales.get(i);
        }
    });
    Q6_K: Q6, I8Scale16, 8, 32, (|block: blocks::BlockQ6_K, row| {
        row.scale = bits(block.scale);
        row.set_quants(256, |i| (block.quant(i) + 32) as u8);
        (0..16).for_each(|i| row.sub_scales[i] = block.group_scales[i] as u8);
    });
    IQ4_NL: Q4Lut<Iq4Levels>, F16Scale, 1, Iq4Levels::ZERO_POINT, copied;
    IQ4_XS: Q4Lut<Iq4Levels>, K6Scale, 8, Iq4Levels::ZERO_POINT, (|block: blocks::BlockIQ4_XS, row| {
        row.scale = bits(block.scale);
        for i in 0..8 {
            row.set_nibbles(i, &block.codes[i]);
            row.sub_scales[i] = (block.group_scale(i) + 32) as u8;
        }
    });
    MXFP4: Q4Lut<Fp4Levels>, E8M0Scale, 1, Fp4Levels::ZERO_POINT, (|block: blocks::BlockMXFP4, row| {
        row.scale = u16::from(block.exponent);
        row.set_nibbles(0, &block.codes);
    });
    NVFP4: Q4Lut<Fp4Levels>, E4M3Scale16, 2, Fp4Levels::ZERO_POINT, (|block: blocks::BlockNVFP4, row| {
        row.set_quants(64, |i| block.code(i));
        row.sub_scales[..4].copy_from_slice(&block.group_scales);
    });
    TQ1_0: Q2, F16Scale256, 8, 1, (|block: blocks::BlockTQ1_0, row| {
        row.scale = bits(block.scale);
        row.set_quants(256, |i| (block.quant(i) + 1) as u8);
    });
    TQ2_0: Q2, F16Scale256, 8, 1, (|block: blocks::BlockTQ2_0, row| {
        row.scale = bits(block.scale);
        row.set_quants(256, |i| (block.quant(i) + 1) as u8);
    });
    IQ1_S: GridQuants<blocks::BlockIQ1_S>, GridScale<blocks::BlockIQ1_S, 32>, 8,
        GridQuants::<blocks::BlockIQ1_S>::ZERO_POINT, (|block: blocks::BlockIQ1_S, row| { row.set_grid(&block); });
    IQ1_M: GridQuants<blocks::BlockIQ1_M>, GridScale<blocks::BlockIQ1_M, 16>, 8,
        GridQuants::<blocks::BlockIQ1_M>::ZERO_POINT, (|block: blocks::BlockIQ1_M, row| { row.set_grid(&block); });
    IQ2_XXS: GridQuants<blocks::BlockIQ2_XXS>, GridScale<blocks::BlockIQ2_XXS, 32>, 8,
        GridQuants::<blocks::BlockIQ2_XXS>::ZERO_POINT, (|block: blocks::BlockIQ2_XXS, row| { row.set_grid(&block); });
    IQ2_XS: GridQuants<blocks::BlockIQ2_XS>, GridScale<blocks::BlockIQ2_XS, 16>, 8,
        GridQuants::<blocks::BlockIQ2_XS>::ZERO_POINT, (|block: blocks::BlockIQ2_XS, row| { row.set_grid(&block); });
    IQ2_S: GridQuants<blocks::BlockIQ2_S>, GridScale<blocks::BlockIQ2_S, 16>, 8,
        GridQuants::<blocks::BlockIQ2_S>::ZERO_POINT, (|block: blocks::BlockIQ2_S, row| { row.set_grid(&block); });
    IQ3_XXS: GridQuants<blocks::BlockIQ3_XXS>, GridScale<blocks::BlockIQ3_XXS, 32>, 8,
        GridQuants::<blocks::BlockIQ3_XXS>::ZERO_POINT, (|block: blocks::BlockIQ3_XXS, row| { row.set_grid(&block); });
    IQ3_S: GridQuants<blocks::BlockIQ3_S>, GridScale<blocks::BlockIQ3_S, 32>, 8,
        GridQuants::<blocks::BlockIQ3_S>::ZERO_POINT, (|block: blocks::BlockIQ3_S, row| { row.set_grid(&block); });
}

fn bits(half: blocks::HalfBytes) -> u16 {
    u16::from_le_bytes(half.0)
}

/// Columns and bytes of a superblock of a type; `None` if there is no packed format of it.
pub(super) fn superblock_size(dtype: DType) -> Option<(usize, usize)> {
    with_format!(dtype, F => Some((F::COLUMNS, F::BYTES)), else None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_superblock_is_as_long_as_sixteen_blocks_of_the_file_or_little_longer() {
        let mut formats = 0;
        for dtype in DType::all() {
            let size = superblock_size(dtype);
            assert_eq!(size.is_some(), dtype.is_quantized() && dtype.is_computable(), "{dtype}");
            let Some((columns, bytes)) = size else { continue };
            let longer = match dtype {
                DType::TQ1_0 => 12,
                DType::IQ2_XS => 8,
                DType::IQ1_S | DType::IQ2_XXS | DType::IQ3_XXS => 4,
                DType::IQ1_M => 2,
                _ => 0,
            };
            assert_eq!(columns, dtype.block_len(), "{dtype}");
            assert_eq!(bytes, GROUP * (dtype.block_bytes() + longer), "{dtype}");
            formats += 1;
        }
        assert_eq!(formats, 23);
    }
}

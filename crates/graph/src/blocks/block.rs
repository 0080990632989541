//! The traits of block structs, and the macro that implements `Block`.

use bytemuck::Pod;

use crate::dtype::DType;

/// A block of a quantized format: a struct of bytes, alignment 1, whose size is that of the format.
pub trait Block: Pod {
    /// The type whose rows consist of these blocks.
    const DTYPE: DType;

    /// The elements of one block as an array: `[f32; 32]`, `[f32; 64]` or `[f32; 256]`.
    type Values: Pod;

    /// Writes the values of the elements, in row order.
    fn dequantize(&self, out: &mut Self::Values);
}

/// A block format that values can be quantized to.
pub trait QuantizeBlock: Block {
    /// Quantizes values to a block.
    ///
    /// Any input is accepted: values out of range saturate, and NaN becomes some finite number.
    fn quantize(values: &Self::Values) -> Self;
}

/// Implements [`Block`] with the struct's own `dequantize`, and asserts size and alignment at compile time.
macro_rules! block_format {
    ($block:ident, $dtype:ident, $length:literal elements in $bytes:literal bytes) => {
        impl super::block::Block for $block {
            const DTYPE: $crate::dtype::DType = $crate::dtype::DType::$dtype;
            type Values = [f32; $length];

            #[inline]
            fn dequantize(&self, out: &mut [f32; $length]) {
                $block::dequantize(self, out);
            }
        }

        const _: () = {
            assert!(size_of::<$block>() == $bytes);
            assert!(align_of::<$block>() == 1);
            assert!($crate::dtype::DType::$dtype.block_bytes() == $bytes);
            assert!($crate::dtype::DType::$dtype.block_len() == $length);
        };
    };
}
pub(super) use block_format;

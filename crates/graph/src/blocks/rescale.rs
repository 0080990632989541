//! The scale of a block, for those who make blocks of random bits: tests and synthetic models.

use super::grid::BlockIQ1_M;
use super::half_bytes::HalfBytes;
use crate::dtype::DType;

/// Where the f16 scales of a block are: byte offsets, and factors of the block's scale. The factor of a minimum is the
/// one that centres the values at zero.
const fn f16_fields(dtype: DType) -> &'static [(usize, f32)] {
    use DType::*;
    match dtype {
        Q4_0 | Q5_0 | Q8_0 | IQ4_NL | IQ4_XS => &[(0, 1.0)],
        IQ1_S | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S => &[(0, 1.0)],
        Q4_1 => &[(0, 1.0), (2, -7.5)],
        Q5_1 => &[(0, 1.0), (2, -15.5)],
        Q2_K => &[(80, 1.0), (82, 1.5)],
        Q3_K => &[(108, 1.0)],
        Q4_K => &[(0, 1.0), (2, 7.5)],
        Q5_K => &[(0, 1.0), (2, 15.5)],
        Q6_K => &[(208, 1.0)],
        TQ1_0 => &[(52, 1.0)],
        TQ2_0 => &[(64, 1.0)],
        _ => &[],
    }
}

/// Sets the scale of a block of random bits, and a minimum that centres the values at zero; quants and group scales
/// stay. A scale that the type cannot hold is rounded, and its sign is lost where the type has only positive ones. Does
/// nothing if the type is not quantized.
pub fn set_scale(dtype: DType, block: &mut [u8], scale: f32) {
    for (at, factor) in f16_fields(dtype) {
        let bytes = HalfBytes::from_f32_finite(scale * factor).0;
        block.iter_mut().skip(*at).zip(bytes).for_each(|(to, from)| *to = from);
    }
    match dtype {
        DType::MXFP4 => {
            // The levels are doubled, and the scale halved for them.
            let exponent = (128.0 + scale.abs().log2().round()).clamp(0.0, 254.0) as u8;
            block.iter_mut().take(1).for_each(|byte| *byte = exponent);
        }
        DType::NVFP4 => {
            // The inverse of `BlockNVFP4::decode_scale`, for the nearest scale.
            let half = HalfBytes::from_f32_finite(scale.abs() / 128.0);
            let code = (u16::from_le_bytes(half.0) + 64) >> 7;
            block.iter_mut().take(4).for_each(|byte| *byte = code.min(0x7e) as u8);
        }
        DType::IQ1_M => {
            if let Ok([block]) = super::as_blocks_mut::<BlockIQ1_M>(block) {
                block.set_scale(HalfBytes::from_f32_finite(scale));
            }
        }
        _ => {}
    }
}

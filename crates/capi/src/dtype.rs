//! Element types.

use std::ffi::c_char;

use quadriga::graph::DType;

use crate::guard;
use crate::status::{Failure, Outcome};

/// An element type: one of QD_DTYPE_…, the numbers of GGUF files and of ggml.
pub type qd_dtype = u32;

/// 32-bit floating point.
pub const QD_DTYPE_F32: qd_dtype = 0;
/// 16-bit floating point.
pub const QD_DTYPE_F16: qd_dtype = 1;
/// 4-bit blocks of 32 with a scale.
pub const QD_DTYPE_Q4_0: qd_dtype = 2;
/// 4-bit blocks of 32 with a scale and a minimum.
pub const QD_DTYPE_Q4_1: qd_dtype = 3;
/// 5-bit blocks of 32 with a scale.
pub const QD_DTYPE_Q5_0: qd_dtype = 6;
/// 5-bit blocks of 32 with a scale and a minimum.
pub const QD_DTYPE_Q5_1: qd_dtype = 7;
/// 8-bit blocks of 32 with a scale.
pub const QD_DTYPE_Q8_0: qd_dtype = 8;
/// 8-bit blocks of 32 with a scale and a sum, for intermediate results.
pub const QD_DTYPE_Q8_1: qd_dtype = 9;
/// 2-bit k-quants.
pub const QD_DTYPE_Q2_K: qd_dtype = 10;
/// 3-bit k-quants.
pub const QD_DTYPE_Q3_K: qd_dtype = 11;
/// 4-bit k-quants.
pub const QD_DTYPE_Q4_K: qd_dtype = 12;
/// 5-bit k-quants.
pub const QD_DTYPE_Q5_K: qd_dtype = 13;
/// 6-bit k-quants.
pub const QD_DTYPE_Q6_K: qd_dtype = 14;
/// 8-bit blocks of 256 with a scale and sums, for intermediate results.
pub const QD_DTYPE_Q8_K: qd_dtype = 15;
/// Codebook quantization, 2.06 bits.
pub const QD_DTYPE_IQ2_XXS: qd_dtype = 16;
/// Codebook quantization, 2.31 bits.
pub const QD_DTYPE_IQ2_XS: qd_dtype = 17;
/// Codebook quantization, 3.06 bits.
pub const QD_DTYPE_IQ3_XXS: qd_dtype = 18;
/// Codebook quantization, 1.56 bits.
pub const QD_DTYPE_IQ1_S: qd_dtype = 19;
/// 4-bit non-linear blocks of 32.
pub const QD_DTYPE_IQ4_NL: qd_dtype = 20;
/// Codebook quantization, 3.44 bits.
pub const QD_DTYPE_IQ3_S: qd_dtype = 21;
/// Codebook quantization, 2.56 bits.
pub const QD_DTYPE_IQ2_S: qd_dtype = 22;
/// 4-bit non-linear blocks of 256.
pub const QD_DTYPE_IQ4_XS: qd_dtype = 23;
/// 8-bit integer.
pub const QD_DTYPE_I8: qd_dtype = 24;
/// 16-bit integer.
pub const QD_DTYPE_I16: qd_dtype = 25;
/// 32-bit integer.
pub const QD_DTYPE_I32: qd_dtype = 26;
/// 64-bit integer.
pub const QD_DTYPE_I64: qd_dtype = 27;
/// 64-bit floating point.
pub const QD_DTYPE_F64: qd_dtype = 28;
/// Codebook quantization, 1.75 bits.
pub const QD_DTYPE_IQ1_M: qd_dtype = 29;
/// Brain floating point.
pub const QD_DTYPE_BF16: qd_dtype = 30;
/// Ternary weights, 1.69 bits.
pub const QD_DTYPE_TQ1_0: qd_dtype = 34;
/// Ternary weights, 2.06 bits.
pub const QD_DTYPE_TQ2_0: qd_dtype = 35;
/// 4-bit floating point in blocks of 32 with a scale.
pub const QD_DTYPE_MXFP4: qd_dtype = 39;
/// 4-bit floating point in blocks of 64 with scales of 16.
pub const QD_DTYPE_NVFP4: qd_dtype = 40;

/// The type with this number.
pub(crate) fn from_id(id: qd_dtype) -> Outcome<DType> {
    DType::from_id(id).ok_or_else(|| Failure::argument(format!("there is no element type {id}")))
}

/// The name of an element type, such as "Q4_K"; NULL if there is none of this number.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_dtype_name(dtype: qd_dtype) -> *const c_char {
    guard::value(std::ptr::null(), || {
        let found = NAMES.iter().find(|(id, _)| *id == dtype);
        Ok(found.map_or(std::ptr::null(), |(_, name)| name.as_ptr().cast()))
    })
}

/// Every type's number, and its name with NUL at its end.
const NAMES: &[(qd_dtype, &str)] = &[
    (0, "F32\0"),
    (1, "F16\0"),
    (2, "Q4_0\0"),
    (3, "Q4_1\0"),
    (6, "Q5_0\0"),
    (7, "Q5_1\0"),
    (8, "Q8_0\0"),
    (9, "Q8_1\0"),
    (10, "Q2_K\0"),
    (11, "Q3_K\0"),
    (12, "Q4_K\0"),
    (13, "Q5_K\0"),
    (14, "Q6_K\0"),
    (15, "Q8_K\0"),
    (16, "IQ2_XXS\0"),
    (17, "IQ2_XS\0"),
    (18, "IQ3_XXS\0"),
    (19, "IQ1_S\0"),
    (20, "IQ4_NL\0"),
    (21, "IQ3_S\0"),
    (22, "IQ2_S\0"),
    (23, "IQ4_XS\0"),
    (24, "I8\0"),
    (25, "I16\0"),
    (26, "I32\0"),
    (27, "I64\0"),
    (28, "F64\0"),
    (29, "IQ1_M\0"),
    (30, "BF16\0"),
    (34, "TQ1_0\0"),
    (35, "TQ2_0\0"),
    (39, "MXFP4\0"),
    (40, "NVFP4\0"),
];

/// The number of elements of a block, 1 for types that are not quantized; 0 if there is no such type.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_dtype_block_elements(dtype: qd_dtype) -> usize {
    guard::value(0, || Ok(from_id(dtype)?.block_len()))
}

/// The bytes of a block; 0 if there is no such type.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_dtype_block_bytes(dtype: qd_dtype) -> usize {
    guard::value(0, || Ok(from_id(dtype)?.block_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_its_name() {
        let names: Vec<(u32, &str)> = DType::all().map(|dtype| (dtype.id(), dtype.name())).collect();
        let own: Vec<(u32, &str)> =
            NAMES.iter().map(|(id, name)| (*id, name.trim_end_matches('\0'))).collect();
        assert_eq!(own, names);
        assert!(qd_dtype_name(4).is_null());
    }
}

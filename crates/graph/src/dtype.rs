//! Element types: every type of a GGUF file, with its id, name, block length and block size.

use std::fmt;

/// The type of a tensor's elements.
///
/// Quantized types store `block_len` consecutive elements of a row in `block_bytes` bytes; plain types have blocks of
/// one element. All types of the GGUF format are here, so that any file can be listed; [`DType::is_computable`] is true
/// for those that kernels support.
///
/// ```
/// use quadriga_graph::DType;
///
/// let dtype = DType::Q4_K;
/// assert_eq!((dtype.block_len(), dtype.block_bytes()), (256, 144));
/// assert_eq!(dtype.row_bytes(4096), Some(2304));
/// assert_eq!(dtype.row_bytes(100), None);
/// assert_eq!(DType::from_name("q4_k"), Some(dtype));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(non_camel_case_types, missing_docs, reason = "the names are those of the file format")]
#[repr(u32)]
pub enum DType {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q8_1 = 9,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    Q8_K = 15,
    IQ2_XXS = 16,
    IQ2_XS = 17,
    IQ3_XXS = 18,
    IQ1_S = 19,
    IQ4_NL = 20,
    IQ3_S = 21,
    IQ2_S = 22,
    IQ4_XS = 23,
    I8 = 24,
    I16 = 25,
    I32 = 26,
    I64 = 27,
    F64 = 28,
    IQ1_M = 29,
    BF16 = 30,
    TQ1_0 = 34,
    TQ2_0 = 35,
    MXFP4 = 39,
    NVFP4 = 40,
}

/// One row of the type table: type, name, elements per block, bytes per block.
type Row = (DType, &'static str, usize, usize);

const TABLE: &[Row] = &[
    (DType::F32, "F32", 1, 4),
    (DType::F16, "F16", 1, 2),
    (DType::Q4_0, "Q4_0", 32, 18),
    (DType::Q4_1, "Q4_1", 32, 20),
    (DType::Q5_0, "Q5_0", 32, 22),
    (DType::Q5_1, "Q5_1", 32, 24),
    (DType::Q8_0, "Q8_0", 32, 34),
    (DType::Q8_1, "Q8_1", 32, 36),
    (DType::Q2_K, "Q2_K", 256, 84),
    (DType::Q3_K, "Q3_K", 256, 110),
    (DType::Q4_K, "Q4_K", 256, 144),
    (DType::Q5_K, "Q5_K", 256, 176),
    (DType::Q6_K, "Q6_K", 256, 210),
    (DType::Q8_K, "Q8_K", 256, 292),
    (DType::IQ2_XXS, "IQ2_XXS", 256, 66),
    (DType::IQ2_XS, "IQ2_XS", 256, 74),
    (DType::IQ3_XXS, "IQ3_XXS", 256, 98),
    (DType::IQ1_S, "IQ1_S", 256, 50),
    (DType::IQ4_NL, "IQ4_NL", 32, 18),
    (DType::IQ3_S, "IQ3_S", 256, 110),
    (DType::IQ2_S, "IQ2_S", 256, 82),
    (DType::IQ4_XS, "IQ4_XS", 256, 136),
    (DType::I8, "I8", 1, 1),
    (DType::I16, "I16", 1, 2),
    (DType::I32, "I32", 1, 4),
    (DType::I64, "I64", 1, 8),
    (DType::F64, "F64", 1, 8),
    (DType::IQ1_M, "IQ1_M", 256, 56),
    (DType::BF16, "BF16", 1, 2),
    (DType::TQ1_0, "TQ1_0", 256, 54),
    (DType::TQ2_0, "TQ2_0", 256, 66),
    (DType::MXFP4, "MXFP4", 32, 17),
    (DType::NVFP4, "NVFP4", 64, 36),
];

impl DType {
    /// Every type, in the order of ids.
    pub fn all() -> impl Iterator<Item = DType> {
        TABLE.iter().map(|row| row.0)
    }

    const fn row(self) -> &'static Row {
        let mut i = 0;
        while i < TABLE.len() {
            #[allow(clippy::indexing_slicing, reason = "i < TABLE.len()")]
            let row = &TABLE[i];
            if row.0 as u32 == self as u32 {
                return row;
            }
            i += 1;
        }
        // Unreachable: a test checks that every variant has a row.
        &(DType::F32, "F32", 1, 4)
    }

    /// The id in a GGUF file.
    pub const fn id(self) -> u32 {
        self as u32
    }

    /// The type with this id, if there is one.
    pub fn from_id(id: u32) -> Option<DType> {
        DType::all().find(|t| t.id() == id)
    }

    /// The type with this name, ignoring case.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::all().find(|t| t.name().eq_ignore_ascii_case(name))
    }

    /// The name in the GGUF format.
    pub const fn name(self) -> &'static str {
        self.row().1
    }

    /// The number of elements of a block: 1 for plain types.
    pub const fn block_len(self) -> usize {
        self.row().2
    }

    /// The size of a block in bytes.
    pub const fn block_bytes(self) -> usize {
        self.row().3
    }

    /// Whether elements are stored in blocks that share a scale.
    pub const fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// Whether this is a plain floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16 | DType::F64)
    }

    /// Whether this is a plain integer type.
    pub const fn is_integer(self) -> bool {
        matches!(self, DType::I8 | DType::I16 | DType::I32 | DType::I64)
    }

    /// Whether a KV cache can have this type: attention reads keys and values of it.
    pub const fn is_cache_type(self) -> bool {
        use DType::*;
        matches!(self, F32 | F16 | BF16 | Q8_0 | Q5_1 | Q4_0)
    }

    /// Whether values of this type can be dequantized to `f32`, and so used as weights.
    pub const fn is_computable(self) -> bool {
        use DType::*;
        !matches!(self, Q8_1 | Q8_K | I8 | I16 | I32 | I64 | F64)
    }

    /// The size of a contiguous row of `len` elements; `None` if `len` is not a multiple of the block length or the
    /// size overflows.
    pub const fn row_bytes(self, len: usize) -> Option<usize> {
        if !len.is_multiple_of(self.block_len()) {
            return None;
        }
        (len / self.block_len()).checked_mul(self.block_bytes())
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Debug for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_its_own_row_and_is_found_by_id_and_name() {
        let mut seen = std::collections::HashSet::new();
        for t in DType::all() {
            assert_eq!(t.row().0, t);
            assert_eq!(DType::from_id(t.id()), Some(t));
            assert_eq!(DType::from_name(&t.name().to_lowercase()), Some(t));
            assert!(seen.insert(t.name()));
        }
        assert_eq!(seen.len(), 33);
        assert_eq!(DType::from_id(4), None);
    }

    #[test]
    fn rows_are_multiples_of_a_block() {
        assert_eq!(DType::Q4_K.row_bytes(512), Some(288));
        assert_eq!(DType::Q4_K.row_bytes(300), None);
        assert_eq!(DType::F32.row_bytes(usize::MAX), None);
        assert_eq!(DType::Q8_0.row_bytes(0), Some(0));
    }
}

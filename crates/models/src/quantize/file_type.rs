//! The names of quantized files: types and mixes, with their numbers in files.

use std::fmt;

use quadriga_graph::DType;

/// What a file is quantized to: one type, or a mix of which this is the name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileType {
    name: &'static str,
    id: u32,
    dtype: DType,
}

/// Name, number in `general.file_type`, and the type of most tensors.
const fn row(name: &'static str, id: u32, dtype: DType) -> FileType {
    FileType { name, id, dtype }
}

/// All names, as llama.cpp's quantizer has them, in order of size. MXFP4 and NVFP4 without experts are this program's.
const FILE_TYPES: &[FileType] = &[
    row("IQ1_S", 24, DType::IQ1_S),
    row("IQ1_M", 31, DType::IQ1_M),
    row("TQ1_0", 36, DType::TQ1_0),
    row("IQ2_XXS", 19, DType::IQ2_XXS),
    row("TQ2_0", 37, DType::TQ2_0),
    row("IQ2_XS", 20, DType::IQ2_XS),
    row("IQ2_S", 28, DType::IQ2_XS),
    row("IQ2_M", 29, DType::IQ2_S),
    row("Q2_K_S", 21, DType::Q2_K),
    row("Q2_K", 10, DType::Q2_K),
    row("IQ3_XXS", 23, DType::IQ3_XXS),
    row("IQ3_XS", 22, DType::IQ3_S),
    row("IQ3_S", 26, DType::IQ3_S),
    row("IQ3_M", 27, DType::IQ3_S),
    row("Q3_K_S", 11, DType::Q3_K),
    row("Q3_K_M", 12, DType::Q3_K),
    row("Q3_K_L", 13, DType::Q3_K),
    row("IQ4_XS", 30, DType::IQ4_XS),
    row("MXFP4", 38, DType::MXFP4),
    row("MXFP4_MOE", 38, DType::MXFP4),
    row("IQ4_NL", 25, DType::IQ4_NL),
    row("NVFP4", 39, DType::NVFP4),
    row("Q4_0", 2, DType::Q4_0),
    row("Q4_K_S", 14, DType::Q4_K),
    row("Q4_K_M", 15, DType::Q4_K),
    row("Q4_1", 3, DType::Q4_1),
    row("Q5_0", 8, DType::Q5_0),
    row("Q5_K_S", 16, DType::Q5_K),
    row("Q5_K_M", 17, DType::Q5_K),
    row("Q5_1", 9, DType::Q5_1),
    row("Q6_K", 18, DType::Q6_K),
    row("Q8_0", 7, DType::Q8_0),
    row("F16", 1, DType::F16),
    row("BF16", 32, DType::BF16),
    row("F32", 0, DType::F32),
];

impl FileType {
    /// All names, smallest first.
    pub fn all() -> impl Iterator<Item = FileType> {
        FILE_TYPES.iter().copied()
    }

    /// By name, ignoring case, or by number; Q3_K, Q4_K and Q5_K are short for the mixes that end in _M.
    pub fn from_name(name: &str) -> Option<FileType> {
        let name = match name.to_ascii_uppercase().as_str() {
            short @ ("Q3_K" | "Q4_K" | "Q5_K") => format!("{short}_M"),
            name => name.to_owned(),
        };
        FileType::all().find(|row| row.name == name || name.parse() == Ok(row.id))
    }

    /// The name of a file that has mostly tensors of this type: that of the type, where there is such a name.
    pub fn of(dtype: DType) -> Option<FileType> {
        let same = FileType::from_name(dtype.name()).filter(|row| row.dtype == dtype);
        same.or_else(|| FileType::all().find(|row| row.dtype == dtype))
    }

    /// The name.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// The number in `general.file_type`.
    pub fn id(self) -> u32 {
        self.id
    }

    /// The type of most tensors.
    pub fn dtype(self) -> DType {
        self.dtype
    }
}

impl fmt::Display for FileType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_any_case_by_number_and_in_short() {
        for found in FileType::all() {
            assert_eq!(FileType::from_name(&found.name().to_lowercase()), Some(found));
        }
        assert_eq!(FileType::from_name("q4_k").map(FileType::name), Some("Q4_K_M"));
        assert_eq!(FileType::from_name("15").map(FileType::name), Some("Q4_K_M"));
        assert_eq!(FileType::from_name("Q9_0"), None);
        for (dtype, name) in [(DType::Q4_K, "Q4_K_M"), (DType::IQ2_S, "IQ2_M"), (DType::F16, "F16")] {
            assert_eq!(FileType::of(dtype).map(FileType::name), Some(name));
        }
        assert_eq!(FileType::of(DType::I32), None);
    }
}

//! Errors of model files: each names the field, its offset and what to do.

use std::{fmt, io, path::PathBuf};

use quadriga_graph::DType;

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model file could not be read, queried or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The operation: "open", "map", "rename".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The path names a folder, a pipe or a device.
    #[error("{} is not a regular file", path.display())]
    NotAFile {
        /// The path given.
        path: PathBuf,
    },
    /// A mapped file has become shorter: reading what was cut off would end the process.
    #[error(
        "{} has shrunk from {mapped} to {found} bytes while it was open; close it, or read it into memory instead of mapping it",
        path.display()
    )]
    Shrunk {
        /// The file.
        path: PathBuf,
        /// Its size when it was mapped.
        mapped: u64,
        /// Its size now.
        found: u64,
    },

    /// The file violates the format.
    #[error("{}{error}", at(path))]
    Format {
        /// The file, when it was opened by its path.
        path: Option<PathBuf>,
        /// The field, its offset and the rule it violates.
        error: FieldError,
    },
    /// The file is one part of a split model, and its name does not follow the scheme of split files.
    #[error(
        "{} is part {number} of {count}, but its name does not say so: rename the parts to \
         NAME-{number:05}-of-{count:05}.gguf and so on, then open any of them",
        path.display()
    )]
    SplitName {
        /// The file that was opened.
        path: PathBuf,
        /// The part number in the file, counted from 1.
        number: u64,
        /// The number of parts in the file.
        count: u64,
    },
    /// A required key is not in the file.
    #[error("the file has no key {key:?}")]
    MissingKey {
        /// The requested key.
        key: String,
    },
    /// A key's value is not of the requested type, or does not fit in it.
    #[error("key {key:?} should be {expected}, but is {found}")]
    WrongType {
        /// The requested key.
        key: String,
        /// The requested type.
        expected: String,
        /// The type, and for a number the value, in the file.
        found: String,
    },
    /// A required tensor is not in the file.
    #[error("the file has no tensor {name:?} among its {count}")]
    MissingTensor {
        /// The requested name.
        name: String,
        /// How many tensors the file has.
        count: usize,
    },
    /// A key or tensor given to the writer violates the format.
    #[error("cannot write {field}: {kind}")]
    Unwritable {
        /// The key or tensor.
        field: String,
        /// The rule it violates.
        kind: FormatErrorKind,
    },
    /// A tensor's data source wrote more or fewer bytes than its type and shape require.
    #[error("the data of tensor {name:?} should be {expected} bytes, but its source wrote {found}")]
    DataLength {
        /// The tensor.
        name: String,
        /// The bytes that its type and shape require.
        expected: u64,
        /// The bytes written; if there were too many, the count at which writing stopped.
        found: u64,
    },
    /// A tensor's data source, or the output stream, failed.
    #[error("{what} could not be produced or written: {source}")]
    Stream {
        /// The metadata, or the data of a tensor.
        what: String,
        /// The error of the source or the stream.
        source: io::Error,
    },
}

fn at(path: &Option<PathBuf>) -> String {
    path.as_ref().map(|path| format!("{}: ", path.display())).unwrap_or_default()
}

/// A field that violates the format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// The field: "tensor count", "value of key \"general.alignment\"".
    pub field: String,
    /// Where the field starts, in bytes from the start of the file.
    pub offset: u64,
    /// The rule it violates.
    pub kind: FormatErrorKind,
}

impl FieldError {
    pub(crate) fn new(field: impl fmt::Display, offset: usize, kind: FormatErrorKind) -> FieldError {
        FieldError { field: field.to_string(), offset: offset as u64, kind }
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {}: {}", self.field, self.offset, self.kind)
    }
}

impl std::error::Error for FieldError {}

/// The rule of the format that a field violates.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum FormatErrorKind {
    #[error("the file ends too early: {expected} bytes are needed, {left} are left (incomplete download?)")]
    Truncated { expected: u64, left: u64 },
    #[error(
        "{count} items of at least {min_bytes} bytes each do not fit in the {left} bytes that are left \
         (incomplete download?)"
    )]
    TooMany { count: u64, min_bytes: u64, left: u64 },
    #[error("not a GGUF file: it does not start with \"GGUF\"")]
    Magic { found: [u8; 4] },
    #[error(
        "GGUF version {found} is not supported (2 and 3 are); convert the model again with a current converter"
    )]
    Version { found: u32 },
    #[error(
        "the file was written for a {} machine and this one is not; convert it, for example with the \
         gguf-convert-endian command of the Python package gguf",
        if cfg!(target_endian = "little") { "big-endian" } else { "little-endian" }
    )]
    ForeignByteOrder,
    #[error("not valid UTF-8")]
    NotUtf8,
    #[error("a bool must be 0 or 1, not {found}")]
    Bool { found: u8 },
    #[error("value type {found} is unknown")]
    ValueType { found: u32 },
    #[error("arrays are nested more than {limit} deep")]
    TooDeep { limit: u32 },
    #[error("the name is empty")]
    EmptyName,
    #[error("the name is {len} bytes long, more than {limit}")]
    LongName { len: u64, limit: u64 },
    #[error("the name appears twice; first at byte {first}")]
    Duplicate { first: u64 },
    #[error("the name is already in use")]
    NameInUse,
    #[error("should be {expected}, but is {found}")]
    WrongType { expected: &'static str, found: String },
    #[error("alignment {found} is not a power of two between {min} and {max}")]
    Alignment { found: u64, min: u64, max: u64 },
    #[error("{found} dimensions; a tensor has 1 to {max}")]
    DimensionCount { found: u64, max: u64 },
    #[error("a dimension of {found}; each must be at least 1")]
    Dimension { found: i64 },
    #[error("the number of elements, or of bytes, overflows")]
    TooLarge,
    #[error("tensor type id {found} is unknown: removed from the format, or newer than this program")]
    TensorType { found: u32 },
    #[error("rows of {len} elements are not whole blocks of {block} ({dtype})")]
    PartialBlock { len: u64, block: u64, dtype: DType },
    #[error("data offset {found} is not a multiple of the alignment {alignment}")]
    Misaligned { found: u64, alignment: u64 },
    #[error(
        "{len} bytes of data at offset {start} of the data section do not fit in its {available} bytes: the file has {found} bytes, but its tensors need {expected} (incomplete download?)"
    )]
    OutOfRange { start: u64, len: u64, available: u64, found: u64, expected: u64 },
    #[error("its data overlaps that of tensor {other:?}")]
    Overlap { other: String },
    #[error("this is part {found} of a split model where part {expected} is expected (counted from 0)")]
    SplitNumber { found: u64, expected: u64 },
    #[error("the model is split into {found} parts, but {expected} were given")]
    SplitCount { found: u64, expected: u64 },
    #[error("the parts together should have {expected} tensors, but have {found}")]
    SplitTensors { found: u64, expected: u64 },
    #[error("a part of a split model lacks this key")]
    SplitKey,
}

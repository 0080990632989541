//! What can go wrong with a model file, said with the field, the offset and the way out.

use std::{fmt, io, path::PathBuf};

use quadriga_graph::DType;

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model file could not be read, asked or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system refused something.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried: "open", "map", "rename".
        action: &'static str,
        /// The file or folder it was tried on.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The path names a folder, a pipe or a device.
    #[error("{} is not a regular file", path.display())]
    NotAFile {
        /// The path given.
        path: PathBuf,
    },
    /// The file's content breaks the format.
    #[error("{}{fault}", at(path))]
    Format {
        /// The file, when it was opened by its path.
        path: Option<PathBuf>,
        /// The field, its offset and what is wrong with it.
        fault: Fault,
    },
    /// The file is one part of several, and its name does not say how the others are called.
    #[error(
        "{} is part {number} of {count}, but is not named so: rename the parts to \
         NAME-{number:05}-of-{count:05}.gguf and so on, then open any of them",
        path.display()
    )]
    SplitName {
        /// The file opened.
        path: PathBuf,
        /// Which part it says it is, counted from 1.
        number: u64,
        /// How many parts it says there are.
        count: u64,
    },
    /// A key that is needed is not in the file.
    #[error("the file has no key {key:?}")]
    MissingKey {
        /// The key asked for.
        key: String,
    },
    /// A key's value is not of the type asked for, or does not fit in it.
    #[error("key {key:?} should be {wanted}, but is {found}")]
    WrongType {
        /// The key asked for.
        key: String,
        /// The type asked for.
        wanted: String,
        /// The type, and for a number the value, in the file.
        found: String,
    },
    /// A tensor that is needed is not in the file.
    #[error("the file has no tensor {name:?} among its {count}")]
    MissingTensor {
        /// The name asked for.
        name: String,
        /// How many tensors the file has.
        count: usize,
    },
    /// A file that breaks the format was about to be written.
    #[error("cannot write {field}: {problem}")]
    Unwritable {
        /// The key or tensor at fault.
        field: String,
        /// What is wrong with it.
        problem: FormatErrorKind,
    },
    /// A tensor's data source gave more or fewer bytes than its type and shape call for.
    #[error("the data of tensor {name:?} should be {wanted} bytes, but its source gave {found}")]
    DataLength {
        /// The tensor.
        name: String,
        /// Bytes that its type and shape call for.
        wanted: u64,
        /// Bytes given; when too many were offered, the count at which writing stopped.
        found: u64,
    },
    /// A tensor's data source failed, or the stream that was written to.
    #[error("{what} could not be produced or written: {source}")]
    Stream {
        /// The metadata, or the data of a tensor.
        what: String,
        /// What the source, or the system, said.
        source: io::Error,
    },
}

fn at(path: &Option<PathBuf>) -> String {
    path.as_ref().map(|path| format!("{}: ", path.display())).unwrap_or_default()
}

/// One thing wrong in a file: which field, where, and what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The field: "tensor count", "value of key \"general.alignment\"".
    pub field: String,
    /// Where the field starts, in bytes from the start of the file.
    pub offset: u64,
    /// What is wrong with it.
    pub problem: FormatErrorKind,
}

impl Fault {
    pub(crate) fn new(field: impl fmt::Display, offset: usize, problem: FormatErrorKind) -> Fault {
        Fault { field: field.to_string(), offset: offset as u64, problem }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {}: {}", self.field, self.offset, self.problem)
    }
}

impl std::error::Error for Fault {}

/// What is wrong with a field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum FormatErrorKind {
    #[error("the file ends too early: {wanted} bytes are needed, {left} are left")]
    Truncated { wanted: u64, left: u64 },
    #[error("{count} items of at least {least} bytes each do not fit in the {left} bytes that are left")]
    TooMany { count: u64, least: u64, left: u64 },
    #[error("not a GGUF file: it starts with {found:02x?} instead of \"GGUF\"")]
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
    #[error("a truth value must be 0 or 1, not {found}")]
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
    Twice,
    #[error("should be {wanted}, but is {found}")]
    Kind { wanted: &'static str, found: String },
    #[error("alignment {found} is not a power of two between {least} and {most}")]
    Alignment { found: u64, least: u64, most: u64 },
    #[error("{found} dimensions; a tensor has 1 to {most}")]
    DimensionCount { found: u64, most: u64 },
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
    #[error("{len} bytes of data at offset {start} of the data section do not fit in its {available} bytes")]
    OutOfRange { start: u64, len: u64, available: u64 },
    #[error("its data overlaps that of tensor {other:?}")]
    Overlap { other: String },
    #[error("this is part {found} of a split model where part {wanted} is expected (counted from 0)")]
    SplitNumber { found: u64, wanted: u64 },
    #[error("the model is split in {found} parts, but {wanted} are at hand")]
    SplitCount { found: u64, wanted: u64 },
    #[error("the parts together should have {wanted} tensors, but have {found}")]
    SplitTensors { found: u64, wanted: u64 },
    #[error("a part of a split model lacks this key")]
    SplitKey,
}

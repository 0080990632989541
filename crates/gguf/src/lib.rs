//! GGUF model files: a checked reader over a file map, and a writer.
//!
//! [`File::open`] maps a file (or all parts of a split one), checks every field of it once, and hands out metadata
//! and tensors without copying them. A file that breaks the format is an [`Error`] that names the field, its offset
//! and what is wrong; it is never a panic, and never costs more memory than the file itself warrants.
mod cursor;
mod data;
mod error;
mod file;
mod from_value;
mod known;
mod map;
mod parse;
mod split;
mod tensor;
mod value;

pub use data::Data;
pub use error::{Error, Fault, Problem, Result};
pub use file::File;
pub use from_value::FromValue;
pub use tensor::Tensor;
pub use value::{Array, Value, ValueType, Values};

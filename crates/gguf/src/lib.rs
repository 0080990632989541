//! Reads and writes GGUF model files, the format of llama.cpp: metadata, a tokenizer and quantized tensors.
//!
//! [`File::open`] maps a file (or all parts of a split model) into memory, validates every field once, and gives access
//! to metadata and tensors without copying them. An invalid file is an [`Error`] that names the field, its offset and
//! the rule it violates; it never causes a panic or an allocation larger than the file justifies. [`Writer`] streams
//! tensors into a new file, which replaces its target only when it is complete.
//!
//! ```
//! use quadriga_gguf::{File, Writer};
//! use quadriga_graph::DType;
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("tiny.gguf");
//! let mut writer = Writer::new();
//! writer.set("general.architecture", "llama")?;
//! writer.set("llama.block_count", 1u32)?;
//! writer.set("tokenizer.ggml.tokens", ["<s>", "hello"])?;
//! // Two rows of three: outermost dimension first.
//! writer.tensor("blk.0.attn_norm.weight", DType::F32, [2, 3], |out| {
//!     (0..6).try_for_each(|index| out.write_all(&(index as f32).to_ne_bytes()))
//! })?;
//! writer.write(&path)?;
//!
//! let file = File::open(&path)?;
//! assert_eq!(file.get::<usize>("llama.block_count")?, 1);
//! assert_eq!(file.get::<Vec<&str>>("tokenizer.ggml.tokens")?, ["<s>", "hello"]);
//! assert_eq!(file.find::<&str>("general.name")?, None);
//! let tensor = file.tensor("blk.0.attn_norm.weight")?;
//! assert_eq!((tensor.dtype(), tensor.byte_len()), (DType::F32, 24));
//! assert_eq!(tensor.shape().dims(), [2, 3]);
//! // A tensor can be a weight of a graph; its bytes stay in the file map.
//! let graph = quadriga_graph::GraphBuilder::new();
//! graph.weight("norm", tensor);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod atomic_file;
mod cursor;
mod error;
mod file;
mod from_value;
mod known;
mod map;
mod on_demand;
mod owned;
mod parse;
mod split;
mod summary;
mod tensor;
mod value;
mod writer;

pub use error::{Error, FieldError, FormatErrorKind, Result};
pub use file::File;
pub use from_value::FromValue;
pub use owned::OwnedValue;
pub use split::SplitName;
pub use summary::{Summary, TokenizerSummary, TypeTotal};
pub use tensor::Tensor;
pub use value::{Array, Value, ValueType, Values};
pub use writer::Writer;

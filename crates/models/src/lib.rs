//! Model files: get them from a hub, convert them to GGUF, quantize them, judge the result, split and merge them.
//!
//! | module | contents |
//! |---|---|
//! | [`hub`] | download from Hugging Face's API into a content-addressed cache |
//! | [`convert`] | safetensors folders to GGUF |
//! | [`quantize`] | GGUF to GGUF with smaller types, per tensor, by name or by a size to fit |
//! | [`importance`] | importance matrices: how much each input of a weight matrix matters |
//! | [`quality`] | perplexity, KL divergence and error per tensor |
//! | [`shards`] | split GGUF files and merge them |
//! | [`lora`] | low-rank adapters |

pub mod convert;
mod divergence;
mod error;
pub mod hub;
pub mod importance;
pub mod lora;
mod output_path;
pub mod quality;
pub mod quantize;
pub mod shards;

pub use error::{Error, Result};
pub use output_path::{OutputIsInput, check_output};

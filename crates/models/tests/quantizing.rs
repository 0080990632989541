//! Quantization: the error of each type, files, options, mixes, importance matrices and interrupted runs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

#[path = "quantizing/errors.rs"]
mod errors;
#[path = "quantizing/files.rs"]
mod files;
#[path = "quantizing/importance.rs"]
mod importance;
#[path = "quantizing/mixes.rs"]
mod mixes;
#[path = "quantizing/random.rs"]
mod random;

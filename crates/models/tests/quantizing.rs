//! Quantization: the error of each type, files, options, mixes, importance matrices and interrupted runs.

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

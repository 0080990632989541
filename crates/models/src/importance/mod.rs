//! Importance matrices: how much each input of a weight matrix contributes, measured on a text.

mod collect;
mod file;
mod legacy;
mod matrix;

pub use crate::error::ImportanceError;
pub use collect::collect;
pub use matrix::{ImportanceEntry, ImportanceMatrix};

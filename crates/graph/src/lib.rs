//! What is computed: element types, block formats, shapes, operations and the graph builder.

pub mod blocks;
mod dtype;

pub use dtype::DType;

//! What is computed: element types, block formats, shapes, operations and the graph builder.

mod dtype;

pub use dtype::DType;

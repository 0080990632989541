//! Tensor graphs: element types, quantized block formats, shapes, operations and a builder with shape inference.
//!
//! A [`Graph`] describes a computation and executes nothing: tensors with a type, a shape and byte strides, and nodes
//! in execution order. A [`GraphBuilder`] builds and checks it; afterwards it is immutable. `quadriga-runtime` assigns
//! it to backends and runs it.
//!
//! ```
//! use quadriga_graph::{DType, GraphBuilder, Pairing, Rope, Weight};
//!
//! let g = GraphBuilder::new();
//! let x = g.input("x", DType::F32, [5, 256]);
//! let positions = g.input("positions", DType::I32, [5]);
//! let wq = g.weight("q", Weight::new(DType::Q8_0, [256, 256]));
//! let q = {
//!     let g = g.scope("attention");
//!     g.mul_mat(wq, x.rms_norm(1e-5)).reshape([5, 4, 64]).rope(Rope::new(64, Pairing::Adjacent, 1e4), positions, None)
//! };
//! g.output("q", q);
//! let graph = g.finish()?;
//! assert_eq!(graph.nodes().len(), 4);
//! println!("{graph}");
//! # Ok::<(), quadriga_graph::BuildError>(())
//! ```

#![forbid(unsafe_code)]

mod attention_options;
pub mod blocks;
mod builder;
mod collective_values;
mod construction;
mod conv_values;
mod custom;
mod data;
mod dtype;
mod error;
mod expert_values;
mod fingerprint;
mod graph;
mod graph_hash;
mod names;
mod operators;
mod ops;
mod order;
mod print;
mod shape;
mod sparse_values;
mod tensor;
mod transposed;
mod value;

pub use attention_options::AttentionOptions;
pub use builder::{GraphBuilder, Scope, Weight};
pub use custom::{
    CustomCall, CustomError, CustomFunction, CustomInput, CustomKernel, CustomOp, CustomOutput, CustomValues,
};
pub use data::{Data, PagedBytes};
pub use dtype::DType;
pub use error::{BuildError, GraphErrorKind};
pub use expert_values::DeltaRuleInputs;
pub use fingerprint::Fingerprint;
pub use graph::{Graph, Node};
pub use names::layer_of;
pub use ops::{
    Attention, Binary, Collective, CollectiveKind, Declaration, ExpertWeights, Gate, GatedDeltaRule,
    GroupScore, Interpolation, Op, Order, PAGE_SLOTS, Pairing, Pooling, Ranks, Rope, SelectExperts, Unary,
    Window,
};
pub use order::OrderError;
pub use shape::{MAX_DIMS, Shape, Strides};
pub use tensor::{NodeId, Tensor, TensorId, TensorKind};
pub use value::Value;

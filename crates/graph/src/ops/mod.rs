//! The operations of a graph: parameters ([`Op`], parameters.rs), names and in-place inputs ([`Op::declaration`]), and the inference
//! rules that derive a result's type and shape from the inputs'.
//!
//! To add one: a variant of [`Op`] and a line in `declaration` (op.rs), a line in `infer` (infer.rs) with its rule in
//! one of the files here, and a method of [`Value`](crate::Value). The conformance oracle then defines its exact
//! result, and each backend implements it.

mod attention;
mod checks;
mod collective;
mod conv;
mod elementwise;
mod experts;
mod infer;
mod layout;
mod matrix;
mod op;
mod parameters;
mod recurrent;
mod reduce;
mod rope;
mod rows;
mod sparse;
mod window;

pub(crate) use checks::{Inferred, ResultMemory};
pub use collective::{Collective, CollectiveKind, Ranks};
pub use op::{Declaration, Op};
pub use parameters::{
    Attention, Binary, ExpertWeights, Gate, GatedDeltaRule, GroupScore, Interpolation, Order, PAGE_SLOTS,
    Pooling, SelectExperts, Unary,
};
pub use rope::{Pairing, Rope};
pub use window::Window;

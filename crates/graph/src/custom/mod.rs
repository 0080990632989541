//! Custom operations: a caller's own object or closures as an operation of a graph.
//!
//! A [`CustomKernel`] has a name, a rule that infers the result's type and shape, and code that computes it on the CPU.
//! A [`CustomOp`] is a shared handle on one, which [`Op::Custom`](crate::Op::Custom) carries. Planning, memory, traces
//! and conformance treat it as any other operation.

mod call;
mod error;
mod function;
mod kernel;
mod op;

pub use call::{CustomCall, CustomInput, CustomOutput, CustomValues};
pub use error::CustomError;
pub use function::CustomFunction;
pub use kernel::CustomKernel;
pub use op::CustomOp;

//! Compute kernels.
//!
//! Kernels know nothing of graphs. They take matrices as checked views ([`matmul::Input`], [`matmul::Output`], …) and
//! a [`Worker`](crate::pool::Worker): every thread of a run calls the same kernel with the same views, and the kernel
//! distributes the work among them. Results never depend on the number of threads.

pub mod attention;
pub(crate) mod delta_chunk;
mod error;
pub mod matmul;
pub(crate) mod recurrent;
pub mod vec;

pub use error::KernelError;

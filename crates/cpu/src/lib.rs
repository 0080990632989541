//! The CPU backend: a thread pool and kernels per instruction set.

pub mod isa;
pub mod kernels;
pub mod pool;

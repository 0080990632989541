//! Kernels and the thread pool, for this crate's own tests and benchmarks. **Not part of the API**: anything in here
//! may change or go in any release. Functions that rely on a promise of their caller are `unsafe`.

/// Kernels on rows and matrices in memory; see the crate's `kernels` module.
pub mod kernels {
    pub use crate::kernels::{KernelError, attention, matmul, vec};
}

/// The thread pool; see the crate's `pool` module.
pub mod pool {
    pub use crate::pool::{Latches, MAX_THREADS, Pool, PoolError, Stopped, Worker};
}

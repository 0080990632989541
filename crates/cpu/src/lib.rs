//! The CPU backend: a thread pool and kernels per instruction set.

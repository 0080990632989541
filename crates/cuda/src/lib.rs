//! The CUDA backend: driver and compiler loaded at run time.

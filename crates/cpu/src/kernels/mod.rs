//! Kernels: the arithmetic, one file per family and purpose.

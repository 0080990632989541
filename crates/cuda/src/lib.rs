//! The CUDA backend: driver, compiler and cuBLAS loaded at run time.
//!
//! The crate builds where there is no CUDA; [`device_count`] says what a machine has, or why it has nothing:
//!
//! ```
//! match quadriga_cuda::device_count() {
//!     Ok(count) => println!("{count} CUDA devices"),
//!     Err(reason) => println!("no CUDA device: {reason}"),
//! }
//! ```
//!
//! A split is lowered to launches (`lower/`), captured once as a CUDA graph (`program.rs`) and replayed for every run;
//! inputs and positions live in device memory, so the same graph serves every token. The kernels are in `kernels/`.

mod backend;
mod blas;
mod buffer;
mod context;
mod error;
mod event;
mod faults;
mod gaps;
mod kernels;
mod launch;
mod lower;
mod program;
mod queue;
mod small;

pub use backend::{CudaBackend, device_count};
pub use error::CudaError;

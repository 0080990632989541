//! The CPU backend: a thread pool and kernels per instruction set.
//!
//! [`Backend`] computes every operation of `quadriga-graph`. The kernels are chosen when it is made, by what the CPU
//! can do (see [`isa`]); results do not depend on the number of threads.
//!
//! ```
//! use quadriga_cpu::Backend;
//! use quadriga_runtime::{Backend as _, Usage};
//!
//! let backend = Backend::builder().threads(2).build()?;
//! let buffer = backend.allocate(1024, Usage::Compute)?;
//! buffer.write(0, &[1, 2, 3])?;
//! backend.set_threads(1)?;
//! println!("{}", backend.device().description);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A split is compiled into a list of steps ([`compile`](Backend) resolves addresses and picks kernels once), which
//! run in one wake of the threads with a barrier between steps. Neighbouring operations that are too small to share
//! out, or that only look at each other's rows, become one step.

mod backend;
mod buffer;
mod chains;
mod compile;
mod fuse;
#[doc(hidden)]
pub mod internals;
pub mod isa;
mod kernels;
mod memory;
mod ops;
mod partition;
mod places;
mod pool;
mod profile;
mod program;
mod queue;
mod step;
mod view;
mod weights;

pub use backend::{Backend, Builder, Error, FUSE_VARIABLE};
pub use memory::ALIGNMENT;
pub use pool::{MAX_THREADS, PoolError};
pub use profile::{Profile, Spent};

/// The name of the backend.
pub const NAME: &str = "cpu";

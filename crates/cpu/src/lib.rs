//! A CPU backend for the tensor graphs of `quadriga-graph`: kernels for AVX2, AVX-512 and AMX (and plain Rust for any other
//! CPU), and a thread pool that runs a whole split with one wake-up. Give a [`Backend`] to a scheduler of
//! `quadriga-runtime`, alone or beside other devices.
//!
//! ```
//! use quadriga_cpu::Backend;
//! use quadriga_graph::{DType, GraphBuilder};
//! use quadriga_runtime::{Scheduler, Session};
//!
//! let g = GraphBuilder::new();
//! let (x, y) = (g.input("x", DType::F32, [2, 3]), g.input("y", DType::F32, [2, 3]));
//! g.output("sum", x.add(y));
//!
//! let cpu = Backend::new()?;
//! let mut session = Session::new(&Scheduler::new(cpu))?;
//! session.use_graph(g.finish()?)?;
//! session.run(&[("x", &[1.0_f32; 6]), ("y", &[2.0_f32; 6])])?;
//! assert_eq!(session.read::<f32>("sum")?, [3.0; 6]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The kernels are chosen when the backend is built, by the instruction sets of the CPU (see [`isa`]). Results do not
//! depend on the number of threads.
//!
//! A split is compiled once into a list of steps: addresses are resolved and checked, kernels are chosen, and operations
//! are fused. A run wakes the threads once; they meet at a barrier between steps.
//!
//! # Environment variables
//!
//! | variable | meaning | in code |
//! |---|---|---|
//! | `QUADRIGA_ISA` | instruction set of the kernels: `scalar`, `avx2`, `avxvnni`, `avx512` or `amx` [default: the best available] | [`BackendBuilder::isa`] |
//! | `QUADRIGA_FUSE` | `0` turns fusion off: every operation is a step of its own [default: on] | [`BackendBuilder::fuse`] |

mod backend;
mod buffer;
mod compile;
mod environment;
mod feed_forward;
mod fusion;
#[doc(hidden)]
pub mod internals;
pub mod isa;
mod kernels;
mod memory;
pub mod numa;
mod ops;
mod partition;
mod places;
mod pool;
mod profile;
mod program;
mod prologue;
mod queue;
#[cfg(unix)]
mod reservations;
mod state;
mod step;
mod view;
mod weights;

pub use backend::{Backend, BackendBuilder, Error};
pub use environment::{FUSE_VARIABLE, ISA_VARIABLE, SKIP_VARIABLE};
pub use memory::ALIGNMENT;
pub use pool::{MAX_THREADS, PoolError};
pub use profile::{Profile, StepTotals};

/// The backend's name.
pub const NAME: &str = "cpu";

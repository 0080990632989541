//! A backend for NVIDIA GPUs: it compiles parts of a tensor graph into CUDA graphs and runs them. The driver is
//! loaded at run time, so the crate builds, and says what is missing, on machines without CUDA.
//!
//! ```no_run
//! use quadriga_graph::{DType, GraphBuilder};
//! use quadriga_runtime::Scheduler;
//!
//! let g = GraphBuilder::new();
//! g.output("y", g.input("x", DType::F32, [256]).tanh());
//! let graph = g.finish()?;
//!
//! let plan = Scheduler::new(quadriga_cuda::Backend::new(0)?).plan(&graph)?;
//! let mut session = plan.session()?;
//! session.run(&[("x", &vec![0.5f32; 256])])?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A split is lowered to kernel launches and cuBLAS calls (`lower/`), captured once as a CUDA graph (`program.rs`) and
//! replayed for every run: inputs and positions are read from device memory, so one CUDA graph serves every token. The
//! kernels are in `kernels/`, and compiled in `images/`, which are part of the binary.
//!
//! # Requirements
//!
//! Compute capability 7.5 and a driver, 525 or newer. cuBLAS is used where it is installed; NVRTC, where kernels are to
//! be compiled from source. [`device_count`] says what a machine has:
//!
//! ```
//! match quadriga_cuda::device_count() {
//!     Ok(1) => println!("1 CUDA device"),
//!     Ok(count) => println!("{count} CUDA devices"),
//!     Err(reason) => println!("no CUDA device: {reason}"),
//! }
//! ```
//!
//! # Settings
//!
//! A [`Builder`] has a method for each setting; an environment variable is the default where that method is not called.
//!
//! | variable | method | meaning |
//! |---|---|---|
//! | `QUADRIGA_CUDA_FUSE=0` | [`Builder::fusion`] | one launch per operation; no programmatic dependent launch |
//! | `QUADRIGA_CUDA_SKIP=0` | – | rows of inactive neurons are computed, too: the same results bit for bit |
//! | `QUADRIGA_CUDA_BLAS=0` | [`Builder::cublas`] | disable cuBLAS, as if it were not installed |
//! | `QUADRIGA_CUDA_KERNELS=ptx` or `compile` | [`Builder::kernels`] | let the driver or NVRTC compile the kernels |
//! | `QUADRIGA_NCCL=1` or a path | [`Backend::connect_ranks`] | GPUs of several ranks exchange data through NCCL, with the library that the dynamic linker finds or that of the path |
//! | `QUADRIGA_CUDA_GAPS=1` | [`Builder::measure_idle_gaps`] | print the GPU's idle time between programs at the end |
//! | `QUADRIGA_CACHE=DIR` | [`Builder::cache_dir`] | kernels that were compiled on this machine are kept in `DIR/kernels`; default: `~/.cache/quadriga` |

mod backend;
mod blas;
mod buffer;
mod context;
mod custom;
mod error;
mod event;
mod faults;
mod idle_gaps;
mod inner;
mod kernels;
mod launch;
mod lower;
mod nccl;
mod options;
mod peers;
mod program;
mod queue;
mod slices;
mod small_copies;
mod stream;
mod tensor_map;

pub use backend::{Backend, Builder, device_count};
pub use custom::{CustomCode, FAMILY};
pub use error::Error;
pub use kernels::{KernelCompilation, observe_compilation};
pub use nccl::{NcclError, NcclRanks, nccl_is_enabled};
pub use options::KernelOrigin;

/// Whether there is a kernel for a node of a graph: the answer of every [`Backend`], which needs no device.
///
/// # Errors
/// The reason why there is none.
pub fn supports(
    graph: &quadriga_graph::Graph,
    node: quadriga_graph::NodeId,
) -> Result<(), quadriga_runtime::Refusal> {
    lower::supports(graph, node)
}

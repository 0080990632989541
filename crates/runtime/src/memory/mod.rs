//! Memory: which bytes every tensor gets, and for how long, decided before anything is allocated.
//!
//! Planning the memory of a graph is three questions, asked one after the other, each answered with plain data that can
//! be printed and checked:
//!
//! 1. **Who shares a storage?** ([`sharing`]) A view lies inside its source; an operation that writes into a tensor
//!    gives back that tensor's memory; and an operation that may run in place takes over the memory of an input that
//!    nobody reads after it. Everything else has a storage of its own. Weights, constants and state are placed once for
//!    all runs, so their storages are not the planner's to give.
//! 2. **How long does each storage live?** ([`lifetimes`]) From the step that first writes it to the last step that
//!    reads any tensor in it. Steps are node numbers, unless the caller says otherwise: nodes that run at the same time
//!    get the same step, and what another lane still reads is held up to a later one. Outputs live to the end.
//! 3. **Where does it go?** ([`packing`]) Storages with sizes and lifetimes are rectangles to be piled as low as
//!    possible, in one or several buffers for each backend.
//!
//! A [`Planner`] answers all three for a [`Request`] and writes the answers into a [`MemoryPlan`]: for each tensor its
//! backend, chunk and offset; for each backend the chunks to allocate, and the figures of a [`Forecast`]. [`check()`] judges
//! a plan without using anything that made it. Then, and only then, is there memory: an [`Arena`] holds a backend's
//! chunks, and all plans of a session share them.
//!
//! [`TensorAllocator`] stands beside all this: it places one tensor at a time, without a graph.
//!
//! ```
//! use quadriga_graph::{DType, GraphBuilder};
//! use quadriga_runtime::memory::{Memory, Planner, Request};
//!
//! let g = GraphBuilder::new();
//! let x = g.input("x", DType::F32, [8, 64]);
//! g.output("y", x.sqr().silu().add(x));
//! let graph = g.finish()?;
//!
//! let memories = [Memory::measuring("cpu", 64, None)];
//! let plan = Planner::default().plan(&Request::new(&graph, &memories))?;
//! // The input is kept for the next run; square, activation and sum are computed in one storage.
//! assert_eq!(plan.arena_bytes(0), 2 * 8 * 64 * 4);
//! println!("{plan}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod arena;
mod check;
mod error;
mod free_list;
pub mod lifetimes;
mod ordered_set;
pub mod packing;
mod placed_tensor;
mod plan;
mod planner;
mod request;
pub mod sharing;
mod tensor_allocator;

pub use arena::Arena;
pub use check::{Flaw, check};
pub use error::MemoryError;
pub use lifetimes::{Lifetime, barrier_steps};
pub use plan::{Alive, BackendForecast, BackendPlan, Forecast, MemoryPlan, Spot, Tenant};
pub use planner::Planner;
pub use request::{Extra, Hold, Inputs, Memory, Request};
pub use sharing::Sharing;
pub use tensor_allocator::{AllocatorError, LiveTensor, TensorAllocation, TensorAllocator};

pub(crate) use arena::purpose;
pub(crate) use placed_tensor::PlacedTensor;

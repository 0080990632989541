//! Memory planning: which bytes of which buffer each tensor of a graph gets, decided before anything is allocated.
//!
//! Tensors whose lifetimes do not overlap can share memory. A [`Planner`] turns a [`MemoryRequest`] (a graph, the
//! backend of each tensor, the step of each node) into a [`MemoryPlan`] in three stages, each with a result that can be
//! printed:
//!
//! 1. **Aliasing** ([`sharing`]): which tensors share one storage. Views lie in their source; an operation that can run
//!    in place writes its result over an input that nothing reads afterwards. Weights, constants and state keep the
//!    same memory in every run and are not planned.
//! 2. **Liveness** ([`liveness`]): the lifetime of each storage, from the first step that writes it to the last that
//!    reads it. A step is a node, unless the caller gives concurrent nodes the same step or extends a lifetime with a
//!    [`Hold`].
//! 3. **Packing** ([`packing`]): an offset for each storage such that storages with overlapping lifetimes do not
//!    overlap in memory and the total is small. This is offline *dynamic storage allocation* (DSA), which is NP-hard;
//!    the peak of live bytes is a lower bound.
//!
//! The plan has the location of each tensor, the buffers to allocate on each backend (*chunks*, one or, where the
//! backend limits the size of a buffer, several) and a [`Forecast`] of the bytes. [`check()`] verifies a plan with code
//! of its own. A session then allocates the chunks in one [`Arena`] per backend, which all of its plans share.
//!
//! [`TensorAllocator`] needs no graph: it allocates and frees single tensors in one buffer, best fit over a free list,
//! and reports its high-water mark.
//!
//! ```
//! use quadriga_graph::{DType, GraphBuilder};
//! use quadriga_runtime::memory::{BackendMemory, Planner, MemoryRequest};
//!
//! let g = GraphBuilder::new();
//! let x = g.input("x", DType::F32, [8, 64]);
//! g.output("y", x.sqr().silu().add(x));
//! let graph = g.finish()?;
//!
//! let memories = [BackendMemory::measuring("cpu", 64, None)];
//! let plan = Planner::default().plan(&MemoryRequest::new(&graph, &memories))?;
//! // The input is kept for the next run; square, activation and sum are computed in place in one storage.
//! assert_eq!(plan.arena_bytes(0), 2 * 8 * 64 * 4);
//! println!("{plan}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod arena;
mod check;
mod error;
mod free_list;
mod lifetime;
pub mod liveness;
mod ordered_set;
pub mod packing;
mod placed_tensor;
mod plan;
mod planner;
mod request;
pub mod sharing;
mod tensor_allocator;

pub use arena::Arena;
pub use check::{PlanViolation, check};
pub use error::MemoryError;
pub use lifetime::Lifetime;
pub use liveness::barrier_steps;
pub use plan::{
    BackendForecast, BackendPlan, Forecast, LiveStorage, MemoryPlan, StorageOwner, TensorLocation,
};
pub use planner::Planner;
pub use request::{BackendMemory, Extra, Hold, InputPolicy, MemoryRequest};
pub use sharing::Sharing;
pub use tensor_allocator::{AllocatorError, LiveTensor, TensorAllocation, TensorAllocator};

pub(crate) use arena::purpose;
pub(crate) use placed_tensor::PlacedTensor;

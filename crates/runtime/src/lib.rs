//! Where and when: backends, buffers, memory planning, scheduling and sessions.
//!
//! A [`Scheduler`] takes a graph and backends in order of preference, and makes a [`Plan`]: where each node runs, what
//! is copied between devices, and which bytes everything gets. A [`Session`] allocates, loads weights, compiles, and
//! runs plans over and over. A device takes part by implementing [`Backend`].
//!
//! ```
//! use std::sync::Arc;
//!
//! use quadriga_graph::{DType, Data, GraphBuilder, Weight};
//! use quadriga_runtime::{Backend, Scheduler};
//!
//! let n = 2;
//! let g = GraphBuilder::new();
//! let x = g.input("x", DType::F32, [n, 64]);
//! let ones = Data::from([1.0f32; 128 * 64].as_slice());
//! let w = g.weight("blk.0.ffn_up.weight", Weight::with_data(DType::F32, [128, 64], ones));
//! let y = g.scope("blk.0").mul_mat(w, x).silu();
//! g.output("y", y);
//! let graph = g.finish()?;
//!
//! let data = vec![0.5f32; n * 64];
//! let cpu: Arc<dyn Backend> = Arc::new(quadriga_cpu::Backend::new()?);
//! let sim = quadriga_sim::Sim::new("sim:0").build();
//! for backends in [vec![cpu.clone()], vec![sim, cpu]] {                 // preferred first
//!     let plan = Scheduler::new(backends).plan(&graph)?;                // pins, order, budget: builder methods
//!     println!("{plan}");                                               // splits, copies, bytes; {:#} says why
//!     let mut session = plan.session()?;
//!     session.run(&[("x", &data)])?;
//!     let out: Vec<f32> = session.read("y")?;
//!     assert!((out[0] - 32.0).abs() < 1e-3);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod backend;
mod cost;
mod error;
mod flow;
pub mod memory;
mod runtime_error;
mod schedule;
mod session;
mod trace;

pub use backend::{
    Backend, Buffer, Device, DeviceKind, Event, Layout, MemoryFacts, Program, Queue, Refusal, Region,
    SplitSource, StepTime, TensorPlace, Usage, WeightLayout, check_range, compute_once,
};
pub use cost::Cost;
pub use error::BackendError;
pub use runtime_error::{OverBudget, RuntimeError};
pub use schedule::{
    BackendBytes, BackendLine, Copy, CopyLine, Decision, Explanation, IntoGraph, LeafUse, NodeLine,
    PLAN_SCHEMA, Plan, Reason, ScheduleStep, Scheduler, Split, SplitLine, Splits, StorageLine, StorageUse,
    WeightStreaming,
};
pub use session::{Element, Fetched, Key, Observed, Progress, Session, Values, WeightStore};
pub use trace::{BackendTime, CopyTime, Detail, OperationTime, SplitTime, Stream, Trace};

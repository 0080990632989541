//! Runs a tensor graph on one or several processors at once: on the CPU, on GPUs, or split between them.
//!
//! A [`Scheduler`] takes a graph and backends in order of preference, and makes a [`Plan`]: which backend runs each
//! node, which tensors are copied between them, and where each tensor is in memory. A [`Session`] allocates the memory, loads the
//! weights, compiles, and runs plans any number of times. A processor takes part by implementing [`Backend`].
//!
//! ```
//! use quadriga_graph::{DType, Data, GraphBuilder, Weight};
//! use quadriga_runtime::Scheduler;
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
//! let cpu = quadriga_cpu::Backend::new()?;
//! let device = quadriga_sim::Sim::new("sim:0").device();    // a simulated accelerator
//! let scheduler = Scheduler::new((device, cpu))             // preferred first
//!     .budget(0, 1 << 30);                                  // also: placements, pins, effort
//! let plan = scheduler.plan(&graph)?;
//! println!("{plan}");                                       // splits, copies, bytes; {:#} adds reasons
//! let mut session = plan.session()?;
//! session.run(&[("x", &data)])?;
//! let out: Vec<f32> = session.read("y")?;
//! assert!((out[0] - 32.0).abs() < 1e-3);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![deny(unsafe_code)]

mod allocation_lock;
mod backend;
mod byte_text;
mod compute_once;
mod copy_region;
mod cost;
mod device;
mod environment;
mod error;
mod expert_rows;
mod flow;
mod host_memory;
pub mod memory;
mod ranks;
mod rates;
mod read_curve;
mod runtime_error;
mod schedule;
mod schedule_error;
mod session;
mod snapshot_error;
mod trace;
mod weights;

pub use backend::{
    Backend, Buffer, Event, Layout, Program, Queue, Refusal, Region, SliceSelection, SplitSource, StepTime,
    TensorPlace, WeightLayout, check_range, copy_plain_slice,
};
pub use byte_text::byte_text;
pub use compute_once::compute_once;
pub use copy_region::{CopyRoute, copy_region};
pub use cost::Cost;
pub use device::{Device, DeviceKind, MemoryFacts, Usage};
pub use environment::CHECK_PLANS_VARIABLE;
pub use error::BackendError;
pub use expert_rows::{ExpertRows, host_slowness};
pub use half::{bf16, f16};
pub use host_memory::HostMemory;
pub use ranks::{ExchangeCall, RankGroup, RankGroups};
pub use rates::Rates;
pub use read_curve::{ReadCurve, ReadPoint};
pub use runtime_error::{OverBudget, RuntimeError};
pub use schedule::{
    BackendBytes, BackendLine, Copy, CopyLine, CopySelection, Decision, Explanation, IntoBackend,
    IntoBackends, IntoGraph, LeafUse, NodeLine, PLAN_SCHEMA, Plan, Reason, ScheduleStep, Scheduler, Split,
    SplitLine, Splits, StorageLine, StorageUse, WeightStreaming, check_schedule,
};
pub use schedule_error::ScheduleError;
pub use session::{
    DEFAULT_UPLOAD_BYTES, Element, ModelId, Observed, ObservedRun, Observer, PendingRead, PlanKey,
    PlanLimits, PlanUsage, Session, SessionDebug, SessionMemory, SessionTensor, SliceUpload, StateInfo,
    TensorInfo, TensorRef, Values, WeightSlice,
};
pub use snapshot_error::SnapshotError;
pub use trace::{BackendTime, CopyTime, Detail, OperationTime, SplitTime, Stream, Trace};
pub use weights::Progress;

//! Where and when: backends, buffers, memory planning, scheduling and sessions.

#![forbid(unsafe_code)]

mod backend;
mod error;
pub mod memory;
mod runtime_error;
mod schedule;
mod session;

pub use backend::{
    Backend, Buffer, Device, DeviceKind, Event, Layout, MemoryFacts, Place, Program, Queue, Refusal, Region,
    SplitSource, Usage, WeightLayout, check_range, compute_once,
};
pub use error::BackendError;
pub use runtime_error::{OverBudget, RuntimeError};
pub use schedule::{
    BackendBytes, Copy, Decision, Explanation, IntoGraph, LeafUse, NodeLine, Plan, Reason, Scheduler, Split,
    Splits, Step,
};
pub use session::{Element, Key, Observed, Progress, Session, Values, WeightStore};

//! The schedule: where each node of a graph runs, in what pieces, with which copies between devices.
//!
//! One direction, each stage plain data: [`flow`](crate::flow) lays out who computes what from what, [`assign`] gives
//! every storage a backend, [`split`] cuts each backend's nodes into splits and finds the copies, [`order`] says in what
//! order they are handed out, [`space`] asks the memory planner for their bytes; a [`Plan`] holds the answers and
//! [explains](explain) them.

mod assign;
mod check;
mod explain;
mod explanation;
mod lend;
mod order;
mod plan;
mod scheduler;
mod settle;
mod space;
mod split;

pub use assign::Reason;
pub use explanation::{
    BackendLine, CopyLine, Explanation, NodeLine, PLAN_SCHEMA, SplitLine, StorageLine, StorageUse,
};
pub use lend::WeightStreaming;
pub use order::ScheduleStep;
pub use plan::{BackendBytes, Decision, Plan};
pub use scheduler::{IntoGraph, Scheduler};
pub use split::{Copy, LeafUse, Split, Splits};

pub(crate) use plan::Uses;
pub(crate) use space::Slot;

/// In arrays of backend numbers: none.
pub(crate) const NO_BACKEND: u16 = u16::MAX;

//! The schedule: where each node of a graph runs, in which splits, with which copies between backends.
//!
//! Stages in one direction, each with plain data as its result: [`flow`](crate::flow) has the producers and their
//! inputs, [`assign`] gives every storage a backend ([`streaming`] and [`settle`] refine it), [`split`] cuts each
//! backend's nodes into splits and finds the copies ([`selection`]: of which only some slices are needed), [`order`] orders them for issue, [`space`] requests their memory. A
//! [`Plan`] holds the results; [`explain`] prints them, [`explanation`] has them as data, [`check`] verifies them, [`staging`] adds up
//! the staging memory of copies.

mod assign;
mod bound;
mod check;
mod explain;
mod explanation;
mod into_backends;
mod into_graph;
mod knowledge;
mod order;
mod placement;
mod plan;
mod planning;
mod scheduler;
mod selection;
mod settle;
mod space;
mod split;
mod splits;
mod staging;
mod streaming;

pub use check::check_schedule;
pub use explanation::{
    BackendLine, CopyLine, Explanation, NodeLine, PLAN_SCHEMA, SplitLine, StorageLine, StorageUse,
};
pub use into_backends::{IntoBackend, IntoBackends};
pub use into_graph::IntoGraph;
pub use order::ScheduleStep;
pub use placement::Reason;
pub use plan::{BackendBytes, Decision, Plan};
pub use scheduler::Scheduler;
pub use splits::{Copy, CopySelection, LeafUse, Split, Splits};
pub use streaming::WeightStreaming;

pub(crate) use bound::{BoundStorage, BoundStorages};
pub(crate) use space::Slot;
pub(crate) use staging::MAX_PENDING_READS;

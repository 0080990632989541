//! The rules of schedules that a plan can break.

use thiserror::Error;

/// A rule that a schedule breaks, found by [`Plan::check`](crate::Plan::check). A scheduler never makes such a plan; if
/// one shows, it is a bug in it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum ScheduleError {
    #[error("the order names {step}, which does not exist")]
    UnknownStep { step: String },
    #[error("{step} is issued twice")]
    IssuedTwice { step: String },
    #[error("{step} is never issued")]
    NeverIssued { step: String },
    #[error("{step} is issued before {before}, which it waits for")]
    IssuedEarly { step: String, before: String },
    #[error("split {split} has no nodes, or nodes that do not exist")]
    SplitNodes { split: usize },
    #[error("the lane of backend {backend} does not have exactly its splits, in order")]
    Lane { backend: usize },
    #[error("copy {copy} is made to its own backend, or to one that does not exist")]
    CopyTarget { copy: usize },
    #[error("copy {copy} is made from a backend that does not have {tensor}")]
    CopySource { copy: usize, tensor: String },
    #[error("copy {copy} reaches beyond {tensor}")]
    CopyRange { copy: usize, tensor: String },
    #[error("copy {copy} does not wait for split {split}, which writes its source")]
    SourceNotAwaited { copy: usize, split: usize },
    #[error("copy {copy} does not wait for the indices that select its slices")]
    SelectionNotAwaited { copy: usize },
    #[error("copy {copy} has slices that are selected on another backend than its own")]
    SelectionElsewhere { copy: usize },
    #[error("{node} in split {split} reads other slices of copy {copy} than those that are selected for it")]
    OtherSlices { node: String, split: usize, copy: usize },
    #[error("{node} runs in split {split}, on another backend than its result's")]
    WrongBackend { node: String, split: usize },
    #[error("{node} runs twice")]
    NodeTwice { node: String },
    #[error("{node} never runs")]
    NeverRuns { node: String },
    #[error("{node} in split {split} reads {input}, which is not on its backend")]
    NotOnBackend { node: String, split: usize, input: String },
    #[error("{node} in split {split} reads {input} before it is computed")]
    NotComputed { node: String, split: usize, input: String },
    #[error("{node} in split {split} reads {input} after it was overwritten")]
    Overwritten { node: String, split: usize, input: String },
    #[error("split {split} reads copy {copy} without waiting for it")]
    CopyNotAwaited { split: usize, copy: usize },
    #[error("{node} in split {split} reads copy {copy}, which has other bytes than those of {input}")]
    StaleCopy { node: String, split: usize, copy: usize, input: String },
    #[error("split {split} overwrites what copy {copy} reads without waiting for it")]
    OverwrittenWhileCopied { split: usize, copy: usize },
    #[error("split {split} reuses the memory that copy {copy} reads without waiting for it")]
    ReleasedWhileCopied { split: usize, copy: usize },
    #[error("copy {copy} writes to memory that split {split} may still use")]
    CopyTargetInUse { split: usize, copy: usize },
    #[error("{node} is repeated in split {split}, which has no copy to write to")]
    NoMirror { node: String, split: usize },
    #[error("split {split} has nodes of both sides of a barrier")]
    AcrossBarrier { split: usize },
    #[error("split {split} passes a barrier without waiting for split {before}")]
    BarrierIgnored { split: usize, before: usize },
    #[error("{node} and {last} are collectives, and do not run in the graph's order")]
    CollectiveOrder { node: String, last: String },
}

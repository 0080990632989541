//! Times of one run: each split, each copy, each backend, as plain data.

use serde::Serialize;

/// When a split ran.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SplitTime {
    /// The split's number.
    pub split: usize,
    /// The backend's number.
    pub backend: usize,
    /// How many nodes it has.
    pub nodes: usize,
    /// Seconds from the start of the run.
    pub start: f64,
    /// How long it took.
    pub seconds: f64,
}

/// When a copy was made. One that goes through host memory has a time for each of its two legs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CopyTime {
    /// The copy's number.
    pub copy: usize,
    /// The backend that made it.
    pub backend: usize,
    /// How many bytes.
    pub bytes: usize,
    /// Seconds from the start of the run.
    pub start: f64,
    /// How long it took.
    pub seconds: f64,
}

/// What a backend spent its time on.
#[derive(Clone, Debug, PartialEq, Default, Serialize)]
pub struct BackendTime {
    /// The backend's name.
    pub backend: String,
    /// Seconds of all its splits.
    pub compute: f64,
    /// Seconds of all copies it made.
    pub copy: f64,
}

/// Times of one run. Those of asynchronous devices are from their own clocks, counted from the moment at which the
/// device began the run; the others are the host's.
#[derive(Clone, Debug, PartialEq, Default, Serialize)]
pub struct Trace {
    /// Seconds from start to end, by the host's clock.
    pub seconds: f64,
    /// The splits, in the order they were handed out.
    pub splits: Vec<SplitTime>,
    /// The copies, in the order they were handed out.
    pub copies: Vec<CopyTime>,
    /// The backends.
    pub backends: Vec<BackendTime>,
}

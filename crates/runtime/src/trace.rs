//! Times of one run: each split, each operation, each copy, each backend, as plain data.

use quadriga_graph::{Graph, NodeId};
use serde::Serialize;

/// How closely a run is timed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Detail {
    /// Splits and copies.
    #[default]
    Splits,
    /// Also what splits consist of, on backends that can tell (see [`Queue::run_timed`](crate::Queue::run_timed)).
    Operations,
}

/// Which of a backend's queues did something. A backend that keeps the host waiting has only one, whatever it does.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    /// The one that runs splits.
    Compute,
    /// The one that brings copies in.
    Incoming,
    /// Brings what is there before the run: weights that are lent, states as they were.
    Ahead,
    /// The one that sends copies out.
    Outgoing,
}

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

/// When an operation ran, or several that a backend computes as one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OperationTime {
    /// The split it belongs to.
    pub split: usize,
    /// The backend's number.
    pub backend: usize,
    /// The numbers of the nodes.
    pub nodes: Vec<usize>,
    /// What it does: `mul_mat × 3`, `add + rms_norm + mul`.
    pub operation: String,
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
    /// The queue of that backend.
    pub stream: Stream,
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
    /// The operations of each split, in order; only with [`Detail::Operations`], and only of backends that can tell.
    pub operations: Vec<OperationTime>,
    /// The copies, in the order they were handed out.
    pub copies: Vec<CopyTime>,
    /// The backends.
    pub backends: Vec<BackendTime>,
}

/// What some nodes do together, in words.
pub(crate) fn operation(graph: &Graph, nodes: &[NodeId]) -> String {
    if nodes.is_empty() {
        return "preparation".to_owned();
    }
    let mut parts: Vec<(&str, usize)> = Vec::new();
    for node in nodes {
        let name = graph.get_node(*node).map_or("", |node| node.op().name());
        match parts.last_mut() {
            Some((last, count)) if *last == name => *count += 1,
            _ => parts.push((name, 1)),
        }
    }
    let part = |(name, count): (&str, usize)| match count {
        1 => name.to_owned(),
        _ => format!("{name} × {count}"),
    };
    parts.into_iter().map(part).collect::<Vec<_>>().join(" + ")
}

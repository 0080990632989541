//! The times of one run as plain data: of each split, operation, copy and backend.

use quadriga_graph::{Graph, NodeId};
use serde::Serialize;

/// How closely a run is timed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Detail {
    /// Splits and copies.
    #[default]
    Splits,
    /// Also the operations of each split, on backends that time them (see [`Queue::run_timed`](crate::Queue::run_timed)).
    Operations,
}

/// The queues of a backend. A synchronous backend does everything in one queue; the stream is the purpose.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    /// Runs splits.
    Compute,
    /// Copies inputs, and results of other backends, to this one.
    Upload,
    /// Copies tensors that are there before the run to this backend: streamed weights, and states.
    Prefetch,
    /// Copies from this backend to others.
    Download,
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

/// When an operation ran, or several that a backend fuses.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OperationTime {
    /// The split it belongs to.
    pub split: usize,
    /// The backend's number.
    pub backend: usize,
    /// The numbers of the nodes.
    pub nodes: Vec<usize>,
    /// The operations: `mul_mat × 3`, `add + rms_norm + mul`.
    pub operation: String,
    /// Seconds from the start of the run.
    pub start: f64,
    /// How long it took.
    pub seconds: f64,
}

/// When a copy was made. One that goes through staging memory has two: to the staging memory and from it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CopyTime {
    /// The copy's number.
    pub copy: usize,
    /// The backend that made it.
    pub backend: usize,
    /// The queue of that backend.
    pub stream: Stream,
    /// How many bytes; at most as many, unless they are `exact`.
    pub bytes: usize,
    /// Whether only selected slices were copied; there are two such times if slices were prefetched.
    pub selected: bool,
    /// Whether so many bytes were copied. Of selected slices not all backends know.
    pub exact: bool,
    /// Seconds from the start of the run.
    pub start: f64,
    /// How long it took.
    pub seconds: f64,
}

/// The time that a backend spent computing and copying.
#[derive(Clone, Debug, PartialEq, Default, Serialize)]
pub struct BackendTime {
    /// The backend's name.
    pub backend: String,
    /// Seconds of all its splits.
    pub compute: f64,
    /// Seconds of all copies it made.
    pub copy: f64,
}

/// The times of one run, from [`SessionDebug::trace`](crate::SessionDebug::trace). Those of asynchronous devices are from
/// their own clocks, counted from the start of the run on the device; the others are from the host's clock.
///
/// ```
/// use quadriga_graph::{DType, GraphBuilder};
/// use quadriga_runtime::{Detail, Scheduler};
///
/// let g = GraphBuilder::new();
/// let x = g.input("x", DType::F32, [2, 8]);
/// g.output("y", x.sqr().silu());
///
/// let mut session = Scheduler::new(quadriga_cpu::Backend::new()?).plan(g.finish()?)?.session()?;
/// session.set("x", &[1.0f32; 16])?;
/// let trace = session.debug().trace(Detail::Splits)?;
/// assert_eq!((trace.splits.len(), trace.copies.len()), (1, 0));
/// assert!(trace.splits[0].seconds <= trace.seconds);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Default, Serialize)]
pub struct Trace {
    /// Seconds from start to end, by the host's clock.
    pub seconds: f64,
    /// The splits, in the order in which they were issued.
    pub splits: Vec<SplitTime>,
    /// The operations of each split, in order; only with [`Detail::Operations`], and only of backends that time them.
    pub operations: Vec<OperationTime>,
    /// The copies, in the order in which they were issued.
    pub copies: Vec<CopyTime>,
    /// The backends.
    pub backends: Vec<BackendTime>,
}

/// The names of the operations of some nodes.
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

#[cfg(test)]
mod tests {
    use quadriga_graph::{DType, GraphBuilder};

    use super::*;

    #[test]
    fn equal_operations_in_a_row_are_counted() {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [4]);
        g.output("y", x.sqr().sqr().sqr().sqrt().sqr().add(x));
        let graph = g.finish().unwrap();
        let nodes: Vec<NodeId> = graph.node_ids().collect();
        assert_eq!(operation(&graph, &nodes), "sqr × 3 + sqrt + sqr + add");
        assert_eq!(operation(&graph, &nodes[..1]), "sqr");
        assert_eq!(operation(&graph, &[]), "preparation");
    }
}

//! Liveness: the lifetime of each storage, from the step that first writes it to the last step that uses it.
//!
//! A use is a read or a write by a node, or a hold of the request; outputs are used to the end of the run. A view node
//! is no use, since it computes nothing; the readers of the view are. A result that nothing reads is used once, by the
//! node that writes it.

#![expect(
    clippy::indexing_slicing,
    reason = "arrays are sized by the graph's tensors, whose ids index them; ids from the caller are checked first"
)]

use quadriga_graph::{Graph, NodeId, TensorId, TensorKind};

use super::MemoryError;
use super::lifetime::Lifetime;
use super::request::{InputPolicy, MemoryRequest};
use crate::flow::{Flow, Producer};

/// The [steps](super::MemoryRequest::steps) of an execution order with barriers: nodes between two barriers share a
/// step, so memory is reused only at a barrier. Each slice of `groups` holds the nodes between two barriers; all other
/// nodes come before the first.
pub fn barrier_steps(graph: &Graph, groups: &[&[NodeId]]) -> Result<Vec<u32>, MemoryError> {
    let mut steps = vec![0; graph.nodes().len()];
    for (group, nodes) in groups.iter().enumerate() {
        for node in *nodes {
            let count = steps.len();
            let step = steps.get_mut(node.index()).ok_or(MemoryError::Length {
                what: "nodes",
                expected: count,
                found: node.index() + 1,
            })?;
            *step = u32::try_from(group + 1)
                .map_err(|_| MemoryError::Step { what: "a group of nodes".to_owned(), step: u32::MAX })?;
        }
    }
    Ok(steps)
}

/// The largest step number that is allowed.
pub(crate) const LAST_STEP: u32 = u32::MAX - 5;
/// The end of a lifetime that lasts to the end of the run.
pub(crate) const KEPT: u32 = u32::MAX;

/// The last use of a storage.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LastUse {
    /// One past the last step that uses it; 0 if none does; [`KEPT`] for outputs.
    pub(crate) end: u32,
    /// Whether it has more than one use in that step.
    pub(crate) tied: bool,
}

impl LastUse {
    fn at(&mut self, step: u32) {
        let end = step + 1;
        self.tied = end == self.end || (end < self.end && self.tied);
        self.end = self.end.max(end);
    }
}

/// The uses of each storage of a graph.
#[derive(Clone, Debug, Default)]
pub(crate) struct StorageUses {
    /// For each tensor that owns a storage, the last use of that storage.
    pub(crate) last: Vec<LastUse>,
    /// The results that are computed in place, filled in by [`Sharing`](super::Sharing).
    pub(crate) in_place: Vec<TensorId>,
    /// For each tensor whether it has a hold; empty if the request has no holds.
    held: Vec<bool>,
    /// One past the last step of the run.
    pub(crate) horizon: u32,
}

impl StorageUses {
    /// Collects all uses; fails if the steps contradict the graph.
    pub(crate) fn collect(&mut self, request: &MemoryRequest<'_>, flow: &Flow) -> Result<(), MemoryError> {
        let graph = request.graph;
        self.last.clear();
        self.last.resize(flow.storage.len(), LastUse::default());
        self.horizon = 1;
        self.collect_steps(request)?;
        self.collect_holds(request, flow)?;
        for (producer, inputs) in flow.iter() {
            let step = request.step(producer.node.index());
            let written = producer.storage.index();
            let backend = request.backend(written);
            if producer.overwrites {
                check_written_backend(request, producer, backend)?;
            }
            self.last[written].at(step);
            for source in inputs {
                let storage = source.storage.index();
                let by_copy = !self.held.is_empty()
                    && self.held[source.tensor.index()]
                    && request.backend(storage) != backend;
                if !by_copy {
                    self.last[storage].at(step);
                }
            }
        }
        for (_, output) in graph.outputs() {
            self.last[flow.storage[output.index()].index()].end = KEPT;
        }
        Ok(())
    }

    /// Checks the steps of all nodes, and sets the horizon.
    fn collect_steps(&mut self, request: &MemoryRequest<'_>) -> Result<(), MemoryError> {
        let graph = request.graph;
        if request.steps.is_empty() && graph.nodes().len() <= LAST_STEP as usize {
            self.horizon = (graph.nodes().len() as u32).max(1);
            return Ok(());
        }
        for node in graph.node_ids() {
            let step = request.step(node.index());
            if step > LAST_STEP {
                return Err(MemoryError::Step { what: graph.node_name(node), step });
            }
            self.horizon = self.horizon.max(step + 1);
            for input in graph.inputs(node) {
                check_order(request, node.index(), step, input.index())?;
            }
        }
        Ok(())
    }

    fn collect_holds(&mut self, request: &MemoryRequest<'_>, flow: &Flow) -> Result<(), MemoryError> {
        self.held.clear();
        if !request.holds.is_empty() {
            self.held.resize(flow.storage.len(), false);
        }
        for hold in request.holds {
            let index = hold.tensor.index();
            if hold.until > LAST_STEP {
                return Err(MemoryError::Step { what: request.graph.name(hold.tensor), step: hold.until });
            }
            self.held[index] = true;
            // A node that uses the storage in the hold's step is tied with it.
            self.last[flow.storage[index].index()].at(hold.until);
            self.horizon = self.horizon.max(hold.until + 1);
        }
        for (index, extra) in request.extras.iter().enumerate() {
            let Lifetime { start, end } = extra.lifetime;
            if extra.lifetime.is_empty() || start > LAST_STEP {
                return Err(MemoryError::Step { what: format!("extra {index}"), step: start });
            }
            let last = if end == KEPT { start + 1 } else { end };
            self.horizon = self.horizon.max(last);
        }
        Ok(())
    }

    /// The lifetime of a planned storage, in-place results included. Empty if nothing uses it.
    pub(crate) fn lifetime(&self, request: &MemoryRequest<'_>, kind: TensorKind, owner: usize) -> Lifetime {
        let end = self.last[owner].end;
        let (start, kept) = match kind {
            _ if end == 0 => return Lifetime::NEVER,
            TensorKind::Computed(node) => (request.step(node.index()), end == KEPT),
            _ => (0, end == KEPT || request.inputs == InputPolicy::Keep),
        };
        Lifetime { start, end: if kept { self.horizon } else { end } }
    }
}

/// An error if a node writes into a storage of another backend.
fn check_written_backend(
    request: &MemoryRequest<'_>,
    producer: Producer,
    target_backend: u16,
) -> Result<(), MemoryError> {
    let graph = request.graph;
    let output = graph[producer.node].output();
    match request.backend(output.index()) {
        backend if backend == target_backend => Ok(()),
        backend => Err(MemoryError::ForeignWrite {
            node: graph.name(output),
            backend,
            target: graph.name(producer.storage),
            target_backend,
        }),
    }
}

fn check_order(request: &MemoryRequest<'_>, node: usize, step: u32, input: usize) -> Result<(), MemoryError> {
    let graph = request.graph;
    let source = graph.tensors()[input].node().map(|node| request.step(node.index()));
    match source {
        Some(source_step) if source_step > step => Err(MemoryError::Order {
            reader: graph.node_name(NodeId::from_index(node)),
            step,
            source_name: graph.name(TensorId::from_index(input)),
            source_step,
        }),
        _ => Ok(()),
    }
}

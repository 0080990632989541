//! How long each storage lives: from the step that first writes it up to the last step that uses it.
//!
//! A use is a read or a write by a node; a hold that the caller adds; or being an output, which lasts to the end. Views
//! compute nothing, so they use nothing: a view matters through those that read it. A result that nobody reads is used
//! once, by the node that writes it.

#![expect(
    clippy::indexing_slicing,
    reason = "arrays are sized by the graph's tensors, whose ids index them; ids from the caller are checked first"
)]

use quadriga_graph::{Graph, NodeId, TensorId, TensorKind};
use std::fmt;

use super::MemoryError;
use super::request::{Inputs, Request};
use crate::flow::{Flow, Maker};

/// The steps `start..end`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Lifetime {
    /// The first step.
    pub start: u32,
    /// One past the last step. Nothing lives where this is not after `start`.
    pub end: u32,
}

impl Lifetime {
    /// From before the first step to after the last.
    pub const WHOLE: Lifetime = Lifetime { start: 0, end: u32::MAX };

    /// Nothing ever uses it.
    pub const NEVER: Lifetime = Lifetime { start: 0, end: 0 };

    /// Whether there is a step in it.
    pub fn is_empty(self) -> bool {
        self.start >= self.end
    }

    /// Whether a step is in it.
    pub fn contains(self, step: u32) -> bool {
        (self.start..self.end).contains(&step)
    }

    /// Whether the two have a step in common.
    pub fn meets(self, other: Lifetime) -> bool {
        self.start.max(other.start) < self.end.min(other.end)
    }
}

impl fmt::Display for Lifetime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

/// The steps of a caller-given order with barriers: nodes between two barriers share a step, so memory changes hands
/// only at a barrier. Each slice of `groups` holds the nodes between two barriers; nodes that are not named stand first.
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

/// The last step that can be counted; above it are the marks below.
pub(crate) const LAST_STEP: u32 = u32::MAX - 5;
/// The end of what is kept to the end of the run, whenever that is.
pub(crate) const KEPT: u32 = u32::MAX;

/// The last use of a storage.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LastUse {
    /// One past the last step that uses it; 0 if none does; [`KEPT`] for outputs.
    pub(crate) end: u32,
    /// Whether more than one thing uses it in that step.
    pub(crate) tied: bool,
}

impl LastUse {
    fn at(&mut self, step: u32) {
        let end = step + 1;
        self.tied = end == self.end || (end < self.end && self.tied);
        self.end = self.end.max(end);
    }
}

/// The uses of each storage of a graph, before anything is taken over in place.
#[derive(Clone, Debug, Default)]
pub(crate) struct Uses {
    /// For each tensor that owns a storage, the last of its uses.
    pub(crate) last: Vec<LastUse>,
    /// The results that took over the storage of an input.
    pub(crate) taken: Vec<TensorId>,
    /// For each tensor whether it has a hold; empty where there are none.
    held: Vec<bool>,
    /// One past the last step of all.
    pub(crate) horizon: u32,
}

impl Uses {
    /// Collects all uses; refuses steps that contradict the graph.
    pub(crate) fn collect(&mut self, request: &Request<'_>, flow: &Flow) -> Result<(), MemoryError> {
        let graph = request.graph;
        self.last.clear();
        self.last.resize(flow.storage.len(), LastUse::default());
        self.horizon = 1;
        self.collect_steps(request)?;
        self.collect_holds(request, flow)?;
        for (maker, sources) in flow.iter() {
            let step = request.step(maker.node.index());
            let home = maker.storage.index();
            let backend = request.backend(home);
            if maker.overwrites {
                check_home(request, maker, backend)?;
            }
            self.last[home].at(step);
            for source in sources {
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

    /// Checks the steps of all nodes, and finds the last.
    fn collect_steps(&mut self, request: &Request<'_>) -> Result<(), MemoryError> {
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

    fn collect_holds(&mut self, request: &Request<'_>, flow: &Flow) -> Result<(), MemoryError> {
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
            let last = &mut self.last[flow.storage[index].index()];
            last.at(hold.until);
            // Whatever else happens in that step is not alone.
            last.tied |= last.end == hold.until + 1;
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

    /// The life of a storage that the planner places, given what became of it by in-place operations. Empty if nothing
    /// uses it.
    pub(crate) fn lifetime(&self, request: &Request<'_>, kind: TensorKind, owner: usize) -> Lifetime {
        let end = self.last[owner].end;
        let (start, kept) = match kind {
            _ if end == 0 => return Lifetime::NEVER,
            TensorKind::Computed(node) => (request.step(node.index()), end == KEPT),
            _ => (0, end == KEPT || request.inputs == Inputs::Keep),
        };
        Lifetime { start, end: if kept { self.horizon } else { end } }
    }
}

/// Refuses a node that writes into a storage of another backend.
fn check_home(request: &Request<'_>, maker: Maker, home: u16) -> Result<(), MemoryError> {
    let graph = request.graph;
    let output = graph[maker.node].output();
    match request.backend(output.index()) {
        backend if backend == home => Ok(()),
        backend => Err(MemoryError::ForeignWrite {
            node: graph.name(output),
            backend,
            target: graph.name(maker.storage),
            home,
        }),
    }
}

fn check_order(request: &Request<'_>, node: usize, step: u32, input: usize) -> Result<(), MemoryError> {
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

//! How long each storage lives: from the step that first writes it up to the last step that uses it.
//!
//! A use is a read or a write by a node; a hold that the caller adds; or being an output, which lasts to the end. Views
//! compute nothing, so they use nothing: a view matters through those that read it. A result that nobody reads is used
//! once, by the node that writes it.

#![expect(
    clippy::indexing_slicing,
    reason = "arrays are sized by the graph's tensors, whose ids index them; ids from the caller are checked first"
)]

use quadriga_graph::{Graph, Kind, NodeId};
use std::fmt;

use super::MemoryError;
use super::request::{Inputs, Request};
use super::sharing::Sharing;

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

/// The origin of an input.
pub(crate) const INPUT: u32 = u32::MAX;
/// The origins of weights, constants and state: what the planner leaves alone.
pub(crate) const WEIGHT: u32 = u32::MAX - 1;
pub(crate) const CONSTANT: u32 = u32::MAX - 2;
pub(crate) const STATE: u32 = u32::MAX - 3;

/// Whether an origin is that of a weight, constant or state.
pub(crate) fn is_fixed(origin: u32) -> bool {
    (STATE..=WEIGHT).contains(&origin)
}

/// A result whose operation may work in the memory of an input.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub(crate) result: u32,
    pub(crate) input: u32,
    /// One past the step of the node.
    pub(crate) end: u32,
}

/// What the questions need to know of a graph, in flat arrays that are read once from its tensors and nodes; and the
/// uses of each storage of the graph, before anything is taken over in place. Indexed by the tensor that owns it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Uses {
    /// One past the last step that uses it; 0 if none does; [`KEPT`] for outputs.
    pub(crate) end: Vec<u32>,
    /// Whether more than one thing uses it in its last step.
    pub(crate) tied: Vec<bool>,
    /// For each tensor the storage it lies in.
    pub(crate) storage: Vec<u32>,
    /// For each tensor the node that computes it, or one of the marks above.
    pub(crate) origin: Vec<u32>,
    /// For each tensor its bytes.
    pub(crate) bytes: Vec<u64>,
    /// For each tensor where in its storage it begins.
    pub(crate) offset: Vec<u64>,
    /// The results that could take over the storage of an input, as far as their operations are concerned.
    pub(crate) candidates: Vec<Candidate>,
    /// For each tensor whether it has a hold; empty where there are none.
    held: Vec<bool>,
    /// One past the last step of all.
    pub(crate) horizon: u32,
}

impl Uses {
    fn at(&mut self, storage: usize, step: u32) {
        let end = &mut self.end[storage];
        if step + 1 > *end {
            *end = step + 1;
            self.tied[storage] = false;
        } else if step + 1 == *end {
            self.tied[storage] = true;
        }
    }

    /// Collects all uses; refuses steps that contradict the graph.
    pub(crate) fn collect(&mut self, request: &Request<'_>) -> Result<(), MemoryError> {
        let graph = request.graph;
        let tensors = graph.tensors();
        self.end.clear();
        self.end.resize(tensors.len(), 0);
        self.tied.clear();
        self.tied.resize(tensors.len(), false);
        self.storage.clear();
        self.origin.clear();
        self.bytes.clear();
        self.offset.clear();
        self.candidates.clear();
        for tensor in tensors {
            self.storage.push(tensor.storage().index() as u32);
            self.bytes.push(tensor.bytes() as u64);
            self.offset.push(tensor.offset() as u64);
            self.origin.push(match tensor.kind() {
                Kind::Computed(node) => node.index() as u32,
                Kind::Input => INPUT,
                Kind::Weight => WEIGHT,
                Kind::Constant => CONSTANT,
                Kind::State => STATE,
            });
        }
        self.horizon = 1;
        self.collect_holds(request)?;

        for (index, node) in graph.nodes().iter().enumerate() {
            let step = request.step(index);
            if step > LAST_STEP {
                return Err(MemoryError::Step { what: graph.node_name(NodeId::from_index(index)), step });
            }
            self.horizon = self.horizon.max(step + 1);
            let inputs = graph.inputs(NodeId::from_index(index));
            if !request.steps.is_empty() {
                for input in inputs {
                    check_order(request, index, step, input.index())?;
                }
            }
            if node.op().is_view() {
                continue;
            }
            let output = node.output().index();
            let home = self.storage[output] as usize;
            let backend = request.backend(output);
            if home != output && request.backend(home) != backend {
                return Err(MemoryError::ForeignWrite {
                    node: graph.name(node.output()),
                    backend,
                    target: graph.name(tensors[home].storage()),
                    home: request.backend(home),
                });
            }
            self.at(home, step);
            self.candidates.extend(node.in_place_inputs().filter_map(|input| inputs.get(input)).map(
                |input| Candidate { result: output as u32, input: input.index() as u32, end: step + 1 },
            ));
            for input in inputs {
                let storage = self.storage[input.index()] as usize;
                let by_copy =
                    !self.held.is_empty() && self.held[input.index()] && request.backend(storage) != backend;
                if !by_copy {
                    self.at(storage, step);
                }
            }
        }
        for (_, output) in graph.outputs() {
            self.end[self.storage[output.index()] as usize] = KEPT;
        }
        Ok(())
    }

    fn collect_holds(&mut self, request: &Request<'_>) -> Result<(), MemoryError> {
        self.held.clear();
        if !request.holds.is_empty() {
            self.held.resize(self.storage.len(), false);
        }
        for hold in request.holds {
            let index = hold.tensor.index();
            if hold.until > LAST_STEP {
                return Err(MemoryError::Step { what: request.graph.name(hold.tensor), step: hold.until });
            }
            self.held[index] = true;
            let storage = self.storage[index] as usize;
            self.at(storage, hold.until);
            // Whatever else happens in that step is not alone.
            self.tied[storage] |= self.end[storage] == hold.until + 1;
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

    /// The life of a storage, given the groups that in-place operations made; empty for what the planner leaves alone.
    pub(crate) fn lifetime(&self, request: &Request<'_>, sharing: &Sharing, owner: usize) -> Lifetime {
        let end = self.end[owner];
        if end == 0 || !sharing.is_root(owner) || sharing.is_placed(owner) {
            return Lifetime::NEVER;
        }
        let (start, kept) = match self.origin[owner] {
            INPUT => (0, end == KEPT || request.inputs == Inputs::Keep),
            node => (request.step(node as usize), end == KEPT),
        };
        Lifetime { start, end: if kept { self.horizon } else { end } }
    }
}

fn check_order(request: &Request<'_>, node: usize, step: u32, input: usize) -> Result<(), MemoryError> {
    let graph = request.graph;
    let source = graph.tensors()[input].node().map(|node| request.step(node.index()));
    match source {
        Some(source_step) if source_step > step => Err(MemoryError::Order {
            reader: graph.node_name(NodeId::from_index(node)),
            step,
            source_name: graph.name(quadriga_graph::TensorId::from_index(input)),
            source_step,
        }),
        _ => Ok(()),
    }
}

//! Assignment: which backend computes each node.
//!
//! All nodes that write one storage must run on one backend, so storages are assigned, not nodes. Leaves that are only
//! read (weights, constants, inputs) are assigned only if the caller places them; they attract the nodes that read them.
//!
//! In order: pins and placements; nodes that [weight streaming](super::streaming) moves; going forward, storages computed from
//! placed leaves and those that follow their inputs; going backward, storages that follow their consumers; the rest goes
//! to the most preferred backend that computes it. Last, [`settle`] revises the borders.
//!
//! The order of a node's inputs never decides: bytes do, then which input was computed last (so that a residual stream
//! moves on with the layers instead of returning to where it began), then the order of the backends.
#![expect(
    clippy::indexing_slicing,
    reason = "arrays are sized for all tensors and backends; ids are the graph's own"
)]

use std::cmp::Reverse;
use std::sync::Arc;

use quadriga_graph::{Collective, Graph, NodeId, Op, TensorId, TensorKind};

use super::placement::{NO_BACKEND, Placements, Reason};
use super::settle::settle;
use super::streaming::{WeightStreaming, stream_weights};
use crate::flow::{Flow, FlowInput};
use crate::{Backend, RankGroups, Refusal, RuntimeError};

/// How often placements spread forward and backward; a storage that they do not reach is far from any placed one.
const ROUNDS: usize = 4;

/// The placements that are fixed beforehand, at most one for each storage.
pub(crate) type FixedPlacements = Vec<(TensorId, u16)>;

pub(crate) fn assign(
    (graph, flow): (&Graph, &Flow),
    backends: &[Arc<dyn Backend>],
    ranks: &RankGroups,
    fixed: &FixedPlacements,
    streaming: Option<(WeightStreaming, u16)>,
) -> Result<Placements, RuntimeError> {
    let count = flow.storage.len();
    let mut assigner = Assigner {
        graph,
        flow,
        backends,
        ranks,
        written: vec![false; count],
        placements: Placements {
            backend: vec![NO_BACKEND; count],
            reason: vec![Reason::WhereRead; count],
            ..Placements::default()
        },
        pulls: Vec::new(),
        left: Vec::new(),
        states_left: Vec::new(),
    };
    for (storage, _) in &flow.writers {
        assigner.written[storage.index()] = true;
    }
    assigner.fix(fixed)?;
    if fixed.is_empty() {
        assigner.left.extend(0..flow.producers().len() as u32);
    } else {
        if let Some(streaming) = streaming {
            assigner.stream_weights(streaming, fixed);
        }
        assigner.follow_leaves();
        // Each round reaches the other neighbours of the storages that the previous round reached.
        for _ in 0..ROUNDS {
            assigner.follow_inputs();
            if !assigner.follow_consumers() {
                break;
            }
        }
    }
    assigner.assign_rest()?;
    if backends.len() > 1 {
        assigner.settle();
    }
    Ok(assigner.placements)
}

struct Assigner<'a> {
    graph: &'a Graph,
    flow: &'a Flow,
    backends: &'a [Arc<dyn Backend>],
    ranks: &'a RankGroups,
    /// For each tensor whether nodes other than its producer write it.
    written: Vec<bool>,
    placements: Placements,
    /// Working memory of [`Assigner::choose_backend`].
    pulls: Vec<Pull>,
    /// The producers whose storages are not assigned yet, by number.
    left: Vec<u32>,
    /// The states that are not assigned yet.
    states_left: Vec<TensorId>,
}

/// The inputs of a storage that are on one backend, which attract it to that backend.
#[derive(Clone, Copy)]
struct Pull {
    backend: u16,
    /// Their bytes, and one for each of them.
    bytes: u64,
    /// One past the last node that produces one of them.
    latest: usize,
    /// Bytes and tensor of the largest.
    largest: (u64, usize),
}

impl Assigner<'_> {
    fn fix(&mut self, fixed: &FixedPlacements) -> Result<(), RuntimeError> {
        for (storage, backend) in fixed {
            self.set(*storage, *backend, Reason::Pinned);
        }
        self.states_left = self.flow.states().filter(|state| !self.is_assigned(*state)).collect();
        for (storage, backend) in fixed.iter().filter(|(storage, backend)| !self.computes(*storage, *backend))
        {
            if let Some(refusal) = self.refusal(*storage, *backend) {
                return Err(self.unsupported(*storage, vec![refusal]));
            }
        }
        Ok(())
    }

    /// Going forward: storages that read leaves which the caller has placed; where there are none, those that read
    /// results that are assigned.
    fn follow_leaves(&mut self) {
        let flow = self.flow;
        let is_leaf = |input: &FlowInput| !matches!(input.kind, TensorKind::Computed(_));
        for (number, (producer, inputs)) in (0..).zip(flow.iter()) {
            if !self.is_assigned(producer.storage)
                && !self.draw(producer.storage, inputs, is_leaf, |tensor| Reason::HoldsSource { tensor })
                && !self.follow(producer.storage, inputs)
            {
                self.left.push(number);
            }
        }
    }

    /// Going forward: storages that read anything that is assigned.
    fn follow_inputs(&mut self) {
        let flow = self.flow;
        let mut left = std::mem::take(&mut self.left);
        left.retain(|number| {
            let storage = flow.producers()[*number as usize].storage;
            !self.is_assigned(storage) && !self.follow(storage, flow.inputs(*number as usize))
        });
        self.left = left;
    }

    /// Assigns a storage to the backend of its inputs; whether it is assigned now.
    fn follow(&mut self, storage: TensorId, inputs: &[FlowInput]) -> bool {
        self.draw(storage, inputs, |_| true, |tensor| Reason::FollowsSource { tensor })
    }

    /// Assigns a storage to the backend with the most bytes of those of its inputs that count, or to the next one if
    /// that backend refuses; whether it is assigned now.
    fn draw(
        &mut self,
        storage: TensorId,
        inputs: &[FlowInput],
        counts: impl Fn(&FlowInput) -> bool,
        reason: impl Fn(usize) -> Reason,
    ) -> bool {
        // The common case: all of them are on one backend.
        let (mut only, mut largest) = (NO_BACKEND, (0, 0));
        for input in inputs {
            let backend = self.placements.backend[input.storage.index()];
            if backend != NO_BACKEND && counts(input) && !self.placements.streamed.contains(&input.storage) {
                if only != NO_BACKEND && only != backend {
                    return self.choose_backend(storage, inputs, counts, reason);
                }
                only = backend;
                largest = largest.max((self.flow.bytes[input.tensor.index()], input.tensor.index()));
            }
        }
        if only == NO_BACKEND {
            return false;
        }
        let computes = self.computes(storage, only);
        if computes {
            self.set(storage, only, reason(largest.1));
        } else {
            self.placements.refused.entry(storage).or_insert(only);
        }
        computes
    }

    /// The same for inputs on several backends.
    fn choose_backend(
        &mut self,
        storage: TensorId,
        inputs: &[FlowInput],
        counts: impl Fn(&FlowInput) -> bool,
        reason: impl Fn(usize) -> Reason,
    ) -> bool {
        let mut pulls = std::mem::take(&mut self.pulls);
        pulls.clear();
        for input in inputs.iter().filter(|input| counts(input)) {
            let backend = self.placements.backend[input.storage.index()];
            if backend != NO_BACKEND && !self.placements.streamed.contains(&input.storage) {
                let bytes = self.flow.bytes[input.tensor.index()];
                let at = pulls.iter().position(|pull| pull.backend == backend).unwrap_or(pulls.len());
                if at == pulls.len() {
                    pulls.push(Pull { backend, bytes: 0, latest: 0, largest: (0, 0) });
                }
                let pull = &mut pulls[at];
                pull.bytes = pull.bytes.saturating_add(bytes).saturating_add(1);
                pull.latest = pull.latest.max(input.produced());
                pull.largest = pull.largest.max((bytes, input.tensor.index()));
            }
        }
        pulls.sort_unstable_by_key(|pull| (Reverse((pull.bytes, pull.latest)), pull.backend));
        let strongest = pulls.iter().position(|pull| self.computes(storage, pull.backend));
        if strongest != Some(0) {
            self.placements.refused.entry(storage).or_insert(pulls[0].backend);
        }
        if let Some(at) = strongest {
            self.set(storage, pulls[at].backend, reason(pulls[at].largest.1));
        }
        self.pulls = pulls;
        strongest.is_some()
    }

    /// Going backward: storages whose readers are assigned. The earliest reader decides. Whether a result was assigned.
    fn follow_consumers(&mut self) -> bool {
        let flow = self.flow;
        if self.left.is_empty() && self.states_left.is_empty() {
            return false;
        }
        let mut found = false;
        let mut reader: Vec<(u16, u32)> = vec![(NO_BACKEND, 0); flow.storage.len()];
        for (producer, inputs) in flow.iter().rev() {
            let storage = producer.storage;
            if !self.is_assigned(storage) {
                let (backend, consumer) = reader[storage.index()];
                if backend == NO_BACKEND {
                    continue;
                }
                if !self.computes(storage, backend) {
                    self.placements.refused.entry(storage).or_insert(backend);
                    continue;
                }
                self.set(storage, backend, Reason::FollowsConsumer { node: consumer as usize });
                found = true;
            }
            let backend = self.placements.backend[storage.index()];
            for FlowInput { storage, .. } in inputs.iter().filter(|input| !self.is_assigned(input.storage)) {
                reader[storage.index()] = (backend, producer.node.index() as u32);
            }
        }
        // A state that is only read has no producer in the loop above.
        for state in std::mem::take(&mut self.states_left) {
            let (backend, consumer) = reader[state.index()];
            if self.is_assigned(state) {
                continue;
            }
            if backend != NO_BACKEND && self.computes(state, backend) {
                self.set(state, backend, Reason::FollowsConsumer { node: consumer as usize });
            } else {
                self.states_left.push(state);
            }
        }
        found
    }

    fn stream_weights(&mut self, (streaming, device): (WeightStreaming, u16), fixed: &FixedPlacements) {
        let on_host: Vec<bool> = self.backends.iter().map(|backend| backend.memory().host).collect();
        if fixed.iter().any(|(_, backend)| on_host[usize::from(*backend)]) {
            let mut placements = std::mem::take(&mut self.placements);
            let computes = |storage| self.refusal(storage, device).is_none();
            let (graph, flow) = (self.graph, self.flow);
            stream_weights(graph, flow, &on_host, &mut placements, (streaming, device), computes);
            self.placements = placements;
        }
    }

    fn settle(&mut self) {
        let mut placements = std::mem::take(&mut self.placements);
        let written = |storage: TensorId| self.written[storage.index()];
        let computes = |storage, backend| self.computes(storage, backend);
        settle(self.graph, self.flow, &mut placements, written, computes);
        self.placements = placements;
    }

    fn assign_rest(&mut self) -> Result<(), RuntimeError> {
        let flow = self.flow;
        for number in std::mem::take(&mut self.left) {
            self.assign_preferred(flow.producers()[number as usize].storage)?;
        }
        for state in std::mem::take(&mut self.states_left) {
            self.assign_preferred(state)?;
        }
        Ok(())
    }

    fn assign_preferred(&mut self, storage: TensorId) -> Result<(), RuntimeError> {
        if self.is_assigned(storage) {
            return Ok(());
        }
        let mut refusals = Vec::new();
        for backend in 0..self.backends.len() {
            match self.refusal(storage, backend as u16) {
                None => {
                    self.set(storage, backend as u16, Reason::Preferred);
                    if backend > 0 {
                        self.placements.refused.entry(storage).or_insert(0);
                    }
                    return Ok(());
                }
                Some(refusal) => refusals.push(refusal),
            }
        }
        Err(self.unsupported(storage, refusals))
    }

    fn is_assigned(&self, storage: TensorId) -> bool {
        self.placements.backend[storage.index()] != NO_BACKEND
    }

    fn set(&mut self, storage: TensorId, backend: u16, reason: Reason) {
        self.placements.backend[storage.index()] = backend;
        self.placements.reason[storage.index()] = reason;
    }

    /// Whether a backend computes all nodes that write a storage.
    fn computes(&self, storage: TensorId, backend: u16) -> bool {
        let supports = |node: NodeId| self.supports(node, backend).is_ok();
        match self.flow.kind[storage.index()] {
            TensorKind::Computed(node) if !supports(node) => false,
            _ => !self.written[storage.index()] || self.refusal(storage, backend).is_none(),
        }
    }

    /// Whether a backend computes a node: of a collective, with the ranks of its group.
    fn supports(&self, node: NodeId, backend: u16) -> Result<(), Refusal> {
        let device = &self.backends[usize::from(backend)];
        if let Op::Collective(Collective { ranks, .. }) = self.graph[node].op() {
            device.exchanges(self.ranks.get(ranks.group).map(|ranks| &**ranks))?;
        }
        device.supports(self.graph, node)
    }

    /// The first node that writes a storage and that a backend does not compute, with the backend and its reason.
    fn refusal(&self, storage: TensorId, backend: u16) -> Option<(NodeId, u16, String)> {
        let refuse = |node: NodeId| {
            let refusal = self.supports(node, backend).err()?;
            Some((node, backend, refusal.to_string()))
        };
        let producer = self.graph[storage].node().and_then(refuse);
        producer.or_else(|| self.flow.writers_of(storage).find_map(refuse))
    }

    fn unsupported(&self, storage: TensorId, refusals: Vec<(NodeId, u16, String)>) -> RuntimeError {
        let graph = self.graph;
        let node = refusals.first().map(|(node, ..)| *node).or(graph[storage].node());
        let Some(node) = node else { return RuntimeError::NoBackends };
        let typed = |id: TensorId| format!("{} {}", graph[id].dtype(), graph[id].shape());
        let inputs: Vec<String> = graph.inputs(node).iter().map(|id| typed(*id)).collect();
        RuntimeError::NoBackendSupports {
            node: graph.node_name(node),
            operation: format!(
                "{} of {} to {}",
                graph[node].op().name(),
                inputs.join(", "),
                typed(graph[node].output())
            ),
            refusals: refusals
                .into_iter()
                .map(|(at, backend, why)| {
                    let backend = self.backends[usize::from(backend)].name().to_owned();
                    if at == node {
                        (backend, why)
                    } else {
                        (backend, format!("{}: {why}", graph.node_name(at)))
                    }
                })
                .collect(),
        }
    }
}

//! Assignment: which backend computes each node.
//!
//! Everything that writes one storage must run where the storage lives, so the unknowns are not nodes but storages:
//! the *home* of a computed or state storage is the backend of all nodes that write it. Leaves that are only read
//! (weights, constants, inputs) have a home only if the caller gave them one; it attracts the nodes that read them.
//!
//! In order: pins and placements; what [`lend`] moves; going forward, storages beside placed leaves and those that
//! follow their sources; going backward, storages that follow their consumers; what is left goes to the most preferred
//! backend that computes it. At last [`settle`] looks at the borders.
//!
//! No step lets the order of a node's sources decide: bytes do, then which was computed last (so that a residual stream
//! moves on with the layers, instead of going back to where it began), then the order of the backends.
#![expect(
    clippy::indexing_slicing,
    reason = "arrays are sized for all tensors and backends; ids are the graph's own"
)]

use std::cmp::Reverse;
use std::sync::Arc;

use quadriga_graph::{Graph, NodeId, TensorId, TensorKind};
use rustc_hash::{FxHashMap, FxHashSet};
use serde::Serialize;

use super::NO_BACKEND;
use super::lend::{WeightStreaming, lend};
use super::settle::settle;
use crate::flow::{Flow, Source};
use crate::{Backend, RuntimeError};

/// Why a storage, and with it every node that writes it, has the home it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum Reason {
    /// The caller pinned it, or placed it by name.
    Pinned,
    /// A placed leaf that it is computed from lives there; of several the most bytes decide.
    HoldsSource {
        /// The largest such leaf (index of the tensor).
        tensor: usize,
    },
    /// A result that it is computed from lives there; of several the most bytes decide.
    FollowsSource {
        /// The largest such result (index of the tensor).
        tensor: usize,
    },
    /// It is fetched there for the run: what is done with it outweighs the way.
    Borrows {
        /// The largest of what is fetched (index of the tensor).
        tensor: usize,
    },
    /// It is first read there.
    FollowsConsumer {
        /// The reading node.
        node: usize,
    },
    /// All that reads it is there, and copying its sources takes less than copying it.
    SavesCopy {
        /// The first reader.
        node: usize,
    },
    /// Nothing draws it anywhere: the most preferred backend that computes it.
    Preferred,
    /// A leaf without a home of its own: it is wherever it is read.
    WhereRead,
}

/// The homes of all storages.
#[derive(Default)]
pub(crate) struct Homes {
    /// For each tensor that owns its storage, its backend; [`NO_BACKEND`] for leaves that live wherever they are read.
    pub(crate) home: Vec<u16>,
    /// Why.
    pub(crate) reason: Vec<Reason>,
    /// A more attractive backend that refused to compute it.
    pub(crate) refused: FxHashMap<TensorId, u16>,
    /// Weights that are copied from their home to whoever reads them.
    pub(crate) lent: FxHashSet<TensorId>,
    /// The backend that borrows, and states of others that it looks at.
    pub(crate) echoes: (u16, FxHashSet<TensorId>),
}

/// How often homes spread forward and backward; what is then left is far from anything placed.
const ROUNDS: usize = 4;

/// What the caller fixed beforehand: homes of storages. A storage has at most one.
pub(crate) type Fixed = Vec<(TensorId, u16)>;

pub(crate) fn assign(
    graph: &Graph,
    flow: &Flow,
    backends: &[Arc<dyn Backend>],
    fixed: &Fixed,
    lending: Option<(WeightStreaming, u16)>,
) -> Result<Homes, RuntimeError> {
    let count = flow.storage.len();
    let mut assigner = Assigner {
        graph,
        flow,
        backends,
        written: vec![false; count],
        homes: Homes {
            home: vec![NO_BACKEND; count],
            reason: vec![Reason::WhereRead; count],
            ..Homes::default()
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
        assigner.left.extend(0..flow.makers().len() as u32);
    } else {
        if let Some(lending) = lending {
            assigner.lend(lending, fixed);
        }
        assigner.beside_leaves();
        // Each round reaches what hangs on the other end of what the round before reached.
        for _ in 0..ROUNDS {
            assigner.follow_sources();
            if !assigner.follow_consumers() {
                break;
            }
        }
    }
    assigner.the_rest()?;
    if backends.len() > 1 {
        assigner.settle();
    }
    Ok(assigner.homes)
}

struct Assigner<'a> {
    graph: &'a Graph,
    flow: &'a Flow,
    backends: &'a [Arc<dyn Backend>],
    /// For each tensor whether nodes write into it that did not make it.
    written: Vec<bool>,
    homes: Homes,
    /// Scratch: what draws a storage to backends.
    pulls: Vec<Pull>,
    /// The makers whose storages have no home yet, by place.
    left: Vec<u32>,
    /// The states that have none.
    states_left: Vec<TensorId>,
}

/// What draws a storage to a backend: the sources that live there.
#[derive(Clone, Copy)]
struct Pull {
    home: u16,
    /// Their bytes, and one for each of them.
    bytes: u64,
    /// One past the last node that made one of them.
    latest: usize,
    /// Bytes and number of the largest.
    largest: (u64, usize),
}

impl Assigner<'_> {
    fn fix(&mut self, fixed: &Fixed) -> Result<(), RuntimeError> {
        for (storage, backend) in fixed {
            self.set(*storage, *backend, Reason::Pinned);
        }
        self.states_left = self.flow.states().filter(|state| !self.has_home(*state)).collect();
        for (storage, backend) in fixed.iter().filter(|(storage, backend)| !self.computes(*storage, *backend))
        {
            if let Some(refusal) = self.refusal(*storage, *backend) {
                return Err(self.unsupported(*storage, vec![refusal]));
            }
        }
        Ok(())
    }

    /// Going forward: storages that read leaves which the caller has placed; where there are none, those that read
    /// results with a home.
    fn beside_leaves(&mut self) {
        let flow = self.flow;
        let placed = |source: &Source| !matches!(source.kind, TensorKind::Computed(_));
        for (place, (maker, sources)) in (0..).zip(flow.iter()) {
            if !self.has_home(maker.storage)
                && !self.draw(maker.storage, sources, placed, |tensor| Reason::HoldsSource { tensor })
                && !self.follow(maker.storage, sources)
            {
                self.left.push(place);
            }
        }
    }

    /// Going forward: storages that read anything with a home.
    fn follow_sources(&mut self) {
        let flow = self.flow;
        let mut left = std::mem::take(&mut self.left);
        left.retain(|place| {
            let storage = flow.makers()[*place as usize].storage;
            !self.has_home(storage) && !self.follow(storage, flow.sources(*place as usize))
        });
        self.left = left;
    }

    /// Gives a storage the home of its sources. Whether it has one now.
    fn follow(&mut self, storage: TensorId, sources: &[Source]) -> bool {
        self.draw(storage, sources, |_| true, |tensor| Reason::FollowsSource { tensor })
    }

    /// Gives a storage the home of those of its sources that count, by bytes; the next best where a backend refuses.
    /// Whether it has one now.
    fn draw(
        &mut self,
        storage: TensorId,
        sources: &[Source],
        counts: impl Fn(&Source) -> bool,
        reason: impl Fn(usize) -> Reason,
    ) -> bool {
        // Nearly always they are all in one place.
        let (mut only, mut largest) = (NO_BACKEND, (0, 0));
        for source in sources {
            let home = self.homes.home[source.storage.index()];
            if home != NO_BACKEND && counts(source) && !self.homes.lent.contains(&source.storage) {
                if only != NO_BACKEND && only != home {
                    return self.draw_apart(storage, sources, counts, reason);
                }
                only = home;
                largest = largest.max((self.flow.bytes[source.tensor.index()], source.tensor.index()));
            }
        }
        if only == NO_BACKEND {
            return false;
        }
        let computes = self.computes(storage, only);
        if computes {
            self.set(storage, only, reason(largest.1));
        } else {
            self.homes.refused.entry(storage).or_insert(only);
        }
        computes
    }

    /// The same where the sources are in several places.
    fn draw_apart(
        &mut self,
        storage: TensorId,
        sources: &[Source],
        counts: impl Fn(&Source) -> bool,
        reason: impl Fn(usize) -> Reason,
    ) -> bool {
        let mut pulls = std::mem::take(&mut self.pulls);
        pulls.clear();
        for source in sources.iter().filter(|source| counts(source)) {
            let home = self.homes.home[source.storage.index()];
            if home != NO_BACKEND && !self.homes.lent.contains(&source.storage) {
                let bytes = self.flow.bytes[source.tensor.index()];
                let place = pulls.iter().position(|pull| pull.home == home).unwrap_or(pulls.len());
                if place == pulls.len() {
                    pulls.push(Pull { home, bytes: 0, latest: 0, largest: (0, 0) });
                }
                let pull = &mut pulls[place];
                pull.bytes = pull.bytes.saturating_add(bytes).saturating_add(1);
                pull.latest = pull.latest.max(source.made());
                pull.largest = pull.largest.max((bytes, source.tensor.index()));
            }
        }
        pulls.sort_unstable_by_key(|pull| (Reverse((pull.bytes, pull.latest)), pull.home));
        let taker = pulls.iter().position(|pull| self.computes(storage, pull.home));
        if taker != Some(0) {
            self.homes.refused.entry(storage).or_insert(pulls[0].home);
        }
        if let Some(taker) = taker {
            self.set(storage, pulls[taker].home, reason(pulls[taker].largest.1));
        }
        self.pulls = pulls;
        taker.is_some()
    }

    /// Going backward: storages whose readers have a home. The earliest reader decides.
    /// Whether results were given one.
    fn follow_consumers(&mut self) -> bool {
        let flow = self.flow;
        if self.left.is_empty() && self.states_left.is_empty() {
            return false;
        }
        let mut found = false;
        let mut reader: Vec<(u16, u32)> = vec![(NO_BACKEND, 0); flow.storage.len()];
        for (maker, sources) in flow.iter().rev() {
            let storage = maker.storage;
            if !self.has_home(storage) {
                let (home, consumer) = reader[storage.index()];
                if home == NO_BACKEND {
                    continue;
                }
                if !self.computes(storage, home) {
                    self.homes.refused.entry(storage).or_insert(home);
                    continue;
                }
                self.set(storage, home, Reason::FollowsConsumer { node: consumer as usize });
                found = true;
            }
            let home = self.homes.home[storage.index()];
            for Source { storage, .. } in sources.iter().filter(|source| !self.has_home(source.storage)) {
                reader[storage.index()] = (home, maker.node.index() as u32);
            }
        }
        // A state that is only read has no node of its own above.
        for state in std::mem::take(&mut self.states_left) {
            let (home, consumer) = reader[state.index()];
            if self.has_home(state) {
                continue;
            }
            if home != NO_BACKEND && self.computes(state, home) {
                self.set(state, home, Reason::FollowsConsumer { node: consumer as usize });
            } else {
                self.states_left.push(state);
            }
        }
        found
    }

    fn lend(&mut self, (lending, device): (WeightStreaming, u16), fixed: &Fixed) {
        let on_host: Vec<bool> = self.backends.iter().map(|backend| backend.memory().host).collect();
        if fixed.iter().any(|(_, backend)| on_host[usize::from(*backend)]) {
            let mut homes = std::mem::take(&mut self.homes);
            let computes = |storage| self.refusal(storage, device).is_none();
            lend(self.graph, self.flow, &on_host, &mut homes, (lending, device), computes);
            self.homes = homes;
        }
    }

    fn settle(&mut self) {
        let mut homes = std::mem::take(&mut self.homes);
        let written = |storage: TensorId| self.written[storage.index()];
        settle(self.graph, self.flow, &mut homes, written, |storage, home| self.computes(storage, home));
        self.homes = homes;
    }

    fn the_rest(&mut self) -> Result<(), RuntimeError> {
        let flow = self.flow;
        for place in std::mem::take(&mut self.left) {
            self.prefer(flow.makers()[place as usize].storage)?;
        }
        for state in std::mem::take(&mut self.states_left) {
            self.prefer(state)?;
        }
        Ok(())
    }

    fn prefer(&mut self, storage: TensorId) -> Result<(), RuntimeError> {
        if self.has_home(storage) {
            return Ok(());
        }
        let mut refusals = Vec::new();
        for home in 0..self.backends.len() {
            match self.refusal(storage, home as u16) {
                None => {
                    self.set(storage, home as u16, Reason::Preferred);
                    if home > 0 {
                        self.homes.refused.entry(storage).or_insert(0);
                    }
                    return Ok(());
                }
                Some(refusal) => refusals.push(refusal),
            }
        }
        Err(self.unsupported(storage, refusals))
    }

    fn has_home(&self, storage: TensorId) -> bool {
        self.homes.home[storage.index()] != NO_BACKEND
    }

    fn set(&mut self, storage: TensorId, home: u16, reason: Reason) {
        self.homes.home[storage.index()] = home;
        self.homes.reason[storage.index()] = reason;
    }

    /// Whether a backend computes everything that writes a storage.
    fn computes(&self, storage: TensorId, backend: u16) -> bool {
        let device = &self.backends[usize::from(backend)];
        let takes = |node: NodeId| device.supports(self.graph, node).is_ok();
        match self.flow.kind[storage.index()] {
            TensorKind::Computed(node) if !takes(node) => false,
            _ => !self.written[storage.index()] || self.refusal(storage, backend).is_none(),
        }
    }

    /// The first node of a storage that a backend does not compute, the backend, and what it says.
    fn refusal(&self, storage: TensorId, backend: u16) -> Option<(NodeId, u16, String)> {
        let ask = |node: NodeId| {
            let refusal = self.backends[usize::from(backend)].supports(self.graph, node).err()?;
            Some((node, backend, refusal.to_string()))
        };
        let made = self.graph[storage].node().and_then(ask);
        made.or_else(|| self.flow.writers_of(storage).find_map(ask))
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

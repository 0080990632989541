//! A plan: everything decided about one graph on some backends, before anything is allocated.

use std::sync::Arc;

use quadriga_graph::{Graph, NodeId, Op, TensorId, TensorKind};
use serde::Serialize;

use super::NO_BACKEND;
use super::assign::{Homes, Reason};
use super::order::ScheduleStep;
use super::scheduler::Scheduler;
use super::space::Space;
use super::split::Splits;
use crate::memory::MemoryPlan;
use crate::session::lay_out;
use crate::{Backend, Layout, RuntimeError, Session, WeightLayout};

/// Where a node runs, and why.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Decision {
    /// The backend's number.
    pub backend: usize,
    /// Why its storage lives there.
    pub reason: Reason,
    /// A backend that would have been better, but does not compute it.
    pub refused_by: Option<usize>,
}

/// What a plan takes of one backend.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct BackendBytes {
    /// The backend's name.
    pub backend: String,
    /// Bytes of weights and constants to be loaded.
    pub weights: u64,
    /// Bytes of weights that are used where they are, in a file map.
    pub mapped: u64,
    /// Bytes of state.
    pub state: u64,
    /// Bytes of the arena: results, inputs and copies.
    pub compute: u64,
}

impl BackendBytes {
    /// What is allocated in all.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.state).saturating_add(self.compute)
    }
}

/// Where and when every node of a graph runs. Immutable; cloning copies a pointer.
///
/// Printing it shows splits, copies and bytes; `{:#}` adds a line for each node with the reason for its place.
#[derive(Clone)]
pub struct Plan {
    inner: Arc<Inner>,
}

struct Inner {
    scheduler: Scheduler,
    graph: Arc<Graph>,
    homes: Homes,
    splits: Splits,
    order: Vec<ScheduleStep>,
    space: Space,
}

impl Plan {
    pub(crate) fn new(
        scheduler: Scheduler,
        graph: Arc<Graph>,
        homes: Homes,
        splits: Splits,
        order: Vec<ScheduleStep>,
        space: Space,
    ) -> Plan {
        Plan { inner: Arc::new(Inner { scheduler, graph, homes, splits, order, space }) }
    }

    /// The graph it is for.
    pub fn graph(&self) -> &Arc<Graph> {
        &self.inner.graph
    }

    /// The backends, in order of preference.
    pub fn backends(&self) -> &[Arc<dyn Backend>] {
        self.inner.scheduler.backends()
    }

    /// The scheduler that made it.
    pub fn scheduler(&self) -> &Scheduler {
        &self.inner.scheduler
    }

    /// Splits, copies and the uses of leaves.
    pub fn splits(&self) -> &Splits {
        &self.inner.splits
    }

    /// What a run does, in order.
    pub fn order(&self) -> &[ScheduleStep] {
        &self.inner.order
    }

    /// Where everything that lives for one run goes.
    pub fn memory(&self) -> &MemoryPlan {
        &self.inner.space.memory
    }

    pub(crate) fn space(&self) -> &Space {
        &self.inner.space
    }

    /// The backend that a tensor's storage lives on; `None` for leaves that are wherever they are read.
    pub fn home(&self, tensor: TensorId) -> Option<usize> {
        let storage = self.inner.graph.get(tensor)?.storage();
        let home = *self.inner.homes.home.get(storage.index())?;
        (home != NO_BACKEND).then_some(usize::from(home))
    }

    /// The number of the backend that runs a node; of a view, where what it looks at lives.
    pub fn backend_of(&self, node: NodeId) -> usize {
        self.decision(node).map_or(0, |decision| decision.backend)
    }

    /// Where a node runs, and why. `None` for views of leaves that live wherever they are read.
    pub fn decision(&self, node: NodeId) -> Option<Decision> {
        let output = self.inner.graph.get_node(node)?.output();
        let storage = self.inner.graph.get(output)?.storage();
        let (reason, refused_by) = self.reason_for(storage)?;
        Some(Decision { backend: self.home(storage)?, reason, refused_by })
    }

    /// Why a storage is where it is, and which backend refused it.
    pub(crate) fn reason_for(&self, storage: TensorId) -> Option<(Reason, Option<usize>)> {
        let refused_by = self.inner.homes.refused.get(&storage).map(|b| usize::from(*b));
        Some((*self.inner.homes.reason.get(storage.index())?, refused_by))
    }

    /// Whether weights are brought from their home to a device for the run.
    pub fn lends(&self) -> bool {
        !self.inner.homes.lent.is_empty()
    }

    /// Whether a tensor, by index, is a weight that is brought from its home to a device for the run.
    pub(crate) fn is_lent(&self, tensor: usize) -> bool {
        self.lends() && self.inner.homes.lent.contains(&TensorId::from_index(tensor))
    }

    /// The copy through which a backend reads a tensor that lives elsewhere.
    pub fn copy_for(&self, tensor: TensorId, backend: usize) -> Option<usize> {
        let key = (u32::try_from(tensor.index()).ok()?, u16::try_from(backend).ok()?);
        self.inner.splits.copy_of.get(&key).map(|copy| *copy as usize)
    }

    /// The name of a copy in messages: the reading backend, and the tensor.
    pub fn copy_name(&self, copy: usize) -> String {
        let Some(c) = self.inner.splits.copies.get(copy) else { return format!("copy {copy}") };
        let backend = self.backends().get(c.to).map_or("", |b| b.name());
        format!("{backend}#{}", self.inner.graph.name(TensorId::from_index(c.tensor)))
    }

    /// How a backend wants a weight or constant that this graph reads there, and whether its bytes can be used where
    /// they are.
    pub(crate) fn weight_layout(
        &self,
        tensor: TensorId,
        backend: usize,
        viewed: bool,
        uses: &[(&Op, usize)],
    ) -> (WeightLayout, bool) {
        let plain = WeightLayout { layout: Layout::Plain, bytes: 0, mappable: true };
        let (Some(t), Some(b)) = (self.inner.graph.get(tensor), self.backends().get(backend)) else {
            return (plain, false);
        };
        let layout = if viewed || t.kind() == TensorKind::Constant {
            WeightLayout { bytes: b.storage_bytes(t), ..plain }
        } else {
            b.weight_layout(t, uses)
        };
        let map = layout.layout == Layout::Plain && layout.mappable && b.memory().host;
        (layout, map && self.inner.graph.data(tensor).is_some())
    }

    /// Of the weights that would be loaded to a backend: how many, how many of them fit into so many bytes in the order
    /// of their first use, and the bytes of these.
    pub(crate) fn fitting_weights(&self, backend: usize, bytes: u64) -> (usize, usize, u64) {
        let graph = &self.inner.graph;
        let uses = Uses::of(graph);
        let alignment = self.backends().get(backend).map_or(1, |b| b.memory().alignment.max(1)) as u64;
        let (mut count, mut fitting, mut sum, mut full) = (0, 0, 0_u64, false);
        for leaf in self.inner.splits.leaves.iter().filter(|leaf| leaf.backend == backend) {
            let id = TensorId::from_index(leaf.tensor);
            if !matches!(graph.get(id).map(|t| t.kind()), Some(TensorKind::Weight | TensorKind::Constant)) {
                continue;
            }
            let (layout, maps) = self.weight_layout(id, backend, leaf.viewed, &uses.of_tensor(graph, id));
            if !maps {
                count += 1;
                let start = sum.checked_next_multiple_of(alignment);
                let end = start.map_or(u64::MAX, |start| start.saturating_add(layout.bytes as u64));
                full |= end > bytes;
                if !full {
                    fitting += 1;
                    sum = end;
                }
            }
        }
        (count, fitting, sum)
    }

    /// Bytes per backend, before anything is allocated.
    pub fn bytes(&self) -> Vec<BackendBytes> {
        let graph = &self.inner.graph;
        let mut all: Vec<BackendBytes> = self
            .backends()
            .iter()
            .enumerate()
            .map(|(index, backend)| BackendBytes {
                backend: backend.name().to_owned(),
                compute: self.memory().arena_bytes(index),
                ..BackendBytes::default()
            })
            .collect();
        let uses = Uses::of(graph);
        let mut weights: Vec<Vec<usize>> = vec![Vec::new(); all.len()];
        for leaf in &self.inner.splits.leaves {
            let id = TensorId::from_index(leaf.tensor);
            let kind = graph.get(id).map(|t| t.kind());
            if !matches!(kind, Some(TensorKind::Weight | TensorKind::Constant)) {
                continue;
            }
            let (layout, maps) =
                self.weight_layout(id, leaf.backend, leaf.viewed, &uses.of_tensor(graph, id));
            if let (Some(bytes), Some(sizes)) = (all.get_mut(leaf.backend), weights.get_mut(leaf.backend)) {
                if maps {
                    bytes.mapped = bytes.mapped.saturating_add(layout.bytes as u64);
                } else {
                    sizes.push(layout.bytes);
                }
            }
        }
        for ((bytes, sizes), backend) in all.iter_mut().zip(weights).zip(self.backends()) {
            let (_, buffers) = lay_out(sizes, backend.memory());
            bytes.weights = buffers.iter().fold(0, |sum, buffer| sum.saturating_add(*buffer as u64));
        }
        for id in graph.of_kind(TensorKind::State) {
            if let Some(home) = self.home(id)
                && let (Some(bytes), Some(backend), Some(t)) =
                    (all.get_mut(home), self.backends().get(home), graph.get(id))
            {
                bytes.state = bytes.state.saturating_add(backend.storage_bytes(t) as u64);
            }
        }
        all
    }

    /// A session that runs this plan: allocates, loads weights, compiles.
    pub fn session(&self) -> Result<Session, RuntimeError> {
        self.session_with(&mut |_| {})
    }

    /// As [`Plan::session`], telling of the bytes of weights that are loaded.
    pub fn session_with(&self, progress: &mut dyn FnMut(crate::Progress)) -> Result<Session, RuntimeError> {
        let mut session = Session::new(self.scheduler())?;
        session.add(self, progress)?;
        Ok(session)
    }
}

/// Which nodes read each weight, and as which input.
pub(crate) struct Uses {
    /// (tensor, node, input), sorted.
    all: Vec<(u32, u32, u32)>,
}

impl Uses {
    pub(crate) fn of(graph: &Graph) -> Uses {
        let mut all = Vec::new();
        for node in graph.node_ids() {
            for (input, id) in graph.inputs(node).iter().enumerate() {
                if graph.get(*id).is_some_and(|t| t.kind() == TensorKind::Weight) {
                    all.push((id.index() as u32, node.index() as u32, input as u32));
                }
            }
        }
        all.sort_unstable();
        Uses { all }
    }

    pub(crate) fn of_tensor<'g>(&self, graph: &'g Graph, tensor: TensorId) -> Vec<(&'g Op, usize)> {
        let index = tensor.index() as u32;
        let first = self.all.partition_point(|(t, ..)| *t < index);
        let mine = self.all.iter().skip(first).take_while(|(t, ..)| *t == index);
        let mut uses: Vec<(&Op, usize)> = Vec::new();
        for (_, node, input) in mine {
            if let Some(node) = graph.get_node(NodeId::from_index(*node as usize))
                && !uses.iter().any(|(op, at)| *op == node.op() && *at == *input as usize)
            {
                uses.push((node.op(), *input as usize));
            }
        }
        uses
    }
}

//! A plan: everything decided about one graph on some backends, before anything is allocated.

use std::sync::Arc;

use quadriga_graph::{Graph, NodeId, TensorId, TensorKind};
use serde::Serialize;

use super::order::ScheduleStep;
use super::placement::{NO_BACKEND, Placements, Reason};
use super::scheduler::Scheduler;
use super::space::Space;
use super::splits::Splits;
use crate::Backend;
use crate::memory::MemoryPlan;
use crate::weights::{self, WeightRead};

/// Where a node runs, and why.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Decision {
    /// The backend's number.
    pub backend: usize,
    /// Why its storage is there.
    pub reason: Reason,
    /// A better backend, which does not compute it.
    pub refused_by: Option<usize>,
}

/// The memory that a plan takes of one backend.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct BackendBytes {
    /// The backend's name.
    pub backend: String,
    /// Bytes of weights and constants to be loaded.
    pub weights: u64,
    /// Bytes of weights that the backend reads in the file map.
    pub mapped: u64,
    /// Bytes of state.
    pub state: u64,
    /// Bytes of the arena: results, inputs and copies.
    pub compute: u64,
    /// Bytes of the backend's work memory, which all its programs share; on the CPU it depends on the number of threads.
    pub work: u64,
    /// Bytes of host memory that the backend allocates for copies: for those to a device that it does not reach, and for
    /// streamed weights that no backend maps. Not all of it is there before the first run. Reads that do not wait take
    /// more ([`Plan::pending_read_bytes`]).
    pub staging: u64,
}

impl BackendBytes {
    /// Bytes of the backend's own memory that are allocated in all; staging memory is the host's.
    pub fn total(&self) -> u64 {
        let arena = self.compute.saturating_add(self.work);
        self.weights.saturating_add(self.state).saturating_add(arena)
    }
}

/// Where and when every node of a graph runs: the result of [`Scheduler::plan`]. Immutable; cloning copies a pointer.
///
/// Printing it shows splits, copies and bytes; `{:#}` adds a line for each node with the reason for its placement.
/// [`explain`](Plan::explain) and [`to_json`](Plan::to_json) have all of it as data.
///
/// ```
/// use quadriga_graph::{DType, GraphBuilder};
/// use quadriga_runtime::Scheduler;
///
/// let g = GraphBuilder::new();
/// let x = g.input("x", DType::F32, [2, 8]);
/// g.output("y", x.sqr().silu());
///
/// let plan = Scheduler::new(quadriga_cpu::Backend::new()?).plan(g.finish()?)?;
/// assert_eq!(plan.splits().splits.len(), 1);
/// println!("{plan:#}");
/// println!("{} bytes for inputs and results", plan.bytes()[0].compute);
/// let mut session = plan.session()?; // allocates, loads weights, compiles
/// # session.run(&[("x", &[1.0f32; 16])])?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Plan {
    inner: Arc<PlanInner>,
}

struct PlanInner {
    scheduler: Scheduler,
    graph: Arc<Graph>,
    placements: Placements,
    splits: Splits,
    order: Vec<ScheduleStep>,
    space: Space,
}

impl Plan {
    /// Whether this is another handle to the same plan.
    pub(crate) fn is_same(&self, other: &Plan) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    pub(crate) fn new(
        scheduler: Scheduler,
        graph: Arc<Graph>,
        placements: Placements,
        splits: Splits,
        order: Vec<ScheduleStep>,
        space: Space,
    ) -> Plan {
        Plan { inner: Arc::new(PlanInner { scheduler, graph, placements, splits, order, space }) }
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

    /// The commands of a run, in the order in which they are issued.
    pub fn order(&self) -> &[ScheduleStep] {
        &self.inner.order
    }

    /// The memory plan of inputs, results and copies.
    pub fn memory(&self) -> &MemoryPlan {
        &self.inner.space.memory
    }

    pub(crate) fn space(&self) -> &Space {
        &self.inner.space
    }

    /// The backend that a tensor's storage is assigned to; `None` for leaves that are on every backend that reads them.
    pub fn placement(&self, tensor: TensorId) -> Option<usize> {
        let storage = self.inner.graph.get(tensor)?.storage();
        let backend = *self.inner.placements.backend.get(storage.index())?;
        (backend != NO_BACKEND).then_some(usize::from(backend))
    }

    /// The number of the backend that runs a node; for a view, the backend of its storage.
    pub fn backend_of(&self, node: NodeId) -> usize {
        self.decision(node).map_or(0, |decision| decision.backend)
    }

    /// Where a node runs, and why. `None` for views of leaves that are not assigned to a backend.
    pub fn decision(&self, node: NodeId) -> Option<Decision> {
        let output = self.inner.graph.get_node(node)?.output();
        let storage = self.inner.graph.get(output)?.storage();
        let (reason, refused_by) = self.reason_for(storage)?;
        Some(Decision { backend: self.placement(storage)?, reason, refused_by })
    }

    /// Why a storage is on its backend, and which backend refused it.
    pub(crate) fn reason_for(&self, storage: TensorId) -> Option<(Reason, Option<usize>)> {
        let refused_by = self.inner.placements.refused.get(&storage).map(|b| usize::from(*b));
        Some((*self.inner.placements.reason.get(storage.index())?, refused_by))
    }

    /// Whether every split runs on an asynchronous backend. Then [`Session::start`](crate::Session::start) returns before
    /// anything is computed, and the next run can be started while one is in flight.
    pub fn is_asynchronous(&self) -> bool {
        let asynchronous = self.scheduler().asynchronous();
        let mut splits = self.splits().splits.iter();
        splits.all(|split| asynchronous.get(split.backend).copied().unwrap_or(false))
    }

    /// Whether host-resident weights are copied to a device in each run.
    pub fn streams_weights(&self) -> bool {
        !self.inner.placements.streamed.is_empty()
    }

    /// Whether a tensor, by index, is a weight that is copied to a device in each run.
    pub(crate) fn is_streamed(&self, tensor: usize) -> bool {
        self.streams_weights() && self.inner.placements.streamed.contains(&TensorId::from_index(tensor))
    }

    /// The copy through which a backend reads a tensor of another.
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

    /// The weights and constants that the plan reads, with the backends that hold them.
    pub(crate) fn weight_reads(&self) -> impl Iterator<Item = WeightRead> + '_ {
        self.inner.splits.leaves.iter().filter_map(|leaf| {
            let tensor = TensorId::from_index(leaf.tensor);
            let kind = self.inner.graph.get(tensor)?.kind();
            matches!(kind, TensorKind::Weight | TensorKind::Constant).then_some(WeightRead {
                tensor,
                backend: leaf.backend,
                viewed: leaf.viewed,
            })
        })
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
        let weights = weights::bytes_on(graph, self.backends(), self.weight_reads());
        for (bytes, weights) in all.iter_mut().zip(weights) {
            (bytes.weights, bytes.mapped) = (weights.loaded, weights.mapped);
        }
        let splits = self.splits();
        for (number, split) in splits.splits.iter().enumerate() {
            if let (Some(bytes), Some(backend)) =
                (all.get_mut(split.backend), self.backends().get(split.backend))
            {
                bytes.work = bytes.work.max(backend.work_bytes(graph, splits.nodes_of(number)) as u64);
            }
        }
        for id in graph.of_kind(TensorKind::State) {
            if self.space().bound.contains_key(&id) {
                continue;
            }
            if let Some(number) = self.placement(id)
                && let (Some(bytes), Some(backend), Some(t)) =
                    (all.get_mut(number), self.backends().get(number), graph.get(id))
            {
                bytes.state = bytes.state.saturating_add(backend.storage_bytes(t) as u64);
            }
        }
        for (bytes, staging) in all.iter_mut().zip(self.staging_bytes()) {
            bytes.staging = staging;
        }
        all
    }
}

//! From a plan to something that runs: every split gets its programs, every copy its regions.

use std::any::Any;
use std::sync::Arc;

use quadriga_graph::{Graph, NodeId, TensorId, TensorKind};

use super::places::SplitPlaces;
use super::transfer::CopyRegions;
use crate::memory::PlacedTensor;
use crate::schedule::Plan;
use crate::{Buffer, Event, Program, RuntimeError, SplitSource};

/// The programs and copies of a plan.
pub(crate) struct CompiledPlan {
    /// The arenas' generation that the places belong to.
    pub(crate) generation: u64,
    /// For each split its program, per bank of inputs; one program where the split reads no inputs in banks.
    pub(crate) programs: Vec<Vec<Box<dyn Program>>>,
    /// For each split of an asynchronous backend the event that it is done.
    pub(crate) done: Vec<Option<Arc<dyn Event>>>,
    /// The copies.
    pub(crate) copies: Vec<CopyRegions>,
    /// Keep host memory locked for direct access by devices.
    _locks: Vec<Box<dyn Any + Send + Sync>>,
    /// For each backend the copies out of it that may not be done when its last split starts.
    pub(crate) loose_ends: Vec<Vec<usize>>,
    /// Keep the tensors in the arenas registered with their backends.
    pub(crate) registrations: Vec<PlacedTensor>,
}

impl CompiledPlan {
    pub(crate) fn new(places: &SplitPlaces<'_>) -> Result<CompiledPlan, RuntimeError> {
        let (plan, splits) = (places.plan, places.plan.splits());
        let registrations = places.register()?;
        let kept = kept(plan);
        let kept = |tensor: TensorId| {
            plan.graph().get(tensor).is_none_or(|t| kept.get(t.storage().index()).is_none_or(|k| *k))
        };
        let mut programs = Vec::with_capacity(splits.splits.len());
        let mut done = Vec::with_capacity(splits.splits.len());
        for (number, split) in splits.splits.iter().enumerate() {
            let nodes = splits.nodes_of(number);
            let first = || nodes.first().map_or_else(String::new, |node| plan.graph().node_name(*node));
            let banks = if reads_banks(plan, split.backend, nodes) { 2 } else { 1 };
            let compiled: Result<Vec<_>, _> =
                (0..banks).map(|bank| program(places, split.backend, nodes, (number, bank), &kept)).collect();
            programs.push(compiled.map_err(|error| error.in_split(number, first))?);
            let event = event_of(plan, split.backend);
            done.push(event.map_err(|error| error.in_split(number, first))?);
        }
        let mut copies = Vec::with_capacity(splits.copies.len());
        for number in 0..splits.copies.len() {
            let (Some(from), Some(to)) = (places.copy_source(number)?, places.copy_target(number)) else {
                return Err(RuntimeError::BadPlan(format!("{} has no memory", plan.copy_name(number))));
            };
            copies.push(CopyRegions::new(from, to, places.selection(number)));
        }
        let locks = locks(plan, &copies);
        let mut loose_ends = vec![Vec::new(); plan.backends().len()];
        for (number, copy) in splits.copies.iter().enumerate() {
            let known = splits.lanes.get(copy.from).and_then(|lane| lane.last()).is_some_and(|last| {
                let done = splits.done_before(*last as usize).get(copy.to);
                done.is_some_and(|done| *done as usize > copy.reader)
            });
            if !known && let Some(ends) = loose_ends.get_mut(copy.from) {
                ends.push(number);
            }
        }
        let generation = places.arenas.generation;
        Ok(CompiledPlan { generation, programs, done, copies, _locks: locks, loose_ends, registrations })
    }

    /// Forgets events of a run that was given up.
    pub(crate) fn reset_copies(&mut self) {
        self.copies.iter_mut().for_each(CopyRegions::reset);
    }
}

/// Compiles some nodes of a split.
pub(crate) fn program(
    places: &SplitPlaces<'_>,
    backend: usize,
    nodes: &[NodeId],
    (split, bank): (usize, usize),
    kept: &dyn Fn(TensorId) -> bool,
) -> Result<Box<dyn Program>, RuntimeError> {
    let Some(device) = places.plan.backends().get(backend) else { return Err(RuntimeError::ForeignPlan) };
    let split = SplitSource {
        graph: places.plan.graph(),
        nodes,
        place: &|tensor| places.place(tensor, backend, bank),
        kept,
        scratch: places.scratch(split),
        ranks: places.plan.scheduler().rank_groups(),
    };
    device.compile(&split).map_err(RuntimeError::device)
}

/// Lets asynchronous devices lock the host memory that they copy to and from.
fn locks(plan: &Plan, copies: &[CopyRegions]) -> Vec<Box<dyn Any + Send + Sync>> {
    let mut seen: Vec<(usize, &Arc<dyn Buffer>)> = Vec::new();
    let mut locks = Vec::new();
    for (copy, regions) in plan.splits().copies.iter().zip(copies) {
        for (device, buffer) in [(copy.to, &regions.from.buffer), (copy.from, &regions.to.buffer)] {
            let asynchronous = plan.scheduler().asynchronous().get(device).copied().unwrap_or(false);
            let known = seen.iter().any(|(d, b)| *d == device && Arc::ptr_eq(b, buffer));
            if asynchronous && buffer.is_host() && !known {
                seen.push((device, buffer));
                locks.extend(plan.backends().get(device).and_then(|device| device.lock(buffer)));
            }
        }
    }
    locks
}

/// A new event of a backend, if it is asynchronous.
fn event_of(plan: &Plan, backend: usize) -> Result<Option<Arc<dyn Event>>, RuntimeError> {
    let asynchronous = plan.scheduler().asynchronous().get(backend).copied().unwrap_or(false);
    match plan.backends().get(backend).filter(|_| asynchronous) {
        Some(device) => device.event(false).map(Some).map_err(RuntimeError::device),
        None => Ok(None),
    }
}

/// Whether nodes read inputs that their backend has two banks of.
pub(crate) fn reads_banks(plan: &Plan, backend: usize, nodes: &[NodeId]) -> bool {
    let graph = plan.graph();
    let is_input = |id: &TensorId| {
        let storage = graph.get(*id).and_then(|t| graph.get(t.storage()));
        storage.is_some_and(|s| s.kind() == TensorKind::Input)
    };
    plan.space().banks.get(backend).is_some_and(|banks| *banks > 1)
        && nodes.iter().any(|node| graph.inputs(*node).iter().any(is_input))
}

/// For each storage whether it is read outside the split that computes it.
pub(crate) fn kept(plan: &Plan) -> Vec<bool> {
    let (graph, of_node): (&Graph, _) = (plan.graph(), &plan.splits().split_of_node);
    let computed_in = |storage: TensorId| {
        let node = graph.get(storage).and_then(|t| t.node());
        node.and_then(|node| of_node.get(node.index()).copied()).unwrap_or(u32::MAX)
    };
    let mut kept = vec![false; graph.tensors().len()];
    let mut keep = |storage: TensorId, split: u32| {
        if computed_in(storage) != split
            && let Some(kept) = kept.get_mut(storage.index())
        {
            *kept = true;
        }
    };
    for (node, split) in graph.node_ids().zip(of_node) {
        let output = graph.get_node(node).map(|n| n.output());
        if *split == u32::MAX {
            continue;
        }
        for id in graph.inputs(node).iter().copied().chain(output) {
            if let Some(t) = graph.get(id) {
                keep(t.storage(), *split);
            }
        }
    }
    for (_, output) in graph.outputs() {
        if let Some(t) = graph.get(*output) {
            keep(t.storage(), u32::MAX - 1);
        }
    }
    kept
}

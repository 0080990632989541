//! From a plan to something that runs: every tensor gets its place, every split its program.

use std::any::Any;
use std::sync::Arc;

use quadriga_graph::{Graph, NodeId, TensorId, TensorKind};

use super::arena::Arenas;
use super::state::States;
use super::weights::Weights;
use crate::memory::PlacedTensor;
use crate::schedule::Plan;
use crate::{Backend, BackendError, Buffer, Event, Program, Region, RuntimeError, SplitSource, TensorPlace};

/// A plan of a session, ready to run.
pub(crate) struct Compiled {
    /// The arenas' generation that the places belong to.
    pub(crate) generation: u64,
    /// For each split its program, per bank of inputs; one program where the split reads no inputs in banks.
    pub(crate) programs: Vec<Vec<Box<dyn Program>>>,
    /// For each split of an asynchronous backend the event that it is done.
    pub(crate) done: Vec<Option<Arc<dyn Event>>>,
    /// For each copy what it moves.
    pub(crate) copies: Vec<Moving>,
    /// What lets devices reach the host's memory directly.
    _locks: Vec<Box<dyn Any + Send + Sync>>,
    /// For each backend the copies out of it that are not known to be done when its lane ends.
    pub(crate) loose_ends: Vec<Vec<usize>>,
    /// The backends know of every tensor in the arenas for as long as it is there.
    _placed: Vec<PlacedTensor>,
}

/// A copy between two backends.
pub(crate) struct Moving {
    pub(crate) from: Region,
    pub(crate) to: Region,
    /// How it is done; found out when it is first done.
    pub(crate) route: Route,
    /// Recorded when it is done; none before the first run, and where both sides are synchronous.
    pub(crate) done: Option<Arc<dyn Event>>,
}

/// How bytes get from one backend to another.
pub(crate) enum Route {
    /// Not known yet.
    Unknown,
    /// The reading backend fetches them.
    Pull,
    /// The backend that has them sends them.
    Push,
    /// Through host memory that both can reach.
    Bounce {
        /// The host memory.
        staging: Region,
        /// Recorded when the bytes are there.
        filled: Option<Arc<dyn Event>>,
    },
    /// Through memory of the session, the host waiting.
    Host(Vec<u8>),
}

/// What places are made of.
pub(crate) struct Site<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) arenas: &'a Arenas,
    pub(crate) states: &'a States,
    pub(crate) weights: &'a Weights,
}

impl Site<'_> {
    /// Where a tensor is for nodes of a backend.
    pub(crate) fn place(&self, tensor: TensorId, backend: usize, bank: usize) -> Option<TensorPlace> {
        let graph = self.plan.graph();
        let t = graph.get(tensor)?;
        let storage = t.storage();
        let short = u16::try_from(backend).ok()?;
        let plain = |region: Region| TensorPlace { region, layout: crate::Layout::Plain };
        let part = |region: &Region| region.part(t.offset(), t.bytes()).ok().map(plain);
        match graph.get(storage)?.kind() {
            TensorKind::Weight if self.plan.copy_for(tensor, backend).is_some() => {
                self.copied(tensor, backend)
            }
            TensorKind::Weight | TensorKind::Constant => {
                let place = self.weights.get(&(storage.index() as u32, short))?.place();
                if tensor == storage { Some(place.clone()) } else { part(&place.region) }
            }
            TensorKind::Input => {
                let slot = self.plan.space().input(storage, short, bank)?;
                part(&self.arenas.region(slot, graph.get(storage)?.bytes())?)
            }
            TensorKind::State if self.plan.home(storage) == Some(backend) => {
                part(self.states.get(&graph.name(storage))?.region())
            }
            TensorKind::Computed(_) if self.plan.home(storage) == Some(backend) => {
                let slot = self.plan.space().result(tensor)?;
                self.arenas.region(slot, t.bytes()).map(plain)
            }
            TensorKind::State | TensorKind::Computed(_) => self.copied(tensor, backend),
        }
    }

    /// Where a backend reads its copy of a tensor that lives elsewhere.
    fn copied(&self, tensor: TensorId, backend: usize) -> Option<TensorPlace> {
        let t = self.plan.graph().get(tensor)?;
        let number = self.plan.copy_for(tensor, backend)?;
        let copy = self.plan.splits().copies.get(number)?;
        let whole = self.arenas.region(self.plan.space().copy(number)?, copy.bytes)?;
        let region = whole.part(t.offset().checked_sub(copy.offset)?, t.bytes()).ok()?;
        Some(TensorPlace { region, layout: crate::Layout::Plain })
    }

    /// The bytes of a weight as its file has them, which at home may be packed: mapped for the backend that fetches
    /// them, or as host memory, or copied to some.
    fn lent(&self, tensor: TensorId, from: usize, to: usize) -> Result<Option<Region>, RuntimeError> {
        let (Some(data), Some(owner), Some(reader)) =
            (self.plan.graph().data(tensor), self.plan.backends().get(from), self.plan.backends().get(to))
        else {
            return Ok(None);
        };
        let buffer = match reader.map(data).or_else(|| owner.map(data)) {
            Some(buffer) => buffer,
            None => {
                let buffer = reader.staging(data.len()).map_err(RuntimeError::device)?;
                buffer.write(0, data.bytes()).map_err(RuntimeError::device)?;
                buffer
            }
        };
        Region::new(buffer, 0, data.len()).map(Some).map_err(RuntimeError::device)
    }

    /// Where a copy's bytes are at their source.
    fn source(&self, copy: usize) -> Result<Option<Region>, RuntimeError> {
        let Some(copy) = self.plan.splits().copies.get(copy) else { return Ok(None) };
        let tensor = TensorId::from_index(copy.tensor);
        if self.plan.graph().get(tensor).is_some_and(|t| t.kind() == TensorKind::Weight) {
            return self.lent(tensor, copy.from, copy.to);
        }
        Ok(self.place(tensor, copy.from, 0).map(|place| place.region))
    }

    fn target(&self, copy: usize) -> Option<Region> {
        let bytes = self.plan.splits().copies.get(copy)?.bytes;
        self.arenas.region(self.plan.space().copy(copy)?, bytes)
    }

    /// Tells the backends of all that the plan has in the arenas: results, inputs and copies.
    fn placed(&self) -> Result<Vec<PlacedTensor>, RuntimeError> {
        let (plan, graph) = (self.plan, self.plan.graph());
        let mut all = Vec::new();
        let mut tell = |id: TensorId, backend: usize, region: Option<Region>| -> Result<(), RuntimeError> {
            let (Some(tensor), Some(device), Some(region)) =
                (graph.get(id), plan.backends().get(backend), region)
            else {
                return Ok(());
            };
            let told = PlacedTensor::new(device, tensor, region);
            all.push(told.map_err(|error| RuntimeError::device(error).at(|| graph.name(id)))?);
            Ok(())
        };
        for id in graph.tensor_ids() {
            if let Some(home) = plan.home(id).filter(|_| graph.get(id).is_some_and(|t| t.node().is_some())) {
                tell(id, home, self.place(id, home, 0).map(|place| place.region))?;
            }
        }
        for leaf in &plan.splits().leaves {
            let id = TensorId::from_index(leaf.tensor);
            if graph.get(id).is_some_and(|t| t.kind() == TensorKind::Input) {
                for bank in 0..usize::from(plan.space().banks.get(leaf.backend).copied().unwrap_or(1)) {
                    tell(id, leaf.backend, self.place(id, leaf.backend, bank).map(|place| place.region))?;
                }
            }
        }
        for (number, copy) in plan.splits().copies.iter().enumerate() {
            tell(TensorId::from_index(copy.tensor), copy.to, self.target(number))?;
        }
        Ok(all)
    }

    /// Compiles some nodes of a split.
    pub(crate) fn program(
        &self,
        backend: usize,
        nodes: &[NodeId],
        (split, bank): (usize, usize),
        kept: &dyn Fn(TensorId) -> bool,
    ) -> Result<Box<dyn Program>, RuntimeError> {
        let Some(device) = self.plan.backends().get(backend) else { return Err(RuntimeError::ForeignPlan) };
        let scratch = self.plan.space().scratch(split);
        let split = SplitSource {
            graph: self.plan.graph(),
            nodes,
            place: &|tensor| self.place(tensor, backend, bank),
            kept,
            scratch: scratch.and_then(|(slot, bytes)| self.arenas.region(slot, bytes)),
        };
        device.compile(&split).map_err(RuntimeError::device)
    }
}

impl Compiled {
    pub(crate) fn new(site: &Site<'_>) -> Result<Compiled, RuntimeError> {
        let (plan, splits) = (site.plan, site.plan.splits());
        let placed = site.placed()?;
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
            let made: Result<Vec<_>, _> =
                (0..banks).map(|bank| site.program(split.backend, nodes, (number, bank), &kept)).collect();
            programs.push(made.map_err(|error| error.in_split(number, first))?);
            let event = event_of(plan, split.backend, false);
            done.push(event.map_err(|error| error.in_split(number, first))?);
        }
        let mut copies = Vec::with_capacity(splits.copies.len());
        for number in 0..splits.copies.len() {
            let (Some(from), Some(to)) = (site.source(number)?, site.target(number)) else {
                return Err(RuntimeError::BadPlan(format!("{} has no place", plan.copy_name(number))));
            };
            copies.push(Moving { from, to, route: Route::Unknown, done: None });
        }
        let locks = locks(plan, &copies);
        let mut loose_ends = vec![Vec::new(); plan.backends().len()];
        for (number, copy) in splits.copies.iter().enumerate() {
            let known = splits.lanes.get(copy.from).and_then(|lane| lane.last()).is_some_and(|last| {
                splits
                    .done_before(*last as usize)
                    .get(copy.to)
                    .is_some_and(|done| *done as usize > copy.reader)
            });
            if !known && let Some(ends) = loose_ends.get_mut(copy.from) {
                ends.push(number);
            }
        }
        let generation = site.arenas.generation;
        Ok(Compiled { generation, programs, done, copies, _locks: locks, loose_ends, _placed: placed })
    }
}

/// Lets asynchronous devices lock the host memory that they copy to and from.
fn locks(plan: &Plan, copies: &[Moving]) -> Vec<Box<dyn Any + Send + Sync>> {
    let mut seen: Vec<(usize, &Arc<dyn Buffer>)> = Vec::new();
    let mut locks = Vec::new();
    for (copy, moving) in plan.splits().copies.iter().zip(copies) {
        for (device, buffer) in [(copy.to, &moving.from.buffer), (copy.from, &moving.to.buffer)] {
            let works = plan.scheduler().asynchronous().get(device).copied().unwrap_or(false);
            let known = seen.iter().any(|(d, b)| *d == device && Arc::ptr_eq(b, buffer));
            if works && buffer.is_host() && !known {
                seen.push((device, buffer));
                locks.extend(plan.backends().get(device).and_then(|device| device.lock(buffer)));
            }
        }
    }
    locks
}

/// An event of a backend, if it is asynchronous.
pub(crate) fn event_of(
    plan: &Plan,
    backend: usize,
    timing: bool,
) -> Result<Option<Arc<dyn Event>>, RuntimeError> {
    let asynchronous = plan.scheduler().asynchronous().get(backend).copied().unwrap_or(false);
    match plan.backends().get(backend).filter(|_| asynchronous) {
        Some(device) => device.event(timing).map(Some).map_err(RuntimeError::device),
        None => Ok(None),
    }
}

/// Host memory for a copy that neither side can make alone.
pub(crate) fn staging(backend: &Arc<dyn Backend>, bytes: usize) -> Result<Region, BackendError> {
    let buffer: Arc<dyn Buffer> = backend.staging(bytes)?;
    Region::new(buffer, 0, bytes)
}

/// Whether nodes read inputs that have two places on their backend.
fn reads_banks(plan: &Plan, backend: usize, nodes: &[NodeId]) -> bool {
    let graph = plan.graph();
    let is_input = |id: &TensorId| {
        let storage = graph.get(*id).and_then(|t| graph.get(t.storage()));
        storage.is_some_and(|s| s.kind() == TensorKind::Input)
    };
    plan.space().banks.get(backend).is_some_and(|banks| *banks > 1)
        && nodes.iter().any(|node| graph.inputs(*node).iter().any(is_input))
}

/// For each storage whether it is read after the split that makes it.
fn kept(plan: &Plan) -> Vec<bool> {
    let (graph, of_node): (&Graph, _) = (plan.graph(), &plan.splits().split_of_node);
    let made_in = |storage: TensorId| {
        let node = graph.get(storage).and_then(|t| t.node());
        node.and_then(|node| of_node.get(node.index()).copied()).unwrap_or(u32::MAX)
    };
    let mut kept = vec![false; graph.tensors().len()];
    let mut keep = |storage: TensorId, split: u32| {
        if made_in(storage) != split
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

//! From a request to a plan: the three questions, one after the other.

#![expect(
    clippy::indexing_slicing,
    reason = "arrays are sized by the graph's tensors and the request's backends; what indexes them is validated first"
)]

use quadriga_graph::TensorKind;

use super::MemoryError;
use super::lifetimes::{Lifetime, Uses};
use super::packing::{Packer, PackingItem, PackingProblem};
use super::plan::{BackendPlan, MemoryPlan, Spot};
use super::request::Request;
use crate::flow::Flow;

/// Plans memory, and keeps its working memory for the next plan: planning again what has about the same size allocates
/// nothing.
#[derive(Clone, Debug, Default)]
pub struct Planner {
    flow: Flow,
    uses: Uses,
    packer: Packer,
    /// For each backend the packing problem, and for each item of it the tensor whose storage it is. Extras follow.
    problems: Vec<(PackingProblem, Vec<u32>)>,
}

impl Planner {
    /// Plans the memory of a graph.
    pub fn plan(&mut self, request: &Request<'_>) -> Result<MemoryPlan, MemoryError> {
        let mut plan = MemoryPlan::default();
        self.plan_into(request, &mut plan)?;
        Ok(plan)
    }

    /// As [`Planner::plan`], into a plan whose memory is used again. After an error that plan is empty.
    pub fn plan_into(&mut self, request: &Request<'_>, plan: &mut MemoryPlan) -> Result<(), MemoryError> {
        let mut flow = std::mem::take(&mut self.flow);
        flow.read(request.graph);
        let done = self.plan_read(request, &flow, plan);
        self.flow = flow;
        done
    }

    /// As [`Planner::plan_into`], for a graph that has been read already.
    pub(crate) fn plan_read(
        &mut self,
        request: &Request<'_>,
        flow: &Flow,
        plan: &mut MemoryPlan,
    ) -> Result<(), MemoryError> {
        plan.clear();
        let done = self.answer(request, flow, plan);
        if done.is_err() {
            plan.clear();
        }
        #[cfg(debug_assertions)]
        if done.is_ok()
            && let Err(flaw) = super::check(request, plan)
        {
            debug_assert!(false, "memory plan: {flaw}");
        }
        done
    }

    fn answer(
        &mut self,
        request: &Request<'_>,
        flow: &Flow,
        plan: &mut MemoryPlan,
    ) -> Result<(), MemoryError> {
        validate(request)?;
        self.uses.collect(request, flow)?;
        plan.sharing.analyse(request, flow, &mut self.uses);
        plan.graph = request.graph.fingerprint();
        plan.horizon = self.uses.horizon;
        plan.extras.extend_from_slice(request.extras);
        plan.backends.resize(request.memories.len(), BackendPlan::default());
        for (backend, memory) in plan.backends.iter_mut().zip(request.memories) {
            let (name, chunks) = (std::mem::take(&mut backend.name), std::mem::take(&mut backend.chunks));
            *backend = BackendPlan { name, chunks, ..BackendPlan::default() };
            memory.name.clone_into(&mut backend.name);
        }
        self.state_problems(request);
        self.gather(request, flow, plan);
        self.place(request, flow, plan)?;
        Ok(())
    }

    /// For each backend a packing problem without items.
    fn state_problems(&mut self, request: &Request<'_>) {
        self.problems.resize_with(request.memories.len(), || (PackingProblem::new(Vec::new()), Vec::new()));
        for ((problem, owners), memory) in self.problems.iter_mut().zip(request.memories) {
            let alignment = memory.facts.alignment as u64;
            problem.items.clear();
            problem.alignment = alignment;
            problem.max_chunk = memory.facts.max_buffer.map(|max| max as u64 / alignment * alignment);
            owners.clear();
        }
    }

    /// Fills in lifetimes, sizes and figures, and the items of each backend's packing problem.
    fn gather(&mut self, request: &Request<'_>, flow: &Flow, plan: &mut MemoryPlan) {
        let Planner { uses, problems, .. } = self;
        plan.bytes.resize(flow.storage.len(), 0);
        plan.lifetimes.resize(flow.storage.len(), Lifetime::NEVER);
        // A storage is as large as the largest of those that follow each other in it, which is known when they have been
        // seen: from the last to the root.
        for (index, tensor) in request.graph.tensors().iter().enumerate().rev() {
            if flow.storage[index].index() != index || uses.last[index].end == 0 {
                continue;
            }
            let backend = usize::from(request.backend(index));
            let memory = &request.memories[backend];
            let bytes = if memory.pads() { memory.storage_bytes(tensor) } else { flow.bytes[index] };
            let root = plan.sharing.roots[index].index();
            let bytes = bytes.max(plan.bytes[root]);
            let figures = &mut plan.backends[backend];
            let figure = match flow.kind[index] {
                _ if root != index => {
                    plan.bytes[root] = bytes;
                    continue;
                }
                TensorKind::Weight => &mut figures.weights,
                TensorKind::Constant => &mut figures.constants,
                TensorKind::State => &mut figures.state,
                _ if plan.sharing.placed[index] => continue,
                kind => {
                    let life = uses.lifetime(request, kind, index);
                    plan.lifetimes[index] = life;
                    plan.bytes[index] = bytes;
                    let (problem, owners) = &mut problems[backend];
                    problem.items.push(PackingItem { size: bytes, start: life.start, end: life.end });
                    owners.push(index as u32);
                    if kind == TensorKind::Input { &mut figures.inputs } else { &mut figures.results }
                }
            };
            *figure = figure.saturating_add(bytes);
        }
        for (problem, owners) in &mut *problems {
            problem.items.reverse();
            owners.reverse();
        }
        for extra in request.extras {
            let Lifetime { start, end } = extra.lifetime;
            let end = end.min(uses.horizon);
            let backend = usize::from(extra.backend);
            problems[backend].0.items.push(PackingItem { size: extra.bytes, start, end });
            let figure = &mut plan.backends[backend].extras;
            *figure = figure.saturating_add(extra.bytes);
        }
    }

    /// Packs each backend's storages and writes down where everything is.
    fn place(
        &mut self,
        request: &Request<'_>,
        flow: &Flow,
        plan: &mut MemoryPlan,
    ) -> Result<(), MemoryError> {
        plan.spots.extend(plan.sharing.placed.iter().enumerate().map(|(index, placed)| match placed {
            true => Spot::Placed { backend: request.backend(index) },
            false => Spot::Unused,
        }));
        plan.extra_spots.resize(request.extras.len(), Spot::Unused);
        for (number, (problem, owners)) in self.problems.iter().enumerate() {
            if problem.items.is_empty() {
                continue;
            }
            let packing = self.packer.pack(problem, request.effort)?;
            let spot = |item: usize| {
                let place = packing.placements[item];
                Spot::Arena { backend: number as u16, chunk: place.chunk, offset: place.offset }
            };
            for (item, owner) in owners.iter().enumerate() {
                plan.spots[*owner as usize] = spot(item);
            }
            let extras = request.extras.iter().enumerate();
            let mine = extras.filter(|(_, extra)| usize::from(extra.backend) == number);
            for (item, (extra, _)) in (owners.len()..).zip(mine) {
                plan.extra_spots[extra] = spot(item);
            }
            let backend = &mut plan.backends[number];
            // A chunk ends with the last byte in use, which the packing has rounded up to the alignment.
            backend.chunks.resize(packing.chunks.len(), 0);
            for (item, place) in problem.items.iter().zip(&packing.placements) {
                let size = &mut backend.chunks[place.chunk as usize];
                *size = (*size).max(place.offset + item.size);
            }
            backend.lower_bound = packing.lower_bound.min(backend.arena_bytes());
            backend.strategy = packing.strategy;
            backend.proved_optimal = packing.proved_optimal;
            // Tensors without a byte still need a buffer to point into.
            if packing.peak == 0 {
                backend.chunks.clear();
                backend.chunks.push(problem.alignment);
            }
        }
        for tensor in &self.uses.taken {
            plan.spots[tensor.index()] = plan.spots[plan.sharing.roots[tensor.index()].index()];
        }
        for lodger in &flow.lodgers {
            let mut spot = plan.spots[lodger.storage.index()];
            if let Spot::Arena { offset, .. } = &mut spot {
                *offset += lodger.offset;
            }
            plan.spots[lodger.tensor.index()] = spot;
        }
        Ok(())
    }
}

/// Refuses lists of the wrong length, numbers of backends and tensors that do not exist, and impossible alignments.
fn validate(request: &Request<'_>) -> Result<(), MemoryError> {
    let graph = request.graph;
    let length = |what, expected: usize, found: usize| {
        if found == 0 || found == expected {
            Ok(())
        } else {
            Err(MemoryError::Length { what, expected, found })
        }
    };
    length("backends of tensors", graph.tensors().len(), request.backends.len())?;
    length("steps of nodes", graph.nodes().len(), request.steps.len())?;
    let count = request.memories.len();
    for memory in request.memories {
        if !memory.facts.alignment.is_power_of_two() {
            let (backend, alignment) = (memory.name.to_owned(), memory.facts.alignment);
            return Err(MemoryError::Alignment { backend, alignment });
        }
    }
    if count == 0 && !graph.tensors().is_empty() {
        return Err(MemoryError::Length { what: "memories", expected: 1, found: 0 });
    }
    let known = |backend: u16| usize::from(backend) < count;
    // They are looked at one by one only where one is wrong.
    let highest = request.backends.iter().fold(0, |highest, backend| highest.max(*backend));
    if !known(highest)
        && let Some(index) = request.backends.iter().position(|backend| !known(*backend))
    {
        let what = graph.name(quadriga_graph::TensorId::from_index(index));
        return Err(MemoryError::UnknownBackend { what, backend: request.backends[index], count });
    }
    if let Some(index) = request.extras.iter().position(|extra| !known(extra.backend)) {
        let backend = request.extras[index].backend;
        return Err(MemoryError::UnknownBackend { what: format!("extra {index}"), backend, count });
    }
    let named = request.holds.iter().map(|hold| hold.tensor).chain(request.placed.iter().copied());
    for index in named.map(|tensor| tensor.index()) {
        if index >= graph.tensors().len() {
            return Err(MemoryError::UnknownTensor { index, count: graph.tensors().len() });
        }
    }
    Ok(())
}

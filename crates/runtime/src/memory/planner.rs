//! The planner: aliasing, liveness and packing, one after the other.

#![expect(
    clippy::indexing_slicing,
    reason = "arrays are sized by the graph's tensors and the request's backends; indices are validated first"
)]

use quadriga_graph::TensorKind;

use super::MemoryError;
use super::lifetime::Lifetime;
use super::liveness::StorageUses;
use super::packing::{Packer, PackingItem, PackingProblem};
use super::plan::{BackendPlan, MemoryPlan, TensorLocation};
use super::request::MemoryRequest;
use crate::flow::Flow;

/// Plans memory. It keeps its working memory between plans: planning a graph of about the same size again allocates
/// nothing.
#[derive(Clone, Debug, Default)]
pub struct Planner {
    flow: Flow,
    uses: StorageUses,
    packer: Packer,
    /// For each backend its packing problem, and the tensor of each item; the items of extras follow those of tensors.
    problems: Vec<(PackingProblem, Vec<u32>)>,
}

impl Planner {
    /// Plans the memory of a graph.
    pub fn plan(&mut self, request: &MemoryRequest<'_>) -> Result<MemoryPlan, MemoryError> {
        let mut plan = MemoryPlan::default();
        self.plan_into(request, &mut plan)?;
        Ok(plan)
    }

    /// As [`Planner::plan`], reusing the memory of an existing plan. After an error that plan is empty.
    pub fn plan_into(
        &mut self,
        request: &MemoryRequest<'_>,
        plan: &mut MemoryPlan,
    ) -> Result<(), MemoryError> {
        let mut flow = std::mem::take(&mut self.flow);
        flow.read(request.graph);
        let done = self.plan_flow(request, &flow, plan);
        self.flow = flow;
        #[cfg(debug_assertions)]
        if done.is_ok()
            && let Err(violation) = super::check(request, plan)
        {
            debug_assert!(false, "memory plan: {violation}");
        }
        done
    }

    /// As [`Planner::plan_into`], for a graph whose [`Flow`] is known already. The caller checks the plan.
    pub(crate) fn plan_flow(
        &mut self,
        request: &MemoryRequest<'_>,
        flow: &Flow,
        plan: &mut MemoryPlan,
    ) -> Result<(), MemoryError> {
        plan.clear();
        let done = self.fill(request, flow, plan);
        if done.is_err() {
            plan.clear();
        }
        done
    }

    fn fill(
        &mut self,
        request: &MemoryRequest<'_>,
        flow: &Flow,
        plan: &mut MemoryPlan,
    ) -> Result<(), MemoryError> {
        validate(request)?;
        self.uses.collect(request, flow)?;
        plan.sharing.compute(request, flow, &mut self.uses);
        plan.graph = request.graph.fingerprint();
        plan.horizon = self.uses.horizon;
        plan.extras.extend_from_slice(request.extras);
        plan.backends.resize(request.memories.len(), BackendPlan::default());
        for (backend, memory) in plan.backends.iter_mut().zip(request.memories) {
            let (name, chunks) = (std::mem::take(&mut backend.name), std::mem::take(&mut backend.chunks));
            *backend = BackendPlan { name, chunks, ..BackendPlan::default() };
            memory.name.clone_into(&mut backend.name);
        }
        self.reset_problems(request);
        self.collect_items(request, flow, plan);
        self.pack(request, flow, plan)?;
        Ok(())
    }

    /// Makes an empty packing problem for each backend.
    fn reset_problems(&mut self, request: &MemoryRequest<'_>) {
        self.problems.resize_with(request.memories.len(), || (PackingProblem::new(Vec::new()), Vec::new()));
        for ((problem, owners), memory) in self.problems.iter_mut().zip(request.memories) {
            let alignment = memory.facts.alignment as u64;
            problem.items.clear();
            problem.alignment = alignment;
            problem.max_chunk = memory.facts.max_buffer.map(|max| max as u64 / alignment * alignment);
            owners.clear();
        }
    }

    /// Fills in the plan's lifetimes and bytes, and the items of each backend's packing problem.
    fn collect_items(&mut self, request: &MemoryRequest<'_>, flow: &Flow, plan: &mut MemoryPlan) {
        let Planner { uses, problems, .. } = self;
        plan.bytes.resize(flow.storage.len(), 0);
        plan.lifetimes.resize(flow.storage.len(), Lifetime::NEVER);
        // A storage is as large as the largest of its in-place results with padding. The root comes first in the graph,
        // so tensors are visited in reverse.
        for (index, tensor) in request.graph.tensors().iter().enumerate().rev() {
            if flow.storage[index].index() != index || uses.last[index].end == 0 {
                continue;
            }
            let backend = usize::from(request.backend(index));
            let memory = &request.memories[backend];
            let bytes = if memory.pads() { memory.storage_bytes(tensor) } else { flow.bytes[index] };
            let root = plan.sharing.roots[index].index();
            let bytes = bytes.max(plan.bytes[root]);
            let totals = &mut plan.backends[backend];
            let total = match flow.kind[index] {
                _ if root != index => {
                    plan.bytes[root] = bytes;
                    continue;
                }
                TensorKind::Weight => &mut totals.weights,
                TensorKind::Constant => &mut totals.constants,
                TensorKind::State => &mut totals.state,
                _ if plan.sharing.external[index] => continue,
                kind => {
                    let life = uses.lifetime(request, kind, index);
                    plan.lifetimes[index] = life;
                    plan.bytes[index] = bytes;
                    let (problem, owners) = &mut problems[backend];
                    problem.items.push(PackingItem { size: bytes, start: life.start, end: life.end });
                    owners.push(index as u32);
                    if kind == TensorKind::Input { &mut totals.inputs } else { &mut totals.results }
                }
            };
            *total = total.saturating_add(bytes);
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
            let total = &mut plan.backends[backend].extras;
            *total = total.saturating_add(extra.bytes);
        }
    }

    /// Packs each backend's storages and fills in the plan's locations.
    fn pack(
        &mut self,
        request: &MemoryRequest<'_>,
        flow: &Flow,
        plan: &mut MemoryPlan,
    ) -> Result<(), MemoryError> {
        plan.locations.extend(plan.sharing.external.iter().enumerate().map(
            |(index, external)| match external {
                true => TensorLocation::External { backend: request.backend(index) },
                false => TensorLocation::Unused,
            },
        ));
        plan.extra_locations.resize(request.extras.len(), TensorLocation::Unused);
        for (number, (problem, owners)) in self.problems.iter().enumerate() {
            if problem.items.is_empty() {
                continue;
            }
            let packing = self.packer.pack(problem, request.effort)?;
            let location = |item: usize| {
                let place = packing.placements[item];
                TensorLocation::Arena { backend: number as u16, chunk: place.chunk, offset: place.offset }
            };
            for (item, owner) in owners.iter().enumerate() {
                plan.locations[*owner as usize] = location(item);
            }
            let extras = request.extras.iter().enumerate();
            let here = extras.filter(|(_, extra)| usize::from(extra.backend) == number);
            for (item, (extra, _)) in (owners.len()..).zip(here) {
                plan.extra_locations[extra] = location(item);
            }
            let backend = &mut plan.backends[number];
            // A chunk ends with its last tensor's last byte; the packing has rounded that up to the alignment.
            backend.chunks.resize(packing.chunks.len(), 0);
            for (item, place) in problem.items.iter().zip(&packing.placements) {
                let size = &mut backend.chunks[place.chunk as usize];
                *size = (*size).max(place.offset + item.size);
            }
            backend.lower_bound = packing.lower_bound.min(backend.arena_bytes());
            backend.strategy = packing.strategy;
            backend.proved_optimal = packing.proved_optimal;
            // Tensors of zero bytes still need a buffer.
            if packing.peak == 0 {
                backend.chunks.clear();
                backend.chunks.push(problem.alignment);
            }
        }
        for tensor in &self.uses.in_place {
            plan.locations[tensor.index()] = plan.locations[plan.sharing.roots[tensor.index()].index()];
        }
        for alias in &flow.aliases {
            let mut location = plan.locations[alias.storage.index()];
            if let TensorLocation::Arena { offset, .. } = &mut location {
                *offset += alias.offset;
            }
            plan.locations[alias.tensor.index()] = location;
        }
        Ok(())
    }
}

/// Checks the lengths of lists, the indices of backends and tensors, and alignments.
fn validate(request: &MemoryRequest<'_>) -> Result<(), MemoryError> {
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
    // The tensor is searched for only if some backend is unknown.
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
    let named = request.holds.iter().map(|hold| hold.tensor).chain(request.external.iter().copied());
    for index in named.map(|tensor| tensor.index()) {
        if index >= graph.tensors().len() {
            return Err(MemoryError::UnknownTensor { index, count: graph.tensors().len() });
        }
    }
    Ok(())
}

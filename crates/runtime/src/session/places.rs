//! Where each tensor of a plan is: its region of a weight, state or arena.

use quadriga_graph::{TensorId, TensorKind};

use super::arena::Arenas;
use super::state::States;
use crate::memory::PlacedTensor;
use crate::schedule::Plan;
use crate::weights::{PlanWeights, streaming_source};
use crate::{Layout, Region, RuntimeError, SliceSelection, TensorPlace};

/// The places of a plan's tensors.
pub(crate) struct SplitPlaces<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) arenas: &'a Arenas,
    pub(crate) states: &'a States,
    pub(crate) weights: &'a PlanWeights,
}

impl SplitPlaces<'_> {
    /// Where nodes of a backend find a tensor.
    pub(crate) fn place(&self, tensor: TensorId, backend: usize, bank: usize) -> Option<TensorPlace> {
        let graph = self.plan.graph();
        let t = graph.get(tensor)?;
        let storage = t.storage();
        let short = u16::try_from(backend).ok()?;
        let plain = |region: Region| TensorPlace { region, layout: Layout::Plain };
        let part = |region: &Region| region.part(t.offset(), t.bytes()).ok().map(plain);
        if let Some(bound) = self.plan.space().bound.get(&storage)
            && bound.number == backend
        {
            return part(&bound.region);
        }
        match graph.get(storage)?.kind() {
            TensorKind::Weight if self.plan.copy_for(tensor, backend).is_some() => self.copy(tensor, backend),
            TensorKind::Weight | TensorKind::Constant => {
                let place = self.weights.get(&(storage.index() as u32, short))?.place();
                if tensor == storage { Some(place.clone()) } else { part(&place.region) }
            }
            TensorKind::Input => {
                let slot = self.plan.space().input(storage, short, bank)?;
                part(&self.arenas.region(slot, graph.get(storage)?.bytes())?)
            }
            TensorKind::State if self.plan.placement(storage) == Some(backend) => {
                part(self.states.get(&graph.name(storage))?.region())
            }
            TensorKind::Computed(_) if self.plan.placement(storage) == Some(backend) => {
                let slot = self.plan.space().result(tensor)?;
                self.arenas.region(slot, t.bytes()).map(plain)
            }
            TensorKind::State | TensorKind::Computed(_) => self.copy(tensor, backend),
        }
    }

    /// Where a backend reads its copy of a tensor of another.
    fn copy(&self, tensor: TensorId, backend: usize) -> Option<TensorPlace> {
        let t = self.plan.graph().get(tensor)?;
        let number = self.plan.copy_for(tensor, backend)?;
        let copy = self.plan.splits().copies.get(number)?;
        if let Some(layout) = self.plan.space().layouts.get(&(number as u32)) {
            return Some(TensorPlace { region: self.copy_target(number)?, layout: layout.layout });
        }
        let whole = self.arenas.region(self.plan.space().copy(number)?, copy.bytes)?;
        let region = whole.part(t.offset().checked_sub(copy.offset)?, t.bytes()).ok()?;
        Some(TensorPlace { region, layout: Layout::Plain })
    }

    /// The bytes that a copy is made from.
    pub(super) fn copy_source(&self, copy: usize) -> Result<Option<Region>, RuntimeError> {
        let Some(copy) = self.plan.splits().copies.get(copy) else { return Ok(None) };
        let (graph, backends) = (self.plan.graph(), self.plan.backends());
        let tensor = TensorId::from_index(copy.tensor);
        if graph.get(tensor).is_some_and(|t| t.kind() == TensorKind::Weight) {
            let (Some(data), Some(owner), Some(reader)) =
                (graph.data(tensor), backends.get(copy.from), backends.get(copy.to))
            else {
                return Ok(None);
            };
            return streaming_source(data, owner, reader).map(Some).map_err(RuntimeError::device);
        }
        Ok(self.place(tensor, copy.from, 0).map(|place| place.region))
    }

    /// The bytes that a copy is made to.
    pub(super) fn copy_target(&self, copy: usize) -> Option<Region> {
        let mut bytes = self.plan.splits().copies.get(copy)?.bytes;
        if let Some(layout) = self.plan.space().layouts.get(&(copy as u32))
            && layout.layout != Layout::Plain
        {
            bytes = layout.bytes;
        }
        self.arenas.region(self.plan.space().copy(copy)?, bytes)
    }

    /// Which slices a copy is made of, if they are selected.
    pub(super) fn selection(&self, copy: usize) -> Option<SliceSelection> {
        let layout = self.plan.space().layouts.get(&(copy as u32))?.layout;
        let copy = self.plan.splits().copies.get(copy)?;
        let ids = self.place(TensorId::from_index(copy.selected_by?.ids), copy.to, 0)?;
        let weight = self.plan.graph().get(TensorId::from_index(copy.tensor))?.clone();
        Some(SliceSelection::new(weight, layout, ids.region))
    }

    /// The scratch memory of a split.
    pub(super) fn scratch(&self, split: usize) -> Option<Region> {
        let (slot, bytes) = self.plan.space().scratch(split)?;
        self.arenas.region(slot, bytes)
    }

    /// Registers all tensors that the plan has in the arenas with their backends: results, inputs and copies.
    pub(super) fn register(&self) -> Result<Vec<PlacedTensor>, RuntimeError> {
        let (plan, graph) = (self.plan, self.plan.graph());
        let mut all = Vec::new();
        let mut add = |id: TensorId, backend: usize, region: Option<Region>| -> Result<(), RuntimeError> {
            let (Some(tensor), Some(device), Some(region)) =
                (graph.get(id), plan.backends().get(backend), region)
            else {
                return Ok(());
            };
            let registered = PlacedTensor::new(device, tensor, region);
            all.push(registered.map_err(|error| RuntimeError::device(error).at(|| graph.name(id)))?);
            Ok(())
        };
        for id in graph.tensor_ids() {
            let is_computed = graph.get(id).is_some_and(|t| t.node().is_some());
            if let Some(backend) = plan.placement(id).filter(|_| is_computed) {
                add(id, backend, self.place(id, backend, 0).map(|place| place.region))?;
            }
        }
        for leaf in &plan.splits().leaves {
            let id = TensorId::from_index(leaf.tensor);
            if graph.get(id).is_some_and(|t| t.kind() == TensorKind::Input) {
                for bank in 0..usize::from(plan.space().banks.get(leaf.backend).copied().unwrap_or(1)) {
                    add(id, leaf.backend, self.place(id, leaf.backend, bank).map(|place| place.region))?;
                }
            }
        }
        for (number, copy) in plan.splits().copies.iter().enumerate() {
            add(TensorId::from_index(copy.tensor), copy.to, self.copy_target(number))?;
        }
        Ok(all)
    }
}

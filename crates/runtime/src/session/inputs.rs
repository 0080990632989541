//! Inputs: the caller's bytes on their way into the arenas.
//!
//! On an asynchronous backend every input has two places: one that the run under way reads, one that the next run will
//! read. Setting an input writes to the latter. When a run starts with at least one input set anew, the places change
//! roles, and inputs that were not set are carried over.
//!
//! Large inputs travel in the incoming queue while the run before computes. Small ones go in the compute queue itself:
//! that a run has no other queue to wait for saves more than their travel takes.

use quadriga_graph::{TensorId, TensorKind};

use super::cache::Results;
use super::compile::Compiled;
use super::lane::Lane;
use super::{Session, Values};
use crate::schedule::Plan;
use crate::{Queue, Region, RuntimeError};

/// The most bytes of an input that goes in the compute queue.
const SMALL: usize = 128;

/// The queue that an input of so many bytes goes in.
fn queue_for(lane: &mut Lane, bytes: usize) -> &mut dyn Queue {
    if bytes <= SMALL { &mut *lane.compute } else { lane.incoming() }
}

/// An input of a plan.
pub(crate) struct InputPlace {
    id: TensorId,
    name: String,
    /// Where it is: backend, and the region of each bank.
    places: Vec<(usize, [Region; 2])>,
    /// Set for the next run.
    set: bool,
    /// Set for some run before.
    known: bool,
}

/// All inputs of a plan.
#[derive(Default)]
pub(crate) struct Inputs {
    all: Vec<InputPlace>,
    /// Which place the latest run reads.
    pub(crate) bank: usize,
}

impl Inputs {
    /// Finds the places of all inputs that some node reads, or that are outputs.
    pub(crate) fn new(plan: &Plan, region: impl Fn(TensorId, usize, usize) -> Option<Region>) -> Inputs {
        let graph = plan.graph();
        let mut all: Vec<InputPlace> = graph
            .of_kind(TensorKind::Input)
            .map(|id| InputPlace { id, name: graph.name(id), places: Vec::new(), set: false, known: false })
            .collect();
        for leaf in &plan.splits().leaves {
            let Ok(at) = all.binary_search_by_key(&leaf.tensor, |input| input.id.index()) else { continue };
            let place = |bank| region(TensorId::from_index(leaf.tensor), leaf.backend, bank);
            if let (Some(input), Some(first), Some(second)) = (all.get_mut(at), place(0), place(1)) {
                input.places.push((leaf.backend, [first, second]));
            }
        }
        Inputs { all, bank: 0 }
    }

    /// All inputs must be set again.
    pub(crate) fn forget(&mut self) {
        for input in &mut self.all {
            input.set = false;
            input.known = false;
        }
    }

    /// The number of the input with this name.
    fn find(&self, name: &str) -> Option<usize> {
        self.all.iter().position(|input| input.name == name)
    }
}

impl Session {
    /// Sets an input of the current plan, by name. It keeps its value for later runs, as long as no other plan of the
    /// session is used between. The bytes are taken before this returns.
    pub fn set<V: Values + ?Sized>(&mut self, name: &str, values: &V) -> Result<(), RuntimeError> {
        let current = self.ready()?;
        let inputs = self.entries.get(current).map(|entry| &entry.inputs);
        let Some(index) = inputs.and_then(|inputs| inputs.find(name)) else {
            let known = inputs.map_or_else(Vec::new, |all| all.all.iter().map(|i| i.name.clone()).collect());
            return Err(RuntimeError::UnknownName { what: "input", name: name.to_owned(), known });
        };
        self.set_at(current, index, values.bytes(), values.dtype())
    }

    /// Sets an input of the current plan, by id.
    pub fn set_id<V: Values + ?Sized>(&mut self, id: TensorId, values: &V) -> Result<(), RuntimeError> {
        let current = self.ready()?;
        let Some(entry) = self.entries.get(current) else { return Err(RuntimeError::NoPlan) };
        match entry.inputs.all.binary_search_by_key(&id, |input| input.id) {
            Ok(index) => self.set_at(current, index, values.bytes(), values.dtype()),
            Err(_) => Err(RuntimeError::WrongKind { name: entry.plan.graph().name(id), wanted: "an input" }),
        }
    }

    fn set_at(
        &mut self,
        current: usize,
        index: usize,
        bytes: &[u8],
        dtype: Option<quadriga_graph::DType>,
    ) -> Result<(), RuntimeError> {
        let Some(entry) = self.entries.get_mut(current) else { return Err(RuntimeError::NoPlan) };
        let next = 1 - entry.inputs.bank;
        let Some(input) = entry.inputs.all.get_mut(index) else { return Err(RuntimeError::NoPlan) };
        let Some(tensor) = entry.plan.graph().get(input.id) else { return Err(RuntimeError::NoPlan) };
        if let Some(given) = dtype.filter(|given| *given != tensor.dtype()) {
            let (name, found) = (input.name.clone(), tensor.dtype());
            return Err(RuntimeError::WrongType { name, found, given });
        }
        if bytes.len() != tensor.bytes() {
            let (name, expected, found) = (input.name.clone(), tensor.bytes(), bytes.len());
            return Err(RuntimeError::WrongSize { name, expected, found });
        }
        self.occupy(current);
        let Some(entry) = self.entries.get_mut(current) else { return Err(RuntimeError::NoPlan) };
        let Some(input) = entry.inputs.all.get_mut(index) else { return Err(RuntimeError::NoPlan) };
        for (backend, places) in &input.places {
            let Some(lane) = self.lanes.get_mut(*backend) else { continue };
            let place = places.get(next).unwrap_or(&places[0]);
            // The run before the one under way read this place.
            let free = lane.start().filter(|_| bytes.len() > SMALL);
            let queue = queue_for(lane, bytes.len());
            let written = match free {
                Some(event) => queue.wait(&*event).and_then(|()| queue.write(place, bytes)),
                None => queue.write(place, bytes),
            };
            written.map_err(|error| RuntimeError::device(error).at(|| input.name.clone()))?;
        }
        input.set = true;
        Ok(())
    }

    /// Lets the next run read as an input what the latest run of the same plan gives as an output, without waiting for
    /// it: the bytes stay on their device. `false`, and nothing has happened, where the two are not on one device.
    pub fn carry(&mut self, output: &str, input: &str) -> Result<bool, RuntimeError> {
        let (current, output) = self.output(output)?;
        let Some(entry) = self.entries.get_mut(current) else { return Err(RuntimeError::NoPlan) };
        let Some(from) = entry.outputs.get(output) else { return Err(RuntimeError::NoPlan) };
        let bank = entry.inputs.bank;
        let Some(index) = entry.inputs.find(input) else {
            let known = entry.inputs.all.iter().map(|input| input.name.clone()).collect();
            return Err(RuntimeError::UnknownName { what: "input", name: input.to_owned(), known });
        };
        let Some(to) = entry.inputs.all.get_mut(index) else { return Err(RuntimeError::NoPlan) };
        let Some(tensor) = entry.plan.graph().get(to.id) else { return Err(RuntimeError::NoPlan) };
        match entry.results {
            Results::None => return Err(RuntimeError::NothingRun),
            Results::Gone => return Err(RuntimeError::Gone { name: from.name.clone() }),
            Results::There => {}
        }
        let region = from.region(bank);
        if from.elements() != Some(tensor.dtype()) || region.bytes != tensor.bytes() {
            let (name, expected, found) = (to.name.clone(), tensor.bytes(), region.bytes);
            return Err(RuntimeError::WrongSize { name, expected, found });
        }
        let [(backend, places)] = to.places.as_slice() else { return Ok(false) };
        let Some(lane) = self.lanes.get_mut(*backend).filter(|_| *backend == from.backend) else {
            return Ok(false);
        };
        let place = places.get(1 - bank).unwrap_or(&places[0]);
        let copied = lane.compute.copy(region, place);
        let copied = copied.map_err(|error| RuntimeError::device(error).at(|| to.name.clone()))?;
        to.set |= copied;
        Ok(copied)
    }

    /// Before a run: exchanges the places of inputs if one was set, carrying the others over. Returns whether
    /// anything is on its way in the incoming queues.
    pub(super) fn turn_inputs(&mut self, current: usize) -> Result<bool, RuntimeError> {
        let Some(entry) = self.entries.get_mut(current) else { return Err(RuntimeError::NoPlan) };
        let inputs = &mut entry.inputs;
        if let Some(bare) = inputs.all.iter().find(|input| !input.set && !input.known) {
            return Err(RuntimeError::NotSet { what: "input", name: bare.name.clone() });
        }
        self.occupy(current);
        let Some(entry) = self.entries.get_mut(current) else { return Err(RuntimeError::NoPlan) };
        let inputs = &mut entry.inputs;
        if !inputs.all.iter().any(|input| input.set) {
            return Ok(false);
        }
        let (old, new) = (inputs.bank, 1 - inputs.bank);
        let is_large = |input: &InputPlace| input.places.iter().any(|(_, places)| places[0].bytes > SMALL);
        let on_its_way = inputs.all.iter().any(is_large);
        for input in inputs.all.iter_mut().filter(|input| !input.set) {
            for (backend, places) in &input.places {
                let Some(lane) = self.lanes.get_mut(*backend).filter(|lane| lane.traffic.is_some()) else {
                    continue;
                };
                if let (Some(from), Some(to)) = (places.get(old), places.get(new)) {
                    queue_for(lane, from.bytes)
                        .copy(from, to)
                        .map_err(|error| RuntimeError::device(error).at(|| input.name.clone()))?;
                }
            }
        }
        for input in &mut inputs.all {
            input.known |= std::mem::take(&mut input.set);
        }
        inputs.bank = new;
        Ok(on_its_way)
    }
}

impl Compiled {
    /// After a failure: events that stand for work that was given up.
    pub(super) fn forget_events(&mut self) {
        for copy in &mut self.copies {
            copy.done = None;
            copy.route = super::compile::Route::Unknown;
        }
    }
}

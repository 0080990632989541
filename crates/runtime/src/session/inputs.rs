//! Inputs: the caller's bytes, copied into the arenas.
//!
//! On an asynchronous backend every input has two *banks*: the run in flight reads one, the next run will read the
//! other. Setting an input writes to the latter. When a run starts with at least one input set anew, the banks change
//! roles, and inputs that were not set are copied from the old bank to the new one.
//!
//! Large inputs go through the upload queue while the previous run computes. Small ones go through the compute queue:
//! that the run need not wait for another queue saves more time than their copy takes. So do large ones that were chained
//! to an output, until they are set again: one queue orders all writes and copies of a bank.

use quadriga_graph::{DType, Tensor, TensorId, TensorKind};

use super::lane::Lane;
use super::outputs::OutputPlace;
use super::tensor_ref::TensorRef;
use crate::schedule::Plan;
use crate::trace::Stream;
use crate::{BackendError, Queue, Region, RuntimeError};

/// The most bytes of an input that goes through the compute queue.
const MAX_SMALL_BYTES: usize = 128;

/// The queue of an input's writes and copies. An upload waits until the runs that read its bank are done.
fn queue_for(lane: &mut Lane, upload: bool) -> Result<&mut dyn Queue, BackendError> {
    let free = lane.start().filter(|_| upload);
    let queue = lane.queue(if upload { Stream::Upload } else { Stream::Compute });
    if let Some(event) = free {
        queue.wait(&*event)?;
    }
    Ok(queue)
}

/// Copies an input from one bank to the other; through the host if the queue cannot.
fn copy_bank(queue: &mut dyn Queue, from: &Region, to: &Region) -> Result<(), BackendError> {
    if queue.copy(from, to)? {
        return Ok(());
    }
    let mut bytes = vec![0; from.bytes];
    queue.read(from, &mut bytes)?;
    queue.write(to, &bytes)
}

/// An input of a plan.
struct InputSlot {
    id: TensorId,
    name: String,
    /// The backends that read it, each with the region of each bank.
    places: Vec<(usize, [Region; 2])>,
    /// Set for the next run.
    set: bool,
    /// Set for an earlier run.
    known: bool,
    /// The latest value was written by the compute queue: chained, or set after that for the same run.
    chained: bool,
    /// It is in memory of the caller, who sets it.
    bound: bool,
}

/// All inputs of a plan.
#[derive(Default)]
pub(crate) struct Inputs {
    all: Vec<InputSlot>,
    /// The bank that the latest run reads.
    pub(crate) bank: usize,
}

impl Inputs {
    /// Finds the places of all inputs that some node reads, or that are outputs.
    pub(crate) fn new(plan: &Plan, region: impl Fn(TensorId, usize, usize) -> Option<Region>) -> Inputs {
        let graph = plan.graph();
        let mut all: Vec<InputSlot> = graph
            .of_kind(TensorKind::Input)
            .map(|id| {
                let bound = plan.space().bound.contains_key(&id);
                InputSlot {
                    id,
                    name: graph.name(id),
                    places: Vec::new(),
                    set: false,
                    known: bound,
                    chained: false,
                    bound,
                }
            })
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
            input.known = input.bound;
            input.chained = false;
        }
    }

    /// The number of an input.
    pub(crate) fn find(&self, plan: &Plan, input: TensorRef<'_>) -> Result<usize, RuntimeError> {
        let found = match input {
            TensorRef::Name(name) => self.all.iter().position(|input| input.name == name),
            TensorRef::Id(id) => self.all.binary_search_by_key(&id, |input| input.id).ok(),
        };
        found.ok_or_else(|| match input {
            TensorRef::Name(name) => {
                let known = self.all.iter().map(|input| input.name.clone()).collect();
                RuntimeError::UnknownName { what: "input", name: name.to_owned(), known }
            }
            TensorRef::Id(id) => {
                RuntimeError::WrongKind { name: plan.graph().name(id), expected: "an input" }
            }
        })
    }

    /// An input's name and tensor.
    pub(crate) fn named<'p>(
        &'p self,
        plan: &'p Plan,
        input: TensorRef<'_>,
    ) -> Result<(&'p str, &'p Tensor), RuntimeError> {
        let (input, tensor) = self.tensor(plan, self.find(plan, input)?)?;
        Ok((&input.name, tensor))
    }

    /// An error unless these are bytes for an input.
    pub(crate) fn check(
        &self,
        plan: &Plan,
        index: usize,
        bytes: &[u8],
        dtype: Option<DType>,
    ) -> Result<(), RuntimeError> {
        let (input, tensor) = self.tensor(plan, index)?;
        if let Some(given) = dtype.filter(|given| *given != tensor.dtype()) {
            let (name, found) = (input.name.clone(), tensor.dtype());
            return Err(RuntimeError::WrongType { name, found, given });
        }
        if bytes.len() != tensor.bytes() {
            let (name, expected, found) = (input.name.clone(), tensor.bytes(), bytes.len());
            return Err(RuntimeError::WrongSize { name, expected, found });
        }
        Ok(())
    }

    /// Writes bytes to the bank of the next run.
    pub(crate) fn set(&mut self, index: usize, bytes: &[u8], lanes: &mut [Lane]) -> Result<(), RuntimeError> {
        let next = 1 - self.bank;
        let Some(input) = self.all.get_mut(index) else { return Err(no_such_input()) };
        // After a chained copy to the same bank, in the queue of that copy.
        input.chained &= input.set;
        let upload = bytes.len() > MAX_SMALL_BYTES && !input.chained && !input.bound;
        for (backend, places) in &input.places {
            let Some(lane) = lanes.get_mut(*backend) else { continue };
            let place = places.get(next).unwrap_or(&places[0]);
            let written = queue_for(lane, upload).and_then(|queue| queue.write(place, bytes));
            written.map_err(|error| RuntimeError::device(error).at(|| input.name.clone()))?;
        }
        input.set = true;
        Ok(())
    }

    /// Writes bytes at an offset to the bank of the next run; the others are those of the latest value.
    pub(crate) fn set_part(
        &mut self,
        plan: &Plan,
        index: usize,
        (offset, bytes, dtype): (usize, &[u8], Option<DType>),
        lanes: &mut [Lane],
    ) -> Result<(), RuntimeError> {
        let (input, tensor) = self.tensor(plan, index)?;
        let name = || input.name.clone();
        if let Some(given) = dtype.filter(|given| *given != tensor.dtype()) {
            return Err(RuntimeError::WrongType { name: name(), found: tensor.dtype(), given });
        }
        let end = offset.saturating_add(bytes.len());
        if end > tensor.bytes() {
            return Err(RuntimeError::WrongSize { name: name(), expected: tensor.bytes(), found: end });
        }
        if !input.set && !input.known {
            return Err(RuntimeError::NotSet { what: "input", name: name() });
        }
        let (old, next, total) = (self.bank, 1 - self.bank, tensor.bytes());
        let Some(input) = self.all.get_mut(index) else { return Err(no_such_input()) };
        // In the queue of the latest value, which is copied first unless it is in this bank.
        let upload = total > MAX_SMALL_BYTES && !input.chained && !input.bound;
        for (backend, places) in &input.places {
            let Some(lane) = lanes.get_mut(*backend) else { continue };
            let copy = !input.set && !input.bound && lane.is_asynchronous();
            let (from, to) = (places.get(old).unwrap_or(&places[0]), places.get(next).unwrap_or(&places[0]));
            let written = queue_for(lane, upload).and_then(|queue| {
                if copy {
                    copy_bank(queue, from, to)?;
                }
                queue.write(&to.part(offset, bytes.len())?, bytes)
            });
            written.map_err(|error| RuntimeError::device(error).at(|| input.name.clone()))?;
        }
        input.set = true;
        Ok(())
    }

    /// Copies an output of the latest run to the bank of the next run, if one backend has both; whether it does.
    pub(crate) fn chain(
        &mut self,
        plan: &Plan,
        index: usize,
        output: &OutputPlace,
        lanes: &mut [Lane],
    ) -> Result<bool, RuntimeError> {
        let bank = self.bank;
        let (input, tensor) = self.tensor(plan, index)?;
        let region = output.region(bank);
        if output.elements() != Some(tensor.dtype()) || region.bytes != tensor.bytes() {
            let (name, expected, found) = (input.name.clone(), tensor.bytes(), region.bytes);
            return Err(RuntimeError::WrongSize { name, expected, found });
        }
        let Some(input) = self.all.get_mut(index) else { return Err(no_such_input()) };
        let [(backend, places)] = input.places.as_slice() else { return Ok(false) };
        let Some(lane) = lanes.get_mut(*backend).filter(|_| *backend == output.backend) else {
            return Ok(false);
        };
        let place = places.get(1 - bank).unwrap_or(&places[0]);
        let uploaded = input.set && !input.chained && !input.bound && place.bytes > MAX_SMALL_BYTES;
        let ready = if uploaded { lane.compute_waits_for_uploads() } else { Ok(()) };
        let copied = ready.and_then(|()| lane.compute.copy(region, place));
        let copied = copied.map_err(|error| RuntimeError::device(error).at(|| input.name.clone()))?;
        input.set |= copied;
        input.chained |= copied;
        Ok(copied)
    }

    /// An error if an input was never set.
    pub(crate) fn check_all_set(&self) -> Result<(), RuntimeError> {
        match self.all.iter().find(|input| !input.set && !input.known) {
            Some(unset) => Err(RuntimeError::NotSet { what: "input", name: unset.name.clone() }),
            None => Ok(()),
        }
    }

    /// Before a run: changes the roles of the banks if an input was set, and copies the inputs that were not. Returns
    /// whether inputs are in the upload queues.
    pub(crate) fn swap_banks(&mut self, lanes: &mut [Lane]) -> Result<bool, RuntimeError> {
        if !self.all.iter().any(|input| input.set) {
            return Ok(false);
        }
        let (old, new) = (self.bank, 1 - self.bank);
        let is_large = |input: &InputSlot| {
            !input.bound && input.places.iter().any(|(_, places)| places[0].bytes > MAX_SMALL_BYTES)
        };
        let uploads = self.all.iter().any(is_large);
        for input in self.all.iter().filter(|input| !input.set && !input.bound) {
            for (backend, places) in &input.places {
                let Some(lane) = lanes.get_mut(*backend).filter(|lane| lane.is_asynchronous()) else {
                    continue;
                };
                if let (Some(from), Some(to)) = (places.get(old), places.get(new)) {
                    let upload = from.bytes > MAX_SMALL_BYTES && !input.chained;
                    queue_for(lane, upload)
                        .and_then(|queue| copy_bank(queue, from, to))
                        .map_err(|error| RuntimeError::device(error).at(|| input.name.clone()))?;
                }
            }
        }
        for input in &mut self.all {
            input.known |= std::mem::take(&mut input.set);
        }
        self.bank = new;
        Ok(uploads)
    }

    fn tensor<'p>(&self, plan: &'p Plan, index: usize) -> Result<(&InputSlot, &'p Tensor), RuntimeError> {
        let input = self.all.get(index).ok_or_else(no_such_input)?;
        let tensor = plan.graph().get(input.id).ok_or_else(no_such_input)?;
        Ok((input, tensor))
    }
}

#[track_caller]
fn no_such_input() -> RuntimeError {
    RuntimeError::internal("an input's number is out of range")
}

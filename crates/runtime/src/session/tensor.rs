//! Where the tensors of a session are, and parts of inputs and outputs.

use std::sync::Arc;

use quadriga_graph::TensorKind;

use super::element::{Element, Values};
use super::prepared::Results;
use super::session::Session;
use super::tensor_ref::TensorRef;
use crate::{Backend, Layout, Region, RuntimeError};

/// Where a tensor of a session is.
#[derive(Clone, Debug)]
pub struct SessionTensor {
    /// Its backend.
    pub backend: Arc<dyn Backend>,
    /// Its buffer, and the offset there.
    pub region: Region,
    /// Its layout: only weights may be packed.
    pub layout: Layout,
}

impl Session {
    /// Where a tensor of the current graph is: an output, a leaf or any other result, by name (the first that is found in
    /// this order) or id. `None` if nothing uses it. A leaf that several backends hold is found on the first of them, an input where the latest run has it.
    ///
    /// The memory of results is reused: what is there after a run is known for outputs only, and until another graph of the
    /// session is run. Memory that is written through this must not be in use by a run.
    pub fn tensor<'n>(
        &self,
        tensor: impl Into<TensorRef<'n>>,
    ) -> Result<Option<SessionTensor>, RuntimeError> {
        let prepared = self.plans.get(self.plans.current()?)?;
        let (plan, graph) = (&prepared.plan, prepared.plan.graph());
        let id = match tensor.into() {
            TensorRef::Id(id) => Some(id),
            TensorRef::Name(name) => graph.output(name).or_else(|| graph.tensor(name)),
        };
        let Some((id, storage)) = id.and_then(|id| Some((id, graph.get(id)?.storage()))) else {
            return Ok(None);
        };
        let on_readers = matches!(
            graph.get(storage).map(|storage| storage.kind()),
            Some(TensorKind::Weight | TensorKind::Constant | TensorKind::Input)
        );
        let number = if on_readers {
            let leaf = plan.splits().leaves.iter().find(|leaf| leaf.tensor == storage.index());
            leaf.map(|leaf| leaf.backend)
        } else {
            plan.placement(storage)
        };
        let place = number.and_then(|number| {
            let place =
                self.memory.places(plan, &prepared.weights).place(id, number, prepared.inputs.bank)?;
            let backend = Arc::clone(plan.backends().get(number)?);
            Some(SessionTensor { backend, region: place.region, layout: place.layout })
        });
        Ok(place)
    }

    /// Sets some elements of an input, from number `first` on; the others keep their values. The input must have been set
    /// as a whole before.
    pub fn set_at<'n, V: Values + ?Sized>(
        &mut self,
        input: impl Into<TensorRef<'n>>,
        first: usize,
        values: &V,
    ) -> Result<(), RuntimeError> {
        let current = self.ready()?;
        self.plans.occupy(current);
        self.queued = Some(current);
        let prepared = self.plans.get_mut(current)?;
        let index = prepared.inputs.find(&prepared.plan, input.into())?;
        let offset = first.saturating_mul(values.element_bytes());
        let dtype = values.dtype();
        prepared.inputs.set_part(&prepared.plan, index, (offset, values.bytes(), dtype), &mut self.lanes)
    }

    /// Reads some elements of an output of the latest run, from number `first` on; waits for it.
    pub fn read_at<'n, T: Element>(
        &mut self,
        output: impl Into<TensorRef<'n>>,
        first: usize,
        into: &mut [T],
    ) -> Result<(), RuntimeError> {
        let offset = first.saturating_mul(size_of::<T>());
        self.read_bytes(output.into(), T::DTYPE, Some(offset), bytemuck::cast_slice_mut(into))
    }

    /// Reads bytes of an output: from an offset on, or all.
    pub(super) fn read_bytes(
        &mut self,
        output: TensorRef<'_>,
        dtype: Option<quadriga_graph::DType>,
        offset: Option<usize>,
        into: &mut [u8],
    ) -> Result<(), RuntimeError> {
        let prepared = self.plans.get(self.plans.current()?)?;
        let place = prepared.output(output)?;
        match prepared.results {
            Results::None => return Err(RuntimeError::NothingRun),
            Results::Gone if !place.lasting => {
                return Err(RuntimeError::Gone { name: place.name.clone() });
            }
            _ => {}
        }
        place.check_type(dtype)?;
        let region = place.region(prepared.inputs.bank);
        let part = offset.and_then(|offset| region.part(offset, into.len()).ok());
        let region = match (&part, offset) {
            (Some(part), _) => part,
            (None, None) if into.len() == region.bytes => region,
            _ => {
                let found = offset.unwrap_or(0).saturating_add(into.len());
                let (name, expected) = (place.name.clone(), region.bytes);
                return Err(RuntimeError::WrongSize { name, expected, found });
            }
        };
        let Some(lane) = self.lanes.get_mut(place.backend) else { return Err(RuntimeError::ForeignPlan) };
        let read = lane.compute.read(region, into);
        let read = read.map_err(|error| RuntimeError::device(error).at(|| place.name.clone()));
        read.map_err(|error| self.fail(error))
    }
}

//! Results: bytes on their way back to the caller.

use quadriga_graph::{TensorId, TensorKind};

use super::cache::Results;
use super::compile::Site;
use super::{Element, Session};
use crate::{Region, RuntimeError};

/// Where a result is: its backend, and the region for each bank of inputs.
pub(crate) struct OutputPlace {
    pub(crate) id: TensorId,
    pub(super) name: String,
    pub(super) backend: usize,
    regions: [Region; 2],
    elements: Option<quadriga_graph::DType>,
    /// Whether its memory is its own for longer than a run.
    lasting: bool,
}

impl OutputPlace {
    /// Where it is after a run that read this bank of inputs.
    pub(super) fn region(&self, bank: usize) -> &Region {
        self.regions.get(bank).unwrap_or(&self.regions[0])
    }

    /// Its type, if its bytes lie one after another.
    pub(super) fn elements(&self) -> Option<quadriga_graph::DType> {
        self.elements
    }
}

/// Finds the places of all outputs of a plan.
pub(crate) fn outputs(site: &Site<'_>) -> Result<Vec<OutputPlace>, RuntimeError> {
    let graph = site.plan.graph();
    let mut all = Vec::with_capacity(graph.outputs().len());
    for (name, id) in graph.outputs() {
        let Some(t) = graph.get(*id) else { continue };
        let storage = t.storage();
        let leaf = || site.plan.splits().leaves.iter().find(|leaf| leaf.tensor == storage.index());
        let is_leaf = matches!(
            graph.get(storage).map(|s| s.kind()),
            Some(TensorKind::Weight | TensorKind::Constant | TensorKind::Input)
        );
        let home = if is_leaf { leaf().map(|leaf| leaf.backend) } else { site.plan.home(storage) };
        let place = |bank| home.and_then(|home| site.place(*id, home, bank)).map(|place| place.region);
        let (Some(backend), Some(first), Some(second)) = (home, place(0), place(1)) else {
            return Err(RuntimeError::BadPlan(format!("output {name} has no place")));
        };
        let elements = t.is_contiguous().then_some(t.dtype());
        let kind = graph.get(storage).map(|s| s.kind());
        let lasting = matches!(kind, Some(TensorKind::Weight | TensorKind::Constant | TensorKind::State));
        let (name, regions) = (name.clone(), [first, second]);
        all.push(OutputPlace { id: *id, name, backend, regions, elements, lasting });
    }
    Ok(all)
}

impl Session {
    /// Reads an output of the latest run, by name; waits for it.
    pub fn read<T: Element>(&mut self, name: &str) -> Result<Vec<T>, RuntimeError> {
        let (entry, output) = self.output(name)?;
        self.read_whole(entry, output)
    }

    /// Reads an output of the latest run, by id; waits for it.
    pub fn read_id<T: Element>(&mut self, id: TensorId) -> Result<Vec<T>, RuntimeError> {
        let (entry, output) = self.output_id(id)?;
        self.read_whole(entry, output)
    }

    /// Reads an output of the latest run into memory of the caller, which must have its size; waits for it.
    pub fn read_into<T: Element>(&mut self, name: &str, into: &mut [T]) -> Result<(), RuntimeError> {
        let (entry, output) = self.output(name)?;
        self.read_bytes(entry, output, T::DTYPE, bytemuck::cast_slice_mut(into))
    }

    pub(super) fn output(&self, name: &str) -> Result<(usize, usize), RuntimeError> {
        let current = self.current.ok_or(RuntimeError::NoPlan)?;
        let outputs = self.entries.get(current).map_or(&[][..], |entry| &entry.outputs);
        match outputs.iter().position(|output| output.name == name) {
            Some(output) => Ok((current, output)),
            None => {
                let known = outputs.iter().map(|output| output.name.clone()).collect();
                Err(RuntimeError::UnknownName { what: "output", name: name.to_owned(), known })
            }
        }
    }

    fn output_id(&self, id: TensorId) -> Result<(usize, usize), RuntimeError> {
        let current = self.current.ok_or(RuntimeError::NoPlan)?;
        let Some(entry) = self.entries.get(current) else { return Err(RuntimeError::NoPlan) };
        match entry.outputs.iter().position(|output| output.id == id) {
            Some(output) => Ok((current, output)),
            None => Err(RuntimeError::WrongKind { name: entry.plan.graph().name(id), wanted: "an output" }),
        }
    }

    fn read_whole<T: Element>(&mut self, entry: usize, output: usize) -> Result<Vec<T>, RuntimeError> {
        let place = self.entries.get(entry).and_then(|entry| entry.outputs.get(output));
        let bytes = place.map_or(0, |place| place.regions[0].bytes);
        let mut values = vec![T::default(); bytes / size_of::<T>().max(1)];
        self.read_bytes(entry, output, T::DTYPE, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    fn read_bytes(
        &mut self,
        entry: usize,
        output: usize,
        given: Option<quadriga_graph::DType>,
        into: &mut [u8],
    ) -> Result<(), RuntimeError> {
        let Some(entry) = self.entries.get(entry) else { return Err(RuntimeError::NoPlan) };
        let Some(place) = entry.outputs.get(output) else { return Err(RuntimeError::NoPlan) };
        match entry.results {
            Results::None => return Err(RuntimeError::NothingRun),
            Results::Gone if !place.lasting => {
                return Err(RuntimeError::Gone { name: place.name.clone() });
            }
            _ => {}
        }
        if let Some(given) = given {
            let Some(found) = place.elements else {
                return Err(RuntimeError::Strided { name: place.name.clone() });
            };
            if given != found {
                return Err(RuntimeError::WrongType { name: place.name.clone(), found, given });
            }
        }
        let region = place.region(entry.inputs.bank);
        if into.len() != region.bytes {
            let (name, expected, found) = (place.name.clone(), region.bytes, into.len());
            return Err(RuntimeError::WrongSize { name, expected, found });
        }
        let Some(lane) = self.lanes.get_mut(place.backend) else { return Err(RuntimeError::ForeignPlan) };
        let read = lane.compute.read(region, into);
        let failed = read.map_err(|error| RuntimeError::device(error).at(|| place.name.clone()));
        failed.map_err(|error| {
            let error = self.blame(error);
            self.recover();
            error
        })
    }
}

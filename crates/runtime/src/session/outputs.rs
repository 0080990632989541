//! Outputs: where the results of a run are.

use quadriga_graph::{DType, TensorId, TensorKind};

use super::places::SplitPlaces;
use super::tensor_ref::TensorRef;
use crate::schedule::Plan;
use crate::{Region, RuntimeError};

/// Where an output is: its backend, and the region for each bank of inputs.
pub(crate) struct OutputPlace {
    pub(crate) id: TensorId,
    pub(crate) name: String,
    pub(crate) backend: usize,
    regions: [Region; 2],
    elements: Option<DType>,
    /// Whether its memory outlives the run: it is a weight, a constant or a state.
    pub(crate) lasting: bool,
}

impl OutputPlace {
    /// Where it is after a run that read this bank of inputs.
    pub(crate) fn region(&self, bank: usize) -> &Region {
        self.regions.get(bank).unwrap_or(&self.regions[0])
    }

    /// Its type, if it is contiguous.
    pub(crate) fn elements(&self) -> Option<DType> {
        self.elements
    }

    /// An error unless it can be read as elements of this type.
    pub(crate) fn check_type(&self, given: Option<DType>) -> Result<(), RuntimeError> {
        let Some(given) = given else { return Ok(()) };
        match self.elements {
            None => Err(RuntimeError::Strided { name: self.name.clone() }),
            Some(found) if found != given => {
                Err(RuntimeError::WrongType { name: self.name.clone(), found, given })
            }
            Some(_) => Ok(()),
        }
    }
}

/// Finds the places of all outputs of a plan.
pub(crate) fn outputs(places: &SplitPlaces<'_>) -> Result<Vec<OutputPlace>, RuntimeError> {
    let (plan, graph) = (places.plan, places.plan.graph());
    let mut all = Vec::with_capacity(graph.outputs().len());
    for (name, id) in graph.outputs() {
        let Some(t) = graph.get(*id) else { continue };
        let storage = t.storage();
        let kind = graph.get(storage).map(|s| s.kind());
        let backend = plan.output_backend(*id);
        let place = |bank| backend.and_then(|backend| places.place(*id, backend, bank)).map(|p| p.region);
        let (Some(backend), Some(first), Some(second)) = (backend, place(0), place(1)) else {
            return Err(RuntimeError::BadPlan(format!("output {name} has no memory")));
        };
        let elements = t.is_contiguous().then_some(t.dtype());
        let lasting = matches!(kind, Some(TensorKind::Weight | TensorKind::Constant | TensorKind::State));
        let (name, regions) = (name.clone(), [first, second]);
        all.push(OutputPlace { id: *id, name, backend, regions, elements, lasting });
    }
    Ok(all)
}

/// The output that a caller names: by the output's name, by its tensor's name, or by id.
pub(crate) fn find<'o>(
    plan: &Plan,
    outputs: &'o [OutputPlace],
    output: TensorRef<'_>,
) -> Result<&'o OutputPlace, RuntimeError> {
    let by_id = |id: TensorId| {
        let found = outputs.iter().find(|place| place.id == id);
        let not_output = || RuntimeError::WrongKind { name: plan.graph().name(id), expected: "an output" };
        found.ok_or_else(not_output)
    };
    match output {
        TensorRef::Id(id) => by_id(id),
        TensorRef::Name(name) => match outputs.iter().find(|place| place.name == name) {
            Some(place) => Ok(place),
            None => match plan.graph().tensor(name) {
                Some(id) => by_id(id),
                None => {
                    let known = outputs.iter().map(|output| output.name.clone()).collect();
                    Err(RuntimeError::UnknownName { what: "output", name: name.to_owned(), known })
                }
            },
        },
    }
}

//! A plan of a session with its weights, inputs, outputs and programs.

use rustc_hash::FxHashMap;

use super::compile::CompiledPlan;
use super::inputs::Inputs;
use super::memory::SessionMemory;
use super::outputs::{OutputPlace, find, outputs};
use super::tensor_ref::TensorRef;
use crate::schedule::Plan;
use crate::weights::{PlanWeights, unset};
use crate::{Program, RuntimeError};

/// The programs of segments of splits, for observed runs: by split, first node and end there, and bank of inputs.
pub(crate) type SegmentPrograms = FxHashMap<(usize, usize, usize, usize), Box<dyn Program>>;

/// A plan of a session.
pub(crate) struct PreparedPlan {
    pub(crate) plan: Plan,
    pub(crate) weights: PlanWeights,
    /// Whether all weights have their bytes.
    weights_set: bool,
    pub(crate) inputs: Inputs,
    pub(crate) outputs: Vec<OutputPlace>,
    pub(crate) compiled: Option<CompiledPlan>,
    /// Compiled when they are first observed.
    pub(crate) segments: SegmentPrograms,
    pub(crate) results: Results,
    /// Whether it was compiled at least once.
    pub(crate) proven: bool,
    /// The states that were allocated for it.
    pub(crate) new_states: Vec<String>,
}

/// The results of a plan's latest run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Results {
    /// The plan was not run.
    None,
    /// They are in the arenas, or will be when the run is done.
    Present,
    /// Another plan has their memory, or the run failed.
    Gone,
}

impl PreparedPlan {
    pub(crate) fn new(plan: Plan, weights: PlanWeights, new_states: Vec<String>) -> PreparedPlan {
        PreparedPlan {
            plan,
            weights,
            weights_set: false,
            inputs: Inputs::default(),
            outputs: Vec::new(),
            compiled: None,
            segments: SegmentPrograms::default(),
            results: Results::None,
            proven: false,
            new_states,
        }
    }

    /// Compiles the plan for the arenas as they are.
    pub(crate) fn compile(&mut self, memory: &SessionMemory) -> Result<(), RuntimeError> {
        let places = memory.places(&self.plan, &self.weights);
        let outputs = outputs(&places)?;
        let inputs = Inputs::new(&self.plan, |tensor, backend, bank| {
            places.place(tensor, backend, bank).map(|place| place.region)
        });
        self.compiled = Some(CompiledPlan::new(&places)?);
        self.outputs = outputs;
        self.inputs = inputs;
        self.results = Results::None;
        self.proven = true;
        self.new_states = Vec::new();
        Ok(())
    }

    /// Forgets everything that points into the arenas or to weights.
    pub(crate) fn forget_places(&mut self) {
        self.compiled = None;
        self.segments.clear();
        self.outputs.clear();
        self.inputs = Inputs::default();
        self.results = Results::None;
        self.weights_set = false;
    }

    /// The plan's bytes in the arenas are overwritten: inputs must be set again, and results are gone.
    pub(crate) fn lose_values(&mut self) {
        self.inputs.forget();
        if self.results == Results::Present {
            self.results = Results::Gone;
        }
    }

    /// An error if a weight has no bytes yet.
    pub(crate) fn check_weights(&mut self) -> Result<(), RuntimeError> {
        if self.weights_set {
            return Ok(());
        }
        match unset(&self.weights) {
            Some(id) => Err(RuntimeError::NotSet { what: "weight", name: self.plan.graph().name(id) }),
            None => {
                self.weights_set = true;
                Ok(())
            }
        }
    }

    /// An output by name or id.
    pub(crate) fn output(&self, output: TensorRef<'_>) -> Result<&OutputPlace, RuntimeError> {
        find(&self.plan, &self.outputs, output)
    }

    /// An output of the latest run; an error if there was none, or its results are gone.
    pub(crate) fn result(&self, output: TensorRef<'_>) -> Result<&OutputPlace, RuntimeError> {
        let place = self.output(output)?;
        self.results.check(place).map(|()| place)
    }
}

impl Results {
    /// An error if there are no results to take an output from.
    pub(crate) fn check(self, output: &OutputPlace) -> Result<(), RuntimeError> {
        match self {
            Results::None => Err(RuntimeError::NothingRun),
            Results::Gone => Err(RuntimeError::Gone { name: output.name.clone() }),
            Results::Present => Ok(()),
        }
    }
}

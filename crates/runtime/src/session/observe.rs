//! Watching a run: every node compiled and run on its own, its result shown to the caller.

use quadriga_graph::{NodeId, TensorId};

use super::Session;
use super::cache::Results;
use super::compile::Site;
use super::execute::Run;
use crate::schedule::{Plan, ScheduleStep};
use crate::{Program, RuntimeError};

/// A node's result, right after it was computed.
pub struct Observed<'a> {
    /// The plan that is run.
    pub plan: &'a Plan,
    /// The node.
    pub node: NodeId,
    /// The tensor it computed.
    pub tensor: TensorId,
    /// The tensor's bytes, with its own strides.
    pub bytes: &'a [u8],
}

/// One program for each node, per bank of inputs, in the order of [`Splits::nodes`](crate::Splits::nodes).
pub(crate) type Singles = Vec<[Box<dyn Program>; 2]>;

impl Session {
    /// Runs the current plan one node at a time, showing each result. Much slower than [`Session::run`], with the same
    /// results, unless a backend computes fused nodes otherwise.
    pub fn observe(&mut self, watch: &mut dyn FnMut(Observed<'_>)) -> Result<(), RuntimeError> {
        let current = self.ready()?;
        self.wait()?;
        self.check_weights(current)?;
        let observed = self.observe_entry(current, watch);
        if observed.is_err() {
            self.recover();
        }
        observed
    }

    fn observe_entry(
        &mut self,
        current: usize,
        watch: &mut dyn FnMut(Observed<'_>),
    ) -> Result<(), RuntimeError> {
        let fresh_inputs = self.turn_inputs(current)?;
        let Some(entry) = self.entries.get_mut(current) else { return Err(RuntimeError::NoPlan) };
        let Some(compiled) = &mut entry.compiled else { return Err(RuntimeError::NoPlan) };
        let plan = &entry.plan;
        let site = Site { plan, arenas: &self.arenas, states: &self.states, weights: &entry.weights };
        if entry.singles.is_none() {
            entry.singles = Some(singles(&site)?);
        }
        let Some(programs) = &mut entry.singles else { return Err(RuntimeError::NoPlan) };
        let bank = entry.inputs.bank;
        let mut run = Run { plan, compiled, lanes: &mut self.lanes, bank, fresh_inputs, timing: None };
        run.begin()?;
        let mut bytes = Vec::new();
        for step in plan.order() {
            let number = match *step {
                ScheduleStep::Copy(copy) => {
                    run.copy(copy)?;
                    continue;
                }
                ScheduleStep::Split(split) => split,
            };
            let Some(split) = plan.splits().splits.get(number) else { continue };
            run.wait_for_copies(number)?;
            let of_split = programs.iter_mut().skip(split.first_node).zip(plan.splits().nodes_of(number));
            for (pair, node) in of_split {
                let Some(tensor) = plan.graph().get_node(*node).map(|n| n.output()) else { continue };
                let Some(program) = pair.get_mut(bank) else { continue };
                let Some(place) = site.place(tensor, split.backend, bank) else { continue };
                bytes.resize(place.region.bytes, 0);
                run.single(number, &mut **program, &place.region, &mut bytes)
                    .map_err(|error| error.in_split(number, || plan.graph().node_name(*node)))?;
                // A write that is repeated on a copy is shown where the state lives.
                if !plan.splits().is_echo(*node, number) {
                    watch(Observed { plan, node: *node, tensor, bytes: &bytes });
                }
            }
            run.finish_split(number)?;
        }
        entry.results = Results::There;
        self.wait()
    }
}

fn singles(site: &Site<'_>) -> Result<Singles, RuntimeError> {
    let splits = site.plan.splits();
    let mut all = Vec::with_capacity(splits.nodes.len());
    for (number, split) in splits.splits.iter().enumerate() {
        for node in splits.nodes_of(number) {
            let program = |bank| {
                let made = site.program(split.backend, std::slice::from_ref(node), (number, bank), &|_| true);
                made.map_err(|error| error.in_split(number, || site.plan.graph().node_name(*node)))
            };
            all.push([program(0)?, program(1)?]);
        }
    }
    Ok(all)
}

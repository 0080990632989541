//! Looking into runs: timing them, and observing every node's result.

use std::sync::Arc;

use quadriga_graph::{NodeId, TensorId};

use super::clock::TraceClock;
use super::compile::{CompiledPlan, program};
use super::execute::Run;
use super::places::SplitPlaces;
use super::prepared::{NodePrograms, PreparedPlan, Results};
use super::session::{Session, not_compiled};
use crate::schedule::{Plan, ScheduleStep};
use crate::trace::{BackendTime, CopyTime, Detail, OperationTime, SplitTime, Trace, operation};
use crate::{Backend, RuntimeError};

/// Times and observes runs of a session; from [`Session::debug`].
pub struct SessionDebug<'s> {
    session: &'s mut Session,
}

/// The result of a node, right after it was computed.
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

impl Session {
    /// Runs that are timed, or observed node by node.
    pub fn debug(&mut self) -> SessionDebug<'_> {
        SessionDebug { session: self }
    }
}

impl SessionDebug<'_> {
    /// Runs the current plan with the inputs that are set, waits for the end, and takes the time of every split and
    /// copy, with [`Detail::Operations`] also of every operation.
    pub fn trace(&mut self, detail: Detail) -> Result<Trace, RuntimeError> {
        let session = &mut *self.session;
        let current = session.ready()?;
        session.plans.get_mut(current)?.check_weights()?;
        session.wait()?;
        let clock = session.issue(current, Some(detail))?;
        let clock = clock.ok_or_else(|| RuntimeError::internal("a traced run has no clock"))?;
        session.wait()?;
        let seconds = clock.origin.elapsed().as_secs_f64();
        let PreparedPlan { plan, compiled, inputs, .. } = session.plans.get(current)?;
        let compiled = compiled.as_ref().ok_or_else(not_compiled)?;
        Ok(trace(&clock, plan, compiled, inputs.bank, seconds))
    }

    /// Runs the current plan one node at a time, and shows each result to a callback. Much slower than [`Session::run`],
    /// with the same results, unless a backend computes fused nodes differently.
    pub fn observe(&mut self, callback: &mut dyn FnMut(Observed<'_>)) -> Result<(), RuntimeError> {
        let session = &mut *self.session;
        let current = session.ready()?;
        session.wait()?;
        session.plans.get_mut(current)?.check_weights()?;
        let observed = observe(session, current, callback);
        if observed.is_err() {
            session.recover();
        }
        observed
    }
}

fn observe(
    session: &mut Session,
    current: usize,
    callback: &mut dyn FnMut(Observed<'_>),
) -> Result<(), RuntimeError> {
    let uploads = session.swap_banks(current)?;
    let PreparedPlan { plan, weights, compiled, node_programs, inputs, results, .. } =
        session.plans.get_mut(current)?;
    let compiled = compiled.as_mut().ok_or_else(not_compiled)?;
    let places = session.memory.places(plan, weights);
    let programs = match node_programs {
        Some(programs) => programs,
        none => none.insert(compile_nodes(&places)?),
    };
    let bank = inputs.bank;
    let mut run = Run { plan, compiled, lanes: &mut session.lanes, bank, uploads, clock: None };
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
        for (banks, node) in of_split {
            let Some(tensor) = plan.graph().get_node(*node).map(|n| n.output()) else { continue };
            let Some(program) = banks.get_mut(bank) else { continue };
            let Some(place) = places.place(tensor, split.backend, bank) else { continue };
            bytes.resize(place.region.bytes, 0);
            run.run_node(number, &mut **program, &place.region, &mut bytes)
                .map_err(|error| error.in_split(number, || plan.graph().node_name(*node)))?;
            // A mirrored write is shown once, on the backend of the state.
            if !plan.splits().is_mirrored_write(*node, number) {
                callback(Observed { plan, node: *node, tensor, bytes: &bytes });
            }
        }
        run.finish_split(number)?;
    }
    *results = Results::Present;
    session.wait()
}

fn compile_nodes(places: &SplitPlaces<'_>) -> Result<NodePrograms, RuntimeError> {
    let splits = places.plan.splits();
    let mut all = Vec::with_capacity(splits.nodes.len());
    for (number, split) in splits.splits.iter().enumerate() {
        for node in splits.nodes_of(number) {
            let program = |bank| {
                let nodes = std::slice::from_ref(node);
                let compiled = program(places, split.backend, nodes, (number, bank), &|_| true);
                compiled.map_err(|error| error.in_split(number, || places.plan.graph().node_name(*node)))
            };
            all.push([program(0)?, program(1)?]);
        }
    }
    Ok(all)
}

/// The times of a run that is done.
fn trace(clock: &TraceClock, plan: &Plan, compiled: &CompiledPlan, bank: usize, seconds: f64) -> Trace {
    let of = |backend: &Arc<dyn Backend>| BackendTime {
        backend: backend.name().to_owned(),
        ..BackendTime::default()
    };
    let mut trace = Trace { seconds, backends: plan.backends().iter().map(of).collect(), ..Trace::default() };
    for step in &clock.steps {
        let (start, seconds) = clock.measure(step);
        let (backend, stream) = (step.lane, step.stream);
        let total = trace.backends.get_mut(backend);
        match step.step {
            ScheduleStep::Split(split) => {
                let nodes = plan.splits().nodes_of(split).len();
                trace.splits.push(SplitTime { split, backend, nodes, start, seconds });
                total.into_iter().for_each(|total| total.compute += seconds);
                if clock.detail == Detail::Operations {
                    trace.operations.extend(operations(plan, compiled, (split, backend, bank), start));
                }
            }
            ScheduleStep::Copy(copy) => {
                let bytes = plan.splits().copies.get(copy).map_or(0, |copy| copy.bytes);
                trace.copies.push(CopyTime { copy, backend, stream, bytes, start, seconds });
                total.into_iter().for_each(|total| total.copy += seconds);
            }
        }
    }
    trace
}

/// The times of the operations of a split that started at `start`.
fn operations(
    plan: &Plan,
    compiled: &CompiledPlan,
    (split, backend, bank): (usize, usize, usize),
    start: f64,
) -> impl Iterator<Item = OperationTime> {
    let programs = compiled.programs.get(split);
    let program = programs.and_then(|programs| programs.get(bank % programs.len().max(1)));
    let steps = program.map(|program| program.step_times()).unwrap_or_default();
    steps.into_iter().map(move |step| OperationTime {
        split,
        backend,
        nodes: step.nodes.iter().map(|node| node.index()).collect(),
        operation: operation(plan.graph(), &step.nodes),
        start: start + step.start,
        seconds: step.seconds,
    })
}

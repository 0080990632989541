//! Runs that are timed.

use std::sync::Arc;

use super::clock::TraceClock;
use super::compile::CompiledPlan;
use super::issue::not_compiled;
use super::prepared::PreparedPlan;
use super::selected::SelectedSlices;
use super::session::Session;
use crate::schedule::{Plan, ScheduleStep};
use crate::trace::{BackendTime, CopyTime, Detail, OperationTime, SplitTime, Trace, operation};
use crate::{Backend, RuntimeError};

/// Times and observes runs of a session; from [`Session::debug`].
pub struct SessionDebug<'s> {
    pub(super) session: &'s mut Session,
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
        let before = session.selected_slices(current)?;
        let clock = session.issue(current, Some(detail))?;
        let clock = clock.ok_or_else(|| RuntimeError::internal("a traced run has no clock"))?;
        session.wait()?;
        let seconds = clock.origin.elapsed().as_secs_f64();
        let selected = SelectedSlices { before, after: session.selected_slices(current)? };
        let PreparedPlan { plan, compiled, inputs, .. } = session.plans.get(current)?;
        let compiled = compiled.as_ref().ok_or_else(not_compiled)?;
        Ok(trace(&clock, plan, (compiled, inputs.bank), &selected, seconds))
    }
}

/// The times of a run that is done.
fn trace(
    clock: &TraceClock,
    plan: &Plan,
    (compiled, bank): (&CompiledPlan, usize),
    slices: &SelectedSlices,
    seconds: f64,
) -> Trace {
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
            ScheduleStep::Copy(copy) | ScheduleStep::Prefetch(copy) => {
                let planned = plan.splits().copies.get(copy);
                let most = planned.map_or(0, |copy| copy.bytes);
                let selected = planned.is_some_and(|copy| copy.selected_by.is_some());
                let known = if selected { slices.bytes(step.step, &clock.steps, most) } else { Some(most) };
                let (bytes, exact) = (known.unwrap_or(most), known.is_some());
                trace.copies.push(CopyTime { copy, backend, stream, bytes, selected, exact, start, seconds });
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

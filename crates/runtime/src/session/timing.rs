//! Timing a run: marks in the queues of asynchronous devices, the host's clock for the others.

use std::sync::Arc;
use std::time::Instant;

use super::Session;
use super::cache::Results;
use super::compile::Compiled;
use super::execute::Run;
use super::lane::Lane;
use crate::schedule::{Plan, ScheduleStep};
use crate::trace::{BackendTime, CopyTime, Detail, OperationTime, SplitTime, Stream, Trace, operation};
use crate::{Backend, BackendError, Event, Queue, RuntimeError, Values};

/// A moment.
pub(crate) enum Mark {
    /// When a device came to this point of a queue.
    Device(Arc<dyn Event>),
    /// When the host was there.
    Host(Instant),
}

/// Something that was done.
struct Span {
    step: ScheduleStep,
    lane: usize,
    stream: Stream,
    begin: Mark,
    end: Mark,
}

/// The marks of a run.
pub(crate) struct Timing {
    pub(crate) detail: Detail,
    origin: Instant,
    /// For each asynchronous lane its first mark.
    first: Vec<Option<Arc<dyn Event>>>,
    /// What was done.
    spans: Vec<Span>,
}

impl Timing {
    /// Starts the clocks of all lanes.
    pub(crate) fn new(lanes: &mut [Lane], detail: Detail) -> Result<Timing, BackendError> {
        let mut first = Vec::with_capacity(lanes.len());
        for lane in lanes {
            first.push(match &lane.traffic {
                Some(_) => {
                    let event = lane.backend.event(true)?;
                    lane.compute.record(&*event)?;
                    Some(event)
                }
                None => None,
            });
        }
        Ok(Timing { detail, origin: Instant::now(), first, spans: Vec::new() })
    }

    pub(crate) fn add(
        &mut self,
        (step, lane): (ScheduleStep, usize),
        stream: Stream,
        begin: Mark,
        end: Mark,
    ) {
        self.spans.push(Span { step, lane, stream, begin, end });
    }

    /// Start and length of a span, in seconds.
    fn measure(&self, lane: usize, begin: &Mark, end: &Mark) -> (f64, f64) {
        match (begin, end) {
            (Mark::Device(begin), Mark::Device(end)) => {
                let first = self.first.get(lane).and_then(Option::as_ref);
                let start = first.and_then(|first| begin.seconds_since(&**first));
                (start.unwrap_or(0.0), end.seconds_since(&**begin).unwrap_or(0.0))
            }
            (Mark::Host(begin), Mark::Host(end)) => {
                ((*begin - self.origin).as_secs_f64(), (*end - *begin).as_secs_f64())
            }
            _ => (0.0, 0.0),
        }
    }

    fn trace(&self, plan: &Plan, compiled: &Compiled, bank: usize, seconds: f64) -> Trace {
        let of = |backend: &Arc<dyn Backend>| BackendTime {
            backend: backend.name().to_owned(),
            ..BackendTime::default()
        };
        let mut trace =
            Trace { seconds, backends: plan.backends().iter().map(of).collect(), ..Trace::default() };
        for Span { step, lane, stream, begin, end } in &self.spans {
            let (start, seconds) = self.measure(*lane, begin, end);
            let backend = *lane;
            let total = trace.backends.get_mut(backend);
            match *step {
                ScheduleStep::Split(split) => {
                    let nodes = plan.splits().nodes_of(split).len();
                    trace.splits.push(SplitTime { split, backend, nodes, start, seconds });
                    total.into_iter().for_each(|total| total.compute += seconds);
                    if self.detail == Detail::Operations {
                        trace.operations.extend(operations(plan, compiled, (split, backend, bank), start));
                    }
                }
                ScheduleStep::Copy(copy) => {
                    let bytes = plan.splits().copies.get(copy).map_or(0, |copy| copy.bytes);
                    trace.copies.push(CopyTime { copy, backend, stream: *stream, bytes, start, seconds });
                    total.into_iter().for_each(|total| total.copy += seconds);
                }
            }
        }
        trace
    }
}

/// What the steps of a split took that began at `start`.
fn operations(
    plan: &Plan,
    compiled: &Compiled,
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

/// A mark in a queue of a backend.
pub(crate) fn mark(
    backend: &Arc<dyn Backend>,
    asynchronous: bool,
    queue: &mut dyn Queue,
) -> Result<Mark, BackendError> {
    if !asynchronous {
        return Ok(Mark::Host(Instant::now()));
    }
    let event = backend.event(true)?;
    queue.record(&*event)?;
    Ok(Mark::Device(event))
}

impl Session {
    /// As [`Session::run`], and says how long everything took.
    pub fn run_traced(&mut self, inputs: &[(&str, &dyn Values)]) -> Result<Trace, RuntimeError> {
        for (name, values) in inputs {
            self.set(name, *values)?;
        }
        self.trace(Detail::Splits)
    }

    /// Runs the current plan with the inputs that are set, waits for the end, and says how long everything took.
    pub fn trace(&mut self, detail: Detail) -> Result<Trace, RuntimeError> {
        let current = self.ready()?;
        self.check_weights(current)?;
        self.wait()?;
        let begun = self.begin_traced(current, detail);
        let timing = match begun {
            Ok(timing) => timing,
            Err(error) => {
                self.recover();
                return Err(error);
            }
        };
        self.wait()?;
        let seconds = timing.origin.elapsed().as_secs_f64();
        let entry = self.entries.get(current);
        match entry.and_then(|entry| Some((entry, entry.compiled.as_ref()?))) {
            Some((entry, compiled)) => Ok(timing.trace(&entry.plan, compiled, entry.inputs.bank, seconds)),
            None => Err(RuntimeError::NoPlan),
        }
    }

    fn begin_traced(&mut self, current: usize, detail: Detail) -> Result<Timing, RuntimeError> {
        let fresh_inputs = self.turn_inputs(current)?;
        let timing = Timing::new(&mut self.lanes, detail).map_err(RuntimeError::device)?;
        let Some(entry) = self.entries.get_mut(current) else { return Err(RuntimeError::NoPlan) };
        let Some(compiled) = &mut entry.compiled else { return Err(RuntimeError::NoPlan) };
        self.in_flight = Some(current);
        entry.results = Results::There;
        let (plan, bank) = (&entry.plan, entry.inputs.bank);
        let mut run =
            Run { plan, compiled, lanes: &mut self.lanes, bank, fresh_inputs, timing: Some(timing) };
        run.issue()?;
        run.timing.take().ok_or(RuntimeError::NoPlan)
    }
}

//! Timing a run: marks in the queues of asynchronous devices, the host's clock for the others.

use std::sync::Arc;
use std::time::Instant;

use super::Session;
use super::execute::Run;
use super::lane::Lane;
use crate::schedule::{Plan, Step};
use crate::trace::{BackendTime, CopyTime, SplitTime, Trace};
use crate::{Backend, BackendError, Event, Queue, RuntimeError, Values};

/// A moment.
pub(crate) enum Mark {
    /// When a device came to this point of a queue.
    Device(Arc<dyn Event>),
    /// When the host was there.
    Host(Instant),
}

/// The marks of a run.
pub(crate) struct Timing {
    origin: Instant,
    /// For each asynchronous lane its first mark.
    first: Vec<Option<Arc<dyn Event>>>,
    /// What was done, on which lane, from when to when.
    spans: Vec<(Step, usize, Mark, Mark)>,
}

impl Timing {
    /// Starts the clocks of all lanes.
    pub(crate) fn new(lanes: &mut [Lane]) -> Result<Timing, BackendError> {
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
        Ok(Timing { origin: Instant::now(), first, spans: Vec::new() })
    }

    pub(crate) fn add(&mut self, step: Step, lane: usize, begin: Mark, end: Mark) {
        self.spans.push((step, lane, begin, end));
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

    fn trace(&self, plan: &Plan, seconds: f64) -> Trace {
        let of = |backend: &Arc<dyn Backend>| BackendTime {
            backend: backend.name().to_owned(),
            ..BackendTime::default()
        };
        let mut trace =
            Trace { seconds, backends: plan.backends().iter().map(of).collect(), ..Trace::default() };
        for (step, lane, begin, end) in &self.spans {
            let (start, seconds) = self.measure(*lane, begin, end);
            let total = trace.backends.get_mut(*lane);
            match *step {
                Step::Split(split) => {
                    let nodes = plan.splits().nodes_of(split).len();
                    trace.splits.push(SplitTime { split, backend: *lane, nodes, start, seconds });
                    total.into_iter().for_each(|total| total.compute += seconds);
                }
                Step::Copy(copy) => {
                    let bytes = plan.splits().copies.get(copy).map_or(0, |copy| copy.bytes);
                    trace.copies.push(CopyTime { copy, backend: *lane, bytes, start, seconds });
                    total.into_iter().for_each(|total| total.copy += seconds);
                }
            }
        }
        trace
    }
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
        let current = self.ready()?;
        self.check_weights(current)?;
        self.wait()?;
        let begun = self.begin_traced(current);
        let timing = match begun {
            Ok(timing) => timing,
            Err(error) => {
                self.recover();
                return Err(error);
            }
        };
        self.wait()?;
        let seconds = timing.origin.elapsed().as_secs_f64();
        match self.entries.get(current) {
            Some(entry) => Ok(timing.trace(&entry.plan, seconds)),
            None => Err(RuntimeError::NoPlan),
        }
    }

    fn begin_traced(&mut self, current: usize) -> Result<Timing, RuntimeError> {
        let fresh_inputs = self.turn_inputs(current)?;
        let timing = Timing::new(&mut self.lanes).map_err(RuntimeError::device)?;
        let Some(entry) = self.entries.get_mut(current) else { return Err(RuntimeError::NoPlan) };
        let Some(compiled) = &mut entry.compiled else { return Err(RuntimeError::NoPlan) };
        self.in_flight = Some(current);
        entry.has_run = true;
        let (plan, bank) = (&entry.plan, entry.inputs.bank);
        let mut run =
            Run { plan, compiled, lanes: &mut self.lanes, bank, fresh_inputs, timing: Some(timing) };
        run.issue()?;
        run.timing.take().ok_or(RuntimeError::NoPlan)
    }
}

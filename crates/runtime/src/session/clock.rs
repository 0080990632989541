//! Taking the times of a run: events in the queues of asynchronous devices, the host's clock for the others.

use std::sync::Arc;
use std::time::Instant;

use super::lane::Lane;
use crate::schedule::ScheduleStep;
use crate::trace::{Detail, Stream};
use crate::{BackendError, Event, Queue};

/// A point in time.
pub(crate) enum Mark {
    /// An event in a queue of a device.
    Device(Arc<dyn Event>),
    /// The host's clock.
    Host(Instant),
}

/// A copy or split with its start and end.
pub(crate) struct TimedStep {
    pub(crate) step: ScheduleStep,
    pub(crate) lane: usize,
    pub(crate) stream: Stream,
    begin: Mark,
    end: Mark,
}

/// The times of a run in progress.
pub(crate) struct TraceClock {
    pub(crate) detail: Detail,
    pub(crate) origin: Instant,
    /// For each asynchronous lane its first event.
    first: Vec<Option<Arc<dyn Event>>>,
    pub(crate) steps: Vec<TimedStep>,
}

impl TraceClock {
    /// Starts the clocks of all lanes.
    pub(crate) fn start(lanes: &mut [Lane], detail: Detail) -> Result<TraceClock, BackendError> {
        let mut first = Vec::with_capacity(lanes.len());
        for lane in lanes {
            first.push(if lane.is_asynchronous() {
                let event = lane.backend.event(true)?;
                lane.compute.record(&*event)?;
                Some(event)
            } else {
                None
            });
        }
        Ok(TraceClock { detail, origin: Instant::now(), first, steps: Vec::new() })
    }

    /// Adds a step that is done, or issued.
    pub(crate) fn add(
        &mut self,
        (step, lane): (ScheduleStep, usize),
        stream: Stream,
        [begin, end]: [Mark; 2],
    ) {
        self.steps.push(TimedStep { step, lane, stream, begin, end });
    }

    /// Issues a command to a queue between two marks. A command that the backend cannot do (`false`) is not added.
    pub(crate) fn time(
        &mut self,
        lane: &mut Lane,
        stream: Stream,
        what: (ScheduleStep, usize),
        command: impl FnOnce(&mut dyn Queue) -> Result<bool, BackendError>,
    ) -> Result<bool, BackendError> {
        let begin = mark(lane, stream)?;
        let done = command(lane.queue(stream))?;
        if done {
            let end = mark(lane, stream)?;
            self.add(what, stream, [begin, end]);
        }
        Ok(done)
    }

    /// Start and length of a step, in seconds.
    pub(crate) fn measure(&self, step: &TimedStep) -> (f64, f64) {
        match (&step.begin, &step.end) {
            (Mark::Device(begin), Mark::Device(end)) => {
                let first = self.first.get(step.lane).and_then(Option::as_ref);
                let start = first.and_then(|first| begin.seconds_since(&**first));
                (start.unwrap_or(0.0), end.seconds_since(&**begin).unwrap_or(0.0))
            }
            (Mark::Host(begin), Mark::Host(end)) => {
                ((*begin - self.origin).as_secs_f64(), (*end - *begin).as_secs_f64())
            }
            _ => (0.0, 0.0),
        }
    }
}

fn mark(lane: &mut Lane, stream: Stream) -> Result<Mark, BackendError> {
    if !lane.is_asynchronous() {
        return Ok(Mark::Host(Instant::now()));
    }
    let event = lane.backend.event(true)?;
    lane.queue(stream).record(&*event)?;
    Ok(Mark::Device(event))
}

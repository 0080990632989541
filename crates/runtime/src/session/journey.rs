//! One copy on its way from one backend to another.
//!
//! The reading backend pulls, else the owner pushes, else the bytes go through host memory that both can reach, else
//! the host carries them. Which of these it is, is found out when a copy is first made, and kept.

use std::sync::Arc;
use std::time::Instant;

use super::compile::{Moving, Route, event_of, staging};
use super::lane::Lane;
use super::timing::{Mark, Timing, mark};
use crate::schedule::{Plan, ScheduleStep};
use crate::trace::Stream;
use crate::{BackendError, Event, Queue, Region, RuntimeError};

/// A copy of a run.
pub(crate) struct Journey<'r> {
    pub(crate) copy: usize,
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Whether the source is there before the run: a weight that is lent, or a state as it was.
    pub(crate) ahead: bool,
    /// What must be done before: the source made, the target's place free.
    pub(crate) waits: [Option<Arc<dyn Event>>; 2],
    pub(crate) moving: &'r mut Moving,
    pub(crate) lanes: &'r mut [Lane],
    pub(crate) timing: &'r mut Option<Timing>,
}

fn queue_of(lane: &mut Lane, stream: Stream) -> &mut dyn Queue {
    match stream {
        Stream::Compute => &mut *lane.compute,
        Stream::Ahead => lane.ahead(),
        Stream::Incoming => lane.incoming(),
        Stream::Outgoing => lane.outgoing(),
    }
}

/// Does something on a queue between two marks. What was not done (`false`) is not written down.
pub(crate) fn timed(
    lane: &mut Lane,
    stream: Stream,
    timing: &mut Timing,
    what: (ScheduleStep, usize),
    work: impl FnOnce(&mut dyn Queue) -> Result<bool, BackendError>,
) -> Result<bool, BackendError> {
    let (backend, asynchronous) = (Arc::clone(&lane.backend), lane.traffic.is_some());
    let queue = queue_of(lane, stream);
    let begin = mark(&backend, asynchronous, queue)?;
    let done = work(queue)?;
    if done {
        timing.add(what, stream, begin, mark(&backend, asynchronous, queue)?);
    }
    Ok(done)
}

impl Journey<'_> {
    pub(crate) fn make(&mut self, plan: &Plan) -> Result<(), BackendError> {
        match self.moving.route {
            Route::Unknown => self.find(plan),
            Route::Pull => self.leg(self.to, Stream::Incoming).map(|_| ()),
            Route::Push => self.leg(self.from, Stream::Outgoing).map(|_| ()),
            Route::Bounce { .. } => self.bounce().map(|_| ()),
            Route::Host(_) => self.carry(),
        }
    }

    /// Makes the copy for the first time, and keeps the way it went.
    fn find(&mut self, plan: &Plan) -> Result<(), BackendError> {
        let event = |backend: usize| match event_of(plan, backend, false) {
            Ok(event) => Ok(event),
            Err(RuntimeError::Device { error, .. }) => Err(*error),
            Err(_) => Ok(None),
        };
        self.moving.done = event(self.to)?;
        if self.leg(self.to, Stream::Incoming)? {
            self.moving.route = Route::Pull;
            return Ok(());
        }
        self.moving.done = event(self.from)?;
        if self.leg(self.from, Stream::Outgoing)? {
            self.moving.route = Route::Push;
            return Ok(());
        }
        let bytes = self.moving.from.bytes;
        self.moving.done = event(self.to)?;
        if let Some(lane) = self.lanes.get(self.from) {
            let staging = staging(&lane.backend, bytes)?;
            self.moving.route = Route::Bounce { staging, filled: event(self.from)? };
            if self.bounce()? {
                return Ok(());
            }
        }
        self.moving.route = Route::Host(vec![0; bytes]);
        self.moving.done = None;
        self.carry()
    }

    /// All of the way on one queue; `false` if it cannot reach both sides.
    fn leg(&mut self, lane: usize, stream: Stream) -> Result<bool, BackendError> {
        let [source, free] = self.waits.clone();
        let (from, to, done) = (self.moving.from.clone(), self.moving.to.clone(), self.moving.done.clone());
        self.transfer(lane, stream, [source, free], (&from, &to), done)
    }

    /// Waits, copies and records on one queue; `false` if it cannot reach both sides.
    fn transfer(
        &mut self,
        number: usize,
        stream: Stream,
        waits: [Option<Arc<dyn Event>>; 2],
        (from, to): (&Region, &Region),
        done: Option<Arc<dyn Event>>,
    ) -> Result<bool, BackendError> {
        let stream = if self.ahead && stream == Stream::Incoming { Stream::Ahead } else { stream };
        let Some(lane) = self.lanes.get_mut(number) else { return Ok(false) };
        for event in waits.iter().flatten() {
            queue_of(lane, stream).wait(&**event)?;
        }
        let made = match self.timing {
            None => queue_of(lane, stream).copy(from, to)?,
            Some(timing) => {
                let what = (ScheduleStep::Copy(self.copy), number);
                timed(lane, stream, timing, what, |queue| queue.copy(from, to))?
            }
        };
        if made && let Some(done) = &done {
            queue_of(lane, stream).record(&**done)?;
        }
        Ok(made)
    }

    /// Through host memory that both queues can reach; `false` if one of them cannot.
    fn bounce(&mut self) -> Result<bool, BackendError> {
        let Route::Bounce { staging, filled } = &self.moving.route else { return Ok(false) };
        let (staging, filled) = (staging.clone(), filled.clone());
        let [source, free] = self.waits.clone();
        let (from, to, done) = (self.moving.from.clone(), self.moving.to.clone(), self.moving.done.clone());
        // The copy of the run before must have left the host memory.
        let sent = self.transfer(
            self.from,
            Stream::Outgoing,
            [source, done.clone()],
            (&from, &staging),
            filled.clone(),
        )?;
        Ok(sent && self.transfer(self.to, Stream::Incoming, [free, filled], (&staging, &to), done)?)
    }

    /// Read and written by the host, which waits.
    fn carry(&mut self) -> Result<(), BackendError> {
        let Route::Host(bytes) = &mut self.moving.route else { return Ok(()) };
        let [source, free] = &self.waits;
        let begin = Mark::Host(Instant::now());
        if let Some(lane) = self.lanes.get_mut(self.from) {
            let sending = lane.outgoing();
            if let Some(event) = source {
                sending.wait(&**event)?;
            }
            sending.read(&self.moving.from, bytes)?;
        }
        if let Some(lane) = self.lanes.get_mut(self.to) {
            let receiving = lane.incoming();
            if let Some(event) = free {
                receiving.wait(&**event)?;
            }
            receiving.write(&self.moving.to, bytes)?;
            receiving.synchronize()?;
        }
        if let Some(timing) = self.timing {
            let what = (ScheduleStep::Copy(self.copy), self.to);
            timing.add(what, Stream::Incoming, begin, Mark::Host(Instant::now()));
        }
        Ok(())
    }
}

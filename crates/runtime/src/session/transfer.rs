//! One copy between two backends.
//!
//! The reading backend pulls the bytes, else the owner pushes them, else they go through staging memory that both can
//! reach, else the host reads and writes them. The first run finds out which of these works, and later runs do the same.

use std::sync::Arc;
use std::time::Instant;

use super::clock::{Mark, TraceClock};
use super::lane::Lane;
use crate::schedule::ScheduleStep;
use crate::trace::Stream;
use crate::{BackendError, Event, Layout, Queue, Region, SliceSelection};

/// The two sides of a copy, and how it is made.
pub(crate) struct CopyRegions {
    pub(crate) from: Region,
    pub(crate) to: Region,
    pub(crate) route: Route,
    /// Recorded when the copy is done; `None` before the first run, and where both sides are synchronous.
    pub(crate) done: Option<Arc<dyn Event>>,
    /// Of a weight of which selected slices are copied: which they are.
    pub(crate) selection: Option<SliceSelection>,
}

/// How bytes get from one backend to another.
pub(crate) enum Route {
    /// Not known before the first run.
    Unknown,
    /// The reading backend copies them.
    Pull,
    /// The backend that has them copies them.
    Push,
    /// Both copy, to and from staging memory.
    Staged {
        /// The staging memory.
        staging: Region,
        /// Recorded when the bytes are in it.
        filled: Option<Arc<dyn Event>>,
    },
    /// The host reads and writes them through its own memory.
    Host(Vec<u8>),
}

/// A copy of a run.
pub(crate) struct Transfer<'r> {
    pub(crate) copy: usize,
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Whether the source is there before the run: a streamed weight, or a state.
    pub(crate) prefetch: bool,
    /// The source is written, the target's memory is free, and the slices are selected.
    pub(crate) waits: [Option<Arc<dyn Event>>; 3],
    pub(crate) regions: &'r mut CopyRegions,
    pub(crate) lanes: &'r mut [Lane],
    pub(crate) clock: &'r mut Option<TraceClock>,
}

impl CopyRegions {
    pub(crate) fn new(from: Region, to: Region, selection: Option<SliceSelection>) -> CopyRegions {
        CopyRegions { from, to, route: Route::Unknown, done: None, selection }
    }

    /// Bytes of memory that only this copy uses.
    pub(crate) fn own_bytes(&self) -> usize {
        match &self.route {
            Route::Staged { staging, .. } => staging.bytes,
            Route::Host(bytes) => bytes.len(),
            Route::Unknown | Route::Pull | Route::Push => 0,
        }
    }

    /// Forgets events of a run that was given up.
    pub(crate) fn reset(&mut self) {
        self.done = None;
        self.route = Route::Unknown;
        self.selection.iter_mut().for_each(SliceSelection::reset);
    }
}

impl Transfer<'_> {
    /// Issues the copy.
    pub(crate) fn issue(&mut self) -> Result<(), BackendError> {
        match self.regions.route {
            Route::Unknown => self.find_route(),
            Route::Pull => self.direct(self.to, Stream::Upload).map(|_| ()),
            Route::Push => self.direct(self.from, Stream::Download).map(|_| ()),
            Route::Staged { .. } => self.via_staging().map(|_| ()),
            Route::Host(_) => self.via_host(),
        }
    }

    /// Copies slices that are likely to be selected, if an earlier run has found that the reading backend copies them.
    pub(crate) fn prefetch_slices(&mut self) -> Result<(), BackendError> {
        let regions = &mut *self.regions;
        let (Route::Pull, Some(selection)) = (&regions.route, &mut regions.selection) else { return Ok(()) };
        let Some(lane) = self.lanes.get_mut(self.to) else { return Ok(()) };
        // The indices are not needed yet.
        let [source, free, _] = &self.waits;
        for event in source.iter().chain(free) {
            lane.queue(Stream::Prefetch).wait(&**event)?;
        }
        let (from, to) = (&regions.from, &regions.to);
        selection.prefetched = match self.clock {
            None => lane.queue(Stream::Prefetch).prefetch_slices(from, to, selection)?,
            Some(clock) => {
                let what = (ScheduleStep::Prefetch(self.copy), self.to);
                let prefetch = |queue: &mut dyn Queue| queue.prefetch_slices(from, to, selection);
                clock.time(lane, Stream::Prefetch, what, prefetch)?
            }
        };
        Ok(())
    }

    /// Issues the copy for the first time, and keeps the route that works.
    fn find_route(&mut self) -> Result<(), BackendError> {
        self.regions.done = self.event(self.to)?;
        if self.direct(self.to, Stream::Upload)? {
            self.regions.route = Route::Pull;
            return Ok(());
        }
        // From here on all of the bytes are copied as they are.
        let packed = |selection: &SliceSelection| selection.layout != Layout::Plain;
        if self.regions.selection.as_ref().is_some_and(packed) {
            let backend = self.lanes.get(self.to).map_or("", |lane| lane.backend.name()).to_owned();
            let reason = "the backend does not reach a weight that it wants packed".to_owned();
            return Err(BackendError::Failed { backend, what: "copying slices", reason });
        }
        self.regions.done = self.event(self.from)?;
        if self.direct(self.from, Stream::Download)? {
            self.regions.route = Route::Push;
            return Ok(());
        }
        let bytes = self.regions.from.bytes;
        self.regions.done = self.event(self.to)?;
        if let Some(lane) = self.lanes.get(self.from) {
            let staging = Region::new(lane.backend.staging(bytes)?, 0, bytes)?;
            self.regions.route = Route::Staged { staging, filled: self.event(self.from)? };
            if self.via_staging()? {
                return Ok(());
            }
        }
        self.regions.route = Route::Host(vec![0; bytes]);
        self.regions.done = None;
        self.via_host()
    }

    fn event(&self, lane: usize) -> Result<Option<Arc<dyn Event>>, BackendError> {
        self.lanes.get(lane).map_or(Ok(None), Lane::event)
    }

    /// From source to target on one queue; `false` if the backend cannot reach both.
    fn direct(&mut self, lane: usize, stream: Stream) -> Result<bool, BackendError> {
        let waits = self.waits.clone();
        let CopyRegions { from, to, done, .. } = &*self.regions;
        let (from, to, done) = (from.clone(), to.clone(), done.clone());
        // Only the backend that reads the copy has the indices.
        let selection = if lane == self.to { self.regions.selection.take() } else { None };
        let Some(mut selection) = selection else {
            return self.enqueue(lane, stream, &waits, done, |queue| queue.copy(&from, &to));
        };
        let copied =
            self.enqueue(lane, stream, &waits, done, |queue| queue.copy_slices(&from, &to, &mut selection));
        selection.prefetched = false;
        self.regions.selection = Some(selection);
        copied
    }

    /// Waits, copies and records on one queue; `false` if the backend cannot reach both regions.
    fn enqueue(
        &mut self,
        number: usize,
        stream: Stream,
        waits: &[Option<Arc<dyn Event>>],
        done: Option<Arc<dyn Event>>,
        copy: impl FnOnce(&mut dyn Queue) -> Result<bool, BackendError>,
    ) -> Result<bool, BackendError> {
        let stream = if self.prefetch && stream == Stream::Upload { Stream::Prefetch } else { stream };
        let Some(lane) = self.lanes.get_mut(number) else { return Ok(false) };
        for event in waits.iter().flatten() {
            lane.queue(stream).wait(&**event)?;
        }
        let copied = match self.clock {
            None => copy(lane.queue(stream))?,
            Some(clock) => {
                let what = (ScheduleStep::Copy(self.copy), number);
                clock.time(lane, stream, what, copy)?
            }
        };
        if copied && let Some(done) = &done {
            lane.queue(stream).record(&**done)?;
        }
        Ok(copied)
    }

    /// Through staging memory; `false` if one of the backends cannot reach it.
    fn via_staging(&mut self) -> Result<bool, BackendError> {
        let CopyRegions { from, to, done, route: Route::Staged { staging, filled }, .. } = &*self.regions
        else {
            return Ok(false);
        };
        let (from, to, staging) = (from.clone(), to.clone(), staging.clone());
        let (done, filled) = (done.clone(), filled.clone());
        let [source, free, _] = self.waits.clone();
        // The previous run's copy must have left the staging memory.
        let waits = [source, done.clone()];
        let sent = self.enqueue(self.from, Stream::Download, &waits, filled.clone(), |queue| {
            queue.copy(&from, &staging)
        })?;
        let pull = |queue: &mut dyn Queue| queue.copy(&staging, &to);
        Ok(sent && self.enqueue(self.to, Stream::Upload, &[free, filled], done, pull)?)
    }

    /// Read and written by the host, which waits.
    fn via_host(&mut self) -> Result<(), BackendError> {
        let Route::Host(bytes) = &mut self.regions.route else { return Ok(()) };
        let [source, free, _] = &self.waits;
        let begin = Mark::Host(Instant::now());
        if let Some(lane) = self.lanes.get_mut(self.from) {
            let queue = lane.queue(Stream::Download);
            if let Some(event) = source {
                queue.wait(&**event)?;
            }
            queue.read(&self.regions.from, bytes)?;
        }
        if let Some(lane) = self.lanes.get_mut(self.to) {
            let queue = lane.queue(Stream::Upload);
            if let Some(event) = free {
                queue.wait(&**event)?;
            }
            queue.write(&self.regions.to, bytes)?;
            queue.synchronize()?;
        }
        if let Some(clock) = self.clock {
            let what = (ScheduleStep::Copy(self.copy), self.to);
            clock.add(what, Stream::Upload, [begin, Mark::Host(Instant::now())]);
        }
        Ok(())
    }
}

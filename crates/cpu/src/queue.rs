//! Queues and events. The backend is synchronous: every call returns after its work is done.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use quadriga_graph::Tensor;
use quadriga_runtime::{BackendError, Event, Layout, Program, Queue, Region, check_range};

use crate::NAME;
use crate::buffer;
use crate::program::CpuProgram;
use crate::state::BackendInner;
use crate::weights;

/// A queue that runs its work immediately.
pub(crate) struct CpuQueue {
    pub(crate) inner: Arc<BackendInner>,
}

fn foreign(what: &'static str) -> BackendError {
    BackendError::Foreign { backend: NAME.into(), what }
}

fn check(region: &Region, bytes: usize) -> Result<(), BackendError> {
    if region.bytes != bytes {
        return Err(BackendError::SizeMismatch { backend: NAME.into(), from: bytes, to: region.bytes });
    }
    check_range(&*region.buffer, region.offset, bytes)
}

impl Queue for CpuQueue {
    fn write(&mut self, to: &Region, bytes: &[u8]) -> Result<(), BackendError> {
        check(to, bytes.len())?;
        to.buffer.write(to.offset, bytes)
    }

    fn read(&mut self, from: &Region, into: &mut [u8]) -> Result<(), BackendError> {
        check(from, into.len())?;
        from.buffer.read(from.offset, into)
    }

    fn copy(&mut self, from: &Region, to: &Region) -> Result<bool, BackendError> {
        buffer::copy(from, to)
    }

    fn load_slice(
        &mut self,
        weight: &Tensor,
        layout: Layout,
        index: usize,
        from: &Region,
        to: &Region,
    ) -> Result<(), BackendError> {
        let mut bytes = vec![0; from.bytes];
        self.read(from, &mut bytes)?;
        weights::load_slice(&self.inner, weight, layout, index, &bytes, to)
    }

    fn run(&mut self, program: &mut dyn Program) -> Result<(), BackendError> {
        let program = program.as_any().downcast_mut::<CpuProgram>().ok_or_else(|| foreign("program"))?;
        program.run(&self.inner, false)
    }

    fn run_timed(&mut self, program: &mut dyn Program) -> Result<(), BackendError> {
        let program = program.as_any().downcast_mut::<CpuProgram>().ok_or_else(|| foreign("program"))?;
        program.run(&self.inner, true)
    }

    fn record(&mut self, event: &dyn Event) -> Result<(), BackendError> {
        let event = event.as_any().downcast_ref::<CpuEvent>().ok_or_else(|| foreign("event"))?;
        if event.timing {
            *event.at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
        Ok(())
    }

    fn wait(&mut self, event: &dyn Event) -> Result<(), BackendError> {
        event.wait()
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        Ok(())
    }
}

/// An event, complete as soon as it is recorded.
pub(crate) struct CpuEvent {
    timing: bool,
    at: Mutex<Option<Instant>>,
}

impl CpuEvent {
    pub(crate) fn new(timing: bool) -> CpuEvent {
        CpuEvent { timing, at: Mutex::new(None) }
    }

    fn at(&self) -> Option<Instant> {
        *self.at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Event for CpuEvent {
    fn is_done(&self) -> Result<bool, BackendError> {
        Ok(true)
    }

    fn wait(&self) -> Result<(), BackendError> {
        Ok(())
    }

    fn seconds_since(&self, earlier: &dyn Event) -> Option<f64> {
        let earlier = earlier.as_any().downcast_ref::<CpuEvent>()?.at()?;
        Some(self.at()?.saturating_duration_since(earlier).as_secs_f64())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

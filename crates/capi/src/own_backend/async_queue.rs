//! Queues and events of backends whose queues go on working.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use quadriga::runtime::{BackendError, Event, Program, Queue, Region, check_range};

use super::memory::OwnBuffer;
use super::program::{OwnProgram, OwnWork};
use super::shared::{QueueFunctions, Shared};
use crate::status::{QD_STATUS_END, QD_STATUS_OK, QD_STATUS_OUT_OF_MEMORY, qd_error, qd_status};

/// A queue of the caller's device.
pub(super) struct AsyncQueue {
    shared: Arc<Shared>,
    functions: QueueFunctions,
    queue: *mut c_void,
}

// SAFETY: the address is only given back to the caller's functions, which may be called from any thread.
unsafe impl Send for AsyncQueue {}

/// What a function that makes something returned, or why it did not.
fn made(
    shared: &Shared,
    what: &'static str,
    pointer: *mut c_void,
    error: &qd_error,
) -> Result<*mut c_void, BackendError> {
    if !pointer.is_null() {
        return Ok(pointer);
    }
    let status = if error.code == QD_STATUS_OK { QD_STATUS_OUT_OF_MEMORY } else { error.code };
    Err(shared.failed(what, status, error, 0))
}

impl AsyncQueue {
    pub(super) fn new(shared: &Arc<Shared>, functions: QueueFunctions) -> Result<AsyncQueue, BackendError> {
        let mut error = qd_error::empty();
        let queue = (functions.new)(shared.table.context, &raw mut error);
        let queue = made(shared, "making a queue", queue, &error)?;
        Ok(AsyncQueue { shared: Arc::clone(shared), functions, queue })
    }

    fn own<'r>(&self, region: &'r Region) -> Result<&'r OwnBuffer, BackendError> {
        let foreign = || BackendError::Foreign { backend: self.shared.name.clone(), what: "buffer" };
        OwnBuffer::of(&self.shared, region).ok_or_else(foreign)
    }

    fn call(
        &self,
        what: &'static str,
        function: impl FnOnce(*mut c_void, *mut c_void, *mut qd_error) -> qd_status,
    ) -> Result<(), BackendError> {
        self.shared.call(what, |context, error| function(context, self.queue, error))
    }
}

impl Drop for AsyncQueue {
    fn drop(&mut self) {
        // A failure was reported by the calls that wait; what is queued must end before the queue does.
        let _ = self.synchronize();
        (self.functions.free)(self.shared.table.context, self.queue);
    }
}

impl Queue for AsyncQueue {
    fn write(&mut self, to: &Region, bytes: &[u8]) -> Result<(), BackendError> {
        let buffer = self.own(to)?;
        check_range(buffer, to.offset, bytes.len())?;
        let (pointer, write, data) = (buffer.pointer, self.functions.write, bytes.as_ptr().cast());
        self.call("writing", |context, queue, error| {
            write(context, queue, pointer, to.offset, data, bytes.len(), error)
        })
    }

    fn read(&mut self, from: &Region, into: &mut [u8]) -> Result<(), BackendError> {
        let buffer = self.own(from)?;
        check_range(buffer, from.offset, into.len())?;
        let (pointer, read, data) = (buffer.pointer, self.functions.read, into.as_mut_ptr().cast());
        self.call("reading", |context, queue, error| {
            read(context, queue, pointer, from.offset, data, into.len(), error)
        })
    }

    fn copy(&mut self, from: &Region, to: &Region) -> Result<bool, BackendError> {
        match (OwnBuffer::of(&self.shared, from), OwnBuffer::of(&self.shared, to)) {
            (Some(source), Some(target)) => {
                check_range(target, to.offset, from.bytes)?;
                let (source, target, copy) = (source.pointer, target.pointer, self.functions.copy);
                self.call("copying", |context, queue, error| {
                    copy(context, queue, source, from.offset, target, to.offset, from.bytes, error)
                })?;
                Ok(true)
            }
            // Memory of the host: the bytes are read before the call returns.
            (None, Some(_)) if from.buffer.is_host() => {
                let mut bytes = vec![0; from.bytes];
                from.buffer.read(from.offset, &mut bytes)?;
                self.write(to, &bytes)?;
                Ok(true)
            }
            (Some(_), None) if to.buffer.is_host() => {
                let mut bytes = vec![0; from.bytes];
                self.read(from, &mut bytes)?;
                to.buffer.write(to.offset, &bytes)?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    fn run(&mut self, program: &mut dyn Program) -> Result<(), BackendError> {
        let program = OwnProgram::of(&self.shared, program)?;
        let OwnWork::Program(program) = program.work else {
            return Err(BackendError::Foreign { backend: self.shared.name.clone(), what: "program" });
        };
        let run = self.functions.run;
        self.call("running", |context, queue, error| run(context, queue, program, error))
    }

    fn record(&mut self, event: &dyn Event) -> Result<(), BackendError> {
        let foreign = || BackendError::Foreign { backend: self.shared.name.clone(), what: "event" };
        let event = event.as_any().downcast_ref::<AsyncEvent>().ok_or_else(foreign)?;
        if !Arc::ptr_eq(&event.shared, &self.shared) {
            return Err(foreign());
        }
        let record = self.functions.event_record;
        self.call("recording an event", |context, queue, error| record(context, queue, event.event, error))
    }

    fn wait(&mut self, event: &dyn Event) -> Result<(), BackendError> {
        match event.as_any().downcast_ref::<AsyncEvent>() {
            Some(own) if Arc::ptr_eq(&own.shared, &self.shared) => {
                let wait = self.functions.event_wait;
                self.call("waiting for an event", |context, queue, error| {
                    wait(context, queue, own.event, error)
                })
            }
            // An event of another backend: the host waits for it.
            _ => event.wait(),
        }
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        let synchronize = self.functions.synchronize;
        self.call("synchronizing", |context, queue, error| synchronize(context, queue, error))
    }
}

/// An event of the caller's device.
pub(super) struct AsyncEvent {
    shared: Arc<Shared>,
    functions: QueueFunctions,
    event: *mut c_void,
}

// SAFETY: the address is only given back to the caller's functions, which may be called from any thread.
unsafe impl Send for AsyncEvent {}
// SAFETY: as above.
unsafe impl Sync for AsyncEvent {}

impl AsyncEvent {
    pub(super) fn new(shared: &Arc<Shared>, functions: QueueFunctions) -> Result<AsyncEvent, BackendError> {
        let mut error = qd_error::empty();
        let event = (functions.event_new)(shared.table.context, &raw mut error);
        let event = made(shared, "making an event", event, &error)?;
        Ok(AsyncEvent { shared: Arc::clone(shared), functions, event })
    }
}

impl Drop for AsyncEvent {
    fn drop(&mut self) {
        (self.functions.event_free)(self.shared.table.context, self.event);
    }
}

impl Event for AsyncEvent {
    fn is_done(&self) -> Result<bool, BackendError> {
        let mut error = qd_error::empty();
        match (self.functions.event_query)(self.shared.table.context, self.event, &raw mut error) {
            QD_STATUS_END => Ok(true),
            QD_STATUS_OK => Ok(false),
            status => Err(self.shared.failed("asking for an event", status, &error, 0)),
        }
    }

    fn wait(&self) -> Result<(), BackendError> {
        let synchronize = self.functions.event_synchronize;
        self.shared.call("waiting for an event", |context, error| synchronize(context, self.event, error))
    }

    fn seconds_since(&self, _earlier: &dyn Event) -> Option<f64> {
        None
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

//! Queues and events of backends whose work is done when a function returns.

use std::any::Any;
use std::sync::Arc;

use quadriga::runtime::{BackendError, Event, Program, Queue, Region, check_range};

use super::memory::OwnBuffer;
use super::program::{OwnProgram, OwnWork};
use super::shared::{Compute, Shared};

/// A queue that does everything at once.
pub(super) struct OwnQueue {
    pub(super) shared: Arc<Shared>,
}

impl Queue for OwnQueue {
    fn write(&mut self, to: &Region, bytes: &[u8]) -> Result<(), BackendError> {
        to.buffer.write(to.offset, bytes)
    }

    fn read(&mut self, from: &Region, into: &mut [u8]) -> Result<(), BackendError> {
        from.buffer.read(from.offset, into)
    }

    fn copy(&mut self, from: &Region, to: &Region) -> Result<bool, BackendError> {
        if let (Some(source), Some(target), Some(copy)) =
            (OwnBuffer::of(&self.shared, from), OwnBuffer::of(&self.shared, to), self.shared.table.copy)
        {
            check_range(target, to.offset, from.bytes)?;
            let (source, target) = (source.pointer, target.pointer);
            self.shared.call("copying", |context, error| {
                copy(context, source, from.offset, target, to.offset, from.bytes, error)
            })?;
            return Ok(true);
        }
        let reachable =
            |region: &Region| OwnBuffer::of(&self.shared, region).is_some() || region.buffer.is_host();
        if !reachable(from) || !reachable(to) {
            return Ok(false);
        }
        let mut bytes = vec![0; from.bytes];
        from.buffer.read(from.offset, &mut bytes)?;
        to.buffer.write(to.offset, &bytes)?;
        Ok(true)
    }

    fn run(&mut self, program: &mut dyn Program) -> Result<(), BackendError> {
        let program = OwnProgram::of(&self.shared, program)?;
        match (&program.work, self.shared.functions.compute) {
            (OwnWork::Program(program), Compute::Programs { run, .. }) => {
                self.shared.call("running", |context, error| run(context, *program, error))
            }
            (OwnWork::Nodes(nodes), Compute::Nodes(run)) => {
                for node in nodes {
                    self.shared.call("running", |context, error| run(context, node.node(), error))?;
                }
                Ok(())
            }
            _ => Err(BackendError::Foreign { backend: self.shared.name.clone(), what: "program" }),
        }
    }

    fn record(&mut self, _event: &dyn Event) -> Result<(), BackendError> {
        Ok(())
    }

    fn wait(&mut self, event: &dyn Event) -> Result<(), BackendError> {
        event.wait()
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        Ok(())
    }
}

/// All work is done when a call returns.
pub(super) struct OwnEvent;

impl Event for OwnEvent {
    fn is_done(&self) -> Result<bool, BackendError> {
        Ok(true)
    }

    fn wait(&self) -> Result<(), BackendError> {
        Ok(())
    }

    fn seconds_since(&self, _earlier: &dyn Event) -> Option<f64> {
        None
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

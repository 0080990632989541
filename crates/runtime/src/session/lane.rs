//! A lane: what one backend does, one thing after the other, and what travels to and from it meanwhile.

use std::sync::Arc;

use crate::{Backend, BackendError, Event, Queue};

/// The queues of a backend.
pub(crate) struct Lane {
    pub(crate) backend: Arc<dyn Backend>,
    /// Runs splits.
    pub(crate) compute: Box<dyn Queue>,
    /// Present on a backend that works while the host goes on.
    pub(crate) traffic: Option<Traffic>,
}

/// What an asynchronous backend needs beside its compute queue.
pub(crate) struct Traffic {
    /// Brings inputs and copies in.
    pub(crate) incoming: Box<dyn Queue>,
    /// Brings what is there before the run, weights that are lent and states as they were: in the order in which they are
    /// needed, since a device makes its copies one after another, and so that nothing else has to wait behind them.
    pub(crate) ahead: Box<dyn Queue>,
    /// Pushes copies out.
    pub(crate) outgoing: Box<dyn Queue>,
    /// Recorded in the compute queue at the start of every run that something may wait for: everything of earlier runs is
    /// done.
    pub(crate) start: Arc<dyn Event>,
    /// Recorded in the incoming queue when the inputs of a run are on their way.
    pub(crate) inputs: Arc<dyn Event>,
}

impl Lane {
    pub(crate) fn new(backend: &Arc<dyn Backend>, asynchronous: bool) -> Result<Lane, BackendError> {
        let traffic = if asynchronous {
            Some(Traffic {
                incoming: backend.queue()?,
                ahead: backend.queue()?,
                outgoing: backend.queue()?,
                start: backend.event(false)?,
                inputs: backend.event(false)?,
            })
        } else {
            None
        };
        Ok(Lane { backend: Arc::clone(backend), compute: backend.queue()?, traffic })
    }

    /// The queue that brings things in.
    pub(crate) fn incoming(&mut self) -> &mut dyn Queue {
        match &mut self.traffic {
            Some(traffic) => &mut *traffic.incoming,
            None => &mut *self.compute,
        }
    }

    /// The queue that brings what is there before a run.
    pub(crate) fn ahead(&mut self) -> &mut dyn Queue {
        match &mut self.traffic {
            Some(traffic) => &mut *traffic.ahead,
            None => &mut *self.compute,
        }
    }

    /// The queue that sends things out.
    pub(crate) fn outgoing(&mut self) -> &mut dyn Queue {
        match &mut self.traffic {
            Some(traffic) => &mut *traffic.outgoing,
            None => &mut *self.compute,
        }
    }

    /// The event that says that everything of earlier runs is done; none where that goes without saying.
    pub(crate) fn start(&self) -> Option<Arc<dyn Event>> {
        self.traffic.as_ref().map(|traffic| Arc::clone(&traffic.start))
    }

    /// Waits for all queues; the first failure.
    pub(crate) fn synchronize(&mut self) -> Result<(), BackendError> {
        let compute = self.compute.synchronize();
        let Some(traffic) = &mut self.traffic else { return compute };
        let incoming = traffic.incoming.synchronize().and(traffic.ahead.synchronize());
        let outgoing = traffic.outgoing.synchronize();
        incoming.and(compute).and(outgoing)
    }
}

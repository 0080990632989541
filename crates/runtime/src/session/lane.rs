//! A lane: the queues of one backend. Its splits run one after another in the compute queue; copies and inputs have
//! queues of their own, so that they overlap with it.

use std::sync::Arc;

use crate::trace::Stream;
use crate::{Backend, BackendError, Event, Queue};

/// The queues of a backend.
pub(crate) struct Lane {
    pub(crate) backend: Arc<dyn Backend>,
    /// Runs splits.
    pub(crate) compute: Box<dyn Queue>,
    /// Only on an asynchronous backend; others do everything in the compute queue.
    pub(crate) transfers: Option<TransferQueues>,
}

/// The transfer queues and events of an asynchronous backend.
pub(crate) struct TransferQueues {
    /// Inputs, and copies of results of other backends.
    pub(crate) upload: Box<dyn Queue>,
    /// Copies of tensors that are there before the run (streamed weights, states), in the order of use: a device makes its
    /// copies one after another, and uploads must not wait behind them.
    pub(crate) prefetch: Box<dyn Queue>,
    /// Copies that this backend sends to others.
    pub(crate) download: Box<dyn Queue>,
    /// Recorded in the compute queue at the start of a run that a transfer may wait for: all earlier runs are done.
    pub(crate) start: Arc<dyn Event>,
    /// Recorded in the upload queue after the inputs of a run.
    pub(crate) inputs: Arc<dyn Event>,
}

impl Lane {
    pub(crate) fn new(backend: &Arc<dyn Backend>, asynchronous: bool) -> Result<Lane, BackendError> {
        let transfers = if asynchronous {
            Some(TransferQueues {
                upload: backend.queue()?,
                prefetch: backend.queue()?,
                download: backend.queue()?,
                start: backend.event(false)?,
                inputs: backend.event(false)?,
            })
        } else {
            None
        };
        Ok(Lane { backend: Arc::clone(backend), compute: backend.queue()?, transfers })
    }

    /// Whether queues return before their work is done.
    pub(crate) fn is_asynchronous(&self) -> bool {
        self.transfers.is_some()
    }

    /// The queue of a stream; a synchronous backend has only one.
    pub(crate) fn queue(&mut self, stream: Stream) -> &mut dyn Queue {
        match (stream, &mut self.transfers) {
            (Stream::Upload, Some(transfers)) => &mut *transfers.upload,
            (Stream::Prefetch, Some(transfers)) => &mut *transfers.prefetch,
            (Stream::Download, Some(transfers)) => &mut *transfers.download,
            (Stream::Compute, _) | (_, None) => &mut *self.compute,
        }
    }

    /// The event that all earlier runs are done; a synchronous backend needs none.
    pub(crate) fn start(&self) -> Option<Arc<dyn Event>> {
        self.transfers.as_ref().map(|transfers| Arc::clone(&transfers.start))
    }

    /// Records anew that all earlier runs are done. Otherwise the event of a failed run would make the uploads of the next one
    /// fail, too.
    pub(crate) fn renew_start(&mut self) {
        if let Some(transfers) = &self.transfers {
            // If this fails, so will the next run.
            let _ = self.compute.record(&*transfers.start);
        }
    }

    /// Lets the compute queue wait for everything in the upload queue.
    pub(crate) fn compute_waits_for_uploads(&mut self) -> Result<(), BackendError> {
        let Some(transfers) = &mut self.transfers else { return Ok(()) };
        transfers.upload.record(&*transfers.inputs)?;
        self.compute.wait(&*transfers.inputs)
    }

    /// A new event, if the backend is asynchronous.
    pub(crate) fn event(&self) -> Result<Option<Arc<dyn Event>>, BackendError> {
        if self.is_asynchronous() { self.backend.event(false).map(Some) } else { Ok(None) }
    }

    /// Waits for all queues; the first failure.
    pub(crate) fn synchronize(&mut self) -> Result<(), BackendError> {
        let compute = self.compute.synchronize();
        let Some(transfers) = &mut self.transfers else { return compute };
        let uploads = transfers.upload.synchronize().and(transfers.prefetch.synchronize());
        let downloads = transfers.download.synchronize();
        uploads.and(compute).and(downloads)
    }
}

//! Uploading slices of weights.

use super::session::Session;
use super::slice_uploads::{SliceUpload, WeightSlice};
use crate::RuntimeError;

impl Session {
    /// Starts to copy new bytes for slices of weights to the device that holds them, while it computes. The weights must
    /// have no data of their own, and be on one backend. They change in [`Session::apply_uploads`]; until then no run must
    /// read these slices if their old bytes are no longer wanted. A weight counts as set from its first slice on.
    ///
    /// `None` if as many bytes are in flight as [may be](Session::limit_uploads). Nothing waits for an upload: neither a run nor [`Session::wait`].
    pub fn upload(&mut self, slices: &[WeightSlice<'_>]) -> Result<Option<SliceUpload>, RuntimeError> {
        self.uploads.start(&self.memory.weights, &self.lanes, slices)
    }

    /// Sets the most bytes of uploads to one device that are in flight at a time, which is the memory that they have there; at first
    /// [`DEFAULT_UPLOAD_BYTES`](crate::DEFAULT_UPLOAD_BYTES). An upload of more bytes goes alone.
    pub fn limit_uploads(&mut self, bytes: u64) {
        self.uploads.limit(bytes);
    }

    /// Writes the uploads that have arrived into their weights, before the next run, and returns them in the order in which
    /// they were started. One that failed has changed nothing that was wanted, and may be started again. Does not wait,
    /// unless `all` is set: then for all uploads that are in flight.
    pub fn apply_uploads(&mut self, all: bool) -> Vec<(SliceUpload, Result<(), RuntimeError>)> {
        self.uploads.apply(&mut self.lanes, all)
    }
}

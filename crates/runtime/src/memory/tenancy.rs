//! A tensor that has memory, and the backend that was told so.

use quadriga_graph::Tensor;
use std::sync::Arc;

use crate::{Backend, BackendError, Region};

/// While this lives, the backend knows that the tensor has its place there; then it is told that the place is released.
#[derive(Debug)]
pub(crate) struct Tenancy {
    backend: Arc<dyn Backend>,
    tensor: Tensor,
    region: Region,
}

impl Tenancy {
    /// Tells the backend. If it refuses, nothing needs to be taken back.
    pub(crate) fn new(
        backend: &Arc<dyn Backend>,
        tensor: &Tensor,
        region: Region,
    ) -> Result<Tenancy, BackendError> {
        backend.placed(tensor, &region)?;
        Ok(Tenancy { backend: Arc::clone(backend), tensor: tensor.clone(), region })
    }

    /// Where the tensor is.
    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    /// The tensor.
    pub(crate) fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

impl Drop for Tenancy {
    fn drop(&mut self) {
        self.backend.released(&self.tensor, &self.region);
    }
}

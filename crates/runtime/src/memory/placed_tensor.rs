//! A tensor with memory, and the backend's hooks for it.

use quadriga_graph::Tensor;
use std::sync::Arc;

use crate::{Backend, BackendError, Region};

/// Calls [`Backend::placed`] when it is made and [`Backend::released`] when it is dropped, so that the two are paired.
#[derive(Debug)]
pub(crate) struct PlacedTensor {
    backend: Arc<dyn Backend>,
    tensor: Tensor,
    region: Region,
}

impl PlacedTensor {
    /// Calls [`Backend::placed`]; after an error [`Backend::released`] is not called.
    pub(crate) fn new(
        backend: &Arc<dyn Backend>,
        tensor: &Tensor,
        region: Region,
    ) -> Result<PlacedTensor, BackendError> {
        backend.placed(tensor, &region)?;
        Ok(PlacedTensor { backend: Arc::clone(backend), tensor: tensor.clone(), region })
    }

    /// The tensor's bytes.
    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    /// The tensor.
    pub(crate) fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

impl Drop for PlacedTensor {
    fn drop(&mut self) {
        self.backend.released(&self.tensor, &self.region);
    }
}

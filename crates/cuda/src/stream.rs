//! A CUDA stream.

use std::sync::Arc;

use cudarc::driver::sys;
use quadriga_runtime::BackendError;

use crate::context::Context;

/// A stream that is destroyed with its owner.
pub(crate) struct CudaStream {
    context: Arc<Context>,
    pub(crate) handle: sys::CUstream,
}

// SAFETY: a stream may be used from any thread with its context current.
unsafe impl Send for CudaStream {}

impl CudaStream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<CudaStream, BackendError> {
        context.bind()?;
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle.
        context.check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut handle, flags) })?;
        Ok(CudaStream { context: Arc::clone(context), handle })
    }

    /// Waits for all work in the stream.
    pub(crate) fn synchronize(&self) -> Result<(), BackendError> {
        // SAFETY: the stream is live.
        self.context.check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.handle) })
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: created by `new`, destroyed only here. Work in flight is waited for, so that buffers dropped
            // after the stream are no longer in use.
            unsafe {
                let _ = sys::cuStreamSynchronize(self.handle);
                let _ = sys::cuStreamDestroy_v2(self.handle);
            }
        }
    }
}

//! The devices of the tests.
#![allow(dead_code, reason = "not every test needs all of them")]

use std::sync::Arc;

use quadriga_runtime::Backend;

/// The first GPU; without one the test says so, and passes.
pub(crate) fn device() -> Option<Arc<dyn Backend>> {
    match quadriga_cuda::Backend::new(0) {
        Ok(backend) => Some(Arc::new(backend)),
        Err(reason) => {
            println!("skipped, there is no GPU: {reason}");
            None
        }
    }
}

/// The first GPU with a context of its own; without one the test says so, and passes.
pub(crate) fn device_with_own_context() -> Option<Arc<dyn Backend>> {
    match quadriga_cuda::Backend::builder(0).own_context(true).build() {
        Ok(backend) => Some(Arc::new(backend)),
        Err(reason) => {
            println!("skipped, there is no GPU: {reason}");
            None
        }
    }
}

/// The host's CPU with two threads.
pub(crate) fn cpu() -> Arc<dyn Backend> {
    Arc::new(quadriga_cpu::Backend::builder().threads(2).build().unwrap())
}

//! Memory of the caller's device.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use quadriga::runtime::{BackendError, Buffer, Region, Usage, check_range};

use super::shared::Shared;

/// Memory of the caller's device.
pub(super) struct OwnBuffer {
    pub(super) shared: Arc<Shared>,
    pub(super) pointer: *mut c_void,
    pub(super) bytes: usize,
    pub(super) usage: Usage,
}

impl OwnBuffer {
    /// The buffer of a region, if it is one of this backend.
    pub(super) fn of<'r>(shared: &Arc<Shared>, region: &'r Region) -> Option<&'r OwnBuffer> {
        let buffer = region.buffer.as_any().downcast_ref::<OwnBuffer>()?;
        Arc::ptr_eq(&buffer.shared, shared).then_some(buffer)
    }
}

// SAFETY: the address is only given back to the caller's functions, which may be called from any thread.
unsafe impl Send for OwnBuffer {}
// SAFETY: as above.
unsafe impl Sync for OwnBuffer {}

impl Drop for OwnBuffer {
    fn drop(&mut self) {
        (self.shared.functions.free)(self.shared.table.context, self.pointer);
    }
}

impl Buffer for OwnBuffer {
    fn backend(&self) -> &str {
        &self.shared.name
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn is_host(&self) -> bool {
        false
    }

    fn address(&self) -> u64 {
        self.shared.table.address.map_or(0, |address| address(self.shared.table.context, self.pointer))
    }

    fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), BackendError> {
        check_range(self, offset, into.len())?;
        self.shared.call("reading", |context, error| {
            let data = into.as_mut_ptr().cast();
            (self.shared.functions.read)(context, self.pointer, offset, data, into.len(), error)
        })
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<(), BackendError> {
        check_range(self, offset, from.len())?;
        self.shared.call("writing", |context, error| {
            let data = from.as_ptr().cast();
            (self.shared.functions.write)(context, self.pointer, offset, data, from.len(), error)
        })
    }

    fn clear(&self, offset: usize, len: usize) -> Result<(), BackendError> {
        check_range(self, offset, len)?;
        match self.shared.table.clear {
            Some(clear) => self
                .shared
                .call("clearing", |context, error| clear(context, self.pointer, offset, len, error)),
            None => self.write(offset, &vec![0; len]),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

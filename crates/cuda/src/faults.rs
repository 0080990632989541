//! Device-side fault reports: how a kernel reports bad data, such as a row index out of range.
//!
//! The kernel skips the access and stores a fault code in a word of pinned host memory (the first report wins). Whoever
//! waits for the work reads the word, and finds node and reason in a table.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use quadriga_runtime::BackendError;

use crate::buffer::PinnedBuffer;
use crate::context::Context;

pub(crate) struct Faults {
    memory: PinnedBuffer,
    /// Node and reason of each fault code: code `i` is at `i − 1`, and 0 means no fault.
    table: Mutex<Vec<(String, &'static str)>>,
}

impl Faults {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Faults, BackendError> {
        Ok(Faults { memory: PinnedBuffer::new(context, 4)?, table: Mutex::default() })
    }

    /// The code with which a kernel reports this fault.
    pub(crate) fn code(&self, node: &str, reason: &'static str) -> u32 {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = table.iter().position(|(n, r)| n == node && *r == reason) {
            return known as u32 + 1;
        }
        table.push((node.to_owned(), reason));
        table.len() as u32
    }

    /// The address of the fault word, for kernels.
    pub(crate) fn address(&self) -> u64 {
        self.memory.address() as u64
    }

    /// The fault reported since the last call, as an error.
    pub(crate) fn take(&self, backend: &str) -> Result<(), BackendError> {
        // SAFETY: the memory is four bytes, aligned by the driver to more than four, and lives as long as this; the
        // device writes it only with system-wide atomics.
        let word = unsafe { AtomicU32::from_ptr(self.memory.address().cast()) };
        if word.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let code = word.swap(0, Ordering::AcqRel);
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let (node, reason) = table
            .get((code as usize).wrapping_sub(1))
            .map_or(("unknown node", "bad data"), |(node, reason)| (node.as_str(), *reason));
        Err(BackendError::Node {
            backend: backend.to_owned(),
            node: node.to_owned(),
            reason: reason.to_owned(),
        })
    }
}

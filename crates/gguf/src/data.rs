//! Shared, immutable bytes.

use std::{fmt, sync::Arc};

/// A cheaply cloned handle on immutable bytes: a part of a file map or of memory, kept alive as long as it is used.
#[derive(Clone)]
pub struct Data {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    start: usize,
    len: usize,
}

impl Data {
    /// All bytes of `owner`.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Data {
        let len = (*owner).as_ref().len();
        Data { owner, start: 0, len }
    }

    /// A part of these bytes; `None` if it is not inside them.
    pub fn slice(&self, start: usize, len: usize) -> Option<Data> {
        let end = start.checked_add(len)?;
        (end <= self.len).then(|| Data { owner: self.owner.clone(), start: self.start + start, len })
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        (*self.owner).as_ref().get(self.start..self.start + self.len).unwrap_or_default()
    }
}

impl fmt::Debug for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Data({} bytes)", self.len)
    }
}

//! A shared handle on immutable bytes: a file map, a vector, or part of one.

use std::fmt;
use std::sync::Arc;

/// Immutable bytes with shared ownership. Cloning and slicing copy no bytes.
#[derive(Clone)]
pub struct Data {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    start: usize,
    len: usize,
}

impl Data {
    /// All the bytes of `owner`.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Data {
        let len = (*owner).as_ref().len();
        Data { owner, start: 0, len }
    }

    /// The bytes `start..start + len` of these, or `None` if that reaches past the end.
    pub fn slice(&self, start: usize, len: usize) -> Option<Data> {
        if start.checked_add(len)? > self.len {
            return None;
        }
        Some(Data { owner: Arc::clone(&self.owner), start: self.start + start, len })
    }

    /// The bytes; empty if the owner's `as_ref` has become shorter since the handle was made.
    pub fn bytes(&self) -> &[u8] {
        (*self.owner).as_ref().get(self.start..self.start + self.len).unwrap_or(&[])
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether two handles refer to the same bytes of the same owner.
    pub fn same(&self, other: &Data) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.owner), Arc::as_ptr(&other.owner))
            && self.start == other.start
            && self.len == other.len
    }
}

impl From<Vec<u8>> for Data {
    fn from(bytes: Vec<u8>) -> Data {
        Data::new(Arc::new(bytes))
    }
}

impl From<&[f32]> for Data {
    fn from(values: &[f32]) -> Data {
        Data::from(bytemuck::cast_slice::<f32, u8>(values).to_vec())
    }
}

impl From<&[i32]> for Data {
    fn from(values: &[i32]) -> Data {
        Data::from(bytemuck::cast_slice::<i32, u8>(values).to_vec())
    }
}

impl fmt::Debug for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Data({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_bounds_checked_and_share_the_owner() {
        let data = Data::from(vec![1u8, 2, 3, 4]);
        let part = data.slice(1, 2).unwrap();
        assert_eq!(part.bytes(), &[2, 3]);
        assert_eq!(part.slice(1, 1).unwrap().bytes(), &[3]);
        assert!(part.slice(1, 2).is_none());
        assert!(part.slice(usize::MAX, 2).is_none());
        assert!(part.same(&data.slice(1, 2).unwrap()));
        assert!(!part.same(&data));
    }
}

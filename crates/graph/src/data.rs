//! A shared handle on immutable bytes: a file map, a vector, or part of one.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

/// Immutable bytes with shared ownership, in one piece or several. Cloning, slicing and joining copy no bytes.
#[derive(Clone)]
pub struct Data {
    pieces: Pieces,
    len: usize,
}

#[derive(Clone)]
enum Pieces {
    One { owner: Arc<dyn AsRef<[u8]> + Send + Sync>, start: usize },
    Joined(Arc<[Data]>),
}

impl Data {
    /// All the bytes of `owner`.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Data {
        let len = (*owner).as_ref().len();
        Data { pieces: Pieces::One { owner, start: 0 }, len }
    }

    /// The bytes of several, one after the other. They stay where they are, until [`Data::bytes`] asks for them.
    pub fn joined(pieces: impl Into<Arc<[Data]>>) -> Data {
        let pieces = pieces.into();
        let len = pieces.iter().map(Data::len).sum();
        Data { pieces: Pieces::Joined(pieces), len }
    }

    /// The bytes `start..start + len` of these, or `None` if that reaches past the end or if these are joined.
    pub fn slice(&self, start: usize, len: usize) -> Option<Data> {
        let Pieces::One { owner, start: first } = &self.pieces else { return None };
        if start.checked_add(len)? > self.len {
            return None;
        }
        Some(Data { pieces: Pieces::One { owner: Arc::clone(owner), start: first + start }, len })
    }

    /// The piece of these that has all of the bytes `start..start + len`, and where they begin in it. `None` if they are in
    /// several pieces, or past the end.
    pub fn piece(&self, start: usize, len: usize) -> Option<(&Data, usize)> {
        let end = start.checked_add(len).filter(|end| *end <= self.len)?;
        let Pieces::Joined(pieces) = &self.pieces else { return Some((self, start)) };
        let mut first = 0;
        for piece in pieces.iter() {
            let next = first + piece.len();
            if start < next || len == 0 {
                return if end <= next { piece.piece(start - first, len) } else { None };
            }
            first = next;
        }
        None
    }

    /// The bytes: those of joined data are copied. Empty if the owner's `as_ref` has become shorter since the handle was
    /// made.
    pub fn bytes(&self) -> Cow<'_, [u8]> {
        match &self.pieces {
            Pieces::One { .. } => Cow::Borrowed(self.as_slice().unwrap_or_default()),
            Pieces::Joined(pieces) => {
                let mut all = Vec::with_capacity(self.len);
                pieces.iter().for_each(|piece| all.extend_from_slice(&piece.bytes()));
                Cow::Owned(all)
            }
        }
    }

    /// The bytes in their place; `None` for joined data, or if the owner's `as_ref` has become shorter since the handle was
    /// made.
    pub fn as_slice(&self) -> Option<&[u8]> {
        match &self.pieces {
            Pieces::One { owner, start } => (**owner).as_ref().get(*start..*start + self.len),
            Pieces::Joined(_) => None,
        }
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether two handles refer to the same bytes of the same owners.
    pub fn same(&self, other: &Data) -> bool {
        self.len == other.len
            && match (&self.pieces, &other.pieces) {
                (Pieces::One { owner: a, start: i }, Pieces::One { owner: b, start: j }) => {
                    std::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b)) && i == j
                }
                (Pieces::Joined(a), Pieces::Joined(b)) => {
                    a.len() == b.len() && a.iter().zip(b.iter()).all(|(a, b)| a.same(b))
                }
                _ => false,
            }
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
        assert_eq!(*part.bytes(), [2, 3]);
        assert_eq!(*part.slice(1, 1).unwrap().bytes(), [3]);
        assert!(part.slice(1, 2).is_none());
        assert!(part.slice(usize::MAX, 2).is_none());
        assert!(part.same(&data.slice(1, 2).unwrap()));
        assert!(!part.same(&data));
    }

    #[test]
    fn joined_data_is_the_same_if_its_pieces_are() {
        let data = Data::from(vec![1u8, 2, 3, 4]);
        let (first, last) = (data.slice(0, 1).unwrap(), data.slice(2, 2).unwrap());
        let joined = Data::joined(vec![last.clone(), first.clone(), last.clone()]);
        assert_eq!(*joined.bytes(), [3, 4, 1, 3, 4]);
        assert_eq!((joined.len(), joined.is_empty()), (5, false));
        assert!(joined.as_slice().is_none() && joined.slice(0, 1).is_none());
        assert!(joined.same(&Data::joined(vec![last.clone(), first.clone(), last.clone()])));
        assert!(!joined.same(&Data::joined(vec![first.clone(), last.clone(), last.clone()])));
        assert!(!joined.same(&Data::joined(vec![last.clone(), first.clone()])));
        assert!(!joined.same(&data.slice(0, 4).unwrap()));
        assert!(Data::joined(Vec::new()).bytes().is_empty());
    }
}

//! A shared handle on immutable bytes: a file map, a vector, or part of one.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::dtype::DType;
use crate::transposed::{transpose, transposed_type};

/// Immutable bytes with shared ownership, in one piece or several. Cloning, slicing, joining and transposing copy no bytes.
#[derive(Clone)]
pub struct Data {
    pieces: Pieces,
    len: usize,
}

/// An owner of bytes that are also kept elsewhere, as those of a mapped file.
pub trait PagedBytes: AsRef<[u8]> + Send + Sync {
    /// Gives back the memory of some of the bytes, which are not used for now. They are the same when they are used again.
    fn release(&self, bytes: Range<usize>);
}

/// Bytes between pieces that are not worth keeping when both pieces are released: rows of matrices of which other ranks have columns.
const NEAR: usize = 256 << 10;

#[derive(Clone)]
enum Owner {
    Plain(Arc<dyn AsRef<[u8]> + Send + Sync>),
    Paged(Arc<dyn PagedBytes>),
}

impl Owner {
    fn bytes(&self) -> &[u8] {
        match self {
            Owner::Plain(owner) => (**owner).as_ref(),
            Owner::Paged(owner) => (**owner).as_ref(),
        }
    }

    fn address(&self) -> *const () {
        match self {
            Owner::Plain(owner) => Arc::as_ptr(owner).cast(),
            Owner::Paged(owner) => Arc::as_ptr(owner).cast(),
        }
    }
}

#[derive(Clone)]
enum Pieces {
    One { owner: Owner, start: usize },
    Joined(Arc<[Data]>),
    Transposed(Arc<Transposed>),
}

/// Matrices that are transposed when their bytes are asked for.
struct Transposed {
    from: Data,
    dtype: DType,
    rows: usize,
    columns: usize,
}

impl Data {
    /// All the bytes of `owner`.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Data {
        let len = (*owner).as_ref().len();
        Data { pieces: Pieces::One { owner: Owner::Plain(owner), start: 0 }, len }
    }

    /// All the bytes of an owner that can give back their memory; [`Data::release`] tells it which.
    pub fn paged(owner: Arc<dyn PagedBytes>) -> Data {
        let len = (*owner).as_ref().len();
        Data { pieces: Pieces::One { owner: Owner::Paged(owner), start: 0 }, len }
    }

    /// `len` bytes that `owner` has; it is not asked for them before they are needed. If it then has fewer, this data is empty, as
    /// [`Data::bytes`] says.
    pub fn deferred(owner: Arc<dyn AsRef<[u8]> + Send + Sync>, len: usize) -> Data {
        Data { pieces: Pieces::One { owner: Owner::Plain(owner), start: 0 }, len }
    }

    /// Where the bytes are in the memory of their owners: the first and the number of each piece. `None` for transposed data.
    pub fn ranges(&self) -> Option<Vec<Range<usize>>> {
        match &self.pieces {
            Pieces::One { start, .. } => Some(std::iter::once(*start..*start + self.len).collect()),
            Pieces::Joined(pieces) => {
                let ranges: Option<Vec<_>> = pieces.iter().map(Data::ranges).collect();
                ranges.map(|ranges| ranges.into_iter().flatten().collect())
            }
            Pieces::Transposed(_) => None,
        }
    }

    /// The bytes of several, one after the other. They stay where they are, until [`Data::bytes`] asks for them.
    pub fn joined(pieces: impl Into<Arc<[Data]>>) -> Data {
        let pieces = pieces.into();
        let len = pieces.iter().map(Data::len).sum();
        Data { pieces: Pieces::Joined(pieces), len }
    }

    /// These bytes as matrices of `rows` × `columns` elements of type `dtype`, each of them transposed, and the type that the
    /// elements then have: that of floats stays, and blocks become F16. They are transposed whenever [`Data::bytes`] asks
    /// for them. `None` if the bytes are not whole matrices of a type that can be dequantized.
    pub fn transposed(self, dtype: DType, rows: usize, columns: usize) -> Option<(DType, Data)> {
        let to = transposed_type(dtype);
        let elements = rows.checked_mul(columns).filter(|_| dtype.is_computable())?;
        let matrix = dtype.row_bytes(elements).filter(|bytes| *bytes > 0)?;
        let count = self.len.is_multiple_of(matrix).then_some(self.len / matrix)?;
        let len = to.row_bytes(elements)?.checked_mul(count)?;
        let matrices = Transposed { from: self, dtype, rows, columns };
        Some((to, Data { pieces: Pieces::Transposed(Arc::new(matrices)), len }))
    }

    /// The bytes `start..start + len` of these, or `None` if that reaches past the end or if these are joined or transposed.
    pub fn slice(&self, start: usize, len: usize) -> Option<Data> {
        let Pieces::One { owner, start: first } = &self.pieces else { return None };
        if start.checked_add(len)? > self.len {
            return None;
        }
        Some(Data { pieces: Pieces::One { owner: owner.clone(), start: first + start }, len })
    }

    /// The piece of these that has all of the bytes `start..start + len`, and where they begin in it. `None` if they are in
    /// several pieces, transposed, or past the end.
    pub fn piece(&self, start: usize, len: usize) -> Option<(&Data, usize)> {
        let end = start.checked_add(len).filter(|end| *end <= self.len)?;
        let pieces = match &self.pieces {
            Pieces::One { .. } => return Some((self, start)),
            Pieces::Joined(pieces) => pieces,
            Pieces::Transposed(_) => return None,
        };
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

    /// The bytes: those of joined and transposed data are copied. Empty if the owner's `as_ref` has become shorter since the handle was
    /// made.
    pub fn bytes(&self) -> Cow<'_, [u8]> {
        match &self.pieces {
            Pieces::One { .. } => Cow::Borrowed(self.as_slice().unwrap_or_default()),
            Pieces::Joined(pieces) => {
                let mut all = Vec::with_capacity(self.len);
                pieces.iter().for_each(|piece| all.extend_from_slice(&piece.bytes()));
                Cow::Owned(all)
            }
            Pieces::Transposed(matrices) => {
                let Transposed { from, dtype, rows, columns } = &**matrices;
                Cow::Owned(transpose(*dtype, &from.bytes(), *rows, *columns))
            }
        }
    }

    /// The bytes in their place; `None` for joined and transposed data, or if the owner's `as_ref` has become shorter since the handle was
    /// made.
    pub fn as_slice(&self) -> Option<&[u8]> {
        match &self.pieces {
            Pieces::One { owner, start } => owner.bytes().get(*start..*start + self.len),
            Pieces::Joined(_) | Pieces::Transposed(_) => None,
        }
    }

    /// Says that these bytes are not used for now, since they were copied or packed: an owner that has them elsewhere, as a mapped file
    /// does, [gives their memory back](PagedBytes::release), with what is between pieces close to each other. Nothing happens where the
    /// bytes are nowhere else.
    pub fn release(&self) {
        let mut last: Option<(&Arc<dyn PagedBytes>, Range<usize>)> = None;
        self.visit_paged(&mut |owner, bytes| {
            match &mut last {
                Some((same, before))
                    if Arc::ptr_eq(same, owner)
                        && before.start <= bytes.start
                        && bytes.start <= before.end.saturating_add(NEAR) =>
                {
                    before.end = before.end.max(bytes.end);
                }
                _ => {
                    if let Some((owner, bytes)) = last.replace((owner, bytes)) {
                        owner.release(bytes);
                    }
                }
            };
        });
        if let Some((owner, bytes)) = last {
            owner.release(bytes);
        }
    }

    fn visit_paged<'d>(&'d self, visit: &mut dyn FnMut(&'d Arc<dyn PagedBytes>, Range<usize>)) {
        match &self.pieces {
            Pieces::One { owner: Owner::Paged(owner), start } => visit(owner, *start..*start + self.len),
            Pieces::One { owner: Owner::Plain(_), .. } => {}
            Pieces::Joined(pieces) => pieces.iter().for_each(|piece| piece.visit_paged(visit)),
            Pieces::Transposed(matrices) => matrices.from.visit_paged(visit),
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
                    std::ptr::addr_eq(a.address(), b.address()) && i == j
                }
                (Pieces::Joined(a), Pieces::Joined(b)) => {
                    a.len() == b.len() && a.iter().zip(b.iter()).all(|(a, b)| a.same(b))
                }
                (Pieces::Transposed(a), Pieces::Transposed(b)) => {
                    (a.dtype, a.rows, a.columns) == (b.dtype, b.rows, b.columns) && a.from.same(&b.from)
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

    /// Bytes whose owner notes what was released.
    struct Noted(Vec<u8>, std::sync::Mutex<Vec<Range<usize>>>);

    impl AsRef<[u8]> for Noted {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    impl PagedBytes for Noted {
        fn release(&self, bytes: Range<usize>) {
            self.1.lock().unwrap().push(bytes);
        }
    }

    #[test]
    fn pieces_that_are_close_to_each_other_are_released_together() {
        let owner = Arc::new(Noted(vec![7; 4 * NEAR], Default::default()));
        let data = Data::paged(Arc::<Noted>::clone(&owner));
        let released = |data: &Data| {
            data.release();
            std::mem::take(&mut *owner.1.lock().unwrap())
        };
        let part = |start: usize, len: usize| data.slice(start, len).unwrap();
        assert_eq!(released(&part(5, 10)), vec![Range { start: 5, end: 15 }]);
        assert!(part(5, 10).same(&part(5, 10)) && !part(5, 10).same(&part(6, 10)));
        // Columns of rows; then a tensor far away.
        let columns = [part(100, 10), part(200, 10), part(300, 10), part(3 * NEAR, 8)];
        assert_eq!(released(&Data::joined(columns)), [100..310, 3 * NEAR..3 * NEAR + 8]);
        assert_eq!(released(&Data::joined([part(300, 8), part(0, 8)])), [300..308, 0..8]);
        let transposed = part(0, 64).transposed(DType::F32, 4, 4).unwrap().1;
        assert_eq!(released(&transposed), vec![Range { start: 0, end: 64 }]);
        assert_eq!(released(&Data::from(vec![1u8])), [], "it is nowhere else");
        assert_eq!(*part(5, 2).bytes(), [7, 7]);
    }

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
    fn deferred_bytes_are_asked_for_when_they_are_needed() {
        struct Owner(std::sync::atomic::AtomicUsize);
        impl AsRef<[u8]> for Owner {
            fn as_ref(&self) -> &[u8] {
                self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                &[1, 2, 3, 4]
            }
        }
        let owner = Arc::new(Owner(0.into()));
        let data = Data::deferred(Arc::<Owner>::clone(&owner), 4);
        let joined = Data::joined(vec![data.slice(2, 2).unwrap(), data.slice(0, 1).unwrap()]);
        assert_eq!(joined.ranges().unwrap(), [2..4, 0..1]);
        assert_eq!(owner.0.load(std::sync::atomic::Ordering::Relaxed), 0);
        assert_eq!(*joined.bytes(), [3, 4, 1]);
        assert!(Data::deferred(owner, 5).bytes().is_empty(), "fewer than were said");
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

    #[test]
    fn transposed_data_is_the_same_if_what_it_is_made_of_is() {
        let values: Vec<f32> = (0..6).map(|i| i as f32).collect();
        let data = Data::from(values.as_slice());
        let (dtype, turned) = data.clone().transposed(DType::F32, 2, 3).unwrap();
        let wanted: Vec<f32> = [0, 3, 1, 4, 2, 5].map(|i| i as f32).to_vec();
        assert_eq!((dtype, turned.len()), (DType::F32, 24));
        assert_eq!(*turned.bytes(), *Data::from(wanted.as_slice()).bytes());
        assert!(turned.as_slice().is_none() && turned.slice(0, 4).is_none() && turned.piece(0, 4).is_none());
        assert!(turned.same(&data.clone().transposed(DType::F32, 2, 3).unwrap().1));
        assert!(!turned.same(&data.clone().transposed(DType::F32, 3, 2).unwrap().1));
        assert!(!turned.same(&data));
        assert!(data.clone().transposed(DType::F32, 4, 1).is_none(), "not whole matrices");
        assert!(data.clone().transposed(DType::Q8_0, 4, 8).is_none(), "not whole blocks");
        assert!(data.transposed(DType::I32, 2, 3).is_none());
    }
}

//! Shapes and byte strides of at most four dimensions, row-major: the outermost dimension first.

use std::fmt;

use crate::dtype::DType;

/// The maximum number of dimensions.
pub const MAX_DIMS: usize = 4;

/// The extents of a tensor, outermost dimension first.
///
/// A shape is stored right-aligned in four dimensions, padded with ones, so that loops over a tensor need not
/// distinguish ranks: see [`Shape::dims4`].
///
/// ```
/// use quadriga_graph::{DType, Shape};
///
/// let shape = Shape::from([8, 64]);
/// assert_eq!((shape.dims(), shape.dims4()), (&[8, 64][..], [1, 1, 8, 64]));
/// assert_eq!((shape.rows(), shape.cols(), shape.elements()), (8, 64, 512));
/// let (strides, bytes) = shape.contiguous(DType::Q8_0).unwrap();
/// assert_eq!((strides.0[2], bytes), (68, 544));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; MAX_DIMS],
    rank: u8,
}

impl Shape {
    /// A shape of these extents, or `None` if there are more than four.
    pub fn new(dims: &[usize]) -> Option<Shape> {
        let skip = MAX_DIMS.checked_sub(dims.len())?;
        let mut all = [1; MAX_DIMS];
        for (to, from) in all.iter_mut().skip(skip).zip(dims) {
            *to = *from;
        }
        Some(Shape { dims: all, rank: dims.len() as u8 })
    }

    /// A shape of `rank` dimensions, or of more if an outer extent is not 1.
    pub(crate) fn from_dims4(dims: [usize; MAX_DIMS], rank: usize) -> Shape {
        let outer = dims.iter().position(|d| *d != 1).unwrap_or(MAX_DIMS);
        Shape { dims, rank: rank.clamp(MAX_DIMS - outer, MAX_DIMS) as u8 }
    }

    /// The number of dimensions; 0 for a scalar.
    pub fn rank(&self) -> usize {
        self.rank.into()
    }

    /// The extents, outermost first.
    pub fn dims(&self) -> &[usize] {
        self.dims.get(MAX_DIMS - self.rank()..).unwrap_or(&[])
    }

    /// The extents padded with ones to four dimensions, outermost first.
    pub fn dims4(&self) -> [usize; MAX_DIMS] {
        self.dims
    }

    /// The innermost extent: the length of a row.
    pub fn cols(&self) -> usize {
        self.dims[3]
    }

    /// The number of elements, or `None` if it overflows.
    pub fn checked_elements(&self) -> Option<usize> {
        if self.dims.contains(&0) {
            return Some(0);
        }
        self.dims.iter().try_fold(1usize, |n, d| n.checked_mul(*d))
    }

    /// The number of elements; `usize::MAX` if it overflows, which the builder rules out for tensors of a graph.
    pub fn elements(&self) -> usize {
        self.checked_elements().unwrap_or(usize::MAX)
    }

    /// The number of rows: the product of all extents but the innermost.
    pub fn rows(&self) -> usize {
        if self.dims[..3].contains(&0) {
            return 0;
        }
        self.dims[..3].iter().fold(1usize, |n, d| n.saturating_mul(*d))
    }

    /// Whether repeating a tensor of this shape along every dimension can fill `target`.
    pub fn repeats_into(&self, target: &Shape) -> bool {
        self.dims.iter().zip(target.dims).all(|(d, t)| if *d == 0 { t == 0 } else { t % d == 0 })
    }

    /// The strides of a contiguous tensor of this shape, and its size in bytes; `None` if the row is not a whole
    /// number of blocks or the size overflows.
    pub fn contiguous(&self, dtype: DType) -> Option<(Strides, usize)> {
        let row = dtype.row_bytes(self.dims[3])?;
        let s2 = row;
        let s1 = s2.checked_mul(self.dims[2])?;
        let s0 = s1.checked_mul(self.dims[1])?;
        let bytes = s0.checked_mul(self.dims[0])?;
        // A zero extent must not hide an overflow of the others.
        self.dims.iter().filter(|d| **d != 0).try_fold(dtype.block_bytes(), |n, d| n.checked_mul(*d))?;
        Some((Strides([s0, s1, s2, dtype.block_bytes()]), bytes))
    }
}

macro_rules! shape_from_arrays {
    ($($n:literal),*) => {$(
        impl From<[usize; $n]> for Shape {
            fn from(dims: [usize; $n]) -> Shape {
                let mut all = [1; MAX_DIMS];
                all[MAX_DIMS - $n..].copy_from_slice(&dims);
                Shape { dims: all, rank: $n }
            }
        }
    )*};
}
shape_from_arrays!(0, 1, 2, 3, 4);

impl From<&Shape> for Shape {
    fn from(shape: &Shape) -> Shape {
        *shape
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

/// Byte strides of four dimensions, outermost first.
///
/// The innermost stride is the distance between blocks; plain types have one element per block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Strides(pub [usize; MAX_DIMS]);

impl Strides {
    /// Bytes from the first to one past the last byte of a tensor with this shape and type; 0 when it has no
    /// elements; `None` on overflow or if a row is not a whole number of blocks.
    pub fn span(&self, shape: &Shape, dtype: DType) -> Option<usize> {
        let [d0, d1, d2, d3] = shape.dims4();
        if d3 % dtype.block_len() != 0 {
            return None;
        }
        if shape.checked_elements()? == 0 {
            return Some(0);
        }
        let steps = [d0 - 1, d1 - 1, d2 - 1, d3 / dtype.block_len() - 1];
        steps
            .iter()
            .zip(self.0)
            .try_fold(dtype.block_bytes(), |n, (count, stride)| n.checked_add(count.checked_mul(stride)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_right_aligned() {
        let s = Shape::from([2, 3]);
        assert_eq!(s.dims(), &[2, 3]);
        assert_eq!(s.dims4(), [1, 1, 2, 3]);
        assert_eq!((s.rows(), s.cols(), s.elements()), (2, 3, 6));
        assert_eq!(Shape::new(&[1, 2, 3, 4, 5]), None);
        assert_eq!(Shape::from([]).elements(), 1);
        assert_eq!(Shape::from_dims4([1, 1, 5, 6], 1).dims(), &[5, 6]);
    }

    #[test]
    fn sizes_are_checked() {
        let (strides, bytes) = Shape::from([2, 3, 64]).contiguous(DType::Q4_0).unwrap();
        assert_eq!((strides.0, bytes), ([216, 108, 36, 18], 216));
        assert_eq!(strides.span(&Shape::from([2, 3, 64]), DType::Q4_0), Some(216));
        assert!(Shape::from([2, 33]).contiguous(DType::Q4_0).is_none());
        assert!(Shape::from([usize::MAX, 2]).contiguous(DType::F32).is_none());
        assert!(Shape::from([0, usize::MAX, 2]).contiguous(DType::F32).is_none());
        assert_eq!(Shape::from([0, 4]).contiguous(DType::F32).unwrap().1, 0);
        assert_eq!(Shape::from([usize::MAX, 4]).checked_elements(), None);
    }

    #[test]
    fn repeating_needs_integer_multiples() {
        assert!(Shape::from([1, 3]).repeats_into(&Shape::from([4, 6])));
        assert!(!Shape::from([2, 4]).repeats_into(&Shape::from([4, 6])));
        assert!(Shape::from([3]).repeats_into(&Shape::from([0, 3])));
        assert!(!Shape::from([0]).repeats_into(&Shape::from([3])));
        assert!(Shape::from([0]).repeats_into(&Shape::from([0])));
    }
}

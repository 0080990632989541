//! A tensor of a graph: its type, shape, strides, and the storage that holds it.

use crate::dtype::DType;
use crate::shape::{MAX_DIMS, Shape, Strides};

/// Identifies a tensor of a graph: its index.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct TensorId(pub(crate) u32);

/// Identifies a node of a graph: its index in execution order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NodeId(pub(crate) u32);

impl TensorId {
    /// The position of the tensor in [`Graph::tensors`](crate::Graph::tensors).
    pub fn index(self) -> usize {
        self.0 as usize
    }

    /// The id of the tensor at this position of a graph.
    pub fn from_index(index: usize) -> TensorId {
        TensorId(u32::try_from(index).unwrap_or(u32::MAX))
    }
}

impl NodeId {
    /// The position of the node in execution order.
    pub fn index(self) -> usize {
        self.0 as usize
    }

    /// The id of the node at this position of a graph.
    pub fn from_index(index: usize) -> NodeId {
        NodeId(u32::try_from(index).unwrap_or(u32::MAX))
    }
}

/// Where a tensor's value comes from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TensorKind {
    /// The caller sets it before a run.
    Input,
    /// Parameters of a model: set once, never written by a run.
    Weight,
    /// Part of the graph, with its bytes.
    Constant,
    /// Keeps its content between runs, zero at first; written by `set_rows` and `copy_into`.
    State,
    /// The result of a node: new memory, a view of another tensor, or another tensor after a write.
    Computed(NodeId),
}

impl TensorKind {
    /// The kind in a word, for tables and messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            TensorKind::Input => "input",
            TensorKind::Weight => "weight",
            TensorKind::Constant => "constant",
            TensorKind::State => "state",
            TensorKind::Computed(_) => "computed",
        }
    }
}

/// A tensor of a graph.
#[derive(Clone, PartialEq, Debug)]
pub struct Tensor {
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    pub(crate) strides: Strides,
    pub(crate) bytes: usize,
    pub(crate) kind: TensorKind,
    pub(crate) storage: TensorId,
    pub(crate) offset: usize,
    pub(crate) version: u32,
    pub(crate) scope: u32,
    pub(crate) label: u32,
}

impl Tensor {
    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The extents padded to four dimensions.
    pub fn dims4(&self) -> [usize; MAX_DIMS] {
        self.shape.dims4()
    }

    /// The byte strides, outermost of four dimensions first.
    pub fn strides(&self) -> [usize; MAX_DIMS] {
        self.strides.0
    }

    /// The bytes from the first to one past the last byte.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where the value comes from.
    pub fn kind(&self) -> TensorKind {
        self.kind
    }

    /// The tensor that owns the memory: this one, unless it is a view or the result of a write.
    pub fn storage(&self) -> TensorId {
        self.storage
    }

    /// Bytes from the start of the storage to this tensor's first byte.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The node that computes it; `None` for leaves.
    pub fn node(&self) -> Option<NodeId> {
        match self.kind {
            TensorKind::Computed(node) => Some(node),
            _ => None,
        }
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.shape.elements()
    }

    /// Whether the elements are dense in row-major order.
    pub fn is_contiguous(&self) -> bool {
        if self.elements() == 0 {
            return true;
        }
        let mut expected = self.dtype.block_bytes();
        let mut dims = self.dims4();
        dims[3] /= self.dtype.block_len();
        for (extent, stride) in dims.iter().zip(self.strides()).rev() {
            if *extent > 1 && stride != expected {
                return false;
            }
            expected = expected.saturating_mul(*extent);
        }
        true
    }

    /// Whether the elements of each row are contiguous.
    pub fn has_dense_rows(&self) -> bool {
        self.shape.cols() <= self.dtype.block_len() || self.strides.0[3] == self.dtype.block_bytes()
    }

    /// Whether type, shape and strides are equal, as an in-place operation requires.
    pub fn same_layout(&self, other: &Tensor) -> bool {
        self.dtype == other.dtype
            && self.shape.dims4() == other.shape.dims4()
            && self.strides == other.strides
    }
}

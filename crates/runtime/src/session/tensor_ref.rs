//! How callers name tensors.

use quadriga_graph::TensorId;

/// An input or output of the current graph: its name, or the id of its tensor. An output is also found by the name of its
/// tensor (see [`Graph::tensor`](quadriga_graph::Graph::tensor)), unless another output has that name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TensorRef<'a> {
    /// By name.
    Name(&'a str),
    /// By id.
    Id(TensorId),
}

impl<'a> From<&'a str> for TensorRef<'a> {
    fn from(name: &'a str) -> TensorRef<'a> {
        TensorRef::Name(name)
    }
}

impl<'a> From<&&'a str> for TensorRef<'a> {
    fn from(name: &&'a str) -> TensorRef<'a> {
        TensorRef::Name(name)
    }
}

impl<'a> From<&'a String> for TensorRef<'a> {
    fn from(name: &'a String) -> TensorRef<'a> {
        TensorRef::Name(name)
    }
}

impl From<TensorId> for TensorRef<'_> {
    fn from(id: TensorId) -> Self {
        TensorRef::Id(id)
    }
}

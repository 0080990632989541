//! The memory of a split's tensors: `place` is called once for every tensor.
//!
//! A caller's `place` function may answer differently each time it is called. Compilation checks one answer and uses
//! the same one, so that no kernel gets an address that was not checked.

use std::collections::{HashMap, HashSet};

use quadriga_graph::{Graph, TensorId};
use quadriga_runtime::{Layout, SplitSource, TensorPlace, check_range};

use crate::buffer::HostBuffer;
use crate::view::TensorView;

/// The places of all tensors that the nodes of a split read and write.
pub(crate) struct OperandPlaces<'a> {
    graph: &'a Graph,
    places: HashMap<TensorId, TensorPlace>,
}

impl<'a> OperandPlaces<'a> {
    /// Calls the split's `place` function once for every tensor.
    pub(crate) fn new(split: &SplitSource<'a>) -> OperandPlaces<'a> {
        let graph = split.graph;
        let mut places = HashMap::new();
        let mut seen = HashSet::new();
        for &node in split.nodes {
            let output = graph.get_node(node).map(|node| node.output());
            for &id in graph.inputs(node).iter().chain(&output) {
                if seen.insert(id)
                    && let Some(place) = (split.place)(id)
                {
                    places.insert(id, place);
                }
            }
        }
        OperandPlaces { graph, places }
    }

    /// Gives a tensor another place.
    pub(crate) fn replace(&mut self, id: TensorId, place: TensorPlace) {
        self.places.insert(id, place);
    }

    /// The place of a tensor; `None` if it has no memory on this backend.
    pub(crate) fn get(&self, id: TensorId) -> Option<&TensorPlace> {
        self.places.get(&id)
    }

    /// Whether a tensor is a packed weight.
    pub(crate) fn is_packed(&self, id: TensorId) -> bool {
        self.get(id).is_some_and(|place| matches!(place.layout, Layout::Packed(_)))
    }

    /// A plain tensor in memory; `None` if it is packed, has no memory here, or its memory is not inside its buffer.
    pub(crate) fn plain_view(&self, id: TensorId) -> Option<TensorView> {
        let (tensor, place) = (self.graph.get(id)?, self.get(id)?);
        let buffer = HostBuffer::of(&place.region).filter(|_| place.layout == Layout::Plain)?;
        check_range(buffer, place.region.offset, place.region.bytes).ok()?;
        if place.region.bytes < tensor.bytes() {
            return None;
        }
        // SAFETY: the tensor's bytes are inside the buffer. Nothing is read through the view unless compiling the nodes
        // that read and write the tensor has also checked its alignment and registered its buffer.
        Some(unsafe { TensorView::new(tensor, buffer.pointer().wrapping_add(place.region.offset)) })
    }
}

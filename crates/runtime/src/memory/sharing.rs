//! Aliasing: which tensors share one storage.
//!
//! A tensor has a storage of its own, or is an alias of another tensor: views, and results that are written into an
//! existing tensor, lie in that tensor's storage. In addition a result may be computed in place, in the storage of one
//! of its inputs; a chain of in-place operations shares the storage of its first tensor, the *root*. A result is
//! computed in place if
//!
//! - the operation declares it for that input, and the input has the result's type, shape and strides;
//! - the input is all of its storage, directly or through views (a part would keep the whole storage alive);
//! - nothing else uses the storage in the node's step or later: no other reader, no view that is still read, no hold;
//! - the storage holds no output, its memory is not external (that of weights, constants and state always is), and it
//!   is no input, unless the memory of inputs may be reused;
//! - the node runs on the storage's backend: sharing never changes the assignment of backends.

#![expect(
    clippy::indexing_slicing,
    reason = "arrays are sized by the graph's tensors, whose ids index them; ids from the caller are checked first"
)]

use quadriga_graph::{Graph, TensorId, TensorKind};
use std::fmt::{self, Write};

use super::liveness::StorageUses;
use super::request::{InputPolicy, MemoryRequest};
use crate::flow::{Flow, InPlaceCandidate};

/// For each tensor the root of its storage. An in-place result starts where its root does; a view, at its own offset.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Sharing {
    /// For each tensor the root of its storage.
    pub roots: Vec<TensorId>,
    /// For each tensor whether it owns a storage with external memory.
    pub external: Vec<bool>,
}

impl Sharing {
    /// The root of a tensor's storage.
    pub fn root(&self, tensor: TensorId) -> Option<TensorId> {
        self.roots.get(tensor.index()).copied()
    }

    /// How many results are computed in place.
    pub fn in_place_count(&self, graph: &Graph) -> usize {
        let in_place = |(tensor, root): &(TensorId, &TensorId)| {
            graph.get(*tensor).is_some_and(|t| t.storage() == *tensor) && **root != *tensor
        };
        graph.tensor_ids().zip(&self.roots).filter(in_place).count()
    }

    /// A table of all storages with more than one tensor: each root and its aliases.
    pub fn table(&self, graph: &Graph) -> String {
        let mut members: Vec<Vec<TensorId>> = vec![Vec::new(); self.roots.len()];
        for (tensor, root) in graph.tensor_ids().zip(&self.roots) {
            if tensor != *root
                && let Some(list) = members.get_mut(root.index())
            {
                list.push(tensor);
            }
        }
        let mut text = String::new();
        for (root, list) in graph.tensor_ids().zip(&members).filter(|(_, list)| !list.is_empty()) {
            let _ = write!(text, "{}:", graph.name(root));
            for tensor in list {
                let owns = graph.get(*tensor).is_some_and(|t| t.storage() == *tensor);
                let how = if owns { "in place" } else { "view" };
                let _ = write!(text, " {} ({how})", graph.name(*tensor));
            }
            text.push('\n');
        }
        text
    }

    /// Decides what is computed in place, and extends the last use of each root to that of its last in-place result.
    pub(crate) fn compute(&mut self, request: &MemoryRequest<'_>, flow: &Flow, uses: &mut StorageUses) {
        self.roots.clear();
        self.roots.extend_from_slice(&flow.storage);
        self.external.clear();
        self.external.extend(
            flow.kind.iter().map(|kind| !matches!(kind, TensorKind::Computed(_) | TensorKind::Input)),
        );
        for tensor in request.external {
            self.external[flow.storage[tensor.index()].index()] = true;
        }

        uses.in_place.clear();
        for InPlaceCandidate { node, result, input } in &flow.in_place {
            let root = self.roots[flow.storage[input.index()].index()];
            let last = uses.last[root.index()];
            if last.end != request.step(node.index()) + 1
                || last.tied
                || self.external[root.index()]
                || self.external[result.index()]
                || self.roots[result.index()] != *result
                // The input must be all of its storage.
                || flow.bytes[input.index()] != flow.bytes[root.index()]
                || request.backend(root.index()) != request.backend(result.index())
                || (flow.kind[root.index()] == TensorKind::Input && request.inputs == InputPolicy::Keep)
            {
                continue;
            }
            self.roots[result.index()] = root;
            uses.in_place.push(*result);
            uses.last[root.index()] = uses.last[result.index()];
        }
        // Aliases follow their storage.
        for alias in &flow.aliases {
            self.roots[alias.tensor.index()] = self.roots[alias.storage.index()];
        }
    }
}

impl fmt::Display for Sharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let roots = self.roots.iter().enumerate().filter(|(index, root)| root.index() == *index).count();
        write!(f, "{} tensors in {roots} storages", self.roots.len())
    }
}

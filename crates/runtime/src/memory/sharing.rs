//! Which tensors share one storage.
//!
//! Every tensor of a graph lies in the storage of some tensor: its own, or, for views and for results that are written
//! into another tensor, that one's. On top of this an operation that may run in place takes over a whole storage, and a
//! chain of such operations ends up in the storage of its first tensor, the *root*. That is allowed where
//!
//! - the operation declares it for that input, and the input has the result's type, shape and strides;
//! - the input is all of its storage, be it directly or through views (a part of a larger storage would keep all of it
//!   alive);
//! - nothing else uses the storage in the node's step or later: no other reader, no view that is still read, no hold;
//! - the storage is no output and was not placed beforehand (weights, constants and state never are the planner's), and
//!   is no input, unless inputs may be released;
//! - the node runs on the storage's backend. Sharing follows the assignment of backends and never changes it.

#![expect(
    clippy::indexing_slicing,
    reason = "arrays are sized by the graph's tensors, whose ids index them; ids from the caller are checked first"
)]

use quadriga_graph::{Graph, TensorId, TensorKind};
use std::fmt::{self, Write};

use super::lifetimes::Uses;
use super::request::{Inputs, Request};
use crate::flow::{Flow, Takeover};

/// For each tensor the root of its storage. Offsets are the tensors' own: an in-place result starts where its root does.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Sharing {
    /// For each tensor the tensor whose storage it lies in.
    pub roots: Vec<TensorId>,
    /// For each tensor whether it owns a storage that the planner leaves alone.
    pub placed: Vec<bool>,
}

impl Sharing {
    /// The tensor whose storage a tensor lies in.
    pub fn root(&self, tensor: TensorId) -> Option<TensorId> {
        self.roots.get(tensor.index()).copied()
    }

    /// How many results took over the storage of an input.
    pub fn in_place_count(&self, graph: &Graph) -> usize {
        let taken = |(tensor, root): &(TensorId, &TensorId)| {
            graph.get(*tensor).is_some_and(|t| t.storage() == *tensor) && **root != *tensor
        };
        graph.tensor_ids().zip(&self.roots).filter(taken).count()
    }

    /// A table of all storages that more than one tensor lies in: each root, and who lies there.
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

    /// Fills in who shares with whom, and lengthens the uses of each root to those of its last tenant.
    pub(crate) fn analyse(&mut self, request: &Request<'_>, flow: &Flow, uses: &mut Uses) {
        self.roots.clear();
        self.roots.extend_from_slice(&flow.storage);
        self.placed.clear();
        self.placed.extend(
            flow.kind.iter().map(|kind| !matches!(kind, TensorKind::Computed(_) | TensorKind::Input)),
        );
        for tensor in request.placed {
            self.placed[flow.storage[tensor.index()].index()] = true;
        }

        uses.taken.clear();
        for Takeover { node, result, input } in &flow.takeovers {
            let root = self.roots[flow.storage[input.index()].index()];
            let last = uses.last[root.index()];
            if last.end != request.step(node.index()) + 1
                || last.tied
                || self.placed[root.index()]
                || self.placed[result.index()]
                || self.roots[result.index()] != *result
                // A part of a storage has fewer bytes than all of it.
                || flow.bytes[input.index()] != flow.bytes[root.index()]
                || request.backend(root.index()) != request.backend(result.index())
                || (flow.kind[root.index()] == TensorKind::Input && request.inputs == Inputs::Keep)
            {
                continue;
            }
            self.roots[result.index()] = root;
            uses.taken.push(*result);
            uses.last[root.index()] = uses.last[result.index()];
        }
        // Views and written results follow the storage they lie in.
        for lodger in &flow.lodgers {
            self.roots[lodger.tensor.index()] = self.roots[lodger.storage.index()];
        }
    }
}

impl fmt::Display for Sharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let roots = self.roots.iter().enumerate().filter(|(index, root)| root.index() == *index).count();
        write!(f, "{} tensors in {roots} storages", self.roots.len())
    }
}

//! Finds prologues to fuse into matmuls: a norm with its weights, or a gate, that only matmuls read.
//!
//! The memory plan assumes that nodes run in order. A matmul with a fused prologue reads the prologue's inputs later than
//! the prologue itself would have, so no node in between may write over them.

use std::collections::HashMap;

use quadriga_graph::{Binary, DType, NodeId, Op, TensorId};
use quadriga_runtime::SplitSource;

use crate::ops::{Prologue, is_small};
use crate::places::OperandPlaces;
use crate::view::TensorView;

/// A prologue and the nodes that it replaces.
pub(crate) struct FusedPrologue {
    pub(crate) nodes: Vec<NodeId>,
    pub(crate) prologue: Prologue,
}

/// Searches a split. Nodes are given by their position in it.
struct Finder<'a> {
    split: &'a SplitSource<'a>,
    /// The node that computes a tensor.
    producer: HashMap<TensorId, usize>,
    /// The nodes that read any part of a storage.
    readers: HashMap<TensorId, Vec<usize>>,
    places: &'a OperandPlaces<'a>,
}

/// The prologues of a split, by the tensor that the matmuls read.
pub(crate) fn find(split: &SplitSource<'_>, places: &OperandPlaces<'_>) -> HashMap<TensorId, FusedPrologue> {
    let mut finder = Finder { split, producer: HashMap::new(), readers: HashMap::new(), places };
    for (position, &id) in split.nodes.iter().enumerate() {
        let Some(node) = split.graph.get_node(id) else { continue };
        finder.producer.insert(node.output(), position);
        if node.op().is_view() {
            continue;
        }
        for input in split.graph.inputs(id) {
            if let Some(tensor) = split.graph.get(*input) {
                finder.readers.entry(tensor.storage()).or_default().push(position);
            }
        }
    }
    let mut found = HashMap::new();
    for &id in split.nodes {
        let Some(node) = split.graph.get_node(id) else { continue };
        let &[_, activations] = split.graph.inputs(id) else { continue };
        if *node.op() == Op::MulMat
            && !found.contains_key(&activations)
            && let Some(prologue) = finder.prologue_of(activations)
        {
            found.insert(activations, prologue);
        }
    }
    found
}

impl Finder<'_> {
    /// The producer and the readers of a tensor that is no view and that is not read after the split.
    fn temporary(&self, tensor: TensorId) -> Option<(usize, &[usize])> {
        let own = self.split.graph.get(tensor)?.storage() == tensor;
        let readers = self.readers.get(&tensor)?;
        let producer = *self.producer.get(&tensor)?;
        (own && !(self.split.kept)(tensor)).then_some((producer, readers.as_slice()))
    }

    fn node(&self, position: usize) -> Option<(NodeId, &Op, &[TensorId])> {
        let id = *self.split.nodes.get(position)?;
        Some((id, self.split.graph.get_node(id)?.op(), self.split.graph.inputs(id)))
    }

    /// A tensor of contiguous rows of f32.
    fn rows(&self, tensor: TensorId) -> Option<TensorView> {
        self.places.plain_view(tensor).filter(|view| view.dtype == DType::F32 && view.is_contiguous())
    }

    /// The prologue that computes this tensor, if there is one and the matmuls that read the tensor may compute it.
    fn prologue_of(&self, tensor: TensorId) -> Option<FusedPrologue> {
        let result = self.split.graph.get(tensor)?;
        let [d0, d1, d2, columns] = result.dims4();
        if result.dtype() != DType::F32 || !result.is_contiguous() || !is_small(d0 * d1 * d2, columns) {
            return None;
        }
        let (last, readers) = self.temporary(tensor)?;
        if !readers.iter().all(|reader| self.is_matmul_of(*reader, tensor)) {
            return None;
        }
        let (first, fused) = match self.node(last)? {
            (id, Op::Gated { gate, swapped }, &[a, b]) => {
                let (a, b) = if *swapped { (b, a) } else { (a, b) };
                let prologue = Prologue::Gated { gate: *gate, first: self.rows(a)?, second: self.rows(b)? };
                (last, FusedPrologue { nodes: vec![id], prologue })
            }
            (id, Op::Binary(Binary::Mul), &[normed, weight]) => {
                let (position, readers) = self.temporary(normed)?;
                let (norm, Op::RmsNorm { eps }, &[x]) = self.node(position)? else { return None };
                let weight = self.rows(weight).filter(|w| w.rows() == 1 && w.cols() == columns)?;
                if readers != [last] {
                    return None;
                }
                let prologue = Prologue::Norm { x: self.rows(x)?, eps: *eps, weight: Some(weight) };
                (position, FusedPrologue { nodes: vec![norm, id], prologue })
            }
            (id, Op::RmsNorm { eps }, &[x]) => {
                let prologue = Prologue::Norm { x: self.rows(x)?, eps: *eps, weight: None };
                (last, FusedPrologue { nodes: vec![id], prologue })
            }
            _ => return None,
        };
        let end = readers.iter().max()?;
        (first..=*end).all(|position| self.leaves_inputs(position, &fused)).then_some(fused)
    }

    /// Whether a node is a matmul of one packed matrix with this tensor.
    fn is_matmul_of(&self, position: usize, tensor: TensorId) -> bool {
        let Some((_, Op::MulMat, &[weight, activations])) = self.node(position) else { return false };
        let one = |dims: [usize; 4]| dims[0] == 1 && dims[1] == 1;
        activations == tensor
            && self.places.is_packed(weight)
            && self.split.graph.get(weight).is_some_and(|weight| one(weight.dims4()))
    }

    /// Whether a node does not write over the inputs of a prologue.
    fn leaves_inputs(&self, position: usize, fused: &FusedPrologue) -> bool {
        let Some((id, op, _)) = self.node(position) else { return false };
        let Some(output) = self.split.graph.get_node(id).map(|node| node.output()) else { return false };
        if op.is_view() || fused.nodes.contains(&id) {
            return true;
        }
        let Some(out) = self.places.plain_view(output) else { return false };
        fused.prologue.inputs().all(|input| {
            let (a, b) = (out.range(), input.range());
            a.start >= b.end || b.start >= a.end
        })
    }
}

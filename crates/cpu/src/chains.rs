//! Finds small operations that only products read, so that the products can compute them themselves (ops/source.rs):
//! a norm with its weights, and a gated unit.
//!
//! Results lie in memory on the assumption that nodes run in order. A product reads the chain's inputs later than the
//! chain would have, so nothing that is computed in between may lie over them.

use std::collections::HashMap;

use quadriga_graph::{Binary, DType, NodeId, Op, TensorId};
use quadriga_runtime::SplitSource;

use crate::ops::{Recipe, is_small};
use crate::places::Places;
use crate::view::View;

/// A chain: the nodes it consists of, and what their last result is.
pub(crate) struct Chain {
    pub(crate) nodes: Vec<NodeId>,
    pub(crate) recipe: Recipe,
}

/// Looks through a split.
struct Finder<'a> {
    split: &'a SplitSource<'a>,
    /// The node that makes a tensor, by its place in the split.
    maker: HashMap<TensorId, usize>,
    /// The nodes that read any part of a storage, by their places.
    readers: HashMap<TensorId, Vec<usize>>,
    places: &'a Places<'a>,
}

/// The chains of a split, by the tensor that products would read.
pub(crate) fn find(split: &SplitSource<'_>, places: &Places<'_>) -> HashMap<TensorId, Chain> {
    let mut finder = Finder { split, maker: HashMap::new(), readers: HashMap::new(), places };
    for (place, &id) in split.nodes.iter().enumerate() {
        let Some(node) = split.graph.get_node(id) else { continue };
        finder.maker.insert(node.output(), place);
        if node.op().is_view() {
            continue;
        }
        for input in split.graph.inputs(id) {
            if let Some(tensor) = split.graph.get(*input) {
                finder.readers.entry(tensor.storage()).or_default().push(place);
            }
        }
    }
    let mut chains = HashMap::new();
    for &id in split.nodes {
        let Some(node) = split.graph.get_node(id) else { continue };
        let &[_, activations] = split.graph.inputs(id) else { continue };
        if *node.op() == Op::MulMat
            && !chains.contains_key(&activations)
            && let Some(chain) = finder.chain(activations)
        {
            chains.insert(activations, chain);
        }
    }
    chains
}

impl Finder<'_> {
    /// The node that makes a tensor which is no view and which these nodes alone read: its place, and the readers.
    fn made_for(&self, tensor: TensorId) -> Option<(usize, &[usize])> {
        let own = self.split.graph.get(tensor)?.storage() == tensor;
        let readers = self.readers.get(&tensor)?;
        let place = *self.maker.get(&tensor)?;
        (own && !(self.split.kept)(tensor)).then_some((place, readers.as_slice()))
    }

    fn node(&self, place: usize) -> Option<(NodeId, &Op, &[TensorId])> {
        let id = *self.split.nodes.get(place)?;
        Some((id, self.split.graph.get_node(id)?.op(), self.split.graph.inputs(id)))
    }

    /// A tensor of dense rows of f32.
    fn rows(&self, tensor: TensorId) -> Option<View> {
        self.places.plain_view(tensor).filter(|view| view.dtype == DType::F32 && view.is_contiguous())
    }

    /// The chain that ends in this tensor, if there is one and products may compute it.
    fn chain(&self, tensor: TensorId) -> Option<Chain> {
        let result = self.split.graph.get(tensor)?;
        let [d0, d1, d2, columns] = result.dims4();
        if result.dtype() != DType::F32 || !result.is_contiguous() || !is_small(d0 * d1 * d2, columns) {
            return None;
        }
        let (last, readers) = self.made_for(tensor)?;
        if !readers.iter().all(|reader| self.is_product_of(*reader, tensor)) {
            return None;
        }
        let (first, chain) = match self.node(last)? {
            (id, Op::Gated { gate, swapped }, &[a, b]) => {
                let (a, b) = if *swapped { (b, a) } else { (a, b) };
                let recipe = Recipe::Gated { gate: *gate, first: self.rows(a)?, second: self.rows(b)? };
                (last, Chain { nodes: vec![id], recipe })
            }
            (id, Op::Binary(Binary::Mul), &[normed, weight]) => {
                let (place, readers) = self.made_for(normed)?;
                let (norm, Op::RmsNorm { eps }, &[x]) = self.node(place)? else { return None };
                let weight = self.rows(weight).filter(|w| w.rows() == 1 && w.cols() == columns)?;
                if readers != [last] {
                    return None;
                }
                let recipe = Recipe::Norm { x: self.rows(x)?, eps: *eps, weight: Some(weight) };
                (place, Chain { nodes: vec![norm, id], recipe })
            }
            (id, Op::RmsNorm { eps }, &[x]) => {
                let recipe = Recipe::Norm { x: self.rows(x)?, eps: *eps, weight: None };
                (last, Chain { nodes: vec![id], recipe })
            }
            _ => return None,
        };
        let end = readers.iter().max()?;
        (first..=*end).all(|place| self.leaves(place, &chain)).then_some(chain)
    }

    /// Whether a node is a product of one packed matrix with this tensor.
    fn is_product_of(&self, place: usize, tensor: TensorId) -> bool {
        let Some((_, Op::MulMat, &[weight, activations])) = self.node(place) else { return false };
        let one = |dims: [usize; 4]| dims[0] == 1 && dims[1] == 1;
        activations == tensor
            && self.places.is_packed(weight)
            && self.split.graph.get(weight).is_some_and(|weight| one(weight.dims4()))
    }

    /// Whether the result of a node leaves what a chain reads as it is.
    fn leaves(&self, place: usize, chain: &Chain) -> bool {
        let Some((id, op, _)) = self.node(place) else { return false };
        let Some(output) = self.split.graph.get_node(id).map(|node| node.output()) else { return false };
        if op.is_view() || chain.nodes.contains(&id) {
            return true;
        }
        let Some(out) = self.places.plain_view(output) else { return false };
        chain.recipe.inputs().all(|input| {
            let (a, b) = (out.range(), input.range());
            a.start >= b.end || b.start >= a.end
        })
    }
}

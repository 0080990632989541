//! Rectified feed-forward networks in placements: gates are read for every token, the other rows for few.

use std::collections::HashSet;

use quadriga_graph::{Graph, NodeId, Op, layer_of};

use super::TensorClass;

/// The share of neurons that a token is assumed to activate.
const ACTIVE: f64 = 0.1;

/// The share of its weight that a node reads: of rows of neurons, those that so many tokens activate.
pub(super) fn active_share(graph: &Graph, node: NodeId) -> f64 {
    match graph[node].op() {
        Op::MulMatSparse { .. } | Op::AxpySparse => {
            let tokens = graph[graph[node].output()].shape().rows();
            1.0 - (1.0 - ACTIVE).powf(tokens as f64)
        }
        _ => 1.0,
    }
}

/// The weight's name without its last part.
pub(super) fn stem(name: &str) -> &str {
    name.rsplit_once('.').map_or(name, |(stem, _)| stem)
}

/// The stems of the matrices of feed-forward networks that are read in full, in layers of which other matrices are not.
pub(super) fn gates(graph: &Graph) -> HashSet<String> {
    let (mut full, mut sparse) = (Vec::new(), HashSet::new());
    for node in graph.node_ids() {
        let Some(name) = graph.inputs(node).first().and_then(|weight| graph.leaf_name(*weight)) else {
            continue;
        };
        let Some(layer) = layer_of(name).filter(|_| TensorClass::of_weight(name) == TensorClass::FeedForward)
        else {
            continue;
        };
        match graph[node].op() {
            Op::MulMat => full.push((layer, stem(name).to_owned())),
            Op::MulMatSparse { .. } | Op::AxpySparse => _ = sparse.insert(layer),
            _ => {}
        }
    }
    full.into_iter().filter(|(layer, _)| sparse.contains(layer)).map(|(_, stem)| stem).collect()
}

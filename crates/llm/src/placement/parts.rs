//! The parts of a model that are placed as a whole, and what each costs on every device.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use quadriga_graph::{DType, Graph, NodeId, TensorId, TensorKind, layer_of};
use quadriga_runtime::{Cost, Rates};
use serde::Serialize;

use super::{TensorClass, neurons};
use crate::models::SLOTS_SUFFIX;

/// A part of a model that is placed as a whole.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelPart {
    /// Attention, norms, router, shared experts, KV cache or recurrent states of a layer.
    Attention {
        /// The layer.
        layer: usize,
    },
    /// Experts of a layer, the first ones.
    Experts {
        /// The layer.
        layer: usize,
        /// Their number: all that the layer has.
        count: usize,
    },
    /// The gates of a layer's rectified feed-forward network, which decide about the rows that are read.
    Gates {
        /// The layer.
        layer: usize,
    },
    /// The dense feed-forward network of a layer; the gates of a rectified one come before it.
    FeedForward {
        /// The layer.
        layer: usize,
    },
    /// Attention and feed-forward network or experts of a layer together.
    Layer {
        /// The layer.
        layer: usize,
    },
    /// The output matrix and the norm before it.
    Output,
    /// The token embedding.
    Embeddings,
}

impl ModelPart {
    /// The layer, if it belongs to one.
    pub fn layer(self) -> Option<usize> {
        match self {
            ModelPart::Attention { layer }
            | ModelPart::Experts { layer, .. }
            | ModelPart::Gates { layer }
            | ModelPart::FeedForward { layer }
            | ModelPart::Layer { layer } => Some(layer),
            ModelPart::Output | ModelPart::Embeddings => None,
        }
    }

    /// Whether both are the same part of two layers.
    pub(super) fn is_alike(self, other: ModelPart) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }

    /// What it is, without the layer.
    pub fn kind(self) -> &'static str {
        match self {
            ModelPart::Attention { .. } => "attention",
            ModelPart::Experts { .. } => "experts",
            ModelPart::Gates { .. } => "gates",
            ModelPart::FeedForward { .. } => "feed-forward",
            ModelPart::Layer { .. } => "layer",
            ModelPart::Output => "output",
            ModelPart::Embeddings => "embeddings",
        }
    }
}

impl fmt::Display for ModelPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self, self.layer()) {
            (ModelPart::Layer { .. }, Some(layer)) => write!(f, "layer {layer}"),
            (part, Some(layer)) => write!(f, "{} of layer {layer}", part.kind()),
            (part, None) => f.write_str(part.kind()),
        }
    }
}

/// Bytes of a part, and its time on each device.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct PartCost {
    /// Bytes of weights and states.
    pub(super) bytes: u64,
    /// Seconds per token on each backend.
    pub(super) seconds: Vec<f64>,
}

/// The parts of a model with their costs.
pub(super) struct ModelParts {
    pub(super) costs: BTreeMap<ModelPart, PartCost>,
    pub(super) layers: usize,
    /// The weights that are placed with the token embedding.
    pub(super) embeddings: HashSet<String>,
    /// Whether the output matrix is the token embedding.
    pub(super) tied: bool,
    /// The stems of the matrices that are [gates](ModelPart::Gates).
    pub(super) gates: HashSet<String>,
}

impl ModelParts {
    /// The parts of a model by the graph of one token, `experts` in each layer. Weights that `fixed` names are placed otherwise
    /// and not counted.
    pub(super) fn of(
        graph: &Graph,
        experts: &[usize],
        rates: &[Rates],
        fixed: impl Fn(&str) -> bool,
    ) -> ModelParts {
        let tied = graph.leaf("output.weight").is_none();
        let mut parts = ModelParts {
            costs: BTreeMap::new(),
            layers: experts.len(),
            embeddings: HashSet::new(),
            tied,
            gates: neurons::gates(graph),
        };
        for (id, tensor) in graph.tensor_ids().zip(graph.tensors()) {
            let Some((part, name)) = part_of_leaf(graph, id, experts, &parts) else { continue };
            if part == ModelPart::Embeddings {
                parts.embeddings.insert(name.to_owned());
            }
            if !fixed(name) {
                let cost = parts.costs.entry(part).or_default();
                cost.bytes = cost.bytes.saturating_add(tensor.bytes() as u64);
                cost.seconds.resize(rates.len(), 0.0);
            }
        }
        for node in graph.node_ids() {
            let Some((leaf, dtype)) = largest_leaf(graph, node) else { continue };
            let Some((part, name)) = part_of_leaf(graph, leaf, experts, &parts) else { continue };
            if let Some(cost) = parts.costs.get_mut(&part).filter(|_| !fixed(name)) {
                let (work, share) = (Cost::of(graph, node), neurons::active_share(graph, node));
                for (seconds, rates) in cost.seconds.iter_mut().zip(rates) {
                    *seconds += share * rates.seconds(work, dtype);
                }
            }
        }
        parts
    }

    /// The cost of a part; nothing if the model lacks it.
    pub(super) fn cost(&self, part: ModelPart) -> PartCost {
        self.costs.get(&part).cloned().unwrap_or_default()
    }

    /// The parts of a layer besides its attention: experts or a feed-forward network.
    pub(super) fn rest_of(&self, layer: usize) -> impl Iterator<Item = ModelPart> + '_ {
        let parts = self.costs.keys().copied().filter(move |part| part.layer() == Some(layer));
        parts.filter(|part| !matches!(part, ModelPart::Attention { .. }))
    }
}

/// The part that a weight or state belongs to, and its name; `None` for inputs, results, RoPE factors that all layers
/// share, and slots of experts, which are there in any case.
fn part_of_leaf<'g>(
    graph: &'g Graph,
    id: TensorId,
    experts: &[usize],
    parts: &ModelParts,
) -> Option<(ModelPart, &'g str)> {
    let kind = graph.get(id)?.kind();
    let name = graph.leaf_name(id).filter(|_| matches!(kind, TensorKind::Weight | TensorKind::State))?;
    if name.ends_with(SLOTS_SUFFIX) {
        return None;
    }
    let class = TensorClass::of_weight(name);
    let part = match (layer_of(name), class) {
        (Some(layer), TensorClass::Experts) if kind == TensorKind::Weight => {
            ModelPart::Experts { layer, count: experts.get(layer).copied().unwrap_or(0) }
        }
        (Some(layer), TensorClass::FeedForward) if parts.gates.contains(neurons::stem(name)) => {
            ModelPart::Gates { layer }
        }
        (Some(layer), TensorClass::FeedForward) if kind == TensorKind::Weight => {
            ModelPart::FeedForward { layer }
        }
        (Some(layer), _) => ModelPart::Attention { layer },
        (None, TensorClass::Output) => ModelPart::Output,
        (None, TensorClass::Embeddings) if parts.tied && name.starts_with("token_embd.") => ModelPart::Output,
        (None, TensorClass::Embeddings) => ModelPart::Embeddings,
        (None, _) => return None,
    };
    Some((part, name))
}

/// The largest weight or state that a node reads, and its type.
pub(super) fn largest_leaf(graph: &Graph, node: NodeId) -> Option<(TensorId, DType)> {
    let leaf = |id: &TensorId| {
        let tensor = graph.get(*id)?;
        let storage = graph.get(tensor.storage())?;
        let is_leaf = matches!(storage.kind(), TensorKind::Weight | TensorKind::State);
        is_leaf.then_some((tensor.bytes(), tensor.storage(), tensor.dtype()))
    };
    let largest = graph.inputs(node).iter().filter_map(leaf).max_by_key(|(bytes, ..)| *bytes);
    largest.map(|(_, id, dtype)| (id, dtype))
}

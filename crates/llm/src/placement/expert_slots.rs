//! The size of an expert cache.

use quadriga_graph::{TensorKind, layer_of};

use super::TensorClass;
use crate::Result;
use crate::model::Model;
use crate::models::GraphShape;

/// The bytes of one expert of a layer, as the file has them; of the largest, if layers differ. 0 without experts.
pub fn expert_bytes(model: &Model) -> Result<u64> {
    let layers = &model.hyperparameters().layers;
    if layers.iter().all(|layer| layer.experts.is_none()) {
        return Ok(0);
    }
    let graph = model.graph(GraphShape::new(1, 1))?;
    let mut bytes = vec![0u64; layers.len()];
    for id in graph.of_kind(TensorKind::Weight) {
        let (name, tensor) = (graph.name(id), graph.get(id));
        let is_expert = TensorClass::of_weight(&name) == TensorClass::Experts;
        let layer = layer_of(&name).filter(|_| is_expert).and_then(|layer| bytes.get_mut(layer));
        if let (Some(layer), Some(tensor)) = (layer, tensor) {
            let experts = tensor.shape().dims().first().copied().unwrap_or(1).max(1);
            *layer += (tensor.bytes() / experts) as u64;
        }
    }
    Ok(bytes.into_iter().max().unwrap_or(0))
}

//! The placement rule of parts of a model: where each part is, and the backend of every weight and state.

use std::collections::HashSet;

use quadriga_graph::layer_of;

use super::order::PlacementUnit;
use super::parts::{ModelPart, ModelParts};
use super::{TensorClass, neurons};

/// The backend of each part of a model.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Residence {
    /// Of each layer's attention, with everything else that is in [`ModelPart::Attention`].
    attention: Vec<usize>,
    /// Of each layer's experts or feed-forward network.
    rest: Vec<usize>,
    /// Of each layer's gates, if those are apart.
    gates: Vec<usize>,
    gate_names: HashSet<String>,
    output: usize,
    embeddings: usize,
    cpu: usize,
    tied: bool,
    /// The weights that are placed with the token embedding.
    embedding_names: HashSet<String>,
}

impl Residence {
    /// These units on their accelerators, everything else on the CPU.
    pub(super) fn new(parts: &ModelParts, units: &[PlacementUnit], cpu: usize) -> Residence {
        let mut residence = Residence {
            attention: vec![cpu; parts.layers],
            rest: vec![cpu; parts.layers],
            gates: vec![cpu; parts.layers],
            gate_names: parts.gates.clone(),
            output: cpu,
            embeddings: cpu,
            cpu,
            tied: parts.tied,
            embedding_names: parts.embeddings.clone(),
        };
        for PlacementUnit { part, accelerator, .. } in units.iter().filter(|unit| unit.placed) {
            match part {
                ModelPart::Attention { layer } => set(&mut residence.attention, *layer, *accelerator),
                ModelPart::Experts { layer, .. } | ModelPart::FeedForward { layer } => {
                    set(&mut residence.rest, *layer, *accelerator);
                    set(&mut residence.gates, *layer, *accelerator);
                }
                ModelPart::Gates { layer } => set(&mut residence.gates, *layer, *accelerator),
                ModelPart::Layer { layer } => {
                    set(&mut residence.gates, *layer, *accelerator);
                    set(&mut residence.attention, *layer, *accelerator);
                    set(&mut residence.rest, *layer, *accelerator);
                }
                ModelPart::Output => residence.output = *accelerator,
                ModelPart::Embeddings => residence.embeddings = *accelerator,
            }
        }
        residence
    }

    /// The backend of a leaf; `None` if it is placed where it is read.
    pub(super) fn backend_of(&self, name: &str) -> Option<usize> {
        if let Some(layer) = layer_of(name) {
            return match TensorClass::of_weight(name) {
                TensorClass::FeedForward if self.gate_names.contains(neurons::stem(name)) => {
                    self.gates.get(layer).copied()
                }
                TensorClass::Experts | TensorClass::FeedForward => self.rest.get(layer).copied(),
                _ => self.attention.get(layer).copied(),
            };
        }
        let is_used = || self.attention.iter().chain(&self.rest).any(|backend| *backend != self.cpu);
        match TensorClass::of_weight(name) {
            TensorClass::Output => Some(self.output),
            // Read at both ends of the model.
            TensorClass::Embeddings if self.tied && name.starts_with("token_embd.") => {
                (self.output == self.cpu).then_some(self.cpu)
            }
            TensorClass::Embeddings if self.embedding_names.contains(name) => Some(self.embeddings),
            // RoPE factors, which all layers read.
            TensorClass::Attention => (!is_used()).then_some(self.cpu),
            _ => None,
        }
    }
}

fn set(backends: &mut [usize], layer: usize, backend: usize) {
    if let Some(of_layer) = backends.get_mut(layer) {
        *of_layer = backend;
    }
}

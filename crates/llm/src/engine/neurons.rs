//! Counts of active neurons, and of the bytes that skipping inactive ones saves.

use std::fmt;

use quadriga_graph::{Graph, NodeId, Op, TensorId, TensorKind, layer_of};
use serde::Serialize;

use super::Engine;
use crate::models::{GraphShape, SLOTS_SUFFIX, active_output, missed_output, predicted_output};
use crate::{Model, NeuronCounts, Result};

/// The active neurons of all batches since the engine was made.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct NeuronUse {
    /// Batches.
    pub batches: u64,
    /// Neurons, of all tokens and layers.
    pub neurons: u64,
    /// Those that were active.
    pub active: u64,
    /// With predictors: those that were expected to be active.
    pub predicted: u64,
    /// With predictors: active neurons that were not expected to be. They were not computed.
    pub missed: u64,
    /// Rows of matrices of neurons that a batch read, of all batches.
    pub rows: u64,
    /// Bytes of weights that were read.
    pub bytes: u64,
    /// Bytes of the weights if no row had been skipped.
    pub dense_bytes: u64,
}

impl fmt::Display for NeuronUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |part: u64, of: u64| 100.0 * part as f64 / of.max(1) as f64;
        let megabytes = |bytes: u64| bytes as f64 / 1e6 / self.batches.max(1) as f64;
        write!(
            f,
            "neurons: {:.1} % active; a batch read {} rows of them, and {:.1} MB of weights instead of {:.1} MB",
            percent(self.active, self.neurons),
            self.rows / self.batches.max(1),
            megabytes(self.bytes),
            megabytes(self.dense_bytes)
        )?;
        if self.predicted > 0 {
            let all = self.active + self.missed;
            let (predicted, missed) = (percent(self.predicted, self.neurons), percent(self.missed, all));
            write!(f, "; {predicted:.1} % predicted, {missed:.2} % of the active ones missed")?;
        }
        Ok(())
    }
}

/// What is known about the neurons of an engine's batches.
pub(super) struct NeuronObserver {
    usage: NeuronUse,
    counts: NeuronCounts,
    /// The activations of a layer; kept to reuse their memory.
    values: Vec<f32>,
    /// Which neurons of a layer a batch used.
    used: Vec<bool>,
}

impl NeuronObserver {
    pub(super) fn new(model: &Model) -> NeuronObserver {
        let (usage, counts) = (NeuronUse::default(), NeuronCounts::new(model));
        NeuronObserver { usage, counts, values: Vec::new(), used: Vec::new() }
    }
}

/// The rows of a layer's matrices that a batch read.
#[derive(Clone, Copy, Default)]
struct RowsRead {
    active: u64,
    /// Those of the active neurons that were in slots.
    in_slots: u64,
    predicted: Option<u64>,
}

impl Engine {
    /// The active neurons of all batches; `None` unless [`Neurons::observe`](crate::models::Neurons::observe) is set.
    pub fn neuron_use(&self) -> Option<NeuronUse> {
        self.neurons.as_ref().map(|neurons| neurons.usage).filter(|usage| usage.neurons > 0)
    }

    /// How often each neuron was active; `None` unless [`Neurons::observe`](crate::models::Neurons::observe) is set.
    pub fn neuron_counts(&self) -> Option<&NeuronCounts> {
        self.neurons.as_ref().map(|neurons| &neurons.counts)
    }

    /// Counts the neurons that a batch used.
    pub(super) fn observe_neurons(&mut self, shape: &GraphShape) -> Result<()> {
        let Some(observer) = self.neurons.as_mut().filter(|_| shape.neurons.observe) else { return Ok(()) };
        let layers = self.model.hyperparameters().layers.len();
        let mut read = vec![RowsRead::default(); layers];
        for (layer, of_layer) in read.iter_mut().enumerate() {
            // The last layer computes the output rows only.
            let tokens = if layer + 1 == layers { shape.rows } else { shape.tokens };
            let neurons = observer.counts.layers.get(layer).map_or(0, Vec::len);
            let has = |output: &str| {
                let outputs = self.session.plan().map(|plan| plan.graph().outputs());
                outputs.is_some_and(|outputs| outputs.iter().any(|(name, _)| name == output))
            };
            let (active, missed, predicted) =
                (active_output(layer), missed_output(layer), predicted_output(layer));
            if tokens * neurons == 0 || !has(&active) {
                continue;
            }
            let has_predictor = has(&predicted);
            observer.values.resize(tokens * neurons, 0.0);
            observer.used.clear();
            observer.used.resize(neurons, false);
            self.session.read_into(active.as_str(), &mut observer.values)?;
            let counts = observer.counts.layers.get_mut(layer).map(Vec::as_mut_slice).unwrap_or_default();
            for row in observer.values.chunks(neurons) {
                for ((value, count), used) in row.iter().zip(counts.iter_mut()).zip(&mut observer.used) {
                    let is_active = *value != 0.0;
                    *count = count.saturating_add(is_active.into());
                    *used |= is_active;
                    observer.usage.active += u64::from(is_active);
                }
            }
            observer.usage.neurons += (tokens * neurons) as u64;
            of_layer.active = count(&observer.used, |used| *used);
            let held = self.neuron_slots.as_ref().map(|slots| slots.held(layer)).unwrap_or_default();
            of_layer.in_slots =
                observer.used.iter().zip(held).map(|(used, slot)| u64::from(*used && *slot >= 0)).sum();
            if has_predictor {
                self.session.read_into(missed.as_str(), &mut observer.values)?;
                observer.usage.missed += count(&observer.values, |value| *value != 0.0);
                self.session.read_into(predicted.as_str(), &mut observer.values)?;
                observer.usage.predicted += count(&observer.values, |value| *value != 0.0);
                observer.used.fill(false);
                for row in observer.values.chunks(neurons) {
                    observer.used.iter_mut().zip(row).for_each(|(used, value)| *used |= *value != 0.0);
                }
                of_layer.predicted = Some(count(&observer.used, |used| *used));
            }
        }
        observer.counts.tokens += shape.tokens as u64;
        if let Some(plan) = self.session.plan() {
            let [bytes, dense, rows] = weights_read(plan.graph(), &read);
            let usage = &mut observer.usage;
            usage.batches += 1;
            (usage.bytes, usage.dense_bytes) = (usage.bytes + bytes, usage.dense_bytes + dense);
            usage.rows += rows;
        }
        Ok(())
    }
}

fn count<T>(values: &[T], is_counted: impl Fn(&T) -> bool) -> u64 {
    values.iter().filter(|value| is_counted(value)).count() as u64
}

/// Bytes of weights that a batch read, bytes without skipping, and rows of neurons that it read. What is computed only to be
/// observed is not counted.
fn weights_read(graph: &Graph, layers: &[RowsRead]) -> [u64; 3] {
    let [mut bytes, mut dense, mut rows] = [0; 3];
    let mut seen: Vec<TensorId> = Vec::new();
    for node in graph.node_ids() {
        let Some((weight, all)) = weight_of(graph, node) else { continue };
        let name = graph.name(weight);
        let in_slots = name.ends_with(SLOTS_SUFFIX);
        // Rows in slots are copies.
        if !seen.contains(&weight) && !in_slots {
            dense += all;
        }
        let is_sparse = graph
            .get_node(node)
            .is_some_and(|node| matches!(node.op(), Op::MulMatSparse { .. } | Op::AxpySparse));
        let layer = layer_of(&name).and_then(|layer| layers.get(layer).map(|read| (layer, read)));
        match layer.filter(|_| is_sparse) {
            Some((layer, read)) => {
                // With a predictor, the first matrix is read by its mask.
                let mask = graph.outputs().iter().find(|(name, _)| *name == predicted_output(layer));
                let by_mask = mask.is_some_and(|(_, mask)| graph.inputs(node).get(2) == Some(mask));
                let is_divided = graph.leaf(&format!("{name}{SLOTS_SUFFIX}")).is_some();
                let read = match read.predicted.filter(|_| by_mask) {
                    Some(predicted) => predicted,
                    None if in_slots => read.in_slots,
                    None if is_divided => read.active - read.in_slots,
                    None => read.active,
                };
                let count = graph.get(weight).map_or(1, |weight| weight.shape().rows()).max(1) as u64;
                bytes += all / count * read;
                rows += read;
            }
            None if seen.contains(&weight) => continue,
            None => bytes += all,
        }
        seen.push(weight);
    }
    [bytes, dense, rows]
}

/// The weight that a matmul reads, and its bytes.
fn weight_of(graph: &Graph, node: NodeId) -> Option<(TensorId, u64)> {
    let op = graph.get_node(node)?.op();
    let weight = *graph.inputs(node).first()?;
    let tensor = graph.get(weight)?;
    let is_matmul = matches!(op, Op::MulMat | Op::MulMatSparse { .. } | Op::AxpySparse);
    (is_matmul && tensor.kind() == TensorKind::Weight).then_some((weight, tensor.bytes() as u64))
}

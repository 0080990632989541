//! A compiled split: for each node where its inputs and its result are.

use std::any::Any;
use std::sync::Arc;

use quadriga_conformance::compute_node;
use quadriga_graph::{Graph, NodeId};
use quadriga_runtime::{BackendError, Layout, Place, Program, Region, SplitSource};

use crate::device::Shared;
use crate::memory::SimBuffer;

/// The arrangement of packed weights: every bit turned over. Whoever takes it for plain gets nonsense.
pub(crate) const PACKED: Layout = Layout::Packed(7);

struct Step {
    node: NodeId,
    inputs: Vec<Place>,
    output: Region,
}

/// What a program does; shared with the queues that run it.
pub(crate) struct Steps {
    device: Arc<Shared>,
    graph: Arc<Graph>,
    steps: Vec<Step>,
}

/// A compiled split.
pub(crate) struct SimProgram {
    pub(crate) steps: Arc<Steps>,
}

impl Program for SimProgram {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

impl SimProgram {
    pub(crate) fn new(
        device: &Arc<Shared>,
        graph: Arc<Graph>,
        split: &SplitSource<'_>,
    ) -> Result<SimProgram, BackendError> {
        let missing = |node: NodeId, reason: String| BackendError::Node {
            backend: device.settings.name.clone(),
            node: graph.node_name(node),
            reason,
        };
        let mut steps = Vec::with_capacity(split.nodes.len());
        for node in split.nodes {
            let Some(n) = graph.get_node(*node).filter(|n| !n.op().is_view()) else { continue };
            let place = |id| {
                let place = (split.place)(id)
                    .ok_or_else(|| missing(*node, format!("{} has no place", graph.name(id))))?;
                let buffer = place.region.buffer.as_any().downcast_ref::<SimBuffer>();
                if buffer.is_some_and(|b| b.is_of(device))
                    || (device.settings.host && place.region.buffer.is_host())
                {
                    Ok(place)
                } else {
                    Err(missing(*node, format!("{} is not in this device's memory", graph.name(id))))
                }
            };
            let inputs: Result<Vec<Place>, _> = graph.inputs(*node).iter().map(|id| place(*id)).collect();
            steps.push(Step { node: *node, inputs: inputs?, output: place(n.output())?.region });
        }
        Ok(SimProgram { steps: Arc::new(Steps { device: Arc::clone(device), graph, steps }) })
    }
}

/// Memory that is used again from node to node.
#[derive(Default)]
pub(crate) struct Scratch {
    inputs: Vec<Vec<u8>>,
    output: Vec<u8>,
}

impl Steps {
    pub(crate) fn seconds(&self) -> f64 {
        self.steps.len() as f64 * self.device.settings.node_seconds
    }

    /// Computes all nodes.
    pub(crate) fn run(&self, scratch: &mut Scratch) -> Result<(), BackendError> {
        if !self.device.settings.computes {
            return Ok(());
        }
        for step in &self.steps {
            while scratch.inputs.len() < step.inputs.len() {
                scratch.inputs.push(Vec::new());
            }
            for (bytes, place) in scratch.inputs.iter_mut().zip(&step.inputs) {
                get(&place.region, bytes)?;
                if place.layout == PACKED {
                    bytes.iter_mut().for_each(|byte| *byte = !*byte);
                }
            }
            get(&step.output, &mut scratch.output)?;
            let inputs: Vec<&[u8]> =
                scratch.inputs.iter().take(step.inputs.len()).map(Vec::as_slice).collect();
            compute_node(&self.graph, step.node, &inputs, &mut scratch.output).map_err(|error| {
                BackendError::Node {
                    backend: self.device.settings.name.clone(),
                    node: self.graph.node_name(step.node),
                    reason: error.to_string(),
                }
            })?;
            put(&step.output, &scratch.output)?;
        }
        Ok(())
    }
}

pub(crate) fn get(region: &Region, into: &mut Vec<u8>) -> Result<(), BackendError> {
    into.resize(region.bytes, 0);
    match region.buffer.as_any().downcast_ref::<SimBuffer>() {
        Some(buffer) => {
            buffer.get(region.offset, into);
            Ok(())
        }
        None => region.buffer.read(region.offset, into),
    }
}

pub(crate) fn put(region: &Region, from: &[u8]) -> Result<(), BackendError> {
    match region.buffer.as_any().downcast_ref::<SimBuffer>() {
        Some(buffer) => {
            buffer.put(region.offset, from);
            Ok(())
        }
        None => region.buffer.write(region.offset, from),
    }
}

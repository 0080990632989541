//! A compiled split: the places of inputs and result of each node.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use quadriga_conformance::{compute_custom_node, compute_node};
use quadriga_graph::{Collective, CollectiveKind, CustomOp, Graph, NodeId, Op};
use quadriga_runtime::{
    BackendError, ExchangeCall, Layout, Program, RankGroup, Region, SplitSource, StepTime, TensorPlace,
};

use crate::FAMILY;
use crate::inner::DeviceInner;
use crate::memory::SimBuffer;
use crate::settings::Clock;

/// The layout of packed weights: every bit inverted. Reading them as plain yields garbage.
pub(crate) const PACKED: Layout = Layout::Packed(7);

/// One node with the places of its inputs and its result.
struct SimStep {
    node: NodeId,
    inputs: Vec<TensorPlace>,
    output: Region,
    /// The code of a custom operation.
    code: Option<CustomOp>,
    /// The ranks that a collective is executed with.
    ranks: Option<Arc<dyn RankGroup>>,
}

/// The code of a custom operation for simulated devices: a [`CustomOp`] whose CPU code the device runs.
pub(crate) fn custom_code(op: &CustomOp) -> Option<CustomOp> {
    op.backend_code(FAMILY)?.downcast_ref::<CustomOp>().cloned()
}

/// The steps of a program, shared with the queues that run it.
pub(crate) struct ProgramSteps {
    device: Arc<DeviceInner>,
    graph: Arc<Graph>,
    steps: Vec<SimStep>,
    /// Scratch memory, if the settings require it.
    scratch: Option<Region>,
    /// The host time at which each step of the latest timed run began, then the end of the last step.
    marks: Mutex<Vec<Instant>>,
}

/// A compiled split.
pub(crate) struct SimProgram {
    pub(crate) steps: Arc<ProgramSteps>,
}

impl Program for SimProgram {
    fn scratch_bytes(&self) -> usize {
        let steps = &self.steps.steps;
        let inputs: usize = steps.iter().map(|step| size_of_val(&*step.inputs)).sum();
        size_of_val(&**steps) + inputs
    }

    fn step_times(&self) -> Vec<StepTime> {
        self.steps.times()
    }

    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}

impl SimProgram {
    pub(crate) fn new(
        device: &Arc<DeviceInner>,
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
            let inputs: Result<Vec<TensorPlace>, _> =
                graph.inputs(*node).iter().map(|id| place(*id)).collect();
            let code = match n.op() {
                Op::Custom(op) => match custom_code(op) {
                    Some(code) => Some(code),
                    None => return Err(missing(*node, "it has no code for simulated devices".into())),
                },
                _ => None,
            };
            let ranks = match n.op() {
                Op::Collective(Collective { ranks, .. }) => {
                    let ranks = split.ranks.of(ranks);
                    Some(Arc::clone(ranks.map_err(|reason| missing(*node, reason))?))
                }
                _ => None,
            };
            let (inputs, output) = (inputs?, place(n.output())?.region);
            steps.push(SimStep { node: *node, inputs, output, code, ranks });
        }
        let scratch = split.scratch.clone().filter(|scratch| scratch.bytes >= device.settings.scratch);
        if scratch.is_none() && device.settings.scratch > 0 {
            let first = split.nodes.first().copied().unwrap_or(NodeId::from_index(0));
            return Err(missing(first, "the split has too little scratch memory".into()));
        }
        let (device, marks) = (Arc::clone(device), Mutex::default());
        Ok(SimProgram { steps: Arc::new(ProgramSteps { device, graph, steps, scratch, marks }) })
    }
}

/// Host copies of a node's inputs and result; the memory is reused from node to node.
#[derive(Default)]
pub(crate) struct NodeBuffers {
    inputs: Vec<Vec<u8>>,
    output: Vec<u8>,
}

impl ProgramSteps {
    /// The memory that a run reads and writes, in order; `true` for writes.
    pub(crate) fn accesses(&self) -> impl Iterator<Item = (&Region, bool)> {
        let scratch = self.scratch.iter().map(|region| (region, true));
        scratch.chain(self.steps.iter().flat_map(|step| {
            let inputs = step.inputs.iter().map(|place| (&place.region, false));
            inputs.chain([(&step.output, true)])
        }))
    }

    /// The time that a run takes by the device's clock.
    pub(crate) fn seconds(&self) -> f64 {
        self.steps.len() as f64 * self.device.settings.node_seconds
    }

    /// The times of the steps in the latest timed run, by the device's clock.
    fn times(&self) -> Vec<StepTime> {
        let marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(first) = marks.first() else { return Vec::new() };
        let each = self.device.settings.node_seconds;
        let spans = marks.iter().zip(marks.iter().skip(1)).enumerate();
        let time = |(step, (number, (begin, end))): (&SimStep, (usize, (&Instant, &Instant)))| {
            let (start, seconds) = match self.device.settings.clock {
                Clock::Virtual | Clock::Real => (number as f64 * each, each),
                Clock::Host => ((*begin - *first).as_secs_f64(), (*end - *begin).as_secs_f64()),
            };
            StepTime { nodes: vec![step.node], start, seconds }
        };
        self.steps.iter().zip(spans).map(time).collect()
    }

    /// Computes all nodes.
    pub(crate) fn run(&self, buffers: &mut NodeBuffers, timed: bool) -> Result<(), BackendError> {
        let mut marks = Vec::new();
        if !self.device.settings.computes {
            return Ok(());
        }
        for step in &self.steps {
            if timed {
                marks.push(Instant::now());
            }
            if let Some(region) = &self.scratch {
                put(region, &vec![0xa5; region.bytes])?;
            }
            while buffers.inputs.len() < step.inputs.len() {
                buffers.inputs.push(Vec::new());
            }
            for (bytes, place) in buffers.inputs.iter_mut().zip(&step.inputs) {
                get(&place.region, bytes)?;
                if place.layout == PACKED {
                    bytes.iter_mut().for_each(|byte| *byte = !*byte);
                }
            }
            get(&step.output, &mut buffers.output)?;
            let inputs: Vec<&[u8]> =
                buffers.inputs.iter().take(step.inputs.len()).map(Vec::as_slice).collect();
            let output = &mut buffers.output;
            let computed = match (&step.code, &step.ranks) {
                (_, Some(ranks)) => self.exchange(step.node, &**ranks, &inputs, output),
                (Some(code), _) => compute_custom_node(code, &self.graph, step.node, &inputs, output)
                    .map_err(|error| error.to_string()),
                _ => compute_node(&self.graph, step.node, &inputs, output).map_err(|error| error.to_string()),
            };
            computed.map_err(|reason| BackendError::Node {
                backend: self.device.settings.name.clone(),
                node: self.graph.node_name(step.node),
                reason,
            })?;
            put(&step.output, &buffers.output)?;
        }
        if timed {
            marks.push(Instant::now());
            *self.marks.lock().unwrap_or_else(PoisonError::into_inner) = marks;
        }
        Ok(())
    }
}

impl ProgramSteps {
    /// Executes a collective with host copies of its inputs and result. The queue's thread waits for the other ranks; other queues
    /// go on.
    fn exchange(
        &self,
        node: NodeId,
        ranks: &dyn RankGroup,
        inputs: &[&[u8]],
        output: &mut [u8],
    ) -> Result<(), String> {
        let missing = || "the graph has no such node".to_owned();
        let n = self.graph.get_node(node).ok_or_else(missing)?;
        let first = self.graph.inputs(node).first().and_then(|id| self.graph.get(*id)).ok_or_else(missing)?;
        let (Op::Collective(Collective { kind, .. }), Some(input), Some(result)) =
            (n.op(), inputs.first(), self.graph.get(n.output()))
        else {
            return Err(missing());
        };
        let input = match kind {
            CollectiveKind::Receive { .. } => &[],
            kind if kind.is_in_place() => {
                output.copy_from_slice(input);
                &[]
            }
            _ => *input,
        };
        let rows = first.dims4()[2];
        ranks.exchange(ExchangeCall { kind, dtype: result.dtype(), rows, input, output })
    }
}

/// Copies a region out of its buffer.
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

/// Copies bytes into a region.
pub(crate) fn put(region: &Region, from: &[u8]) -> Result<(), BackendError> {
    match region.buffer.as_any().downcast_ref::<SimBuffer>() {
        Some(buffer) => {
            buffer.put(region.offset, from);
            Ok(())
        }
        None => region.buffer.write(region.offset, from),
    }
}

//! A single backend as a target: every tensor in guarded memory of its own.

use std::sync::Arc;

use quadriga_graph::{Graph, Op, TensorId, TensorKind};
use quadriga_runtime::{
    Backend, BackendError, Buffer, Layout, Region, SplitSource, TensorPlace, Usage, WeightLayout,
};

use crate::{Case, Outputs, Target, TargetError};

/// Bytes around each tensor that nobody may write.
const GUARD: usize = 64;
/// What they are filled with: as F32 a large negative number, so that reading them shows as well.
const PATTERN: u8 = 0xf3;

/// Runs each case on one backend, as one split, without scheduler or planner.
///
/// Each storage has a buffer of its own with guard bytes before and after it; a case fails if they were written.
/// Results start out filled with the guards' pattern, never with zeros.
pub struct BackendTarget<'b> {
    backend: &'b dyn Backend,
    fuse: bool,
}

impl<'b> BackendTarget<'b> {
    /// The backend, free to leave results unwritten that only it reads, and so to fuse nodes.
    pub fn new(backend: &'b dyn Backend) -> BackendTarget<'b> {
        BackendTarget { backend, fuse: true }
    }

    /// The backend, which must write the result of every node.
    pub fn unfused(backend: &'b dyn Backend) -> BackendTarget<'b> {
        BackendTarget { backend, fuse: false }
    }

    /// How the backend wants to hold a weight; plain where views look at it.
    fn layout(&self, graph: &Graph, id: TensorId) -> WeightLayout {
        let Some(weight) = graph.get(id) else {
            return WeightLayout { layout: Layout::Plain, bytes: 0, mappable: false };
        };
        let viewed = graph.tensors().iter().filter(|t| t.storage() == id).count() > 1;
        if viewed || weight.kind() != TensorKind::Weight {
            let bytes = self.backend.storage_bytes(weight);
            return WeightLayout { layout: Layout::Plain, bytes, mappable: false };
        }
        let uses: Vec<(&Op, usize)> = graph
            .node_ids()
            .flat_map(|node| {
                let inputs = graph.inputs(node).iter().enumerate().filter(|(_, input)| **input == id);
                inputs.filter_map(move |(place, _)| Some((graph.get_node(node)?.op(), place)))
            })
            .collect();
        self.backend.weight_layout(weight, &uses)
    }

    /// Memory for a storage of `bytes`, between guards, all filled with the pattern.
    fn guarded(&self, bytes: usize, usage: Usage) -> Result<Region, BackendError> {
        let start = GUARD.next_multiple_of(self.backend.memory().alignment.max(1));
        let buffer = self.backend.allocate(start + bytes + GUARD, usage)?;
        buffer.write(0, &vec![PATTERN; start + bytes + GUARD])?;
        Region::new(buffer, start, bytes)
    }

    fn compute(&self, case: &Case) -> Result<Outputs, Trouble> {
        let graph = &case.graph;
        let mut regions: Vec<Option<(Region, Layout)>> = Vec::new();
        for id in graph.tensor_ids() {
            regions.push(match graph.get(id) {
                Some(tensor) if tensor.storage() == id => {
                    let usage = match tensor.kind() {
                        TensorKind::Weight | TensorKind::Constant => Usage::Weights,
                        TensorKind::State => Usage::State,
                        TensorKind::Input | TensorKind::Computed(_) => Usage::Compute,
                    };
                    let WeightLayout { layout, bytes, .. } = self.layout(graph, id);
                    let region = self.guarded(bytes, usage)?;
                    self.backend.placed(tensor, &region)?;
                    if let Some(data) = graph.data(id) {
                        self.backend.load_weight(tensor, layout, data.bytes(), &region)?;
                    } else if tensor.kind() == TensorKind::State {
                        region.buffer.clear(region.offset, region.bytes)?;
                    }
                    Some((region, layout))
                }
                _ => None,
            });
        }
        let place = |id: TensorId| {
            let tensor = graph.get(id)?;
            let (storage, layout) = regions.get(tensor.storage().index())?.as_ref()?;
            let region = match layout {
                Layout::Plain => storage.part(tensor.offset(), tensor.bytes()).ok()?,
                Layout::Packed(_) => storage.clone(),
            };
            Some(TensorPlace { region, layout: *layout })
        };
        let nowhere = |name: &str| Trouble(format!("\"{name}\" has no place"));
        let mut queue = self.backend.queue()?;
        for (name, bytes) in &case.inputs {
            let to = graph.leaf(name).and_then(place).ok_or_else(|| nowhere(name))?;
            queue.write(&to.region, bytes)?;
        }
        let kept = |id: TensorId| {
            let outlives = |t: TensorId| graph.get(t).is_some_and(|t| t.kind() == TensorKind::State);
            !self.fuse
                || graph.outputs().iter().any(|(_, output)| same_storage(graph, id, *output))
                || graph.get(id).is_some_and(|t| outlives(t.storage()))
        };
        let nodes: Vec<_> = graph.node_ids().collect();
        let scratch = match self.backend.scratch_bytes(graph, &nodes) {
            0 => None,
            bytes => Some(Region::new(self.backend.allocate(bytes, Usage::Compute)?, 0, bytes)?),
        };
        let split = SplitSource { graph, nodes: &nodes, place: &place, kept: &kept, scratch };
        let mut program = self.backend.compile(&split)?;
        queue.run(&mut *program)?;
        let mut outputs = Outputs::new();
        for (name, id) in graph.outputs() {
            let from = place(*id).ok_or_else(|| nowhere(name))?.region;
            let mut bytes = vec![0; from.bytes];
            queue.read(&from, &mut bytes)?;
            outputs.push(bytes);
        }
        queue.synchronize()?;
        for (id, region) in graph.tensor_ids().zip(&regions) {
            if let (Some((region, _)), Some(tensor)) = (region, graph.get(id)) {
                check_guards(&region.buffer, region.offset, region.offset + region.bytes)
                    .map_err(|trouble| Trouble(format!("{} {}", graph.name(id), trouble.0)))?;
                self.backend.released(tensor, region);
            }
        }
        Ok(outputs)
    }
}

fn same_storage(graph: &Graph, a: TensorId, b: TensorId) -> bool {
    graph.get(a).zip(graph.get(b)).is_some_and(|(a, b)| a.storage() == b.storage())
}

/// Both guards of a buffer whose tensor lies in `start..end` must be as they were.
fn check_guards(buffer: &Arc<dyn Buffer>, start: usize, end: usize) -> Result<(), Trouble> {
    for (from, to) in [(0, start), (end, buffer.bytes().min(end + GUARD))] {
        let mut guard = vec![0; to - from];
        buffer.read(from, &mut guard)?;
        if let Some(at) = guard.iter().position(|byte| *byte != PATTERN) {
            let side = if from == 0 { "before" } else { "after" };
            return Err(Trouble(format!("was written outside, at byte {at} of the guard {side} it")));
        }
    }
    Ok(())
}

/// What went wrong, in words.
struct Trouble(String);

impl From<BackendError> for Trouble {
    fn from(error: BackendError) -> Trouble {
        Trouble(error.to_string())
    }
}

impl Target for BackendTarget<'_> {
    fn name(&self) -> String {
        let how = if self.fuse { "" } else { ", every result written" };
        format!("{} ({}){how}", self.backend.name(), self.backend.device().description)
    }

    fn run(&mut self, case: &Case) -> Result<Outputs, TargetError> {
        for node in case.graph.node_ids() {
            let op = case.graph.get_node(node).map(|n| n.op());
            let Some(op) = op.filter(|op| !op.is_view()) else { continue };
            if let Err(refusal) = self.backend.supports(&case.graph, node) {
                return Err(TargetError::Unsupported(format!("{}: {refusal}", op.name())));
            }
        }
        self.compute(case).map_err(|trouble| TargetError::Failed(trouble.0))
    }
}

//! A single backend as a target: every tensor in its own guarded buffer.

use std::sync::Arc;

use quadriga_graph::{Graph, Op, TensorId, TensorKind};
use quadriga_runtime::{
    Backend, BackendError, Buffer, Layout, RankGroup, RankGroups, Region, SplitSource, TensorPlace, Usage,
    WeightLayout,
};

use crate::{CASE_GROUP, Case, Outputs, RankPart, Target, TargetError, on_rank_threads};

/// The number of guard bytes before and after each tensor.
const GUARD: usize = 64;
/// The value of guard bytes: a large negative number as F32, so that reads of the guards show in results, too.
const PATTERN: u8 = 0xf3;

/// Runs each case on one backend, as one split, without scheduler or planner.
///
/// Each storage has its own buffer with guard bytes before and after it; a case fails if they are overwritten. Results
/// are initialized with the guards' pattern, never with zeros.
///
/// ```
/// use quadriga_conformance::{BackendTarget, Suite, run_cases};
///
/// let backend = quadriga_cpu::Backend::builder().threads(2).build()?;
/// let suite = Suite::new();
/// let cases = suite.sample(50, 1).into_iter().filter_map(|index| suite.case(index));
/// let report = run_cases(cases, &mut BackendTarget::new(&backend));
/// assert!(report.is_clean(), "{report}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct BackendTarget<'b> {
    backend: &'b dyn Backend,
    /// The backends of the ranks after the first.
    others: Vec<&'b dyn Backend>,
    fuse: bool,
    in_place: bool,
}

impl<'b> BackendTarget<'b> {
    /// A target that allows fusion: the backend need not write results that only its own nodes read.
    pub fn new(backend: &'b dyn Backend) -> BackendTarget<'b> {
        BackendTarget { backend, others: Vec::new(), fuse: true, in_place: false }
    }

    /// A target without fusion: the backend must write the result of every node.
    pub fn unfused(backend: &'b dyn Backend) -> BackendTarget<'b> {
        BackendTarget { backend, others: Vec::new(), fuse: false, in_place: false }
    }

    /// A target without fusion that computes every result in the memory of an input where its operation allows it and
    /// nothing else reads that input, as the memory planner does.
    pub fn in_place(backend: &'b dyn Backend) -> BackendTarget<'b> {
        BackendTarget { backend, others: Vec::new(), fuse: false, in_place: true }
    }

    /// Adds the backends of further ranks, for cases of collectives: ranks wait for each other, so each needs its own. Cases of more
    /// ranks than there are backends count as unsupported.
    #[must_use]
    pub fn with_ranks(mut self, others: impl IntoIterator<Item = &'b dyn Backend>) -> BackendTarget<'b> {
        self.others = others.into_iter().collect();
        self
    }

    /// The layout that the backend chooses for a weight; plain if the weight has views.
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

    /// Whether the backend computes all nodes, with these ranks if there are any.
    fn supports(&self, part: RankPart<'_>, ranks: Option<&dyn RankGroup>) -> Result<(), TargetError> {
        for node in part.graph.node_ids() {
            let op = part.graph.get_node(node).map(|n| n.op());
            let Some(op) = op.filter(|op| !op.is_view()) else { continue };
            let exchanges = match op {
                Op::Collective(_) => self.backend.exchanges(ranks),
                _ => Ok(()),
            };
            if let Err(refusal) = exchanges.and_then(|()| self.backend.supports(part.graph, node)) {
                return Err(TargetError::Unsupported(format!("{}: {refusal}", op.name())));
            }
        }
        Ok(())
    }

    /// A region of `bytes` between guards; region and guards are filled with the pattern.
    fn guarded(&self, bytes: usize, usage: Usage) -> Result<Region, BackendError> {
        let start = GUARD.next_multiple_of(self.backend.memory().alignment.max(1));
        let buffer = self.backend.allocate(start + bytes + GUARD, usage)?;
        buffer.write(0, &vec![PATTERN; start + bytes + GUARD])?;
        Region::new(buffer, start, bytes)
    }

    fn compute(&self, part: RankPart<'_>, ranks: &RankGroups) -> Result<Outputs, TargetFailure> {
        let graph = part.graph;
        let mut regions: Vec<Option<(Region, Layout)>> = Vec::new();
        let reused = if self.in_place { reused_inputs(graph) } else { vec![None; graph.tensors().len()] };
        for (id, reused) in graph.tensor_ids().zip(reused) {
            if let Some(input) = reused {
                regions.push(regions.get(input.index()).cloned().flatten());
                continue;
            }
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
                        self.backend.load_weight(tensor, layout, &data.bytes(), &region)?;
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
        let unplaced = |name: &str| TargetFailure(format!("\"{name}\" has no place"));
        let mut queue = self.backend.queue()?;
        for (name, bytes) in part.inputs {
            let to = graph.leaf(name).and_then(place).ok_or_else(|| unplaced(name))?;
            queue.write(&to.region, bytes)?;
        }
        let kept = |id: TensorId| {
            let is_state = |t: TensorId| graph.get(t).is_some_and(|t| t.kind() == TensorKind::State);
            !self.fuse
                || graph.outputs().iter().any(|(_, output)| same_storage(graph, id, *output))
                || graph.get(id).is_some_and(|t| is_state(t.storage()))
        };
        let nodes: Vec<_> = graph.node_ids().collect();
        let scratch = match self.backend.scratch_bytes(graph, &nodes) {
            0 => None,
            bytes => Some(Region::new(self.backend.allocate(bytes, Usage::Compute)?, 0, bytes)?),
        };
        let split = SplitSource { graph, nodes: &nodes, place: &place, kept: &kept, scratch, ranks };
        let mut program = self.backend.compile(&split)?;
        queue.run(&mut *program)?;
        let mut outputs = Outputs::new();
        for (name, id) in graph.outputs() {
            let from = place(*id).ok_or_else(|| unplaced(name))?.region;
            let mut bytes = vec![0; from.bytes];
            queue.read(&from, &mut bytes)?;
            outputs.push(bytes);
        }
        queue.synchronize()?;
        for (id, region) in graph.tensor_ids().zip(&regions) {
            // A result in the memory of an input comes after it, and has the same guards.
            if let (Some((region, _)), Some(tensor)) = (region, graph.get(id)) {
                check_guards(&region.buffer, region.offset, region.offset + region.bytes)
                    .map_err(|failure| TargetFailure(format!("{} {}", graph.name(id), failure.0)))?;
                self.backend.released(tensor, region);
            }
        }
        Ok(outputs)
    }
}

/// Whether some result of a graph is computed in the memory of an input on [`BackendTarget::in_place`].
pub fn computes_in_place(graph: &Graph) -> bool {
    reused_inputs(graph).iter().any(Option::is_some)
}

/// For each tensor the input whose memory it has, if it is computed in place: the only reader of an input or result
/// that is no output, has no views, and is not written by another node.
fn reused_inputs(graph: &Graph) -> Vec<Option<TensorId>> {
    let computing =
        || graph.node_ids().filter(|node| graph.get_node(*node).is_some_and(|n| !n.op().is_view()));
    let readers = |storage: TensorId| {
        let uses = |id: &TensorId| graph.get(*id).is_some_and(|tensor| tensor.storage() == storage);
        computing().filter(|node| graph.inputs(*node).iter().any(uses)).count()
    };
    let is_free = |id: TensorId| {
        let kind = graph.get(id).filter(|tensor| tensor.storage() == id).map(|tensor| tensor.kind());
        matches!(kind, Some(TensorKind::Input | TensorKind::Computed(_)))
            && readers(id) == 1
            && graph.tensors().iter().filter(|tensor| tensor.storage() == id).count() == 1
            && !graph.outputs().iter().any(|(_, output)| same_storage(graph, id, *output))
    };
    let mut reused = vec![None; graph.tensors().len()];
    for node in computing() {
        let Some(n) = graph.get_node(node) else { continue };
        let inputs = graph.inputs(node);
        let input = n.in_place_inputs().filter_map(|at| inputs.get(at).copied()).find(|id| is_free(*id));
        if let Some(reused) = reused.get_mut(n.output().index()) {
            *reused = input;
        }
    }
    reused
}

fn same_storage(graph: &Graph, a: TensorId, b: TensorId) -> bool {
    graph.get(a).zip(graph.get(b)).is_some_and(|(a, b)| a.storage() == b.storage())
}

/// Checks that both guards of a buffer with its tensor in `start..end` are unchanged.
fn check_guards(buffer: &Arc<dyn Buffer>, start: usize, end: usize) -> Result<(), TargetFailure> {
    for (from, to) in [(0, start), (end, buffer.bytes().min(end + GUARD))] {
        let mut guard = vec![0; to - from];
        buffer.read(from, &mut guard)?;
        if let Some(at) = guard.iter().position(|byte| *byte != PATTERN) {
            let side = if from == 0 { "before" } else { "after" };
            return Err(TargetFailure(format!(
                "was overrun: byte {at} of the guard {side} it was overwritten"
            )));
        }
    }
    Ok(())
}

/// The message of a failed run.
struct TargetFailure(String);

impl From<BackendError> for TargetFailure {
    fn from(error: BackendError) -> TargetFailure {
        TargetFailure(error.to_string())
    }
}

impl Target for BackendTarget<'_> {
    fn name(&self) -> String {
        let how = match (self.fuse, self.in_place) {
            (true, _) => "",
            (false, false) => ", without fusion",
            (false, true) => ", in place",
        };
        format!("{} ({}){how}", self.backend.name(), self.backend.device().description)
    }

    fn run(&mut self, case: &Case) -> Result<Outputs, TargetError> {
        let part = RankPart { graph: &case.graph, inputs: &case.inputs };
        self.supports(part, None)?;
        self.compute(part, RankGroups::NONE).map_err(|failure| TargetError::Failed(failure.0))
    }

    fn run_ranks(&mut self, case: &Case) -> Result<Outputs, TargetError> {
        let needed = case.parts().count();
        if needed > self.others.len() + 1 {
            let (has, name) = (self.others.len() + 1, self.backend.name());
            let reason = format!("collectives of {needed} ranks: the target has {has} of {name}");
            return Err(TargetError::Unsupported(reason));
        }
        let BackendTarget { backend, others, fuse, in_place } = self;
        let (fuse, in_place) = (*fuse, *in_place);
        let backends: Vec<&dyn Backend> = std::iter::once(*backend).chain(others.iter().copied()).collect();
        on_rank_threads(case, |rank, part, group| {
            let Some(backend) = backends.get(rank).copied() else {
                return Err(TargetError::Failed(format!("rank {rank} has no backend")));
            };
            let target = BackendTarget { backend, others: Vec::new(), fuse, in_place };
            target.supports(part, Some(&*group))?;
            let mut ranks = RankGroups::default();
            ranks.insert(CASE_GROUP, group);
            target.compute(part, &ranks).map_err(|failure| TargetError::Failed(failure.0))
        })
    }
}

//! About how much host memory a prepared plan takes, for the limits of a session.

use std::mem::{size_of, size_of_val};

use quadriga_graph::{Graph, TensorKind};

use super::compile::CompiledPlan;
use super::prepared::PreparedPlan;
use crate::memory::MemoryPlan;
use crate::schedule::{Plan, Splits};
use crate::weights::PlanWeights;

/// Bytes of a name on the heap.
const NAME: usize = 48;
/// Bytes of an entry of a hash map, beside its key and value.
const MAP_ENTRY: usize = 16;
/// Bytes of a leaf's name, as the leaf's and in the map of names.
const NAMED_LEAF: usize = 2 * NAME + MAP_ENTRY;
/// Bytes of a weight in the map of a plan's weights.
const WEIGHT: usize = MAP_ENTRY + 2 * size_of::<usize>();
/// Bytes of a tensor's placement: backend and reason.
const PLACEMENT: usize = 4 * size_of::<usize>();

fn sum<const N: usize>(parts: [usize; N]) -> usize {
    parts.iter().sum()
}

impl PreparedPlan {
    /// Bytes of the graph, the plan and its programs, and of memory that is the plan's own: constants and staging.
    pub(crate) fn host_bytes(&self) -> usize {
        let programs = self.segments.values().map(|program| program.scratch_bytes());
        sum([
            size_of::<PreparedPlan>(),
            graph_bytes(self.plan.graph()),
            plan_bytes(&self.plan),
            weight_bytes(&self.weights),
            self.compiled.as_ref().map_or(0, CompiledPlan::host_bytes),
            programs.sum(),
        ])
    }
}

impl CompiledPlan {
    fn host_bytes(&self) -> usize {
        sum([
            self.programs.iter().map(|programs| size_of_val(&**programs)).sum(),
            self.programs.iter().flatten().map(|program| program.scratch_bytes()).sum(),
            size_of_val(&*self.copies),
            self.copies.iter().map(|copy| copy.own_bytes()).sum(),
            size_of_val(&*self.registrations),
        ])
    }
}

fn graph_bytes(graph: &Graph) -> usize {
    let edges: usize = graph.node_ids().map(|node| size_of_val(graph.inputs(node))).sum();
    let leaves = graph.tensors().iter().filter(|tensor| tensor.node().is_none()).count();
    sum([
        size_of_val(graph.tensors()),
        size_of_val(graph.nodes()),
        edges,
        leaves * NAMED_LEAF,
        graph.outputs().len() * NAME,
    ])
}

fn plan_bytes(plan: &Plan) -> usize {
    let Splits { splits, nodes, copies, leaves, split_of_node, done, copy_of, remote_reads, .. } =
        plan.splits();
    sum([
        size_of_val(&**splits),
        splits.iter().map(|split| size_of_val(&*split.inputs)).sum(),
        splits.iter().map(|split| size_of_val(&*split.after_copies)).sum(),
        size_of_val(&**nodes),
        size_of_val(&**copies),
        size_of_val(&**leaves),
        size_of_val(&**split_of_node),
        size_of_val(&**done),
        size_of_val(&**remote_reads),
        copy_of.len() * MAP_ENTRY,
        size_of_val(plan.order()),
        memory_bytes(plan.memory()),
        plan.graph().tensors().len() * PLACEMENT,
    ])
}

fn memory_bytes(memory: &MemoryPlan) -> usize {
    sum([
        size_of_val(&*memory.lifetimes),
        size_of_val(&*memory.bytes),
        size_of_val(&*memory.locations),
        size_of_val(&*memory.sharing.roots),
        size_of_val(&*memory.sharing.external),
        size_of_val(&*memory.extras),
        size_of_val(&*memory.extra_locations),
    ])
}

fn weight_bytes(weights: &PlanWeights) -> usize {
    let constants = weights.values().filter(|weight| weight.kind() == TensorKind::Constant);
    sum([constants.map(|weight| weight.loaded_bytes()).sum(), weights.len() * WEIGHT])
}

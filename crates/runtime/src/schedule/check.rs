//! Checks a schedule independently of the code that makes it: every node runs once, on the backend of its storage (a
//! mirrored write once more, on a copy of the storage), after its inputs, and every input is on its backend.
#![expect(clippy::indexing_slicing, reason = "a schedule's arrays are sized by its graph")]

use quadriga_graph::{TensorId, TensorKind};

use super::order::ScheduleStep;
use super::plan::Plan;

/// Describes the first rule that a plan breaks.
pub(crate) fn check(plan: &Plan) -> Result<(), String> {
    let (graph, splits) = (plan.graph(), plan.splits());
    let mut ran = vec![false; graph.nodes().len()];
    let mut copied = vec![false; splits.copies.len()];
    let mut written = vec![false; graph.tensors().len()];
    for id in graph.tensor_ids() {
        written[id.index()] = graph[id].node().is_none();
    }
    for step in plan.order() {
        match *step {
            ScheduleStep::Copy(index) => {
                let copy = &splits.copies[index];
                if !written[copy.storage] {
                    return Err(format!("copy {index} is issued before its source {}", copy.storage));
                }
                if copied[index] || copy.from == copy.to {
                    return Err(format!("copy {index} is made twice, or to its own backend"));
                }
                copied[index] = true;
            }
            ScheduleStep::Split(index) => {
                let split = &splits.splits[index];
                if split.node_count == 0 {
                    return Err(format!("split {index} is empty"));
                }
                for node in splits.nodes_of(index) {
                    let output = graph[*node].output();
                    let mirrored = splits.is_mirrored_write(*node, index);
                    if !mirrored && (plan.backend_of(*node) != split.backend || ran[node.index()]) {
                        return Err(format!("{} runs twice or on another backend", graph.node_name(*node)));
                    }
                    if mirrored && !reachable(plan, output, split.backend, &copied) {
                        return Err(format!(
                            "{} is mirrored on a backend without a copy",
                            graph.node_name(*node)
                        ));
                    }
                    for input in graph.inputs(*node) {
                        let place = reachable(plan, *input, split.backend, &copied);
                        if !place || !written[graph[*input].storage().index()] {
                            let (node, input) = (graph.node_name(*node), graph.name(*input));
                            return Err(format!(
                                "{node} in split {index} reads {input}, which is not on its backend"
                            ));
                        }
                    }
                    ran[node.index()] |= !mirrored;
                    written[graph[output].storage().index()] = true;
                }
            }
        }
    }
    match graph.node_ids().find(|node| !graph[*node].op().is_view() && !ran[node.index()]) {
        Some(node) => Err(format!("{} never runs", graph.node_name(node))),
        None => Ok(()),
    }
}

/// Whether a backend can read a tensor at this moment.
fn reachable(plan: &Plan, tensor: TensorId, backend: usize, copied: &[bool]) -> bool {
    let graph = plan.graph();
    let storage = graph[tensor].storage();
    match graph[storage].kind() {
        TensorKind::Weight | TensorKind::Constant | TensorKind::Input => {
            plan.splits().leaves.iter().any(|leaf| leaf.tensor == storage.index() && leaf.backend == backend)
                || plan.copy_for(tensor, backend).is_some_and(|copy| copied[copy])
        }
        TensorKind::Computed(_) | TensorKind::State => {
            plan.placement(storage) == Some(backend)
                || plan.copy_for(tensor, backend).is_some_and(|copy| copied[copy])
        }
    }
}

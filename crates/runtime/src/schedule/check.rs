//! Judges a schedule by its own rules, with nothing that made it: every node runs once, where its storage lives, and
//! perhaps once more on a copy of it; after what it reads, and everything it reads is on its backend.
#![expect(clippy::indexing_slicing, reason = "a schedule's arrays are sized by its graph")]

use quadriga_graph::{TensorId, TensorKind};

use super::ScheduleStep;
use super::plan::Plan;

/// The first rule that a plan breaks, in words.
pub(crate) fn check(plan: &Plan) -> Result<(), String> {
    let (graph, splits) = (plan.graph(), plan.splits());
    let mut ran = vec![false; graph.nodes().len()];
    let mut copied = vec![false; splits.copies.len()];
    let mut made = vec![false; graph.tensors().len()];
    for id in graph.tensor_ids() {
        made[id.index()] = graph[id].node().is_none();
    }
    for step in plan.order() {
        match *step {
            ScheduleStep::Copy(index) => {
                let copy = &splits.copies[index];
                if !made[copy.storage] {
                    return Err(format!("copy {index} goes before its source {}", copy.storage));
                }
                if copied[index] || copy.from == copy.to {
                    return Err(format!("copy {index} is made twice, or to where it is"));
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
                    let echo = splits.is_echo(*node, index);
                    if !echo && (plan.backend_of(*node) != split.backend || ran[node.index()]) {
                        return Err(format!("{} runs twice or elsewhere", graph.node_name(*node)));
                    }
                    if echo && !reachable(plan, output, split.backend, &copied) {
                        return Err(format!("{} is repeated where its copy is not", graph.node_name(*node)));
                    }
                    for input in graph.inputs(*node) {
                        let place = reachable(plan, *input, split.backend, &copied);
                        if !place || !made[graph[*input].storage().index()] {
                            let (node, input) = (graph.node_name(*node), graph.name(*input));
                            return Err(format!("{node} in split {index} reads {input}, which is not there"));
                        }
                    }
                    ran[node.index()] |= !echo;
                    made[graph[output].storage().index()] = true;
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
            plan.home(storage) == Some(backend)
                || plan.copy_for(tensor, backend).is_some_and(|copy| copied[copy])
        }
    }
}

//! Which operations read each weight of a graph.

use quadriga_graph::{Graph, NodeId, Op, TensorId, TensorKind};

/// The nodes that read each weight, and as which input.
pub(crate) struct WeightUses {
    /// (weight, node, input), sorted.
    all: Vec<(u32, u32, u32)>,
}

impl WeightUses {
    /// Collects the uses of all weights.
    pub(crate) fn of(graph: &Graph) -> WeightUses {
        let mut all = Vec::new();
        for node in graph.node_ids() {
            for (input, id) in graph.inputs(node).iter().enumerate() {
                if graph.get(*id).is_some_and(|t| t.kind() == TensorKind::Weight) {
                    all.push((id.index() as u32, node.index() as u32, input as u32));
                }
            }
        }
        all.sort_unstable();
        WeightUses { all }
    }

    /// The distinct operations that read a weight, each with the number of the input that the weight is.
    pub(crate) fn of_tensor<'g>(&self, graph: &'g Graph, tensor: TensorId) -> Vec<(&'g Op, usize)> {
        let index = tensor.index() as u32;
        let first = self.all.partition_point(|(t, ..)| *t < index);
        let readers = self.all.iter().skip(first).take_while(|(t, ..)| *t == index);
        let mut uses: Vec<(&Op, usize)> = Vec::new();
        for (_, node, input) in readers {
            if let Some(node) = graph.get_node(NodeId::from_index(*node as usize))
                && !uses.iter().any(|(op, at)| *op == node.op() && *at == *input as usize)
            {
                uses.push((node.op(), *input as usize));
            }
        }
        uses
    }
}

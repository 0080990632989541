//! Another execution order for a finished graph, with barriers.

use thiserror::Error;

use crate::graph::Graph;
use crate::graph_hash::fingerprint;
use crate::tensor::{NodeId, TensorId, TensorKind};

/// Why nodes cannot be executed in an order.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum OrderError {
    /// The order names a node that the graph does not have.
    #[error("the order names node {node}, but the graph has only {count}")]
    Unknown {
        /// The node's number.
        node: usize,
        /// How many there are.
        count: usize,
    },
    /// A node is in the order twice.
    #[error("{node} is in the order twice")]
    Twice {
        /// The node.
        node: String,
    },
    /// A node is not in the order.
    #[error("{node} is not in the order")]
    Missing {
        /// The node.
        node: String,
    },
    /// A node comes before the node that computes one of its inputs.
    #[error("{node} comes before {input}, which it reads")]
    BeforeInput {
        /// The node.
        node: String,
        /// Its input.
        input: String,
    },
    /// A node would read or write a storage before or after another write than in the graph.
    #[error("{node} would come on the other side of a write into {storage} than in the graph")]
    AcrossWrite {
        /// The node.
        node: String,
        /// The tensor that owns the storage.
        storage: String,
    },
}

impl Graph {
    /// The same graph with its nodes in another order, and a barrier after each group of nodes but the last.
    ///
    /// Nodes between two barriers need not be ordered, so they do not share memory, unless one computes in place what
    /// another has computed: memory is released only at a barrier. No split, and no fusion of a backend, reaches over a
    /// barrier, and no backend passes it before all others have. Without barriers (one group), memory is released after
    /// each node. Tensors keep their ids, nodes do not: a node's id is its place in the order.
    ///
    /// ```
    /// use quadriga_graph::{DType, GraphBuilder};
    ///
    /// let g = GraphBuilder::new();
    /// let x = g.input("x", DType::F32, [8]);
    /// let (a, b) = (x.sqr().named("a"), x.sqrt().named("b"));
    /// g.output("y", a.add(b).named("y"));
    /// let graph = g.finish()?;
    ///
    /// let [a, b, y] = [0, 1, 2].map(quadriga_graph::NodeId::from_index);
    /// let other = graph.with_order(&[&[b, a], &[y]])?;
    /// let names: Vec<String> = other.node_ids().map(|node| other.node_name(node)).collect();
    /// assert_eq!(names, ["b", "a", "y"]);
    /// assert_eq!(other.barriers(), [y]);
    /// assert!(graph.with_order(&[&[y], &[a, b]]).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The order does not have every node once, or contradicts the data flow.
    pub fn with_order(&self, groups: &[&[NodeId]]) -> Result<Graph, OrderError> {
        let order: Vec<NodeId> = groups.iter().flat_map(|group| group.iter().copied()).collect();
        let place = self.check_order(&order)?;
        let mut graph = self.clone();
        graph.results = std::sync::OnceLock::new();
        graph.nodes = order.iter().filter_map(|node| self.get_node(*node).cloned()).collect();
        for tensor in &mut graph.tensors {
            if let TensorKind::Computed(node) = &mut tensor.kind
                && let Some(place) = place.get(node.index())
            {
                *node = *place;
            }
        }
        graph.barriers.clear();
        let mut end = 0;
        for group in groups {
            end += group.len();
            graph.add_barrier(end);
        }
        graph.drop_last_barrier();
        graph.fingerprint = fingerprint(&graph);
        Ok(graph)
    }

    /// The nodes before which a barrier is, in order; see [`Graph::with_order`] and
    /// [`GraphBuilder::barrier`](crate::GraphBuilder::barrier).
    pub fn barriers(&self) -> &[NodeId] {
        &self.barriers
    }

    /// Adds a barrier before the node with this number.
    pub(crate) fn add_barrier(&mut self, before: usize) {
        let barrier = NodeId(before as u32);
        if before > 0 && self.barriers.last() != Some(&barrier) {
            self.barriers.push(barrier);
        }
    }

    /// A barrier after the last node separates nothing.
    pub(crate) fn drop_last_barrier(&mut self) {
        self.barriers.pop_if(|barrier| barrier.index() >= self.nodes.len());
    }

    /// For each node its place in a new order.
    fn check_order(&self, order: &[NodeId]) -> Result<Vec<NodeId>, OrderError> {
        let count = self.nodes.len();
        let mut place: Vec<Option<NodeId>> = vec![None; count];
        for (at, node) in order.iter().enumerate() {
            match place.get_mut(node.index()) {
                None => return Err(OrderError::Unknown { node: node.index(), count }),
                Some(Some(_)) => return Err(OrderError::Twice { node: self.node_name(*node) }),
                Some(place) => *place = Some(NodeId(at as u32)),
            }
        }
        let all: Option<Vec<NodeId>> = place.iter().copied().collect();
        let Some(place) = all else {
            let missing = place.iter().position(Option::is_none).unwrap_or(0);
            return Err(OrderError::Missing { node: self.node_name(NodeId(missing as u32)) });
        };
        for (node, at) in self.node_ids().zip(&place) {
            for input in self.inputs(node) {
                let computed = self.get(*input).and_then(|tensor| tensor.node());
                let produced = computed.and_then(|node| place.get(node.index()));
                if produced.is_some_and(|produced| produced >= at) {
                    let (node, input) = (self.node_name(node), self.name(*input));
                    return Err(OrderError::BeforeInput { node, input });
                }
            }
        }
        self.check_writes(order)?;
        Ok(place)
    }

    /// Every node must find each storage after as many writes as in the graph's own order.
    fn check_writes(&self, order: &[NodeId]) -> Result<(), OrderError> {
        let own: Vec<NodeId> = self.node_ids().collect();
        let before = self.writes_before(&own);
        let after = self.writes_before(order);
        for (node, (before, after)) in own.into_iter().zip(before.iter().zip(&after)) {
            let moved = before.iter().zip(after).find(|(before, after)| before != after);
            if let Some(((storage, _), _)) = moved {
                let (node, storage) = (self.node_name(node), self.name(*storage));
                return Err(OrderError::AcrossWrite { node, storage });
            }
        }
        Ok(())
    }

    /// For each node, by number: its storages, and how often each was written before it in an order.
    fn writes_before(&self, order: &[NodeId]) -> Vec<Vec<(TensorId, u32)>> {
        let mut writes = vec![0u32; self.tensors.len()];
        let mut all = vec![Vec::new(); self.nodes.len()];
        for node in order {
            let Some(n) = self.get_node(*node) else { continue };
            if n.op.is_view() {
                continue;
            }
            let storage = |id: TensorId| self.get(id).map_or(id, |tensor| tensor.storage);
            let used = self.inputs(*node).iter().copied().chain([n.output]).map(storage);
            let used = used.map(|storage| (storage, writes.get(storage.index()).copied().unwrap_or(0)));
            if let Some(all) = all.get_mut(node.index()) {
                all.extend(used);
            }
            if let Some(written) = writes.get_mut(storage(n.output).index()) {
                *written += 1;
            }
        }
        all
    }
}

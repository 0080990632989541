//! The finished graph: immutable plain data, nodes in execution order.

use std::collections::HashMap;
use std::ops::Index;
use std::sync::OnceLock;

use crate::data::Data;
use crate::fingerprint::Fingerprint;
use crate::ops::Op;
use crate::tensor::{NodeId, Tensor, TensorId, TensorKind};

/// An operation applied to tensors, with one tensor as its result.
#[derive(Clone, Debug)]
pub struct Node {
    pub(crate) op: Op,
    pub(crate) first_input: u32,
    pub(crate) input_count: u32,
    pub(crate) output: TensorId,
    /// Bit `i` is set if the result may reuse the memory of input `i`.
    pub(crate) in_place: u8,
}

impl Node {
    /// The operation.
    pub fn op(&self) -> &Op {
        &self.op
    }

    /// The result.
    pub fn output(&self) -> TensorId {
        self.output
    }

    /// The indices of the inputs whose memory the result may reuse: the operation allows it, and type, shape and
    /// strides equal the result's. The memory planner decides whether another node still needs that memory.
    #[inline]
    pub fn in_place_inputs(&self) -> impl Iterator<Item = usize> + use<> {
        let mut bits = self.in_place;
        std::iter::from_fn(move || {
            let input = bits.trailing_zeros();
            bits &= bits.wrapping_sub(1);
            (input < u8::BITS).then_some(input as usize)
        })
    }
}

/// An immutable tensor graph, made by [`GraphBuilder`](crate::GraphBuilder).
///
/// Tensors and nodes are in two arrays, indexed by [`TensorId`] and [`NodeId`]. Nodes are in execution order: each
/// reads only leaves and results of earlier nodes. Indexing with an id of another graph may panic, as indexing a slice
/// does; [`Graph::get`] and [`Graph::get_node`] return `None` instead.
///
/// ```
/// use quadriga_graph::{DType, GraphBuilder, Weight};
///
/// let g = GraphBuilder::new();
/// let x = g.input("x", DType::F32, [2, 8]);
/// let w = g.weight("w", Weight::new(DType::F32, [4, 8]));
/// g.output("y", w.mul_mat(x).relu());
/// let graph = g.finish()?;
///
/// for node in graph.node_ids() {
///     let inputs: Vec<String> = graph.inputs(node).iter().map(|id| graph.name(*id)).collect();
///     println!("{} = {}({})", graph.node_name(node), graph[node].op().name(), inputs.join(", "));
/// }
/// let y = &graph[graph.output("y").unwrap()];
/// assert_eq!((y.dtype(), y.shape().dims()), (DType::F32, &[2, 4][..]));
/// # Ok::<(), quadriga_graph::BuildError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Graph {
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) edges: Vec<TensorId>,
    pub(crate) outputs: Vec<(String, TensorId)>,
    pub(crate) scopes: Vec<String>,
    pub(crate) labels: Vec<String>,
    pub(crate) data: HashMap<TensorId, Data>,
    pub(crate) leaves: HashMap<String, TensorId>,
    /// Results by name; the first lookup builds it.
    pub(crate) results: OnceLock<HashMap<String, TensorId>>,
    /// Nodes before which there is a barrier, in order.
    pub(crate) barriers: Vec<NodeId>,
    pub(crate) fingerprint: Fingerprint,
}

impl Graph {
    /// Gives back what was reserved for more: sessions keep many graphs.
    pub(crate) fn shrink(&mut self) {
        self.tensors.shrink_to_fit();
        self.nodes.shrink_to_fit();
        self.edges.shrink_to_fit();
        self.scopes.shrink_to_fit();
        self.labels.shrink_to_fit();
        self.data.shrink_to_fit();
        self.leaves.shrink_to_fit();
    }

    /// All tensors, in the order of their ids.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// All nodes, in execution order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The ids of all tensors.
    pub fn tensor_ids(&self) -> impl ExactSizeIterator<Item = TensorId> + use<> {
        (0..self.tensors.len() as u32).map(TensorId)
    }

    /// The ids of all nodes, in execution order.
    pub fn node_ids(&self) -> impl ExactSizeIterator<Item = NodeId> + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    /// The tensor with this id.
    pub fn get(&self, id: TensorId) -> Option<&Tensor> {
        self.tensors.get(id.index())
    }

    /// The node with this id.
    pub fn get_node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id.index())
    }

    /// The tensors that a node reads, in the order of its operation's inputs.
    #[inline]
    pub fn inputs(&self, node: NodeId) -> &[TensorId] {
        self.get_node(node).map_or(&[], |n| {
            let first = n.first_input as usize;
            self.edges.get(first..first + n.input_count as usize).unwrap_or(&[])
        })
    }

    /// The outputs with their names.
    pub fn outputs(&self) -> &[(String, TensorId)] {
        &self.outputs
    }

    /// The output with this name.
    pub fn output(&self, name: &str) -> Option<TensorId> {
        self.outputs.iter().find(|(n, _)| n == name).map(|(_, id)| *id)
    }

    /// The input, weight, constant or state with this name.
    pub fn leaf(&self, name: &str) -> Option<TensorId> {
        self.leaves.get(name).copied()
    }

    /// The tensor with this name, as [`Graph::name`] gives it: a leaf's name, or a result's scope and label.
    ///
    /// The names of leaves are unique, those of results need not be: a leaf takes precedence over a result, and of
    /// several results the first in execution order is returned. Outputs have names of their own; see
    /// [`Graph::output`]. The first lookup of a result builds an index, so
    /// that lookups take constant time.
    ///
    /// ```
    /// use quadriga_graph::{DType, GraphBuilder};
    ///
    /// let g = GraphBuilder::new();
    /// let x = g.input("x", DType::F32, [4, 8]);
    /// let block = g.scope("blk.0");
    /// g.output("y", x.silu().named("activation"));
    /// drop(block);
    /// let graph = g.finish()?;
    /// assert_eq!(graph.tensor("blk.0.activation"), graph.output("y"));
    /// assert_eq!(graph[graph.tensor("x").unwrap()].shape().dims(), [4, 8]);
    /// assert_eq!(graph.tensor("y"), None);
    /// # Ok::<(), quadriga_graph::BuildError>(())
    /// ```
    pub fn tensor(&self, name: &str) -> Option<TensorId> {
        self.leaf(name).or_else(|| {
            let results = self.results.get_or_init(|| {
                let mut index = HashMap::with_capacity(self.nodes.len());
                for node in &self.nodes {
                    index.entry(self.name(node.output)).or_insert(node.output);
                }
                index
            });
            results.get(name).copied()
        })
    }

    /// The bytes of a weight or constant, if the builder was given them.
    pub fn data(&self, id: TensorId) -> Option<&Data> {
        self.data.get(&id)
    }

    /// The tensors of one kind, in the order they were declared.
    pub fn of_kind(&self, kind: TensorKind) -> impl Iterator<Item = TensorId> + '_ {
        self.tensor_ids().filter(move |id| self.get(*id).is_some_and(|t| t.kind == kind))
    }

    /// The name of an input, weight, constant or state; `None` for results.
    pub fn leaf_name(&self, id: TensorId) -> Option<&str> {
        let tensor = self.get(id).filter(|tensor| tensor.node().is_none())?;
        self.labels.get(tensor.label as usize).map(String::as_str)
    }

    /// The name of a tensor: a leaf's own name; for a result its scope and label, or without a label its scope,
    /// operation and node number.
    pub fn name(&self, id: TensorId) -> String {
        let Some(tensor) = self.get(id) else { return format!("tensor {}", id.0) };
        let label = self.labels.get(tensor.label as usize).map(String::as_str);
        let TensorKind::Computed(node) = tensor.kind else { return label.unwrap_or_default().to_owned() };
        let scope = self.scopes.get(tensor.scope as usize).map_or("", String::as_str);
        let dot = if scope.is_empty() { "" } else { "." };
        match (label, self.get_node(node)) {
            (Some(label), _) => format!("{scope}{dot}{label}"),
            (None, Some(n)) => format!("{scope}{dot}{}#{}", n.op.name(), node.0),
            (None, None) => format!("{scope}{dot}#{}", node.0),
        }
    }

    /// The name of a node: that of its result.
    pub fn node_name(&self, id: NodeId) -> String {
        self.get_node(id).map_or_else(|| format!("node {}", id.0), |n| self.name(n.output))
    }

    /// The path of scopes in which a tensor was declared; empty at the top level.
    pub fn scope(&self, id: TensorId) -> &str {
        self.get(id).and_then(|t| self.scopes.get(t.scope as usize)).map_or("", String::as_str)
    }

    /// A hash of everything that affects planning and execution: operations, parameters, edges, views, types, shapes,
    /// names of leaves and outputs; not the bytes of weights. It is the same in every run and on every machine, except for
    /// graphs with custom operations, whose identity is that of a process.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }
}

impl Index<TensorId> for Graph {
    type Output = Tensor;

    #[expect(clippy::indexing_slicing, reason = "documented: ids of another graph may panic")]
    fn index(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.index()]
    }
}

impl Index<NodeId> for Graph {
    type Output = Node;

    #[expect(clippy::indexing_slicing, reason = "documented: ids of another graph may panic")]
    fn index(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }
}

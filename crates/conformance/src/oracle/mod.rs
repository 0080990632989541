//! The oracle: a plain evaluator of any graph in f64, the reference for every backend.
//!
//! It is written for clarity, not speed. Tensors have the memory layout of the graph (views and writes share their
//! storage, and stored values are rounded to their type), with one exception: computed F32 tensors are kept as f64, so
//! that the reference is more accurate than the backends. [`compute_node`] works on plain bytes and rounds F32 results.

mod custom;
mod error;
mod memory;
mod ops;
mod ranks;

use quadriga_graph::{Collective, CustomOp, DType, Data, Graph, NodeId, Op, Tensor, TensorId, TensorKind};

pub use error::{EvalError, OracleError};
pub use ranks::RankOracle;

pub(crate) use memory::decode_all;
use memory::{OracleLayout, OracleMemory, OracleMemoryMut, View, ViewMut, zeros};

/// The memory of a tensor that owns storage.
#[derive(Clone, Debug, Default)]
enum Storage {
    /// Neither set nor computed yet.
    #[default]
    Unset,
    /// The bytes in the graph.
    Shared(Data),
    /// Bytes in the encoding of the type.
    Bytes(Vec<u8>),
    /// F32 values kept as f64.
    Exact(Vec<f64>),
}

impl Storage {
    /// Zeros, for a state or a result.
    fn computed(tensor: &Tensor) -> Result<Storage, EvalError> {
        OracleLayout::of(tensor)?;
        if tensor.dtype() == DType::F32 {
            Ok(Storage::Exact(zeros(tensor.elements())?))
        } else {
            Ok(Storage::Bytes(zeros(tensor.bytes())?))
        }
    }

    /// The memory from byte `offset`; `None` if it is unset.
    fn memory(&self, offset: usize) -> Option<OracleMemory<'_>> {
        match self {
            Storage::Unset => None,
            Storage::Shared(data) => Some(OracleMemory::Stored(
                data.as_slice().and_then(|bytes| bytes.get(offset..)).unwrap_or(&[]),
            )),
            Storage::Bytes(bytes) => Some(OracleMemory::Stored(bytes.get(offset..).unwrap_or(&[]))),
            Storage::Exact(values) => Some(OracleMemory::Exact(values.get(offset / 4..).unwrap_or(&[]))),
        }
    }

    fn memory_mut(&mut self, offset: usize) -> Option<OracleMemoryMut<'_>> {
        match self {
            Storage::Unset | Storage::Shared(_) => None,
            Storage::Bytes(bytes) => {
                Some(OracleMemoryMut::Stored(bytes.get_mut(offset..).unwrap_or_default()))
            }
            Storage::Exact(values) => {
                Some(OracleMemoryMut::Exact(values.get_mut(offset / 4..).unwrap_or_default()))
            }
        }
    }
}

/// Evaluates a graph, any number of times; states keep their content between runs.
///
/// ```
/// use quadriga_conformance::Oracle;
/// use quadriga_graph::{DType, GraphBuilder};
///
/// let g = GraphBuilder::new();
/// let x = g.input("x", DType::F32, [3]);
/// g.output("y", x.sqr().sum());
/// let graph = g.finish()?;
///
/// let mut oracle = Oracle::new(&graph)?;
/// oracle.set_f32("x", &[1.0, 2.0, 3.0])?;
/// oracle.run()?;
/// assert_eq!(oracle.read("y")?, [14.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Oracle<'g> {
    graph: &'g Graph,
    /// By tensor index; only tensors that own storage have one.
    storages: Vec<Storage>,
}

impl<'g> Oracle<'g> {
    /// An oracle of `graph`: states are zero, weights and constants have their bytes in the graph.
    pub fn new(graph: &'g Graph) -> Result<Oracle<'g>, OracleError> {
        let mut oracle = Oracle { graph, storages: vec![Storage::Unset; graph.tensors().len()] };
        for (id, slot) in graph.tensor_ids().zip(&mut oracle.storages) {
            let Some(tensor) = graph.get(id) else { continue };
            if let Some(data) = graph.data(id) {
                *slot = match data.as_slice() {
                    Some(_) => Storage::Shared(data.clone()),
                    None => Storage::Bytes(data.bytes().into_owned()),
                };
            } else if tensor.kind() == TensorKind::State {
                *slot = Storage::computed(tensor)
                    .map_err(|error| OracleError::Tensor { name: graph.name(id), error })?;
            }
        }
        Ok(oracle)
    }

    /// Sets an input, weight or state: the bytes of a contiguous tensor of its type.
    pub fn set(&mut self, name: &str, bytes: &[u8]) -> Result<(), OracleError> {
        let id = self.graph.leaf(name).ok_or_else(|| OracleError::NoSuchName(name.to_owned()))?;
        let tensor = self.graph.get(id).ok_or(OracleError::NoSuchId(id.index()))?;
        if tensor.kind() == TensorKind::Constant {
            return Err(OracleError::Constant(name.to_owned()));
        }
        if bytes.len() != tensor.bytes() {
            let (expected, found) = (tensor.bytes(), bytes.len());
            return Err(OracleError::Length { name: name.to_owned(), expected, found });
        }
        let failed = |error| OracleError::Tensor { name: name.to_owned(), error };
        let mut storage = Storage::Bytes(bytes.to_vec());
        if tensor.kind() == TensorKind::State {
            storage = Storage::computed(tensor).map_err(failed)?;
            let layout = OracleLayout::of(tensor).map_err(failed)?;
            if let Some(memory) = storage.memory_mut(0) {
                ViewMut { layout, memory }.set_all_bytes(bytes).map_err(failed)?;
            }
        }
        if let Some(slot) = self.storages.get_mut(id.index()) {
            *slot = storage;
        }
        Ok(())
    }

    /// [`Oracle::set`] with F32 values.
    pub fn set_f32(&mut self, name: &str, values: &[f32]) -> Result<(), OracleError> {
        self.set(name, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
    }

    /// [`Oracle::set`] with I32 values.
    pub fn set_i32(&mut self, name: &str, values: &[i32]) -> Result<(), OracleError> {
        self.set(name, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
    }

    /// Computes every node, in execution order.
    pub fn run(&mut self) -> Result<(), OracleError> {
        self.graph.node_ids().try_for_each(|node| self.run_node(node))
    }

    /// Computes every node and lets `disturb` change each F32 result before it is used, to simulate rounding.
    pub(crate) fn run_disturbed(&mut self, mut disturb: impl FnMut(&mut [f64])) -> Result<(), OracleError> {
        for id in self.graph.node_ids() {
            self.run_node(id)?;
            let computed = self.graph.get_node(id).filter(|node| !node.op().is_view());
            let storage = computed.and_then(|node| self.graph.get(node.output())).map(Tensor::storage);
            let storage = storage.and_then(|storage| self.storages.get_mut(storage.index()));
            if let Some(Storage::Exact(values)) = storage {
                disturb(values);
            }
        }
        Ok(())
    }

    /// Computes one node; its inputs must have been computed.
    pub fn run_node(&mut self, id: NodeId) -> Result<(), OracleError> {
        let node = self.graph.get_node(id).ok_or(OracleError::NoSuchId(id.index()))?;
        let output = self.graph.get(node.output()).ok_or(OracleError::NoSuchId(node.output().index()))?;
        if node.op().is_view() {
            return Ok(());
        }
        let failed = |error| OracleError::Node { node: self.graph.node_name(id), error };
        let slot = output.storage().index();
        // A write whose other inputs do not share its storage can write in place.
        let mut inputs = self.graph.inputs(id);
        let mut storage = if node.op().is_write() {
            inputs = inputs.get(1..).unwrap_or(&[]);
            let shared =
                inputs.iter().any(|i| self.graph.get(*i).is_some_and(|t| t.storage() == output.storage()));
            let place = self.storages.get_mut(slot).ok_or(OracleError::NoSuchId(slot))?;
            if shared { place.clone() } else { std::mem::take(place) }
        } else {
            Storage::computed(output).map_err(failed)?
        };
        let result = self.evaluate(id, inputs, output, &mut storage);
        if let Some(place) = self.storages.get_mut(slot) {
            *place = storage;
        }
        result
    }

    fn evaluate(
        &self,
        id: NodeId,
        inputs: &[TensorId],
        output: &Tensor,
        storage: &mut Storage,
    ) -> Result<(), OracleError> {
        let failed = |error| OracleError::Node { node: self.graph.node_name(id), error };
        let node = self.graph.get_node(id).ok_or(OracleError::NoSuchId(id.index()))?;
        let views = inputs.iter().map(|i| self.view(*i)).collect::<Result<Vec<_>, _>>()?;
        let layout = OracleLayout::of(output).map_err(failed)?;
        let memory = storage
            .memory_mut(output.offset())
            .ok_or_else(|| OracleError::Unset(self.graph.name(output.storage())))?;
        let out = &mut ViewMut { layout, memory };
        match node.op() {
            Op::Collective(collective) => alone(collective, &views, out).map_err(failed),
            Op::Custom(op) => custom::evaluate(op, self.graph, id, &views, out).map_err(failed),
            op => ops::evaluate(op, &views, out).map_err(failed),
        }
    }

    /// The values of an output or leaf, in row-major order.
    pub fn read(&self, name: &str) -> Result<Vec<f64>, OracleError> {
        let id = self.graph.output(name).or_else(|| self.graph.leaf(name));
        self.values(id.ok_or_else(|| OracleError::NoSuchName(name.to_owned()))?)
    }

    /// The current values of any tensor, in row-major order.
    pub fn values(&self, id: TensorId) -> Result<Vec<f64>, OracleError> {
        self.view(id)?.all().map_err(|error| OracleError::Tensor { name: self.graph.name(id), error })
    }

    /// The current bytes of any tensor in its own type, in row-major order.
    pub fn bytes(&self, id: TensorId) -> Result<Vec<u8>, OracleError> {
        self.view(id)?.all_bytes().map_err(|error| OracleError::Tensor { name: self.graph.name(id), error })
    }

    fn view(&self, id: TensorId) -> Result<View<'_>, OracleError> {
        let tensor = self.graph.get(id).ok_or(OracleError::NoSuchId(id.index()))?;
        let name = || self.graph.name(id);
        let layout = OracleLayout::of(tensor).map_err(|error| OracleError::Tensor { name: name(), error })?;
        let storage = self.storages.get(tensor.storage().index()).ok_or(OracleError::NoSuchId(id.index()))?;
        let memory = storage
            .memory(tensor.offset())
            .ok_or_else(|| OracleError::Unset(self.graph.name(tensor.storage())))?;
        Ok(View { layout, memory })
    }
}

/// A collective of one rank: its result is its input.
fn alone(collective: &Collective, inputs: &[View<'_>], out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    match (collective.ranks.count, inputs) {
        (1, [input]) => out.set_all(&input.all()?),
        (count, _) => Err(EvalError::Ranks(count)),
    }
}

/// Computes one node in memory of the caller.
///
/// Each slice starts at the first byte of its tensor and has at least [`Tensor::bytes`] bytes. `inputs` are all inputs
/// of the node in order. The result is rounded to its type and written to `output`. For an operation that writes its
/// input 0, `output` must hold the current bytes of that input, and `inputs[0]` is ignored. Views compute nothing.
///
/// ```
/// use quadriga_conformance::compute_node;
/// use quadriga_graph::{DType, GraphBuilder};
///
/// let g = GraphBuilder::new();
/// let x = g.input("x", DType::F32, [1]);
/// g.output("y", x.neg());
/// let graph = g.finish()?;
/// let mut y = [0; 4];
/// compute_node(&graph, graph.node_ids().next().unwrap(), &[&2f32.to_le_bytes()], &mut y)?;
/// assert_eq!(f32::from_le_bytes(y), -2.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn compute_node(
    graph: &Graph,
    id: NodeId,
    inputs: &[&[u8]],
    output: &mut [u8],
) -> Result<(), OracleError> {
    let node = graph.get_node(id).ok_or(OracleError::NoSuchId(id.index()))?;
    let failed = |error| OracleError::Node { node: graph.node_name(id), error };
    let ids = graph.inputs(id);
    if inputs.len() != ids.len() {
        return Err(failed(EvalError::Arity(inputs.len())));
    }
    let first = usize::from(node.op().is_write());
    let mut views = Vec::new();
    for (id, bytes) in ids.iter().zip(inputs).skip(first) {
        let tensor = graph.get(*id).ok_or(OracleError::NoSuchId(id.index()))?;
        let layout = OracleLayout::of(tensor).map_err(failed)?;
        views.push(View { layout, memory: OracleMemory::Stored(bytes) });
    }
    let tensor = graph.get(node.output()).ok_or(OracleError::NoSuchId(node.output().index()))?;
    let layout = OracleLayout::of(tensor).map_err(failed)?;
    let out = &mut ViewMut { layout, memory: OracleMemoryMut::Stored(output) };
    match node.op() {
        Op::Collective(collective) => alone(collective, &views, out).map_err(failed),
        Op::Custom(op) => custom::compute(op, graph, id, &views, out).map_err(failed),
        op => ops::evaluate(op, &views, out).map_err(failed),
    }
}

/// Computes one node of a custom operation in memory of the caller by the code of `op`, which may be another operation
/// than the node's own: a backend's code for it. Otherwise as [`compute_node`].
pub fn compute_custom_node(
    op: &CustomOp,
    graph: &Graph,
    id: NodeId,
    inputs: &[&[u8]],
    output: &mut [u8],
) -> Result<(), OracleError> {
    let failed = |error| OracleError::Node { node: graph.node_name(id), error };
    let mut views = Vec::new();
    for (id, bytes) in graph.inputs(id).iter().zip(inputs) {
        let tensor = graph.get(*id).ok_or(OracleError::NoSuchId(id.index()))?;
        let layout = OracleLayout::of(tensor).map_err(failed)?;
        views.push(View { layout, memory: OracleMemory::Stored(bytes) });
    }
    let tensor = graph.get_node(id).and_then(|node| graph.get(node.output()));
    let layout = OracleLayout::of(tensor.ok_or(OracleError::NoSuchId(id.index()))?).map_err(failed)?;
    let out = &mut ViewMut { layout, memory: OracleMemoryMut::Stored(output) };
    custom::compute(op, graph, id, &views, out).map_err(failed)
}

//! A graph under construction: tensors and nodes as they are added, and the first error.
//!
//! [`GraphBuilder`](crate::GraphBuilder) owns it, and every [`Value`](crate::Value) refers to it.

use std::collections::HashMap;
use std::panic::Location;

use crate::data::Data;
use crate::dtype::DType;
use crate::error::{BuildError, GraphErrorKind};
use crate::graph::{Graph, Node};
use crate::ops::{Inferred, Op, ResultMemory};
use crate::shape::{MAX_DIMS, Shape, Strides};
use crate::tensor::{NodeId, Tensor, TensorId, TensorKind};

/// `Tensor::label` of a result without a label.
const NO_LABEL: u32 = u32::MAX;

/// The graph so far, the open scope and the first error.
#[derive(Default)]
pub(crate) struct Construction {
    pub(crate) graph: Graph,
    pub(crate) error: Option<BuildError>,
    /// The innermost open scope, as an index into `graph.scopes`.
    pub(crate) scope: u32,
    /// For each tensor that owns storage: how often it was written, and the last node that did.
    writes: HashMap<TensorId, (u32, NodeId)>,
}

impl Construction {
    /// Records the first error; the caller has made sure that there is none yet.
    pub(crate) fn fail(
        &mut self,
        operation: String,
        kind: GraphErrorKind,
        inputs: &[TensorId],
        location: &'static Location<'static>,
    ) {
        let graph = &self.graph;
        let inputs = inputs
            .iter()
            .map(|id| match graph.get(*id) {
                Some(t) => format!("{} {} {}", graph.name(*id), t.dtype, t.shape),
                None => format!("tensor {}", id.0),
            })
            .collect();
        let scope = graph.scopes.get(self.scope as usize).cloned().unwrap_or_default();
        self.error = Some(BuildError { operation, kind, inputs, scope, location });
    }

    /// Opens a scope inside the current one and returns the current one.
    pub(crate) fn open_scope(&mut self, name: &str) -> u32 {
        let outer = self.scope;
        let path = match self.graph.scopes.get(outer as usize) {
            Some(path) if !path.is_empty() => format!("{path}.{name}"),
            _ => name.to_owned(),
        };
        self.scope = self.graph.scopes.len() as u32;
        self.graph.scopes.push(path);
        outer
    }

    /// Adds an input, weight, constant or state.
    pub(crate) fn leaf(
        &mut self,
        name: &str,
        kind: TensorKind,
        dtype: DType,
        shape: Shape,
        data: Option<Data>,
    ) -> Result<TensorId, GraphErrorKind> {
        let id = self.next_id()?;
        if self.graph.leaves.contains_key(name) {
            return Err(GraphErrorKind::Duplicate(name.to_owned()));
        }
        let (strides, bytes) = contiguous(dtype, &shape)?;
        if let Some(data) = data {
            if data.len() != bytes {
                return Err(GraphErrorKind::DataLength { expected: bytes, found: data.len() });
            }
            self.graph.data.insert(id, data);
        }
        let label = self.graph.labels.len() as u32;
        self.graph.labels.push(name.to_owned());
        self.graph.leaves.insert(name.to_owned(), id);
        let scope = self.scope;
        self.graph.tensors.push(Tensor {
            dtype,
            shape,
            strides,
            bytes,
            kind,
            storage: id,
            offset: 0,
            version: 0,
            scope,
            label,
        });
        Ok(id)
    }

    /// Adds a node and its result.
    pub(crate) fn node(&mut self, op: Op, ids: &[TensorId]) -> Result<TensorId, GraphErrorKind> {
        let tensor = self.result_of(&op, ids)?;
        let output = TensorId(self.graph.tensors.len() as u32);
        let first_input = self.graph.edges.len() as u32;
        self.graph.edges.extend_from_slice(ids);
        if op.is_write() {
            let node = NodeId(self.graph.nodes.len() as u32);
            self.writes.insert(tensor.storage, (tensor.version, node));
        }
        let fits = |input: &&usize| {
            let input = ids.get(**input).and_then(|id| self.graph.get(*id));
            input.is_some_and(|input| tensor.storage == output && input.same_layout(&tensor))
        };
        let in_place = op.declaration().in_place.iter().filter(fits).fold(0, |bits, input| bits | 1 << input);
        self.graph.nodes.push(Node { op, first_input, input_count: ids.len() as u32, output, in_place });
        self.graph.tensors.push(tensor);
        Ok(output)
    }

    /// Names the result of a node; leaves keep the names they were declared with.
    pub(crate) fn set_label(&mut self, id: TensorId, label: &str) {
        let next = self.graph.labels.len() as u32;
        if self.error.is_none()
            && let Some(t) = self.graph.tensors.get_mut(id.index())
            && matches!(t.kind, TensorKind::Computed(_))
        {
            t.label = next;
            self.graph.labels.push(label.to_owned());
        }
    }

    /// Makes a tensor an output of the graph.
    pub(crate) fn output(&mut self, name: &str, id: TensorId) -> Result<(), GraphErrorKind> {
        if self.graph.output(name).is_some() {
            return Err(GraphErrorKind::Duplicate(name.to_owned()));
        }
        self.check_current(0, id)?;
        self.graph.outputs.push((name.to_owned(), id));
        Ok(())
    }

    fn next_id(&self) -> Result<TensorId, GraphErrorKind> {
        u32::try_from(self.graph.tensors.len())
            .ok()
            .filter(|n| *n < u32::MAX - 1)
            .map(TensorId)
            .ok_or(GraphErrorKind::TooMany)
    }

    /// An error if the storage of a tensor was written after the tensor was made.
    fn check_current(&self, input: usize, id: TensorId) -> Result<(), GraphErrorKind> {
        let Some(t) = self.graph.get(id) else { return Err(GraphErrorKind::Foreign { input }) };
        match self.writes.get(&t.storage) {
            Some((version, writer)) if *version != t.version => {
                Err(GraphErrorKind::Stale { input, writer: self.graph.node_name(*writer) })
            }
            _ => Ok(()),
        }
    }

    /// The tensor that an operation on these inputs yields.
    fn result_of(&self, op: &Op, ids: &[TensorId]) -> Result<Tensor, GraphErrorKind> {
        let output = self.next_id()?;
        u32::try_from(self.graph.edges.len() + ids.len()).map_err(|_| GraphErrorKind::TooMany)?;
        for (input, id) in ids.iter().enumerate() {
            self.check_current(input, *id)?;
        }
        let inputs: Vec<&Tensor> = ids.iter().filter_map(|id| self.graph.get(*id)).collect();
        let Inferred { dtype, shape, memory } = op.infer(&inputs)?;
        let mut tensor = Tensor {
            dtype,
            shape,
            strides: Strides([0; MAX_DIMS]),
            bytes: 0,
            kind: TensorKind::Computed(NodeId(self.graph.nodes.len() as u32)),
            storage: output,
            offset: 0,
            version: 0,
            scope: self.scope,
            label: NO_LABEL,
        };
        match (memory, inputs.first()) {
            (ResultMemory::View(offset, strides), Some(source)) => {
                tensor.strides = strides;
                tensor.bytes = strides.span(&shape, dtype).ok_or(GraphErrorKind::Overflow)?;
                tensor.storage = source.storage;
                tensor.offset = source.offset.checked_add(offset).ok_or(GraphErrorKind::Overflow)?;
                tensor.version = source.version;
            }
            (ResultMemory::Written, Some(target)) => {
                let owner = self.graph.get(target.storage).map(|t| t.kind);
                if !matches!(owner, Some(TensorKind::State | TensorKind::Computed(_))) {
                    return Err(GraphErrorKind::ReadOnly { input: 0 });
                }
                let lost = self.graph.outputs.iter().find(|(_, id)| {
                    self.graph.get(*id).is_some_and(|output| output.storage == target.storage)
                });
                if let Some((name, _)) = lost {
                    return Err(GraphErrorKind::OutputLost(name.clone()));
                }
                tensor.strides = target.strides;
                tensor.bytes = target.bytes;
                tensor.storage = target.storage;
                tensor.offset = target.offset;
                tensor.version = self.writes.get(&target.storage).map_or(1, |(version, _)| version + 1);
            }
            _ => (tensor.strides, tensor.bytes) = contiguous(dtype, &shape)?,
        }
        if let Op::Custom(custom) = op {
            custom.units(&inputs, &tensor).map_err(GraphErrorKind::Custom)?;
        }
        Ok(tensor)
    }
}

fn contiguous(dtype: DType, shape: &Shape) -> Result<(Strides, usize), GraphErrorKind> {
    if !shape.cols().is_multiple_of(dtype.block_len()) {
        return Err(GraphErrorKind::Blocks { dtype, cols: shape.cols() });
    }
    shape.contiguous(dtype).ok_or(GraphErrorKind::Overflow)
}

//! Building a graph: leaves, scopes, nodes, and the first mistake kept for the end.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Deref;
use std::panic::Location;

use crate::fingerprint::fingerprint;
use crate::ops::{Outcome, Place};
use crate::{
    BuildError, DType, Data, Graph, GraphErrorKind, Node, NodeId, Op, Shape, Tensor, TensorId, TensorKind,
    Value,
};

/// Builds a [`Graph`].
///
/// Building never panics. The first mistake is kept, with the caller's line and the path of scopes; everything
/// after it is ignored, and [`GraphBuilder::finish`] returns it.
///
/// ```
/// use quadriga_graph::{DType, GraphBuilder, Weight};
///
/// let g = GraphBuilder::new();
/// let x = g.input("x", DType::F32, [8, 64]);
/// let w = g.weight("up.weight", Weight::new(DType::Q4_0, [128, 64]));
/// let y = g.scope("blk.0").mul_mat(w, x).silu();
/// g.output("y", y);
/// let graph = g.finish()?;
/// assert_eq!(graph[graph.output("y").unwrap()].shape().dims(), &[8, 128]);
/// # Ok::<(), quadriga_graph::BuildError>(())
/// ```
#[derive(Default)]
pub struct GraphBuilder {
    inner: RefCell<Inner>,
}

#[derive(Default)]
struct Inner {
    graph: Graph,
    error: Option<BuildError>,
    scope: u32,
    /// For each tensor that owns storage: how often it was written, and the last node that did.
    writes: HashMap<TensorId, (u32, NodeId)>,
}

const NO_LABEL: u32 = u32::MAX;

/// Type, shape and, where known already, bytes of a weight.
#[derive(Clone, Debug)]
pub struct Weight {
    /// The type of its elements.
    pub dtype: DType,
    /// Its extents, outermost dimension first.
    pub shape: Shape,
    /// Its bytes; without them the session must be given them before it runs.
    pub data: Option<Data>,
}

impl Weight {
    /// A weight whose bytes come later.
    pub fn new(dtype: DType, shape: impl Into<Shape>) -> Weight {
        Weight { dtype, shape: shape.into(), data: None }
    }

    /// A weight with its bytes.
    pub fn with_data(dtype: DType, shape: impl Into<Shape>, data: impl Into<Data>) -> Weight {
        Weight { dtype, shape: shape.into(), data: Some(data.into()) }
    }
}

/// Puts what is built while it lives under a name; nested scopes join with dots. It is also the builder itself.
pub struct Scope<'g> {
    builder: &'g GraphBuilder,
    outer: u32,
}

impl Deref for Scope<'_> {
    type Target = GraphBuilder;

    fn deref(&self) -> &GraphBuilder {
        self.builder
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        self.builder.inner.borrow_mut().scope = self.outer;
    }
}

impl GraphBuilder {
    /// An empty graph.
    pub fn new() -> GraphBuilder {
        let builder = GraphBuilder::default();
        builder.inner.borrow_mut().graph.scopes.push(String::new());
        builder
    }

    /// Opens a scope: until the returned guard is dropped, results carry its name.
    pub fn scope(&self, name: &str) -> Scope<'_> {
        let mut inner = self.inner.borrow_mut();
        let outer = inner.scope;
        let path = match inner.graph.scopes.get(outer as usize) {
            Some(path) if !path.is_empty() => format!("{path}.{name}"),
            _ => name.to_owned(),
        };
        inner.scope = inner.graph.scopes.len() as u32;
        inner.graph.scopes.push(path);
        Scope { builder: self, outer }
    }

    /// A tensor that the caller sets before a run.
    #[track_caller]
    pub fn input(&self, name: &str, dtype: DType, shape: impl Into<Shape>) -> Value<'_> {
        self.leaf(name, TensorKind::Input, dtype, shape.into(), None, Location::caller())
    }

    /// Parameters, set once for all runs.
    #[track_caller]
    pub fn weight(&self, name: &str, weight: impl Into<Weight>) -> Value<'_> {
        let w = weight.into();
        self.leaf(name, TensorKind::Weight, w.dtype, w.shape, w.data, Location::caller())
    }

    /// Bytes that belong to the graph.
    #[track_caller]
    pub fn constant(
        &self,
        name: &str,
        dtype: DType,
        shape: impl Into<Shape>,
        data: impl Into<Data>,
    ) -> Value<'_> {
        self.leaf(name, TensorKind::Constant, dtype, shape.into(), Some(data.into()), Location::caller())
    }

    /// A tensor that outlives a run, zero at first.
    #[track_caller]
    pub fn state(&self, name: &str, dtype: DType, shape: impl Into<Shape>) -> Value<'_> {
        self.leaf(name, TensorKind::State, dtype, shape.into(), None, Location::caller())
    }

    /// Keeps a tensor to the end of a run, to be read under this name.
    #[track_caller]
    pub fn output(&self, name: &str, value: Value<'_>) {
        let location = Location::caller();
        let mut inner = self.inner.borrow_mut();
        if inner.error.is_some() {
            return;
        }
        let problem = if !value.is_of(self) {
            GraphErrorKind::Foreign { input: 0 }
        } else if inner.graph.output(name).is_some() {
            GraphErrorKind::Duplicate(name.to_owned())
        } else {
            match inner.current(0, value.id()) {
                Ok(()) => {
                    inner.graph.outputs.push((name.to_owned(), value.id()));
                    return;
                }
                Err(problem) => problem,
            }
        };
        inner.fail(format!("output \"{name}\""), problem, &[], location);
    }

    /// Applies any operation; the methods of [`Value`] are shorter ways to say the same.
    #[track_caller]
    pub fn apply<'g>(&'g self, op: Op, inputs: &[Value<'g>]) -> Value<'g> {
        self.apply_at(op, inputs, Location::caller())
    }

    pub(crate) fn apply_at<'g>(
        &'g self,
        op: Op,
        inputs: &[Value<'g>],
        location: &'static Location<'static>,
    ) -> Value<'g> {
        let mut inner = self.inner.borrow_mut();
        if inner.error.is_some() {
            return Value::new(self, TensorId(0));
        }
        let name = op.name();
        let ids: Vec<TensorId> = inputs.iter().map(|v| v.id()).collect();
        let made = match inputs.iter().position(|v| !v.is_of(self)) {
            Some(input) => Err(GraphErrorKind::Foreign { input }),
            None => inner.node(op, &ids),
        };
        match made {
            Ok(id) => Value::new(self, id),
            Err(problem) => {
                let known = if matches!(problem, GraphErrorKind::Foreign { .. }) { &[][..] } else { &ids };
                inner.fail(name.to_owned(), problem, known, location);
                Value::new(self, TensorId(0))
            }
        }
    }

    /// Keeps a mistake that a method found before it had an operation to apply.
    pub(crate) fn mistake<'g>(
        &'g self,
        operation: &str,
        problem: GraphErrorKind,
        inputs: &[Value<'g>],
        location: &'static Location<'static>,
    ) -> Value<'g> {
        let mut inner = self.inner.borrow_mut();
        if inner.error.is_none() {
            let ids: Vec<TensorId> = inputs.iter().map(|v| v.id()).collect();
            inner.fail(operation.to_owned(), problem, &ids, location);
        }
        Value::new(self, TensorId(0))
    }

    pub(crate) fn set_label(&self, id: TensorId, label: &str) {
        let mut inner = self.inner.borrow_mut();
        if inner.error.is_some() {
            return;
        }
        let next = inner.graph.labels.len() as u32;
        if let Some(t) = inner.graph.tensors.get_mut(id.index())
            && matches!(t.kind, TensorKind::Computed(_))
        {
            t.label = next;
            inner.graph.labels.push(label.to_owned());
        }
    }

    pub(crate) fn with_tensor<T>(&self, id: TensorId, read: impl FnOnce(&Tensor) -> T) -> Option<T> {
        self.inner.borrow().graph.get(id).map(read)
    }

    fn leaf(
        &self,
        name: &str,
        kind: TensorKind,
        dtype: DType,
        shape: Shape,
        data: Option<Data>,
        location: &'static Location<'static>,
    ) -> Value<'_> {
        let mut inner = self.inner.borrow_mut();
        if inner.error.is_none() {
            match inner.leaf(name, kind, dtype, shape, data) {
                Ok(id) => return Value::new(self, id),
                Err(problem) => {
                    let what = match kind {
                        TensorKind::Input => "input",
                        TensorKind::Weight => "weight",
                        TensorKind::Constant => "constant",
                        TensorKind::State => "state",
                        TensorKind::Computed(_) => "tensor",
                    };
                    inner.fail(format!("{what} \"{name}\" {dtype} {shape}"), problem, &[], location);
                }
            }
        }
        Value::new(self, TensorId(0))
    }

    /// The finished graph, or the first mistake.
    pub fn finish(self) -> Result<Graph, BuildError> {
        let Inner { mut graph, error, .. } = self.inner.into_inner();
        if let Some(error) = error {
            return Err(error);
        }
        graph.fingerprint = fingerprint(&graph);
        Ok(graph)
    }
}

impl Inner {
    fn fail(
        &mut self,
        operation: String,
        problem: GraphErrorKind,
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
        self.error = Some(BuildError { operation, problem, inputs, scope, location });
    }

    fn next_id(&self) -> Result<TensorId, GraphErrorKind> {
        u32::try_from(self.graph.tensors.len())
            .ok()
            .filter(|n| *n < u32::MAX - 1)
            .map(TensorId)
            .ok_or(GraphErrorKind::TooMany)
    }

    fn leaf(
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

    /// An error unless a tensor still holds the value it stands for.
    fn current(&self, input: usize, id: TensorId) -> Result<(), GraphErrorKind> {
        let Some(t) = self.graph.get(id) else { return Err(GraphErrorKind::Foreign { input }) };
        match self.writes.get(&t.storage) {
            Some((version, writer)) if *version != t.version => {
                Err(GraphErrorKind::Stale { input, writer: self.graph.node_name(*writer) })
            }
            _ => Ok(()),
        }
    }

    fn node(&mut self, op: Op, ids: &[TensorId]) -> Result<TensorId, GraphErrorKind> {
        let tensor = self.try_node(&op, ids)?;
        let output = TensorId(self.graph.tensors.len() as u32);
        let first_input = self.graph.edges.len() as u32;
        self.graph.edges.extend_from_slice(ids);
        if op.is_write() {
            let node = NodeId(self.graph.nodes.len() as u32);
            self.writes.insert(tensor.storage, (tensor.version, node));
        }
        let fits = |input: &&usize| {
            let taken = ids.get(**input).and_then(|id| self.graph.get(*id));
            taken.is_some_and(|taken| tensor.storage == output && taken.same_layout(&tensor))
        };
        let takes = op.declaration().in_place.iter().filter(fits).fold(0, |takes, input| takes | 1 << input);
        self.graph.nodes.push(Node { op, first_input, input_count: ids.len() as u32, output, takes });
        self.graph.tensors.push(tensor);
        Ok(output)
    }

    fn try_node(&self, op: &Op, ids: &[TensorId]) -> Result<Tensor, GraphErrorKind> {
        let output = self.next_id()?;
        u32::try_from(self.graph.edges.len() + ids.len()).map_err(|_| GraphErrorKind::TooMany)?;
        for (input, id) in ids.iter().enumerate() {
            self.current(input, *id)?;
        }
        let inputs: Vec<&Tensor> = ids.iter().filter_map(|id| self.graph.get(*id)).collect();
        let Outcome { dtype, shape, place } = op.infer(&inputs)?;
        let mut tensor = Tensor {
            dtype,
            shape,
            strides: crate::Strides([0; crate::MAX_DIMS]),
            bytes: 0,
            kind: TensorKind::Computed(NodeId(self.graph.nodes.len() as u32)),
            storage: output,
            offset: 0,
            version: 0,
            scope: self.scope,
            label: NO_LABEL,
        };
        match (place, inputs.first()) {
            (Place::View(offset, strides), Some(source)) => {
                tensor.strides = strides;
                tensor.bytes = strides.span(&shape, dtype).ok_or(GraphErrorKind::Overflow)?;
                tensor.storage = source.storage;
                tensor.offset = source.offset.checked_add(offset).ok_or(GraphErrorKind::Overflow)?;
                tensor.version = source.version;
            }
            (Place::Written, Some(target)) => {
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
        Ok(tensor)
    }
}

fn contiguous(dtype: DType, shape: &Shape) -> Result<(crate::Strides, usize), GraphErrorKind> {
    if !shape.cols().is_multiple_of(dtype.block_len()) {
        return Err(GraphErrorKind::Blocks { dtype, cols: shape.cols() });
    }
    shape.contiguous(dtype).ok_or(GraphErrorKind::Overflow)
}

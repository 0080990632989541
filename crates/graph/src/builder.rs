//! The graph builder: leaves, scopes, outputs and the finished graph.

use std::cell::RefCell;
use std::ops::Deref;
use std::panic::Location;

use crate::construction::Construction;
use crate::data::Data;
use crate::dtype::DType;
use crate::error::{BuildError, GraphErrorKind};
use crate::graph::Graph;
use crate::graph_hash::fingerprint;
use crate::ops::Op;
use crate::shape::Shape;
use crate::tensor::{TensorId, TensorKind};
use crate::value::{self, Value};

/// Builds a [`Graph`].
///
/// Building never panics. The builder keeps the first error, with the caller's line and the path of scopes, ignores
/// everything after it, and returns it from [`GraphBuilder::finish`].
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
    construction: RefCell<Construction>,
}

/// Type, shape and optionally the bytes of a weight.
#[derive(Clone, Debug)]
pub struct Weight {
    /// The element type.
    pub dtype: DType,
    /// The extents, outermost dimension first.
    pub shape: Shape,
    /// The bytes; a weight without them must be loaded into the session before a run.
    pub data: Option<Data>,
}

impl Weight {
    /// A weight whose bytes are loaded later.
    pub fn new(dtype: DType, shape: impl Into<Shape>) -> Weight {
        Weight { dtype, shape: shape.into(), data: None }
    }

    /// A weight with its bytes.
    pub fn with_data(dtype: DType, shape: impl Into<Shape>, data: impl Into<Data>) -> Weight {
        Weight { dtype, shape: shape.into(), data: Some(data.into()) }
    }
}

/// An open scope: while it lives, results get its name as a prefix. Nested scopes join with dots. A scope
/// dereferences to its builder.
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
        self.builder.construction.borrow_mut().scope = self.outer;
    }
}

impl GraphBuilder {
    /// A builder of an empty graph.
    pub fn new() -> GraphBuilder {
        let builder = GraphBuilder::default();
        builder.construction.borrow_mut().graph.scopes.push(String::new());
        builder
    }

    /// Opens a scope: until the returned guard is dropped, the names of results start with `name`.
    pub fn scope(&self, name: &str) -> Scope<'_> {
        let outer = self.construction.borrow_mut().open_scope(name);
        Scope { builder: self, outer }
    }

    /// Declares a tensor that the caller sets before each run.
    #[track_caller]
    pub fn input(&self, name: &str, dtype: DType, shape: impl Into<Shape>) -> Value<'_> {
        self.leaf(name, TensorKind::Input, dtype, shape.into(), None, Location::caller())
    }

    /// Declares a parameter of the model, set once for all runs.
    #[track_caller]
    pub fn weight(&self, name: &str, weight: impl Into<Weight>) -> Value<'_> {
        let w = weight.into();
        self.leaf(name, TensorKind::Weight, w.dtype, w.shape, w.data, Location::caller())
    }

    /// Declares a constant, whose bytes belong to the graph.
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

    /// Declares a tensor that keeps its content between runs, such as a KV cache; zero at first.
    #[track_caller]
    pub fn state(&self, name: &str, dtype: DType, shape: impl Into<Shape>) -> Value<'_> {
        self.leaf(name, TensorKind::State, dtype, shape.into(), None, Location::caller())
    }

    /// Makes a tensor an output: it keeps its value to the end of a run and can be read under this name.
    #[track_caller]
    pub fn output(&self, name: &str, value: Value<'_>) {
        let mut construction = self.construction.borrow_mut();
        if construction.error.is_some() {
            return;
        }
        let made = match value.is_of(&self.construction) {
            true => construction.output(name, value.id()),
            false => Err(GraphErrorKind::Foreign { input: 0 }),
        };
        if let Err(kind) = made {
            construction.fail(format!("output \"{name}\""), kind, &[], Location::caller());
        }
    }

    /// Ends a group of nodes: everything built before is executed before everything built after. With barriers, the memory
    /// of results is released only at a barrier, so that nodes between two of them need not be ordered; see
    /// [`Graph::with_order`], which also takes another order of the nodes.
    pub fn barrier(&self) {
        let mut construction = self.construction.borrow_mut();
        let nodes = construction.graph.nodes.len();
        construction.graph.add_barrier(nodes);
    }

    /// Applies any operation; the methods of [`Value`] are shorthands for this.
    #[track_caller]
    pub fn apply<'g>(&'g self, op: Op, inputs: &[Value<'g>]) -> Value<'g> {
        value::apply(&self.construction, op, inputs, Location::caller())
    }

    /// The values `start, start + step, …` below `stop` (above it, if `step` is negative), F32.
    #[track_caller]
    pub fn arange(&self, start: f32, stop: f32, step: f32) -> Value<'_> {
        // A step of 0, or one away from `stop`, gives none; one that is not finite is refused.
        let steps = ((f64::from(stop) - f64::from(start)) / f64::from(step)).ceil();
        let count = if steps.is_finite() && steps > 0.0 { steps as usize } else { 0 };
        let step = if steps.is_finite() { step } else { f32::NAN };
        value::apply(&self.construction, Op::Arange { start, step, count }, &[], Location::caller())
    }

    /// Weights `[n, k]` times each row of `x […, m, k]` → `[…, m, n]`; the same as [`Value::mul_mat`].
    #[track_caller]
    pub fn mul_mat<'g>(&self, weights: Value<'g>, x: Value<'g>) -> Value<'g> {
        weights.mul_mat(x)
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
        let mut construction = self.construction.borrow_mut();
        if construction.error.is_none() {
            match construction.leaf(name, kind, dtype, shape, data) {
                Ok(id) => return Value::new(&self.construction, id),
                Err(error) => {
                    let declared = format!("{} \"{name}\" {dtype} {shape}", kind.name());
                    construction.fail(declared, error, &[], location);
                }
            }
        }
        Value::new(&self.construction, TensorId(0))
    }

    /// The finished graph, or the first error.
    pub fn finish(self) -> Result<Graph, BuildError> {
        let Construction { mut graph, error, .. } = self.construction.into_inner();
        if let Some(error) = error {
            return Err(error);
        }
        graph.drop_last_barrier();
        graph.fingerprint = fingerprint(&graph);
        graph.shrink();
        Ok(graph)
    }
}

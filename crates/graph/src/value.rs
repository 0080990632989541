//! A tensor of a graph under construction, with the operations as methods.

use std::cell::RefCell;
use std::panic::Location;

use crate::construction::Construction;
use crate::custom::CustomOp;
use crate::dtype::DType;
use crate::error::GraphErrorKind;
use crate::ops::{Binary, Gate, Op, Order, Rope, Unary};
use crate::shape::{MAX_DIMS, Shape, Strides};
use crate::tensor::{Tensor, TensorId};

/// A tensor of the graph that a [`GraphBuilder`](crate::GraphBuilder) builds; a small, copyable handle.
///
/// Each method adds one node. A method that finds an error records it for
/// [`GraphBuilder::finish`](crate::GraphBuilder::finish) and returns a placeholder, which further methods accept and
/// ignore. [`Op`] defines each operation. `+`, `-`, `*` and `/` work on two values, where the right operand is repeated
/// to the shape of the left, and on a value and an `f32`.
///
/// ```
/// use quadriga_graph::{DType, GraphBuilder, Weight};
///
/// let g = GraphBuilder::new();
/// let x = g.input("x", DType::F32, [8, 64]);
/// let scale = g.weight("scale", Weight::new(DType::F32, [64]));
/// let bias = g.weight("bias", Weight::new(DType::F32, [64]));
/// let y = x.norm(1e-5) * scale + bias;
/// g.output("y", 0.5 * y.tanh() + x);
/// assert_eq!(g.finish()?.nodes().len(), 6);
/// # Ok::<(), quadriga_graph::BuildError>(())
/// ```
#[derive(Clone, Copy)]
pub struct Value<'g> {
    construction: &'g RefCell<Construction>,
    id: TensorId,
}

/// Adds a node, or records why it cannot be added and returns a placeholder.
pub(crate) fn apply<'g>(
    construction: &'g RefCell<Construction>,
    op: Op,
    inputs: &[Value<'g>],
    location: &'static Location<'static>,
) -> Value<'g> {
    let mut state = construction.borrow_mut();
    if state.error.is_some() {
        return Value::new(construction, TensorId(0));
    }
    let name = op.name();
    let ids: Vec<TensorId> = inputs.iter().map(|v| v.id).collect();
    let made = match inputs.iter().position(|v| !v.is_of(construction)) {
        Some(input) => Err(GraphErrorKind::Foreign { input }),
        None => state.node(op, &ids),
    };
    let id = made.unwrap_or_else(|kind| {
        let known = if matches!(kind, GraphErrorKind::Foreign { .. }) { &[][..] } else { &ids };
        state.fail(name.to_owned(), kind, known, location);
        TensorId(0)
    });
    Value::new(construction, id)
}

/// Methods that apply a unary function.
macro_rules! unary_methods {
    ($($(#[$doc:meta])* $name:ident => $unary:ident,)*) => {$(
        $(#[$doc])*
        #[track_caller]
        pub fn $name(self) -> Value<'g> {
            self.unary(Unary::$unary)
        }
    )*};
}

/// Methods that apply an elementwise function of two tensors.
macro_rules! binary_methods {
    ($($(#[$doc:meta])* $name:ident => $binary:ident,)*) => {$(
        $(#[$doc])*
        #[track_caller]
        pub fn $name(self, other: Value<'g>) -> Value<'g> {
            self.op(Op::Binary(Binary::$binary), &[self, other])
        }
    )*};
}

#[allow(
    clippy::should_implement_trait,
    reason = "the operators are implemented, too; methods can be chained"
)]
impl<'g> Value<'g> {
    pub(crate) fn new(construction: &'g RefCell<Construction>, id: TensorId) -> Value<'g> {
        Value { construction, id }
    }

    pub(crate) fn is_of(&self, construction: &RefCell<Construction>) -> bool {
        std::ptr::eq(self.construction, construction)
    }

    fn read<T>(self, read: impl FnOnce(&Tensor) -> T) -> Option<T> {
        self.construction.borrow().graph.get(self.id).map(read)
    }

    /// The id that the finished graph knows this tensor by.
    pub fn id(self) -> TensorId {
        self.id
    }

    /// Its shape; that of a scalar after an error.
    pub fn shape(self) -> Shape {
        self.read(|t| *t.shape()).unwrap_or(Shape::from([]))
    }

    /// Its type; F32 after an error.
    pub fn dtype(self) -> DType {
        self.read(|t| t.dtype()).unwrap_or(DType::F32)
    }

    /// Its byte strides, outermost of four dimensions first.
    pub fn strides(self) -> [usize; MAX_DIMS] {
        self.read(|t| t.strides()).unwrap_or([0; MAX_DIMS])
    }

    /// Whether its elements follow each other without gaps, in the order of its shape.
    pub fn is_contiguous(self) -> bool {
        self.read(Tensor::is_contiguous).unwrap_or(true)
    }

    /// Labels this result; its name in tables, messages and [`Graph::tensor`](crate::Graph::tensor) is the scope and
    /// this label. A leaf keeps the name it was declared with.
    pub fn named(self, label: &str) -> Value<'g> {
        self.construction.borrow_mut().set_label(self.id, label);
        self
    }

    #[track_caller]
    pub(crate) fn op(self, op: Op, inputs: &[Value<'g>]) -> Value<'g> {
        apply(self.construction, op, inputs, Location::caller())
    }

    binary_methods! {
        /// `self + other`, `other` repeated to this shape.
        add => Add,
        /// `self − other`, `other` repeated to this shape.
        sub => Sub,
        /// `self · other` element by element, `other` repeated to this shape.
        mul => Mul,
        /// `self / other` element by element, `other` repeated to this shape.
        div => Div,
    }

    /// A function of each element.
    #[track_caller]
    pub fn unary(self, unary: Unary) -> Value<'g> {
        self.op(Op::Unary(unary), &[self])
    }

    unary_methods! {
        /// Squares.
        sqr => Sqr,
        /// Square roots.
        sqrt => Sqrt,
        /// Natural logarithms.
        log => Log,
        /// Exponentials.
        exp => Exp,
        /// Sines.
        sin => Sin,
        /// Cosines.
        cos => Cos,
        /// Absolute values.
        abs => Abs,
        /// Negated values.
        neg => Neg,
        /// `max(x, 0)`.
        relu => Relu,
        /// GELU by the tanh approximation.
        gelu => Gelu,
        /// GELU by the error function.
        gelu_erf => GeluErf,
        /// `x · sigmoid(x)`.
        silu => Silu,
        /// `1 / (1 + e⁻ˣ)`.
        sigmoid => Sigmoid,
        /// Hyperbolic tangents.
        tanh => Tanh,
        /// `ln(1 + eˣ)`.
        softplus => Softplus,
    }

    /// `self + value`, where `value` has one element.
    #[track_caller]
    pub fn add1(self, value: Value<'g>) -> Value<'g> {
        self.op(Op::Add1, &[self, value])
    }

    /// `scale · self`.
    #[track_caller]
    pub fn scale(self, scale: f32) -> Value<'g> {
        self.scale_bias(scale, 0.0)
    }

    /// `scale · self + bias`.
    #[track_caller]
    pub fn scale_bias(self, scale: f32, bias: f32) -> Value<'g> {
        self.op(Op::Scale { scale, bias }, &[self])
    }

    /// Clamps each element to `min..=max`.
    #[track_caller]
    pub fn clamp(self, min: f32, max: f32) -> Value<'g> {
        self.op(Op::Clamp { min, max }, &[self])
    }

    /// `activation(self) · up`.
    #[track_caller]
    pub fn gated(self, gate: Gate, up: Value<'g>) -> Value<'g> {
        self.op(Op::Gated { gate, swapped: false }, &[self, up])
    }

    /// `activation(gate) · up` of the two halves of each row; the first half is the gate unless `swapped`.
    #[track_caller]
    pub fn gated_halves(self, gate: Gate, swapped: bool) -> Value<'g> {
        self.op(Op::Gated { gate, swapped }, &[self])
    }

    /// `silu(self) · up`.
    #[track_caller]
    pub fn swiglu(self, up: Value<'g>) -> Value<'g> {
        self.gated(Gate::Swiglu, up)
    }

    /// Layer norm without weights: rows normalized to mean 0 and variance 1.
    #[track_caller]
    pub fn norm(self, eps: f32) -> Value<'g> {
        self.op(Op::Norm { eps }, &[self])
    }

    /// Rows divided by their root mean square.
    #[track_caller]
    pub fn rms_norm(self, eps: f32) -> Value<'g> {
        self.op(Op::RmsNorm { eps }, &[self])
    }

    /// Groups of channels normalized to mean 0 and variance 1.
    #[track_caller]
    pub fn group_norm(self, groups: usize, eps: f32) -> Value<'g> {
        self.op(Op::GroupNorm { groups, eps }, &[self])
    }

    /// Rows divided by their Euclidean length.
    #[track_caller]
    pub fn l2_norm(self, eps: f32) -> Value<'g> {
        self.op(Op::L2Norm { eps }, &[self])
    }

    /// Softmax along rows of `scale · self + mask`, optionally with an attention sink per head.
    #[track_caller]
    pub fn soft_max(self, scale: f32, mask: Option<Value<'g>>, sinks: Option<Value<'g>>) -> Value<'g> {
        let op = Op::SoftMax { scale, mask: mask.is_some(), sinks: sinks.is_some() };
        let inputs: Vec<_> = [Some(self), mask, sinks].into_iter().flatten().collect();
        self.op(op, &inputs)
    }

    /// Rotary position embedding of `[…, tokens, heads, d]` at `positions [tokens]`.
    #[track_caller]
    pub fn rope(self, rope: Rope, positions: Value<'g>, factors: Option<Value<'g>>) -> Value<'g> {
        let op = Op::Rope { rope, factors: factors.is_some() };
        let inputs: Vec<_> = [Some(self), Some(positions), factors].into_iter().flatten().collect();
        self.op(op, &inputs)
    }

    /// `−∞` where `column > past + row`.
    #[track_caller]
    pub fn diag_mask_inf(self, past: usize) -> Value<'g> {
        self.op(Op::DiagMaskInf { past }, &[self])
    }

    /// 0 where `column > past + row`.
    #[track_caller]
    pub fn diag_mask_zero(self, past: usize) -> Value<'g> {
        self.op(Op::DiagMaskZero { past }, &[self])
    }

    /// Matrix multiplication with these weights: `[n, k]`, `x […, m, k]` → `x · selfᵀ […, m, n]`.
    #[track_caller]
    pub fn mul_mat(self, x: Value<'g>) -> Value<'g> {
        self.op(Op::MulMat, &[self, x])
    }

    /// Matrix multiplication with selected experts: weights `[e, n, k]`, `x [t, u|1, k]`, and the expert of each row in
    /// `ids [t, u]`; the row of an expert −1 is 0.
    #[track_caller]
    pub fn mul_mat_id(self, x: Value<'g>, ids: Value<'g>) -> Value<'g> {
        self.op(Op::MulMatId, &[self, x, ids])
    }

    /// The sum of outer products: `[…, k, p]`, `[…, k, q]` → `[…, q, p]`.
    #[track_caller]
    pub fn out_prod(self, other: Value<'g>) -> Value<'g> {
        self.op(Op::OutProd, &[self, other])
    }

    /// Gathers the rows with these indices.
    #[track_caller]
    pub fn get_rows(self, ids: Value<'g>) -> Value<'g> {
        self.op(Op::GetRows, &[self, ids])
    }

    /// Overwrites the rows with these indices; returns the tensor after the write.
    #[track_caller]
    pub fn set_rows(self, rows: Value<'g>, ids: Value<'g>) -> Value<'g> {
        self.op(Op::SetRows, &[self, rows, ids])
    }

    /// A contiguous copy in another type.
    #[track_caller]
    pub fn cast(self, to: DType) -> Value<'g> {
        self.op(Op::Cast { to }, &[self])
    }

    /// A contiguous copy.
    #[track_caller]
    pub fn cont(self) -> Value<'g> {
        self.cast(self.dtype())
    }

    /// Copies these elements to `target`; returns the target after the write.
    #[track_caller]
    pub fn copy_into(self, target: Value<'g>) -> Value<'g> {
        self.op(Op::CopyInto, &[target, self])
    }

    /// Concatenates this tensor and `others` along dimension `axis`.
    #[track_caller]
    pub fn concat(self, axis: usize, others: &[Value<'g>]) -> Value<'g> {
        let rank = others.iter().map(|v| v.shape().rank()).fold(self.shape().rank(), usize::max);
        let inputs: Vec<_> = std::iter::once(self).chain(others.iter().copied()).collect();
        if axis >= rank {
            return self.axis_error("concat", axis, &inputs, Location::caller());
        }
        self.op(Op::Concat { axis4: MAX_DIMS - rank + axis }, &inputs)
    }

    /// Repeats the tensor along every dimension to fill `shape`.
    #[track_caller]
    pub fn repeat(self, shape: impl Into<Shape>) -> Value<'g> {
        self.op(Op::Repeat { shape: shape.into() }, &[self])
    }

    /// Appends zeros along the innermost dimensions; `after` gives their numbers, outermost dimension first.
    #[track_caller]
    pub fn pad<const N: usize>(self, after: [usize; N]) -> Value<'g> {
        let Some(skip) = MAX_DIMS.checked_sub(N) else {
            return self.axis_error("pad", N, &[self], Location::caller());
        };
        let mut all = [0; MAX_DIMS];
        for (to, from) in all.iter_mut().skip(skip).zip(after) {
            *to = from;
        }
        self.op(Op::Pad { before: [0; MAX_DIMS], after: all }, &[self])
    }

    /// The sum of all elements.
    #[track_caller]
    pub fn sum(self) -> Value<'g> {
        self.op(Op::Sum, &[self])
    }

    /// The sum of each row.
    #[track_caller]
    pub fn sum_rows(self) -> Value<'g> {
        self.op(Op::SumRows, &[self])
    }

    /// The mean of each row.
    #[track_caller]
    pub fn mean(self) -> Value<'g> {
        self.op(Op::Mean, &[self])
    }

    /// The index of each row's largest element.
    #[track_caller]
    pub fn argmax(self) -> Value<'g> {
        self.op(Op::ArgMax, &[self])
    }

    /// The indices that sort each row.
    #[track_caller]
    pub fn argsort(self, order: Order) -> Value<'g> {
        self.op(Op::ArgSort { order }, &[self])
    }

    /// The indices of each row's `k` largest elements.
    #[track_caller]
    pub fn top_k(self, k: usize) -> Value<'g> {
        self.op(Op::TopK { k }, &[self])
    }

    /// A custom operation of this tensor and `others`.
    #[track_caller]
    pub fn custom(self, op: &CustomOp, others: &[Value<'g>]) -> Value<'g> {
        let inputs: Vec<_> = std::iter::once(self).chain(others.iter().copied()).collect();
        self.op(Op::Custom(op.clone()), &inputs)
    }

    /// The same elements under another shape.
    #[track_caller]
    pub fn reshape(self, shape: impl Into<Shape>) -> Value<'g> {
        self.op(Op::Reshape { shape: shape.into() }, &[self])
    }

    /// A view with any shape, byte strides (outermost of four dimensions first) and byte offset.
    #[track_caller]
    pub fn view(self, shape: impl Into<Shape>, strides: [usize; MAX_DIMS], offset: usize) -> Value<'g> {
        self.op(Op::View { shape: shape.into(), strides: Strides(strides), offset }, &[self])
    }

    /// Elements `start..start + len` along dimension `axis`, as a view.
    #[track_caller]
    pub fn slice(self, axis: usize, start: usize, len: usize) -> Value<'g> {
        let (shape, strides, block) = (self.shape(), self.strides(), self.dtype().block_len());
        let axis4 = MAX_DIMS - shape.rank() + axis;
        let mut dims = shape.dims4();
        let (Some(dim), Some(stride)) = (dims.get_mut(axis4), strides.get(axis4)) else {
            return self.axis_error("slice", axis, &[self], Location::caller());
        };
        let unit = if axis4 == MAX_DIMS - 1 { block } else { 1 };
        if start.checked_add(len).is_none_or(|end| end > *dim) || !start.is_multiple_of(unit) {
            let text = format!("{len} elements from {start} of a dimension of {dim}");
            return self.fail("slice", GraphErrorKind::Parameter(text), &[self], Location::caller());
        }
        *dim = len;
        let offset = (start / unit).saturating_mul(*stride);
        // An empty slice may start one past the end; it has no bytes, so its offset is 0.
        let offset = if dims.contains(&0) { 0 } else { offset };
        let shape = Shape::from_dims4(dims, shape.rank());
        self.op(Op::View { shape, strides: Strides(strides), offset }, &[self])
    }

    /// Reorders the dimensions: dimension `i` of the result is dimension `axes[i]` of this tensor.
    #[track_caller]
    pub fn permute<const N: usize>(self, axes: [usize; N]) -> Value<'g> {
        let rank = self.shape().rank();
        let skip = MAX_DIMS - rank;
        let mut all = [0u8, 1, 2, 3];
        if N != rank {
            return self.axis_error("permute", N, &[self], Location::caller());
        }
        for (to, from) in all.iter_mut().skip(skip).zip(axes) {
            *to = u8::try_from(from.saturating_add(skip)).unwrap_or(u8::MAX);
        }
        self.op(Op::Permute { axes: all }, &[self])
    }

    /// Swaps the two innermost dimensions.
    #[track_caller]
    pub fn transpose(self) -> Value<'g> {
        self.op(Op::Transpose, &[self])
    }

    fn axis_error(
        self,
        operation: &str,
        axis: usize,
        inputs: &[Value<'g>],
        location: &'static Location<'static>,
    ) -> Value<'g> {
        let text = format!("{axis} does not fit a tensor of {} dimensions", self.shape().rank());
        self.fail(operation, GraphErrorKind::Parameter(text), inputs, location)
    }

    /// Records an error that a method finds before it applies an operation.
    pub(crate) fn fail(
        self,
        operation: &str,
        kind: GraphErrorKind,
        inputs: &[Value<'g>],
        location: &'static Location<'static>,
    ) -> Value<'g> {
        let mut construction = self.construction.borrow_mut();
        if construction.error.is_none() {
            let ids: Vec<TensorId> = inputs.iter().map(|v| v.id).collect();
            construction.fail(operation.to_owned(), kind, &ids, location);
        }
        Value::new(self.construction, TensorId(0))
    }
}

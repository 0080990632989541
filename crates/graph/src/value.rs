//! A tensor of a graph under construction, with the operations as methods.

use std::panic::Location;

use crate::{
    Attention, Binary, DType, Gate, GraphBuilder, GraphErrorKind, MAX_DIMS, Op, Order, Rope, Shape, Strides,
    TensorId, Unary,
};

/// A tensor of the graph that a [`GraphBuilder`] is building. Small and copyable.
///
/// Each method adds one node, or keeps the first mistake for [`GraphBuilder::finish`] and returns a value that may
/// be used further without harm. [`Op`] says what each operation computes.
#[derive(Clone, Copy)]
pub struct Value<'g> {
    builder: &'g GraphBuilder,
    id: TensorId,
}

/// Methods that apply a unary function.
macro_rules! unary_methods {
    ($($(#[$doc:meta])* $name:ident => $unary:ident,)*) => {$(
        $(#[$doc])*
        #[track_caller]
        #[allow(clippy::should_implement_trait, reason = "operators could not carry the caller's location")]
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
        #[allow(clippy::should_implement_trait, reason = "operators could not carry the caller's location")]
        pub fn $name(self, other: Value<'g>) -> Value<'g> {
            self.op(Op::Binary(Binary::$binary), &[self, other])
        }
    )*};
}

impl<'g> Value<'g> {
    pub(crate) fn new(builder: &'g GraphBuilder, id: TensorId) -> Value<'g> {
        Value { builder, id }
    }

    pub(crate) fn is_of(&self, builder: &GraphBuilder) -> bool {
        std::ptr::eq(self.builder, builder)
    }

    /// The id that the finished graph knows this tensor by.
    pub fn id(self) -> TensorId {
        self.id
    }

    /// Its shape; that of a single value after a mistake.
    pub fn shape(self) -> Shape {
        self.builder.with_tensor(self.id, |t| *t.shape()).unwrap_or(Shape::from([]))
    }

    /// Its type; F32 after a mistake.
    pub fn dtype(self) -> DType {
        self.builder.with_tensor(self.id, |t| t.dtype()).unwrap_or(DType::F32)
    }

    /// Its byte strides, outermost of four dimensions first.
    pub fn strides(self) -> [usize; MAX_DIMS] {
        self.builder.with_tensor(self.id, |t| t.strides()).unwrap_or([0; MAX_DIMS])
    }

    /// Names this result, within its scope, in tables and messages.
    pub fn named(self, label: &str) -> Value<'g> {
        self.builder.set_label(self.id, label);
        self
    }

    #[track_caller]
    fn op(self, op: Op, inputs: &[Value<'g>]) -> Value<'g> {
        self.builder.apply_at(op, inputs, Location::caller())
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
        /// `x · sigmoid(x)`.
        silu => Silu,
        /// `1 / (1 + e⁻ˣ)`.
        sigmoid => Sigmoid,
        /// Hyperbolic tangents.
        tanh => Tanh,
    }

    /// `self + value`, a tensor of one element.
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

    /// Limits each element to `min..=max`.
    #[track_caller]
    pub fn clamp(self, min: f32, max: f32) -> Value<'g> {
        self.op(Op::Clamp { min, max }, &[self])
    }

    /// `activation(self) · up`.
    #[track_caller]
    pub fn gated(self, gate: Gate, up: Value<'g>) -> Value<'g> {
        self.op(Op::Gated { gate, swapped: false }, &[self, up])
    }

    /// `activation(one half of each row) · the other`; the first half is the gate unless `swapped`.
    #[track_caller]
    pub fn gated_halves(self, gate: Gate, swapped: bool) -> Value<'g> {
        self.op(Op::Gated { gate, swapped }, &[self])
    }

    /// `silu(self) · up`.
    #[track_caller]
    pub fn swiglu(self, up: Value<'g>) -> Value<'g> {
        self.gated(Gate::Swiglu, up)
    }

    /// Rows brought to mean 0 and variance 1.
    #[track_caller]
    pub fn norm(self, eps: f32) -> Value<'g> {
        self.op(Op::Norm { eps }, &[self])
    }

    /// Rows divided by their root mean square.
    #[track_caller]
    pub fn rms_norm(self, eps: f32) -> Value<'g> {
        self.op(Op::RmsNorm { eps }, &[self])
    }

    /// Groups of channels brought to mean 0 and variance 1.
    #[track_caller]
    pub fn group_norm(self, groups: usize, eps: f32) -> Value<'g> {
        self.op(Op::GroupNorm { groups, eps }, &[self])
    }

    /// Rows divided by their length.
    #[track_caller]
    pub fn l2_norm(self, eps: f32) -> Value<'g> {
        self.op(Op::L2Norm { eps }, &[self])
    }

    /// Softmax along rows of `scale · self + mask`, with a sink per head.
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

    /// These weights `[n, k]` times each row of `x […, m, k]` → `[…, m, n]`.
    #[track_caller]
    pub fn mul_mat(self, x: Value<'g>) -> Value<'g> {
        self.op(Op::MulMat, &[self, x])
    }

    /// These experts `[e, n, k]` times rows `[t, u|1, k]`, each by the expert that `ids [t, u]` names.
    #[track_caller]
    pub fn mul_mat_id(self, x: Value<'g>, ids: Value<'g>) -> Value<'g> {
        self.op(Op::MulMatId, &[self, x, ids])
    }

    /// The sum of outer products: `[…, k, p]`, `[…, k, q]` → `[…, q, p]`.
    #[track_caller]
    pub fn out_prod(self, other: Value<'g>) -> Value<'g> {
        self.op(Op::OutProd, &[self, other])
    }

    /// The rows that `ids` name.
    #[track_caller]
    pub fn get_rows(self, ids: Value<'g>) -> Value<'g> {
        self.op(Op::GetRows, &[self, ids])
    }

    /// Writes `rows` over the rows that `ids` name; the result is this tensor as it is then.
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

    /// Writes these elements to `target`; the result is the target as it is then.
    #[track_caller]
    pub fn copy_into(self, target: Value<'g>) -> Value<'g> {
        self.op(Op::CopyInto, &[target, self])
    }

    /// This tensor, then `others`, along dimension `axis`.
    #[track_caller]
    pub fn concat(self, axis: usize, others: &[Value<'g>]) -> Value<'g> {
        let rank = others.iter().map(|v| v.shape().rank()).fold(self.shape().rank(), usize::max);
        let inputs: Vec<_> = std::iter::once(self).chain(others.iter().copied()).collect();
        if axis >= rank {
            return self.axis_mistake("concat", axis, &inputs, Location::caller());
        }
        self.op(Op::Concat { axis4: MAX_DIMS - rank + axis }, &inputs)
    }

    /// Repeated to fill `shape`.
    #[track_caller]
    pub fn repeat(self, shape: impl Into<Shape>) -> Value<'g> {
        self.op(Op::Repeat { shape: shape.into() }, &[self])
    }

    /// Zeros appended along the innermost dimensions; `after` lists them outermost first.
    #[track_caller]
    pub fn pad<const N: usize>(self, after: [usize; N]) -> Value<'g> {
        let Some(skip) = MAX_DIMS.checked_sub(N) else {
            return self.axis_mistake("pad", N, &[self], Location::caller());
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

    /// Attention of these queries `[b, h, t, d]` over `keys` and `values`; see [`Op::Attention`].
    #[track_caller]
    pub fn attention(
        self,
        keys: Value<'g>,
        values: Value<'g>,
        mask: Option<Value<'g>>,
        spans: Option<Value<'g>>,
        scale: f32,
        soft_cap: Option<f32>,
    ) -> Value<'g> {
        let op = Op::Attention(Attention { scale, soft_cap, mask: mask.is_some(), spans: spans.is_some() });
        let inputs: Vec<_> =
            [Some(self), Some(keys), Some(values), mask, spans].into_iter().flatten().collect();
        self.op(op, &inputs)
    }

    /// The same elements under another shape.
    #[track_caller]
    pub fn reshape(self, shape: impl Into<Shape>) -> Value<'g> {
        self.op(Op::Reshape { shape: shape.into() }, &[self])
    }

    /// A window with any shape, byte strides (outermost of four first) and byte offset.
    #[track_caller]
    pub fn view(self, shape: impl Into<Shape>, strides: [usize; MAX_DIMS], offset: usize) -> Value<'g> {
        self.op(Op::View { shape: shape.into(), strides: Strides(strides), offset }, &[self])
    }

    /// The part `start..start + len` of dimension `axis`, as a view.
    #[track_caller]
    pub fn slice(self, axis: usize, start: usize, len: usize) -> Value<'g> {
        let (shape, strides, block) = (self.shape(), self.strides(), self.dtype().block_len());
        let axis4 = MAX_DIMS - shape.rank() + axis;
        let mut dims = shape.dims4();
        let (Some(dim), Some(stride)) = (dims.get_mut(axis4), strides.get(axis4)) else {
            return self.axis_mistake("slice", axis, &[self], Location::caller());
        };
        let unit = if axis4 == MAX_DIMS - 1 { block } else { 1 };
        if start.checked_add(len).is_none_or(|end| end > *dim) || !start.is_multiple_of(unit) {
            let text = format!("{len} elements from {start} of a dimension of {dim}");
            return self.builder.mistake(
                "slice",
                GraphErrorKind::Parameter(text),
                &[self],
                Location::caller(),
            );
        }
        *dim = len;
        let offset = (start / unit).saturating_mul(*stride);
        // A part without elements may start at the very end; it looks at no byte, so it starts at the first.
        let offset = if dims.contains(&0) { 0 } else { offset };
        let shape = Shape::from_dims4(dims, shape.rank());
        self.op(Op::View { shape, strides: Strides(strides), offset }, &[self])
    }

    /// The dimensions in another order: dimension `i` of the result is dimension `axes[i]` of this.
    #[track_caller]
    pub fn permute<const N: usize>(self, axes: [usize; N]) -> Value<'g> {
        let rank = self.shape().rank();
        let skip = MAX_DIMS - rank;
        let mut all = [0u8, 1, 2, 3];
        if N != rank {
            return self.axis_mistake("permute", N, &[self], Location::caller());
        }
        for (to, from) in all.iter_mut().skip(skip).zip(axes) {
            *to = u8::try_from(from.saturating_add(skip)).unwrap_or(u8::MAX);
        }
        self.op(Op::Permute { axes: all }, &[self])
    }

    /// The two innermost dimensions exchanged.
    #[track_caller]
    pub fn transpose(self) -> Value<'g> {
        self.op(Op::Transpose, &[self])
    }

    fn axis_mistake(
        self,
        operation: &str,
        axis: usize,
        inputs: &[Value<'g>],
        location: &'static Location<'static>,
    ) -> Value<'g> {
        let text = format!("{axis} does not fit a tensor of {} dimensions", self.shape().rank());
        self.builder.mistake(operation, GraphErrorKind::Parameter(text), inputs, location)
    }
}

impl GraphBuilder {
    /// Weights `[n, k]` times each row of `x […, m, k]` → `[…, m, n]`: [`Value::mul_mat`] in the order of a formula.
    #[track_caller]
    pub fn mul_mat<'g>(&self, weights: Value<'g>, x: Value<'g>) -> Value<'g> {
        weights.mul_mat(x)
    }
}

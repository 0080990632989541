//! The operations with their parameters, names and in-place inputs.

use super::rope::Rope;
use crate::dtype::DType;
use crate::shape::{MAX_DIMS, Shape, Strides};

/// Elementwise functions of two tensors; the second is repeated to the shape of the first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Binary {
    /// `a + b`
    Add,
    /// `a − b`
    Sub,
    /// `a · b`
    Mul,
    /// `a / b`
    Div,
}

/// Elementwise functions of one tensor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Unary {
    /// `x²`
    Sqr,
    /// `√x`
    Sqrt,
    /// natural logarithm
    Log,
    /// `eˣ`
    Exp,
    /// sine
    Sin,
    /// cosine
    Cos,
    /// `|x|`
    Abs,
    /// `−x`
    Neg,
    /// −1, 0 or 1
    Sign,
    /// 1 where `x > 0`, else 0
    Step,
    /// `max(x, 0)`
    Relu,
    /// Gaussian error linear unit, by the tanh approximation
    Gelu,
    /// Gaussian error linear unit, by the error function
    GeluErf,
    /// `x · sigmoid(1.702 x)`
    GeluQuick,
    /// `x · sigmoid(x)`
    Silu,
    /// `1 / (1 + e⁻ˣ)`
    Sigmoid,
    /// hyperbolic tangent
    Tanh,
    /// `x` where `x > 0`, else `eˣ − 1`
    Elu,
    /// `x · clamp((x + 3) / 6, 0, 1)`
    HardSwish,
    /// `clamp((x + 3) / 6, 0, 1)`
    HardSigmoid,
    /// `ln(1 + eˣ)`
    Softplus,
}

impl Unary {
    /// Every unary function.
    pub const ALL: [Unary; 21] = {
        use Unary::*;
        [
            Sqr,
            Sqrt,
            Log,
            Exp,
            Sin,
            Cos,
            Abs,
            Neg,
            Sign,
            Step,
            Relu,
            Gelu,
            GeluErf,
            GeluQuick,
            Silu,
            Sigmoid,
            Tanh,
            Elu,
            HardSwish,
            HardSigmoid,
            Softplus,
        ]
    };
}

/// The activation of a gated unit: `activation(gate) · up`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Gate {
    /// SiLU
    Swiglu,
    /// GELU (tanh approximation)
    Geglu,
    /// ReLU
    Reglu,
}

/// Ascending or descending.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Order {
    /// Smallest first.
    Ascending,
    /// Largest first.
    Descending,
}

/// Parameters of [`Op::Attention`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Attention {
    /// Scores are multiplied by this.
    pub scale: f32,
    /// Scores are replaced by `cap · tanh(score / cap)`, before the mask.
    pub soft_cap: Option<f32>,
    /// Whether a mask follows the values among the inputs.
    pub mask: bool,
    /// Whether spans follow the mask (or the values) among the inputs.
    pub spans: bool,
}

/// What a node computes.
///
/// Shapes below are row-major; `…` stands for leading dimensions. Optional inputs are switched on by flags, and
/// follow the others in the order named.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Op {
    /// A function of two tensors, element by element; `b` is repeated to the shape of `a`.
    Binary(Binary),
    /// `a + b` where `b` is a single value.
    Add1,
    /// `scale · x + bias`
    Scale {
        /// The factor.
        scale: f32,
        /// What is added.
        bias: f32,
    },
    /// `x` limited to `min..=max`.
    Clamp {
        /// The least value.
        min: f32,
        /// The greatest value.
        max: f32,
    },
    /// A function of one tensor, element by element.
    Unary(Unary),
    /// `activation(gate) · up`: of two tensors `gate`, `up`, or of the two halves of each row of one tensor (the
    /// first half is the gate unless `swapped`).
    Gated {
        /// The activation.
        gate: Gate,
        /// With one input: the second half of each row is the gate. With two: the second input is.
        swapped: bool,
    },
    /// Rows brought to mean 0 and variance 1.
    Norm {
        /// Added to the variance.
        eps: f32,
    },
    /// Rows divided by the root of their mean square.
    RmsNorm {
        /// Added to the mean square.
        eps: f32,
    },
    /// `[b, c, h, w]`: each of `groups` runs of channels brought to mean 0 and variance 1.
    GroupNorm {
        /// How many groups the channels are cut into.
        groups: usize,
        /// Added to the variance.
        eps: f32,
    },
    /// Rows divided by their Euclidean length, or by `eps` if that is larger.
    L2Norm {
        /// The least divisor.
        eps: f32,
    },
    /// Softmax of `scale · x + mask` along rows. Inputs: `x [b, h, t, n]`, mask `[b|1, h|1, ≥t, n]`, sinks `[h]` (a
    /// further score per head that takes its share of the probability and yields nothing). A row whose scores are
    /// all `−∞` yields zeros.
    SoftMax {
        /// Scores are multiplied by this.
        scale: f32,
        /// Whether a mask is given.
        mask: bool,
        /// Whether sinks are given.
        sinks: bool,
    },
    /// Rotary position embedding. Inputs: `x [b, t, h, d]`, positions `[t]` (i32), factors `[dims/2]`.
    Rope {
        /// How to turn.
        rope: Rope,
        /// Whether per-dimension frequency factors are given.
        factors: bool,
    },
    /// `−∞` where `column > past + row`.
    DiagMaskInf {
        /// Columns visible to row 0 beyond the first.
        past: usize,
    },
    /// 0 where `column > past + row`.
    DiagMaskZero {
        /// Columns visible to row 0 beyond the first.
        past: usize,
    },
    /// `w [b', h', n, k]` of any type × `x [b, h, m, k]` → `[b, h, m, n]`: each row of `x` times each row of `w`.
    /// `b` and `h` are multiples of `b'` and `h'`; neighbours share: head `i` of `x` meets head `i / (h / h')` of `w`,
    /// as grouped queries meet their keys.
    MulMat,
    /// Products with chosen experts. Inputs: `w [e, n, k]`, `x [t, u|1, k]`, ids `[t, u]` (i32) → `[t, u, n]`.
    MulMatId,
    /// `a […, k, p]`, `b […, k, q]` → `[…, q, p]`: the sum over `k` of outer products.
    OutProd,
    /// Rows of `x [b, h, r, n]` picked by ids `[b, h, t]` (i32) → `[b, h, t, n]`, as f32 (i32 stays i32).
    GetRows,
    /// `target [b, h, r, n]` with rows ids `[b|1, h|1, t]` replaced by those of `x [b, h, t, n]`. Inputs: target, x, ids.
    /// The result is the target's memory. The ids of one head must differ: of equal ones, any may stay.
    SetRows,
    /// A contiguous copy in the given type.
    Cast {
        /// The type of the result.
        to: DType,
    },
    /// The elements of `x` written to `target` in row-major order, cast to its type. Inputs: target, x. The result
    /// is the target's memory.
    CopyInto,
    /// Tensors laid one after another along a dimension.
    Concat {
        /// The dimension, counted from the outermost of four.
        axis4: usize,
    },
    /// The tensor repeated to fill a larger shape.
    Repeat {
        /// The shape to fill.
        shape: Shape,
    },
    /// Zeros added before and after along each of four dimensions.
    Pad {
        /// Zeros before, outermost dimension first.
        before: [usize; MAX_DIMS],
        /// Zeros after, outermost dimension first.
        after: [usize; MAX_DIMS],
    },
    /// The sum of all elements.
    Sum,
    /// The sum of each row: `[…, n]` → `[…, 1]`.
    SumRows,
    /// The mean of each row: `[…, n]` → `[…, 1]`.
    Mean,
    /// The index of the largest element of each row (the first of equals): `[…, n]` → `[…]`, i32.
    ArgMax,
    /// The indices that sort each row (equals keep their order), i32.
    ArgSort {
        /// Which end comes first.
        order: Order,
    },
    /// The indices of the `k` largest elements of each row, largest first (the first of equals first), i32.
    TopK {
        /// How many.
        k: usize,
    },
    /// Attention in one pass. Inputs: `q [b, h, t, d]` (f32), `k [b, g, n, d]`, `v [b, g, n, e]`, mask
    /// `[b|1, h|1, t, n]`, spans `[t, 2]` (i32) → `[b, t, h, e]`, where `h` is a multiple of `g`.
    ///
    /// A span gives, for each query, the first key it sees and one past the last: causal and sliding masks
    /// without a matrix. A query that sees nothing yields zeros.
    Attention(Attention),
    /// The same elements under another shape.
    Reshape {
        /// The new shape.
        shape: Shape,
    },
    /// A window on a tensor: any shape, strides and offset inside it.
    View {
        /// The window's shape.
        shape: Shape,
        /// The window's byte strides.
        strides: Strides,
        /// Bytes from the tensor's first byte to the window's.
        offset: usize,
    },
    /// The dimensions in another order: dimension `i` of the result is dimension `axes[i]` of the input.
    Permute {
        /// The order, over four dimensions.
        axes: [u8; MAX_DIMS],
    },
    /// The two innermost dimensions exchanged.
    Transpose,
}

/// What an operation is called, means, and may do.
#[derive(Clone, Copy)]
pub struct Declaration {
    /// Its name in tables, messages and files.
    pub name: &'static str,
    /// What it computes, in a line.
    pub meaning: &'static str,
    /// The inputs whose memory the result may take over, where layouts agree and nobody else reads it: a kernel
    /// must then give the same result as with memory of its own.
    pub in_place: &'static [usize],
}

impl Op {
    /// Name, meaning and in-place ability.
    pub fn declaration(&self) -> Declaration {
        let declare = |name, meaning, in_place| Declaration { name, meaning, in_place };
        const FIRST: &[usize] = &[0];
        const EITHER: &[usize] = &[0, 1];
        const NEVER: &[usize] = &[];
        match self {
            Op::Binary(Binary::Add) => declare("add", "a + b", EITHER),
            Op::Binary(Binary::Sub) => declare("sub", "a − b", EITHER),
            Op::Binary(Binary::Mul) => declare("mul", "a · b", EITHER),
            Op::Binary(Binary::Div) => declare("div", "a / b", EITHER),
            Op::Add1 => declare("add1", "a + one value", FIRST),
            Op::Scale { .. } => declare("scale", "x · scale + bias", FIRST),
            Op::Clamp { .. } => declare("clamp", "x limited to a range", FIRST),
            Op::Unary(unary) => declare(unary_name(*unary), "f(x)", FIRST),
            Op::Gated { gate: Gate::Swiglu, .. } => declare("swiglu", "silu(gate) · up", EITHER),
            Op::Gated { gate: Gate::Geglu, .. } => declare("geglu", "gelu(gate) · up", EITHER),
            Op::Gated { gate: Gate::Reglu, .. } => declare("reglu", "relu(gate) · up", EITHER),
            Op::Norm { .. } => declare("norm", "rows to mean 0, variance 1", FIRST),
            Op::RmsNorm { .. } => declare("rms_norm", "rows over their root mean square", FIRST),
            Op::GroupNorm { .. } => declare("group_norm", "channel groups to mean 0, variance 1", FIRST),
            Op::L2Norm { .. } => declare("l2_norm", "rows over their length", FIRST),
            Op::SoftMax { .. } => declare("soft_max", "softmax(scale · x + mask)", FIRST),
            Op::Rope { .. } => declare("rope", "rotary position embedding", FIRST),
            Op::DiagMaskInf { .. } => declare("diag_mask_inf", "−∞ above the diagonal", FIRST),
            Op::DiagMaskZero { .. } => declare("diag_mask_zero", "0 above the diagonal", FIRST),
            Op::MulMat => declare("mul_mat", "x · wᵀ", NEVER),
            Op::MulMatId => declare("mul_mat_id", "x · wᵀ of chosen experts", NEVER),
            Op::OutProd => declare("out_prod", "sum of outer products", NEVER),
            Op::GetRows => declare("get_rows", "rows picked by index", NEVER),
            Op::SetRows => declare("set_rows", "rows replaced by index", NEVER),
            Op::Cast { .. } => declare("cast", "a contiguous copy in a type", NEVER),
            Op::CopyInto => declare("copy_into", "elements written to a tensor", NEVER),
            Op::Concat { .. } => declare("concat", "one after another", NEVER),
            Op::Repeat { .. } => declare("repeat", "repeated to a shape", NEVER),
            Op::Pad { .. } => declare("pad", "zeros around", NEVER),
            Op::Sum => declare("sum", "sum of all elements", NEVER),
            Op::SumRows => declare("sum_rows", "sum of each row", NEVER),
            Op::Mean => declare("mean", "mean of each row", NEVER),
            Op::ArgMax => declare("argmax", "index of the largest", NEVER),
            Op::ArgSort { .. } => declare("argsort", "sorting indices of rows", NEVER),
            Op::TopK { .. } => declare("top_k", "indices of the largest", NEVER),
            Op::Attention(_) => declare("attention", "softmax(q · kᵀ) · v", NEVER),
            Op::Reshape { .. } => declare("reshape", "another shape", NEVER),
            Op::View { .. } => declare("view", "a window", NEVER),
            Op::Permute { .. } => declare("permute", "dimensions reordered", NEVER),
            Op::Transpose => declare("transpose", "inner dimensions exchanged", NEVER),
        }
    }

    /// The operation's name.
    pub fn name(&self) -> &'static str {
        self.declaration().name
    }

    /// Whether the operation only looks at its input's memory in another way and computes nothing.
    pub fn is_view(&self) -> bool {
        matches!(self, Op::Reshape { .. } | Op::View { .. } | Op::Permute { .. } | Op::Transpose)
    }

    /// Whether the operation writes into the memory of input 0 and returns it.
    pub fn is_write(&self) -> bool {
        matches!(self, Op::SetRows | Op::CopyInto)
    }
}

fn unary_name(unary: Unary) -> &'static str {
    match unary {
        Unary::Sqr => "sqr",
        Unary::Sqrt => "sqrt",
        Unary::Log => "log",
        Unary::Exp => "exp",
        Unary::Sin => "sin",
        Unary::Cos => "cos",
        Unary::Abs => "abs",
        Unary::Neg => "neg",
        Unary::Sign => "sign",
        Unary::Step => "step",
        Unary::Relu => "relu",
        Unary::Gelu => "gelu",
        Unary::GeluErf => "gelu_erf",
        Unary::GeluQuick => "gelu_quick",
        Unary::Silu => "silu",
        Unary::Sigmoid => "sigmoid",
        Unary::Tanh => "tanh",
        Unary::Elu => "elu",
        Unary::HardSwish => "hardswish",
        Unary::HardSigmoid => "hardsigmoid",
        Unary::Softplus => "softplus",
    }
}

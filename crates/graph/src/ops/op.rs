//! The operations with their names and in-place inputs.

use super::collective::Collective;
use super::parameters::{
    Attention, Binary, ExpertWeights, Gate, GatedDeltaRule, Interpolation, Order, Pooling, SelectExperts,
    Unary,
};
use super::rope::Rope;
use super::window::Window;
use crate::custom::CustomOp;
use crate::dtype::DType;
use crate::shape::{MAX_DIMS, Shape, Strides};

/// The operation of a node, with its parameters.
///
/// Shapes are row-major; `…` stands for leading dimensions. Optional inputs are enabled by flags and follow the others
/// in the order listed.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Op {
    /// A function of two tensors, element by element; `b` is repeated to the shape of `a`.
    Binary(Binary),
    /// `a + b` where `b` has one element.
    Add1,
    /// `scale · x + bias`
    Scale {
        /// The factor.
        scale: f32,
        /// The summand.
        bias: f32,
    },
    /// `x` clamped to `min..=max`.
    Clamp {
        /// The lower bound.
        min: f32,
        /// The upper bound.
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
    /// Rows normalized to mean 0 and variance 1 (layer norm without weights).
    Norm {
        /// Added to the variance.
        eps: f32,
    },
    /// Rows divided by the root of their mean square.
    RmsNorm {
        /// Added to the mean square.
        eps: f32,
    },
    /// `[b, c, h, w]`: each of `groups` groups of consecutive channels normalized to mean 0 and variance 1.
    GroupNorm {
        /// The number of groups.
        groups: usize,
        /// Added to the variance.
        eps: f32,
    },
    /// Rows divided by their Euclidean length, or by `eps` if that is larger.
    L2Norm {
        /// The minimum divisor.
        eps: f32,
    },
    /// Softmax of `scale · x + mask` along rows. Inputs: `x [b, h, t, n]`, mask `[b|1, h|1, ≥t, n]`, sinks `[h]` (an
    /// additional score per head, part of the denominator only). A row whose scores are all `−∞` yields zeros.
    SoftMax {
        /// The factor of the scores.
        scale: f32,
        /// Whether a mask is given.
        mask: bool,
        /// Whether sinks are given.
        sinks: bool,
    },
    /// Rotary position embedding. Inputs: `x [b, t, h, d]`, positions `[t]` (i32), factors `[dims/2]`.
    Rope {
        /// The parameters.
        rope: Rope,
        /// Whether a frequency factor per pair is given.
        factors: bool,
    },
    /// `−∞` where `column > past + row`.
    DiagMaskInf {
        /// The number of columns beyond the first that row 0 sees.
        past: usize,
    },
    /// 0 where `column > past + row`.
    DiagMaskZero {
        /// The number of columns beyond the first that row 0 sees.
        past: usize,
    },
    /// `w [b', h', n, k]` of any type × `x [b, h, m, k]` → `[b, h, m, n]`: `x · wᵀ`.
    /// `b` and `h` are multiples of `b'` and `h'`: head `i` of `x` uses head `i / (h / h')` of `w`, as in grouped-query
    /// attention.
    MulMat,
    /// Matrix multiplication with selected experts. Inputs: `w [e, n, k]`, `x [t, u|1, k]`, ids `[t, u]` (i32) → `[t,
    /// u, n]`. An id of −1 is an expert that another node computes: its row is 0.
    MulMatId,
    /// Matrix multiplication with the rows of active neurons only. Inputs: `w [m, k]`, `x [t, k]`, gates `[t, n]`, ids `[m]`
    /// (i32) → `[t, m]`: gate · (x · row) for each row of `w`. Row `i` is that of neuron `i`, or with ids that of neuron
    /// `ids[i]`; −1 is a row without a neuron. Where a gate is 0, so is the result, whatever the row holds: it is not read.
    MulMatSparse {
        /// Whether ids are given; otherwise there is a row for each neuron.
        ids: bool,
    },
    /// The sum of rows `w [n, k]` times factors `[t, n]` → `[t, k]`, in the order of the rows. A row whose factor is 0 adds
    /// nothing, whatever it holds: it is not read.
    AxpySparse,
    /// The experts of each token: scores `[t, e]` → ids `[t, used]` (i32), those with the largest scores, largest first
    /// (of equal ones the first). With groups, only the experts of the groups with the best [`GroupScore`](super::GroupScore)
    /// count.
    SelectExperts(SelectExperts),
    /// The weights of the selected experts. Inputs: probabilities `[t, e]`, ids `[t, u]` (i32) → `[t, u]`.
    ExpertWeights(ExpertWeights),
    /// Adds to each row the bias of its expert. Inputs: `x [t, u, n]`, biases `[e, n]`, ids `[t, u]` (i32). With an id of
    /// −1, nothing is added.
    AddId,
    /// The weighted sum of the experts' results. Inputs: `x [t, u, n]`, weights `[t, u]` → `[t, n]`.
    SumExperts,
    /// Causal convolution of each channel by itself. Inputs: `x [k − 1 + t, c]`, kernel `[c, k]` → `[t, c]`: row `i` is the
    /// sum of rows `i..i + k` of `x`, each times its column of the kernel. The first `k − 1` rows are those before.
    SsmConv,
    /// The gated delta rule, a linear attention with a state `S [h, d, e]`. Inputs: queries and keys `[t, g, d]`, values
    /// `[t, h, e]`, gates `[t, h]` (the logarithm of the decay), betas `[t, h]`, state `[h, d, e]`. For each token and
    /// head: `S ← e^gate · S`, `S ← S + k ⊗ β (v − Sᵀk)` (or `k ⊗ β v`), result `scale · Sᵀq`. The output `[t · h + h · d, e]` has the
    /// results `[t, h, e]` and after them the state after the last token.
    GatedDeltaRule(GatedDeltaRule),
    /// `a […, k, p]`, `b […, k, q]` → `[…, q, p]`: the sum over `k` of outer products.
    OutProd,
    /// Rows of `x [b, h, r, n]` selected by ids `[b, h, t]` (i32) → `[b, h, t, n]`, as f32 (i32 stays i32).
    GetRows,
    /// Overwrites the rows ids `[b|1, h|1, t]` of `target [b, h, r, n]` with those of `x [b, h, t, n]`. Inputs: target,
    /// x, ids. The result shares the target's memory. With duplicate ids in a head, any of the rows may win.
    SetRows,
    /// A contiguous copy in the given type.
    Cast {
        /// The type of the result.
        to: DType,
    },
    /// Copies the elements of `x` to `target` in row-major order, cast to its type. Inputs: target, x. The result
    /// shares the target's memory.
    CopyInto,
    /// Tensors concatenated along a dimension.
    Concat {
        /// The dimension, counted from the outermost of four.
        axis4: usize,
    },
    /// The tensor repeated along every dimension to fill a shape.
    Repeat {
        /// The shape to fill.
        shape: Shape,
    },
    /// Zeros added before and after the elements of each dimension.
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
    /// The index of the largest element of each row (the first of equal ones): `[…, n]` → `[…]`, i32.
    ArgMax,
    /// The indices that sort each row, stable, i32.
    ArgSort {
        /// The sort order.
        order: Order,
    },
    /// The indices of the `k` largest elements of each row, largest first (of equal ones the first), i32.
    TopK {
        /// The number of indices per row.
        k: usize,
    },
    /// Fused attention. Inputs: `q [b, h, t, d]` (f32), `k [b, g, n, d]`, `v [b, g, n, e]`, mask
    /// `[b|1, h|1, t, n]`, spans `[t, 2]` (i32), sinks `[h]`, pages `[s, p]` (i32) → `[b, t, h, e]`, where `h` is a multiple of
    /// `g`.
    ///
    /// A span gives, for each query, the first visible key and one past the last: causal and sliding-window masks
    /// without a mask tensor. A query without visible keys yields zeros. A sink is an additional score of a head, which
    /// is neither scaled nor capped and has no value: it is part of the softmax's denominator only.
    ///
    /// With pages, keys and values are a pool that several sequences share, in pages of [`PAGE_SLOTS`](crate::PAGE_SLOTS) rows.
    /// Spans are then `[t, 3]`, in positions of the query's own sequence: the first that it sees, one past the last, and the
    /// sequence's row `r` of the page table. Position `i` is row `pages[r, i / 64] · 64 + i % 64` of keys and values. Entries that
    /// no span covers are not read and may have any value. `b` is 1, and there is no mask.
    Attention(Attention),
    /// The same elements under another shape.
    Reshape {
        /// The new shape.
        shape: Shape,
    },
    /// A view of a tensor with any shape, strides and offset inside it.
    View {
        /// The shape of the view.
        shape: Shape,
        /// The byte strides of the view.
        strides: Strides,
        /// The offset from the tensor's first byte in bytes.
        offset: usize,
    },
    /// The dimensions reordered: dimension `i` of the result is dimension `axes[i]` of the input.
    Permute {
        /// The order, over four dimensions.
        axes: [u8; MAX_DIMS],
    },
    /// The two innermost dimensions swapped.
    Transpose,
    /// The patches that a window sees, as rows: `x [n, c, h, w]` → `[n, oh, ow, c · kh · kw]`; padding is 0.
    Im2Col {
        /// The window.
        window: Window,
        /// The type of the result, F32 or F16.
        to: DType,
    },
    /// Convolution of each channel with a kernel of its own. Inputs: kernel `[c, 1, kh, kw]`, `x [n, c, h, w]` →
    /// `[n, c, oh, ow]`, F32.
    ConvDepthwise {
        /// The window.
        window: Window,
    },
    /// Transposed convolution without padding. Inputs: kernel `[ic, oc, kh, kw]`, `x [n, ic, h, w]` →
    /// `[n, oc, (h − 1) · stride + kh, (w − 1) · stride + kw]`, F32.
    ConvTranspose {
        /// Vertical and horizontal stride.
        stride: [usize; 2],
    },
    /// Pooling: `x [n, c, h, w]` → `[n, c, oh, ow]`, F32.
    Pool {
        /// The value of a window.
        pooling: Pooling,
        /// The window, without dilation and with less padding than its size.
        window: Window,
    },
    /// The tensor resized to a shape.
    Upscale {
        /// The new shape.
        shape: Shape,
        /// How the values are made.
        interpolation: Interpolation,
    },
    /// `start + i · step` for `i` in `0..count`; no inputs.
    Arange {
        /// The first value.
        start: f32,
        /// The difference between values.
        step: f32,
        /// The number of values.
        count: usize,
    },
    /// `−Σ labels · log_softmax(logits) / rows`, one number. Inputs: logits and labels of one shape.
    CrossEntropyLoss,
    /// What this rank does together with the others of its group.
    Collective(Collective),
    /// A caller's own operation.
    Custom(CustomOp),
}

/// Name, description and in-place inputs of an operation.
#[derive(Clone, Copy)]
pub struct Declaration {
    /// The name in tables, messages and files.
    pub name: &'static str,
    /// The computation in a line.
    pub description: &'static str,
    /// The inputs whose memory the result may reuse, if layouts are equal and no other node reads it. Kernels must
    /// compute the same result in place as out of place.
    pub in_place: &'static [usize],
}

impl Op {
    /// Name, description and in-place inputs.
    pub fn declaration(&self) -> Declaration {
        let declare = |name, description, in_place| Declaration { name, description, in_place };
        const FIRST: &[usize] = &[0];
        const EITHER: &[usize] = &[0, 1];
        const NEVER: &[usize] = &[];
        match self {
            Op::Binary(Binary::Add) => declare("add", "a + b", EITHER),
            Op::Binary(Binary::Sub) => declare("sub", "a − b", EITHER),
            Op::Binary(Binary::Mul) => declare("mul", "a · b", EITHER),
            Op::Binary(Binary::Div) => declare("div", "a / b", EITHER),
            Op::Add1 => declare("add1", "a + scalar", FIRST),
            Op::Scale { .. } => declare("scale", "x · scale + bias", FIRST),
            Op::Clamp { .. } => declare("clamp", "clamp(x, min, max)", FIRST),
            Op::Unary(unary) => declare(unary_name(*unary), "f(x)", FIRST),
            Op::Gated { gate: Gate::Swiglu, .. } => declare("swiglu", "silu(gate) · up", EITHER),
            Op::Gated { gate: Gate::Geglu, .. } => declare("geglu", "gelu(gate) · up", EITHER),
            Op::Gated { gate: Gate::Reglu, .. } => declare("reglu", "relu(gate) · up", EITHER),
            Op::Gated { gate: Gate::SwigluOai, .. } => {
                declare("swiglu_oai", "gpt-oss's clamped swiglu", EITHER)
            }
            Op::Norm { .. } => declare("norm", "rows normalized to mean 0, variance 1", FIRST),
            Op::RmsNorm { .. } => declare("rms_norm", "rows divided by their root mean square", FIRST),
            Op::GroupNorm { .. } => {
                declare("group_norm", "channel groups normalized to mean 0, variance 1", FIRST)
            }
            Op::L2Norm { .. } => declare("l2_norm", "rows divided by their Euclidean length", FIRST),
            Op::SoftMax { .. } => declare("soft_max", "softmax(scale · x + mask)", FIRST),
            Op::Rope { .. } => declare("rope", "rotary position embedding", FIRST),
            Op::DiagMaskInf { .. } => declare("diag_mask_inf", "−∞ above the diagonal", FIRST),
            Op::DiagMaskZero { .. } => declare("diag_mask_zero", "0 above the diagonal", FIRST),
            Op::MulMat => declare("mul_mat", "x · wᵀ", NEVER),
            Op::MulMatId => declare("mul_mat_id", "x · wᵀ of selected experts", NEVER),
            Op::MulMatSparse { .. } => declare("mul_mat_sparse", "gate · x · wᵀ of active rows", NEVER),
            Op::AxpySparse => declare("axpy_sparse", "sum of active rows times factors", NEVER),
            Op::SelectExperts(_) => declare("select_experts", "experts with the largest scores", NEVER),
            Op::ExpertWeights(_) => declare("expert_weights", "weights of the selected experts", NEVER),
            Op::AddId => declare("add_id", "x + bias of the expert", FIRST),
            Op::SumExperts => declare("sum_experts", "weighted sum over experts", NEVER),
            Op::SsmConv => declare("ssm_conv", "causal convolution of each channel", NEVER),
            Op::GatedDeltaRule(_) => declare("gated_delta_rule", "linear attention with a state", NEVER),
            Op::OutProd => declare("out_prod", "sum of outer products", NEVER),
            Op::GetRows => declare("get_rows", "rows selected by index", NEVER),
            Op::SetRows => declare("set_rows", "rows overwritten by index", NEVER),
            Op::Cast { .. } => declare("cast", "contiguous copy in a type", NEVER),
            Op::CopyInto => declare("copy_into", "elements copied to a tensor", NEVER),
            Op::Concat { .. } => declare("concat", "concatenation along a dimension", NEVER),
            Op::Repeat { .. } => declare("repeat", "repetition to a shape", NEVER),
            Op::Pad { .. } => declare("pad", "zero padding", NEVER),
            Op::Sum => declare("sum", "sum of all elements", NEVER),
            Op::SumRows => declare("sum_rows", "sum of each row", NEVER),
            Op::Mean => declare("mean", "mean of each row", NEVER),
            Op::ArgMax => declare("argmax", "index of the largest element", NEVER),
            Op::ArgSort { .. } => declare("argsort", "sorting indices of each row", NEVER),
            Op::TopK { .. } => declare("top_k", "indices of the k largest elements", NEVER),
            Op::Attention(_) => declare("attention", "softmax(q · kᵀ) · v", NEVER),
            Op::Reshape { .. } => declare("reshape", "the same elements in another shape", NEVER),
            Op::View { .. } => declare("view", "view with any strides", NEVER),
            Op::Permute { .. } => declare("permute", "dimensions reordered", NEVER),
            Op::Transpose => declare("transpose", "inner dimensions swapped", NEVER),
            Op::Im2Col { .. } => declare("im2col", "patches of a window as rows", NEVER),
            Op::ConvDepthwise { .. } => declare("conv_2d_dw", "convolution of each channel by itself", NEVER),
            Op::ConvTranspose { .. } => declare("conv_transpose_2d", "transposed convolution", NEVER),
            Op::Pool { pooling: Pooling::Max, .. } => {
                declare("pool_max", "largest element of windows", NEVER)
            }
            Op::Pool { .. } => declare("pool_avg", "mean of windows", NEVER),
            Op::Upscale { .. } => declare("upscale", "resized by interpolation", NEVER),
            Op::Arange { .. } => declare("arange", "start + i · step", NEVER),
            Op::CrossEntropyLoss => declare("cross_entropy_loss", "−Σ labels · log softmax / rows", NEVER),
            Op::Collective(Collective { kind, .. }) => {
                declare(kind.name(), kind.description(), if kind.is_in_place() { FIRST } else { NEVER })
            }
            Op::Custom(custom) => declare(custom.name(), custom.description(), custom.in_place_inputs()),
        }
    }

    /// The operation's name.
    pub fn name(&self) -> &'static str {
        self.declaration().name
    }

    /// Whether the result is a view of the input; nothing is computed.
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

//! The parameters of operations.

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
    /// gpt-oss's clamped SwiGLU: `g · sigmoid(1.702 g) · (u + 1)` with `g = min(gate, 7)` and `u = clamp(up, −7, 7)`
    SwigluOai,
}

impl Gate {
    /// Every activation.
    pub const ALL: [Gate; 4] = [Gate::Swiglu, Gate::Geglu, Gate::Reglu, Gate::SwigluOai];
    /// The factor in the sigmoid of [`Gate::SwigluOai`].
    pub const OAI_ALPHA: f32 = 1.702;
    /// The bound of gate and up in [`Gate::SwigluOai`].
    pub const OAI_LIMIT: f32 = 7.0;
}

/// Ascending or descending.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Order {
    /// Smallest first.
    Ascending,
    /// Largest first.
    Descending,
}

/// The value of a window of elements.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Pooling {
    /// The largest element; padding counts as `−∞`.
    Max,
    /// The sum divided by the size of the window; padding counts as 0 (ggml's pooling in two dimensions).
    Average,
    /// The mean of the elements that are not padding (ggml's pooling in one dimension).
    AverageInside,
}

/// How an upscaled tensor gets its values.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Interpolation {
    /// Element `⌊i · from / to⌋` of each dimension.
    Nearest,
    /// Linear in the two inner dimensions, between pixel centres; past the outermost centres their values. Other
    /// dimensions as in `Nearest`.
    Bilinear,
}

/// Parameters of [`Op::Attention`](crate::Op::Attention).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Attention {
    /// The factor of the scores.
    pub scale: f32,
    /// Replaces each score by `cap · tanh(score / cap)`, before the mask is added.
    pub soft_cap: Option<f32>,
    /// Whether a mask follows the values among the inputs.
    pub mask: bool,
    /// Whether spans follow the mask (or the values) among the inputs.
    pub spans: bool,
    /// Whether sinks follow them.
    pub sinks: bool,
    /// Whether a page table is the last input.
    pub pages: bool,
}

/// Rows of keys and values in a page of a KV cache.
pub const PAGE_SLOTS: usize = 64;

/// Parameters of [`Op::SelectExperts`](crate::Op::SelectExperts).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SelectExperts {
    /// The number of experts that each token uses.
    pub used: usize,
    /// The number of groups of consecutive experts; 1 if there are none.
    pub groups: usize,
    /// The number of groups that experts are selected from.
    pub groups_used: usize,
    /// By which score those groups are the best.
    pub group_score: GroupScore,
}

impl SelectExperts {
    /// So many experts for each token, without groups.
    pub const fn ungrouped(used: usize) -> SelectExperts {
        SelectExperts { used, groups: 1, groups_used: 1, group_score: GroupScore::TopTwo }
    }
}

/// The score of a group of experts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum GroupScore {
    /// The sum of its two largest scores (DeepSeek V3).
    TopTwo,
    /// Its largest score (DeepSeek V2).
    Max,
}

impl GroupScore {
    /// Both scores.
    pub const ALL: [GroupScore; 2] = [GroupScore::TopTwo, GroupScore::Max];

    /// How many of a group's largest scores are added.
    pub const fn summed(self) -> usize {
        match self {
            GroupScore::TopTwo => 2,
            GroupScore::Max => 1,
        }
    }
}

/// Parameters of [`Op::ExpertWeights`](crate::Op::ExpertWeights).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ExpertWeights {
    /// Whether the selected probabilities are logits, of which the weights are the softmax.
    pub softmax: bool,
    /// Whether the weights are divided by their sum.
    pub normalize: bool,
    /// The factor of the weights, applied last.
    pub scale: f32,
}

impl ExpertWeights {
    /// The smallest sum that weights are divided by.
    pub const MIN_SUM: f32 = 6.103_515_6e-5;
}

/// Parameters of [`Op::GatedDeltaRule`](crate::Op::GatedDeltaRule).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct GatedDeltaRule {
    /// The factor of the results.
    pub scale: f32,
    /// Which key head serves value head `i` of `h`, where there are `g` key heads: `i mod g` if set, else `i / (h / g)`.
    pub tiled: bool,
    /// Whether the state learns how values differ from what it yields for their keys (the delta rule). Otherwise it
    /// learns the values as they are: `S ← e^gate · S + k ⊗ β v`.
    pub delta: bool,
}

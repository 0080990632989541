//! Elementwise operations.

use quadriga_graph::{Binary, Gate, Unary};

use crate::oracle::EvalError;
use crate::oracle::memory::{View, ViewMut};

pub(super) fn binary(
    kind: Binary,
    a: &View<'_>,
    b: &View<'_>,
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    let apply = |(a, b): (f64, f64)| match kind {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
    };
    out.each_row(|i| {
        Ok(a.row(i)?.into_iter().zip(b.repeated_row(i)?.into_iter().cycle()).map(apply).collect())
    })
}

pub(super) fn add1(a: &View<'_>, b: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    let one = b.all()?.into_iter().sum::<f64>();
    map(|x| x + one, a, out)
}

/// `f` of each element.
pub(super) fn map(f: impl Fn(f64) -> f64, x: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    out.each_row(|i| Ok(x.row(i)?.into_iter().map(&f).collect()))
}

/// `activation(gate) · up` of two tensors.
pub(super) fn gated(
    kind: Gate,
    gate: &View<'_>,
    up: &View<'_>,
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    out.each_row(|i| Ok(gate_row(kind, &gate.row(i)?, &up.row(i)?)))
}

/// `activation(gate) · up` of the two halves of each row.
pub(super) fn gated_halves(
    kind: Gate,
    swapped: bool,
    x: &View<'_>,
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    out.each_row(|i| {
        let row = x.row(i)?;
        let (first, second) = row.split_at(row.len() / 2);
        Ok(if swapped { gate_row(kind, second, first) } else { gate_row(kind, first, second) })
    })
}

fn gate_row(kind: Gate, gate: &[f64], up: &[f64]) -> Vec<f64> {
    let one = |g: f64, u: f64| match kind {
        Gate::Swiglu => unary(Unary::Silu, g) * u,
        Gate::Geglu => unary(Unary::Gelu, g) * u,
        Gate::Reglu => unary(Unary::Relu, g) * u,
        Gate::SwigluOai => swiglu_oai(g, u),
    };
    gate.iter().zip(up).map(|(g, u)| one(*g, *u)).collect()
}

fn swiglu_oai(gate: f64, up: f64) -> f64 {
    let limit = f64::from(Gate::OAI_LIMIT);
    // Comparisons that let NaN through.
    let gate = if gate > limit { limit } else { gate };
    let up = if up.is_nan() { up } else { up.clamp(-limit, limit) };
    gate / (1.0 + (-f64::from(Gate::OAI_ALPHA) * gate).exp()) * (up + 1.0)
}

/// A function of one number.
pub(super) fn unary(kind: Unary, x: f64) -> f64 {
    match kind {
        Unary::Sqr => x * x,
        Unary::Sqrt => x.sqrt(),
        Unary::Log => x.ln(),
        Unary::Exp => x.exp(),
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::Abs => x.abs(),
        Unary::Neg => -x,
        Unary::Sign if x > 0.0 => 1.0,
        Unary::Sign if x < 0.0 => -1.0,
        Unary::Sign => 0.0,
        Unary::Step if x > 0.0 => 1.0,
        Unary::Step => 0.0,
        Unary::Relu => x.max(0.0),
        Unary::Gelu => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
        Unary::GeluErf => 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)),
        Unary::GeluQuick => x * sigmoid(1.702 * x),
        Unary::Silu => x * sigmoid(x),
        Unary::Sigmoid => sigmoid(x),
        Unary::Tanh => x.tanh(),
        Unary::Elu if x > 0.0 => x,
        Unary::Elu => x.exp_m1(),
        Unary::HardSwish => x * ((x + 3.0) / 6.0).clamp(0.0, 1.0),
        Unary::HardSigmoid => ((x + 3.0) / 6.0).clamp(0.0, 1.0),
        Unary::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The error function: `2/√π · e^(−x²) · Σ 2ⁿ x^(2n+1) / (1·3·5·…·(2n+1))`, whose terms all have the sign of `x`.
fn erf(x: f64) -> f64 {
    if x.abs() >= 6.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

/// `−∞` or 0 where `column > past + row`.
pub(super) fn diag_mask(
    fill: f64,
    past: usize,
    x: &View<'_>,
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    out.each_row(|i| {
        let last = past.saturating_add(i[2]);
        Ok(x.row(i)?.into_iter().enumerate().map(|(c, v)| if c > last { fill } else { v }).collect())
    })
}

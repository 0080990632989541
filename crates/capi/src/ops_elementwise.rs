//! Operations element by element, and norms.

use quadriga::graph::{Gate, Unary};

use crate::builder::{add, qd_builder};
use crate::status::{Failure, Outcome};
use crate::tensor::qd_tensor;

/// `a + b`, element by element; `b` is repeated to the shape of `a`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_add(builder: *mut qd_builder, a: qd_tensor, b: qd_tensor) -> qd_tensor {
    add(builder, "add", |c| Ok(c.value(a)?.add(c.value(b)?)))
}

/// `a − b`, element by element; `b` is repeated to the shape of `a`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_sub(builder: *mut qd_builder, a: qd_tensor, b: qd_tensor) -> qd_tensor {
    add(builder, "sub", |c| Ok(c.value(a)?.sub(c.value(b)?)))
}

/// `a · b`, element by element; `b` is repeated to the shape of `a`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_mul(builder: *mut qd_builder, a: qd_tensor, b: qd_tensor) -> qd_tensor {
    add(builder, "mul", |c| Ok(c.value(a)?.mul(c.value(b)?)))
}

/// `a / b`, element by element; `b` is repeated to the shape of `a`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_div(builder: *mut qd_builder, a: qd_tensor, b: qd_tensor) -> qd_tensor {
    add(builder, "div", |c| Ok(c.value(a)?.div(c.value(b)?)))
}

/// `x + value`, where `value` has one element.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_add1(builder: *mut qd_builder, x: qd_tensor, value: qd_tensor) -> qd_tensor {
    add(builder, "add1", |c| Ok(c.value(x)?.add1(c.value(value)?)))
}

/// `scale · x`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_scale(builder: *mut qd_builder, x: qd_tensor, scale: f32) -> qd_tensor {
    add(builder, "scale", |c| Ok(c.value(x)?.scale(scale)))
}

/// `scale · x + bias`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_scale_bias(builder: *mut qd_builder, x: qd_tensor, scale: f32, bias: f32) -> qd_tensor {
    add(builder, "scale_bias", |c| Ok(c.value(x)?.scale_bias(scale, bias)))
}

/// Each element clamped to `min` … `max`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_clamp(builder: *mut qd_builder, x: qd_tensor, min: f32, max: f32) -> qd_tensor {
    add(builder, "clamp", |c| Ok(c.value(x)?.clamp(min, max)))
}

/// x².
pub const QD_UNARY_SQR: i32 = 0;
/// √x.
pub const QD_UNARY_SQRT: i32 = 1;
/// Natural logarithm.
pub const QD_UNARY_LOG: i32 = 2;
/// eˣ.
pub const QD_UNARY_EXP: i32 = 3;
/// Sine.
pub const QD_UNARY_SIN: i32 = 4;
/// Cosine.
pub const QD_UNARY_COS: i32 = 5;
/// |x|.
pub const QD_UNARY_ABS: i32 = 6;
/// −x.
pub const QD_UNARY_NEG: i32 = 7;
/// −1, 0 or 1.
pub const QD_UNARY_SIGN: i32 = 8;
/// 1 where x > 0, else 0.
pub const QD_UNARY_STEP: i32 = 9;
/// max(x, 0).
pub const QD_UNARY_RELU: i32 = 10;
/// GELU by the tanh approximation.
pub const QD_UNARY_GELU: i32 = 11;
/// GELU by the error function.
pub const QD_UNARY_GELU_ERF: i32 = 12;
/// x · sigmoid(1.702 x).
pub const QD_UNARY_GELU_QUICK: i32 = 13;
/// x · sigmoid(x).
pub const QD_UNARY_SILU: i32 = 14;
/// 1 / (1 + e⁻ˣ).
pub const QD_UNARY_SIGMOID: i32 = 15;
/// Hyperbolic tangent.
pub const QD_UNARY_TANH: i32 = 16;
/// x where x > 0, else eˣ − 1.
pub const QD_UNARY_ELU: i32 = 17;
/// x · clamp((x + 3) / 6, 0, 1).
pub const QD_UNARY_HARD_SWISH: i32 = 18;
/// clamp((x + 3) / 6, 0, 1).
pub const QD_UNARY_HARD_SIGMOID: i32 = 19;
/// ln(1 + eˣ).
pub const QD_UNARY_SOFTPLUS: i32 = 20;

fn unary(function: i32) -> Outcome<Unary> {
    let found = usize::try_from(function).ok().and_then(|function| Unary::ALL.get(function).copied());
    found.ok_or_else(|| Failure::argument(format!("there is no function QD_UNARY_… {function}")))
}

/// A function of each element: QD_UNARY_….
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_unary(builder: *mut qd_builder, x: qd_tensor, function: i32) -> qd_tensor {
    add(builder, "unary", |c| Ok(c.value(x)?.unary(unary(function)?)))
}

/// `x · sigmoid(x)`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_silu(builder: *mut qd_builder, x: qd_tensor) -> qd_tensor {
    add(builder, "silu", |c| Ok(c.value(x)?.silu()))
}

/// GELU by the tanh approximation.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_gelu(builder: *mut qd_builder, x: qd_tensor) -> qd_tensor {
    add(builder, "gelu", |c| Ok(c.value(x)?.gelu()))
}

/// `max(x, 0)`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_relu(builder: *mut qd_builder, x: qd_tensor) -> qd_tensor {
    add(builder, "relu", |c| Ok(c.value(x)?.relu()))
}

/// Hyperbolic tangent.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_tanh(builder: *mut qd_builder, x: qd_tensor) -> qd_tensor {
    add(builder, "tanh", |c| Ok(c.value(x)?.tanh()))
}

/// Squares.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_sqr(builder: *mut qd_builder, x: qd_tensor) -> qd_tensor {
    add(builder, "sqr", |c| Ok(c.value(x)?.sqr()))
}

/// SiLU.
pub const QD_GATE_SWIGLU: i32 = 0;
/// GELU by the tanh approximation.
pub const QD_GATE_GEGLU: i32 = 1;
/// ReLU.
pub const QD_GATE_REGLU: i32 = 2;
/// The clamped SwiGLU of gpt-oss.
pub const QD_GATE_SWIGLU_OAI: i32 = 3;

fn gate(gate: i32) -> Outcome<Gate> {
    let found = usize::try_from(gate).ok().and_then(|gate| Gate::ALL.get(gate).copied());
    found.ok_or_else(|| Failure::argument(format!("there is no activation QD_GATE_… {gate}")))
}

/// `activation(x) · up`, with an activation QD_GATE_….
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_gated(
    builder: *mut qd_builder,
    x: qd_tensor,
    up: qd_tensor,
    activation: i32,
) -> qd_tensor {
    add(builder, "gated", |c| Ok(c.value(x)?.gated(gate(activation)?, c.value(up)?)))
}

/// `activation(gate) · up` of the two halves of each row; the first half is the gate unless `swapped`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_gated_halves(
    builder: *mut qd_builder,
    x: qd_tensor,
    activation: i32,
    swapped: i32,
) -> qd_tensor {
    add(builder, "gated_halves", |c| Ok(c.value(x)?.gated_halves(gate(activation)?, swapped != 0)))
}

/// Rows normalized to mean 0 and variance 1.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_norm(builder: *mut qd_builder, x: qd_tensor, eps: f32) -> qd_tensor {
    add(builder, "norm", |c| Ok(c.value(x)?.norm(eps)))
}

/// Rows divided by their root mean square.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_rms_norm(builder: *mut qd_builder, x: qd_tensor, eps: f32) -> qd_tensor {
    add(builder, "rms_norm", |c| Ok(c.value(x)?.rms_norm(eps)))
}

/// `[b, c, h, w]`: groups of channels normalized to mean 0 and variance 1.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_group_norm(
    builder: *mut qd_builder,
    x: qd_tensor,
    groups: usize,
    eps: f32,
) -> qd_tensor {
    add(builder, "group_norm", |c| Ok(c.value(x)?.group_norm(groups, eps)))
}

/// Rows divided by their Euclidean length.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_l2_norm(builder: *mut qd_builder, x: qd_tensor, eps: f32) -> qd_tensor {
    add(builder, "l2_norm", |c| Ok(c.value(x)?.l2_norm(eps)))
}

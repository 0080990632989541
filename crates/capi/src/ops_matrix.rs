//! Products of matrices, rows by index, reductions, and experts.

use quadriga::graph::{DeltaRuleInputs, ExpertWeights, GatedDeltaRule, GroupScore, Order, SelectExperts};

use crate::builder::{add, qd_builder};
use crate::tensor::{QD_NO_TENSOR, qd_tensor};

/// Matrix multiplication: weights `[n, k]`, `x […, m, k]` → `x · weightsᵀ […, m, n]`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_mul_mat(builder: *mut qd_builder, weights: qd_tensor, x: qd_tensor) -> qd_tensor {
    add(builder, "mul_mat", |c| Ok(c.value(weights)?.mul_mat(c.value(x)?)))
}

/// Matrix multiplication with selected experts: weights `[e, n, k]`, `x [t, u|1, k]`, ids `[t, u]` (I32) → `[t, u, n]`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_mul_mat_id(
    builder: *mut qd_builder,
    weights: qd_tensor,
    x: qd_tensor,
    ids: qd_tensor,
) -> qd_tensor {
    add(builder, "mul_mat_id", |c| Ok(c.value(weights)?.mul_mat_id(c.value(x)?, c.value(ids)?)))
}

/// Rows `[m, k]` times `x [t, k]` and times their gates `[t, n]`; rows whose gates are 0 are not read. `ids [m]` (I32) may be
/// QD_NO_TENSOR.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_mul_mat_sparse(
    builder: *mut qd_builder,
    weights: qd_tensor,
    x: qd_tensor,
    gates: qd_tensor,
    ids: qd_tensor,
) -> qd_tensor {
    add(builder, "mul_mat_sparse", |c| {
        Ok(c.value(weights)?.mul_mat_sparse(c.value(x)?, c.value(gates)?, c.optional(ids)?))
    })
}

/// The sum of rows `[n, k]` times factors `[t, n]`; rows whose factors are 0 are not read.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_axpy_sparse(builder: *mut qd_builder, rows: qd_tensor, factors: qd_tensor) -> qd_tensor {
    add(builder, "axpy_sparse", |c| Ok(c.value(rows)?.axpy_sparse(c.value(factors)?)))
}

/// The sum of outer products: `a […, k, p]`, `b […, k, q]` → `[…, q, p]`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_out_prod(builder: *mut qd_builder, a: qd_tensor, b: qd_tensor) -> qd_tensor {
    add(builder, "out_prod", |c| Ok(c.value(a)?.out_prod(c.value(b)?)))
}

/// Rows of `x […, r, n]` by `ids […, t]` (I32), as F32.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_get_rows(builder: *mut qd_builder, x: qd_tensor, ids: qd_tensor) -> qd_tensor {
    add(builder, "get_rows", |c| Ok(c.value(x)?.get_rows(c.value(ids)?)))
}

/// Overwrites the rows `ids` (I32) of a state or result; returns the tensor after the write.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_set_rows(
    builder: *mut qd_builder,
    target: qd_tensor,
    rows: qd_tensor,
    ids: qd_tensor,
) -> qd_tensor {
    add(builder, "set_rows", |c| Ok(c.value(target)?.set_rows(c.value(rows)?, c.value(ids)?)))
}

/// The sum of all elements.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_sum(builder: *mut qd_builder, x: qd_tensor) -> qd_tensor {
    add(builder, "sum", |c| Ok(c.value(x)?.sum()))
}

/// The sum of each row: `[…, n]` → `[…, 1]`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_sum_rows(builder: *mut qd_builder, x: qd_tensor) -> qd_tensor {
    add(builder, "sum_rows", |c| Ok(c.value(x)?.sum_rows()))
}

/// The mean of each row: `[…, n]` → `[…, 1]`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_mean(builder: *mut qd_builder, x: qd_tensor) -> qd_tensor {
    add(builder, "mean", |c| Ok(c.value(x)?.mean()))
}

/// The index of each row's largest element, I32.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_argmax(builder: *mut qd_builder, x: qd_tensor) -> qd_tensor {
    add(builder, "argmax", |c| Ok(c.value(x)?.argmax()))
}

/// The indices that sort each row, I32; largest first if `descending`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_argsort(builder: *mut qd_builder, x: qd_tensor, descending: i32) -> qd_tensor {
    add(builder, "argsort", |c| {
        let order = if descending == 0 { Order::Ascending } else { Order::Descending };
        Ok(c.value(x)?.argsort(order))
    })
}

/// The indices of each row's `k` largest elements, largest first, I32.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_top_k(builder: *mut qd_builder, x: qd_tensor, k: usize) -> qd_tensor {
    add(builder, "top_k", |c| Ok(c.value(x)?.top_k(k)))
}

/// The cross-entropy loss of logits and labels, which are probabilities of the same shape: one number.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_cross_entropy_loss(
    builder: *mut qd_builder,
    logits: qd_tensor,
    labels: qd_tensor,
) -> qd_tensor {
    add(builder, "cross_entropy_loss", |c| Ok(c.value(logits)?.cross_entropy_loss(c.value(labels)?)))
}

/// The values `start`, `start + step` … below `stop`, F32.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_arange(builder: *mut qd_builder, start: f32, stop: f32, step: f32) -> qd_tensor {
    add(builder, "arange", |c| Ok(c.builder()?.arange(start, stop, step)))
}

/// The experts of each token: scores `[t, e]` → ids `[t, used]` (I32), from the best `groups_used` of `groups` groups. The score
/// of a group is the sum of its two largest.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_select_experts(
    builder: *mut qd_builder,
    scores: qd_tensor,
    used: usize,
    groups: usize,
    groups_used: usize,
) -> qd_tensor {
    add(builder, "select_experts", |c| {
        let group_score = GroupScore::TopTwo;
        Ok(c.value(scores)?.select_experts(SelectExperts { used, groups, groups_used, group_score }))
    })
}

/// `qd_select_experts` where the score of a group is its largest.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_select_experts_by_largest(
    builder: *mut qd_builder,
    scores: qd_tensor,
    used: usize,
    groups: usize,
    groups_used: usize,
) -> qd_tensor {
    add(builder, "select_experts", |c| {
        let group_score = GroupScore::Max;
        Ok(c.value(scores)?.select_experts(SelectExperts { used, groups, groups_used, group_score }))
    })
}

/// The weights of selected experts: probabilities `[t, e]`, ids `[t, u]` → `[t, u]`; their softmax, or divided by their sum,
/// and times `scale`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_expert_weights(
    builder: *mut qd_builder,
    probabilities: qd_tensor,
    ids: qd_tensor,
    softmax: i32,
    normalize: i32,
    scale: f32,
) -> qd_tensor {
    add(builder, "expert_weights", |c| {
        let parameters = ExpertWeights { softmax: softmax != 0, normalize: normalize != 0, scale };
        Ok(c.value(probabilities)?.expert_weights(c.value(ids)?, parameters))
    })
}

/// Adds to each row of `x [t, u, n]` the bias `[e, n]` of its expert in `ids [t, u]`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_add_id(
    builder: *mut qd_builder,
    x: qd_tensor,
    biases: qd_tensor,
    ids: qd_tensor,
) -> qd_tensor {
    add(builder, "add_id", |c| Ok(c.value(x)?.add_id(c.value(biases)?, c.value(ids)?)))
}

/// The sum over `u` of `x [t, u, n]`, each row times its weight in `[t, u]`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_sum_experts(builder: *mut qd_builder, x: qd_tensor, weights: qd_tensor) -> qd_tensor {
    add(builder, "sum_experts", |c| Ok(c.value(x)?.sum_experts(c.value(weights)?)))
}

/// Causal convolution of each channel of `x [k − 1 + t, c]` with a kernel `[c, k]`.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_ssm_conv(builder: *mut qd_builder, x: qd_tensor, kernel: qd_tensor) -> qd_tensor {
    add(builder, "ssm_conv", |c| Ok(c.value(x)?.ssm_conv(c.value(kernel)?)))
}

/// The tensors and parameters of qd_gated_delta_rule: `g` key heads, `h` value heads, `t` tokens.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qd_delta_rule {
    /// Queries `[t, g, d]`.
    pub queries: qd_tensor,
    /// Keys `[t, g, d]`.
    pub keys: qd_tensor,
    /// Values `[t, h, e]`.
    pub values: qd_tensor,
    /// The logarithm of the state's decay `[t, h]`.
    pub gates: qd_tensor,
    /// The rates at which the state learns `[t, h]`.
    pub betas: qd_tensor,
    /// The state before the first token `[h, d, e]`.
    pub state: qd_tensor,
    /// The factor of the results.
    pub scale: f32,
    /// 1: value head `i` uses key head `i mod g`, else `i / (h / g)`.
    pub tiled: i32,
    /// 1: the state learns differences (the delta rule), else the values.
    pub delta: i32,
}

/// The gated delta rule, a linear attention: the results `[t, h, e]`. The state after the last token goes to `*state`, which
/// may be NULL.
///
/// Threads: one at a time for each builder.
#[unsafe(no_mangle)]
pub extern "C" fn qd_gated_delta_rule(
    builder: *mut qd_builder,
    rule: Option<&qd_delta_rule>,
    state: Option<&mut qd_tensor>,
) -> qd_tensor {
    let mut after = None;
    let results = add(builder, "gated_delta_rule", |c| {
        let rule = crate::arguments::required(rule, "rule")?;
        let inputs = DeltaRuleInputs {
            keys: c.value(rule.keys)?,
            values: c.value(rule.values)?,
            gates: c.value(rule.gates)?,
            betas: c.value(rule.betas)?,
            state: c.value(rule.state)?,
        };
        let parameters = GatedDeltaRule { scale: rule.scale, tiled: rule.tiled != 0, delta: rule.delta != 0 };
        let (results, written) = c.value(rule.queries)?.gated_delta_rule(inputs, parameters);
        after = Some(written);
        Ok(results)
    });
    let after = after.map_or(QD_NO_TENSOR, |after| add(builder, "gated_delta_rule", |_| Ok(after)));
    if let Some(state) = state {
        *state = after;
    }
    results
}

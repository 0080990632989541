//! Cases of mixtures of experts.

use quadriga_graph::{DType, ExpertWeights, Gate, GroupScore, SelectExperts, Shape, Unary};

use super::CaseList;
use super::builder::{CaseBuilder, InputLayout};
use super::fill::{Fill, UNIT};
use crate::Tolerance;

/// Experts, how many a token uses, groups and how many of those are used.
const ROUTES: [[usize; 4]; 12] = [
    [1, 1, 1, 1],
    [4, 2, 1, 1],
    [5, 5, 1, 1],
    [8, 2, 1, 1],
    [32, 4, 1, 1],
    [40, 8, 1, 1],
    [64, 6, 1, 1],
    [128, 8, 1, 1],
    [512, 10, 1, 1],
    [16, 4, 4, 2],
    [24, 3, 8, 3],
    [256, 8, 8, 4],
];

const TOKENS: [usize; 5] = [0, 1, 2, 7, 33];

pub(super) fn list(list: &mut CaseList) {
    for [experts, used, groups, groups_used] in ROUTES {
        for tokens in TOKENS {
            for group_score in group_scores(groups) {
                select(list, tokens, experts, SelectExperts { used, groups, groups_used, group_score });
            }
            weights(list, tokens, experts, used);
        }
    }
    for (tokens, used, experts) in [(0, 2, 4), (1, 1, 1), (1, 4, 8), (5, 3, 7), (33, 8, 16)] {
        for columns in [1, 7, 32, 65, 256, 2880] {
            add_id(list, [tokens, used, experts, columns]);
            sum(list, [tokens, used, columns]);
        }
    }
    for dtype in [DType::F32, DType::F16, DType::Q4_0, DType::Q8_0, DType::Q4_K, DType::MXFP4] {
        for (tokens, experts, used) in [(1, 4, 2), (3, 8, 3), (19, 6, 4)] {
            for gate in [Gate::Swiglu, Gate::SwigluOai] {
                feed_forward(list, dtype, [tokens, experts, used], gate, None);
            }
            // All experts of some tokens are absent, or some of them, in the last case for whole tiles.
            for here in [1, experts.div_ceil(2)] {
                feed_forward(list, dtype, [tokens, experts, used], Gate::Swiglu, Some(here));
                feed_forward(list, dtype, [tokens, experts, used], Gate::SwigluOai, Some(here));
            }
        }
    }
    for dtype in [DType::F32, DType::F16, DType::Q4_0, DType::Q8_0, DType::Q4_K, DType::MXFP4] {
        for (tokens, experts, used) in [(1, 6, 4), (1, 3, 1), (2, 8, 3), (8, 8, 8), (19, 6, 4)] {
            for gate in [Gate::Swiglu, Gate::Geglu, Gate::Reglu] {
                one_matrix(list, dtype, [tokens, experts, used], gate);
            }
            weighted_rows(list, dtype, [tokens, experts, used]);
        }
    }
    for dtype in [DType::F32, DType::Q4_0, DType::Q8_0, DType::Q4_K, DType::MXFP4] {
        let many = [(1, 40, 8), (1, 140, 5), (1, 300, 3)].into_iter().filter(|_| dtype.block_len() <= 32);
        for (tokens, experts, used) in [(1, 6, 2), (1, 8, 8), (4, 6, 2)].into_iter().chain(many) {
            for router in [Router::Softmax, Router::Sigmoid, Router::OfSelected] {
                routed(list, dtype, [tokens, experts, used], router);
            }
        }
    }
}

/// The scores of groups that make a difference.
fn group_scores(groups: usize) -> impl Iterator<Item = GroupScore> {
    GroupScore::ALL.into_iter().filter(move |score| groups > 1 || *score == GroupScore::TopTwo)
}

/// How a router's logits become weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Router {
    Softmax,
    /// With a bias that only the selection sees.
    Sigmoid,
    /// Softmax over the selected logits, which have a bias.
    OfSelected,
}

fn select(list: &mut CaseList, tokens: usize, experts: usize, parameters: SelectExperts) {
    let SelectExperts { used, groups, groups_used, group_score } = parameters;
    let of_groups = match group_score {
        GroupScore::TopTwo => "groups",
        GroupScore::Max => "groups by their largest scores",
    };
    // Distinct scores, and scores with ties: the first expert or group of equal ones is taken.
    for fill in [Fill::Distinct, Fill::Steps] {
        let layout = InputLayout::dense(list.len());
        let details = format!(
            "{used} of {experts}, {groups_used} of {groups} {of_groups}, {tokens} tokens{layout} {fill:?}"
        );
        list.push("select_experts", details, Tolerance::DEFAULT, move |s| {
            let scores = s.strided_input(DType::F32, [1, 1, tokens, experts], layout, fill);
            s.out(scores.select_experts(parameters));
        });
    }
}

fn weights(list: &mut CaseList, tokens: usize, experts: usize, used: usize) {
    for (softmax, normalize, scale) in
        [(false, false, 1.0), (false, true, 1.0), (true, false, 1.0), (false, true, 2.5)]
    {
        let parameters = ExpertWeights { softmax, normalize, scale };
        let details = format!("{used} of {experts}, {tokens} tokens {parameters:?}");
        list.push("expert_weights", details, Tolerance::DEFAULT, move |s| {
            let fill = if softmax { Fill::Range(-20.0, 20.0) } else { Fill::Range(0.01, 1.0) };
            let probabilities = s.shaped_input(DType::F32, Shape::from([tokens, experts]), fill);
            let ids = s.distinct_ids([1, 1, tokens, used], experts).reshape([tokens, used]);
            s.out(probabilities.expert_weights(ids, parameters));
        });
    }
}

/// Routing with scores that are NaN or infinite, and with probabilities whose sum is next to nothing.
pub(super) fn extreme(list: &mut CaseList) {
    for [experts, used, groups, _] in ROUTES {
        for (chance, tokens) in [(1.0, 3), (0.1, 33)] {
            let parameters = SelectExperts::ungrouped(used);
            // Infinities in one group make its score infinite or NaN; of many such the order is not defined.
            if groups == 1 {
                let details = format!("{used} of {experts}, {tokens} tokens, not finite {chance}");
                list.push("select_experts", details, Tolerance::DEFAULT, move |s| {
                    let fill = Fill::NonFinite(chance);
                    let scores = s.shaped_input(DType::F32, Shape::from([tokens, experts]), fill);
                    s.out(scores.select_experts(parameters));
                });
            }
        }
        for softmax in [false, true] {
            for fill in [Fill::NonFinite(0.1), Fill::Range(0.0, 1e-6), Fill::Range(0.0, 1e-12)] {
                let parameters = ExpertWeights { softmax, normalize: !softmax, scale: 1.5 };
                let details = format!("{used} of {experts} {fill:?} {parameters:?}");
                list.push("expert_weights", details, Tolerance::DEFAULT, move |s| {
                    let probabilities = s.shaped_input(DType::F32, Shape::from([9, experts]), fill);
                    let ids = s.distinct_ids([1, 1, 9, used], experts).reshape([9, used]);
                    s.out(probabilities.expert_weights(ids, parameters));
                });
            }
        }
    }
}

fn add_id(list: &mut CaseList, [tokens, used, experts, columns]: [usize; 4]) {
    let layout = InputLayout::dense(list.len());
    let details = format!("[{tokens}, {used}, {columns}]{layout}, {experts} experts");
    list.push("add_id", details, Tolerance::DEFAULT, move |s| {
        let x = s.strided_input(DType::F32, [1, tokens, used, columns], layout, UNIT);
        let biases = s.shaped_input(DType::F32, Shape::from([experts, columns]), UNIT);
        let ids = s.ids([1, 1, tokens, used], experts).reshape([tokens, used]);
        s.out(x.add_id(biases, ids));
    });
}

fn sum(list: &mut CaseList, [tokens, used, columns]: [usize; 3]) {
    let layout = InputLayout::dense(list.len());
    let details = format!("[{tokens}, {used}, {columns}]{layout}");
    list.push("sum_experts", details, Tolerance::DEFAULT, move |s| {
        let x = s.strided_input(DType::F32, [1, tokens, used, columns], layout, UNIT);
        s.out(x.sum_experts(s.shaped_input(DType::F32, Shape::from([tokens, used]), UNIT)));
    });
}

/// A whole feed-forward of experts, as models have it: kernels may fuse its operations. With `here`, only so many of the
/// experts are in the matrices, in slots that a table has; the others are computed elsewhere.
fn feed_forward(
    list: &mut CaseList,
    dtype: DType,
    [tokens, experts, used]: [usize; 3],
    gate: Gate,
    here: Option<usize>,
) {
    let among = here.map(|here| format!(", {here} of them here")).unwrap_or_default();
    let details = format!("{dtype} {gate:?} {tokens} tokens, {used} of {experts}{among}");
    let tolerance = if dtype == DType::F32 { Tolerance::DEFAULT } else { Tolerance::QUANTIZED };
    list.push("expert_feed_forward", details, tolerance, move |s: &CaseBuilder<'_>| {
        let (width, hidden) = (256, 512);
        let x = s.shaped_input(DType::F32, Shape::from([tokens, 1, width]), UNIT);
        let logits = s.shaped_input(DType::F32, Shape::from([tokens, experts]), Fill::Distinct);
        let ids = logits.select_experts(SelectExperts::ungrouped(used));
        let weights =
            logits.expert_weights(ids, ExpertWeights { softmax: true, normalize: false, scale: 1.0 });
        let (ids, experts) = match here {
            None => (ids, experts),
            Some(here) => {
                // Every other expert is in a slot, from the last one down, as far as there are slots.
                let slot =
                    |expert: usize| here.checked_sub(1 + expert / 2).filter(|_| expert.is_multiple_of(2));
                let table = (0..experts).map(|expert| slot(expert).map_or(-1, |slot| slot as i32)).collect();
                let table = s.table(table);
                (table.get_rows(ids.reshape([tokens * used])).reshape([tokens, used]), here)
            }
        };
        let expert = |n, k| s.weight(dtype, [1, experts, n, k]);
        let mut gates = expert(hidden, width).mul_mat_id(x, ids);
        let mut ups = expert(hidden, width).mul_mat_id(x, ids);
        if gate == Gate::SwigluOai {
            let bias = |n| s.shaped_input(DType::F32, Shape::from([experts, n]), UNIT);
            (gates, ups) = (gates.add_id(bias(hidden), ids), ups.add_id(bias(hidden), ids));
        }
        let mut down = expert(width, hidden).mul_mat_id(gates.gated(gate, ups), ids);
        if here.is_some() && gate == Gate::SwigluOai {
            down = down.add_id(s.shaped_input(DType::F32, Shape::from([experts, width]), UNIT), ids);
        }
        s.out(down.sum_experts(weights));
    });
}

/// A feed-forward whose experts have gate and up in one matrix, with the residual.
fn one_matrix(list: &mut CaseList, dtype: DType, [tokens, experts, used]: [usize; 3], gate: Gate) {
    let details = format!("{dtype} {gate:?} {tokens} tokens, {used} of {experts}, gate and up in one matrix");
    let tolerance = if dtype == DType::F32 { Tolerance::DEFAULT } else { Tolerance::QUANTIZED };
    list.push("expert_feed_forward", details, tolerance, move |s: &CaseBuilder<'_>| {
        let (width, hidden) = (256, 512);
        let x = s.shaped_input(DType::F32, Shape::from([tokens, width]), UNIT);
        let weights = s.shaped_input(DType::F32, Shape::from([tokens, used]), UNIT);
        let ids = s.distinct_ids([1, 1, tokens, used], experts).reshape([tokens, used]);
        let expert = |n, k| s.weight(dtype, [1, experts, n, k]);
        let both = expert(2 * hidden, width).mul_mat_id(x.reshape([tokens, 1, width]), ids);
        let down = expert(width, hidden).mul_mat_id(both.gated_halves(gate, false), ids);
        s.out(x.add(down.sum_experts(weights)));
    });
}

/// A feed-forward whose experts each read a row of their own, without a gate.
fn weighted_rows(list: &mut CaseList, dtype: DType, [tokens, experts, used]: [usize; 3]) {
    let details = format!("{dtype} Relu {tokens} tokens, {used} of {experts}, rows of their own");
    let tolerance = if dtype == DType::F32 { Tolerance::DEFAULT } else { Tolerance::QUANTIZED };
    list.push("expert_feed_forward", details, tolerance, move |s: &CaseBuilder<'_>| {
        let (width, hidden) = (256, 256);
        let x = s.shaped_input(DType::F32, Shape::from([tokens, used, width]), UNIT);
        let weights = s.shaped_input(DType::F32, Shape::from([tokens, used]), UNIT);
        let ids = s.distinct_ids([1, 1, tokens, used], experts).reshape([tokens, used]);
        let expert = |n, k| s.weight(dtype, [1, experts, n, k]);
        let inner = expert(hidden, width).mul_mat_id(x, ids).unary(Unary::Relu);
        s.out(expert(width, hidden).mul_mat_id(inner, ids).sum_experts(weights));
    });
}

/// The same with norm, router and residual. The experts' rows are fewer than a multiple of what kernels take at once.
fn routed(list: &mut CaseList, dtype: DType, [tokens, experts, used]: [usize; 3], router: Router) {
    let details = format!("{dtype} {router:?} {tokens} tokens, {used} of {experts}");
    let tolerance = if dtype == DType::F32 { Tolerance::DEFAULT } else { Tolerance::QUANTIZED };
    list.push("routed_feed_forward", details, tolerance, move |s: &CaseBuilder<'_>| {
        let block = dtype.block_len().max(32);
        let width = if experts > 32 { block } else { 256 };
        let hidden = width + block;
        let x = s.shaped_input(DType::F32, Shape::from([tokens, width]), UNIT);
        let normed = x.rms_norm(1e-5).mul(s.weight(DType::F32, [1, 1, 1, width]));
        let mut logits = s.weight(DType::F32, [1, 1, experts, width]).mul_mat(normed);
        let vector = || s.weight(DType::F32, [1, 1, 1, experts]);
        if router == Router::OfSelected {
            logits = logits.add(vector());
        }
        let scores = match router {
            Router::Softmax => logits.soft_max(1.0, None, None),
            Router::Sigmoid => logits.sigmoid(),
            Router::OfSelected => logits,
        };
        let ranked = if router == Router::Sigmoid { scores.add(vector()) } else { scores };
        let ids = ranked.select_experts(SelectExperts::ungrouped(used));
        let softmax = router == Router::OfSelected;
        let weights = scores.expert_weights(ids, ExpertWeights { softmax, normalize: !softmax, scale: 1.5 });
        let expert = |n, k| s.weight(dtype, [1, experts, n, k]);
        let rows = normed.reshape([tokens, 1, width]);
        let gates = expert(hidden, width).mul_mat_id(rows, ids);
        let inner = gates.gated(Gate::Swiglu, expert(hidden, width).mul_mat_id(rows, ids));
        s.out(expert(width, hidden).mul_mat_id(inner, ids).sum_experts(weights).add(x));
    });
}

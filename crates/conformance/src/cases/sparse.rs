//! Cases of matrix multiplications with the rows of active neurons.

use quadriga_graph::{DType, Shape, Unary};

use super::builder::InputLayout;
use super::fill::{Fill, UNIT};
use super::{CaseList, WEIGHT_TYPES};
use crate::Tolerance;

/// Shares of active neurons: none, few, some, all.
const ACTIVE: [f64; 4] = [0.0, 0.1, 0.5, 1.0];

fn tolerance(dtype: DType) -> Tolerance {
    if dtype == DType::F32 { Tolerance::DEFAULT } else { Tolerance::QUANTIZED }
}

pub(super) fn list(list: &mut CaseList) {
    for dtype in WEIGHT_TYPES {
        let block = dtype.block_len().max(32);
        for active in ACTIVE {
            for (tokens, neurons, width) in [(1, 1, 1), (1, 70, 2), (2, 33, 3), (7, 48, 1), (33, 65, 2)] {
                mul_mat(list, dtype, active, [tokens, neurons, width * block]);
                axpy(list, dtype, active, [tokens, neurons, width * block]);
            }
            for tokens in [1, 5] {
                some_rows(list, dtype, active, [tokens, 96, 2 * block]);
                feed_forward(list, dtype, active, [tokens, 160, 2 * block]);
            }
        }
        for [tokens, neurons, width] in [[0, 5, block], [3, 0, block], [2, 5, 0]] {
            mul_mat(list, dtype, 0.5, [tokens, neurons, width]);
            axpy(list, dtype, 0.5, [tokens, neurons, width]);
        }
    }
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::Q4_0, DType::Q8_0] {
        for [tokens, neurons, width] in [[1, 700, 576], [1, 260, 2048], [3, 1100, 256], [9, 515, 320]] {
            mul_mat(list, dtype, 0.1, [tokens, neurons, width]);
            axpy(list, dtype, 0.1, [tokens, neurons, width]);
        }
    }
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for width in [1, 7, 33, 130, 577] {
            mul_mat(list, dtype, 0.3, [2, 40, width]);
            axpy(list, dtype, 0.3, [2, 40, width]);
        }
    }
    // So many tokens that backends may multiply with all rows.
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::Q4_0, DType::Q8_0] {
        for [tokens, neurons, width] in [[40, 64, 96], [100, 72, 256], [129, 136, 160]] {
            for active in [0.0, 0.1, 1.0] {
                mul_mat(list, dtype, active, [tokens, neurons, width]);
                axpy(list, dtype, active, [tokens, neurons, width]);
            }
        }
        for tokens in [40, 100] {
            feed_forward(list, dtype, 0.1, [tokens, 160, 256]);
        }
    }
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for tokens in [1, 3, 40, 100] {
            unused_rows(list, dtype, [tokens, 72, 160]);
        }
    }
    for [tokens, width] in [[3, 256], [129, 256], [136, 64]] {
        computed_rows(list, [tokens, width]);
    }
}

fn mul_mat(list: &mut CaseList, dtype: DType, active: f64, [tokens, neurons, width]: [usize; 3]) {
    let layout = InputLayout::dense(list.len());
    let details = format!("{dtype} [{neurons}, {width}] × [{tokens}, {width}], {active} active{layout}");
    list.push("mul_mat_sparse", details, tolerance(dtype), move |s| {
        let w = s.weight(dtype, [1, 1, neurons, width]);
        let x = s.shaped_input(DType::F32, Shape::from([tokens, width]), UNIT);
        let gates = s.strided_input(DType::F32, [1, 1, tokens, neurons], layout, Fill::Active(active));
        s.out(w.mul_mat_sparse(x, gates, None));
    });
}

fn axpy(list: &mut CaseList, dtype: DType, active: f64, [tokens, neurons, width]: [usize; 3]) {
    let layout = InputLayout::dense(list.len());
    let details = format!("{dtype} [{neurons}, {width}], [{tokens}, {neurons}] {active} active{layout}");
    list.push("axpy_sparse", details, tolerance(dtype), move |s| {
        let w = s.weight(dtype, [1, 1, neurons, width]);
        let factors = s.strided_input(DType::F32, [1, 1, tokens, neurons], layout, Fill::Active(active));
        s.out(w.axpy_sparse(factors));
    });
}

/// Some rows hold infinities and NaN, which only tokens with such a neuron may see.
fn unused_rows(list: &mut CaseList, dtype: DType, [tokens, neurons, width]: [usize; 3]) {
    let details = format!("{dtype} [{neurons}, {width}] with NaN, {tokens} tokens");
    let dims = [1, 1, neurons, width];
    list.push("mul_mat_sparse", details.clone(), tolerance(dtype), move |s| {
        let x = s.shaped_input(DType::F32, Shape::from([tokens, width]), UNIT);
        let gates = s.shaped_input(DType::F32, Shape::from([tokens, neurons]), Fill::Active(0.1));
        s.out(s.filled_weight(dtype, dims, Fill::NonFinite(2e-4)).mul_mat_sparse(x, gates, None));
    });
    list.push("axpy_sparse", details, tolerance(dtype), move |s| {
        let factors = s.shaped_input(DType::F32, Shape::from([tokens, neurons]), Fill::Active(0.1));
        s.out(s.filled_weight(dtype, dims, Fill::NonFinite(2e-4)).axpy_sparse(factors));
    });
}

/// Rows that the graph computes, to which their own sums are added: no result may be where rows are that are still read.
fn computed_rows(list: &mut CaseList, [tokens, width]: [usize; 2]) {
    let details = format!("{tokens} computed rows of {width}, and their sums");
    list.push("axpy_sparse", details, Tolerance::DEFAULT, move |s| {
        let rows = s.shaped_input(DType::F32, Shape::from([tokens, width]), UNIT).scale(2.0);
        let factors = s.shaped_input(DType::F32, Shape::from([tokens, tokens]), Fill::Active(0.1));
        s.out(rows.add(rows.axpy_sparse(factors)));
    });
}

/// Rows of some neurons, in any order, and rows without a neuron.
fn some_rows(list: &mut CaseList, dtype: DType, active: f64, [tokens, neurons, width]: [usize; 3]) {
    let details = format!("{dtype} some of {neurons} rows × [{tokens}, {width}], {active} active");
    list.push("mul_mat_sparse", details, tolerance(dtype), move |s| {
        let rows = neurons / 2;
        let w = s.weight(dtype, [1, 1, rows, width]);
        let x = s.shaped_input(DType::F32, Shape::from([tokens, width]), UNIT);
        let gates = s.shaped_input(DType::F32, Shape::from([tokens, neurons]), Fill::Active(active));
        let id = |row: usize| if row % 5 == 3 { -1 } else { (row * 31 % neurons) as i32 };
        let ids = s.table((0..rows).map(id).collect()).reshape([rows]);
        s.out(w.mul_mat_sparse(x, gates, Some(ids)));
    });
}

/// A whole feed-forward, as models have it: kernels may fuse its operations.
fn feed_forward(list: &mut CaseList, dtype: DType, active: f64, [tokens, neurons, width]: [usize; 3]) {
    let details = format!("{dtype} {tokens} tokens, {neurons} neurons of {width}, {active} active");
    list.push("sparse_feed_forward", details, tolerance(dtype), move |s| {
        let x = s.shaped_input(DType::F32, Shape::from([tokens, width]), UNIT);
        let normed = x.rms_norm(1e-5);
        // A bias moves the share of active neurons; that share is only about the one asked for.
        let bias = s.shaped_input(DType::F32, Shape::from([neurons]), UNIT);
        let shift = if active == 0.0 { -1e4 } else { 8.0 * (active as f32 - 0.5) };
        let rows = || s.weight(dtype, [1, 1, neurons, width]);
        let gates = rows().mul_mat(normed).add(bias).scale_bias(1.0, shift).unary(Unary::Relu);
        let inner = rows().mul_mat_sparse(normed, gates, None);
        s.out(rows().axpy_sparse(inner).add(x));
    });
}

//! Cases of sums, means, argmax and sorts.

use quadriga_graph::{DType, Op, Order};

use super::builder::InputLayout;
use super::fill::{Fill, UNIT};
use super::{CaseList, WIDTHS};
use crate::Tolerance;

pub(super) fn list(list: &mut CaseList) {
    for width in WIDTHS.into_iter().chain([4097]) {
        for dims in [[1, 1, 1, width], [1, 1, 7, width], [2, 3, 2, width]] {
            sums(list, dims);
            orders(list, dims);
        }
    }
    for dims in [[1, 1, 0, 8], [0, 2, 1, 3]] {
        sums(list, dims);
        orders(list, dims);
    }
    few_of_many(list);
    // Argmax and sum of logits, which kernels compute together; a large vocabulary's by several blocks.
    for dims in [[1, 1, 1, 512], [1, 1, 3, 512], [1, 1, 1, 70_000], [1, 1, 1, 151_936]] {
        list.push("argmax_sum", format!("{dims:?}"), Tolerance::DEFAULT, move |s| {
            let x = s.input(DType::F32, dims, UNIT);
            s.out(s.graph().apply(Op::ArgMax, &[x]));
            s.out(s.graph().apply(Op::SumRows, &[x]));
        });
    }
    // An empty row has the sum 0 and no mean.
    for op in [Op::Sum, Op::SumRows] {
        list.push(op.name(), "[1, 2, 3, 0]".into(), Tolerance::DEFAULT, move |s| {
            s.out(s.graph().apply(op.clone(), &[s.input(DType::F32, [1, 2, 3, 0], UNIT)]));
        });
    }
}

fn sums(list: &mut CaseList, dims: [usize; 4]) {
    for op in [Op::Sum, Op::SumRows, Op::Mean] {
        for fill in [UNIT, Fill::Range(0.0, 1000.0)] {
            let layout = InputLayout::any(list.len());
            let op = op.clone();
            list.push(op.name(), format!("{dims:?}{layout} {fill:?}"), Tolerance::DEFAULT, move |s| {
                s.out(s.graph().apply(op.clone(), &[s.strided_input(DType::F32, dims, layout, fill)]));
            });
        }
    }
}

/// Few of many: backends need not sort the others.
fn few_of_many(list: &mut CaseList) {
    for (columns, k) in [(4097, 1), (4100, 3), (9000, 40), (12_289, 128), (33_000, 1000), (70_001, 128)] {
        for fill in [Fill::Distinct, Fill::Steps] {
            let (dims, layout) = ([1, 2, 2, columns], InputLayout::any(list.len()));
            let what = format!("{k} of {dims:?}{layout} {fill:?}");
            list.push(Op::TopK { k }.name(), what, Tolerance::Exact, move |s| {
                s.out(s.strided_input(DType::F32, dims, layout, fill).top_k(k));
            });
        }
    }
}

/// With distinct values there is one right answer; with ties the first index wins.
fn orders(list: &mut CaseList, dims: [usize; 4]) {
    let columns = dims[3];
    let mut ops =
        vec![Op::ArgMax, Op::ArgSort { order: Order::Ascending }, Op::ArgSort { order: Order::Descending }];
    ops.extend([1, columns / 2, columns].map(|k| Op::TopK { k }));
    for op in ops {
        for fill in [Fill::Distinct, Fill::Steps] {
            let layout = InputLayout::any(list.len());
            let name = op.name();
            let op = op.clone();
            let how = match &op {
                Op::ArgSort { order } => format!("{order:?} "),
                Op::TopK { k } => format!("{k} of "),
                _ => String::new(),
            };
            list.push(name, format!("{how}{dims:?}{layout} {fill:?}"), Tolerance::Exact, move |s| {
                s.out(s.graph().apply(op.clone(), &[s.strided_input(DType::F32, dims, layout, fill)]));
            });
        }
    }
}

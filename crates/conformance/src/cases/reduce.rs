//! Cases of sums, means and orders.

use quadriga_graph::{DType, Op, Order};

use super::fill::{Fill, UNIT};
use super::sketch::Lay;
use super::{List, WIDTHS};
use crate::Tolerance;

pub(super) fn list(list: &mut List) {
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
    // A row without elements sums to nothing, and has no mean.
    for op in [Op::Sum, Op::SumRows] {
        list.push(op.name(), "[1, 2, 3, 0]".into(), Tolerance::DEFAULT, move |s| {
            s.out(s.graph().apply(op.clone(), &[s.input(DType::F32, [1, 2, 3, 0], UNIT)]));
        });
    }
}

fn sums(list: &mut List, dims: [usize; 4]) {
    for op in [Op::Sum, Op::SumRows, Op::Mean] {
        for fill in [UNIT, Fill::Range(0.0, 1000.0)] {
            let lay = Lay::any(list.turn());
            let op = op.clone();
            list.push(op.name(), format!("{dims:?}{lay} {fill:?}"), Tolerance::DEFAULT, move |s| {
                s.out(s.graph().apply(op.clone(), &[s.laid(DType::F32, dims, lay, fill)]));
            });
        }
    }
}

/// Values are all different, so that there is one right answer; and once with equals, where the first wins.
fn orders(list: &mut List, dims: [usize; 4]) {
    let columns = dims[3];
    let mut ops =
        vec![Op::ArgMax, Op::ArgSort { order: Order::Ascending }, Op::ArgSort { order: Order::Descending }];
    ops.extend([1, columns / 2, columns].map(|k| Op::TopK { k }));
    for op in ops {
        for fill in [Fill::Distinct, Fill::Steps] {
            let lay = Lay::any(list.turn());
            let name = op.name();
            let op = op.clone();
            let how = match &op {
                Op::ArgSort { order } => format!("{order:?} "),
                Op::TopK { k } => format!("{k} of "),
                _ => String::new(),
            };
            list.push(name, format!("{how}{dims:?}{lay} {fill:?}"), Tolerance::Exact, move |s| {
                s.out(s.graph().apply(op.clone(), &[s.laid(DType::F32, dims, lay, fill)]));
            });
        }
    }
}

//! Cases of collectives: one to four ranks, whose parts may be uneven or empty.

use quadriga_graph::{DType, Ranks, Shape};

use super::builder::CaseBuilder;
use super::fill::UNIT;
use super::{CASE_GROUP, CaseList, RankBuild};
use crate::Tolerance;

/// The most ranks of a case.
const MOST_RANKS: usize = 4;
/// The types that are moved without being computed with.
const MOVED: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::I32];
/// Rows and columns.
const SHAPES: [[usize; 2]; 9] =
    [[1, 1], [1, 7], [1, 576], [3, 5], [2, 64], [17, 33], [5, 1000], [0, 4], [4, 0]];

fn ranks(rank: usize, count: usize) -> Ranks {
    Ranks { group: CASE_GROUP, rank, count }
}

fn input<'g>(s: &CaseBuilder<'g>, dtype: DType, shape: [usize; 2]) -> quadriga_graph::Value<'g> {
    s.shaped_input(dtype, Shape::from(shape), UNIT)
}

/// The columns of each rank: alike, uneven, and with ranks that have none.
fn divisions(count: usize) -> Vec<Vec<usize>> {
    let mut all = vec![
        vec![1; count],
        vec![16; count],
        (0..count).map(|rank| 3 + 5 * rank).collect(),
        (0..count).rev().map(|rank| 7 * rank).collect(),
        (0..count).map(|rank| if rank % 2 == 0 { 0 } else { 33 }).collect(),
        (0..count).map(|rank| if rank + 1 == count { 65 } else { 0 }).collect(),
    ];
    all.dedup();
    all
}

pub(super) fn list(list: &mut CaseList) {
    for count in 1..=MOST_RANKS {
        for shape in SHAPES {
            all_reduce(list, count, shape);
            for root in 0..count {
                broadcast(list, count, root, shape);
            }
            if count > 1 {
                chain(list, count, shape);
            }
        }
        for columns in divisions(count) {
            for rows in [1, 2, 5, 32] {
                all_gather(list, count, &columns, rows);
                reduce_scatter(list, count, &columns, rows);
                both(list, count, &columns, rows);
            }
        }
        layer(list, count);
    }
}

fn push(
    list: &mut CaseList,
    operation: &'static str,
    count: usize,
    details: String,
    tolerance: Tolerance,
    build: impl for<'g> Fn(&CaseBuilder<'g>, Ranks) + Send + Sync + 'static,
) {
    let build: RankBuild = Box::new(move |s, rank| build(s, ranks(rank, count)));
    let of = if count == 1 { "rank" } else { "ranks" };
    list.push_ranks(operation, format!("{details} on {count} {of}"), tolerance, count, build);
}

fn all_reduce(list: &mut CaseList, count: usize, shape: [usize; 2]) {
    push(list, "all_reduce", count, format!("{shape:?}"), Tolerance::DEFAULT, move |s, ranks| {
        s.out(input(s, DType::F32, shape).all_reduce(ranks));
    });
    // In place of a result, and of one that is read afterwards, too.
    let details = format!("{shape:?} between other operations");
    push(list, "all_reduce", count, details, Tolerance::DEFAULT, move |s, ranks| {
        s.out(input(s, DType::F32, shape).scale(0.5).all_reduce(ranks).scale_bias(2.0, 1.0));
    });
    let details = format!("{shape:?} of a value that is read again");
    push(list, "all_reduce", count, details, Tolerance::DEFAULT, move |s, ranks| {
        let x = input(s, DType::F32, shape).scale(-0.5);
        s.out(x.all_reduce(ranks).sub(x));
    });
}

fn broadcast(list: &mut CaseList, count: usize, root: usize, shape: [usize; 2]) {
    for dtype in MOVED {
        let details = format!("{dtype} {shape:?} of rank {root}");
        push(list, "broadcast", count, details, Tolerance::Exact, move |s, ranks| {
            s.out(input(s, dtype, shape).broadcast(ranks, root));
        });
    }
}

/// A tensor that is passed from the first rank to the last, each of which changes it.
fn chain(list: &mut CaseList, count: usize, shape: [usize; 2]) {
    let build = move |s: &CaseBuilder<'_>, ranks: Ranks| {
        let own = input(s, DType::F32, shape);
        let before = match ranks.rank.checked_sub(1) {
            Some(from) => own.receive(ranks, (from, 7), DType::F32, shape).add(own),
            None => own.neg(),
        };
        let next = ranks.rank + 1;
        s.out(if next < count { before.send(ranks, next, 7, &[own]) } else { before });
    };
    push(list, "send", count, format!("{shape:?} in a chain"), Tolerance::DEFAULT, build);
    for dtype in MOVED {
        let details = format!("{dtype} {shape:?} with two tags");
        push(list, "receive", count, details, Tolerance::Exact, move |s, ranks| {
            let own = input(s, dtype, shape);
            let last = count - 1;
            if ranks.rank == 0 {
                s.out(own.send(ranks, last, 1, &[]).send(ranks, last, 2, &[]));
            } else if ranks.rank == last {
                let first = own.receive(ranks, (0, 1), dtype, shape);
                s.out(first);
                s.out(first.receive(ranks, (0, 2), dtype, shape));
            } else {
                s.out(own.cont());
            }
        });
    }
}

fn all_gather(list: &mut CaseList, count: usize, columns: &[usize], rows: usize) {
    for dtype in MOVED {
        let (all, details) = (columns.to_vec(), format!("{dtype} {rows} rows of {columns:?}"));
        push(list, "all_gather", count, details, Tolerance::Exact, move |s, ranks| {
            let own = all.get(ranks.rank).copied().unwrap_or(0);
            s.out(input(s, dtype, [rows, own]).all_gather(ranks, all.clone()));
        });
    }
}

fn reduce_scatter(list: &mut CaseList, count: usize, columns: &[usize], rows: usize) {
    let (all, details) = (columns.to_vec(), format!("{rows} rows of {columns:?}"));
    push(list, "reduce_scatter", count, details, Tolerance::DEFAULT, move |s, ranks| {
        s.out(input(s, DType::F32, [rows, all.iter().sum()]).reduce_scatter(ranks, all.clone()));
    });
}

/// A sum in two halves, which an all-reduce computes at once.
fn both(list: &mut CaseList, count: usize, columns: &[usize], rows: usize) {
    let (all, details) = (columns.to_vec(), format!("{rows} rows of {columns:?}, then gathered"));
    push(list, "reduce_scatter", count, details, Tolerance::DEFAULT, move |s, ranks| {
        let x = input(s, DType::F32, [rows, all.iter().sum()]).scale(1.5);
        s.out(x.reduce_scatter(ranks, all.clone()).scale(2.0).all_gather(ranks, all.clone()));
        s.out(x.all_reduce(ranks));
    });
}

/// Two independent sums after products with parts of matrices, as in a layer that ranks divide.
fn layer(list: &mut CaseList, count: usize) {
    for rows in [1, 3] {
        let details = format!("{rows} rows after products");
        push(list, "all_reduce", count, details, Tolerance::DEFAULT, move |s, ranks| {
            let x = s.shaped_input(DType::F32, Shape::from([rows, 64]), UNIT);
            let [a, b] = [s.weight(DType::F32, [1, 1, 32, 64]), s.weight(DType::F32, [1, 1, 32, 64])];
            let (a, b) = (a.mul_mat(x).all_reduce(ranks), b.mul_mat(x).all_reduce(ranks));
            s.out(a.rms_norm(1e-5).add(b));
        });
    }
}

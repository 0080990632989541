//! Cases of the elementwise operations.

use quadriga_graph::{Binary, DType, Gate, Op, Unary};

use super::builder::InputLayout;
use super::fill::{Fill, UNIT};
use super::{CaseList, WIDTHS};
use crate::Tolerance;

const FLOATS: [DType; 2] = [DType::F32, DType::F16];
const EMPTY: [[usize; 4]; 4] = [[1, 1, 0, 8], [1, 1, 3, 0], [0, 2, 3, 4], [2, 0, 1, 1]];

pub(super) fn list(list: &mut CaseList) {
    for kind in Unary::ALL {
        unary(list, kind);
    }
    for kind in [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div] {
        binary(list, kind);
    }
    one_value(list);
    for gate in Gate::ALL {
        gated(list, gate);
    }
    diagonal_masks(list);
}

/// Ordinary values of a function's domain, and large ones at which a naive implementation overflows.
fn ranges(kind: Unary, dtype: DType) -> (Fill, Fill) {
    let half = dtype == DType::F16;
    match kind {
        Unary::Log => (Fill::Range(0.01, 10.0), Fill::Range(1e-4, if half { 6e4 } else { 1e30 })),
        Unary::Sqrt => (Fill::Range(0.0, 10.0), Fill::Range(0.0, if half { 6e4 } else { 1e30 })),
        Unary::Exp => {
            (Fill::Range(-6.0, 6.0), if half { Fill::Range(-20.0, 11.0) } else { Fill::Range(-100.0, 88.0) })
        }
        Unary::Sin | Unary::Cos => (Fill::Range(-6.0, 6.0), Fill::Range(-100.0, 100.0)),
        Unary::Sqr => (UNIT, if half { Fill::Range(-250.0, 250.0) } else { Fill::Range(-1e15, 1e15) }),
        Unary::Sign | Unary::Step | Unary::Relu | Unary::Abs => (Fill::Steps, Fill::Range(-3e4, 3e4)),
        _ => (Fill::Range(-6.0, 6.0), Fill::Range(-1e4, 1e4)),
    }
}

fn unary(list: &mut CaseList, kind: Unary) {
    let name = Op::Unary(kind).name();
    for dtype in FLOATS {
        let (usual, large) = ranges(kind, dtype);
        let mut push = |dims: [usize; 4], fill: Fill| {
            let layout = InputLayout::any(list.len());
            let size = if fill == large { " large" } else { "" };
            list.push(
                name,
                format!("{dtype} {dims:?}{layout}{size}"),
                Tolerance::of_result(dtype),
                move |s| {
                    s.out(s.strided_input(dtype, dims, layout, fill).unary(kind));
                },
            );
        };
        for width in WIDTHS {
            push([1, 1, 1, width], usual);
            push([2, 3, 4, width], usual);
        }
        for dims in EMPTY {
            push(dims, usual);
        }
        for dims in [[1, 1, 1, 77], [1, 1, 9, 64], [3, 2, 2, 33]] {
            push(dims, large);
        }
    }
}

fn binary(list: &mut CaseList, kind: Binary) {
    let name = Op::Binary(kind).name();
    let types = [
        (DType::F32, DType::F32),
        (DType::F16, DType::F32),
        (DType::F32, DType::F16),
        (DType::F16, DType::F16),
    ];
    let push = |list: &mut CaseList, (ta, tb): (DType, DType), a: [usize; 4], b: [usize; 4]| {
        let (la, lb) = (InputLayout::any(list.len()), InputLayout::any(list.len() / 5));
        // Divisors stay away from zero.
        let fill = if kind == Binary::Div { Fill::Range(0.5, 2.0) } else { UNIT };
        let details = format!("{ta} {a:?}{la}, {tb} {b:?}{lb}");
        list.push(name, details, Tolerance::of_result(ta), move |s| {
            let (a, b) = (s.strided_input(ta, a, la, UNIT), s.strided_input(tb, b, lb, fill));
            s.out(s.graph().apply(Op::Binary(kind), &[a, b]));
        });
    };
    for (i, types) in types.into_iter().enumerate() {
        for (j, width) in WIDTHS.into_iter().enumerate() {
            push(list, types, [1, 1, 1, width], [1, 1, 1, width]);
            push(list, types, [2, 3, 4, width], [2, 3, 4, width]);
            push(list, types, [2, 3, 4, width], [1, 1, 1, width]);
            push(list, types, [2, 3, 4, width], [2, 1, 4, 1]);
            if (i + j).is_multiple_of(2) {
                push(list, types, [2, 3, 4, width], [1, 1, 1, 1]);
                push(list, types, [2, 3, 4, width], [1, 3, 1, width]);
                push(list, types, [2, 4, 6, width], [1, 2, 3, width]);
                push(list, types, [1, 2, 2, 3 * width], [1, 1, 2, width]);
            }
        }
        for dims in EMPTY {
            push(list, types, dims, dims);
        }
        push(list, types, [1, 1, 0, 8], [1, 1, 1, 8]);
    }
}

fn one_value(list: &mut CaseList) {
    for dtype in FLOATS {
        let all = WIDTHS.iter().flat_map(|w| [[1, 1, 1, *w], [2, 3, 4, *w]]).chain(EMPTY);
        for (number, dims) in all.enumerate() {
            // Not the number of cases so far, which grows by as many as there are layouts.
            let layout = InputLayout::any(number);
            let tolerance = Tolerance::of_result(dtype);
            list.push("add1", format!("{dtype} {dims:?}{layout}"), tolerance, move |s| {
                s.out(s.strided_input(dtype, dims, layout, UNIT).add1(s.input(DType::F32, [1; 4], UNIT)));
            });
            for (scale, bias) in [(0.125, 0.0), (-3.5, 1.25)] {
                list.push(
                    "scale",
                    format!("{dtype} {dims:?}{layout} · {scale} + {bias}"),
                    tolerance,
                    move |s| {
                        s.out(s.strided_input(dtype, dims, layout, UNIT).scale_bias(scale, bias));
                    },
                );
            }
            for (min, max) in [(-0.5, 0.25), (f32::NEG_INFINITY, 0.0)] {
                list.push("clamp", format!("{dtype} {dims:?}{layout} {min}..{max}"), tolerance, move |s| {
                    s.out(s.strided_input(dtype, dims, layout, UNIT).clamp(min, max));
                });
            }
        }
    }
}

fn gated(list: &mut CaseList, gate: Gate) {
    let name = Op::Gated { gate, swapped: false }.name();
    let fill = Fill::Range(-6.0, 6.0);
    for dtype in FLOATS {
        for dims in WIDTHS.iter().flat_map(|w| [[1, 1, 1, *w], [2, 1, 5, *w]]).chain(EMPTY) {
            for swapped in [false, true] {
                let (layout, other) = (InputLayout::any(list.len()), InputLayout::any(list.len() / 5));
                let mark = if swapped { " swapped" } else { "" };
                let tolerance = Tolerance::of_result(dtype);
                list.push(name, format!("{dtype} {dims:?}{layout} and{other}{mark}"), tolerance, move |s| {
                    let (a, b) = (
                        s.strided_input(dtype, dims, layout, fill),
                        s.strided_input(dtype, dims, other, fill),
                    );
                    s.out(s.graph().apply(Op::Gated { gate, swapped }, &[a, b]));
                });
                let [a, b, c, d] = dims;
                let layout = InputLayout::any(list.len());
                list.push(name, format!("{dtype} halves {dims:?}{layout}{mark}"), tolerance, move |s| {
                    s.out(s.strided_input(dtype, [a, b, c, 2 * d], layout, fill).gated_halves(gate, swapped));
                });
            }
        }
    }
}

fn diagonal_masks(list: &mut CaseList) {
    for width in WIDTHS {
        for dims in [[1, 1, 1, width], [1, 1, 9, width], [2, 3, 5, width]] {
            for past in [0, 1, 16] {
                let layout = InputLayout::any(list.len());
                let details = format!("{dims:?}{layout} past {past}");
                list.push("diag_mask_inf", details.clone(), Tolerance::Exact, move |s| {
                    s.out(s.strided_input(DType::F32, dims, layout, UNIT).diag_mask_inf(past));
                });
                list.push("diag_mask_zero", details, Tolerance::Exact, move |s| {
                    s.out(s.strided_input(DType::F32, dims, layout, UNIT).diag_mask_zero(past));
                });
            }
        }
    }
}

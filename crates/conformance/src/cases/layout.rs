//! Cases of copies, views and other operations that move elements.

use quadriga_graph::{DType, Op};

use super::builder::InputLayout;
use super::fill::UNIT;
use super::{CaseList, WEIGHT_TYPES, WIDTHS, WRITABLE};
use crate::Tolerance;

const MOVED: [DType; 3] = [DType::F32, DType::F16, DType::I32];

pub(super) fn list(list: &mut CaseList) {
    casts(list);
    permutations(list);
    copies(list);
    concats(list);
    repeats(list);
    pads(list);
    views(list);
}

/// A row length that is a whole number of blocks of both types.
fn width(a: DType, b: DType) -> usize {
    a.block_len().max(b.block_len())
}

fn casts(list: &mut CaseList) {
    for from in WEIGHT_TYPES.into_iter().chain([DType::I32]) {
        for to in WRITABLE.into_iter().chain([from]) {
            if from == DType::I32 && to != from {
                continue;
            }
            let unit = width(from, to);
            let lengths = if unit == 1 { vec![1, 7, 33, 256] } else { vec![unit, 3 * unit] };
            for columns in lengths {
                for dims in [[1, 1, 1, columns], [2, 3, 5, columns], [1, 0, 2, columns]] {
                    let layout = if from.is_quantized() {
                        InputLayout::dense(list.len())
                    } else {
                        InputLayout::any(list.len())
                    };
                    // A copy between equal types is bit-exact.
                    let tolerance = if from == to { Tolerance::Exact } else { Tolerance::written(to) };
                    list.push("cast", format!("{from} {dims:?}{layout} to {to}"), tolerance, move |s| {
                        s.out(s.strided_input(from, dims, layout, UNIT).cast(to));
                    });
                }
            }
        }
    }
}

/// Contiguous copies of every order of dimensions.
fn permutations(list: &mut CaseList) {
    for dtype in MOVED {
        for code in 0..256usize {
            let axes = [code >> 6, (code >> 4) & 3, (code >> 2) & 3, code & 3];
            let mut sorted = axes;
            sorted.sort_unstable();
            if sorted != [0, 1, 2, 3] {
                continue;
            }
            for dims in [[2, 3, 4, 5], [1, 2, 17, 33]] {
                list.push(
                    "cast",
                    format!("{dtype} {dims:?} in order {axes:?}"),
                    Tolerance::Exact,
                    move |s| {
                        let x = s.input(dtype, dims, UNIT).reshape(dims);
                        s.out(x.permute(axes).cont());
                    },
                );
            }
        }
    }
}

fn copies(list: &mut CaseList) {
    for from in WEIGHT_TYPES {
        for to in WRITABLE {
            let columns = 2 * width(from, to).max(9);
            for (layout, part) in [
                (InputLayout::Plain, false),
                (InputLayout::Gaps, true),
                (InputLayout::Permuted, true),
                (InputLayout::Offset, false),
            ] {
                let tolerance = if from == to { Tolerance::Exact } else { Tolerance::written(to) };
                let place = if part { " a part" } else { "" };
                let details = format!("{from} [2, 3, 4, {columns}]{layout} into {to}{place}");
                list.push("copy_into", details, tolerance, move |s| {
                    let dims = [2, 3, 4, columns];
                    let x = s.strided_input(from, dims, layout, UNIT);
                    if part {
                        let target = s.state(to, [2, 5, 4, columns]);
                        let written = x.copy_into(target.slice(1, 1, 3));
                        s.out(written.cont());
                    } else {
                        s.out(x.copy_into(s.state(to, dims)));
                    }
                });
            }
        }
    }
    for dtype in MOVED {
        list.push("copy_into", format!("{dtype} into another shape"), Tolerance::Exact, move |s| {
            let x = s.strided_input(dtype, [1, 2, 6, 5], InputLayout::Transposed, UNIT);
            s.out(x.copy_into(s.state(dtype, [1, 1, 4, 15])));
        });
    }
}

fn concats(list: &mut CaseList) {
    for dtype in MOVED {
        for axis in 0..4usize {
            for count in [1, 2, 3, 5] {
                for dims in [[1, 1, 1, 1], [2, 3, 4, 5], [1, 2, 3, 33], [2, 1, 0, 8], [1, 1, 7, 64]] {
                    let layout = InputLayout::any(list.len());
                    let details = format!("{dtype} {count} × {dims:?}{layout} along {axis}");
                    list.push("concat", details, Tolerance::Exact, move |s| {
                        let parts: Vec<_> = (0..count)
                            .map(|i| {
                                // Each part is longer than the previous one by 1 along the concatenated dimension.
                                let mut dims = dims;
                                dims.iter_mut().skip(axis).take(1).for_each(|d| *d += i);
                                s.strided_input(
                                    dtype,
                                    dims,
                                    if i % 2 == 0 { layout } else { InputLayout::Plain },
                                    UNIT,
                                )
                            })
                            .collect();
                        s.out(s.graph().apply(Op::Concat { axis4: axis }, &parts));
                    });
                }
            }
        }
    }
}

fn repeats(list: &mut CaseList) {
    for dtype in MOVED {
        for width in WIDTHS {
            for times in [[1, 1, 1, 3], [2, 3, 1, 1], [1, 2, 5, 2]] {
                let dims = if width % 2 == 0 { [1, 2, 3, width] } else { [1, 1, 1, width] };
                let layout = InputLayout::any(list.len());
                list.push(
                    "repeat",
                    format!("{dtype} {dims:?}{layout} × {times:?}"),
                    Tolerance::Exact,
                    move |s| {
                        let [a, b, c, d] = dims;
                        let to = [a * times[0], b * times[1], c * times[2], d * times[3]];
                        s.out(s.strided_input(dtype, dims, layout, UNIT).repeat(to));
                    },
                );
            }
        }
        list.push("repeat", format!("{dtype} to nothing"), Tolerance::Exact, move |s| {
            s.out(s.input(dtype, [1, 1, 1, 4], UNIT).repeat([0, 4]));
        });
    }
}

fn pads(list: &mut CaseList) {
    for dtype in [DType::F32, DType::F16] {
        for dims in [[1, 1, 1, 1], [1, 1, 3, 7], [2, 3, 4, 5], [1, 2, 1, 33], [1, 1, 0, 4], [1, 1, 5, 64]] {
            for (before, after) in [
                ([0; 4], [0; 4]),
                ([0; 4], [0, 0, 0, 3]),
                ([0; 4], [1, 2, 1, 1]),
                ([0, 0, 1, 2], [0, 0, 0, 1]),
                ([1, 1, 1, 1], [0, 1, 0, 31]),
            ] {
                let layout = InputLayout::any(list.len());
                let details = format!("{dtype} {dims:?}{layout} by {before:?} and {after:?}");
                list.push("pad", details, Tolerance::Exact, move |s| {
                    let x = s.strided_input(dtype, dims, layout, UNIT);
                    s.out(s.graph().apply(Op::Pad { before, after }, &[x]));
                });
            }
        }
    }
}

/// Views of views, observed through a contiguous copy.
fn views(list: &mut CaseList) {
    for dtype in MOVED {
        for dims in [[1, 1, 4, 6], [1, 2, 3, 8], [2, 3, 4, 5], [1, 1, 1, 33], [1, 2, 0, 4]] {
            let count: usize = dims.iter().product();
            list.push("views", format!("{dtype} {dims:?} transposed"), Tolerance::Exact, move |s| {
                s.out(s.input(dtype, dims, UNIT).reshape(dims).transpose().cont());
            });
            list.push(
                "views",
                format!("{dtype} {dims:?} transposed, sliced, transposed"),
                Tolerance::Exact,
                move |s| {
                    let transposed = s.input(dtype, dims, UNIT).reshape(dims).transpose();
                    s.out(transposed.slice(2, dims[3] / 2, dims[3].div_ceil(2)).transpose().cont());
                },
            );
            list.push("views", format!("{dtype} {dims:?} flat, sliced"), Tolerance::Exact, move |s| {
                let flat = s.input(dtype, dims, UNIT).reshape([count]);
                s.out(flat.slice(0, count / 3, count / 2).cont());
            });
            list.push("views", format!("{dtype} {dims:?} one row repeated"), Tolerance::Exact, move |s| {
                let x = s.input(dtype, dims, UNIT).reshape(dims);
                let columns = if count == 0 { 0 } else { dims[3] };
                let strides = [0, 0, 0, dtype.block_bytes()];
                s.out(x.view([2, 3, columns], strides, 0).cont());
            });
        }
    }
}

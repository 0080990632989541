//! Cases of matrix multiplication.

use quadriga_graph::DType;

use super::builder::InputLayout;
use super::fill::UNIT;
use super::{CaseList, WEIGHT_TYPES};
use crate::Tolerance;

/// Inner dimensions: around vector widths for plain types, whole blocks for the others.
fn depths(dtype: DType) -> &'static [usize] {
    match dtype.block_len() {
        1 => &[1, 7, 16, 31, 33, 64, 129, 256, 511],
        32 => &[32, 64, 96, 160, 256, 288, 512, 1024],
        64 => &[64, 128, 192, 320, 512, 1024],
        _ => &[256, 512, 768, 1024],
    }
}

/// The default for F32; with other types kernels may round activations.
fn tolerance(w: DType, x: DType) -> Tolerance {
    if w == DType::F32 && x == DType::F32 { Tolerance::DEFAULT } else { Tolerance::QUANTIZED }
}

pub(super) fn list(list: &mut CaseList) {
    for dtype in WEIGHT_TYPES {
        for k in depths(dtype) {
            for n in [1, 2, 3, 7, 8, 16, 17, 33, 64] {
                for m in [1, 2, 3, 5, 8, 16, 17, 33] {
                    mul_mat(list, dtype, [1, 1, n, *k], (DType::F32, [1, 1, m, *k]));
                }
            }
            for (n, m) in [(1, 1), (5, 1), (16, 2), (33, 9), (64, 32)] {
                mul_mat(list, dtype, [1, 1, n, *k], (DType::F16, [1, 1, m, *k]));
            }
        }
        shapes(list, dtype);
        experts(list, dtype);
        outer(list, dtype);
    }
}

fn mul_mat(list: &mut CaseList, dtype: DType, w: [usize; 4], x: (DType, [usize; 4])) {
    let details = format!("{dtype} {w:?} × {} {:?}", x.0, x.1);
    list.push("mul_mat", details, tolerance(dtype, x.0), move |s| {
        let (w, x) = s.mul_mat_inputs(dtype, w, (x.0, x.1, InputLayout::Plain));
        s.out(w.mul_mat(x));
    });
}

/// Leading dimensions, weights shared by heads, layouts, large and empty matrices.
fn shapes(list: &mut CaseList, dtype: DType) {
    let k = 2 * dtype.block_len().max(24);
    for (wb, wh, b, h) in [(1, 1, 1, 3), (1, 2, 1, 4), (1, 3, 2, 3), (2, 1, 2, 5), (2, 3, 4, 9)] {
        for (n, m) in [(5, 7), (16, 1), (33, 17)] {
            mul_mat(list, dtype, [wb, wh, n, k], (DType::F32, [b, h, m, k]));
            mul_mat(list, dtype, [wb, wh, n, k], (DType::F16, [b, h, m, k]));
        }
    }
    for layout in InputLayout::DENSE {
        for of_w in [false, true] {
            for x_type in [DType::F32, DType::F16] {
                let side = if of_w { "weights" } else { "rows" };
                let details = format!("{dtype} [2, 3, 17, {k}] × {x_type} [2, 3, 9, {k}]{layout} {side}");
                list.push("mul_mat", details, tolerance(dtype, x_type), move |s| {
                    let (of_w, of_x) =
                        if of_w { (layout, InputLayout::Plain) } else { (InputLayout::Plain, layout) };
                    let w = s.strided_input(dtype, [2, 3, 17, k], of_w, UNIT);
                    s.out(w.mul_mat(s.strided_input(x_type, [2, 3, 9, k], of_x, UNIT)));
                });
            }
        }
    }
    for (n, m, k) in [(256, 1, 2048), (300, 2, 1024), (96, 65, 512), (129, 40, 768)] {
        mul_mat(list, dtype, [1, 1, n, k], (DType::F32, [1, 1, m, k]));
    }
    // Numbers of rows at and around the sizes of tiles, with columns that are no whole tile, or that blocks divide.
    for (n, m) in
        [(131, 4), (77, 6), (65, 7), (200, 9), (33, 17), (259, 33), (129, 64), (131, 100), (130, 257)]
    {
        mul_mat(list, dtype, [1, 1, n, 3 * k], (DType::F32, [1, 1, m, 3 * k]));
    }
    for (n, m) in [(129, 2), (64, 8), (130, 24), (33, 129)] {
        mul_mat(list, dtype, [1, 1, n, 1280], (DType::F32, [1, 1, m, 1280]));
    }
    for (n, m, k) in [(0, 3, k), (4, 0, k), (2, 3, 0)] {
        mul_mat(list, dtype, [1, 1, n, k], (DType::F32, [1, 1, m, k]));
    }
}

fn experts(list: &mut CaseList, dtype: DType) {
    let block = dtype.block_len();
    for k in [block.max(32), 3 * block.max(21)] {
        for (experts, used) in [(1, 1), (4, 2), (8, 3)] {
            for tokens in [1, 2, 7, 32] {
                for shared in [true, false] {
                    for x_type in [DType::F32, DType::F16] {
                        if x_type == DType::F16 && tokens == 2 {
                            continue;
                        }
                        let (n, u) = (if tokens == 7 { 33 } else { 16 }, if shared { 1 } else { used });
                        let each = if used == 1 { "expert" } else { "experts" };
                        let details = format!(
                            "{dtype} [{experts}, {n}, {k}] × {x_type} [{tokens}, {u}, {k}], {used} {each} each"
                        );
                        list.push("mul_mat_id", details, tolerance(dtype, x_type), move |s| {
                            // Not used through a view, so that a backend may pack it.
                            let w = s.weight(dtype, [1, experts, n, k]);
                            let x = s.input(x_type, [1, tokens, u, k], UNIT).reshape([tokens, u, k]);
                            s.out(w.mul_mat_id(x, s.distinct_ids([1, 1, tokens, used], experts)));
                        });
                    }
                }
            }
        }
    }
    list.push("mul_mat_id", format!("{dtype} no tokens"), tolerance(dtype, DType::F32), move |s| {
        let w = s.weight(dtype, [1, 4, 3, 256]);
        let x = s.input(DType::F32, [1, 0, 1, 256], UNIT);
        s.out(w.mul_mat_id(x, s.ids([1, 1, 0, 2], 4)));
    });
}

fn outer(list: &mut CaseList, dtype: DType) {
    let block = dtype.block_len();
    for p in [block, 3 * block, 17 * block.min(32)] {
        for (k, q) in [(1, 1), (1, 9), (7, 1), (17, 5), (0, 3), (33, 16)] {
            for lead in [[1, 1], [2, 3]] {
                if !p.is_multiple_of(block) {
                    continue;
                }
                let [b, h] = lead;
                let layout = InputLayout::any(list.len());
                let details = format!("{dtype} [{b}, {h}, {k}, {p}] ⊗ [{b}, {h}, {k}, {q}]{layout}");
                list.push("out_prod", details, tolerance(dtype, DType::F32), move |s| {
                    let a = s.input(dtype, [b, h, k, p], UNIT);
                    s.out(a.out_prod(s.strided_input(DType::F32, [b, h, k, q], layout, UNIT)));
                });
            }
        }
    }
}

//! Cases of gathering and scattering rows by index.

use quadriga_graph::DType;

use super::builder::InputLayout;
use super::fill::UNIT;
use super::{CaseList, WEIGHT_TYPES, WRITABLE};
use crate::Tolerance;

/// Row lengths of whole blocks.
fn widths(dtype: DType) -> Vec<usize> {
    match dtype.block_len() {
        1 => vec![1, 7, 16, 33, 64, 100, 257],
        block => [1, 2, 3, 5, 8].iter().map(|n| n * block).collect(),
    }
}

pub(super) fn list(list: &mut CaseList) {
    for dtype in WEIGHT_TYPES.into_iter().chain([DType::I32]) {
        for width in widths(dtype) {
            for (rows, count) in [(1, 1), (5, 1), (7, 16), (40, 3), (3, 0)] {
                for lead in [[1, 1], [2, 3]] {
                    get_rows(list, dtype, [lead[0], lead[1], rows, width], count);
                }
            }
        }
    }
    for dtype in WRITABLE {
        for width in widths(dtype) {
            for (rows, count) in [(1, 1), (8, 3), (33, 17), (4, 0)] {
                for (lead, ids) in [([1, 1], [1, 1]), ([2, 3], [2, 3]), ([2, 3], [1, 1]), ([2, 3], [1, 3])] {
                    for x_type in [DType::F32, DType::F16] {
                        set_rows(list, [dtype, x_type], [lead[0], lead[1], rows, width], ids, count);
                    }
                }
            }
        }
    }
}

fn get_rows(list: &mut CaseList, dtype: DType, dims: [usize; 4], count: usize) {
    let [b, h, rows, _] = dims;
    let layout = InputLayout::dense(list.len());
    list.push("get_rows", format!("{count} of {dtype} {dims:?}{layout}"), Tolerance::Exact, move |s| {
        s.out(s.strided_input(dtype, dims, layout, UNIT).get_rows(s.ids([1, b, h, count], rows)));
    });
}

fn set_rows(list: &mut CaseList, types: [DType; 2], dims: [usize; 4], lead: [usize; 2], count: usize) {
    let [b, h, rows, width] = dims;
    let [dtype, x_type] = types;
    let layout = InputLayout::any(list.len());
    let details = format!("{dtype} {dims:?} from {count} {x_type}{layout}, ids {lead:?}");
    list.push("set_rows", details, Tolerance::written(dtype), move |s| {
        let x = s.strided_input(x_type, [b, h, count, width], layout, UNIT);
        let ids = s.distinct_ids([1, lead[0], lead[1], count], rows);
        s.out(s.state(dtype, dims).set_rows(x, ids));
    });
}

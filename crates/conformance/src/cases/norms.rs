//! Cases of normalizations.

use quadriga_graph::{DType, Op};

use super::builder::InputLayout;
use super::fill::{Fill, UNIT};
use super::{CaseList, WIDTHS};
use crate::Tolerance;

pub(super) fn list(list: &mut CaseList) {
    type Make = fn(f32) -> Op;
    let kinds: [Make; 3] = [|eps| Op::Norm { eps }, |eps| Op::RmsNorm { eps }, |eps| Op::L2Norm { eps }];
    for make in kinds {
        let name = make(0.0).name();
        let empty = [[1, 1, 0, 8], [1, 2, 3, 0], [0, 1, 1, 1]];
        let dims = WIDTHS.iter().flat_map(|w| [[1, 1, 1, *w], [1, 1, 5, *w], [2, 3, 4, *w]]).chain(empty);
        for dims in dims {
            for (eps, fill) in [
                (1e-5, UNIT),
                (1e-6, Fill::Range(-100.0, 100.0)),
                (0.1, UNIT),
                // Far from zero: computing the variance as a difference of sums would cancel.
                (1e-5, Fill::Range(99.0, 101.0)),
            ] {
                let layout = InputLayout::any(list.len());
                list.push(
                    name,
                    format!("{dims:?}{layout} eps {eps} {fill:?}"),
                    Tolerance::DEFAULT,
                    move |s| {
                        s.out(s.graph().apply(make(eps), &[s.strided_input(DType::F32, dims, layout, fill)]));
                    },
                );
            }
        }
    }
    for (channels, groups) in [(1, 1), (4, 1), (4, 2), (6, 3), (32, 32), (64, 32)] {
        for size in [[1, 1], [1, 7], [3, 5], [8, 8], [4, 33]] {
            for batch in [1, 3] {
                for fill in [UNIT, Fill::Range(9.0, 11.0)] {
                    let layout = InputLayout::any(list.len());
                    let dims = [batch, channels, size[0], size[1]];
                    let details = format!("{dims:?}{layout} in {groups} groups {fill:?}");
                    list.push("group_norm", details, Tolerance::DEFAULT, move |s| {
                        s.out(s.strided_input(DType::F32, dims, layout, fill).group_norm(groups, 1e-6));
                    });
                }
            }
        }
    }
    list.push("group_norm", "[0, 4, 2, 2]".into(), Tolerance::DEFAULT, |s| {
        s.out(s.input(DType::F32, [0, 4, 2, 2], UNIT).group_norm(2, 1e-6));
    });
}

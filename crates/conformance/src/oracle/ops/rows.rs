//! Gathering and scattering of rows by index.

use crate::oracle::EvalError;
use crate::oracle::memory::{RowIndex, View, ViewMut};

/// The id at column `column` of a row of ids, which must be below `count`.
pub(super) fn checked_id(
    ids: &View<'_>,
    row: RowIndex,
    column: usize,
    count: usize,
) -> Result<usize, EvalError> {
    let id = ids.int_row(row)?.get(column).copied().ok_or(EvalError::Memory)?;
    let [i, j, k] = row;
    let error = EvalError::Id { id, at: [i, j, k, column], count };
    usize::try_from(id).ok().filter(|id| *id < count).ok_or(error)
}

/// The expert in slot `u` of token `t`; `None` for −1.
pub(super) fn checked_expert(
    ids: &View<'_>,
    t: usize,
    u: usize,
    experts: usize,
) -> Result<Option<usize>, EvalError> {
    let is_absent = ids.int_row([0, 0, t])?.get(u) == Some(&-1);
    if is_absent { Ok(None) } else { checked_id(ids, [0, 0, t], u, experts).map(Some) }
}

pub(super) fn get_rows(x: &View<'_>, ids: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    let count = x.dims()[2];
    out.each_row(|[b, h, t]| x.row([b, h, checked_id(ids, [0, b, h], t, count)?]))
}

/// Rows are written in the order of the ids: with duplicate ids the last one wins.
pub(super) fn set_rows(x: &View<'_>, ids: &View<'_>, target: &mut ViewMut<'_>) -> Result<(), EvalError> {
    let count = target.dims()[2];
    let [_, ids_b, ids_h, _] = ids.dims();
    for [b, h, t] in x.layout.rows() {
        let id = checked_id(ids, [0, b % ids_b.max(1), h % ids_h.max(1)], t, count)?;
        target.set_row([b, h, id], &x.row([b, h, t])?)?;
    }
    Ok(())
}

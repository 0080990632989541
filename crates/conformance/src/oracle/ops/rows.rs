//! Rows picked and replaced by index.

use crate::oracle::Fault;
use crate::oracle::memory::{RowIndex, View, ViewMut};

/// The id at column `column` of a row of ids, which must be below `count`.
pub(super) fn checked_id(ids: &View<'_>, row: RowIndex, column: usize, count: usize) -> Result<usize, Fault> {
    let id = ids.int_row(row)?.get(column).copied().ok_or(Fault::Memory)?;
    let [i, j, k] = row;
    let fault = Fault::Id { id, at: [i, j, k, column], count };
    usize::try_from(id).ok().filter(|id| *id < count).ok_or(fault)
}

pub(super) fn get_rows(x: &View<'_>, ids: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), Fault> {
    let count = x.dims()[2];
    out.each_row(|[b, h, t]| x.row([b, h, checked_id(ids, [0, b, h], t, count)?]))
}

/// Rows are written in the order of the ids: of equal ids, the last one stays.
pub(super) fn set_rows(x: &View<'_>, ids: &View<'_>, target: &mut ViewMut<'_>) -> Result<(), Fault> {
    let count = target.dims()[2];
    let [_, ids_b, ids_h, _] = ids.dims();
    for [b, h, t] in x.layout.rows() {
        let id = checked_id(ids, [0, b % ids_b.max(1), h % ids_h.max(1)], t, count)?;
        target.set_row([b, h, id], &x.row([b, h, t])?)?;
    }
    Ok(())
}

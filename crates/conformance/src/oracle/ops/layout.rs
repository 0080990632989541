//! Copies and other operations that move elements.

use quadriga_graph::{DType, MAX_DIMS};

use crate::oracle::EvalError;
use crate::oracle::memory::{View, ViewMut, zeros};

/// The elements of `x` in row-major order, in the type of `out`. Copies between equal types are bit-exact, so that
/// every type can be copied; except F32, which may be kept as f64.
pub(super) fn copy(x: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    if x.layout.dtype == out.layout.dtype && x.layout.dtype != DType::F32 {
        out.set_all_bytes(&x.all_bytes()?)
    } else {
        out.set_all(&x.all()?)
    }
}

pub(super) fn concat(axis: usize, inputs: &[View<'_>], out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    if axis == 3 {
        return out.each_row(|i| {
            let parts: Vec<Vec<f64>> = inputs.iter().map(|x| x.row(i)).collect::<Result<_, _>>()?;
            Ok(parts.concat())
        });
    }
    let mut start = 0;
    for x in inputs {
        for index in x.layout.rows() {
            let mut to = index;
            if let Some(place) = to.get_mut(axis) {
                *place += start;
            }
            out.set_row(to, &x.row(index)?)?;
        }
        start += x.dims().get(axis).copied().unwrap_or(0);
    }
    Ok(())
}

pub(super) fn repeat(x: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    let columns = out.layout.cols();
    out.each_row(|i| Ok(x.repeated_row(i)?.into_iter().cycle().take(columns).collect()))
}

pub(super) fn pad(before: &[usize; MAX_DIMS], x: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    let columns = out.layout.cols();
    let [d0, d1, d2, _] = x.dims();
    let [b0, b1, b2, b3] = *before;
    out.each_row(|[i, j, k]| {
        let mut row = zeros(columns)?;
        let inside =
            |at: usize, before: usize, extent: usize| at.checked_sub(before).filter(|at| *at < extent);
        if let (Some(i), Some(j), Some(k)) = (inside(i, b0, d0), inside(j, b1, d1), inside(k, b2, d2)) {
            row.iter_mut().skip(b3).zip(x.row([i, j, k])?).for_each(|(to, from)| *to = from);
        }
        Ok(row)
    })
}

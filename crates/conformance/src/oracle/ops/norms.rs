//! Normalizations.

use crate::oracle::EvalError;
use crate::oracle::memory::{View, ViewMut};

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn mean_square(values: &[f64]) -> f64 {
    values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64
}

pub(super) fn norm(eps: f64, x: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    out.each_row(|i| {
        let row = x.row(i)?;
        let middle = mean(&row);
        let centred: Vec<f64> = row.iter().map(|v| v - middle).collect();
        let deviation = (mean_square(&centred) + eps).sqrt();
        Ok(centred.iter().map(|v| v / deviation).collect())
    })
}

pub(super) fn rms_norm(eps: f64, x: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    out.each_row(|i| {
        let row = x.row(i)?;
        let root = (mean_square(&row) + eps).sqrt();
        Ok(row.iter().map(|v| v / root).collect())
    })
}

pub(super) fn l2_norm(eps: f64, x: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    out.each_row(|i| {
        let row = x.row(i)?;
        let length = row.iter().map(|v| v * v).sum::<f64>().sqrt().max(eps);
        Ok(row.iter().map(|v| v / length).collect())
    })
}

pub(super) fn group_norm(
    groups: usize,
    eps: f64,
    x: &View<'_>,
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    if x.layout.is_empty() {
        return Ok(());
    }
    let [batch, channels, height, _] = x.dims();
    let per_group = channels / groups.max(1);
    for b in 0..batch {
        for group in 0..groups {
            let rows = || {
                (group * per_group..(group + 1) * per_group)
                    .flat_map(move |c| (0..height).map(move |h| [b, c, h]))
            };
            let mut values = Vec::new();
            for index in rows() {
                values.extend(x.row(index)?);
            }
            let middle = mean(&values);
            let centred: Vec<f64> = values.iter().map(|v| v - middle).collect();
            let deviation = (mean_square(&centred) + eps).sqrt();
            for index in rows() {
                let row: Vec<f64> = x.row(index)?.iter().map(|v| (v - middle) / deviation).collect();
                out.set_row(index, &row)?;
            }
        }
    }
    Ok(())
}

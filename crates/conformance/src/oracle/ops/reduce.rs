//! Reductions and sorts of rows.

use quadriga_graph::Order;

use crate::oracle::EvalError;
use crate::oracle::memory::{View, ViewMut};

pub(super) fn sum(x: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    let mut total = 0.0;
    for index in x.layout.rows() {
        total += x.row(index)?.iter().sum::<f64>();
    }
    out.set_row([0; 3], &[total])
}

pub(super) fn sum_rows(x: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    out.each_row(|i| Ok(vec![x.row(i)?.iter().sum::<f64>()]))
}

pub(super) fn mean(x: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    let columns = x.layout.cols() as f64;
    out.each_row(|i| Ok(vec![x.row(i)?.iter().sum::<f64>() / columns]))
}

pub(super) fn argmax(x: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    let rows = x.dims()[2];
    out.each_row(|[_, i, j]| {
        (0..rows)
            .map(|k| Ok(sorted(&x.row([i, j, k])?, Order::Descending).into_iter().next().unwrap_or(0.0)))
            .collect()
    })
}

pub(super) fn argsort(order: Order, x: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    out.each_row(|i| Ok(sorted(&x.row(i)?, order)))
}

pub(super) fn top_k(k: usize, x: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    out.each_row(|i| {
        let mut indices = sorted(&x.row(i)?, Order::Descending);
        indices.truncate(k);
        Ok(indices)
    })
}

pub(super) fn cross_entropy(
    logits: &View<'_>,
    labels: &View<'_>,
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    let (mut total, mut rows) = (0.0, 0);
    for index in logits.layout.rows() {
        let (x, y) = (logits.row(index)?, labels.row(index)?);
        let largest = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let log_sum = x.iter().map(|x| (x - largest).exp()).sum::<f64>().ln();
        total -= x.iter().zip(&y).map(|(x, y)| y * (x - largest - log_sum)).sum::<f64>();
        rows += 1;
    }
    out.set_row([0; 3], &[total / f64::from(rows)])
}

/// The indices that sort a row, stable; the two zeros are equal.
pub(super) fn sorted(row: &[f64], order: Order) -> Vec<f64> {
    let mut keyed: Vec<(f64, usize)> = row.iter().enumerate().map(|(i, v)| (v + 0.0, i)).collect();
    keyed.sort_by(|a, b| match order {
        Order::Ascending => a.0.total_cmp(&b.0),
        Order::Descending => b.0.total_cmp(&a.0),
    });
    keyed.into_iter().map(|(_, i)| i as f64).collect()
}

//! Matrix multiplication.

use super::rows::checked_expert;
use crate::oracle::EvalError;
use crate::oracle::memory::{View, ViewMut};

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `out[b, h, m, n] = w[b', h', n] · x[b, h, m]`
pub(super) fn mul_mat(w: &View<'_>, x: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    if out.layout.is_empty() {
        return Ok(());
    }
    let [batch, heads, count, rows] = out.dims();
    let [wb, wh, _, _] = w.dims();
    for b in 0..batch {
        for h in 0..heads {
            let inputs: Vec<Vec<f64>> = (0..count).map(|m| x.row([b, h, m])).collect::<Result<_, _>>()?;
            let mut results = vec![Vec::new(); count];
            for n in 0..rows {
                // Grouped heads: consecutive heads of `x` share one of `w`.
                let weights = w.row([b / (batch / wb.max(1)).max(1), h / (heads / wh.max(1)).max(1), n])?;
                for (result, input) in results.iter_mut().zip(&inputs) {
                    result.push(dot(&weights, input));
                }
            }
            for (m, result) in results.iter().enumerate() {
                out.set_row([b, h, m], result)?;
            }
        }
    }
    Ok(())
}

/// `out[t, u, n] = w[ids[t, u], n] · x[t, u or 0]`
pub(super) fn mul_mat_id(
    w: &View<'_>,
    x: &View<'_>,
    ids: &View<'_>,
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    let [_, experts, rows, _] = w.dims();
    out.each_row(|[_, t, u]| {
        let Some(expert) = checked_expert(ids, t, u, experts)? else { return Ok(vec![0.0; rows]) };
        let input = x.repeated_row([0, t, u])?;
        (0..rows).map(|n| Ok(dot(&w.row([0, expert, n])?, &input))).collect()
    })
}

/// `out[…, q, p] = Σ a[…, k, p] · b[…, k, q]` over `k`
pub(super) fn out_prod(a: &View<'_>, b: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    if out.layout.is_empty() {
        return Ok(());
    }
    let [batch, heads, count, columns] = out.dims();
    let depth = a.dims()[2];
    for i in 0..batch {
        for j in 0..heads {
            let mut sums = vec![vec![0.0; columns]; count];
            for k in 0..depth {
                let (left, right) = (a.row([i, j, k])?, b.row([i, j, k])?);
                for (sum, factor) in sums.iter_mut().zip(right) {
                    sum.iter_mut().zip(&left).for_each(|(s, v)| *s += v * factor);
                }
            }
            for (q, sum) in sums.iter().enumerate() {
                out.set_row([i, j, q], sum)?;
            }
        }
    }
    Ok(())
}

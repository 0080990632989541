//! Recurrent layers: causal convolution and the gated delta rule.

use quadriga_graph::GatedDeltaRule;

use crate::oracle::EvalError;
use crate::oracle::memory::{View, ViewMut};

/// `out[i, c] = Σ kernel[c, j] · x[i + j, c]` over `j`
pub(super) fn ssm_conv(x: &View<'_>, kernel: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    let [_, _, channels, taps] = kernel.dims();
    let kernels = (0..channels).map(|c| kernel.row([0, 0, c])).collect::<Result<Vec<_>, _>>()?;
    out.each_row(|[_, _, i]| {
        let mut sums = vec![0.0; channels];
        for j in 0..taps {
            for ((sum, x), kernel) in sums.iter_mut().zip(x.row([0, 0, i + j])?).zip(&kernels) {
                *sum += x * kernel.get(j).copied().unwrap_or(0.0);
            }
        }
        Ok(sums)
    })
}

/// One token after another, as the rule is written.
pub(super) fn gated_delta_rule(
    parameters: &GatedDeltaRule,
    [q, k, v]: [&View<'_>; 3],
    [gates, betas]: [&View<'_>; 2],
    state: &View<'_>,
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    if out.layout.is_empty() {
        return Ok(());
    }
    let [_, tokens, heads, width] = v.dims();
    let [_, _, key_heads, depth] = q.dims();
    for head in 0..heads {
        let key_head =
            if parameters.tiled { head % key_heads } else { head / (heads / key_heads.max(1)).max(1) };
        let mut memory = (0..depth).map(|i| state.row([0, head, i])).collect::<Result<Vec<_>, _>>()?;
        let at_head = |x: &View<'_>, t: usize| {
            Ok::<f64, EvalError>(x.row([0, 0, t])?.get(head).copied().unwrap_or(f64::NAN))
        };
        for t in 0..tokens {
            let (query, key) = (q.row([0, t, key_head])?, k.row([0, t, key_head])?);
            let (decay, beta) = (at_head(gates, t)?.exp(), at_head(betas, t)?);
            memory.iter_mut().flatten().for_each(|s| *s *= decay);
            let expected = if parameters.delta { combine(&memory, &key, width) } else { vec![0.0; width] };
            let change: Vec<f64> =
                v.row([0, t, head])?.iter().zip(expected).map(|(v, e)| beta * (v - e)).collect();
            for (row, key) in memory.iter_mut().zip(&key) {
                row.iter_mut().zip(&change).for_each(|(s, c)| *s += key * c);
            }
            let scale = f64::from(parameters.scale);
            let result: Vec<f64> = combine(&memory, &query, width).iter().map(|o| scale * o).collect();
            out.set_row([0, 0, t * heads + head], &result)?;
        }
        for (i, row) in memory.iter().enumerate() {
            out.set_row([0, 0, tokens * heads + head * depth + i], row)?;
        }
    }
    Ok(())
}

/// `Σ factors[i] · rows[i]`
fn combine(rows: &[Vec<f64>], factors: &[f64], width: usize) -> Vec<f64> {
    let mut sums = vec![0.0; width];
    for (row, factor) in rows.iter().zip(factors) {
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += factor * x);
    }
    sums
}

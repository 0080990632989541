//! Matrix multiplications with the rows of active neurons.

use super::rows::checked_expert;
use crate::oracle::EvalError;
use crate::oracle::memory::{View, ViewMut};

/// `out[t, i] = gates[t, id of i] · (w[i] · x[t])`, and 0 where the gate is 0 or there is no id.
pub(super) fn mul_mat(
    w: &View<'_>,
    x: &View<'_>,
    gates: &View<'_>,
    ids: Option<&View<'_>>,
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    let (rows, neurons) = (w.dims()[2], gates.layout.cols());
    out.each_row(|[_, _, t]| {
        let (gates, input) = (gates.row([0, 0, t])?, x.row([0, 0, t])?);
        let of_row = |row: usize| {
            let neuron = match ids {
                Some(ids) => checked_expert(ids, 0, row, neurons)?,
                None => Some(row),
            };
            match neuron.and_then(|neuron| gates.get(neuron)) {
                Some(gate) if *gate != 0.0 => {
                    let product: f64 = w.row([0, 0, row])?.iter().zip(&input).map(|(w, x)| w * x).sum();
                    Ok(gate * product)
                }
                _ => Ok(0.0),
            }
        };
        (0..rows).map(of_row).collect()
    })
}

/// `out[t] = Σ factors[t, i] · w[i]` over the rows whose factor is not 0.
pub(super) fn axpy(w: &View<'_>, factors: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    out.each_row(|[_, _, t]| {
        let mut total = vec![0.0; w.layout.cols()];
        for (row, factor) in factors.row([0, 0, t])?.into_iter().enumerate() {
            if factor != 0.0 {
                total.iter_mut().zip(w.row([0, 0, row])?).for_each(|(sum, w)| *sum += factor * w);
            }
        }
        Ok(total)
    })
}

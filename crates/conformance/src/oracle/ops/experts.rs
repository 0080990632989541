//! Mixtures of experts: selection, weights, biases and the weighted sum.

use quadriga_graph::{ExpertWeights, Order, SelectExperts};

use super::reduce::sorted;
use super::rows::{checked_expert, checked_id};
use crate::oracle::EvalError;
use crate::oracle::memory::{View, ViewMut};

/// The indices of a row's largest elements, largest first.
fn largest(row: &[f64], count: usize) -> Vec<usize> {
    sorted(row, Order::Descending).into_iter().take(count).map(|i| i as usize).collect()
}

pub(super) fn select(
    parameters: &SelectExperts,
    scores: &View<'_>,
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    let SelectExperts { used, groups, groups_used, group_score } = *parameters;
    let size = scores.layout.cols() / groups.max(1);
    out.each_row(|i| {
        let row = scores.row(i)?;
        let of = |index: &usize| row.get(*index).copied().unwrap_or(f64::NAN);
        let group_scores: Vec<f64> = row
            .chunks(size.max(1))
            .map(|group| largest(group, group_score.summed()).iter().filter_map(|i| group.get(*i)).sum())
            .collect();
        let mut kept = largest(&group_scores, groups_used);
        kept.sort_unstable();
        let candidates: Vec<usize> = kept.iter().flat_map(|g| g * size..(g + 1) * size).collect();
        let candidate_scores: Vec<f64> = candidates.iter().map(of).collect();
        let chosen = largest(&candidate_scores, used);
        Ok(chosen.iter().filter_map(|i| candidates.get(*i)).map(|i| *i as f64).collect())
    })
}

pub(super) fn weights(
    parameters: &ExpertWeights,
    probabilities: &View<'_>,
    ids: &View<'_>,
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    let (experts, used) = (probabilities.layout.cols(), ids.layout.cols());
    out.each_row(|i| {
        let row = probabilities.row(i)?;
        let mut weights = (0..used)
            .map(|u| Ok(row.get(checked_id(ids, i, u, experts)?).copied().unwrap_or(f64::NAN)))
            .collect::<Result<Vec<f64>, EvalError>>()?;
        if parameters.softmax {
            let largest = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            weights.iter_mut().for_each(|w| *w = (*w - largest).exp());
            let sum: f64 = weights.iter().sum();
            weights.iter_mut().for_each(|w| *w /= sum);
        }
        if parameters.normalize {
            let sum = weights.iter().sum::<f64>().max(f64::from(ExpertWeights::MIN_SUM));
            weights.iter_mut().for_each(|w| *w /= sum);
        }
        weights.iter_mut().for_each(|w| *w *= f64::from(parameters.scale));
        Ok(weights)
    })
}

pub(super) fn add_id(
    x: &View<'_>,
    biases: &View<'_>,
    ids: &View<'_>,
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    let experts = biases.dims()[2];
    out.each_row(|[b, t, u]| {
        let Some(expert) = checked_expert(ids, t, u, experts)? else { return x.row([b, t, u]) };
        let bias = biases.row([0, 0, expert])?;
        Ok(x.row([b, t, u])?.iter().zip(bias).map(|(x, b)| x + b).collect())
    })
}

/// `out[t] = Σ weights[t, u] · x[t, u]` over `u`
pub(super) fn sum(x: &View<'_>, weights: &View<'_>, out: &mut ViewMut<'_>) -> Result<(), EvalError> {
    out.each_row(|[_, _, t]| {
        let mut total = vec![0.0; x.layout.cols()];
        for (u, weight) in weights.row([0, 0, t])?.into_iter().enumerate() {
            total.iter_mut().zip(x.row([0, t, u])?).for_each(|(sum, x)| *sum += weight * x);
        }
        Ok(total)
    })
}

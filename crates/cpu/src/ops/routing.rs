//! Routing of a mixture of experts: which experts a token uses, with which weights, and the sum of their results.

use std::cmp::Ordering;
use std::ops::Range;

use quadriga_graph::{ExpertWeights, SelectExperts};

use super::experts::expert;
use super::reduce::ascending;
use super::scratch::with_floats;
use crate::partition::Partition;
use crate::step::{Access, Kernel, StepPart, WorkMemory};
use crate::view::{SEGMENT, TensorView, segments};

/// Larger first, of equal ones the one with the smaller index.
fn best_first(values: &[f32], a: i32, b: i32) -> Ordering {
    let value = |i: i32| values.get(i as usize).copied().unwrap_or(f32::NAN);
    ascending(value(b), value(a)).then(a.cmp(&b))
}

/// Keeps the best `count` indices, best first.
fn keep_best(indices: &mut Vec<i32>, values: &[f32], count: usize) {
    if (1..indices.len()).contains(&count) {
        indices.select_nth_unstable_by(count - 1, |a, b| best_first(values, *a, *b));
        indices.truncate(count);
    }
    indices.sort_unstable_by(|a, b| best_first(values, *a, *b));
}

struct SelectKernel {
    parameters: SelectExperts,
    scores: TensorView,
    ids: TensorView,
}

pub(super) fn select(parameters: &SelectExperts, scores: &TensorView, ids: &TensorView) -> StepPart {
    let units = ids.rows();
    let accesses = vec![
        Access::reads_own(scores, Partition::equal(units)),
        Access::writes_own(ids, Partition::equal(units)),
    ];
    let kernel = SelectKernel { parameters: *parameters, scores: *scores, ids: *ids };
    StepPart::new(kernel, units, 4 * scores.elements(), accesses)
}

/// The score of a group: the sum of its two largest.
fn group_score(group: &[f32]) -> f32 {
    let mut best: Option<f32> = None;
    let mut second: Option<f32> = None;
    for value in group {
        if best.is_none_or(|best| ascending(*value, best).is_gt()) {
            (second, best) = (best, Some(*value));
        } else if second.is_none_or(|second| ascending(*value, second).is_gt()) {
            second = Some(*value);
        }
    }
    best.unwrap_or(0.0) + second.unwrap_or(0.0)
}

impl Kernel for SelectKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let SelectExperts { used, groups, groups_used } = self.parameters;
        let experts = self.scores.cols();
        let size = experts / groups.max(1);
        let (mut kept, mut indices) = (Vec::with_capacity(groups), Vec::with_capacity(experts));
        with_floats(experts + groups, |floats| {
            let (scores, group_scores) = floats.split_at_mut(experts);
            for row in units {
                self.scores.load(row, 0, scores);
                kept.clear();
                kept.extend(0..groups as i32);
                if groups_used < groups {
                    for (to, group) in group_scores.iter_mut().zip(scores.chunks(size.max(1))) {
                        *to = group_score(group);
                    }
                    keep_best(&mut kept, group_scores, groups_used);
                }
                indices.clear();
                for group in &kept {
                    let first = *group * size as i32;
                    indices.extend(first..first + size as i32);
                }
                keep_best(&mut indices, scores, used);
                self.ids.store_indices(row, 0, &indices);
            }
        });
        Ok(())
    }
}

struct WeightsKernel {
    parameters: ExpertWeights,
    probabilities: TensorView,
    ids: TensorView,
    out: TensorView,
}

pub(super) fn weights(
    parameters: &ExpertWeights,
    probabilities: &TensorView,
    ids: &TensorView,
    out: &TensorView,
) -> StepPart {
    let units = out.rows();
    let own = || Partition::equal(units);
    let accesses = vec![
        Access::reads_own(probabilities, own()),
        Access::reads_own(ids, own()),
        Access::writes_own(out, own()),
    ];
    let kernel =
        WeightsKernel { parameters: *parameters, probabilities: *probabilities, ids: *ids, out: *out };
    StepPart::new(kernel, units, 8 * out.elements(), accesses)
}

impl Kernel for WeightsKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let ExpertWeights { softmax, normalize, scale } = self.parameters;
        with_floats(self.out.cols(), |weights| {
            for token in units {
                for (u, weight) in weights.iter_mut().enumerate() {
                    let id = expert(&self.ids, token, u, self.probabilities.cols())?;
                    self.probabilities.load(token, id, std::slice::from_mut(weight));
                }
                if softmax {
                    let largest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    weights.iter_mut().for_each(|weight| *weight = (*weight - largest).exp());
                    divide_by(weights, weights.iter().sum());
                }
                if normalize {
                    divide_by(weights, weights.iter().sum::<f32>().max(ExpertWeights::MIN_SUM));
                }
                weights.iter_mut().for_each(|weight| *weight *= scale);
                self.out.store(token, 0, weights);
            }
            Ok(())
        })
    }
}

fn divide_by(weights: &mut [f32], sum: f32) {
    weights.iter_mut().for_each(|weight| *weight /= sum);
}

struct AddIdKernel {
    x: TensorView,
    biases: TensorView,
    ids: TensorView,
    out: TensorView,
}

pub(super) fn add_id(x: &TensorView, biases: &TensorView, ids: &TensorView, out: &TensorView) -> StepPart {
    let units = out.rows();
    let accesses = vec![
        Access::reads_own(x, Partition::equal(units)),
        Access::reads(biases),
        Access::reads(ids),
        Access::writes_own(out, Partition::equal(units)),
    ];
    let kernel = AddIdKernel { x: *x, biases: *biases, ids: *ids, out: *out };
    StepPart::new(kernel, units, out.elements(), accesses)
}

impl Kernel for AddIdKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let (mut values, mut bias) = ([0.0; SEGMENT], [0.0; SEGMENT]);
        for row in units {
            let [_, token, u] = self.out.place(row);
            let id = expert(&self.ids, token, u, self.biases.dims[2])?;
            for columns in segments(self.out.cols()) {
                let len = columns.len();
                let (Some(values), Some(bias)) = (values.get_mut(..len), bias.get_mut(..len)) else {
                    continue;
                };
                self.x.load(row, columns.start, values);
                self.biases.load_at([0, 0, id], columns.start, bias);
                values.iter_mut().zip(bias).for_each(|(value, bias)| *value += *bias);
                self.out.store(row, columns.start, values);
            }
        }
        Ok(())
    }
}

struct SumKernel {
    x: TensorView,
    weights: TensorView,
    out: TensorView,
}

pub(super) fn sum(x: &TensorView, weights: &TensorView, out: &TensorView) -> StepPart {
    // A unit is a segment of a row, so that threads share the work of a single token.
    let units = out.rows() * out.cols().div_ceil(SEGMENT);
    let accesses = vec![Access::reads(x), Access::reads(weights), Access::writes(out)];
    let kernel = SumKernel { x: *x, weights: *weights, out: *out };
    StepPart::new(kernel, units, x.elements(), accesses)
}

impl Kernel for SumKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let (mut values, mut sums) = ([0.0; SEGMENT], [0.0; SEGMENT]);
        let per_row = self.out.cols().div_ceil(SEGMENT).max(1);
        for unit in units {
            let (token, first) = (unit / per_row, unit % per_row * SEGMENT);
            let len = SEGMENT.min(self.out.cols() - first);
            let (Some(values), Some(sums)) = (values.get_mut(..len), sums.get_mut(..len)) else { continue };
            sums.fill(0.0);
            for u in 0..self.x.dims[2] {
                let mut weight = [0.0];
                self.weights.load(token, u, &mut weight);
                self.x.load_at([0, token, u], first, values);
                sums.iter_mut().zip(values.iter()).for_each(|(sum, value)| *sum += weight[0] * *value);
            }
            self.out.store(token, first, sums);
        }
        Ok(())
    }
}

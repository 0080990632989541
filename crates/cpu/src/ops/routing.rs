//! Routing of a mixture of experts: which experts a token uses, with which weights, and the sum of their results.

use std::cmp::Ordering;
use std::ops::Range;

use quadriga_graph::{ExpertWeights, GroupScore, SelectExperts};

use super::experts::expert;
use super::reduce::ascending;
use super::scratch::with_floats;
use crate::isa::Isa;
use crate::kernels::vec::{self, Zip};
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

fn group_score(score: GroupScore, group: &[f32]) -> f32 {
    let mut best: Option<f32> = None;
    let mut second: Option<f32> = None;
    for value in group {
        if best.is_none_or(|best| ascending(*value, best).is_gt()) {
            (second, best) = (best, Some(*value));
        } else if second.is_none_or(|second| ascending(*value, second).is_gt()) {
            second = Some(*value);
        }
    }
    match score {
        GroupScore::TopTwo => best.unwrap_or(0.0) + second.unwrap_or(0.0),
        GroupScore::Max => best.unwrap_or(0.0),
    }
}

impl Kernel for SelectKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        let SelectExperts { used, groups, groups_used, group_score: score } = self.parameters;
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
                        *to = group_score(score, group);
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
                    let id = id.ok_or_else(|| format!("token {token} has no expert {u}"))?;
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

const NOT_DENSE: &str = "its rows are not dense";

struct AddIdKernel {
    isa: Isa,
    x: TensorView,
    biases: TensorView,
    ids: TensorView,
    out: TensorView,
}

pub(super) fn add_id(
    x: &TensorView,
    biases: &TensorView,
    ids: &TensorView,
    out: &TensorView,
    isa: Isa,
) -> StepPart {
    let units = out.rows();
    let accesses = vec![
        Access::reads_own(x, Partition::equal(units)),
        Access::reads(biases),
        Access::reads(ids),
        Access::writes_own(out, Partition::equal(units)),
    ];
    let kernel = AddIdKernel { isa, x: *x, biases: *biases, ids: *ids, out: *out };
    let mut part = StepPart::new(kernel, units, out.elements(), accesses);
    if x.is_contiguous() && out.is_contiguous() {
        part.by_columns = Some([out.rows(), out.cols()]);
    }
    part
}

impl Kernel for AddIdKernel {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        self.run_block(units, 0..self.out.cols())
    }

    fn run_block(&self, rows: Range<usize>, columns: Range<usize>) -> Result<(), String> {
        let (first, count) = (columns.start, columns.len());
        for row in rows {
            let [_, token, u] = self.out.place(row);
            let (Some(x), Some(out)) = (
                self.x.floats_at(self.x.place(row), first, count),
                self.out.floats_at(self.out.place(row), first, count),
            ) else {
                return Err(NOT_DENSE.into());
            };
            let Some(id) = expert(&self.ids, token, u, self.biases.dims[2])? else {
                // SAFETY: both have `count` elements there, and are the same ones or do not overlap.
                unsafe { std::ptr::copy(x, out, count) };
                continue;
            };
            let bias = self.biases.floats_at([0, 0, id], first, count).ok_or(NOT_DENSE)?;
            // SAFETY: all three have `count` elements there; compilation has checked that the result is exactly in place of
            // `x` or does not overlap an input.
            unsafe { vec::zip_raw(self.isa, Zip::Add, x, bias, out, count) };
        }
        Ok(())
    }
}

struct SumKernel {
    isa: Isa,
    x: TensorView,
    weights: TensorView,
    out: TensorView,
    partition: Partition,
}

pub(super) fn sum(x: &TensorView, weights: &TensorView, out: &TensorView, isa: Isa) -> StepPart {
    // The partition of elementwise operations, such as the residual that follows.
    let partition = Partition::by_pieces(out);
    let accesses = vec![Access::reads(x), Access::reads(weights), Access::writes_own(out, partition)];
    let kernel = SumKernel { isa, x: *x, weights: *weights, out: *out, partition };
    let mut part = StepPart::new(kernel, partition.units(), x.elements(), accesses);
    if x.is_contiguous() && out.is_contiguous() {
        part.by_columns = Some([out.rows(), out.cols()]);
        part.sums_experts = true;
    }
    part
}

impl SumKernel {
    /// Some columns of a token.
    fn columns(&self, token: usize, columns: &Range<usize>) -> Result<(), String> {
        let mut sums = [0.0; SEGMENT];
        for part in segments(columns.len()) {
            let (first, len) = (columns.start + part.start, part.len());
            let Some(sums) = sums.get_mut(..len) else { continue };
            sums.fill(0.0);
            for u in 0..self.x.dims[2] {
                let mut weight = [0.0];
                self.weights.load(token, u, &mut weight);
                let x = self.x.floats_at([0, token, u], first, len).ok_or(NOT_DENSE)?;
                // SAFETY: the row has `len` elements there, which this operation does not write.
                vec::axpy(self.isa, weight[0], unsafe { std::slice::from_raw_parts(x, len) }, sums);
            }
            self.out.store(token, first, sums);
        }
        Ok(())
    }
}

impl Kernel for SumKernel {
    fn run(&self, mut units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        units.try_for_each(|unit| {
            let (token, columns) = self.partition.unit(unit);
            self.columns(token, &columns)
        })
    }

    fn run_block(&self, mut rows: Range<usize>, columns: Range<usize>) -> Result<(), String> {
        rows.try_for_each(|token| self.columns(token, &columns))
    }
}

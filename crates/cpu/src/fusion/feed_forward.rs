//! Joins the steps of a feed-forward of experts: gate and up, the last matrices, and the weighted sum.

use super::StepBuilder;
use crate::ops::{ExpertMatMul, FeedForwardStep, MatMulStep, StepMatMul};
use crate::step::{Access, StepPart};

/// Joins all feed-forwards among some steps.
pub(super) fn join(steps: Vec<StepBuilder>) -> Vec<StepBuilder> {
    let mut joined: Vec<StepBuilder> = Vec::with_capacity(steps.len());
    for step in steps {
        joined.push(step);
        match joined.last_mut() {
            Some(StepBuilder::Experts(_)) => join_output(&mut joined),
            Some(StepBuilder::Serial(_) | StepBuilder::Parallel(_)) => join_sum(&mut joined),
            _ => {}
        }
    }
    joined
}

/// Joins the last step, if it multiplies the last matrices of a feed-forward, with the one or two before it.
fn join_output(steps: &mut Vec<StepBuilder>) {
    let Some(StepBuilder::Experts(output)) = steps.pop() else { return };
    let rows = match steps.pop() {
        Some(StepBuilder::Parallel(parts)) => Some((parts, true)),
        Some(StepBuilder::Serial(parts)) => Some((parts, false)),
        other => {
            steps.extend(other);
            None
        }
    };
    match steps.pop() {
        Some(StepBuilder::Experts(hidden)) => {
            let parts = rows.as_ref().map_or(&[][..], |(parts, _)| parts);
            if feeds(&hidden, parts, &output) {
                let parts = rows.map(|(parts, _)| parts).unwrap_or_default();
                let step = FeedForwardStep::new(hidden, parts, output, Vec::new());
                return steps.push(StepBuilder::FeedForward(step));
            }
            steps.push(StepBuilder::Experts(hidden));
        }
        other => steps.extend(other),
    }
    steps.extend(rows.map(
        |(parts, parallel)| {
            if parallel { StepBuilder::Parallel(parts) } else { StepBuilder::Serial(parts) }
        },
    ));
    steps.push(StepBuilder::Experts(output));
}

/// Whether two steps of matmuls, with parts between them, are a feed-forward that can be one step: the second reads whole rows of
/// what the first and the parts compute, and there is no other memory whose order matters.
fn feeds(hidden: &MatMulStep<ExpertMatMul>, parts: &[StepPart], output: &MatMulStep<ExpertMatMul>) -> bool {
    let (Some(first), [last]) = (hidden.matmuls.first(), output.matmuls.as_slice()) else { return false };
    let Some(activations) = last.activations_access() else { return false };
    let [rows, _] = last.extent();
    let before = || hidden.accesses().chain(parts.iter().flat_map(|part| &part.accesses));
    let is_hidden = |access: &Access| access.is_where(activations);
    let only_activations = |after: &Access| {
        before().all(|own| {
            let handed_over = is_hidden(own) && is_hidden(after) && !after.is_write();
            !own.conflicts(after) || handed_over
        })
    };
    // A part works on a row as soon as all of its columns are computed.
    let by_row = |index: usize, part: &StepPart| {
        let of_matmuls = hidden.accesses().filter(|own| own.is_write());
        let earlier = parts.iter().take(index).flat_map(|part| &part.accesses);
        let reads_of_matmuls = hidden.accesses().filter(|own| !own.is_write());
        part.by_rows == Some(rows)
            && of_matmuls.chain(earlier).all(|own| {
                let same_rows = |access: &Access| access.is_own() && access.is_where(own);
                part.accesses.iter().all(|access| !access.conflicts(own) || same_rows(access))
            })
            && reads_of_matmuls
                .filter(|own| !is_result(hidden, own))
                .all(|own| part.accesses.iter().all(|access| !access.conflicts(own)))
    };
    FeedForwardStep::fits(first, last)
        && hidden.matmuls.iter().all(|matmul| matmul.extent()[0] == rows)
        && before().any(|own| own.is_write() && is_hidden(own))
        && output.accesses().all(only_activations)
        && parts.iter().enumerate().all(|(index, part)| by_row(index, part))
}

/// Whether an access is to memory that a step's matmuls and epilogues write.
fn is_result(step: &MatMulStep<ExpertMatMul>, access: &Access) -> bool {
    step.accesses().any(|own| own.is_write() && own.is_where(access))
}

/// Moves the weighted sum and the elementwise parts after it, at the beginning of the last step, into a feed-forward before it.
fn join_sum(steps: &mut Vec<StepBuilder>) {
    let [.., StepBuilder::FeedForward(step), StepBuilder::Serial(parts) | StepBuilder::Parallel(parts)] =
        steps.as_mut_slice()
    else {
        return;
    };
    if !step.sum.is_empty() {
        return;
    }
    let Some(last) = step.output.matmuls.first() else { return };
    let [rows, columns] = last.extent();
    let mut joined = 0;
    for (index, part) in parts.iter().enumerate() {
        let before = parts.get(..index).unwrap_or_default();
        let extent = part
            .by_columns
            .filter(|[tokens, width]| *width == columns && rows.is_multiple_of((*tokens).max(1)));
        let same_extent = extent.is_some() && before.iter().all(|other| other.by_columns == extent);
        let fits =
            if index == 0 { is_sum_of(part, &step.output) } else { follows_sum(part, before, &step.output) };
        if !same_extent || !fits {
            break;
        }
        joined = index + 1;
    }
    step.sum.extend(parts.drain(..joined));
    if parts.is_empty() {
        steps.pop();
    }
}

/// Whether a part is the weighted sum of a step's results, and writes nothing that the step uses.
fn is_sum_of(part: &StepPart, output: &MatMulStep<ExpertMatMul>) -> bool {
    let conflicts = |access: &Access| output.accesses().any(|own| own.conflicts(access));
    let summed = part.accesses.first();
    part.sums_experts
        && summed.is_some_and(|summed| is_result(output, summed))
        && part.accesses.iter().skip(1).all(|access| !conflicts(access))
        && output
            .accesses()
            .filter(|own| own.is_write())
            .all(|own| summed.is_some_and(|summed| own.is_where(summed) || !own.conflicts(summed)))
}

/// Whether a part after the sum works column by column on it, and on nothing that the last matrices use.
///
/// Memory that only the first matrices use may be written: they are done before the first column is added up.
fn follows_sum(part: &StepPart, before: &[StepPart], output: &MatMulStep<ExpertMatMul>) -> bool {
    let apart = |access: &Access| {
        before.iter().flat_map(|part| &part.accesses).all(|own| {
            let same_columns = own.is_own() && access.is_own() && own.is_where(access);
            !own.conflicts(access) || same_columns
        })
    };
    part.accesses.iter().all(|access| apart(access) && !output.accesses().any(|own| own.conflicts(access)))
}

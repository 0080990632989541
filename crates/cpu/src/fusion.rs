//! Fusion of operations into steps: fewer barriers, and rows that stay in the cache.
//!
//! Every fusion leaves the arithmetic as it is, so results are the same bit for bit:
//!
//! - Operations too small to parallelize run one after another on one thread, in program order.
//! - Operations with the same [partition](crate::partition), of which no unit touches another unit's share, run unit by
//!   unit: a thread takes some rows through all of them, from the residual addition through the norm to the
//!   activations of the next matmul.
//! - Matmuls of the same activations (queries, keys and values; gate and up) prepare them once and run as one step, if no
//!   operation between them touches the memory that the later matmul writes.
//! - Of few rows, every thread prepares the activations itself, with the norm or gate as a prologue
//!   (ops/activation_source.rs); elementwise operations after a matmul (bias, residual, gate) become its epilogue, run on
//!   each block of columns by the thread that computed it. A layer of one token then has six steps.

use crate::ops::{LoweredOp, MAX_MATMULS, MatMulStep, PackedMatMul, TeamOp, WorkBytes};
use crate::step::{Access, KernelStep, StepPart, TINY};

/// A step that operations can still be added to.
enum StepBuilder {
    Serial(Vec<StepPart>),
    Parallel(Vec<StepPart>),
    MatMuls(MatMulStep),
    Team(TeamOp),
}

impl StepBuilder {
    /// Whether the order of this step and of an operation with these accesses matters.
    fn conflicts(&self, accesses: &[Access]) -> bool {
        let any = |own: &[Access]| own.iter().any(|a| accesses.iter().any(|b| a.conflicts(b)));
        match self {
            StepBuilder::Serial(parts) | StepBuilder::Parallel(parts) => {
                parts.iter().any(|part| any(&part.accesses))
            }
            StepBuilder::MatMuls(MatMulStep { matmuls, epilogues, .. }) => {
                matmuls.iter().any(|matmul| any(matmul.accesses()))
                    || epilogues.iter().any(|(_, part)| any(&part.accesses))
            }
            StepBuilder::Team(team) => any(&team.accesses),
        }
    }
}

/// Makes steps of operations, fused if `fuse`; also returns the work memory that they need.
pub(crate) fn build_steps(ops: Vec<LoweredOp>, fuse: bool) -> (Vec<KernelStep>, WorkBytes) {
    let mut steps: Vec<StepBuilder> = Vec::new();
    for op in ops {
        match op {
            LoweredOp::Part(part) => add_part(&mut steps, part, fuse),
            LoweredOp::MatMul(matmul) => {
                if let Some(matmul) = add_to_earlier_step(&mut steps, matmul, fuse) {
                    if !matmul.is_private() {
                        add_part(&mut steps, matmul.preparation(), fuse);
                    }
                    steps.push(StepBuilder::MatMuls(MatMulStep::new(matmul)));
                }
            }
            LoweredOp::Team(team) => steps.push(StepBuilder::Team(team)),
        }
    }
    let mut needs: Vec<WorkBytes> = Vec::new();
    let steps = steps.into_iter().map(|step| finish(step, &mut needs)).collect();
    let largest = move |threads| needs.iter().try_fold(0, |most, need| Ok(need(threads)?.max(most)));
    (steps, Box::new(largest))
}

fn finish(step: StepBuilder, needs: &mut Vec<WorkBytes>) -> KernelStep {
    match step {
        StepBuilder::Serial(parts) => KernelStep::Serial(parts),
        StepBuilder::Parallel(parts) => KernelStep::Parallel(parts),
        StepBuilder::MatMuls(step) => {
            let epilogues = step.epilogues.iter().map(|(_, part)| part);
            let names = step.matmuls.iter().flat_map(PackedMatMul::names);
            let names = names.chain(epilogues.clone().map(|part| part.name)).collect();
            for matmul in &step.matmuls {
                let need = matmul.work_need();
                needs.push(Box::new(move |threads| need.bytes(threads)));
            }
            let mut label = format!("mul_mat × {}", step.matmuls.len());
            for part in epilogues {
                label = label + " + " + part.label;
            }
            KernelStep::Team { kernel: Box::new(step), names, label }
        }
        StepBuilder::Team(TeamOp { kernel, work_bytes, name, label, .. }) => {
            needs.push(work_bytes);
            KernelStep::Team { kernel, names: vec![name], label: label.to_owned() }
        }
    }
}

fn is_tiny(part: &StepPart) -> bool {
    part.units <= 1 || part.cost <= TINY
}

/// Adds a part to the last step if it can be fused with it; otherwise starts a new step.
fn add_part(steps: &mut Vec<StepBuilder>, part: StepPart, fuse: bool) {
    match steps.last_mut() {
        Some(StepBuilder::Serial(parts)) if fuse && is_tiny(&part) => parts.push(part),
        Some(StepBuilder::Parallel(parts)) if fuse && runs_unit_by_unit_with(parts, &part) => {
            parts.push(part);
        }
        Some(StepBuilder::MatMuls(step))
            if fuse && let Some((matmul, together)) = epilogue_of(step, &part) =>
        {
            step.epilogues.push((matmul, part));
            step.together |= together;
        }
        _ if is_tiny(&part) => steps.push(StepBuilder::Serial(vec![part])),
        _ => steps.push(StepBuilder::Parallel(vec![part])),
    }
}

/// Whether a part can run unit by unit with others: as many units, and no unit touches memory that another unit of any
/// part writes.
fn runs_unit_by_unit_with(parts: &[StepPart], part: &StepPart) -> bool {
    parts.iter().all(|other| {
        let apart = |theirs: &Access| part.accesses.iter().all(|ours| !theirs.conflicts_across_units(ours));
        other.units == part.units && other.accesses.iter().all(apart)
    })
}

/// The matmul of a step (by index) whose epilogue a part can be, and whether a thread must then compute the same columns
/// of all matmuls of the step.
///
/// The part must be small, work elementwise on the result of one matmul or of all of them, and touch nothing else that
/// the step writes; nor may it write anything that the step reads.
fn epilogue_of(step: &MatMulStep, part: &StepPart) -> Option<(usize, bool)> {
    let extent = part.by_columns.filter(|_| is_tiny(part))?;
    // Everything that a matmul and its epilogues write.
    let results = |index: usize| {
        let matmul = step.matmuls.get(index).into_iter().flat_map(PackedMatMul::accesses);
        let epilogues = step.epilogues.iter().filter(move |(of, _)| *of == index);
        matmul.chain(epilogues.flat_map(|(_, part)| &part.accesses)).filter(|access| access.is_write())
    };
    let is_result = |index: usize, access: &Access| results(index).any(|result| result.is_where(access));
    let is_read = |index: &usize| part.accesses.iter().any(|a| !a.is_write() && is_result(*index, a));
    let read: Vec<usize> = (0..step.matmuls.len()).filter(is_read).collect();
    let last = *read.last()?;
    let together = read.len() > 1;
    let one_or_all = read.len() == 1 || read.len() == step.matmuls.len();
    let same_extent = |index: &usize| step.matmuls.get(*index).is_some_and(|m| m.extent() == extent);
    let is_own = |access: &Access| read.iter().any(|index| is_result(*index, access));
    let apart = |other: &Access| {
        part.accesses.iter().all(|access| !access.conflicts(other) || (is_own(access) && is_own(other)))
    };
    let matmuls = step.matmuls.iter().flat_map(PackedMatMul::accesses);
    let mut others = matmuls.chain(step.epilogues.iter().flat_map(|(_, part)| &part.accesses));
    (one_or_all && read.iter().all(same_extent) && others.all(apart)).then_some((last, together))
}

/// Adds a matmul to an earlier step with the same activations, if no step in between conflicts with it; otherwise gives
/// it back.
fn add_to_earlier_step(steps: &mut [StepBuilder], matmul: PackedMatMul, fuse: bool) -> Option<PackedMatMul> {
    if !fuse {
        return Some(matmul);
    }
    for step in steps.iter_mut().rev() {
        let conflicts = step.conflicts(matmul.accesses());
        match step {
            StepBuilder::MatMuls(MatMulStep { matmuls, together: false, .. })
                if !conflicts
                    && matmuls.len() < MAX_MATMULS
                    && matmuls.first().is_some_and(|first| first.shares_activations(&matmul)) =>
            {
                matmuls.push(matmul);
                return None;
            }
            _ if conflicts => return Some(matmul),
            _ => {}
        }
    }
    Some(matmul)
}

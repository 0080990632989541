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
//! - Expert matmuls of the same activations and experts are one step, too, with operations of any size as epilogues: a
//!   thread runs them on the rows of one expert at a time.
//! - The matmuls of a feed-forward of experts of few rows, with the weighted sum and what follows it, are one step, in which
//!   chunks wait for those that they need instead of all threads for each other (feed_forward.rs).

mod feed_forward;

use crate::ops::{
    ExpertMatMul, FeedForwardStep, LoweredOp, MAX_MATMULS, MatMulStep, PackedMatMul, StepMatMul, TeamOp,
    WorkBytes,
};
use crate::step::{Access, KernelStep, StepPart, TINY, TeamKernel};

/// A step that operations can still be added to.
enum StepBuilder {
    Serial(Vec<StepPart>),
    Parallel(Vec<StepPart>),
    MatMuls(MatMulStep<PackedMatMul>),
    Experts(MatMulStep<ExpertMatMul>),
    FeedForward(FeedForwardStep),
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
            StepBuilder::MatMuls(step) => step.accesses().any(|own| any(std::slice::from_ref(own))),
            StepBuilder::Experts(step) => step.accesses().any(|own| any(std::slice::from_ref(own))),
            StepBuilder::FeedForward(step) => step.accesses().any(|own| any(std::slice::from_ref(own))),
            StepBuilder::Team(team) => any(&team.accesses),
        }
    }

    /// The step, if it is one of dense matmuls.
    fn matmuls(&mut self) -> Option<&mut MatMulStep<PackedMatMul>> {
        if let StepBuilder::MatMuls(step) = self { Some(step) } else { None }
    }

    /// The step, if it is one of expert matmuls.
    fn experts(&mut self) -> Option<&mut MatMulStep<ExpertMatMul>> {
        if let StepBuilder::Experts(step) = self { Some(step) } else { None }
    }
}

/// Makes steps of operations, fused if `fuse`; also returns the work memory that they need.
pub(crate) fn build_steps(ops: Vec<LoweredOp>, fuse: bool) -> (Vec<KernelStep>, WorkBytes) {
    let mut steps: Vec<StepBuilder> = Vec::new();
    for op in ops {
        match op {
            LoweredOp::Part(part) => add_part(&mut steps, part, fuse),
            LoweredOp::MatMul(matmul) => {
                if let Some(matmul) = add_to_earlier_step(&mut steps, matmul, fuse, StepBuilder::matmuls) {
                    if !matmul.is_private() {
                        add_part(&mut steps, matmul.preparation(), fuse);
                    }
                    steps.push(StepBuilder::MatMuls(MatMulStep::new(matmul)));
                }
            }
            LoweredOp::Experts(matmul) => {
                if let Some(matmul) = add_to_earlier_step(&mut steps, matmul, fuse, StepBuilder::experts) {
                    steps.push(StepBuilder::Experts(MatMulStep::new(matmul)));
                }
            }
            LoweredOp::Team(team) => steps.push(StepBuilder::Team(team)),
        }
    }
    if fuse {
        steps = feed_forward::join(steps);
    }
    let mut needs: Vec<WorkBytes> = Vec::new();
    let steps = steps.into_iter().map(|step| finish(step, &mut needs)).collect();
    let largest = move |threads| needs.iter().try_fold(0, |most, need| Ok(need(threads)?.max(most)));
    (steps, Box::new(largest))
}

fn finish(step: StepBuilder, needs: &mut Vec<WorkBytes>) -> KernelStep {
    if let StepBuilder::Serial(parts) | StepBuilder::Parallel(parts) = &step {
        let most = parts.iter().map(|part| part.work_bytes).max().unwrap_or(0);
        needs.extend((most > 0).then(|| Box::new(move |_: usize| Ok(most)) as WorkBytes));
    }
    match step {
        StepBuilder::Serial(parts) => KernelStep::Serial(parts),
        StepBuilder::Parallel(parts) => KernelStep::Parallel(parts),
        StepBuilder::MatMuls(step) => {
            let names = step.matmuls.iter().flat_map(PackedMatMul::names).collect();
            for matmul in &step.matmuls {
                let need = matmul.work_need();
                needs.push(Box::new(move |threads| need.bytes(threads)));
            }
            team("mul_mat", names, step)
        }
        StepBuilder::Experts(step) => {
            let names = step.matmuls.iter().map(|matmul| matmul.name).collect();
            needs.extend(step.matmuls.iter().map(|matmul| Box::new(matmul.work_bytes()) as WorkBytes));
            team("mul_mat_id", names, step)
        }
        StepBuilder::FeedForward(step) => {
            let matmuls = || step.hidden.matmuls.iter().chain(&step.output.matmuls);
            // The last matmul needs none, but a program that runs it by itself does: forecasts do not tell them apart.
            needs.extend(matmuls().map(|matmul| Box::new(matmul.work_bytes()) as WorkBytes));
            let mut names: Vec<usize> = matmuls().map(|matmul| matmul.name).collect();
            let mut label = format!("expert feed-forward: mul_mat_id × {}", matmuls().count());
            for part in step.parts() {
                names.push(part.name);
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

/// A step of matmuls, with the names of their nodes.
fn team<M>(op: &str, mut names: Vec<usize>, step: MatMulStep<M>) -> KernelStep
where
    MatMulStep<M>: TeamKernel + 'static,
{
    let mut label = format!("{op} × {}", step.matmuls.len());
    for (_, part) in &step.epilogues {
        names.push(part.name);
        label = label + " + " + part.label;
    }
    KernelStep::Team { kernel: Box::new(step), names, label }
}

fn is_tiny(part: &StepPart) -> bool {
    part.units <= 1 || part.cost <= TINY
}

/// Adds a part to the last step if it can be fused with it; otherwise starts a new step.
fn add_part(steps: &mut Vec<StepBuilder>, part: StepPart, fuse: bool) {
    match steps.last_mut() {
        Some(StepBuilder::Serial(parts)) if fuse && is_tiny(&part) => parts.push(part),
        Some(StepBuilder::Parallel(parts))
            if fuse && (runs_unit_by_unit_with(parts, &part) || follows_columns(parts, &part)) =>
        {
            parts.push(part);
        }
        Some(StepBuilder::MatMuls(step)) if fuse && let Some(place) = epilogue_of(step, &part) => {
            add_epilogue(step, part, place);
        }
        Some(StepBuilder::Experts(step)) if fuse && let Some(place) = epilogue_of(step, &part) => {
            add_epilogue(step, part, place);
        }
        Some(StepBuilder::MatMuls(step)) if fuse && part.active_rows.is_some() => {
            prefetch_active_rows(step, &part);
            steps.push(StepBuilder::Parallel(vec![part]));
        }
        _ if is_tiny(&part) => steps.push(StepBuilder::Serial(vec![part])),
        _ => steps.push(StepBuilder::Parallel(vec![part])),
    }
}

fn add_epilogue<M>(step: &mut MatMulStep<M>, part: StepPart, (matmul, together): (usize, bool)) {
    step.epilogues.push((matmul, part));
    step.together |= together;
}

/// Lets the epilogue that computes the last input of a part prefetch the rows that the part will read.
fn prefetch_active_rows(step: &mut MatMulStep<PackedMatMul>, part: &StepPart) {
    let (Some(matrix), Some(factors)) =
        (part.active_rows, part.accesses.iter().rfind(|access| !access.is_write()))
    else {
        return;
    };
    for (_, epilogue) in &mut step.epilogues {
        if epilogue.accesses.iter().any(|access| access.is_write() && access.is_where(factors)) {
            epilogue.kernel.read_next(&matrix);
        }
    }
}

/// Whether a part can run on the columns of the units of others as soon as these are complete: it works elementwise, and of
/// what the others write it touches the same columns only.
fn follows_columns(parts: &[StepPart], part: &StepPart) -> bool {
    let Some(first) = parts.first().filter(|first| first.unit_columns.is_some()) else { return false };
    let result = first.accesses.iter().find(|access| access.is_write());
    let earlier = || parts.iter().flat_map(|other| &other.accesses);
    let is_result = |access: &Access| earlier().any(|own| own.is_write() && own.is_where(access));
    let extent = parts.get(1).map_or(part.by_columns, |other| other.by_columns);
    part.by_columns.is_some_and(|[rows, _]| rows == 1)
        && part.by_columns == extent
        && part.accesses.iter().any(|access| result.is_some_and(|result| result.is_where(access)))
        && part.accesses.iter().all(|access| {
            earlier().all(|own| !own.conflicts(access) || (is_result(access) && own.is_where(access)))
        })
}

/// Whether a part can run unit by unit with others: as many units, and no unit touches memory that another unit of any
/// part writes.
fn runs_unit_by_unit_with(parts: &[StepPart], part: &StepPart) -> bool {
    // Parts after one whose units are columns run on these columns.
    let by_units = parts.first().is_none_or(|first| first.unit_columns.is_none());
    by_units
        && parts.iter().all(|other| {
            let apart =
                |theirs: &Access| part.accesses.iter().all(|ours| !theirs.conflicts_across_units(ours));
            other.units == part.units && other.accesses.iter().all(apart)
        })
}

/// The matmul of a step (by index) whose epilogue a part can be, and whether a thread must then compute the same columns
/// of all matmuls of the step.
///
/// The part must be small (for dense matmuls), work elementwise on the result of one matmul or of all of them, and touch nothing else that
/// the step writes; nor may it write anything that the step reads.
fn epilogue_of<M: StepMatMul>(step: &MatMulStep<M>, part: &StepPart) -> Option<(usize, bool)> {
    let extent = part.by_columns.filter(|_| !M::SMALL_EPILOGUES || part.large_epilogue || is_tiny(part))?;
    // Everything that a matmul and its epilogues write.
    let results = |index: usize| {
        let matmul = step.matmuls.get(index).into_iter().flat_map(StepMatMul::accesses);
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
    (one_or_all && read.iter().all(same_extent) && step.accesses().all(apart)).then_some((last, together))
}

/// Adds a matmul to an earlier step (of its kind, as `of_kind` finds it) with the same activations, if no step in between
/// conflicts with it; otherwise gives it back.
fn add_to_earlier_step<M: StepMatMul>(
    steps: &mut [StepBuilder],
    matmul: M,
    fuse: bool,
    of_kind: fn(&mut StepBuilder) -> Option<&mut MatMulStep<M>>,
) -> Option<M> {
    if !fuse {
        return Some(matmul);
    }
    for step in steps.iter_mut().rev() {
        if step.conflicts(matmul.accesses()) {
            return Some(matmul);
        }
        if let Some(MatMulStep { matmuls, together: false, .. }) = of_kind(step)
            && matmuls.len() < MAX_MATMULS
            && matmuls.first().is_some_and(|first| first.shares_activations(&matmul))
        {
            matmuls.push(matmul);
            return None;
        }
    }
    Some(matmul)
}

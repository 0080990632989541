//! Matmuls of a mixture of experts: rows are sorted by expert, so that each expert multiplies all its rows at once.

use quadriga_graph::DType;

use super::lowered::{LoweredOp, TeamOp};
use super::operand::{LoweringContext, PackedWeight};
use super::packed_matmul::{ActivationMatrix, WorkMemoryNeed};
use crate::isa::Isa;
use crate::kernels::matmul::{self, ActivationFormat, Activations, NO_ROW, Output};
use crate::memory::HostBlock;
use crate::pool::Worker;
use crate::step::{Access, TeamError, TeamKernel, WorkMemory};
use crate::view::TensorView;

/// The expert in slot `u` of token `t`, checked.
pub(super) fn expert(ids: &TensorView, t: usize, u: usize, experts: usize) -> Result<usize, String> {
    let id = ids.index([0, 0, t], u);
    usize::try_from(id)
        .ok()
        .filter(|expert| *expert < experts)
        .ok_or_else(|| format!("expert {id} of token {t} is outside 0..{experts}"))
}

/// Rows sorted by expert, each expert's rows padded to a multiple of the activation format's row granularity.
///
/// ```text
/// ends    [experts]   one past the last place of each expert
/// gather  [places]    the row of the activations that goes to each place, or none
/// scatter [places]    the row of the result that comes from each place, or none
/// ```
struct ExpertLists {
    block: HostBlock,
    experts: usize,
    places: usize,
}

impl ExpertLists {
    fn part(&self, first: usize, len: usize) -> *mut u32 {
        debug_assert!((first + len) * size_of::<u32>() <= self.block.bytes());
        self.block.pointer().cast::<u32>().wrapping_add(first)
    }

    /// # Safety
    /// No other thread uses the lists.
    #[expect(clippy::mut_from_ref, reason = "the memory is shared among threads, with barriers between uses")]
    unsafe fn for_writing(&self) -> (&mut [u32], &mut [u32], &mut [u32]) {
        // SAFETY: three parts of the block that do not overlap; no other thread uses them, as the caller promised.
        unsafe {
            (
                std::slice::from_raw_parts_mut(self.part(0, self.experts), self.experts),
                std::slice::from_raw_parts_mut(self.part(self.experts, self.places), self.places),
                std::slice::from_raw_parts_mut(
                    self.part(self.experts + self.places, self.places),
                    self.places,
                ),
            )
        }
    }

    /// # Safety
    /// No thread writes the lists.
    unsafe fn for_reading(&self) -> (&[u32], &[u32], &[u32]) {
        // SAFETY: as in `for_writing`, for reading.
        unsafe {
            (
                std::slice::from_raw_parts(self.part(0, self.experts), self.experts),
                std::slice::from_raw_parts(self.part(self.experts, self.places), self.places),
                std::slice::from_raw_parts(self.part(self.experts + self.places, self.places), self.places),
            )
        }
    }
}

/// The row of the activations for a token and expert slot. The strides of tokens and of slots are arbitrary: rows are
/// counted in steps of their greatest common divisor.
#[derive(Clone, Copy)]
struct RowsOfTokens {
    step: usize,
    token: usize,
    choice: usize,
}

impl RowsOfTokens {
    fn new(x: &TensorView) -> RowsOfTokens {
        let [_, tokens, choices, _] = x.dims;
        let [_, s1, s2, _] = x.strides;
        let (s1, s2) = (if tokens > 1 { s1 } else { 0 }, if choices > 1 { s2 } else { 0 });
        let (mut step, mut rest) = (s1, s2);
        while rest > 0 {
            (step, rest) = (rest, step % rest);
        }
        let step = step.max(1);
        RowsOfTokens { step, token: s1 / step, choice: s2 / step }
    }

    fn row(self, t: usize, u: usize) -> u32 {
        (t * self.token + u * self.choice) as u32
    }

    /// All rows as a matrix; `None` if row indices do not fit 32 bits.
    fn matrix(self, x: &TensorView) -> Option<ActivationMatrix> {
        let [_, tokens, choices, _] = x.dims;
        let last = (tokens - 1) * self.token + (choices - 1) * self.choice;
        (last < NO_ROW as usize).then_some(())?;
        ActivationMatrix::new(x, [0; 3], last + 1, self.step, x.cols())
    }
}

struct ExpertMatMul {
    packed: PackedWeight,
    x: ActivationMatrix,
    x_rows: RowsOfTokens,
    ids: TensorView,
    out: *mut f32,
    tokens: usize,
    used: usize,
    isa: Isa,
    step: usize,
    lists: ExpertLists,
}

// SAFETY: addresses and numbers; the invariant of `TensorView` says when they may be used.
unsafe impl Send for ExpertMatMul {}
// SAFETY: as above; the lists are written by one thread, with a barrier before others read them.
unsafe impl Sync for ExpertMatMul {}

/// The granularity of the rows of each expert, and the number of rows with padding.
pub(super) fn places_of(
    isa: Isa,
    dtype: DType,
    rows: usize,
    experts: usize,
) -> Result<(usize, usize), String> {
    // The activation format depends on the number of rows, which padding may raise: choose again with that.
    let form = |rows| ActivationFormat::choose(isa, dtype, rows).map_err(|error| error.to_string());
    let filled = |step: usize| rows + experts.min(rows) * (step - 1);
    let step = form(filled(form(rows)?.row_granularity()))?.row_granularity();
    Ok((step, filled(step)))
}

pub(super) fn mul_mat_id(
    packed: PackedWeight,
    x: &TensorView,
    ids: &TensorView,
    out: &TensorView,
    context: &LoweringContext<'_>,
    lowered: &mut Vec<LoweredOp>,
) -> Result<(), String> {
    let [_, tokens, used, _] = out.dims;
    let missing = "its activations cannot be read as a matrix";
    let rows_of_x = RowsOfTokens::new(x);
    let x_matrix = rows_of_x.matrix(x).ok_or(missing)?;
    let target = out.row_pointer([0; 3]).ok_or(missing)?;
    let dtype = packed.layout.dtype();
    let rows = tokens * used;
    let experts = packed.count;
    let (step, places) = places_of(context.isa, dtype, rows, experts)?;
    let bytes = experts
        .checked_add(places.checked_mul(2).ok_or("too many rows")?)
        .and_then(|count| count.checked_mul(size_of::<u32>()))
        .ok_or("too many rows")?;
    let lists =
        ExpertLists { block: HostBlock::zeroed(bytes).map_err(|error| error.to_string())?, experts, places };
    let need = WorkMemoryNeed { isa: context.isa, dtype, rows: places, columns: x.cols(), private: false };
    let kernel = ExpertMatMul {
        packed,
        x: x_matrix,
        x_rows: rows_of_x,
        ids: *ids,
        out: target.cast(),
        tokens,
        used,
        isa: context.isa,
        step,
        lists,
    };
    lowered.push(LoweredOp::Team(TeamOp {
        kernel: Box::new(kernel),
        accesses: vec![
            Access::range(packed.range(), false),
            Access::reads(x),
            Access::reads(ids),
            Access::writes(out),
        ],
        work_bytes: Box::new(move |threads| need.bytes(threads)),
        name: 0,
        label: "",
    }));
    Ok(())
}

impl ExpertMatMul {
    fn dtype(&self) -> DType {
        self.packed.layout.dtype()
    }

    /// Sorts the rows by expert; on one thread.
    fn sort(&self) -> Result<(), String> {
        // SAFETY: one thread calls this, while the others wait at the barrier that follows.
        let (ends, gather, scatter) = unsafe { self.lists.for_writing() };
        ends.fill(0);
        gather.fill(NO_ROW);
        scatter.fill(NO_ROW);
        let pairs = || (0..self.tokens).flat_map(|t| (0..self.used).map(move |u| (t, u)));
        for (t, u) in pairs() {
            if let Some(count) = ends.get_mut(expert(&self.ids, t, u, self.lists.experts)?) {
                *count += 1;
            }
        }
        // A prefix sum makes starts of counts; placing rows then moves each start to its end.
        let mut start = 0;
        for end in ends.iter_mut() {
            let count = *end;
            *end = start;
            start += count.next_multiple_of(self.step as u32);
        }
        for (t, u) in pairs() {
            let Some(end) = ends.get_mut(expert(&self.ids, t, u, self.lists.experts)?) else { continue };
            let place = *end as usize;
            *end += 1;
            if let (Some(from), Some(to)) = (gather.get_mut(place), scatter.get_mut(place)) {
                *from = self.x_rows.row(t, u);
                *to = (t * self.used + u) as u32;
            }
        }
        Ok(())
    }
}

impl TeamKernel for ExpertMatMul {
    fn run(&self, worker: &Worker<'_>, work: WorkMemory) -> Result<(), TeamError> {
        worker.try_chunks(1, |_| self.sort()).map_err(TeamError::Data)?;
        worker.barrier()?;
        // SAFETY: the lists were written before the barrier.
        let (ends, gather, scatter) = unsafe { self.lists.for_reading() };
        let (dtype, places, columns) = (self.dtype(), self.lists.places, self.x.columns);
        let needs = Activations::work_bytes(self.isa, dtype, places, columns, work.threads)?;
        if work.bytes < needs {
            return Err(TeamError::Data(format!("{} bytes of work memory, {needs} needed", work.bytes)));
        }
        // SAFETY: the work memory is long enough, and used for these activations alone during this step.
        let activations =
            unsafe { Activations::from_raw(self.isa, dtype, places, columns, work.threads, work.pointer)? };
        // SAFETY: the program holds the buffer of the activations, which this step does not write. All threads of the
        // run execute this, and a barrier follows.
        unsafe { activations.prepare(worker, &self.x.input().gather(gather)?)? };
        worker.barrier()?;
        let rows = self.packed.layout.rows();
        let mut first = 0;
        for (expert, &end) in ends.iter().enumerate() {
            // Padding rows are computed and discarded: a panel is only read as a whole.
            let end = (end as usize).next_multiple_of(self.step);
            let Some(scatter) = scatter.get(first..end).filter(|scatter| !scatter.is_empty()) else {
                continue;
            };
            let matrix = self.packed.matrix(expert).map_err(TeamError::Data)?;
            // SAFETY: the result is a contiguous tensor of these rows in a buffer that the program holds for
            // writing; each of its rows is in the list of one expert.
            let output = unsafe { Output::from_raw(self.out, self.tokens * self.used, rows, rows) };
            let output = output.scatter(scatter)?;
            // SAFETY: the program holds the buffer of the weights, which are never written.
            let bytes = unsafe { matrix.bytes() };
            let product =
                matmul::Matmul { layout: &matrix.layout, packed: bytes, output: &output, first_row: first };
            // SAFETY: all threads of the run execute this step; the barrier above separates it from the preparation.
            unsafe { matmul::multiply(worker, &activations, &[product])? };
            first = end;
        }
        Ok(())
    }
}

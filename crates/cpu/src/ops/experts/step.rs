//! The steps of expert matmuls.

use std::ops::Range;

use super::{ExpertActivations, ExpertMatMul, expert};
use crate::kernels::KernelError;
use crate::kernels::matmul::format::GROUP;
use crate::kernels::matmul::{self, Activations, Matmul, Output};
use crate::ops::packed_matmul::{MatMulStep, StepMatMul};
use crate::pool::Worker;
use crate::step::{Access, TeamError, TeamKernel, WorkMemory};

/// Chunks for each thread, at least: a thread that has finished its own takes over chunks of others.
const CHUNKS_PER_THREAD: usize = 4;

impl StepMatMul for ExpertMatMul {
    const SMALL_EPILOGUES: bool = false;

    fn accesses(&self) -> &[Access] {
        &self.accesses
    }

    fn extent(&self) -> [usize; 2] {
        [self.tokens * self.used, self.packed.layout.rows()]
    }

    fn shares_activations(&self, other: &ExpertMatMul) -> bool {
        self.x == other.x
            && self.x_rows == other.x_rows
            && self.ids.is_same(&other.ids)
            && self.activations.format == other.activations.format
            && self.activations.rows == other.activations.rows
            && self.packed.layout.rows() == other.packed.layout.rows()
    }

    fn own_bytes(&self) -> usize {
        let lists = self.lists.as_ref().map_or(0, |lists| lists.bytes());
        lists + self.accesses.capacity() * size_of::<Access>()
    }
}

impl ExpertMatMul {
    /// Work memory for a number of threads.
    pub(crate) fn work_bytes(&self) -> impl Fn(usize) -> Result<usize, KernelError> + Send + use<> {
        let activations = self.activations;
        move |threads| activations.work_bytes(threads)
    }

    /// Row groups that a kernel takes together.
    pub(super) fn unit(&self) -> usize {
        matmul::groups_together(if self.activations.single { 1 } else { self.activations.rows })
    }

    /// Units of row groups of a matrix.
    pub(super) fn units(&self) -> usize {
        self.packed.layout.groups().div_ceil(self.unit())
    }

    /// The chunks of one expert's matrix, if `experts` experts multiply `rows` rows each.
    pub(super) fn chunks(&self, experts: usize, rows: usize, threads: usize) -> usize {
        let most = matmul::groups_of_chunk(self.activations.format, &self.packed.layout, rows);
        let least = (CHUNKS_PER_THREAD * threads).div_ceil(experts.max(1));
        self.units().div_ceil((most / self.unit()).max(1)).max(least).min(self.units()).max(1)
    }

    /// The row groups of one of `chunks` chunks.
    pub(super) fn groups(&self, chunk: usize, chunks: usize) -> Range<usize> {
        let first = |chunk: usize| chunk * self.units() / chunks;
        self.unit() * first(chunk)..(self.unit() * first(chunk + 1)).min(self.packed.layout.groups())
    }

    fn check_work(&self, work: WorkMemory) -> Result<(), KernelError> {
        let (has, needs) = (work.bytes, self.activations.work_bytes(work.threads)?);
        if has < needs { Err(KernelError::Short { what: "work memory", has, needs }) } else { Ok(()) }
    }

    /// The activations of all threads.
    pub(super) fn shared(&self, work: WorkMemory) -> Result<Activations<'static>, KernelError> {
        self.check_work(work)?;
        let ExpertActivations { format, isa, dtype, rows, columns, .. } = self.activations;
        // SAFETY: the work memory is long enough, and used for these activations alone during this step.
        unsafe {
            Activations::in_format(format, isa, dtype, [rows, columns], Some(work.threads), work.pointer)
        }
    }

    /// This thread's own activations.
    pub(super) fn own(
        &self,
        worker: &Worker<'_>,
        work: WorkMemory,
    ) -> Result<Activations<'static>, KernelError> {
        self.check_work(work)?;
        if worker.index() >= work.threads {
            let (has, needs) = (work.threads, worker.index() + 1);
            return Err(KernelError::Short { what: "threads that the work memory is for", has, needs });
        }
        let ExpertActivations { format, isa, dtype, rows, columns, .. } = self.activations;
        let memory = work.pointer.wrapping_add(worker.index() * self.activations.thread_bytes()?);
        // SAFETY: the work memory is long enough, and each thread has an equal part of it for itself.
        unsafe { Activations::in_format(format, isa, dtype, [rows, columns], None, memory) }
    }
}

/// Rows of activations, the rows of the result that they go to, and their expert; none: their results are 0.
pub(super) struct ExpertRows<'a> {
    pub(super) expert: Option<usize>,
    pub(super) first: usize,
    pub(super) scatter: &'a [u32],
}

impl MatMulStep<ExpertMatMul> {
    /// Multiplies an expert's rows with some row groups of its matrices, and runs the epilogues.
    ///
    /// # Safety
    /// As [`multiply_groups`](matmul::multiply_groups).
    pub(super) unsafe fn multiply(
        &self,
        worker: &Worker<'_>,
        activations: &Activations<'_>,
        rows: &ExpertRows<'_>,
        groups: &Range<usize>,
        follows: bool,
    ) -> Result<(), TeamError> {
        for (number, product) in self.matmuls.iter().enumerate() {
            let layout = &product.packed.layout;
            let [count, columns] = product.extent();
            let own_columns = groups.start * GROUP..(groups.end * GROUP).min(columns);
            // SAFETY: the result is a contiguous tensor of these rows in a buffer that the program holds for writing; each
            // of its rows belongs to one expert.
            let output = unsafe { Output::from_raw(product.out, count, columns, columns) };
            if let Some(expert) = rows.expert {
                let matrix = product.packed.matrix(expert).map_err(TeamError::Data)?;
                let output = output.scatter(rows.scatter)?;
                // SAFETY: the program holds the buffer of the weights, which are never written.
                let packed = unsafe { matrix.bytes() };
                let product = Matmul { layout, packed, output: &output, first_row: rows.first };
                // SAFETY: promised by the caller.
                unsafe { matmul::multiply_groups(worker, activations, &product, groups.clone(), follows)? };
            } else {
                for row in rows.scatter.iter().filter(|row| (**row as usize) < count) {
                    let first = product.out.wrapping_add(*row as usize * columns + own_columns.start);
                    // SAFETY: these columns of a row of the result, which this unit alone writes.
                    unsafe { std::ptr::write_bytes(first, 0, own_columns.len()) };
                }
            }
            for (_, part) in self.epilogues.iter().filter(|(of, _)| *of == number) {
                for row in rows.scatter.iter().filter(|row| (**row as usize) < count) {
                    let row = *row as usize;
                    part.kernel.run_block(row..row + 1, own_columns.clone()).map_err(TeamError::Data)?;
                }
            }
        }
        Ok(())
    }

    /// The experts of one token, each with one row: all of them are one parallel region.
    fn single(&self, first: &ExpertMatMul, worker: &Worker<'_>, work: WorkMemory) -> Result<(), TeamError> {
        let activations = first.own(worker, work)?;
        let chunks = first.chunks(first.used, 1, worker.threads());
        // The rows that this thread has prepared, and its last unit.
        let (mut prepared, mut previous) = (0_u64, None);
        worker.try_chunks(first.used * chunks, |unit| {
            let (slot, chunk) = (unit / chunks, unit % chunks);
            let expert = expert(&first.ids, 0, slot, first.packed.count).map_err(TeamError::Data)?;
            let row = first.x_rows.row(0, slot) as usize;
            if expert.is_some() && prepared >> row & 1 == 0 {
                prepared |= 1 << row;
                // SAFETY: this thread's own memory; the row was written before the last barrier.
                unsafe { activations.prepare_rows(row..row + 1, &first.x.input()) };
            }
            let follows = chunk > 0 && previous == unit.checked_sub(1);
            previous = Some(unit);
            let rows = ExpertRows { expert, first: row, scatter: &[slot as u32] };
            // SAFETY: the thread has prepared the row; each unit writes its own columns of its own row.
            unsafe { self.multiply(worker, &activations, &rows, &first.groups(chunk, chunks), follows) }
        })
    }

    /// The rows of many tokens, sorted by expert.
    fn sorted(&self, first: &ExpertMatMul, worker: &Worker<'_>, work: WorkMemory) -> Result<(), TeamError> {
        let Some(lists) = &first.lists else { return Ok(()) };
        let step = first.activations.format.row_granularity();
        worker
            .try_chunks(1, |_| {
                // SAFETY: one thread sorts, while the others wait at the barrier.
                unsafe { lists.sort(&first.ids, step, |t, u| first.x_rows.row(t, u)) }
            })
            .map_err(TeamError::Data)?;
        worker.barrier()?;
        // SAFETY: the lists were written before the barrier.
        let (ends, gather, scatter) = unsafe { lists.for_reading() };
        let activations = first.shared(work)?;
        // SAFETY: the program holds the buffer of the activations, which this step does not write. All threads of the
        // run execute this, and a barrier follows.
        unsafe { activations.prepare(worker, &first.x.input().gather(gather)?)? };
        worker.barrier()?;
        let busy = first.packed.count.min(first.tokens * first.used).max(1);
        let average = (first.tokens * first.used).div_ceil(busy).max(2);
        let chunks = first.chunks(busy, average, worker.threads());
        worker.try_chunks(ends.len() * chunks, |unit| {
            let (expert, chunk) = (unit / chunks, unit % chunks);
            // Padding rows are computed and discarded: a panel is only read as a whole.
            let padded = |end: &u32| (*end as usize).next_multiple_of(step);
            let begin = expert.checked_sub(1).and_then(|before| ends.get(before)).map_or(0, padded);
            // Rows without an expert are not multiplied, and have no padding.
            let absent = expert + 1 == ends.len();
            let end = ends.get(expert).map_or(begin, |end| if absent { *end as usize } else { padded(end) });
            let Some(scatter) = scatter.get(begin..end).filter(|scatter| !scatter.is_empty()) else {
                return Ok(());
            };
            let rows = ExpertRows { expert: (!absent).then_some(expert), first: begin, scatter };
            // SAFETY: the barrier above separates this from the preparation; each unit writes its own columns of its own
            // rows.
            unsafe { self.multiply(worker, &activations, &rows, &first.groups(chunk, chunks), false) }
        })
    }
}

impl TeamKernel for MatMulStep<ExpertMatMul> {
    fn own_bytes(&self) -> usize {
        self.fused_bytes()
    }

    fn run(&self, worker: &Worker<'_>, work: WorkMemory) -> Result<(), TeamError> {
        let Some(first) = self.matmuls.first() else { return Ok(()) };
        if first.activations.single {
            self.single(first, worker, work)
        } else {
            self.sorted(first, worker, work)
        }
    }
}

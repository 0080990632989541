//! The feed-forward of a mixture of experts as one step: gate and up with the activation, the last matrices, and the weighted
//! sum, without a barrier between them.
//!
//! Work is cut into jobs (an expert and its rows) and chunks (row groups of its matrices), in two phases:
//!
//! ```text
//! hidden (job, chunk)   gate and up, epilogues      the last of a job prepares its activations and opens its latch
//! output (job, chunk)   last matrix, epilogues      needs the latch of its job; the last of a chunk adds up all jobs
//! ```
//!
//! Each thread takes its own chunks of the first job, then of the second, and so on, through both phases, and then helps
//! others. Jobs are complete one after another: when a thread begins with the second phase, only the last ones are not, and
//! their latches open while it computes the others. A chunk whose latch is still closed, because a thread lost its core,
//! is put off until there is nothing else to do.
//!
//! No wait is for ever: a thread waits only for chunks of an earlier phase, all of which threads have taken before, and a
//! thread that fails wakes the others. Results are the same bits however chunks are taken: each column of a row is computed by
//! one thread, and sums over experts are in the order of the ids.

use std::ops::Range;

use super::jobs::{ExpertJobs, JobRows, MAX_JOB_ROWS, MAX_PLACES, SortedRows};
use super::step::ExpertRows;
use super::{ExpertActivations, ExpertMatMul};
use crate::kernels::KernelError;
use crate::kernels::matmul::Activations;
use crate::kernels::matmul::format::GROUP;
use crate::ops::packed_matmul::MatMulStep;
use crate::pool::{Latches, Worker};
use crate::step::{Access, StepPart, TeamError, TeamKernel, WorkMemory};

/// Chunks that a thread puts off, at most.
const MAX_DEFERRED: usize = 64;

/// Chunks of a job for each thread, at most. A thread that is done early with the first phase has work in the second; with the
/// second it has not, so that chunks there are smaller.
const MOST_HIDDEN_CHUNKS: usize = 4;
const MOST_OUTPUT_CHUNKS: usize = 8;

/// The latches of prepared activations of the first phase, of hidden rows, and of the last chunk; then, for each
/// unit of row groups of the last matrices, that of the chunk which begins there.
const PREPARED: usize = 0;
const HIDDEN: usize = MAX_JOB_ROWS;
const FINISHED: usize = 2 * MAX_JOB_ROWS;
const CHUNKS: usize = FINISHED + 1;

/// A feed-forward of experts of few rows.
pub(crate) struct FeedForwardStep {
    /// Gate and up, or the one matrix of both.
    pub(crate) hidden: MatMulStep<ExpertMatMul>,
    /// Parts that compute whole rows of the hidden activations from the results of `hidden`.
    pub(crate) row_parts: Vec<StepPart>,
    /// The last matrices.
    pub(crate) output: MatMulStep<ExpertMatMul>,
    /// The weighted sum and elementwise parts after it, column by column; empty if they are a step of their own.
    pub(crate) sum: Vec<StepPart>,
    latches: Latches,
}

/// Which chunk of which job a unit is: a thread's share of all units is its chunks of every job in turn.
struct JobChunks {
    jobs: usize,
    chunks: usize,
    threads: usize,
    /// Whether there are fewer row groups than chunks: then each job leaves other threads without any.
    rotated: bool,
}

impl JobChunks {
    /// Chunks of `matmul` for `jobs` jobs of about `rows` rows: as many for each thread, at most `most`.
    fn new(matmul: &ExpertMatMul, jobs: usize, rows: usize, threads: usize, most: usize) -> JobChunks {
        let threads = threads.max(1);
        let chunks = (matmul.chunks(jobs, rows, threads) / threads).clamp(1, most) * threads;
        JobChunks { jobs, chunks, threads, rotated: matmul.units() < chunks }
    }

    fn units(&self) -> usize {
        self.jobs * self.chunks
    }

    /// The job and the chunk of a unit.
    fn unit(&self, unit: usize) -> (usize, usize) {
        let each = (self.chunks / self.threads).max(1);
        let share = (self.jobs * each).max(1);
        let (thread, within) = (unit / share, unit % share);
        let (job, chunk) = (within / each, thread * each + within % each);
        (job, if self.rotated { (chunk + job * each) % self.chunks } else { chunk })
    }
}

/// Units that a thread has taken and put off.
struct DeferredUnits {
    units: [usize; MAX_DEFERRED],
    count: usize,
}

impl DeferredUnits {
    /// Keeps a unit; false if there is no room.
    fn push(&mut self, unit: usize) -> bool {
        let Some(place) = self.units.get_mut(self.count) else { return false };
        *place = unit;
        self.count += 1;
        true
    }

    fn units(&self) -> &[usize] {
        self.units.get(..self.count).unwrap_or(&self.units)
    }

    /// Takes out a unit that is ready.
    fn take(&mut self, ready: impl Fn(usize) -> bool) -> Option<usize> {
        let at = self.units().iter().position(|unit| ready(*unit))?;
        self.count -= 1;
        let last = self.units.get(self.count).copied()?;
        self.units.get_mut(at).map(|unit| std::mem::replace(unit, last))
    }
}

/// What all units of a run need.
struct FeedForwardRun<'a> {
    step: &'a FeedForwardStep,
    worker: &'a Worker<'a>,
    work: WorkMemory,
    first: &'a ExpertMatMul,
    last: &'a ExpertMatMul,
    jobs: &'a ExpertJobs,
    /// The rows of the first matmuls and of the last.
    rows: [JobRows<'a>; 2],
    hidden: JobChunks,
    output: JobChunks,
    /// The activations of the first matmuls: this thread's own, or those of all threads.
    activations: Activations<'static>,
    /// The hidden activations of all jobs.
    hidden_activations: Activations<'static>,
}

impl FeedForwardStep {
    /// A step of these parts. The caller has checked that they depend on each other only as the [module](self) says.
    pub(crate) fn new(
        hidden: MatMulStep<ExpertMatMul>,
        row_parts: Vec<StepPart>,
        output: MatMulStep<ExpertMatMul>,
        sum: Vec<StepPart>,
    ) -> FeedForwardStep {
        let units = output.matmuls.first().map_or(0, ExpertMatMul::units);
        let latches = Latches::new(CHUNKS + units);
        FeedForwardStep { hidden, row_parts, output, sum, latches }
    }

    /// Whether the rows of these matmuls are few enough, and lie as the step expects: the first and the last of a
    /// feed-forward, the last with memory for prepared activations.
    pub(crate) fn fits(first: &ExpertMatMul, last: &ExpertMatMul) -> bool {
        let rows = first.tokens * first.used;
        let in_order =
            |row: usize| last.x_rows.row(row / last.used.max(1), row % last.used.max(1)) as usize == row;
        last.prepared.is_some()
            && (first.tokens, first.used) == (last.tokens, last.used)
            && first.ids.is_same(&last.ids)
            && first.activations.single == last.activations.single
            && (1..=MAX_JOB_ROWS).contains(&rows)
            && [first, last].iter().all(|matmul| matmul.activations.rows <= MAX_PLACES)
            && last.x.rows == rows
            && (0..rows).all(in_order)
    }

    /// All parts beside the matmuls, in order.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &StepPart> {
        let hidden = self.hidden.epilogues.iter().map(|(_, part)| part).chain(&self.row_parts);
        hidden.chain(self.output.epilogues.iter().map(|(_, part)| part)).chain(&self.sum)
    }

    /// The memory that it reads and writes.
    pub(crate) fn accesses(&self) -> impl Iterator<Item = &Access> {
        let parts = self.row_parts.iter().chain(&self.sum).flat_map(|part| &part.accesses);
        self.hidden.accesses().chain(self.output.accesses()).chain(parts)
    }
}

impl FeedForwardRun<'_> {
    /// Prepares the activations of the first matmuls. Of one token, threads do that for themselves.
    fn prepare(&self) -> Result<(), TeamError> {
        let Some(gather) = self.rows[0].gather() else { return Ok(()) };
        // SAFETY: the program holds the buffer of the activations, which the step does not write before all of them are used.
        let input = unsafe { self.first.x.input() }.gather(gather)?;
        self.worker.chunks(self.jobs.present(), |job| {
            let places = self.rows[0].of(job);
            // SAFETY: places of a job are whole panels; each job goes to one thread, and others read them when the latch is open.
            unsafe { self.activations.prepare_rows(places, &input) };
            self.worker.open(&self.step.latches, PREPARED + job);
        });
        Ok(())
    }

    /// The first phase: the hidden activations of all jobs whose experts are here.
    fn hidden(&self) -> Result<(), TeamError> {
        let (latches, single) = (&self.step.latches, self.first.activations.single);
        // Of one token: the rows that this thread has prepared. And its previous unit.
        let (mut prepared, mut previous) = (0_u64, None);
        self.worker.try_chunks(self.hidden.units(), |unit| {
            let (job, chunk) = self.hidden.unit(unit);
            let places = self.rows[0].of(job);
            if !single {
                self.worker.wait_until(|| latches.is_open(PREPARED + job))?;
            } else if prepared >> places.start & 1 == 0 {
                prepared |= 1 << places.start;
                // SAFETY: this thread's own memory; the row was written before the last barrier.
                unsafe { self.activations.prepare_rows(places.clone(), &self.first.x.input()) };
            }
            let groups = self.first.groups(chunk, self.hidden.chunks);
            let follows = chunk.checked_sub(1).is_some_and(|before| previous == Some((job, before)));
            previous = Some((job, chunk));
            let rows = ExpertRows {
                expert: self.jobs.expert(job),
                first: places.start,
                scatter: self.rows[0].scatter(job),
            };
            if !groups.is_empty() {
                // SAFETY: the rows are prepared; each unit writes its own columns of its own rows.
                unsafe {
                    self.step.hidden.multiply(self.worker, &self.activations, &rows, &groups, follows)?;
                }
            }
            if latches.arrive(HIDDEN + job, self.hidden.chunks) {
                self.finish_hidden(job)?;
                self.worker.open(latches, HIDDEN + job);
            }
            Ok(())
        })
    }

    /// Completes the hidden rows of a job and prepares them, when all of their columns are computed.
    fn finish_hidden(&self, job: usize) -> Result<(), TeamError> {
        for part in &self.step.row_parts {
            for row in self.jobs.rows(job) {
                let row = *row as usize;
                part.kernel.run(row..row + 1, self.work).map_err(TeamError::Data)?;
            }
        }
        // SAFETY: all threads that wrote these rows have arrived at the job's latch, and nothing writes them again.
        let mut input = unsafe { self.last.x.input() };
        if let Some(gather) = self.rows[1].gather() {
            input = input.gather(gather)?;
        }
        let places = self.rows[1].of(job);
        // SAFETY: places of a job are whole panels, which this thread alone fills; others read them when the latch is open.
        unsafe { self.hidden_activations.prepare_rows(places, &input) };
        Ok(())
    }

    /// Whether the hidden rows of a unit of the second phase are complete, or it needs none. A unit without row groups must not
    /// look at latches: nobody waits for it before they are reset.
    fn is_ready(&self, unit: usize) -> bool {
        let (job, chunk) = self.output.unit(unit);
        job >= self.jobs.present()
            || self.last.groups(chunk, self.output.chunks).is_empty()
            || self.step.latches.is_open(HIDDEN + job)
    }

    /// The second phase: the results of all jobs and their sum.
    fn output(&self) -> Result<(), TeamError> {
        let mut deferred = DeferredUnits { units: [0; MAX_DEFERRED], count: 0 };
        let is_ready = |unit: usize| self.is_ready(unit);
        let any_ready = |deferred: &DeferredUnits| deferred.units().iter().any(|unit| is_ready(*unit));
        let mut previous = None;
        let mut run = |unit: usize| {
            let (job, chunk) = self.output.unit(unit);
            let follows = chunk.checked_sub(1).is_some_and(|before| previous == Some((job, before)));
            previous = Some((job, chunk));
            self.output_chunk(job, chunk, follows)
        };
        self.worker.try_chunks(self.output.units(), |unit| {
            if is_ready(unit) {
                return run(unit);
            }
            while !deferred.push(unit) {
                self.worker.wait_until(|| any_ready(&deferred))?;
                if let Some(unit) = deferred.take(is_ready) {
                    run(unit)?;
                }
            }
            Ok(())
        })?;
        while !deferred.units().is_empty() {
            self.worker.wait_until(|| any_ready(&deferred))?;
            if let Some(unit) = deferred.take(is_ready) {
                run(unit)?;
            }
        }
        Ok(())
    }

    /// Some columns of the results of a job whose hidden rows are complete.
    fn output_chunk(&self, job: usize, chunk: usize, follows: bool) -> Result<(), TeamError> {
        let (latches, last) = (&self.step.latches, self.last);
        let groups = last.groups(chunk, self.output.chunks);
        if groups.is_empty() {
            return Ok(());
        }
        let rows = ExpertRows {
            expert: self.jobs.expert(job),
            first: if job < self.jobs.present() { self.rows[1].of(job).start } else { 0 },
            scatter: self.rows[1].scatter(job),
        };
        // SAFETY: the latch of the job is open, so that its rows are prepared; each unit writes its own columns of its own rows.
        unsafe { self.step.output.multiply(self.worker, &self.hidden_activations, &rows, &groups, follows)? };
        if !latches.arrive(CHUNKS + groups.start / last.unit(), self.jobs.count()) {
            return Ok(());
        }
        let columns = groups.start * GROUP..(groups.end * GROUP).min(last.packed.layout.rows());
        self.add_up(columns)?;
        if latches.arrive(FINISHED, self.output.chunks.min(last.units())) {
            // All chunks are done: nobody will look at a latch before the next barrier.
            latches.reset();
        }
        Ok(())
    }

    /// The weighted sum, and what follows it, of columns that all jobs have computed.
    fn add_up(&self, columns: Range<usize>) -> Result<(), TeamError> {
        for part in &self.step.sum {
            part.kernel.run_block(0..self.first.tokens, columns.clone()).map_err(TeamError::Data)?;
        }
        Ok(())
    }
}

impl TeamKernel for FeedForwardStep {
    fn own_bytes(&self) -> usize {
        let parts = [&self.row_parts, &self.sum];
        self.hidden.fused_bytes()
            + self.output.fused_bytes()
            + parts.iter().map(|parts| parts.capacity() * size_of::<StepPart>()).sum::<usize>()
            + parts.into_iter().flatten().map(StepPart::own_bytes).sum::<usize>()
            + self.latches.bytes()
    }

    fn reset(&self) {
        self.latches.reset();
    }

    fn run(&self, worker: &Worker<'_>, work: WorkMemory) -> Result<(), TeamError> {
        let (Some(first), Some(last)) = (self.hidden.matmuls.first(), self.output.matmuls.first()) else {
            return Ok(());
        };
        let jobs = ExpertJobs::new(first, last).map_err(TeamError::Data)?;
        if first.activations.single {
            self.run_jobs(worker, work, &jobs, [first, last], None)
        } else {
            self.run_sorted(worker, work, &jobs, [first, last])
        }
    }
}

impl FeedForwardStep {
    /// Of more than one token. Apart, so that one token does not pay for the lists.
    #[inline(never)]
    fn run_sorted(
        &self,
        worker: &Worker<'_>,
        work: WorkMemory,
        jobs: &ExpertJobs,
        matmuls: [&ExpertMatMul; 2],
    ) -> Result<(), TeamError> {
        let mut sorted = [SortedRows::EMPTY; 2];
        for (rows, matmul) in sorted.iter_mut().zip(matmuls) {
            rows.fill(jobs, matmul);
        }
        self.run_jobs(worker, work, jobs, matmuls, Some(&sorted))
    }

    fn run_jobs(
        &self,
        worker: &Worker<'_>,
        work: WorkMemory,
        jobs: &ExpertJobs,
        [first, last]: [&ExpertMatMul; 2],
        sorted: Option<&[SortedRows; 2]>,
    ) -> Result<(), TeamError> {
        let single = first.activations.single;
        let average = (first.tokens * first.used).div_ceil(jobs.count().max(1));
        let average = if single { 1 } else { average.max(2) };
        let chunks = |matmul, jobs, most| JobChunks::new(matmul, jobs, average, worker.threads(), most);
        let activations = if single { first.own(worker, work)? } else { first.shared(work)? };
        let hidden_activations = last.hidden_activations(worker, &activations)?;
        let rows = [
            JobRows { jobs, matmul: first, sorted: sorted.map(|[first, _]| first) },
            JobRows { jobs, matmul: last, sorted: sorted.map(|[_, last]| last) },
        ];
        let hidden = chunks(first, jobs.present(), MOST_HIDDEN_CHUNKS);
        let output = chunks(last, jobs.count(), MOST_OUTPUT_CHUNKS);
        let run = FeedForwardRun {
            step: self,
            worker,
            work,
            first,
            last,
            jobs,
            rows,
            hidden,
            output,
            activations,
            hidden_activations,
        };
        run.prepare()?;
        run.hidden()?;
        run.output()
    }
}

impl ExpertMatMul {
    /// The activations of all threads in the memory that was set apart for them, with this worker's scratch memory of `other`.
    fn hidden_activations(
        &self,
        worker: &Worker<'_>,
        other: &Activations<'static>,
    ) -> Result<Activations<'static>, KernelError> {
        let ExpertActivations { format, dtype, rows, columns, .. } = self.activations;
        let needs = self.activations.shared_bytes()?;
        let (has, pointer) =
            self.prepared.as_ref().map_or((0, std::ptr::null_mut()), |memory| (memory.bytes, memory.pointer));
        if has < needs {
            return Err(KernelError::Short { what: "memory of prepared activations", has, needs });
        }
        // SAFETY: the memory is long enough and in a buffer that the program holds for writing. Latches separate the thread that
        // fills a row from those that read it.
        unsafe { Activations::beside(other, worker, format, dtype, [rows, columns], pointer) }
    }
}

#[cfg(test)]
mod tests {
    use quadriga_conformance::Rng;

    use super::{DeferredUnits, JobChunks, MAX_DEFERRED};

    #[test]
    fn every_chunk_of_every_job_is_one_unit_and_shares_go_through_the_jobs_in_order() {
        let seed = 3;
        let mut rng = Rng::new(seed);
        for round in 0..500 {
            let (jobs, each, threads) = (rng.range(0, 20), rng.range(1, 9), rng.range(1, 17));
            let chunks = JobChunks { jobs, chunks: each * threads, threads, rotated: rng.chance(0.5) };
            let units: Vec<_> = (0..chunks.units()).map(|unit| chunks.unit(unit)).collect();
            for share in units.chunks((jobs * each).max(1)) {
                assert!(share.is_sorted_by_key(|(job, _)| *job), "seed {seed}, round {round}: {share:?}");
            }
            let mut sorted = units.clone();
            sorted.sort_unstable();
            let all = (0..jobs).flat_map(|job| (0..each * threads).map(move |chunk| (job, chunk)));
            assert!(sorted.into_iter().eq(all), "seed {seed}, round {round}: {units:?}");
        }
    }

    #[test]
    fn deferred_units_are_taken_once_each_when_they_are_ready() {
        let mut deferred = DeferredUnits { units: [0; MAX_DEFERRED], count: 0 };
        assert!((0..MAX_DEFERRED).all(|unit| deferred.push(unit)));
        assert!(!deferred.push(MAX_DEFERRED), "there is no room");
        let mut taken: Vec<usize> = Vec::new();
        for ready in [|unit: usize| unit.is_multiple_of(3), |unit: usize| unit > 40, |_: usize| true] {
            taken.extend(std::iter::from_fn(|| deferred.take(ready)));
            assert!(taken.iter().rev().take(1).all(|unit| ready(*unit)));
        }
        taken.sort_unstable();
        assert!(taken.into_iter().eq(0..MAX_DEFERRED) && deferred.units().is_empty());
    }
}

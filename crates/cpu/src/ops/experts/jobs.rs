//! The experts that few rows use: one job for each.

use std::ops::Range;

use super::{ExpertMatMul, expert};
use crate::kernels::matmul::NO_ROW;

/// The most rows of a feed-forward that is one step: tokens times the experts that each uses.
pub(crate) const MAX_JOB_ROWS: usize = 64;

/// Rows that a format of activations prepares together, at most.
const MAX_GRANULARITY: usize = 16;

/// The most rows of activations, with padding.
pub(super) const MAX_PLACES: usize = MAX_JOB_ROWS * MAX_GRANULARITY;

/// An expert and the rows that it multiplies.
#[derive(Clone, Copy, Debug)]
struct ExpertJob {
    /// `None`: the expert is not here, and the results are 0.
    expert: Option<usize>,
    /// The first of its rows, and one past the last, in [`ExpertJobs::order`].
    rows: [usize; 2],
}

/// The jobs of a feed-forward's tokens: experts that are here first. Every thread finds the same ones from the same ids.
///
/// Of one token, each of its experts is a job with one row, in the order of the ids; of more, the rows of all tokens are
/// sorted by expert.
pub(super) struct ExpertJobs {
    jobs: [ExpertJob; MAX_JOB_ROWS],
    count: usize,
    present: usize,
    /// Rows of the results, job after job.
    order: [u32; MAX_JOB_ROWS],
}

impl ExpertJobs {
    /// The jobs of these matmuls, the first and the last of a feed-forward.
    ///
    /// # Errors
    /// An id is out of range, or there are more rows than [`MAX_JOB_ROWS`].
    pub(super) fn new(first: &ExpertMatMul, last: &ExpertMatMul) -> Result<ExpertJobs, String> {
        let (rows, used) = (first.tokens * first.used, first.used.max(1));
        let single = first.activations.single;
        let experts = first.packed.count.min(last.packed.count);
        // The order of the jobs in the upper half, the row in the lower.
        let mut keys = [(u64::MAX, None); MAX_JOB_ROWS];
        let Some(keys) = keys.get_mut(..rows) else { return Err(format!("{rows} rows are too many")) };
        for (row, key) in keys.iter_mut().enumerate() {
            let expert = expert(&first.ids, row / used, row % used, experts)?;
            let rank = if single { expert.map(|_| 0) } else { expert };
            *key = (rank.map_or(u64::from(u32::MAX), |rank| rank as u64) << 32 | row as u64, expert);
        }
        keys.sort_unstable_by_key(|(key, _)| *key);
        let no_job = ExpertJob { expert: None, rows: [0; 2] };
        let mut made =
            ExpertJobs { jobs: [no_job; MAX_JOB_ROWS], count: 0, present: 0, order: [0; MAX_JOB_ROWS] };
        for (place, ((key, expert), to)) in keys.iter().zip(&mut made.order).enumerate() {
            *to = *key as u32;
            let last = made.count.checked_sub(1).and_then(|last| made.jobs.get_mut(last));
            match last.filter(|job| !single && job.expert == *expert) {
                Some(job) => job.rows[1] = place + 1,
                None => {
                    if let Some(job) = made.jobs.get_mut(made.count) {
                        *job = ExpertJob { expert: *expert, rows: [place, place + 1] };
                    }
                    made.count += 1;
                    made.present += usize::from(expert.is_some());
                }
            }
        }
        Ok(made)
    }

    /// The number of jobs.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// The number of jobs whose experts are here: the first ones.
    pub(super) fn present(&self) -> usize {
        self.present
    }

    /// The expert of a job, if it is here.
    pub(super) fn expert(&self, job: usize) -> Option<usize> {
        self.jobs.get(job).and_then(|job| job.expert)
    }

    /// The rows of the results of a job.
    pub(super) fn rows(&self, job: usize) -> &[u32] {
        self.jobs.get(job).and_then(|job| self.order.get(job.rows[0]..job.rows[1])).unwrap_or(&[])
    }
}

/// The rows of activations of a matmul of more than one token: those of each job are adjacent, padded to what the format
/// prepares together.
pub(super) struct SortedRows {
    /// The first row of each job.
    first: [usize; MAX_JOB_ROWS],
    granularity: usize,
    /// For each row, the row of the activations in memory, or none.
    gather: [u32; MAX_PLACES],
    /// For each row, the row of the result, or none.
    scatter: [u32; MAX_PLACES],
}

impl SortedRows {
    /// No rows.
    pub(super) const EMPTY: SortedRows = SortedRows {
        first: [0; MAX_JOB_ROWS],
        granularity: 1,
        gather: [NO_ROW; MAX_PLACES],
        scatter: [NO_ROW; MAX_PLACES],
    };

    /// Adds the rows of all jobs whose experts are here.
    pub(super) fn fill(&mut self, jobs: &ExpertJobs, matmul: &ExpertMatMul) {
        let used = matmul.used.max(1);
        self.granularity = matmul.activations.format.row_granularity().max(1);
        let mut next = 0_usize;
        for (job, first) in self.first.iter_mut().enumerate().take(jobs.present) {
            *first = next;
            for row in jobs.rows(job) {
                if let (Some(from), Some(to)) = (self.gather.get_mut(next), self.scatter.get_mut(next)) {
                    *from = matmul.x_rows.row(*row as usize / used, *row as usize % used);
                    *to = *row;
                }
                next += 1;
            }
            next = next.next_multiple_of(self.granularity);
        }
    }
}

/// The rows of a matmul's activations that belong to each job.
#[derive(Clone, Copy)]
pub(super) struct JobRows<'a> {
    pub(super) jobs: &'a ExpertJobs,
    pub(super) matmul: &'a ExpertMatMul,
    /// `None` of one token, whose rows are used as they are.
    pub(super) sorted: Option<&'a SortedRows>,
}

impl<'a> JobRows<'a> {
    /// The rows of activations of a job whose expert is here.
    pub(super) fn of(&self, job: usize) -> Range<usize> {
        let rows = self.jobs.rows(job);
        let Some(sorted) = self.sorted else {
            let row = rows.first().map_or(0, |row| self.matmul.x_rows.row(0, *row as usize)) as usize;
            return row..row + 1;
        };
        let first = sorted.first.get(job).copied().unwrap_or_default();
        first..first + rows.len().next_multiple_of(sorted.granularity)
    }

    /// For each row of activations of a job, the row of the result; padding has none.
    pub(super) fn scatter(&self, job: usize) -> &'a [u32] {
        match self.sorted {
            // Results of an expert that is not here have no activations.
            Some(sorted) if job < self.jobs.present => sorted.scatter.get(self.of(job)).unwrap_or(&[]),
            _ => self.jobs.rows(job),
        }
    }

    /// For each row of activations, the row in memory; `None` if they are the same.
    pub(super) fn gather(&self) -> Option<&'a [u32]> {
        self.sorted.and_then(|sorted| sorted.gather.get(..self.matmul.activations.rows))
    }
}

//! What a compiled split consists of: kernels over units of work, and the memory they touch.

use std::ops::Range;

use crate::kernels::KernelError;
use crate::partition::{Partition, UnitShare};
use crate::pool::{Stopped, Worker};
use crate::view::View;

/// Why a step did not finish.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Another thread failed.
    Stopped(Stopped),
    /// The part with this number met data it cannot work with.
    Part {
        /// Index of the part's name in the program.
        name: usize,
        /// What was wrong.
        reason: String,
    },
}

impl From<Stopped> for Failure {
    fn from(stopped: Stopped) -> Failure {
        Failure::Stopped(stopped)
    }
}

/// Work memory of a run, shared by all steps one after another.
#[derive(Clone, Copy)]
pub(crate) struct Work {
    pub(crate) pointer: *mut u8,
    pub(crate) bytes: usize,
    pub(crate) threads: usize,
}

// SAFETY: an address and numbers; steps agree on who writes where.
unsafe impl Send for Work {}
// SAFETY: as above.
unsafe impl Sync for Work {}

/// An operation cut into units that can be computed in any order and by any thread, with the same result.
pub(crate) trait Kernel: Send + Sync {
    /// Computes these units.
    fn run(&self, units: Range<usize>, work: Work) -> Result<(), String>;

    /// Computes some columns of all rows; only of parts that are [`by_columns`](Part::by_columns).
    fn run_columns(&self, _columns: Range<usize>) {}
}

/// An operation that all threads compute together, with barriers of its own inside.
pub(crate) trait Team: Send + Sync {
    /// This thread's share; every thread of the run calls it.
    fn run(&self, worker: &Worker<'_>, work: Work) -> Result<(), TeamError>;

    /// Asks for the memory that this thread will read first, while others may still be at the step before.
    fn ask_ahead(&self, _worker: &Worker<'_>) {}
}

/// Why a team did not finish.
pub(crate) enum TeamError {
    /// Another thread failed.
    Stopped(Stopped),
    /// Data it cannot work with.
    Data(String),
}

impl From<KernelError> for TeamError {
    fn from(error: KernelError) -> TeamError {
        match error {
            KernelError::Stopped(stopped) => TeamError::Stopped(stopped),
            other => TeamError::Data(other.to_string()),
        }
    }
}

impl From<Stopped> for TeamError {
    fn from(stopped: Stopped) -> TeamError {
        TeamError::Stopped(stopped)
    }
}

/// A range of addresses that an operation reads or writes.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    range: Range<usize>,
    /// The bytes that each unit touches, if no unit touches those of another.
    share: Option<UnitShare>,
    write: bool,
}

impl Access {
    fn new(view: &View, partition: Option<Partition>, write: bool) -> Access {
        let share = partition.and_then(|partition| partition.share(view));
        Access { range: view.range(), share, write }
    }

    /// Any part of the tensor is read by any unit.
    pub(crate) fn reads(view: &View) -> Access {
        Access::new(view, None, false)
    }

    /// Any part of the tensor is written by any unit.
    pub(crate) fn writes(view: &View) -> Access {
        Access::new(view, None, true)
    }

    /// Each unit reads only its own share of the tensor.
    pub(crate) fn reads_own(view: &View, partition: Partition) -> Access {
        Access::new(view, Some(partition), false)
    }

    /// Each unit writes only its own share of the tensor.
    pub(crate) fn writes_own(view: &View, partition: Partition) -> Access {
        Access::new(view, Some(partition), true)
    }

    /// Any part of a range of addresses is read, or written, by any unit.
    pub(crate) fn range(range: Range<usize>, write: bool) -> Access {
        Access { range, share: None, write }
    }

    /// Whether they are of exactly the same addresses.
    pub(crate) fn is_where(&self, other: &Access) -> bool {
        self.range == other.range
    }

    /// Whether it writes.
    pub(crate) fn is_write(&self) -> bool {
        self.write
    }

    /// Whether the order of the two matters: one writes what the other touches.
    pub(crate) fn conflicts(&self, other: &Access) -> bool {
        (self.write || other.write)
            && self.range.start < other.range.end
            && other.range.start < self.range.end
    }

    /// Whether a unit of one conflicts with another unit of the other. It does not where both cut the same memory into
    /// the same shares.
    pub(crate) fn conflicts_across_units(&self, other: &Access) -> bool {
        let same_shares = self.share.is_some() && self.share == other.share && self.range == other.range;
        self.conflicts(other) && !same_shares
    }
}

/// A kernel with what is known of it.
pub(crate) struct Part {
    pub(crate) kernel: Box<dyn Kernel>,
    pub(crate) units: usize,
    /// About how many elements are computed in all.
    pub(crate) cost: usize,
    /// Threads take a whole number of this many units.
    pub(crate) grain: usize,
    pub(crate) accesses: Vec<Access>,
    /// Rows and columns, if an element of the result depends on that element of dense inputs alone (or of one row of
    /// them), so that any columns can be computed by themselves.
    pub(crate) by_columns: Option<[usize; 2]>,
    /// Index of the node's name in the program.
    pub(crate) name: usize,
    /// What it does, in a word.
    pub(crate) label: &'static str,
}

impl Part {
    /// A kernel of `units` units that computes about `cost` elements.
    pub(crate) fn new(
        kernel: impl Kernel + 'static,
        units: usize,
        cost: usize,
        accesses: Vec<Access>,
    ) -> Part {
        let kernel = Box::new(kernel);
        Part { kernel, units, cost, grain: 1, accesses, by_columns: None, name: 0, label: "" }
    }
}

/// Elements that are not worth sharing among threads.
pub(crate) const TINY: usize = 4096;

/// One step of a program; a barrier follows each.
pub(crate) enum Step {
    /// Parts one after another, on one thread.
    Single(Vec<Part>),
    /// Parts with equal units: each thread takes some units through all parts.
    Shared(Vec<Part>),
    /// All threads together.
    Team {
        /// The work.
        team: Box<dyn Team>,
        /// Indices of the nodes' names in the program.
        names: Vec<usize>,
        /// What it does.
        label: String,
    },
}

impl Step {
    /// What the step does: its operations, joined by plus signs.
    pub(crate) fn label(&self) -> String {
        match self {
            Step::Single(parts) | Step::Shared(parts) => {
                parts.iter().map(|part| part.label).collect::<Vec<_>>().join(" + ")
            }
            Step::Team { label, .. } => label.clone(),
        }
    }

    /// Indices of the names of the nodes that the step computes, each once.
    pub(crate) fn names(&self) -> Vec<usize> {
        let mut names: Vec<usize> = match self {
            Step::Single(parts) | Step::Shared(parts) => parts.iter().map(|part| part.name).collect(),
            Step::Team { names, .. } => names.clone(),
        };
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Asks for the memory that this thread will read first in this step.
    pub(crate) fn ask_ahead(&self, worker: &Worker<'_>) {
        if let Step::Team { team, .. } = self {
            team.ask_ahead(worker);
        }
    }

    /// This thread's share of the step.
    pub(crate) fn run(&self, worker: &Worker<'_>, work: Work) -> Result<(), Failure> {
        match self {
            Step::Single(parts) => worker
                .try_chunks(1, |_| parts.iter().try_for_each(|part| run_part(part, 0..part.units, work))),
            Step::Shared(parts) => {
                let units = parts.first().map_or(0, |part| part.units);
                let cost: usize = parts.iter().map(|part| part.cost).sum();
                let grain = parts.iter().map(|part| part.grain).max().unwrap_or(1);
                let by_cost = units.saturating_mul(TINY) / cost.max(1);
                let by_threads = units / (worker.threads() * 4);
                let size = by_cost.max(by_threads).max(1).next_multiple_of(grain);
                worker.try_chunks(units.div_ceil(size), |chunk| {
                    let range = chunk * size..((chunk + 1) * size).min(units);
                    parts.iter().try_for_each(|part| run_part(part, range.clone(), work))
                })
            }
            Step::Team { team, names, .. } => team.run(worker, work).map_err(|error| match error {
                TeamError::Stopped(stopped) => Failure::Stopped(stopped),
                TeamError::Data(reason) => {
                    Failure::Part { name: names.first().copied().unwrap_or_default(), reason }
                }
            }),
        }
    }
}

fn run_part(part: &Part, units: Range<usize>, work: Work) -> Result<(), Failure> {
    part.kernel.run(units, work).map_err(|reason| Failure::Part { name: part.name, reason })
}

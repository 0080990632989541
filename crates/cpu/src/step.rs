//! The steps of a compiled split: kernels over units of work, and the memory that they access.

use std::ops::Range;

use crate::kernels::KernelError;
use crate::memory::HostBlock;
use crate::partition::{Partition, UnitShare};
use crate::pool::{Stopped, Worker};
use crate::view::TensorView;

/// Why a step did not finish.
#[derive(Debug)]
pub(crate) enum StepFailure {
    /// Another thread failed.
    Stopped(Stopped),
    /// The data of a node is invalid, such as an index out of range.
    Data {
        /// Index of the node's name in the program.
        name: usize,
        /// The value and the range it should be in.
        reason: String,
    },
}

impl From<Stopped> for StepFailure {
    fn from(stopped: Stopped) -> StepFailure {
        StepFailure::Stopped(stopped)
    }
}

/// Work memory of a run; each step uses all of it.
#[derive(Clone, Copy)]
pub(crate) struct WorkMemory {
    pub(crate) pointer: *mut u8,
    pub(crate) bytes: usize,
    pub(crate) threads: usize,
}

impl WorkMemory {
    /// All of a block, for this many threads.
    pub(crate) fn new(block: &HostBlock, threads: usize) -> WorkMemory {
        WorkMemory { pointer: block.pointer(), bytes: block.bytes(), threads }
    }
}

// SAFETY: an address and numbers; the kernels of a step write disjoint parts.
unsafe impl Send for WorkMemory {}
// SAFETY: as above.
unsafe impl Sync for WorkMemory {}

/// An operation cut into independent units: any thread may compute them, in any order, with the same result.
pub(crate) trait Kernel: Send + Sync {
    /// Computes these units.
    fn run(&self, units: Range<usize>, work: WorkMemory) -> Result<(), String>;

    /// Computes some columns of some rows; only of parts that are [`by_columns`](StepPart::by_columns).
    fn run_block(&self, _rows: Range<usize>, _columns: Range<usize>) -> Result<(), String> {
        Ok(())
    }

    /// Prefetches the memory that [`run_block`](Kernel::run_block) will read for these rows and columns. Its inputs are
    /// complete.
    fn prefetch_block(&self, _rows: Range<usize>, _columns: Range<usize>) {}

    /// Says that the next step reads rows of this matrix, one for each column of the result that is not 0.
    fn read_next(&mut self, _matrix: &TensorView) {}
}

/// An operation that all threads compute together, with barriers inside.
pub(crate) trait TeamKernel: Send + Sync {
    /// This thread's share; every thread of the run calls it.
    fn run(&self, worker: &Worker<'_>, work: WorkMemory) -> Result<(), TeamError>;

    /// Prefetches the memory that this thread reads first, while other threads may still run the previous step.
    fn prefetch(&self, _worker: &Worker<'_>) {}

    /// Bytes of host memory that it points to.
    fn own_bytes(&self) -> usize {
        0
    }

    /// Makes it ready to run again after a run that failed. No thread runs it meanwhile.
    fn reset(&self) {}
}

/// Why a team kernel did not finish.
pub(crate) enum TeamError {
    /// Another thread failed.
    Stopped(Stopped),
    /// The node's data is invalid, such as an index out of range.
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
    fn new(view: &TensorView, partition: Option<Partition>, write: bool) -> Access {
        let share = partition.and_then(|partition| partition.share(view));
        Access { range: view.range(), share, write }
    }

    /// Any part of the tensor is read by any unit.
    pub(crate) fn reads(view: &TensorView) -> Access {
        Access::new(view, None, false)
    }

    /// Any part of the tensor is written by any unit.
    pub(crate) fn writes(view: &TensorView) -> Access {
        Access::new(view, None, true)
    }

    /// Each unit reads only its own share of the tensor.
    pub(crate) fn reads_own(view: &TensorView, partition: Partition) -> Access {
        Access::new(view, Some(partition), false)
    }

    /// Each unit writes only its own share of the tensor.
    pub(crate) fn writes_own(view: &TensorView, partition: Partition) -> Access {
        Access::new(view, Some(partition), true)
    }

    /// Any part of a range of addresses is read, or written, by any unit.
    pub(crate) fn range(range: Range<usize>, write: bool) -> Access {
        Access { range, share: None, write }
    }

    /// Whether both cover exactly the same addresses.
    pub(crate) fn is_where(&self, other: &Access) -> bool {
        self.range == other.range
    }

    /// Whether each unit touches only its own share.
    pub(crate) fn is_own(&self) -> bool {
        self.share.is_some()
    }

    /// Whether it writes.
    pub(crate) fn is_write(&self) -> bool {
        self.write
    }

    /// Whether the order of the two matters: one writes memory that the other accesses.
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

/// A kernel as part of a step: its units, its cost and the memory it accesses.
pub(crate) struct StepPart {
    pub(crate) kernel: Box<dyn Kernel>,
    pub(crate) units: usize,
    /// About how many elements are computed in all.
    pub(crate) cost: usize,
    /// Threads take multiples of this many units.
    pub(crate) grain: usize,
    pub(crate) accesses: Vec<Access>,
    /// Rows and columns of the result, if each element depends only on the same element of contiguous inputs (or of an
    /// input of one row, or of a row for each expert): the part can then run on any rows and columns, as the epilogue
    /// of a matmul.
    pub(crate) by_columns: Option<[usize; 2]>,
    /// Whether it may be the epilogue of a matmul however large it is.
    pub(crate) large_epilogue: bool,
    /// Whether, as an epilogue, it runs a little later than its columns are complete, so that what it reads can be
    /// [prefetched](Kernel::prefetch_block).
    pub(crate) deferrable: bool,
    /// Columns of a unit, if units are columns of a result of one row. A thread takes its share of them at once.
    pub(crate) unit_columns: Option<usize>,
    /// Bytes of work memory that it writes for the next step, or reads.
    pub(crate) work_bytes: usize,
    /// The matrix of which it reads a row for each element of its last input that is not 0.
    pub(crate) active_rows: Option<TensorView>,
    /// Rows of the result, if unit `r` computes row `r` and nothing else.
    pub(crate) by_rows: Option<usize>,
    /// Whether it is the weighted sum over the experts of each token, which is [`by_columns`](StepPart::by_columns).
    pub(crate) sums_experts: bool,
    /// Index of the node's name in the program.
    pub(crate) name: usize,
    /// The operation's name.
    pub(crate) label: &'static str,
}

impl StepPart {
    /// A kernel of `units` units that computes about `cost` elements.
    pub(crate) fn new(
        kernel: impl Kernel + 'static,
        units: usize,
        cost: usize,
        accesses: Vec<Access>,
    ) -> StepPart {
        StepPart {
            kernel: Box::new(kernel),
            units,
            cost,
            grain: 1,
            accesses,
            by_columns: None,
            large_epilogue: false,
            deferrable: false,
            unit_columns: None,
            work_bytes: 0,
            active_rows: None,
            by_rows: None,
            sums_experts: false,
            name: 0,
            label: "",
        }
    }

    /// Bytes of host memory that it points to.
    pub(crate) fn own_bytes(&self) -> usize {
        size_of_val(&*self.kernel) + self.accesses.capacity() * size_of::<Access>()
    }
}

/// Operations of at most this many elements run on one thread.
pub(crate) const TINY: usize = 4096;

/// One step of a program; a barrier follows each.
pub(crate) enum KernelStep {
    /// Parts one after another, on one thread.
    Serial(Vec<StepPart>),
    /// Parts of the same partition: each thread takes some units through all parts. If units of the first are columns of
    /// a row, the others are elementwise parts, which run on these columns.
    Parallel(Vec<StepPart>),
    /// A kernel that all threads run together.
    Team {
        /// The kernel.
        kernel: Box<dyn TeamKernel>,
        /// Indices of the nodes' names in the program.
        names: Vec<usize>,
        /// The names of its operations.
        label: String,
    },
}

impl KernelStep {
    /// The names of its operations, joined by plus signs.
    pub(crate) fn label(&self) -> String {
        match self {
            KernelStep::Serial(parts) | KernelStep::Parallel(parts) => {
                parts.iter().map(|part| part.label).collect::<Vec<_>>().join(" + ")
            }
            KernelStep::Team { label, .. } => label.clone(),
        }
    }

    /// Bytes of host memory that it takes.
    pub(crate) fn bytes(&self) -> usize {
        let parts = match self {
            KernelStep::Serial(parts) | KernelStep::Parallel(parts) => {
                parts.capacity() * size_of::<StepPart>()
                    + parts.iter().map(StepPart::own_bytes).sum::<usize>()
            }
            KernelStep::Team { kernel, names, label } => {
                size_of_val(&**kernel) + kernel.own_bytes() + size_of_val(&**names) + label.len()
            }
        };
        size_of::<KernelStep>() + parts
    }

    /// Indices of the names of the nodes that the step computes, each once.
    pub(crate) fn names(&self) -> Vec<usize> {
        let mut names: Vec<usize> = match self {
            KernelStep::Serial(parts) | KernelStep::Parallel(parts) => {
                parts.iter().map(|part| part.name).collect()
            }
            KernelStep::Team { names, .. } => names.clone(),
        };
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Prefetches the memory that this thread reads first in this step.
    pub(crate) fn prefetch(&self, worker: &Worker<'_>) {
        if let KernelStep::Team { kernel, .. } = self {
            kernel.prefetch(worker);
        }
    }

    /// Makes the step ready to run again after a run that failed.
    pub(crate) fn reset(&self) {
        if let KernelStep::Team { kernel, .. } = self {
            kernel.reset();
        }
    }

    /// This thread's share of the step.
    pub(crate) fn run(&self, worker: &Worker<'_>, work: WorkMemory) -> Result<(), StepFailure> {
        match self {
            KernelStep::Serial(parts) => worker
                .try_chunks(1, |_| parts.iter().try_for_each(|part| run_part(part, 0..part.units, work))),
            KernelStep::Parallel(parts) => {
                let units = parts.first().map_or(0, |part| part.units);
                let cost: usize = parts.iter().map(|part| part.cost).sum();
                let grain = parts.iter().map(|part| part.grain).max().unwrap_or(1);
                let by_cost = units.saturating_mul(TINY) / cost.max(1);
                let columns = parts.first().and_then(|part| part.unit_columns);
                let by_threads = match columns {
                    None => units / (worker.threads() * 4),
                    Some(_) => units.div_ceil(worker.threads()),
                };
                let size = by_cost.max(by_threads).max(1).next_multiple_of(grain);
                worker.try_chunks(units.div_ceil(size), |chunk| {
                    let range = chunk * size..((chunk + 1) * size).min(units);
                    parts.iter().try_for_each(|part| match (columns, part.by_columns) {
                        (Some(columns), Some([rows, width])) => {
                            let block = range.start * columns..(range.end * columns).min(width);
                            let ran = part.kernel.run_block(0..rows, block);
                            ran.map_err(|reason| StepFailure::Data { name: part.name, reason })
                        }
                        _ => run_part(part, range.clone(), work),
                    })
                })
            }
            KernelStep::Team { kernel, names, .. } => kernel.run(worker, work).map_err(|error| match error {
                TeamError::Stopped(stopped) => StepFailure::Stopped(stopped),
                TeamError::Data(reason) => {
                    StepFailure::Data { name: names.first().copied().unwrap_or_default(), reason }
                }
            }),
        }
    }
}

fn run_part(part: &StepPart, units: Range<usize>, work: WorkMemory) -> Result<(), StepFailure> {
    part.kernel.run(units, work).map_err(|reason| StepFailure::Data { name: part.name, reason })
}

#[cfg(test)]
mod tests {
    use super::*;
    use quadriga_graph::{DType, GraphBuilder};

    /// An access of rows of 64 floats at an address.
    fn rows(address: usize, write: bool) -> Access {
        let g = GraphBuilder::new();
        g.output("x", g.input("x", DType::F32, [16, 64]));
        let graph = g.finish().unwrap();
        // SAFETY: only the numbers of the view are used.
        let view = unsafe {
            TensorView::new(&graph[graph.leaf("x").unwrap()], std::ptr::without_provenance_mut::<u8>(address))
        };
        Access::new(&view, Some(Partition::equal(16)), write)
    }

    #[test]
    fn rows_that_overlap_shifted_conflict_and_the_same_rows_do_not() {
        let read = rows(0x10000, false);
        assert!(!read.conflicts_across_units(&rows(0x10000, true)), "each unit has its own rows");
        assert!(!read.conflicts_across_units(&rows(0x10000 + 16 * 256, true)), "apart");
        for shift in [64, 256, 15 * 256] {
            assert!(read.conflicts_across_units(&rows(0x10000 + shift, true)), "shifted by {shift}");
            assert!(rows(0x10000 + shift, true).conflicts_across_units(&read), "shifted by {shift}");
            assert!(!read.conflicts_across_units(&rows(0x10000 + shift, false)), "both read");
        }
    }
}

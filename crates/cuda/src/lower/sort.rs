//! Argsort and top-k.

use quadriga_graph::{NodeId, Op, Order};
use quadriga_runtime::BackendError;

use super::lowering::Lowering;
use super::scratch;
use crate::kernels::KernelFile;
use crate::launch::Launch;

/// The longest row, or run of one, that a block sorts in shared memory.
pub(super) const MAX_SORTED_IN_BLOCK: usize = 4096;

/// The most elements of a long row that are found without sorting all of it.
pub(super) const MAX_TOP: usize = 1024;

/// Threads of a block that finds the largest elements: an eighth of its elements.
const TOP_THREADS: u32 = (MAX_SORTED_IN_BLOCK / 8) as u32;

/// Whether the largest elements of rows are found run by run, and the rest is never sorted: how many, and the runs of a row.
pub(super) fn top_of_runs(op: &Op, cols: usize) -> Option<(usize, usize)> {
    match op {
        Op::TopK { k } if cols > MAX_SORTED_IN_BLOCK && (1..=MAX_TOP).contains(k) => {
            Some((*k, cols.div_ceil(MAX_SORTED_IN_BLOCK)))
        }
        _ => None,
    }
}

impl Lowering<'_> {
    /// The indices of each row in sorted order: runs that fit into shared memory are sorted by blocks, then merged.
    pub(super) fn sort(&mut self, node: NodeId) -> Result<(), BackendError> {
        if let Some(x) = self.graph.inputs(node).first()
            && let Some((k, runs)) = top_of_runs(self.graph[node].op(), self.graph[*x].shape().cols())
        {
            return self.top_of_runs(node, k, runs);
        }
        let order = match self.graph[node].op() {
            Op::ArgSort { order } => *order,
            _ => Order::Descending,
        };
        let (inputs, out) = self.operands(node)?;
        let x = inputs.first().copied().unwrap_or_default();
        let cols = x.dims[3] as usize;
        let padded = cols.next_power_of_two().clamp(2, MAX_SORTED_IN_BLOCK);
        let runs = cols.div_ceil(padded) as u32;
        let descending = i32::from(order == Order::Descending);
        let [mut from, mut to] =
            if runs > 1 { self.scratch(node, scratch::sort(x.elements() as usize))? } else { [0; 2] };
        let function = self.function(KernelFile::Reduce, c"k_argsort")?;
        let launch = Launch::new(function, [x.rows() as u32, runs, 1], (padded as u32 / 2).clamp(32, 512));
        let launch = launch.shared_bytes(padded as u32 * 8).arg(x).arg(out).arg(from);
        self.push(launch.arg(descending).arg(padded as i32));
        let merge = self.function(KernelFile::Reduce, c"k_merge_runs")?;
        let mut width = padded;
        while width < cols {
            let last = 2 * width >= cols;
            let launch = Launch::over(merge, x.elements()).arg(x).arg(out).arg(from);
            self.push(launch.arg(if last { 0 } else { to }).arg(width as i64).arg(descending));
            std::mem::swap(&mut from, &mut to);
            width *= 2;
        }
        Ok(())
    }

    /// The indices of the largest elements of long rows: those of each run, then those of all runs together.
    fn top_of_runs(&mut self, node: NodeId, k: usize, mut runs: usize) -> Result<(), BackendError> {
        let (inputs, out) = self.operands(node)?;
        let x = inputs.first().copied().unwrap_or_default();
        let rows = x.rows() as usize;
        let [mut to, mut next] = self.scratch(node, scratch::top_of_runs(rows, runs, k))?;
        let (mut from, mut length) = (0, x.dims[3] as usize);
        let half = k.next_power_of_two();
        let function = self.function(KernelFile::Reduce, c"k_top_of_runs")?;
        loop {
            let is_last = runs == 1;
            let padded = length.next_power_of_two().clamp(half.max(2), MAX_SORTED_IN_BLOCK);
            let launch = Launch::new(function, [rows as u32, runs as u32, 1], TOP_THREADS)
                .shared_bytes(padded as u32 * 8)
                .arg(x)
                .arg(out)
                .arg(from)
                .arg(if is_last { 0 } else { to })
                .arg(length as i32)
                .arg(k as i32);
            self.push(launch.arg(half as i32).arg(padded as i32));
            if is_last {
                return Ok(());
            }
            (from, length) = (to, runs * k);
            runs = length.div_ceil(MAX_SORTED_IN_BLOCK);
            std::mem::swap(&mut to, &mut next);
        }
    }
}

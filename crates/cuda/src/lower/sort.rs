//! Argsort and top-k.

use quadriga_graph::{NodeId, Op, Order};
use quadriga_runtime::BackendError;

use super::lowering::Lowering;
use super::scratch;
use crate::kernels::KernelFile;
use crate::launch::Launch;

/// The longest row, or run of one, that a block sorts in shared memory.
pub(super) const MAX_SORTED_IN_BLOCK: usize = 4096;

impl Lowering<'_> {
    /// The indices of each row in sorted order: runs that fit into shared memory are sorted by blocks, then merged.
    pub(super) fn sort(&mut self, node: NodeId) -> Result<(), BackendError> {
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
}

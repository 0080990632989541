//! Matmuls with the rows of active neurons.

use quadriga_graph::{DType, NodeId, Tensor};
use quadriga_runtime::BackendError;

use super::lowering::Lowering;
use crate::kernels::KernelFile;
use crate::launch::{Launch, TensorArg, has_dense_rows};

/// Rows of a block of `k_mul_mat_sparse`, and tokens of a warp.
const ROW_WARPS: u64 = 8;
const TOKENS: u64 = 8;
/// Rows that a block of `k_axpy_sparse` sums, and its threads, with four columns each.
const CHUNK_ROWS: usize = 256;
const THREADS: u32 = 256;

/// Bytes of the sums of each chunk of rows, for as many tokens as are computed at a time.
pub(super) fn chunk_bytes(rows: usize, columns: usize, tokens: usize) -> [usize; 1] {
    [rows.div_ceil(CHUNK_ROWS).saturating_mul(columns).saturating_mul(4 * tokens.min(TOKENS as usize))]
}

/// Whether kernels can load four elements of a row at a time.
fn is_fast(w: &TensorArg) -> bool {
    let of = |dtype: DType, alignment: u64| has_dense_rows(w, dtype, alignment);
    let aligned = of(DType::F32, 16)
        || of(DType::F16, 8)
        || of(DType::BF16, 8)
        || of(DType::Q8_0, 2)
        || of(DType::Q4_0, 2);
    aligned && w.dims[3] % 4 == 0
}

impl Lowering<'_> {
    pub(super) fn mul_mat_sparse(&mut self, node: NodeId) -> Result<(), BackendError> {
        let (inputs, out) = self.operands(node)?;
        let [w, x, gates, ids @ ..] = inputs.as_slice() else {
            return Err(self.failed(node, "three inputs are needed"));
        };
        let ids = ids.first().copied().unwrap_or_default();
        let fast = is_fast(w) && has_dense_rows(x, DType::F32, 16);
        let (faults, fault) = self.fault(node, "the number of a neuron is out of range");
        let function = self.function(KernelFile::Sparse, c"k_mul_mat_sparse")?;
        let blocks = u32::try_from((w.dims[2] as u64).div_ceil(ROW_WARPS));
        let blocks = blocks.map_err(|_| self.failed(node, "too many rows"))?;
        let launch = Launch::new(function, [blocks, 1, 1], ROW_WARPS as u32 * 32);
        let launch = launch.grid_y((out.dims[2] as u64).div_ceil(TOKENS) as u32);
        let launch = launch.arg(*w).arg(*x).arg(*gates).arg(ids).arg(out);
        self.push(launch.arg(i32::from(fast)).arg(i32::from(self.inner.skip)).arg(faults).arg(fault));
        Ok(())
    }

    pub(super) fn axpy_sparse(&mut self, node: NodeId) -> Result<(), BackendError> {
        let (inputs, out) = self.operands(node)?;
        let [w, factors] = inputs.as_slice() else { return Err(self.failed(node, "two inputs are needed")) };
        let (w, factors) = (*w, *factors);
        let [_, _, rows, columns] = w.dims;
        let tokens = out.dims[2] as u64;
        let chunks = (rows as usize).div_ceil(CHUNK_ROWS).max(1) as u64;
        let [parts] = self.scratch(node, chunk_bytes(rows as usize, columns as usize, tokens as usize))?;
        let sum = self.function(KernelFile::Sparse, c"k_axpy_sparse")?;
        let add = self.function(KernelFile::Sparse, c"k_axpy_chunks")?;
        let row_bytes = columns as u64 * 4;
        for first in (0..tokens).step_by(TOKENS as usize) {
            let count = (tokens - first).min(TOKENS);
            let to = out.address + first * row_bytes;
            // One chunk is the result itself.
            let target = if chunks == 1 { to } else { parts };
            let tiles = (columns as u32).div_ceil(4 * THREADS);
            let launch = Launch::new(sum, [tiles, chunks as u32, count as u32], THREADS);
            let launch = launch.arg(w).arg(factors).arg(target).arg(first as i64);
            self.push(launch.arg(i32::from(is_fast(&w))).arg(i32::from(self.inner.skip)));
            if chunks > 1 {
                let launch = Launch::over(add, count * columns as u64).arg(parts).arg(to);
                self.push(launch.arg(chunks as i64).arg(columns).arg(count as i64));
            }
        }
        Ok(())
    }
}

/// Whether the grid of a matmul's kernel is within limits.
pub(super) fn fits(w: &Tensor, tokens: usize) -> bool {
    const MAX_GRID_Y: usize = 65_535;
    tokens.div_ceil(TOKENS as usize) <= MAX_GRID_Y && w.shape().rows().div_ceil(CHUNK_ROWS) <= MAX_GRID_Y
}

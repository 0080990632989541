//! Matmuls with the rows of active neurons.

use quadriga_graph::{DType, NodeId, Op, Tensor};
use quadriga_runtime::BackendError;

use super::formats::MAX_GEMV_ROWS;
use super::gemm::operand_type;
use super::lowering::Lowering;
use super::scratch;
use crate::buffer::overlap;
use crate::kernels::KernelFile;
use crate::launch::{Launch, TensorArg, has_dense_rows};

/// Rows of a block of `k_mul_mat_sparse`, its warps, and its tokens.
const ROWS: u64 = 32;
const WARPS: u32 = 8;
const TOKENS: u64 = 8;
/// Rows that a block of `k_axpy_sparse` sums, one for each thread, columns of a thread, and tokens of a launch.
const CHUNK_ROWS: usize = 128;
const CHUNK_COLUMNS: u32 = 8;
const CHUNK_TOKENS: u64 = 4;
/// Columns and threads of a block of `k_axpy_chunks`.
const ADD_COLUMNS: u32 = 32;
const ADD_THREADS: u32 = 256;

/// Bytes of the sums of each chunk of rows, for as many tokens as are computed at a time.
pub(super) fn chunk_bytes(rows: usize, columns: usize, tokens: usize) -> [usize; 1] {
    [rows.div_ceil(CHUNK_ROWS).saturating_mul(columns).saturating_mul(4 * tokens.min(CHUNK_TOKENS as usize))]
}

/// The largest grid in y.
const MAX_GRID_Y: usize = 65_535;

/// The share of neurons that a token is assumed to activate.
const ACTIVE: f64 = 0.1;

/// Whether GEMM reads no more memory for all rows than the kernels do for the rows of each token's active neurons: the row, and
/// what is `written` of it in another type, once, and read again.
fn pays(weight: &Tensor, tokens: usize, written: usize) -> bool {
    let read = weight.dtype().row_bytes(weight.shape().cols()).unwrap_or(0);
    tokens > MAX_GEMV_ROWS && tokens as f64 * ACTIVE * read as f64 >= (read + 2 * written) as f64
}

/// Whether so many tokens are multiplied with all rows.
pub(super) fn multiplies_all_rows(weight: &Tensor, tokens: usize) -> bool {
    let is_operand = matches!(weight.dtype(), DType::F16 | DType::F32);
    pays(weight, tokens, if is_operand { 0 } else { 2 * weight.shape().cols() })
}

/// Whether all rows are added for so many tokens, by GEMM with their transposed matrix.
pub(super) fn adds_all_rows(weight: &Tensor, tokens: usize) -> bool {
    let size = if weight.dtype() == DType::F32 { 4 } else { 2 };
    pays(weight, tokens, size * weight.shape().cols())
}

/// Whether kernels can load eight elements of a row at a time.
fn is_fast(w: &TensorArg) -> bool {
    let of = |dtype: DType, alignment: u64| has_dense_rows(w, dtype, alignment);
    let aligned = of(DType::F32, 16)
        || of(DType::F16, 16)
        || of(DType::BF16, 16)
        || of(DType::Q8_0, 2)
        || of(DType::Q4_0, 2);
    aligned && w.dims[3] % 8 == 0
}

impl Lowering<'_> {
    /// Whether the matmul that follows a ReLU, and alone reads its result, applies it: both are at the same address, so that the
    /// gates before ReLU are still there.
    pub(super) fn leaves_relu_to_matmul(&mut self, at: usize, node: NodeId) -> Result<bool, BackendError> {
        let ([x], out) = (self.graph.inputs(node), self.graph[node].output()) else { return Ok(false) };
        let reads = |next: &NodeId| {
            let gates = self.graph.inputs(*next).iter().position(|input| *input == out);
            matches!(self.graph[*next].op(), Op::MulMatSparse { .. }) && gates == Some(2)
        };
        if !self.inner.fusion || self.only_reader(at, out).filter(reads).is_none() {
            return Ok(false);
        }
        let is_alike = self.tensor(*x).same_layout(self.tensor(out)) && self.tensor(*x).dtype() == DType::F32;
        let in_place = self.place(node, *x)?.1 == self.place(node, out)?.1;
        if is_alike && in_place {
            self.unrectified = Some(out);
        }
        Ok(is_alike && in_place)
    }

    pub(super) fn mul_mat_sparse(&mut self, node: NodeId) -> Result<(), BackendError> {
        let (inputs, out) = self.operands(node)?;
        let [w, x, gates, ids @ ..] = inputs.as_slice() else {
            return Err(self.failed(node, "three inputs are needed"));
        };
        let (w, x, gates) = (*w, *x, *gates);
        let gates_are = self.graph.inputs(node).get(2).copied();
        let rectify = i32::from(self.unrectified.is_some() && self.unrectified.take() == gates_are);
        if let ([weight, rows, _], true) =
            (self.graph.inputs(node), self.has_gemm(w.dims[2] as usize, w.dims[3] as usize, w.address))
            && multiplies_all_rows(self.tensor(*weight), out.dims[2] as usize)
            && self.tensor(*weight).is_contiguous()
        {
            self.plain_gemm(node, *weight, *rows, (w, x))?;
            let gate = self.function(KernelFile::Sparse, c"k_gate_products")?;
            self.push(Launch::over(gate, out.elements()).arg(gates).arg(out.address).arg(rectify));
            return Ok(());
        }
        let ids = ids.first().copied().unwrap_or_default();
        let fast = is_fast(&w) && has_dense_rows(&x, DType::F32, 16);
        let (faults, fault) = self.fault(node, "the number of a neuron is out of range");
        let function = self.function(KernelFile::Sparse, c"k_mul_mat_sparse")?;
        let blocks = u32::try_from((w.dims[2] as u64).div_ceil(ROWS));
        let blocks = blocks.map_err(|_| self.failed(node, "too many rows"))?;
        let launch = Launch::new(function, [blocks, 1, 1], WARPS * 32).dependent();
        let launch = launch.grid_y((out.dims[2] as u64).div_ceil(TOKENS) as u32);
        let launch = launch.arg(w).arg(x).arg(gates).arg(ids).arg(out);
        let launch = launch.arg(i32::from(fast)).arg(i32::from(self.inner.skip)).arg(rectify);
        self.push(launch.arg(faults).arg(fault));
        Ok(())
    }

    pub(super) fn axpy_sparse(&mut self, at: usize, node: NodeId) -> Result<(), BackendError> {
        let (inputs, out) = self.operands(node)?;
        let ([w, factors], [weight, _]) = (inputs.as_slice(), self.graph.inputs(node)) else {
            return Err(self.failed(node, "two inputs are needed"));
        };
        let (w, factors, weight) = (*w, *factors, *weight);
        let [_, _, rows, columns] = w.dims;
        let tokens = out.dims[2] as u64;
        // The operand of GEMM is the transposed slab, which is aligned.
        if adds_all_rows(self.tensor(weight), tokens as usize)
            && self.has_gemm(columns as usize, rows as usize, 0)
            && (rows as usize).div_ceil(scratch::TRANSPOSE_TILE) <= MAX_GRID_Y
        {
            let operand = operand_type(self.tensor(weight).dtype(), self.inner.gemm_kernels());
            return self.transposed_gemm(node, w, factors, operand);
        }
        let chunks = (rows as usize).div_ceil(CHUNK_ROWS).max(1) as u64;
        let [parts] = self.scratch(node, chunk_bytes(rows as usize, columns as usize, tokens as usize))?;
        let sum = self.function(KernelFile::Sparse, c"k_axpy_sparse")?;
        let add = self.function(KernelFile::Sparse, c"k_axpy_chunks")?;
        let row_bytes = columns as u64 * 4;
        let (mut result, mut other) = (out.address, 0);
        if chunks > 1
            && self.inner.fusion
            && let Some((addition, addend)) = self.addend(at, self.graph[node].output())
        {
            // Rows and factors are read again for one group of tokens after the other.
            let to = self.place(node, self.graph[addition].output())?.1;
            let bytes = self.tensor(self.graph[addition].output()).bytes();
            let mut is_read_later = false;
            for input in self.graph.inputs(node) {
                let from = self.place(node, *input)?.1;
                is_read_later |= overlap(from, self.tensor(*input).bytes(), to, bytes);
            }
            if tokens <= CHUNK_TOKENS || !is_read_later {
                (result, other) = (to, self.place(node, addend)?.1);
                self.fuse(addition);
            }
        }
        for first in (0..tokens).step_by(CHUNK_TOKENS as usize) {
            let count = (tokens - first).min(CHUNK_TOKENS);
            let to = result + first * row_bytes;
            // One chunk is the result itself.
            let target = if chunks == 1 { to } else { parts };
            let tiles = (columns as u32).div_ceil(CHUNK_COLUMNS * CHUNK_ROWS as u32);
            let launch =
                Launch::new(sum, [tiles, chunks as u32, count as u32], CHUNK_ROWS as u32).dependent();
            let launch = launch.arg(w).arg(factors).arg(target).arg(first as i64);
            self.push(launch.arg(i32::from(is_fast(&w))).arg(i32::from(self.inner.skip)));
            if chunks > 1 {
                let addend = if other == 0 { 0 } else { other + first * row_bytes };
                let grid = [(columns as u32).div_ceil(ADD_COLUMNS), count as u32, 1];
                let launch = Launch::new(add, grid, ADD_THREADS).dependent().arg(parts).arg(to).arg(addend);
                self.push(launch.arg(chunks as i64).arg(columns));
            }
        }
        Ok(())
    }
}

/// Whether the grid of a matmul's kernel is within limits.
pub(super) fn fits(w: &Tensor, tokens: usize) -> bool {
    tokens.div_ceil(TOKENS as usize) <= MAX_GRID_Y && w.shape().rows().div_ceil(CHUNK_ROWS) <= MAX_GRID_Y
}

#[cfg(test)]
mod tests {
    use quadriga_graph::{GraphBuilder, Weight};

    use super::*;

    /// The least number of tokens for which GEMM takes all rows of a matrix.
    fn least(dtype: DType, takes: fn(&Tensor, usize) -> bool) -> usize {
        let g = GraphBuilder::new();
        g.output(
            "y",
            g.weight("w", Weight::new(dtype, [11008, 4096])).mul_mat(g.input("x", DType::F32, [1, 4096])),
        );
        let graph = g.finish().unwrap();
        let weight = &graph[graph.leaf("w").unwrap()];
        (1..).find(|tokens| takes(weight, *tokens)).unwrap()
    }

    #[test]
    fn gemm_takes_all_rows_where_it_reads_no_more_bytes() {
        for (dtype, of_products, of_sums) in [
            (DType::F32, 10, 30),
            (DType::F16, 10, 30),
            (DType::BF16, 30, 30),
            (DType::Q8_0, 48, 48),
            (DType::Q4_0, 82, 82),
        ] {
            assert_eq!(least(dtype, multiplies_all_rows), of_products, "{dtype}");
            assert_eq!(least(dtype, adds_all_rows), of_sums, "{dtype}");
        }
    }
}

//! Matrix multiplication.
//!
//! From two rows on, on Hopper: weights that are converted on the way to the tensor cores (mixed.rs). Elsewhere, up to
//! eight rows: GEMV kernels on packed weights, with the rows quantized to 8 bits; several weights that are
//! multiplied with the same rows share a launch, and a following addition is its epilogue. More rows: GEMM (gemm.rs).
//! Everything else: the generic kernel.

use quadriga_graph::{Binary, DType, NodeId, Op, TensorId, TensorKind};
use quadriga_runtime::{BackendError, Layout};

use super::formats::{MAX_GEMV_ROWS, PackedMatrix};
use super::lowering::Lowering;
use super::scratch;
use crate::blas::GemmKernels;
use crate::buffer::overlap;
use crate::kernels::KernelFile;
use crate::launch::{Argument, Launch, TensorArg};

/// Rows of a matrix that a block of the GEMV kernels takes.
const ROWS_PER_BLOCK: u32 = 8;
/// The most rows of a float matrix that has a block for each: with more, a warp for each fills the device.
const MAX_BLOCK_ROWS: u64 = 512;
/// Rows and columns of a tile of gemm_heads.cu.
const HEADS_TILE: u64 = 64;
/// The fewest rows for which its tiles are faster than a warp for each result.
const MIN_HEADS_ROWS: u64 = 16;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Segment {
    quants: u64,
    scales: u64,
    out: u64,
    add: u64,
    rows: u32,
    first: u32,
    stride: i64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Segments {
    all: [Segment; 3],
    count: u32,
    blocks: u32,
}

// SAFETY: `struct Segments` of matmul.cu has the same fields in the same order.
unsafe impl Argument for Segments {}

impl Lowering<'_> {
    pub(super) fn mul_mat(&mut self, at: usize, node: NodeId) -> Result<(), BackendError> {
        let [weight, x] = *self.graph.inputs(node) else {
            return Err(self.failed(node, "two inputs are needed"));
        };
        let rows = self.tensor(x).shape().rows();
        if rows == 1 && self.gemv_streamed(at, x, None)? || rows > 1 && self.mixed_gemm(at, x, None)? {
            return Ok(());
        }
        let (place, address) = self.place(node, weight)?;
        let packed = match place.layout {
            Layout::Packed(_) => PackedMatrix::of(self.tensor(weight)),
            Layout::Plain => None,
        };
        match packed {
            Some(packed) if rows <= MAX_GEMV_ROWS => self.packed_gemv(at, node, packed, x),
            Some(packed) if self.inner.gemm_kernels() == GemmKernels::OwnF32 => {
                self.packed_gemv_batches(node, packed, weight, x)
            }
            Some(packed) => self.packed_gemm(node, packed, address, weight, x),
            None if place.layout != Layout::Plain => Err(self.failed(node, "unknown weight layout")),
            None => self.plain_matmul(at, node, weight, x),
        }
    }

    /// The next node, if it adds a tensor of equal layout (a residual or bias) to a result, and that tensor.
    pub(super) fn addend(&self, at: usize, result: TensorId) -> Option<(NodeId, TensorId)> {
        let next = self.only_reader(at, result)?;
        let [a, b] = *self.graph.inputs(next) else { return None };
        if !matches!(self.graph[next].op(), Op::Binary(Binary::Add)) {
            return None;
        }
        let other = if a == result { b } else { a };
        let (r, o) = (self.tensor(result), self.tensor(other));
        (r.same_layout(o) && r.is_contiguous()).then_some((next, other))
    }

    /// Up to eight rows times a packed weight, in one launch with the next matmuls of the same rows.
    fn packed_gemv(
        &mut self,
        at: usize,
        node: NodeId,
        packed: PackedMatrix,
        x: TensorId,
    ) -> Result<(), BackendError> {
        let rows = self.tensor(x).shape().rows();
        let (quants, scales) = self.quantize(node, x, packed.blocks, rows.next_power_of_two())?;
        let mut segments = Segments { blocks: packed.blocks as u32, ..Segments::default() };
        let mut first = 0;
        let mut group = vec![(at, node)];
        let split = self.split;
        for (later_at, later) in split.nodes.iter().enumerate().skip(at + 1) {
            let op = self.graph[*later].op();
            if op.is_view() {
                continue;
            }
            let same = matches!(op, Op::MulMat)
                && self.graph.inputs(*later).get(1) == Some(&x)
                && self.graph.inputs(*later).first().is_some_and(|w| {
                    self.place(*later, *w).is_ok_and(|(place, _)| place.layout != Layout::Plain)
                        && PackedMatrix::of(self.tensor(*w)).is_some_and(|p| p.format == packed.format)
                });
            if !same || group.len() == segments.all.len() {
                break;
            }
            group.push((later_at, *later));
        }
        for ((at, member), slot) in group.iter().zip(segments.all.iter_mut()) {
            let Some(weight) = self.graph.inputs(*member).first().copied() else { continue };
            let (_, address) = self.place(*member, weight)?;
            let Some(layout) = PackedMatrix::of(self.tensor(weight)) else { continue };
            let mut output = self.graph[*member].output();
            let mut add = 0;
            // Only a matmul that is alone has its addition next; in a group, other matmuls come between.
            if group.len() == 1
                && let Some((sum, other)) = self.addend(*at, output)
            {
                add = self.place(*member, other)?.1;
                output = self.graph[sum].output();
                self.fuse(sum);
            }
            let (_, out) = self.place(*member, output)?;
            let n = self.tensor(weight).shape().rows() as u32;
            *slot = Segment {
                quants: address,
                scales: address + layout.scales_at as u64,
                out,
                add,
                rows: n,
                first,
                stride: i64::from(n),
            };
            first += n.div_ceil(ROWS_PER_BLOCK);
            segments.count += 1;
            self.fuse(*member);
        }
        let name = packed.format.gemv(rows).ok_or_else(|| self.failed(node, "unknown weight layout"))?;
        let function = self.function(KernelFile::Matmul, name)?;
        self.push(
            Launch::new(function, [first, 1, 1], 128).arg(segments).arg(quants).arg(scales).arg(rows as u32),
        );
        Ok(())
    }

    /// Quantizes the rows of `x` to 8 bits at the start of scratch memory, with room for `capacity` rows.
    fn quantize(
        &mut self,
        node: NodeId,
        x: TensorId,
        blocks: usize,
        capacity: usize,
    ) -> Result<(u64, u64), BackendError> {
        let known = self.quantized == Some(x);
        let [quants, scales] = self.scratch(node, scratch::quantized(capacity, blocks))?;
        self.quantized = Some(x);
        if !known {
            let rows = self.tensor_arg(node, x)?;
            let function = self.function(KernelFile::Matmul, c"k_quantize_q8")?;
            let threads = rows.rows() * blocks as u64 * 8;
            self.push(Launch::over(function, threads).arg(rows).arg(quants).arg(scales).arg(blocks as i64));
        }
        Ok((quants, scales))
    }

    /// Many rows times a packed weight, eight rows at a time: where there is neither cuBLAS nor mma of bf16.
    fn packed_gemv_batches(
        &mut self,
        node: NodeId,
        packed: PackedMatrix,
        weight: TensorId,
        x: TensorId,
    ) -> Result<(), BackendError> {
        let m = self.tensor(x).shape().rows();
        let (quants, scales) = self.quantize(node, x, packed.blocks, m.next_multiple_of(MAX_GEMV_ROWS))?;
        let address = self.place(node, weight)?.1;
        let out = self.tensor_arg(node, self.graph[node].output())?;
        let n = self.tensor(weight).shape().rows() as u32;
        let name = packed.format.gemv(MAX_GEMV_ROWS);
        let name = name.ok_or_else(|| self.failed(node, "unknown weight layout"))?;
        let function = self.function(KernelFile::Matmul, name)?;
        for first in (0..m).step_by(MAX_GEMV_ROWS) {
            let segment = Segment {
                quants: address,
                scales: address + packed.scales_at as u64,
                out: out.address + (first * n as usize * 4) as u64,
                add: 0,
                rows: n,
                first: 0,
                stride: i64::from(n),
            };
            let mut segments = Segments { count: 1, blocks: packed.blocks as u32, ..Segments::default() };
            segments.all[0] = segment;
            self.push(
                Launch::new(function, [n.div_ceil(ROWS_PER_BLOCK), 1, 1], 128)
                    .arg(segments)
                    .arg(quants + (first * packed.blocks * 32) as u64)
                    .arg(scales + (first * packed.blocks * 8) as u64)
                    .arg((m - first).min(MAX_GEMV_ROWS) as u32),
            );
        }
        Ok(())
    }

    /// Weights in their file format.
    fn plain_matmul(
        &mut self,
        at: usize,
        node: NodeId,
        weight: TensorId,
        x: TensorId,
    ) -> Result<(), BackendError> {
        let (w, rows) = (self.tensor_arg(node, weight)?, self.tensor_arg(node, x)?);
        let (wt, xt) = (self.tensor(weight), self.tensor(x));
        let flat = wt.dims4()[0] == 1 && wt.dims4()[1] == 1 && wt.is_contiguous();
        let float = matches!(wt.dtype(), DType::F16 | DType::BF16 | DType::F32);
        let (m, k) = (xt.shape().rows(), xt.shape().cols());
        let aligned = k.is_multiple_of(8) && w.address.is_multiple_of(16) && rows.address.is_multiple_of(16);
        if flat && float && m <= MAX_GEMV_ROWS && aligned && xt.dtype() == DType::F32 && xt.is_contiguous() {
            return self.float_gemv(at, node, weight, x, w, rows);
        }
        if flat && m > MAX_GEMV_ROWS && self.has_gemm(wt.shape().rows(), k, w.address) {
            return self.plain_gemm(node, weight, x, (w, rows));
        }
        let out = self.tensor_arg(node, self.graph[node].output())?;
        if let Some(grid) = self.heads_grid(&out, k) {
            let function = self.function(KernelFile::GemmHeads, c"k_gemm_heads")?;
            self.push(Launch::new(function, grid, 128).dependent().arg(w).arg(rows).arg(out));
            return Ok(());
        }
        let function = self.function(KernelFile::Matmul, c"k_mul_mat")?;
        let blocks =
            u32::try_from(out.elements().div_ceil(8)).map_err(|_| self.failed(node, "too many results"))?;
        self.push(Launch::new(function, [blocks, 1, 1], 256).arg(w).arg(rows).arg(out));
        Ok(())
    }

    /// The grid of the tensor-core kernel for several heads; `None` where there are too few rows or columns to fill its tiles.
    fn heads_grid(&self, out: &TensorArg, k: usize) -> Option<[u32; 3]> {
        let [b, h, m, n] = out.dims.map(|extent| extent as u64);
        let tiles = |extent: u64| u32::try_from(extent.div_ceil(HEADS_TILE)).ok();
        let is_long = m >= MIN_HEADS_ROWS && n >= MIN_HEADS_ROWS && k >= 16;
        let has_mma = self.inner.context.compute_capability >= (8, 0);
        let grid = [tiles(n)?, tiles(m)?, u32::try_from(b.checked_mul(h)?).ok()?];
        let fits = grid.iter().skip(1).all(|blocks| (1..=65_535).contains(blocks));
        (is_long && has_mma && fits).then_some(grid)
    }

    fn float_gemv(
        &mut self,
        at: usize,
        node: NodeId,
        weight: TensorId,
        x: TensorId,
        w: TensorArg,
        rows: TensorArg,
    ) -> Result<(), BackendError> {
        let mut output = self.graph[node].output();
        let mut add = 0;
        if let Some((sum, other)) = self.addend(at, output) {
            let (_, from) = self.place(node, x)?;
            let (_, to) = self.place(node, self.graph[sum].output())?;
            let bytes = self.tensor(self.graph[sum].output()).bytes();
            // The rows are read until the end: the sum must not overlap them.
            if !overlap(from, self.tensor(x).bytes(), to, bytes) {
                add = self.place(node, other)?.1;
                output = self.graph[sum].output();
                self.fuse(sum);
            }
        }
        let out = self.tensor_arg(node, output)?;
        let m = self.tensor(x).shape().rows();
        let n = self.tensor(weight).shape().rows() as u64;
        let few = n <= MAX_BLOCK_ROWS && self.tensor(weight).kind() == TensorKind::Weight;
        if m == 1 && few && self.inner.fusion {
            let function = self.function(KernelFile::Matmul, c"k_gemv_float_block")?;
            let launch = Launch::new(function, [n as u32, 1, 1], 128).dependent();
            self.push(launch.arg(w).arg(rows.address).arg(out.address).arg(add));
            return Ok(());
        }
        let name = match m.next_power_of_two() {
            1 => c"k_gemv_float_m1",
            2 => c"k_gemv_float_m2",
            4 => c"k_gemv_float_m4",
            _ => c"k_gemv_float_m8",
        };
        let function = self.function(KernelFile::Matmul, name)?;
        let launch = Launch::new(function, [n.div_ceil(4) as u32, 1, 1], 128);
        self.push(launch.arg(w).arg(rows).arg(out).arg(add).arg(m as u32));
        Ok(())
    }
}

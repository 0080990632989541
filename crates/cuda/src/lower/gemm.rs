//! GEMM: a weight times more rows than the GEMV kernels take.
//!
//! Both operands are converted to one type, the weight a slab of rows at a time, and multiplied on tensor cores: by
//! cuBLAS where it is installed, otherwise by this crate's kernels, with wgmma on Hopper and mma elsewhere. Devices
//! before compute capability 8.0 have no mma of bf16; there, without cuBLAS, operands are f32.

use std::ffi::CStr;

use quadriga_graph::{DType, NodeId, TensorId};
use quadriga_runtime::BackendError;

use super::formats::{self, PackedMatrix};
use super::lowering::Lowering;
use super::op_codes::ConvertTo;
use super::scratch;
use crate::blas::{Gemm, GemmKernels, OperandType};
use crate::kernels::KernelFile;
use crate::launch::{Argument, Launch, TensorArg, is_dense_f32};
use crate::program::ProgramStep;
use crate::tensor_map::TensorMap;

/// Rows and columns of a block's results.
const TILE: u32 = scratch::GEMM_TILE as u32;
/// The largest grid in y.
const MAX_TILES: usize = 65_535;
/// Threads of a block of `k_add_odd_rows`, and its tokens.
const ODD_THREADS: u32 = 256;
const ODD_TOKENS: usize = 64;
/// Shared memory of a block with mma: four slots of both operands' tiles, 32 columns wide.
const MMA_SHARED_BYTES: u32 = 4 * 2 * TILE * 32 * 2;
/// The same with wgmma: six slots, 64 columns wide, and what aligning them may cost.
const WGMMA_SHARED_BYTES: u32 = 6 * 2 * TILE * 64 * 2 + 1024;

/// `struct GemmWork` of gemm.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct GemmWork {
    x: u64,
    w: u64,
    result: GemmResult,
}

// SAFETY: `struct GemmWork` of gemm.cu has the same fields in the same order.
unsafe impl Argument for GemmWork {}

/// `struct GemmResult` of gemm_wgmma.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct GemmResult {
    out: u64,
    scales: u64,
    m: u32,
    n: u32,
    k: u32,
    stride: u32,
}

// SAFETY: `struct GemmResult` of gemm_wgmma.cu has the same fields in the same order.
unsafe impl Argument for GemmResult {}

/// The type that both operands of a GEMM are converted to.
pub(super) fn operand_type(weight: DType, kernels: GemmKernels) -> OperandType {
    match weight {
        DType::F32 => OperandType::F32,
        _ if kernels == GemmKernels::OwnF32 => OperandType::F32,
        DType::F16 => OperandType::F16,
        _ => OperandType::Bf16,
    }
}

impl Lowering<'_> {
    /// Whether the GEMM kernels take a contiguous weight: cuBLAS all, this crate's those with rows of whole 16-byte
    /// words.
    pub(super) fn has_gemm(&self, n: usize, k: usize, address: u64) -> bool {
        let own = k.is_multiple_of(8) && address.is_multiple_of(16) && n <= MAX_TILES * TILE as usize;
        // With few columns, a launch costs more than it gains.
        k >= 16 && (own || self.inner.gemm_kernels() == GemmKernels::Cublas)
    }

    /// Many rows times a packed weight, converted to bf16.
    pub(super) fn packed_gemm(
        &mut self,
        node: NodeId,
        packed: PackedMatrix,
        address: u64,
        weight: TensorId,
        x: TensorId,
    ) -> Result<(), BackendError> {
        let function = self.function(KernelFile::Pack, c"k_unpack_bf16")?;
        let (quants, scales) = (address, address + packed.scales_at as u64);
        self.gemm_by_slabs(node, weight, x, OperandType::Bf16, |first, rows, to| {
            let blocks = (rows * packed.blocks) as u64;
            Launch::over(function, blocks * 4)
                .arg(quants)
                .arg(scales)
                .arg(packed.format.code())
                .arg(first as i64)
                .arg(rows as i64)
                .arg(packed.blocks as i64)
                .arg(to)
        })
    }

    /// Many rows times a weight in its file format.
    pub(super) fn plain_gemm(
        &mut self,
        node: NodeId,
        weight: TensorId,
        x: TensorId,
        (w, rows): (TensorArg, TensorArg),
    ) -> Result<(), BackendError> {
        let (dtype, k) = (self.tensor(weight).dtype(), self.tensor(weight).shape().cols());
        let operand = operand_type(dtype, self.inner.gemm_kernels());
        if operand == OperandType::F16 {
            return self.f16_gemm(node, x, w, rows);
        }
        if operand == OperandType::Bf16
            && let Some(name) = formats::to_bf16(dtype)
        {
            let function = self.function(KernelFile::Pack, name)?;
            return self.gemm_by_slabs(node, weight, x, operand, |first, count, to| {
                Launch::over(function, (count * k / 8) as u64)
                    .arg(w)
                    .arg(first as i64)
                    .arg(count as i64)
                    .arg(to)
            });
        }
        let function = self.function(KernelFile::Pack, c"k_convert_rows")?;
        let mode = convert_to(operand) as i32;
        self.gemm_by_slabs(node, weight, x, operand, |first, count, to| {
            Launch::over(function, (count * k) as u64)
                .arg(w)
                .arg(first as i64)
                .arg(count as i64)
                .arg(to)
                .arg(mode)
        })
    }

    /// Converts a slab of the weight's rows at a time to the operand type, and multiplies.
    fn gemm_by_slabs(
        &mut self,
        node: NodeId,
        weight: TensorId,
        x: TensorId,
        operand: OperandType,
        unpack: impl Fn(usize, usize, u64) -> Launch,
    ) -> Result<(), BackendError> {
        let out = self.tensor_arg(node, self.graph[node].output())?;
        let source = self.tensor_arg(node, x)?;
        let (n, k, m) =
            (self.tensor(weight).shape().rows(), self.tensor(weight).shape().cols(), source.rows() as usize);
        let size = if operand == OperandType::F32 { 4 } else { 2 };
        // As much as forecasts have left for it.
        let left = self.scratch_bytes.saturating_sub(scratch::total_bytes([m.saturating_mul(k * size)]));
        let slab = left.min(scratch::SLAB_BYTES) / scratch::ALIGNMENT * scratch::ALIGNMENT;
        let per_slab = scratch::rows_per_slab(k, size, n, slab);
        let converted = self.converted == Some((x, operand));
        let [rows, weights] = self.scratch(node, scratch::operands(m, k, size, n, slab))?;
        self.converted = Some((x, operand));
        if !converted {
            let launch = if operand == OperandType::Bf16 && is_dense_f32(&source) && k.is_multiple_of(8) {
                let eights = (m * k / 8) as u64;
                let function = self.function(KernelFile::Pack, c"k_f32_to_bf16")?;
                Launch::over(function, eights).arg(source.address).arg(eights).arg(rows)
            } else {
                let function = self.function(KernelFile::Pack, c"k_convert_rows")?;
                let mode = convert_to(operand) as i32;
                let launch = Launch::over(function, (m * k) as u64).arg(source).arg(0i64).arg(m as i64);
                launch.arg(rows).arg(mode)
            };
            self.push(launch);
        }
        for first in (0..n).step_by(per_slab) {
            let count = per_slab.min(n - first);
            self.push(unpack(first, count, weights));
            let gemm = Gemm {
                m,
                n: count,
                k,
                w: weights,
                x: rows,
                out: out.address + 4 * first as u64,
                out_stride: n,
                operand,
                workspace: self.workspace,
            };
            self.multiply(gemm, None)?;
        }
        Ok(())
    }

    /// Many rows times an f16 weight, which is read in place.
    fn f16_gemm(
        &mut self,
        node: NodeId,
        source: TensorId,
        w: TensorArg,
        x: TensorArg,
    ) -> Result<(), BackendError> {
        let out = self.tensor_arg(node, self.graph[node].output())?;
        let (m, n, k) = (x.rows() as usize, w.rows() as usize, x.dims[3] as usize);
        let converted = self.converted == Some((source, OperandType::F16));
        let [rows, scales] = self.scratch(node, scratch::f16_rows(m, k))?;
        self.converted = Some((source, OperandType::F16));
        if !converted {
            let narrow = self.function(KernelFile::Pack, c"k_f32_to_f16_scaled")?;
            self.push(Launch::new(narrow, [m as u32, 1, 1], 256).arg(x).arg(rows).arg(scales));
        }
        let gemm = Gemm {
            m,
            n,
            k,
            w: w.address,
            x: rows,
            out: out.address,
            out_stride: n,
            operand: OperandType::F16,
            workspace: self.workspace,
        };
        self.multiply(gemm, Some(scales))
    }

    /// Many rows times a weight whose columns are transposed, a slab at a time: `[m, k] · [k, n]`. Elements of the weight that are
    /// infinite or NaN count only for rows that use them: columns of tiles with any are computed again, by their definition.
    pub(super) fn transposed_gemm(
        &mut self,
        node: NodeId,
        w: TensorArg,
        x: TensorArg,
        operand: OperandType,
    ) -> Result<(), BackendError> {
        let out = self.tensor_arg(node, self.graph[node].output())?;
        let (m, k, n) = (x.rows() as usize, w.dims[2] as usize, w.dims[3] as usize);
        let size = operand.bytes();
        let [rows, row_scales, slab, odd] =
            self.scratch(node, scratch::transposed_operands(m, k, size, n))?;
        let scales = (operand == OperandType::F16).then_some(row_scales);
        let convert = if operand == OperandType::F16 {
            let narrow = self.function(KernelFile::Pack, c"k_f32_to_f16_scaled")?;
            Launch::new(narrow, [m as u32, 1, 1], 256).arg(x).arg(rows).arg(row_scales)
        } else {
            let function = self.function(KernelFile::Pack, c"k_convert_rows")?;
            let launch = Launch::over(function, (m * k) as u64).arg(x).arg(0i64).arg(m as i64);
            launch.arg(rows).arg(convert_to(operand) as i32)
        };
        self.push(convert);
        let function = self.function(KernelFile::Sparse, c"k_transpose_rows")?;
        let tiles = |extent: usize| extent.div_ceil(scratch::TRANSPOSE_TILE) as u32;
        let per_slab = scratch::columns_per_slab(k, size, n);
        let scales_rows = self.inner.gemm_kernels() == GemmKernels::Cublas;
        for first in (0..n).step_by(per_slab) {
            let count = per_slab.min(n - first);
            let launch =
                Launch::new(function, [tiles(count), tiles(k), 1], scratch::TRANSPOSE_TILE as u32 * 8);
            let launch = launch.arg(w).arg(first as i64).arg(count as i64).arg(slab);
            self.push(launch.arg(operand.dtype().id()).arg(odd));
            let gemm = Gemm {
                m,
                n: count,
                k,
                w: slab,
                x: rows,
                out: out.address + 4 * first as u64,
                out_stride: n,
                operand,
                workspace: self.workspace,
            };
            self.multiply(gemm, scales.filter(|_| !scales_rows))?;
        }
        // Rows of the result are whole now.
        if let Some(scales) = scales.filter(|_| scales_rows) {
            let widen = self.function(KernelFile::Pack, c"k_scale_rows")?;
            let launch = Launch::new(widen, [m as u32, 1, 1], 256);
            self.push(launch.arg(out.address).arg(scales).arg(n as i64));
        }
        let exact = self.function(KernelFile::Sparse, c"k_add_odd_rows")?;
        let launch = Launch::new(exact, [tiles(n), m.div_ceil(ODD_TOKENS) as u32, 1], ODD_THREADS);
        self.push(launch.arg(w).arg(x).arg(out.address).arg(odd).arg(m as i64));
        Ok(())
    }

    /// Multiplies, and each row of the result with its scale.
    fn multiply(&mut self, gemm: Gemm, scales: Option<u64>) -> Result<(), BackendError> {
        if self.inner.gemm_kernels() != GemmKernels::Cublas {
            let launch = self.own_gemm(&gemm, scales.unwrap_or(0))?;
            self.push(launch.dependent());
            return Ok(());
        }
        self.push_step(ProgramStep::Gemm(gemm));
        if let Some(scales) = scales {
            let widen = self.function(KernelFile::Pack, c"k_scale_rows")?;
            let launch = Launch::new(widen, [gemm.m as u32, 1, 1], 256);
            self.push(launch.arg(gemm.out).arg(scales).arg(gemm.n as i64));
        }
        Ok(())
    }

    fn own_gemm(&self, gemm: &Gemm, scales: u64) -> Result<Launch, BackendError> {
        let Gemm { m, n, k, w, x, out, operand, .. } = *gemm;
        let result =
            GemmResult { out, scales, m: m as u32, n: n as u32, k: k as u32, stride: gemm.out_stride as u32 };
        let [tiles_m, tiles_n] = [result.m.div_ceil(TILE), result.n.div_ceil(TILE)];
        let kernels = &self.inner.kernels;
        if operand == OperandType::F32 {
            let function = kernels.function(KernelFile::Gemm, c"k_gemm_f32")?;
            let launch = Launch::new(function, [tiles_m, tiles_n, 1], 256);
            return Ok(launch.arg(GemmWork { x, w, result }));
        }
        if !kernels.has_wgmma() {
            let name = if operand == OperandType::F16 { c"k_gemm_f16" } else { c"k_gemm_bf16" };
            let function = kernels.function_with_shared_memory(KernelFile::Gemm, name, MMA_SHARED_BYTES)?;
            let launch = Launch::new(function, [tiles_m, tiles_n, 1], 256).shared_bytes(MMA_SHARED_BYTES);
            return Ok(launch.arg(GemmWork { x, w, result }));
        }
        // Two blocks with the same rows of the weight load them together.
        let pair = tiles_m > 1;
        let cluster = if pair { 2 } else { 1 };
        let context = &self.inner.context;
        let rows = TensorMap::of_rows(context, x, (m, k), operand, TILE)?;
        let weight = TensorMap::of_rows(context, w, (n, k), operand, TILE / cluster)?;
        let name = wgmma_kernel(operand, pair);
        let function =
            kernels.function_with_shared_memory(KernelFile::GemmWgmma, name, WGMMA_SHARED_BYTES)?;
        let grid = [tiles_m.next_multiple_of(cluster), tiles_n, 1];
        let launch = Launch::new(function, grid, 288).shared_bytes(WGMMA_SHARED_BYTES);
        Ok(launch.arg(rows).arg(weight).arg(result))
    }
}

fn wgmma_kernel(operand: OperandType, pair: bool) -> &'static CStr {
    match (operand, pair) {
        (OperandType::F16, false) => c"k_gemm_f16_wgmma",
        (OperandType::F16, true) => c"k_gemm_f16_wgmma_pair",
        (_, false) => c"k_gemm_bf16_wgmma",
        (_, true) => c"k_gemm_bf16_wgmma_pair",
    }
}

fn convert_to(operand: OperandType) -> ConvertTo {
    if operand == OperandType::F32 { ConvertTo::F32 } else { ConvertTo::Bf16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_keep_the_precision_of_weights_that_the_kernels_take() {
        for kernels in [GemmKernels::Cublas, GemmKernels::OwnF32] {
            assert_eq!(operand_type(DType::F32, kernels), OperandType::F32);
        }
        assert_eq!(operand_type(DType::F16, GemmKernels::Cublas), OperandType::F16);
        assert_eq!(operand_type(DType::Q4_0, GemmKernels::Cublas), OperandType::Bf16);
        assert_eq!(operand_type(DType::F16, GemmKernels::OwnF32), OperandType::F32);
        assert_eq!(operand_type(DType::Q4_0, GemmKernels::OwnF32), OperandType::F32);
    }

    #[test]
    fn kernels_are_named_by_operand_and_cluster() {
        assert_eq!(wgmma_kernel(OperandType::F16, false), c"k_gemm_f16_wgmma");
        assert_eq!(wgmma_kernel(OperandType::F16, true), c"k_gemm_f16_wgmma_pair");
        assert_eq!(wgmma_kernel(OperandType::Bf16, false), c"k_gemm_bf16_wgmma");
        assert_eq!(wgmma_kernel(OperandType::Bf16, true), c"k_gemm_bf16_wgmma_pair");
    }
}

//! Matrices of experts.
//!
//! Few tokens: a GEMV for each token and expert on packed weights; gate and up with their biases and activation in one
//! launch, and the last matrix with its bias, the weighted sum over experts and a residual in another
//! (expert_fusion.rs). Many tokens: rows are sorted by expert on the device, then multiplied on tensor cores. Everything
//! else: the generic kernel.

use std::ffi::CStr;

use quadriga_graph::{DType, NodeId, TensorId};
use quadriga_runtime::{BackendError, Layout};

use super::expert_extents::{ExpertExtents, MAX_GRID_Y};
use super::experts_decode::{NEEDED_BYTES, StreamedExperts};
use super::formats::{MAX_SHARED_BYTES, MatrixFormat, PackedMatrix, expert_gemv_shared_bytes};
use super::lowering::Lowering;
use super::op_codes::{self, ConvertTo};
use super::scratch;
use crate::kernels::KernelFile;
use crate::launch::{Argument, Launch, TensorArg, is_dense_f32};

/// Rows of a matrix that a block of the GEMV takes.
const GEMV_ROWS: u32 = 32;
/// The same of gate and up.
const GATED_GEMV_ROWS: u32 = 16;
/// The same of a matrix whose experts are summed.
const SUMMED_GEMV_ROWS: u32 = 8;
/// Rows of a matrix that a block of the GEMM takes.
const GEMM_ROWS: usize = 128;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ExpertGemv {
    ids: TensorArg,
    quants: [u64; 2],
    scales: [u64; 2],
    bias: [u64; 2],
    x: u64,
    weights: u64,
    add: u64,
    out: u64,
    weights_stride: i64,
    fault_word: u64,
    fault: u32,
    experts: u32,
    used: u32,
    rows: u32,
    cols: u32,
    x_rows: u32,
    first_token: u32,
    gate: i32,
    block_rows: u32,
    routes: u32,
}

// SAFETY: `struct ExpertGemv` of expert_gemv.cuh has the same fields in the same order.
unsafe impl Argument for ExpertGemv {}

#[repr(C)]
#[derive(Clone, Copy)]
struct ExpertGemm {
    w: TensorArg,
    quants: u64,
    scales: u64,
    x: u64,
    sorted: u64,
    tiles: u64,
    out: u64,
    n: u32,
    k: u32,
    rows_per_x: u32,
}

// SAFETY: `struct ExpertGemm` of experts_gemm.cu has the same fields in the same order.
unsafe impl Argument for ExpertGemm {}

/// The GEMV, GEMV of gate and up, summed GEMV, and GEMM of a packed format.
struct ExpertKernels {
    gemv: &'static CStr,
    gated: &'static CStr,
    summed: &'static CStr,
    gemm: &'static CStr,
}

fn kernels(format: MatrixFormat) -> Option<ExpertKernels> {
    Some(match format {
        MatrixFormat::Q4 => ExpertKernels {
            gemv: c"k_expert_gemv_q4",
            gated: c"k_expert_gemv_q4_gated",
            summed: c"k_expert_gemv_q4_summed",
            gemm: c"k_expert_gemm_q4",
        },
        MatrixFormat::Q4Min => ExpertKernels {
            gemv: c"k_expert_gemv_q4min",
            gated: c"k_expert_gemv_q4min_gated",
            summed: c"k_expert_gemv_q4min_summed",
            gemm: c"k_expert_gemm_q4min",
        },
        MatrixFormat::Q8 => ExpertKernels {
            gemv: c"k_expert_gemv_q8",
            gated: c"k_expert_gemv_q8_gated",
            summed: c"k_expert_gemv_q8_summed",
            gemm: c"k_expert_gemm_q8",
        },
        MatrixFormat::Mxfp4 => ExpertKernels {
            gemv: c"k_expert_gemv_mxfp4",
            gated: c"k_expert_gemv_mxfp4_gated",
            summed: c"k_expert_gemv_mxfp4_summed",
            gemm: c"k_expert_gemm_mxfp4",
        },
        MatrixFormat::F16 => return None,
    })
}

/// Bytes of a ring of four slots of the GEMM: rows as bf16, a part of the matrix, scales.
fn gemm_shared_bytes(format: Option<MatrixFormat>) -> u32 {
    let (quants, scales) = match format {
        None => (128, 0),
        Some(MatrixFormat::Q8) => (64 + 16, 4),
        Some(MatrixFormat::Q4Min) => (32 + 16, 8),
        Some(_) => (32 + 16, 4),
    };
    4 * (scratch::EXPERT_TILE as u32 * 128 + GEMM_ROWS as u32 * (quants + scales))
}

impl Lowering<'_> {
    pub(super) fn mul_mat_id(&mut self, at: usize, node: NodeId) -> Result<(), BackendError> {
        let [weight, x, ids] = *self.graph.inputs(node) else {
            return Err(self.failed(node, "three inputs are needed"));
        };
        let extents =
            ExpertExtents::new(self.tensor(weight).dims4(), self.tensor(x).dims4(), self.tensor(ids).dims4());
        let (place, _) = self.place(node, weight)?;
        let packed = match place.layout {
            Layout::Packed(_) => {
                let packed = PackedMatrix::of(self.tensor(weight));
                Some(packed.ok_or_else(|| self.failed(node, "unknown weight layout"))?)
            }
            Layout::Plain => None,
        };
        // Weights in f32 are multiplied exactly: the GEMM's operands are bf16.
        let rounds = self.tensor(weight).dtype() != DType::F32;
        if rounds && extents.uses_gemm(self.inner.context.compute_capability) {
            return self.expert_gemm(node, packed, extents);
        }
        match packed {
            Some(packed) => self.expert_gemv(at, node, packed, extents),
            None => self.generic_mul_mat_id(node),
        }
    }

    /// The GEMV of the matmul at position `at`, with what follows and can be part of it.
    fn expert_gemv(
        &mut self,
        at: usize,
        node: NodeId,
        packed: PackedMatrix,
        extents: ExpertExtents,
    ) -> Result<(), BackendError> {
        let kernels = kernels(packed.format).ok_or_else(|| self.failed(node, "unknown weight layout"))?;
        let launch = self.expert_launch(at, node, packed.format, extents)?;
        let ExpertExtents { experts, tokens, used, x_rows, n, k } = extents;
        let [_, x, ids] = *self.graph.inputs(node) else {
            return Err(self.failed(node, "three inputs are needed"));
        };
        let (fault_word, fault) = self.fault(node, "an expert index is out of range");
        let mut work = ExpertGemv {
            ids: self.tensor_arg(node, ids)?,
            x: self.rows_as_f32(node, x)?,
            out: self.place(node, launch.output)?.1,
            fault_word,
            fault,
            experts: experts as u32,
            used: used as u32,
            rows: n as u32,
            cols: k as u32,
            x_rows: x_rows as u32,
            gate: launch.gate.map_or(0, op_codes::gate),
            ..ExpertGemv::default()
        };
        for (i, (weight, bias)) in launch.matrices.iter().enumerate().take(2) {
            let (_, address) = self.place(node, *weight)?;
            let bias = match bias {
                Some(bias) => self.place(node, *bias)?.1,
                None => 0,
            };
            let slots = (work.quants.get_mut(i), work.scales.get_mut(i), work.bias.get_mut(i));
            if let (Some(quants), Some(scales), Some(of_bias)) = slots {
                (*quants, *scales, *of_bias) = (address, address + packed.scales_at as u64, bias);
            }
        }
        if let Some((weights, add)) = launch.sum {
            let weights = self.tensor_arg(node, weights)?;
            (work.weights, work.weights_stride) = (weights.address, weights.strides[2]);
            if let Some(add) = add {
                work.add = self.place(node, add)?.1;
            }
        }
        launch.fused.iter().for_each(|node| self.fuse(*node));
        let multiprocessors = self.inner.context.multiprocessors as usize;
        let streamed = match (&launch.sum, launch.gate) {
            _ if tokens != 1 || !self.streams_experts() => None,
            (Some(_), _) => StreamedExperts::summed(packed.format, &extents, multiprocessors),
            (None, Some(_)) => StreamedExperts::gated(packed.format, &extents, multiprocessors),
            (None, None) => None,
        };
        if let Some(shape) = streamed {
            return self.push_streamed(work, &shape, ids);
        }
        let (name, per_block, x_cols, slots) = match (&launch.sum, launch.gate) {
            (Some(_), _) => (kernels.summed, SUMMED_GEMV_ROWS, x_rows * k, 1),
            (None, Some(_)) => (kernels.gated, GATED_GEMV_ROWS, k, used),
            (None, None) => (kernels.gemv, GEMV_ROWS, k, used),
        };
        let shared = expert_gemv_shared_bytes(x_cols) as u32;
        let file = KernelFile::ExpertsGemv;
        // Nodes with rows of other lengths share the kernel: its limit is that of all of them.
        let limit = MAX_SHARED_BYTES as u32;
        let function = self.inner.kernels.function_with_shared_memory(file, name, limit)?;
        for first in (0..tokens).step_by(MAX_GRID_Y) {
            work.first_token = first as u32;
            let grid =
                [(n as u32).div_ceil(per_block), slots as u32, (tokens - first).min(MAX_GRID_Y) as u32];
            self.push(Launch::new(function, grid, 256).shared_bytes(shared).dependent().arg(work));
        }
        Ok(())
    }

    /// Whether the device has what the streamed kernels need.
    fn streams_experts(&self) -> bool {
        let context = &self.inner.context;
        self.inner.fusion && context.has_bulk_copies() && context.shared_bytes_per_block >= NEEDED_BYTES
    }

    fn push_streamed(
        &mut self,
        mut work: ExpertGemv,
        shape: &StreamedExperts,
        ids: TensorId,
    ) -> Result<(), BackendError> {
        let file = KernelFile::ExpertsDecode;
        let function = self.inner.kernels.function_with_shared_memory(file, shape.name, NEEDED_BYTES)?;
        let is_gated = work.weights == 0;
        let route = if is_gated {
            self.pending_route.take_if(|route| route.ids == ids).map(|route| route.work)
        } else {
            // Directly after gate and up, which have routed by the same logits.
            let known = self.routed.filter(|(of, _, steps)| (*of, *steps) == (ids, self.steps.len()));
            known.map(|(_, route, _)| route).filter(|route| route.weights == work.weights)
        };
        work.block_rows = shape.rows as u32;
        work.routes = u32::from(route.is_some());
        let [x, y] = shape.grid;
        let launch = Launch::new(function, [x, y, 1], shape.threads).shared_bytes(shape.shared_bytes as u32);
        self.push(launch.dependent().arg(work).arg(route.unwrap_or_default()));
        if let Some(route) = route.filter(|_| is_gated) {
            self.routed = Some((ids, route, self.steps.len()));
        }
        Ok(())
    }

    /// The address of contiguous f32 rows: those of `x`, or a copy of them in scratch memory.
    fn rows_as_f32(&mut self, node: NodeId, x: TensorId) -> Result<u64, BackendError> {
        let rows = self.tensor_arg(node, x)?;
        if is_dense_f32(&rows) {
            return Ok(rows.address);
        }
        let [to] = self.scratch(node, [rows.elements() as usize * 4])?;
        let function = self.function(KernelFile::Pack, c"k_convert_rows")?;
        let launch = Launch::over(function, rows.elements()).arg(rows).arg(0i64).arg(rows.rows() as i64);
        self.push(launch.arg(to).arg(ConvertTo::F32 as i32));
        Ok(to)
    }

    /// Many tokens: sorts their rows by expert, and multiplies tiles of one expert each.
    fn expert_gemm(
        &mut self,
        node: NodeId,
        packed: Option<PackedMatrix>,
        extents: ExpertExtents,
    ) -> Result<(), BackendError> {
        let [weight, x, ids] = *self.graph.inputs(node) else {
            return Err(self.failed(node, "three inputs are needed"));
        };
        let is_sorted = self.sorted == Some((ids, extents.experts));
        let has_rows = is_sorted && self.expert_rows == Some(x);
        let [sorted, tiles, rows] = self.scratch(node, extents.gemm_scratch())?;
        (self.sorted, self.expert_rows) = (Some((ids, extents.experts)), Some(x));
        let file = KernelFile::ExpertsGemm;
        if !is_sorted {
            let ids = self.tensor_arg(node, ids)?;
            let (fault_word, fault) = self.fault(node, "an expert index is out of range");
            let function = self.function(file, c"k_sort_by_expert")?;
            let launch = Launch::new(function, [1, 1, 1], 1024).dependent().arg(ids);
            let launch = launch.arg(extents.experts as u32).arg(sorted).arg(tiles);
            self.push(launch.arg(fault_word).arg(fault));
        }
        if !has_rows {
            let source = self.tensor_arg(node, x)?;
            let function = self.function(file, c"k_rows_for_experts")?;
            self.push(Launch::over(function, source.elements() / 8).dependent().arg(source).arg(rows));
        }
        let (_, address) = self.place(node, weight)?;
        let out = self.tensor_arg(node, self.graph[node].output())?;
        let work = ExpertGemm {
            w: TensorArg::new(self.tensor(weight), address),
            quants: address,
            scales: packed.map_or(0, |packed| address + packed.scales_at as u64),
            x: rows,
            sorted,
            tiles,
            out: out.address,
            n: extents.n as u32,
            k: extents.k as u32,
            rows_per_x: (extents.used / extents.x_rows.max(1)).max(1) as u32,
        };
        let format = packed.map(|packed| packed.format);
        let name = format.and_then(kernels).map_or(c"k_expert_gemm_any", |kernels| kernels.gemm);
        let shared = gemm_shared_bytes(format);
        let function = self.inner.kernels.function_with_shared_memory(file, name, shared)?;
        let grid = [extents.n.div_ceil(GEMM_ROWS) as u32, extents.max_tiles() as u32, 1];
        self.push(Launch::new(function, grid, 256).shared_bytes(shared).dependent().arg(work));
        Ok(())
    }

    fn generic_mul_mat_id(&mut self, node: NodeId) -> Result<(), BackendError> {
        let (inputs, out) = self.operands(node)?;
        let [w, x, ids] = *inputs.as_slice() else {
            return Err(self.failed(node, "three inputs are needed"));
        };
        let (fault_word, fault) = self.fault(node, "an expert index is out of range");
        let function = self.function(KernelFile::Matmul, c"k_mul_mat_id")?;
        let blocks =
            u32::try_from(out.elements().div_ceil(8)).map_err(|_| self.failed(node, "too many results"))?;
        let launch = Launch::new(function, [blocks, 1, 1], 256);
        self.push(launch.arg(w).arg(x).arg(ids).arg(out).arg(fault_word).arg(fault));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_have_a_block_for_as_many_rows_as_the_kernels_take() {
        let source = include_str!("../../kernels/experts_gemv.cu");
        let warps: u32 = source.lines().find_map(|l| l.strip_prefix("#define WARPS ")?.parse().ok()).unwrap();
        for (kind, rows) in [("", GEMV_ROWS), ("##_gated", GATED_GEMV_ROWS), ("##_summed", SUMMED_GEMV_ROWS)]
        {
            let start = format!("EXPERT_GEMV(k_expert_gemv_##name{kind}, format, ");
            let (arguments, _) = source.split_once(&start).unwrap().1.split_once(')').unwrap();
            let [matrices, _, lines, _] = *arguments.split(", ").collect::<Vec<_>>() else { panic!() };
            let [matrices, lines]: [u32; 2] = [matrices, lines].map(|n| n.parse().unwrap());
            assert_eq!(rows, warps * lines / matrices, "{kind}");
        }
    }
}

//! GEMV with weights streamed through shared memory, with the norm of the row as prologue and a bias, residual or
//! SwiGLU as epilogue. See `kernels/gemv_streamed.cu`.

use quadriga_graph::{Binary, DType, Gate, NodeId, Op, TensorId, TensorKind};
use quadriga_runtime::{BackendError, Layout};

use super::formats::{MatrixFormat, PackedMatrix};
use super::lowering::Lowering;
use crate::blas::OperandType;
use crate::buffer::overlap;
use crate::context::Context;
use crate::kernels::KernelFile;
use crate::launch::{Argument, Launch};
use crate::tensor_map::TensorMap;

/// Warps of a block that leaves room on its SM for a block of the next kernel, as in the kernel.
const FEW_WARPS: usize = 8;
/// Warps of a block that has the SM for itself.
const MANY_WARPS: usize = 16;
/// Bytes of weights per SM from which on more warps are worth more than room for the next kernel.
const MIN_WIDE_BYTES: usize = 48_000;
/// The most slots of a warp's ring.
const MAX_SLOTS: usize = 8;
/// Shared memory of a block of which two fit on an SM: the next kernel fills its rings while this one runs.
const HALF_SM_BYTES: usize = 114_000;
/// Shared memory of a block that has the SM for itself.
const WHOLE_SM_BYTES: usize = 220_000;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct StreamPart {
    quants: u64,
    scales: u64,
    out: u64,
    add: u64,
    rows: u32,
    first: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct StreamedGemv {
    part: [StreamPart; 3],
    x: u64,
    norm: u64,
    count: u32,
    gated: u32,
    pairs: u32,
    cols: u32,
    slots: u32,
    eps: f32,
}

// SAFETY: `struct StreamedGemv` of gemv_streamed.cu has the same fields in the same order.
unsafe impl Argument for StreamedGemv {}

/// The RMS norm of a launch's prologue.
#[derive(Clone, Copy)]
pub(super) struct FusedNorm {
    /// The row before the norm.
    pub(super) x: TensorId,
    /// The weight by which the normalised row is multiplied.
    pub(super) weight: TensorId,
    pub(super) eps: f32,
}

/// How the elements of a matrix are stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum MatrixKind {
    /// In a format of the device.
    Format(MatrixFormat),
    /// bf16, as in the file.
    Bf16,
}

/// A matrix that can be streamed.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct StreamedMatrix {
    pub(super) kind: MatrixKind,
    pub(super) quants: u64,
    pub(super) scales: u64,
    pub(super) rows: usize,
    /// Whether no kernel writes it.
    pub(super) is_weight: bool,
}

impl StreamedMatrix {
    /// How the tensor copy engine finds 64 rows of the matrix at a time: its elements, or 128 bytes of quants; the scales of
    /// 256 columns.
    pub(super) fn maps(&self, context: &Context, k: usize) -> Result<(TensorMap, TensorMap), BackendError> {
        let size = (self.rows, k);
        let (quants, scales) = match self.kind {
            MatrixKind::Bf16 => {
                let map = TensorMap::of_rows(context, self.quants, size, OperandType::Bf16, 64)?;
                return Ok((map, TensorMap::default()));
            }
            MatrixKind::Format(MatrixFormat::F16) => {
                let map = TensorMap::of_rows(context, self.quants, size, OperandType::F16, 64)?;
                return Ok((map, TensorMap::default()));
            }
            MatrixKind::Format(format) => format.row_parts(k),
        };
        let box_bytes = if self.kind == MatrixKind::Format(MatrixFormat::Q4Min) { 32 } else { 16 };
        Ok((
            TensorMap::of_bytes(context, self.quants, (self.rows, quants), 128)?,
            TensorMap::of_bytes(context, self.scales, (self.rows, scales), box_bytes)?,
        ))
    }
}

/// One matmul of a launch.
pub(super) struct FusedMatmul {
    pub(super) matrix: StreamedMatrix,
    /// The result of the matmul itself.
    pub(super) product: TensorId,
    /// The tensor that the epilogue adds.
    pub(super) add: Option<TensorId>,
    /// The tensor that is written.
    pub(super) output: TensorId,
    /// The nodes that the launch computes.
    pub(super) nodes: Vec<NodeId>,
}

impl Lowering<'_> {
    /// Tries to make one launch of the matmul at position `at`, those that follow with the same row `x`, and their
    /// epilogues. With a norm, the launch must contain every reader of `x`. `false` if it is not possible, with nothing
    /// changed.
    pub(super) fn gemv_streamed(
        &mut self,
        at: usize,
        x: TensorId,
        norm: Option<FusedNorm>,
    ) -> Result<bool, BackendError> {
        let context = &self.inner.context;
        let has_room = context.shared_bytes_per_block as usize >= WHOLE_SM_BYTES;
        if !self.inner.fusion || !context.has_bulk_copies() || !has_room {
            return Ok(false);
        }
        let Some(node) = self.split.nodes.get(at).copied() else { return Ok(false) };
        let source = norm.map_or(x, |norm| norm.x);
        let (row, from) = (self.tensor(source), self.place(node, source)?.1);
        let dense = row.dtype() == DType::F32 && row.is_contiguous() && row.shape().rows() == 1;
        if !dense || !from.is_multiple_of(16) {
            return Ok(false);
        }
        let cols = row.shape().cols();
        let mut members = self.members(at, x, false)?;
        let Some(MatrixKind::Format(format)) = members.first().map(|member| member.matrix.kind) else {
            return Ok(false);
        };
        let reads = self.readers(x).len();
        let gated = self.gated(at, &members).filter(|(_, _, gate)| *gate == Gate::Swiglu);
        if let Some((unit, swapped, _)) = gated {
            if swapped {
                members.swap(0, 1);
            }
            for member in &mut members {
                member.output = self.graph[unit].output();
                member.add = None;
            }
            if let Some(first) = members.first_mut() {
                first.nodes.push(unit);
            }
        }
        if !self.outputs_are_apart(node, Some(source), &members, gated.is_some())? {
            // The matmul alone, without epilogue.
            members.truncate(1);
            if let Some(first) = members.first_mut() {
                (first.add, first.output) = (None, first.product);
                first.nodes.truncate(1);
            }
            if gated.is_some() || !self.outputs_are_apart(node, Some(source), &members, false)? {
                return Ok(false);
            }
        }
        if norm.is_some() && members.len() < reads {
            return Ok(false);
        }
        let rows: usize = members.iter().map(|member| member.matrix.rows).sum();
        let pairs = if gated.is_some() { rows / 2 } else { rows.div_ceil(2) };
        let multiprocessors = self.inner.context.multiprocessors as usize;
        let Some(shape) = LaunchShape::of(format, cols, rows, pairs, multiprocessors) else {
            return Ok(false);
        };
        // Warps compute their row pairs in 32 bits.
        if u32::try_from((pairs + 1) * multiprocessors * shape.warps).is_err() {
            return Ok(false);
        }
        let mut job =
            StreamedGemv { x: from, cols: cols as u32, slots: shape.slots as u32, ..StreamedGemv::default() };
        if let Some(norm) = norm {
            job.norm = self.place(node, norm.weight)?.1;
            job.eps = norm.eps;
        }
        job.gated = u32::from(gated.is_some());
        for (member, part) in members.iter().zip(&mut job.part) {
            *part = StreamPart {
                quants: member.matrix.quants,
                scales: member.matrix.scales,
                out: self.place(node, member.output)?.1,
                add: match member.add {
                    Some(add) => self.place(node, add)?.1,
                    None => 0,
                },
                rows: member.matrix.rows as u32,
                first: job.pairs,
            };
            job.pairs += member.matrix.rows.div_ceil(2) as u32;
            job.count += 1;
        }
        if gated.is_some() {
            job.pairs = job.part[0].rows;
        }
        let blocks = self.inner.context.multiprocessors.min(job.pairs).max(1);
        let function = self.inner.kernels.function_with_shared_memory(
            KernelFile::GemvStreamed,
            format.streamed(shape.warps == MANY_WARPS),
            WHOLE_SM_BYTES as u32,
        )?;
        let launch = Launch::new(function, [blocks, 1, 1], shape.warps as u32 * 32);
        self.push(launch.shared_bytes(shape.shared_bytes as u32).dependent().arg(job));
        members.iter().flat_map(|member| &member.nodes).for_each(|node| self.fuse(*node));
        Ok(true)
    }

    /// The matmul at a position and those that directly follow with the same rows, each with its addition. `mixed`: for the
    /// mixed GEMM, which takes more kinds of matrices.
    pub(super) fn members(
        &mut self,
        at: usize,
        x: TensorId,
        mixed: bool,
    ) -> Result<Vec<FusedMatmul>, BackendError> {
        let mut members: Vec<FusedMatmul> = Vec::new();
        let later: Vec<NodeId> = self.split.nodes.iter().skip(at).copied().collect();
        for node in later {
            let op = self.graph[node].op();
            if op.is_view() || self.is_fused(node) {
                continue;
            }
            let output = self.graph[node].output();
            if let Op::MulMat = op
                && let [weight, row] = *self.graph.inputs(node)
                && row == x
                && members.len() < 3
                && let Some(matrix) = self.streamed_matrix(node, weight, mixed)?
                && members.first().is_none_or(|first| first.matrix.kind == matrix.kind)
            {
                members.push(FusedMatmul { matrix, product: output, add: None, output, nodes: vec![node] });
                continue;
            }
            // Only an addition to one of the results may come between matmuls.
            let [a, b] = *self.graph.inputs(node) else { break };
            let ours = |id: TensorId| members.iter().any(|m| m.product == id || m.output == id);
            let (product, other) = match (ours(a), ours(b)) {
                (true, false) => (a, b),
                (false, true) => (b, a),
                _ => break,
            };
            let tensor = &self.graph[product];
            let fits = matches!(op, Op::Binary(Binary::Add))
                && tensor.is_contiguous()
                && tensor.same_layout(&self.graph[other])
                && self.readers(tensor.storage()).len() == 1
                && !(self.split.kept)(product);
            let sum = members.iter_mut().find(|m| m.product == product && m.add.is_none());
            let Some(sum) = sum.filter(|_| fits) else { break };
            (sum.add, sum.output) = (Some(other), output);
            sum.nodes.push(node);
        }
        Ok(members)
    }

    /// The matrix of a matmul, if it can be streamed. The GEMV takes weights only, since it reads before the previous
    /// kernel is complete.
    fn streamed_matrix(
        &mut self,
        node: NodeId,
        weight: TensorId,
        mixed: bool,
    ) -> Result<Option<StreamedMatrix>, BackendError> {
        let tensor = self.tensor(weight);
        let is_weight = tensor.kind() == TensorKind::Weight && tensor.storage() == weight;
        if !(is_weight || mixed) || tensor.dims4()[0] != 1 || tensor.dims4()[1] != 1 {
            return Ok(None);
        }
        let (place, quants) = self.place(node, weight)?;
        let (rows, cols) = (tensor.shape().rows(), tensor.shape().cols());
        if rows > u32::MAX as usize / 4 || cols > u32::MAX as usize / 4 {
            return Ok(None);
        }
        let matrix = |kind, scales| StreamedMatrix { kind, quants, scales, rows, is_weight };
        let is_dense = tensor.is_contiguous()
            && cols.is_multiple_of(MatrixFormat::F16.block())
            && quants.is_multiple_of(16);
        Ok(match (place.layout, tensor.dtype()) {
            (Layout::Packed(_), _) => PackedMatrix::of(tensor)
                .map(|packed| matrix(MatrixKind::Format(packed.format), quants + packed.scales_at as u64)),
            (Layout::Plain, DType::F16) if is_dense => Some(matrix(MatrixKind::Format(MatrixFormat::F16), 0)),
            (Layout::Plain, DType::BF16) if is_dense && mixed => Some(matrix(MatrixKind::Bf16, 0)),
            _ => None,
        })
    }

    /// The gated activation that reads the results of two matmuls, if nothing else does, whether the second is the gate,
    /// and which activation it is.
    pub(super) fn gated(&self, at: usize, members: &[FusedMatmul]) -> Option<(NodeId, bool, Gate)> {
        let [one, two] = members else { return None };
        let last = *two.nodes.first()?;
        let position = self.split.nodes.iter().skip(at).position(|node| *node == last)? + at;
        let unit = self.next(position)?;
        let Op::Gated { gate: activation, swapped } = self.graph[unit].op() else { return None };
        let [a, b] = *self.graph.inputs(unit) else { return None };
        let (gate, up) = if *swapped { (b, a) } else { (a, b) };
        let both = (gate, up) == (one.product, two.product) || (gate, up) == (two.product, one.product);
        let alone = |m: &FusedMatmul| {
            let product = &self.graph[m.product];
            m.add.is_none() && !(self.split.kept)(m.product) && self.readers(product.storage()).len() == 1
        };
        let out = &self.graph[self.graph[unit].output()];
        let fits = out.dtype() == DType::F32 && out.is_contiguous() && one.matrix.rows == two.matrix.rows;
        (both && alone(one) && alone(two) && fits).then_some((unit, gate == two.product, *activation))
    }

    /// Whether no output overlaps an input that is still read: all blocks read the row, if there is one, and only the
    /// thread that writes a result reads its addend.
    pub(super) fn outputs_are_apart(
        &mut self,
        node: NodeId,
        row: Option<TensorId>,
        members: &[FusedMatmul],
        gated: bool,
    ) -> Result<bool, BackendError> {
        let range = |lowering: &mut Self, id: TensorId| -> Result<(u64, usize), BackendError> {
            Ok((lowering.place(node, id)?.1, lowering.tensor(id).bytes()))
        };
        let apart = |a: (u64, usize), b: (u64, usize)| !overlap(a.0, a.1, b.0, b.1);
        let row = row.map(|row| range(self, row)).transpose()?;
        let members = if gated { members.get(..1).unwrap_or_default() } else { members };
        for (index, member) in members.iter().enumerate() {
            let out = range(self, member.output)?;
            if row.is_some_and(|row| !apart(out, row)) {
                return Ok(false);
            }
            for (other_index, other) in members.iter().enumerate() {
                if other_index != index && !apart(out, range(self, other.output)?) {
                    return Ok(false);
                }
                if let Some(add) = other.add {
                    let add = range(self, add)?;
                    let in_place = other_index == index && add == out;
                    if !in_place && !apart(out, add) {
                        return Ok(false);
                    }
                }
            }
        }
        Ok(true)
    }
}

/// Block size and shared memory of a launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct LaunchShape {
    /// Warps of a block.
    warps: usize,
    /// Slots of a warp's ring.
    slots: usize,
    /// Shared memory of a block.
    shared_bytes: usize,
}

impl LaunchShape {
    /// For matrices of `rows` rows in all, in `pairs` row pairs; `None` if a ring does not fit into shared memory.
    fn of(
        format: MatrixFormat,
        cols: usize,
        rows: usize,
        pairs: usize,
        multiprocessors: usize,
    ) -> Option<LaunchShape> {
        if !cols.is_multiple_of(format.block()) || cols == 0 {
            return None;
        }
        let chunk = format.chunk();
        let slot = 2 * format.row_bytes(cols.min(chunk));
        // The row as f32, or as 8-bit elements with two floats for each 32.
        let row = if format == MatrixFormat::F16 { cols * 4 } else { cols + cols / 4 };
        // No more slots than a warp fills, and at least `min_slots` if it fills that many.
        let with = |warps: usize, limit: usize, min_slots: usize| {
            let filled = pairs.div_ceil(multiprocessors.max(1) * warps).max(1) * cols.div_ceil(chunk);
            let slots = (limit.checked_sub(row)? / (warps * slot)).min(MAX_SLOTS).min(filled);
            let shared_bytes = warps * slots * slot + row;
            (slots >= min_slots.min(filled)).then_some(LaunchShape { warps, slots, shared_bytes })
        };
        let wide = (rows * format.row_bytes(cols) > multiprocessors * MIN_WIDE_BYTES)
            .then(|| with(MANY_WARPS, WHOLE_SM_BYTES, 2))
            .flatten();
        let shares_sm = || with(FEW_WARPS, HALF_SM_BYTES, 2);
        wide.or_else(shares_sm).or_else(|| with(FEW_WARPS, WHOLE_SM_BYTES, 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: [MatrixFormat; 4] =
        [MatrixFormat::Q4, MatrixFormat::Q4Min, MatrixFormat::Q8, MatrixFormat::F16];

    #[test]
    fn small_matrices_leave_room_for_the_next_kernel_and_no_slot_is_unused() {
        for format in FORMATS {
            for cols in [32, 576, 1536, 4096, 8192, 11008] {
                let shape = LaunchShape::of(format, cols, 132, 66, 132).unwrap();
                assert!(
                    shape.warps == FEW_WARPS && shape.shared_bytes <= HALF_SM_BYTES,
                    "{format:?} {cols}: {shape:?}"
                );
                assert!(shape.slots >= 2 || cols <= 4096, "{format:?} {cols}: {shape:?}");
            }
            assert_eq!(LaunchShape::of(format, 10, 132, 66, 132), None);
            assert_eq!(LaunchShape::of(format, 1 << 20, 132, 66, 132), None);
        }
        assert_eq!(
            LaunchShape::of(MatrixFormat::Q4, 576, 960, 480, 132).unwrap().slots,
            1,
            "a warp has one row pair"
        );
    }

    #[test]
    fn large_matrices_have_more_warps_and_at_least_two_slots() {
        for format in FORMATS {
            for (cols, rows) in [(4096, 12_288), (4096, 22_016), (11_008, 4096), (4096, 32_000)] {
                let shape = LaunchShape::of(format, cols, rows, rows / 2, 132).unwrap();
                assert!(shape.warps == MANY_WARPS && shape.slots >= 2, "{format:?} {cols}: {shape:?}");
                assert!(shape.shared_bytes <= WHOLE_SM_BYTES, "{format:?} {cols}: {shape:?}");
            }
        }
    }

    #[test]
    fn rings_fill_the_shared_memory_that_a_block_may_use() {
        let shape = |format, cols, rows: usize| LaunchShape::of(format, cols, rows, rows / 2, 132).unwrap();
        let ring = |warps, slots, shared_bytes| LaunchShape { warps, slots, shared_bytes };
        // A slot has two rows of 1,536 elements: 768 bytes of quants and 96 of scales each. The row is one byte per
        // element and two floats for each 32.
        assert_eq!(shape(MatrixFormat::Q4, 1536, 4096), ring(8, 2, 8 * 2 * 2 * 864 + 1920));
        assert_eq!(shape(MatrixFormat::Q8, 1536, 4096), ring(16, 1, 16 * 2 * 1632 + 1920));
        assert_eq!(shape(MatrixFormat::F16, 1024, 512), ring(8, 1, 8 * 2 * 2048 + 4096));
        // Longer rows are streamed in chunks of 4,096 elements; the whole SM is used where half is too small.
        assert_eq!(shape(MatrixFormat::Q4, 4096, 12_288), ring(16, 2, 16 * 2 * 2 * 2304 + 5120));
        assert_eq!(shape(MatrixFormat::Q4, 11_008, 132), ring(8, 2, 8 * 2 * 2 * 2304 + 13_760));
        // 132 SMs with 48,000 bytes each are few enough for one with half an SM.
        let limit = 132 * MIN_WIDE_BYTES / MatrixFormat::F16.row_bytes(1000);
        assert_eq!(shape(MatrixFormat::F16, 1000, limit).warps, FEW_WARPS);
        assert_eq!(shape(MatrixFormat::F16, 1000, limit + 1).warps, MANY_WARPS);
    }
}

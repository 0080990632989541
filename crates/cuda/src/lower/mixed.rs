//! GEMM of several rows and a weight that is converted on the way to the tensor cores of Hopper: from two rows on, without
//! a copy of the weight in another type. See `kernels/gemm_mixed.cuh`.
//!
//! Matmuls of the same rows share a launch, and a residual, bias or gated activation is its epilogue. An RMS norm is part
//! of the launch that converts the rows.

use std::ffi::CString;

use quadriga_graph::{DType, NodeId, TensorId};
use quadriga_runtime::BackendError;

use super::formats::MatrixFormat;
use super::gemv_streamed::{FusedMatmul, FusedNorm, MatrixKind};
use super::lowering::{Lowering, MixedRows};
use super::op_codes;
use super::scratch;
use crate::blas::OperandType;
use crate::kernels::{Function, KernelFile};
use crate::launch::{Argument, Launch};
use crate::tensor_map::TensorMap;

/// Rows of a weight that a block takes; half as many of each of two that are gated.
const TILE: usize = 128;
/// The numbers of rows that kernels take at a time.
const ROWS: [usize; 5] = [8, 16, 32, 64, 128];
/// Columns of a stage; rows for converted weights are padded to whole ones.
const STAGE_COLS: usize = 256;
/// The most rows with which the parts of a sum depend on the weight alone, and rows are converted by the kernel for few of
/// them, so that a row's result does not depend on the others.
const MAX_SPLIT_ROWS: usize = 256;
/// Shared memory that every Hopper device gives a block, less what the kernels have for barriers.
const NEEDED_BYTES: u32 = (227 << 10) - 1024;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct MixedPart {
    weight: u64,
    out: u64,
    add: u64,
    rows: u32,
    first: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct MixedGemm {
    part: [MixedPart; 3],
    row_scales: u64,
    row_bytes: u64,
    count: u32,
    gate: i32,
    m: u32,
    k: u32,
    tiles: u32,
    waits: u32,
}

// SAFETY: `struct MixedGemm` of gemm_mixed.cuh has the same fields in the same order.
unsafe impl Argument for MixedGemm {}

/// `struct MixedMaps` of gemm_mixed.cuh.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct MixedMaps {
    x: TensorMap,
    weight: [TensorMap; 3],
    scales: [TensorMap; 3],
}

// SAFETY: `struct MixedMaps` of gemm_mixed.cuh has the same fields in the same order.
unsafe impl Argument for MixedMaps {}

/// The kernels of a kind of matrix: their name, and what they read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct MixedKernels {
    name: &'static str,
    rows: MixedRows,
    /// Bytes of a stage for 64 rows of the weight; 0: the weight is not converted.
    group_bytes: usize,
}

impl MixedKernels {
    fn of(kind: MatrixKind) -> Option<MixedKernels> {
        let converted = |name, operand, boxes: usize, scales: usize| MixedKernels {
            name,
            rows: MixedRows { operand, is_ordered: true },
            group_bytes: 64 * (boxes * 128 + scales),
        };
        let in_place = |name, operand| MixedKernels {
            name,
            rows: MixedRows { operand, is_ordered: false },
            group_bytes: 0,
        };
        Some(match kind {
            MatrixKind::Format(MatrixFormat::Q4) => converted("q4", OperandType::F16, 1, 16),
            MatrixKind::Format(MatrixFormat::Q4Min) => converted("q4min", OperandType::F16, 1, 32),
            MatrixKind::Format(MatrixFormat::Q8) => converted("q8", OperandType::F16, 2, 16),
            MatrixKind::Format(MatrixFormat::Mxfp4) => converted("mxfp4", OperandType::Bf16, 1, 16),
            MatrixKind::Format(MatrixFormat::F16) => in_place("f16", OperandType::F16),
            MatrixKind::Bf16 => in_place("bf16", OperandType::Bf16),
        })
    }

    /// Shared memory of a block for `rows` rows at a time, as `struct Shape` of the kernels has it.
    fn shared_bytes(&self, rows: usize) -> u32 {
        let is_in_place = self.group_bytes == 0;
        let slot = rows * 128 + if is_in_place { TILE * 128 } else { 0 };
        let stage = 2 * self.group_bytes;
        let slots = match (is_in_place, rows) {
            (true, 128) => 6,
            (true, _) => 8,
            (false, 128) => 4 * 2,
            (false, 64) => 3 * 4,
            (false, 32) => 2 * 4,
            (false, _) => 4 * 4,
        };
        let stages = match stage {
            40_001.. => 2,
            24_001.. if rows == 128 => 2,
            24_001.. => 3,
            _ => 4,
        };
        let results = rows * (TILE + 4) * 4;
        (slots * slot + stages * stage).max(results) as u32 + 1024
    }
}

/// Whether there are kernels that convert packed weights of a type on the way.
pub(super) fn takes_packed(dtype: DType) -> bool {
    let format = MatrixFormat::of(dtype);
    format.and_then(|format| MixedKernels::of(MatrixKind::Format(format))).is_some()
}

/// How many blocks share a tile of the result, each with a part of the columns: enough to keep all multiprocessors busy.
/// It depends on the weight alone.
fn parts_of_columns(tiles: usize, k: usize, multiprocessors: usize) -> u32 {
    if k >= 4 * STAGE_COLS && 2 * tiles < 3 * multiprocessors { 2 } else { 1 }
}

impl Lowering<'_> {
    /// Tries to make one launch of the matmul at position `at`, those that follow with the same rows `x`, and their
    /// epilogues. With a norm, the launch must contain every reader of `x`. `false` if it is not possible, with nothing
    /// changed.
    pub(super) fn mixed_gemm(
        &mut self,
        at: usize,
        x: TensorId,
        norm: Option<FusedNorm>,
    ) -> Result<bool, BackendError> {
        let context = &self.inner.context;
        let has_room = context.shared_bytes_per_block > NEEDED_BYTES;
        if !has_room || !self.inner.kernels.has_wgmma() {
            return Ok(false);
        }
        let Some(node) = self.split.nodes.get(at).copied() else { return Ok(false) };
        let source = norm.map_or(x, |norm| norm.x);
        let (m, k) = (self.tensor(source).shape().rows(), self.tensor(source).shape().cols());
        if m < 2 || m > i32::MAX as usize / 2 || k == 0 || k > i32::MAX as usize / 4 {
            return Ok(false);
        }
        let mut members = self.members(at, x, true)?;
        let Some(first) = members.first() else { return Ok(false) };
        let Some(kernels) = MixedKernels::of(first.matrix.kind) else { return Ok(false) };
        let mut gated = self.gated(at, &members);
        if !self.inner.fusion {
            gated = None;
            alone(&mut members);
        }
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
        // The rows are converted before anything is written, so that results may overlap them.
        if !self.outputs_are_apart(node, None, &members, gated.is_some())? {
            if gated.is_some() {
                return Ok(false);
            }
            alone(&mut members);
        }
        if norm.is_some() && (!self.inner.fusion || members.len() < self.readers(x).len()) {
            return Ok(false);
        }
        let per_tile = if gated.is_some() { TILE / 2 } else { TILE };
        let tiles = |member: &FusedMatmul| member.matrix.rows.div_ceil(per_tile);
        let all =
            if gated.is_some() { members.first().map_or(0, tiles) } else { members.iter().map(tiles).sum() };
        if all > 65_535 {
            return Ok(false);
        }
        let (rows, scales, pitch) = self.mixed_rows(node, x, norm, kernels.rows)?;
        let at_once = ROWS.into_iter().find(|rows| *rows >= m).unwrap_or(TILE);
        let is_pair = m > MAX_SPLIT_ROWS;
        let context = &self.inner.context;
        let box_rows = if is_pair { at_once / 2 } else { at_once } as u32;
        let mut maps = MixedMaps {
            x: TensorMap::of_rows(context, rows, (m, pitch), kernels.rows.operand, box_rows)?,
            ..MixedMaps::default()
        };
        let mut job = MixedGemm {
            row_scales: if kernels.rows.operand == OperandType::F16 { scales } else { 0 },
            gate: gated.map_or(-1, |(_, _, gate)| op_codes::gate(gate)),
            m: m as u32,
            k: k as u32,
            tiles: all as u32,
            ..MixedGemm::default()
        };
        let mut first_tile = 0;
        for (i, member) in members.iter().enumerate().take(3) {
            let matrix = member.matrix;
            let maps_of = (maps.weight.get_mut(i), maps.scales.get_mut(i), job.part.get_mut(i));
            let (Some(weight), Some(scales), Some(part)) = maps_of else { continue };
            (*weight, *scales) = matrix.maps(&self.inner.context, k)?;
            *part = MixedPart {
                weight: matrix.quants,
                out: self.place(node, member.output)?.1,
                add: match member.add {
                    Some(add) => self.place(node, add)?.1,
                    None => 0,
                },
                rows: matrix.rows as u32,
                first: first_tile,
            };
            first_tile += tiles(member) as u32;
            job.count += 1;
            job.waits |= u32::from(!matrix.is_weight);
        }
        let name = format!("k_gemm_mixed_{}_{at_once}{}", kernels.name, if is_pair { "_pair" } else { "" });
        let shared = kernels.shared_bytes(at_once);
        let function = self.mixed_function(node, &name, shared)?;
        let row_tiles = m.div_ceil(at_once) as u32;
        let launch = if is_pair {
            Launch::new(function, [2 * row_tiles, job.tiles.div_ceil(2), 1], 2 * 128 + 64)
        } else {
            let blocks = parts_of_columns(all, k, self.inner.context.multiprocessors as usize);
            Launch::new(function, [blocks * row_tiles, job.tiles, 1], 2 * 128 + 64).cluster(blocks)
        };
        self.push(launch.shared_bytes(shared).dependent().arg(maps).arg(job));
        members.iter().flat_map(|member| &member.nodes).for_each(|node| self.fuse(*node));
        Ok(true)
    }

    fn mixed_function(&self, node: NodeId, name: &str, shared: u32) -> Result<Function, BackendError> {
        let name = CString::new(name).map_err(|_| self.failed(node, "a kernel's name has a zero byte"))?;
        self.inner.kernels.function_with_shared_memory(KernelFile::GemmMixed, &name, shared)
    }

    /// The rows of a matmul as the kernels read them, in scratch memory: their address, that of their scales, and the
    /// elements of a row.
    fn mixed_rows(
        &mut self,
        node: NodeId,
        x: TensorId,
        norm: Option<FusedNorm>,
        wanted: MixedRows,
    ) -> Result<(u64, u64, usize), BackendError> {
        let source = self.tensor_arg(node, norm.map_or(x, |norm| norm.x))?;
        let (m, k) = (source.rows() as usize, source.dims[3] as usize);
        let pitch = if wanted.is_ordered { k.next_multiple_of(STAGE_COLS) } else { k };
        let known = self.mixed_rows == Some((x, wanted));
        let [rows, scales] = self.scratch(node, scratch::mixed_rows(m, k))?;
        self.mixed_rows = Some((x, wanted));
        if !known {
            let (weight, eps) = match norm {
                Some(norm) => (self.place(node, norm.weight)?.1, norm.eps),
                None => (0, 0.0),
            };
            // Each thread has 8 columns at a time, or two times 16.
            let (name, columns) =
                if m > MAX_SPLIT_ROWS { (c"k_mixed_rows", 8) } else { (c"k_mixed_few_rows", 32) };
            let function = self.function(KernelFile::GemmMixed, name)?;
            let threads = (pitch as u32).div_ceil(columns).next_multiple_of(32).clamp(64, 512);
            let launch = Launch::new(function, [m as u32, 1, 1], threads).dependent();
            let launch = launch.arg(source).arg(weight).arg(eps).arg(pitch as u32).arg(rows).arg(scales);
            let is_bf16 = wanted.operand == OperandType::Bf16;
            self.push(launch.arg(u32::from(wanted.is_ordered)).arg(u32::from(is_bf16)));
        }
        Ok((rows, scales, pitch))
    }
}

/// Leaves the first matmul, without epilogue.
fn alone(members: &mut Vec<FusedMatmul>) {
    members.truncate(1);
    if let Some(first) = members.first_mut() {
        (first.add, first.output) = (None, first.product);
        first.nodes.truncate(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [MatrixKind; 6] = [
        MatrixKind::Format(MatrixFormat::Q4),
        MatrixKind::Format(MatrixFormat::Q4Min),
        MatrixKind::Format(MatrixFormat::Q8),
        MatrixKind::Format(MatrixFormat::Mxfp4),
        MatrixKind::Format(MatrixFormat::F16),
        MatrixKind::Bf16,
    ];

    #[test]
    fn every_kind_of_matrix_has_kernels_that_fit_the_shared_memory() {
        for kind in KINDS {
            let kernels = MixedKernels::of(kind).unwrap();
            for rows in ROWS {
                let bytes = kernels.shared_bytes(rows);
                assert!(bytes <= NEEDED_BYTES, "{kind:?} {rows}: {bytes}");
                // Two blocks of four-bit weights and few rows share a multiprocessor.
                let few = matches!(kernels.name, "q4" | "mxfp4") && rows <= 32;
                assert!(!few || 2 * (bytes + 1024) <= NEEDED_BYTES + 1024, "{kind:?} {rows}: {bytes}");
            }
        }
    }

    #[test]
    fn columns_are_divided_where_there_are_few_tiles() {
        assert_eq!(parts_of_columns(32, 4096, 132), 2);
        assert_eq!(parts_of_columns(172, 4096, 132), 2);
        assert_eq!(parts_of_columns(224, 4096, 132), 1);
        assert_eq!(parts_of_columns(5, 576, 132), 1);
    }

    #[test]
    fn kernels_are_named_as_in_their_file() {
        let source = include_str!("../../kernels/gemm_mixed.cu");
        for kind in KINDS {
            let kernels = MixedKernels::of(kind).unwrap();
            let packed = kernels.group_bytes > 0;
            let header = include_str!("../../kernels/formats.cuh");
            let named = match packed {
                true => header.contains(&format!("X({}, MATRIX_", kernels.name)),
                false => source.contains(&format!("(k_gemm_mixed_{}, ", kernels.name)),
            };
            assert!(named, "{}", kernels.name);
        }
        for rows in ROWS {
            assert!(source.contains(&format!("GEMM_MIXED(name, source, {rows})")), "{rows}");
        }
    }
}

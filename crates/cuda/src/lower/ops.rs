//! Operations that become one kernel launch each.

use std::ffi::CStr;

use quadriga_graph::{Binary, DType, NodeId, Op, TensorId};
use quadriga_runtime::{BackendError, Layout};

use super::formats::PackedMatrix;
use super::lowering::Lowering;
use super::op_codes;
use crate::buffer::overlap;
use crate::custom::CustomCode;
use crate::inner::MAX_ARGMAX_PARTS;
use crate::kernels::KernelFile;
use crate::launch::{Launch, TensorArg, has_dense_rows, is_dense_f32, is_plain};

/// The most float4s of a row whose argmax one block computes.
const MIN_SHARED_QUADS: i64 = 16 << 10;

/// The most threads that a custom operation's kernel is launched with.
const MAX_CUSTOM_THREADS: u64 = 1 << 30;

/// Threads of a block for one row.
fn row_threads(cols: i64) -> u32 {
    (cols as u32).div_ceil(32).clamp(1, 8) * 32
}

impl Lowering<'_> {
    pub(super) fn one_launch(&mut self, at: usize, node: NodeId) -> Result<(), BackendError> {
        let graph = self.graph;
        let op = graph[node].op();
        if let Op::GetRows = op
            && let [table, ids] = *graph.inputs(node)
        {
            let (place, address) = self.place(node, table)?;
            if place.layout != Layout::Plain {
                let ids = self.tensor_arg(node, ids)?;
                return self.get_rows_packed(node, table, address, ids);
            }
        }
        let (inputs, out) = self.operands(node)?;
        let x = inputs.first().copied().unwrap_or_default();
        let second = inputs.get(1).copied().unwrap_or_default();
        let elements = out.elements();
        let launch = match op {
            Op::Unary(unary) => self
                .elementwise(c"k_unary", elements)?
                .arg(x)
                .arg(out)
                .arg(op_codes::unary(*unary))
                .arg(0.0f32)
                .arg(0.0f32),
            Op::Scale { scale, bias } => self
                .elementwise(c"k_unary", elements)?
                .arg(x)
                .arg(out)
                .arg(op_codes::UNARY_SCALE)
                .arg(*scale)
                .arg(*bias),
            Op::Clamp { min, max } => self
                .elementwise(c"k_unary", elements)?
                .arg(x)
                .arg(out)
                .arg(op_codes::UNARY_CLAMP)
                .arg(*min)
                .arg(*max),
            Op::Binary(binary) => {
                let code = op_codes::binary(*binary);
                match dense_quads([&x, &second, &out]) {
                    Some(quads) => self.over_quads(c"k_binary_dense", [&x, &second, &out], quads)?.arg(code),
                    None => self.elementwise(c"k_binary", elements)?.arg(x).arg(second).arg(out).arg(code),
                }
            }
            Op::Add1 => {
                let add = op_codes::binary(Binary::Add);
                self.elementwise(c"k_binary", elements)?.arg(x).arg(second).arg(out).arg(add)
            }
            Op::Gated { gate, swapped } => {
                let (first, second) = match inputs.as_slice() {
                    [a, b] => (*a, *b),
                    _ => halves(x),
                };
                let (gated, up) = if *swapped { (second, first) } else { (first, second) };
                let code = op_codes::gate(*gate);
                match dense_quads([&gated, &up, &out]) {
                    Some(quads) => self.over_quads(c"k_gated_dense", [&gated, &up, &out], quads)?.arg(code),
                    None => self.elementwise(c"k_gated", elements)?.arg(gated).arg(up).arg(out).arg(code),
                }
            }
            Op::DiagMaskInf { past } => {
                let past = *past as i64;
                self.elementwise(c"k_diag_mask", elements)?.arg(x).arg(out).arg(past).arg(f32::NEG_INFINITY)
            }
            Op::DiagMaskZero { past } => {
                self.elementwise(c"k_diag_mask", elements)?.arg(x).arg(out).arg(*past as i64).arg(0.0f32)
            }
            Op::GroupNorm { groups, eps } => {
                let blocks = x.dims[0] as u32 * *groups as u32;
                let function = self.function(KernelFile::Norm, c"k_group_norm")?;
                Launch::new(function, [blocks, 1, 1], 256).arg(x).arg(out).arg(*groups as i32).arg(*eps)
            }
            Op::SoftMax { scale, mask, sinks } => {
                let mut rest = inputs.iter().skip(1).copied();
                let mask = mask.then(|| rest.next()).flatten().unwrap_or_default();
                let sinks = sinks.then(|| rest.next()).flatten().unwrap_or_default();
                let function = self.function(KernelFile::Norm, c"k_soft_max")?;
                let launch = Launch::new(function, [x.rows() as u32, 1, 1], row_threads(x.dims[3]));
                launch.arg(x).arg(mask).arg(sinks).arg(out).arg(*scale)
            }
            Op::OutProd => Launch::over(self.function(KernelFile::Matmul, c"k_out_prod")?, elements)
                .arg(x)
                .arg(second)
                .arg(out),
            Op::GetRows => {
                if out.rows() > 1 && self.move_rows(node, [&x, &out, &second], false)? {
                    return Ok(());
                }
                let (faults, fault) = self.fault(node, "a row index is out of range");
                let launch = self.rows(c"k_get_rows", out.rows(), out.dims[3])?;
                // One token's row is shared by several blocks.
                let launch = if out.rows() == 1 { launch.grid_y(out.dims[3] as u32 / 256) } else { launch };
                launch.arg(x).arg(second).arg(out).arg(faults).arg(fault)
            }
            Op::SetRows => {
                let (faults, fault) = self.fault(node, "a row index is out of range");
                let ids = inputs.get(2).copied().unwrap_or_default();
                let flat = x.dims[0] == 1 && x.dims[1] == 1 && ids.strides[3] == 4 && second.rows() < 65_536;
                let f16_target = x.dtype == DType::F16.id()
                    && x.strides[3] == 2
                    && x.address.is_multiple_of(8)
                    && x.strides[2] % 8 == 0;
                if flat && f16_target && is_dense_f32(&second) {
                    let quads = second.dims[3] as u32 / 4;
                    let function = self.function(KernelFile::Rows, c"k_set_rows_f16")?;
                    self.push(
                        Launch::new(function, [quads.div_ceil(128), second.rows() as u32, 1], 128)
                            .arg(x.address)
                            .arg(x.strides[2])
                            .arg(x.dims[2])
                            .arg(second.address)
                            .arg(ids.address)
                            .arg(quads as i32)
                            .arg(faults)
                            .arg(fault),
                    );
                    return Ok(());
                }
                if self.move_rows(node, [&x, &second, &ids], true)? {
                    return Ok(());
                }
                let launch = self.rows(c"k_set_rows", second.rows(), second.dims[3])?;
                launch.arg(x).arg(second).arg(ids).arg(faults).arg(fault)
            }
            Op::Cast { .. } => return self.copy(x, out),
            Op::CopyInto => return self.copy(second, out),
            Op::Concat { axis4 } => {
                let mut target = out;
                for part in inputs {
                    target.dims = part.dims;
                    if part.elements() > 0 {
                        self.copy(part, target)?;
                    }
                    let step = part.dims.get(*axis4).copied().unwrap_or(0)
                        * out.strides.get(*axis4).copied().unwrap_or(0);
                    target.address += step as u64;
                }
                return Ok(());
            }
            Op::Repeat { .. } => {
                Launch::over(self.function(KernelFile::Rows, c"k_repeat")?, elements).arg(x).arg(out)
            }
            Op::Pad { before, .. } => {
                let [a, b, c, d] = before.map(|n| n as i64);
                let function = self.function(KernelFile::Rows, c"k_pad")?;
                Launch::over(function, elements).arg(x).arg(out).arg(a).arg(b).arg(c).arg(d)
            }
            Op::Sum => {
                Launch::new(self.function(KernelFile::Reduce, c"k_sum")?, [1, 1, 1], 1024).arg(x).arg(out)
            }
            Op::SumRows | Op::Mean => {
                let function = self.function(KernelFile::Reduce, c"k_sum_rows")?;
                let launch = Launch::new(function, [x.rows() as u32, 1, 1], row_threads(x.dims[3]));
                launch.arg(x).arg(out).arg(i32::from(matches!(op, Op::Mean)))
            }
            Op::ArgMax if self.argmax_sum(at, node, x, out)? => return Ok(()),
            Op::ArgMax => {
                let function = self.function(KernelFile::Reduce, c"k_argmax")?;
                Launch::new(function, [x.rows() as u32, 1, 1], 256).arg(x).arg(out)
            }
            Op::Custom(op) => {
                let code = CustomCode::of(op).ok_or_else(|| self.failed(node, "it has no code for CUDA"))?;
                let function = self.inner.kernels.custom(&code)?;
                let blocks = elements.min(MAX_CUSTOM_THREADS).div_ceil(u64::from(code.block()));
                let launch = Launch::new(function, [blocks.max(1) as u32, 1, 1], code.block());
                inputs.into_iter().fold(launch, Launch::arg).arg(out)
            }
            _ => return Err(self.failed(node, "there is no kernel for it")),
        };
        self.push(launch);
        Ok(())
    }

    fn elementwise(&self, name: &CStr, elements: u64) -> Result<Launch, BackendError> {
        Ok(Launch::over(self.function(KernelFile::Elementwise, name)?, elements))
    }

    /// A launch over the float4s of contiguous tensors, with their addresses and the number of float4s.
    fn over_quads(&self, name: &CStr, tensors: [&TensorArg; 3], quads: u64) -> Result<Launch, BackendError> {
        let launch = self.elementwise(name, quads)?;
        Ok(tensors.iter().fold(launch, |launch, tensor| launch.arg(tensor.address)).arg(quads))
    }

    fn rows(&self, name: &CStr, rows: u64, cols: i64) -> Result<Launch, BackendError> {
        Ok(Launch::new(self.function(KernelFile::Rows, name)?, [rows as u32, 1, 1], row_threads(cols)))
    }

    /// Copies elements in row-major order from one tensor to another, converting their type.
    fn copy(&mut self, from: TensorArg, to: TensorArg) -> Result<(), BackendError> {
        let quantized = |t: &TensorArg| DType::from_id(t.dtype).is_some_and(|d| !is_plain(d));
        let launch = if quantized(&to) && from.dtype == to.dtype {
            let dtype = DType::from_id(to.dtype).unwrap_or(DType::F32);
            let bytes = to.elements() / dtype.block_len() as u64 * dtype.block_bytes() as u64;
            Launch::over(self.function(KernelFile::Rows, c"k_copy_blocks")?, bytes)
                .arg(from)
                .arg(to)
                .arg(dtype.block_len() as i32)
                .arg(dtype.block_bytes() as i32)
        } else if quantized(&to) {
            Launch::over(self.function(KernelFile::Rows, c"k_copy_quantized")?, to.elements() / 32)
                .arg(from)
                .arg(to)
        } else {
            Launch::over(self.function(KernelFile::Rows, c"k_copy")?, to.elements()).arg(from).arg(to)
        };
        self.push(launch);
        Ok(())
    }

    /// Tries to fuse the argmax of rows with their sums, if those follow.
    fn argmax_sum(
        &mut self,
        at: usize,
        node: NodeId,
        x: TensorArg,
        out: TensorArg,
    ) -> Result<bool, BackendError> {
        let graph = self.graph;
        let next = self.next(at).filter(|next| {
            matches!(graph[*next].op(), Op::SumRows) && graph.inputs(*next) == graph.inputs(node)
        });
        let Some(next) = next.filter(|_| self.inner.fusion && is_dense_f32(&x)) else { return Ok(false) };
        let quads = x.dims[3] / 4;
        let sums = self.tensor_arg(next, graph[next].output())?;
        let (rows, bytes) = (x.rows() as usize * 4, x.elements() as usize * 4);
        // Rows are read until the end: neither result may overlap them.
        let apart = !overlap(sums.address, rows, x.address, bytes)
            && !overlap(out.address, rows, x.address, bytes)
            && !overlap(sums.address, rows, out.address, rows);
        if !apart || quads > i64::from(i32::MAX) / 32 {
            return Ok(false);
        }
        let function = self.function(KernelFile::Reduce, c"k_argmax_sum")?;
        let threads = (quads as u32).next_multiple_of(32).clamp(32, 1024);
        // A long row alone is shared by several blocks.
        let alone = x.rows() == 1 && quads > MIN_SHARED_QUADS;
        let blocks = if alone { (quads as u32 / 2048).min(MAX_ARGMAX_PARTS as u32) } else { 1 };
        self.uses_counters |= blocks > 1;
        let launch = Launch::new(function, [x.rows() as u32, blocks, 1], threads).dependent();
        let launch = launch.arg(x.address).arg(quads as i32).arg(out.address).arg(sums.address);
        self.push(launch.arg(self.inner.argmax_parts_address()).arg(self.inner.counters.address()));
        self.fuse(next);
        Ok(true)
    }

    /// Copies rows of f32 from a table, or to it with `store`; `false` if they are not dense.
    fn move_rows(
        &mut self,
        node: NodeId,
        [table, rows, ids]: [&TensorArg; 3],
        store: bool,
    ) -> Result<bool, BackendError> {
        let flat = [table.dims, rows.dims].iter().all(|[b, h, ..]| (*b, *h) == (1, 1));
        let dense = has_dense_rows(table, DType::F32, 16) && is_dense_f32(rows) && ids.strides[3] == 4;
        if !flat || !dense {
            return Ok(false);
        }
        let quads = rows.dims[3] / 4;
        let (faults, fault) = self.fault(node, "a row index is out of range");
        let function = self.function(KernelFile::Rows, c"k_move_rows")?;
        self.push(
            Launch::new(function, [rows.rows() as u32, 1, 1], row_threads(quads))
                .arg(table.address)
                .arg(table.strides[2])
                .arg(table.dims[2])
                .arg(rows.address)
                .arg(ids.address)
                .arg(quads as i32)
                .arg(i32::from(store))
                .arg(faults)
                .arg(fault),
        );
        Ok(true)
    }

    /// get_rows of a packed weight.
    fn get_rows_packed(
        &mut self,
        node: NodeId,
        table: TensorId,
        address: u64,
        ids: TensorArg,
    ) -> Result<(), BackendError> {
        let weight = self.tensor(table);
        let Some(packed) = PackedMatrix::of(weight) else {
            return Err(self.failed(node, "unknown weight layout"));
        };
        let out = self.tensor_arg(node, self.graph[node].output())?;
        let (faults, fault) = self.fault(node, "a row index is out of range");
        let function = self.function(KernelFile::Pack, c"k_get_rows_packed")?;
        self.push(
            Launch::new(function, [out.rows() as u32, 1, 1], row_threads(out.dims[3]))
                .arg(TensorArg::new(weight, address))
                .arg(address)
                .arg(address + packed.scales_at as u64)
                .arg(packed.format.code())
                .arg(ids)
                .arg(out)
                .arg(faults)
                .arg(fault),
        );
        Ok(())
    }
}

/// The number of float4s of each tensor, if all are contiguous f32 of one shape.
fn dense_quads(tensors: [&TensorArg; 3]) -> Option<u64> {
    let alike = tensors.windows(2).all(|pair| matches!(pair, [a, b] if a.dims == b.dims));
    let [first, ..] = tensors;
    (alike && tensors.iter().all(|tensor| is_dense_f32(tensor))).then_some(first.elements() / 4)
}

/// The first and second half of each row: gate and up in one tensor.
fn halves(x: TensorArg) -> (TensorArg, TensorArg) {
    let mut first = x;
    first.dims[3] /= 2;
    let mut second = first;
    second.address += (first.dims[3] * x.strides[3]) as u64;
    (first, second)
}

#[cfg(test)]
mod tests {
    use quadriga_graph::DType;

    use super::*;

    #[test]
    fn a_row_has_a_warp_per_32_columns_and_at_most_eight() {
        for (cols, threads) in [(0, 32), (1, 32), (32, 32), (33, 64), (255, 256), (256, 256), (100_000, 256)]
        {
            assert_eq!(row_threads(cols), threads, "{cols} columns");
        }
    }

    #[test]
    fn quads_are_counted_if_all_tensors_are_dense_and_alike() {
        let tensor = |dims: [i64; 4]| TensorArg {
            address: 1 << 20,
            dtype: DType::F32.id(),
            reserved: 0,
            dims,
            strides: [dims[1] * dims[2] * dims[3] * 4, dims[2] * dims[3] * 4, dims[3] * 4, 4],
        };
        let (x, other) = (tensor([1, 2, 3, 8]), tensor([1, 3, 2, 8]));
        let shifted = TensorArg { address: x.address + 4, ..x };
        assert_eq!(dense_quads([&x, &x, &x]), Some(12));
        for tensors in [[&other, &x, &x], [&x, &other, &x], [&x, &x, &other], [&x, &x, &shifted]] {
            assert_eq!(dense_quads(tensors), None);
        }
        let (first, second) = halves(x);
        assert_eq!((first.dims, second.dims), ([1, 2, 3, 4], [1, 2, 3, 4]));
        assert_eq!((first.address, second.address), (x.address, x.address + 16));
        assert_eq!(second.strides, x.strides);
    }
}

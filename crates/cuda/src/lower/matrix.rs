//! Matrix products.
//!
//! Up to eight rows: straight from the packed blocks, with the rows quantized to eight bits, several weights that
//! share their rows in one launch, and a following addition taken along. More rows: the weights become bf16 in
//! scratch memory, some at a time, and cuBLAS multiplies them on the tensor cores; unpacking moves a few bytes per
//! weight, which hundreds of rows make up for. Everything else: the plain kernel.

use quadriga_graph::{Binary, DType, NodeId, Op, TensorId};
use quadriga_runtime::{BackendError, Layout};

use super::packing::{Form, Packed};
use super::simple::is_dense_f32;
use super::{Lowering, overlap, scratch};
use crate::blas::{Operand, Product};
use crate::kernels::File;
use crate::launch::{Argument, Described, Launch};
use crate::program::Step;

/// The most rows that the one-row kernels take.
pub(super) const FEW: usize = 8;
/// Scratch bytes for weights as bf16: enough rows at a time to fill the device.
pub(super) const DENSE_BYTES: usize = 96 << 20;
const ROWS_PER_BLOCK: u32 = 8;

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
        if rows == 1 && self.stream(at, x, None)? {
            return Ok(());
        }
        let (place, address) = self.place(node, weight)?;
        let packed = match place.layout {
            Layout::Packed(_) => Packed::of(self.tensor(weight)),
            Layout::Plain => None,
        };
        match packed {
            Some(packed) if rows <= FEW => self.packed_product(at, node, packed, x),
            Some(packed) => self.dense_packed(node, packed, address, weight, x),
            None if place.layout != Layout::Plain => Err(self.failed(node, "unknown weight layout")),
            None => self.plain_product(at, node, weight, x),
        }
    }

    /// The residual, bias or other tensor of equal layout that the next node adds to a product, with that node.
    fn addend(&self, at: usize, product: TensorId) -> Option<(NodeId, TensorId)> {
        let next = self.only_reader(at, product)?;
        let [a, b] = *self.graph.inputs(next) else { return None };
        if !matches!(self.graph[next].op(), Op::Binary(Binary::Add)) {
            return None;
        }
        let other = if a == product { b } else { a };
        let (p, o) = (self.tensor(product), self.tensor(other));
        (p.same_layout(o) && p.is_contiguous()).then_some((next, other))
    }

    /// Products of up to eight rows with packed weights. Following products of the same rows come along.
    fn packed_product(
        &mut self,
        at: usize,
        node: NodeId,
        packed: Packed,
        x: TensorId,
    ) -> Result<(), BackendError> {
        let rows = self.tensor(x).shape().rows();
        let few = rows.next_power_of_two();
        let (quants, scales) = self.quantize(node, x, packed.blocks, few)?;
        let mut segments = Segments { blocks: packed.blocks as u32, ..Segments::default() };
        let mut first = 0;
        let mut group = vec![(at, node)];
        for (later_at, later) in self.split.nodes.iter().enumerate().skip(at + 1) {
            let op = self.graph[*later].op();
            if op.is_view() {
                continue;
            }
            let same = matches!(op, Op::MulMat)
                && self.graph.inputs(*later).get(1) == Some(&x)
                && self.graph.inputs(*later).first().is_some_and(|w| {
                    (self.split.place)(*w).is_some_and(|p| p.layout != Layout::Plain)
                        && Packed::of(self.tensor(*w)).is_some_and(|p| p.form == packed.form)
                });
            if !same || group.len() == segments.all.len() {
                break;
            }
            group.push((later_at, *later));
        }
        for ((at, member), slot) in group.iter().zip(segments.all.iter_mut()) {
            let Some(weight) = self.graph.inputs(*member).first().copied() else { continue };
            let (_, address) = self.place(*member, weight)?;
            let Some(layout) = Packed::of(self.tensor(weight)) else { continue };
            let mut output = self.graph[*member].output();
            let mut add = 0;
            // Only the last of a group may take its addition along: the others' follow later products.
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
        let name = kernel(packed.form, few);
        let function = self.function(File::Matmul, name)?;
        self.push(
            Launch::new(function, [first, 1, 1], 128).arg(segments).arg(quants).arg(scales).arg(rows as u32),
        );
        Ok(())
    }

    /// The rows of `x` quantized to eight bits at the start of scratch memory, in room for `few` rows.
    fn quantize(
        &mut self,
        node: NodeId,
        x: TensorId,
        blocks: usize,
        few: usize,
    ) -> Result<(u64, u64), BackendError> {
        let known = self.quantized == Some(x);
        let [quants, scales] = self.scratch(node, scratch::quantized(few, blocks))?;
        self.quantized = Some(x);
        if !known {
            let rows = self.described(node, x)?;
            let function = self.function(File::Matmul, c"k_quantize")?;
            let threads = rows.rows() * blocks as u64 * 8;
            self.push(Launch::over(function, threads).arg(rows).arg(quants).arg(scales).arg(blocks as i64));
        }
        Ok((quants, scales))
    }

    /// Products of many rows with packed weights, through bf16.
    fn dense_packed(
        &mut self,
        node: NodeId,
        packed: Packed,
        address: u64,
        weight: TensorId,
        x: TensorId,
    ) -> Result<(), BackendError> {
        if self.shared.blas.is_none() {
            return self.in_eights(node, packed, weight, x);
        }
        let function = self.function(File::Pack, c"k_unpack_bf16")?;
        let (quants, scales) = (address, address + packed.scales_at as u64);
        self.dense(node, weight, x, Operand::Bf16, |first, rows, to| {
            let blocks = (rows * packed.blocks) as u64;
            Launch::over(function, blocks * 4)
                .arg(quants)
                .arg(scales)
                .arg(packed.form as i32)
                .arg(first as i64)
                .arg(rows as i64)
                .arg(packed.blocks as i64)
                .arg(to)
        })
    }

    /// Products of many rows with packed weights, eight at a time: where there is no cuBLAS.
    fn in_eights(
        &mut self,
        node: NodeId,
        packed: Packed,
        weight: TensorId,
        x: TensorId,
    ) -> Result<(), BackendError> {
        let m = self.tensor(x).shape().rows();
        let (quants, scales) = self.quantize(node, x, packed.blocks, m.next_multiple_of(FEW))?;
        let address = self.place(node, weight)?.1;
        let out = self.described(node, self.graph[node].output())?;
        let n = self.tensor(weight).shape().rows() as u32;
        let function = self.function(File::Matmul, kernel(packed.form, FEW))?;
        for first in (0..m).step_by(FEW) {
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
                    .arg((m - first).min(FEW) as u32),
            );
        }
        Ok(())
    }

    /// Converts rows of weights into scratch memory, some at a time, and multiplies.
    fn dense(
        &mut self,
        node: NodeId,
        weight: TensorId,
        x: TensorId,
        operand: Operand,
        unpack: impl Fn(usize, usize, u64) -> Launch,
    ) -> Result<(), BackendError> {
        let out = self.described(node, self.graph[node].output())?;
        let source = self.described(node, x)?;
        let (n, k, m) =
            (self.tensor(weight).shape().rows(), self.tensor(weight).shape().cols(), source.rows() as usize);
        let size = if operand == Operand::F32 { 4 } else { 2 };
        let at_once = scratch::rows_at_once(k, size, n);
        let converted = self.converted == Some((x, operand));
        let [rows, weights] = self.scratch(node, scratch::dense(m, k, size, n))?;
        self.converted = Some((x, operand));
        if !converted {
            let launch = if operand == Operand::Bf16 && is_dense_f32(&source) && k.is_multiple_of(8) {
                let eights = (m * k / 8) as u64;
                let function = self.function(File::Pack, c"k_to_bf16")?;
                Launch::over(function, eights).arg(source.address).arg(eights).arg(rows)
            } else {
                let function = self.function(File::Pack, c"k_to_dense")?;
                let mode = i32::from(operand == Operand::F32);
                let launch = Launch::over(function, (m * k) as u64).arg(source).arg(0i64).arg(m as i64);
                launch.arg(rows).arg(mode)
            };
            self.push(launch);
        }
        for first in (0..n).step_by(at_once) {
            let count = at_once.min(n - first);
            self.push(unpack(first, count, weights));
            self.steps.push(Step::Product(Product {
                m,
                n: count,
                k,
                w: weights,
                w_stride: k,
                x: rows,
                x_stride: k,
                out: out.address + 4 * first as u64,
                out_stride: n,
                operand,
                workspace: self.workspace,
            }));
        }
        Ok(())
    }

    /// Products with weights as the file has them.
    fn plain_product(
        &mut self,
        at: usize,
        node: NodeId,
        weight: TensorId,
        x: TensorId,
    ) -> Result<(), BackendError> {
        let (w, rows) = (self.described(node, weight)?, self.described(node, x)?);
        let (wt, xt) = (self.tensor(weight), self.tensor(x));
        let flat = wt.dims4()[0] == 1 && wt.dims4()[1] == 1 && wt.is_contiguous();
        let float = matches!(wt.dtype(), DType::F16 | DType::BF16 | DType::F32);
        let (m, k) = (xt.shape().rows(), xt.shape().cols());
        let aligned = k.is_multiple_of(8) && w.address.is_multiple_of(16) && rows.address.is_multiple_of(16);
        if flat && float && m <= FEW && aligned && xt.dtype() == DType::F32 && xt.is_contiguous() {
            return self.float_product(at, node, weight, x, w, rows);
        }
        // Exact f32 products of few columns gain nothing from cuBLAS's start-up.
        if flat && m > FEW && k >= 16 && self.shared.blas.is_some() {
            if wt.dtype() == DType::F16 {
                return self.half_product(node, x, w, rows);
            }
            let operand = if wt.dtype() == DType::F32 { Operand::F32 } else { Operand::Bf16 };
            if let Some(name) = from_blocks(wt.dtype()) {
                let function = self.function(File::Pack, name)?;
                return self.dense(node, weight, x, operand, |first, count, to| {
                    Launch::over(function, (count * k / 8) as u64)
                        .arg(w)
                        .arg(first as i64)
                        .arg(count as i64)
                        .arg(to)
                });
            }
            let function = self.function(File::Pack, c"k_to_dense")?;
            let mode = i32::from(operand == Operand::F32);
            return self.dense(node, weight, x, operand, |first, count, to| {
                Launch::over(function, (count * k) as u64)
                    .arg(w)
                    .arg(first as i64)
                    .arg(count as i64)
                    .arg(to)
                    .arg(mode)
            });
        }
        let out = self.described(node, self.graph[node].output())?;
        let function = self.function(File::Matmul, c"k_mul_mat")?;
        let blocks =
            u32::try_from(out.elements().div_ceil(8)).map_err(|_| self.failed(node, "too many results"))?;
        self.push(Launch::new(function, [blocks, 1, 1], 256).arg(w).arg(rows).arg(out));
        Ok(())
    }

    /// Products of many rows with f16 weights where they lie.
    fn half_product(
        &mut self,
        node: NodeId,
        source: TensorId,
        w: Described,
        x: Described,
    ) -> Result<(), BackendError> {
        let out = self.described(node, self.graph[node].output())?;
        let (m, n, k) = (x.rows() as usize, w.rows() as usize, x.dims[3] as usize);
        let converted = self.converted == Some((source, Operand::F16));
        let [rows, scales] = self.scratch(node, scratch::halves(m, k))?;
        self.converted = Some((source, Operand::F16));
        if !converted {
            let narrow = self.function(File::Pack, c"k_to_half_scaled")?;
            self.push(Launch::new(narrow, [m as u32, 1, 1], 256).arg(x).arg(rows).arg(scales));
        }
        self.steps.push(Step::Product(Product {
            m,
            n,
            k,
            w: w.address,
            w_stride: k,
            x: rows,
            x_stride: k,
            out: out.address,
            out_stride: n,
            operand: Operand::F16,
            workspace: self.workspace,
        }));
        let widen = self.function(File::Pack, c"k_scale_rows")?;
        self.push(Launch::new(widen, [m as u32, 1, 1], 256).arg(out.address).arg(scales).arg(n as i64));
        Ok(())
    }

    fn float_product(
        &mut self,
        at: usize,
        node: NodeId,
        weight: TensorId,
        x: TensorId,
        w: Described,
        rows: Described,
    ) -> Result<(), BackendError> {
        let mut output = self.graph[node].output();
        let mut add = 0;
        if let Some((sum, other)) = self.addend(at, output) {
            let (_, from) = self.place(node, x)?;
            let (_, to) = self.place(node, self.graph[sum].output())?;
            let bytes = self.tensor(self.graph[sum].output()).bytes();
            // The rows are read until the end: the sum must not lie over them.
            if !overlap(from, self.tensor(x).bytes(), to, bytes) {
                add = self.place(node, other)?.1;
                output = self.graph[sum].output();
                self.fuse(sum);
            }
        }
        let out = self.described(node, output)?;
        let m = self.tensor(x).shape().rows();
        let n = self.tensor(weight).shape().rows() as u64;
        let name = match m.next_power_of_two() {
            1 => c"k_float_1",
            2 => c"k_float_2",
            4 => c"k_float_4",
            _ => c"k_float_8",
        };
        let function = self.function(File::Matmul, name)?;
        let launch = Launch::new(function, [n.div_ceil(4) as u32, 1, 1], 128);
        self.push(launch.arg(w).arg(rows).arg(out).arg(add).arg(m as u32));
        Ok(())
    }

    pub(super) fn mul_mat_id(&mut self, node: NodeId) -> Result<(), BackendError> {
        let (inputs, out) = self.operands(node)?;
        let [w, x, ids] = *inputs.as_slice() else {
            return Err(self.failed(node, "three inputs are needed"));
        };
        let (faults, fault) = self.fault(node, "an expert's number is out of range");
        let function = self.function(File::Matmul, c"k_mul_mat_id")?;
        let blocks =
            u32::try_from(out.elements().div_ceil(8)).map_err(|_| self.failed(node, "too many results"))?;
        let launch = Launch::new(function, [blocks, 1, 1], 256);
        self.push(launch.arg(w).arg(x).arg(ids).arg(out).arg(faults).arg(fault));
        Ok(())
    }
}

/// The kernel that turns blocks of a format, as the file has them, into bf16, where there is one for it.
fn from_blocks(dtype: DType) -> Option<&'static std::ffi::CStr> {
    Some(match dtype {
        DType::Q4_0 => c"k_bf16_from_q4_0",
        DType::Q4_1 => c"k_bf16_from_q4_1",
        DType::Q5_0 => c"k_bf16_from_q5_0",
        DType::Q5_1 => c"k_bf16_from_q5_1",
        DType::Q8_0 => c"k_bf16_from_q8_0",
        DType::Q4_K => c"k_bf16_from_q4_k",
        DType::Q5_K => c"k_bf16_from_q5_k",
        DType::Q6_K => c"k_bf16_from_q6_k",
        _ => return None,
    })
}

/// The kernel for packed weights and up to so many rows: 1, 2, 4 or 8.
fn kernel(form: Form, few: usize) -> &'static std::ffi::CStr {
    match (form, few) {
        (Form::Four, 1) => c"k_four_1",
        (Form::Four, 2) => c"k_four_2",
        (Form::Four, 4) => c"k_four_4",
        (Form::Four, _) => c"k_four_8",
        (Form::Shifted, 1) => c"k_shifted_1",
        (Form::Shifted, 2) => c"k_shifted_2",
        (Form::Shifted, 4) => c"k_shifted_4",
        (Form::Shifted, _) => c"k_shifted_8",
        (_, 1) => c"k_eight_1",
        (_, 2) => c"k_eight_2",
        (_, 4) => c"k_eight_4",
        _ => c"k_eight_8",
    }
}

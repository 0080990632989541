//! The operations that become one launch each, and which nodes there are kernels for.

use quadriga_graph::{Binary, DType, Gate, Graph, NodeId, Op, Order, TensorId, Unary};
use quadriga_runtime::{BackendError, Layout, Refusal};

use super::packing::Packed;
use super::stream::Norm;
use super::{Lowering, overlap, scratch};
use crate::backend::is_plain;
use crate::kernels::File;
use crate::launch::{Described, Launch};

/// The longest row that is sorted in a block's shared memory; longer ones are sorted in pieces, which are merged.
pub(super) const MOST_SORTED: usize = 4096;
/// The largest grid dimension beyond the first, and head size, that the attention kernel takes.
const MOST_GRID: usize = 65_535;
const MOST_HEAD: usize = 512;
const MOST_ROWS: usize = i32::MAX as usize;

pub(super) fn supports(graph: &Graph, node: NodeId) -> Result<(), Refusal> {
    let refuse = |reason: &'static str| Err(Refusal(reason.into()));
    let n = &graph[node];
    let out = &graph[n.output()];
    let input = |i: usize| graph.inputs(node).get(i).map(|id| &graph[*id]);
    if out.shape().rows() > MOST_ROWS {
        return refuse("more rows than a grid has blocks");
    }
    match n.op() {
        Op::ArgSort { .. } | Op::TopK { .. }
            if input(0).is_some_and(|x| x.shape().cols() > MOST_SORTED * MOST_GRID) =>
        {
            refuse("rows of more pieces to be sorted than a grid has blocks")
        }
        Op::Attention(_) => {
            let (Some(q), Some(v)) = (input(0), input(2)) else { return refuse("inputs are missing") };
            let [b, h, t, d] = q.dims4();
            if d > MOST_HEAD || v.shape().cols() > MOST_HEAD {
                return refuse("heads of more than 512 elements");
            }
            if b.saturating_mul(t) > MOST_GRID || h > MOST_GRID {
                return refuse("more queries than a grid has blocks");
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// The number by which `k_unary` knows a function.
fn unary_number(unary: Unary) -> i32 {
    Unary::ALL.iter().position(|u| *u == unary).map_or(-1, |n| n as i32)
}

/// Threads of a block that works on one row.
fn row_threads(cols: i64) -> u32 {
    (cols as u32).div_ceil(32).clamp(1, 8) * 32
}

impl Lowering<'_> {
    pub(super) fn simple(&mut self, at: usize, node: NodeId) -> Result<(), BackendError> {
        let graph = self.graph;
        let op = graph[node].op();
        if let Op::GetRows = op
            && let [table, ids] = *graph.inputs(node)
        {
            let (place, address) = self.place(node, table)?;
            if place.layout != Layout::Plain {
                let ids = self.described(node, ids)?;
                return self.packed_rows(node, table, address, ids);
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
                .arg(unary_number(*unary))
                .arg(0.0f32)
                .arg(0.0f32),
            Op::Scale { scale, bias } => {
                self.elementwise(c"k_unary", elements)?.arg(x).arg(out).arg(100i32).arg(*scale).arg(*bias)
            }
            Op::Clamp { min, max } => {
                self.elementwise(c"k_unary", elements)?.arg(x).arg(out).arg(101i32).arg(*min).arg(*max)
            }
            Op::Binary(binary) => {
                let number = match binary {
                    Binary::Add => 0i32,
                    Binary::Sub => 1,
                    Binary::Mul => 2,
                    Binary::Div => 3,
                };
                match dense_quads([&x, &second, &out]) {
                    Some(quads) => {
                        self.over_quads(c"k_binary_dense", [&x, &second, &out], quads)?.arg(number)
                    }
                    None => self.elementwise(c"k_binary", elements)?.arg(x).arg(second).arg(out).arg(number),
                }
            }
            Op::Add1 => self.elementwise(c"k_binary", elements)?.arg(x).arg(second).arg(out).arg(0i32),
            Op::Gated { gate, swapped } => {
                let (first, second) = match inputs.as_slice() {
                    [a, b] => (*a, *b),
                    _ => halves(x),
                };
                let (gated, up) = if *swapped { (second, first) } else { (first, second) };
                let number = match gate {
                    Gate::Swiglu => 0i32,
                    Gate::Geglu => 1,
                    Gate::Reglu => 2,
                };
                match dense_quads([&gated, &up, &out]) {
                    Some(quads) => self.over_quads(c"k_gated_dense", [&gated, &up, &out], quads)?.arg(number),
                    None => self.elementwise(c"k_gated", elements)?.arg(gated).arg(up).arg(out).arg(number),
                }
            }
            Op::DiagMaskInf { past } => {
                let past = *past as i64;
                self.elementwise(c"k_diag_mask", elements)?.arg(x).arg(out).arg(past).arg(f32::NEG_INFINITY)
            }
            Op::DiagMaskZero { past } => {
                self.elementwise(c"k_diag_mask", elements)?.arg(x).arg(out).arg(*past as i64).arg(0.0f32)
            }
            Op::Norm { eps } => return self.row_norm(at, node, x, out, 0, *eps),
            Op::RmsNorm { eps } => return self.row_norm(at, node, x, out, 1, *eps),
            Op::L2Norm { eps } => return self.row_norm(at, node, x, out, 2, *eps),
            Op::GroupNorm { groups, eps } => {
                let blocks = x.dims[0] as u32 * *groups as u32;
                let function = self.function(File::Norm, c"k_group_norm")?;
                Launch::new(function, [blocks, 1, 1], 256).arg(x).arg(out).arg(*groups as i32).arg(*eps)
            }
            Op::SoftMax { scale, mask, sinks } => {
                let mut rest = inputs.iter().skip(1).copied();
                let mask = mask.then(|| rest.next()).flatten().unwrap_or_default();
                let sinks = sinks.then(|| rest.next()).flatten().unwrap_or_default();
                let function = self.function(File::Norm, c"k_soft_max")?;
                let launch = Launch::new(function, [x.rows() as u32, 1, 1], row_threads(x.dims[3]));
                launch.arg(x).arg(mask).arg(sinks).arg(out).arg(*scale)
            }
            Op::Rope { rope, .. } => return self.rope(at, node, rope),
            Op::OutProd => Launch::over(self.function(File::Matmul, c"k_out_prod")?, elements)
                .arg(x)
                .arg(second)
                .arg(out),
            Op::GetRows => {
                let (faults, fault) = self.fault(node, "a row index is out of range");
                let launch = self.rows(c"k_get_rows", out.rows(), out.dims[3])?;
                launch.arg(x).arg(second).arg(out).arg(faults).arg(fault)
            }
            Op::SetRows => {
                let (faults, fault) = self.fault(node, "a row index is out of range");
                let ids = inputs.get(2).copied().unwrap_or_default();
                let flat = x.dims[0] == 1 && x.dims[1] == 1 && ids.strides[3] == 4 && second.rows() < 65_536;
                let halves = x.dtype == DType::F16.id()
                    && x.strides[3] == 2
                    && x.address.is_multiple_of(8)
                    && x.strides[2] % 8 == 0;
                if flat && halves && is_dense_f32(&second) {
                    let quads = second.dims[3] as u32 / 4;
                    let function = self.function(File::Rows, c"k_set_rows_f16")?;
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
                Launch::over(self.function(File::Rows, c"k_repeat")?, elements).arg(x).arg(out)
            }
            Op::Pad { before, .. } => {
                let [a, b, c, d] = before.map(|n| n as i64);
                let function = self.function(File::Rows, c"k_pad")?;
                Launch::over(function, elements).arg(x).arg(out).arg(a).arg(b).arg(c).arg(d)
            }
            Op::Sum => Launch::new(self.function(File::Reduce, c"k_sum")?, [1, 1, 1], 1024).arg(x).arg(out),
            Op::SumRows | Op::Mean => {
                let function = self.function(File::Reduce, c"k_sum_rows")?;
                let launch = Launch::new(function, [x.rows() as u32, 1, 1], row_threads(x.dims[3]));
                launch.arg(x).arg(out).arg(i32::from(matches!(op, Op::Mean)))
            }
            Op::ArgMax if self.argmax_sum(at, node, x, out)? => return Ok(()),
            Op::ArgMax => {
                let function = self.function(File::Reduce, c"k_argmax")?;
                Launch::new(function, [x.rows() as u32, 1, 1], 256).arg(x).arg(out)
            }
            Op::ArgSort { order } => return self.sort(node, x, out, *order),
            Op::TopK { .. } => return self.sort(node, x, out, Order::Descending),
            _ => return Err(self.failed(node, "there is no kernel for it")),
        };
        self.push(launch);
        Ok(())
    }

    fn elementwise(&self, name: &std::ffi::CStr, elements: u64) -> Result<Launch, BackendError> {
        Ok(Launch::over(self.function(File::Elementwise, name)?, elements))
    }

    /// A launch over whole float4s of contiguous tensors, with their addresses and the number of those.
    fn over_quads(
        &self,
        name: &std::ffi::CStr,
        tensors: [&Described; 3],
        quads: u64,
    ) -> Result<Launch, BackendError> {
        let launch = self.elementwise(name, quads)?;
        Ok(tensors.iter().fold(launch, |launch, tensor| launch.arg(tensor.address)).arg(quads))
    }

    fn rows(&self, name: &std::ffi::CStr, rows: u64, cols: i64) -> Result<Launch, BackendError> {
        Ok(Launch::new(self.function(File::Rows, name)?, [rows as u32, 1, 1], row_threads(cols)))
    }

    /// A norm, with the multiplication by its weight where that follows.
    fn row_norm(
        &mut self,
        at: usize,
        node: NodeId,
        x: Described,
        mut out: Described,
        mode: i32,
        eps: f32,
    ) -> Result<(), BackendError> {
        let result = self.graph[node].output();
        let mut weight = Described::default();
        if let Some(next) = self.only_reader(at, result)
            && matches!(self.graph[next].op(), Op::Binary(Binary::Mul))
            && let [a, b] = *self.graph.inputs(next)
            && a == result
        {
            let product = self.graph[next].output();
            if mode == 1 && self.norm_stream(node, next, b, eps)? {
                return Ok(());
            }
            let source = self.graph.inputs(node).first().copied().unwrap_or(result);
            let (_, to) = self.place(node, product)?;
            let bytes = self.tensor(source).bytes();
            // A row is read whole before any of it is written: exactly in place is fine, partly over it is not.
            let exact = to == x.address && self.tensor(source).same_layout(self.tensor(product));
            if exact || !overlap(to, self.tensor(product).bytes(), x.address, bytes) {
                weight = self.described(node, b)?;
                out = self.described(node, product)?;
                self.fuse(next);
            }
        }
        if mode == 1
            && weight.address != 0
            && weight.dims == [1, 1, 1, x.dims[3]]
            && let Some(quads) = [x, out, weight].iter().all(is_dense_f32).then_some(x.dims[3] as u32 / 4)
            && quads <= 4096
        {
            let function = self.function(File::Norm, c"k_rms_rows")?;
            let threads = quads.div_ceil(4).next_multiple_of(32).clamp(128, 1024);
            let launch = Launch::new(function, [x.rows() as u32, 1, 1], threads);
            self.push(launch.arg(x.address).arg(weight.address).arg(out.address).arg(quads as i32).arg(eps));
            return Ok(());
        }
        let function = self.function(File::Norm, c"k_row_norm")?;
        let threads = (x.dims[3] as u32).div_ceil(32).clamp(1, 32) * 32;
        let launch = Launch::new(function, [x.rows() as u32, 1, 1], threads);
        self.push(launch.arg(x).arg(weight).arg(out).arg(mode).arg(eps));
        Ok(())
    }

    /// Tries to make one launch of a root-mean-square norm, the multiplication `times` by its weight, and the products
    /// that follow, if nothing else reads the result.
    fn norm_stream(
        &mut self,
        node: NodeId,
        times: NodeId,
        weight: TensorId,
        eps: f32,
    ) -> Result<bool, BackendError> {
        let product = self.graph[times].output();
        let Some(x) = self.graph.inputs(node).first().copied() else { return Ok(false) };
        let at = self.split.nodes.iter().position(|n| *n == times).unwrap_or(usize::MAX);
        let vector = self.described(node, weight)?;
        let fits = vector.dims == [1, 1, 1, self.tensor(x).shape().cols() as i64] && is_dense_f32(&vector);
        let Some(first) = self.later(at).next().filter(|_| fits && !(self.split.kept)(product)) else {
            return Ok(false);
        };
        let starts =
            self.readers(product).iter().find(|at| self.split.nodes.get(**at) == Some(&first)).copied();
        let Some(starts) = starts.filter(|_| matches!(self.graph[first].op(), Op::MulMat)) else {
            return Ok(false);
        };
        if !self.stream(starts, product, Some(Norm { x, weight, eps }))? {
            return Ok(false);
        }
        self.fuse(times);
        Ok(true)
    }

    /// Elements in row-major order from one tensor to another, cast on the way.
    fn copy(&mut self, from: Described, to: Described) -> Result<(), BackendError> {
        let quantized = |t: &Described| DType::from_id(t.dtype).is_some_and(|d| !is_plain(d));
        let launch = if quantized(&to) && from.dtype == to.dtype {
            let dtype = DType::from_id(to.dtype).unwrap_or(DType::F32);
            let bytes = to.elements() / dtype.block_len() as u64 * dtype.block_bytes() as u64;
            Launch::over(self.function(File::Rows, c"k_copy_blocks")?, bytes)
                .arg(from)
                .arg(to)
                .arg(dtype.block_len() as i32)
                .arg(dtype.block_bytes() as i32)
        } else if quantized(&to) {
            Launch::over(self.function(File::Rows, c"k_copy_quantized")?, to.elements() / 32)
                .arg(from)
                .arg(to)
        } else {
            Launch::over(self.function(File::Rows, c"k_copy")?, to.elements()).arg(from).arg(to)
        };
        self.push(launch);
        Ok(())
    }

    /// Tries to make one launch of the largest elements of rows and, where that follows, their sums.
    fn argmax_sum(
        &mut self,
        at: usize,
        node: NodeId,
        x: Described,
        out: Described,
    ) -> Result<bool, BackendError> {
        let graph = self.graph;
        let next = self.next(at).filter(|next| {
            matches!(graph[*next].op(), Op::SumRows) && graph.inputs(*next) == graph.inputs(node)
        });
        let Some(next) = next.filter(|_| self.shared.fuses && is_dense_f32(&x)) else { return Ok(false) };
        let quads = x.dims[3] / 4;
        let sums = self.described(next, graph[next].output())?;
        let (rows, bytes) = (x.rows() as usize * 4, x.elements() as usize * 4);
        // Rows are read until the last of them is done.
        let apart = !overlap(sums.address, rows, x.address, bytes)
            && !overlap(out.address, rows, x.address, bytes)
            && !overlap(sums.address, rows, out.address, rows);
        if !apart || quads > i64::from(i32::MAX) / 32 {
            return Ok(false);
        }
        let function = self.function(File::Reduce, c"k_argmax_sum")?;
        let threads = (quads as u32).next_multiple_of(32).clamp(32, 1024);
        let launch = Launch::new(function, [x.rows() as u32, 1, 1], threads).early();
        self.push(launch.arg(x.address).arg(quads as i32).arg(out.address).arg(sums.address));
        self.fuse(next);
        Ok(true)
    }

    fn sort(&mut self, node: NodeId, x: Described, out: Described, order: Order) -> Result<(), BackendError> {
        let cols = x.dims[3] as usize;
        let padded = cols.next_power_of_two().clamp(2, MOST_SORTED);
        let pieces = cols.div_ceil(padded) as u32;
        let descending = i32::from(order == Order::Descending);
        let [mut from, mut to] =
            if pieces > 1 { self.scratch(node, scratch::sort(x.elements() as usize))? } else { [0; 2] };
        let function = self.function(File::Reduce, c"k_argsort")?;
        let launch = Launch::new(function, [x.rows() as u32, pieces, 1], (padded as u32 / 2).clamp(32, 512));
        let launch = launch.shared(padded as u32 * 8).arg(x).arg(out).arg(from);
        self.push(launch.arg(descending).arg(padded as i32));
        let merge = self.function(File::Reduce, c"k_merge_runs")?;
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

    /// Rows of a packed weight.
    fn packed_rows(
        &mut self,
        node: NodeId,
        table: TensorId,
        address: u64,
        ids: Described,
    ) -> Result<(), BackendError> {
        let weight = self.tensor(table);
        let Some(packed) = Packed::of(weight) else { return Err(self.failed(node, "unknown weight layout")) };
        let out = self.described(node, self.graph[node].output())?;
        let (faults, fault) = self.fault(node, "a row index is out of range");
        let function = self.function(File::Pack, c"k_get_rows_packed")?;
        self.push(
            Launch::new(function, [out.rows() as u32, 1, 1], row_threads(out.dims[3]))
                .arg(Described::new(weight, address))
                .arg(address)
                .arg(address + packed.scales_at as u64)
                .arg(packed.form as i32)
                .arg(ids)
                .arg(out)
                .arg(faults)
                .arg(fault),
        );
        Ok(())
    }
}

/// How many float4s each of some tensors is, if all of them are contiguous f32 of one shape.
fn dense_quads(tensors: [&Described; 3]) -> Option<u64> {
    let alike = tensors.windows(2).all(|pair| matches!(pair, [a, b] if a.dims == b.dims));
    let [first, ..] = tensors;
    (alike && tensors.iter().all(|tensor| is_dense_f32(tensor))).then_some(first.elements() / 4)
}

/// Whether a tensor is contiguous f32 in rows of whole, aligned float4s.
pub(super) fn is_dense_f32(t: &Described) -> bool {
    let [_, d1, d2, d3] = t.dims;
    t.dtype == DType::F32.id()
        && t.address.is_multiple_of(16)
        && d3 % 4 == 0
        && t.strides[3] == 4
        && (t.rows() == 1 || t.strides == [d1 * d2 * d3 * 4, d2 * d3 * 4, d3 * 4, 4])
}

/// The two halves of each row.
fn halves(x: Described) -> (Described, Described) {
    let mut first = x;
    first.dims[3] /= 2;
    let mut second = first;
    second.address += (first.dims[3] * x.strides[3]) as u64;
    (first, second)
}

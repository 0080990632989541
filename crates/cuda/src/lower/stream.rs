//! Products of one row whose matrices stream through shared memory, with what comes before and after: the norm of the
//! row, a bias or residual, a gated unit. See `kernels/stream.cu`.

use std::ffi::CStr;

use quadriga_graph::{Binary, DType, Gate, NodeId, Op, TensorId, TensorKind};
use quadriga_runtime::{BackendError, Layout};

use super::packing::{Form, Packed};
use super::{Lowering, overlap};
use crate::kernels::File;
use crate::launch::{Argument, Launch};

/// Warps of a block that leaves room on its multiprocessor for the next kernel's, and of one that does not, as in the
/// kernel.
const FEW_WARPS: usize = 8;
const MANY_WARPS: usize = 16;
/// Bytes of weights for each multiprocessor from which on more warps are worth more than room for the next kernel.
const MUCH: usize = 40_000;
/// The most slots of a warp's ring.
const MOST_SLOTS: usize = 8;
/// Shared memory of a block so that two fit a multiprocessor: the next kernel's rings fill while this one runs.
const SHARED_OF_TWO: usize = 114_000;
/// Shared memory of a block that is alone.
const SHARED_OF_ONE: usize = 220_000;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Part {
    quants: u64,
    scales: u64,
    out: u64,
    add: u64,
    rows: u32,
    first: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Job {
    part: [Part; 3],
    x: u64,
    norm: u64,
    count: u32,
    gated: u32,
    units: u32,
    cols: u32,
    slots: u32,
    eps: f32,
}

// SAFETY: `struct Job` of stream.cu has the same fields in the same order.
unsafe impl Argument for Job {}

/// A norm that the row passes through before it is multiplied.
#[derive(Clone, Copy)]
pub(super) struct Norm {
    /// What is normed.
    pub(super) x: TensorId,
    /// The weight that it is multiplied with.
    pub(super) weight: TensorId,
    pub(super) eps: f32,
}

/// A matrix that can be streamed.
#[derive(Clone, Copy, PartialEq)]
struct Matrix {
    form: Form,
    quants: u64,
    scales: u64,
    rows: usize,
}

/// One product of a launch.
struct Member {
    matrix: Matrix,
    /// What it computes by itself.
    product: TensorId,
    /// What is added to it.
    add: Option<TensorId>,
    /// What is written.
    output: TensorId,
    /// The nodes that it stands for.
    nodes: Vec<NodeId>,
}

impl Lowering<'_> {
    /// Tries to make one launch of a product at position `at` and what belongs to it. `x` is the row as the graph has
    /// it; with a norm, all that reads it must come along. `false` if it cannot be: nothing has happened then.
    pub(super) fn stream(
        &mut self,
        at: usize,
        x: TensorId,
        norm: Option<Norm>,
    ) -> Result<bool, BackendError> {
        if !self.shared.fuses || !self.shared.context.has_bulk_copies() {
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
        let mut members = self.members(at, x)?;
        let Some(form) = members.first().map(|member| member.matrix.form) else { return Ok(false) };
        let reads = self.readers(x).len();
        let gated = self.gated(at, &members);
        if let Some((unit, swapped)) = gated {
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
        if !self.is_safe(node, source, &members, gated.is_some())? {
            // One at a time, without what follows.
            members.truncate(1);
            if let Some(first) = members.first_mut() {
                (first.add, first.output) = (None, first.product);
                first.nodes.truncate(1);
            }
            if gated.is_some() || !self.is_safe(node, source, &members, false)? {
                return Ok(false);
            }
        }
        if norm.is_some() && members.len() < reads {
            return Ok(false);
        }
        let rows: usize = members.iter().map(|member| member.matrix.rows).sum();
        let units = if gated.is_some() { rows / 2 } else { rows.div_ceil(2) };
        let multiprocessors = self.shared.context.multiprocessors as usize;
        let Some(cut) = Cut::of(form, cols, rows, units, multiprocessors) else { return Ok(false) };
        // Warps find their units by numbers of 32 bits.
        if u32::try_from((units + 1) * multiprocessors * cut.warps).is_err() {
            return Ok(false);
        }
        let mut job = Job { x: from, cols: cols as u32, slots: cut.slots as u32, ..Job::default() };
        if let Some(norm) = norm {
            job.norm = self.place(node, norm.weight)?.1;
            job.eps = norm.eps;
        }
        job.gated = u32::from(gated.is_some());
        for (member, part) in members.iter().zip(&mut job.part) {
            *part = Part {
                quants: member.matrix.quants,
                scales: member.matrix.scales,
                out: self.place(node, member.output)?.1,
                add: match member.add {
                    Some(add) => self.place(node, add)?.1,
                    None => 0,
                },
                rows: member.matrix.rows as u32,
                first: job.units,
            };
            job.units += member.matrix.rows.div_ceil(2) as u32;
            job.count += 1;
        }
        if gated.is_some() {
            job.units = job.part[0].rows;
        }
        let blocks = self.shared.context.multiprocessors.min(job.units).max(1);
        let function = self.shared.kernels.large_function(
            File::Stream,
            name(form, cut.warps == MANY_WARPS),
            SHARED_OF_ONE as u32,
        )?;
        let launch = Launch::new(function, [blocks, 1, 1], cut.warps as u32 * 32).shared(cut.shared as u32);
        self.push(launch.early().arg(job));
        members.iter().flat_map(|member| &member.nodes).for_each(|node| self.fuse(*node));
        Ok(true)
    }

    /// The product at a position and those that follow it directly with the same row, each with its addition.
    fn members(&mut self, at: usize, x: TensorId) -> Result<Vec<Member>, BackendError> {
        let mut members: Vec<Member> = Vec::new();
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
                && let Some(matrix) = self.matrix(node, weight)?
                && members.first().is_none_or(|first| first.matrix.form == matrix.form)
            {
                members.push(Member { matrix, product: output, add: None, output, nodes: vec![node] });
                continue;
            }
            // The only other thing that may stand between products is an addition to one of them.
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

    /// The matrix of a product, if it can be streamed. Only weights are there before the kernel before is done.
    fn matrix(&mut self, node: NodeId, weight: TensorId) -> Result<Option<Matrix>, BackendError> {
        let tensor = self.tensor(weight);
        if tensor.kind() != TensorKind::Weight || tensor.storage() != weight || tensor.shape().rank() > 2 {
            return Ok(None);
        }
        let (place, quants) = self.place(node, weight)?;
        let (rows, cols) = (tensor.shape().rows(), tensor.shape().cols());
        if rows > u32::MAX as usize / 4 || cols > u32::MAX as usize / 4 {
            return Ok(None);
        }
        Ok(match place.layout {
            Layout::Packed(_) => Packed::of(tensor).map(|packed| Matrix {
                form: packed.form,
                quants,
                scales: quants + packed.scales_at as u64,
                rows,
            }),
            Layout::Plain => (tensor.dtype() == DType::F16
                && tensor.is_contiguous()
                && cols.is_multiple_of(8)
                && quants.is_multiple_of(16))
            .then_some(Matrix { form: Form::Half, quants, scales: 0, rows }),
        })
    }

    /// The gated unit of two products, if that is what they are for, and whether the second one is the gate.
    fn gated(&self, at: usize, members: &[Member]) -> Option<(NodeId, bool)> {
        let [one, two] = members else { return None };
        let last = *two.nodes.first()?;
        let position = self.split.nodes.iter().skip(at).position(|node| *node == last)? + at;
        let unit = self.next(position)?;
        let Op::Gated { gate: Gate::Swiglu, swapped } = self.graph[unit].op() else { return None };
        let [a, b] = *self.graph.inputs(unit) else { return None };
        let (gate, up) = if *swapped { (b, a) } else { (a, b) };
        let both = (gate, up) == (one.product, two.product) || (gate, up) == (two.product, one.product);
        let alone = |m: &Member| {
            let product = &self.graph[m.product];
            m.add.is_none() && !(self.split.kept)(m.product) && self.readers(product.storage()).len() == 1
        };
        let out = &self.graph[self.graph[unit].output()];
        let fits = out.dtype() == DType::F32 && out.is_contiguous() && one.matrix.rows == two.matrix.rows;
        (both && alone(one) && alone(two) && fits).then_some((unit, gate == two.product))
    }

    /// Whether everything that is read stays as it is until it was read: the row by all, what is added by its own
    /// thread alone.
    fn is_safe(
        &mut self,
        node: NodeId,
        row: TensorId,
        members: &[Member],
        gated: bool,
    ) -> Result<bool, BackendError> {
        let range = |lowering: &mut Self, id: TensorId| -> Result<(u64, usize), BackendError> {
            Ok((lowering.place(node, id)?.1, lowering.tensor(id).bytes()))
        };
        let apart = |a: (u64, usize), b: (u64, usize)| !overlap(a.0, a.1, b.0, b.1);
        let row = range(self, row)?;
        let members = if gated { members.get(..1).unwrap_or_default() } else { members };
        for (index, member) in members.iter().enumerate() {
            let out = range(self, member.output)?;
            if !apart(out, row) {
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

fn name(form: Form, alone: bool) -> &'static CStr {
    match (form, alone) {
        (Form::Four, false) => c"k_stream_four",
        (Form::Shifted, false) => c"k_stream_shifted",
        (Form::Eight, false) => c"k_stream_eight",
        (Form::Half, false) => c"k_stream_half",
        (Form::Four, true) => c"k_stream_four_alone",
        (Form::Shifted, true) => c"k_stream_shifted_alone",
        (Form::Eight, true) => c"k_stream_eight_alone",
        (Form::Half, true) => c"k_stream_half_alone",
    }
}

/// How a launch is cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Cut {
    /// Warps of a block.
    warps: usize,
    /// Slots of a warp's ring.
    slots: usize,
    /// Bytes of shared memory of a block.
    shared: usize,
}

impl Cut {
    /// For matrices of so many rows in all, in so many units.
    fn of(form: Form, cols: usize, rows: usize, units: usize, multiprocessors: usize) -> Option<Cut> {
        if !cols.is_multiple_of(if form == Form::Half { 8 } else { 32 }) || cols == 0 {
            return None;
        }
        let chunk = match form {
            Form::Four | Form::Shifted => 4096,
            Form::Eight => 2048,
            Form::Half => 1024,
        };
        let bytes = |elements: usize| match form {
            Form::Four => elements / 2 + (elements / 16).next_multiple_of(16),
            Form::Shifted => elements / 2 + (elements / 8).next_multiple_of(16),
            Form::Eight => elements + (elements / 16).next_multiple_of(16),
            Form::Half => 2 * elements,
        };
        let slot = 2 * bytes(cols.min(chunk));
        // Eight-bit elements and two floats for each 32 of them, or floats.
        let row = if form == Form::Half { cols * 4 } else { cols + cols / 4 };
        // No more slots than a warp fills, and no fewer than `least` if it could fill more.
        let with = |warps: usize, limit: usize, least: usize| {
            let filled = units.div_ceil(multiprocessors.max(1) * warps).max(1) * cols.div_ceil(chunk);
            let slots = (limit.checked_sub(row)? / (warps * slot)).min(MOST_SLOTS).min(filled);
            (slots >= least.min(filled)).then_some(Cut { warps, slots, shared: warps * slots * slot + row })
        };
        let alone = (rows * bytes(cols) > multiprocessors * MUCH)
            .then(|| with(MANY_WARPS, SHARED_OF_ONE, 2))
            .flatten();
        let shares = || with(FEW_WARPS, SHARED_OF_TWO, 2);
        alone.or_else(shares).or_else(|| with(FEW_WARPS, SHARED_OF_ONE, 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMS: [Form; 4] = [Form::Four, Form::Shifted, Form::Eight, Form::Half];

    #[test]
    fn little_work_leaves_room_for_the_next_kernel_and_no_slot_is_empty() {
        for form in FORMS {
            for cols in [32, 576, 1536, 4096, 8192, 11008] {
                let cut = Cut::of(form, cols, 132, 66, 132).unwrap();
                assert!(cut.warps == FEW_WARPS && cut.shared <= SHARED_OF_TWO, "{form:?} {cols}: {cut:?}");
                assert!(cut.slots >= 2 || cols <= 4096, "{form:?} {cols}: {cut:?}");
            }
            assert_eq!(Cut::of(form, 10, 132, 66, 132), None);
            assert_eq!(Cut::of(form, 1 << 20, 132, 66, 132), None);
        }
        assert_eq!(Cut::of(Form::Four, 576, 960, 480, 132).unwrap().slots, 1, "a warp has one unit");
    }

    #[test]
    fn much_work_has_more_warps_and_rings_that_fill_while_they_empty() {
        for form in FORMS {
            for (cols, rows) in [(4096, 12_288), (4096, 22_016), (11_008, 4096), (4096, 32_000)] {
                let cut = Cut::of(form, cols, rows, rows / 2, 132).unwrap();
                assert!(cut.warps == MANY_WARPS && cut.slots >= 2, "{form:?} {cols}: {cut:?}");
                assert!(cut.shared <= SHARED_OF_ONE, "{form:?} {cols}: {cut:?}");
            }
        }
    }
}

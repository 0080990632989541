//! Custom operations: the caller's code over units of the result.

use std::ops::Range;

use quadriga_graph::{CustomCall, CustomInput, CustomOp, CustomOutput, Graph, NodeId, Shape, Tensor};

use super::lowered::{LoweredOp, TeamOp};
use super::operand::Operand;
use crate::kernels::KernelError;
use crate::memory::ALIGNMENT;
use crate::partition::Partition;
use crate::pool::Worker;
use crate::step::{Access, Kernel, StepPart, TeamError, TeamKernel, WorkMemory};
use crate::view::TensorView;

/// An input in memory; `tensor` is its description in the graph.
struct CustomOperand {
    tensor: Tensor,
    view: TensorView,
}

struct CustomRun {
    op: CustomOp,
    inputs: Vec<CustomOperand>,
    out: TensorView,
    shape: Shape,
    units: usize,
    /// Bytes of the scratch memory of each thread.
    scratch: usize,
}

/// The caller's code over independent units.
struct CustomPart(CustomRun);

/// The caller's code with scratch memory per thread.
struct CustomTeam(CustomRun);

/// Lowers a custom operation.
pub(crate) fn custom(
    op: &CustomOp,
    graph: &Graph,
    node: NodeId,
    operands: &[Operand],
    out: &TensorView,
) -> Result<LoweredOp, String> {
    let missing = || "the graph has no such tensor".to_owned();
    let output = graph.get_node(node).and_then(|node| graph.get(node.output())).ok_or_else(missing)?;
    let tensors: Vec<&Tensor> = graph.inputs(node).iter().filter_map(|id| graph.get(*id)).collect();
    if tensors.len() != operands.len() || !out.is_contiguous() {
        return Err(missing());
    }
    if operands.iter().any(|operand| operand.packed.is_some()) {
        return Err("it cannot read a packed weight".into());
    }
    let units = op.units(&tensors, output)?;
    let scratch = op.scratch_bytes(&tensors, output)?;
    let cost = usize::try_from(op.operations(&tensors, output)).unwrap_or(usize::MAX);
    let inputs: Vec<CustomOperand> = tensors
        .iter()
        .zip(operands)
        .map(|(tensor, operand)| CustomOperand { tensor: (*tensor).clone(), view: operand.view })
        .collect();
    // The code may read any part of an input, except of the one that the result overwrites.
    let access = |(index, input): (usize, &CustomOperand)| match op.in_place() == Some(index) {
        true => Access::reads_own(&input.view, Partition::equal(units)),
        false => Access::reads(&input.view),
    };
    let mut accesses: Vec<Access> = inputs.iter().enumerate().map(access).collect();
    accesses.push(Access::writes_own(out, Partition::equal(units)));
    let run = CustomRun { op: op.clone(), inputs, out: *out, shape: *output.shape(), units, scratch };
    if scratch == 0 {
        return Ok(LoweredOp::Part(StepPart::new(CustomPart(run), units, cost, accesses)));
    }
    let each = scratch.checked_next_multiple_of(ALIGNMENT).ok_or("its scratch memory is too large")?;
    let work_bytes = move |threads: usize| {
        let short = KernelError::Short { what: "scratch memory", has: usize::MAX, needs: each };
        each.checked_mul(threads).ok_or(short)
    };
    Ok(LoweredOp::Team(TeamOp {
        kernel: Box::new(CustomTeam(CustomRun { scratch: each, ..run })),
        accesses,
        work_bytes: Box::new(work_bytes),
        name: 0,
        label: op.name(),
    }))
}

impl CustomRun {
    /// Computes some units; `scratch` is this thread's.
    fn run(&self, units: Range<usize>, scratch: &mut [u8]) -> Result<(), String> {
        let elements = self.out.elements() / self.units.max(1);
        let (first, end) = (units.start * elements, units.end * elements);
        let overwritten = self.op.in_place();
        let mut inputs = Vec::with_capacity(self.inputs.len());
        for (index, input) in self.inputs.iter().enumerate() {
            let bytes = if overwritten == Some(index) {
                self.fill(&input.view, first..end);
                None
            } else {
                // SAFETY: the program holds the buffer. Nothing writes to an input while a step reads it: fusion
                // orders conflicting accesses by barriers, and compilation has refused a result that overlaps an
                // input other than the one it overwrites, of which no slice is made.
                Some(unsafe { input.view.bytes() })
            };
            inputs.push(CustomInput::new(&input.tensor, bytes));
        }
        // SAFETY: the program holds the buffer for writing, each unit is computed by one thread, and no slice of the same
        // memory exists: see above.
        let Some(bytes) = (unsafe { self.out.elements_mut(first..end) }) else {
            return Err("its units are not whole blocks".into());
        };
        self.op.compute(CustomCall {
            inputs: &inputs,
            units,
            unit_count: self.units,
            output: CustomOutput::new(self.out.dtype, self.shape, first, bytes),
            scratch,
        })
    }

    /// Copies elements of the overwritten input to the result, unless they are there already.
    fn fill(&self, from: &TensorView, elements: Range<usize>) {
        if from.range() == self.out.range() {
            return;
        }
        let columns = self.out.cols().max(1);
        let mut at = elements.start;
        while at < elements.end {
            let (row, column) = (at / columns, at % columns);
            let len = (columns - column).min(elements.end - at);
            let place = self.out.place(row);
            self.out.copy_from(place, column, from, place, column, len);
            at += len;
        }
    }
}

impl Kernel for CustomPart {
    fn run(&self, units: Range<usize>, _work: WorkMemory) -> Result<(), String> {
        self.0.run(units, &mut [])
    }
}

impl TeamKernel for CustomTeam {
    fn run(&self, worker: &Worker<'_>, work: WorkMemory) -> Result<(), TeamError> {
        let CustomRun { units, scratch, .. } = self.0;
        let first = worker.index() * scratch;
        if first + scratch > work.bytes {
            return Err(TeamError::Data("there is too little scratch memory".into()));
        }
        // SAFETY: the range is inside the work memory, which belongs to this step, and is this thread's alone.
        let memory = unsafe { std::slice::from_raw_parts_mut(work.pointer.wrapping_add(first), scratch) };
        let size = units.div_ceil(worker.threads() * 4).max(1);
        let chunks = units.div_ceil(size);
        let run = |chunk: usize| self.0.run(chunk * size..((chunk + 1) * size).min(units), memory);
        worker.try_chunks(chunks, run).map_err(TeamError::Data)
    }
}

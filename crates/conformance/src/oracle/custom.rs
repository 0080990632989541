//! Custom operations: their reference in f64, or their own code on bytes.

use quadriga_graph::{
    CustomCall, CustomInput, CustomOp, CustomOutput, CustomValues, Graph, NodeId, Shape, Tensor,
};

use super::EvalError;
use super::memory::{View, ViewMut, zeros};

/// Computes a node in f64 by its reference; by its code, if it has none.
pub(super) fn evaluate(
    op: &CustomOp,
    graph: &Graph,
    id: NodeId,
    inputs: &[View<'_>],
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    let Some(output) = graph.get_node(id).and_then(|node| graph.get(node.output())) else {
        return Err(EvalError::Memory);
    };
    // An operation that overwrites an input reads it, too.
    let mut values = Vec::new();
    for input in inputs {
        values.push(CustomValues { dims: input.dims(), values: input.all()? });
    }
    match op.reference(&values, output) {
        Some(result) => out.set_all(&result.map_err(EvalError::Custom)?),
        None => compute(op, graph, id, inputs, out),
    }
}

/// Computes a node by the operation's code for the CPU, on contiguous copies of its inputs.
pub(super) fn compute(
    op: &CustomOp,
    graph: &Graph,
    id: NodeId,
    views: &[View<'_>],
    out: &mut ViewMut<'_>,
) -> Result<(), EvalError> {
    let Some(output) = graph.get_node(id).and_then(|node| graph.get(node.output())) else {
        return Err(EvalError::Memory);
    };
    if output.elements() == 0 {
        return Ok(());
    }
    let tensors: Vec<&Tensor> = graph.inputs(id).iter().filter_map(|id| graph.get(*id)).collect();
    let unit_count = op.units(&tensors, output).map_err(EvalError::Custom)?;
    let scratch = op.scratch_bytes(&tensors, output).map_err(EvalError::Custom)?;
    let mut result = AlignedBytes::new(output.bytes())?;
    let mut copies = Vec::new();
    for (index, view) in views.iter().enumerate() {
        let bytes = view.all_bytes()?;
        let mut copy = AlignedBytes::new(bytes.len())?;
        copy.bytes_mut().copy_from_slice(&bytes);
        if op.in_place() == Some(index) && bytes.len() == output.bytes() {
            result.bytes_mut().copy_from_slice(&bytes);
        }
        copies.push(copy);
    }
    let mut inputs = Vec::new();
    for (index, (view, copy)) in views.iter().zip(&copies).enumerate() {
        let bytes = (op.in_place() != Some(index)).then(|| copy.bytes());
        let rank = tensors.get(index).map_or(4, |tensor| tensor.shape().rank());
        let dims = view.dims();
        let shape = dims.get(4 - rank..).and_then(Shape::new).unwrap_or(Shape::from(dims));
        let input = CustomInput::contiguous(view.layout.dtype, shape, bytes);
        inputs.push(input.ok_or(EvalError::Memory)?);
    }
    let call = CustomCall {
        inputs: &inputs,
        units: 0..unit_count,
        unit_count,
        output: CustomOutput::new(output.dtype(), *output.shape(), 0, result.bytes_mut()),
        scratch: &mut zeros(scratch)?,
    };
    op.compute(call).map_err(EvalError::Custom)?;
    out.set_all_bytes(result.bytes())
}

/// Bytes at an address that suits every element type.
struct AlignedBytes {
    words: Vec<u64>,
    len: usize,
}

impl AlignedBytes {
    fn new(len: usize) -> Result<AlignedBytes, EvalError> {
        Ok(AlignedBytes { words: zeros(len.div_ceil(8))?, len })
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words).get(..self.len).unwrap_or_default()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.words).get_mut(..self.len).unwrap_or_default()
    }
}

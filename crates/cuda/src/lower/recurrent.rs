//! Recurrent layers: causal convolution and the gated delta rule.

use quadriga_graph::{GatedDeltaRule, NodeId};
use quadriga_runtime::BackendError;

use super::lowering::Lowering;
use crate::kernels::KernelFile;
use crate::launch::{Argument, Launch, TensorArg};

/// Columns of the state that a block takes.
const COLUMNS: u32 = 32;
/// The most rows of a head's state: those of the largest kernel.
pub(super) const MAX_DELTA_DEPTH: usize = 256;

#[repr(C)]
#[derive(Clone, Copy)]
struct DeltaRule {
    inputs: [TensorArg; 6],
    out: u64,
    scale: f32,
    tiled: i32,
    delta: i32,
    reserved: i32,
}

// SAFETY: `struct DeltaRule` of recurrent.cu has the same fields in the same order, the inputs one by one.
unsafe impl Argument for DeltaRule {}

impl Lowering<'_> {
    pub(super) fn ssm_conv(&mut self, node: NodeId) -> Result<(), BackendError> {
        let (inputs, out) = self.operands(node)?;
        let [x, kernel] = *inputs.as_slice() else {
            return Err(self.failed(node, "two inputs are needed"));
        };
        let function = self.function(KernelFile::Recurrent, c"k_ssm_conv")?;
        let launch = Launch::over(function, out.elements()).dependent();
        self.push(launch.arg(x).arg(kernel).arg(out.address).arg(out.elements() as i64));
        Ok(())
    }

    pub(super) fn gated_delta_rule(
        &mut self,
        node: NodeId,
        parameters: &GatedDeltaRule,
    ) -> Result<(), BackendError> {
        let (inputs, out) = self.operands(node)?;
        let Ok(inputs) = <[TensorArg; 6]>::try_from(inputs) else {
            return Err(self.failed(node, "six inputs are needed"));
        };
        if self.delta_chunks(node, parameters, inputs, out.address)? {
            return Ok(());
        }
        let [_, keys, values, ..] = inputs;
        let name = match keys.dims[3] {
            ..=64 => c"k_delta_rule_64",
            65..=128 => c"k_delta_rule_128",
            _ => c"k_delta_rule_256",
        };
        let function = self.function(KernelFile::Recurrent, name)?;
        let grid = [(values.dims[3] as u32).div_ceil(COLUMNS), values.dims[2] as u32, 1];
        let work = DeltaRule {
            inputs,
            out: out.address,
            scale: parameters.scale,
            tiled: i32::from(parameters.tiled),
            delta: i32::from(parameters.delta),
            reserved: 0,
        };
        self.push(Launch::new(function, grid, 128).dependent().arg(work));
        Ok(())
    }
}

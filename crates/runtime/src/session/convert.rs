//! Values that are converted between `f32` and a tensor's own type.

use quadriga_graph::blocks::{self, FormatError};
use quadriga_graph::{DType, Tensor};

use super::session::Session;
use super::tensor_ref::TensorRef;
use crate::RuntimeError;

/// Conversions, for callers that have `f32` where a tensor has another type: F16 and BF16 are rounded to nearest, ties to
/// even (numbers beyond the range become infinite), and quantized types are quantized as
/// [`blocks::quantize`] does. [`Session::set`] and [`Session::read`] never convert.
///
/// ```
/// use quadriga_graph::{DType, GraphBuilder};
/// use quadriga_runtime::{Scheduler, f16};
///
/// let g = GraphBuilder::new();
/// let x = g.input("x", DType::F16, [2]);
/// g.output("y", x.cast(DType::F32).scale(2.0).cast(DType::BF16));
///
/// let mut session = Scheduler::new(quadriga_cpu::Backend::new()?).plan(g.finish()?)?.session()?;
/// session.set_from_f32("x", &[1.5, 2.5])?;         // the same as:
/// session.set("x", &[f16::from_f32(1.5), f16::from_f32(2.5)])?;
/// session.run(&[])?;
/// assert_eq!(session.read_as_f32("y")?, [3.0, 5.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
impl Session {
    /// Sets an input from `f32` values, converted to the input's type.
    pub fn set_from_f32<'n>(
        &mut self,
        input: impl Into<TensorRef<'n>>,
        values: &[f32],
    ) -> Result<(), RuntimeError> {
        let input = input.into();
        let current = self.ready()?;
        let prepared = self.plans.get(current)?;
        let (name, tensor) = prepared.inputs.named(&prepared.plan, input)?;
        let bytes = to_type(name, tensor, values)?;
        self.set(input, &bytes)
    }

    /// Reads an output of the latest run, converted to `f32`; waits for it.
    pub fn read_as_f32<'n>(&mut self, output: impl Into<TensorRef<'n>>) -> Result<Vec<f32>, RuntimeError> {
        let output = output.into();
        let place = self.plans.get(self.plans.current()?)?.output(output)?;
        let name = place.name.clone();
        let Some(dtype) = place.elements() else { return Err(RuntimeError::Strided { name }) };
        let bytes = self.read::<u8>(output)?;
        to_f32(&name, dtype, &bytes)
    }

    /// Writes a state from `f32` values, converted to the state's type.
    pub fn write_state_from_f32(&mut self, name: &str, values: &[f32]) -> Result<(), RuntimeError> {
        let bytes = to_type(name, self.state(name)?.tensor(), values)?;
        self.write_state(name, &bytes)
    }

    /// Reads a state, converted to `f32`.
    pub fn read_state_as_f32(&mut self, name: &str) -> Result<Vec<f32>, RuntimeError> {
        let dtype = self.state(name)?.tensor().dtype();
        let bytes = self.read_state::<u8>(name)?;
        to_f32(name, dtype, &bytes)
    }
}

fn to_type(name: &str, tensor: &Tensor, values: &[f32]) -> Result<Vec<u8>, RuntimeError> {
    let (expected, found) = (tensor.elements(), values.len());
    if expected != found {
        return Err(RuntimeError::WrongCount { name: name.to_owned(), expected, found });
    }
    let mut bytes = vec![0; tensor.bytes()];
    blocks::quantize(tensor.dtype(), values, &mut bytes).map_err(|error| no_conversion(name, error))?;
    Ok(bytes)
}

fn to_f32(name: &str, dtype: DType, bytes: &[u8]) -> Result<Vec<f32>, RuntimeError> {
    let mut values = vec![0.0; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    blocks::dequantize(dtype, bytes, &mut values).map_err(|error| no_conversion(name, error))?;
    Ok(values)
}

fn no_conversion(name: &str, error: FormatError) -> RuntimeError {
    RuntimeError::NoConversion { name: name.to_owned(), reason: error.to_string() }
}

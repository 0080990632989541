//! The interface of a custom operation.

use std::any::Any;
use std::sync::Arc;

use super::call::{CustomCall, CustomValues};
use super::error::CustomError;
use crate::dtype::DType;
use crate::shape::Shape;
use crate::tensor::Tensor;

/// An operation of the caller's own: its rule, its code and its properties.
///
/// [`CustomOp::new`](super::CustomOp::new) makes an operation of it, [`CustomFunction`](super::CustomFunction) is an
/// implementation by closures. An error or a panic in any method is an error of the call that needed it: of building the
/// graph, or of the run, with the node's name.
///
/// ```
/// use quadriga_graph::{
///     CustomCall, CustomError, CustomKernel, CustomOp, DType, GraphBuilder, Shape, Tensor,
/// };
///
/// /// Each element to a power.
/// struct Power(i32);
///
/// impl CustomKernel for Power {
///     fn name(&self) -> &'static str {
///         "power"
///     }
///
///     fn infer(&self, inputs: &[&Tensor]) -> Result<(DType, Shape), CustomError> {
///         match inputs {
///             [x] if x.dtype() == DType::F32 => Ok((DType::F32, *x.shape())),
///             _ => Err("one F32 input is needed".into()),
///         }
///     }
///
///     // Two objects with the same exponent are the same operation.
///     fn attributes(&self) -> Option<Vec<u8>> {
///         Some(self.0.to_le_bytes().to_vec())
///     }
///
///     // The result starts as a copy of input 0, or in its memory.
///     fn in_place(&self) -> Option<usize> {
///         Some(0)
///     }
///
///     fn compute(&self, mut call: CustomCall<'_>) -> Result<(), CustomError> {
///         for value in call.output.f32()? {
///             *value = value.powi(self.0);
///         }
///         Ok(())
///     }
/// }
///
/// let g = GraphBuilder::new();
/// let x = g.input("x", DType::F32, [2, 3]);
/// g.output("y", x.custom(&CustomOp::new(Power(3)), &[]));
/// assert_eq!(g.finish()?.nodes()[0].op().name(), "power");
/// assert_eq!(CustomOp::new(Power(3)), CustomOp::new(Power(3)));
/// assert_ne!(CustomOp::new(Power(3)), CustomOp::new(Power(2)));
/// # Ok::<(), quadriga_graph::BuildError>(())
/// ```
pub trait CustomKernel: Any + Send + Sync {
    /// The operation's name in tables, traces and messages.
    fn name(&self) -> &'static str;

    /// The computation in a line.
    fn description(&self) -> &'static str {
        "custom operation"
    }

    /// The result's type and shape, or the reason why the operation does not take these inputs.
    ///
    /// # Errors
    /// The inputs are not what the operation needs.
    fn infer(&self, inputs: &[&Tensor]) -> Result<(DType, Shape), CustomError>;

    /// Computes some units of the result on the CPU. Any thread may call it for any units, several at the same time; the
    /// result must not depend on how units are distributed.
    ///
    /// # Errors
    /// The data cannot be computed with. The run ends with this error, under the node's name.
    fn compute(&self, call: CustomCall<'_>) -> Result<(), CustomError>;

    /// Everything that distinguishes this object from others of its type, if that can be said in bytes: two objects of
    /// one type with equal names and attributes are the same operation, so that a graph built again from new objects
    /// finds its plan. With `None`, an operation equals only its own clones.
    fn attributes(&self) -> Option<Vec<u8>> {
        None
    }

    /// The input, one of the first eight, that the result overwrites: it has the result's type and shape.
    /// [`CustomCall::output`] then starts as its elements, and its memory is the input's where no other node needs that.
    /// Each unit is computed from the same unit of this input; [`CustomCall::inputs`] has only its shape.
    fn in_place(&self) -> Option<usize> {
        None
    }

    /// Into how many equal, contiguous parts the result can be divided, for threads to compute. [default: its rows]
    fn units(&self, inputs: &[&Tensor], output: &Tensor) -> usize {
        let _ = inputs;
        output.shape().rows()
    }

    /// Bytes of scratch memory for each thread, as [`CustomCall::scratch`]. [default: none]
    fn scratch_bytes(&self, inputs: &[&Tensor], output: &Tensor) -> usize {
        let _ = (inputs, output);
        0
    }

    /// About how many arithmetic operations it takes, for statistics and for the number of threads. [default: one per
    /// element of the result]
    fn operations(&self, inputs: &[&Tensor], output: &Tensor) -> u64 {
        let _ = inputs;
        output.elements() as u64
    }

    /// The result in float64, in row-major order: the judge of [`compute`](CustomKernel::compute) and of every backend's
    /// code in `quadriga_conformance`. [default: none; the oracle then calls `compute`]
    fn reference(&self, inputs: &[CustomValues], output: &Tensor) -> Option<Result<Vec<f64>, CustomError>> {
        let _ = (inputs, output);
        None
    }

    /// Code for another backend, by the family's name (`cuda`, `sim`): a value of the type that the backend documents, such
    /// as `quadriga_cuda::CustomCode`. Where there is no code, the scheduler places the node on the CPU and copies its inputs
    /// and result. [default: none]
    fn backend_code(&self, family: &str) -> Option<Arc<dyn Any + Send + Sync>> {
        let _ = family;
        None
    }
}

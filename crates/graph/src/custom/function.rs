//! A custom operation of closures.

use std::any::Any;
use std::sync::Arc;

use super::call::{CustomCall, CustomValues};
use super::error::CustomError;
use super::kernel::CustomKernel;
use super::op::CustomOp;
use crate::dtype::DType;
use crate::shape::Shape;
use crate::tensor::Tensor;

type Rule = Box<dyn Fn(&[&Tensor]) -> Result<(DType, Shape), CustomError> + Send + Sync>;
type Compute = Box<dyn Fn(CustomCall<'_>) -> Result<(), CustomError> + Send + Sync>;
type Reference = Box<dyn Fn(&[CustomValues]) -> Vec<f64> + Send + Sync>;

/// A [`CustomKernel`] made of closures. It has no attributes: an operation made of it equals only its own clones, so
/// make it once and use it in every graph.
///
/// ```
/// use quadriga_graph::{CustomFunction, DType, GraphBuilder};
///
/// let reverse = CustomFunction::new(
///     "reverse_rows",
///     |inputs| match inputs {
///         [x] => Ok((DType::F32, *x.shape())),
///         _ => Err("one input is needed".into()),
///     },
///     |mut call| {
///         let x = call.input(0)?;
///         let columns = x.shape().cols();
///         for (row, to) in call.units.clone().zip(call.output.f32()?.chunks_mut(columns)) {
///             x.read_row(row, to)?;
///             to.reverse();
///         }
///         Ok(())
///     },
/// )
/// .build();
///
/// let g = GraphBuilder::new();
/// g.output("y", g.input("x", DType::F32, [2, 3]).custom(&reverse, &[]));
/// assert!(g.finish().is_ok());
/// ```
pub struct CustomFunction {
    name: &'static str,
    rule: Rule,
    compute: Compute,
    in_place: Option<usize>,
    units: Option<usize>,
    scratch: usize,
    operations: Option<u64>,
    reference: Option<Reference>,
    code: Vec<(&'static str, Arc<dyn Any + Send + Sync>)>,
}

impl CustomFunction {
    /// An operation with a name, a rule that infers the result, and the code that computes units of it; see
    /// [`CustomKernel::infer`] and [`CustomKernel::compute`].
    pub fn new(
        name: &'static str,
        rule: impl Fn(&[&Tensor]) -> Result<(DType, Shape), CustomError> + Send + Sync + 'static,
        compute: impl Fn(CustomCall<'_>) -> Result<(), CustomError> + Send + Sync + 'static,
    ) -> CustomFunction {
        CustomFunction {
            name,
            rule: Box::new(rule),
            compute: Box::new(compute),
            in_place: None,
            units: None,
            scratch: 0,
            operations: None,
            reference: None,
            code: Vec::new(),
        }
    }

    /// Lets the result overwrite an input; see [`CustomKernel::in_place`].
    #[must_use]
    pub fn in_place(mut self, input: usize) -> CustomFunction {
        self.in_place = Some(input);
        self
    }

    /// Sets the number of units [default: the rows of the result]; see [`CustomKernel::units`].
    #[must_use]
    pub fn units(mut self, units: usize) -> CustomFunction {
        self.units = Some(units);
        self
    }

    /// Sets the scratch memory of each thread [default: none]; see [`CustomKernel::scratch_bytes`].
    #[must_use]
    pub fn scratch_bytes(mut self, bytes: usize) -> CustomFunction {
        self.scratch = bytes;
        self
    }

    /// Sets the cost per element of the result, in arithmetic operations [default: 1].
    #[must_use]
    pub fn operations_per_element(mut self, operations: u64) -> CustomFunction {
        self.operations = Some(operations);
        self
    }

    /// Sets the reference in float64; see [`CustomKernel::reference`].
    #[must_use]
    pub fn reference(
        mut self,
        reference: impl Fn(&[CustomValues]) -> Vec<f64> + Send + Sync + 'static,
    ) -> CustomFunction {
        self.reference = Some(Box::new(reference));
        self
    }

    /// Adds code for a family of backends; see [`CustomKernel::backend_code`].
    #[must_use]
    pub fn backend_code(mut self, family: &'static str, code: impl Any + Send + Sync) -> CustomFunction {
        self.code.push((family, Arc::new(code)));
        self
    }

    /// The operation.
    pub fn build(self) -> CustomOp {
        CustomOp::new(self)
    }
}

impl CustomKernel for CustomFunction {
    fn name(&self) -> &'static str {
        self.name
    }

    fn infer(&self, inputs: &[&Tensor]) -> Result<(DType, Shape), CustomError> {
        (self.rule)(inputs)
    }

    fn compute(&self, call: CustomCall<'_>) -> Result<(), CustomError> {
        (self.compute)(call)
    }

    fn in_place(&self) -> Option<usize> {
        self.in_place
    }

    fn units(&self, _: &[&Tensor], output: &Tensor) -> usize {
        self.units.unwrap_or(output.shape().rows())
    }

    fn scratch_bytes(&self, _: &[&Tensor], _: &Tensor) -> usize {
        self.scratch
    }

    fn operations(&self, _: &[&Tensor], output: &Tensor) -> u64 {
        (output.elements() as u64).saturating_mul(self.operations.unwrap_or(1))
    }

    fn reference(&self, inputs: &[CustomValues], _: &Tensor) -> Option<Result<Vec<f64>, CustomError>> {
        self.reference.as_ref().map(|reference| Ok(reference(inputs)))
    }

    fn backend_code(&self, family: &str) -> Option<Arc<dyn Any + Send + Sync>> {
        self.code.iter().find(|(name, _)| *name == family).map(|(_, code)| Arc::clone(code))
    }
}

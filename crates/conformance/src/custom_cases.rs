//! Cases for a custom operation, judged by its own reference.

use quadriga_graph::{BuildError, CustomOp, DType, GraphBuilder, Shape};

use crate::cases::builder::{CaseBuilder, InputLayout};
use crate::cases::fill;
use crate::{Case, Tolerance};

/// Cases that judge a custom operation's code by its [reference](quadriga_graph::CustomKernel::reference): inputs of
/// these types and shapes with random values, contiguous and in every strided layout that the operation's rule accepts,
/// and computed inputs, so that the result can be in place and neighbours can be fused. Run them with
/// [`run_cases`](crate::run_cases) on any target.
///
/// ```
/// use quadriga_conformance::{BackendTarget, Tolerance, custom_cases, run_cases};
/// use quadriga_graph::{CustomFunction, DType, Shape};
///
/// let cube = CustomFunction::new(
///     "cube",
///     |inputs| Ok((DType::F32, inputs.first().map(|x| *x.shape()).ok_or("an input is needed")?)),
///     |mut call| Ok(call.output.f32()?.iter_mut().for_each(|x| *x = *x * *x * *x)),
/// )
/// .in_place(0)
/// .reference(|inputs| inputs[0].values.iter().map(|x| x.powi(3)).collect())
/// .build();
///
/// let cases = custom_cases(&cube, &[(DType::F32, Shape::from([3, 17]))], Tolerance::DEFAULT)?;
/// let backend = quadriga_cpu::Backend::builder().threads(2).build()?;
/// let report = run_cases(cases.into_iter().map(Ok), &mut BackendTarget::new(&backend));
/// assert!(report.is_clean(), "{report}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The operation refuses contiguous inputs of these types and shapes.
pub fn custom_cases(
    op: &CustomOp,
    inputs: &[(DType, Shape)],
    tolerance: Tolerance,
) -> Result<Vec<Case>, BuildError> {
    let mut cases = Vec::new();
    for (number, layout) in InputLayout::ALL.into_iter().enumerate() {
        match case(op, inputs, layout, false, tolerance, number as u64) {
            Ok(case) => cases.push(case),
            // The rule may refuse strides.
            Err(_) if layout != InputLayout::Plain => {}
            Err(error) => return Err(error),
        }
    }
    cases.push(case(op, inputs, InputLayout::Plain, true, tolerance, 5)?);
    Ok(cases)
}

fn case(
    op: &CustomOp,
    inputs: &[(DType, Shape)],
    layout: InputLayout,
    neighbours: bool,
    tolerance: Tolerance,
    seed: u64,
) -> Result<Case, BuildError> {
    let graph = GraphBuilder::new();
    let builder = CaseBuilder::new(&graph, seed);
    let mut values = Vec::new();
    for (dtype, shape) in inputs {
        let dense = if dtype.is_quantized() && layout == InputLayout::Transposed {
            InputLayout::Gaps
        } else {
            layout
        };
        let value = match layout {
            // Rules may depend on the rank, which the other layouts do not keep.
            InputLayout::Plain => builder.shaped_input(*dtype, *shape, fill::UNIT),
            _ => builder.strided_input(*dtype, shape.dims4(), dense, fill::UNIT),
        };
        values.push(if neighbours && *dtype == DType::F32 { value.scale(-0.5) } else { value });
    }
    let result = graph.apply(quadriga_graph::Op::Custom(op.clone()), &values);
    let last = neighbours && result.dtype() == DType::F32;
    builder.out(if last { result.scale_bias(2.0, 1.0) } else { result });
    let inputs = builder.into_inputs();
    let how = if neighbours { " between other operations" } else { "" };
    let name = format!("{}{layout}{how}", op.name());
    let (graph, others) = (graph.finish()?, Vec::new());
    Ok(Case { name, operation: op.name(), graph, inputs, tolerance, others })
}

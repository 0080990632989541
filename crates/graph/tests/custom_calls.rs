//! What the code of a custom operation is given, and what an operation answers about itself.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use quadriga_graph::blocks;
use quadriga_graph::{
    CustomCall, CustomError, CustomFunction, CustomInput, CustomKernel, CustomOp, CustomOutput, DType, Graph,
    GraphBuilder, GraphErrorKind, Shape, Tensor, TensorId,
};

fn like_first(inputs: &[&Tensor]) -> Result<(DType, Shape), CustomError> {
    Ok((inputs[0].dtype(), *inputs[0].shape()))
}

/// An operation that says nothing about itself but its name.
struct Plain;

impl CustomKernel for Plain {
    fn name(&self) -> &'static str {
        "plain"
    }

    fn infer(&self, inputs: &[&Tensor]) -> Result<(DType, Shape), CustomError> {
        like_first(inputs)
    }

    fn compute(&self, _: CustomCall<'_>) -> Result<(), CustomError> {
        Ok(())
    }
}

/// The number as attributes.
struct Numbered<const TYPE: usize>(u8);

impl<const TYPE: usize> CustomKernel for Numbered<TYPE> {
    fn name(&self) -> &'static str {
        "numbered"
    }

    fn infer(&self, inputs: &[&Tensor]) -> Result<(DType, Shape), CustomError> {
        like_first(inputs)
    }

    fn compute(&self, _: CustomCall<'_>) -> Result<(), CustomError> {
        Ok(())
    }

    fn attributes(&self) -> Option<Vec<u8>> {
        Some(vec![self.0])
    }
}

/// A graph with one operation on an input of three rows, and the ids of input and result.
fn graph_of(op: &CustomOp, dtype: DType, cols: usize) -> Result<(Graph, TensorId, TensorId), GraphErrorKind> {
    let g = GraphBuilder::new();
    let x = g.input("x", dtype, [3, cols]);
    let y = x.custom(op, &[]);
    g.output("y", y);
    let (x, y) = (x.id(), y.id());
    g.finish().map(|graph| (graph, x, y)).map_err(|error| error.kind)
}

#[test]
fn rows_of_any_layout_are_read_as_floats() {
    let values: Vec<f32> = (0..2 * 3 * 4 * 64).map(|i| (i % 101) as f32).collect();
    let shape = Shape::from([2, 3, 4, 64]);
    for dtype in [DType::F32, DType::F16, DType::Q8_0] {
        let mut bytes = vec![0; dtype.row_bytes(values.len()).unwrap()];
        blocks::quantize(dtype, &values, &mut bytes).unwrap();
        let mut expected = vec![0.0; values.len()];
        blocks::dequantize(dtype, &bytes, &mut expected).unwrap();
        let input = CustomInput::contiguous(dtype, shape, Some(&bytes)).unwrap();
        assert_eq!(input.strides(), shape.contiguous(dtype).unwrap().0.0);
        let mut row = vec![0.0; 64];
        for (number, expected) in expected.chunks(64).enumerate() {
            input.read_row(number, &mut row).unwrap();
            assert_eq!(row, expected, "row {number} of {dtype}");
        }
        // No such row, and a row of another length.
        let error = |number, row: &mut [f32]| input.read_row(number, row).unwrap_err().to_string();
        assert_eq!(error(24, &mut row), "64 elements of row 24 of [2, 3, 4, 64]");
        assert_eq!(error(1, &mut row[..32]), "32 elements of row 1 of [2, 3, 4, 64]");
    }
    for empty in [Shape::from([0, 3, 4, 8]), Shape::from([2, 0, 4, 8]), Shape::from([2, 3, 0, 8])] {
        let input = CustomInput::contiguous(DType::F32, empty, Some(&[])).unwrap();
        let error = input.read_row(0, &mut [0.0; 8]).unwrap_err().to_string();
        assert_eq!(error, format!("8 elements of row 0 of {empty}"));
    }
}

#[test]
fn elements_are_borrowed_where_type_and_layout_allow_it() {
    let g = GraphBuilder::new();
    let ids = g.input("ids", DType::I32, [2, 3]);
    g.output("ids", ids);
    let transposed = ids.transpose();
    g.output("transposed", transposed);
    let (ids, transposed) = (ids.id(), transposed.id());
    let graph = g.finish().unwrap();
    let mut numbers = [1i32, 2, 3, 4, 5, 6];
    let bytes = bytemuck::cast_slice(&numbers);
    let input = CustomInput::new(&graph[ids], Some(bytes));
    assert_eq!(input.i32().unwrap(), numbers);
    assert!(input.f32().is_err(), "the wrong type");
    assert!(CustomInput::new(&graph[transposed], Some(bytes)).i32().is_err(), "not contiguous");
    assert!(CustomInput::new(&graph[ids], Some(&bytes[..20])).i32().is_err(), "too short");
    assert!(CustomInput::new(&graph[ids], None).i32().is_err(), "overwritten");
    // Integers cannot be read as floats, whatever their layout.
    assert!(input.read_row(0, &mut [0.0; 3]).is_err());

    let mut output =
        CustomOutput::new(DType::I32, [2, 3].into(), 3, bytemuck::cast_slice_mut(&mut numbers[3..]));
    assert_eq!((output.first(), output.bytes().len()), (3, 12));
    output.i32().unwrap()[0] = 9;
    assert!(output.f32().is_err());
    assert_eq!(numbers, [1, 2, 3, 9, 5, 6]);
}

#[test]
fn an_operation_has_defaults_for_all_but_its_rule_and_code() {
    let op = CustomOp::new(Plain);
    assert_eq!((op.name(), op.description(), op.in_place()), ("plain", "custom operation", None));
    let (graph, x, y) = graph_of(&op, DType::F32, 8).unwrap();
    let (inputs, output) = ([&graph[x]], &graph[y]);
    assert_eq!(op.units(&inputs, output), Ok(3));
    assert_eq!(op.scratch_bytes(&inputs, output), Ok(0));
    assert_eq!(op.operations(&inputs, output), 24);
    assert_eq!(op.reference(&[], output), None);
    assert!(op.backend_code("sim").is_none());
    assert_eq!(graph.nodes()[0].in_place_inputs().count(), 0);
}

#[test]
fn a_function_answers_what_it_was_built_with() {
    let op = CustomFunction::new("twice", like_first, |_| Ok(()))
        .operations_per_element(5)
        .scratch_bytes(7)
        .in_place(0)
        .backend_code("sim", 11u8)
        .build();
    let (graph, x, y) = graph_of(&op, DType::F32, 8).unwrap();
    let (inputs, output) = ([&graph[x]], &graph[y]);
    assert_eq!((op.name(), op.in_place()), ("twice", Some(0)));
    assert_eq!(graph.nodes()[0].op().name(), "twice");
    assert_eq!(op.operations(&inputs, output), 120);
    assert_eq!(op.scratch_bytes(&inputs, output), Ok(7));
    assert_eq!(graph.nodes()[0].in_place_inputs().collect::<Vec<_>>(), [0]);
    assert!(op.backend_code("cuda").is_none());
    assert_eq!(op.backend_code("sim").unwrap().downcast_ref::<u8>(), Some(&11));
}

#[test]
fn units_divide_the_result_into_whole_blocks() {
    let with_units = |dtype, units| {
        let op = CustomFunction::new("units", like_first, |_| Ok(())).units(units).build();
        graph_of(&op, dtype, 64).is_ok()
    };
    for units in [1, 2, 3, 6, 192] {
        assert!(with_units(DType::F32, units), "{units} units of 192 numbers");
    }
    for units in [0, 5, 7, 384] {
        assert!(!with_units(DType::F32, units), "{units} units of 192 numbers");
    }
    assert!(with_units(DType::Q8_0, 6) && !with_units(DType::Q8_0, 12), "six blocks of 32");
}

#[test]
fn fingerprints_tell_kernels_apart_by_type_and_attributes() {
    let fingerprint = |op: CustomOp| graph_of(&op, DType::F32, 8).unwrap().0.fingerprint();
    let base = fingerprint(CustomOp::new(Numbered::<0>(1)));
    assert_eq!(base, fingerprint(CustomOp::new(Numbered::<0>(1))));
    assert_ne!(base, fingerprint(CustomOp::new(Numbered::<0>(2))));
    assert_ne!(base, fingerprint(CustomOp::new(Numbered::<1>(1))));
    assert_ne!(fingerprint(CustomOp::new(Plain)), fingerprint(CustomOp::new(Plain)));
}

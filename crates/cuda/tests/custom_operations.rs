//! Custom operations on a real device: with code as PTX and as source, beside the CPU, and with code that is wrong. Says so and
//! passes where there is no device.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "tests"
)]

mod common;

use std::sync::Arc;

use quadriga_conformance::{BackendTarget, Tolerance, custom_cases, run_cases};
use quadriga_cuda::CustomCode;
use quadriga_graph::{
    CustomCall, CustomError, CustomFunction, CustomOp, DType, Graph, GraphBuilder, Shape, Tensor,
};
use quadriga_runtime::{Backend, RuntimeError, Scheduler};

use common::{cpu, device};

/// `x³` with any strides.
const CUBE: &str = r#"
extern "C" __global__ void cube(Tensor x, Tensor y) {
    long long elements = y.dims[0] * y.dims[1] * y.dims[2] * y.dims[3];
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < elements; i += (long long)gridDim.x * blockDim.x) {
        long long rest = i, at = 0;
        for (int d = 3; d >= 0; d--) {
            at += rest % y.dims[d] * x.strides[d];
            rest /= y.dims[d];
        }
        float v = *(const float *)(x.address + at);
        ((float *)y.address)[i] = v * v * v;
    }
}"#;

/// The same for one contiguous element, in PTX: only the first element is written.
const FIRST: &str = r"
.version 7.0
.target sm_75
.address_size 64
.visible .entry first(.param .align 8 .b8 x[80], .param .align 8 .b8 y[80])
{
    .reg .pred %p;
    .reg .f32 %f<3>;
    .reg .b32 %r<3>;
    .reg .b64 %d<3>;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %tid.x;
    or.b32 %r1, %r1, %r2;
    setp.ne.u32 %p, %r1, 0;
    @%p bra done;
    ld.param.u64 %d1, [x];
    ld.param.u64 %d2, [y];
    ld.global.f32 %f1, [%d1];
    mul.f32 %f2, %f1, %f1;
    mul.f32 %f2, %f2, %f1;
    st.global.f32 [%d2], %f2;
done:
    ret;
}
";

fn like_first(inputs: &[&Tensor]) -> Result<(DType, Shape), CustomError> {
    match inputs {
        [x] if x.dtype() == DType::F32 => Ok((DType::F32, *x.shape())),
        _ => Err("one input of F32 is needed".into()),
    }
}

/// The code for the CPU fails: what succeeds ran on the device.
fn cube(code: CustomCode) -> CustomOp {
    let never = |_: CustomCall<'_>| -> Result<(), CustomError> { Err("the CPU's code was called".into()) };
    CustomFunction::new("cube", like_first, never)
        .reference(|inputs| inputs[0].values.iter().map(|x| x.powi(3)).collect())
        .backend_code(quadriga_cuda::FAMILY, code)
        .build()
}

fn source(text: &str, entry: &str) -> CustomCode {
    // SAFETY: the kernels above stay within x and y; wrong ones are never launched.
    unsafe { CustomCode::source(text, entry) }.unwrap()
}

fn ptx(text: &str, entry: &str) -> CustomCode {
    // SAFETY: as above.
    unsafe { CustomCode::ptx(text, entry) }.unwrap()
}

/// x → scale → custom operation → relu.
fn between(op: &CustomOp, rows: usize, columns: usize) -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [rows, columns]).scale(2.0);
    g.output("y", x.custom(op, &[]).named("own").relu());
    g.finish().unwrap()
}

fn run(backends: Vec<Arc<dyn Backend>>, graph: &Graph, x: &[f32]) -> Result<Vec<f32>, RuntimeError> {
    let mut session = Scheduler::new(backends).plan(graph)?.session()?;
    session.run(&[("x", &x)])?;
    session.read("y")
}

#[test]
fn code_in_cuda_is_judged_by_the_operations_reference() {
    let Some(cuda) = device() else { return };
    for threads in [1, 32, 256, 1024] {
        let op = cube(source(CUBE, "cube").threads(threads));
        for shape in [Shape::from([1]), Shape::from([61, 129]), Shape::from([2, 3, 40, 33])] {
            let cases = custom_cases(&op, &[(DType::F32, shape)], Tolerance::DEFAULT).unwrap();
            let report = run_cases(cases.into_iter().map(Ok), &mut BackendTarget::new(&*cuda));
            assert!(report.is_clean() && report.reasons.is_empty(), "{threads} threads\n{report}");
        }
    }
}

#[test]
fn an_operation_runs_on_the_device_that_has_code_for_it() {
    let Some(cuda) = device() else { return };
    let x: Vec<f32> = (0..24).map(|i| i as f32 - 12.0).collect();
    let wanted: Vec<f32> = x.iter().map(|x| (8.0 * x * x * x).max(0.0)).collect();
    let op = cube(source(CUBE, "cube"));
    for _ in 0..3 {
        assert_eq!(run(vec![Arc::clone(&cuda), cpu()], &between(&op, 6, 4), &x).unwrap(), wanted);
    }
    let first = run(vec![Arc::clone(&cuda)], &between(&cube(ptx(FIRST, "first")), 1, 1), &[3.0]);
    assert_eq!(first.unwrap(), [216.0]);

    // Without code for the device, the CPU computes it between two of its operations.
    let here = CustomFunction::new("cube", like_first, |mut call| {
        let (first, x) = (call.output.first(), call.input(0)?.f32()?);
        call.output.f32()?.iter_mut().zip(&x[first..]).for_each(|(y, x)| *y = x * x * x);
        Ok(())
    });
    let graph = between(&here.build(), 6, 4);
    let plan = Scheduler::new([Arc::clone(&cuda), cpu()]).plan(&graph).unwrap();
    let own = graph.node_ids().nth(1).unwrap();
    assert_eq!((plan.backend_of(own), plan.decision(own).unwrap().refused_by), (1, Some(0)));
    assert_eq!(run(vec![Arc::clone(&cuda), cpu()], &graph, &x).unwrap(), wanted);
}

#[test]
fn wrong_code_is_an_error_that_says_so_and_nothing_else_is_hurt() {
    let Some(cuda) = device() else { return };
    for (code, words) in [
        (source("extern \"C\" __global__ void cube(Tensor x, Tensor y) { nonsense; }", "cube"), "nonsense"),
        (source(CUBE, "cub"), "no kernel \"cub\""),
        (ptx("nonsense", "cube"), "does not take the PTX"),
        (ptx(FIRST, "second"), "no kernel \"second\""),
    ] {
        let error = run(vec![Arc::clone(&cuda), cpu()], &between(&cube(code), 1, 4), &[1.0; 4]).unwrap_err();
        assert!(error.to_string().contains(words), "{words}: {error}");
        let again = between(&cube(source(CUBE, "cube")), 1, 4);
        assert_eq!(run(vec![Arc::clone(&cuda)], &again, &[1.0; 4]).unwrap(), [8.0; 4]);
    }
}

//! Custom operations in sessions: on the CPU, beside a simulated device, in place, between fused neighbours, with
//! errors and panics in the caller's code.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use quadriga_conformance::{BackendTarget, Tolerance, custom_cases, run_cases};
use quadriga_graph::{
    CustomCall, CustomError, CustomFunction, CustomKernel, CustomOp, CustomValues, DType, Graph,
    GraphBuilder, GraphErrorKind, Shape, Tensor,
};
use quadriga_runtime::{Backend, RuntimeError, Scheduler, Session};
use quadriga_sim::Sim;

fn cpu(threads: usize, fuse: bool) -> Arc<dyn Backend> {
    Arc::new(quadriga_cpu::Backend::builder().threads(threads).fuse(fuse).build().unwrap())
}

fn like_first(inputs: &[&Tensor]) -> Result<(DType, Shape), CustomError> {
    match inputs {
        [x, ..] if x.dtype() == DType::F32 => Ok((DType::F32, *x.shape())),
        _ => Err("the first input must be F32".into()),
    }
}

/// Rows in reverse order of rows: every unit reads another unit's input.
fn flip() -> CustomFunction {
    CustomFunction::new("flip", like_first, |mut call| {
        let (x, rows) = (call.input(0)?, call.unit_count);
        let columns = x.shape().cols();
        for (row, to) in call.units.clone().zip(call.output.f32()?.chunks_mut(columns)) {
            x.read_row(rows - 1 - row, to)?;
        }
        Ok(())
    })
    .reference(|inputs| {
        let CustomValues { dims, values } = &inputs[0];
        values.chunks(dims[3]).rev().flatten().copied().collect()
    })
}

/// `x + scale · y`, over x.
struct Axpy(f32);

impl CustomKernel for Axpy {
    fn name(&self) -> &'static str {
        "axpy"
    }

    fn infer(&self, inputs: &[&Tensor]) -> Result<(DType, Shape), CustomError> {
        match inputs {
            [x, y] if x.shape() == y.shape() && y.is_contiguous() => like_first(inputs),
            _ => Err("two contiguous inputs of one shape are needed".into()),
        }
    }

    fn compute(&self, mut call: CustomCall<'_>) -> Result<(), CustomError> {
        let first = call.output.first();
        let y = call.input(1)?.f32()?;
        for (i, x) in call.output.f32()?.iter_mut().enumerate() {
            *x += self.0 * y[first + i];
        }
        Ok(())
    }

    fn attributes(&self) -> Option<Vec<u8>> {
        Some(self.0.to_le_bytes().to_vec())
    }

    fn in_place(&self) -> Option<usize> {
        Some(0)
    }

    fn reference(&self, inputs: &[CustomValues], _: &Tensor) -> Option<Result<Vec<f64>, CustomError>> {
        let pairs = inputs[0].values.iter().zip(&inputs[1].values);
        Some(Ok(pairs.map(|(x, y)| x + f64::from(self.0) * y).collect()))
    }
}

fn run(backends: Vec<Arc<dyn Backend>>, graph: &Graph, x: &[f32]) -> Result<Vec<f32>, RuntimeError> {
    let mut session = Scheduler::new(backends).plan(graph)?.session()?;
    session.run(&[("x", &x)])?;
    session.read("y")
}

#[test]
fn results_are_those_of_the_reference_with_any_threads_fused_in_place_and_strided() {
    let ops = [flip().build(), flip().scratch_bytes(100).build(), CustomOp::new(Axpy(0.25))];
    for threads in [1, 2, 3, 8] {
        for fuse in [false, true] {
            let backend = cpu(threads, fuse);
            for (op, inputs) in ops.iter().zip([1, 1, 2]) {
                for shape in [Shape::from([1, 7]), Shape::from([61, 129]), Shape::from([2, 3, 40, 33])] {
                    let cases = custom_cases(op, &vec![(DType::F32, shape); inputs], Tolerance::DEFAULT);
                    let cases = cases.unwrap();
                    assert!(cases.len() >= 2, "{} has only {} cases", op.name(), cases.len());
                    let report = run_cases(cases.into_iter().map(Ok), &mut BackendTarget::new(&*backend));
                    assert!(report.is_clean() && report.reasons.is_empty(), "{threads} threads\n{report}");
                }
            }
        }
    }
}

#[test]
fn wrong_code_is_found_by_its_reference() {
    let wrong = flip().reference(|inputs| inputs[0].values.clone()).build();
    let cases = custom_cases(&wrong, &[(DType::F32, Shape::from([4, 4]))], Tolerance::DEFAULT).unwrap();
    let report = run_cases(cases.into_iter().map(Ok), &mut BackendTarget::new(&*cpu(1, true)));
    assert!(!report.is_clean());
}

/// x → scale → custom operation → silu.
fn between(op: &CustomOp, rows: usize, columns: usize) -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [rows, columns]).scale(2.0);
    g.output("y", x.custom(op, &[]).named("own").relu());
    g.finish().unwrap()
}

#[test]
fn an_operation_without_code_for_a_device_runs_on_the_cpu_and_one_with_code_on_the_device() {
    let x: Vec<f32> = (0..24).map(|i| i as f32 - 12.0).collect();
    let wanted: Vec<f32> = x.chunks(4).rev().flatten().map(|x| (2.0 * x).max(0.0)).collect();
    let graph = between(&flip().build(), 6, 4);
    let scheduler = Scheduler::new([Sim::new("sim:0").build(), cpu(2, true)]);
    let plan = scheduler.plan(&graph).unwrap();
    let own = graph.node_ids().nth(1).unwrap();
    assert_eq!((plan.backend_of(own), plan.decision(own).unwrap().refused_by), (1, Some(0)));
    assert!(Sim::new("sim:0").build().supports(&graph, own).unwrap_err().to_string().contains("no code"));
    let mut session = plan.session().unwrap();
    session.run(&[("x", &x)]).unwrap();
    assert_eq!(session.read::<f32>("y").unwrap(), wanted);

    // The device's code is another operation, which shows that it ran there.
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&calls);
    let device = CustomFunction::new("flip_on_sim", like_first, move |mut call| {
        counter.fetch_add(1, Ordering::Relaxed);
        let x = call.input(0)?.f32()?;
        let columns = call.output.shape().cols();
        let rows = x.chunks(columns).rev().flatten();
        call.output.f32()?.iter_mut().zip(rows).for_each(|(to, from)| *to = *from);
        Ok(())
    });
    let never = |_: CustomCall<'_>| -> Result<(), CustomError> { Err("the CPU's code was called".into()) };
    let op = CustomFunction::new("flip", like_first, never);
    let op = op.backend_code(quadriga_sim::FAMILY, device.build()).build();
    let found = run(vec![Sim::new("sim:0").build(), cpu(2, true)], &between(&op, 6, 4), &x).unwrap();
    assert_eq!((found, calls.load(Ordering::Relaxed)), (wanted, 1));
}

#[test]
fn an_in_place_operation_shares_the_memory_of_its_input_unless_another_node_reads_it() {
    let double = CustomFunction::new("double", like_first, |mut call| {
        call.output.f32()?.iter_mut().for_each(|x| *x *= 2.0);
        Ok(())
    });
    let double = double.in_place(0).build();
    for read_again in [false, true] {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [4, 1000]).scale(0.5);
        let doubled = x.custom(&double, &[]);
        let twice = doubled.custom(&double, &[]);
        g.output("y", if read_again { twice + x } else { twice });
        let graph = g.finish().unwrap();
        for backends in [vec![cpu(2, true)], vec![Sim::new("sim:0").build(), cpu(1, true)]] {
            let found = run(backends, &graph, &[1.0; 4000]).unwrap();
            assert_eq!(found, vec![if read_again { 2.5 } else { 2.0 }; 4000]);
        }
        let plan = Scheduler::new(cpu(1, true)).plan(&graph).unwrap();
        // x, its scaled copy unless that is in place, and the result.
        let root = |node: usize| plan.memory().location(graph.nodes()[node].output());
        assert_eq!(root(0) == root(1), !read_again, "{plan}");
        assert_eq!(root(1), root(2));
    }
}

#[test]
fn an_error_or_panic_is_an_error_of_the_run_and_the_next_run_works() {
    let fails = |scratch: usize| {
        CustomFunction::new("picky", like_first, |mut call| {
            let x = call.input(0)?;
            let columns = x.shape().cols();
            for (row, to) in call.units.clone().zip(call.output.f32()?.chunks_mut(columns)) {
                x.read_row(row, to)?;
                assert!(to[0] < 100.0, "{} is too large", to[0]);
                if to[0] < -100.0 {
                    return Err(format!("{} is too small", to[0]).into());
                }
            }
            Ok(())
        })
        .scratch_bytes(scratch)
        .operations_per_element(1000)
        .build()
    };
    std::panic::set_hook(Box::new(|_| {}));
    for scratch in [0, 64] {
        for (threads, fuse) in [(1, true), (3, true), (8, false)] {
            let mut session = Session::new(&Scheduler::new(cpu(threads, fuse))).unwrap();
            session.use_graph(between(&fails(scratch), 64, 8)).unwrap();
            let with = |value: f32| {
                let mut x = vec![1.0; 512];
                x[37 * 8] = value;
                x
            };
            for _ in 0..3 {
                for (bad, words) in [(60.0, "panicked: 120 is too large"), (-60.0, "-120 is too small")] {
                    let error = session.run(&[("x", &with(bad))]).unwrap_err().to_string();
                    assert!(error.contains("own") && error.contains(words), "{error}");
                    session.run(&[("x", &with(3.0))]).unwrap();
                    let y: Vec<f32> = session.read("y").unwrap();
                    assert_eq!((y[0], y[37 * 8]), (2.0, 6.0));
                }
            }
        }
    }
    let _ = std::panic::take_hook();
}

#[test]
fn a_payload_whose_drop_panics_is_an_error_of_the_run() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("a payload that panics when dropped");
        }
    }
    let op = CustomFunction::new("bomb", like_first, |_| std::panic::panic_any(Bomb)).build();
    for threads in [1, 3] {
        let error = run(vec![cpu(threads, true)], &between(&op, 64, 64), &[0.0; 4096]).unwrap_err();
        assert!(error.to_string().contains("panicked"), "{error}");
    }
}

#[test]
fn operations_of_one_name_and_different_code_are_not_confused() {
    let times = |factor: f32| {
        CustomFunction::new("times", like_first, move |mut call| {
            let (x, first) = (call.input(0)?.f32()?, call.output.first());
            for (i, to) in call.output.f32()?.iter_mut().enumerate() {
                *to = factor * x[first + i];
            }
            Ok(())
        })
        .build()
    };
    let (two, three) = (times(2.0), times(3.0));
    assert_ne!(two, three);
    assert_eq!(two, two.clone());
    let (a, b) = (between(&two, 2, 2), between(&three, 2, 2));
    assert_ne!(a.fingerprint(), b.fingerprint());
    assert_eq!(a.fingerprint(), between(&two, 2, 2).fingerprint());
    // One session, both graphs, again and again: plans are found by fingerprint.
    let scheduler = Scheduler::new([Sim::new("sim:0").build(), cpu(2, true)]);
    let mut session = Session::new(&scheduler).unwrap();
    for _ in 0..3 {
        for (graph, factor) in [(&a, 4.0), (&b, 6.0)] {
            session.use_graph(graph).unwrap();
            session.run(&[("x", &[1.0f32; 4])]).unwrap();
            assert_eq!(session.read::<f32>("y").unwrap(), [factor; 4]);
        }
    }
    // By attributes: objects of one type and value are one operation.
    assert_eq!(CustomOp::new(Axpy(1.5)), CustomOp::new(Axpy(1.5)));
    assert_ne!(CustomOp::new(Axpy(1.5)), CustomOp::new(Axpy(2.5)));
    let graph = |scale: f32| {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [4]);
        g.output("y", x.custom(&CustomOp::new(Axpy(scale)), &[x]));
        g.finish().unwrap()
    };
    assert_eq!(graph(1.5).fingerprint(), graph(1.5).fingerprint());
    assert_ne!(graph(1.5).fingerprint(), graph(2.5).fingerprint());
    // An input that is read beside being overwritten: never in place.
    assert_eq!(run(vec![cpu(2, true)], &graph(1.5), &[1.0, 2.0, 3.0, 4.0]).unwrap(), [2.5, 5.0, 7.5, 10.0]);
}

/// Panics in one of the methods that are called when the operation is made.
struct Panics(usize);

impl Panics {
    fn at(&self, method: usize) {
        assert_ne!(self.0, method, "at method {method}");
    }
}

impl CustomKernel for Panics {
    fn name(&self) -> &'static str {
        self.at(0);
        "panics"
    }

    fn description(&self) -> &'static str {
        self.at(1);
        ""
    }

    fn attributes(&self) -> Option<Vec<u8>> {
        self.at(2);
        Some(Vec::new())
    }

    fn in_place(&self) -> Option<usize> {
        self.at(3);
        None
    }

    fn infer(&self, inputs: &[&Tensor]) -> Result<(DType, Shape), CustomError> {
        like_first(inputs)
    }

    fn compute(&self, _: CustomCall<'_>) -> Result<(), CustomError> {
        Ok(())
    }
}

#[test]
fn wrong_rules_are_errors_of_the_builder() {
    let refused = |op: &CustomOp, inputs: usize| {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [6, 10]);
        g.output("y", x.custom(op, &vec![x; inputs - 1]));
        g.finish().err().map(|error| {
            assert!(matches!(error.kind, GraphErrorKind::Custom(_) | GraphErrorKind::Overflow), "{error}");
            error.to_string()
        })
    };
    let done = |_: CustomCall<'_>| Ok(());
    let text = |op: CustomFunction, inputs| refused(&op.build(), inputs).unwrap_or_default();
    assert!(text(CustomFunction::new("no", |_| Err("never".into()), done), 1).contains("never"));
    std::panic::set_hook(Box::new(|_| {}));
    assert!(text(CustomFunction::new("no", |_| panic!("at the rule"), done), 1).contains("at the rule"));
    for method in 0..4 {
        let error = refused(&CustomOp::new(Panics(method)), 1).unwrap_or_default();
        assert!(error.contains(&format!("at method {method}")), "{error}");
    }
    let _ = std::panic::take_hook();
    for units in [0, 7, 61, usize::MAX] {
        let error = text(CustomFunction::new("no", like_first, done).units(units), 1);
        assert!(error.contains("equal units"), "{error}");
    }
    for (input, shape) in [(0, Shape::from([60])), (1, Shape::from([6, 10])), (8, Shape::from([6, 10]))] {
        let op = CustomFunction::new("no", move |_| Ok((DType::F32, shape)), done).in_place(input);
        assert!(text(op, 1).contains("overwrite"));
    }
    let huge = |_: &[&Tensor]| Ok((DType::F32, Shape::from([usize::MAX, 8])));
    assert!(text(CustomFunction::new("no", huge, done), 1).contains("overflow"));
}

#[test]
fn too_much_scratch_memory_is_an_error() {
    let op = flip().scratch_bytes(usize::MAX / 2).build();
    let error = run(vec![cpu(2, true)], &between(&op, 4, 4), &[0.0; 16]).unwrap_err();
    assert!(error.to_string().contains("memory"), "{error}");
}

#[test]
fn an_operation_can_use_the_backend_that_runs_it() {
    for threads in [1, 3] {
        let (done, finished) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let backend = Arc::new(quadriga_cpu::Backend::builder().threads(threads).build().unwrap());
            let used = Arc::clone(&backend);
            let op = CustomFunction::new("nested", like_first, move |mut call| {
                assert!(used.set_threads(5).unwrap_err().to_string().contains("inside a job"));
                assert!(used.work_bytes() <= used.allocated_bytes());
                // A session on the same backend: planned, compiled, run and read while the outer run is in flight.
                let g = GraphBuilder::new();
                let x = g.input("x", DType::F32, [4, 64]);
                g.output(
                    "y",
                    x.scale(3.0).soft_max(1.0, None, None).custom(&flip().scratch_bytes(100).build(), &[]),
                );
                let graph = g.finish()?;
                let inner: Arc<dyn Backend> = Arc::clone(&used) as _;
                let y = run(vec![inner], &graph, &[1.0; 256])?;
                let (x, first) = (call.input(0)?.f32()?, call.output.first());
                for (i, to) in call.output.f32()?.iter_mut().enumerate() {
                    *to = x[first + i] + 64.0 * y[0];
                }
                Ok(())
            });
            // The outer run needs work memory of its own.
            let op = op.scratch_bytes(64).build();
            let outer: Arc<dyn Backend> = Arc::clone(&backend) as _;
            let y = run(vec![outer], &between(&op, 6, 4), &[1.0; 24]).unwrap();
            assert_eq!((y, backend.threads()), (vec![3.0; 24], threads));
            done.send(()).unwrap();
        });
        finished.recv_timeout(std::time::Duration::from_secs(20)).expect("the backend waits for itself");
    }
}

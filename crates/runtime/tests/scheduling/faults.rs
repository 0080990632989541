//! Failures: every operation of a device fails once.

use std::sync::Arc;

use quadriga_graph::{DType, Graph, GraphBuilder, Weight};
use quadriga_runtime::{Backend, BackendError, ModelId, PlanKey, RuntimeError, Scheduler, Session};
use quadriga_sim::{FaultPoint, Sim};

use crate::common::numbers;
use crate::misbehaving::Misbehaving;

/// Twenty-six blocks that alternate between two devices, with a weight and a state in each.
fn graph() -> Graph {
    let mut rng = quadriga_conformance::Rng::new(3);
    let g = GraphBuilder::new();
    let mut x = g.input("x", DType::F32, [2, 8]);
    let ids = g.input("ids", DType::I32, [2]);
    for block in 0..26 {
        let _scope = g.scope(&format!("blk.{block}"));
        let w = g.weight(&format!("w.{block}"), Weight::with_data(DType::F32, [8, 8], numbers(&mut rng, 64)));
        let s = g.state(&format!("s.{block}"), DType::F32, [4, 8]);
        let y = g.mul_mat(w, x).tanh();
        x = s.set_rows(y, ids).slice(0, 0, 2).add(y);
    }
    g.output("y", x);
    g.finish().unwrap()
}

fn devices(kind: usize) -> [Arc<Sim>; 2] {
    match kind {
        0 => [Sim::new("a").device(), Sim::new("b").device()],
        1 => [Sim::new("a").without_peers().device(), Sim::new("b").without_peers().device()],
        2 => [Sim::new("a").device(), Sim::new("b").synchronous().host().device()],
        _ => [Sim::new("a").isolated().device(), Sim::new("b").isolated().device()],
    }
}

fn scheduler(devices: &[Arc<Sim>; 2]) -> Scheduler {
    let backends = devices.clone().map(|sim| sim as Arc<dyn Backend>);
    Scheduler::new(backends).place(|name| {
        let (_, block) = name.split_once('.')?;
        Some(block.parse::<usize>().ok()? % 2)
    })
}

const X: [f32; 16] = [0.5; 16];

fn run(session: &mut Session) -> Result<Vec<f32>, RuntimeError> {
    session.run(&[("x", &X), ("ids", &[0, 1])])?;
    session.read("y")
}

/// An error must name the backend, and a failure in a split or its copies the split and a node.
fn check_error(error: &RuntimeError, name: &str, what: FaultPoint) {
    let RuntimeError::Device { backend, split, node, error: inner } = error else {
        panic!("{what:?} on {name}: {error}");
    };
    assert_eq!(backend, name, "{error}");
    assert!(!matches!(**inner, BackendError::Foreign { .. } | BackendError::OutOfBounds { .. }), "{error}");
    assert!(node.as_ref().is_some_and(|node| !node.is_empty()), "{what:?}: {error}");
    if matches!(what, FaultPoint::Compile | FaultPoint::Run) {
        assert!(split.is_some(), "{what:?}: {error}");
    }
}

#[test]
fn x19_every_allocation_transfer_compile_and_run_may_fail() {
    let graph = Arc::new(graph());
    let expected = {
        let devices = devices(0);
        let plan = scheduler(&devices).plan(&graph).unwrap();
        assert!(plan.splits().splits.len() >= 10);
        run(&mut plan.session().unwrap()).unwrap()
    };
    let mut injected = 0;
    for kind in 0..4 {
        let devices = devices(kind);
        let scheduler = scheduler(&devices);
        let plan = scheduler.plan(&graph).unwrap();
        for (device, name) in [(0, "a"), (1, "b")] {
            for what in FaultPoint::ALL {
                // While the session is created.
                for after in 0.. {
                    devices[device].fail(what, after);
                    let made = plan.session();
                    devices[device].clear_faults();
                    match made {
                        Err(error) => check_error(&error, name, what),
                        Ok(mut session) => {
                            assert_eq!(run(&mut session).unwrap(), expected);
                            break;
                        }
                    }
                    assert_eq!(devices.each_ref().map(|d| d.used_bytes()), [0, 0], "after {what:?} {after}");
                    injected += 1;
                }
                // While it runs, the first time and later. Afterwards it runs again.
                for warm in [false, true] {
                    for after in 0.. {
                        let mut session = plan.session().unwrap();
                        if warm {
                            assert_eq!(run(&mut session).unwrap(), expected);
                        }
                        devices[device].fail(what, after);
                        let ran = run(&mut session);
                        devices[device].clear_faults();
                        match ran {
                            Err(error) => {
                                check_error(&error, name, what);
                                // Results are those of the previous run, or gone: never partial ones.
                                match session.read::<f32>("y") {
                                    Err(RuntimeError::Gone { .. } | RuntimeError::NothingRun) => {}
                                    old => assert_eq!((old, warm), (Ok(expected.clone()), true)),
                                }
                            }
                            Ok(found) => {
                                assert_eq!(found, expected);
                                break;
                            }
                        }
                        let again = run(&mut session);
                        let case = format!("{what:?} {after} on {name}, kind {kind}, warm {warm}");
                        assert_eq!(again, Ok(expected.clone()), "{case}");
                        injected += 1;
                    }
                }
            }
        }
    }
    assert!(injected >= 1000, "only {injected} faults");
}

#[test]
fn a_run_in_which_a_device_panics_has_no_results() {
    for kind in 0..4 {
        let [a, b] = devices(kind);
        let (a, b) = (Arc::new(Misbehaving::new(a)), Arc::new(Misbehaving::new(b)));
        let scheduler = Scheduler::new((a.clone(), b.clone())).place(|name| {
            let (_, block) = name.split_once('.')?;
            Some(block.parse::<usize>().ok()? % 2)
        });
        let mut session = scheduler.plan(graph()).unwrap().session().unwrap();
        for (device, number, runs_before) in [(&a, 1, false), (&a, 4, true), (&b, 1, true), (&b, 3, true)] {
            let expected = if runs_before { Some(run(&mut session).unwrap()) } else { None };
            session.clear_state().unwrap();
            session.set("x", &X).unwrap();
            session.set("ids", &[0, 1]).unwrap();
            device.panic_in_run(number);
            let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| session.start()));
            assert!(unwound.is_err(), "{kind} {number}");
            assert!(matches!(session.read::<f32>("y"), Err(RuntimeError::Gone { .. })), "{kind} {number}");
            assert!(session.is_done().unwrap());
            // As after any failed run.
            assert!(matches!(session.run(&[]), Err(RuntimeError::NotSet { .. })));
            session.clear_state().unwrap();
            let after = run(&mut session).unwrap();
            session.clear_state().unwrap();
            assert!(expected.is_none_or(|expected| expected == after), "{kind} {number}");
        }
    }
}

#[test]
fn a_lost_device_is_reported_as_lost_until_it_is_restored() {
    let graph = Arc::new(graph());
    for kind in 0..3 {
        let devices = devices(kind);
        let plan = scheduler(&devices).plan(&graph).unwrap();
        let mut session = plan.session().unwrap();
        let expected = run(&mut session).unwrap();
        for what in [FaultPoint::Transfer, FaultPoint::Run] {
            for after in 0..5 {
                devices[0].lose(what, after);
                for _ in 0..2 {
                    let error = run(&mut session).unwrap_err();
                    assert!(error.is_lost(), "{error}");
                }
                devices[0].clear_faults();
                assert_eq!(run(&mut session).unwrap(), expected);
            }
        }
    }
}

#[test]
fn x19_a_plan_that_does_not_fit_the_device_is_an_error_with_numbers_and_the_session_still_works() {
    let build = |rows: usize| {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [rows, 64]);
        g.output("y", x.tanh().add(x));
        g.finish()
    };
    let a = Sim::new("a").capacity(20_000).device();
    let mut session = Session::new(&Scheduler::new([a.clone() as Arc<dyn Backend>])).unwrap();
    session.prepare(8, || build(8)).unwrap();
    session.run(&[("x", &[1.0f32; 512])]).unwrap();
    let good: Vec<f32> = session.read("y").unwrap();
    let error = session.prepare(100, || build(100)).unwrap_err();
    let RuntimeError::Device { error: inner, .. } = &error else { panic!("{error}") };
    assert!(matches!(**inner, BackendError::OutOfMemory { free: Some(..20_000), .. }), "{error}");
    session.prepare(8, || build(8)).unwrap();
    session.run(&[("x", &[1.0f32; 512])]).unwrap();
    assert_eq!(session.read::<f32>("y").unwrap(), good);
    // A plan that only fits once the old arena is freed replaces it.
    session.prepare(24, || build(24)).unwrap();
    session.run(&[("x", &[1.0f32; 24 * 64])]).unwrap();
}

/// Rows of 64 that are added up in a way that needs `rows` × 1 KiB.
fn wide(rows: usize) -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [rows, 64]);
    g.output("y", x.tanh().add(x));
    g.finish().unwrap()
}

fn run_wide(session: &mut Session, rows: usize) -> Result<Vec<f32>, RuntimeError> {
    session.prepare(rows as u64, || Ok::<_, RuntimeError>(wide(rows)))?;
    session.run(&[("x", &vec![0.5f32; rows * 64])])?;
    session.read("y")
}

#[test]
fn x14_a_refused_growth_leaves_an_arena_of_the_old_size() {
    let a = Sim::new("a").capacity(20_000).device();
    let mut session = Session::new(&Scheduler::new(a.clone())).unwrap();
    let good = run_wide(&mut session, 8).unwrap();
    let used = a.used_bytes();
    // Too large even for the empty device: the arena is not touched.
    let allocations = a.counts().of(FaultPoint::Compile);
    assert!(run_wide(&mut session, 100).is_err());
    assert_eq!(a.used_bytes(), used);
    assert_eq!(run_wide(&mut session, 8).unwrap(), good);
    assert_eq!(a.counts().of(FaultPoint::Compile), allocations, "nothing is compiled again");
    // Large enough for the empty device, but refused once the old arena is freed.
    a.fail(FaultPoint::Allocation, 1);
    assert!(run_wide(&mut session, 24).is_err());
    a.clear_faults();
    assert_eq!(a.used_bytes(), used);
    assert_eq!(run_wide(&mut session, 8).unwrap(), good);
}

#[test]
fn x14_sessions_that_compete_for_the_last_memory_keep_what_worked() {
    // The first session can grow if it frees its arena before. The second can only grow while the first one has none: if it
    // does so just then, there is no room left for the first.
    let a = Sim::new("a").capacity(20_000).device();
    let sessions = [(6, 21), (4, 21)].map(|(few, many)| {
        let mut session = Session::new(&Scheduler::new(a.clone())).unwrap();
        let good = run_wide(&mut session, few).unwrap();
        (session, few, many, good)
    });
    std::thread::scope(|scope| {
        for (mut session, few, many, good) in sessions {
            scope.spawn(move || {
                for round in 0..100 {
                    let grown = run_wide(&mut session, many);
                    assert_eq!(run_wide(&mut session, few).as_ref(), Ok(&good), "round {round}, {grown:?}");
                    if grown.is_ok() {
                        // Back to a small arena, so that the other session has a chance.
                        session.forget_all().unwrap();
                        while run_wide(&mut session, few).is_err() {
                            std::thread::yield_now();
                        }
                    }
                }
            });
        }
    });
    assert_eq!(a.used_bytes(), 0);
}

#[test]
fn a_known_plan_that_cannot_be_compiled_again_is_kept() {
    let sim = Sim::new("a").device();
    let mut session = Session::new(&Scheduler::new(sim.clone()).check_plans(false)).unwrap();
    let model = ModelId::new();
    let small = |session: &mut Session, known: bool| {
        session.prepare(PlanKey::of(&model, [1, 0, 0, 0]), || {
            assert!(!known, "the graph is kept");
            Ok::<_, RuntimeError>(wide(1))
        })
    };
    small(&mut session, false).unwrap();
    // The arena grows, so that the small plan has to be compiled again.
    session.prepare(2, || Ok::<_, RuntimeError>(wide(1000))).unwrap();
    sim.fail(FaultPoint::Compile, 0);
    assert!(small(&mut session, true).is_err());
    small(&mut session, true).unwrap();
    assert!(run_wide(&mut session, 1).is_ok());
}

/// A node that is given an index out of its bounds is named, with its split, wherever it runs.
#[test]
fn a_node_with_bad_data_is_named_with_its_split() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [4, 8]);
    let weight = |name: &str| {
        let data: Vec<f32> = (0..64).map(|i| i as f32 / 64.0).collect();
        g.weight(name, Weight::with_data(DType::F32, [8, 8], data.as_slice()))
    };
    let first = weight("w0").mul_mat(x);
    let rows = weight("w1").get_rows(g.input("ids", DType::I32, [4])).named("looked up");
    g.output("y", weight("v1").mul_mat(first.add(rows)));
    let graph = g.finish().unwrap();
    let cpu = || -> Arc<dyn Backend> { Arc::new(quadriga_cpu::Backend::new().unwrap()) };
    for second in [cpu(), Sim::new("b").build(), Sim::new("b").synchronous().build()] {
        let backend = second.name().to_owned();
        let scheduler = Scheduler::new([Sim::new("a").build(), second])
            .place(|name| Some((name.ends_with('1') || name == "ids").into()));
        let plan = scheduler.plan(&graph).unwrap();
        let node = graph.node_ids().find(|node| graph.node_name(*node).contains("looked up")).unwrap();
        let expected = plan.splits().split_of_node[node.index()] as usize;
        let mut session = plan.session().unwrap();
        let run =
            |session: &mut Session, id: i32| session.run(&[("x", &[1.0f32; 32]), ("ids", &[0, 1, id, 2])]);
        run(&mut session, 3).unwrap();
        let error = run(&mut session, 8).unwrap_err();
        let RuntimeError::Device { backend: found, split, node: name, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(
            (found, split, name),
            (&backend, &Some(expected), &Some(graph.node_name(node))),
            "{error}"
        );
        run(&mut session, 7).unwrap();
    }
}

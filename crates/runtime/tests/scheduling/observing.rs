//! Observed runs: the observer is asked first, can end the run, and costs no more compiling than it needs.

use std::ops::ControlFlow;

use quadriga_graph::{DType, Graph, GraphBuilder, NodeId, Weight};
use quadriga_runtime::{Observed, ObservedRun, Observer, Plan, RuntimeError, Scheduler, Session};
use quadriga_sim::{FaultPoint, Sim};

use crate::common::{chain, chain_input, device, host};

/// Wants nodes by name, and ends the run at one of them.
#[derive(Default)]
struct Watcher {
    names: Vec<&'static str>,
    last: Option<&'static str>,
    asked: Vec<NodeId>,
    seen: Vec<(String, Vec<u8>)>,
}

impl Observer for Watcher {
    fn wants(&mut self, plan: &Plan, node: NodeId) -> bool {
        assert!(self.seen.is_empty(), "asked during the run");
        self.asked.push(node);
        self.names.contains(&plan.graph().node_name(node).as_str())
    }

    fn observe(&mut self, observed: Observed<'_>) -> ControlFlow<()> {
        let name = observed.plan.graph().node_name(observed.node);
        let stop = self.last == Some(name.as_str());
        self.seen.push((name, observed.bytes.to_vec()));
        if stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

fn watch(names: &[&'static str]) -> Watcher {
    Watcher { names: names.to_vec(), ..Watcher::default() }
}

/// A small transformer-like block with a state, all results named.
fn block() -> Graph {
    let g = GraphBuilder::new();
    let (x, ids) = (g.input("x", DType::F32, [1, 8]), g.input("ids", DType::I32, [1]));
    let values: Vec<f32> = (0..64).map(|i| (i % 7) as f32 / 7.0).collect();
    let w = g.weight("w1", Weight::with_data(DType::F32, [8, 8], values.as_slice()));
    let normed = x.rms_norm(1e-5).named("normed");
    let hidden = w.mul_mat(normed).named("hidden");
    let active = hidden.silu().named("active");
    let seen = g.state("s0", DType::F32, [4, 8]).set_rows(active, ids).named("seen");
    g.output(
        "y",
        seen.sum_rows().named("sums").add(active.named("active").sum_rows().named("sum")).named("y"),
    );
    g.finish().unwrap()
}

const ALL: [&str; 7] = ["normed", "hidden", "active", "seen", "sums", "sum", "y"];

fn sessions() -> Vec<Session> {
    let rule = |name: &str| name.bytes().last().filter(u8::is_ascii_digit).map(|last| usize::from(last % 2));
    let all = [
        Scheduler::new(quadriga_cpu::Backend::builder().threads(2).build().unwrap()),
        Scheduler::new(device("gpu")),
        Scheduler::new([device("gpu"), host("cpu")]).place(rule),
    ];
    all.iter().map(|scheduler| scheduler.plan(block()).unwrap().session().unwrap()).collect()
}

fn set(session: &mut Session, row: i32) {
    session.set("x", &[1.0f32, 2.0, 3.0, 4.0, -1.0, -2.0, 0.5, 0.0]).unwrap();
    session.set("ids", &[row]).unwrap();
}

#[test]
fn an_observer_is_asked_about_each_node_once_and_sees_what_it_wants() {
    for mut session in sessions() {
        set(&mut session, 1);
        let mut all = watch(&ALL);
        assert_eq!(session.debug().observe(&mut all).unwrap(), ObservedRun::Finished);
        let names: Vec<&str> = all.seen.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names.len(), 7, "{names:?}");
        let mut asked = all.asked.clone();
        asked.dedup();
        assert_eq!(asked.len(), 7);
        let y: Vec<u8> = session.read("y").unwrap();
        let bytes_of = |name: &str| all.seen.iter().find(|(seen, _)| seen == name).unwrap().1.clone();
        assert_eq!(bytes_of("y"), y);
        assert_eq!(bytes_of("seen"), session.read_state::<u8>("s0").unwrap());
        // Each alone, with everything else fused as usual, is the same.
        for name in ALL {
            let mut one = watch(&[name]);
            assert_eq!(session.debug().observe(&mut one).unwrap(), ObservedRun::Finished);
            let [(seen, bytes)] = one.seen.as_slice() else { panic!("{name}: {:?}", one.seen.len()) };
            assert_eq!(seen, name);
            let (a, b) = (floats(bytes), floats(&bytes_of(name)));
            assert!(
                a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= 1e-5 * b.abs().max(1.0)),
                "{name}: {a:?} {b:?}"
            );
        }
        session.run(&[]).unwrap();
        assert_eq!(session.read::<u8>("y").unwrap().len(), y.len());
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[test]
fn an_observer_can_end_the_run_and_the_session_goes_on() {
    for mut session in sessions() {
        set(&mut session, 2);
        session.run(&[]).unwrap();
        let expected: Vec<u8> = session.read("y").unwrap();
        session.clear_state().unwrap();
        let mut watcher = Watcher { last: Some("hidden"), ..watch(&ALL) };
        let outcome = session.debug().observe(&mut watcher).unwrap();
        let graph = block();
        let hidden = graph[graph.tensor("hidden").unwrap()].node().unwrap();
        assert_eq!(outcome, ObservedRun::Stopped { node: hidden });
        assert_eq!(watcher.seen.last().unwrap().0, "hidden");
        assert!(matches!(session.read::<f32>("y"), Err(RuntimeError::Gone { .. })));
        // Nothing was written, and inputs have their values.
        assert_eq!(session.read_state::<f32>("s0").unwrap(), [0.0; 32]);
        session.run(&[]).unwrap();
        assert_eq!(session.read::<u8>("y").unwrap(), expected);
        // Ended at the first node of many runs in a row.
        for _ in 0..3 {
            let mut first = Watcher { last: Some("normed"), ..watch(&["normed"]) };
            assert!(matches!(session.debug().observe(&mut first).unwrap(), ObservedRun::Stopped { .. }));
        }
        session.run(&[]).unwrap();
        assert_eq!(session.read::<u8>("y").unwrap(), expected);
    }
}

#[test]
fn a_run_whose_observer_panics_has_no_results() {
    for mut session in sessions() {
        set(&mut session, 2);
        session.run(&[]).unwrap();
        let expected: Vec<u8> = session.read("y").unwrap();
        for last in ["normed", "hidden", "sums"] {
            let mut panicking = |observed: Observed<'_>| {
                let name = observed.plan.graph().node_name(observed.node);
                if name == last {
                    std::panic::resume_unwind(Box::new("the observer gives up"));
                }
                ControlFlow::Continue(())
            };
            let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                session.debug().observe(&mut panicking).map(|_| ())
            }));
            assert!(unwound.is_err(), "{last}");
            assert!(matches!(session.read::<f32>("y"), Err(RuntimeError::Gone { .. })), "{last}");
            // As after any failed run.
            assert!(matches!(session.run(&[]), Err(RuntimeError::NotSet { .. })));
            session.clear_state().unwrap();
            set(&mut session, 2);
            session.run(&[]).unwrap();
            assert_eq!(session.read::<u8>("y").unwrap(), expected, "{last}");
        }
    }
}

#[test]
fn nothing_is_compiled_twice_and_nothing_for_nodes_that_nobody_wants() {
    let sim = Sim::new("gpu").device();
    let mut session = Scheduler::new(sim.clone()).plan(chain(4)).unwrap().session().unwrap();
    session.set("x", &chain_input()).unwrap();
    let compiles = || sim.counts().of(FaultPoint::Compile);
    let added = |session: &mut Session, observer: &mut dyn Observer| {
        let before = compiles();
        let outcome = session.debug().observe(observer).unwrap();
        (compiles() - before, outcome)
    };
    let graph = chain(4);
    let names: Vec<String> = graph.node_ids().map(|node| graph.node_name(node)).collect();
    struct Chosen(Vec<String>, usize);
    impl Observer for Chosen {
        fn wants(&mut self, plan: &Plan, node: NodeId) -> bool {
            self.0.contains(&plan.graph().node_name(node))
        }
        fn observe(&mut self, _: Observed<'_>) -> ControlFlow<()> {
            self.1 += 1;
            ControlFlow::Continue(())
        }
    }
    // Nothing wanted: the split's own program runs.
    let mut none = Chosen(Vec::new(), 0);
    assert_eq!(added(&mut session, &mut none), (0, ObservedRun::Finished));
    // One in the middle: what is up to it, and what is after.
    let mut middle = Chosen(vec![names[3].clone()], 0);
    assert_eq!(added(&mut session, &mut middle), (2, ObservedRun::Finished));
    assert_eq!(added(&mut session, &mut middle), (0, ObservedRun::Finished));
    // All of them: each once.
    let mut all = Chosen(names.clone(), 0);
    assert_eq!(added(&mut session, &mut all), (8, ObservedRun::Finished));
    assert_eq!(added(&mut session, &mut all), (0, ObservedRun::Finished));
    assert_eq!((middle.1, all.1), (2, 16));
    // Another bank of inputs: only the node that reads the input is compiled for it.
    session.set("x", &chain_input()).unwrap();
    assert_eq!(added(&mut session, &mut all), (1, ObservedRun::Finished));
}

#[test]
fn a_failure_in_an_observed_run_leaves_the_session_usable() {
    let sim = Sim::new("gpu").device();
    let mut session = Scheduler::new(sim.clone()).plan(chain(4)).unwrap().session().unwrap();
    session.run(&[("x", &chain_input())]).unwrap();
    let expected: Vec<u8> = session.read("y").unwrap();
    let mut all = |_: Observed<'_>| ControlFlow::Continue(());
    for point in [FaultPoint::Compile, FaultPoint::Run, FaultPoint::Transfer] {
        sim.fail(point, 2);
        assert!(matches!(session.debug().observe(&mut all), Err(RuntimeError::Device { .. })), "{point:?}");
        assert!(matches!(session.debug().observe(&mut all), Err(RuntimeError::NotSet { .. })));
        session.set("x", &chain_input()).unwrap();
        assert_eq!(session.debug().observe(&mut all).unwrap(), ObservedRun::Finished);
        assert_eq!(session.read::<u8>("y").unwrap(), expected);
    }
}

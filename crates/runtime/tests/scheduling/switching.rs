//! Another graph of a session is used while work for the first is queued: its memory, which they share, is not touched
//! before that work is done. The simulated device reports accesses that nothing orders.

use quadriga_graph::{DType, Graph, GraphBuilder};
use quadriga_runtime::{RuntimeError, Scheduler, Session};

use crate::common::device;

/// y = (2 x)².
fn graph(elements: usize) -> Graph {
    let g = GraphBuilder::new();
    g.output("y", g.input("x", DType::F32, [elements]).scale(2.0).sqr());
    g.finish().unwrap()
}

/// A session that knows two graphs.
fn session(first: usize, second: usize) -> Session {
    let mut session = Session::new(&Scheduler::new(device("a"))).unwrap();
    for elements in [first, second] {
        session.use_graph(graph(elements)).unwrap();
    }
    session
}

/// Uses a graph, and checks a run of it.
fn run(session: &mut Session, elements: usize, what: &str) {
    session.use_graph(graph(elements)).unwrap();
    let ran = session.run(&[("x", &vec![3.0f32; elements])]);
    ran.unwrap_or_else(|error| panic!("{what}, then {elements} elements: {error}"));
    assert_eq!(session.read::<f32>("y").unwrap(), vec![36.0; elements], "{what}");
}

#[test]
fn a_pending_read_has_its_bytes_though_another_graph_runs() {
    for round in 0..20 {
        let mut session = session(256, 64);
        run(&mut session, 256, "before");
        let read = session.read_async(&["y"]).unwrap();
        run(&mut session, 64, "a pending read");
        let mut bytes = vec![0; 1024];
        session.finish_read(read, &mut bytes).unwrap();
        assert!(bytes.as_chunks().0.iter().all(|y| f32::from_ne_bytes(*y) == 36.0), "round {round}");
    }
}

#[test]
fn a_chained_output_is_copied_before_another_graph_runs() {
    for _ in 0..20 {
        let mut session = session(256, 64);
        run(&mut session, 256, "before");
        assert!(session.chain("y", "x").unwrap());
        run(&mut session, 64, "a chained output");
    }
}

/// Small inputs go through another queue than large ones.
#[test]
fn inputs_are_written_before_another_graph_runs() {
    for large in [33, 64, 256, 1000, 5000] {
        for small in [1, 16, 32] {
            for (first, second) in [(large, small), (small, large)] {
                for runs in 0..3 {
                    let mut session = session(first, second);
                    for _ in 0..runs {
                        run(&mut session, first, "before");
                    }
                    session.use_graph(graph(first)).unwrap();
                    session.set("x", &vec![5.0f32; first]).unwrap();
                    run(&mut session, second, &format!("{first} elements set after {runs} runs"));
                    // A part of an input that is set already.
                    run(&mut session, first, "before");
                    session.set_at("x", 0, &[5.0f32]).unwrap();
                    run(&mut session, second, &format!("one of {first} elements set after {runs} runs"));
                }
            }
        }
    }
}

#[test]
fn a_plan_for_other_backends_is_refused() {
    let (a, b) = (device("a"), device("b"));
    let scheduler = Scheduler::new([a.clone(), b.clone()]);
    let mut session = Session::new(&scheduler).unwrap();
    let graph = graph(8);
    // Of the same names and number, in another order, and more or fewer.
    let others = [
        vec![device("a"), device("b")],
        vec![a.clone(), device("b")],
        vec![b.clone(), a.clone()],
        vec![a.clone()],
        vec![a.clone(), b.clone(), device("c")],
    ];
    for backends in others {
        let plan = Scheduler::new(backends).plan(&graph).unwrap();
        assert!(matches!(session.use_plan(&plan), Err(RuntimeError::ForeignPlan)));
    }
    session.use_plan(&Scheduler::new([a, b]).plan(&graph).unwrap()).unwrap();
}

//! Overlapping runs: outputs that become the next inputs without leaving the device, and outputs that are read while the
//! next run is in flight.

use std::sync::Arc;

use quadriga_graph::{DType, Graph, GraphBuilder};
use quadriga_runtime::{Backend, Plan, RuntimeError, Scheduler, Session};
use quadriga_sim::{FaultPoint, Sim};

use crate::common::{device, host};

/// y = 2 x + step, and the sum of y.
fn doubling() -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [4]);
    let step = g.input("step", DType::F32, [4]);
    let y = x.add(x).add(step);
    g.output("y", y);
    g.output("sum", y.sum());
    g.finish().unwrap()
}

fn session(backends: Vec<Arc<dyn Backend>>) -> Session {
    Scheduler::new(backends).plan(doubling()).unwrap().session().unwrap()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
}

#[test]
fn an_output_is_chained_to_an_input_and_read_while_the_next_run_is_in_flight() {
    for backend in [device("a"), host("cpu"), Sim::new("b").isolated().build()] {
        let name = backend.name().to_owned();
        let mut session = session(vec![backend]);
        assert_eq!(session.plan().is_some_and(Plan::is_asynchronous), name != "cpu");
        session.set("x", &[1.0f32, 2.0, 3.0, 4.0]).unwrap();
        session.set("step", &[0.0f32; 4]).unwrap();
        session.start().unwrap();
        let mut expected = [1.0f32, 2.0, 3.0, 4.0].map(|x| 2.0 * x);
        for step in 1..20 {
            assert!(session.chain("y", "x").unwrap(), "{name}");
            session.set("step", &[step as f32; 4]).unwrap();
            let read = session.read_async(&["sum", "y"]).unwrap();
            session.start().unwrap();
            let mut bytes = [0; 20];
            session.finish_read(read, &mut bytes).unwrap();
            let found = floats(&bytes);
            assert_eq!(
                (found[0], &found[1..]),
                (expected.iter().sum::<f32>(), &expected[..]),
                "{name}, {step}"
            );
            expected = expected.map(|y| 2.0 * y + step as f32);
        }
        assert_eq!(session.read::<f32>("y").unwrap(), expected, "{name}");
    }
}

#[test]
fn an_input_on_two_devices_is_not_chained() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [4]);
    let y = x.add(x);
    g.output("y", y);
    g.output("z", y.mul(x));
    let graph = g.finish().unwrap();
    let nodes: Vec<_> = graph.node_ids().collect();
    let scheduler = Scheduler::new([device("a"), host("cpu")]).pin_node(nodes[0], 0).pin_node(nodes[1], 1);
    let mut session = scheduler.plan(graph).unwrap().session().unwrap();
    session.run(&[("x", &[1.0f32, 2.0, 3.0, 4.0])]).unwrap();
    assert!(!session.plan().is_some_and(Plan::is_asynchronous), "one of them is the host");
    assert!(!session.chain("y", "x").unwrap());
    session.run(&[]).unwrap();
    assert_eq!(session.read::<f32>("z").unwrap(), [2.0, 8.0, 18.0, 32.0], "inputs are as they were");
    let read = session.read_async(&["y", "z"]).unwrap();
    let mut bytes = [0; 32];
    session.finish_read(read, &mut bytes).unwrap();
    assert_eq!(floats(&bytes), [2.0, 4.0, 6.0, 8.0, 2.0, 8.0, 18.0, 32.0], "from both");
}

#[test]
fn wrong_names_sizes_and_orders_are_errors_and_change_nothing() {
    let mut session = session(vec![device("a")]);
    assert!(matches!(session.read_async(&["y"]), Err(RuntimeError::NothingRun)));
    assert!(matches!(session.chain("y", "x"), Err(RuntimeError::NothingRun)));
    session.run(&[("x", &[1.0f32; 4]), ("step", &[0.0f32; 4])]).unwrap();
    assert!(matches!(session.read_async(&["y", "nope"]), Err(RuntimeError::UnknownName { .. })));
    assert!(matches!(session.chain("nope", "x"), Err(RuntimeError::UnknownName { .. })));
    assert!(matches!(session.chain("y", "nope"), Err(RuntimeError::UnknownName { .. })));
    assert!(matches!(session.chain("sum", "x"), Err(RuntimeError::WrongSize { .. })));
    let read = session.read_async(&["y"]).unwrap();
    assert!(matches!(session.finish_read(read, &mut [0; 15]), Err(RuntimeError::WrongSize { .. })));
    let first = session.read_async(&["y"]).unwrap();
    let (second, third) = (session.read_async(&["y"]).unwrap(), session.read_async(&["y"]).unwrap());
    let mut bytes = [0; 16];
    assert!(matches!(session.finish_read(first, &mut bytes), Err(RuntimeError::Gone { .. })));
    for read in [third, second] {
        bytes.fill(0);
        session.finish_read(read, &mut bytes).unwrap();
        assert_eq!(floats(&bytes), [2.0; 4]);
    }
}

#[test]
fn two_reads_may_be_pending_in_any_order() {
    let mut session = session(vec![device("a")]);
    let start = |session: &mut Session, x: f32| {
        session.run(&[("x", &[x; 4]), ("step", &[0.0f32; 4])]).unwrap();
        (session.read_async(&["y"]).unwrap(), [2.0 * x; 4])
    };
    let finish = |session: &mut Session, (read, expected): (_, [f32; 4])| {
        let mut bytes = [0; 16];
        session.finish_read(read, &mut bytes).unwrap();
        assert_eq!(floats(&bytes), expected);
    };
    let mut oldest = start(&mut session, 1.0);
    for round in 2..10 {
        // The newer of the two is finished first, and its place is free.
        let newer = start(&mut session, round as f32);
        finish(&mut session, newer);
        let next = start(&mut session, round as f32 + 0.5);
        finish(&mut session, oldest);
        oldest = next;
    }
    finish(&mut session, oldest);
}

#[test]
fn a_read_of_another_session_is_refused() {
    let mut sessions = [1.0f32, 2.0].map(|x| {
        let mut session = session(vec![device("a")]);
        session.run(&[("x", &[x; 4]), ("step", &[0.0f32; 4])]).unwrap();
        let read = session.read_async(&["y"]).unwrap();
        (session, Some(read))
    });
    let [(first, of_first), (second, of_second)] = &mut sessions;
    let (of_first, of_second) = (of_first.take().unwrap(), of_second.take().unwrap());
    let mut bytes = [0; 16];
    assert_eq!(second.finish_read(of_first, &mut bytes), Err(RuntimeError::ForeignRead));
    assert_eq!(bytes, [0; 16]);
    second.finish_read(of_second, &mut bytes).unwrap();
    assert_eq!(floats(&bytes), [4.0; 4]);
    assert_eq!(first.read::<f32>("y").unwrap(), [2.0; 4]);
}

#[test]
fn a_device_failure_shows_when_the_read_is_finished() {
    for what in [FaultPoint::Run, FaultPoint::Transfer] {
        for after in 0..4 {
            let sim = Sim::new("a").device();
            let mut session = session(vec![Arc::clone(&sim) as _]);
            session.run(&[("x", &[1.0f32; 4]), ("step", &[0.0f32; 4])]).unwrap();
            sim.fail(what, after);
            let mut go = || -> Result<(), RuntimeError> {
                for _ in 0..3 {
                    session.chain("y", "x")?;
                    let read = session.read_async(&["y"])?;
                    session.start()?;
                    session.finish_read(read, &mut [0; 16])?;
                }
                session.wait()
            };
            let failed = go();
            sim.clear_faults();
            assert!(matches!(failed, Err(RuntimeError::Device { .. })) || after > 2, "{what:?} {after}");
            session.run(&[("x", &[1.0f32; 4]), ("step", &[0.0f32; 4])]).unwrap();
            assert_eq!(session.read::<f32>("y").unwrap(), [2.0; 4], "{what:?} {after}");
        }
    }
}

//! Inputs of overlapping runs: set, kept from an earlier run, or chained to an output, under the order checker.

use quadriga_graph::{DType, Graph, GraphBuilder, Weight};
use quadriga_runtime::{Scheduler, Session};
use quadriga_sim::{FaultPoint, Sim};

/// `big` goes through the upload queue, `small` through the compute queue.
fn sum() -> Graph {
    let g = GraphBuilder::new();
    let big = g.input("big", DType::F32, [4, 64]);
    let small = g.input("small", DType::F32, [1, 1]);
    g.output("y", big + small);
    g.finish().unwrap()
}

/// A session in which a run with `big` = 1 and `small` = 1 is in flight.
fn started() -> Session {
    let sim = Sim::new("sim:0").check_order(true).build();
    let mut session = Scheduler::new(sim).plan(sum()).unwrap().session().unwrap();
    session.set("big", &[1.0f32; 256]).unwrap();
    session.set("small", &[1.0f32]).unwrap();
    session.start().unwrap();
    session
}

fn assert_all(session: &mut Session, expected: f32) {
    assert_eq!(session.read::<f32>("y").unwrap(), [expected; 256]);
}

#[test]
fn a_large_input_that_is_kept_waits_for_the_runs_that_read_its_bank() {
    let mut session = started();
    session.set("big", &[2.0f32; 256]).unwrap();
    session.start().unwrap();
    for small in [3.0f32, 4.0] {
        session.set("small", &[small]).unwrap();
        session.start().unwrap();
    }
    assert_all(&mut session, 6.0);
}

#[test]
fn a_chained_large_input_is_kept_for_the_next_run() {
    let mut session = started();
    assert!(session.chain("y", "big").unwrap());
    session.start().unwrap();
    for small in [2.0f32, 5.0] {
        session.set("small", &[small]).unwrap();
        session.start().unwrap();
    }
    assert_all(&mut session, 7.0);
    session.set("big", &[10.0f32; 256]).unwrap();
    session.start().unwrap();
    session.set("small", &[1.0f32]).unwrap();
    session.start().unwrap();
    assert_all(&mut session, 11.0);
}

#[test]
fn the_latest_of_set_and_chain_holds() {
    let mut session = started();
    session.set("big", &[9.0f32; 256]).unwrap();
    assert!(session.chain("y", "big").unwrap());
    session.start().unwrap();
    assert_all(&mut session, 3.0);

    let mut session = started();
    assert!(session.chain("y", "big").unwrap());
    session.set("big", &[9.0f32; 256]).unwrap();
    session.start().unwrap();
    assert_all(&mut session, 10.0);
}

/// A weight of 64 equal elements.
fn bytes(value: f32) -> Vec<u8> {
    value.to_ne_bytes().repeat(64)
}

fn with_weight(name: &str, rows: bool) -> Graph {
    let g = GraphBuilder::new();
    let w = g.weight("w", Weight::new(DType::F32, [8, 8]));
    let y = if rows {
        w.get_rows(g.constant("first", DType::I32, [1], [0].as_slice()))
    } else {
        w.mul_mat(g.constant("ones", DType::F32, [1, 8], [1.0f32; 8].as_slice()))
    };
    g.output(name, y);
    g.finish().unwrap()
}

#[test]
fn a_graph_that_cannot_be_added_leaves_earlier_plans_their_weights() {
    let sim = Sim::new("sim:0").packs_weights().device();
    let mut session = Session::new(&Scheduler::new(sim.clone())).unwrap();
    session.use_graph(with_weight("y", false)).unwrap();
    session.set_weight("w", &bytes(1.0)).unwrap();
    session.run(&[]).unwrap();
    sim.fail(FaultPoint::Run, 0);
    session.start().unwrap();
    // Reading rows needs another layout of the weight; the failure of the run in flight shows first.
    assert!(session.use_graph(with_weight("z", true)).is_err());
    sim.clear_faults();
    session.use_graph(with_weight("y", false)).unwrap();
    session.set_weight("w", &bytes(2.0)).unwrap();
    session.run(&[]).unwrap();
    assert_eq!(session.read::<f32>("y").unwrap(), [16.0; 8]);
}

#[test]
fn using_a_plan_again_adds_nothing() {
    let sim = Sim::new("sim:0").device();
    let plan = Scheduler::new(sim.clone()).plan(sum()).unwrap();
    let mut session = plan.session().unwrap();
    let before = (sim.placed_tensors(), sim.used_bytes());
    for _ in 0..3 {
        session.use_plan(&plan).unwrap();
    }
    assert_eq!((sim.placed_tensors(), sim.used_bytes()), before);
}

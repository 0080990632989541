//! Overlap of copies and splits, by the devices' own clocks.

use std::sync::Arc;

use quadriga_graph::{DType, Graph, GraphBuilder, TensorId};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_sim::Sim;

use crate::common::{chain, chain_input};

/// Nodes on one device, each of which a node of a chain on the other reads.
fn alternating(steps: usize) -> (Graph, Vec<TensorId>, Vec<TensorId>) {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [64]);
    let mut y = x;
    let (mut here, mut there) = (Vec::new(), Vec::new());
    for step in 0..steps {
        let made = x.scale(step as f32 / steps as f32);
        y = y.add(made);
        here.push(made.id());
        there.push(y.id());
    }
    g.output("y", y);
    (g.finish().unwrap(), here, there)
}

#[test]
fn copies_overlap_with_splits() {
    let steps = 50;
    let (graph, here, there) = alternating(steps);
    let a = Sim::new("a").device();
    let b = Sim::new("b").node_seconds(1.0).copy_seconds(1.0, 0.0).device();
    let mut scheduler = Scheduler::new([a as Arc<dyn Backend>, b.clone()]);
    for (a, b) in here.iter().zip(&there) {
        scheduler = scheduler.pin_tensor(*a, 0).pin_tensor(*b, 1);
    }
    let plan = scheduler.plan(&graph).unwrap();
    assert_eq!(plan.splits().copies.len(), steps);
    let mut session = plan.session().unwrap();
    session.set("x", &[1.0f32; 64]).unwrap();
    session.wait().unwrap();
    let before = b.seconds();
    session.start().unwrap();
    session.wait().unwrap();
    let (took, one_after_the_other) = (b.seconds() - before, 2.0 * steps as f64);
    let hidden = (one_after_the_other - took) / steps as f64;
    assert!(hidden >= 0.9, "{hidden} of the copies are hidden: {took} s");
}

#[test]
fn two_branches_on_two_devices_take_the_time_of_one() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [64]);
    let (mut first, mut second) = (x, x);
    let mut pins = Vec::new();
    for _ in 0..20 {
        first = first.tanh();
        pins.push((first.id(), 0));
    }
    for _ in 0..20 {
        second = second.sigmoid();
        pins.push((second.id(), 1));
    }
    let joined = first.add(second);
    g.output("y", joined);
    let graph = g.finish().unwrap();
    let [a, b] = ["a", "b"].map(|name| Sim::new(name).node_seconds(1.0).copy_seconds(0.1, 0.0).device());
    let mut scheduler = Scheduler::new([a.clone() as Arc<dyn Backend>, b.clone()]);
    for (id, backend) in pins {
        scheduler = scheduler.pin_tensor(id, backend);
    }
    let mut session = scheduler.plan(&graph).unwrap().session().unwrap();
    session.run(&[("x", &[1.0f32; 64])]).unwrap();
    let took = a.seconds().max(b.seconds());
    assert!(took <= 1.1 * 21.0, "{took} s");
}

#[test]
fn the_inputs_of_the_next_run_are_uploaded_while_a_run_computes() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [64]);
    g.output("y", x.tanh());
    let graph = g.finish().unwrap();
    let a = Sim::new("a").node_seconds(1.0).copy_seconds(1.0, 0.0).device();
    let mut session =
        Scheduler::new([a.clone() as Arc<dyn Backend>]).plan(&graph).unwrap().session().unwrap();
    for _ in 0..20 {
        session.set("x", &[1.0f32; 64]).unwrap();
        session.start().unwrap();
    }
    session.wait().unwrap();
    assert!(a.seconds() <= 22.0, "{} s for 20 runs of 1 s with inputs of 1 s", a.seconds());
}

#[test]
fn a_run_is_done_when_its_time_is_over() {
    let a = Sim::new("a").node_seconds(1.0).timed_polls().build();
    let mut session = Scheduler::new([a]).plan(chain(3)).unwrap().session().unwrap();
    assert!(session.is_done().unwrap(), "nothing was started");
    session.set("x", &chain_input()).unwrap();
    session.start().unwrap();
    assert!(!session.is_done().unwrap());
    session.wait().unwrap();
    assert!(session.is_done().unwrap());
}

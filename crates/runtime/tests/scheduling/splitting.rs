//! S4, S5, S10: how a graph is cut into splits.

use quadriga_graph::{DType, GraphBuilder, Weight};
use quadriga_runtime::{ScheduleStep, Scheduler};

use crate::common::{chain, chain_input, device, host};

#[test]
fn s4_consecutive_nodes_of_one_backend_form_a_split() {
    let graph = chain(6);
    let plan = Scheduler::new([device("a"), device("b")])
        .place(|name| Some((name > "w.1" && name < "w.4").into()))
        .plan(&graph)
        .unwrap();
    let sizes: Vec<(usize, usize)> = plan.splits().splits.iter().map(|s| (s.backend, s.node_count)).collect();
    assert_eq!(sizes, [(0, 4), (1, 4), (0, 4)]);
}

#[test]
fn x17_views_are_in_no_split_and_no_split_is_empty() {
    let g = GraphBuilder::new();
    let w = g.weight("w", Weight::with_data(DType::F32, [2, 8], vec![0u8; 64]));
    let state = g.state("s", DType::F32, [2, 8]);
    let view = state.reshape([4, 4]).reshape([16]);
    let transposed = w.transpose();
    let y = transposed.cont().reshape([16]).add(view);
    g.output("y", y);
    let graph = g.finish().unwrap();
    let plan = Scheduler::new([device("a"), device("b")])
        .place(|name| Some((name == "w").into()))
        .plan(&graph)
        .unwrap();
    assert!(plan.splits().splits.iter().all(|split| split.node_count > 0));
    assert!(plan.splits().nodes.iter().all(|node| !graph[*node].op().is_view()));
    let mut session = plan.session().unwrap();
    session.run(&[]).unwrap();
    assert_eq!(session.read::<f32>("y").unwrap(), [0.0; 16]);
}

#[test]
fn interleaved_independent_branches_are_one_split_each() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [8]);
    let (mut a, mut b) = (x, x);
    let mut pins = Vec::new();
    for _ in 0..10 {
        (a, b) = (a.tanh(), b.sigmoid());
        pins.push((a.id(), b.id()));
    }
    g.output("a", a);
    g.output("b", b);
    let graph = g.finish().unwrap();
    let mut scheduler = Scheduler::new([device("a"), device("b")]);
    for (a, b) in pins {
        scheduler = scheduler.pin_tensor(a, 0).pin_tensor(b, 1);
    }
    let plan = scheduler.plan(&graph).unwrap();
    assert_eq!(plan.splits().splits.len(), 2);
    assert!(plan.splits().copies.is_empty());
}

#[test]
fn a_split_that_another_waits_for_takes_no_more_nodes() {
    // b reads the first node of a; the second node of a must not delay it.
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [8]);
    let first = x.tanh();
    let there = first.sigmoid();
    let second = first.silu();
    g.output("there", there);
    g.output("second", second);
    let pins = [(first.id(), 0), (there.id(), 1), (second.id(), 0)];
    let graph = g.finish().unwrap();
    let mut scheduler = Scheduler::new([device("a"), device("b")]);
    for (id, backend) in pins {
        scheduler = scheduler.pin_tensor(id, backend);
    }
    let plan = scheduler.plan(&graph).unwrap();
    assert_eq!(plan.splits().splits.len(), 3);
}

#[test]
fn asynchronous_splits_are_issued_before_those_that_block_the_host() {
    // The host's branch comes first in the graph, but the device's splits are issued before it.
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [8]);
    let here = x.tanh();
    let there = x.sigmoid();
    g.output("here", here);
    g.output("there", there);
    let (here, there) = (here.id(), there.id());
    let graph = g.finish().unwrap();
    let plan = Scheduler::new([host("cpu"), device("a")])
        .pin_tensor(here, 0)
        .pin_tensor(there, 1)
        .plan(&graph)
        .unwrap();
    assert_eq!(plan.order(), [ScheduleStep::Split(1), ScheduleStep::Split(0)]);
}

#[test]
fn x12_planning_does_not_change_the_graph() {
    let graph = chain(6);
    let before = (graph.to_string(), graph.fingerprint());
    let scheduler = Scheduler::new([device("a"), host("cpu")]).place(|name| Some((name > "w.2").into()));
    let mut results = Vec::new();
    for _ in 0..2 {
        let mut session = scheduler.plan(&graph).unwrap().session().unwrap();
        session.run(&[("x", &chain_input())]).unwrap();
        session.run(&[]).unwrap();
        results.push(session.read::<f32>("y").unwrap());
    }
    assert_eq!(results[0], results[1]);
    assert_eq!((graph.to_string(), graph.fingerprint()), before);
}

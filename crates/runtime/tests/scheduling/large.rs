//! Graphs beyond ggml's limits: 4 backends, 256 splits, 16 inputs of a split, 4096 nodes, 6 inputs of a node.

use std::sync::Arc;

use quadriga_graph::{DType, Graph, GraphBuilder, Weight};
use quadriga_runtime::{Backend, Plan, RuntimeError, Scheduler};
use quadriga_sim::Sim;

use crate::common::{device, host};

fn idle(count: usize) -> Vec<Arc<dyn Backend>> {
    (0..count).map(|i| Sim::new(&format!("d{i}")).without_computing().build()).collect()
}

/// A chain of additions whose backend changes every `run` nodes.
fn long(nodes: usize, run: usize, backends: Vec<Arc<dyn Backend>>) -> (Graph, Plan) {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [4]);
    let count = backends.len();
    let mut scheduler = Scheduler::new(backends);
    let mut y = x;
    for node in 0..nodes {
        y = y.add(x);
        if node % run == 0 {
            scheduler = scheduler.pin_tensor(y.id(), node / run % count);
        }
    }
    g.output("y", y);
    let graph = g.finish().unwrap();
    let plan = scheduler.plan(&graph).unwrap();
    (graph, plan)
}

#[test]
fn x5_a_million_nodes_on_three_backends() {
    let (graph, plan) = long(1_000_000, 1000, idle(3));
    assert_eq!(plan.splits().nodes.len(), graph.nodes().len());
    assert_eq!(plan.splits().splits.len(), 1000);
    assert_eq!(plan.splits().copies.len(), 999);
}

#[test]
fn ten_thousand_splits_run() {
    let (_, plan) = long(10_000, 1, vec![device("a"), device("b")]);
    assert_eq!(plan.splits().splits.len(), 10_000);
    let mut session = plan.session().unwrap();
    session.run(&[("x", &[1.0f32; 4])]).unwrap();
    assert_eq!(session.read::<f32>("y").unwrap(), [10_001.0; 4]);
}

#[test]
fn sixty_four_backends_run() {
    let backends = (0..64).map(|i| device(&format!("d{i}"))).collect();
    let (_, plan) = long(640, 5, backends);
    let mut session = plan.session().unwrap();
    session.run(&[("x", &[1.0f32; 4])]).unwrap();
    assert_eq!(session.read::<f32>("y").unwrap(), [641.0; 4]);
}

#[test]
fn a_thousand_inputs_to_a_split_and_to_a_node() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [1, 4]);
    let parts: Vec<_> = (0..1000).map(|i| x.scale(i as f32)).collect();
    let y = parts[0].concat(0, &parts[1..]);
    let sum = y.transpose().cont().sum_rows();
    g.output("sum", sum);
    let mut scheduler = Scheduler::new([device("a"), device("b")]).pin_tensor(y.id(), 1);
    for part in &parts {
        scheduler = scheduler.pin_tensor(part.id(), 0);
    }
    let graph = g.finish().unwrap();
    let plan = scheduler.plan(&graph).unwrap();
    assert_eq!(plan.splits().splits[1].inputs.len(), 1000);
    let mut session = plan.session().unwrap();
    session.run(&[("x", &[1.0f32, 2.0, 3.0, 4.0])]).unwrap();
    assert_eq!(session.read::<f32>("sum").unwrap(), [499_500.0, 999_000.0, 1_498_500.0, 1_998_000.0]);
}

#[test]
fn weights_and_states_beyond_all_memory_are_errors_with_numbers() {
    let g = GraphBuilder::new();
    let ids = g.input("ids", DType::I32, [4]);
    let mut rows = Vec::new();
    // Each has 2^62 bytes: the sum of five overflows.
    for layer in 0..5 {
        let w = g.weight(&format!("w{layer}"), Weight::new(DType::F32, [1 << 40, 1 << 20]));
        let s = g.state(&format!("s{layer}"), DType::F32, [1 << 40, 1 << 20]);
        rows.push(w.get_rows(ids).add(s.get_rows(ids)));
    }
    g.output("y", rows.into_iter().reduce(|a, b| a.add(b)).unwrap());
    let graph = g.finish().unwrap();
    for place in [None, Some(1)] {
        let scheduler = Scheduler::new([device("a"), host("cpu")]).place(move |_| place);
        let plan = scheduler.clone().plan(&graph).unwrap();
        let bytes = plan.bytes();
        let backend = &bytes[place.unwrap_or(0)];
        assert_eq!((backend.weights, backend.state, backend.total()), (u64::MAX, u64::MAX, u64::MAX));
        let error = plan.session().map(|_| ()).unwrap_err();
        assert!(matches!(error, RuntimeError::Device { .. }), "{error}");
        let error = scheduler.budget(place.unwrap_or(0), 1 << 40).plan(&graph).map(|_| ()).unwrap_err();
        assert!(
            matches!(&error, RuntimeError::OverBudget(over) if (over.weight_count, over.fitting) == (5, 0)),
            "{error}"
        );
    }
}

//! S1–S3, S6, K6: the backend of each node, and the reason.

use std::sync::Arc;

use quadriga_graph::{DType, Graph, GraphBuilder, NodeId, Op, TensorId, Value, Weight};
use quadriga_runtime::{Backend, Reason, RuntimeError, Scheduler};
use quadriga_sim::Sim;

use crate::common::{chain, chain_input, device, host};

fn two() -> [Arc<dyn Backend>; 2] {
    [device("a"), device("b")]
}

fn node(graph: &Graph, name: &str) -> NodeId {
    graph.node_ids().find(|n| graph.node_name(*n) == name).unwrap()
}

#[test]
fn x3_a_graph_with_nothing_placed_runs_on_the_most_preferred_backend() {
    let graph = chain(3);
    let plan = Scheduler::new(two()).plan(&graph).unwrap();
    assert!(graph.node_ids().all(|n| plan.backend_of(n) == 0));
    assert_eq!(plan.decision(NodeId::from_index(0)).unwrap().reason, Reason::Preferred);
    assert_eq!(plan.splits().splits.len(), 1);
    plan.session().unwrap().run(&[("x", &chain_input())]).unwrap();
}

#[test]
fn s2_nodes_run_on_the_backend_of_their_weights_and_the_others_follow() {
    let graph = chain(4);
    let plan = Scheduler::new(two()).place(|name| (name == "w.2").then_some(1)).plan(&graph).unwrap();
    let backends: Vec<usize> = graph.node_ids().map(|n| plan.backend_of(n)).collect();
    // Matmuls 0 and 1 have no placed input: they follow their consumer.
    assert_eq!(backends, [1, 1, 1, 1, 1, 1, 1, 1]);
    let placed = plan.decision(NodeId::from_index(4)).unwrap();
    assert_eq!(placed.reason, Reason::HoldsSource { tensor: graph.leaf("w.2").unwrap().index() });
    assert!(matches!(plan.decision(NodeId::from_index(5)).unwrap().reason, Reason::FollowsSource { .. }));
    assert!(matches!(plan.decision(NodeId::from_index(3)).unwrap().reason, Reason::FollowsConsumer { .. }));
}

#[test]
fn s2_a_write_to_a_state_runs_on_its_backend() {
    let g = GraphBuilder::new();
    let cache = g.state("cache", DType::F32, [8, 4]);
    let rows = g.input("rows", DType::F32, [1, 4]).silu();
    let ids = g.input("ids", DType::I32, [1]);
    g.output("cache", cache.set_rows(rows, ids));
    let graph = g.finish().unwrap();
    let plan = Scheduler::new(two()).place(|name| (name == "cache").then_some(1)).plan(&graph).unwrap();
    let write = graph.node_ids().find(|n| *graph[*n].op() == Op::SetRows).unwrap();
    assert_eq!(plan.backend_of(write), 1);
    assert_eq!(plan.decision(write).unwrap().reason, Reason::Pinned);
}

#[test]
fn x16_bytes_of_inputs_decide_and_not_their_order() {
    for swapped in [false, true] {
        let g = GraphBuilder::new();
        let small = g.weight("small", Weight::new(DType::F32, [1, 8]));
        let large = g.weight("large", Weight::new(DType::F32, [64, 8]));
        let (first, second) = if swapped { (large, small) } else { (small, large) };
        let y = first.concat(0, &[second]);
        g.output("y", y);
        let graph = g.finish().unwrap();
        let plan = Scheduler::new(two()).place(|n| Some((n == "large").into())).plan(&graph).unwrap();
        assert_eq!(plan.backend_of(NodeId::from_index(0)), 1, "the larger input decides");

        let g = GraphBuilder::new();
        let a = g.weight("a", Weight::new(DType::F32, [4, 8]));
        let b = g.weight("b", Weight::new(DType::F32, [4, 8]));
        g.output("y", if swapped { b.add(a) } else { a.add(b) });
        let graph = g.finish().unwrap();
        let plan = Scheduler::new(two()).place(|n| Some((n == "b").into())).plan(&graph).unwrap();
        assert_eq!(plan.backend_of(NodeId::from_index(0)), 0, "equal inputs: the preferred backend");
    }
}

#[test]
fn s3_a_residual_stream_moves_on_with_the_layers() {
    let g = GraphBuilder::new();
    let mut x = g.input("x", DType::F32, [4, 8]);
    for layer in 0..9 {
        let w = g.weight(&format!("w.{layer}"), Weight::new(DType::F32, [8, 8]));
        let y = g.mul_mat(w, x.rms_norm(1e-5)).silu();
        x = if layer % 2 == 0 { x.add(y) } else { y.add(x) };
    }
    g.output("y", x);
    let graph = g.finish().unwrap();
    let thirds = |name: &str| Some(name.strip_prefix("w.")?.parse::<usize>().ok()? / 3);
    let plan = Scheduler::new([device("a"), device("b"), device("c")]).place(thirds).plan(&graph).unwrap();
    assert_eq!(plan.splits().splits.len(), 3, "{plan:#}");
    assert_eq!(
        plan.splits().copies.len(),
        2,
        "the residual stream, at two borders: its norm moves to the next backend"
    );
}

#[test]
fn x1_s6_pins_hold_however_often_a_graph_is_planned() {
    let graph = chain(3);
    let pinned = node(&graph, "blk.1.mul_mat#2");
    let scheduler = Scheduler::new(two()).pin_node(pinned, 1);
    for _ in 0..3 {
        let plan = scheduler.plan(&graph).unwrap();
        assert_eq!(plan.backend_of(pinned), 1);
        assert_eq!(plan.decision(pinned).unwrap().reason, Reason::Pinned);
        plan.session().unwrap().run(&[("x", &chain_input())]).unwrap();
    }
    // Tensors can be pinned, too.
    let plan = Scheduler::new(two()).pin_tensor(graph[pinned].output(), 1).plan(&graph).unwrap();
    assert_eq!(plan.backend_of(pinned), 1);
}

#[test]
fn x2_unknown_backends_nodes_and_tensors_are_errors() {
    let graph = chain(2);
    let error = Scheduler::new(two()).place(|_| Some(9)).plan(&graph).unwrap_err();
    assert!(matches!(error, RuntimeError::UnknownBackend { index: 9, count: 2, .. }), "{error}");
    let error = Scheduler::new(two()).pin_node(NodeId::from_index(0), 70_000).plan(&graph).unwrap_err();
    assert!(matches!(error, RuntimeError::UnknownBackend { index: 70_000, .. }), "{error}");
    let error = Scheduler::new(two()).pin_node(NodeId::from_index(99), 0).plan(&graph).unwrap_err();
    assert!(matches!(error, RuntimeError::UnknownPin { what: "node", index: 99, .. }), "{error}");
    let error = Scheduler::new(two()).pin_tensor(TensorId::from_index(99), 0).plan(&graph).unwrap_err();
    assert!(matches!(error, RuntimeError::UnknownPin { what: "tensor", .. }), "{error}");
    let error = Scheduler::new(two()).budget(2, 1).plan(&graph).unwrap_err();
    assert!(matches!(error, RuntimeError::UnknownBackend { .. }), "{error}");
    let error = Scheduler::new(Vec::<Arc<dyn Backend>>::new()).plan(&graph).unwrap_err();
    assert_eq!(error, RuntimeError::NoBackends);
}

#[test]
fn two_writers_of_one_storage_cannot_be_pinned_to_different_backends() {
    let g = GraphBuilder::new();
    let ids = g.input("ids", DType::I32, [1]);
    let rows = g.input("rows", DType::F32, [1, 4]);
    let first = g.state("s", DType::F32, [4, 4]).set_rows(rows, ids);
    let second = first.set_rows(rows, ids);
    g.output("s", second);
    let graph = g.finish().unwrap();
    let nodes: Vec<NodeId> = graph.node_ids().collect();
    let error = Scheduler::new(two()).pin_node(nodes[0], 0).pin_node(nodes[1], 1).plan(&graph).unwrap_err();
    assert!(matches!(error, RuntimeError::PinConflict { .. }), "{error}");
}

fn refusing(name: &str, operation: &'static str) -> Arc<dyn Backend> {
    let refuse = move |graph: &Graph, node: NodeId| {
        (graph[node].op().name() == operation).then(|| format!("{operation} is beyond me"))
    };
    Sim::new(name).refuse(refuse).build()
}

#[test]
fn x13_k6_a_node_that_a_backend_refuses_runs_on_the_next_best() {
    let graph = chain(2);
    let plan = Scheduler::new([refusing("a", "tanh"), host("cpu")]).plan(&graph).unwrap();
    let backends: Vec<usize> = graph.node_ids().map(|n| plan.backend_of(n)).collect();
    assert_eq!(backends, [0, 1, 0, 1]);
    assert_eq!(plan.decision(NodeId::from_index(1)).unwrap().refused_by, Some(0));
    assert!(plan.reason(NodeId::from_index(1)).contains("a does not compute it"));

    // A pin to a backend that refuses, and a node that all refuse, are errors with node, operation and reasons.
    let tanh = NodeId::from_index(1);
    let error =
        Scheduler::new([refusing("a", "tanh"), host("cpu")]).pin_node(tanh, 0).plan(&graph).unwrap_err();
    assert!(error.to_string().contains("a: tanh is beyond me"), "{error}");
    let error = Scheduler::new([refusing("a", "tanh"), refusing("b", "tanh")]).plan(&graph).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("blk.0.tanh#1") && text.contains("a: tanh") && text.contains("b: tanh"), "{text}");
    assert!(text.contains("tanh of F32 [4, 8] to F32 [4, 8]"), "{text}");
}

#[test]
fn a_storage_is_where_every_node_that_writes_it_is_computed() {
    let g = GraphBuilder::new();
    let (x, ids) = (g.input("x", DType::F32, [1, 8]), g.input("ids", DType::I32, [1]));
    let states = ["s0", "s1", "s2"].map(|name| g.state(name, DType::F32, [4, 8]));
    let rows = x.repeat([4, 8]);
    let [s0, s1, s2] = states;
    let written = [rows.copy_into(s0), s1.set_rows(x, ids), rows.copy_into(s2)];
    for (name, state) in ["y0", "y1", "y2"].into_iter().zip(written) {
        g.output(name, state);
    }
    let states = states.map(Value::id);
    let graph = g.finish().unwrap();
    let plan = Scheduler::new([refusing("a", "set_rows"), host("cpu")]).plan(&graph).unwrap();
    assert_eq!(states.map(|state| plan.placement(state)), [Some(0), Some(1), Some(0)]);
    let plan = Scheduler::new([refusing("a", "copy_into"), host("cpu")]).plan(&graph).unwrap();
    assert_eq!(states.map(|state| plan.placement(state)), [Some(1), Some(0), Some(1)]);
}

#[test]
fn pins_of_ids_are_for_the_graph_that_they_were_made_for() {
    let (first, second) = (chain(4), chain(1));
    let last = first.outputs()[0].1;
    let pinned = Scheduler::new(two()).pin_tensor(last, 1).pin_node(first[last].node().unwrap(), 1);
    let mut session = pinned.plan(&first).unwrap().session().unwrap();
    session.use_graph(second).expect("the second graph has no such tensor or node");
}

#[test]
fn s9_every_decision_is_explained_as_text_json_and_dot() {
    let graph = chain(4);
    let plan = Scheduler::new(two()).place(|name| Some((name > "w.1").into())).plan(&graph).unwrap();
    let brief = plan.to_string();
    assert!(brief.starts_with("8 nodes in 2 splits with 1 copy\n"), "{brief}");
    assert!(brief.contains("split 0 on a: 4 nodes"), "{brief}");
    assert!(brief.contains("split 1 on b: 4 nodes; reads b#blk.1.tanh#3 (128 bytes)"), "{brief}");
    let whole = format!("{plan:#}");
    assert!(whole.contains("w.2 is placed there") && whole.contains("follows blk.0.mul_mat#0"), "{whole}");
    assert_eq!(whole.lines().count(), brief.lines().count() + 8);
    let json: serde_json::Value = serde_json::from_str(&plan.to_json()).unwrap();
    assert_eq!(json["splits"].as_array().unwrap().len(), 2);
    assert_eq!(json["nodes"][4]["reason"]["HoldsSource"]["tensor"], graph.leaf("w.2").unwrap().index());
    let dot = plan.to_dot();
    assert!(dot.contains("s0 -> s1") && dot.starts_with("digraph"), "{dot}");
}

#[test]
fn an_error_over_budget_counts_the_weights_that_would_fit() {
    let graph = chain(10);
    let plan = Scheduler::new(two()).plan(&graph).unwrap();
    let bytes = &plan.bytes()[0];
    assert_eq!(bytes.weights, 10 * 256);
    Scheduler::new(two()).budget(0, bytes.total()).plan(&graph).unwrap();
    let error = Scheduler::new(two()).budget(0, bytes.total() - 700).plan(&graph).unwrap_err();
    let RuntimeError::OverBudget(over) = &error else { panic!("{error}") };
    assert_eq!((over.needed, over.weight_count, over.fitting), (bytes.total(), 10, 7));
    let text = error.to_string();
    assert!(text.contains("700 B more than the budget of"), "{text}");
    assert!(text.contains("7 of its 10 weights (1.8 KiB) would fit"), "{text}");
}

#[test]
fn weights_after_one_that_does_not_fit_are_not_counted() {
    let g = GraphBuilder::new();
    let mut x = g.input("x", DType::F32, [1, 64]);
    for (name, rows) in [("first", 16), ("large", 64), ("last", 16)] {
        let data = vec![0.1f32; rows * 64];
        let product = g.weight(name, Weight::with_data(DType::F32, [rows, 64], data.as_slice())).mul_mat(x);
        x = if rows == 64 { product } else { product.repeat([4, 16]).reshape([1, 64]) };
    }
    g.output("y", x);
    let graph = g.finish().unwrap();
    let total = Scheduler::new(two()).plan(&graph).unwrap().bytes()[0].total();
    let fitting = |budget| match Scheduler::new(two()).budget(0, budget).plan(&graph) {
        Err(RuntimeError::OverBudget(over)) => (over.fitting, over.weight_count, over.fitting_bytes),
        other => panic!("{:?}", other.err()),
    };
    assert_eq!(fitting(total - 1), (2, 3, (16 + 64) * 64 * 4));
    // There is room for the last one, but not for the large one before it.
    assert_eq!(fitting(total - 16 * 64 * 4 - 1), (1, 3, 16 * 64 * 4));
    assert_eq!(fitting(total - (16 + 64) * 64 * 4 - 1), (0, 3, 0));
}

//! G6: a caller's order and barriers, from the graph to the session.

use quadriga_conformance::Rng;
use quadriga_graph::{DType, Graph, GraphBuilder, NodeId, OrderError, Weight};
use quadriga_runtime::{Detail, Scheduler};
use quadriga_sim::Sim;

use crate::common::{chain_input, device, host, random_graph};

/// Four results and their sums, which are joined at the end.
fn branches() -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [16]);
    let parts: Vec<_> = (0..4).map(|i| x.scale(i as f32 + 1.0).pad([16])).collect();
    let sums: Vec<_> = parts.iter().map(|part| part.sum()).collect();
    g.output("all", sums[0].concat(0, &sums[1..]));
    g.finish().unwrap()
}

fn outputs(scheduler: &Scheduler, graph: &Graph) -> Vec<Vec<u8>> {
    let mut session = scheduler.plan(graph).unwrap().session().unwrap();
    for name in ["x", "z"].into_iter().filter(|name| graph.leaf(name).is_some()) {
        session.set(name, &chain_input()).unwrap();
    }
    for row in [1i32, 3] {
        session.run(&[("ids", &[row])]).unwrap();
    }
    graph.outputs().iter().map(|(name, _)| session.read::<u8>(name).unwrap()).collect()
}

#[test]
fn g6_with_barriers_memory_is_released_only_at_a_barrier() {
    let graph = branches();
    let nodes: Vec<NodeId> = graph.node_ids().collect();
    // Scale and pad of each part, then the sums, then the concatenation.
    let wide = graph.with_order(&[&nodes[..8], &nodes[8..12], &nodes[12..]]).unwrap();
    let deep: Vec<Vec<NodeId>> = (0..4).map(|i| vec![nodes[2 * i], nodes[2 * i + 1], nodes[8 + i]]).collect();
    let deep: Vec<&[NodeId]> = deep.iter().map(Vec::as_slice).chain([&nodes[12..]]).collect();
    let deep = graph.with_order(&deep).unwrap();
    for scheduler in [
        Scheduler::new(quadriga_cpu::Backend::builder().threads(2).build().unwrap()),
        Scheduler::new(device("gpu")),
    ] {
        let bytes = |graph: &Graph| scheduler.plan(graph).unwrap().memory().arena_bytes(0);
        let (free, wide_bytes, deep_bytes) = (bytes(&graph), bytes(&wide), bytes(&deep));
        // All pads are live at once between the first two barriers, one at a time in the deep order.
        assert!(wide_bytes >= free + 3 * 64, "{wide_bytes} and {free}");
        assert!(deep_bytes < wide_bytes, "{deep_bytes} and {wide_bytes}");
        let values: Vec<f32> = (0..16).map(|i| i as f32).collect();
        for (graph, splits) in [(&graph, 1), (&wide, 3), (&deep, 5)] {
            let plan = scheduler.plan(graph).unwrap();
            // No split reaches over a barrier, and so no fusion does.
            assert_eq!(plan.splits().splits.len(), splits);
            let mut session = plan.session().unwrap();
            session.run(&[("x", &values)]).unwrap();
            assert_eq!(session.read::<f32>("all").unwrap(), [120.0, 240.0, 360.0, 480.0]);
        }
    }
}

#[test]
fn g6_no_device_passes_a_barrier_before_the_others() {
    let graph = |barrier: bool| {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [1, 8]);
        let weight =
            |name: &str| g.weight(name, Weight::with_data(DType::F32, [8, 8], [1.0f32; 64].as_slice()));
        let slow = weight("w0").mul_mat(x).tanh().tanh().tanh();
        let fast = weight("w1").mul_mat(x);
        if barrier {
            g.barrier();
        }
        g.output("slow", slow.neg());
        g.output("fast", fast.neg());
        g.finish().unwrap()
    };
    let starts = |barrier: bool| {
        let slow = Sim::new("a").node_seconds(10.0).build();
        let fast = Sim::new("b").node_seconds(1.0).build();
        let rule = |name: &str| name.strip_prefix('w').and_then(|number| number.parse().ok());
        let plan = Scheduler::new([slow, fast]).place(rule).plan(graph(barrier)).unwrap();
        let mut session = plan.session().unwrap();
        session.set("x", &[1.0f32; 8]).unwrap();
        let trace = session.debug().trace(Detail::Splits).unwrap();
        assert_eq!(session.read::<f32>("fast").unwrap(), [-8.0; 8]);
        trace.splits.iter().map(|split| (split.backend, split.start, split.seconds)).collect::<Vec<_>>()
    };
    assert_eq!(starts(false).len(), 2);
    let with = starts(true);
    assert_eq!(with.len(), 4);
    let last =
        with.iter().filter(|(backend, ..)| *backend == 1).map(|(_, start, _)| *start).fold(0.0, f64::max);
    assert!(last >= 40.0, "the fast device went on after {last} seconds: {with:?}");
}

#[test]
fn g6_any_valid_order_with_any_barriers_gives_the_same_results() {
    for seed in 0..25 {
        let mut rng = Rng::new(seed);
        let graph = random_graph(&mut rng, 25);
        let rule = |name: &str| name.bytes().last().map(|last| usize::from(last % 2));
        let scheduler = Scheduler::new([device("gpu"), host("cpu")]).place(rule);
        let expected = outputs(&scheduler, &graph);
        let mut order: Vec<NodeId> = graph.node_ids().collect();
        let mut moved = 0;
        for _ in 0..150 {
            let (from, to) = (rng.below(order.len()), rng.below(order.len()));
            let mut other = order.clone();
            let node = other.remove(from);
            other.insert(to, node);
            if graph.with_order(&[&other]).is_ok() {
                moved += usize::from(from != to);
                order = other;
            }
        }
        assert!(moved > 5, "seed {seed}: only {moved} moves");
        let mut groups: Vec<&[NodeId]> = Vec::new();
        let mut rest = order.as_slice();
        while !rest.is_empty() {
            let (group, others) = rest.split_at(rng.range(1, rest.len()));
            groups.push(group);
            rest = others;
        }
        let barriers = graph.with_order(&groups).unwrap();
        assert_eq!(barriers.barriers().len(), groups.len() - 1);
        assert_ne!(barriers.fingerprint(), graph.with_order(&[&order]).unwrap().fingerprint());
        assert_eq!(outputs(&scheduler, &graph.with_order(&[&order]).unwrap()), expected, "seed {seed}");
        assert_eq!(outputs(&scheduler, &barriers), expected, "seed {seed}");
        let one = Scheduler::new(device("gpu"));
        assert_eq!(outputs(&one, &barriers), outputs(&one, &graph), "seed {seed}");
    }
}

#[test]
fn g6_orders_that_contradict_the_graph_are_errors() {
    let g = GraphBuilder::new();
    let (x, ids) = (g.input("x", DType::F32, [1, 8]), g.input("ids", DType::I32, [1]));
    let state = g.state("s", DType::F32, [4, 8]);
    let before = state.tanh().named("before");
    let written = state.set_rows(x, ids).named("written");
    g.output("y", before.add(written.sqr().named("squares")).named("y"));
    let graph = g.finish().unwrap();
    let node = |name: &str| graph[graph.tensor(name).unwrap()].node().unwrap();
    let [before, written, squares, y] = ["before", "written", "squares", "y"].map(node);
    let error = |order: &[NodeId]| graph.with_order(&[order]).unwrap_err();
    assert!(graph.with_order(&[&[before, written, squares, y]]).is_ok());
    let name = |name: &str| name.to_owned();
    assert_eq!(error(&[before, written, squares]), OrderError::Missing { node: name("y") });
    assert_eq!(error(&[before, written, squares, y, y]), OrderError::Twice { node: name("y") });
    assert_eq!(error(&[NodeId::from_index(9)]), OrderError::Unknown { node: 9, count: 4 });
    assert_eq!(
        error(&[before, squares, written, y]),
        OrderError::BeforeInput { node: name("squares"), input: name("written") }
    );
    assert_eq!(
        error(&[written, before, squares, y]),
        OrderError::AcrossWrite { node: name("before"), storage: name("s") }
    );
    // A barrier at the start or end, or a second one at the same place, separates nothing.
    let g = GraphBuilder::new();
    g.barrier();
    let x = g.input("x", DType::F32, [8]).tanh();
    g.barrier();
    g.barrier();
    g.output("y", x.neg());
    g.barrier();
    assert_eq!(g.finish().unwrap().barriers(), [NodeId::from_index(1)]);
}

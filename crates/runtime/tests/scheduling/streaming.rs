//! Weight streaming: host-resident weights and caches that a device reads through copies.

use std::sync::Arc;

use quadriga_conformance::Rng;
use quadriga_graph::{
    AttentionOptions, DType, Graph, GraphBuilder, Op, Shape, TensorId, TensorKind, Value, Weight,
};
use quadriga_runtime::{Backend, Reason, Scheduler, WeightStreaming};

use quadriga_sim::Sim;

use crate::common::{chain, chain_input, device, host, numbers, random_graph};

/// Streams every weight that can be streamed.
const ALWAYS: WeightStreaming = WeightStreaming { operations_per_byte: 0, min_operations: 0 };

fn scheduler(streaming: Option<WeightStreaming>) -> Scheduler {
    Scheduler::new([device("gpu"), host("cpu")])
        .place(|name| (name.starts_with('w') || name.starts_with('s')).then_some(1))
        .weight_streaming(streaming)
}

fn run(scheduler: &Scheduler, graph: &Graph) -> Vec<Vec<u8>> {
    let mut session = scheduler.plan(graph).unwrap().session().unwrap();
    let x = chain_input();
    for name in ["x", "z"].into_iter().filter(|name| graph.leaf(name).is_some()) {
        session.set(name, &x).unwrap();
    }
    if graph.leaf("ids").is_some() {
        session.set("ids", &[1i32]).unwrap();
    }
    // In the second run the memory has values of the first.
    session.run(&[]).unwrap();
    session.run(&[]).unwrap();
    graph.outputs().iter().map(|(name, _)| session.read::<u8>(name).unwrap()).collect()
}

#[test]
fn matmuls_stream_host_resident_weights_where_the_work_outweighs_the_copy() {
    let graph = chain(6);
    let plan = scheduler(Some(ALWAYS)).plan(&graph).unwrap();
    assert!(plan.streams_weights());
    for node in graph.node_ids().filter(|node| *graph[*node].op() == Op::MulMat) {
        let decision = plan.decision(node).unwrap();
        assert_eq!(decision.backend, 0);
        assert!(matches!(decision.reason, Reason::Streams { .. }));
    }
    // The weights stay resident on the host; their copies are in the device's arena.
    let bytes = plan.bytes();
    assert_eq!((bytes[0].weights, bytes[1].weights + bytes[1].mapped), (0, 6 * 256));
    assert_eq!(plan.splits().copies.iter().filter(|copy| copy.from == 1 && copy.bytes == 256).count(), 6);
    assert_eq!(run(&scheduler(Some(ALWAYS)), &graph), run(&scheduler(None), &graph));
}

#[test]
fn small_graphs_and_few_rows_stream_nothing() {
    let graph = chain(6);
    assert!(!scheduler(Some(WeightStreaming::default())).plan(&graph).unwrap().streams_weights());
    // Four rows: eight operations for each element of four bytes.
    let streaming = |operations_per_byte| Some(WeightStreaming { operations_per_byte, min_operations: 0 });
    assert!(scheduler(streaming(2)).plan(&graph).unwrap().streams_weights());
    assert!(!scheduler(streaming(3)).plan(&graph).unwrap().streams_weights());
}

#[test]
fn a_plan_over_budget_with_streaming_is_made_without() {
    let graph = chain(6);
    let needed = scheduler(Some(ALWAYS)).plan(&graph).unwrap().bytes()[0].total();
    let plan = scheduler(Some(ALWAYS)).budget(0, needed).plan(&graph).unwrap();
    assert!(plan.streams_weights());
    let plan = scheduler(Some(ALWAYS)).budget(0, needed - 1).plan(&graph).unwrap();
    assert!(!plan.streams_weights());
    assert!(plan.bytes()[0].total() < needed);
}

#[test]
fn results_are_the_same_with_and_without_streaming() {
    for seed in 0..60 {
        let graph = random_graph(&mut Rng::new(seed), 30);
        let (with, without) = (run(&scheduler(Some(ALWAYS)), &graph), run(&scheduler(None), &graph));
        assert_eq!(with, without, "seed {seed}");
    }
}

/// Layers with attention over a cache to which four rows are written, at the rows of the input "four". With `rng`, layers
/// differ: some read all of the cache, some write it twice.
fn cached(layers: usize, mut rng: Option<&mut Rng>) -> Graph {
    let mut numbers_from = Rng::new(3);
    let g = GraphBuilder::new();
    let mut x = g.input("x", DType::F32, [4, 8]);
    let ids = g.input("four", DType::I32, [4]);
    let mut states = Vec::new();
    for layer in 0..layers {
        let _scope = g.scope(&format!("blk.{layer}"));
        let mut product = |name: &str, x| {
            let data = numbers(&mut numbers_from, 64);
            g.mul_mat(g.weight(&format!("w.{layer}.{name}"), Weight::with_data(DType::F32, [8, 8], data)), x)
        };
        let mut chance = |of: f64| rng.as_mut().is_some_and(|rng| rng.chance(of));
        let (query, key, value) = (product("q", x), product("k", x), product("v", x));
        let keys = g.state(&format!("s.{layer}.k"), DType::F32, [8, 8]);
        let values = g.state(&format!("s.{layer}.v"), DType::F32, [8, 8]);
        let whole = chance(0.3);
        let mut written = if whole { keys } else { keys.slice(0, 0, 6) }.set_rows(key, ids);
        if chance(0.4) {
            written = written.set_rows(if chance(0.5) { key.tanh() } else { x }, ids);
        }
        let values_written = values.slice(0, 0, 6).set_rows(value, ids);
        let seen = written.slice(0, if whole { 1 } else { 0 }, 6);
        let attended = query.reshape([4, 1, 8]).permute([1, 0, 2]).attention(
            seen.reshape([6, 1, 8]).permute([1, 0, 2]),
            values_written.reshape([6, 1, 8]).permute([1, 0, 2]),
            AttentionOptions::new().scale(0.3),
        );
        x = product("o", attended.reshape([4, 8])).add(x).tanh();
        states.extend([written, values_written]);
    }
    g.output("y", x);
    for (index, state) in states.into_iter().enumerate() {
        g.output(&format!("state{index}"), state);
    }
    g.finish().unwrap()
}

fn run_cached(scheduler: &Scheduler, graph: &Graph) -> Vec<Vec<u8>> {
    let mut session = scheduler.plan(graph).unwrap().session().unwrap();
    session.set("x", &chain_input()).unwrap();
    let mut all = Vec::new();
    for ids in [[0i32, 1, 2, 3], [4, 5, 2, 0], [5, 4, 3, 2]] {
        session.set("four", &ids).unwrap();
        session.run(&[]).unwrap();
        all.extend(graph.outputs().iter().map(|(name, _)| session.read::<u8>(name).unwrap()));
    }
    all
}

#[test]
fn writes_to_a_host_resident_cache_are_mirrored_and_it_is_copied_before_the_run() {
    let graph = cached(5, None);
    let plan = scheduler(Some(ALWAYS)).plan(&graph).unwrap();
    let splits = plan.splits();
    assert_eq!(splits.mirrored_writes.len(), 10);
    assert!(splits.mirrored_writes.iter().all(|(node, split)| {
        *graph[*node].op() == Op::SetRows && splits.splits[*split].backend == 0 && plan.backend_of(*node) == 1
    }));
    // The device reads nothing that the host computes in this run.
    for copy in splits.copies.iter().filter(|copy| copy.to == 0) {
        assert_eq!(copy.source, None, "{}", graph.name(TensorId::from_index(copy.tensor)));
    }
    // The new rows are written back, and the device's memory does not grow with the number of layers.
    let of_state = |id: usize| graph[TensorId::from_index(id)].kind() == TensorKind::State;
    assert_eq!(splits.copies.iter().filter(|copy| copy.to == 0 && of_state(copy.storage)).count(), 10);
    let more = scheduler(Some(ALWAYS)).plan(cached(20, None)).unwrap();
    assert_eq!(plan.bytes()[0].compute, more.bytes()[0].compute);
    assert!(run_cached(&scheduler(Some(ALWAYS)), &graph) == run_cached(&scheduler(None), &graph));
}

#[test]
fn caches_are_the_same_with_and_without_streaming() {
    for seed in 0..60 {
        let graph = cached(4, Some(&mut Rng::new(seed)));
        let with = run_cached(&scheduler(Some(ALWAYS)), &graph);
        let without = run_cached(&scheduler(None), &graph);
        let differ: Vec<usize> = (0..with.len()).filter(|result| with[*result] != without[*result]).collect();
        assert!(differ.is_empty(), "seed {seed}: results {differ:?} of {}", with.len());
    }
}

#[test]
fn scratch_memory_is_planned_like_tensors_and_shared_with_none() {
    let with = |scratch: usize| {
        Scheduler::new([
            Sim::new("gpu").scratch(scratch).build(),
            Sim::new("cpu").synchronous().host().build(),
        ])
        .place(|name| (name.starts_with('w') || name.starts_with('s')).then_some(1))
        .weight_streaming(Some(ALWAYS))
    };
    for seed in 0..20 {
        let graph = cached(4, Some(&mut Rng::new(seed)));
        let (plain, scratch) = (with(0).plan(&graph).unwrap(), with(1 << 12).plan(&graph).unwrap());
        let (plain, scratch) = (plain.bytes()[0].compute, scratch.bytes()[0].compute);
        // Splits of one device run one after another, and share their scratch memory.
        assert!(scratch >= plain.max(1 << 12) && scratch <= plain + (1 << 12), "{plain} {scratch}");
        assert!(run_cached(&with(1 << 12), &graph) == run_cached(&scheduler(None), &graph), "seed {seed}");
    }
    // It counts towards the budget: with one byte less nothing is streamed.
    let graph = cached(4, None);
    let needed = with(1 << 12).plan(&graph).unwrap().bytes()[0].total();
    assert!(with(1 << 12).budget(0, needed).plan(&graph).unwrap().streams_weights());
    assert!(!with(1 << 12).budget(0, needed - 1).plan(&graph).unwrap().streams_weights());
}

#[test]
fn weights_are_streamed_to_the_first_asynchronous_device_with_memory_of_its_own() {
    let graph = chain(3);
    let streams_to = |backends: [Arc<dyn Backend>; 3]| {
        let weights_on = backends.iter().position(|backend| backend.memory().host).unwrap();
        let scheduler = Scheduler::new(backends)
            .place(move |name| name.starts_with('w').then_some(weights_on))
            .weight_streaming(Some(ALWAYS));
        let plan = scheduler.plan(&graph).unwrap();
        let streams = |node| {
            let decision = plan.decision(node).unwrap();
            matches!(decision.reason, Reason::Streams { .. }).then_some(decision.backend)
        };
        let mut to: Vec<usize> = graph.node_ids().filter_map(streams).collect();
        to.dedup();
        to
    };
    let synchronous = || Sim::new("synchronous").synchronous().build();
    let shares_memory = || Sim::new("shares memory").host().build();
    assert_eq!(streams_to([host("cpu"), device("a"), device("b")]), [1]);
    assert_eq!(streams_to([synchronous(), device("a"), host("cpu")]), [1]);
    assert_eq!(streams_to([host("cpu"), shares_memory(), device("a")]), [2]);
    assert!(streams_to([host("cpu"), synchronous(), shares_memory()]).is_empty());
}

#[test]
fn a_weight_that_cannot_be_copied_from_its_data_is_not_streamed() {
    let streams = |build: &dyn for<'g> Fn(&'g GraphBuilder, Value<'g>)| {
        let g = GraphBuilder::new();
        build(&g, g.input("x", DType::F32, [4, 8]));
        scheduler(Some(ALWAYS)).plan(g.finish().unwrap()).unwrap().streams_weights()
    };
    let weight = || Weight::with_data(DType::F32, [8, 8], numbers(&mut Rng::new(1), 64));
    assert!(streams(&|g, x| g.output("y", g.weight("w", weight()).mul_mat(x))));
    assert!(!streams(&|g, x| g.output("y", g.weight("w", Weight::new(DType::F32, [8, 8])).mul_mat(x))));
    // A backend that packs it would not find a part of it.
    assert!(!streams(&|g, x| {
        let w = g.weight("w", weight());
        g.output("y", w.mul_mat(x));
        g.output("first", w.slice(0, 0, 1).mul_mat(x));
    }));
    assert!(!streams(&|g, x| {
        let constant = g.constant("w", DType::F32, [8, 8], numbers(&mut Rng::new(1), 64));
        g.output("y", constant.mul_mat(x));
    }));
}

#[test]
fn a_quarter_of_the_work_of_sparse_matmuls_counts() {
    // 16 tokens, 64 neurons, 8 columns.
    let (tokens, neurons, width) = (16u64, 64u64, 8u64);
    let sparse = |into_neurons: bool| {
        let g = GraphBuilder::new();
        let data = numbers(&mut Rng::new(1), 64 * 8);
        let w = g.weight("w", Weight::with_data(DType::F32, [64, 8], data));
        let gates = g.input("gates", DType::F32, [16, 64]);
        let y = match into_neurons {
            true => w.mul_mat_sparse(g.input("x", DType::F32, [16, 8]), gates, None),
            false => w.axpy_sparse(gates),
        };
        g.output("y", y);
        g.finish().unwrap()
    };
    let operations = 2 * tokens * neurons * width / 4;
    for graph in [sparse(true), sparse(false)] {
        let streams = |min_operations| {
            let streaming = WeightStreaming { operations_per_byte: 0, min_operations };
            scheduler(Some(streaming)).plan(&graph).unwrap().streams_weights()
        };
        assert!(streams(operations) && !streams(operations + 1));
    }
}

#[test]
fn small_weights_are_streamed_where_every_result_is_four_times_as_large() {
    let streams_bias = |rows: usize, alone: bool| {
        let g = GraphBuilder::new();
        let weight = |name: &str, dims: &[usize]| {
            let data = numbers(&mut Rng::new(4), dims.iter().product());
            g.weight(name, Weight::with_data(DType::F32, Shape::new(dims).unwrap(), data))
        };
        let (w, bias) = (weight("w", &[8, 8]), weight("w.bias", &[8]));
        g.output("y", w.mul_mat(g.input("x", DType::F32, [rows, 8])).add(bias));
        if alone {
            g.output("squares", bias.sqr());
        }
        let bias = bias.id().index();
        let plan = scheduler(Some(ALWAYS)).plan(g.finish().unwrap()).unwrap();
        assert!(plan.streams_weights());
        plan.splits().copies.iter().any(|copy| copy.tensor == bias)
    };
    assert!(streams_bias(4, false) && !streams_bias(3, false) && !streams_bias(4, true));
}

#[test]
fn attention_counts_a_product_with_every_key_and_every_value() {
    let g = GraphBuilder::new();
    let [k, v] = ["s.k", "s.v"].map(|name| g.state(name, DType::F32, [1, 5, 8]));
    // Two heads of three queries.
    let q = g.input("q", DType::F32, [2, 3, 8]);
    g.output("y", q.attention(k, v, AttentionOptions::new()));
    let graph = g.finish().unwrap();
    let operations = 2 * 5 * (2 * 3 * 8 + 2 * 3 * 8);
    for (min_operations, streams) in [(operations, true), (operations + 1, false)] {
        let streaming = WeightStreaming { operations_per_byte: 0, min_operations };
        let plan = scheduler(Some(streaming)).plan(&graph).unwrap();
        let is_streamed = |node| matches!(plan.decision(node).unwrap().reason, Reason::Streams { .. });
        assert_eq!(graph.node_ids().any(is_streamed), streams);
    }
}

//! Estimates of time: what each operation, copy, rendezvous and streamed weight adds.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use quadriga_graph::{DType, Graph, GraphBuilder, Shape, Value, Weight};
use quadriga_llm::placement::{BatchEstimate, SlotHits};
use quadriga_runtime::{Backend, Cost, Plan, Rates, ReadCurve, ReadPoint, Scheduler, WeightStreaming};
use quadriga_sim::Sim;

/// Rates of a device and of the host. Only the device's link and rendezvous count.
const DEVICE: Rates = Rates {
    read: 1e6,
    read_curve: ReadCurve::UNKNOWN,
    int8: 1e30,
    bf16: 1e30,
    f32: 1e30,
    link: 1e3,
    rendezvous: 0.25,
    launch: 0.0,
    measured: true,
};
const HOST: Rates = Rates { read: 1e5, f32: 1e6, link: 7.0, rendezvous: 99.0, ..DEVICE };

fn weight<'g>(g: &'g GraphBuilder, name: &str, shape: impl Into<Shape>) -> Value<'g> {
    let shape = shape.into();
    let elements: usize = shape.dims().iter().product();
    g.weight(name, Weight::with_data(DType::F32, shape, vec![0.5f32; elements].as_slice()))
}

/// All experts are used equally often.
const WITHOUT: SlotHits = SlotHits::WithoutLocality;

/// A plan on a device and the host, which has the tensors with `host` in their name.
fn plan(graph: &Graph, streaming: Option<WeightStreaming>) -> Plan {
    let cpu: Arc<dyn Backend> = Arc::new(quadriga_cpu::Backend::builder().threads(1).build().unwrap());
    let scheduler = Scheduler::new([Sim::new("sim:0").build(), cpu]);
    let place = |name: &str| name.contains('w').then(|| usize::from(name.contains("host")));
    scheduler.place(place).weight_streaming(streaming).plan(graph).unwrap()
}

/// The work of the node that reads a leaf.
fn cost(graph: &Graph, leaf: &str) -> Cost {
    let leaf = graph.leaf(leaf).unwrap();
    let node = graph.node_ids().find(|node| graph.inputs(*node).first() == Some(&leaf)).unwrap();
    Cost::of(graph, node)
}

fn assert_near(found: f64, expected: f64, what: &str) {
    assert!((found - expected).abs() <= 1e-9 * expected.abs(), "{what}: {found} instead of {expected}");
}

#[test]
fn backends_compute_in_turn_copy_activations_and_wait_for_each_other() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [3, 64]);
    let y = weight(&g, "w0", [64, 64]).mul_mat(x);
    let y = weight(&g, "w1.host", [64, 64]).mul_mat(y);
    g.output("y", weight(&g, "w2", [32, 64]).mul_mat(y));
    let graph = g.finish().unwrap();
    let estimate = BatchEstimate::of(&plan(&graph, None), 3, 17, &[DEVICE, HOST], WITHOUT);
    assert_eq!((estimate.tokens, estimate.visible_slots, estimate.crossings), (3, 17, 2));
    // The device is bound by memory, the host's matmul by arithmetic.
    let traffic = cost(&graph, "w0").traffic + cost(&graph, "w2").traffic;
    assert_eq!(traffic, 4 * (64 * 64 + 6 * 64 + 32 * 64 + 3 * 64 + 3 * 32));
    assert_near(estimate.compute[0], traffic as f64 / 1e6, "device");
    let on_host = cost(&graph, "w1.host");
    assert_eq!(on_host, Cost { operations: 2 * 3 * 64 * 64, traffic: 4 * (64 * 64 + 6 * 64), sent: 0 });
    assert_near(estimate.compute[1], on_host.traffic as f64 / 1e5, "host");
    assert_near(estimate.copies, 2.0 * (3 * 64 * 4) as f64 / 1e3, "copies");
    assert_near(estimate.waiting, 0.5, "waiting");
    assert_eq!(estimate.streaming, 0.0);
    let seconds = estimate.compute[0] + estimate.compute[1] + estimate.copies + 0.5;
    assert_near(estimate.seconds(), seconds, "all");
    assert_near(estimate.tokens_per_second(), 3.0 / seconds, "speed");
    // Each matmul has a launch.
    let launching = [Rates { launch: 8.0, ..DEVICE }, Rates { launch: 16.0, ..HOST }];
    let launched = BatchEstimate::of(&plan(&graph, None), 3, 17, &launching, WITHOUT);
    assert_near(launched.compute[0], estimate.compute[0] + 2.0 * 8.0, "two launches");
    assert_near(launched.compute[1], estimate.compute[1] + 16.0, "one");
    let slow = Rates { f32: 1e4, ..HOST };
    let estimate = BatchEstimate::of(&plan(&graph, None), 3, 17, &[DEVICE, slow], WITHOUT);
    assert_near(estimate.compute[1], on_host.operations as f64 / 1e4, "arithmetic");
}

#[test]
fn streamed_weights_count_as_far_as_they_take_longer_than_the_device_computes() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [16, 64]);
    let y = weight(&g, "w0", [64, 64]).mul_mat(x);
    g.output("y", weight(&g, "w1.host", [64, 64]).mul_mat(y));
    let graph = g.finish().unwrap();
    let always = WeightStreaming { operations_per_byte: 1, min_operations: 1 };
    let plan = plan(&graph, Some(always));
    assert!(plan.streams_weights());
    let bytes = (64 * 64 * 4) as f64;
    let compute = (cost(&graph, "w0").traffic + cost(&graph, "w1.host").traffic) as f64 / 1e6;
    let estimate = BatchEstimate::of(&plan, 16, 16, &[DEVICE, HOST], WITHOUT);
    assert_near(estimate.compute[0], compute, "the device computes all");
    assert_eq!((estimate.compute[1], estimate.copies, estimate.crossings), (0.0, 0.0, 0));
    assert_near(estimate.streaming, bytes / 1e3 - compute, "the rest of the copy");
    let fast = Rates { link: 1e9, ..DEVICE };
    assert_eq!(
        BatchEstimate::of(&plan, 16, 16, &[fast, HOST], WITHOUT).streaming,
        0.0,
        "hidden behind the compute"
    );
}

#[test]
fn weights_are_read_at_the_rate_of_as_many_bytes() {
    let point = |working_set, rate| ReadPoint { working_set, rate };
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [1, 64]);
    let y = weight(&g, "w0.host", [64, 64]).mul_mat(x);
    g.output("y", weight(&g, "w1.host", [32, 64]).mul_mat(y));
    let graph = g.finish().unwrap();
    let both = (cost(&graph, "w0.host").traffic + cost(&graph, "w1.host").traffic) as f64;
    // Caches hold one of both, and not both: they are read in turn.
    let read_curve = ReadCurve::new(&[point(both - 1.0, 4e5), point(both, 2e5)]);
    let rates = [DEVICE, Rates { read_curve, ..HOST }];
    let estimate = BatchEstimate::of(&plan(&graph, None), 1, 1, &rates, WITHOUT);
    assert_near(estimate.compute[1], both / 2e5, "both");

    let g = GraphBuilder::new();
    let (x, ids) = (g.input("x", DType::F32, [1, 1, 64]), g.input("ids", DType::I32, [1, 2]));
    g.output("y", weight(&g, "w.host", [8, 32, 64]).mul_mat_id(x, ids));
    let graph = g.finish().unwrap();
    let (used, all) = (cost(&graph, "w.host").traffic as f64, f64::from(8 * 32 * 64 * 4));
    assert!(used < all / 2.0);
    let read_curve = ReadCurve::new(&[point(all - 1.0, 4e5), point(all, 2e5)]);
    let rates = [DEVICE, Rates { read_curve, ..HOST }];
    let estimate = BatchEstimate::of(&plan(&graph, None), 1, 1, &rates, WITHOUT);
    assert_near(estimate.compute[1], used / 2e5, "the next token uses other experts");
}

/// The host's time for experts with few rows each is the one by which the scheduler decides to stream them.
#[test]
fn a_host_takes_longer_for_few_rows_of_each_expert_and_a_device_does_not() {
    for (tokens, slowness) in [(1, 1.0), (16, 4.0), (400, 1.5)] {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [tokens, 1, 64]);
        let ids = g.input("ids", DType::I32, [tokens, 2]);
        let here = weight(&g, "w0", [8, 32, 64]).mul_mat_id(x, ids);
        let there = weight(&g, "w1.host", [8, 32, 64]).mul_mat_id(x, ids);
        g.output("y", here);
        g.output("z", there);
        let graph = g.finish().unwrap();
        // Arithmetic is the limit of both.
        let slow = |rates: Rates| Rates { read: 1e30, f32: 1e6, ..rates };
        let plan = plan(&graph, None);
        let estimate = BatchEstimate::of(&plan, tokens, tokens, &[slow(DEVICE), slow(HOST)], WITHOUT);
        let operations = cost(&graph, "w1.host").operations as f64;
        assert_near(estimate.compute[0], operations / 1e6, "device");
        assert_near(estimate.compute[1], slowness * operations / 1e6, "host");
    }
}

#[test]
fn experts_in_slots_and_on_the_host_share_the_work() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [2, 1, 64]);
    let ids = g.input("ids", DType::I32, [2, 3]);
    let here = weight(&g, "w.host.slots", [2, 32, 64]).mul_mat_id(x, ids);
    let there = weight(&g, "w.host", [8, 32, 64]).mul_mat_id(x, ids);
    let whole = weight(&g, "whole.w", [8, 32, 64]).mul_mat_id(x, ids);
    g.output("y", here.add(there).add(whole));
    let graph = g.finish().unwrap();
    let only = |leaf: &str| cost(&graph, leaf).traffic as f64;
    let plan = plan(&graph, None);
    let rates = [Rates { read: 1.0, ..DEVICE }, Rates { read: 1.0, ..HOST }];
    let estimate = BatchEstimate::of(&plan, 2, 2, &rates, WITHOUT);
    // With slots for a quarter of the experts, 7 of 16 look-ups are assumed to find theirs.
    let assumed = BatchEstimate::of(&plan, 2, 2, &rates, SlotHits::Assumed);
    let fewer = estimate.compute[1] - assumed.compute[1];
    // Here the host has the slots, too.
    let moved = only("w.host") - only("w.host.slots");
    assert_near(fewer, moved * (0.75 - 9.0 / 16.0), "fewer on the host");
    let adds: f64 = graph
        .node_ids()
        .filter(|node| graph.inputs(*node).len() == 2)
        .map(|node| Cost::of(&graph, node).traffic as f64)
        .sum();
    let all: f64 = estimate.compute.iter().sum();
    let expected = only("w.host.slots") * 0.25 + only("w.host") * 0.75 + only("whole.w") + adds;
    assert_near(all, expected, "a quarter of the experts has slots");
}

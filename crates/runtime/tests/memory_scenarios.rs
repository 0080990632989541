//! Small graphs with limited buffers, and the total that ggml needs for each; ours is never larger.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_graph::{DType, Graph, GraphBuilder, Value, Weight};
use quadriga_runtime::memory::packing::Effort;
use quadriga_runtime::memory::{BackendMemory, InputPolicy, MemoryPlan, MemoryRequest, Planner, check};

/// An input of this many bytes.
fn input<'g>(g: &'g GraphBuilder, name: &str, bytes: usize) -> Value<'g> {
    g.input(name, DType::F32, [bytes / 4])
}

fn build(make: impl for<'g> Fn(&'g GraphBuilder) -> Value<'g>) -> Graph {
    let g = GraphBuilder::new();
    let last = make(&g);
    g.output("last", last);
    g.finish().unwrap()
}

fn plan(graph: &Graph, alignment: usize, max: Option<usize>) -> MemoryPlan {
    let memories = [BackendMemory::measuring("a", alignment, max)];
    let effort = Effort::Search { seed: 1, steps: 10_000 };
    let request =
        MemoryRequest { inputs: InputPolicy::Release, effort, ..MemoryRequest::new(graph, &memories) };
    let plan = Planner::default().plan(&request).unwrap();
    check(&request, &plan).unwrap();
    println!("{plan}{}", plan.forecast(graph));
    plan
}

fn needs(graph: &Graph, alignment: usize, max: Option<usize>, most: u64) {
    let plan = plan(graph, alignment, max);
    assert!(plan.arena_bytes(0) <= most, "{} bytes, ggml needs {most}", plan.arena_bytes(0));
    let largest = graph.tensors().iter().map(|t| t.bytes() as u64).max().unwrap();
    let limit = max.map_or(u64::MAX, |max| largest.max(max as u64));
    assert!(plan.backends[0].chunks.iter().all(|chunk| *chunk <= limit));
}

/// In the order in which ggml runs these nodes, depth first from the result: e, d, f, g. With d before e, the four
/// tensors a, b, c, d are alive at once, and no allocator needs less than 32 bytes.
#[test]
fn too_many_tensors_for_one_buffer() {
    let graph = build(|g| {
        let [a, b, c] = ["a", "b", "c"].map(|name| input(g, name, 8));
        let e = b.add(c);
        let f = a.mul(b).add(a);
        e.add(f)
    });
    needs(&graph, 8, Some(16), 24);
}

#[test]
fn a_tensor_too_large_for_what_is_left() {
    let graph = build(|g| input(g, "a", 16).concat(0, &[input(g, "b", 8)]));
    needs(&graph, 8, Some(32), 48);
}

#[test]
fn one_tensor_larger_than_the_largest_buffer_gets_its_own() {
    let graph = build(|g| input(g, "a", 24).scale(2.0));
    needs(&graph, 8, Some(16), 24);
}

#[test]
fn more_buffers_than_sixteen() {
    let graph = build(|g| {
        let all: Vec<_> = (0..17).map(|i| input(g, &format!("x{i}"), 8)).collect();
        all[1..].iter().fold(all[0], |sum, x| sum.add(*x))
    });
    needs(&graph, 8, Some(8), 136);
}

#[test]
fn leftover_space_is_filled() {
    let graph = build(|g| input(g, "a", 8).pad([2]).mean());
    needs(&graph, 8, Some(16), 24);
}

#[test]
fn in_place_through_views() {
    let graph = build(|g| {
        let a = input(g, "a", 16);
        let c = a.reshape([2, 2]).permute([1, 0]);
        let d = c.view([2], [8, 8, 8, 4], 4);
        d.add(input(g, "e", 8))
    });
    needs(&graph, 8, Some(32), 24);
}

#[test]
fn memory_is_used_again() {
    let graph = build(|g| {
        let (a, b, c) = (input(g, "a", 24), input(g, "b", 8), input(g, "c", 8));
        let d = b.add(c);
        let e = a.pad([2]);
        let f = e.scale(2.0);
        let h = e.add(f).view([2], [8, 8, 8, 4], 8);
        d.add(h)
    });
    needs(&graph, 8, Some(40), 72);
}

#[test]
fn free_blocks_merge() {
    let graph = build(|g| {
        let [a, b, c] = ["a", "b", "c"].map(|name| input(g, name, 16));
        let (d, e, f) = (a.mean(), b.mean(), c.pad([2]));
        f.add(d.add(e).pad([5]))
    });
    needs(&graph, 8, Some(32), 72);
    needs(&graph, 8, None, 72);
}

#[test]
fn memory_already_held_is_preferred() {
    let graph = build(|g| input(g, "a", 24).mean().mean());
    needs(&graph, 4, Some(32), 28);
}

#[test]
fn g7_two_backends_in_one_pass() {
    let g = GraphBuilder::new();
    let weight = |name: &str, bytes: usize| g.weight(name, Weight::new(DType::F32, [bytes / 4]));
    let (a0, a1) = (weight("a0", 16), weight("a1", 16));
    let (b0, b1) = (weight("b0", 24), weight("b1", 4));
    let x0 = input(&g, "x0", 16);
    let x1 = x0.mul(a0);
    let x2 = x1.pad([2]);
    let x3 = x2.mul(b0);
    let x4 = x3.mean();
    let x5 = x4.add(b1);
    let x6 = x5.pad([3]);
    let x8 = x6.add(a1).scale(2.0);
    let on_b = [b0, b1, x3, x4, x5, x6].map(Value::id);
    g.output("x8", x8);
    let graph = g.finish().unwrap();
    let backends: Vec<u16> = graph.tensor_ids().map(|id| u16::from(on_b.contains(&id))).collect();
    let memories = [BackendMemory::measuring("A", 8, Some(32)), BackendMemory::measuring("B", 8, None)];
    let request = MemoryRequest {
        backends: &backends,
        inputs: InputPolicy::Release,
        ..MemoryRequest::new(&graph, &memories)
    };
    let plan = Planner::default().plan(&request).unwrap();
    check(&request, &plan).unwrap();
    let totals: Vec<u64> = plan.backends.iter().map(|b| b.arena_bytes() + b.weights).collect();
    assert!(totals[0] <= 72 && totals[1] <= 56, "{plan}");
}

#[test]
fn a_backend_that_gets_nothing() {
    let graph = build(|g| input(g, "a", 16).scale(2.0));
    let memories = [BackendMemory::measuring("A", 8, None), BackendMemory::measuring("B", 8, None)];
    let request = MemoryRequest { inputs: InputPolicy::Release, ..MemoryRequest::new(&graph, &memories) };
    let plan = Planner::default().plan(&request).unwrap();
    assert_eq!((plan.arena_bytes(0), plan.arena_bytes(1)), (16, 0));
    assert!(plan.backends[1].chunks.is_empty());
}

/// Each graph alone takes 40 bytes, as in ggml, which frees the first one's buffers for the second. Chunks that serve
/// both, one after the other in any order, cannot be less than 24 and 20 bytes: a session's arena has just those.
#[test]
fn x18_another_graph_of_equal_total_is_planned_anew() {
    let first = build(|g| {
        let (a, b) = (input(g, "a", 24), input(g, "b", 16));
        let c = a.view([1], [4, 4, 4, 4], 0);
        b.add(c)
    });
    let second = build(|g| input(g, "a", 20).add(input(g, "b", 20)));
    let (one, two) = (plan(&first, 4, Some(32)), plan(&second, 4, Some(32)));
    assert!(one.arena_bytes(0) <= 40 && two.arena_bytes(0) <= 40);
    assert_ne!(one.graph, two.graph);
}

//! Real memory behind plans: what is forecast is allocated, nothing more, and a refusal leaves everything as it was.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

#[path = "common/heap.rs"]
mod heap;
#[path = "common/transformer.rs"]
mod transformer;

use heap::Heap;
use quadriga_graph::{DType, Data, Graph, GraphBuilder, Weight};
use quadriga_runtime::memory::{Binding, Family, Inputs, Memory, MemoryError, MemoryPlan, Planner, Request};
use quadriga_runtime::{Backend, BackendError, Usage};
use std::sync::Arc;

fn chain(width: usize) -> Arc<Graph> {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [width]);
    let w = g.weight("w", Weight::new(DType::F32, [width, width]));
    let y = g.mul_mat(w, x.reshape([1, width])).silu();
    g.output("y", y.pad([0, 2]).sqr());
    Arc::new(g.finish().unwrap())
}

fn plan(graph: &Graph, backends: &[&Heap]) -> Arc<MemoryPlan> {
    let memories: Vec<Memory<'_>> = backends.iter().map(|backend| Memory::of(*backend)).collect();
    Arc::new(Planner::default().plan(&Request::new(graph, &memories)).unwrap())
}

#[test]
fn b1_a_buffer_is_freed_once_and_wrapped_memory_never() {
    let heap = Heap::new("h", 16, None);
    let buffer = heap.allocate(100, Usage::Weights).unwrap();
    let other = Arc::clone(&buffer);
    assert_eq!((heap.counts().live, heap.counts().frees), (100, 0));
    drop(buffer);
    assert_eq!(heap.counts().frees, 0);
    drop(other);
    assert_eq!((heap.counts().live, heap.counts().frees), (0, 1));
    let data = Data::from(vec![1, 2, 3, 4]);
    let mapped = heap.map(&data).unwrap();
    let mut bytes = [0; 2];
    mapped.read(1, &mut bytes).unwrap();
    assert_eq!(bytes, [2, 3]);
    drop(mapped);
    assert_eq!(heap.counts().frees, 1);
    assert_eq!(data.len(), 4);
}

#[test]
fn b2_b3_places_are_aligned_inside_their_buffer_and_padded_as_the_backend_asks() {
    let graph = chain(5);
    let mut heap = Heap::new("h", 32, None);
    heap.padding = 48;
    let binding = Binding::allocate(&graph, &heap.shared()).unwrap();
    let mut storages = Vec::new();
    for (id, tensor) in graph.tensor_ids().zip(graph.tensors()).filter(|(_, t)| t.node().is_some()) {
        let region = binding.region(id).unwrap();
        assert!(region.offset.is_multiple_of(32) || tensor.storage() != id);
        let padded = if tensor.storage() == id { heap.storage_bytes(tensor) } else { tensor.bytes() };
        assert!(region.offset + padded <= region.buffer.bytes());
        storages.push(binding.plan().bytes[id.index()]);
    }
    assert!(storages.iter().all(|bytes| bytes.is_multiple_of(48)));
    // Without padding a storage takes the tensor's own bytes.
    assert_eq!(Memory::measuring("m", 4, None).storage_bytes(&graph.tensors()[0]), 20);
}

#[test]
fn b4_x15_hooks_run_once_for_each_place_and_never_while_measuring() {
    let graph = chain(8);
    let heap = Heap::new("h", 16, None);
    plan(&graph, &[&heap]);
    assert_eq!(heap.counts(), heap::Counts::default());
    let binding = Binding::allocate(&graph, &heap.shared()).unwrap();
    let placed = graph.tensor_ids().filter(|id| binding.region(*id).is_some()).count();
    assert_eq!((heap.counts().placed, heap.counts().released), (placed, 0));
    assert!(placed > 0);
    drop(binding);
    let counts = heap.counts();
    assert_eq!((counts.placed, counts.released, counts.live), (placed, placed, 0));
}

#[test]
fn b4_a_refused_place_is_taken_back() {
    let graph = chain(8);
    for refused in 0..4 {
        let heap = Heap::new("h", 16, None);
        *heap.refuse_placed.lock().unwrap() = Some(refused);
        let error = Binding::allocate(&graph, &heap.shared()).unwrap_err();
        assert!(matches!(error, MemoryError::Backend(BackendError::Failed { .. })));
        let counts = heap.counts();
        assert_eq!((counts.placed, counts.released, counts.live), (refused, refused, 0));
    }
}

#[test]
fn b5_g5_a_tensor_knows_its_buffer_and_backend_and_an_unplaced_one_has_none() {
    let graph = chain(8);
    let heap = Heap::new("h", 16, None);
    let binding = Binding::allocate(&graph, &heap.shared()).unwrap();
    let output = graph.output("y").unwrap();
    assert_eq!(binding.region(output).unwrap().buffer.backend(), "h");
    assert!(binding.region(graph.leaf("w").unwrap()).is_none());
}

#[test]
fn g8_one_call_plans_and_allocates_and_the_forecast_is_what_is_allocated() {
    for max in [None, Some(4096), Some(60_000)] {
        let graph = Arc::new(transformer::of_nodes(100));
        let mut heap = Heap::new("h", 64, max);
        heap.padding = 96;
        heap.facts.max_buffer = max.map(|max| max.max(100_000));
        let forecast = plan(&graph, &[&heap]).forecast(&graph);
        assert_eq!(heap.counts().live, 0);
        let binding = Binding::allocate(&graph, &heap.shared()).unwrap();
        assert_eq!(heap.counts().live, forecast.backends[0].plan.arena_bytes());
        let chunks = &forecast.backends[0].plan.chunks;
        assert_eq!(heap.counts().allocations, chunks.len());
        assert!(!forecast.backends[0].alive.is_empty());
        assert!(!forecast.to_string().is_empty());
        drop(binding);
        assert_eq!(heap.counts().live, 0);
    }
}

#[test]
fn x8_x9_plans_of_any_size_follow_each_other_in_one_arena() {
    let heap = Heap::new("h", 16, None);
    let mut family = Family::new([heap.shared()]);
    let mut bind = |width: usize| {
        let graph = chain(width);
        let memories = [Memory::of(&heap)];
        let plan = family.plan(&Request::new(&graph, &memories)).unwrap();
        let binding = family.bind(&graph, &plan).unwrap();
        (binding, plan)
    };
    let (large, _) = bind(1000);
    let held = heap.counts().live;
    drop(large);
    let (small, small_plan) = bind(10);
    assert_eq!(heap.counts().live, held, "what fits takes no new memory");
    // A smaller graph after a larger one is planned as if it were the first.
    assert_eq!(*small_plan, *plan(&chain(10), &[&heap]));
    let allocations = heap.counts().allocations;
    let (again, again_plan) = bind(10);
    assert!(Arc::ptr_eq(&small_plan, &again_plan), "the same request finds the same plan");
    assert_eq!(heap.counts().allocations, allocations);
    drop((small, again));
    let (_larger, plan) = bind(2000);
    assert_eq!(heap.counts().live, plan.arena_bytes(0));
}

#[test]
fn x18_a_plan_is_never_used_for_another_graph() {
    // Equal sizes, another topology: the first sum is read later in one of them.
    let make = |late: bool| {
        let g = GraphBuilder::new();
        let (a, b) = (g.input("a", DType::F32, [8]), g.input("b", DType::F32, [8]));
        let c = a.add(b);
        let d = c.pad([0]);
        let e = if late { d.add(c) } else { d.add(b) };
        g.output("e", e);
        Arc::new(g.finish().unwrap())
    };
    let (one, two) = (make(false), make(true));
    let heap = Heap::new("h", 16, None);
    let memories = [Memory::of(&heap)];
    let mut family = Family::new([heap.shared()]);
    let plan = family.plan(&Request::new(&one, &memories)).unwrap();
    let other = family.plan(&Request::new(&two, &memories)).unwrap();
    assert_eq!(family.len(), 2);
    assert_eq!(family.bind(&two, &plan).unwrap_err(), MemoryError::Stale);
    family.bind(&two, &other).unwrap();
    // Anything else that decides a plan makes a new one, too.
    let base = Request::new(&one, &memories);
    let tensors = vec![0; one.tensors().len()];
    let steps = vec![0, 1, 2];
    let others = [
        Request { inputs: Inputs::Release, ..base },
        Request { backends: &tensors, ..base },
        Request { steps: &steps, ..base },
        Request { placed: &[one.leaf("a").unwrap()], ..base },
    ];
    let mut keys: Vec<_> = others.iter().map(Request::key).chain([base.key()]).collect();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), 5);
    let mut padded = heap.clone();
    padded.padding = 64;
    let memories = [Memory::of(&padded)];
    assert_ne!(Request::new(&one, &memories).key(), base.key());
}

#[test]
fn x14_x19_every_allocation_failing_in_turn_leaves_what_was() {
    let (small, large) = (chain(10), chain(500));
    // Chunks of 1,024 bytes: the large plan needs several allocations on both backends.
    let names = ["a", "b"];
    for refused in 0..16 {
        let heaps = names.map(|name| Heap::new(name, 16, Some(4096)));
        let mut family = Family::new(heaps.iter().map(Heap::shared));
        let memories: Vec<Memory<'_>> = heaps.iter().map(|heap| Memory::of(heap)).collect();
        let spread =
            |graph: &Graph| -> Vec<u16> { (0..graph.tensors().len()).map(|i| u16::from(i > 3)).collect() };
        let backends = spread(&small);
        let request = Request { backends: &backends, ..Request::new(&small, &memories) };
        let small_plan = family.plan(&request).unwrap();
        let before = family.bind(&small, &small_plan).unwrap();
        let y = small.output("y").unwrap();
        let region = before.region(y).unwrap();
        region.buffer.write(region.offset, &[7; 40]).unwrap();
        let counts: Vec<_> = heaps.iter().map(Heap::counts).collect();

        let which = refused % 2;
        *heaps[which].refuse.lock().unwrap() = Some(counts[which].allocations + refused / 2);
        let backends = spread(&large);
        let request = Request { backends: &backends, ..Request::new(&large, &memories) };
        let large_plan = family.plan(&request).unwrap();
        match family.bind(&large, &large_plan) {
            Ok(_) => assert!(refused / 2 >= large_plan.backends[which].chunks.len()),
            Err(MemoryError::Allocation { backend, wanted, free, .. }) => {
                assert_eq!(backend, names[which]);
                assert!(wanted > 0 && free.is_some());
                for (heap, before) in heaps.iter().zip(&counts) {
                    assert_eq!(heap.counts().live, before.live, "nothing is leaked");
                }
                let mut bytes = [0; 40];
                region.buffer.read(region.offset, &mut bytes).unwrap();
                assert_eq!(bytes, [7; 40]);
                family.bind(&small, &small_plan).unwrap();
            }
            Err(other) => panic!("{other}"),
        }
        drop((before, region));
        drop(family);
        assert!(heaps.iter().all(|heap| heap.counts().live == 0));
    }
}

#[test]
fn a_tensor_that_no_buffer_can_hold_is_named() {
    let graph = chain(100);
    let heap = Heap::new("h", 16, Some(256));
    let error = Binding::allocate(&graph, &heap.shared()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("bytes are wanted") && text.contains("are free"), "{text}");
    assert!(matches!(error, MemoryError::Allocation { wanted, .. } if wanted >= 400));
    assert_eq!(heap.counts().live, 0);
}

#[test]
fn tensors_without_a_byte_have_a_place() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [0, 4]);
    g.output("y", x.silu());
    let graph = Arc::new(g.finish().unwrap());
    let heap = Heap::new("h", 16, None);
    let binding = Binding::allocate(&graph, &heap.shared()).unwrap();
    assert_eq!(binding.region(graph.output("y").unwrap()).unwrap().bytes, 0);
}

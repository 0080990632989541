//! The memory that a session allocates for its plans: exactly what was forecast, shared by all plans, and intact after
//! a refused allocation.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

#[path = "common/heap.rs"]
mod heap;
#[path = "common/transformer.rs"]
mod transformer;

use heap::{Heap, HeapCounts};
use quadriga_graph::{BuildError, DType, Data, Graph, GraphBuilder, Weight};
use quadriga_runtime::memory::{Arena, BackendMemory, MemoryRequest, Planner, TensorLocation};
use quadriga_runtime::{Backend, BackendError, ModelId, PlanKey, RuntimeError, Scheduler, Session, Usage};
use quadriga_sim::{FaultPoint, Sim};
use std::sync::Arc;

/// A matmul, an activation and a padded square; the weight is all ones.
fn chain(width: usize) -> Result<Graph, BuildError> {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [width]);
    let ones = Data::from(vec![1.0f32; width * width].as_slice());
    let w = g.weight(&format!("w{width}"), Weight::with_data(DType::F32, [width, width], ones));
    let y = g.mul_mat(w, x.reshape([1, width])).relu();
    g.output("y", y.pad([0, 2]).sqr());
    g.finish()
}

fn scheduler(heap: &Heap) -> Scheduler {
    Scheduler::new([heap.shared()])
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
fn b2_b3_tensors_are_aligned_inside_their_buffer_and_padded_as_the_backend_requires() {
    let mut heap = Heap::new("h", 32, None);
    heap.padding = 48;
    let plan = scheduler(&heap).plan(chain(5).unwrap()).unwrap();
    assert!(plan.memory().bytes.iter().all(|bytes| bytes.is_multiple_of(48)));
    let _session = plan.session().unwrap();
    let records = heap.records.lock().unwrap();
    assert!(records.len() > 4);
    for record in &*records {
        let storage = record.offset - record.tensor.offset();
        assert!(storage.is_multiple_of(32), "{record:?}");
        assert!(storage + heap.storage_bytes(&record.tensor) <= record.buffer_bytes, "{record:?}");
    }
    // Without a backend a storage takes the tensor's own bytes.
    assert_eq!(BackendMemory::measuring("m", 4, None).storage_bytes(&plan.graph().tensors()[0]), 20);
}

#[test]
fn b4_x15_hooks_run_once_for_each_tensor_and_never_while_planning() {
    let heap = Heap::new("h", 16, None);
    let scheduler = scheduler(&heap);
    let plan = scheduler.plan(chain(8).unwrap()).unwrap();
    assert_eq!(heap.counts(), HeapCounts::default());
    let session = plan.session().unwrap();
    let placed = heap.counts().placed;
    assert!(placed > 0);
    assert_eq!(heap.counts().released, 0);
    drop((session, plan, scheduler));
    let counts = heap.counts();
    assert_eq!((counts.placed, counts.released, counts.live), (placed, placed, 0));
}

#[test]
fn b4_a_tensor_that_the_backend_refuses_fails_the_session_and_all_others_are_released() {
    for refused in 0..4 {
        let heap = Heap::new("h", 16, None);
        *heap.refuse_placed.lock().unwrap() = Some(refused);
        let plan = scheduler(&heap).plan(chain(8).unwrap()).unwrap();
        let Err(RuntimeError::Device { error, .. }) = plan.session() else { panic!("must be refused") };
        assert!(matches!(*error, BackendError::Failed { .. }), "{error}");
        drop(plan);
        let counts = heap.counts();
        assert_eq!((counts.placed, counts.released, counts.live), (refused, refused, 0));
    }
}

#[test]
fn b5_g5_a_tensor_is_in_a_buffer_of_its_backend_and_a_weight_is_not_in_the_arena() {
    let heap = Heap::new("h", 16, None);
    let plan = scheduler(&heap).plan(chain(8).unwrap()).unwrap();
    let graph = plan.graph();
    let output = graph.output("y").unwrap();
    assert!(matches!(plan.memory().location(output), TensorLocation::Arena { backend: 0, .. }));
    assert_eq!(plan.memory().location(graph.leaf("w8").unwrap()), TensorLocation::External { backend: 0 });
    let _session = plan.session().unwrap();
    assert!(heap.records.lock().unwrap().iter().all(|record| record.owner == "h"));
}

#[test]
fn g8_a_session_plans_and_allocates_in_one_call_and_allocates_what_is_forecast() {
    for max in [None, Some(1100)] {
        let mut heap = Heap::new("h", 64, max);
        heap.padding = 96;
        let mut session = Session::new(&scheduler(&heap)).unwrap();
        session.use_graph(transformer::of_nodes_small(100)).unwrap();
        let plan = session.plan().unwrap();
        let forecast = plan.memory().forecast(plan.graph());
        let arena: u64 = session.memory().arena(0).iter().map(|chunk| chunk.bytes() as u64).sum();
        assert_eq!(arena, forecast.backends[0].plan.arena_bytes());
        assert_eq!(session.memory().arena(0).len(), forecast.backends[0].plan.chunks.len());
        assert_eq!(session.memory().arena(0).len() > 1, max.is_some());
        assert_eq!(heap.counts().live, plan.bytes()[0].total());
        assert!(!forecast.backends[0].live.is_empty());
        assert!(!forecast.to_string().is_empty());
        drop(session);
        assert_eq!(heap.counts().live, 0);
    }
}

#[test]
fn x8_x9_graphs_of_any_size_follow_each_other_in_one_arena() {
    let heap = Heap::new("h", 16, None);
    let scheduler = scheduler(&heap);
    // With the check, a graph that is kept would be built again, too.
    let mut session = Session::new(&scheduler.clone().check_plans(false)).unwrap();
    let model = ModelId::new();
    let key = |rows: u64| PlanKey::of(&model, [rows, 0, 0, 0]);
    session.prepare(key(1000), || chain(1000)).unwrap();
    let held = session.memory().bytes(0);
    session.prepare(key(10), || chain(10)).unwrap();
    assert_eq!(session.memory().bytes(0), held, "a smaller plan takes no new memory");
    // After a larger graph a smaller one is planned as if it were the first.
    let alone = scheduler.plan(chain(10).unwrap()).unwrap();
    assert_eq!(session.plan().unwrap().memory(), alone.memory());
    let allocations = heap.counts().allocations;
    session.prepare(key(10), || -> Result<Graph, BuildError> { panic!("the plan is kept") }).unwrap();
    assert_eq!(heap.counts().allocations, allocations);
    session.prepare(key(2000), || chain(2000)).unwrap();
    assert_eq!(session.memory().bytes(0), session.plan().unwrap().memory().arena_bytes(0));
}

#[test]
fn x18_a_graph_with_equal_sizes_and_another_topology_has_a_plan_of_its_own() {
    // The first sum is read once more in one of them.
    let make = |late: bool| {
        let g = GraphBuilder::new();
        let (a, b) = (g.input("a", DType::F32, [8]), g.input("b", DType::F32, [8]));
        let c = a.add(b);
        let d = c.pad([0]);
        let e = if late { d.add(c) } else { d.add(b) };
        g.output("e", e);
        g.finish().unwrap()
    };
    let cpu: Arc<dyn Backend> = Arc::new(quadriga_cpu::Backend::new().unwrap());
    let mut session = Session::new(&Scheduler::new([cpu])).unwrap();
    let mut plans = Vec::new();
    for _ in 0..2 {
        for (late, expected) in [(false, 5.0), (true, 6.0)] {
            session.use_graph(make(late)).unwrap();
            session.run(&[("a", &[1.0f32; 8]), ("b", &[2.0f32; 8])]).unwrap();
            assert_eq!(session.read::<f32>("e").unwrap(), [expected; 8]);
            plans.push(session.plan().unwrap().memory().clone());
        }
    }
    assert_ne!(plans[0].graph, plans[1].graph);
    assert_eq!(plans[..2], plans[2..]);
}

#[test]
fn x14_x19_when_any_allocation_of_a_larger_plan_fails_the_smaller_one_still_runs() {
    let run = |session: &mut Session, width: usize| {
        session.prepare(width as u64, || chain(width))?;
        session.run(&[("x", &vec![1.0f32; width])])?;
        session.read::<f32>("y")
    };
    let expected = |width: usize| {
        let square = (width * width) as f32;
        [vec![square; width], vec![0.0; 2]].concat()
    };
    let mut failures = 0;
    for refused in 0.. {
        let a = Sim::new("a").max_buffer(2048).device();
        let scheduler = Scheduler::new([a.clone() as Arc<dyn Backend>]);
        let mut session = Session::new(&scheduler).unwrap();
        assert_eq!(run(&mut session, 10).unwrap(), expected(10));
        let before = a.counts().of(FaultPoint::Allocation);
        a.fail(FaultPoint::Allocation, refused);
        let grown = run(&mut session, 20);
        let done = a.counts().of(FaultPoint::Allocation) - before <= refused;
        match grown {
            Ok(values) => assert_eq!(values, expected(20)),
            Err(RuntimeError::Device { backend, .. }) => {
                failures += 1;
                assert_eq!(backend, "a");
            }
            Err(other) => panic!("{other}"),
        }
        a.clear_faults();
        assert_eq!(run(&mut session, 10).unwrap(), expected(10));
        assert_eq!(run(&mut session, 20).unwrap(), expected(20));
        drop((session, scheduler));
        assert_eq!(a.used_bytes(), 0);
        if done {
            break;
        }
    }
    assert!(failures > 0);
}

#[test]
fn a_tensor_that_no_buffer_can_hold_is_named_with_the_bytes_that_are_free() {
    let heap = Heap::new("h", 16, Some(256));
    let g = GraphBuilder::new();
    g.output("y", g.input("x", DType::F32, [100]).relu());
    let plan = scheduler(&heap).plan(g.finish().unwrap()).unwrap();
    let Err(error) = plan.session() else { panic!("400 bytes do not fit") };
    let RuntimeError::Device { error: inner, .. } = &error else { panic!("{error}") };
    assert!(matches!(**inner, BackendError::OutOfMemory { requested: 400, free: Some(_), .. }), "{error}");
    assert!(error.to_string().contains("chunk"), "{error}");
    assert_eq!(heap.counts().live, 0);
}

#[test]
fn tensors_without_a_byte_have_a_place() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [0, 4]);
    g.output("y", x.silu());
    let cpu: Arc<dyn Backend> = Arc::new(quadriga_cpu::Backend::new().unwrap());
    let mut session = Scheduler::new([cpu]).plan(g.finish().unwrap()).unwrap().session().unwrap();
    session.run(&[("x", &[0f32; 0])]).unwrap();
    assert!(session.read::<f32>("y").unwrap().is_empty());
}

#[test]
fn an_arena_starts_empty_and_fits_what_its_chunks_hold() {
    let arena = Arena::new(Heap::new("h", 16, None).shared());
    assert_eq!((arena.bytes(), arena.chunks().len()), (0, 0));
    assert!(arena.fits(&[]) && !arena.fits(&[16]));
}

#[test]
fn planning_a_graph_alone_is_the_same_after_any_other() {
    let heap = Heap::new("h", 16, None);
    let memories = [BackendMemory::of(&heap)];
    let (small, large) = (chain(10).unwrap(), chain(300).unwrap());
    let mut planner = Planner::default();
    let first = planner.plan(&MemoryRequest::new(&small, &memories)).unwrap();
    planner.plan(&MemoryRequest::new(&large, &memories)).unwrap();
    assert_eq!(planner.plan(&MemoryRequest::new(&small, &memories)).unwrap(), first);
}

//! The memory of sessions on a real device: places, parts, copies, memory of the caller and of owners, allocators, scratch memory,
//! limits of plans. Says so and passes where there is no device.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "tests"
)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use quadriga_graph::{DType, Data, Graph, GraphBuilder, NodeId, TensorId, Weight};
use quadriga_runtime::memory::{AllocatorError, TensorAllocator};
use quadriga_runtime::{
    Backend, BackendError, CopyRoute, Layout, PlanLimits, RankGroups, Region, RuntimeError, Scheduler,
    Session, SplitSource, TensorPlace, Usage, WeightStreaming, compute_once, copy_region,
};

use common::{cpu, device};

/// y = 2 x + s, z = 3 small, s = s + x; `rows` of 64.
fn graph(rows: usize) -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [rows, 64]);
    let small = g.input("small", DType::F32, [4]);
    let w = g.weight("w", Weight::with_data(DType::F32, [64], vec![2.0f32; 64].as_slice()));
    let s = g.state("s", DType::F32, [1, 64]);
    g.output("y", x.mul(w).add(s));
    g.output("z", small.scale(3.0));
    g.output("s", s.add(x.slice(0, 0, 1)).copy_into(s));
    g.finish().unwrap()
}

fn region(backend: &Arc<dyn Backend>, floats: usize) -> Region {
    Region::new(backend.allocate(4 * floats, Usage::Compute).unwrap(), 0, 4 * floats).unwrap()
}

fn put(region: &Region, values: &[f32]) {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    region.buffer.write(region.offset, &bytes).unwrap();
}

fn get(region: &Region, floats: usize) -> Vec<f32> {
    let mut bytes = vec![0; 4 * floats];
    region.buffer.read(region.offset, &mut bytes).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
}

#[test]
fn b2_b5_k2_tensors_have_places_and_parts() {
    let Some(cuda) = device() else { return };
    let mut session = Session::new(&Scheduler::new(Arc::clone(&cuda))).unwrap();
    session.use_graph(graph(4)).unwrap();
    let (mut x, mut small) = ((0..256).map(|i| i as f32).collect::<Vec<_>>(), vec![1.0f32; 4]);
    session.run(&[("x", &x), ("small", &small)]).unwrap();
    session.clear_state().unwrap();
    for tensor in ["x", "small", "w", "s", "y", "z"] {
        let place = session.tensor(tensor).unwrap().unwrap();
        assert_eq!((place.backend.name(), place.region.buffer.backend()), (cuda.name(), cuda.name()));
        let address = place.region.buffer.address();
        assert!(address > 0 && (address + place.region.offset as u64).is_multiple_of(256), "{tensor}");
    }
    for round in 0..5usize {
        session.clear_state().unwrap();
        let value = 1000.0 + round as f32;
        for at in [3 * round, 100, 255 - round] {
            session.set_at("x", at, &[value]).unwrap();
            x[at] = value;
        }
        session.set_at("small", 2, &[value; 2]).unwrap();
        small[2..].fill(value);
        session.start().unwrap();
        let read = session.read_async(&["z"]).unwrap();
        assert!(session.read_async(&["nope"]).is_err());
        let mut part = [0.0f32; 5];
        session.read_at("y", 98, &mut part).unwrap();
        assert_eq!(part.to_vec(), x[98..103].iter().map(|x| 2.0 * x).collect::<Vec<_>>(), "{round}");
        assert_eq!(session.read::<f32>("y").unwrap(), x.iter().map(|x| 2.0 * x).collect::<Vec<_>>());
        let mut bytes = [0; 16];
        session.finish_read(read, &mut bytes).unwrap();
        assert_eq!(bytes[12..], (3.0 * value).to_ne_bytes());
        assert_eq!(get(&session.tensor("z").unwrap().unwrap().region, 4)[3], 3.0 * value);
    }
}

#[test]
fn k3_tensors_are_copied_between_cpu_and_gpu() {
    let Some(cuda) = device() else { return };
    let cpu = cpu();
    let (a, b, c) = (region(&cpu, 64), region(&cuda, 64), region(&cuda, 64));
    put(&a, &[5.0; 64]);
    let on = |backend: &Arc<dyn Backend>, region: &Region| (Arc::clone(backend), region.clone());
    let copy = |from: (Arc<dyn Backend>, Region), to: (Arc<dyn Backend>, Region)| {
        copy_region((&*from.0, &from.1), (&*to.0, &to.1))
    };
    assert_eq!(copy(on(&cpu, &a), on(&cuda, &b)), Ok(CopyRoute::Pulled));
    assert_eq!(copy(on(&cuda, &b), on(&cuda, &c)), Ok(CopyRoute::Pulled));
    assert_eq!(copy(on(&cuda, &c), on(&cuda, &c)), Ok(CopyRoute::Same));
    put(&a, &[0.0; 64]);
    copy(on(&cuda, &c), on(&cpu, &a)).unwrap();
    assert_eq!(get(&a, 64), [5.0; 64]);
}

#[test]
fn k5_a_graph_is_computed_once_with_scratch_memory_of_its_own() {
    let Some(cuda) = device() else { return };
    let g = GraphBuilder::new();
    g.output("y", g.input("x", DType::F32, [3, 5000]).top_k(5));
    let graph = g.finish().unwrap();
    let nodes: Vec<NodeId> = graph.node_ids().collect();
    assert!(cuda.scratch_bytes(&graph, &nodes) > 0);
    let places: Vec<Region> = graph.tensors().iter().map(|t| region(&cuda, t.elements().max(1))).collect();
    let values: Vec<f32> = (0..15_000).map(|i| (i % 4999) as f32).collect();
    put(&places[0], &values);
    let place =
        |id: TensorId| Some(TensorPlace { region: places[id.index()].clone(), layout: Layout::Plain });
    let split = SplitSource {
        graph: &graph,
        nodes: &nodes,
        place: &place,
        kept: &|_| true,
        scratch: None,
        ranks: RankGroups::NONE,
    };
    compute_once(&*cuda, &split).unwrap();
    // The indices of the five largest of each row, in any order.
    let y = &places[graph.output("y").unwrap().index()];
    let mut bytes = [0; 3 * 5 * 4];
    y.buffer.read(y.offset, &mut bytes).unwrap();
    let found: Vec<i32> = bytes.as_chunks::<4>().0.iter().map(|index| i32::from_ne_bytes(*index)).collect();
    for (row, found) in values.chunks(5000).zip(found.chunks(5)) {
        let mut indices: Vec<i32> = (0..5000).collect();
        indices.sort_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]));
        let (mut found, mut largest) = (found.to_vec(), indices[..5].to_vec());
        found.sort_unstable();
        largest.sort_unstable();
        assert_eq!(found, largest);
    }
}

/// Bytes that count how often they are dropped.
struct Owner {
    bytes: Vec<u8>,
    drops: Arc<AtomicUsize>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Ordering::Relaxed);
    }
}

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[test]
fn b1_mapped_memory_is_dropped_with_its_owner_exactly_once() {
    let Some(cuda) = device() else { return };
    // Without a whole page, and with some.
    for floats in [64, 1 << 16] {
        let drops = Arc::new(AtomicUsize::new(0));
        let count = || drops.load(Ordering::Relaxed);
        let owner =
            |value: f32| Owner { bytes: value.to_ne_bytes().repeat(floats), drops: Arc::clone(&drops) };
        let data = Data::new(Arc::new(owner(3.0)));
        let mapped = cuda.map(&data).unwrap();
        let again = cuda.map(&data).unwrap();
        drop(data);
        let to = region(&cuda, floats);
        let mut queue = cuda.queue().unwrap();
        assert!(queue.copy(&Region::new(Arc::clone(&mapped), 0, 4 * floats).unwrap(), &to).unwrap());
        queue.synchronize().unwrap();
        assert_eq!(get(&to, floats), vec![3.0; floats]);
        drop(mapped);
        assert_eq!(count(), 0, "the other handle keeps it");
        drop(again);
        assert_eq!(count(), 1, "{floats} floats");

        // A weight of the host that is streamed to the device, and one that the device has.
        for (streamed, dropped) in [(true, 2), (false, 3)] {
            let g = GraphBuilder::new();
            let weight = Weight::with_data(DType::F32, [floats / 64, 64], Data::new(Arc::new(owner(0.5))));
            g.output("y", g.mul_mat(g.weight("w", weight), g.input("x", DType::F32, [4, 64])));
            let scheduler = Scheduler::new(vec![Arc::clone(&cuda), cpu()])
                .place(move |_| Some(usize::from(streamed)))
                .weight_streaming(Some(WeightStreaming { operations_per_byte: 0, min_operations: 0 }));
            let plan = scheduler.plan(g.finish().unwrap()).unwrap();
            assert_eq!(plan.streams_weights(), streamed);
            let mut session = plan.session().unwrap();
            for _ in 0..2 {
                session.run(&[("x", &[1.0f32; 256])]).unwrap();
                assert_eq!(session.read::<f32>("y").unwrap(), vec![32.0; floats / 16]);
            }
            drop(plan);
            drop(session);
            assert_eq!(count(), dropped, "{floats} floats, streamed: {streamed}");
        }
    }
}

#[test]
fn a7_an_allocator_over_a_buffer_and_over_the_device() {
    let Some(cuda) = device() else { return };
    let g = GraphBuilder::new();
    g.output("y", g.input("x", DType::F32, [25]).neg());
    let graph = g.finish().unwrap();
    let tensor = &graph[graph.leaf("x").unwrap()];
    let buffer = cuda.allocate(1024, Usage::State).unwrap();
    let over = TensorAllocator::over(&cuda, Arc::clone(&buffer)).unwrap();
    let on = TensorAllocator::on(&cuda, 1024, Usage::Compute).unwrap();
    let mut measuring = TensorAllocator::measuring_for(&cuda).unwrap();
    for (mut allocator, of_caller) in [(over, true), (on, false)] {
        let padded = cuda.storage_bytes(tensor).next_multiple_of(256) as u64;
        let allocations: Vec<_> =
            (0..1024 / padded).map(|_| allocator.allocate("t", tensor).unwrap()).collect();
        assert!(matches!(allocator.allocate("t", tensor), Err(AllocatorError::OutOfMemory { .. })));
        for (number, allocation) in allocations.iter().enumerate() {
            let region = allocation.region().unwrap();
            assert_eq!(Arc::ptr_eq(&region.buffer, &buffer), of_caller);
            assert_eq!(region.buffer.backend(), cuda.name());
            assert!((region.buffer.address() + region.offset as u64).is_multiple_of(256));
            assert_eq!((allocation.bytes, allocation.offset), (padded, number as u64 * padded));
            put(region, &[number as f32; 25]);
        }
        for (number, allocation) in allocations.iter().enumerate() {
            assert_eq!(get(allocation.region().unwrap(), 25), [number as f32; 25]);
        }
        // A region keeps the device's memory without the allocator.
        drop(allocator);
        assert_eq!(get(allocations[0].region().unwrap(), 25), [0.0; 25]);
        let measured = measuring.allocate("t", tensor).unwrap();
        assert!(measured.region().is_none() && measured.bytes == padded);
    }
    let foreign = TensorAllocator::over(&cuda, cpu().allocate(64, Usage::Compute).unwrap());
    assert!(matches!(foreign, Err(AllocatorError::ForeignBuffer { .. })));
}

#[test]
fn s6_inputs_states_and_outputs_are_used_in_the_callers_memory() {
    let Some(cuda) = device() else { return };
    let [x, s, y] = [region(&cuda, 192), region(&cuda, 64), region(&cuda, 192)];
    let mut session = Session::new(&Scheduler::new(Arc::clone(&cuda))).unwrap();
    session.bind_leaf("x", x.clone()).unwrap();
    session.bind_leaf("s", s.clone()).unwrap();
    session.bind_output("y", y.clone()).unwrap();
    put(&s, &[10.0; 64]);
    let mut state = 10.0;
    for (round, rows) in [3, 1, 2, 3].into_iter().enumerate() {
        session.use_graph(graph(rows)).unwrap();
        for again in 0..2 {
            let value = (round * 2 + again) as f32;
            put(&x, &vec![value; rows * 64]);
            session.run(&[("small", &[1.0f32; 4])]).unwrap();
            assert_eq!(get(&y, rows * 64), vec![2.0 * value + state; rows * 64], "{round}");
            state += value;
            assert_eq!(get(&s, 64), [state; 64], "{round}");
        }
    }
}

#[test]
fn plans_are_bounded_and_come_back_with_equal_results() {
    let Some(cuda) = device() else { return };
    let mut session = Session::new(&Scheduler::new(cuda)).unwrap();
    session.set_plan_limits(PlanLimits { plans: 3, ..PlanLimits::default() }).unwrap();
    let run = |session: &mut Session, rows: usize| {
        session.prepare(rows as u64, || Ok::<_, RuntimeError>(graph(rows))).unwrap();
        session.clear_state().unwrap();
        session.run(&[("x", &vec![1.5f32; rows * 64]), ("small", &[1.0f32; 4])]).unwrap();
        session.read::<f32>("y").unwrap()
    };
    for round in 0..2 {
        for rows in 1..40 {
            assert_eq!(run(&mut session, rows), vec![3.0; rows * 64], "{round}");
            assert!(session.plan_usage().plans <= 3);
        }
    }
    session.start().unwrap();
    assert!(session.forget(39).unwrap());
    session.forget_all().unwrap();
    assert_eq!(run(&mut session, 2), [3.0; 128]);
}

#[test]
fn bad_data_is_reported_with_its_split() {
    let Some(cuda) = device() else { return };
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [4, 8]);
    let on_gpu = x.scale(2.0).named("first");
    let on_cpu = on_gpu.tanh().named("second");
    g.output("y", on_cpu.get_rows(g.input("ids", DType::I32, [2])).named("third"));
    let scheduler = Scheduler::new(vec![cuda, cpu()]);
    let scheduler = scheduler.pin_name("first", 0).pin_name("second", 1).pin_name("third", 0);
    let mut session = scheduler.plan(g.finish().unwrap()).unwrap().session().unwrap();
    assert_eq!(session.plan().unwrap().splits().splits.len(), 3);
    for _ in 0..2 {
        let failed = session.run(&[("x", &[1.0f32; 32]), ("ids", &[1, 4])]);
        let Err(RuntimeError::Device { split, node, error, .. }) = failed else { panic!("{failed:?}") };
        assert!(matches!(*error, BackendError::Node { .. }), "{error}");
        assert_eq!((split, node.as_deref()), (Some(2), Some("third")));
    }
    session.run(&[("x", &[1.0f32; 32]), ("ids", &[1, 3])]).unwrap();
}

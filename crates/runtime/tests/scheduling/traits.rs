//! K1–K5 on the simulated device: the contract of the backend traits.

use std::sync::Arc;

use quadriga_graph::{DType, GraphBuilder, TensorId};
use quadriga_runtime::{
    Backend, BackendError, HostMemory, Layout, RankGroups, Region, Scheduler, SplitSource, TensorPlace,
    Usage, check_range, compute_once,
};
use quadriga_sim::{FaultPoint, Sim};

use crate::common::host;
use crate::hostile_memory::{check_alternating_owner, check_foreign_host_buffer};
use crate::misbehaving::Misbehaving;

fn region(backend: &dyn Backend, bytes: usize) -> Region {
    Region::new(backend.allocate(bytes, Usage::Compute).unwrap(), 0, bytes).unwrap()
}

#[test]
fn k1_backends_have_a_name_an_alignment_and_memory_that_is_freed() {
    let sim = Sim::new("sim:7").alignment(100).capacity(1000).max_buffer(600).device();
    assert_eq!((sim.name(), sim.memory().alignment), ("sim:7", 128));
    let buffer = sim.allocate(600, Usage::Weights).unwrap();
    assert_eq!((sim.used_bytes(), sim.device().free_bytes), (600, Some(400)));
    assert_eq!((buffer.backend(), buffer.bytes(), buffer.usage()), ("sim:7", 600, Usage::Weights));
    assert!(matches!(sim.allocate(601, Usage::Weights), Err(BackendError::OutOfMemory { .. })));
    assert!(matches!(
        sim.allocate(401, Usage::State),
        Err(BackendError::OutOfMemory { requested: 401, free: Some(400), .. })
    ));
    drop(buffer);
    assert_eq!(sim.used_bytes(), 0);
}

#[test]
fn k2_transfers_have_offsets_and_lengths_and_are_bounds_checked() {
    let sim = Sim::new("a").build();
    let mut queue = sim.queue().unwrap();
    let whole = region(&*sim, 64);
    queue.write(&whole, &[1; 64]).unwrap();
    queue.write(&whole.part(8, 4).unwrap(), &[9, 8, 7, 6]).unwrap();
    let mut bytes = [0; 6];
    queue.read(&whole.part(7, 6).unwrap(), &mut bytes).unwrap();
    assert_eq!(bytes, [1, 9, 8, 7, 6, 1]);
    queue.synchronize().unwrap();
    assert!(whole.part(60, 5).is_err() && whole.part(usize::MAX, 2).is_err());
    assert!(check_range(&*whole.buffer, 64, 1).is_err());
    assert!(queue.write(&whole, &[0; 63]).is_err());
    let wild = Region { buffer: Arc::clone(&whole.buffer), offset: 60, bytes: 8 };
    assert!(matches!(queue.write(&wild, &[0; 8]), Err(BackendError::OutOfBounds { .. })));
    assert!(matches!(whole.buffer.read(60, &mut [0; 8]), Err(BackendError::OutOfBounds { .. })));
    let other = Sim::new("b").build();
    assert!(matches!(queue.write(&region(&*other, 8), &[0; 8]), Err(BackendError::Foreign { .. })));
    assert!(matches!(
        queue.copy(&whole, &region(&*other, 8)),
        Err(BackendError::SizeMismatch { from: 64, to: 8, .. })
    ));
}

#[test]
fn events_order_queues_of_different_devices() {
    let (a, b) = (Sim::new("a").build(), Sim::new("b").build());
    let (from, to) = (region(&*a, 8), region(&*b, 8));
    let (mut first, mut second) = (a.queue().unwrap(), b.queue().unwrap());
    let written = a.event(true).unwrap();
    assert!(written.is_done().unwrap(), "an event counts as done before it is recorded");
    written.wait().unwrap();
    for round in 0..100 {
        first.write(&from, &[round; 8]).unwrap();
        first.record(&*written).unwrap();
        second.wait(&*written).unwrap();
        assert!(second.copy(&from, &to).unwrap());
        let mut bytes = [0; 8];
        second.read(&to, &mut bytes).unwrap();
        assert_eq!(bytes, [round; 8]);
    }
    assert!(first.record(&*b.event(false).unwrap()).is_err(), "events are recorded by their own device");
}

#[test]
fn k4_k5_nodes_are_compiled_once_and_run_often_or_computed_once() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [2]);
    g.output("y", x.sqr().scale(2.0));
    let graph = g.finish().unwrap();
    for backend in [host("cpu"), Sim::new("a").build(), Sim::new("scratch").scratch(100).build()] {
        let places: Vec<Region> = graph.tensors().iter().map(|t| region(&*backend, t.bytes())).collect();
        let place =
            |id: TensorId| Some(TensorPlace { region: places[id.index()].clone(), layout: Layout::Plain });
        let nodes: Vec<_> = graph.node_ids().collect();
        let split = SplitSource {
            graph: &graph,
            nodes: &nodes,
            place: &place,
            kept: &|_| true,
            scratch: None,
            ranks: RankGroups::NONE,
        };
        let result = places.last().unwrap();
        let mut queue = backend.queue().unwrap();
        compute_once(&*backend, &split).expect("brings its own scratch memory");
        let too_small = SplitSource { scratch: Some(region(&*backend, 10)), ..split };
        compute_once(&*backend, &too_small).expect("brings more scratch memory");
        let split = SplitSource { scratch: None, ..too_small };
        let scratch = (backend.name() == "scratch").then(|| region(&*backend, 100));
        let split = SplitSource { scratch, ..split };
        let mut program = backend.compile(&split).unwrap();
        for value in [1.0f32, 2.0, 3.0] {
            queue.write(&places[0], &[value.to_le_bytes(), value.to_le_bytes()].concat()).unwrap();
            queue.run(&mut *program).unwrap();
            let mut bytes = [0; 8];
            queue.read(result, &mut bytes).unwrap();
            assert_eq!(bytes[4..], (2.0 * value * value).to_le_bytes());
        }
        queue.write(&places[0], &[5f32.to_le_bytes(), 5f32.to_le_bytes()].concat()).unwrap();
        queue.synchronize().unwrap();
        compute_once(&*backend, &split).unwrap();
        let mut bytes = [0; 8];
        result.buffer.read(0, &mut bytes).unwrap();
        assert_eq!(bytes[..4], 50f32.to_le_bytes());
    }
}

#[test]
fn host_memory_has_the_address_and_the_bytes_that_it_was_made_of() {
    let mut bytes = vec![0u8; 48];
    let pointer = bytes.as_mut_ptr();
    // SAFETY: the vector is moved, not its bytes, and nothing else uses them.
    let memory = unsafe { HostMemory::new(pointer, 48, Arc::new(bytes)) };
    assert_eq!((memory.pointer(), memory.bytes()), (pointer, 48));
    assert_eq!(memory.clone().pointer(), pointer);
}

#[test]
fn memory_is_allocated_for_one_run_only_if_scratch_memory_is_missing() {
    let g = GraphBuilder::new();
    g.output("y", g.input("x", DType::F32, [2]).sqr());
    let graph = g.finish().unwrap();
    for (needed, given, allocations) in
        [(0, None, 0), (100, Some(100), 0), (100, Some(99), 1), (100, None, 1)]
    {
        let sim = Sim::new("a").scratch(needed).device();
        let places: Vec<Region> = graph.tensors().iter().map(|t| region(&*sim, t.bytes())).collect();
        let place =
            |id: TensorId| Some(TensorPlace { region: places[id.index()].clone(), layout: Layout::Plain });
        let nodes: Vec<_> = graph.node_ids().collect();
        let scratch = given.map(|bytes| region(&*sim, bytes));
        let before = sim.counts().of(FaultPoint::Allocation);
        compute_once(
            &*sim,
            &SplitSource {
                graph: &graph,
                nodes: &nodes,
                place: &place,
                kept: &|_| true,
                scratch,
                ranks: RankGroups::NONE,
            },
        )
        .unwrap();
        assert_eq!(sim.counts().of(FaultPoint::Allocation) - before, allocations, "{needed} {given:?}");
    }
}

#[test]
fn backends_are_told_which_results_are_needed_after_a_split() {
    let backend = Arc::new(Misbehaving::new(Sim::new("a").build()));
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [2, 4]);
    let first = x.tanh().named("first");
    let second = first.sqr().named("second");
    let viewed = second.neg().named("viewed");
    let there = viewed.silu().named("there");
    g.output("row", viewed.slice(0, 0, 1));
    g.output("elsewhere", second.exp().named("elsewhere"));
    g.output("there", there);
    let backends: [Arc<dyn Backend>; 2] = [Arc::clone(&backend) as Arc<dyn Backend>, host("cpu")];
    let here = ["first", "second", "viewed", "there"];
    let scheduler = Scheduler::new(backends).pin_name("elsewhere", 1);
    let scheduler = here.into_iter().fold(scheduler, |scheduler, name| scheduler.pin_name(name, 0));
    let plan = scheduler.plan(g.finish().unwrap()).unwrap();
    assert_eq!(plan.splits().splits.len(), 2);
    plan.session().unwrap().run(&[("x", &[0.5f32; 8])]).unwrap();
    let [kept, not_kept] = backend.kept();
    assert_eq!(not_kept, ["first"]);
    assert_eq!(kept, ["second", "there", "viewed"]);
}

#[test]
fn an_owner_whose_bytes_change_is_asked_for_them_once() {
    assert!(check_alternating_owner(&quadriga_cpu::Backend::new().unwrap()));
    // A simulated device maps nothing: its sessions copy what the host has.
    assert!(!check_alternating_owner(&*Sim::new("a").build()));
}

#[test]
fn the_address_of_a_foreign_buffer_is_never_used() {
    check_foreign_host_buffer(&*Sim::new("a").build());
    check_foreign_host_buffer(&*host("host"));
}

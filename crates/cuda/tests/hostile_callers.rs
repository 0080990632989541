//! What a caller of the backend's interface may do wrong is an error, on a real device: places and bytes that change, regions out of
//! bounds, memory of others, events of others, sessions and buffers that end early. Says so and passes where there is no device.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "tests"
)]

mod common;
#[path = "../../runtime/tests/common/hostile_memory.rs"]
mod hostile_memory;

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;

use quadriga_graph::{DType, Graph, GraphBuilder, Op, Shape, Tensor, TensorId, Weight};
use quadriga_runtime::{
    Backend, BackendError, Buffer, Layout, RankGroups, Region, Scheduler, SliceSelection, SplitSource,
    TensorPlace, Usage, WeightLayout, compute_once,
};

use common::{cpu, device};
use hostile_memory::{Elsewhere, check_alternating_owner, check_foreign_host_buffer};

fn norm_and_matmul() -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [1, 64]);
    let w = g.weight("w", Weight::with_data(DType::F32, [32, 64], vec![0; 32 * 64 * 4]));
    g.output("y", g.mul_mat(w, x.rms_norm(1e-5)));
    g.finish().unwrap()
}

/// Memory of a backend for every tensor.
fn places(backend: &dyn Backend, graph: &Graph) -> HashMap<TensorId, TensorPlace> {
    let place = |id: TensorId| {
        let tensor = &graph[id];
        let uses: &[(&Op, usize)] = if graph.data(id).is_some() { &[(&Op::MulMat, 0)] } else { &[] };
        let WeightLayout { layout, bytes, .. } = backend.weight_layout(tensor, uses);
        let region = Region::new(backend.allocate(bytes, Usage::Compute).unwrap(), 0, bytes).unwrap();
        if let Some(data) = graph.data(id) {
            backend.load_weight(tensor, layout, &data.bytes(), &region).unwrap();
        }
        (id, TensorPlace { region, layout })
    };
    graph.tensor_ids().map(place).collect()
}

#[test]
fn a_place_that_changes_from_call_to_call_is_asked_for_once() {
    let Some(cuda) = device() else { return };
    let graph = norm_and_matmul();
    let places = places(&*cuda, &graph);
    let nodes: Vec<_> = graph.node_ids().collect();
    let (x, y) = (graph.leaf("x").unwrap(), graph.output("y").unwrap());
    let bytes = cuda.scratch_bytes(&graph, &nodes).max(1);
    let scratch = Region::new(cuda.allocate(bytes, Usage::Compute).unwrap(), 0, bytes).unwrap();
    for wrong in 0..3 {
        let calls = Cell::new(0);
        let place = |id: TensorId| {
            let mut place = places.get(&id).cloned()?;
            if id == x {
                if calls.get() == wrong {
                    place.region.offset = 1 << 40;
                }
                calls.set(calls.get() + 1);
            }
            Some(place)
        };
        let scratch = Some(scratch.clone());
        let split = SplitSource {
            graph: &graph,
            nodes: &nodes,
            place: &place,
            kept: &|id| id == y,
            scratch,
            ranks: RankGroups::NONE,
        };
        match cuda.compile(&split) {
            Err(error) => assert!(wrong == 0 && matches!(error, BackendError::OutOfBounds { .. }), "{error}"),
            Ok(mut program) => {
                assert!(wrong > 0, "the first answer is out of bounds");
                let mut queue = cuda.queue().unwrap();
                queue.run(&mut *program).unwrap();
                queue.synchronize().unwrap();
            }
        }
        assert!(calls.get() <= 1, "{} calls", calls.get());
    }
}

#[test]
fn operands_must_be_memory_of_this_backend_of_their_size() {
    let Some(cuda) = device() else { return };
    let (other, host) = (device().unwrap(), cpu());
    let g = GraphBuilder::new();
    g.output("y", g.input("x", DType::F32, [64]).silu());
    let graph = g.finish().unwrap();
    let nodes: Vec<_> = graph.node_ids().collect();
    let (x, y) = (graph.leaf("x").unwrap(), graph.output("y").unwrap());
    let good = places(&*cuda, &graph);
    let run = |at: TensorId, region: &Region| {
        let place = |id: TensorId| {
            let good = good.get(&id).cloned()?;
            Some(if id == at { TensorPlace { region: region.clone(), ..good } } else { good })
        };
        let split = SplitSource {
            graph: &graph,
            nodes: &nodes,
            place: &place,
            kept: &|_| true,
            scratch: None,
            ranks: RankGroups::NONE,
        };
        compute_once(&*cuda, &split)
    };
    for id in [x, y] {
        assert_eq!(run(id, &good[&id].region), Ok(()));
        let short = Region { bytes: 255, ..good[&id].region.clone() };
        let past = Region { offset: 4, ..good[&id].region.clone() };
        let far = Region { offset: usize::MAX - 16, ..good[&id].region.clone() };
        for (what, region) in [("short", short), ("past", past), ("far", far)] {
            assert!(run(id, &region).is_err(), "{what}");
        }
        for backend in [&host, &other] {
            let buffer = backend.allocate(256, Usage::Compute).unwrap();
            let foreign = Region::new(buffer, 0, 256).unwrap();
            // Two backends of one device share its memory: that may work, and must not fail later.
            let result = run(id, &foreign);
            assert!(result.is_err() || backend.name() == cuda.name(), "memory of {}", backend.name());
        }
        assert_eq!(run(id, &good[&id].region), Ok(()), "after errors");
    }
}

#[test]
fn buffers_are_checked_and_live_as_long_as_queued_work() {
    let Some(cuda) = device() else { return };
    let buffer = cuda.allocate(100, Usage::Compute).unwrap();
    for (offset, len) in [(0, 101), (100, 1), (usize::MAX, 2), (51, 50)] {
        let mut bytes = vec![0; len];
        assert!(matches!(buffer.read(offset, &mut bytes), Err(BackendError::OutOfBounds { .. })));
        assert!(matches!(buffer.write(offset, &bytes), Err(BackendError::OutOfBounds { .. })));
        assert!(matches!(buffer.clear(offset, len), Err(BackendError::OutOfBounds { .. })));
    }
    // Copies are queued, both ends dropped, and other memory is taken at once: what is read last is what was copied.
    let mut queue = cuda.queue().unwrap();
    for round in 0..200u8 {
        let last = Region::new(cuda.allocate(64, Usage::Compute).unwrap(), 0, 64).unwrap();
        {
            let from = Region::new(cuda.staging(64).unwrap(), 0, 64).unwrap();
            from.buffer.write(0, &[round; 64]).unwrap();
            let middle = Region::new(cuda.allocate(64, Usage::Compute).unwrap(), 0, 64).unwrap();
            assert!(queue.copy(&from, &middle).unwrap());
            assert!(queue.copy(&middle, &last).unwrap());
        }
        let others: Vec<_> = (0..4).map(|_| cuda.allocate(64, Usage::Compute).unwrap()).collect();
        others.iter().for_each(|other| other.clear(0, 64).unwrap());
        queue.synchronize().unwrap();
        let mut bytes = [0; 64];
        last.buffer.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [round; 64]);
    }
}

#[test]
fn events_of_other_backends_and_of_ended_queues_are_harmless() {
    let Some(cuda) = device() else { return };
    let g = GraphBuilder::new();
    g.output("y", g.input("x", DType::F32, [1 << 16]).silu().sqr());
    let graph = g.finish().unwrap();
    // Each session ends while its last run may still be running; events are made and dropped in large numbers.
    for round in 0..50 {
        let plan = Scheduler::new([Arc::clone(&cuda), cpu()]).plan(&graph).unwrap();
        let (mut first, mut second) = (plan.session().unwrap(), plan.session().unwrap());
        first.set("x", &vec![1.0f32; 1 << 16]).unwrap();
        first.start().unwrap();
        second.run(&[("x", &vec![round as f32; 1 << 16])]).unwrap();
        drop(first);
        let silu = round as f32 / (1.0 + (-(round as f32)).exp());
        let y = second.read::<f32>("y").unwrap();
        assert!((y[777] - silu * silu).abs() <= 1e-4 * (1.0 + silu * silu), "{round}: {}", y[777]);
    }
}

#[test]
fn an_owner_whose_bytes_change_is_asked_for_them_once() {
    let Some(cuda) = device() else { return };
    check_alternating_owner(&*cuda);
}

#[test]
fn the_address_of_a_foreign_buffer_is_never_used() {
    let Some(cuda) = device() else { return };
    let shared: Arc<dyn Buffer> = Arc::new(Elsewhere::default());
    assert!(cuda.lock(&shared).is_none(), "it offers no memory to devices");
    check_foreign_host_buffer(&*cuda);
}

/// A weight of a graph, and the layout that matmuls, or those of experts, get.
fn quantized(cuda: &dyn Backend, dims: impl Into<Shape>, op: &Op) -> (Tensor, WeightLayout) {
    let g = GraphBuilder::new();
    let id = g.weight("w", Weight::new(DType::Q4_0, dims)).id();
    let weight = g.finish().unwrap()[id].clone();
    let uses: &[(&Op, usize)] = &[(op, 0)];
    let layout = match op {
        Op::MulMatId => cuda.streamed_layout(&weight, uses),
        _ => cuda.weight_layout(&weight, uses),
    };
    assert_ne!(layout.layout, Layout::Plain);
    (weight, layout)
}

/// A region of new memory, with some memory after it that nothing may write.
fn guarded(buffer: Arc<dyn Buffer>, bytes: usize) -> Region {
    buffer.write(0, &vec![0x5a; buffer.bytes()]).unwrap();
    Region::new(buffer, 0, bytes).unwrap()
}

fn is_untouched(region: &Region) -> bool {
    let mut after = vec![0; region.buffer.bytes() - region.bytes];
    region.buffer.read(region.bytes, &mut after).unwrap();
    after.iter().all(|byte| *byte == 0x5a)
}

#[test]
fn a_weight_of_another_size_than_its_shape_is_not_packed() {
    let Some(cuda) = device() else { return };
    let (weight, WeightLayout { layout, bytes, .. }) = quantized(&*cuda, [4096, 32], &Op::MulMat);
    let room = cuda.allocate(bytes + (1 << 20), Usage::Weights).unwrap();
    for wrong in [0, 18, weight.bytes() - 1, weight.bytes() + 1, weight.bytes() + 4095] {
        let to = guarded(Arc::clone(&room), bytes);
        let loaded = cuda.load_weight(&weight, layout, &vec![1; wrong], &to);
        assert!(matches!(loaded, Err(BackendError::SizeMismatch { .. })), "{wrong}: {loaded:?}");
        assert!(is_untouched(&to), "{wrong}");
    }
    let small = Region { bytes: bytes - 1, ..guarded(Arc::clone(&room), bytes) };
    assert!(cuda.load_weight(&weight, layout, &vec![1; weight.bytes()], &small).is_err());
    let to = guarded(room, bytes);
    cuda.load_weight(&weight, layout, &vec![1; weight.bytes()], &to).unwrap();
    assert!(is_untouched(&to));
}

#[test]
fn slices_are_copied_only_between_places_of_the_size_of_their_weight() {
    let Some(cuda) = device() else { return };
    let (weight, WeightLayout { layout, bytes, .. }) = quantized(&*cuda, [8, 32, 64], &Op::MulMatId);
    let ids = Region::new(cuda.allocate(16, Usage::Compute).unwrap(), 0, 16).unwrap();
    ids.buffer.write(0, &[0; 16]).unwrap();
    let pinned = cuda.staging(weight.bytes()).unwrap();
    pinned.write(0, &vec![1; weight.bytes()]).unwrap();
    let from = Region::new(pinned, 0, weight.bytes()).unwrap();
    let room = cuda.allocate(2 * weight.bytes().max(bytes), Usage::Weights).unwrap();
    let mut queue = cuda.queue().unwrap();
    for (layout, bytes) in [(layout, bytes), (Layout::Plain, weight.bytes())] {
        let to = guarded(Arc::clone(&room), bytes);
        let short = |region: &Region| Region { bytes: region.bytes - 32, ..region.clone() };
        let past = |region: &Region| Region { offset: region.buffer.bytes() - 32, ..region.clone() };
        let wrong = [
            (short(&from), to.clone()),
            (past(&from), to.clone()),
            (from.clone(), short(&to)),
            (from.clone(), past(&to)),
        ];
        for (from, to) in wrong {
            let mut selection = SliceSelection::new(weight.clone(), layout, ids.clone());
            assert!(queue.copy_slices(&from, &to, &mut selection).is_err());
            assert!(queue.prefetch_slices(&from, &to, &mut selection).is_err());
        }
        let mut selection = SliceSelection::new(weight.clone(), layout, ids.clone());
        assert!(queue.copy_slices(&from, &to, &mut selection).unwrap());
        // What is remembered of that copy is not used for a smaller weight, nor for fewer indices.
        let (smaller, _) = quantized(&*cuda, [4, 32, 64], &Op::MulMatId);
        selection.weight = smaller;
        selection.ids.bytes = 4;
        assert!(queue.copy_slices(&from, &to, &mut selection).unwrap());
        queue.synchronize().unwrap();
        let selected = queue.selected_slices(&selection).unwrap();
        assert!(selected.is_none_or(|selected| selected == [true, false, false, false]));
        assert!(is_untouched(&to));
    }
}

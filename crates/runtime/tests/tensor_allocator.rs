//! The tensor allocator decides as ggml's does, and works over real buffers of real backends.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

#[path = "common/best_fit.rs"]
mod best_fit;
#[path = "common/heap.rs"]
mod heap;

use best_fit::BestFit;
use heap::Heap;
use quadriga_conformance::Rng;
use quadriga_graph::{DType, Data, Graph, GraphBuilder, Tensor};
use quadriga_runtime::memory::{AllocatorError, LiveTensor, TensorAllocation, TensorAllocator};
use quadriga_runtime::{Backend, BackendError, Buffer, Usage};
use quadriga_sim::Sim;
use std::sync::Arc;

/// Tensors of 0 to `most` bytes.
struct Tensors(Graph);

impl Tensors {
    fn up_to(most: usize) -> Tensors {
        let g = GraphBuilder::new();
        for bytes in 0..=most {
            g.output(&format!("t{bytes}"), g.input(&format!("x{bytes}"), DType::I8, [bytes]));
        }
        Tensors(g.finish().unwrap())
    }

    fn of(&self, bytes: usize) -> &Tensor {
        &self.0[self.0.leaf(&format!("x{bytes}")).unwrap()]
    }
}

/// One tensor of so many bytes, for which there need not be memory.
fn tensor_of(bytes: usize) -> Tensor {
    let g = GraphBuilder::new();
    g.output("y", g.input("x", DType::I8, [bytes]));
    let graph = g.finish().unwrap();
    graph[graph.leaf("x").unwrap()].clone()
}

/// An allocator in a buffer of a heap.
fn in_heap(bytes: u64, alignment: usize) -> TensorAllocator {
    TensorAllocator::on(&Heap::new("h", alignment, None).shared(), bytes, Usage::Compute).unwrap()
}

fn backends() -> [Arc<dyn Backend>; 3] {
    [
        Arc::new(quadriga_cpu::Backend::new().unwrap()),
        Sim::new("sim").alignment(128).padding(48).build(),
        Heap::new("h", 16, None).shared(),
    ]
}

#[test]
fn a1_a3_random_sequences_are_decided_as_by_the_plain_rule() {
    let tensors = Tensors::up_to(300);
    for seed in 0..300 {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let alignment = 1 << rng.below(6);
        let bounded = rng.chance(0.5);
        let size = if bounded { rng.range(0, 4000) as u64 } else { u64::MAX };
        let mut plain = BestFit::new(size, alignment as u64);
        let mut allocator =
            if bounded { in_heap(size, alignment) } else { TensorAllocator::measuring(alignment).unwrap() };
        let mut live: Vec<TensorAllocation> = Vec::new();
        for _ in 0..600 {
            if rng.chance(0.55) {
                let most = if rng.chance(0.5) { 20 } else { 300 };
                let bytes = rng.below(most);
                match (allocator.allocate("t", tensors.of(bytes)), plain.allocate(bytes as u64)) {
                    (Ok(allocation), Some(offset)) => {
                        assert_eq!(allocation.offset, offset);
                        live.push(allocation);
                    }
                    (Err(AllocatorError::OutOfMemory { free, .. }), None) => {
                        assert_eq!(free, plain.free.iter().map(|block| block.1).sum::<u64>());
                    }
                    (ours, plain) => panic!("{ours:?}, but by the plain rule {plain:?}"),
                }
            } else if !live.is_empty() {
                let allocation = live.swap_remove(rng.below(live.len()));
                assert_eq!(allocator.free(&allocation), Ok(true));
                plain.free(allocation.offset, allocation.bytes);
            }
            assert_eq!(allocator.free_blocks(), plain.blocks());
            assert_eq!(allocator.high_water(), plain.high_water);
            assert_eq!(allocator.used(), live.iter().map(|allocation| allocation.bytes).sum::<u64>());
        }
    }
}

#[test]
fn a1_the_last_block_is_the_last_resort() {
    let tensors = Tensors::up_to(16);
    let mut allocator = TensorAllocator::measuring(1).unwrap();
    let mut allocate = |bytes: usize| allocator.allocate("t", tensors.of(bytes)).unwrap();
    let six: Vec<_> = (0..6).map(|_| allocate(10)).collect();
    allocator.free(&six[1]).unwrap();
    allocator.free(&six[3]).unwrap();
    let mut offset = |bytes: usize| allocator.allocate("t", tensors.of(bytes)).unwrap().offset;
    assert_eq!(offset(10), 30, "of equal blocks the highest");
    assert_eq!(offset(11), 60, "no other block is large enough");
    assert_eq!(offset(4), 10);
}

#[test]
fn a2_allocation_starts_at_the_aligned_base() {
    // A caller's memory may start at any address.
    let mut heap = Heap::new("h", 32, None);
    for (base, expected) in [(992, 0), (1000, 24), (1023, 1)] {
        heap.base = Some(base);
        let buffer = heap.map(&Data::from(vec![0u8; 100])).unwrap();
        let mut allocator = TensorAllocator::over(&heap.shared(), buffer).unwrap();
        let allocation = allocator.allocate("t", &tensor_of(5)).unwrap();
        assert_eq!((allocation.offset, allocation.bytes), (expected, 32));
    }
    assert_eq!(TensorAllocator::measuring(0).unwrap_err(), AllocatorError::Alignment(0));
    assert_eq!(TensorAllocator::measuring(24).unwrap_err(), AllocatorError::Alignment(24));
}

#[test]
fn a4_the_tensor_of_another_buffer_is_ignored() {
    let tensor = tensor_of(8);
    let (mut first, mut second) = (in_heap(64, 8), in_heap(64, 8));
    let allocation = first.allocate("t", &tensor).unwrap();
    second.allocate("t", &tensor).unwrap();
    assert_eq!(second.free(&allocation), Ok(false));
    assert_eq!(second.used(), 8);
    assert_eq!(first.free(&allocation), Ok(true));
    assert_eq!(first.free(&allocation), Err(AllocatorError::NotAllocated { offset: 0, bytes: 8 }));
    // What a reset has freed cannot be freed again, even when its bytes are taken anew.
    let before = first.allocate("t", &tensor).unwrap();
    first.reset();
    first.allocate("t", &tensor).unwrap();
    assert!(matches!(first.free(&before), Err(AllocatorError::NotAllocated { .. })));
    assert_eq!(first.used(), 8);
}

#[test]
fn a5_the_same_tensors_fit_a_buffer_of_the_measured_size_and_none_smaller() {
    let tensors = Tensors::up_to(100);
    for (number, backend) in backends().iter().enumerate() {
        for seed in 0..30 {
            println!("backend {number}, seed {seed}");
            let run = |allocator: &mut TensorAllocator| {
                let mut rng = Rng::new(seed);
                let (mut live, mut offsets) = (Vec::new(), Vec::new());
                for _ in 0..200 {
                    if rng.chance(0.6) {
                        live.push(allocator.allocate("t", tensors.of(rng.below(100)))?);
                        offsets.push(live.last().map(|allocation| allocation.offset));
                    } else if !live.is_empty() {
                        allocator.free(&live.swap_remove(rng.below(live.len())))?;
                    }
                }
                Ok::<_, AllocatorError>(offsets)
            };
            let mut measuring = TensorAllocator::measuring_for(backend).unwrap();
            let offsets = run(&mut measuring).unwrap();
            assert!(measuring.buffer().is_none());
            let on = |bytes: u64| TensorAllocator::on(backend, bytes, Usage::Compute).unwrap();
            assert_eq!(run(&mut on(measuring.high_water())).unwrap(), offsets);
            assert!(run(&mut on(measuring.high_water() - measuring.alignment())).is_err());
        }
    }
}

#[test]
fn a6_after_a_reset_all_is_free_and_the_high_water_mark_is_zero() {
    let tensor = tensor_of(100);
    for backend in &backends() {
        let on = TensorAllocator::on(backend, 1024, Usage::Compute).unwrap();
        for mut allocator in [on, TensorAllocator::measuring_for(backend).unwrap()] {
            let whole = allocator.free_blocks();
            let first = allocator.allocate("a", &tensor).unwrap();
            allocator.allocate("b", &tensor).unwrap();
            assert!(allocator.high_water() >= 200 && allocator.free_blocks().len() == 1);
            allocator.reset();
            assert_eq!((allocator.high_water(), allocator.used()), (0, 0));
            assert_eq!(allocator.free_blocks(), whole);
            assert_eq!(allocator.allocate("c", &tensor).unwrap().offset, first.offset);
        }
    }
}

#[test]
fn a7_b2_b3_b5_tensors_get_aligned_padded_regions_of_the_buffer() {
    let tensor = tensor_of(100);
    for backend in &backends() {
        let buffer: Arc<dyn Buffer> = backend.allocate(1024, Usage::State).unwrap();
        let mut allocator = TensorAllocator::over(backend, Arc::clone(&buffer)).unwrap();
        let alignment = backend.memory().alignment;
        let padded = backend.storage_bytes(&tensor).next_multiple_of(alignment) as u64;
        for number in 0..3 {
            let allocation = allocator.allocate("t", &tensor).unwrap();
            let region = allocation.region().unwrap();
            assert!(Arc::ptr_eq(&region.buffer, &buffer));
            assert_eq!(region.buffer.backend(), backend.name());
            assert_eq!((region.offset as u64, region.bytes), (allocation.offset, 100));
            assert_eq!((allocation.bytes, allocation.offset), (padded, number * padded));
            let bytes = [number as u8 + 1; 100];
            region.buffer.write(region.offset, &bytes).unwrap();
            let mut read = [0; 100];
            region.buffer.read(region.offset, &mut read).unwrap();
            assert_eq!(read, bytes);
        }
    }
    let measured = TensorAllocator::measuring(64).unwrap().allocate("t", &tensor).unwrap();
    assert_eq!((measured.bytes, measured.region().is_none()), (128, true));
    let [cpu, sim, _] = backends();
    let foreign = TensorAllocator::over(&cpu, sim.allocate(64, Usage::Compute).unwrap());
    assert!(matches!(foreign, Err(AllocatorError::ForeignBuffer { .. })));
}

#[test]
fn a7_b1_the_buffer_is_freed_once_when_allocator_and_allocations_are_gone() {
    let heap = Heap::new("h", 16, None);
    let mut allocator = TensorAllocator::on(&heap.shared(), 256, Usage::Compute).unwrap();
    let allocation = allocator.allocate("t", &tensor_of(8)).unwrap();
    drop(allocator);
    assert_eq!((heap.counts().live, heap.counts().frees), (256, 0), "the region keeps the buffer");
    drop(allocation);
    assert_eq!((heap.counts().live, heap.counts().frees), (0, 1));
    let sim = Sim::new("a").device();
    let shared = sim.clone() as Arc<dyn Backend>;
    drop(TensorAllocator::on(&shared, 256, Usage::Compute).unwrap());
    assert_eq!(sim.used_bytes(), 0);
    // A wrapped buffer is never freed.
    let wrapped = heap.map(&Data::from(vec![0u8; 64])).unwrap();
    drop(TensorAllocator::over(&heap.shared(), wrapped).unwrap());
    assert_eq!(heap.counts().frees, 1);
    let refused = TensorAllocator::on(&Heap::new("h", 16, Some(100)).shared(), 256, Usage::Compute);
    assert!(matches!(refused, Err(AllocatorError::Backend(BackendError::OutOfMemory { .. }))));
}

#[test]
fn a5_b4_hooks_run_for_each_tensor_and_never_while_measuring() {
    let tensor = tensor_of(40);
    let heap = Heap::new("h", 16, None);
    let hooks = || (heap.counts().placed, heap.counts().released);
    let mut measuring = TensorAllocator::measuring_for(&heap.shared()).unwrap();
    let measured = measuring.allocate("t", &tensor).unwrap();
    measuring.free(&measured).unwrap();
    measuring.allocate("t", &tensor).unwrap();
    drop(measuring);
    assert_eq!((hooks(), heap.counts().allocations), ((0, 0), 0));

    let mut allocator = TensorAllocator::on(&heap.shared(), 256, Usage::Compute).unwrap();
    let first = allocator.allocate("t", &tensor).unwrap();
    allocator.allocate("t", &tensor).unwrap();
    assert_eq!(hooks(), (2, 0));
    allocator.free(&first).unwrap();
    assert_eq!(hooks(), (2, 1));
    allocator.reset();
    assert_eq!(hooks(), (2, 2));
    allocator.allocate("t", &tensor).unwrap();
    drop(allocator);
    assert_eq!(hooks(), (3, 3));

    // A tensor that the backend refuses gets no memory.
    *heap.refuse_placed.lock().unwrap() = Some(3);
    let mut allocator = TensorAllocator::on(&heap.shared(), 256, Usage::Compute).unwrap();
    assert!(matches!(allocator.allocate("t", &tensor), Err(AllocatorError::Backend(_))));
    assert_eq!((allocator.used(), allocator.high_water(), allocator.free_blocks().len()), (0, 0, 1));
    assert_eq!(hooks(), (3, 3));
}

#[test]
fn a5_b4_a_simulated_device_is_told_of_tensors_too() {
    let sim = Sim::new("a").device();
    let backend = sim.clone() as Arc<dyn Backend>;
    let mut allocator = TensorAllocator::on(&backend, 1024, Usage::Compute).unwrap();
    let first = allocator.allocate("t", &tensor_of(40)).unwrap();
    allocator.allocate("t", &tensor_of(40)).unwrap();
    assert_eq!(sim.placed_tensors(), 2);
    allocator.free(&first).unwrap();
    assert_eq!(sim.placed_tensors(), 1);
    drop(allocator);
    assert_eq!(sim.placed_tensors(), 0);
}

#[test]
fn a8_live_tensors_at_the_high_water_mark_are_listed_with_names_of_any_length() {
    let tensors = Tensors::up_to(16);
    let mut allocator = TensorAllocator::measuring(8).unwrap().with_listing();
    let long = "blk.0.".repeat(100);
    let first = allocator.allocate("first", tensors.of(8)).unwrap();
    allocator.allocate(&long, tensors.of(8)).unwrap();
    allocator.free(&first).unwrap();
    allocator.allocate("third", tensors.of(16)).unwrap();
    allocator.allocate("fourth", tensors.of(8)).unwrap();
    let live = |name: &str, offset, bytes| LiveTensor { name: name.to_owned(), offset, bytes };
    assert_eq!(
        allocator.live_at_high_water(),
        [live(&long, 8, 8), live("third", 16, 16)],
        "the fourth went into the freed block"
    );
    assert!(long.len() > 64);
}

#[test]
fn there_can_be_more_than_256_free_blocks() {
    let tensor = tensor_of(8);
    let mut allocator = in_heap(8 * 10_000, 8);
    let all: Vec<_> = (0..10_000).map(|_| allocator.allocate("t", &tensor).unwrap()).collect();
    for allocation in all.iter().step_by(2) {
        allocator.free(allocation).unwrap();
    }
    assert_eq!(allocator.free_blocks().len(), 5000);
    for allocation in all.iter().skip(1).step_by(2) {
        allocator.free(allocation).unwrap();
    }
    assert_eq!(allocator.free_blocks(), [(0, 80_000)]);
}

#[test]
fn x6_a_buffer_filled_to_the_last_byte_still_answers() {
    let mut allocator = in_heap(64, 32);
    let first = allocator.allocate("first", &tensor_of(32)).unwrap();
    allocator.allocate("second", &tensor_of(32)).unwrap();
    let empty = allocator.allocate("empty", &tensor_of(0)).unwrap();
    assert!(empty.offset <= 64 && empty.region().is_some_and(|region| region.bytes == 0));
    assert_eq!(
        allocator.allocate("third", &tensor_of(1)).unwrap_err(),
        AllocatorError::OutOfMemory { name: "third".into(), wanted: 32, largest: 0, free: 0, capacity: 64 }
    );
    assert_eq!(allocator.free(&empty), Ok(true));
    assert_eq!(allocator.free(&first), Ok(true));
    assert_eq!(allocator.allocate("fourth", &tensor_of(1)).unwrap().offset, 0);
}

#[test]
fn x7_a_buffer_smaller_than_its_alignment_gap_has_no_room() {
    let mut heap = Heap::new("h", 32, None);
    heap.base = Some(8);
    let mut allocator = TensorAllocator::on(&heap.shared(), 16, Usage::Compute).unwrap();
    assert_eq!(
        allocator.allocate("t", &tensor_of(4 << 20)).unwrap_err(),
        AllocatorError::OutOfMemory { name: "t".into(), wanted: 4 << 20, largest: 0, free: 0, capacity: 0 }
    );
    assert_eq!(allocator.allocate("empty", &tensor_of(0)).unwrap().offset, 16);
}

#[test]
fn a8_the_first_of_two_equal_high_water_marks_is_listed() {
    let tensors = Tensors::up_to(8);
    let mut allocator = TensorAllocator::measuring(8).unwrap().with_listing();
    for name in ["first", "second"] {
        let allocation = allocator.allocate(name, tensors.of(8)).unwrap();
        allocator.free(&allocation).unwrap();
    }
    let names: Vec<&str> = allocator.live_at_high_water().iter().map(|live| live.name.as_str()).collect();
    assert_eq!((allocator.high_water(), names), (8, vec!["first"]));
}

#[test]
fn an_allocator_has_the_alignment_and_the_buffer_of_its_backend() {
    let allocator = in_heap(64, 16);
    assert_eq!((allocator.alignment(), allocator.buffer().unwrap().bytes()), (16, 64));
    let measuring = TensorAllocator::measuring(32).unwrap();
    assert!(measuring.alignment() == 32 && measuring.buffer().is_none());
}

//! How long memory planning takes: transformer graphs of five sizes, planned with warm working memory; and how long a
//! session takes to find the plan of a graph that it has seen before.
//!
//! `cargo bench -p quadriga-runtime --bench planning [-- ROUNDS [NODES…]]`
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a benchmark"
)]

#[path = "../tests/common/transformer.rs"]
mod transformer;

use quadriga_runtime::memory::packing::{Effort, Packer, PackingItem, PackingProblem};
use quadriga_runtime::memory::{BackendMemory, MemoryPlan, MemoryRequest, Planner};
use quadriga_runtime::{Scheduler, Session};
use quadriga_sim::Sim;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// CPU time of this thread in seconds, so that other work on the machine does not count; wall-clock time where the
/// system does not report it.
fn seconds(since: Instant) -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let computed = text.split(' ').next().and_then(|nanoseconds| nanoseconds.parse::<f64>().ok());
    computed.map_or_else(|| since.elapsed().as_secs_f64(), |nanoseconds| nanoseconds / 1e9)
}

/// The median time of the work in seconds, and the heap allocations of the last round.
fn median(rounds: usize, mut work: impl FnMut()) -> (f64, usize) {
    // CPU time is updated every few milliseconds: a round repeats the work for longer than that.
    let clock = Instant::now();
    work();
    let repeats = (0.04 / clock.elapsed().as_secs_f64().max(1e-7)).ceil().max(1.0) as usize;
    let mut times = Vec::with_capacity(rounds);
    let mut allocations = 0;
    for _ in 0..rounds {
        let start = seconds(clock);
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        (0..repeats).for_each(|_| work());
        allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
        times.push((seconds(clock) - start) / repeats as f64);
    }
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], allocations)
}

fn main() {
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|argument| argument.parse().ok()).collect();
    let rounds = numbers.first().copied().unwrap_or(7);
    let sizes = numbers.get(1..).filter(|sizes| !sizes.is_empty());
    println!(
        "| nodes | plan | of it packing | ns per node | heap allocations | same graph again in a session, ns per node | heap allocations | peak ÷ bound, strategy |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for &nodes in sizes.unwrap_or(&[1_000, 10_000, 100_000, 300_000, 1_000_000]) {
        let graph = transformer::of_nodes(nodes);
        let count = graph.nodes().len() as f64;
        let memories = [BackendMemory::measuring("a", 64, None)];
        let backends = vec![0; graph.tensors().len()];
        let request = MemoryRequest { backends: &backends, ..MemoryRequest::new(&graph, &memories) };
        let (mut planner, mut plan) = (Planner::default(), MemoryPlan::default());
        planner.plan_into(&request, &mut plan).unwrap();
        let (fresh, allocations) = median(rounds, || planner.plan_into(&request, &mut plan).unwrap());
        let lives = plan.lifetimes.iter().zip(&plan.bytes).filter(|(life, _)| !life.is_empty());
        let items = lives.map(|(life, bytes)| PackingItem { size: *bytes, start: life.start, end: life.end });
        let problem = PackingProblem { items: items.collect(), alignment: 64, max_chunk: None };
        let mut packer = Packer::default();
        packer.pack(&problem, Effort::Fast).unwrap();
        let (packing, _) = median(rounds, || {
            packer.pack(&problem, Effort::Fast).unwrap();
        });
        // Small tensors: the lookup does not depend on their sizes, and the session allocates them.
        let small = Arc::new(transformer::of_nodes_small(nodes));
        let device = Sim::new("a").synchronous().host().without_computing().build();
        let mut session = Session::new(&Scheduler::new([device])).unwrap();
        session.use_graph(&small).unwrap();
        let (again, again_allocations) = median(rounds, || session.use_graph(&small).unwrap());
        println!(
            "| {} | {:.2} ms | {:.2} ms | {:.0} | {allocations} | {:.1} | {again_allocations} | {:.4}, {} |",
            graph.nodes().len(),
            fresh * 1e3,
            packing * 1e3,
            fresh * 1e9 / count,
            again * 1e9 / count,
            plan.arena_bytes(0) as f64 / plan.backends[0].lower_bound as f64,
            plan.backends[0].strategy,
        );
    }
}

//! In the steady state, runs allocate nothing on the host and nothing on devices, and compile nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]
#![allow(unsafe_code, reason = "a global allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use quadriga_graph::{BuildError, DType, Graph, GraphBuilder, Weight};
use quadriga_runtime::{ModelId, PlanKey, Scheduler, Session};
use quadriga_sim::{FaultPoint, Sim};

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// Counts the allocations of this thread; devices work on threads of their own.
struct Counting;

// SAFETY: every call is forwarded to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's guarantees are forwarded.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's guarantees are forwarded.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn build(bucket: usize) -> Result<Graph, BuildError> {
    let g = GraphBuilder::new();
    let mut x = g.input("x", DType::F32, [1, 16]);
    let ids = g.input("ids", DType::I32, [1]);
    for block in 0..10 {
        let w = g.weight(&format!("w.{block}"), Weight::with_data(DType::F32, [16, 16], vec![0u8; 1024]));
        let cache = g.state(&format!("cache.{block}"), DType::F32, [64, 16]);
        let y = g.mul_mat(w, x);
        x = cache.set_rows(y, ids).slice(0, 0, bucket).cont().slice(0, 0, 1).add(y);
    }
    g.output("y", x);
    g.finish()
}

#[test]
fn a_decode_loop_allocates_and_compiles_nothing_in_the_steady_state() {
    let sims = [
        // The order check allocates.
        Sim::new("a").check_order(false).device(),
        Sim::new("b").check_order(false).without_peers().device(),
        Sim::new("cpu").check_order(false).synchronous().host().without_computing().device(),
    ];
    let scheduler = Scheduler::new(sims.clone()).place(|name| {
        let (_, block) = name.split_once('.')?;
        Some(block.parse::<usize>().ok()? % 3)
    });
    // With the check, every graph is built again.
    let mut session = Session::new(&scheduler.check_plans(false)).unwrap();
    let mut out = [0f32; 16];
    let model = ModelId::new();
    let mut token = |position: i32, out: &mut [f32]| {
        let bucket = if position % 64 < 32 { 32 } else { 64 };
        session.prepare(PlanKey::of(&model, [1, bucket as u64, 0, 0]), || build(bucket)).unwrap();
        session.set("x", &[position as f32; 16]).unwrap();
        session.set("ids", &[position % 64]).unwrap();
        session.start().unwrap();
        session.read_into("y", out).unwrap();
    };
    for position in 0..130 {
        token(position, &mut out);
    }
    let counts = sims
        .each_ref()
        .map(|sim| (sim.counts().of(FaultPoint::Allocation), sim.counts().of(FaultPoint::Compile)));
    let before = COUNT.with(Cell::get);
    for position in 130..330 {
        token(position, &mut out);
    }
    assert_eq!(COUNT.with(Cell::get) - before, 0);
    let after = sims
        .each_ref()
        .map(|sim| (sim.counts().of(FaultPoint::Allocation), sim.counts().of(FaultPoint::Compile)));
    assert_eq!(counts, after);
}

#[test]
fn overlapping_runs_on_a_device_allocate_nothing_in_the_steady_state() {
    let sim = Sim::new("a").check_order(false).device();
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [1, 16]);
    g.output("y", x.add(x).tanh());
    let scheduler = Scheduler::new(Arc::clone(&sim));
    let mut session = scheduler.plan(g.finish().unwrap()).unwrap().session().unwrap();
    session.run(&[("x", &[0.5f32; 16])]).unwrap();
    let mut bytes = [0; 64];
    let mut token = |bytes: &mut [u8]| {
        session.chain("y", "x").unwrap();
        let read = session.read_async(&["y"]).unwrap();
        session.start().unwrap();
        session.finish_read(read, bytes).unwrap();
    };
    (0..50).for_each(|_| token(&mut bytes));
    let allocations = sim.counts().of(FaultPoint::Allocation);
    let before = COUNT.with(Cell::get);
    (0..100).for_each(|_| token(&mut bytes));
    assert_eq!(COUNT.with(Cell::get) - before, 0);
    assert_eq!(sim.counts().of(FaultPoint::Allocation), allocations);
}

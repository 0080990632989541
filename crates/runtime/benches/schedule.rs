//! The cost of scheduling, on two simulated devices and a host that compute nothing.
//!
//! `cargo bench -p quadriga-runtime --bench schedule` prints the table of `bench/RESULTS.md`. Medians; times depend on
//! the machine, the last rows are counted or come from the devices' own clocks.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    unsafe_code,
    reason = "a benchmark"
)]
#![allow(missing_docs, reason = "a benchmark")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Instant;

use quadriga_graph::{AttentionOptions, DType, Graph, GraphBuilder, Pairing, Rope, Weight, layer_of};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_sim::{Clock, Sim};

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicI64 = AtomicI64::new(0);

struct Counting;

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A decoder of `layers` blocks, 26 nodes each, views included.
fn transformer(layers: usize) -> Graph {
    let (t, d, h, kv, n) = (4, 256, 4, 64, 128);
    let g = GraphBuilder::new();
    let ids = g.input("tokens", DType::I32, [t]);
    let positions = g.input("positions", DType::I32, [t]);
    let mask = g.input("mask", DType::F32, [t, n]);
    let weight = |name: String, rows, cols| g.weight(&name, Weight::new(DType::F16, [rows, cols]));
    let norm = |name: String| g.weight(&name, Weight::new(DType::F32, [d]));
    let rope = Rope::new(d / h, Pairing::Half, 1e4);
    let mut x = weight("embed".into(), 1000, d).get_rows(ids);
    for layer in 0..layers {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let a = x.rms_norm(1e-5).mul(norm(name("attn_norm")));
        let q = weight(name("q"), d, d).mul_mat(a).reshape([t, h, d / h]).rope(rope, positions, None);
        let k = weight(name("k"), kv, d).mul_mat(a).reshape([t, 1, kv]).rope(rope, positions, None);
        let v = weight(name("v"), kv, d).mul_mat(a);
        let keys = g.state(&name("keys"), DType::F16, [n, kv]).set_rows(k.reshape([t, kv]), positions);
        let values = g.state(&name("values"), DType::F16, [n, kv]).set_rows(v, positions);
        let q = q.permute([1, 0, 2]);
        let keys = keys.reshape([1, n, kv]);
        let values = values.reshape([1, n, kv]);
        let attended = q.attention(keys, values, AttentionOptions::new().mask(mask).scale(0.125));
        let out = weight(name("o"), d, d).mul_mat(attended.reshape([t, d]));
        x = x.add(out);
        let f = x.rms_norm(1e-5).mul(norm(name("ffn_norm")));
        let gate = weight(name("gate"), 3 * d, d).mul_mat(f);
        let up = weight(name("up"), 3 * d, d).mul_mat(f);
        x = x.add(weight(name("down"), d, 3 * d).mul_mat(gate.swiglu(up)));
    }
    g.output("logits", weight("head".into(), 1000, d).mul_mat(x.rms_norm(1e-5)));
    g.finish().unwrap()
}

fn backends() -> Vec<Arc<dyn Backend>> {
    vec![
        Sim::new("a").without_computing().build(),
        Sim::new("b").without_computing().build(),
        Sim::new("cpu").synchronous().host().without_computing().build(),
    ]
}

/// Assigns a third of the layers to each backend.
fn thirds(layers: usize) -> impl Fn(&str) -> Option<usize> + Send + Sync + 'static {
    move |name| layer_of(name).map(|layer| layer * 3 / layers)
}

fn median(rounds: usize, mut measure: impl FnMut() -> f64) -> f64 {
    let mut all: Vec<f64> = (0..rounds).map(|_| measure()).collect();
    all.sort_by(f64::total_cmp);
    all[rounds / 2]
}

fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

fn main() {
    println!("| what | result |\n|---|---|");
    let layers = 39;
    let graph = Arc::new(transformer(layers));
    let nodes = graph.nodes().len();
    let scheduler = Scheduler::new(backends()).place(thirds(layers));
    let plan = scheduler.plan(&graph).unwrap();
    if std::env::args().any(|argument| argument == "--print") {
        println!("{plan:#}");
        return;
    }
    if std::env::args().any(|argument| argument == "--profile") {
        let plan = || seconds(|| drop(scheduler.plan(&graph).unwrap()));
        let minimum = (0..20_000).map(|_| plan()).fold(f64::MAX, f64::min);
        return println!("| minimum of 20,000 | {:.0} µs |", minimum * 1e6);
    }
    let took = median(201, || seconds(|| drop(scheduler.plan(&graph).unwrap())));
    println!(
        "| plan a new {nodes}-node transformer graph on 3 backends ({} splits, {} copies) | {:.0} µs |",
        plan.splits().splits.len(),
        plan.splits().copies.len(),
        took * 1e6
    );
    let one = Scheduler::new(backends());
    let took = median(201, || seconds(|| drop(one.plan(&graph).unwrap())));
    println!("| the same without placements, all on one backend | {:.0} µs |", took * 1e6);

    let before = BYTES.load(Ordering::Relaxed);
    let kept = scheduler.plan(&graph).unwrap();
    let bytes = BYTES.load(Ordering::Relaxed) - before;
    println!("| memory of a plan | {:.0} kB per 1,000 nodes |", bytes as f64 / nodes as f64);
    drop(kept);

    rerun();
    large();
    overlap();
}

/// A plan of several splits on synchronous devices that compute nothing: the time is the session's own overhead.
fn rerun() {
    let g = GraphBuilder::new();
    let mut x = g.input("x", DType::F32, [64]);
    for layer in 0..30 {
        let w = g.weight(&format!("blk.{layer}.w"), Weight::with_data(DType::F32, [64], vec![0u8; 256]));
        for _ in 0..33 {
            x = x.add(w);
        }
    }
    g.output("y", x);
    let graph = g.finish().unwrap();
    let idle = |name| Sim::new(name).synchronous().host().without_computing().build();
    let plan = Scheduler::new([idle("a"), idle("b"), idle("cpu")]).place(thirds(30)).plan(&graph).unwrap();
    let mut session = plan.session().unwrap();
    session.run(&[("x", &[0f32; 64])]).unwrap();
    session.start().unwrap();
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    let took = median(101, || seconds(|| (0..100).for_each(|_| session.start().unwrap()))) / 100.0;
    let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
    println!(
        "| run the same plan again ({} nodes, {} splits, {} copies): overhead, devices included | {:.2} µs, {} heap \
         allocations in 10,100 runs |",
        graph.nodes().len(),
        plan.splits().splits.len(),
        plan.splits().copies.len(),
        took * 1e6,
        allocations.saturating_sub(1),
    );
}

/// A chain of additions that is assigned to the next backend every `run` nodes.
fn chain(nodes: usize, run: usize, count: usize) -> (Arc<Graph>, Scheduler) {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [4]);
    let backends = (0..count).map(|i| Sim::new(&format!("d{i}")).without_computing().build());
    let mut scheduler = Scheduler::new(backends.collect::<Vec<_>>());
    let mut y = x;
    for node in 0..nodes {
        y = y.add(x);
        if node % run == 0 {
            scheduler = scheduler.pin_tensor(y.id(), node / run % count);
        }
    }
    g.output("y", y);
    (Arc::new(g.finish().unwrap()), scheduler)
}

fn large() {
    for (nodes, run, count) in [(1_000_000, 1000, 3), (10_000, 1, 3), (64_000, 100, 64)] {
        let (graph, scheduler) = chain(nodes, run, count);
        let mut splits = 0;
        let took = median(3, || seconds(|| splits = scheduler.plan(&graph).unwrap().splits().splits.len()));
        println!("| plan {nodes} nodes on {count} backends, {splits} splits | {:.3} s |", took);
    }
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [64]).tanh();
    let mut sum = x.scale(1.0);
    let mut scheduler = Scheduler::new(backends()).pin_tensor(x.id(), 0).pin_tensor(sum.id(), 1);
    for _ in 0..999 {
        sum = sum.add(x);
        scheduler = scheduler.pin_tensor(sum.id(), 1);
    }
    g.output("y", sum);
    let plan = scheduler.plan(g.finish().unwrap()).unwrap();
    println!("| copies of a tensor that 1,000 nodes read | {} |", plan.splits().copies.len());
}

/// The time of 50 alternating splits on devices that run in real time.
fn alternating(node_seconds: f64, copy_seconds: f64) -> f64 {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [64]);
    let slow = |name| Sim::new(name).clock(Clock::Real).without_computing();
    let b = slow("b").node_seconds(node_seconds).copy_seconds(copy_seconds, 0.0).build();
    let mut scheduler = Scheduler::new([slow("a").build(), b]);
    let mut y = x;
    for step in 0..50 {
        let made = x.scale(step as f32);
        y = y.add(made);
        scheduler = scheduler.pin_tensor(made.id(), 0).pin_tensor(y.id(), 1);
    }
    g.output("y", y);
    let mut session = scheduler.plan(g.finish().unwrap()).unwrap().session().unwrap();
    session.run(&[("x", &[0f32; 64])]).unwrap();
    median(5, || {
        seconds(|| {
            session.start().unwrap();
            session.wait().unwrap();
        })
    })
}

fn overlap() {
    let each = 2e-3;
    let (computing, copying, both) =
        (alternating(each, 0.0), alternating(0.0, each), alternating(each, each));
    println!(
        "| 50 alternating splits with equal copy and compute | {:.1} ms computing, {:.1} ms copying, {:.1} ms both: \
         {:.0} % of the smaller hidden |",
        computing * 1e3,
        copying * 1e3,
        both * 1e3,
        100.0 * (computing + copying - both) / computing.min(copying)
    );

    let branch = |both: bool| {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [64]);
        let device = |name| Sim::new(name).clock(Clock::Real).without_computing().node_seconds(1e-3).build();
        let mut scheduler = Scheduler::new([device("a"), device("b")]);
        for backend in 0..if both { 2 } else { 1 } {
            let mut y = x;
            for _ in 0..50 {
                y = y.tanh();
                scheduler = scheduler.pin_tensor(y.id(), backend);
            }
            g.output(&format!("y{backend}"), y);
        }
        let mut session = scheduler.plan(g.finish().unwrap()).unwrap().session().unwrap();
        session.run(&[("x", &[0f32; 64])]).unwrap();
        median(5, || {
            seconds(|| {
                session.start().unwrap();
                session.wait().unwrap();
            })
        })
    };
    let (one, two) = (branch(false), branch(true));
    println!(
        "| two equal branches on two devices | {:.3} × the time of one ({:.1} ms, {:.1} ms) |",
        two / one,
        two * 1e3,
        one * 1e3
    );
}

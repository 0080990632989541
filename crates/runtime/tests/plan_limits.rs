//! A session keeps a bounded number of graphs: those used last. Forgotten graphs come back with the same results.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
#![allow(unsafe_code, reason = "a global allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::{Arc, LazyLock, OnceLock};

use quadriga_graph::{BuildError, DType, Data, Graph, GraphBuilder, Weight};
use quadriga_runtime::{Backend, ModelId, PlanKey, PlanLimits, RuntimeError, Scheduler, Session};
use quadriga_sim::Sim;

thread_local! {
    static BYTES: Cell<i64> = const { Cell::new(0) };
}

/// Counts the bytes that this thread has allocated and not freed.
struct Counting;

// SAFETY: every call is forwarded to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.with(|bytes| bytes.set(bytes.get() + layout.size() as i64));
        // SAFETY: the caller's guarantees are forwarded.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        BYTES.with(|bytes| bytes.set(bytes.get() - layout.size() as i64));
        // SAFETY: the caller's guarantees are forwarded.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const WIDTH: usize = 32;

/// The data of every weight, as that of a file would be: one for all graphs.
static DATA: OnceLock<Data> = OnceLock::new();

/// Layers of matmul, norm and activation over `rows` rows, and a state that counts the runs.
fn graph(rows: usize) -> Result<Graph, BuildError> {
    let g = GraphBuilder::new();
    let mut x = g.input("x", DType::F32, [rows, WIDTH]);
    for layer in 0..20 {
        let _scope = g.scope(&format!("blk.{layer}"));
        let data = DATA.get_or_init(|| Data::from([0.01f32; WIDTH * WIDTH].as_slice())).clone();
        let w = g.weight(&format!("w.{layer}"), Weight::with_data(DType::F32, [WIDTH, WIDTH], data));
        x = g.mul_mat(w, x.rms_norm(1e-5)).silu().add(x);
    }
    let count = g.state("count", DType::F32, [1]);
    let one = g.constant("one", DType::F32, [1], [1.0f32].as_slice());
    g.output("count", count.add(one).copy_into(count));
    g.output("y", x);
    g.finish()
}

/// The key of a graph with so many rows.
fn key(rows: u64) -> PlanKey {
    static MODEL: LazyLock<ModelId> = LazyLock::new(ModelId::new);
    PlanKey::of(&MODEL, [rows, 0, 0, 0])
}

fn run(session: &mut Session, rows: usize) -> Vec<f32> {
    session.prepare(key(rows as u64), || graph(rows)).unwrap();
    let x: Vec<f32> = (0..rows * WIDTH).map(|i| (i % 7) as f32).collect();
    session.run(&[("x", &x)]).unwrap();
    session.read("y").unwrap()
}

fn cpu() -> Arc<dyn Backend> {
    Arc::new(quadriga_cpu::Backend::builder().threads(1).build().unwrap())
}

/// Each alone, and both together.
fn schedulers() -> [Scheduler; 3] {
    let one = |backend: Arc<dyn Backend>| Scheduler::new(vec![backend]);
    let both = Scheduler::new(vec![Sim::new("sim:0").build(), cpu()]);
    let both = both.place(|name| Some(name.strip_prefix("w.")?.parse::<usize>().ok()? % 2));
    [one(cpu()), one(Sim::new("sim:0").build()), both]
}

#[test]
fn the_plans_used_last_are_kept_and_the_others_come_back_with_equal_results() {
    for scheduler in schedulers() {
        // With the check, graphs that are kept would be built again, too.
        let mut session = Session::new(&scheduler.check_plans(false)).unwrap();
        session.set_plan_limits(PlanLimits { plans: 3, ..PlanLimits::default() }).unwrap();
        let expected: Vec<Vec<f32>> = (1..=6).map(|rows| run(&mut session, rows)).collect();
        assert_eq!(session.plan_usage().plans, 3);
        let kept = |session: &mut Session, rows: u64| {
            let kept = session.prepare(key(rows), || Err::<Graph, _>("forgotten")).is_ok();
            session.prepare(key(6), || graph(6)).unwrap();
            kept
        };
        let found: Vec<bool> = (1..=6).map(|rows| kept(&mut session, rows)).collect();
        assert_eq!(found, [false, false, false, true, true, true]);
        // 4 was not used since 5 and 6.
        run(&mut session, 5);
        run(&mut session, 1);
        assert!(!kept(&mut session, 4) && kept(&mut session, 5) && kept(&mut session, 1));
        for (rows, expected) in (1..).zip(&expected) {
            assert_eq!(&run(&mut session, rows), expected, "{rows} rows");
        }
        assert_eq!(session.read::<f32>("count").unwrap(), [14.0], "states survive");
    }
}

#[test]
fn plans_from_before_memory_grew_are_known_to_need_compiling() {
    for scheduler in schedulers() {
        let mut session = Session::new(&scheduler).unwrap();
        let few = run(&mut session, 2);
        assert!(session.is_compiled());
        run(&mut session, 200);
        assert!(!session.is_compiled(), "the plan of two rows points into memory that was replaced");
        assert_eq!(run(&mut session, 2), few);
        run(&mut session, 200);
        assert!(session.is_compiled(), "memory no longer grows");
    }
}

#[test]
fn a_hundred_graphs_take_bounded_memory_and_the_reported_bytes_are_about_right() {
    for scheduler in schedulers() {
        let mut session = Session::new(&scheduler).unwrap();
        session.set_plan_limits(PlanLimits { plans: 10, bytes: usize::MAX }).unwrap();
        run(&mut session, 200);
        let start = (BYTES.with(Cell::get), session.plan_usage().bytes as i64);
        (1..10).for_each(|rows| drop(run(&mut session, rows)));
        let full = (BYTES.with(Cell::get), session.plan_usage().bytes as i64);
        let (taken, reported) = (full.0 - start.0, full.1 - start.1);
        let name = scheduler.backends()[0].name();
        println!("{name}: 9 plans take {taken} bytes, {reported} are reported");
        // A simulated device keeps a copy of the graph, and who accessed what.
        let least = if name == "cpu" { taken * 3 / 4 } else { taken / 2 };
        assert!((least..taken).contains(&reported), "{name}: {reported} bytes of {taken} are reported");
        (10..100).for_each(|rows| drop(run(&mut session, rows)));
        let after = BYTES.with(Cell::get);
        assert!(after < full.0 + taken / 2, "{taken} bytes by 9 plans, {} more by 90 others", after - full.0);
        assert_eq!(session.plan_usage().plans, 10);
        // Limits are inclusive.
        let usage = session.plan_usage();
        session.set_plan_limits(PlanLimits { plans: usage.plans, bytes: usage.bytes }).unwrap();
        assert_eq!(session.plan_usage().plans, usage.plans);
        // The limit of bytes counts, too.
        let limit = session.plan_usage().bytes / 2;
        session.set_plan_limits(PlanLimits { plans: 10, bytes: limit }).unwrap();
        assert!(session.plan_usage().plans < 10 && session.plan_usage().bytes <= limit);
        run(&mut session, 3);
        assert!(session.plan_usage().bytes <= limit);
    }
}

#[test]
fn the_current_plan_stays_whatever_the_limits() {
    for scheduler in schedulers() {
        let mut session = Session::new(&scheduler).unwrap();
        session.set_plan_limits(PlanLimits { plans: 0, bytes: 0 }).unwrap();
        for rows in [1, 2, 1] {
            let y = run(&mut session, rows);
            assert_eq!(y.len(), rows * WIDTH);
            assert_eq!(session.plan_usage().plans, 1);
            session.run(&[]).unwrap();
            assert_eq!(session.read::<f32>("y").unwrap(), y);
        }
    }
}

#[test]
fn graphs_are_forgotten_by_key_or_as_such_and_never_while_they_run() {
    for scheduler in schedulers() {
        let mut session = Session::new(&scheduler).unwrap();
        let (one, two) = (run(&mut session, 1), run(&mut session, 2));
        assert!(!session.forget(key(7)).unwrap());
        // In flight: it is waited for.
        session.start().unwrap();
        assert!(session.forget(key(2)).unwrap() && !session.forget(key(2)).unwrap());
        assert!(session.is_done().unwrap());
        assert!(matches!(session.run(&[]), Err(RuntimeError::NoPlan)));
        assert!(session.plan().is_none());
        assert_eq!(run(&mut session, 1), one);
        assert!(session.forget_graph(&graph(1).unwrap()).unwrap());
        assert!(!session.forget_graph(&graph(1).unwrap()).unwrap());
        assert_eq!((run(&mut session, 2), run(&mut session, 1)), (two, one));
        assert_eq!(session.read::<f32>("count").unwrap(), [6.0], "states survive");
    }
}

#[test]
fn to_forget_all_frees_weights_and_arenas_but_not_states() {
    let sim = Sim::new("sim:0").device();
    let mut session = Session::new(&Scheduler::new(Arc::clone(&sim))).unwrap();
    let expected = run(&mut session, 5);
    session.forget_all().unwrap();
    assert_eq!(session.plan_usage().plans, 0);
    assert_eq!(sim.used_bytes(), 4, "the state");
    assert_eq!(run(&mut session, 5), expected);
    assert_eq!(session.read::<f32>("count").unwrap(), [2.0]);
}

#[test]
fn a_graph_that_cannot_be_compiled_leaves_no_plan_and_the_current_one_stays() {
    let sim = Sim::new("sim:0").capacity(200_000).device();
    let mut session = Session::new(&Scheduler::new(Arc::clone(&sim))).unwrap();
    let expected = run(&mut session, 5);
    let usage = session.plan_usage();
    let refused = session.prepare(1000, || graph(1000));
    assert!(matches!(refused, Err(RuntimeError::Device { .. })), "{refused:?}");
    assert_eq!(session.plan_usage().plans, usage.plans);
    assert_eq!(session.plan().unwrap().graph().fingerprint(), graph(5).unwrap().fingerprint());
    let x: Vec<f32> = (0..5 * WIDTH).map(|i| (i % 7) as f32).collect();
    session.run(&[("x", &x)]).unwrap();
    assert_eq!(session.read::<f32>("y").unwrap(), expected);
}

#[test]
fn memory_that_copies_go_through_counts() {
    // Devices that reach neither each other nor host memory: the host reads and writes each copy.
    let scheduler = |isolated: bool| {
        let sim =
            |name: &str| if isolated { Sim::new(name).isolated().build() } else { Sim::new(name).build() };
        let both = Scheduler::new(vec![sim("sim:0"), sim("sim:1")]);
        both.place(|name| Some(name.strip_prefix("w.")?.parse::<usize>().ok()? % 2))
    };
    let bytes = |isolated: bool| {
        let mut session = Session::new(&scheduler(isolated)).unwrap();
        run(&mut session, 64);
        session.plan_usage().bytes
    };
    let copies = 19 * 64 * WIDTH * 4;
    assert!(bytes(true) >= bytes(false) + copies, "{} {}", bytes(true), bytes(false));
}

/// A graph of one shape with a constant of its own.
fn with_constant(value: f32, elements: usize) -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [1]);
    let numbers = vec![value; elements];
    let c = g.constant("c", DType::F32, [elements], numbers.as_slice());
    g.output("y", x.add(c.slice(0, 0, 1)));
    g.finish().unwrap()
}

#[test]
fn of_equal_plans_as_many_are_dropped_as_the_bytes_require() {
    let mut session = Session::new(&Scheduler::new(Sim::new("sim:0").build())).unwrap();
    let use_graph = |session: &mut Session, value: f32| {
        session.use_graph(with_constant(value, 1000)).unwrap();
        session.run(&[("x", &[1.0f32])]).unwrap();
        assert_eq!(session.read::<f32>("y").unwrap(), [1.0 + value]);
        session.plan_usage()
    };
    for (plans, value) in [1.0, 2.0, 3.0, 4.0].into_iter().enumerate() {
        assert_eq!(use_graph(&mut session, value).plans, plans + 1);
    }
    let bytes = session.plan_usage().bytes;
    for (limit, left) in [(bytes, 4), (bytes - 1, 3), (bytes / 2, 2)] {
        session.set_plan_limits(PlanLimits { plans: 10, bytes: limit }).unwrap();
        assert_eq!(session.plan_usage().plans, left, "of {bytes} bytes, {limit}");
    }
    // The oldest are gone; the others are found by their graphs, which differ in a constant only.
    session.set_plan_limits(PlanLimits::default()).unwrap();
    let known =
        |session: &mut Session, value: f32| session.forget_graph(&with_constant(value, 1000)).unwrap();
    assert!(!known(&mut session, 1.0) && !known(&mut session, 2.0));
    assert!(known(&mut session, 3.0) && session.plan_usage().plans == 1);
    assert_eq!(use_graph(&mut session, 4.0).plans, 1, "it is the current one still");
    assert!(known(&mut session, 4.0));
}

#[test]
fn the_bytes_of_constants_count() {
    let bytes = |elements: usize| {
        let mut session = Session::new(&Scheduler::new(Sim::new("sim:0").build())).unwrap();
        session.use_graph(with_constant(1.0, elements)).unwrap();
        session.run(&[("x", &[1.0f32])]).unwrap();
        session.plan_usage().bytes
    };
    let more = bytes(101_000) - bytes(1000);
    assert!((400_000..401_000).contains(&more), "{more}");
}

#[test]
fn a_graph_with_a_weight_that_is_still_to_be_set_is_known_by_its_key() {
    let build = || {
        let g = GraphBuilder::new();
        g.output("y", g.input("x", DType::F32, [2]).add(g.weight("w", Weight::new(DType::F32, [2]))));
        g.finish()
    };
    let scheduler = Scheduler::new(Sim::new("sim:0").build()).check_plans(true);
    let mut session = Session::new(&scheduler).unwrap();
    session.prepare(1, build).unwrap();
    session.prepare(1, build).unwrap();
    assert_eq!(session.plan_usage().plans, 1);
}

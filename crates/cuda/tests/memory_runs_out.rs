//! Out of memory on a real device: an error with numbers, everything released, and the next model loads. Says so and
//! passes where there is no device; `bench/gpu` runs the same with `quadriga check --faults`.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "tests"
)]

mod common;

use std::sync::{Arc, Mutex, PoisonError};

use quadriga_graph::{DType, Data, Graph, GraphBuilder, Weight};
use quadriga_runtime::{Backend, BackendError, RuntimeError, Scheduler, Session, Usage};

use common::device;

/// Held by the test that has the device's memory.
static DEVICE: Mutex<()> = Mutex::new(());

/// `rows` products with an f32 matrix of so many megabytes.
fn graph(megabytes: usize, rows: usize) -> Graph {
    let g = GraphBuilder::new();
    let n = megabytes << 8;
    let w = g.weight("w", Weight::with_data(DType::F32, [n, 1024], Data::from(vec![0u8; n * 4096])));
    g.output("y", g.mul_mat(w, g.input("x", DType::F32, [rows, 1024])));
    g.finish().unwrap()
}

fn runs(backend: &Arc<dyn Backend>) -> Result<(), RuntimeError> {
    let plan = Scheduler::new([Arc::clone(backend)]).plan(graph(16, 4))?;
    plan.session()?.run(&[("x", &vec![1.0f32; 4096])])
}

/// Takes all but about so many bytes.
fn fill(backend: &Arc<dyn Backend>, leave: u64) -> Vec<Arc<dyn quadriga_runtime::Buffer>> {
    let mut held = Vec::new();
    let mut piece = 1u64 << 34;
    while piece >= 1 << 20 {
        let free = backend.device().free_bytes.unwrap();
        if free < leave + piece {
            piece /= 2;
            continue;
        }
        match backend.allocate(piece as usize, Usage::Weights) {
            Ok(buffer) => held.push(buffer),
            Err(_) => piece /= 2,
        }
    }
    held
}

fn wanted(error: &RuntimeError) -> u64 {
    match error {
        RuntimeError::Device { error, .. } => match **error {
            BackendError::OutOfMemory { requested, .. } => requested,
            _ => panic!("{error}"),
        },
        other => panic!("{other}"),
    }
}

#[test]
fn loading_planning_and_running_say_what_was_wanted_and_leave_nothing_behind() {
    let _guard = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(backend) = device() else { return };
    runs(&backend).unwrap();
    let before = backend.device().free_bytes.unwrap();

    // One allocation that no device has.
    let Err(BackendError::OutOfMemory { requested: bytes, free, .. }) =
        backend.allocate(1 << 50, Usage::Weights)
    else {
        panic!("a petabyte was allocated")
    };
    assert_eq!(bytes, 1 << 50);
    assert!(free.is_some_and(|free| free > 0));

    // In planning: a budget that is too small.
    let error = Scheduler::new([Arc::clone(&backend)]).budget(0, 1 << 20).plan(graph(16, 4)).err().unwrap();
    let RuntimeError::OverBudget(over) = error else { panic!("{error}") };
    assert!(over.needed > over.budget && over.budget == 1 << 20);

    // At load, and in the middle: weights fit and the arena does not.
    let held = fill(&backend, 64 << 20);
    let plan = Scheduler::new([Arc::clone(&backend)]).plan(graph(512, 4)).unwrap();
    assert!(wanted(&plan.session().err().unwrap()) >= 512 << 20);
    let plan = Scheduler::new([Arc::clone(&backend)]).plan(graph(16, 1 << 15)).unwrap();
    assert!(wanted(&plan.session().err().unwrap()) >= 256 << 20);
    drop(held);

    // Everything is back, and the next model loads.
    runs(&backend).unwrap();
    let after = backend.device().free_bytes.unwrap();
    assert!(before.abs_diff(after) < 256 << 20, "{before} bytes were free, now {after}");
}

/// `rows` products with an f32 matrix of 4 MB.
fn products(rows: usize) -> Graph {
    let g = GraphBuilder::new();
    let w = Weight::with_data(DType::F32, [1024, 1024], vec![0.5f32; 1 << 20].as_slice());
    g.output("y", g.mul_mat(g.weight("w", w), g.input("x", DType::F32, [rows, 1024])));
    g.finish().unwrap()
}

#[test]
fn x14_a_refused_growth_on_a_full_device_leaves_what_worked() {
    let _guard = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(backend) = device() else { return };
    let (small, large) = (4, 1 << 16);
    let mut session = Session::new(&Scheduler::new([Arc::clone(&backend)])).unwrap();
    let run = |session: &mut Session, value: f32| {
        session.use_graph(products(small)).unwrap();
        session.run(&[("x", &vec![value; small * 1024])]).unwrap();
        session.read::<f32>("y").unwrap()
    };
    assert_eq!(run(&mut session, 1.0), vec![512.0; small * 1024]);
    let held = fill(&backend, 64 << 20);
    for round in 2..5 {
        let refused = session.use_graph(products(large)).unwrap_err();
        assert!(wanted(&refused) >= 256 << 20, "{refused}");
        let value = round as f32;
        assert_eq!(run(&mut session, value), vec![512.0 * value; small * 1024], "round {round}");
    }
    // With room, it grows, and the small graph still works.
    drop(held);
    session.use_graph(products(large)).unwrap();
    assert_eq!(run(&mut session, 7.0), vec![512.0 * 7.0; small * 1024]);
}

//! S7: what a plan says that a session takes is what it takes from a real device. The only test of its process, since it looks at
//! the device's free memory. Says so and passes where there is no device.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "tests"
)]

mod common;

use std::sync::Arc;

use quadriga_graph::{DType, Data, Graph, GraphBuilder, Weight};
use quadriga_runtime::Scheduler;

use common::device;

/// Products with a matrix of `megabytes`, added to a state of as many rows.
fn graph(megabytes: usize, rows: usize) -> Graph {
    let g = GraphBuilder::new();
    let n = megabytes << 8;
    let w = g.weight("w", Weight::with_data(DType::F32, [n, 1024], Data::from(vec![0u8; n * 4096])));
    let state = g.state("s", DType::F32, [rows, n]);
    g.output("y", g.mul_mat(w, g.input("x", DType::F32, [rows, 1024])).tanh().add(state));
    g.finish().unwrap()
}

#[test]
fn s7_a_session_takes_what_its_plan_forecasts() {
    /// The driver rounds each buffer up, and keeps memory for code and CUDA graphs.
    const ROUNDING: u64 = 64 << 20;
    let Some(cuda) = device() else { return };
    let scheduler = Scheduler::new(Arc::clone(&cuda));
    let free = || cuda.device().free_bytes.unwrap();
    let run = |megabytes: usize, rows: usize| {
        let plan = scheduler.plan(graph(megabytes, rows)).unwrap();
        let before = free();
        let mut session = plan.session().unwrap();
        session.run(&[("x", &vec![1.0f32; rows * 1024])]).unwrap();
        session.wait().unwrap();
        let forecast = plan.bytes()[0].total();
        let taken = before.saturating_sub(free());
        drop(session);
        (forecast, taken, before.saturating_sub(free()))
    };
    // The first run loads the kernels.
    run(4, 2048);
    for (megabytes, rows) in [(128, 2048), (256, 1024)] {
        let (forecast, taken, left) = run(megabytes, rows);
        assert!(forecast > 3 * ROUNDING, "{forecast}");
        assert!(taken + ROUNDING > forecast, "{forecast} bytes are forecast, {taken} taken");
        assert!(taken < forecast + ROUNDING, "{forecast} bytes are forecast, {taken} taken");
        assert!(left < ROUNDING, "{left} bytes are not given back");
    }
}

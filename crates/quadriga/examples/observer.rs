//! Inspects the result of every node, to find the first one that is not finite:
//!
//! ```sh
//! cargo run --release -p quadriga --example observer
//! ```

use std::ops::ControlFlow;

use quadriga::cpu;
use quadriga::graph::{DType, GraphBuilder};
use quadriga::runtime::{Observed, ObservedRun, Scheduler};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [4]);
    let shifted = (x + -1.0).named("shifted");
    let root = shifted.sqrt().named("root");
    g.output("y", (root * 2.0).named("doubled"));
    let mut session = Scheduler::new(cpu::Backend::new()?).plan(g.finish()?)?.session()?;

    // The square root of 0 − 1 is NaN.
    session.set("x", [0.0f32, 1.0, 2.0, 5.0].as_slice())?;
    let mut first = None;
    // Runs each node on its own, unfused and in order: slower than `run`, made for debugging. An `Observer` that is
    // interested in some nodes only leaves the others together, and can end the run.
    let run = session.debug().observe(&mut |observed: Observed<'_>| {
        let graph = observed.plan.graph();
        let name = graph.node_name(observed.node);
        let values: Vec<f32> =
            observed.bytes.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect();
        println!("{name:8} {values:?}");
        if values.iter().all(|value| value.is_finite()) {
            return ControlFlow::Continue(());
        }
        first = Some(name);
        ControlFlow::Break(())
    })?;
    println!("first result that is not finite: {first:?}");
    assert!(matches!(run, ObservedRun::Stopped { .. }));
    assert_eq!(first.as_deref(), Some("root"));
    Ok(())
}

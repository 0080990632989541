//! Inspects the result of every node, to find the first one that is not finite:
//!
//! ```sh
//! cargo run --release -p quadriga --example observer
//! ```

use quadriga::cpu;
use quadriga::graph::{DType, GraphBuilder};
use quadriga::runtime::Scheduler;

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
    // Runs each node on its own, unfused and in order: slower than `run`, made for debugging.
    session.debug().observe(&mut |observed| {
        let graph = observed.plan.graph();
        let name = graph.node_name(observed.node);
        if graph.get(observed.tensor).is_none_or(|tensor| tensor.dtype() != DType::F32) {
            return;
        }
        let values: Vec<f32> =
            observed.bytes.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect();
        println!("{name:8} {values:?}");
        if first.is_none() && values.iter().any(|value| !value.is_finite()) {
            first = Some(name);
        }
    })?;
    println!("first result that is not finite: {first:?}");
    assert_eq!(first.as_deref(), Some("root"));
    Ok(())
}

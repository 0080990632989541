//! Runs two models with weights of the same names on one scheduler; each keeps its own weights:
//!
//! ```sh
//! cargo run --release -p quadriga --example two_models
//! ```

use quadriga::cpu;
use quadriga::graph::{BuildError, DType, Data, Graph, GraphBuilder, Weight};
use quadriga::runtime::Scheduler;

const WIDTH: usize = 64;

/// A linear layer whose weights are all this value.
fn model(value: f32) -> Result<Graph, BuildError> {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [1, WIDTH]);
    let data = Data::from(vec![value; WIDTH * WIDTH].as_slice());
    let w = g.weight("blk.0.weight", Weight::with_data(DType::F32, [WIDTH, WIDTH], data));
    g.output("y", w.mul_mat(x));
    g.finish()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let scheduler = Scheduler::new(cpu::Backend::new()?);
    let mut one = scheduler.plan(model(1.0)?)?.session()?;
    let mut two = scheduler.plan(model(2.0)?)?.session()?;
    let x = vec![0.5f32; WIDTH];
    // Alternating runs do not disturb each other.
    for _ in 0..3 {
        for (session, value) in [(&mut one, 1.0), (&mut two, 2.0)] {
            session.run(&[("x", &x)])?;
            let y: Vec<f32> = session.read("y")?;
            println!("weights of {value}: y[0] = {:?}", y.first());
            assert!(y.iter().all(|y| (y - 0.5 * value * WIDTH as f32).abs() < 1e-3));
        }
    }
    Ok(())
}

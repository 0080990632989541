//! Builds a small graph, plans it and runs it:
//!
//! ```sh
//! cargo run --release -p quadriga --example own_graph
//! ```
//!
//! The graph is a feed-forward block with a state: a running sum of its results that persists between runs.

use quadriga::cpu;
use quadriga::graph::{DType, Data, GraphBuilder, Weight};
use quadriga::runtime::Scheduler;

const ROWS: usize = 4;
const WIDTH: usize = 64;
const HIDDEN: usize = 256;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Weights come from a file map, from memory as here, or are set later by name.
    let weight = |rows: usize, columns: usize, value: f32| {
        Weight::with_data(DType::F32, [rows, columns], Data::from(vec![value; rows * columns].as_slice()))
    };

    // Shapes are written outermost dimension first. Errors are recorded and returned by `finish`.
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [ROWS, WIDTH]);
    let up = g.weight("up.weight", weight(HIDDEN, WIDTH, 0.01));
    let down = g.weight("down.weight", weight(WIDTH, HIDDEN, 0.02));
    let y = x + down.mul_mat(up.mul_mat(x).silu());
    let sum = g.state("sum", DType::F32, [ROWS, WIDTH]);
    let sum = (sum + y).copy_into(sum);
    g.output("y", y);
    g.output("sum", sum);
    let graph = g.finish()?;

    // Backends in order of preference, such as a `quadriga::cuda::Backend` before the CPU. Placement rules and memory
    // budgets are methods of the scheduler.
    let plan = Scheduler::new(cpu::Backend::new()?).plan(&graph)?;
    // Splits, copies and bytes are known before anything is allocated.
    println!("{plan}");

    // A session allocates memory, loads weights and compiles splits once.
    let mut session = plan.session()?;
    for run in 1..=3 {
        session.run(&[("x", &[1.0f32; ROWS * WIDTH])])?;
        let (y, sum) = (session.read::<f32>("y")?, session.read::<f32>("sum")?);
        println!("run {run}: y[0] = {:?}, sum[0] = {:?}", y.first(), sum.first());
        assert!(y.iter().zip(&sum).all(|(y, sum)| (sum - run as f32 * y).abs() < 1e-3 * sum));
    }
    Ok(())
}

//! Writes the page of a large synthetic plan, to test how browsers handle it:
//! `cargo run --release -p quadriga-view --example large_page -- FILE.html [LAYERS [RUN_LENGTH [MAX_BUFFER_BYTES]]]`.
//! A layer has ten nodes. Runs of RUN_LENGTH layers alternate between two devices.

use quadriga_graph::{DType, GraphBuilder, Weight, layer_of};
use quadriga_runtime::Scheduler;
use quadriga_sim::Sim;
use quadriga_view::Picture;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let file =
        arguments.next().ok_or("usage: large_page FILE.html [LAYERS [RUN_LENGTH [MAX_BUFFER_BYTES]]]")?;
    let mut number = |default: usize| arguments.next().map_or(Ok(default), |text| text.parse());
    let (layers, run_length, max_buffer) = (number(10_000)?, number(5_000)?.max(1), number(usize::MAX)?);
    let g = GraphBuilder::new();
    let mut x = g.input("x", DType::F32, [8, 32]);
    for layer in 0..layers {
        let _scope = g.scope(&format!("blk.{layer}"));
        let up = g.weight(&format!("blk.{layer}.up.weight"), Weight::new(DType::F32, [64, 32]));
        let down = g.weight(&format!("blk.{layer}.down.weight"), Weight::new(DType::F32, [32, 64]));
        let wide = up.mul_mat(x.rms_norm(1e-5).scale(1.5));
        let gate = wide.silu().mul(wide.sqr()).tanh();
        x = x.add(down.mul_mat(gate)).scale(0.9);
    }
    g.output("y", x);
    let devices = ["sim:0", "sim:1"].map(|name| Sim::new(name).max_buffer(max_buffer).build());
    let plan = Scheduler::new(devices)
        .place(move |name| layer_of(name).map(|layer| layer / run_length % 2))
        .plan(g.finish()?)?;
    let page = Picture::new(format!("{layers} layers"), plan.explain()).about("a synthetic graph").html();
    println!("{file}: {} nodes, {:.1} MiB", plan.graph().nodes().len(), page.len() as f64 / (1 << 20) as f64);
    std::fs::write(&file, page)?;
    Ok(())
}

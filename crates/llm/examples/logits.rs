//! Prints the logits after each token, one row of numbers a line: `logits MODEL.gguf FIRST TOKEN…` computes the first
//! FIRST tokens as one batch, of which only the last row is printed, then the others one by one.
//!
//! `QUADRIGA_ISA` chooses the instruction set. `bench/agree_with_llama_cpp.py` compares what this prints.

use std::sync::Arc;

use quadriga_graph::DType;
use quadriga_llm::{Engine, EngineOptions, Model};
use quadriga_runtime::{Backend, Scheduler};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let model = Model::open(arguments.next().ok_or("usage: logits MODEL.gguf FIRST TOKEN…")?)?;
    let first: usize = arguments.next().ok_or("how many tokens come first?")?.parse()?;
    let tokens = arguments.map(|token| token.parse()).collect::<Result<Vec<u32>, _>>()?;
    let cpu: Arc<dyn Backend> = Arc::new(quadriga_cpu::Backend::new()?);
    let options = EngineOptions { cache: DType::F32, ..EngineOptions::default() };
    let mut engine = Engine::new(model, &Scheduler::new([cpu]), options, &mut |_| {})?;
    let (start, rest) = tokens.split_at_checked(first).ok_or("there are fewer tokens than come first")?;
    for batch in std::iter::once(start).chain(rest.chunks(1)) {
        engine.feed(batch)?;
        let row: Vec<String> = engine.logits(0).iter().map(ToString::to_string).collect();
        println!("{}", row.join(" "));
    }
    Ok(())
}

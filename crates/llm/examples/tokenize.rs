//! Measures tokenizing: `tokenize MODEL.gguf TEXT [--show]` prints tokens and the median speed of five passes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a measuring tool")]

use std::time::Instant;

use quadriga_llm::tokenizer::Tokenizer;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, text, show @ ..] = arguments.as_slice() else {
        eprintln!("usage: tokenize MODEL.gguf TEXTFILE [--show]");
        std::process::exit(2);
    };
    let started = Instant::now();
    let file = quadriga_gguf::File::open(model).expect("model");
    let opened = started.elapsed().as_secs_f64() * 1e3;
    let tokenizer = Tokenizer::from_file(&file).expect("tokenizer");
    let made = started.elapsed().as_secs_f64() * 1e3 - opened;
    eprintln!("file opened in {opened:.1} ms, tokenizer made in {made:.1} ms");
    let text = std::fs::read_to_string(text).expect("text");
    let mut tokens = Vec::new();
    let mut seconds: Vec<f64> = (0..5)
        .map(|_| {
            let started = Instant::now();
            tokens = tokenizer.encode(&text, true);
            started.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    if !show.is_empty() {
        println!("{tokens:?}");
    }
    let rate = text.len() as f64 / seconds[2] / 1e6;
    println!("{} bytes, {} tokens, {rate:.1} MB/s", text.len(), tokens.len());
}

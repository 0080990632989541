//! `quadriga perplexity`: how well a model predicts a text.

use std::io::Write;
use std::path::{Path, PathBuf};

use quadriga_llm::EngineOptions;
use quadriga_models::quality::perplexity as measure;
use quadriga_view::format::plural;

use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::{interrupt, piped_input, values};

/// Arguments of `quadriga perplexity`.
#[derive(clap::Args)]
pub(crate) struct PerplexityArgs {
    /// File with the text
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Tokens of a chunk; each is computed from an empty context
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = values::at_least_one)]
    chunk_size: usize,
    /// Chunks to compute, 0 for all
    #[arg(long, value_name = "N", default_value_t = 0)]
    chunks: usize,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
}

/// Prints the perplexity with its confidence interval.
pub(crate) fn perplexity(arguments: &PerplexityArgs) -> Outcome {
    let text = read_text(&arguments.file)?;
    let options =
        EngineOptions { output_rows: usize::MAX, context: arguments.chunk_size, ..arguments.model.engine() };
    let prepared = arguments.model.prepare(&options)?;
    let tokens = prepared.model.tokenizer()?.encode(&text, false);
    let tokens = first_chunks(&tokens, arguments.chunks, arguments.chunk_size);
    let (mut engine, _) = prepared.engine()?;
    let ctrl_c = interrupt::catch();
    let found = measure(&mut engine, tokens, arguments.chunk_size, &mut |chunk, so_far| {
        if !arguments.model.quiet {
            note!("chunk {chunk} of {}: {so_far:.4}", tokens.len() / arguments.chunk_size);
        }
        !ctrl_c.is_pressed()
    });
    if ctrl_c.is_pressed() {
        return Err(Failure::Interrupted);
    }
    let found = found?;
    let mut out = std::io::stdout().lock();
    if arguments.json {
        serde_json::to_writer(&mut out, &found)?;
        writeln!(out)?;
    } else {
        let tokens = plural(found.tokens, "token", "tokens");
        writeln!(out, "perplexity {:.4} over {tokens} ({:.5} nats a token)", found.perplexity, found.nll)?;
    }
    Ok(())
}

/// The text of a file.
pub(crate) fn read_text(path: &Path) -> Outcome<String> {
    let bytes = std::fs::read(path).map_err(|error| Failure::file("read", path, &error))?;
    piped_input::text(bytes, &path.display().to_string())
}

/// The tokens of the first chunks; all if `count` is 0.
pub(crate) fn first_chunks(tokens: &[u32], count: usize, chunk: usize) -> &[u32] {
    match count {
        0 => tokens,
        count => tokens.get(..count.saturating_mul(chunk)).unwrap_or(tokens),
    }
}

//! `quadriga perplexity`: how well a model predicts a text.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use quadriga_llm::EngineOptions;
use quadriga_models::quality::{ScoredTokens, chunk_tokens, perplexity as measure};
use quadriga_view::format::plural;

use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::{interrupt, piped_input, size, values};

/// Arguments of `quadriga perplexity`.
#[derive(clap::Args)]
pub(crate) struct PerplexityArgs {
    /// GGUF file of the model, also -m
    #[arg(value_name = "MODEL", conflicts_with_all = ["model", "hf_repo"])]
    model_file: Option<PathBuf>,
    /// File with the text, - for stdin
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Tokens of a chunk, also -c; each is computed from an empty context, and all of its tokens but the first are scored, unlike
    /// by llama-perplexity (--second-half); the first is the beginning-of-text token where the model uses one [default: 512]
    #[arg(long, value_name = "N", value_parser = values::at_least_one)]
    chunk_size: Option<usize>,
    /// Chunks to compute, 0 for all
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true, value_parser = values::count_or_all)]
    chunks: usize,
    /// Score the second half of each chunk only, as llama-perplexity does: the first half is context
    #[arg(long)]
    second_half: bool,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
}

/// Tokens of a chunk, unless the user says otherwise.
pub(crate) const CHUNK: usize = 512;

/// The tokens of a chunk: as given, or the context of `-c`, which is that of a chunk in llama.cpp's command.
pub(crate) fn chunk_size(given: Option<usize>, model: &ModelOptions) -> Outcome<usize> {
    match (given, model.context) {
        (Some(chunk), context) if context > 0 && context != chunk => Err(Failure::Usage(format!(
            "-c {context} and --chunk-size {chunk}: both are the tokens of a chunk; give one of them"
        ))),
        (Some(chunk), _) => Ok(chunk),
        (None, 0) => Ok(CHUNK),
        (None, context) => Ok(context),
    }
}

/// Prints the perplexity with its confidence interval.
pub(crate) fn perplexity(arguments: &PerplexityArgs) -> Outcome {
    let text = read_text(&arguments.file)?;
    let model = arguments.model.with_file(arguments.model_file.as_deref());
    let chunk = chunk_size(arguments.chunk_size, &arguments.model)?;
    if chunk < 2 {
        let why = "a chunk needs at least 2 tokens, because its first is not scored";
        return Err(Failure::Usage(format!("--chunk-size {chunk}: {why}")));
    }
    let options = EngineOptions { output_rows: usize::MAX, context: chunk, ..model.engine() };
    let prepared = model.prepare(&options)?;
    let tokens = chunk_tokens(prepared.model.tokenizer()?, &text, chunk);
    let tokens = first_chunks(&tokens, arguments.chunks, chunk);
    let (mut engine, _) = prepared.engine()?;
    let ctrl_c = interrupt::catch();
    let scored = if arguments.second_half { ScoredTokens::SecondHalf } else { ScoredTokens::All };
    let found = measure(&mut engine, tokens, chunk, scored, &mut |number, so_far| {
        if !arguments.model.quiet {
            note!("chunk {number} of {}: {so_far:.4}", tokens.len() / chunk);
        }
        !ctrl_c.is_pressed()
    });
    if ctrl_c.is_pressed() {
        return Err(Failure::Interrupted);
    }
    let found = found?;
    let mut out = std::io::stdout().lock();
    if arguments.json {
        let mut object = serde_json::to_value(&found)?;
        if let Some(object) = object.as_object_mut() {
            object.insert("chunk_size".to_owned(), chunk.into());
            let scored = match scored {
                ScoredTokens::All => "all tokens of a chunk but the first",
                ScoredTokens::SecondHalf => "the second half of a chunk but its first token",
            };
            object.insert("scored".to_owned(), scored.into());
        }
        serde_json::to_writer(&mut out, &object)?;
        writeln!(out)?;
    } else {
        let tokens = plural(found.tokens, "token", "tokens");
        writeln!(out, "perplexity {:.4} over {tokens} ({:.5} nats a token)", found.perplexity, found.nll)?;
        let chunks =
            plural(found.chunk_nll.len(), &format!("chunk of {chunk}"), &format!("chunks of {chunk}"));
        match scored {
            ScoredTokens::All => writeln!(
                out,
                "scored: all tokens but the first of each of {chunks}; llama-perplexity scores the second half of each only (--second-half)"
            )?,
            ScoredTokens::SecondHalf => {
                writeln!(
                    out,
                    "scored: the second half of each of {chunks}, but its first token, as by llama-perplexity"
                )?;
            }
        }
    }
    Ok(())
}

/// The most bytes of a text: one that has more is a mistake, such as a device without an end.
const TEXT_BYTES: u64 = 1 << 30;

/// The text of a file, - for standard input.
pub(crate) fn read_text(path: &Path) -> Outcome<String> {
    let read = match path.as_os_str() == "-" {
        true => read_limited(std::io::stdin().lock(), TEXT_BYTES),
        false => std::fs::File::open(path).and_then(|file| read_limited(file, TEXT_BYTES)),
    };
    let bytes = read.map_err(|error| Failure::file("read", path, &error))?;
    piped_input::text(bytes, &path.display().to_string())
}

/// All bytes of a file, unless it has more than a text.
fn read_limited(file: impl Read, most: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        let text = format!("it has more than {}, the most of a text; is it one?", size::text(most));
        return Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, text));
    }
    Ok(bytes)
}

/// The tokens of the first chunks; all if `count` is 0.
pub(crate) fn first_chunks(tokens: &[u32], count: usize, chunk: usize) -> &[u32] {
    match count {
        0 => tokens,
        count => tokens.get(..count.saturating_mul(chunk)).unwrap_or(tokens),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_an_end_is_no_text() {
        assert_eq!(read_limited(&b"abc"[..], 3).unwrap(), b"abc");
        let error = read_limited(std::io::repeat(b'a'), 3).unwrap_err();
        assert!(error.to_string().contains("more than"), "{error}");
    }
}

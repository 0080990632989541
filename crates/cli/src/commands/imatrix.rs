//! `quadriga imatrix`: computes or merges importance matrices.

use std::path::{Path, PathBuf};

use quadriga_llm::EngineOptions;
use quadriga_models::check_output;
use quadriga_models::importance::{ImportanceMatrix, collect};
use quadriga_models::quality::chunk_tokens;
use quadriga_view::format::plural;

use super::perplexity::{chunk_size, read_text};
use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::output_check::{check_folder, model_files};
use crate::{interrupt, values};

/// Arguments of `quadriga imatrix`.
#[derive(clap::Args)]
pub(crate) struct ImatrixArgs {
    /// GGUF file of the model, also -m
    #[arg(value_name = "MODEL", conflicts_with_all = ["model", "hf_repo"])]
    model_file: Option<PathBuf>,
    /// File with the text
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// File for the importance matrix
    #[arg(short, long, value_name = "FILE", default_value = "imatrix.gguf")]
    output: PathBuf,
    /// Add to these importance matrices of the same model; without a text, merge them
    #[arg(long, value_name = "FILE")]
    in_file: Vec<PathBuf>,
    /// Tokens of a chunk of the text, also -c; the first is the beginning-of-text token where the model uses one [default: 512]
    #[arg(long, value_name = "N", value_parser = values::at_least_one)]
    chunk_size: Option<usize>,
    /// Chunks to compute, 0 for all
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true, value_parser = values::count_or_all)]
    chunks: usize,
    /// Chunks to skip at the beginning of the text [default: 0; with --resume, as many as the first run]
    #[arg(long, visible_alias = "chunk", value_name = "N")]
    from_chunk: Option<usize>,
    /// Continue the file of an interrupted run with the chunks that it does not have yet; text, size of chunks and --in-file are
    /// those of the first run
    #[arg(long)]
    resume: bool,
    /// Write the file after every N chunks
    #[arg(long, visible_alias = "output-frequency", value_name = "N", default_value_t = 10, value_parser = values::at_least_one)]
    save_every: usize,
    /// llama.cpp's options without effect: the output matrix is always measured, and perplexity never
    #[arg(long, hide = true)]
    process_output: bool,
    #[arg(long, hide = true)]
    no_ppl: bool,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
}

/// Computes, merges and writes.
pub(crate) fn imatrix(arguments: &ImatrixArgs) -> Outcome {
    let options_of_model = arguments.model.with_file(arguments.model_file.as_deref());
    let model = options_of_model.file().map(model_files).unwrap_or_default();
    check_output(&arguments.output, arguments.file.iter().chain(&model))?;
    check_folder(&arguments.output)?;
    let mut merged: Option<ImportanceMatrix> = None;
    let mut add = |path: &PathBuf| -> Outcome {
        let matrix = ImportanceMatrix::read(path)?;
        match &mut merged {
            Some(merged) => merged.merge(&matrix)?,
            None => merged = Some(matrix),
        }
        Ok(())
    };
    arguments.in_file.iter().try_for_each(&mut add)?;
    let mut done = 0;
    let resumed = arguments.resume && arguments.output.exists();
    if resumed {
        let matrix = ImportanceMatrix::read(&arguments.output)?;
        done = matrix.resumed_chunks();
        // The first run has added those of --in-file.
        check_merged(&arguments.in_file, &matrix, &arguments.output)?;
        merged = Some(matrix);
    }
    let Some(text_file) = &arguments.file else {
        let Some(merged) = merged.filter(|_| !arguments.in_file.is_empty()) else {
            return Err(Failure::Usage(
                "give a text with -f, or matrices to merge with --in-file".to_owned(),
            ));
        };
        merged.write(&arguments.output)?;
        if !arguments.model.quiet {
            note!("wrote {}: {}", arguments.output.display(), summary(&merged));
        }
        return Ok(());
    };
    let text = read_text(text_file)?;
    let name = text_file.display().to_string();
    let chunk_size = chunk_size(arguments.chunk_size, &arguments.model)?;
    let from = match merged.as_ref().filter(|_| resumed) {
        Some(matrix) => {
            let chunks = (chunk_size, arguments.from_chunk);
            matrix.check_resumable(&text, &name, chunks, &arguments.output)?
        }
        None => arguments.from_chunk.unwrap_or(0),
    };
    let options = EngineOptions { output_rows: usize::MAX, context: chunk_size, ..arguments.model.engine() };
    let prepared = options_of_model.prepare(&options)?;
    if let Some(matrix) = &merged {
        let path = if resumed { Some(&arguments.output) } else { arguments.in_file.first() };
        matrix.check_model(prepared.model.file(), path.unwrap_or(&arguments.output))?;
    }
    let tokens = chunk_tokens(prepared.model.tokenizer()?, &text, chunk_size);
    let skipped = from.saturating_add(done).saturating_mul(chunk_size).min(tokens.len());
    let mut rest = tokens.get(skipped..).unwrap_or_default();
    if arguments.chunks > 0 {
        let wanted = arguments.chunks.saturating_sub(done).saturating_mul(chunk_size);
        rest = rest.get(..wanted).unwrap_or(rest);
    }
    if rest.len() < chunk_size && resumed {
        let path = arguments.output.display();
        match arguments.chunks {
            wanted if (1..=done).contains(&wanted) => note!(
                "quadriga: {path} has {} of the text already, nothing is left of --chunks {wanted}; without --chunks, the rest is computed",
                plural(done, "chunk", "chunks")
            ),
            _ => note!("quadriga: {path} has all chunks of the text already"),
        }
        return Ok(());
    }
    if tokens.len() >= chunk_size && skipped.saturating_add(chunk_size) > tokens.len() {
        let chunks = tokens.len() / chunk_size;
        return Err(Failure::Usage(format!(
            "--from-chunk {from}: the text has {chunks} chunks, counted from 0"
        )));
    }
    let (mut engine, _) = prepared.engine()?;
    let ctrl_c = interrupt::catch();
    let total = rest.len() / chunk_size;
    let with_earlier = |matrix: ImportanceMatrix| -> Outcome<ImportanceMatrix> {
        let own = matrix.chunk_count.saturating_add(u32::try_from(done).unwrap_or(u32::MAX));
        let mut sum = match &merged {
            Some(earlier) => {
                let mut sum = earlier.clone();
                sum.merge(&matrix)?;
                sum
            }
            None => matrix,
        };
        (sum.text, sum.text_chunks) = (Some(ImportanceMatrix::text_id(&text)), own);
        sum.text_start = u32::try_from(from).ok();
        Ok(sum)
    };
    let mut failed = None;
    let matrix = collect(&mut engine, rest, chunk_size, &name, &mut |chunk, matrix| {
        if !arguments.model.quiet {
            note!("chunk {chunk} of {total}");
        }
        if chunk % arguments.save_every == 0 && chunk < total {
            let saved = with_earlier(matrix()).and_then(|sum| Ok(sum.write(&arguments.output)?));
            failed = saved.err();
        }
        failed.is_none() && !ctrl_c.is_pressed()
    })?;
    if let Some(failure) = failed {
        return Err(failure);
    }
    let matrix = with_earlier(matrix)?;
    matrix.write(&arguments.output)?;
    if !arguments.model.quiet {
        note!("wrote {}: {}", arguments.output.display(), summary(&matrix));
    }
    if ctrl_c.is_pressed() {
        note!("quadriga: interrupted; --resume continues");
        return Err(Failure::Interrupted);
    }
    Ok(())
}

/// An error if one of these matrices is of a text that the file to continue has nothing of: it would not be added.
fn check_merged(in_files: &[PathBuf], resumed: &ImportanceMatrix, path: &Path) -> Outcome {
    for in_file in in_files {
        let matrix = ImportanceMatrix::read(in_file)?;
        if let Some(name) = matrix.datasets.iter().find(|name| !resumed.datasets.contains(name)) {
            return Err(Failure::Usage(format!(
                "--resume continues {}, to which --in-file {} was not added: it has nothing of {name:?}; add it with a run without --resume",
                path.display(),
                in_file.display()
            )));
        }
    }
    Ok(())
}

fn summary(matrix: &ImportanceMatrix) -> String {
    let unused: usize =
        matrix.entries.values().map(|entry| entry.counts.iter().filter(|count| **count == 0.0).count()).sum();
    let unused = if unused > 0 {
        format!("; {} never used by the text", plural(unused, "expert matrix", "expert matrices"))
    } else {
        String::new()
    };
    format!(
        "{} from {} of {} tokens{unused}",
        plural(matrix.entries.len(), "weight", "weights"),
        plural(matrix.chunk_count as usize, "chunk", "chunks"),
        matrix.chunk_size
    )
}

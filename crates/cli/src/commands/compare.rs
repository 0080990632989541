//! `quadriga compare`: how far one model is from another.

use std::io::Write;
use std::path::{Path, PathBuf};

use quadriga_gguf::File;
use quadriga_llm::{Engine, EngineOptions};
use quadriga_models::check_output;
use quadriga_models::quality::{
    QualityError, TensorError, TextComparison, UnpairedTensors, check_vocabularies, chunk_tokens,
    compare_tensors, compare_texts, error_page,
};
use quadriga_view::format::plural;

use super::perplexity::{chunk_size, first_chunks, read_text};
use crate::atomic_file::AtomicFile;
use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::output_check::{check_folder, model_files};
use crate::{fetch, interrupt, values};

/// Arguments of `quadriga compare`.
#[derive(Clone, clap::Args)]
pub(crate) struct CompareArgs {
    /// GGUF file of the reference, such as the model before quantization, or the word default; left out with -hf, which names the
    /// reference then
    reference: PathBuf,
    /// GGUF file of the model to judge
    #[arg(required_unless_present = "hf_repo")]
    other: Option<PathBuf>,
    /// File with a text; without, only tensors are compared
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Tokens of a chunk, also -c; each is computed from an empty context, and begins with the beginning-of-text token where the
    /// model uses one [default: 512]
    #[arg(long, value_name = "N", value_parser = values::at_least_one)]
    chunk_size: Option<usize>,
    /// Chunks to compute, 0 for all
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true, value_parser = values::count_or_all)]
    chunks: usize,
    /// Print the error of every tensor
    #[arg(long)]
    tensors: bool,
    /// Write a page with the error of every layer as a picture
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
}

/// Compares texts and tensors.
pub(crate) fn compare(arguments: &CompareArgs) -> Outcome {
    let named = |path: &Path| fetch::model_path(path, arguments.model.cache_dir(), arguments.model.quiet);
    let hub = arguments.model.repository();
    let (reference, other) = match (hub, &arguments.other) {
        _ if arguments.model.has_file() && hub.is_none() => {
            return Err(Failure::Usage(
                "compare has no -m: give the two models as arguments, quadriga compare A B, or -hf ORG/REPO B"
                    .to_owned(),
            ));
        }
        (Some(_), Some(_)) => {
            return Err(Failure::Usage(format!(
                "-hf names the reference: leave {} out, or give both models as arguments, quadriga compare A B",
                arguments.reference.display()
            )));
        }
        (None, None) => return Err(Failure::Usage("the model to judge is missing".to_owned())),
        (hub, other) => (hub, other.as_ref().unwrap_or(&arguments.reference)),
    };
    if arguments.model.has_adapters() && arguments.file.is_none() {
        return Err(Failure::Usage(
            "--lora changes predictions only: give a text with -f, or merge it with `quadriga lora`"
                .to_owned(),
        ));
    }
    let reference_path = match reference {
        Some(name) => arguments.model.hub_path(name)?,
        None => named(&arguments.reference)?,
    };
    let other_path = named(other)?;
    if let Some(html) = &arguments.html {
        let models = [&reference_path, &other_path].into_iter().flat_map(|path| model_files(path));
        check_output(html, models.chain(arguments.file.clone()))?;
        check_folder(html)?;
    }
    let (reference, other) = (File::open(&reference_path)?, File::open(&other_path)?);
    check_vocabularies(&reference, &other)?;
    let text = match &arguments.file {
        Some(path) => Some(judge(
            &arguments.model,
            (&reference_path, &other_path),
            &read_text(path)?,
            (chunk_size(arguments.chunk_size, &arguments.model)?, arguments.chunks),
        )?),
        None => None,
    };
    let tensors = compare_tensors(&reference, &other)?;
    if tensors.is_empty() && text.is_none() {
        return Err(quadriga_models::Error::from(QualityError::NoTensorPairs).into());
    }
    let unpaired = UnpairedTensors::of(&reference, &other);
    if let Some(path) = &arguments.html {
        let title = format!("{} against {}", other_path.display(), reference_path.display());
        let page = error_page(&title, text.as_ref(), &tensors);
        AtomicFile::write_text(path, &page)?;
    }
    let mut out = std::io::stdout().lock();
    if arguments.json {
        serde_json::to_writer(
            &mut out,
            &serde_json::json!({ "text": text, "tensors": tensors, "unpaired": unpaired }),
        )?;
        writeln!(out)?;
        return Ok(());
    }
    if let Some(text) = &text {
        print_text(&mut out, text)?;
    }
    print_tensors(&mut out, &tensors, arguments.tensors || text.is_none())?;
    print_unpaired(&mut out, &unpaired)
}

/// Prints how many tensors were not compared, and the first of each kind.
fn print_unpaired(out: &mut dyn Write, unpaired: &UnpairedTensors) -> Outcome {
    let kinds = [
        ("only in the reference", &unpaired.reference),
        ("only in the other model", &unpaired.other),
        ("of different shapes or unknown types", &unpaired.different),
    ];
    for (kind, names) in kinds {
        if let Some(first) = names.first() {
            let tensors = plural(names.len(), "tensor is", "tensors are");
            writeln!(out, "not compared: {tensors} {kind}, such as {first}")?;
        }
    }
    Ok(())
}

/// The comparison of two files' predictions on a text.
pub(crate) fn judge(
    model: &ModelOptions,
    (reference, other): (&Path, &Path),
    text: &str,
    (chunk, chunks): (usize, usize),
) -> Outcome<TextComparison> {
    let engine = |path: &Path| -> Outcome<(Engine, Vec<u32>)> {
        let model = model.with_file(Some(path));
        let options = EngineOptions { output_rows: usize::MAX, context: chunk, ..model.engine() };
        let prepared = model.prepare(&options)?;
        let tokens = chunk_tokens(prepared.model.tokenizer()?, text, chunk);
        Ok((prepared.engine()?.0, tokens))
    };
    let (mut first, tokens) = engine(reference)?;
    let (mut second, others) = engine(other)?;
    if tokens != others {
        let at = tokens.iter().zip(&others).take_while(|(a, b)| a == b).count();
        let (first, second) = (tokens.get(at), others.get(at));
        let name = |token: Option<&u32>| token.map_or_else(|| "the end".to_owned(), u32::to_string);
        return Err(Failure::Message(format!(
            "the models divide the text into different tokens, from number {at} on ({} and {}): they cannot be compared",
            name(first),
            name(second)
        )));
    }
    let tokens = first_chunks(&tokens, chunks, chunk);
    let ctrl_c = interrupt::catch();
    let found = compare_texts(&mut first, &mut second, tokens, chunk, &mut |done, so_far| {
        if !model.quiet {
            note!("chunk {done} of {}: KL divergence {so_far:.5}", tokens.len() / chunk);
        }
        !ctrl_c.is_pressed()
    });
    if ctrl_c.is_pressed() { Err(Failure::Interrupted) } else { Ok(found?) }
}

/// Prints the comparison of predictions.
pub(crate) fn print_text(out: &mut dyn Write, text: &TextComparison) -> Outcome {
    writeln!(out, "perplexity of the reference  {:.4}", text.reference)?;
    writeln!(out, "perplexity                   {:.4}", text.other)?;
    writeln!(out, "ratio                        {:.5}", text.ratio)?;
    writeln!(out, "KL divergence, mean          {:.6}", text.divergence)?;
    writeln!(
        out,
        "  median, 99 %, largest      {:.6}, {:.6}, {:.6}",
        text.median, text.quantile99, text.largest
    )?;
    writeln!(
        out,
        "same most probable token     {:.3} % ± {:.3}",
        100.0 * text.same_top.mean,
        100.0 * text.same_top.margin
    )?;
    writeln!(out, "RMS change of probability    {:.3} %", 100.0 * text.probability_rms)?;
    writeln!(out, "over {}", plural(text.tokens, "token", "tokens"))?;
    Ok(())
}

/// Prints the errors of tensors: all, or the sum of them.
fn print_tensors(out: &mut dyn Write, tensors: &[TensorError], all: bool) -> Outcome {
    if all {
        writeln!(out, "{:<40} {:>7} {:>7} {:>11} {:>10}", "tensor", "from", "to", "RMS error", "relative")?;
        for tensor in tensors.iter().filter(|tensor| tensor.rms > 0.0) {
            writeln!(
                out,
                "{:<40} {:>7} {:>7} {:>11.4e} {:>8.3} %",
                tensor.name,
                tensor.reference,
                tensor.other,
                tensor.rms,
                100.0 * tensor.relative
            )?;
        }
    }
    if tensors.is_empty() {
        return Ok(());
    }
    let elements: u64 = tensors.iter().map(|tensor| tensor.elements).sum();
    let squares: f64 = tensors.iter().map(|tensor| tensor.rms * tensor.rms * tensor.elements as f64).sum();
    writeln!(out, "RMS error of all weights     {:.6e}", (squares / elements.max(1) as f64).sqrt())?;
    Ok(())
}

//! `quadriga embed`: a vector for each text.

use std::io::{self, Write};

use quadriga_llm::{Embedder, EmbedderOptions, EngineOptions, Pooling, cosine};
use serde_json::json;

use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::piped_input;

/// Arguments of `quadriga embed`.
#[derive(clap::Args)]
#[command(after_help = OUTPUT_FORMAT)]
pub(crate) struct EmbedArgs {
    /// Texts; without any, each line of stdin is one
    #[arg(value_name = "TEXT")]
    texts: Vec<String>,
    /// How the vectors of a text's tokens become one: mean, cls, last or rank [default: as the model says, else last]
    #[arg(long, value_name = "KIND", value_parser = pooling)]
    pooling: Option<Pooling>,
    /// Do not divide embeddings by their length
    #[arg(long)]
    no_normalize: bool,
    /// Print the cosine of each pair of texts in place of the embeddings
    #[arg(long)]
    similarity: bool,
    /// Rank the texts by how well they answer this, best first; the model must be a reranker
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["similarity", "pooling"])]
    query: Option<String>,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
}

/// The format of the output, for the help text.
const OUTPUT_FORMAT: &str = r#"Output is one JSON object:
  {"model": …, "pooling": "mean", "embeddings": [{"text": "a", "tokens": 3, "embedding": [0.1, …]}, …]}
  --similarity: {"model": …, "pooling": "mean", "texts": ["a", …], "similarity": [[1.0, 0.7, …], …]}
  --query:      {"model": …, "query": …, "ranking": [{"text": "b", "score": 4.2}, …]}"#;

fn pooling(name: &str) -> Result<Pooling, String> {
    name.parse().map_err(|_| "must be mean, cls, last or rank".to_owned())
}

/// Prints the embeddings, their similarity or a ranking as JSON.
pub(crate) fn embed(arguments: &EmbedArgs) -> Outcome {
    let texts =
        if arguments.texts.is_empty() { read_lines(arguments.model.quiet)? } else { arguments.texts.clone() };
    let engine = EngineOptions { hidden: true, ..arguments.model.engine() };
    let prepared = arguments.model.prepare(&engine)?;
    let (mut embedder, _) = prepared.embedder(EmbedderOptions {
        pooling: arguments.pooling,
        normalize: !arguments.no_normalize,
        context: prepared.options.context,
    })?;
    let name = prepared.title();
    let printed = match &arguments.query {
        Some(query) => ranking(&mut embedder, &name, query, &texts)?,
        None => embeddings(&mut embedder, &name, &texts, arguments.similarity)?,
    };
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, &printed)?;
    Ok(writeln!(out)?)
}

fn embeddings(
    embedder: &mut Embedder,
    model: &str,
    texts: &[String],
    similarity: bool,
) -> Outcome<serde_json::Value> {
    let mut vectors = Vec::new();
    for text in texts {
        let tokens = embedder.tokenize(text)?;
        let vector = embedder.embed_tokens(&tokens).map_err(|error| of_text(text, &error))?;
        vectors.push((text, tokens.len(), vector));
    }
    let kind = embedder.pooling();
    let pooling = Pooling::ALL.iter().find(|(known, _)| *known == kind).map_or("", |(_, name)| name);
    if similarity {
        let matrix: Vec<Vec<f64>> =
            vectors.iter().map(|(.., a)| vectors.iter().map(|(.., b)| cosine(a, b)).collect()).collect();
        return Ok(json!({ "model": model, "pooling": pooling, "texts": texts, "similarity": matrix }));
    }
    let list: Vec<_> = vectors
        .iter()
        .map(|(text, tokens, vector)| json!({ "text": text, "tokens": tokens, "embedding": vector }))
        .collect();
    Ok(json!({ "model": model, "pooling": pooling, "embeddings": list }))
}

fn ranking(
    embedder: &mut Embedder,
    model: &str,
    query: &str,
    texts: &[String],
) -> Outcome<serde_json::Value> {
    let mut scored = Vec::new();
    for text in texts {
        scored.push((embedder.rank(query, text).map_err(|error| of_text(text, &error))?, text));
    }
    scored.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    let list: Vec<_> = scored.iter().map(|(score, text)| json!({ "text": text, "score": score })).collect();
    Ok(json!({ "model": model, "query": query, "ranking": list }))
}

/// The error, with the beginning of the text that it is about.
fn of_text(text: &str, error: &quadriga_llm::Error) -> Failure {
    let beginning: String = text.chars().take(40).collect();
    Failure::Message(format!("\"{beginning}\": {error}"))
}

fn read_lines(quiet: bool) -> Outcome<Vec<String>> {
    let input = piped_input::read(!quiet)?.unwrap_or_default();
    let texts: Vec<String> = input.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect();
    if texts.is_empty() {
        return Err(Failure::Usage("there is no text: give TEXT, or lines on stdin".to_owned()));
    }
    Ok(texts)
}

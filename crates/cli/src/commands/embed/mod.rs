//! `quadriga embed`: a vector for each text.

mod output;
mod texts;

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Instant;

use quadriga_llm::{
    Embedder, EmbedderOptions, EngineOptions, Model, Pooling, can_rank, cosine, cut_tokens, pair_tokens,
    text_tokens,
};
use quadriga_view::format::plural;

use self::output::{OutputFormat, Ranked};
use crate::failure::{Failure, Outcome};
use crate::model_options::ModelOptions;
use crate::prepared_model::Prepared;
use crate::{model_argument, ranks};

/// Arguments of `quadriga embed`.
#[derive(clap::Args)]
#[command(after_help = OUTPUT_FORMAT)]
pub(crate) struct EmbedArgs {
    /// Texts; each line that is piped into the command is another one, and - stands for them. A first text that is a GGUF
    /// file is the model
    #[arg(value_name = "TEXT")]
    texts: Vec<String>,
    /// Texts, one in each line; stdin is not read
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// File with texts, one in each line; stdin is not read
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// How the vectors of a text's tokens become one: mean, cls, last, rank, or none for one of each token [default: as the
    /// model says, else mean for encoders and last for others]
    #[arg(long, value_name = "KIND", value_parser = pooling)]
    pooling: Option<Pooling>,
    /// Do not divide embeddings by their length
    #[arg(long)]
    no_normalize: bool,
    /// llama.cpp's option: 2 divides embeddings by their length, -1 does not
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = norm, hide = true)]
    embd_normalize: Option<i32>,
    /// Cut texts that are longer than the context; without it they are an error
    #[arg(long)]
    truncate: bool,
    /// Print the cosine of each pair of texts in place of the embeddings
    #[arg(long)]
    similarity: bool,
    /// Rank the texts by how well they answer this, best first: by a reranker's scores, or the cosine of embeddings
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with = "similarity")]
    query: Option<String>,
    /// Output as llama.cpp has it: array, or json
    #[arg(long, value_name = "FORMAT", value_enum, hide = true, conflicts_with_all = ["similarity", "query"])]
    embd_output_format: Option<OutputFormat>,
    /// No effect: the output is JSON
    #[arg(long, hide = true)]
    json: bool,
    #[command(flatten)]
    pub(crate) model: ModelOptions,
}

/// The format of the output, for the help text.
const OUTPUT_FORMAT: &str = r#"Output is one JSON object:
  {"model": …, "pooling": "mean", "embeddings": [{"text": "a", "tokens": 3, "embedding": [0.1, …]}, …]}
  --similarity: {"model": …, "pooling": "mean", "texts": ["a", …], "similarity": [[1.0, 0.7, …], …]}
  --query:      {"model": …, "query": …, "ranking": [{"text": "b", "index": 1, "score": 4.2}, …]}"#;

/// A kind of pooling by name.
pub(super) fn pooling(name: &str) -> Result<Pooling, String> {
    name.parse().map_err(|_| "must be mean, cls, last, rank or none".to_owned())
}

fn norm(text: &str) -> Result<i32, String> {
    match text.parse() {
        Ok(kind @ (-1 | 2)) => Ok(kind),
        _ => Err("must be 2 (divided by the length) or -1 (as they are)".to_owned()),
    }
}

/// Prints the embeddings, their similarity or a ranking as JSON.
pub(crate) fn embed(arguments: &EmbedArgs) -> Outcome {
    let (options, words) = model_argument::split(&arguments.model, &arguments.texts)?;
    // Only the first rank has standard input, and so knows the texts.
    let texts = if ranks::follows() { Vec::new() } else { texts::gather(arguments, words)? };
    let (model, opening) = options.open()?;
    let job = Job::new(arguments, &options, &model, &texts)?;
    let prepared = options.place(model, opening, &job.options.engine(&job.model))?;
    let (mut embedder, load_seconds) = prepared.embedder(job.options.clone())?;
    let started = Instant::now();
    let mut out = io::stdout().lock();
    let name = prepared.title();
    match &arguments.query {
        Some(query) => {
            let ranking = job.rank(&mut embedder, &texts)?;
            serde_json::to_writer(&mut out, &output::ranking(&name, query, &ranking))?;
        }
        None => {
            let vectors = embedder.embed_batch(&job.tokens)?;
            let counts = job.tokens.iter().map(Vec::len);
            let embedded = output::Embedded { model: &name, pooling: embedder.pooling(), width: job.width() };
            let list: Vec<_> = texts
                .iter()
                .zip(counts)
                .zip(&vectors)
                .map(|((t, n), v)| (t.as_str(), n, v.as_slice()))
                .collect();
            if arguments.similarity {
                embedded.write_similarity(&list, &mut out)?;
            } else {
                embedded.write(&list, arguments.embd_output_format, &mut out)?;
            }
        }
    }
    writeln!(out)?;
    if !options.quiet {
        job.summarize(&prepared, load_seconds, started.elapsed().as_secs_f64());
    }
    Ok(())
}

/// The texts as tokens, and the options that they need.
struct Job {
    model: Model,
    options: EmbedderOptions,
    /// The tokens of each text, with the query before them where a classification head ranks.
    tokens: Vec<Vec<u32>>,
    /// The query's tokens, where embeddings rank.
    query: Option<Vec<u32>>,
}

/// The most texts that a model with a KV cache computes at once.
const MAX_SEQUENCES: usize = 64;

impl Job {
    fn new(arguments: &EmbedArgs, options: &ModelOptions, model: &Model, texts: &[String]) -> Outcome<Job> {
        let hyper = model.hyperparameters();
        let trained = hyper.context;
        let limit = if options.context == 0 { trained } else { options.context };
        if hyper.pooling.is_none() && !hyper.encoder && !options.quiet {
            note!(
                "quadriga: this is not an embedding model: the hidden states of a model for text are used; embedding models such as bge or nomic-embed (-m FILE) do better"
            );
        }
        let by_head = can_rank(model) && arguments.pooling.is_none_or(|pooling| pooling == Pooling::Rank);
        let query = arguments.query.as_deref();
        check_pooling(arguments)?;
        let pair = query.filter(|_| by_head);
        let tokens = texts.iter().map(|text| match pair {
            Some(query) => pair_tokens(model, query, text),
            None => text_tokens(model, text),
        });
        let mut tokens = tokens.collect::<Result<Vec<_>, _>>()?;
        let mut query = query.filter(|_| !by_head).map(|query| text_tokens(model, query)).transpose()?;
        if arguments.truncate {
            let cut = tokens
                .iter_mut()
                .chain(&mut query)
                .filter_map(|tokens| cut_tokens(model, tokens, limit).then_some(()));
            let cut = cut.count();
            if cut > 0 && !options.quiet {
                note!(
                    "quadriga: {} cut to the context of {limit} tokens",
                    plural(cut, "text was", "texts were")
                );
            }
        }
        check(texts, &tokens, query.as_deref(), limit)?;
        let longest = tokens.iter().chain(&query).map(Vec::len).max().unwrap_or(1);
        let engine = options.engine();
        // The KV cache has room for a few batches.
        let sequences = (4 * engine.batch / longest.max(1)).clamp(1, MAX_SEQUENCES).min(texts.len());
        let mut agreed = [longest, sequences];
        ranks::from_first(&mut agreed)?;
        let [context, sequences] = agreed;
        let pooling = arguments
            .pooling
            .or((query.is_some() && hyper.pooling == Some(Pooling::Rank)).then_some(Pooling::Cls));
        Ok(Job {
            model: model.clone(),
            options: EmbedderOptions {
                pooling,
                normalize: !arguments.no_normalize && arguments.embd_normalize != Some(-1),
                engine: EngineOptions { context, sequences, ..engine },
            },
            tokens,
            query,
        })
    }

    fn width(&self) -> usize {
        self.model.hyperparameters().width
    }

    /// The texts by how well they answer the query, best first.
    fn rank<'t>(&self, embedder: &mut Embedder, texts: &'t [String]) -> Outcome<Vec<Ranked<'t>>> {
        let scores: Vec<f64> = match &self.query {
            None => embedder.rank_batch(&self.tokens)?.into_iter().map(f64::from).collect(),
            Some(query) => {
                let query = embedder.embed_tokens(query)?;
                embedder.embed_batch(&self.tokens)?.iter().map(|vector| cosine(&query, vector)).collect()
            }
        };
        let mut ranking: Vec<Ranked<'t>> = texts
            .iter()
            .zip(scores)
            .enumerate()
            .map(|(index, (text, score))| Ranked { text, index, score: score as f32 })
            .collect();
        ranking.sort_by(|a, b| b.score.total_cmp(&a.score));
        Ok(ranking)
    }

    /// Prints the speed and the memory.
    fn summarize(&self, prepared: &Prepared, load_seconds: f64, seconds: f64) {
        let tokens: usize = self.tokens.iter().chain(&self.query).map(Vec::len).sum();
        note!(
            "{} · load {load_seconds:.2} s · {}, {}, {:.1} tok/s\nmemory: {}",
            prepared.title(),
            plural(self.tokens.len(), "text", "texts"),
            plural(tokens, "token", "tokens"),
            tokens as f64 / seconds.max(1e-9),
            prepared.memory()
        );
    }
}

/// An error if texts are to be compared by their vectors, of which each has many.
fn check_pooling(arguments: &EmbedArgs) -> Outcome {
    let option = match (arguments.similarity, arguments.query.is_some()) {
        (true, _) => "--similarity",
        (_, true) => "--query",
        _ => return Ok(()),
    };
    if arguments.pooling != Some(Pooling::None) {
        return Ok(());
    }
    Err(Failure::Usage(format!(
        "{option} needs one vector for each text: --pooling none has one for each token"
    )))
}

/// An error that names all texts that cannot be computed, before any is.
fn check(texts: &[String], tokens: &[Vec<u32>], query: Option<&[u32]>, limit: usize) -> Outcome {
    let too_long = |tokens: &[u32]| tokens.len() > limit;
    if query.is_some_and(too_long) {
        return Err(Failure::Message(format!("the query has more tokens than the context of {limit}")));
    }
    if let Some(number) = tokens.iter().position(Vec::is_empty) {
        return Err(Failure::Usage(format!("text {} is empty", number + 1)));
    }
    let long: Vec<String> = texts
        .iter()
        .zip(tokens)
        .zip(1..)
        .filter(|((_, tokens), _)| too_long(tokens))
        .map(|((text, tokens), number)| {
            let beginning: String = text.chars().take(30).collect();
            let dots = if beginning.len() < text.len() { "…" } else { "" };
            format!("text {number} (\"{beginning}{dots}\", {} tokens)", tokens.len())
        })
        .collect();
    match long.as_slice() {
        [] => Ok(()),
        [one] => Err(Failure::Message(format!(
            "{one} is longer than the context of {limit} tokens; --truncate cuts it"
        ))),
        many => {
            let (shown, more) = many.split_at(many.len().min(5));
            let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
            Err(Failure::Message(format!(
                "{}{more} are longer than the context of {limit} tokens; --truncate cuts them",
                shown.join(", ")
            )))
        }
    }
}

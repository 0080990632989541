//! Embeddings: a vector for each text.

use quadriga_runtime::{PlanKey, Progress, Scheduler, Session};

use crate::hyperparameters::Pooling;
use crate::models::GraphShape;
use crate::{BatchToken, Engine, EngineOptions, Error, Model, Result};

/// The options of an [`Embedder`].
#[derive(Clone, Debug)]
pub struct EmbedderOptions {
    /// How the vectors of a text's tokens become one; as the file says if `None`, and the last token's where it does not.
    pub pooling: Option<Pooling>,
    /// Whether embeddings are divided by their length, so that the product of two is their cosine.
    pub normalize: bool,
    /// The largest number of tokens of a text; as the model was trained if 0.
    pub context: usize,
}

impl Default for EmbedderOptions {
    fn default() -> Self {
        EmbedderOptions { pooling: None, normalize: true, context: 0 }
    }
}

/// Computes embeddings of texts, with an encoder such as BERT or with the hidden states of any other model.
///
/// ```no_run
/// use quadriga_llm::{Embedder, EmbedderOptions, Model, Placement};
///
/// let model = Model::open("all-MiniLM-L6-v2.gguf")?;
/// let options = EmbedderOptions::default();
/// let (placement, engine) = (Placement::default(), options.engine(&model));
/// let placed = placement.plan(&model, &placement.open_devices()?, &engine)?;
/// let mut embedder = Embedder::new(model, &placed.scheduler, options, &mut |_| {})?;
/// let (cat, dog) = (embedder.embed("a cat")?, embedder.embed("a dog")?);
/// println!("{}", quadriga_llm::cosine(&cat, &dog));
/// # Ok::<(), quadriga_llm::Error>(())
/// ```
pub struct Embedder {
    model: Model,
    runner: Runner,
    pooling: Pooling,
    normalize: bool,
    context: usize,
}

/// What computes the vectors of a text's tokens.
enum Runner {
    /// An encoder sees a text as a whole.
    Encoder(Box<Session>),
    /// Other models have a KV cache, and compute long texts in batches.
    Decoder(Box<Engine>),
}

impl EmbedderOptions {
    /// The options of an engine for the model, for [`Placement::plan`](crate::Placement::plan).
    pub fn engine(&self, model: &Model) -> EngineOptions {
        let trained = model.hyperparameters().context;
        let context = if self.context == 0 { trained } else { self.context };
        EngineOptions { context, hidden: true, ..EngineOptions::default() }
    }
}

impl Embedder {
    /// Plans the model for the scheduler's backends and loads the weights; `progress` is called meanwhile.
    ///
    /// # Errors
    /// [`Error::NoClassificationHead`] if the pooling is [`Pooling::Rank`] and the model cannot rank; [`Error::Option`] if
    /// the context is longer than an encoder's.
    pub fn new(
        model: Model,
        scheduler: &Scheduler,
        options: EmbedderOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Embedder> {
        let hyper = model.hyperparameters();
        let engine = options.engine(&model);
        let context = engine.context;
        if hyper.encoder && context > hyper.context {
            return Err(Error::Option {
                name: "the context",
                value: context.to_string(),
                wanted: "at most what the encoder was trained with",
            });
        }
        let pooling = options.pooling.or(hyper.pooling).unwrap_or(Pooling::Last);
        if pooling == Pooling::Rank && !has_head(&model) {
            return Err(Error::NoClassificationHead);
        }
        let runner = if hyper.encoder {
            model.file().check_mapped()?;
            let mut session = Session::new(scheduler)?;
            prepare(&mut session, &model, 1, progress)?;
            Runner::Encoder(Box::new(session))
        } else {
            Runner::Decoder(Box::new(Engine::new(model.clone(), scheduler, engine, progress)?))
        };
        Ok(Embedder { model, runner, pooling, normalize: options.normalize, context })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// How the vectors of a text's tokens become one.
    pub fn pooling(&self) -> Pooling {
        self.pooling
    }

    /// The tokens of a text, with those that the model expects before and after it.
    pub fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.model.tokenizer()?.encode_sequence(text, false))
    }

    /// The embedding of a text; with [`Pooling::Rank`] the scores of the classification head.
    pub fn embed(&mut self, text: &str) -> Result<Vec<f32>> {
        let tokens = self.tokenize(text)?;
        self.embed_tokens(&tokens)
    }

    /// How well a document answers a query, by the classification head: the larger the better. The query, a separator and
    /// the document are one text.
    pub fn rank(&mut self, query: &str, document: &str) -> Result<f32> {
        let (mut tokens, second) = (self.tokenize(query)?, self.tokenize(document)?);
        // The second text continues the first: it has no token for the beginning.
        let repeats = self.model.tokenizer()?.adds_bos() && second.len() > 1;
        tokens.extend(second.iter().skip(usize::from(repeats)));
        let scores = self.scores(&tokens)?;
        scores.first().copied().ok_or(Error::EmptyPrompt)
    }

    /// As [`Embedder::embed`], for tokens.
    pub fn embed_tokens(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        if self.pooling == Pooling::Rank {
            return self.scores(tokens);
        }
        let hidden = self.run(tokens, "hidden")?;
        let mut embedding = pool(&hidden, self.model.hyperparameters().width, self.pooling);
        if self.normalize {
            normalize(&mut embedding);
        }
        Ok(embedding)
    }

    fn scores(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        if !has_head(&self.model) {
            return Err(Error::NoClassificationHead);
        }
        self.run(tokens, "rank")
    }

    /// One of the graph's outputs for a text.
    fn run(&mut self, tokens: &[u32], output: &str) -> Result<Vec<f32>> {
        let hyper = self.model.hyperparameters();
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if tokens.len() > self.context {
            return Err(Error::ContextFull { wanted: tokens.len(), used: 0, context: self.context });
        }
        if let Some(token) = tokens.iter().find(|token| **token as usize >= hyper.vocabulary) {
            return Err(Error::Token { token: *token, count: hyper.vocabulary });
        }
        match &mut self.runner {
            Runner::Encoder(session) => {
                self.model.file().check_mapped()?;
                prepare(session, &self.model, tokens.len(), &mut |_| {})?;
                let ids: Vec<i32> = tokens.iter().map(|token| *token as i32).collect();
                let positions: Vec<i32> = (0..tokens.len() as i32).collect();
                session.set("tokens", ids.as_slice())?;
                session.set("positions", positions.as_slice())?;
                session.start()?;
                Ok(session.read(output)?)
            }
            Runner::Decoder(engine) => {
                let batch: Vec<BatchToken> = tokens
                    .iter()
                    .map(|token| BatchToken { sequence: 0, token: *token, output: true })
                    .collect();
                engine.truncate(0, 0);
                engine.extend(&batch)?;
                Ok((0..tokens.len()).flat_map(|row| engine.hidden(row).to_vec()).collect())
            }
        }
    }
}

fn has_head(model: &Model) -> bool {
    let has = |name: &str| model.file().find_tensor(name).is_some();
    model.hyperparameters().encoder && (has("cls.weight") || has("cls.output.weight"))
}

/// Plans an encoder's graph for texts of so many tokens.
fn prepare(
    session: &mut Session,
    model: &Model,
    tokens: usize,
    progress: &mut dyn FnMut(Progress),
) -> Result<()> {
    let shape = GraphShape::new(tokens, model.hyperparameters().context);
    Ok(session.prepare_with(PlanKey([tokens as u64, 0, 0, 0]), || model.graph(shape), progress)?)
}

/// One vector of those of all tokens.
fn pool(hidden: &[f32], width: usize, pooling: Pooling) -> Vec<f32> {
    let mut rows = hidden.chunks_exact(width.max(1));
    match pooling {
        Pooling::Mean => {
            let count = rows.len().max(1) as f64;
            let mut sums = vec![0.0_f64; width];
            for row in rows {
                sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
            }
            sums.into_iter().map(|sum| (sum / count) as f32).collect()
        }
        Pooling::Cls | Pooling::Rank => rows.next().unwrap_or_default().to_vec(),
        Pooling::Last => rows.next_back().unwrap_or_default().to_vec(),
    }
}

fn length(vector: &[f32]) -> f64 {
    vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt()
}

/// Divides a vector by its length; one of length 0 stays.
fn normalize(vector: &mut [f32]) {
    let length = length(vector);
    if length > 0.0 {
        vector.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
}

/// The cosine of the angle between two vectors: 1 for equal directions. 0 if either has length 0.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let product: f64 = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    let lengths = length(a) * length(b);
    if lengths > 0.0 { product / lengths } else { 0.0 }
}

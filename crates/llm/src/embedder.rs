//! Embeddings: a vector for each text.

mod encoder;

use quadriga_runtime::{Progress, Scheduler};

use self::encoder::EncoderRunner;
use crate::hyperparameters::Pooling;
use crate::{BatchToken, Engine, EngineOptions, Error, Model, Result};

/// The options of an [`Embedder`].
#[derive(Clone, Debug)]
pub struct EmbedderOptions {
    /// How the vectors of a text's tokens become one; as the file says if `None`. Where it does not, encoders take the mean,
    /// other models the last.
    pub pooling: Option<Pooling>,
    /// Whether embeddings are divided by their length, so that the product of two is their cosine.
    pub normalize: bool,
    /// The capacity. The context is the largest number of tokens of a text, as the model was trained if 0; up to a batch of
    /// tokens are computed at once, of as many texts as there are sequences. Encoders need no sequences for that.
    pub engine: EngineOptions,
}

impl Default for EmbedderOptions {
    fn default() -> Self {
        EmbedderOptions { pooling: None, normalize: true, engine: EngineOptions::default() }
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
    Encoder(Box<EncoderRunner>),
    /// Other models have a KV cache, and compute long texts in batches.
    Decoder(Box<Engine>),
}

impl EmbedderOptions {
    /// The options of an engine for the model, for [`Placement::plan`](crate::Placement::plan).
    pub fn engine(&self, model: &Model) -> EngineOptions {
        let trained = model.hyperparameters().context;
        let context = if self.engine.context == 0 { trained } else { self.engine.context };
        EngineOptions {
            context,
            hidden: true,
            output_rows: usize::MAX,
            logits: false,
            greedy: false,
            checkpoints: 0,
            ..self.engine.clone()
        }
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
        let pooling = options.pooling.or(hyper.pooling).unwrap_or(if hyper.encoder {
            Pooling::Mean
        } else {
            Pooling::Last
        });
        if pooling == Pooling::Rank && !can_rank(&model) {
            return Err(Error::NoClassificationHead);
        }
        let runner = if hyper.encoder {
            let limit = engine.resolve(&model)?.batch;
            Runner::Encoder(Box::new(EncoderRunner::new(&model, scheduler, limit, progress)?))
        } else {
            Runner::Decoder(Box::new(Engine::new(model.clone(), scheduler, engine, progress)?))
        };
        Ok(Embedder { model, runner, pooling, normalize: options.normalize, context })
    }

    /// Computes what the first rank's embedder computes, until that is dropped: for every other rank of several.
    ///
    /// # Errors
    /// The model is not divided, or ranks could not compute or exchange data.
    pub fn follow_ranks(&mut self) -> Result<()> {
        match &mut self.runner {
            Runner::Decoder(engine) => engine.follow(),
            Runner::Encoder(_) => {
                Err(Error::Encoder { architecture: self.model.hyperparameters().architecture })
            }
        }
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
        text_tokens(&self.model, text)
    }

    /// The embedding of a text; with [`Pooling::Rank`] the scores of the classification head, with [`Pooling::None`] the
    /// vectors of all tokens, one after another.
    ///
    /// # Errors
    /// [`Error::Embedding`] if they are not finite.
    pub fn embed(&mut self, text: &str) -> Result<Vec<f32>> {
        let tokens = self.tokenize(text)?;
        self.embed_tokens(&tokens)
    }

    /// How well a document answers a query, by the classification head: the larger the better. The query, a separator and
    /// the document are one text.
    pub fn rank(&mut self, query: &str, document: &str) -> Result<f32> {
        let tokens = pair_tokens(&self.model, query, document)?;
        self.rank_batch(&[tokens])?.first().copied().ok_or(Error::EmptyPrompt)
    }

    /// As [`Embedder::embed`], for tokens.
    pub fn embed_tokens(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        Ok(self.embed_batch(&[tokens])?.pop().unwrap_or_default())
    }

    /// As [`Embedder::embed`], for the tokens of several texts, which are computed together.
    ///
    /// ```no_run
    /// # fn example(embedder: &mut quadriga_llm::Embedder) -> Result<(), quadriga_llm::Error> {
    /// let texts = [embedder.tokenize("a cat")?, embedder.tokenize("a dog")?];
    /// let vectors = embedder.embed_batch(&texts)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn embed_batch(&mut self, texts: &[impl AsRef<[u32]>]) -> Result<Vec<Vec<f32>>> {
        self.embed_batch_with(texts, self.normalize)
    }

    /// As [`Embedder::embed_batch`], normalized or not whatever [the options](EmbedderOptions::normalize) say.
    pub fn embed_batch_with(
        &mut self,
        texts: &[impl AsRef<[u32]>],
        normalize_each: bool,
    ) -> Result<Vec<Vec<f32>>> {
        if self.pooling == Pooling::Rank {
            return self.scores(texts);
        }
        let texts = self.checked(texts)?;
        let mut embeddings = Vec::with_capacity(texts.len());
        for group in self.groups(&texts) {
            embeddings.extend(self.embed_group(group)?);
        }
        if normalize_each {
            let width = self.model.hyperparameters().width.max(1);
            embeddings.iter_mut().flat_map(|vector| vector.chunks_mut(width)).for_each(normalize);
        }
        finite(embeddings)
    }

    /// How well documents answer queries, for the tokens of [pairs](pair_tokens) of both, which are computed together.
    pub fn rank_batch(&mut self, pairs: &[impl AsRef<[u32]>]) -> Result<Vec<f32>> {
        let scores = self.scores(pairs)?;
        scores.iter().map(|scores| scores.first().copied().ok_or(Error::EmptyPrompt)).collect()
    }

    fn scores(&mut self, texts: &[impl AsRef<[u32]>]) -> Result<Vec<Vec<f32>>> {
        let texts = self.checked(texts)?;
        let mut scores = Vec::with_capacity(texts.len());
        for group in self.groups(&texts) {
            match &mut self.runner {
                Runner::Encoder(runner) if can_rank(&self.model) => {
                    scores.extend(runner.scores(&self.model, group)?);
                }
                _ => return Err(Error::NoClassificationHead),
            }
        }
        finite(scores)
    }

    /// The texts, if each can be computed.
    fn checked<'t>(&self, texts: &'t [impl AsRef<[u32]>]) -> Result<Vec<&'t [u32]>> {
        let count = self.model.hyperparameters().vocabulary;
        let check = |tokens: &'t [u32]| {
            if tokens.is_empty() {
                return Err(Error::EmptyPrompt);
            }
            if tokens.len() > self.context {
                return Err(Error::ContextFull { wanted: tokens.len(), used: 0, context: self.context });
            }
            match tokens.iter().find(|token| **token as usize >= count) {
                Some(token) => Err(Error::Token { token: *token, count }),
                None => Ok(tokens),
            }
        };
        texts.iter().map(|text| check(text.as_ref())).collect()
    }

    /// How many of these texts, from the first on, are computed together: a batch for callers that look after other things
    /// between batches. At least one, unless there are none.
    pub fn first_batch(&self, texts: &[impl AsRef<[u32]>]) -> usize {
        let (tokens, count) = match &self.runner {
            Runner::Encoder(runner) => (runner.limit(), usize::MAX),
            Runner::Decoder(engine) => (engine.options().batch, engine.options().sequences),
        };
        let mut sum = 0;
        let fits = texts.iter().take(count).take_while(|text| {
            sum += text.as_ref().len();
            sum <= tokens
        });
        fits.count().max(1).min(texts.len())
    }

    /// The texts in groups that are computed together.
    fn groups<'a, 't>(&self, texts: &'a [&'t [u32]]) -> Vec<&'a [&'t [u32]]> {
        let (mut groups, mut rest) = (Vec::new(), texts);
        while !rest.is_empty() {
            let (group, after) = rest.split_at(self.first_batch(rest));
            groups.push(group);
            rest = after;
        }
        groups
    }

    /// The pooled vectors of a group of texts.
    fn embed_group(&mut self, texts: &[&[u32]]) -> Result<Vec<Vec<f32>>> {
        let (width, pooling) = (self.model.hyperparameters().width.max(1), self.pooling);
        let engine = match &mut self.runner {
            Runner::Encoder(runner) => {
                let hidden = runner.hidden(&self.model, texts)?;
                let mut rest = hidden.as_slice();
                return Ok(texts
                    .iter()
                    .map(|text| {
                        let (own, after) = rest.split_at_checked(text.len() * width).unwrap_or((rest, &[]));
                        rest = after;
                        pool(own, width, pooling)
                    })
                    .collect());
            }
            Runner::Decoder(engine) => engine,
        };
        let is_output = |position: usize, len: usize| match pooling {
            Pooling::Last => position + 1 == len,
            Pooling::Cls => position == 0,
            Pooling::Mean | Pooling::None | Pooling::Rank => true,
        };
        let mut batch = Vec::new();
        for (sequence, text) in texts.iter().enumerate() {
            engine.truncate(sequence, 0);
            batch.extend(text.iter().enumerate().map(|(position, token)| BatchToken {
                sequence,
                token: *token,
                output: is_output(position, text.len()),
            }));
        }
        engine.extend(&batch)?;
        let mut row = 0;
        Ok(texts
            .iter()
            .map(|text| {
                let rows = (0..text.len()).filter(|position| is_output(*position, text.len())).count();
                let hidden: Vec<f32> =
                    (row..row + rows).flat_map(|row| engine.hidden(row)).copied().collect();
                row += rows;
                pool(&hidden, width, pooling)
            })
            .collect())
    }
}

/// The tokens of a text for an [`Embedder`], with those that the model expects before and after it.
pub fn text_tokens(model: &Model, text: &str) -> Result<Vec<u32>> {
    Ok(model.tokenizer()?.encode_sequence(text, false))
}

/// The tokens of a query, a separator and a document, for [`Embedder::rank_batch`].
pub fn pair_tokens(model: &Model, query: &str, document: &str) -> Result<Vec<u32>> {
    Ok(model.tokenizer()?.encode_pair(query, document))
}

/// Cuts tokens to this number, but keeps the separator at their end. Whether any were cut.
pub fn cut_tokens(model: &Model, tokens: &mut Vec<u32>, len: usize) -> bool {
    if tokens.len() <= len {
        return false;
    }
    let end = tokens
        .last()
        .copied()
        .filter(|last| model.tokenizer().is_ok_and(|t| t.sequence_end() == Some(*last)));
    tokens.truncate(len);
    if let (Some(end), Some(last)) = (end, tokens.last_mut()) {
        *last = end;
    }
    true
}

/// Whether a model has a classification head, so that it ranks documents for a query.
pub fn can_rank(model: &Model) -> bool {
    let has = |name: &str| model.file().find_tensor(name).is_some();
    model.hyperparameters().encoder && (has("cls.weight") || has("cls.output.weight"))
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
        Pooling::None => hidden.to_vec(),
        Pooling::Cls | Pooling::Rank => rows.next().unwrap_or_default().to_vec(),
        Pooling::Last => rows.next_back().unwrap_or_default().to_vec(),
    }
}

/// One vector of those of all tokens, of length 1 if it is normalized; with [`Pooling::None`] all of them.
pub(crate) fn pooled_embedding(
    hidden: &[f32],
    width: usize,
    pooling: Pooling,
    normalized: bool,
) -> Result<Vec<f32>> {
    let mut vector = pool(hidden, width, pooling);
    if normalized {
        vector.chunks_mut(width.max(1)).for_each(normalize);
    }
    Ok(finite(vec![vector])?.pop().unwrap_or_default())
}

/// The results of texts, if all are finite.
fn finite(results: Vec<Vec<f32>>) -> Result<Vec<Vec<f32>>> {
    for (text, values) in results.iter().enumerate() {
        if let Some((index, value)) = values.iter().enumerate().find(|(_, value)| !value.is_finite()) {
            return Err(Error::Embedding { text, index, value: *value });
        }
    }
    Ok(results)
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
    if lengths > 0.0 { (product / lengths).clamp(-1.0, 1.0) } else { 0.0 }
}

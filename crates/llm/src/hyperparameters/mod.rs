//! A model's hyperparameters: read from the metadata of its file, and checked.

mod activation;
mod biases;
mod cache_rows;
mod experts;
mod keys;
mod latent;
mod layer;
mod neurons;
mod pooling;
mod prediction;
mod recurrent;
mod rope;
mod streams;
mod temperature;
mod unread;
mod window;

use std::ops::Range;

use quadriga_graph::Pairing;

pub(crate) use self::activation::Activation;
pub(crate) use self::biases::require_bias;
pub use self::cache_rows::CacheRows;
pub(crate) use self::cache_rows::DEFAULT_CONTEXT;
pub(crate) use self::experts::ExpertDefaults;
pub use self::experts::{Experts, Gating};
pub(crate) use self::keys::Keys;
pub use self::latent::LatentAttention;
pub(crate) use self::layer::LayerCaches;
pub use self::layer::LayerShape;
pub use self::pooling::Pooling;
pub use self::recurrent::{LinearAttention, RecurrentShape};
pub(crate) use self::rope::{LONG_FACTORS, SHORT_FACTORS};
pub use self::streams::ParallelStreams;
pub use self::temperature::AttentionTemperature;
pub(crate) use self::temperature::QUERY_FACTORS;
pub(crate) use self::window::WindowPattern;
pub use self::window::WindowSpan;
use crate::{Error, Result};

/// How a model normalizes its activations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NormKind {
    /// Divided by the root mean square.
    Rms,
    /// To mean 0 and variance 1.
    Layer,
}

impl NormKind {
    /// The key of the epsilon.
    fn key(self) -> &'static str {
        match self {
            NormKind::Rms => "attention.layer_norm_rms_epsilon",
            NormKind::Layer => "attention.layer_norm_epsilon",
        }
    }
}

/// The hyperparameters of a model.
#[derive(Clone, PartialEq, Debug)]
pub struct Hyperparameters {
    /// The architecture's name in GGUF files.
    pub architecture: &'static str,
    /// The shape of each layer.
    pub layers: Vec<LayerShape>,
    /// Blocks in the file: the layers, and those after them that only predict more than one token at once. Those are not
    /// used.
    pub blocks: usize,
    /// The width of the residual stream (the embedding length).
    pub width: usize,
    /// Tokens in the vocabulary: rows of the embedding.
    pub vocabulary: usize,
    /// The context length that the model was trained with.
    pub context: usize,
    /// The kind of the norms.
    pub norm: NormKind,
    /// The epsilon of the norms.
    pub norm_epsilon: f32,
    /// The factor of the embedded tokens.
    pub embedding_scale: f32,
    /// The factor of each branch that is added to the residual stream.
    pub residual_scale: f32,
    /// The factor of the logits.
    pub logit_scale: f32,
    /// The limit `c` of logits `c · tanh(x / c)`, if there is one.
    pub logit_soft_cap: Option<f32>,
    /// The factor of attention scores; `1 / √key_length` if `None`.
    pub attention_scale: Option<f32>,
    /// The limit `c` of attention scores `c · tanh(x / c)`, if there is one.
    pub attention_soft_cap: Option<f32>,
    /// Whether the model is an encoder: tokens see the whole text, and the results are vectors in place of logits.
    pub encoder: bool,
    /// How the model makes one vector of a text, if it was trained for that.
    pub pooling: Option<Pooling>,
    /// The shape of the layers without attention, if there are any.
    pub recurrent: Option<RecurrentShape>,
    /// Whether windows are chunks: a query attends to the positions of its own chunk instead of the latest ones.
    pub chunked_windows: bool,
    /// The growth of queries with their position in layers without rotary embedding, in models that have it.
    pub temperature: Option<AttentionTemperature>,
    /// Whether each head has an attention sink: a score in the softmax's denominator.
    pub attention_sinks: bool,
    /// Whether the feed-forward networks are rectified, in architectures whose networks may be: most neurons are inactive
    /// then, and their rows need not be read.
    pub rectified: bool,
    /// The score above which a neuron is predicted to be active, in files with predictors.
    pub predictor_threshold: Option<f32>,
    /// Multi-head latent attention, in models that have it.
    pub latent: Option<LatentAttention>,
    /// Parallel residual streams, in models that have them.
    pub streams: Option<ParallelStreams>,
}

impl Hyperparameters {
    /// Reads the keys that all architectures have. An architecture then changes what is special to it, and calls
    /// [`Hyperparameters::check`].
    pub(crate) fn read(keys: &Keys<'_>, pairing: Pairing, norm: NormKind) -> Result<Hyperparameters> {
        let blocks = keys.count("block_count")?;
        // Every block has tensors, so that a file cannot demand memory for more blocks than it can have.
        keys.check(
            "block_count",
            blocks,
            blocks <= keys.file().tensor_count() || !keys.has_tensors(),
            "at most the number of tensors",
        )?;
        let width = keys.count("embedding_length")?;
        let norm_epsilon = keys.float(norm.key())?;
        if !(0.0..1.0).contains(&norm_epsilon) {
            return Err(keys.wrong(norm.key(), norm_epsilon, "in 0..1"));
        }
        let context = keys.count("context_length")?;
        Ok(Hyperparameters {
            architecture: keys.architecture(),
            layers: read_layers(keys, pairing, blocks, width, context)?,
            blocks,
            width,
            vocabulary: vocabulary(keys, width)?,
            context,
            norm,
            norm_epsilon,
            embedding_scale: 1.0,
            residual_scale: 1.0,
            logit_scale: 1.0,
            logit_soft_cap: None,
            attention_scale: None,
            attention_soft_cap: None,
            encoder: false,
            pooling: Pooling::read(keys)?,
            recurrent: None,
            chunked_windows: false,
            temperature: None,
            attention_sinks: false,
            rectified: false,
            predictor_threshold: None,
            latent: None,
            streams: None,
        })
    }

    /// Checks the layers, after the architecture has set them.
    pub(crate) fn check(&self, keys: &Keys<'_>) -> Result<()> {
        self.layers.iter().try_for_each(|layer| layer.check(keys, self.width))?;
        self.check_predicting_blocks(keys)?;
        self.check_causality(keys)?;
        self.check_window_heads(keys)?;
        self.check_biases(keys)?;
        let mut windows = self.layers.iter().filter(|layer| layer.attention).filter_map(|layer| layer.window);
        match windows.find(|window| Some(*window) != self.window()) {
            Some(other) => Err(keys.wrong("attention.sliding_window", other, "the same in all layers")),
            None => Ok(()),
        }
    }

    /// An error if the file of a model that generates text says that its tokens see the whole text.
    fn check_causality(&self, keys: &Keys<'_>) -> Result<()> {
        let key = "attention.causal";
        match keys.find_flag(key)? {
            Some(false) if !self.encoder => {
                let wanted =
                    "absent or true: only encoders (bert, nomic-bert) attend to the tokens that follow";
                Err(keys.wrong(key, false, wanted))
            }
            _ => Ok(()),
        }
    }

    /// Whether a layer attends to all positions up to its query's.
    pub fn has_full_attention(&self) -> bool {
        !self.encoder && self.layers.iter().any(|layer| layer.attention && layer.window.is_none())
    }

    /// What some of the layers remember tokens by.
    pub(crate) fn caches_of(&self, layers: Range<usize>) -> LayerCaches {
        let layers = self.layers.get(layers).unwrap_or_default();
        let attends = |window: bool| {
            let has = |layer: &LayerShape| layer.attention && layer.window.is_some() == window;
            !self.encoder && layers.iter().any(has)
        };
        LayerCaches {
            full: attends(false),
            windows: attends(true),
            recurrent: self.recurrent.is_some() && layers.iter().any(|layer| !layer.attention),
        }
    }

    /// Whether the KV cache has one vector for each token, of which keys and values are made: it has no values of its own.
    pub fn has_latent_cache(&self) -> bool {
        self.latent.is_some()
    }

    /// The size of the sliding attention window of the layers that have one; `None` if none has.
    pub fn window(&self) -> Option<usize> {
        self.layers.iter().filter(|layer| layer.attention).find_map(|layer| layer.window)
    }
}

/// The blocks as the common keys describe them: all of them are layers, unless the architecture skips the last ones.
fn read_layers(
    keys: &Keys<'_>,
    pairing: Pairing,
    blocks: usize,
    width: usize,
    context: usize,
) -> Result<Vec<LayerShape>> {
    let heads = keys.counts("attention.head_count", blocks)?;
    let kv_heads = keys.find_counts("attention.head_count_kv", blocks)?.unwrap_or_else(|| heads.clone());
    let feed_forward = keys.find_counts("feed_forward_length", blocks)?.unwrap_or_else(|| vec![0; blocks]);
    let default_length = heads.iter().find_map(|heads| width.checked_div(*heads)).unwrap_or(0);
    let key_length = keys.find_count("attention.key_length")?.unwrap_or(default_length);
    let value_length = keys.find_count("attention.value_length")?.unwrap_or(default_length);
    // Models without attention have no heads.
    let rope = if key_length > 0 { Some(keys.rope(pairing, key_length, context)?) } else { None };
    let layers = heads.into_iter().zip(kv_heads).zip(feed_forward);
    Ok(layers
        .map(|((heads, kv_heads), feed_forward)| LayerShape {
            attention: true,
            heads,
            kv_heads,
            key_length,
            value_length,
            feed_forward,
            experts: None,
            gate_cut: None,
            window: None,
            shares_cache_of: None,
            rope,
        })
        .collect())
}

/// The rows of the token embedding.
fn vocabulary(keys: &Keys<'_>, width: usize) -> Result<usize> {
    if !keys.has_tensors() {
        return keys.count("vocab_size");
    }
    let name = "token_embd.weight";
    let embedding = keys.file().tensor(name)?;
    match *embedding.shape().dims() {
        [rows, columns] if rows > 0 && columns == width => Ok(rows),
        ref dims => Err(Error::TensorShape {
            name: name.to_owned(),
            found: dims.to_vec(),
            wanted: vec![dims.first().copied().unwrap_or(1).max(1), width],
        }),
    }
}

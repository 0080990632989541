//! A model's hyperparameters: read from the metadata of its file, and checked.

use quadriga_gguf::File;
use quadriga_graph::{Pairing, Rope};

use crate::{Error, Result};

/// The supported model architectures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Architecture {
    /// Llama 1 to 3, Mistral, SmolLM and others of the same architecture.
    Llama,
    /// Qwen 2 and 2.5.
    Qwen2,
    /// Qwen 3 (dense).
    Qwen3,
}

impl Architecture {
    const ALL: [(Architecture, &'static str); 3] =
        [(Architecture::Llama, "llama"), (Architecture::Qwen2, "qwen2"), (Architecture::Qwen3, "qwen3")];

    /// The name in GGUF files.
    pub fn name(self) -> &'static str {
        Architecture::ALL.iter().find(|(a, _)| *a == self).map_or("", |(_, name)| name)
    }

    fn from_name(name: &str) -> Result<Architecture> {
        Architecture::ALL.iter().find(|(_, n)| *n == name).map(|(a, _)| *a).ok_or_else(|| {
            Error::UnsupportedArchitecture {
                name: name.to_owned(),
                known: Architecture::ALL.map(|(_, n)| n).join(", "),
            }
        })
    }
}

/// The hyperparameters of a model.
#[derive(Clone, PartialEq, Debug)]
pub struct Hyperparameters {
    /// The architecture.
    pub architecture: Architecture,
    /// The number of layers.
    pub layers: usize,
    /// The width of the residual stream (the embedding length).
    pub width: usize,
    /// The width of the feed-forward layer.
    pub feed_forward: usize,
    /// Query heads of a layer.
    pub heads: usize,
    /// Key and value heads of a layer; divides `heads`.
    pub kv_heads: usize,
    /// Elements of a query or key head.
    pub key_length: usize,
    /// Elements of a value head.
    pub value_length: usize,
    /// The epsilon of the RMS norms.
    pub norm_epsilon: f32,
    /// The context length that the model was trained with.
    pub context: usize,
    /// The size of the sliding attention window, if there is one: the number of positions that a query attends to, up
    /// to its own.
    pub sliding_window: Option<usize>,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Tokens in the vocabulary: rows of the embedding.
    pub vocabulary: usize,
}

/// The largest accepted count: more than any model has, and small enough that the product of two does not overflow.
const MAX_COUNT: u64 = 1 << 30;

impl Hyperparameters {
    /// Reads and checks the metadata of a model file.
    pub fn from_file(file: &File) -> Result<Hyperparameters> {
        let architecture = Architecture::from_name(file.get::<&str>("general.architecture")?)?;
        let keys = Keys { file, prefix: architecture.name() };
        let layers = keys.count("block_count")?;
        let width = keys.count("embedding_length")?;
        let heads = keys.count("attention.head_count")?;
        let kv_heads = keys.find_count("attention.head_count_kv")?.unwrap_or(heads);
        keys.check(
            "attention.head_count_kv",
            kv_heads,
            heads.is_multiple_of(kv_heads),
            "a divisor of the head count",
        )?;
        let default_length = width / heads;
        let key_length = keys.find_count("attention.key_length")?.unwrap_or(default_length);
        let value_length = keys.find_count("attention.value_length")?.unwrap_or(default_length);
        keys.check("attention.head_count", heads, default_length > 0, "at most the embedding length")?;
        if let Some(experts) = keys.find_count_or_zero("expert_count")? {
            keys.check(
                "expert_count",
                experts,
                experts == 0,
                "absent or 0: mixtures of experts are not supported",
            )?;
        }
        let norm_epsilon = keys.get_float("attention.layer_norm_rms_epsilon")?;
        if !(0.0..1.0).contains(&norm_epsilon) {
            return Err(keys.wrong("attention.layer_norm_rms_epsilon", norm_epsilon, "in 0..1"));
        }
        let embedding = file.tensor("token_embd.weight")?;
        let [vocabulary, columns] = *embedding.shape().dims() else {
            return Err(Error::TensorShape {
                name: "token_embd.weight".into(),
                found: embedding.shape().dims().to_vec(),
                wanted: vec![0, width],
            });
        };
        if columns != width || vocabulary == 0 {
            return Err(Error::TensorShape {
                name: "token_embd.weight".into(),
                found: vec![vocabulary, columns],
                wanted: vec![vocabulary.max(1), width],
            });
        }
        let context = keys.count("context_length")?;
        let hyper = Hyperparameters {
            architecture,
            layers,
            width,
            feed_forward: keys.count("feed_forward_length")?,
            heads,
            kv_heads,
            key_length,
            value_length,
            norm_epsilon,
            context,
            sliding_window: keys.find_count_or_zero("attention.sliding_window")?.filter(|window| *window > 0),
            rope: keys.rope(architecture, key_length, context)?,
            vocabulary,
        };
        for (key, product) in [
            ("attention.head_count", hyper.heads * hyper.key_length),
            ("attention.value_length", hyper.heads * hyper.value_length),
        ] {
            keys.check(
                key,
                product,
                product as u64 <= MAX_COUNT,
                "smaller: the product of heads and head length is too large",
            )?;
        }
        Ok(hyper)
    }

    /// Elements of one layer's keys of one token.
    pub fn key_width(&self) -> usize {
        self.kv_heads * self.key_length
    }

    /// Elements of one layer's values of one token.
    pub fn value_width(&self) -> usize {
        self.kv_heads * self.value_length
    }
}

/// Metadata keys that begin with the architecture's name.
struct Keys<'f> {
    file: &'f File,
    prefix: &'static str,
}

impl Keys<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    fn wrong(&self, key: &str, value: impl ToString, wanted: &str) -> Error {
        Error::Hyperparameter { key: self.key(key), value: value.to_string(), wanted: wanted.to_owned() }
    }

    fn check(&self, key: &str, value: usize, holds: bool, wanted: &str) -> Result<()> {
        if holds { Ok(()) } else { Err(self.wrong(key, value, wanted)) }
    }

    fn find_count_or_zero(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.file.find::<u64>(&self.key(key))? else { return Ok(None) };
        if value > MAX_COUNT {
            return Err(self.wrong(key, value, "at most 2^30"));
        }
        Ok(Some(value as usize))
    }

    fn find_count(&self, key: &str) -> Result<Option<usize>> {
        match self.find_count_or_zero(key)? {
            Some(0) => Err(self.wrong(key, 0, "at least 1")),
            found => Ok(found),
        }
    }

    fn count(&self, key: &str) -> Result<usize> {
        match self.find_count(key)? {
            Some(value) => Ok(value),
            None => Ok(self.file.get::<u64>(&self.key(key))? as usize),
        }
    }

    fn find_float(&self, key: &str) -> Result<Option<f32>> {
        match self.file.find::<f32>(&self.key(key))? {
            Some(value) if !value.is_finite() => Err(self.wrong(key, value, "a finite number")),
            found => Ok(found),
        }
    }

    fn get_float(&self, key: &str) -> Result<f32> {
        match self.find_float(key)? {
            Some(value) => Ok(value),
            None => Ok(self.file.get::<f32>(&self.key(key))?),
        }
    }

    fn positive(&self, key: &str, default: f32) -> Result<f32> {
        match self.find_float(key)? {
            Some(value) if value <= 0.0 => Err(self.wrong(key, value, "positive")),
            found => Ok(found.unwrap_or(default)),
        }
    }

    fn rope(&self, architecture: Architecture, key_length: usize, context: usize) -> Result<Rope> {
        let pairing = match architecture {
            Architecture::Llama => Pairing::Adjacent,
            Architecture::Qwen2 | Architecture::Qwen3 => Pairing::Half,
        };
        let dims = self.find_count("rope.dimension_count")?.unwrap_or(key_length);
        self.check(
            "rope.dimension_count",
            dims,
            dims <= key_length && dims.is_multiple_of(2),
            "even and at most the key length",
        )?;
        let mut rope = Rope::new(dims, pairing, self.positive("rope.freq_base", 10_000.0)?);
        rope.original_context = context;
        let factor = match self.find_float("rope.scaling.factor")? {
            Some(factor) => factor,
            None => self.find_float("rope.scale_linear")?.unwrap_or(1.0),
        };
        // A factor of 0 means "none" in files made by older converters.
        let factor = if factor == 0.0 { 1.0 } else { factor };
        if factor < 0.0 {
            return Err(self.wrong("rope.scaling.factor", factor, "positive"));
        }
        match self.file.find::<&str>(&self.key("rope.scaling.type"))? {
            Some("yarn") => {
                rope.ext_factor = 1.0;
                rope.attn_factor = self.positive("rope.scaling.attn_factor", 1.0)?;
                rope.original_context =
                    self.find_count("rope.scaling.original_context_length")?.unwrap_or(context);
                rope.scale = 1.0 / factor;
            }
            Some("none") => {}
            None | Some("linear") => rope.scale = 1.0 / factor,
            // Its factors are two tensors, of which the context length selects one; this is not implemented.
            Some("longrope") => {
                return Err(self.wrong("rope.scaling.type", "longrope", "none, linear or yarn"));
            }
            Some(other) => return Err(self.wrong("rope.scaling.type", other, "none, linear or yarn")),
        }
        Ok(rope)
    }
}

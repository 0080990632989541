//! Small random models as GGUF files, and helpers for tests of engines.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]

pub mod every_architecture;
pub mod experts;
pub mod judge;
pub mod latent;
pub mod recorded_rank;
pub mod recurrent;
pub mod reference;
pub mod serving;
pub mod streams;

use std::sync::Arc;

use quadriga_conformance::Rng;
use quadriga_gguf::{File, OwnedValue, Writer};
use quadriga_graph::{DType, blocks};
use quadriga_llm::{BatchToken, Engine, EngineOptions, Model};
use quadriga_runtime::{Backend, Scheduler};

use self::experts::ExpertRecipe;
use self::latent::LatentRecipe;
use self::recurrent::RecurrentRecipe;
use self::streams::StreamRecipe;

/// RoPE scaling.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Scaling {
    No,
    Linear(f32),
    Yarn { factor: f32, original: u32 },
}

/// Norms of queries and keys.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum QueryNorms {
    No,
    /// Over each head, with the same weights.
    Head,
    /// Over each head, with weights of its own.
    EachHead,
    /// Over all heads of a token.
    All,
}

/// The parameters of a random model.
#[derive(Clone, Debug)]
pub struct Recipe {
    pub architecture: &'static str,
    pub layers: usize,
    pub width: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub key_length: usize,
    pub value_length: usize,
    pub feed_forward: usize,
    pub vocabulary: usize,
    /// The type of the matrices; norms and biases are F32.
    pub dtype: DType,
    /// Whether the embedding is the output matrix, too.
    pub tied: bool,
    /// Biases on queries, keys and values.
    pub biases: bool,
    pub output_bias: bool,
    pub rope_base: f32,
    pub rope_dims: usize,
    pub scaling: Scaling,
    /// Whether there is a tensor that divides each frequency.
    pub rope_factors: bool,
    pub window: Option<u32>,
    /// The last of every so many layers has no window; 0: all have one.
    pub window_period: usize,
    /// Whether the file names the period; otherwise it is the architecture's.
    pub names_period: bool,
    /// The base of the RoPE of layers with a window, if that is another one, which is not scaled either.
    pub window_rope_base: Option<f32>,
    /// The last of every so many layers has no RoPE; 0: all have it.
    pub rope_period: usize,
    /// Whether RoPE pairs neighbours instead of halves.
    pub adjacent: bool,
    /// Whether there are two tensors of factors for long contexts, of which this context needs the second.
    pub long_factors: bool,
    pub rope_magnitude: f32,
    pub layer_norm: bool,
    pub pre_norms: bool,
    pub post_norms: bool,
    pub query_norms: QueryNorms,
    /// Whether attention and feed-forward are side by side.
    pub parallel: bool,
    pub gelu: bool,
    /// Whether the feed-forward network is rectified.
    pub relu: bool,
    /// Whether the feed-forward network has no gate.
    pub ungated: bool,
    /// Whether the last matrix of the feed-forward network is transposed.
    pub transposed: bool,
    /// Biases of norms and of the feed-forward network, and embedded positions in place of RoPE, as in OPT.
    pub positions: bool,
    /// Whether queries, keys and values are one matrix.
    pub fused_attention: bool,
    /// Whether gate and up are one matrix.
    pub fused_feed_forward: bool,
    pub embedding_scale: f32,
    pub residual_scale: f32,
    pub attention_scale: Option<f32>,
    pub attention_cap: Option<f32>,
    pub logit_scale: f32,
    pub logit_cap: Option<f32>,
    pub sinks: bool,
    /// Whether windows are chunks.
    pub chunked: bool,
    /// The growth of queries in layers without RoPE: how fast, and after how many positions.
    pub temperature: Option<(f32, usize)>,
    /// Whether queries and keys have norms without weights, after RoPE.
    pub plain_norms: bool,
    pub recurrent: Option<RecurrentRecipe>,
    pub streams: Option<StreamRecipe>,
    pub experts: Option<ExpertRecipe>,
    pub latent: Option<LatentRecipe>,
    pub context: u32,
    /// Whether there is a vocabulary; of 100 tokens then.
    pub text: bool,
    pub seed: u64,
}

impl Recipe {
    pub fn new(architecture: &'static str) -> Recipe {
        Recipe {
            architecture,
            layers: 2,
            width: 64,
            heads: 4,
            kv_heads: 2,
            key_length: 16,
            value_length: 16,
            feed_forward: 96,
            vocabulary: 100,
            dtype: DType::F32,
            tied: false,
            biases: architecture == "qwen2",
            output_bias: false,
            rope_base: 10_000.0,
            rope_dims: 16,
            scaling: Scaling::No,
            rope_factors: false,
            window: None,
            window_period: 0,
            names_period: false,
            window_rope_base: None,
            rope_period: 0,
            adjacent: architecture == "llama",
            long_factors: false,
            rope_magnitude: 1.0,
            layer_norm: false,
            pre_norms: true,
            post_norms: false,
            query_norms: if architecture == "qwen3" { QueryNorms::Head } else { QueryNorms::No },
            parallel: false,
            gelu: false,
            relu: false,
            ungated: false,
            transposed: false,
            positions: false,
            fused_attention: false,
            fused_feed_forward: false,
            embedding_scale: 1.0,
            residual_scale: 1.0,
            attention_scale: None,
            attention_cap: None,
            logit_scale: 1.0,
            logit_cap: None,
            sinks: false,
            chunked: false,
            temperature: None,
            plain_norms: false,
            recurrent: None,
            streams: None,
            experts: None,
            latent: None,
            context: 128,
            text: false,
            seed: 1,
        }
    }

    /// Models of which few neurons are active, by name.
    pub fn rectified() -> Vec<(&'static str, Recipe)> {
        let relu = |architecture| Recipe { relu: true, ..Recipe::new(architecture) };
        let falcon = Recipe {
            layer_norm: true,
            parallel: true,
            ungated: true,
            fused_attention: true,
            tied: true,
            ..relu("falcon")
        };
        let opt = Recipe {
            layer_norm: true,
            ungated: true,
            tied: true,
            biases: true,
            output_bias: true,
            positions: true,
            kv_heads: 4,
            ..relu("opt")
        };
        vec![
            ("llama, transposed", Recipe { transposed: true, ..relu("llama") }),
            ("llama", relu("llama")),
            ("bamboo", Recipe { adjacent: true, transposed: true, ..relu("bamboo") }),
            ("falcon, transposed", Recipe { transposed: true, ..falcon.clone() }),
            ("falcon", falcon),
            ("opt", Recipe { transposed: true, ..opt }),
        ]
    }

    /// A small model of each architecture that is not Llama's with other biases and norms.
    pub fn families() -> Vec<Recipe> {
        let gemma = |architecture| Recipe {
            gelu: true,
            tied: true,
            embedding_scale: 8.0,
            ..Recipe::new(architecture)
        };
        vec![
            Recipe {
                adjacent: true,
                embedding_scale: 3.0,
                residual_scale: 0.3,
                attention_scale: Some(0.2),
                logit_scale: 0.125,
                ..Recipe::new("granite")
            },
            Recipe { layers: 5, adjacent: true, rope_period: 4, ..Recipe::new("smollm3") },
            Recipe { fused_attention: true, fused_feed_forward: true, ..Recipe::new("phi3") },
            gemma("gemma"),
            Recipe {
                post_norms: true,
                attention_cap: Some(5.0),
                logit_cap: Some(3.0),
                window: Some(6),
                window_period: 2,
                ..gemma("gemma2")
            },
            Recipe {
                layers: 7,
                post_norms: true,
                query_norms: QueryNorms::Head,
                window: Some(6),
                window_period: 6,
                rope_base: 1_000_000.0,
                window_rope_base: Some(10_000.0),
                scaling: Scaling::Linear(8.0),
                ..gemma("gemma3")
            },
            Recipe {
                layers: 7,
                post_norms: true,
                query_norms: QueryNorms::Head,
                attention_scale: Some(1.0),
                logit_cap: Some(3.0),
                window: Some(6),
                window_period: 2,
                names_period: true,
                rope_base: 1_000_000.0,
                window_rope_base: Some(10_000.0),
                streams: Some(StreamRecipe { count: 3, input: 24, shared: 3, cut: (2, 0.4) }),
                ..gemma("gemma3n")
            },
            Recipe {
                pre_norms: false,
                post_norms: true,
                query_norms: QueryNorms::All,
                ..Recipe::new("olmo2")
            },
            Recipe {
                adjacent: true,
                layer_norm: true,
                parallel: true,
                tied: true,
                logit_scale: 0.25,
                ..Recipe::new("command-r")
            },
            Recipe {
                adjacent: true,
                post_norms: true,
                biases: true,
                fused_feed_forward: true,
                rope_dims: 8,
                ..Recipe::new("glm4")
            },
            Recipe {
                layers: 4,
                tied: true,
                query_norms: QueryNorms::Head,
                recurrent: Some(RecurrentRecipe::ShortConvolutions { kernel: 3 }),
                ..Recipe::new("lfm2")
            },
            Recipe {
                heads: 0,
                kv_heads: 0,
                feed_forward: 0,
                tied: true,
                recurrent: Some(RecurrentRecipe::StateSpace),
                ..Recipe::new("mamba2")
            },
        ]
    }

    /// Whether a layer has a window.
    pub fn has_window(&self, layer: usize) -> bool {
        self.window.is_some() && !self.is_last_of(layer, self.window_period)
    }

    /// Whether a layer is recurrent.
    pub fn is_recurrent(&self, layer: usize) -> bool {
        self.recurrent.is_some_and(|recurrent| recurrent.has(layer))
    }

    /// Whether layers have a feed-forward network.
    pub fn has_feed_forward(&self) -> bool {
        self.recurrent != Some(RecurrentRecipe::StateSpace)
    }

    /// The norm after the last layer.
    pub fn output_norm(&self) -> &'static str {
        if self.architecture.starts_with("lfm2") { "token_embd_norm" } else { "output_norm" }
    }

    /// Whether a layer has rotary embedding.
    pub fn has_rope(&self, layer: usize) -> bool {
        !self.is_last_of(layer, self.rope_period)
    }

    /// Whether a layer is the last of every so many; in SmallThinker, the first.
    fn is_last_of(&self, layer: usize, period: usize) -> bool {
        let layer = if self.architecture == "smallthinker" { layer } else { layer + 1 };
        period > 0 && layer.is_multiple_of(period)
    }

    /// The same model wide enough for every block format.
    pub fn wide(architecture: &'static str, dtype: DType) -> Recipe {
        Recipe {
            width: 256,
            key_length: 64,
            value_length: 64,
            rope_dims: 64,
            feed_forward: 512,
            dtype,
            ..Recipe::new(architecture)
        }
    }

    pub fn parts(&self) -> Parts {
        let mut parts = Parts { keys: Vec::new(), tensors: Vec::new(), rng: Rng::new(self.seed) };
        parts.set("general.architecture", self.architecture);
        let mut number = |key: &str, value: usize| {
            parts.set(&format!("{}.{key}", self.architecture), value as u32);
        };
        number("block_count", self.layers);
        number("context_length", self.context as usize);
        number("embedding_length", self.width);
        number("feed_forward_length", self.feed_forward);
        number("attention.head_count", self.heads);
        number("attention.head_count_kv", self.kv_heads);
        if self.heads > 0 {
            number("attention.key_length", self.key_length);
            number("attention.value_length", self.value_length);
            number("rope.dimension_count", self.rope_dims);
        }
        if let Some(window) = self.window {
            number("attention.sliding_window", window as usize);
        }
        if self.names_period {
            number("attention.sliding_window_pattern", self.window_period);
        }
        let epsilon = if self.layer_norm { "layer_norm_epsilon" } else { "layer_norm_rms_epsilon" };
        parts.set(&format!("{}.attention.{epsilon}", self.architecture), 1e-5f32);
        self.add_scales(&mut parts);
        if self.relu && matches!(self.architecture, "llama" | "falcon") {
            parts.set(&format!("{}.hidden_activation", self.architecture), "relu");
        }
        if let Some(experts) = self.experts {
            experts.add_keys(self.architecture, &mut parts);
        }
        if let Some(latent) = self.latent {
            latent.add_keys(self, &mut parts);
        }
        if let Some(recurrent) = self.recurrent {
            recurrent.add_keys(self, &mut parts);
        }
        if let Some(streams) = self.streams {
            streams.add_keys(self, &mut parts);
        }
        if let Some((scale, length)) = self.temperature {
            parts.set(&format!("{}.attention.temperature_scale", self.architecture), scale);
            parts.set(&format!("{}.attention.temperature_length", self.architecture), length as u32);
        }
        parts.set(&format!("{}.rope.freq_base", self.architecture), self.rope_base);
        match self.scaling {
            Scaling::No => {}
            Scaling::Linear(factor) => {
                parts.set(&format!("{}.rope.scaling.type", self.architecture), "linear");
                parts.set(&format!("{}.rope.scaling.factor", self.architecture), factor);
            }
            Scaling::Yarn { factor, original } => {
                parts.set(&format!("{}.rope.scaling.type", self.architecture), "yarn");
                parts.set(&format!("{}.rope.scaling.factor", self.architecture), factor);
                parts.set(&format!("{}.rope.scaling.original_context_length", self.architecture), original);
            }
        }
        if self.text {
            parts.add_vocabulary();
        }
        self.add_tensors(&mut parts);
        if self.text {
            // Special tokens are not what such a model says.
            for (_, dtype, dims, bytes) in
                parts.tensors.iter_mut().filter(|(name, ..)| name == "output.weight")
            {
                for token in [95, 96, 99] {
                    let row = dtype.row_bytes(dims[1]).unwrap();
                    bytes[token * row..][..row].fill(0);
                }
            }
        }
        parts
    }

    fn add_scales(&self, parts: &mut Parts) {
        let mut number = |key: &str, value: f32, absent: f32| {
            if value != absent {
                parts.set(&format!("{}.{key}", self.architecture), value);
            }
        };
        match self.architecture {
            "granite" | "granitemoe" => {
                number("embedding_scale", self.embedding_scale, 1.0);
                number("residual_scale", self.residual_scale, 1.0);
                number("logit_scale", 1.0 / self.logit_scale, 1.0);
            }
            "command-r" => number("logit_scale", self.logit_scale, 1.0),
            _ => {}
        }
        number("attention.scale", self.attention_scale.unwrap_or(0.0), 0.0);
        number("attn_logit_softcapping", self.attention_cap.unwrap_or(0.0), 0.0);
        number("final_logit_softcapping", self.logit_cap.unwrap_or(0.0), 0.0);
        number("rope.freq_base_swa", self.window_rope_base.unwrap_or(0.0), 0.0);
        number("rope.scaling.attn_factor", self.rope_magnitude, 1.0);
        if self.long_factors {
            parts.set(&format!("{}.rope.scaling.type", self.architecture), "longrope");
            parts.set(&format!("{}.rope.scaling.original_context_length", self.architecture), 32u32);
        }
    }

    fn add_tensors(&self, parts: &mut Parts) {
        let (query, keys, values) = (
            self.heads * self.key_length,
            self.kv_heads * self.key_length,
            self.kv_heads * self.value_length,
        );
        parts.matrix("token_embd.weight", self.dtype, [self.vocabulary, self.width], 1.0);
        parts.vector(&format!("{}.weight", self.output_norm()), self.width, 1.0, 0.5);
        if !self.tied {
            parts.matrix("output.weight", self.dtype, [self.vocabulary, self.width], 1.0);
        }
        if let Some(streams) = self.streams {
            streams.add_tensors(self, parts);
        }
        if self.positions {
            // Two rows more than positions, which no position uses.
            parts.matrix("position_embd.weight", self.dtype, [self.context as usize + 2, self.width], 1.0);
        }
        if self.rope_factors {
            parts.vector("rope_freqs.weight", self.rope_dims / 2, 4.0, 3.0);
        }
        if self.long_factors {
            parts.vector("rope_factors_short.weight", self.rope_dims / 2, 4.0, 3.0);
            parts.vector("rope_factors_long.weight", self.rope_dims / 2, 4.0, 3.0);
        }
        // Large queries and keys, so that attention weights differ much.
        let attention: &[_] = if self.fused_attention {
            &[("attn_qkv", query + keys + values, 1.5)]
        } else {
            &[("attn_q", query, 2.0), ("attn_k", keys, 2.0), ("attn_v", values, 1.0)]
        };
        let feed_forward: &[_] = if self.fused_feed_forward {
            &[("ffn_up", 2 * self.feed_forward, 1.0)]
        } else if self.ungated {
            &[("ffn_up", self.feed_forward, 1.0)]
        } else {
            &[("ffn_gate", self.feed_forward, 1.0), ("ffn_up", self.feed_forward, 1.0)]
        };
        for layer in 0..self.layers {
            let name = |part: &str| format!("blk.{layer}.{part}");
            let mut linear = |part: &str, shape: [usize; 2], size: f64, bias: bool| {
                parts.matrix(&name(&format!("{part}.weight")), self.dtype, shape, size);
                if bias {
                    parts.vector(&name(&format!("{part}.bias")), shape[0], 0.0, 0.5);
                }
            };
            if self.latent.is_none() && !self.is_recurrent(layer) {
                let own = if self.shares_cache_of(layer).is_some() { 1 } else { attention.len() };
                for (part, rows, size) in &attention[..own] {
                    linear(part, [*rows, self.width], *size, self.biases);
                }
                linear("attn_output", [self.width, self.heads * self.value_length], 1.0, self.output_bias);
            }
            if self.experts_of(layer).is_none() && self.has_feed_forward() {
                for (part, rows, size) in feed_forward {
                    linear(part, [*rows, self.width], *size, self.positions);
                }
                if self.transposed {
                    linear("ffn_down_t", [self.feed_forward, self.width], 1.0, false);
                } else {
                    linear("ffn_down", [self.width, self.feed_forward], 1.0, false);
                }
            }
            if let Some(latent) = self.latent {
                latent.add_tensors(self, layer, parts);
            }
            if let Some(recurrent) = self.recurrent.filter(|_| self.is_recurrent(layer)) {
                recurrent.add_tensors(self, layer, parts);
            }
            if let Some(streams) = self.streams {
                streams.add_layer(self, layer, parts);
            }
            if let Some(experts) = self.experts_of(layer) {
                experts.add_tensors(self, layer, parts);
            }
            if self.sinks {
                parts.vector(&name("attn_sinks.weight"), self.heads, 0.0, 3.0);
            }
            self.add_norms(parts, layer);
        }
    }

    fn add_norms(&self, parts: &mut Parts, layer: usize) {
        let biases = matches!(self.architecture, "falcon" | "opt");
        let mut norm = |part: &str, len: usize, middle: f64| {
            parts.vector(&format!("blk.{layer}.{part}.weight"), len, middle, 0.5);
            if biases {
                parts.vector(&format!("blk.{layer}.{part}.bias"), len, 0.0, 0.5);
            }
        };
        if self.pre_norms {
            norm("attn_norm", self.width, 1.0);
        }
        if self.pre_norms && !self.parallel && self.has_feed_forward() {
            norm(self.feed_forward_norm(), self.width, 1.0);
        }
        if self.post_norms {
            norm("post_attention_norm", self.width, 1.0);
            norm("post_ffw_norm", self.width, 1.0);
        }
        let d = self.key_length;
        match self.query_norms {
            _ if self.is_recurrent(layer) => {}
            QueryNorms::No => {}
            QueryNorms::Head => {
                norm("attn_q_norm", d, 1.5);
                if self.shares_cache_of(layer).is_none() {
                    norm("attn_k_norm", d, 1.5);
                }
            }
            QueryNorms::All => {
                norm("attn_q_norm", self.heads * d, 1.5);
                norm("attn_k_norm", self.kv_heads * d, 1.5);
            }
            QueryNorms::EachHead => {
                for (part, heads) in [("attn_q_norm", self.heads), ("attn_k_norm", self.kv_heads)] {
                    parts.vector(&format!("blk.{layer}.{part}.weight"), heads * d, 1.5, 0.5);
                    if let Some((_, _, dims, _)) = parts.tensors.last_mut() {
                        *dims = vec![heads, d];
                    }
                }
            }
        }
    }

    pub fn file(&self) -> File {
        File::from_bytes(self.parts().bytes()).unwrap()
    }

    pub fn model(&self) -> Model {
        Model::from_file(self.file()).unwrap()
    }

    /// Random tokens of the vocabulary.
    pub fn tokens(&self, count: usize) -> Vec<u32> {
        let mut rng = Rng::new(self.seed ^ 0x70_6b65);
        (0..count).map(|_| rng.below(self.vocabulary) as u32).collect()
    }
}

/// The contents of a model file, which a test can change before it is written.
pub struct Parts {
    pub keys: Vec<(String, OwnedValue)>,
    pub tensors: Vec<(String, DType, Vec<usize>, Vec<u8>)>,
    rng: Rng,
}

impl Parts {
    /// Sets a key, in place of what it was.
    pub fn set(&mut self, key: &str, value: impl Into<OwnedValue>) -> &mut Parts {
        self.keys.retain(|(name, _)| name != key);
        self.keys.push((key.to_owned(), value.into()));
        self
    }

    /// Takes a key or tensor away.
    pub fn remove(&mut self, name: &str) -> &mut Parts {
        let before = self.keys.len() + self.tensors.len();
        self.keys.retain(|(key, _)| key != name);
        self.tensors.retain(|(tensor, ..)| tensor != name);
        assert_eq!(self.keys.len() + self.tensors.len() + 1, before, "{name} is not there");
        self
    }

    /// A matrix whose product with a vector is about `size` times as large as it.
    pub fn matrix(&mut self, name: &str, dtype: DType, [rows, cols]: [usize; 2], size: f64) {
        let spread = size / (cols as f64).sqrt();
        let mut bytes = vec![0; dtype.row_bytes(cols).unwrap() * rows];
        let limit = spread * 3f64.sqrt();
        let values: Vec<f32> = (0..rows * cols).map(|_| self.rng.uniform(-limit, limit) as f32).collect();
        if blocks::quantize(dtype, &values, &mut bytes).is_err() {
            random_blocks(dtype, &mut bytes, rows * cols, spread, &mut self.rng);
        }
        self.tensors.push((name.to_owned(), dtype, vec![rows, cols], bytes));
    }

    /// F32 values within `spread` of `middle`.
    pub fn vector(&mut self, name: &str, len: usize, middle: f64, spread: f64) {
        let bytes = (0..len)
            .flat_map(|_| (self.rng.uniform(middle - spread, middle + spread) as f32).to_le_bytes())
            .collect();
        self.tensors.push((name.to_owned(), DType::F32, vec![len], bytes));
    }

    /// The printable letters of ASCII (a space is written `Ġ`), two longer tokens, and three special ones: 100 tokens.
    fn add_vocabulary(&mut self) {
        let mut tokens: Vec<String> = ('!'..='~').map(String::from).collect();
        tokens.extend(["Ġ", "<|start|>", "<|end|>", "the", "Ġthe", "<|x|>"].map(String::from));
        assert_eq!(tokens.len(), 100);
        let types: Vec<i32> =
            tokens.iter().map(|token| if token.starts_with("<|") { 3 } else { 1 }).collect();
        let texts: Vec<&str> = tokens.iter().map(String::as_str).collect();
        let end = texts.iter().position(|token| *token == "<|end|>").unwrap() as u32;
        self.set("tokenizer.ggml.model", "gpt2");
        self.set("tokenizer.ggml.pre", "gpt-2");
        self.set("tokenizer.ggml.tokens", texts);
        self.set("tokenizer.ggml.token_type", types);
        self.set("tokenizer.ggml.merges", vec!["t h", "th e", "Ġ the"]);
        self.set("tokenizer.ggml.eos_token_id", end);
        self.set(
            "tokenizer.chat_template",
            "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}\
             {% if add_generation_prompt %}<|start|>{% endif %}",
        );
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        for (key, value) in &self.keys {
            writer.set(key, value.clone()).unwrap();
        }
        for (name, dtype, dims, bytes) in &self.tensors {
            match dims[..] {
                [a] => writer.tensor_bytes(name, *dtype, [a], bytes).unwrap(),
                [a, b] => writer.tensor_bytes(name, *dtype, [a, b], bytes).unwrap(),
                [a, b, c] => writer.tensor_bytes(name, *dtype, [a, b, c], bytes).unwrap(),
                _ => panic!("{name} has {} dimensions", dims.len()),
            };
        }
        let mut out = Vec::new();
        writer.write_to(&mut out).unwrap();
        out
    }

    /// The model, or what is wrong with it.
    pub fn model(&self) -> Result<Model, quadriga_llm::Error> {
        Model::from_file(File::from_bytes(self.bytes())?)
    }
}

/// Random blocks of types that have no quantizer, with scales that give the requested standard deviation.
fn random_blocks(dtype: DType, bytes: &mut [u8], count: usize, spread: f64, rng: &mut Rng) {
    bytes.iter_mut().for_each(|byte| *byte = rng.next_u64() as u8);
    let set = |bytes: &mut [u8], unit: f64| {
        for block in bytes.chunks_mut(dtype.block_bytes()) {
            blocks::set_scale(dtype, block, unit as f32);
        }
    };
    set(bytes, 1.0);
    let mut values = vec![0f32; count];
    blocks::dequantize(dtype, bytes, &mut values).unwrap();
    let square: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / count as f64;
    set(bytes, spread / square.sqrt());
}

/// A CPU with this many threads and the best instruction set.
pub fn cpu(threads: usize) -> Arc<dyn Backend> {
    Arc::new(quadriga_cpu::Backend::builder().threads(threads).build().unwrap())
}

/// An engine on one thread.
pub fn engine(model: Model, options: EngineOptions) -> Engine {
    engine_on(cpu(1), model, options)
}

pub fn engine_on(backend: Arc<dyn Backend>, model: Model, options: EngineOptions) -> Engine {
    Engine::new(model, &Scheduler::new([backend]), options, &mut |_| {}).unwrap()
}

/// A batch of one sequence with outputs for all tokens.
pub fn all_outputs(sequence: usize, tokens: &[u32]) -> Vec<BatchToken> {
    tokens.iter().map(|token| BatchToken { sequence, token: *token, output: true }).collect()
}

/// Every row of logits after feeding tokens to sequence 0.
pub fn logits_of(engine: &mut Engine, tokens: &[u32]) -> Vec<Vec<f32>> {
    engine.extend(&all_outputs(0, tokens)).unwrap();
    (0..tokens.len()).map(|row| engine.logits(row).to_vec()).collect()
}

/// The largest difference of two sets of rows, in standard deviations of the second.
pub fn distance<A, B>(found: &[Vec<A>], wanted: &[Vec<B>]) -> f64
where
    A: Copy + Into<f64>,
    B: Copy + Into<f64>,
{
    distances(found, wanted).0
}

/// The largest and the root mean square difference, in standard deviations of the second.
pub fn distances<A, B>(found: &[Vec<A>], wanted: &[Vec<B>]) -> (f64, f64)
where
    A: Copy + Into<f64>,
    B: Copy + Into<f64>,
{
    assert_eq!(found.len(), wanted.len());
    let (mut worst, mut error, mut sum, mut square, mut count) = (0f64, 0f64, 0f64, 0f64, 0f64);
    for (found, wanted) in found.iter().zip(wanted) {
        assert_eq!(found.len(), wanted.len());
        for (a, b) in found.iter().zip(wanted) {
            let (a, b): (f64, f64) = ((*a).into(), (*b).into());
            assert!(a.is_finite(), "{a} in place of {b}");
            worst = worst.max((a - b).abs());
            error += (a - b).powi(2);
            sum += b;
            square += b * b;
            count += 1.0;
        }
    }
    let deviation = (square / count - (sum / count).powi(2)).sqrt();
    (worst / deviation, (error / count).sqrt() / deviation)
}

//! What a small random model is made of.

use quadriga_conformance::Rng;
use quadriga_gguf::File;
use quadriga_graph::DType;
use quadriga_llm::Model;

use super::Parts;
use super::experts::ExpertRecipe;
use super::latent::LatentRecipe;
use super::recurrent::RecurrentRecipe;
use super::streams::StreamRecipe;

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
    pub(super) fn is_last_of(&self, layer: usize, period: usize) -> bool {
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

    pub(super) fn add_scales(&self, parts: &mut Parts) {
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

    pub(super) fn add_tensors(&self, parts: &mut Parts) {
        let (query, keys, values) = (
            self.heads * self.key_length,
            self.kv_heads * self.key_length,
            self.kv_heads * self.value_length,
        );
        parts.matrix("token_embd.weight", self.dtype, [self.vocabulary, self.width], 1.0);
        parts.vector(&format!("{}.weight", self.output_norm()), self.width, 1.0, 0.5);
        if self.has_norm_biases() {
            parts.vector("output_norm.bias", self.width, 0.0, 0.5);
        }
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
                    linear("ffn_down", [self.width, self.feed_forward], 1.0, self.positions);
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

    fn has_norm_biases(&self) -> bool {
        matches!(self.architecture, "falcon" | "opt")
    }

    pub(super) fn add_norms(&self, parts: &mut Parts, layer: usize) {
        let biases = self.has_norm_biases();
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

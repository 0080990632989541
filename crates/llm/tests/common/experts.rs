//! Random models with experts, and models whose experts are copies or parts of a dense network.

use quadriga_conformance::Rng;
use quadriga_gguf::File;
use quadriga_graph::DType;

use super::latent::LatentRecipe;
use super::recurrent::RecurrentRecipe;
use super::{Parts, QueryNorms, Recipe, Scaling};

/// How a file has its experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    Stacked,
    /// Gate and up in one tensor.
    Fused,
    /// A tensor for each expert, as the oldest files have them.
    Apart,
}

/// The experts of a random model.
#[derive(Clone, Copy, Debug)]
pub struct ExpertRecipe {
    pub count: usize,
    pub used: usize,
    pub width: usize,
    /// The width of the shared expert; 0 if there is none.
    pub shared: usize,
    pub shared_gate: bool,
    /// 1: softmax, 2: sigmoid, 3: softmax of the selected.
    pub gating: u32,
    pub normalize: bool,
    pub scale: f32,
    pub groups: usize,
    pub groups_used: usize,
    /// The largest scores of a group that are added.
    pub group_scores: usize,
    pub selection_bias: bool,
    pub biases: bool,
    pub layout: Layout,
    /// Layers without experts, at the beginning.
    pub dense: usize,
    /// The last of every so many layers has experts.
    pub step: usize,
    /// Whether weights multiply the experts' inputs.
    pub weighs_inputs: bool,
    /// Whether the file names the gating function and whether weights are normalized.
    pub named: bool,
}

impl ExpertRecipe {
    pub fn new(count: usize, used: usize) -> ExpertRecipe {
        ExpertRecipe {
            count,
            used,
            width: 96,
            shared: 0,
            shared_gate: false,
            gating: 1,
            normalize: true,
            scale: 1.0,
            groups: 1,
            groups_used: 1,
            group_scores: 2,
            selection_bias: false,
            biases: false,
            layout: Layout::Stacked,
            dense: 0,
            step: 1,
            weighs_inputs: false,
            named: false,
        }
    }

    pub fn add_keys(&self, architecture: &str, parts: &mut Parts) {
        let key = |key: &str| format!("{architecture}.{key}");
        for (name, value, absent) in [
            ("expert_count", self.count, 0),
            ("expert_used_count", self.used, 0),
            ("expert_feed_forward_length", self.width, 96),
            // Llama 4's shared expert is as wide as the others.
            (
                "expert_shared_feed_forward_length",
                self.shared,
                if self.weighs_inputs { self.shared } else { 0 },
            ),
            ("expert_group_count", self.groups, 1),
            ("expert_group_used_count", self.groups_used, 1),
            ("leading_dense_block_count", self.dense, 0),
            ("interleave_moe_layer_step", self.step, if self.weighs_inputs { 0 } else { 1 }),
        ] {
            if value != absent {
                parts.set(&key(name), value as u32);
            }
        }
        if self.scale != 1.0 {
            parts.set(&key("expert_weights_scale"), self.scale);
        }
        if self.named {
            parts.set(&key("expert_gating_func"), self.gating);
            parts.set(&key("expert_weights_norm"), self.normalize);
        }
    }

    pub fn add_tensors(&self, recipe: &Recipe, layer: usize, parts: &mut Parts) {
        let name = |part: &str| format!("blk.{layer}.{part}");
        // Large logits, so that the experts' weights differ much.
        parts.matrix(&name("ffn_gate_inp.weight"), DType::F32, [self.count, recipe.width], 3.0);
        let down = ("ffn_down", [recipe.width, self.width]);
        let matrices = match self.layout {
            Layout::Fused => vec![("ffn_gate_up", [2 * self.width, recipe.width]), down],
            _ => ["ffn_gate", "ffn_up"]
                .map(|part| (part, [self.width, recipe.width]))
                .into_iter()
                .chain([down])
                .collect(),
        };
        for (part, dims) in matrices {
            match self.layout {
                Layout::Apart => (0..self.count).for_each(|j| {
                    parts.matrix(&name(&format!("{part}.{j}.weight")), recipe.dtype, dims, 1.0)
                }),
                _ => parts.stack(&name(&format!("{part}_exps.weight")), recipe.dtype, self.count, dims),
            }
            if self.biases {
                parts.vectors(&name(&format!("{part}_exps.bias")), [self.count, dims[0]]);
            }
        }
        if self.biases {
            parts.vector(&name("ffn_gate_inp.bias"), self.count, 0.0, 0.5);
        }
        if self.selection_bias {
            parts.vector(&name("exp_probs_b.bias"), self.count, 0.0, 0.3);
        }
        if self.shared > 0 {
            for (part, dims) in [
                ("ffn_gate_shexp", [self.shared, recipe.width]),
                ("ffn_up_shexp", [self.shared, recipe.width]),
                ("ffn_down_shexp", [recipe.width, self.shared]),
            ] {
                parts.matrix(&name(&format!("{part}.weight")), recipe.dtype, dims, 1.0);
            }
        }
        if self.shared_gate {
            parts.vector(&name("ffn_gate_inp_shexp.weight"), recipe.width, 0.0, 0.5);
        }
    }
}

impl Recipe {
    /// A small model of each architecture with experts.
    pub fn with_experts() -> Vec<(&'static str, Recipe)> {
        let mixture = ExpertRecipe::new(6, 2);
        let of = |architecture: &'static str, experts: ExpertRecipe| Recipe {
            experts: Some(experts),
            ..Recipe::new(architecture)
        };
        let mut all = Vec::new();
        for (name, layout) in
            [("stacked", Layout::Stacked), ("fused", Layout::Fused), ("apart", Layout::Apart)]
        {
            all.push((name, of("llama", ExpertRecipe { layout, ..mixture })));
        }
        let narrow = ExpertRecipe { width: 40, ..mixture };
        let qwen3 = Recipe { query_norms: QueryNorms::Head, ..of("qwen3moe", narrow) };
        all.push(("experts narrower than a dense network", qwen3.clone()));
        all.push((
            "all experts",
            Recipe { experts: Some(ExpertRecipe { used: 6, ..narrow }), ..qwen3.clone() },
        ));
        all.push((
            "one expert of one",
            Recipe { experts: Some(ExpertRecipe { count: 1, used: 1, ..narrow }), ..qwen3 },
        ));
        let shared = ExpertRecipe { normalize: false, shared: 56, shared_gate: true, ..narrow };
        all.push(("shared expert with a gate", Recipe { biases: true, ..of("qwen2moe", shared) }));
        let plain = ExpertRecipe { normalize: false, ..mixture };
        all.push(("norms of all queries", Recipe { query_norms: QueryNorms::All, ..of("olmoe", plain) }));
        all.push((
            "granite",
            Recipe {
                adjacent: true,
                embedding_scale: 3.0,
                residual_scale: 0.3,
                attention_scale: Some(0.2),
                logit_scale: 0.125,
                ..of("granitemoe", ExpertRecipe { shared: 24, ..mixture })
            },
        ));
        let oai = ExpertRecipe { gating: 3, normalize: false, biases: true, ..narrow };
        all.push((
            "sinks and windows",
            Recipe {
                layers: 3,
                biases: true,
                output_bias: true,
                sinks: true,
                window: Some(5),
                window_period: 2,
                scaling: Scaling::Yarn { factor: 32.0, original: 64 },
                ..of("gpt-oss", oai)
            },
        ));
        let glm = ExpertRecipe {
            gating: 2,
            scale: 1.7,
            selection_bias: true,
            shared: 40,
            dense: 1,
            named: true,
            ..narrow
        };
        all.push((
            "leading dense layer, selection bias",
            Recipe { layers: 3, biases: true, rope_dims: 8, ..of("glm4moe", glm) },
        ));
        all.push((
            "router before attention",
            Recipe {
                layers: 5,
                window: Some(6),
                window_period: 4,
                rope_period: 4,
                ..of("smallthinker", ExpertRecipe { gating: 2, named: true, ..narrow })
            },
        ));
        all.push((
            "short convolutions",
            Recipe {
                layers: 4,
                query_norms: QueryNorms::Head,
                recurrent: Some(RecurrentRecipe::ShortConvolutions { kernel: 4 }),
                ..of("lfm2moe", ExpertRecipe { shared: 0, ..glm })
            },
        ));
        let scout = Recipe {
            layers: 5,
            adjacent: true,
            chunked: true,
            window: Some(6),
            window_period: 4,
            rope_period: 4,
            plain_norms: true,
            temperature: Some((0.3, 4)),
            ..of(
                "llama4",
                ExpertRecipe {
                    used: 1,
                    gating: 2,
                    normalize: false,
                    weighs_inputs: true,
                    shared: 40,
                    ..narrow
                },
            )
        };
        let maverick = scout.experts.map(|experts| ExpertRecipe { count: 128, used: 2, step: 2, ..experts });
        all.push(("weighted inputs", scout.clone()));
        all.push(("every other layer", Recipe { plain_norms: false, experts: maverick, ..scout }));
        all.extend(deepseek(glm));
        all
    }

    /// The norm before the feed-forward network.
    pub fn feed_forward_norm(&self) -> &'static str {
        match self.architecture {
            "gpt-oss" | "glm4moe" => "post_attention_norm",
            _ => "ffn_norm",
        }
    }

    /// The experts of a layer, if it has any.
    pub fn experts_of(&self, layer: usize) -> Option<ExpertRecipe> {
        self.experts.filter(|experts| layer >= experts.dense && (layer + 1).is_multiple_of(experts.step))
    }
}

fn deepseek(glm: ExpertRecipe) -> Vec<(&'static str, Recipe)> {
    let latent = LatentRecipe { rank: 32, query_rank: Some(24), separate: true, log_multiplier: None };
    let plain = Recipe {
        layers: 3,
        adjacent: true,
        kv_heads: 4,
        key_length: 24,
        rope_dims: 8,
        latent: Some(latent),
        experts: Some(ExpertRecipe {
            normalize: false,
            scale: 1.0,
            gating: 1,
            selection_bias: false,
            named: false,
            ..glm
        }),
        ..Recipe::new("deepseek2")
    };
    let grouped = ExpertRecipe { count: 12, used: 3, groups: 4, groups_used: 2, ..glm };
    // DeepSeek V2: no selection bias, and the score of a group is its largest.
    let greedy = ExpertRecipe {
        group_scores: 1,
        selection_bias: false,
        gating: 1,
        normalize: false,
        scale: 4.0,
        ..grouped
    };
    let yarn = Scaling::Yarn { factor: 32.0, original: 64 };
    let mut all = vec![
        ("absorbed", plain.clone()),
        (
            "absorbed, queries of full rank",
            Recipe { latent: Some(LatentRecipe { query_rank: None, ..latent }), ..plain.clone() },
        ),
        ("groups", Recipe { experts: Some(grouped), ..plain.clone() }),
        ("groups by softmax", Recipe { experts: Some(greedy), ..plain.clone() }),
        (
            "YaRN",
            Recipe {
                scaling: yarn,
                latent: Some(LatentRecipe { log_multiplier: Some(0.0707), ..latent }),
                ..plain.clone()
            },
        ),
    ];
    for (name, recipe) in
        [("keys and values of one matrix", plain.clone()), ("the same, with YaRN", all[4].1.clone())]
    {
        let latent = recipe.latent.map(|latent| LatentRecipe { separate: false, ..latent });
        all.push((name, Recipe { latent, ..recipe }));
    }
    all
}

impl Parts {
    /// A matrix for each expert.
    pub fn stack(&mut self, name: &str, dtype: DType, count: usize, [rows, cols]: [usize; 2]) {
        self.matrix(name, dtype, [count * rows, cols], 1.0);
        if let Some((_, _, dims, _)) = self.tensors.last_mut() {
            *dims = vec![count, rows, cols];
        }
    }

    /// F32 vectors.
    pub fn vectors(&mut self, name: &str, dims: [usize; 2]) {
        self.vector(name, dims[0] * dims[1], 0.0, 0.5);
        if let Some((_, _, to, _)) = self.tensors.last_mut() {
            *to = dims.to_vec();
        }
    }

    /// The contents of a file, with the keys that a rule accepts.
    pub fn of(file: &File, accepts: impl Fn(&str) -> bool) -> Parts {
        let keys = file.metadata().filter(|(key, _)| accepts(key));
        let keys = keys.map(|(key, value)| (key.to_owned(), value.into())).collect();
        let tensors = file
            .tensors()
            .map(|t| (t.name().to_owned(), t.dtype(), t.shape().dims().to_vec(), t.bytes().to_vec()));
        Parts { keys, tensors: tensors.collect(), rng: Rng::new(1) }
    }

    /// Makes a dimension of an F32 tensor one longer: its last or its first.
    pub fn resize(&mut self, name: &str, which: usize) {
        let (dtype, mut dims, _) = self.take(name);
        let at = if which == 1 { dims.len() - 1 } else { 0 };
        dims[at] += 1;
        let bytes = vec![0; dims.iter().product::<usize>() * 4];
        self.tensors.push((name.to_owned(), dtype, dims, bytes));
    }

    /// Gives an F32 tensor another type, and zeros.
    pub fn retype(&mut self, name: &str, dtype: DType) {
        let (_, dims, bytes) = self.take(name);
        let bytes = vec![0; bytes.len() / 4 * dtype.block_bytes() / dtype.block_len()];
        self.tensors.push((name.to_owned(), dtype, dims, bytes));
    }

    /// Takes a tensor out of the file.
    pub fn take(&mut self, name: &str) -> (DType, Vec<usize>, Vec<u8>) {
        let at = self.tensors.iter().position(|(tensor, ..)| tensor == name).unwrap();
        let (_, dtype, dims, bytes) = self.tensors.remove(at);
        (dtype, dims, bytes)
    }

    /// A dense model of an architecture as one of another, in which each layer has `count` experts, each a copy of its dense
    /// network, and a random router.
    pub fn clone_experts(&mut self, layers: usize, count: usize, seed: u64) {
        for layer in 0..layers {
            for part in ["ffn_gate", "ffn_up", "ffn_down"] {
                let (dtype, dims, bytes) = self.take(&format!("blk.{layer}.{part}.weight"));
                let dims = [vec![count], dims].concat();
                let name = format!("blk.{layer}.{part}_exps.weight");
                self.tensors.push((name, dtype, dims, bytes.repeat(count)));
            }
            self.router(layer, count, Some(seed));
        }
    }

    /// A dense model as one whose experts are parts of its dense networks, all of which are used with weight 1.
    pub fn cut_experts(&mut self, layers: usize, count: usize) {
        for layer in 0..layers {
            for part in ["ffn_gate", "ffn_up"] {
                let (dtype, dims, bytes) = self.take(&format!("blk.{layer}.{part}.weight"));
                let dims = vec![count, dims[0] / count, dims[1]];
                self.tensors.push((format!("blk.{layer}.{part}_exps.weight"), dtype, dims, bytes));
            }
            let (dtype, dims, bytes) = self.take(&format!("blk.{layer}.ffn_down.weight"));
            let (row, part) = (bytes.len() / dims[0], bytes.len() / dims[0] / count);
            let cut = (0..count)
                .flat_map(|j| bytes.chunks(row).flat_map(move |row| row[j * part..][..part].to_vec()));
            let cut = cut.collect();
            let name = format!("blk.{layer}.ffn_down_exps.weight");
            self.tensors.push((name, dtype, vec![count, dims[0], dims[1] / count], cut));
            self.router(layer, count, None);
        }
    }

    /// A router with random weights, or with none.
    fn router(&mut self, layer: usize, count: usize, seed: Option<u64>) {
        let width = self.tensors.iter().find(|(name, ..)| name == "output_norm.weight").unwrap().2[0];
        let mut rng = Rng::new(seed.unwrap_or(0) + layer as u64);
        let value = |rng: &mut Rng| if seed.is_some() { rng.uniform(-1.0, 1.0) as f32 } else { 0.0 };
        let bytes = (0..count * width).flat_map(|_| value(&mut rng).to_le_bytes()).collect();
        self.tensors.push((
            format!("blk.{layer}.ffn_gate_inp.weight"),
            DType::F32,
            vec![count, width],
            bytes,
        ));
    }
}

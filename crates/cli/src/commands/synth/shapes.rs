//! The shapes of models: small ones of each architecture, and presets with the dimensions of known models.

use clap::ValueEnum;
use quadriga_gguf::OwnedValue;

/// A known model shape.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Preset {
    /// Llama 7B: 32 layers, 4096 wide, vocabulary of 32000
    #[value(name = "7b")]
    Llama7B,
    /// Llama 3 8B: 32 layers, 4096 wide, 8 KV heads, vocabulary of 128256
    #[value(name = "8b")]
    Llama8B,
    /// Llama 3 70B: 80 layers, 8192 wide, 8 KV heads, vocabulary of 128256
    #[value(name = "70b")]
    Llama70B,
    /// SmolLM2 135M: 30 layers, 576 wide, 3 KV heads, vocabulary of 49152
    #[value(name = "135m")]
    Smol135M,
    /// Qwen3 30B-A3B: 48 layers, 2048 wide, 8 of 128 experts
    #[value(name = "30b-a3b")]
    Qwen30B,
    /// gpt-oss 20B: 24 layers, 2880 wide, 4 of 32 experts
    #[value(name = "gpt-oss-20b")]
    GptOss20B,
    /// gpt-oss 120B: 36 layers, 2880 wide, 4 of 128 experts
    #[value(name = "gpt-oss-120b")]
    GptOss120B,
    /// DeepSeek V2 Lite: 27 layers, 2048 wide, latent attention, 6 of 64 experts
    #[value(name = "deepseek-v2-lite")]
    DeepSeekV2Lite,
    /// DeepSeek V3 and R1, 671B: 61 layers, 7168 wide, latent attention, 8 of 256 experts
    #[value(name = "671b")]
    DeepSeekV3,
    /// Qwen3.5 35B-A3B: 40 layers, 2048 wide, three of four recurrent, 8 of 256 experts
    #[value(name = "qwen35-35b-a3b")]
    Qwen35Moe,
    /// Gemma 3 270M: 18 layers, 640 wide, sliding windows, vocabulary of 262144
    #[value(name = "gemma3-270m")]
    Gemma270M,
}

/// The value of a key of the metadata.
#[derive(Clone, Copy)]
pub(super) enum KeyValue {
    Whole(usize),
    Real(f32),
    Flag(bool),
    Text(&'static str),
    Numbers(&'static [i32]),
}

use KeyValue::{Flag, Numbers, Real, Text, Whole};

impl From<KeyValue> for OwnedValue {
    fn from(value: KeyValue) -> OwnedValue {
        match value {
            Whole(value) => u32::try_from(value).unwrap_or(u32::MAX).into(),
            Real(value) => value.into(),
            Flag(value) => value.into(),
            Text(value) => value.into(),
            Numbers(values) => values.to_vec().into(),
        }
    }
}

/// Keys of the metadata, without the architecture's name.
pub(super) type Keys = Vec<(&'static str, KeyValue)>;

impl Preset {
    /// The architecture.
    pub(super) fn architecture(self) -> &'static str {
        match self {
            Preset::Llama7B | Preset::Llama8B | Preset::Llama70B | Preset::Smol135M => "llama",
            Preset::Qwen30B => "qwen3moe",
            Preset::GptOss20B | Preset::GptOss120B => "gpt-oss",
            Preset::DeepSeekV2Lite | Preset::DeepSeekV3 => "deepseek2",
            Preset::Qwen35Moe => "qwen35moe",
            Preset::Gemma270M => "gemma3",
        }
    }

    /// Whether the output matrix of the model is the token embedding.
    pub(super) fn is_tied(self) -> bool {
        matches!(self, Preset::Smol135M | Preset::Gemma270M)
    }

    /// The keys that differ from the architecture's small model.
    pub(super) fn keys(self) -> Keys {
        match self {
            Preset::Llama7B => with(sizes([32, 4096, 11008, 32, 32, 32_000]), context(4096)),
            Preset::Llama8B => with(sizes([32, 4096, 14336, 32, 8, 128_256]), context(8192)),
            Preset::Llama70B => with(sizes([80, 8192, 28672, 64, 8, 128_256]), context(8192)),
            Preset::Smol135M => with(sizes([30, 576, 1536, 9, 3, 49_152]), context(8192)),
            Preset::Qwen30B => with(
                sizes([48, 2048, 6144, 32, 4, 151_936]),
                vec![
                    ("attention.key_length", Whole(128)),
                    ("attention.value_length", Whole(128)),
                    ("rope.dimension_count", Whole(128)),
                    ("rope.freq_base", Real(1e6)),
                    ("context_length", Whole(32_768)),
                    ("expert_count", Whole(128)),
                    ("expert_used_count", Whole(8)),
                    ("expert_feed_forward_length", Whole(768)),
                ],
            ),
            Preset::GptOss20B => gpt_oss(24, 32),
            Preset::GptOss120B => gpt_oss(36, 128),
            Preset::DeepSeekV2Lite => with(
                latent(sizes([27, 2048, 10944, 16, 1, 102_400]), 0.0707),
                vec![
                    ("leading_dense_block_count", Whole(1)),
                    ("attention.q_lora_rank", Whole(0)),
                    ("expert_count", Whole(64)),
                    ("expert_used_count", Whole(6)),
                    ("expert_shared_count", Whole(2)),
                    ("expert_feed_forward_length", Whole(1408)),
                    ("expert_group_count", Whole(1)),
                    ("expert_group_used_count", Whole(1)),
                    ("expert_gating_func", Whole(1)),
                    ("expert_weights_scale", Real(1.0)),
                    ("expert_weights_norm", Flag(false)),
                ],
            ),
            Preset::DeepSeekV3 => with(
                latent(sizes([61, 7168, 18432, 128, 1, 129_280]), 0.1),
                vec![
                    ("leading_dense_block_count", Whole(3)),
                    ("attention.q_lora_rank", Whole(1536)),
                    ("expert_count", Whole(256)),
                    ("expert_used_count", Whole(8)),
                    ("expert_shared_count", Whole(1)),
                    ("expert_feed_forward_length", Whole(2048)),
                    ("expert_group_count", Whole(8)),
                    ("expert_group_used_count", Whole(4)),
                    ("expert_gating_func", Whole(2)),
                    ("expert_weights_scale", Real(2.5)),
                    ("expert_weights_norm", Flag(true)),
                ],
            ),
            Preset::Qwen35Moe => with(
                sizes([40, 2048, 512, 16, 2, 248_320]),
                vec![
                    ("attention.key_length", Whole(256)),
                    ("attention.value_length", Whole(256)),
                    ("rope.dimension_count", Whole(64)),
                    ("rope.freq_base", Real(1e7)),
                    ("context_length", Whole(262_144)),
                    ("expert_count", Whole(256)),
                    ("expert_used_count", Whole(8)),
                    ("expert_feed_forward_length", Whole(512)),
                    ("expert_shared_feed_forward_length", Whole(512)),
                    ("ssm.state_size", Whole(128)),
                    ("ssm.group_count", Whole(16)),
                    ("ssm.time_step_rank", Whole(32)),
                    ("ssm.inner_size", Whole(4096)),
                ],
            ),
            Preset::Gemma270M => with(
                sizes([18, 640, 2048, 4, 1, 262_144]),
                vec![
                    ("attention.key_length", Whole(256)),
                    ("attention.value_length", Whole(256)),
                    ("rope.dimension_count", Whole(256)),
                    ("rope.freq_base", Real(1e6)),
                    ("context_length", Whole(32_768)),
                    ("attention.sliding_window", Whole(512)),
                ],
            ),
        }
    }
}

/// Layers, embedding, feed-forward width, heads, KV heads, vocabulary.
fn sizes([layers, width, ffn, heads, kv_heads, vocab]: [usize; 6]) -> Keys {
    vec![
        ("block_count", Whole(layers)),
        ("embedding_length", Whole(width)),
        ("feed_forward_length", Whole(ffn)),
        ("attention.head_count", Whole(heads)),
        ("attention.head_count_kv", Whole(kv_heads)),
        ("vocab_size", Whole(vocab)),
    ]
}

/// LFM2's layers: every third has attention.
fn short_convolutions() -> Keys {
    vec![("block_count", Whole(3)), ("shortconv.l_cache", Whole(3))]
}

fn context(tokens: usize) -> Keys {
    vec![("context_length", Whole(tokens))]
}

/// YaRN, and the tenth of its multiplier of the logarithm.
fn yarn(factor: f32, original: usize, log_multiplier: f32) -> Keys {
    vec![
        ("rope.scaling.type", Text("yarn")),
        ("rope.scaling.factor", Real(factor)),
        ("rope.scaling.original_context_length", Whole(original)),
        ("rope.scaling.yarn_log_multiplier", Real(log_multiplier)),
    ]
}

/// DeepSeek's latent attention.
fn latent(keys: Keys, log_multiplier: f32) -> Keys {
    let lengths = vec![
        ("context_length", Whole(163_840)),
        ("attention.kv_lora_rank", Whole(512)),
        ("attention.key_length", Whole(576)),
        ("attention.value_length", Whole(512)),
        ("attention.key_length_mla", Whole(192)),
        ("attention.value_length_mla", Whole(128)),
        ("rope.dimension_count", Whole(64)),
    ];
    with(with(keys, lengths), yarn(40.0, 4096, log_multiplier))
}

fn gpt_oss(layers: usize, experts: usize) -> Keys {
    with(
        sizes([layers, 2880, 2880, 64, 8, 201_088]),
        vec![
            ("attention.key_length", Whole(64)),
            ("attention.value_length", Whole(64)),
            ("rope.dimension_count", Whole(64)),
            ("rope.freq_base", Real(150_000.0)),
            ("context_length", Whole(131_072)),
            ("rope.scaling.type", Text("yarn")),
            ("rope.scaling.factor", Real(32.0)),
            ("rope.scaling.original_context_length", Whole(4096)),
            ("attention.sliding_window", Whole(128)),
            ("expert_count", Whole(experts)),
            ("expert_used_count", Whole(4)),
            ("expert_feed_forward_length", Whole(2880)),
        ],
    )
}

/// Keys with others added, which take the place of those of the same name.
pub(super) fn with(mut keys: Keys, others: Keys) -> Keys {
    for (name, value) in others {
        keys.retain(|(known, _)| *known != name);
        keys.push((name, value));
    }
    keys
}

/// Granite's factors of the embedding, of each branch, of attention scores, and of the logits, which are divided by it.
fn granite() -> Keys {
    vec![
        ("embedding_scale", Real(12.0)),
        ("residual_scale", Real(0.22)),
        ("attention.scale", Real(0.0625)),
        ("logit_scale", Real(6.0)),
    ]
}

/// Layers with a sliding window, and enough of them that one has none.
fn windows(size: usize, layers: usize) -> Keys {
    vec![("attention.sliding_window", Whole(size)), ("block_count", Whole(layers))]
}

/// What an architecture's small model has besides the sizes: the keys that its files must have, and those that make it another
/// model than a llama.
pub(super) fn special(architecture: &str) -> Keys {
    let experts = vec![
        ("expert_count", Whole(4)),
        ("expert_used_count", Whole(2)),
        ("expert_feed_forward_length", Whole(64)),
    ];
    let recurrent = vec![
        ("ssm.conv_kernel", Whole(4)),
        ("ssm.state_size", Whole(32)),
        ("ssm.group_count", Whole(2)),
        ("ssm.time_step_rank", Whole(4)),
        ("ssm.inner_size", Whole(128)),
        ("full_attention_interval", Whole(4)),
        // Of positions in pictures; llama.cpp needs them in any file.
        ("rope.dimension_sections", Numbers(&[11, 11, 10, 0])),
        ("block_count", Whole(4)),
    ];
    let shared = vec![("expert_shared_feed_forward_length", Whole(64))];
    match architecture {
        "qwen3moe" | "olmoe" => experts,
        "granite" => granite(),
        "granitemoe" => with(experts, granite()),
        "smallthinker" => with(with(experts, windows(512, 4)), vec![("expert_gating_func", Whole(2))]),
        // Every fourth layer has no rotary embedding.
        "smollm3" => vec![("block_count", Whole(4))],
        "olmo2" => windows(512, 4),
        "command-r" => vec![("logit_scale", Real(0.0625))],
        "qwen2moe" => with(experts, shared),
        "qwen35" => recurrent,
        "qwen3next" | "qwen35moe" => with(with(experts, shared), recurrent),
        "gpt-oss" => with(experts, vec![("attention.sliding_window", Whole(128))]),
        "glm4moe" => with(
            experts,
            vec![
                ("leading_dense_block_count", Whole(1)),
                ("expert_shared_count", Whole(1)),
                ("expert_gating_func", Whole(2)),
                ("expert_weights_norm", Flag(true)),
            ],
        ),
        "deepseek2" => with(
            with(experts, yarn(4.0, 1024, 0.1)),
            vec![
                ("leading_dense_block_count", Whole(1)),
                ("expert_shared_count", Whole(1)),
                ("expert_group_count", Whole(2)),
                ("expert_group_used_count", Whole(1)),
                ("expert_gating_func", Whole(2)),
                ("expert_weights_scale", Real(2.5)),
                ("expert_weights_norm", Flag(true)),
                ("attention.head_count_kv", Whole(1)),
                ("attention.q_lora_rank", Whole(24)),
                ("attention.kv_lora_rank", Whole(32)),
                ("attention.key_length", Whole(48)),
                ("attention.value_length", Whole(32)),
                ("attention.key_length_mla", Whole(48)),
                ("attention.value_length_mla", Whole(32)),
                ("rope.dimension_count", Whole(16)),
            ],
        ),
        "lfm2" => short_convolutions(),
        "lfm2moe" => with(
            with(experts, short_convolutions()),
            vec![("leading_dense_block_count", Whole(1)), ("expert_gating_func", Whole(2))],
        ),
        "llama4" => with(
            experts,
            vec![
                ("block_count", Whole(4)),
                ("expert_used_count", Whole(1)),
                ("interleave_moe_layer_step", Whole(1)),
            ],
        ),
        "mamba2" => vec![
            ("attention.head_count", Whole(0)),
            ("attention.head_count_kv", Whole(0)),
            ("feed_forward_length", Whole(0)),
            ("ssm.conv_kernel", Whole(4)),
            ("ssm.state_size", Whole(32)),
            ("ssm.group_count", Whole(1)),
            ("ssm.time_step_rank", Whole(4)),
            ("ssm.inner_size", Whole(128)),
        ],
        "gemma2" => vec![("attention.sliding_window", Whole(4096))],
        // The last two attend to keys and values of the first two.
        "gemma3n" => with(
            windows(512, 4),
            vec![
                ("attention.sliding_window_pattern", Whole(2)),
                ("attention.shared_kv_layers", Whole(2)),
                ("embedding_length_per_layer_input", Whole(32)),
            ],
        ),
        "gemma3" => windows(512, 6),
        "bert" | "nomic-bert" => vec![("pooling_type", Whole(1)), ("attention.causal", Flag(false))],
        _ => Vec::new(),
    }
}

/// Whether models of an architecture always have an output matrix of their own.
pub(super) fn is_never_tied(architecture: &str) -> bool {
    matches!(architecture, "gpt-oss" | "olmo2" | "olmoe" | "qwen2moe")
}

/// The types of tokens of encoders.
pub(super) const TOKEN_TYPES: u32 = 2;

/// Whether an architecture's models are encoders.
pub(super) fn is_encoder(architecture: &str) -> bool {
    architecture.ends_with("bert")
}

/// The part of a model that an option is about, if layers of an architecture do not have it.
pub(super) fn missing_part(architecture: &str, flag: &str) -> Option<&'static str> {
    match flag {
        "--heads" | "--kv-heads" if architecture == "mamba2" => Some("attention"),
        "--ffn" if architecture == "mamba2" => Some("feed-forward network"),
        _ => None,
    }
}

/// Changes keys of a small model that options have made impossible: groups of experts, and layers without a KV cache.
pub(super) fn adjust(keys: Keys) -> Keys {
    let get = |name: &str| {
        keys.iter().find(|(key, _)| *key == name).map_or(0, |(_, value)| match value {
            Whole(value) => *value,
            _ => 0,
        })
    };
    let (experts, used) = (get("expert_count"), get("expert_used_count"));
    let (groups, groups_used) = (get("expert_group_count").max(1), get("expert_group_used_count"));
    let mut others = Vec::new();
    if groups > 1 && (!experts.is_multiple_of(groups) || used > experts / groups * groups_used) {
        others.extend([("expert_group_count", Whole(1)), ("expert_group_used_count", Whole(1))]);
    }
    let (layers, shared) = (get("block_count"), get("attention.shared_kv_layers"));
    if shared > 0 && layers < 2 * shared {
        others.push(("attention.shared_kv_layers", Whole(0)));
    }
    with(keys, others)
}

/// Whether a model of an architecture, with these keys, has a tensor that other models may lack.
pub(super) fn has_optional(architecture: &str, keys: &Keys, tied: bool, name: &str) -> bool {
    let part = name
        .split_once('.')
        .filter(|_| name.starts_with("blk."))
        .map_or(name, |(_, rest)| rest.split_once('.').map_or(rest, |(_, part)| part));
    match part {
        "output.weight" => !tied && !is_encoder(architecture),
        "token_types.weight" => is_encoder(architecture),
        "attn_qkv.weight" => matches!(architecture, "phi3" | "nomic-bert" | "falcon"),
        "attn_norm.bias" | "ffn_norm.bias" | "output_norm.bias" => {
            matches!(architecture, "falcon" | "opt" | "bert")
        }
        "ffn_up.bias" | "ffn_down.bias" if architecture == "opt" => true,
        "attn_q.bias" | "attn_k.bias" | "attn_v.bias" => {
            matches!(architecture, "qwen2" | "qwen2moe" | "glm4" | "glm4moe" | "gpt-oss" | "bert" | "opt")
        }
        "exp_probs_b.bias" => {
            let by_sigmoid =
                |(key, value): &(&str, KeyValue)| *key == "expert_gating_func" && matches!(value, Whole(2));
            matches!(architecture, "glm4moe" | "lfm2moe")
                || architecture == "deepseek2" && keys.iter().any(by_sigmoid)
        }
        "ffn_gate_inp_shexp.weight" => matches!(architecture, "qwen2moe" | "qwen3next" | "qwen35moe"),
        "attn_output.bias" => matches!(architecture, "gpt-oss" | "bert" | "opt"),
        _ if architecture == "gpt-oss" => part.ends_with("exps.bias") || part == "ffn_gate_inp.bias",
        _ if is_encoder(architecture) => {
            part.ends_with("norm.bias")
                || (architecture == "bert" && part.starts_with("ffn_") && part.ends_with("bias"))
        }
        _ => false,
    }
}

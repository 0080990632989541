//! Which tensor gets which type: the rules of the mixes (Q4_K_M and its kin), as llama.cpp's quantizer has them.

use quadriga_graph::{DType, Shape};

use super::file_type::FileType;

/// The role of a tensor in a model, as far as the rules distinguish them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Role {
    Embedding,
    Output,
    Query,
    Key,
    /// Values, and projections that contain them.
    Value,
    AttentionOutput,
    Up,
    Gate,
    Down,
    Other,
}

impl Role {
    fn of(name: &str) -> Role {
        match name {
            "output.weight" => Role::Output,
            "token_embd.weight" | "per_layer_token_embd.weight" => Role::Embedding,
            _ if name.contains("attn_qkv.weight") => Role::Value,
            _ if name.contains("attn_kv_b.weight") => Role::Value,
            _ if name.contains("attn_v.weight") => Role::Value,
            _ if name.contains("attn_k.weight") => Role::Key,
            _ if name.contains("attn_q.weight") => Role::Query,
            _ if name.contains("attn_output.weight") => Role::AttentionOutput,
            _ if name.contains("ffn_up") => Role::Up,
            _ if name.contains("ffn_gate") => Role::Gate,
            _ if name.contains("ffn_down") => Role::Down,
            _ => Role::Other,
        }
    }
}

/// What the rules need to know about a model.
#[derive(Clone, Debug, Default)]
pub struct MixModel {
    /// `general.architecture`.
    pub architecture: String,
    /// The number of layers.
    pub layers: usize,
    /// The number of experts; 0 without.
    pub experts: usize,
    /// Attention heads per KV head.
    pub heads_per_kv_head: usize,
    /// Whether there is an importance matrix.
    pub has_importance: bool,
}

/// The types of a file's tensors, by the rules of a mix.
#[derive(Clone, Debug)]
pub struct Mix {
    file_type: FileType,
    model: MixModel,
    /// No output matrix: the embedding is used as one.
    tied: bool,
    /// The names of all matrices of values, in the order of layers.
    values: Vec<String>,
    /// The names of the dense down projections, in the order of layers.
    downs: Vec<String>,
}

/// The layer of a tensor, from `blk.N.`.
pub(super) fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// Whether a tensor of this name and rank is quantized at all. Norms, routers, small convolutions and position embeddings
/// are not.
pub fn is_quantizable(name: &str, shape: &Shape) -> bool {
    const LEFT: &[&str] = &[
        "_norm.weight",
        "ffn_gate_inp.weight",
        "ffn_gate_tid2eid.weight",
        "altup",
        "laurel",
        "per_layer_model_proj",
        "ssm_conv1d",
        "shortconv.conv.weight",
        "indexer.k_proj.weight",
        "indexer.q_proj.weight",
        "time_mix_first.weight",
        "time_mix_w0.weight",
        "time_mix_w1.weight",
        "time_mix_w2.weight",
        "time_mix_v0.weight",
        "time_mix_v1.weight",
        "time_mix_v2.weight",
        "time_mix_a0.weight",
        "time_mix_a1.weight",
        "time_mix_a2.weight",
        "time_mix_g1.weight",
        "time_mix_g2.weight",
        "time_mix_decay_w1.weight",
        "time_mix_decay_w2.weight",
        "time_mix_lerp_fused.weight",
        "attn_rel_b.weight",
        ".position_embd",
        "sam.pos_embd",
        "sam.neck.",
        "sam.net_",
        ".rel_pos",
        ".patch_embd",
        ".patch_merger",
        "a.rvq.codebook",
        "mm.a.code_embd",
    ];
    // Dimensions of 1 outside do not make a vector a matrix.
    let is_matrix = shape.dims().iter().rev().skip(1).any(|dim| *dim > 1);
    let named = !matches!(name, "position_embd.weight" | "token_types.weight");
    is_matrix && named && name.ends_with("weight") && !LEFT.iter().any(|part| name.contains(part))
}

/// The type that a tensor gets whose rows are not whole blocks of `dtype`: `dtype` itself if they are.
pub fn fallback(dtype: DType, row_len: usize) -> DType {
    use DType::*;
    if row_len.is_multiple_of(dtype.block_len()) {
        return dtype;
    }
    let smaller = match dtype {
        IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S | IQ4_XS => IQ4_NL,
        Q2_K | Q3_K | TQ1_0 | TQ2_0 => Q4_0,
        Q4_K => Q5_0,
        Q5_K => Q5_1,
        Q6_K => Q8_0,
        NVFP4 => MXFP4,
        _ => F16,
    };
    if row_len.is_multiple_of(smaller.block_len()) { smaller } else { F16 }
}

/// Layers that get more bits: the first and last eighth, and every third between.
fn more_bits(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

impl Mix {
    /// The rules of a mix for a model whose tensors have these names.
    pub fn new<'a>(
        file_type: FileType,
        model: MixModel,
        names: impl IntoIterator<Item = (&'a str, &'a Shape)>,
    ) -> Mix {
        let (mut values, mut downs, mut tied) = (Vec::new(), Vec::new(), true);
        for (name, shape) in names {
            let role = Role::of(name);
            tied &= role != Role::Output;
            match role {
                Role::Value => values.push(name.to_owned()),
                Role::Down if is_quantizable(name, shape) => downs.push(name.to_owned()),
                _ => {}
            }
        }
        for names in [&mut values, &mut downs] {
            names.sort_by(|a, b| (layer_of(a), a).cmp(&(layer_of(b), b)));
        }
        Mix { file_type, model, tied, values, downs }
    }

    /// The type of a tensor that is quantized, before [`fallback`].
    pub fn choose(&self, name: &str, shape: &Shape) -> DType {
        use DType::*;
        let default = self.file_type.dtype();
        if !default.is_quantized() {
            return default;
        }
        let row_len = shape.dims().last().copied().unwrap_or_default();
        let role = Role::of(name);
        let mix = self.file_type.name();
        let falcon = self.model.architecture == "falcon";
        match role {
            Role::Output => self.output(row_len),
            Role::Embedding if self.tied => self.output(row_len),
            _ if mix == "MXFP4_MOE" => match shape.dims() {
                [.., experts, _, _] if *experts > 1 => MXFP4,
                _ => Q8_0,
            },
            Role::Embedding => match mix {
                "IQ2_XXS" | "IQ2_XS" | "IQ1_S" | "IQ1_M" => Q2_K,
                "IQ2_S" | "IQ2_M" | "IQ3_XXS" => IQ3_S,
                "TQ1_0" | "TQ2_0" => Q4_K,
                _ => default,
            },
            _ if matches!(mix, "IQ1_S" | "IQ1_M" | "IQ2_XXS" | "IQ2_XS" | "IQ2_S" | "IQ2_M") => {
                self.below_three_bits(role, name)
            }
            Role::Value => self.value(name),
            Role::Key if self.model.experts == 8 => Q8_0,
            Role::Key | Role::Query => match mix {
                "IQ3_XS" => IQ3_XXS,
                "IQ3_XXS" => IQ2_S,
                _ => default,
            },
            Role::Down => self.down(name, falcon),
            Role::AttentionOutput if falcon => {
                if mix == "Q3_K_L" {
                    Q4_K
                } else {
                    default
                }
            }
            Role::AttentionOutput if self.model.experts == 8 => match mix {
                "Q2_K" | "IQ3_XS" | "IQ3_XXS" | "Q3_K_S" | "Q3_K_M" | "IQ4_NL" | "Q4_K_S" | "Q4_K_M"
                | "IQ3_S" | "IQ3_M" | "IQ4_XS" => Q5_K,
                _ => default,
            },
            Role::AttentionOutput => match mix {
                "Q2_K" => Q3_K,
                "IQ3_XXS" => IQ3_S,
                "Q3_K_M" | "IQ3_M" => Q4_K,
                "Q3_K_L" => Q5_K,
                _ => default,
            },
            Role::Gate | Role::Up => {
                let layers = self.model.layers;
                let layer = layer_of(name).unwrap_or_default();
                let middle = layer >= layers / 8 && layer < 7 * layers / 8;
                if mix == "IQ3_XS" && middle { IQ3_XXS } else { default }
            }
            Role::Other => default,
        }
    }

    /// The output matrix, or the embedding that is used as one.
    fn output(&self, row_len: usize) -> DType {
        let default = self.file_type.dtype();
        let mix = self.file_type.name();
        let falcon = self.model.architecture == "falcon";
        match mix {
            "MXFP4_MOE" => DType::Q8_0,
            _ if falcon || !row_len.is_multiple_of(default.block_len()) => DType::Q8_0,
            "IQ2_XXS" | "IQ2_XS" | "IQ3_XXS" | "IQ1_S" | "IQ2_S" | "IQ2_M" | "IQ1_M" => DType::Q5_K,
            "Q8_0" => DType::Q8_0,
            _ => DType::Q6_K,
        }
    }

    /// The mixes of IQ1 and IQ2 types.
    fn below_three_bits(&self, role: Role, name: &str) -> DType {
        use DType::*;
        let (mix, default) = (self.file_type.name(), self.file_type.dtype());
        let larger = matches!(mix, "IQ2_S" | "IQ2_M");
        match role {
            Role::Value if self.model.heads_per_kv_head >= 4 || self.model.experts >= 4 => Q4_K,
            Role::Value => {
                if larger {
                    IQ3_S
                } else {
                    Q2_K
                }
            }
            Role::Key if self.model.experts == 8 => Q4_K,
            Role::Down if self.down_rank(name) < self.model.layers / 8 => {
                if larger {
                    IQ3_S
                } else {
                    Q2_K
                }
            }
            Role::AttentionOutput if self.model.experts == 8 => Q5_K,
            Role::AttentionOutput if larger => IQ3_S,
            Role::AttentionOutput if matches!(mix, "IQ1_S" | "IQ1_M") => IQ2_XXS,
            _ => default,
        }
    }

    /// The matrix of values, or the one of queries, keys and values.
    fn value(&self, name: &str) -> DType {
        use DType::*;
        let (mix, default) = (self.file_type.name(), self.file_type.dtype());
        let grouped = self.model.heads_per_kv_head >= 4;
        let rank = self.values.iter().position(|value| value == name).unwrap_or_default();
        let mut chosen = match mix {
            "Q2_K" => {
                if grouped {
                    Q4_K
                } else {
                    Q3_K
                }
            }
            "Q2_K_S" if grouped => Q4_K,
            "IQ3_XXS" if grouped => Q4_K,
            "IQ3_XXS" => {
                if self.model.has_importance {
                    IQ3_XXS
                } else {
                    IQ3_S
                }
            }
            "IQ3_XS" | "IQ3_S" if grouped => Q4_K,
            "IQ3_M" => Q4_K,
            "Q3_K_M" => {
                if rank < 2 {
                    Q5_K
                } else {
                    Q4_K
                }
            }
            "Q3_K_L" => Q5_K,
            "IQ4_NL" | "IQ4_XS" if grouped => Q5_K,
            "Q4_K_M" | "Q5_K_M" if more_bits(rank, self.values.len()) => Q6_K,
            "Q4_K_S" if rank < 4 => Q5_K,
            _ => default,
        };
        let model = &self.model;
        let seventy = match model.architecture.as_str() {
            "llama" => model.layers == 80 && model.heads_per_kv_head > 1,
            "qwen2" | "deci" | "olmo" => model.layers == 80,
            "jais2" => model.layers == 68,
            _ => false,
        };
        if seventy && matches!(chosen, Q3_K | Q4_K) {
            chosen = Q5_K;
        }
        if model.experts == 8 { Q8_0 } else { chosen }
    }

    /// The place of a down projection among all of them: its layer, where there are experts.
    fn down_rank(&self, name: &str) -> usize {
        if self.model.experts > 1 {
            return layer_of(name).unwrap_or_default();
        }
        self.downs.iter().position(|down| down == name).unwrap_or_default()
    }

    fn down(&self, name: &str, falcon: bool) -> DType {
        use DType::*;
        let (mix, default) = (self.file_type.name(), self.file_type.dtype());
        let (layer, layers) = (self.down_rank(name), self.model.layers);
        let (first_eighth, more) = (layer < layers / 8, more_bits(layer, layers.max(1)));
        let important = self.model.has_importance;
        match mix {
            "Q2_K" => Q3_K,
            "Q2_K_S" if first_eighth => Q4_K,
            "IQ3_XXS" if !important => {
                if first_eighth {
                    Q4_K
                } else {
                    Q3_K
                }
            }
            "Q3_K_M" if layer < layers / 16 => Q5_K,
            "Q3_K_M" if !falcon || more => Q4_K,
            "IQ3_M" if first_eighth || (self.model.experts == 8 && more) => Q4_K,
            "Q3_K_L" => {
                if falcon {
                    Q4_K
                } else {
                    Q5_K
                }
            }
            "Q4_K_M" if falcon && layer < layers / 16 => Q6_K,
            "Q4_K_M" if falcon => {
                if more {
                    Q5_K
                } else {
                    Q4_K
                }
            }
            "Q4_K_M" | "Q5_K_M" if more => Q6_K,
            "IQ4_NL" | "IQ4_XS" if first_eighth && !important => Q5_K,
            "Q4_K_S" if !falcon && first_eighth => Q5_K,
            "Q4_0" if important && first_eighth => Q4_1,
            "Q5_0" if important && first_eighth => Q5_1,
            _ => default,
        }
    }
}

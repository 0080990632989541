//! Models with recurrent layers.

use quadriga_graph::DType;

use super::{Parts, Recipe};

/// The recurrent layers of a random model.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum RecurrentRecipe {
    /// Short convolutions with gates, but for every third layer.
    ShortConvolutions { kernel: usize },
    /// State spaces in all layers, without feed-forward networks: [`HEADS`] heads of [`LENGTH`] elements, [`GROUPS`] groups with keys
    /// of [`STATE`] elements.
    StateSpace,
}

pub const HEADS: usize = 6;
pub const LENGTH: usize = 12;
pub const GROUPS: usize = 2;
pub const STATE: usize = 8;
/// Tokens that the convolution of a state space sees.
pub const KERNEL: usize = 4;

impl RecurrentRecipe {
    /// Whether a layer is recurrent.
    pub fn has(self, layer: usize) -> bool {
        match self {
            RecurrentRecipe::ShortConvolutions { .. } => layer % 3 != 2,
            RecurrentRecipe::StateSpace => true,
        }
    }

    pub fn add_keys(self, recipe: &Recipe, parts: &mut Parts) {
        let key = |key: &str| format!("{}.{key}", recipe.architecture);
        match self {
            RecurrentRecipe::ShortConvolutions { kernel } => {
                let heads = |layer: usize| if self.has(layer) { 0 } else { recipe.kv_heads as u32 };
                parts.set(&key("attention.head_count_kv"), (0..recipe.layers).map(heads).collect::<Vec<_>>());
                parts.set(&key("shortconv.l_cache"), kernel as u32);
            }
            RecurrentRecipe::StateSpace => {
                for (name, value) in [
                    ("conv_kernel", KERNEL),
                    ("group_count", GROUPS),
                    ("time_step_rank", HEADS),
                    ("state_size", STATE),
                    ("inner_size", HEADS * LENGTH),
                ] {
                    parts.set(&key(&format!("ssm.{name}")), value as u32);
                }
            }
        }
    }

    pub fn add_tensors(self, recipe: &Recipe, layer: usize, parts: &mut Parts) {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let width = recipe.width;
        match self {
            RecurrentRecipe::ShortConvolutions { kernel } => {
                parts.matrix(&name("shortconv.in_proj.weight"), recipe.dtype, [3 * width, width], 1.5);
                parts.matrix(&name("shortconv.conv.weight"), DType::F32, [width, kernel], 1.5);
                parts.matrix(&name("shortconv.out_proj.weight"), recipe.dtype, [width, width], 1.0);
            }
            RecurrentRecipe::StateSpace => {
                let (inner, channels) = (HEADS * LENGTH, HEADS * LENGTH + 2 * GROUPS * STATE);
                parts.matrix(&name("ssm_in.weight"), recipe.dtype, [inner + channels + HEADS, width], 1.5);
                parts.matrix(&name("ssm_conv1d.weight"), DType::F32, [channels, KERNEL], 1.5);
                parts.vector(&name("ssm_conv1d.bias"), channels, 0.0, 0.5);
                parts.vector(&name("ssm_dt.bias"), HEADS, 0.0, 1.0);
                for (part, middle) in [("ssm_a", -0.5), ("ssm_d", 0.7)] {
                    parts.vector(&name(part), HEADS, middle, 0.4);
                    parts.tensors.last_mut().unwrap().2 = vec![HEADS, 1];
                }
                parts.vector(&name("ssm_norm.weight"), inner, 1.0, 0.5);
                parts.tensors.last_mut().unwrap().2 = vec![GROUPS, inner / GROUPS];
                parts.matrix(&name("ssm_out.weight"), recipe.dtype, [width, inner], 1.0);
            }
        }
    }
}

/// A model whose layers have the gated delta rule, but for every fourth one.
pub fn parts_of(recipe: &Recipe) -> Parts {
    let mut parts = recipe.parts();
    for (key, value) in [
        ("conv_kernel", 4),
        ("group_count", 2),
        ("time_step_rank", 6),
        ("state_size", 8),
        ("inner_size", 6 * 12),
    ] {
        parts.set(&format!("{}.ssm.{key}", recipe.architecture), value as u32);
    }
    let (width, keys, values) = (recipe.width, 2 * 8, 6 * 12);
    for layer in 0..recipe.layers {
        let name = |part: &str| format!("blk.{layer}.{part}");
        parts.remove(&name("ffn_norm.weight"));
        parts.vector(&name("post_attention_norm.weight"), width, 1.0, 0.5);
        parts.remove(&name("attn_q.weight"));
        if layer % 4 == 3 {
            let queries = 2 * recipe.heads * recipe.key_length;
            parts.matrix(&name("attn_q.weight"), DType::F32, [queries, width], 2.0);
            parts.vector(&name("attn_q_norm.weight"), recipe.key_length, 1.5, 0.5);
            parts.vector(&name("attn_k_norm.weight"), recipe.key_length, 1.5, 0.5);
            continue;
        }
        for part in ["attn_k", "attn_v", "attn_output"] {
            parts.remove(&name(&format!("{part}.weight")));
        }
        for (part, shape, size) in [
            ("attn_qkv", [2 * keys + values, width], 1.0),
            ("attn_gate", [values, width], 1.0),
            ("ssm_beta", [6, width], 1.0),
            ("ssm_alpha", [6, width], 1.0),
            ("ssm_ba", [12, width], 1.0),
            ("ssm_conv1d", [2 * keys + values, 4], 1.0),
            ("ssm_out", [width, values], 1.0),
        ] {
            let is_one = part == "ssm_ba";
            if ["ssm_beta", "ssm_alpha", "ssm_ba"].contains(&part)
                && is_one != (recipe.architecture == "qwen3next")
            {
                continue;
            }
            parts.matrix(&name(&format!("{part}.weight")), DType::F32, shape, size);
        }
        parts.vector(&name("ssm_dt.bias"), 6, 0.0, 1.0);
        parts.vector(&name("ssm_a"), 6, -0.5, 0.4);
        parts.vector(&name("ssm_norm.weight"), 12, 1.0, 0.5);
    }
    parts
}

//! Random models with latent attention.

use super::{Parts, Recipe};

/// The latent attention of a random model. The recipe's head lengths are those of the expanded form.
#[derive(Clone, Copy, Debug)]
pub struct LatentRecipe {
    pub rank: usize,
    pub query_rank: Option<usize>,
    /// Whether the file has separate matrices for keys and values.
    pub separate: bool,
    /// YaRN's, as the file has it.
    pub log_multiplier: Option<f32>,
}

impl LatentRecipe {
    pub fn add_keys(&self, recipe: &Recipe, parts: &mut Parts) {
        let mut number = |key: &str, value: usize| {
            parts.set(&format!("{}.{key}", recipe.architecture), value as u32);
        };
        number("attention.kv_lora_rank", self.rank);
        if let Some(rank) = self.query_rank {
            number("attention.q_lora_rank", rank);
        }
        if self.separate {
            number("attention.head_count_kv", 1);
            number("attention.key_length", self.rank + recipe.rope_dims);
            number("attention.value_length", self.rank);
            number("attention.key_length_mla", recipe.key_length);
            number("attention.value_length_mla", recipe.value_length);
        }
        if let Some(multiplier) = self.log_multiplier {
            parts.set(&format!("{}.rope.scaling.yarn_log_multiplier", recipe.architecture), multiplier);
        }
    }

    pub fn add_tensors(&self, recipe: &Recipe, layer: usize, parts: &mut Parts) {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let Recipe { heads, key_length, value_length, width, rope_dims, .. } = *recipe;
        let plain = key_length - rope_dims;
        match self.query_rank {
            Some(rank) => {
                parts.matrix(&name("attn_q_a"), recipe.dtype, [rank, width], 1.0);
                parts.vector(&name("attn_q_a_norm"), rank, 1.0, 0.5);
                parts.matrix(&name("attn_q_b"), recipe.dtype, [heads * key_length, rank], 2.0);
            }
            None => parts.matrix(&name("attn_q"), recipe.dtype, [heads * key_length, width], 2.0),
        }
        parts.matrix(&name("attn_kv_a_mqa"), recipe.dtype, [self.rank + rope_dims, width], 2.0);
        parts.vector(&name("attn_kv_a_norm"), self.rank, 1.0, 0.5);
        if self.separate {
            parts.stack(&name("attn_k_b"), recipe.dtype, heads, [self.rank, plain]);
            parts.stack(&name("attn_v_b"), recipe.dtype, heads, [value_length, self.rank]);
        } else {
            parts.matrix(&name("attn_kv_b"), recipe.dtype, [heads * (plain + value_length), self.rank], 1.0);
        }
        parts.matrix(&name("attn_output"), recipe.dtype, [width, heads * value_length], 1.0);
    }
}

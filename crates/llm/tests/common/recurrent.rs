//! Models with recurrent layers.

use quadriga_graph::DType;

use super::{Parts, Recipe};

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
        parts.set(&format!("qwen35.ssm.{key}"), value as u32);
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
            ("ssm_conv1d", [2 * keys + values, 4], 1.0),
            ("ssm_out", [width, values], 1.0),
        ] {
            parts.matrix(&name(&format!("{part}.weight")), DType::F32, shape, size);
        }
        parts.vector(&name("ssm_dt.bias"), 6, 0.0, 1.0);
        parts.vector(&name("ssm_a"), 6, -0.5, 0.4);
        parts.vector(&name("ssm_norm.weight"), 12, 1.0, 0.5);
    }
    parts
}

//! The parts of a model that its tensors belong to, by name.

use std::fmt;

use quadriga_graph::layer_of;
use serde::Serialize;

/// The part of a model that a weight or state belongs to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorClass {
    /// Projections of attention or of recurrent layers, norms, RoPE factors.
    Attention,
    /// The selection of experts.
    Router,
    /// Experts that every token uses.
    SharedExperts,
    /// Experts that a router selects.
    Experts,
    /// Dense feed-forward networks.
    FeedForward,
    /// Token embeddings and the like.
    Embeddings,
    /// The output matrix and the norm before it, or a classification head.
    Output,
    /// The KV cache, and states of recurrent layers.
    KvCache,
}

impl TensorClass {
    /// All classes, in the order of reports.
    pub const ALL: [TensorClass; 8] = [
        TensorClass::Attention,
        TensorClass::Router,
        TensorClass::SharedExperts,
        TensorClass::Experts,
        TensorClass::FeedForward,
        TensorClass::Embeddings,
        TensorClass::Output,
        TensorClass::KvCache,
    ];

    /// The class of a weight, by its name in GGUF files.
    pub fn of_weight(name: &str) -> TensorClass {
        let Some(layer) = layer_of(name) else {
            return match name {
                _ if ["output", "cls", "altup_unembd"].iter().any(|part| name.starts_with(part)) => {
                    TensorClass::Output
                }
                _ if name.starts_with("rope_f") => TensorClass::Attention,
                _ => TensorClass::Embeddings,
            };
        };
        let part = name.strip_prefix(&format!("blk.{layer}.")).unwrap_or(name);
        match part.split('.').next().unwrap_or_default() {
            part if is_expert(part) => TensorClass::Experts,
            part if part.contains("_shexp") => TensorClass::SharedExperts,
            "ffn_gate_inp" | "exp_probs_b" => TensorClass::Router,
            part if part.contains("norm") => TensorClass::Attention,
            part if part.starts_with("ffn_") => TensorClass::FeedForward,
            _ => TensorClass::Attention,
        }
    }
}

/// Whether a layer's tensor belongs to experts that a router selects: llama.cpp's `ffn_(up|down|gate|gate_up)_(ch|)exps`.
fn is_expert(part: &str) -> bool {
    part.strip_prefix("ffn_").is_some_and(|part| part.ends_with("_exps") || part.ends_with("_chexps"))
}

impl fmt::Display for TensorClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            TensorClass::Attention => "attention",
            TensorClass::Router => "routers",
            TensorClass::SharedExperts => "shared experts",
            TensorClass::Experts => "experts",
            TensorClass::FeedForward => "feed-forward",
            TensorClass::Embeddings => "embeddings",
            TensorClass::Output => "output",
            TensorClass::KvCache => "KV cache",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_the_class() {
        for (name, class) in [
            ("blk.0.attn_q.weight", TensorClass::Attention),
            ("blk.12.ffn_norm.weight", TensorClass::Attention),
            ("blk.12.attn_qkv.weight.q", TensorClass::Attention),
            ("blk.3.ssm_conv1d.weight", TensorClass::Attention),
            ("rope_freqs.weight", TensorClass::Attention),
            ("blk.7.ffn_gate_inp.weight", TensorClass::Router),
            ("blk.7.exp_probs_b.bias", TensorClass::Router),
            ("blk.7.ffn_gate_inp_shexp.weight", TensorClass::SharedExperts),
            ("blk.7.ffn_down_shexp.weight", TensorClass::SharedExperts),
            ("blk.7.ffn_down_exps.weight", TensorClass::Experts),
            ("blk.7.ffn_gate_up_exps.bias", TensorClass::Experts),
            ("blk.7.ffn_up_chexps.weight", TensorClass::Experts),
            ("blk.7.ffn_down.weight", TensorClass::FeedForward),
            ("token_embd.weight", TensorClass::Embeddings),
            ("position_embd.weight", TensorClass::Embeddings),
            ("per_layer_token_embd.weight", TensorClass::Embeddings),
            ("altup_unembd_proj.weight", TensorClass::Output),
            ("output_norm.weight", TensorClass::Output),
            ("output.weight", TensorClass::Output),
        ] {
            assert_eq!(TensorClass::of_weight(name), class, "{name}");
        }
    }
}

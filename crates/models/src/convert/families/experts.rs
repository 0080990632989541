//! Families with experts, other than DeepSeek's.

use super::super::builder::FileBuilder;
use super::super::common::{LayerRules, common_keys, require_layout, require_rope_period};
use super::super::error::ConvertResult;
use super::super::output::OutputTensor;
use super::super::source::Source;
use super::dense::{glm_keys, granite_keys, llama_globals, llama_keys};
use super::fused::{FusedLayout, alternate, fused_experts, half};
use super::{Family, USUAL};

pub(super) static FAMILIES: &[Family] = &[
    Family {
        classes: &["Qwen2MoeForCausalLM"],
        architecture: "qwen2moe",
        keys: |builder| {
            builder.require("norm_topk_prob", &["false"])?;
            qwen_keys(builder)
        },
        layer: qwen_layer,
        ..USUAL
    },
    Family {
        classes: &["Qwen3MoeForCausalLM"],
        architecture: "qwen3moe",
        keys: |builder| {
            builder.require("norm_topk_prob", &["true"])?;
            qwen_keys(builder)
        },
        layer: qwen_layer,
        ..USUAL
    },
    Family {
        classes: &["OlmoeForCausalLM"],
        architecture: "olmoe",
        keys: |builder| {
            builder.require("norm_topk_prob", &["false"])?;
            builder.require("clip_qkv", &["null"])?;
            common_keys(builder)?;
            expert_keys(builder)?;
            let epsilon = builder.config.find_number(&["rms_norm_eps"])?.unwrap_or(1e-5);
            builder.set_number("attention.layer_norm_rms_epsilon", epsilon);
            Ok(())
        },
        layer: qwen_layer,
        ..USUAL
    },
    Family {
        classes: &["GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"],
        architecture: "granitemoe",
        keys: |builder| {
            granite_keys(builder)?;
            builder.copy_count("expert_shared_feed_forward_length", &["shared_intermediate_size"])
        },
        globals: llama_globals,
        layer: granite_layer,
        ..USUAL
    },
    Family {
        classes: &["GptOssForCausalLM"],
        architecture: "gpt-oss",
        keys: |builder| {
            common_keys(builder)?;
            expert_keys(builder)?;
            builder.copy_count("attention.sliding_window", &["sliding_window"])?;
            builder.copy_count("expert_feed_forward_length", &["intermediate_size"])?;
            let length = builder.head_length()?;
            builder.set_count("rope.dimension_count", length);
            Ok(())
        },
        layer: gpt_oss_layer,
        ..USUAL
    },
    Family {
        classes: &["Glm4MoeForCausalLM"],
        architecture: "glm4moe",
        keys: glm4moe_keys,
        layer: |builder, layer| shared_expert_layer(builder, layer, &POST_NORM),
        ..USUAL
    },
    Family {
        classes: &["SmallThinkerForCausalLM"],
        architecture: "smallthinker",
        keys: smallthinker_keys,
        layer: smallthinker_layer,
        ..USUAL
    },
    Family {
        classes: &["Llama4ForCausalLM", "Llama4ForConditionalGeneration"],
        architecture: "llama4",
        keys: llama4_keys,
        globals: llama_globals,
        layer: llama4_layer,
        ..USUAL
    },
];

/// The norm before the feed-forward network is called after what it follows.
pub(super) const POST_NORM: LayerRules =
    LayerRules { parts: &[("post_attention_layernorm", "post_attention_norm")], ..LayerRules::PLAIN };

const GPT_OSS: LayerRules = LayerRules {
    parts: &[("post_attention_layernorm", "post_attention_norm"), ("mlp.router", "ffn_gate_inp")],
    ..LayerRules::PLAIN
};

/// The parts of an expert.
pub(super) const PARTS: [(&str, &str); 3] =
    [("gate_proj", "ffn_gate_exps"), ("up_proj", "ffn_up_exps"), ("down_proj", "ffn_down_exps")];

/// The numbers of experts.
pub(super) fn expert_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    builder.copy_count("expert_count", &["num_local_experts", "num_experts", "n_routed_experts"])?;
    builder.copy_count("expert_used_count", &["num_experts_per_tok", "num_experts_per_token"])?;
    builder.copy_count("expert_feed_forward_length", &["moe_intermediate_size"])
}

/// Qwen's experts: all layers have them.
pub(super) fn qwen_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    builder.require("decoder_sparse_step", &["1"])?;
    builder.require("mlp_only_layers", &["[]"])?;
    builder.require("use_sliding_window", &["false"])?;
    common_keys(builder)?;
    expert_keys(builder)?;
    builder.copy_count("expert_shared_feed_forward_length", &["shared_expert_intermediate_size"])
}

/// Experts, their router, and an expert for all tokens.
pub(super) fn qwen_experts(builder: &mut FileBuilder<'_>, layer: usize) -> ConvertResult<()> {
    let (from, to) = (format!("layers.{layer}.mlp."), format!("blk.{layer}."));
    builder.stack_experts(&format!("{from}experts"), &PARTS, &to)?;
    fused_experts(builder, &format!("{from}experts."), layer, FusedLayout::Rows)?;
    builder.copy_part(&format!("{from}gate"), &format!("{to}ffn_gate_inp"))?;
    for (part, name) in
        [("gate_proj", "ffn_gate_shexp"), ("up_proj", "ffn_up_shexp"), ("down_proj", "ffn_down_shexp")]
    {
        builder.copy_part(&format!("{from}shared_expert.{part}"), &format!("{to}{name}"))?;
        builder.copy_part(&format!("{from}shared_experts.{part}"), &format!("{to}{name}"))?;
    }
    // One row: a vector.
    if let Some(gate) = builder.find(&format!("{from}shared_expert_gate.weight"))? {
        let width = gate.elements();
        builder
            .push(OutputTensor::whole(&format!("{to}ffn_gate_inp_shexp.weight"), gate.reshaped(&[width])?));
    }
    Ok(())
}

fn qwen_layer(builder: &mut FileBuilder<'_>, layer: usize) -> ConvertResult<()> {
    qwen_experts(builder, layer)?;
    LayerRules::PLAIN.layer(builder, &format!("layers.{layer}."), layer)
}

/// Experts behind dense layers, with a bias of the selection.
pub(super) fn shared_expert_layer(
    builder: &mut FileBuilder<'_>,
    layer: usize,
    rules: &LayerRules,
) -> ConvertResult<()> {
    qwen_experts(builder, layer)?;
    let bias = format!("layers.{layer}.mlp.gate.e_score_correction_bias");
    builder.copy(&bias, &format!("blk.{layer}.exp_probs_b.bias"))?;
    rules.layer(builder, &format!("layers.{layer}."), layer)
}

fn granite_layer(builder: &mut FileBuilder<'_>, layer: usize) -> ConvertResult<()> {
    let (from, to) = (format!("layers.{layer}."), format!("blk.{layer}."));
    if let Some(both) = builder.find(&format!("{from}block_sparse_moe.input_linear.weight"))? {
        builder.push(half(&format!("{to}ffn_gate_exps.weight"), &both, FusedLayout::Rows, false)?);
        builder.push(half(&format!("{to}ffn_up_exps.weight"), &both, FusedLayout::Rows, true)?);
    }
    builder.copy(
        &format!("{from}block_sparse_moe.output_linear.weight"),
        &format!("{to}ffn_down_exps.weight"),
    )?;
    builder
        .copy(&format!("{from}block_sparse_moe.router.layer.weight"), &format!("{to}ffn_gate_inp.weight"))?;
    if let Some(both) = builder.find(&format!("{from}shared_mlp.input_linear.weight"))? {
        let (rows, columns) = (both.rows(), both.columns());
        let both: Source = both.reshaped(&[1, rows, columns])?;
        for (name, second) in [("ffn_gate_shexp", false), ("ffn_up_shexp", true)] {
            let tensor = half(&format!("{to}{name}.weight"), &both, FusedLayout::Rows, second)?;
            builder.push(tensor.with_dims(vec![rows / 2, columns]));
        }
    }
    builder.copy(&format!("{from}shared_mlp.output_linear.weight"), &format!("{to}ffn_down_shexp.weight"))?;
    LayerRules::INTERLEAVED.layer(builder, &from, layer)
}

fn gpt_oss_layer(builder: &mut FileBuilder<'_>, layer: usize) -> ConvertResult<()> {
    let (from, to) = (format!("layers.{layer}."), format!("blk.{layer}."));
    let experts = format!("{from}mlp.experts.");
    let packed = |part: &str| builder.store.find_mxfp4(&format!("{}{experts}{part}", builder.prefix));
    match (packed("gate_up_proj")?, packed("down_proj")?) {
        (Some(both), Some(down)) => {
            builder.push(half(
                &format!("{to}ffn_gate_exps.weight"),
                &both,
                FusedLayout::AlternatingRows,
                false,
            )?);
            builder.push(half(
                &format!("{to}ffn_up_exps.weight"),
                &both,
                FusedLayout::AlternatingRows,
                true,
            )?);
            builder.push(OutputTensor::whole(&format!("{to}ffn_down_exps.weight"), down));
        }
        _ => {
            fused_experts(builder, &experts, layer, FusedLayout::AlternatingColumns)?;
        }
    }
    if let Some(bias) = builder.find(&format!("{experts}gate_up_proj_bias"))? {
        builder.push(alternate(&format!("{to}ffn_gate_exps.bias"), bias.clone(), false)?);
        builder.push(alternate(&format!("{to}ffn_up_exps.bias"), bias, true)?);
    }
    builder.copy(&format!("{experts}down_proj_bias"), &format!("{to}ffn_down_exps.bias"))?;
    builder.copy(&format!("{from}self_attn.sinks"), &format!("{to}attn_sinks.weight"))?;
    GPT_OSS.layer(builder, &from, layer)
}

fn glm4moe_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    glm_keys(builder)?;
    expert_keys(builder)?;
    let config = builder.config;
    builder.copy_count("expert_shared_count", &["n_shared_experts"])?;
    builder.copy_count("leading_dense_block_count", &["first_k_dense_replace"])?;
    builder.copy_count("expert_group_count", &["n_group"])?;
    builder.copy_count("expert_group_used_count", &["topk_group"])?;
    builder.set_count("expert_gating_func", 2);
    builder.copy_number("expert_weights_scale", &["routed_scaling_factor"])?;
    builder.set("expert_weights_norm", config.flag("norm_topk_prob")?.unwrap_or(true));
    Ok(())
}

fn smallthinker_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    common_keys(builder)?;
    let config = builder.config;
    builder.copy_count("expert_count", &["moe_num_primary_experts", "num_experts"])?;
    builder.copy_count("expert_used_count", &["moe_num_active_primary_experts", "num_experts_per_tok"])?;
    let width = config.count(&["moe_ffn_hidden_size", "moe_intermediate_size"])?;
    builder.set_count("expert_feed_forward_length", width);
    builder.set_count("feed_forward_length", width);
    let softmax = config.flag("moe_primary_router_apply_softmax")?.unwrap_or(false);
    builder.set_count("expert_gating_func", if softmax { 1 } else { 2 });
    let windows = config.numbers("sliding_window_layout")?;
    let has_windows = windows.as_ref().is_some_and(|layout| layout.iter().any(|kind| *kind != 0.0));
    // In the graph, layers without a window have no rotary embedding either: every fourth from the first on, or none.
    let is_local = |layer: usize| !layer.is_multiple_of(4);
    if let Some(layout) = windows.filter(|_| has_windows) {
        require_layout(builder, "sliding_window_layout", &layout, is_local)?;
    }
    if let Some(layout) = config.numbers("rope_layout")? {
        require_layout(builder, "rope_layout", &layout, |layer| !has_windows || is_local(layer))?;
    }
    if has_windows {
        builder.copy_count("attention.sliding_window", &["sliding_window_size", "sliding_window"])?;
    }
    Ok(())
}

fn smallthinker_layer(builder: &mut FileBuilder<'_>, layer: usize) -> ConvertResult<()> {
    let (from, to) = (format!("layers.{layer}."), format!("blk.{layer}."));
    let parts = [("gate", "ffn_gate_exps"), ("up", "ffn_up_exps"), ("down", "ffn_down_exps")];
    builder.stack_experts(&format!("{from}block_sparse_moe.experts"), &parts, &to)?;
    builder.copy_part(&format!("{from}block_sparse_moe.primary_router"), &format!("{to}ffn_gate_inp"))?;
    LayerRules::PLAIN.layer(builder, &from, layer)
}

fn llama4_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    require_rope_period(builder, 4)?;
    llama_keys(builder)?;
    let config = builder.config;
    builder.copy_count("feed_forward_length", &["intermediate_size_mlp"])?;
    builder.copy_count("expert_feed_forward_length", &["intermediate_size"])?;
    let step = config.find_count(&["interleave_moe_layer_step"])?.unwrap_or(1);
    builder.set_count("interleave_moe_layer_step", step);
    builder.copy_count("attention.sliding_window", &["attention_chunk_size"])?;
    if let Some(types) = config.texts("layer_types")? {
        let is_full = |kind: &&str| *kind == "full_attention";
        let periodic =
            types.iter().enumerate().all(|(layer, kind)| is_full(kind) == (layer + 1).is_multiple_of(4));
        if types.iter().all(is_full) {
            builder.set_count("attention.sliding_window", 0);
        } else if !periodic {
            return Err(config.unsupported("layer_types", "not every fourth full_attention"));
        }
    }
    Ok(())
}

fn llama4_layer(builder: &mut FileBuilder<'_>, layer: usize) -> ConvertResult<()> {
    let (from, to) = (format!("layers.{layer}."), format!("blk.{layer}."));
    let own = format!("{from}feed_forward.");
    fused_experts(builder, &format!("{own}experts."), layer, FusedLayout::Columns)?;
    builder.copy_part(&format!("{own}router"), &format!("{to}ffn_gate_inp"))?;
    for (part, name) in [("gate_proj", "ffn_gate"), ("up_proj", "ffn_up"), ("down_proj", "ffn_down")] {
        builder.copy_part(&format!("{own}{part}"), &format!("{to}{name}"))?;
        builder.copy_part(&format!("{own}shared_expert.{part}"), &format!("{to}{name}_shexp"))?;
    }
    LayerRules::PLAIN.layer(builder, &from, layer)
}

//! DeepSeek V2 and V3 and models of their kind: latent attention.

use super::super::builder::FileBuilder;
use super::super::common::{LayerRules, common_keys, rope_parameters, yarn_attention_factor};
use super::super::error::ConvertResult;
use super::super::output::{OutputTensor, RowSource};
use super::super::source::wrong_shape;
use super::experts::{expert_keys, shared_expert_layer};
use super::{Family, USUAL};

pub(super) static FAMILIES: &[Family] = &[Family {
    classes: &["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"],
    architecture: "deepseek2",
    keys,
    layer,
    ..USUAL
}];

const RULES: LayerRules = LayerRules {
    parts: &[
        ("self_attn.q_a_proj", "attn_q_a"),
        ("self_attn.q_a_layernorm", "attn_q_a_norm"),
        ("self_attn.q_b_proj", "attn_q_b"),
        ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
        ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ],
    ..LayerRules::PLAIN
};

fn keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    common_keys(builder)?;
    expert_keys(builder)?;
    let config = builder.config;
    let epsilon = config.find_number(&["rms_norm_eps"])?.unwrap_or(1e-6);
    builder.set_number("attention.layer_norm_rms_epsilon", epsilon);
    // Keys and values of all heads are made of one cached vector.
    builder.set_count("attention.head_count_kv", 1);
    let has_experts = config.find_count(&["n_routed_experts", "num_local_experts"])?.is_some();
    let dense = config.find_count(&["first_k_dense_replace"])?;
    builder.set_count(
        "leading_dense_block_count",
        dense.unwrap_or(if has_experts { 0 } else { builder.layers }),
    );
    let (rank, rotated) = (config.count(&["kv_lora_rank"])?, config.count(&["qk_rope_head_dim"])?);
    builder.copy_count("attention.q_lora_rank", &["q_lora_rank"])?;
    builder.set_count("attention.kv_lora_rank", rank);
    builder.set_count("attention.key_length", rank + rotated);
    builder.set_count("attention.value_length", rank);
    builder.set_count("attention.key_length_mla", config.count(&["qk_nope_head_dim"])? + rotated);
    builder.set_count("attention.value_length_mla", config.count(&["v_head_dim"])?);
    builder.set_count("rope.dimension_count", rotated);
    let width = config.count(&["moe_intermediate_size", "intermediate_size"])?;
    builder.set_count("expert_feed_forward_length", width);
    builder.set_count("expert_shared_count", config.find_count(&["n_shared_experts"])?.unwrap_or(0));
    let is_v2 = config.class().contains("V2");
    let default = if is_v2 { "greedy" } else { "noaux_tc" };
    match (config.text(&["topk_method"])?.unwrap_or(default), is_v2) {
        ("greedy", _) => {}
        // Files do not name the score of a group: it follows from the selection bias, which models with `noaux_tc` have.
        ("group_limited_greedy", true) | ("noaux_tc", false) => {
            builder.copy_count("expert_group_count", &["n_group"])?;
            builder.copy_count("expert_group_used_count", &["topk_group"])?;
        }
        (other, _) => return Err(config.unsupported("topk_method", other)),
    }
    builder.copy_number("expert_weights_scale", &["routed_scaling_factor"])?;
    if config.flag("norm_topk_prob")?.unwrap_or(!is_v2) && !is_v2 {
        builder.set("expert_weights_norm", true);
    }
    match config.text(&["scoring_func"])? {
        Some("sigmoid") => builder.set_count("expert_gating_func", 2),
        Some("softmax") => builder.set_count("expert_gating_func", 1),
        None => builder.set_count("expert_gating_func", if is_v2 { 1 } else { 2 }),
        Some(other) => return Err(config.unsupported("scoring_func", other)),
    }
    if let Some(parameters) = rope_parameters(config)?
        && let Some(all) = parameters.find_number(&["mscale_all_dim"])?
    {
        builder.set_number("rope.scaling.yarn_log_multiplier", 0.1 * all);
        // With that key the graph does not multiply by YaRN's own factor.
        if parameters.text(&["rope_type", "type"])? == Some("yarn")
            && let Some(factor) = parameters.find_number(&["factor"])?
            && let Some(wanted) = yarn_attention_factor(&parameters, factor)?
        {
            builder.set_number("rope.scaling.attn_factor", wanted);
        }
    }
    Ok(())
}

fn layer(builder: &mut FileBuilder<'_>, layer: usize) -> ConvertResult<()> {
    let name = format!("layers.{layer}.self_attn.kv_b_proj.weight");
    let source = builder.need(&name)?;
    let config = builder.config;
    let (heads, plain, values) =
        (builder.heads.0, config.count(&["qk_nope_head_dim"])?, config.count(&["v_head_dim"])?);
    let (rows, rank) = (source.rows(), source.columns());
    if rows != heads * (plain + values) {
        return Err(wrong_shape(&source, &format!("[{}, {rank}]", heads * (plain + values))));
    }
    // Keys are multiplied with queries instead, which needs the transposed matrix of each head.
    let each = plain + values;
    let key = OutputTensor::rows(
        &format!("blk.{layer}.attn_k_b.weight"),
        vec![heads, rank, plain],
        vec![source.clone()],
        move |row| RowSource { source: 0, start: row / rank * each * rank + row % rank, step: rank },
    );
    let value = OutputTensor::rows(
        &format!("blk.{layer}.attn_v_b.weight"),
        vec![heads, values, rank],
        vec![source],
        move |row| RowSource {
            source: 0,
            start: (row / values * each + plain + row % values) * rank,
            step: 1,
        },
    );
    builder.push(key);
    builder.push(value);
    shared_expert_layer(builder, layer, &RULES)
}

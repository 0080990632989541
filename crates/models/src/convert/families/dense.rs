//! Families without experts: Llama and its kin.

use super::super::builder::FileBuilder;
use super::super::common::{
    LayerRules, common_keys, llama3_factors, output_matrix, positive, require_rope_period, rope_parameters,
};
use super::super::error::ConvertResult;
use super::super::output::{OutputTensor, RowSource};
use super::super::source::wrong_shape;
use super::{Family, USUAL};

pub(super) static FAMILIES: &[Family] = &[
    Family {
        classes: &[
            "LlamaForCausalLM",
            "LLaMAForCausalLM",
            "MistralForCausalLM",
            "MixtralForCausalLM",
            "LlamaModel",
        ],
        architecture: "llama",
        keys: llama_keys,
        globals: llama_globals,
        layer: llama_layer,
        ..USUAL
    },
    Family {
        classes: &["BambooForCausalLM"],
        architecture: "bamboo",
        keys: llama_keys,
        globals: llama_globals,
        layer: llama_layer,
        ..USUAL
    },
    Family {
        classes: &["SmolLM3ForCausalLM"],
        architecture: "smollm3",
        keys: |builder| {
            builder.require("use_sliding_window", &["false"])?;
            require_rope_period(builder, 4)?;
            llama_keys(builder)
        },
        globals: llama_globals,
        layer: llama_layer,
        ..USUAL
    },
    Family {
        classes: &["GraniteForCausalLM"],
        architecture: "granite",
        keys: granite_keys,
        globals: llama_globals,
        layer: llama_layer,
        ..USUAL
    },
    Family { classes: &["Qwen2ForCausalLM", "Qwen2Model"], architecture: "qwen2", keys: qwen_keys, ..USUAL },
    Family { classes: &["Qwen3ForCausalLM", "Qwen3Model"], architecture: "qwen3", keys: qwen_keys, ..USUAL },
    Family {
        classes: &["Phi3ForCausalLM"],
        architecture: "phi3",
        keys: phi_keys,
        globals: phi_globals,
        layer: |builder, layer| PHI.layer(builder, &format!("layers.{layer}."), layer),
        ..USUAL
    },
    Family {
        classes: &["Olmo2ForCausalLM", "Olmo3ForCausalLM"],
        architecture: "olmo2",
        keys: olmo_keys,
        layer: |builder, layer| OLMO.layer(builder, &format!("layers.{layer}."), layer),
        ..USUAL
    },
    Family {
        classes: &["CohereForCausalLM"],
        architecture: "command-r",
        keys: cohere_keys,
        globals: |builder| {
            let embedding = builder.need("embed_tokens.weight")?;
            builder.push(OutputTensor::whole("token_embd.weight", embedding));
            let norm = builder.need("norm.weight")?;
            builder.push(OutputTensor::whole("output_norm.weight", norm));
            Ok(())
        },
        ignored: &["lm_head."],
        ..USUAL
    },
    Family {
        classes: &["Glm4ForCausalLM"],
        architecture: "glm4",
        keys: glm_keys,
        layer: |builder, layer| GLM.layer(builder, &format!("layers.{layer}."), layer),
        ..USUAL
    },
    Family {
        classes: &["FalconForCausalLM", "RWForCausalLM"],
        architecture: "falcon",
        prefixes: &["transformer."],
        embedding: "word_embeddings.weight",
        keys: falcon_keys,
        globals: falcon_globals,
        layer: falcon_layer,
        ..USUAL
    },
    Family {
        classes: &["OPTForCausalLM"],
        architecture: "opt",
        prefixes: &["model.decoder.", "decoder."],
        keys: opt_keys,
        globals: opt_globals,
        layer: |builder, layer| OPT.layer(builder, &format!("layers.{layer}."), layer),
        ..USUAL
    },
];

const PHI: LayerRules = LayerRules {
    parts: &[("self_attn.qkv_proj", "attn_qkv"), ("mlp.gate_up_proj", "ffn_up")],
    ..LayerRules::PLAIN
};

const OLMO: LayerRules = LayerRules {
    parts: &[
        ("post_attention_layernorm", "post_attention_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
    ],
    ..LayerRules::PLAIN
};

const GLM: LayerRules = LayerRules {
    parts: &[
        ("post_self_attn_layernorm", "post_attention_norm"),
        ("post_mlp_layernorm", "post_ffw_norm"),
        ("mlp.gate_up_proj", "ffn_up"),
    ],
    ..LayerRules::PLAIN
};

const OPT: LayerRules = LayerRules {
    parts: &[
        ("self_attn.out_proj", "attn_output"),
        ("self_attn_layer_norm", "attn_norm"),
        ("final_layer_norm", "ffn_norm"),
        ("fc1", "ffn_up"),
        ("fc2", "ffn_down"),
    ],
    ..LayerRules::PLAIN
};

/// Llama's layers, with Mixtral's experts.
pub(super) fn llama_layer(builder: &mut FileBuilder<'_>, layer: usize) -> ConvertResult<()> {
    let (from, to) = (format!("layers.{layer}."), format!("blk.{layer}."));
    let parts = [("w1", "ffn_gate_exps"), ("w2", "ffn_down_exps"), ("w3", "ffn_up_exps")];
    builder.stack_experts(&format!("{from}block_sparse_moe.experts"), &parts, &to)?;
    builder.copy_part(&format!("{from}block_sparse_moe.gate"), &format!("{to}ffn_gate_inp"))?;
    if super::fused::fused_experts(
        builder,
        &format!("{from}mlp.experts."),
        layer,
        super::fused::FusedLayout::Rows,
    )? {
        builder.copy_part(&format!("{from}mlp.gate"), &format!("{to}ffn_gate_inp"))?;
    }
    LayerRules::INTERLEAVED.layer(builder, &from, layer)
}

pub(super) fn llama_globals(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    LayerRules::INTERLEAVED.globals(builder)?;
    llama3_factors(builder)
}

pub(super) fn llama_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    builder.require("hidden_act", &["silu", "swish", "relu"])?;
    common_keys(builder)?;
    if builder.config.text(&["hidden_act"])? == Some("relu") && builder.architecture == "llama" {
        builder.set("hidden_activation", "relu");
    }
    let length = builder.head_length()?;
    builder.set_count("rope.dimension_count", length);
    builder.copy_count("expert_count", &["num_local_experts", "num_experts"])?;
    builder.copy_count("expert_used_count", &["num_experts_per_tok"])?;
    if builder.config.class().starts_with("Mi") {
        builder.copy_count("attention.sliding_window", &["sliding_window"])?;
    }
    Ok(())
}

/// Granite's factors, also of its models with experts.
pub(super) fn granite_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    llama_keys(builder)?;
    builder.copy_number("attention.scale", &["attention_multiplier"])?;
    builder.copy_number("embedding_scale", &["embedding_multiplier"])?;
    builder.copy_number("residual_scale", &["residual_multiplier"])?;
    builder.copy_number("logit_scale", &["logits_scaling"])
}

fn qwen_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    builder.require("hidden_act", &["silu"])?;
    builder.require("use_sliding_window", &["false"])?;
    common_keys(builder)
}

fn phi_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    common_keys(builder)?;
    let config = builder.config;
    let parameters = rope_parameters(config)?;
    let original = config.find_count(&["original_max_position_embeddings"])?;
    let original = match (&parameters, original) {
        (Some(parameters), None) => parameters.find_count(&["original_max_position_embeddings"])?,
        _ => original,
    };
    let context = config.count(&["max_position_embeddings"])?;
    let original = original.unwrap_or(context);
    builder.set_count("rope.scaling.original_context_length", original);
    let partial = match &parameters {
        Some(parameters) => parameters.find_number(&["partial_rotary_factor"])?,
        None => None,
    };
    let partial =
        partial.map_or_else(|| config.find_number(&["partial_rotary_factor"]), |part| Ok(Some(part)))?;
    let dims = builder.head_length()? as f64 * partial.unwrap_or(1.0);
    builder.set_count("rope.dimension_count", dims as usize);
    // 0 tells Phi 4 from Phi 3, whose window is not used.
    builder.set_count("attention.sliding_window", config.find_count(&["sliding_window"])?.unwrap_or(0));
    if let Some(parameters) = parameters
        && parameters.numbers("long_factor")?.is_some()
    {
        builder.set("rope.scaling.type", "longrope");
        let scale = context as f64 / original as f64;
        let factor = if scale > 1.0 { (1.0 + scale.ln() / (original as f64).ln()).sqrt() } else { 1.0 };
        let given = positive(&parameters, "attention_factor")?;
        builder.set_number("rope.scaling.attn_factor", given.unwrap_or(factor));
    }
    Ok(())
}

fn phi_globals(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    PHI.globals(builder)?;
    let Some(parameters) = rope_parameters(builder.config)? else { return Ok(()) };
    for (key, name) in
        [("long_factor", "rope_factors_long.weight"), ("short_factor", "rope_factors_short.weight")]
    {
        if let Some(factors) = parameters.numbers(key)? {
            let factors = factors.into_iter().map(|factor| factor as f32).collect();
            builder.push(OutputTensor::constant(name, factors));
        }
    }
    Ok(())
}

fn olmo_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    common_keys(builder)?;
    let Some(window) = builder.config.find_count(&["sliding_window"])? else { return Ok(()) };
    builder.set_count("attention.sliding_window", window);
    let pattern: Vec<bool> = match builder.config.texts("layer_types")? {
        Some(types) => types.iter().map(|kind| *kind == "sliding_attention").collect(),
        None => (0..builder.layers).map(|layer| !(layer + 1).is_multiple_of(4)).collect(),
    };
    builder.set("attention.sliding_window_pattern", pattern);
    Ok(())
}

fn cohere_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    builder.require("tie_word_embeddings", &["true"])?;
    common_keys(builder)?;
    builder.copy_count("context_length", &["model_max_length", "max_position_embeddings"])?;
    let scale = builder.config.find_number(&["logit_scale"])?.unwrap_or(0.0625);
    builder.set_number("logit_scale", scale);
    if builder.keys.iter().any(|(key, _)| key.ends_with(".rope.scaling.type")) {
        return Err(builder.config.unsupported("rope_scaling", "not null"));
    }
    builder.set("rope.scaling.type", "none");
    Ok(())
}

/// The share of each head that is rotated, 0.5 unless the configuration says otherwise.
pub(super) fn glm_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    common_keys(builder)?;
    let dims = partial_rotary(builder, 0.5)?;
    builder.set_count("rope.dimension_count", dims);
    Ok(())
}

/// The rotated elements of a head.
pub(super) fn partial_rotary(builder: &FileBuilder<'_>, default: f64) -> ConvertResult<usize> {
    let own = match rope_parameters(builder.config)? {
        Some(parameters) => parameters.find_number(&["partial_rotary_factor"])?,
        None => None,
    };
    let share =
        own.map_or_else(|| builder.config.find_number(&["partial_rotary_factor"]), |share| Ok(Some(share)))?;
    Ok((builder.head_length()? as f64 * share.unwrap_or(default)) as usize)
}

fn falcon_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    builder.require("alibi", &["false"])?;
    builder.require("parallel_attn", &["true"])?;
    builder.require("bias", &["false"])?;
    let width = builder.config.count(&["hidden_size"])?;
    common_keys(builder)?;
    builder.set_count(
        "context_length",
        builder.config.find_count(&["max_position_embeddings"])?.unwrap_or(2048),
    );
    let inner = builder.config.find_count(&["ffn_hidden_size"])?.unwrap_or(4 * width);
    builder.set_count("feed_forward_length", inner);
    let epsilon = builder.config.find_number(&["layer_norm_epsilon"])?.unwrap_or(1e-5);
    builder.set_number("attention.layer_norm_epsilon", epsilon);
    builder.set("tensor_data_layout", "jploski");
    Ok(())
}

fn falcon_globals(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    builder.copy("word_embeddings.weight", "token_embd.weight")?;
    builder.copy_part("ln_f", "output_norm")?;
    output_matrix(builder)
}

fn falcon_layer(builder: &mut FileBuilder<'_>, layer: usize) -> ConvertResult<()> {
    let (from, to) = (format!("h.{layer}."), format!("blk.{layer}."));
    let parts = [
        ("self_attention.dense", "attn_output"),
        ("mlp.dense_h_to_4h", "ffn_up"),
        ("mlp.dense_4h_to_h", "ffn_down"),
        ("input_layernorm", "attn_norm"),
        ("ln_mlp", "attn_norm"),
        ("ln_attn", "attn_norm_2"),
    ];
    for (part, name) in parts {
        builder.copy_part(&format!("{from}{part}"), &format!("{to}{name}"))?;
    }
    // Groups of some queries, a key and a value become all queries, all keys and all values.
    let source = builder.need(&format!("{from}self_attention.query_key_value.weight"))?;
    let (heads, kv_heads) = builder.heads;
    let (rows, columns) = (source.rows(), source.columns());
    let length = rows / (heads + 2 * kv_heads).max(1);
    if length * (heads + 2 * kv_heads) != rows || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(wrong_shape(
            &source,
            &format!("rows of {heads} heads and {kv_heads} of keys and values"),
        ));
    }
    let each = heads / kv_heads;
    let dims = source.shape.clone();
    builder.push(OutputTensor::rows(&format!("{to}attn_qkv.weight"), dims, vec![source], move |row| {
        let (head, within) = (row / length, row % length);
        let head = match head {
            query if query < heads => query / each * (each + 2) + query % each,
            key if key < heads + kv_heads => (key - heads) * (each + 2) + each,
            value => (value - heads - kv_heads) * (each + 2) + each + 1,
        };
        RowSource { source: 0, start: (head * length + within) * columns, step: 1 }
    }));
    Ok(())
}

fn opt_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    builder.require("do_layer_norm_before", &["true"])?;
    builder.require("activation_function", &["relu"])?;
    let width = builder.config.count(&["hidden_size"])?;
    let projected = builder.config.find_count(&["word_embed_proj_dim"])?.unwrap_or(width);
    if projected != width {
        return Err(builder.config.unsupported("word_embed_proj_dim", projected));
    }
    common_keys(builder)?;
    let inner = builder.config.count(&["ffn_dim"])?;
    builder.set_count("feed_forward_length", inner);
    builder.set_number("attention.layer_norm_epsilon", 1e-5);
    Ok(())
}

fn opt_globals(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    builder.copy("embed_tokens.weight", "token_embd.weight")?;
    builder.copy("embed_positions.weight", "position_embd.weight")?;
    builder.copy_part("final_layer_norm", "output_norm")?;
    output_matrix(builder)
}

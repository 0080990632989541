//! Families with recurrent layers: Qwen3-Next and 3.5, LFM2, Mamba 2.

use std::sync::Arc;

use super::super::builder::{FileBuilder, MAX_HEAD};
use super::super::common::{LayerRules, common_keys, output_matrix, rope_parameters};
use super::super::error::ConvertResult;
use super::super::output::{ElementMap, OutputTensor, RowSource};
use super::super::source::{Source, wrong_shape};
use super::dense::partial_rotary;
use super::experts::{PARTS, expert_keys, qwen_experts};
use super::{Family, USUAL};

pub(super) static FAMILIES: &[Family] = &[
    Family {
        classes: &["Qwen3NextForCausalLM"],
        architecture: "qwen3next",
        ignored: &["mtp."],
        keys: qwen_keys,
        globals: |builder| QWEN.globals(builder),
        layer: qwen_layer,
        ..USUAL
    },
    Family {
        classes: &["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"],
        architecture: "qwen35",
        ignored: &["mtp."],
        keys: qwen35_keys,
        globals: |builder| QWEN.globals(builder),
        layer: qwen_layer,
        ..USUAL
    },
    Family {
        classes: &["Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"],
        architecture: "qwen35moe",
        ignored: &["mtp."],
        keys: qwen35_keys,
        globals: |builder| QWEN.globals(builder),
        layer: qwen_layer,
        ..USUAL
    },
    Family {
        classes: &["Lfm2ForCausalLM", "LFM2ForCausalLM"],
        architecture: "lfm2",
        keys: lfm_keys,
        globals: lfm_globals,
        layer: lfm_layer,
        ..USUAL
    },
    Family {
        classes: &["Lfm2MoeForCausalLM"],
        architecture: "lfm2moe",
        keys: |builder| {
            lfm_keys(builder)?;
            expert_keys(builder)?;
            builder.copy_count("leading_dense_block_count", &["num_dense_layers"])?;
            builder.set_count("expert_gating_func", 2);
            Ok(())
        },
        globals: lfm_globals,
        layer: lfm_layer,
        ..USUAL
    },
    Family {
        classes: &["Mamba2ForCausalLM"],
        architecture: "mamba2",
        prefixes: &["backbone.", "model.backbone."],
        embedding: "embeddings.weight",
        keys: mamba_keys,
        globals: |builder| {
            builder.copy("embeddings.weight", "token_embd.weight")?;
            builder.copy("norm_f.weight", "output_norm.weight")?;
            output_matrix(builder)
        },
        layer: mamba_layer,
        ..USUAL
    },
];

const QWEN: LayerRules = LayerRules {
    norms_plus_one: true,
    parts: &[
        ("post_attention_layernorm", "post_attention_norm"),
        ("linear_attn.norm", "ssm_norm"),
        ("linear_attn.in_proj_ba", "ssm_ba"),
    ],
    ..LayerRules::PLAIN
};

const LFM: LayerRules = LayerRules {
    parts: &[
        ("operator_norm", "attn_norm"),
        ("ffn_norm", "ffn_norm"),
        ("conv.in_proj", "shortconv.in_proj"),
        ("conv.out_proj", "shortconv.out_proj"),
        ("self_attn.out_proj", "attn_output"),
        ("self_attn.q_layernorm", "attn_q_norm"),
        ("self_attn.k_layernorm", "attn_k_norm"),
        ("feed_forward.w1", "ffn_gate"),
        ("feed_forward.w3", "ffn_up"),
        ("feed_forward.w2", "ffn_down"),
        ("feed_forward.gate", "ffn_gate_inp"),
    ],
    ..LayerRules::PLAIN
};

fn qwen_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    common_keys(builder)?;
    expert_keys(builder)?;
    builder.copy_count("expert_shared_feed_forward_length", &["shared_expert_intermediate_size"])?;
    let config = builder.config;
    let values = (config.count(&["linear_num_value_heads"])?, config.count(&["linear_value_head_dim"])?);
    builder.set_count("ssm.conv_kernel", config.count(&["linear_conv_kernel_dim"])?);
    builder.set_count("ssm.state_size", config.count(&["linear_key_head_dim"])?);
    builder.set_count("ssm.group_count", config.count(&["linear_num_key_heads"])?);
    builder.set_count("ssm.time_step_rank", values.0);
    builder.set_count("ssm.inner_size", values.0 * values.1);
    let interval = match config.texts("layer_types")? {
        Some(types) => {
            let interval = types
                .iter()
                .position(|kind| *kind == "full_attention")
                .map_or(types.len() + 1, |first| first + 1);
            let regular = types
                .iter()
                .enumerate()
                .all(|(layer, kind)| (*kind == "full_attention") == (layer + 1).is_multiple_of(interval));
            if !regular {
                return Err(config.unsupported("layer_types", "not periodic"));
            }
            interval
        }
        None => config.find_count(&["full_attention_interval"])?.unwrap_or(4),
    };
    builder.set_count("full_attention_interval", interval);
    let dims = partial_rotary(builder, 0.25)?;
    builder.set_count("rope.dimension_count", dims);
    Ok(())
}

fn qwen35_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    qwen_keys(builder)?;
    let sections = match rope_parameters(builder.config)? {
        Some(parameters) => parameters.numbers("mrope_section")?,
        None => None,
    };
    let sections = sections.unwrap_or_else(|| vec![11.0, 11.0, 10.0]);
    let mut sections: Vec<i32> = sections.into_iter().map(|section| section as i32).collect();
    sections.resize(4, 0);
    builder.set("rope.dimension_sections", sections);
    Ok(())
}

/// The shape of linear attention: heads and lengths of keys and of values.
struct Linear {
    keys: (usize, usize),
    values: (usize, usize),
}

impl Linear {
    fn of(builder: &FileBuilder<'_>) -> ConvertResult<Linear> {
        let config = builder.config;
        // Rows are divided by these, and their products are places of rows.
        let number = |key: &str| match config.count(&[key])? {
            number @ 1..=MAX_HEAD => Ok(number),
            other => Err(config.unsupported(key, other)),
        };
        let keys = (number("linear_num_key_heads")?, number("linear_key_head_dim")?);
        let values = (number("linear_num_value_heads")?, number("linear_value_head_dim")?);
        if !values.0.is_multiple_of(keys.0) {
            return Err(config.unsupported("linear_num_value_heads", values.0));
        }
        Ok(Linear { keys, values })
    }

    /// The value head of the model's files for a value head of the converted file. There, heads that share a key are apart:
    /// key heads repeat as a whole.
    fn value_head(&self, head: usize) -> usize {
        let each = self.values.0 / self.keys.0;
        head % self.keys.0 * each + head / self.keys.0
    }

    /// The row for a row of values.
    fn value_row(&self, row: usize) -> usize {
        self.value_head(row / self.values.1) * self.values.1 + row % self.values.1
    }

    /// The row for a row of queries, keys and values.
    fn mixed_row(&self, row: usize) -> usize {
        let before = 2 * self.keys.0 * self.keys.1;
        if row < before { row } else { before + self.value_row(row - before) }
    }
}

fn qwen_layer(builder: &mut FileBuilder<'_>, layer: usize) -> ConvertResult<()> {
    let (from, to) = (format!("layers.{layer}."), format!("blk.{layer}."));
    if builder.has(&format!("{from}mlp.gate.weight")) {
        qwen_experts(builder, layer)?;
    }
    let own = format!("{from}linear_attn.");
    if builder.has(&format!("{own}A_log")) {
        let linear = Arc::new(Linear::of(builder)?);
        // Only Qwen 3.5's files have their heads in another order.
        let tiled = builder.architecture != "qwen3next";
        let heads = {
            let linear = Arc::clone(&linear);
            move |head: usize| if tiled { linear.value_head(head) } else { head }
        };
        let decay = builder.need(&format!("{own}A_log"))?;
        builder.push(
            OutputTensor::permuted(&format!("{to}ssm_a"), decay, heads.clone())
                .mapped(ElementMap::NegativeExponential),
        );
        let bias = builder.need(&format!("{own}dt_bias"))?;
        builder.push(OutputTensor::permuted(&format!("{to}ssm_dt.bias"), bias, heads.clone()));
        let conv = builder.need(&format!("{own}conv1d.weight"))?;
        let conv = squeezed(conv)?;
        let mixed = Arc::clone(&linear);
        let mixed = move |row: usize| if tiled { mixed.mixed_row(row) } else { row };
        builder.push(OutputTensor::permuted(&format!("{to}ssm_conv1d.weight"), conv, mixed.clone()));
        for (part, name) in [("in_proj_b", "ssm_beta"), ("in_proj_a", "ssm_alpha")] {
            if let Some(source) = builder.find(&format!("{own}{part}.weight"))? {
                builder.push(OutputTensor::permuted(&format!("{to}{name}.weight"), source, heads.clone()));
            }
        }
        if let Some(source) = builder.find(&format!("{own}in_proj_qkv.weight"))? {
            builder.push(OutputTensor::permuted(&format!("{to}attn_qkv.weight"), source, mixed));
        }
        if let Some(source) = builder.find(&format!("{own}in_proj_z.weight"))? {
            let rows = Arc::clone(&linear);
            builder.push(OutputTensor::permuted(&format!("{to}attn_gate.weight"), source, move |row| {
                rows.value_row(row)
            }));
        }
        if let Some(source) = builder.find(&format!("{own}in_proj_qkvz.weight"))? {
            grouped_projection(builder, layer, source, &linear)?;
        }
        let out = builder.need(&format!("{own}out_proj.weight"))?;
        let columns = out.columns();
        let mut out = OutputTensor::whole(&format!("{to}ssm_out.weight"), out);
        if tiled {
            out.set_columns((0..columns).map(|column| linear.value_row(column) as u32).collect());
        }
        builder.push(out);
    }
    QWEN.layer(builder, &from, layer)
}

/// Qwen3-Next's projection, whose rows are groups of a query, a key, and the values and gates that belong to them.
fn grouped_projection(
    builder: &mut FileBuilder<'_>,
    layer: usize,
    source: Source,
    linear: &Linear,
) -> ConvertResult<()> {
    let ((key_heads, key_length), (value_heads, value_length)) = (linear.keys, linear.values);
    let values = value_heads / key_heads * value_length;
    let group = 2 * key_length + 2 * values;
    let columns = source.columns();
    if source.rows() != key_heads * group {
        return Err(wrong_shape(&source, &format!("[{}, {columns}]", key_heads * group)));
    }
    let place = move |row: usize| {
        let keys = key_heads * key_length;
        match row {
            query if query < keys => query / key_length * group + query % key_length,
            key if key < 2 * keys => {
                (key - keys) / key_length * group + key_length + (key - keys) % key_length
            }
            value => {
                let value = value - 2 * keys;
                let (gate, value) = (value / (key_heads * values), value % (key_heads * values));
                value / values * group + 2 * key_length + gate * values + value % values
            }
        }
    };
    let mixed = 2 * key_heads * key_length + key_heads * values;
    let qkv = OutputTensor::rows(
        &format!("blk.{layer}.attn_qkv.weight"),
        vec![mixed, columns],
        vec![source.clone()],
        move |row| RowSource { source: 0, start: place(row) * columns, step: 1 },
    );
    let gate = OutputTensor::rows(
        &format!("blk.{layer}.attn_gate.weight"),
        vec![key_heads * values, columns],
        vec![source],
        move |row| RowSource { source: 0, start: place(mixed + row) * columns, step: 1 },
    );
    builder.push(qkv);
    builder.push(gate);
    Ok(())
}

/// The kernel of a depthwise convolution without its dimension of 1.
fn squeezed(source: Source) -> ConvertResult<Source> {
    match *source.shape.as_slice() {
        [channels, 1, kernel] => source.reshaped(&[channels, kernel]),
        [_, _] => Ok(source),
        _ => Err(wrong_shape(&source, "[channels, 1, kernel]")),
    }
}

fn lfm_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    common_keys(builder)?;
    let config = builder.config;
    let kv_heads = builder.heads.1;
    let heads: Vec<u32> = match config.texts("layer_types")? {
        Some(types) => {
            types.iter().map(|kind| if *kind == "full_attention" { kv_heads as u32 } else { 0 }).collect()
        }
        None => return Err(config.missing(&["layer_types"])),
    };
    builder.set("attention.head_count_kv", heads);
    builder.set_count("shortconv.l_cache", config.count(&["conv_L_cache"])?);
    let mut width = config.count(&["block_ff_dim", "intermediate_size"])?;
    if config.flag("block_auto_adjust_ff_dim")?.unwrap_or(false) {
        width = 2 * width / 3;
        if let Some(factor) = config.find_number(&["block_ffn_dim_multiplier"])? {
            width = ((factor * width as f64) as usize).min(1 << 31);
        }
        width = width.next_multiple_of(config.find_count(&["block_multiple_of"])?.unwrap_or(256).max(1));
    }
    builder.set_count("feed_forward_length", width);
    Ok(())
}

fn lfm_globals(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    builder.copy("embed_tokens.weight", "token_embd.weight")?;
    builder.copy("embedding_norm.weight", "token_embd_norm.weight")?;
    output_matrix(builder)
}

fn lfm_layer(builder: &mut FileBuilder<'_>, layer: usize) -> ConvertResult<()> {
    let (from, to) = (format!("layers.{layer}."), format!("blk.{layer}."));
    if let Some(conv) = builder.find(&format!("{from}conv.conv.weight"))? {
        builder.push(OutputTensor::whole(&format!("{to}shortconv.conv.weight"), squeezed(conv)?));
    }
    let parts = [("w1", "ffn_gate_exps"), ("w3", "ffn_up_exps"), ("w2", "ffn_down_exps")];
    builder.stack_experts(&format!("{from}feed_forward.experts"), &parts, &to)?;
    builder.stack_experts(&format!("{from}feed_forward.experts"), &PARTS, &to)?;
    super::fused::fused_experts(
        builder,
        &format!("{from}feed_forward.experts."),
        layer,
        super::fused::FusedLayout::Rows,
    )?;
    builder.copy(&format!("{from}feed_forward.expert_bias"), &format!("{to}exp_probs_b.bias"))?;
    LFM.layer(builder, &from, layer)
}

fn mamba_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    let config = builder.config;
    let width = config.count(&["hidden_size", "d_model"])?;
    let length = config.find_count(&["head_dim"])?.unwrap_or(64).max(1);
    let inner = match config.find_count(&["num_heads"])? {
        Some(heads) => heads.saturating_mul(length),
        None => config.find_count(&["expand"])?.unwrap_or(2).saturating_mul(width),
    };
    builder.set_count("context_length", 1 << 20);
    builder.set_count("embedding_length", width);
    builder.set_count("block_count", builder.layers);
    builder.set_count("feed_forward_length", 0);
    builder.set_count("attention.head_count", 0);
    builder.set_count("ssm.conv_kernel", config.find_count(&["conv_kernel", "d_conv"])?.unwrap_or(4));
    builder.set_count("ssm.inner_size", inner);
    builder.set_count("ssm.state_size", config.find_count(&["state_size", "d_state"])?.unwrap_or(128));
    builder.set_count("ssm.time_step_rank", inner / length);
    builder.set_count("ssm.group_count", config.find_count(&["n_groups"])?.unwrap_or(1));
    let epsilon = config.find_number(&["layer_norm_epsilon", "rms_norm_eps"])?.unwrap_or(1e-5);
    builder.set_number("attention.layer_norm_rms_epsilon", epsilon);
    builder.copy_count("vocab_size", &["vocab_size"])
}

fn mamba_layer(builder: &mut FileBuilder<'_>, layer: usize) -> ConvertResult<()> {
    let (from, to) = (format!("layers.{layer}."), format!("blk.{layer}."));
    builder.copy_part(&format!("{from}norm"), &format!("{to}attn_norm"))?;
    builder.copy_part(&format!("{from}mixer.in_proj"), &format!("{to}ssm_in"))?;
    builder.copy_part(&format!("{from}mixer.out_proj"), &format!("{to}ssm_out"))?;
    let conv = builder.need(&format!("{from}mixer.conv1d.weight"))?;
    builder.push(OutputTensor::whole(&format!("{to}ssm_conv1d.weight"), squeezed(conv)?));
    builder.copy(&format!("{from}mixer.conv1d.bias"), &format!("{to}ssm_conv1d.bias"))?;
    builder.copy(&format!("{from}mixer.dt_bias"), &format!("{to}ssm_dt.bias"))?;
    for (part, name, map) in
        [("A_log", "ssm_a", ElementMap::NegativeExponential), ("D", "ssm_d", ElementMap::Keep)]
    {
        let source = builder.need(&format!("{from}mixer.{part}"))?;
        let heads = source.elements();
        builder.push(OutputTensor::whole(&format!("{to}{name}"), source.reshaped(&[heads, 1])?).mapped(map));
    }
    let groups = builder.config.find_count(&["n_groups"])?.unwrap_or(1).max(1);
    let norm = builder.need(&format!("{from}mixer.norm.weight"))?;
    let width = norm.elements();
    builder.push(OutputTensor::whole(
        &format!("{to}ssm_norm.weight"),
        norm.reshaped(&[groups, width / groups])?,
    ));
    Ok(())
}

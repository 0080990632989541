//! Encoders: BERT and Nomic Embed.

use super::super::builder::FileBuilder;
use super::super::common::common_keys;
use super::super::error::ConvertResult;
use super::super::output::OutputTensor;
use super::{Family, USUAL};

pub(super) static FAMILIES: &[Family] = &[
    Family {
        classes: &["BertModel", "BertForMaskedLM"],
        architecture: "bert",
        prefixes: &["bert.", ""],
        embedding: "embeddings.word_embeddings.weight",
        ignored: &["pooler.", "cls.", "embeddings.position_ids"],
        keys,
        globals,
        layer: |builder, layer| {
            parts(
                builder,
                &format!("encoder.layer.{layer}."),
                &format!("blk.{layer}."),
                &[
                    ("attention.self.query", "attn_q"),
                    ("attention.self.key", "attn_k"),
                    ("attention.self.value", "attn_v"),
                    ("attention.output.dense", "attn_output"),
                    ("attention.output.LayerNorm", "attn_output_norm"),
                    ("intermediate.dense", "ffn_up"),
                    ("output.dense", "ffn_down"),
                    ("output.LayerNorm", "layer_output_norm"),
                ],
            )
        },
        ..USUAL
    },
    Family {
        classes: &["NomicBertModel"],
        architecture: "nomic-bert",
        prefixes: &["bert.", ""],
        embedding: "embeddings.word_embeddings.weight",
        ignored: &["pooler.", "cls.", "embeddings.position_ids"],
        keys: nomic_keys,
        globals,
        layer: |builder, layer| {
            parts(
                builder,
                &format!("encoder.layers.{layer}."),
                &format!("blk.{layer}."),
                &[
                    ("attn.Wqkv", "attn_qkv"),
                    ("attn.out_proj", "attn_output"),
                    ("norm1", "attn_output_norm"),
                    ("mlp.fc11", "ffn_up"),
                    ("mlp.fc12", "ffn_gate"),
                    ("mlp.fc2", "ffn_down"),
                    ("norm2", "layer_output_norm"),
                ],
            )
        },
        ..USUAL
    },
];

fn parts(builder: &mut FileBuilder<'_>, from: &str, to: &str, parts: &[(&str, &str)]) -> ConvertResult<()> {
    parts
        .iter()
        .try_for_each(|(part, name)| builder.copy_part(&format!("{from}{part}"), &format!("{to}{name}")))
}

fn keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    builder.require("hidden_act", &["gelu"])?;
    builder.require("position_embedding_type", &["absolute"])?;
    common_keys(builder)?;
    builder.set("attention.causal", false);
    Ok(())
}

fn nomic_keys(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    builder.require("activation_function", &["swiglu"])?;
    builder.require("prenorm", &["false"])?;
    builder.require("rotary_emb_interleaved", &["false"])?;
    builder.require("rotary_emb_fraction", &["1.0", "1"])?;
    builder.require("moe_every_n_layers", &["0"])?;
    common_keys(builder)?;
    let config = builder.config;
    // The published models were trained with fewer positions than they allow.
    if config.find_count(&["n_positions"])? == Some(8192)
        && config.find_count(&["max_trained_positions"])?.unwrap_or(2048) == 2048
    {
        builder.set_count("context_length", 2048);
    }
    builder.set("attention.causal", false);
    let base = config.find_number(&["rotary_emb_base"])?.unwrap_or(10_000.0);
    builder.set_number("rope.freq_base", base);
    Ok(())
}

fn globals(builder: &mut FileBuilder<'_>) -> ConvertResult<()> {
    let embedding = builder.need("embeddings.word_embeddings.weight")?;
    builder.push(OutputTensor::whole("token_embd.weight", embedding));
    builder.copy("embeddings.position_embeddings.weight", "position_embd.weight")?;
    if let Some(types) = builder.find("embeddings.token_type_embeddings.weight")? {
        let count = u32::try_from(types.rows()).unwrap_or(u32::MAX);
        builder.keys.push(("tokenizer.ggml.token_type_count".to_owned(), count.into()));
        builder.push(OutputTensor::whole("token_types.weight", types));
    }
    for norm in ["embeddings.LayerNorm", "emb_ln"] {
        builder.copy_part(norm, "token_embd_norm")?;
    }
    Ok(())
}

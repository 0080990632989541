//! What holds for each architecture where its metadata do not say otherwise. No tensors are needed for that.

use quadriga_gguf::{File, OwnedValue, Writer};
use quadriga_graph::Pairing;

use super::find;
use crate::hyperparameters::{Experts, Gating, Hyperparameters, Keys, RecurrentShape};
use crate::{Error, Result};

/// The hyperparameters of a small model with some keys of its own, whose names lack the architecture.
fn read(architecture: &str, own: &[(&str, OwnedValue)]) -> Result<Hyperparameters> {
    let usual: [(&str, OwnedValue); 11] = [
        ("block_count", 2u32.into()),
        ("embedding_length", 64u32.into()),
        ("context_length", 512u32.into()),
        ("attention.head_count", 4u32.into()),
        ("attention.head_count_kv", 2u32.into()),
        ("feed_forward_length", 96u32.into()),
        ("attention.layer_norm_rms_epsilon", 1e-5f32.into()),
        ("vocab_size", 100u32.into()),
        ("expert_count", 8u32.into()),
        ("expert_used_count", 2u32.into()),
        ("attention.sliding_window", 16u32.into()),
    ];
    let mut writer = Writer::new();
    let usual = usual.iter().filter(|(key, _)| !own.iter().any(|(other, _)| other == key));
    for (key, value) in usual.chain(own) {
        writer.set(&format!("{architecture}.{key}"), value.clone())?;
    }
    let mut bytes = Vec::new();
    writer.write_to(&mut bytes)?;
    let file = File::from_bytes(bytes)?;
    let architecture = find(architecture)?;
    architecture.hyperparameters(&Keys::without_tensors(&file, architecture.name))
}

fn dense() -> [(&'static str, OwnedValue); 2] {
    [("expert_count", 0u32.into()), ("expert_used_count", 0u32.into())]
}

fn latent(more: &[(&'static str, OwnedValue)]) -> Vec<(&'static str, OwnedValue)> {
    let usual: [(&str, OwnedValue); 5] = [
        ("attention.head_count_kv", 1u32.into()),
        ("attention.kv_lora_rank", 20u32.into()),
        ("rope.dimension_count", 8u32.into()),
        ("attention.key_length", 24u32.into()),
        ("attention.value_length", 18u32.into()),
    ];
    let usual = usual.into_iter().filter(|(key, _)| !more.iter().any(|(other, _)| other == key));
    usual.chain(more.iter().cloned()).collect()
}

fn near(found: f32, expected: f64) -> bool {
    (f64::from(found) - expected).abs() < 1e-6
}

#[test]
fn routers_have_the_defaults_of_their_architecture() -> Result<()> {
    let experts = |architecture: &str, own: &[(&str, OwnedValue)]| -> Result<Option<Experts>> {
        Ok(read(architecture, own)?.layers.last().and_then(|layer| layer.experts))
    };
    for (architecture, own, gating, normalize, width) in [
        ("deepseek2", latent(&[]), Gating::Softmax, false, 96),
        ("glm4moe", Vec::new(), Gating::Sigmoid, false, 48),
        ("gpt-oss", Vec::new(), Gating::SoftmaxOfSelected, false, 96),
        ("olmoe", Vec::new(), Gating::Softmax, false, 96),
        ("qwen3moe", Vec::new(), Gating::Softmax, true, 48),
    ] {
        let found = experts(architecture, &own)?.map(|e| (e.count, e.used, e.gating, e.normalize, e.width));
        assert_eq!(found, Some((8, 2, gating, normalize, width)), "{architecture}");
    }
    // The first files of GLM 4.7 Flash do not name the gating function: it is told by its size.
    for (blocks, vocabulary, gating) in [
        (47u32, 154_880u32, Gating::Sigmoid),
        (48, 154_880, Gating::Sigmoid),
        (46, 154_880, Gating::Softmax),
        (47, 100, Gating::Softmax),
    ] {
        let own = latent(&[("block_count", blocks.into()), ("vocab_size", vocabulary.into())]);
        assert_eq!(experts("deepseek2", &own)?.map(|e| e.gating), Some(gating), "{blocks}, {vocabulary}");
    }
    // A shared expert is given by its width, or as a number of experts.
    let shared = |key: &'static str, value: u32| {
        let own = latent(&[("expert_feed_forward_length", 40u32.into()), (key, value.into())]);
        Ok::<_, Error>(experts("deepseek2", &own)?.map(|e| e.shared_width))
    };
    assert_eq!(shared("expert_shared_count", 3)?, Some(120));
    assert_eq!(shared("expert_shared_feed_forward_length", 10)?, Some(10));
    Ok(())
}

#[test]
fn latent_attention_caches_one_vector() -> Result<()> {
    let shape = |own: &[(&'static str, OwnedValue)]| -> Result<(usize, usize, usize, bool)> {
        let hyper = read("deepseek2", &latent(own))?;
        let layer = hyper.layers.first().map(|layer| (layer.kv_heads, layer.key_length, layer.value_length));
        let (heads, key, value) = layer.unwrap_or_default();
        assert!(hyper.has_latent_cache());
        Ok((heads, key, value, hyper.latent.is_some_and(|latent| latent.separate)))
    };
    assert_eq!(shape(&[])?, (1, 28, 20, false));
    let absorbed = [
        ("attention.key_length_mla", 24u32.into()),
        ("attention.value_length_mla", 18u32.into()),
        ("attention.key_length", 28u32.into()),
        ("attention.value_length", 20u32.into()),
    ];
    assert_eq!(shape(&absorbed)?, (1, 28, 20, true));
    // One of both lengths says nothing.
    assert_eq!(shape(&[("attention.key_length_mla", 24u32.into())])?, (1, 28, 20, false));
    assert_eq!(shape(&[("attention.value_length_mla", 18u32.into())])?, (1, 28, 20, false));
    assert!(shape(&[("attention.value_length", (1u32 << 28).into())]).is_ok());
    let error = shape(&[("attention.value_length", ((1u32 << 28) + 1).into())]).err();
    assert!(error.is_some_and(|error| error.to_string().contains("too large")));
    assert!(
        shape(&[("attention.key_length", 8u32.into())]).is_err(),
        "nothing is left beside the rotated part"
    );
    Ok(())
}

#[test]
fn yarn_scales_the_scores_of_latent_attention() -> Result<()> {
    let scaled = |own: &[(&'static str, OwnedValue)]| -> Result<(f32, f32)> {
        let yarn = [
            ("rope.scaling.type", "yarn".into()),
            ("rope.scaling.factor", 4.0f32.into()),
            ("rope.scaling.original_context_length", 128u32.into()),
        ];
        let hyper = read("deepseek2", &latent(&[&yarn[..], own].concat()))?;
        let rope = hyper.layers.first().and_then(|layer| layer.rope);
        Ok((hyper.attention_scale.unwrap_or(0.0), rope.map_or(0.0, |rope| rope.attn_factor)))
    };
    let (plain, own) = (1.0 / 24f64.sqrt(), 1.0 + 0.1 * 4f64.ln());
    assert!(near(scaled(&[])?.0, plain));
    let (scale, factor) = scaled(&[("rope.scaling.yarn_log_multiplier", 0.25f32.into())])?;
    assert!(
        near(scale, (1.0 + 0.25 * 4f64.ln()).powi(2) * plain) && near(factor, 1.0 / own),
        "{scale} {factor}"
    );
    let (scale, factor) = scaled(&[
        ("rope.scaling.yarn_log_multiplier", 0.1f32.into()),
        ("rope.scaling.attn_factor", 1.5f32.into()),
    ])?;
    assert!(near(scale, own.powi(2) * plain) && near(factor, 1.5 / own), "{scale} {factor}");
    let (scale, _) = scaled(&[
        ("rope.scaling.yarn_log_multiplier", 0.1f32.into()),
        ("rope.scaling.yarn_ext_factor", 0.0f32.into()),
    ])?;
    assert!(near(scale, plain), "without extrapolation nothing is scaled: {scale}");
    Ok(())
}

#[test]
fn sections_of_rope_change_the_pairs_of_glm4() -> Result<()> {
    for (sections, pairing) in [
        (None, Pairing::Adjacent),
        (Some([1u32, 1, 0, 0]), Pairing::Half),
        (Some([0, 1, 0, 0]), Pairing::Adjacent),
        (Some([1, 0, 0, 0]), Pairing::Adjacent),
    ] {
        let mut own = dense().to_vec();
        own.extend(sections.map(|sections| ("rope.dimension_sections", sections.to_vec().into())));
        let hyper = read("glm4", &own)?;
        assert!(hyper.layers.iter().all(|layer| layer.rope.is_some_and(|rope| rope.pairing == pairing)));
    }
    Ok(())
}

#[test]
fn recurrent_states_have_their_size_and_a_limit() -> Result<()> {
    let read = |[kernel, keys, values, length, inner]: [u32; 5]| -> Result<Hyperparameters> {
        let own = [
            ("ssm.conv_kernel", kernel.into()),
            ("ssm.group_count", keys.into()),
            ("ssm.time_step_rank", values.into()),
            ("ssm.state_size", length.into()),
            ("ssm.inner_size", inner.into()),
        ];
        read("qwen35", &[&dense()[..], &own[..]].concat())
    };
    let hyper = read([4, 2, 6, 8, 72])?;
    let shape = hyper.recurrent.as_ref();
    let lengths = shape.and_then(|shape| shape.linear).map(|linear| linear.value_length);
    let sizes = shape.map(|shape| (lengths, shape.conv_state(), shape.linear_state()));
    assert_eq!(sizes, Some((Some(12), 3 * (2 * 16 + 72), 6 * 8 * 12)));
    let pieces = |shape: &RecurrentShape| (shape.conv_pieces(), shape.linear.map(|linear| linear.pieces()));
    assert_eq!(shape.map(pieces), Some((3 * 8, Some(6 * 8))));
    let odd = read([4, 1, 3, 5, 9])?;
    assert_eq!(odd.recurrent.as_ref().map(pieces), Some((3, Some(3))));
    // The convolution's state has at most 2^30 elements.
    let heads = 4096;
    let largest = (1 << 24) - 2 * heads * 2;
    assert!(read([64, heads, heads, 2, largest]).is_ok());
    let error = read([64, heads, heads, 2, largest + heads]).err();
    assert!(error.is_some_and(|error| error.to_string().contains("state of a sequence is too large")));
    // Every fourth layer has attention.
    let all = |hyper: &Hyperparameters| hyper.layers.iter().map(|layer| layer.attention).collect::<Vec<_>>();
    assert_eq!(all(&hyper), [false, false]);
    Ok(())
}

#[test]
fn rope_is_scaled_by_the_inverse_of_its_factor() -> Result<()> {
    let scale = |own: &[(&str, OwnedValue)]| -> Result<Option<f32>> {
        let hyper = read("llama", &[&dense()[..], own].concat())?;
        Ok(hyper.layers.first().and_then(|layer| layer.rope).map(|rope| rope.scale))
    };
    assert_eq!(scale(&[("rope.scaling.factor", 4.0f32.into())])?, Some(0.25));
    assert_eq!(scale(&[("rope.scale_linear", 2.0f32.into())])?, Some(0.5));
    let none = [("rope.scaling.type", "none".into()), ("rope.scaling.factor", 4.0f32.into())];
    assert_eq!(scale(&none)?, Some(1.0));
    let long = [("rope.scaling.type", "longrope".into()), ("rope.scaling.factor", 4.0f32.into())];
    assert!(scale(&long).is_err_and(|error| error.to_string().contains("rope_factors_long")));
    assert!(scale(&[("rope.scaling.type", "other".into())]).is_err());
    Ok(())
}

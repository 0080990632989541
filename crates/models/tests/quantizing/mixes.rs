//! Which tensor gets which type: facts of llama.cpp's mixes.

use quadriga_graph::{DType, Shape};
use quadriga_models::quantize::{FileType, Mix, MixModel, fallback, is_quantizable};

fn mix(name: &str, model: MixModel, tied: bool) -> (Mix, Shape) {
    let shape = Shape::from([4096, 4096]);
    let mut names: Vec<String> = vec!["token_embd.weight".into(), "output_norm.weight".into()];
    if !tied {
        names.push("output.weight".into());
    }
    for layer in 0..model.layers {
        for role in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"] {
            names.push(format!("blk.{layer}.{role}.weight"));
        }
    }
    let file_type = FileType::from_name(name).unwrap();
    let shapes = vec![shape; names.len()];
    (Mix::new(file_type, model, names.iter().map(String::as_str).zip(&shapes)), shape)
}

fn llama(layers: usize) -> MixModel {
    MixModel { architecture: "llama".into(), layers, heads_per_kv_head: 4, ..MixModel::default() }
}

#[test]
fn q4_k_m_gives_more_bits_to_the_same_layers_as_llama_cpp() {
    let (mix, shape) = mix("Q4_K_M", llama(32), false);
    let six = |role: &str| {
        (0..32)
            .filter(|layer| mix.choose(&format!("blk.{layer}.{role}.weight"), &shape) == DType::Q6_K)
            .collect::<Vec<_>>()
    };
    // The first and last eighth, and every third between them.
    let expected = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31];
    assert_eq!(six("ffn_down"), expected);
    assert_eq!(six("attn_v"), expected);
    assert_eq!(mix.choose("blk.5.attn_q.weight", &shape), DType::Q4_K);
    assert_eq!(mix.choose("output.weight", &shape), DType::Q6_K);
    assert_eq!(mix.choose("token_embd.weight", &shape), DType::Q4_K);
}

#[test]
fn the_table_of_mixes() {
    use DType::*;
    for (name, tied, tensor, expected) in [
        ("Q2_K", false, "blk.9.attn_v.weight", Q4_K),
        ("Q2_K", false, "blk.9.ffn_down.weight", Q3_K),
        ("Q2_K", false, "blk.9.attn_output.weight", Q3_K),
        ("Q3_K_S", false, "blk.9.ffn_down.weight", Q3_K),
        ("Q3_K_M", false, "blk.0.attn_v.weight", Q5_K),
        ("Q3_K_M", false, "blk.2.attn_v.weight", Q4_K),
        ("Q3_K_M", false, "blk.1.ffn_down.weight", Q5_K),
        ("Q3_K_M", false, "blk.9.ffn_down.weight", Q4_K),
        ("Q3_K_L", false, "blk.9.ffn_down.weight", Q5_K),
        ("Q4_K_S", false, "blk.3.attn_v.weight", Q5_K),
        ("Q4_K_S", false, "blk.4.attn_v.weight", Q4_K),
        ("Q4_K_S", false, "blk.3.ffn_down.weight", Q5_K),
        ("Q5_K_M", false, "blk.0.ffn_down.weight", Q6_K),
        ("Q5_K_S", false, "blk.0.ffn_down.weight", Q5_K),
        ("IQ4_XS", false, "blk.0.ffn_down.weight", Q5_K),
        ("IQ4_XS", false, "blk.9.attn_v.weight", Q5_K),
        ("IQ3_XXS", false, "blk.9.attn_q.weight", IQ2_S),
        ("IQ3_XXS", false, "token_embd.weight", IQ3_S),
        ("IQ3_XS", false, "blk.16.ffn_up.weight", IQ3_XXS),
        ("IQ3_XS", false, "blk.0.ffn_up.weight", IQ3_S),
        ("IQ2_M", false, "blk.9.attn_output.weight", IQ3_S),
        ("IQ2_XXS", false, "output.weight", Q5_K),
        ("IQ1_S", false, "blk.9.attn_output.weight", IQ2_XXS),
        ("IQ1_S", false, "blk.0.ffn_down.weight", Q2_K),
        ("Q4_0", false, "output.weight", Q6_K),
        ("Q4_0", true, "token_embd.weight", Q6_K),
        ("Q8_0", true, "token_embd.weight", Q8_0),
        ("MXFP4_MOE", false, "blk.9.attn_q.weight", Q8_0),
        ("F16", false, "blk.9.attn_q.weight", F16),
    ] {
        let (mix, shape) = mix(name, llama(32), tied);
        assert_eq!(mix.choose(tensor, &shape), expected, "{name} {tensor}");
    }
    let experts = MixModel { experts: 8, ..llama(32) };
    let (mixed, shape) = mix("Q4_K_M", experts, false);
    assert_eq!(mixed.choose("blk.9.attn_k.weight", &shape), Q8_0);
    assert_eq!(mixed.choose("blk.9.attn_output.weight", &shape), Q5_K);
    let (mixed, _) = mix("MXFP4_MOE", MixModel { experts: 32, ..llama(24) }, false);
    assert_eq!(mixed.choose("blk.9.ffn_up_exps.weight", &Shape::from([32, 64, 64])), MXFP4);
}

#[test]
fn norms_and_routers_are_left_and_odd_rows_fall_back() {
    let matrix = Shape::from([64, 64]);
    assert!(is_quantizable("blk.0.ffn_up.weight", &matrix));
    for name in
        ["blk.0.attn_norm.weight", "blk.0.ffn_gate_inp.weight", "position_embd.weight", "blk.0.attn_q.bias"]
    {
        assert!(!is_quantizable(name, &matrix), "{name}");
    }
    assert!(!is_quantizable("blk.0.ffn_up.weight", &Shape::from([64])));
    assert_eq!(fallback(DType::Q4_K, 576), DType::Q5_0);
    assert_eq!(fallback(DType::Q6_K, 576), DType::Q8_0);
    assert_eq!(fallback(DType::IQ4_XS, 576), DType::IQ4_NL);
    assert_eq!(fallback(DType::Q2_K, 576), DType::Q4_0);
    assert_eq!(fallback(DType::Q4_0, 33), DType::F16);
    assert_eq!(fallback(DType::Q4_K, 512), DType::Q4_K);
}

//! Routing of DeepSeek's models: `topk_method` decides whether experts have groups, and the selection bias by which score.

use quadriga_gguf::File;
use quadriga_graph::GroupScore;
use quadriga_llm::Model;
use serde_json::{Value, json};

use super::model_folder::TestTensor;
use super::run_as;

/// A dense layer and one of six experts in three groups; with V3's selection bias.
fn folder(class: &str, changes: &[(&str, Value)], biased: bool) -> Result<File, String> {
    let mut config: Vec<(&str, Value)> = vec![
        ("num_key_value_heads", 2.into()),
        ("kv_lora_rank", 4.into()),
        ("qk_nope_head_dim", 4.into()),
        ("qk_rope_head_dim", 2.into()),
        ("v_head_dim", 4.into()),
        ("q_lora_rank", Value::Null),
        ("first_k_dense_replace", 1.into()),
        ("n_routed_experts", 6.into()),
        ("n_shared_experts", 1.into()),
        ("num_experts_per_tok", 2.into()),
        ("moe_intermediate_size", 8.into()),
        ("n_group", 3.into()),
        ("topk_group", 2.into()),
    ];
    config.extend_from_slice(changes);
    run_as(class, &config, |tensors| {
        tensors.retain(|tensor| {
            !tensor.name.contains("self_attn") && !tensor.name.starts_with("model.layers.1.mlp")
        });
        let mut add = |name: &str, shape: &[usize]| {
            tensors.push(TestTensor::new(&format!("model.layers.{name}"), shape));
        };
        for layer in 0..2 {
            for (part, shape) in [
                ("q_proj", &[12, 8][..]),
                ("kv_a_proj_with_mqa", &[6, 8]),
                ("kv_a_layernorm", &[4]),
                ("kv_b_proj", &[16, 4]),
                ("o_proj", &[8, 8]),
            ] {
                add(&format!("{layer}.self_attn.{part}.weight"), shape);
            }
        }
        add("1.mlp.gate.weight", &[6, 8]);
        if biased {
            add("1.mlp.gate.e_score_correction_bias", &[6]);
        }
        let names = (0..6).map(|expert| format!("experts.{expert}")).chain(["shared_experts".to_owned()]);
        for name in names {
            for (part, shape) in [("gate_proj", [8, 8]), ("up_proj", [8, 8]), ("down_proj", [8, 8])] {
                add(&format!("1.mlp.{name}.{part}.weight"), &shape);
            }
        }
    })
}

#[test]
fn the_method_of_selection_decides_groups_and_their_score() {
    let (v2, v3) = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM");
    let method = |name: &str| vec![("topk_method", json!(name))];
    for (class, changes, biased, groups) in [
        (v2, method("greedy"), false, None),
        (v2, vec![], false, None),
        (v2, method("group_limited_greedy"), false, Some(GroupScore::Max)),
        (v3, method("noaux_tc"), true, Some(GroupScore::TopTwo)),
        (v3, vec![], true, Some(GroupScore::TopTwo)),
    ] {
        let file = folder(class, &changes, biased).unwrap();
        let model = Model::from_file(file).unwrap();
        let experts = model.hyperparameters().experts().unwrap();
        let found = (experts.groups > 1).then_some(experts.group_score);
        assert_eq!(found, groups, "{class} {changes:?}");
    }
    for (class, name) in [(v2, "noaux_tc"), (v3, "group_limited_greedy"), (v2, "best_of_three")] {
        let error = folder(class, &method(name), class == v3).unwrap_err();
        assert!(error.contains("topk_method") && error.contains(name), "{class}: {error}");
    }
}

//! Rotary embeddings of a folder: factors of frequencies, and layers without one.

use serde_json::{Value, json};

use crate::model_folder::TestTensor;
use crate::{run_as, values};

#[test]
fn factors_of_frequencies_are_written_or_refused() {
    let llama3 = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32 });
    let file = run_as("LlamaForCausalLM", &[("rope_scaling", llama3.clone())], |_| {}).unwrap();
    assert_eq!(values(&file, "rope_freqs.weight").len(), 2);
    let with_biases = |tensors: &mut Vec<TestTensor>| {
        for layer in 0..2 {
            for (part, rows) in [("q", 8), ("k", 4), ("v", 4)] {
                let name = format!("model.layers.{layer}.self_attn.{part}_proj.bias");
                tensors.push(TestTensor::new(&name, &[rows]));
            }
        }
    };
    run_as("Qwen2ForCausalLM", &[], with_biases).unwrap();
    let long = json!({ "rope_type": "longrope", "long_factor": [1.0, 2.0], "short_factor": [1.0, 1.0] });
    let su = json!({ "type": "su", "long_factor": [1.0, 2.0], "short_factor": [1.0, 1.0] });
    for (class, scaling, kind) in [
        ("Qwen2ForCausalLM", llama3, "llama3"),
        ("Qwen2ForCausalLM", long.clone(), "longrope"),
        ("LlamaForCausalLM", long, "longrope"),
        ("LlamaForCausalLM", su, "su"),
        ("LlamaForCausalLM", json!({ "rope_type": "LLAMA3", "factor": 8.0 }), "LLAMA3"),
    ] {
        let change = |tensors: &mut Vec<TestTensor>| {
            if class.starts_with("Qwen") {
                with_biases(tensors);
            }
        };
        let error = run_as(class, &[("rope_scaling", scaling)], change).unwrap_err();
        assert!(error.contains(kind) && error.contains("rope_type") && error.contains(class), "{error}");
    }
}

#[test]
fn the_factor_of_yarns_rotated_elements_is_written() {
    let run = |more: Value| {
        let mut scaling =
            json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16 });
        more.as_object().unwrap().iter().for_each(|(key, value)| scaling[key] = value.clone());
        run_as("LlamaForCausalLM", &[("rope_scaling", scaling)], |_| {})
    };
    let own = 1.0 + 0.1 * 4f32.ln();
    for (more, wanted) in [
        (json!({}), None),
        (json!({ "mscale": 2.0 }), None),
        (json!({ "attention_factor": 3.0 }), Some(3.0 / own)),
        (json!({ "attention_factor": 3.0, "mscale": 2.0, "mscale_all_dim": 1.0 }), Some(3.0 / own)),
        (json!({ "attention_factor": 3.0, "extrapolation_factor": 0.0 }), Some(3.0)),
        (json!({ "mscale": 2.0, "mscale_all_dim": 1.0 }), Some((2.0 * own - 1.0) / own / own)),
        (json!({ "attention_factor": 3.0, "factor": 1.0 }), Some(3.0)),
    ] {
        let file = run(more.clone()).unwrap();
        let found = file.find::<f32>("llama.rope.scaling.attn_factor").unwrap();
        match (found, wanted) {
            (None, None) => {}
            (Some(found), Some(wanted)) => {
                assert!((found - wanted).abs() < 1e-6, "{more}: {found}, {wanted}")
            }
            _ => panic!("{more}: {found:?}, {wanted:?}"),
        }
    }
    for (more, place) in [
        (json!({ "factor": 0 }), "factor"),
        (json!({ "factor": -2.0, "rope_type": "linear" }), "factor"),
        (json!({ "attention_factor": 0.0 }), "attention_factor"),
        (json!({ "mscale": -9.0, "mscale_all_dim": 1.0 }), "mscale"),
    ] {
        let error = run(more.clone()).unwrap_err();
        assert!(
            error.contains(&format!("rope_parameters.{place}")) && error.contains("than 0"),
            "{more}: {error}"
        );
    }
}

#[test]
fn layers_without_rotary_embedding_are_those_of_the_graph() {
    for (list, fits) in [
        (json!({}), true),
        (json!({ "no_rope_layer_interval": 4 }), true),
        (json!({ "no_rope_layers": [] }), true),
        (json!({ "no_rope_layers": [1, 1], "no_rope_layer_interval": 3 }), true),
        (json!({ "no_rope_layer_interval": 2 }), false),
        (json!({ "no_rope_layers": [1, 0] }), false),
        (json!({ "no_rope_layers": [1] }), false),
    ] {
        let changes: Vec<(&str, Value)> =
            list.as_object().unwrap().iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
        match run_as("SmolLM3ForCausalLM", &changes, |_| {}) {
            Ok(_) => assert!(fits, "{list}"),
            Err(error) => assert!(!fits && error.contains("no_rope_layer"), "{list}: {error}"),
        }
        let llama4 = run_as("Llama4ForCausalLM", &changes, |_| {}).err().unwrap_or_default();
        assert_eq!(llama4.contains("no_rope_layer"), !fits, "{list}: {llama4}");
    }
    let experts = |tensors: &mut Vec<TestTensor>| {
        tensors.retain(|tensor| !tensor.name.contains(".mlp."));
        for layer in 0..2 {
            let own = format!("model.layers.{layer}.block_sparse_moe");
            tensors.push(TestTensor::new(&format!("{own}.primary_router.weight"), &[2, 8]));
            for expert in 0..2 {
                for (part, shape) in [("gate", [16, 8]), ("up", [16, 8]), ("down", [8, 16])] {
                    tensors.push(TestTensor::new(&format!("{own}.experts.{expert}.{part}.weight"), &shape));
                }
            }
        }
    };
    for (windows, rope, wrong) in [
        ([0, 1], json!([0, 1]), None),
        ([0, 1], Value::Null, None),
        ([0, 0], json!([1, 1]), None),
        ([0, 1], json!([1, 1]), Some("rope_layout")),
        ([0, 0], json!([0, 1]), Some("rope_layout")),
        ([1, 0], Value::Null, Some("sliding_window_layout")),
    ] {
        let changes = [
            ("moe_num_primary_experts", 2.into()),
            ("moe_num_active_primary_experts", 1.into()),
            ("moe_ffn_hidden_size", 16.into()),
            ("sliding_window_size", 16.into()),
            ("sliding_window_layout", json!(windows)),
            ("rope_layout", rope.clone()),
        ];
        match (run_as("SmallThinkerForCausalLM", &changes, experts), wrong) {
            (Ok(_), None) => {}
            (Err(error), Some(key)) => assert!(error.contains(key), "{windows:?} {rope}: {error}"),
            (Ok(_), Some(key)) => panic!("{windows:?} {rope}: {key} is not refused"),
            (Err(error), None) => panic!("{windows:?} {rope}: {error}"),
        }
    }
}

//! Errors about malformed or unsupported model files name the key or tensor.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Parts, Recipe};
use quadriga_gguf::{File, OwnedValue, Value};
use quadriga_graph::DType;
use quadriga_llm::{Error, Model};

/// The error of a model after a change; it must contain a name.
fn refused(architecture: &'static str, change: impl Fn(&mut Parts), name: &str) -> Error {
    let mut parts = Recipe { text: true, ..Recipe::new(architecture) }.parts();
    change(&mut parts);
    let error = parts.model().err().unwrap_or_else(|| panic!("{name}: taken"));
    assert!(error.to_string().contains(name), "{name} is not in: {error}");
    error
}

const NEEDED: [&str; 6] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
];

#[test]
fn missing_keys_are_named() {
    for architecture in ["llama", "qwen2", "qwen3"] {
        for key in NEEDED {
            let key = format!("{architecture}.{key}");
            let error = refused(architecture, |parts| _ = parts.remove(&key), &key);
            assert!(matches!(error, Error::File(_) | Error::Hyperparameter { .. }), "{error}");
        }
    }
    refused("llama", |parts| _ = parts.remove("general.architecture"), "general.architecture");
}

#[test]
fn missing_tensors_are_named() {
    for name in ["token_embd.weight", "output_norm.weight"] {
        refused("llama", |parts| _ = parts.remove(name), name);
    }
    for part in [
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
        "attn_norm",
        "ffn_norm",
    ] {
        let name = format!("blk.1.{part}.weight");
        refused("llama", |parts| _ = parts.remove(&name), &name);
    }
    for part in ["attn_q_norm", "attn_k_norm"] {
        let name = format!("blk.0.{part}.weight");
        refused("qwen3", |parts| _ = parts.remove(&name), &name);
    }
}

/// Every tensor of the other families is needed, and checked.
#[test]
fn tensors_of_other_families_are_named() {
    for recipe in Recipe::families() {
        let recipe = Recipe { layers: recipe.layers.min(2), ..recipe };
        let optional =
            |name: &str| name == "output.weight" || name.ends_with(".bias") || name.starts_with("rope_");
        let names: Vec<String> = recipe.parts().tensors.into_iter().map(|(name, ..)| name).collect();
        for name in names.iter().filter(|name| !optional(name)) {
            let context = format!("{} without {name}", recipe.architecture);
            let error = recipe.parts().remove(name).model().err().expect(&context);
            // In place of a fused tensor, separate ones would do.
            let named = match () {
                () if recipe.fused_feed_forward && name.contains("ffn_up") => {
                    name.replace("ffn_up", "ffn_gate")
                }
                () => name.replace("attn_qkv", "attn_q"),
            };
            assert!(error.to_string().contains(&named), "{context}: {error}");
            // The rows of a tied embedding are the vocabulary.
            if recipe.tied && name == "token_embd.weight" {
                continue;
            }
            let mut parts = recipe.parts();
            for tensor in parts.tensors.iter_mut().filter(|(tensor, ..)| tensor == name) {
                tensor.2[0] += 2;
                tensor.3.resize(
                    tensor.1.row_bytes(*tensor.2.last().unwrap()).unwrap()
                        * tensor.2[..tensor.2.len() - 1].iter().product::<usize>(),
                    0,
                );
            }
            let error = parts.model().err().unwrap_or_else(|| panic!("{name} too large: taken"));
            assert!(matches!(error, Error::TensorShape { .. } | Error::File(_)), "{context}: {error}");
        }
    }
}

/// Numbers that no model has are errors which name the key, or are not used; nothing panics.
#[test]
fn hostile_numbers_of_other_families_are_named() {
    for recipe in Recipe::families() {
        for (key, old) in recipe.file().metadata().filter(|(key, _)| key.starts_with(recipe.architecture)) {
            let values: Vec<OwnedValue> = match old {
                Value::F32(_) => [f32::NAN, f32::INFINITY, -1.0, 0.0, f32::MAX, f32::MIN_POSITIVE]
                    .map(OwnedValue::from)
                    .into(),
                Value::U32(_) => [0u32, 1, 7, 1 << 30, u32::MAX].map(OwnedValue::from).into(),
                _ => continue,
            };
            for value in values {
                let context = format!("{key} = {value:?}");
                let mut parts = recipe.parts();
                match parts.set(key, value).model().err() {
                    None | Some(Error::TensorShape { .. } | Error::Graph(_)) => {}
                    Some(
                        error @ (Error::Hyperparameter { .. } | Error::File(_) | Error::UnusedTensors { .. }),
                    ) => {
                        let message = error.to_string();
                        assert!(
                            message.contains(recipe.architecture) || message.contains("blk."),
                            "{context}: {message}"
                        );
                    }
                    Some(error) => panic!("{context}: {error}"),
                }
            }
        }
    }
}

#[test]
fn long_context_factors_are_checked() {
    let recipe = Recipe {
        long_factors: true,
        ..Recipe::families().into_iter().find(|r| r.architecture == "phi3").unwrap()
    };
    recipe.parts().model().unwrap();
    for name in ["rope_factors_short.weight", "rope_factors_long.weight"] {
        let error = recipe.parts().remove(name).model().err().unwrap();
        assert!(error.to_string().contains("rope_factors"), "{error}");
        let mut parts = recipe.parts();
        for tensor in parts.tensors.iter_mut().filter(|(tensor, ..)| tensor == name) {
            tensor.2 = vec![4];
            tensor.3.truncate(16);
        }
        let error = parts.model().err().unwrap();
        assert!(error.to_string().contains(name), "{error}");
    }
}

#[test]
fn counts_out_of_range_are_named() {
    for key in [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
    ] {
        let key = format!("llama.{key}");
        for value in [0u64, u64::from(u32::MAX), u64::MAX] {
            let error = refused("llama", |parts| _ = parts.set(&key, value), &key);
            assert!(matches!(error, Error::Hyperparameter { .. }), "{key} = {value}: {error}");
        }
        let error = refused("llama", |parts| _ = parts.set(&key, -4i32), &key);
        assert!(matches!(error, Error::File(_) | Error::Hyperparameter { .. }), "{error}");
    }
}

#[test]
fn inconsistent_values_are_named() {
    let key = |key: &str, value: u32| {
        let key = format!("llama.{key}");
        refused("llama", |parts| _ = parts.set(&key, value), &key)
    };
    let hyper = |error: Error| assert!(matches!(error, Error::Hyperparameter { .. }), "{error}");
    hyper(key("attention.head_count_kv", 3));
    hyper(key("attention.head_count_kv", 8));
    hyper(key("attention.head_count", 65));
    hyper(key("rope.dimension_count", 18));
    hyper(key("rope.dimension_count", 7));
    for epsilon in [-1.0f32, 1.0, f32::NAN, f32::INFINITY] {
        let name = "llama.attention.layer_norm_rms_epsilon";
        hyper(refused("llama", |parts| _ = parts.set(name, epsilon), name));
    }
    for base in [0.0f32, -1.0, f32::NAN, f32::INFINITY] {
        let name = "llama.rope.freq_base";
        hyper(refused("llama", |parts| _ = parts.set(name, base), name));
    }
    for factor in [-2.0f32, f32::NAN, f32::INFINITY] {
        let name = "llama.rope.scaling.factor";
        hyper(refused("llama", |parts| _ = parts.set(name, factor), name));
    }
    for kind in ["longrope", "dynamic", ""] {
        let name = "llama.rope.scaling.type";
        hyper(refused("llama", |parts| _ = parts.set(name, kind), name));
    }
}

#[test]
fn values_for_each_layer_are_checked() {
    let hyper = |key: &str, value: OwnedValue| {
        let key = format!("llama.{key}");
        let error = refused("llama", |parts| _ = parts.set(&key, value.clone()), &key);
        assert!(matches!(error, Error::Hyperparameter { .. }), "{error}");
    };
    for (key, n) in
        [("attention.head_count", 4u32), ("attention.head_count_kv", 2), ("feed_forward_length", 96)]
    {
        hyper(key, vec![n].into());
        hyper(key, vec![n, n, n].into());
        hyper(key, vec![n, 0].into());
        hyper(key, vec![n, u32::MAX].into());
    }
    hyper("attention.head_count_kv", vec![2u32, 3].into());
    hyper("attention.sliding_window_pattern", vec![true].into());
    hyper("attention.sliding_window_pattern", vec![true, false, true].into());
    hyper("nextn_predict_layers", 2u32.into());
    hyper("nextn_predict_layers", 3u32.into());
    hyper("block_count", 1000u32.into());
    // A number for all layers and an array that says the same are one model.
    let mut parts = Recipe::new("llama").parts();
    parts
        .set("llama.attention.head_count_kv", vec![2u32, 2])
        .set("llama.feed_forward_length", vec![96u32, 96]);
    assert_eq!(parts.model().unwrap().hyperparameters(), Recipe::new("llama").model().hyperparameters());
    // No model of this architecture has blocks that predict further tokens: the last one is a layer.
    hyper("nextn_predict_layers", 1u32.into());
    let mut parts = Recipe::new("llama").parts();
    parts.set("llama.nextn_predict_layers", 0u32);
    assert_eq!(parts.model().unwrap().hyperparameters(), Recipe::new("llama").model().hyperparameters());
    // No window is the same as a window of 0.
    let mut parts = Recipe::new("llama").parts();
    parts.set("llama.attention.sliding_window", 0u32);
    assert_eq!(parts.model().unwrap().hyperparameters().window(), None);
}

#[test]
fn values_of_another_type_are_named() {
    // The writer refuses such values, so they go under another name of the same length first.
    let refused = |key: &str, value: OwnedValue| {
        let alias = key.replace("llama.", "other.");
        let mut parts = Recipe::new("llama").parts();
        parts.keys.retain(|(name, _)| name != key);
        let mut bytes = parts.set(&alias, value).bytes();
        let at = bytes.windows(alias.len()).position(|window| window == alias.as_bytes()).unwrap();
        bytes[at..at + key.len()].copy_from_slice(key.as_bytes());
        let error = File::from_bytes(bytes).map_err(Error::from).and_then(Model::from_file).err().unwrap();
        assert!(error.to_string().contains(key), "{key} is not in: {error}");
    };
    for key in NEEDED.iter().chain(&[
        "attention.head_count_kv",
        "attention.key_length",
        "expert_count",
        "rope.freq_base",
    ]) {
        refused(&format!("llama.{key}"), "many".into());
        refused(&format!("llama.{key}"), true.into());
        refused(&format!("llama.{key}"), vec!["a", "b"].into());
    }
    for key in ["rope.scaling.factor", "rope.scale_linear", "attention.sliding_window"] {
        refused(&format!("llama.{key}"), "many".into());
    }
    refused("llama.rope.scaling.type", 2u32.into());
}

#[test]
fn tensors_of_another_shape_are_named() {
    for (name, dims) in [
        ("token_embd.weight", vec![100, 32]),
        ("token_embd.weight", vec![100]),
        ("output.weight", vec![99, 64]),
        ("output_norm.weight", vec![63]),
        ("blk.0.attn_q.weight", vec![64, 32]),
        ("blk.1.attn_k.weight", vec![64, 64]),
        ("blk.1.attn_v.weight", vec![32, 64, 1]),
        ("blk.0.attn_output.weight", vec![32, 64]),
        ("blk.1.ffn_down.weight", vec![96, 64]),
        ("blk.0.attn_q.bias", vec![32]),
        ("rope_freqs.weight", vec![9]),
    ] {
        let change = |parts: &mut Parts| {
            parts.tensors.retain(|(tensor, ..)| tensor != name);
            let bytes = vec![0; dims.iter().product::<usize>() * 4];
            parts.tensors.push((name.to_owned(), DType::F32, dims.clone(), bytes));
        };
        let architecture = if name.ends_with(".bias") { "qwen2" } else { "llama" };
        let error = refused(architecture, change, name);
        match error {
            Error::TensorShape { name: tensor, found, wanted } => {
                assert_eq!(tensor, name);
                assert_ne!(found, wanted);
            }
            other => panic!("{name} {dims:?}: {other}"),
        }
    }
    // The same the other way round: the metadata says otherwise than all the tensors.
    for (key, value) in [
        ("llama.embedding_length", 128u32),
        ("llama.feed_forward_length", 95),
        ("llama.attention.head_count", 8),
    ] {
        let mut parts = Recipe::new("llama").parts();
        let error = parts.set(key, value).model().err().unwrap();
        assert!(matches!(error, Error::TensorShape { .. }), "{key}: {error}");
    }
}

#[test]
fn tensors_of_unsupported_types_are_named() {
    for dtype in [DType::I8, DType::F64, DType::Q8_K] {
        let name = "blk.1.ffn_up.weight";
        let change = |parts: &mut Parts| {
            for tensor in parts.tensors.iter_mut().filter(|(tensor, ..)| tensor == name) {
                tensor.1 = dtype;
                tensor.3 = vec![0; dtype.row_bytes(256).unwrap() * 96];
            }
        };
        let mut parts = Recipe { layers: 2, feed_forward: 96, ..Recipe::wide("llama", DType::Q8_0) }.parts();
        change(&mut parts);
        let error = parts.model().err().unwrap();
        let message = error.to_string();
        assert!(matches!(error, Error::TensorType { .. }), "{message}");
        assert!(message.contains(name) && message.contains(&dtype.to_string()), "{message}");
    }
    // Norms, biases and factors are F32 in every file there is.
    for name in ["blk.0.attn_norm.weight", "output_norm.weight", "blk.1.attn_q.bias"] {
        for dtype in [DType::F16, DType::BF16, DType::Q8_0, DType::I32] {
            let mut parts = Recipe::new("qwen2").parts();
            for tensor in parts.tensors.iter_mut().filter(|(tensor, ..)| tensor == name) {
                tensor.1 = dtype;
                tensor.3 = vec![0; dtype.row_bytes(64).unwrap()];
            }
            let error = parts.model().err().unwrap();
            assert!(matches!(error, Error::TensorType { .. }), "{name} as {dtype}: {error}");
            assert!(error.to_string().contains(name), "{name} as {dtype}: {error}");
        }
    }
}

#[test]
fn unsupported_architectures_are_named_with_the_supported_ones() {
    for name in ["starcoder2", "qwen9", "", "LLAMA"] {
        let mut parts = Recipe::new("llama").parts();
        let error = parts.set("general.architecture", name).model().err().unwrap();
        let message = error.to_string();
        assert!(matches!(error, Error::UnsupportedArchitecture { .. }), "{message}");
        assert!(message.contains(name) && message.contains("bert, command-r, deepseek2"), "{message}");
    }
}

#[test]
fn a_vocabulary_that_does_not_fit_the_model_is_an_error() {
    let error = refused("llama", |parts| _ = parts.set("tokenizer.ggml.pre", "no such rule"), "no such rule");
    assert!(matches!(error, Error::UnknownPreTokenizer { .. }), "{error}");
    refused("llama", |parts| _ = parts.set("tokenizer.ggml.model", "no such kind"), "no such kind");
    // A template that cannot be parsed is an error of what renders it.
    let mut parts = Recipe { text: true, ..Recipe::new("llama") }.parts();
    _ = parts.set("tokenizer.chat_template", "{% if %}");
    let model = parts.model().unwrap();
    let error = model.template().unwrap().check().unwrap_err();
    assert!(matches!(error, Error::Template { .. }), "{error}");
    // More tokens than the embedding has rows: some text could not be computed.
    let change = |parts: &mut Parts| {
        let mut tokens: Vec<String> = (0..100).map(|i| format!("x{i}")).collect();
        tokens.push("one too many".to_owned());
        let texts: Vec<&str> = tokens.iter().map(String::as_str).collect();
        parts.remove("tokenizer.ggml.token_type").set("tokenizer.ggml.tokens", texts);
    };
    refused("llama", change, "token_embd.weight");
}

#[test]
fn files_that_are_not_models_are_errors() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("model.gguf");
    let open = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        Model::open(&path).err().unwrap().to_string()
    };
    let whole = Recipe { text: true, ..Recipe::new("llama") }.parts().bytes();
    for bytes in
        [&b""[..], b"GGUF", b"This is a letter to a friend.", &whole[..100], &whole[..whole.len() - 70]]
    {
        let message = open(bytes);
        assert!(message.contains("model.gguf"), "{} bytes: {message}", bytes.len());
    }
    assert!(Model::open(folder.path()).err().unwrap().to_string().contains(folder.path().to_str().unwrap()));
    assert!(Model::open(folder.path().join("none.gguf")).err().unwrap().to_string().contains("none.gguf"));
    std::fs::write(&path, &whole).unwrap();
    Model::open(&path).unwrap();
}

//! The default model as a folder of safetensors and back: the same keys and tensors.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

#[path = "common/model_folder.rs"]
mod model_folder;

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use model_folder::{TestTensor, safetensors};
use quadriga_gguf::{File, OwnedValue};
use quadriga_graph::{DType, blocks};
use quadriga_models::convert::{ConvertOptions, TargetType, convert};
use serde_json::{Map, Value, json};

/// The name in a model's own files, and the heads whose rows are in another order there.
fn original_name(name: &str) -> (String, usize) {
    let whole = match name {
        "token_embd.weight" => Some("model.embed_tokens.weight"),
        "output_norm.weight" => Some("model.norm.weight"),
        _ => None,
    };
    if let Some(whole) = whole {
        return (whole.to_owned(), 0);
    }
    let mut parts = name.split('.');
    let (Some("blk"), Some(layer), Some(part)) = (parts.next(), parts.next(), parts.next()) else {
        panic!("{name}")
    };
    let (own, heads) = match part {
        "attn_norm" => ("input_layernorm", 0),
        "ffn_norm" => ("post_attention_layernorm", 0),
        "attn_q" => ("self_attn.q_proj", 9),
        "attn_k" => ("self_attn.k_proj", 3),
        "attn_v" => ("self_attn.v_proj", 0),
        "attn_output" => ("self_attn.o_proj", 0),
        "ffn_gate" => ("mlp.gate_proj", 0),
        "ffn_up" => ("mlp.up_proj", 0),
        "ffn_down" => ("mlp.down_proj", 0),
        other => panic!("{other}"),
    };
    (format!("model.layers.{layer}.{own}.weight"), heads)
}

/// Rows of which pairs are adjacent, in the order of halves.
fn in_halves(values: &[f32], rows: usize, heads: usize) -> Vec<f32> {
    let (columns, length) = (values.len() / rows, rows / heads);
    let row = |row: usize| &values[row * columns..(row + 1) * columns];
    let source = |index: usize| {
        let (head, within) = (index / length, index % length);
        head * length + within % (length / 2) * 2 + within / (length / 2)
    };
    (0..rows).flat_map(|index| row(source(index)).to_vec()).collect()
}

/// Values of the file, rounded to half precision.
fn half_values(file: &File, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap();
    let mut values = vec![0.0; tensor.shape().elements()];
    blocks::dequantize(tensor.dtype(), tensor.bytes(), &mut values).unwrap();
    values.iter().map(|value| half::f16::from_f32(*value).to_f32()).collect()
}

/// Writes the folder that the file could have been converted from.
fn write_folder(file: &File, folder: &Path) {
    let number = |key: &str| file.get::<u64>(&format!("llama.{key}")).unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": true, "hidden_act": "silu",
        "hidden_size": number("embedding_length"), "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"), "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"), "vocab_size": number("vocab_size"),
        "max_position_embeddings": number("context_length"), "rope_theta": file.get::<f64>("llama.rope.freq_base").unwrap(),
        "rms_norm_eps": 1e-5, "rope_scaling": null,
    });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let tokens: Vec<&str> = file.get("tokenizer.ggml.tokens").unwrap();
    let types: Vec<i64> = file.get("tokenizer.ggml.token_type").unwrap();
    let merges: Vec<&str> = file.get("tokenizer.ggml.merges").unwrap();
    let added: Vec<Value> = (0..tokens.len())
        .filter(|id| types[*id] == 3)
        .map(|id| json!({ "id": id, "content": tokens[id], "special": true }))
        .collect();
    let vocabulary: Map<String, Value> =
        tokens.iter().enumerate().map(|(id, text)| ((*text).to_owned(), id.into())).collect();
    let tokenizer = json!({
        "added_tokens": added,
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            { "type": "Digits", "individual_digits": true }, { "type": "ByteLevel", "add_prefix_space": false, "use_regex": true } ] },
        "model": { "type": "BPE", "vocab": vocabulary, "merges": merges },
    });
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let special = |name: &str| tokens[file.get::<usize>(&format!("tokenizer.ggml.{name}_token_id")).unwrap()];
    let config = json!({
        "add_prefix_space": false, "add_bos_token": false, "bos_token": special("bos"), "eos_token": { "content": special("eos") },
        "unk_token": special("unknown"), "pad_token": special("padding"),
        "chat_template": file.get::<&str>("tokenizer.chat_template").unwrap(),
    });
    fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
    let tensors: Vec<TestTensor> = file
        .tensors()
        .map(|tensor| {
            let shape = tensor.shape().dims().to_vec();
            let (name, heads) = original_name(tensor.name());
            let values = half_values(file, tensor.name());
            let values = if heads > 0 { in_halves(&values, shape[0], heads) } else { values };
            TestTensor { name, shape, values }
        })
        .collect();
    fs::write(folder.join("model.safetensors"), safetensors(&tensors, "F16")).unwrap();
}

#[test]
fn the_default_model_survives_the_way_through_safetensors() {
    let path = quadriga_llm::default_model::fetch(None, &mut |_| ControlFlow::Continue(())).unwrap();
    let original = File::open(path).unwrap();
    let folder = tempfile::tempdir().unwrap();
    write_folder(&original, folder.path());
    let output = folder.path().join("out.gguf");
    let name = original.get::<&str>("general.name").unwrap().to_owned();
    let options = ConvertOptions {
        target: TargetType::from_name("F16"),
        name: Some(name),
        ..ConvertOptions::default()
    };
    convert(folder.path(), &output, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    let converted = File::open(&output).unwrap();
    // Who made it, under which license, and how it was quantized, is not in the weights.
    let about = ["organization", "finetune", "basename", "size_label", "license", "languages", "file_type"];
    let about = about.map(|key| format!("general.{key}"));
    for (key, value) in original.metadata().filter(|(key, _)| !about.iter().any(|own| own == key)) {
        let found = converted.value(key).map(OwnedValue::from);
        assert_eq!(found, Some(OwnedValue::from(value)), "{key}");
    }
    for (key, _) in converted.metadata() {
        assert!(original.value(key).is_some(), "{key}");
    }
    assert_eq!(converted.tensor_count(), original.tensor_count());
    for tensor in original.tensors() {
        let found = converted.tensor(tensor.name()).unwrap();
        let expected = if tensor.dtype() == DType::F32 { DType::F32 } else { DType::F16 };
        assert_eq!((found.dtype(), found.shape()), (expected, tensor.shape()), "{}", tensor.name());
        assert!(
            half_values(&converted, tensor.name()) == half_values(&original, tensor.name()),
            "{}",
            tensor.name()
        );
    }
}

//! Conversion of safetensors folders, judged by plain formulas.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

#[path = "convert/deepseek.rs"]
mod deepseek;
#[path = "convert/files.rs"]
mod files;
#[path = "common/model_folder.rs"]
mod model_folder;
#[path = "convert/rotary.rs"]
mod rotary;
#[path = "convert/tokens.rs"]
mod tokens;

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use model_folder::{TestTensor, llama_config, llama_tensors, safetensors, write};
use quadriga_gguf::File;
use quadriga_graph::{DType, blocks};
use quadriga_models::convert::{ConvertError, ConvertOptions, TargetType, convert};
use quadriga_models::quantize::quantize_rows;
use serde_json::{Value, json};

fn options(target: &str) -> ConvertOptions {
    // Little memory and several threads, so that tensors are cut into pieces.
    ConvertOptions {
        target: TargetType::from_name(target),
        memory: 3000,
        threads: 3,
        ..ConvertOptions::default()
    }
}

fn run(folder: &Path, options: &ConvertOptions) -> Result<File, ConvertError> {
    let output = folder.join("out.gguf");
    convert(folder, &output, options, &mut |_| ControlFlow::Continue(()))?;
    Ok(File::open(&output).unwrap())
}

fn values(file: &File, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap();
    let mut values = vec![0.0; tensor.shape().elements()];
    blocks::dequantize(tensor.dtype(), tensor.bytes(), &mut values).unwrap();
    values
}

fn of<'t>(tensors: &'t [TestTensor], name: &str) -> &'t TestTensor {
    tensors.iter().find(|tensor| tensor.name == name).unwrap()
}

/// Rows of heads whose halves become pairs, by the definition: row 2i is i, row 2i + 1 is i + half.
fn paired(tensor: &TestTensor, heads: usize) -> Vec<f32> {
    let columns = tensor.shape[1];
    let length = tensor.shape[0] / heads;
    let mut rows = Vec::new();
    for head in 0..heads {
        for pair in 0..length / 2 {
            for half in 0..2 {
                let row = head * length + half * length / 2 + pair;
                rows.extend_from_slice(&tensor.values[row * columns..(row + 1) * columns]);
            }
        }
    }
    rows
}

#[test]
fn a_llama_has_the_tensors_keys_and_tokens_of_its_folder() {
    for dtype in ["F32", "F16", "BF16"] {
        let folder = tempfile::tempdir().unwrap();
        let tensors = llama_tensors();
        write(folder.path(), &llama_config(), &tensors, dtype);
        let file = run(folder.path(), &options("F32")).unwrap();
        assert_eq!(file.get::<&str>("general.architecture").unwrap(), "llama");
        assert_eq!(file.get::<u32>("llama.attention.head_count_kv").unwrap(), 1);
        assert_eq!(file.get::<u32>("llama.rope.dimension_count").unwrap(), 4);
        for (name, from, heads) in [
            ("token_embd.weight", "model.embed_tokens.weight", 0),
            ("output.weight", "lm_head.weight", 0),
            ("output_norm.weight", "model.norm.weight", 0),
            ("blk.1.attn_q.weight", "model.layers.1.self_attn.q_proj.weight", 2),
            ("blk.1.attn_k.weight", "model.layers.1.self_attn.k_proj.weight", 1),
            ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight", 0),
            ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight", 0),
        ] {
            let source = of(&tensors, from);
            let expected = if heads == 0 { source.values.clone() } else { paired(source, heads) };
            assert_eq!(values(&file, name), expected, "{name} of {dtype}");
        }
        assert_eq!(file.tensor_count(), 3 + 2 * 9);
        let model = quadriga_llm::Model::from_file(file).unwrap();
        let tokenizer = model.tokenizer().unwrap();
        assert_eq!(
            tokenizer.encode("hello<|endoftext|>", true),
            [257, u32::from(b'l'), u32::from(b'o'), 258]
        );
        assert!(model.template().is_some());
        assert_eq!(model.file().get::<&str>("tokenizer.ggml.pre").unwrap(), "smollm");
    }
}

#[test]
fn several_files_are_one_model_and_the_type_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = llama_tensors();
    write(folder.path(), &llama_config(), &tensors, "BF16");
    let whole = run(folder.path(), &options("none")).unwrap();
    assert_eq!(whole.tensor("blk.0.ffn_up.weight").unwrap().dtype(), DType::BF16);
    assert_eq!(whole.tensor("blk.0.ffn_norm.weight").unwrap().dtype(), DType::F32);
    let whole = fs::read(folder.path().join("out.gguf")).unwrap();
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let mut map = serde_json::Map::new();
    for (number, part) in (1..).zip(tensors.chunks(9)) {
        let name = format!("model-{number:05}-of-00003.safetensors");
        fs::write(folder.path().join(&name), safetensors(part, "BF16")).unwrap();
        map.extend(part.iter().map(|tensor| (tensor.name.clone(), Value::from(name.as_str()))));
    }
    fs::write(folder.path().join("model.safetensors.index.json"), json!({ "weight_map": map }).to_string())
        .unwrap();
    run(folder.path(), &options("none")).unwrap();
    assert_eq!(fs::read(folder.path().join("out.gguf")).unwrap(), whole);
}

#[test]
fn quantized_types_are_those_of_the_quantizer() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = llama_config();
    let mut tensors = llama_tensors();
    // Rows of whole blocks.
    for tensor in &mut tensors {
        for dim in tensor.shape.iter_mut().filter(|dim| **dim != 300) {
            *dim *= 8;
        }
        *tensor = TestTensor::new(&tensor.name, &tensor.shape);
    }
    for (key, value) in [("hidden_size", 64), ("intermediate_size", 128)] {
        config[key] = value.into();
    }
    write(folder.path(), &config, &tensors, "F32");
    let file = run(folder.path(), &options("Q8_0")).unwrap();
    let tensor = file.tensor("blk.0.ffn_up.weight").unwrap();
    let source = of(&tensors, "model.layers.0.mlp.up_proj.weight");
    let mut expected = vec![0; tensor.byte_len()];
    quantize_rows(DType::Q8_0, &source.values, 64, None, &mut expected).unwrap();
    assert_eq!((tensor.dtype(), tensor.bytes()), (DType::Q8_0, expected.as_slice()));
}

#[test]
fn experts_of_mixtral_are_stacked() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = llama_config();
    config["architectures"] = json!(["MixtralForCausalLM"]);
    config["num_local_experts"] = 3.into();
    config["num_experts_per_tok"] = 2.into();
    let mut tensors: Vec<TestTensor> =
        llama_tensors().into_iter().filter(|tensor| !tensor.name.contains("mlp")).collect();
    for layer in 0..2 {
        let own = format!("model.layers.{layer}.block_sparse_moe");
        tensors.push(TestTensor::new(&format!("{own}.gate.weight"), &[3, 8]));
        for expert in 0..3 {
            for (part, shape) in [("w1", [16, 8]), ("w2", [8, 16]), ("w3", [16, 8])] {
                tensors.push(TestTensor::new(&format!("{own}.experts.{expert}.{part}.weight"), &shape));
            }
        }
    }
    write(folder.path(), &config, &tensors, "F32");
    let file = run(folder.path(), &options("F32")).unwrap();
    assert_eq!(file.tensor("blk.1.ffn_down_exps.weight").unwrap().shape().dims(), [3, 8, 16]);
    for (name, part) in [("ffn_gate_exps", "w1"), ("ffn_down_exps", "w2"), ("ffn_up_exps", "w3")] {
        let expected: Vec<f32> = (0..3)
            .flat_map(|expert| {
                of(&tensors, &format!("model.layers.1.block_sparse_moe.experts.{expert}.{part}.weight"))
                    .values
                    .clone()
            })
            .collect();
        assert_eq!(values(&file, &format!("blk.1.{name}.weight")), expected, "{name}");
    }
}

#[test]
fn fp8_weights_are_scaled_by_their_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = llama_tensors();
    let mut config = llama_config();
    config["quantization_config"] = json!({ "quant_method": "fp8", "weight_block_size": [4, 4] });
    write(folder.path(), &config, &tensors, "F32");
    let name = "model.layers.0.mlp.up_proj.weight";
    // One byte per element: 0x38 is 1, 0x40 is 2, 0xb8 is -1; a scale per 4 × 4 block.
    let bytes: Vec<u8> = (0..16 * 8).map(|index| [0x38, 0x40, 0xb8][index % 3]).collect();
    let scales: Vec<f32> = (0..8).map(|index| index as f32 + 0.5).collect();
    let others: Vec<TestTensor> = tensors.iter().filter(|tensor| tensor.name != name).cloned().collect();
    fs::write(folder.path().join("model.safetensors"), safetensors(&others, "F32")).unwrap();
    let header = json!({
        (name): { "dtype": "F8_E4M3", "shape": [16, 8], "data_offsets": [0, 128] },
        (format!("{name}_scale_inv")): { "dtype": "F32", "shape": [4, 2], "data_offsets": [128, 160] },
    })
    .to_string();
    let data: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let own = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes, &data].concat();
    fs::write(folder.path().join("model-fp8.safetensors"), own).unwrap();
    let file = run(folder.path(), &options("F32")).unwrap();
    let expected: Vec<f32> = (0..16 * 8)
        .map(|index| [1.0, 2.0, -1.0][index % 3] * scales[index / 8 / 4 * 2 + index % 8 / 4])
        .collect();
    assert_eq!(values(&file, "blk.0.ffn_up.weight"), expected);
}

/// Writes a model of which one weight, of 16 × 8, is FP8 with these scales.
fn write_fp8(folder: &Path, quantization: Value, shape: &[usize], scales: &[f32]) {
    let tensors = llama_tensors();
    let mut config = llama_config();
    config["quantization_config"] = quantization;
    write(folder, &config, &tensors, "F32");
    let name = "model.layers.0.mlp.up_proj.weight";
    let others: Vec<TestTensor> = tensors.iter().filter(|tensor| tensor.name != name).cloned().collect();
    fs::write(folder.join("model.safetensors"), safetensors(&others, "F32")).unwrap();
    let end = 128 + 4 * scales.len();
    let header = json!({
        (name): { "dtype": "F8_E4M3", "shape": [16, 8], "data_offsets": [0, 128] },
        (format!("{name}_scale_inv")): { "dtype": "F32", "shape": shape, "data_offsets": [128, end] },
    })
    .to_string();
    let data: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let own = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0x38; 128], &data].concat();
    fs::write(folder.join("model-fp8.safetensors"), own).unwrap();
}

#[test]
fn fp8_blocks_have_the_size_that_the_configuration_names() {
    // Rows 0 to 9 have the first scale, as no power of two would have it; the last block is cut off.
    for quantization in [
        json!({ "weight_block_size": [10, 8] }),
        json!({ "config_groups": { "group_0": { "weights": { "block_structure": [10, 8] } } } }),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write_fp8(folder.path(), quantization, &[2, 1], &[0.5, 3.0]);
        let file = run(folder.path(), &options("F32")).unwrap();
        let expected: Vec<f32> = (0..16 * 8).map(|index| if index / 8 < 10 { 0.5 } else { 3.0 }).collect();
        assert_eq!(values(&file, "blk.0.ffn_up.weight"), expected);
    }
    for (quantization, parts) in [
        (
            json!({ "weight_block_size": [4, 8] }),
            &["up_proj.weight_scale_inv", "[4, 1]", "4 × 8", "[2, 1]"][..],
        ),
        (json!({}), &["[1, 1]", "128 × 128", "quantization_config.weight_block_size"]),
        (json!({ "weight_block_size": [0, 8] }), &["weight_block_size", "[0,8]"]),
        (json!({ "weight_block_size": 128 }), &["weight_block_size", "128"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write_fp8(folder.path(), quantization, &[2, 1], &[0.5, 3.0]);
        let error = run(folder.path(), &options("F32")).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}

#[test]
fn a_missing_output_matrix_is_the_embedding_only_where_the_configuration_allows() {
    let without = |flag: Option<bool>, class: &str| {
        let folder = tempfile::tempdir().unwrap();
        let (mut config, mut tensors) = (llama_config(), llama_tensors());
        config["architectures"] = json!([class]);
        if let Some(flag) = flag {
            config["tie_word_embeddings"] = flag.into();
        }
        tensors.retain(|tensor| tensor.name != "lm_head.weight");
        write(folder.path(), &config, &tensors, "F32");
        run(folder.path(), &options("F32")).map(drop)
    };
    for flag in [None, Some(true)] {
        without(flag, "LlamaForCausalLM").unwrap();
    }
    let error = without(Some(false), "LlamaForCausalLM").unwrap_err().to_string();
    assert!(error.contains("lm_head.weight") && error.contains("tie_word_embeddings"), "{error}");
}

#[test]
fn the_file_type_is_that_of_the_tensors() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &llama_config(), &llama_tensors(), "F32");
    // Rows of 8 and 16 are not whole blocks of any type: all are F16, of which the number is 1.
    let file = run(folder.path(), &options("Q4_K_M")).unwrap();
    assert_eq!(file.tensor("blk.0.ffn_up.weight").unwrap().dtype(), DType::F16);
    assert_eq!(file.get::<u32>("general.file_type").unwrap(), 1);
    assert_eq!(run(folder.path(), &options("BF16")).unwrap().get::<u32>("general.file_type").unwrap(), 32);
}

#[test]
fn values_that_a_type_cannot_hold_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = llama_config();
    let mut tensors = llama_tensors();
    for tensor in &mut tensors {
        for dim in tensor.shape.iter_mut().filter(|dim| **dim != 300) {
            *dim *= 8;
        }
        *tensor = TestTensor::new(&tensor.name, &tensor.shape);
    }
    for (key, value) in [("hidden_size", 64), ("intermediate_size", 128)] {
        config[key] = value.into();
    }
    let name = "model.layers.0.mlp.up_proj.weight";
    tensors.iter_mut().find(|tensor| tensor.name == name).unwrap().values[64 * 5 + 3] = 2e6;
    write(folder.path(), &config, &tensors, "F32");
    let error = run(folder.path(), &options("Q4_0")).unwrap_err();
    assert!(
        matches!(&error, ConvertError::Overflow { tensor, row: 5, dtype: DType::Q4_0, .. }
            if tensor == "blk.0.ffn_up.weight"),
        "{error}"
    );
    // Scales of Q8_0 go further, and BF16 has the exponents of F32.
    for target in ["Q8_0", "BF16"] {
        run(folder.path(), &options(target)).unwrap();
    }
}

#[test]
fn values_that_f16_cannot_hold_are_refused_and_fit_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = llama_tensors();
    let up = tensors.iter_mut().find(|tensor| tensor.name.ends_with("1.mlp.up_proj.weight")).unwrap();
    up.values[2 * 8 + 1] = -70_000.0;
    write(folder.path(), &llama_config(), &tensors, "F32");
    let error = run(folder.path(), &options("F16")).unwrap_err();
    assert!(
        matches!(&error, ConvertError::Overflow { tensor, row: 2, .. } if tensor == "blk.1.ffn_up.weight")
    );
    assert!(error.to_string().contains("BF16 or F32"), "{error}");
    assert!(!folder.path().join("out.gguf").exists());
    run(folder.path(), &options("BF16")).unwrap();
    assert_eq!(values(&run(folder.path(), &options("F32")).unwrap(), "blk.1.ffn_up.weight")[17], -70_000.0);
}

#[test]
fn layers_that_predict_further_tokens_are_left_out_where_the_configuration_has_them() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = llama_config();
    config["num_hidden_layers"] = 1.into();
    config["num_nextn_predict_layers"] = 1.into();
    write(folder.path(), &config, &llama_tensors(), "F32");
    assert_eq!(run(folder.path(), &options("F32")).unwrap().tensor_count(), 3 + 9);
}

/// Converts the small Llama's tensors, or changed ones, under another configuration.
fn run_as(
    class: &str,
    changes: &[(&str, Value)],
    change: impl FnOnce(&mut Vec<TestTensor>),
) -> Result<File, String> {
    let folder = tempfile::tempdir().unwrap();
    let (mut config, mut tensors) = (llama_config(), llama_tensors());
    config["architectures"] = json!([class]);
    changes.iter().for_each(|(key, value)| config[*key] = value.clone());
    change(&mut tensors);
    write(folder.path(), &config, &tensors, "F32");
    run(folder.path(), &options("F32")).map_err(|error| error.to_string())
}

/// A layer of linear attention: two heads of keys of 4 and two of values of 4.
fn linear_attention(tensors: &mut Vec<TestTensor>) {
    tensors.retain(|tensor| !tensor.name.contains("self_attn"));
    for layer in 0..2 {
        for (part, shape) in [
            ("A_log", &[2][..]),
            ("dt_bias", &[2]),
            ("conv1d.weight", &[24, 1, 4]),
            ("in_proj_a.weight", &[2, 8]),
            ("in_proj_b.weight", &[2, 8]),
            ("in_proj_qkv.weight", &[24, 8]),
            ("in_proj_z.weight", &[8, 8]),
            ("norm.weight", &[4]),
            ("out_proj.weight", &[8, 8]),
        ] {
            tensors.push(TestTensor::new(&format!("model.layers.{layer}.linear_attn.{part}"), shape));
        }
    }
}

#[test]
fn linear_attention_without_heads_or_elements_is_refused() {
    let keys =
        ["linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim"];
    let changes = |key: &str, number: u64| {
        let mut changes: Vec<(&str, Value)> = vec![
            ("head_dim", 8.into()),
            ("layer_types", json!(["linear_attention", "linear_attention"])),
            ("linear_conv_kernel_dim", 4.into()),
        ];
        for (own, value) in keys.into_iter().zip([2u64, 4, 2, 4]) {
            changes.push((own, if own == key { number } else { value }.into()));
        }
        changes
    };
    for key in keys {
        for number in [0, 1 << 31] {
            let error = run_as("Qwen3_5ForCausalLM", &changes(key, number), linear_attention).unwrap_err();
            assert!(error.contains(key) && error.contains(&number.to_string()), "{key}: {error}");
        }
    }
    run_as("Qwen3_5ForCausalLM", &changes("", 0), linear_attention).unwrap();
}

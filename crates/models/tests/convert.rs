//! Conversion of safetensors folders, judged by plain formulas.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

#[path = "common/model_folder.rs"]
mod model_folder;

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use model_folder::{TestTensor, llama_config, llama_tensors, safetensors, write};
use quadriga_gguf::File;
use quadriga_graph::{DType, blocks};
use quadriga_models::convert::{
    ConvertError, ConvertOptions, TargetType, convert, parse_header, parse_tokenizer_json,
};
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
fn tokens_without_a_row_of_the_embedding_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let write_with = |token: Value, template: &str| {
        write(folder.path(), &llama_config(), &llama_tensors(), "F32");
        let mut tokenizer = model_folder::byte_tokenizer();
        tokenizer["added_tokens"].as_array_mut().unwrap().push(token);
        fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        let own = json!({ "eos_token": "<|endoftext|>", "chat_template": template });
        fs::write(folder.path().join("tokenizer_config.json"), own.to_string()).unwrap();
    };
    let plain = "{{ messages[0].content }}";
    for (special, template) in [(false, plain), (true, "<extra>{{ messages[0].content }}")] {
        write_with(json!({ "id": 300, "content": "<extra>", "special": special }), template);
        let error = run(folder.path(), &options("F32")).unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(error, ConvertError::TokensBeyondRows { tokens: 301, rows: 300, id: 300, .. }),
            "{text}"
        );
        assert!(["301", "300", "<extra>"].iter().all(|part| text.contains(part)), "{text}");
    }
    // A special token that no text contains, as text models have those of images: left out, and said.
    write_with(json!({ "id": 300, "content": "<image>", "special": true }), plain);
    let output = folder.path().join("out.gguf");
    let report =
        convert(folder.path(), &output, &options("F32"), &mut |_| ControlFlow::Continue(())).unwrap();
    assert!(
        matches!(report.notes.as_slice(), [note, rows] if note.contains("<image>") && note.contains("300 rows")
            && rows.contains("41 of the 300 rows") && rows.contains("row 259")),
        "{:?}",
        report.notes
    );
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

/// A pipe that is opened would block the test for ever.
#[cfg(unix)]
#[test]
fn pipes_are_refused_before_they_are_opened() {
    for name in [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "added_tokens.json",
        "chat_template.jinja",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "model-2.safetensors",
        "modules.json",
    ] {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &llama_config(), &llama_tensors(), "F32");
        let path = folder.path().join(name);
        let _ = fs::remove_file(&path);
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let error = run(folder.path(), &options("F32")).unwrap_err();
        assert!(
            matches!(&error, ConvertError::NotRegular { path: found } if *found == path),
            "{name}: {error}"
        );
        assert!(!folder.path().join("out.gguf").exists());
    }
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
fn what_is_missing_or_unknown_is_named_and_no_file_is_left() {
    type Change<'a> = &'a dyn Fn(&mut Value, &mut Vec<TestTensor>);
    let cases: &[(&str, Change<'_>, &str)] = &[
        ("class", &|config, _| config["architectures"] = json!(["NewForCausalLM"]), "NewForCausalLM"),
        (
            "key",
            &|config, _| drop(config.as_object_mut().unwrap().remove("num_hidden_layers")),
            "num_hidden_layers",
        ),
        ("layers", &|config, _| config["num_hidden_layers"] = 3.into(), "blk.2."),
        ("fewer", &|config, _| config["num_hidden_layers"] = 1.into(), "model.layers.1."),
        ("huge", &|config, _| config["num_hidden_layers"] = 2_000_000.into(), "num_hidden_layers"),
        ("heads", &|config, _| config["num_attention_heads"] = 3.into(), "heads"),
        ("negative", &|config, _| config["hidden_size"] = (-8).into(), "hidden_size"),
        ("activation", &|config, _| config["hidden_act"] = "gelu".into(), "hidden_act"),
        (
            "head",
            &|config, _| {
                config["head_dim"] = (1u64 << 31).into();
                config["rope_scaling"] = json!({ "rope_type": "llama3", "factor": 8.0 });
            },
            "head_dim",
        ),
        (
            "rope",
            &|config, _| config["rope_scaling"] = json!({ "rope_type": "dynamic", "factor": 2.0 }),
            "dynamic",
        ),
        (
            "tensor",
            &|_, tensors| tensors.retain(|tensor| !tensor.name.ends_with("1.mlp.up_proj.weight")),
            "ffn_up",
        ),
        (
            "extra",
            &|_, tensors| tensors.push(TestTensor::new("model.layers.0.mlp.router.weight", &[8, 8])),
            "mlp.router",
        ),
        ("not finite", &|_, tensors| tensors[4].values[3] = f32::NAN, "blk.0.ffn_norm.weight"),
        ("infinite", &|_, tensors| tensors[0].values[9] = f32::INFINITY, "token_embd.weight"),
        (
            "shape",
            &|_, tensors| {
                tensors
                    .iter_mut()
                    .filter(|tensor| tensor.name.ends_with("0.mlp.up_proj.weight"))
                    .for_each(|tensor| tensor.shape = vec![8, 16])
            },
            "ffn_up",
        ),
    ];
    for (case, change, part) in cases {
        let folder = tempfile::tempdir().unwrap();
        let (mut config, mut tensors) = (llama_config(), llama_tensors());
        change(&mut config, &mut tensors);
        write(folder.path(), &config, &tensors, "F32");
        let error = run(folder.path(), &options("F32")).unwrap_err().to_string();
        assert!(error.contains(part), "{case}: {error}");
        assert!(!folder.path().join("out.gguf").exists(), "{case}");
    }
}

#[test]
fn unknown_pre_tokenizers_are_refused_until_one_is_named() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &llama_config(), &llama_tensors(), "F32");
    let mut tokenizer = model_folder::byte_tokenizer();
    tokenizer["pre_tokenizer"]["pretokenizers"][0] =
        json!({ "type": "Split", "pattern": { "Regex": "[aeiou]" } });
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let error = run(folder.path(), &options("F32")).unwrap_err();
    assert!(
        matches!(error, ConvertError::PreTokenizer { .. }) && error.to_string().contains("[aeiou]"),
        "{error}"
    );
    let named = ConvertOptions { pre_tokenizer: Some("gpt-2".to_owned()), ..options("F32") };
    assert_eq!(run(folder.path(), &named).unwrap().get::<&str>("tokenizer.ggml.pre").unwrap(), "gpt-2");
    fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    assert!(matches!(run(folder.path(), &options("F32")), Err(ConvertError::Tokenizer { .. })));
}

#[test]
fn a_cancelled_conversion_leaves_the_old_file() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &llama_config(), &llama_tensors(), "F32");
    let output = folder.path().join("out.gguf");
    fs::write(&output, "old").unwrap();
    let cancelled = convert(folder.path(), &output, &options("F32"), &mut |progress| match progress.done * 2
        > progress.total
    {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    });
    assert!(matches!(cancelled, Err(ConvertError::Cancelled)));
    assert_eq!(fs::read(&output).unwrap(), b"old");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 5);
}

#[test]
fn text_that_would_be_changed_is_refused_by_name() {
    let file = |normalizer: &str, prefix: bool, model: &str| {
        parse_tokenizer_json(
            &serde_json::from_str(&format!(
                r#"{{"normalizer":{normalizer},"model":{model},
            "pre_tokenizer":{{"type":"ByteLevel","add_prefix_space":{prefix}}}}}"#
            ))
            .unwrap(),
            "tokenizer.json",
        )
    };
    let bytes = r#"{"type":"BPE","vocab":{"a":0},"merges":[]}"#;
    let unigram = r#"{"type":"Unigram","unk_id":0,"vocab":[["a",0.0]]}"#;
    let pieces = r#"{"type":"WordPiece","vocab":{"a":0}}"#;
    let replace = r#"{"type":"Replace","pattern":{"String":"x"},"content":"y"}"#;
    for (normalizer, prefix, model, part) in [
        (r#"{"type":"Lowercase"}"#, false, bytes, "Lowercase"),
        (r#"{"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Strip"}]}"#, false, bytes, "Strip"),
        (r#"{"type":"NFKC"}"#, false, bytes, "NFKC"),
        (replace, false, bytes, "Replace of \"x\" by \"y\""),
        (replace, false, unigram, "Replace of"),
        (r#"{"type":"Lowercase"}"#, false, unigram, "Lowercase"),
        (r#"{"type":"Lowercase"}"#, false, pieces, "Lowercase"),
        ("null", true, bytes, "add_prefix_space"),
    ] {
        let error = file(normalizer, prefix, model).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("not supported"), "{normalizer}: {error}");
    }
    assert_eq!(file("null", false, bytes).unwrap().notes, [""; 0]);
    // As llama.cpp does it, with a word about it.
    let composed = file(r#"{"type":"NFC"}"#, false, bytes).unwrap();
    assert!(matches!(composed.notes.as_slice(), [note] if note.contains("NFC")), "{:?}", composed.notes);
    let usual = r#"{"type":"Sequence","normalizers":[{"type":"Precompiled","precompiled_charsmap":"AAEC"},
        {"type":"Strip"},{"type":"Replace","pattern":{"Regex":" {2,}"},"content":"▁"}]}"#;
    assert!(file(usual, false, unigram).is_ok());
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

#[test]
fn a_name_that_appears_twice_is_refused() {
    let header = r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
    let error = parse_header(header.as_bytes(), header.len() as u64 + 16, "m.safetensors").unwrap_err();
    assert!(error.to_string().contains("\"w\"") && error.to_string().contains("twice"), "{error}");
}

#[test]
fn files_of_the_source_are_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &llama_config(), &llama_tensors(), "F32");
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        let output = folder.path().join(name);
        let before = fs::read(&output).unwrap();
        let converted = convert(folder.path(), &output, &options("F32"), &mut |_| ControlFlow::Continue(()));
        assert!(matches!(converted, Err(ConvertError::Output(_))), "{name}");
        assert_eq!(fs::read(&output).unwrap(), before);
    }
    // The result of an earlier conversion may be.
    run(folder.path(), &options("F32")).unwrap();
    run(folder.path(), &options("F16")).unwrap();
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

#[test]
fn a_chat_template_that_cannot_be_read_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &llama_config(), &llama_tensors(), "F32");
    fs::write(folder.path().join("tokenizer_config.json"), "{}").unwrap();
    for name in ["chat_template.j2", "chat_template.jinja"] {
        let path = folder.path().join(name);
        fs::write(&path, b"{{ messages }}\xff").unwrap();
        let error = run(folder.path(), &options("F32")).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("byte 14") && error.contains("UTF-8"), "{error}");
        fs::write(&path, "{{ messages }}").unwrap();
        let file = run(folder.path(), &options("F32")).unwrap();
        assert_eq!(file.get::<&str>("tokenizer.chat_template").unwrap(), "{{ messages }}");
    }
}

/// A SentencePiece model of the unknown token, bytes and two pieces.
fn sentence_pieces() -> Vec<u8> {
    let field = |number: u8, content: &[u8]| [&[number << 3 | 2, content.len() as u8], content].concat();
    let piece = |text: &str, kind: u8| {
        let score = [&[2 << 3 | 5][..], &(-1.0f32).to_le_bytes()].concat();
        field(1, &[field(1, text.as_bytes()), score, vec![3 << 3, kind]].concat())
    };
    let mut model = [piece("<unk>", 2), piece("<s>", 3), piece("</s>", 3)].concat();
    (0..=255u8).for_each(|byte| model.extend(piece(&format!("<0x{byte:02X}>"), 6)));
    model.extend([piece("\u{2581}", 1), piece("a", 1)].concat());
    model.extend([field(2, &[3 << 3, 2]), field(3, &[3 << 3, 0])].concat());
    model
}

#[test]
fn added_tokens_of_older_folders_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    write(folder.path(), &llama_config(), &llama_tensors(), "F32");
    fs::remove_file(path("tokenizer.json")).unwrap();
    fs::write(path("tokenizer.model"), sentence_pieces()).unwrap();
    let special = json!({ "eos_token": "</s>", "additional_special_tokens": ["[TOOL]"] });
    fs::write(path("tokenizer_config.json"), special.to_string()).unwrap();
    let added = json!({ "<s>": 1, "<|im_end|>": 279, "[TOOL]": 280, "word": 281 });
    fs::write(path("added_tokens.json"), added.to_string()).unwrap();
    let output = path("out.gguf");
    let report =
        convert(folder.path(), &output, &options("F32"), &mut |_| ControlFlow::Continue(())).unwrap();
    let file = File::open(&output).unwrap();
    let texts = file.get::<Vec<&str>>("tokenizer.ggml.tokens").unwrap();
    let kinds = file.get::<Vec<i32>>("tokenizer.ggml.token_type").unwrap();
    let found: Vec<(&str, i32)> = [1, 278, 279, 280, 281].iter().map(|id| (texts[*id], kinds[*id])).collect();
    assert_eq!(found, [("<s>", 3), ("[PAD278]", 5), ("<|im_end|>", 3), ("[TOOL]", 3), ("word", 4)]);
    // 261 pieces and three tokens.
    assert!(
        matches!(report.notes.as_slice(), [note] if note.contains("36 of the 300 rows") && note.contains("row 261")),
        "{:?}",
        report.notes
    );
    // What tokenizer.json says of an id comes first.
    write(folder.path(), &llama_config(), &llama_tensors(), "F32");
    fs::remove_file(path("tokenizer.model")).unwrap();
    let added = json!({ "other": 258, "<|im_end|>": 279 });
    fs::write(path("added_tokens.json"), added.to_string()).unwrap();
    let file = run(folder.path(), &options("F32")).unwrap();
    let texts = file.get::<Vec<&str>>("tokenizer.ggml.tokens").unwrap();
    assert_eq!((texts[258], texts[279]), ("<|endoftext|>", "<|im_end|>"));
    for (id, part) in [(json!("x"), "whole number"), (json!(16_777_215), "16777215")] {
        fs::write(path("added_tokens.json"), json!({ "<|im_end|>": id }).to_string()).unwrap();
        let error = run(folder.path(), &options("F32")).unwrap_err().to_string();
        assert!(error.contains("added_tokens.json") && error.contains(part), "{error}");
    }
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

#[test]
fn files_that_are_too_long_are_refused() {
    for (name, megabytes) in [
        ("config.json", 4),
        ("generation_config.json", 4),
        ("modules.json", 4),
        ("chat_template.jinja", 4),
        ("chat_template.j2", 4),
        ("tokenizer.model", 16),
        ("tokenizer.json", 64),
        ("tokenizer_config.json", 64),
        ("added_tokens.json", 64),
        ("model.safetensors.index.json", 64),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &llama_config(), &llama_tensors(), "F32");
        if name == "tokenizer.model" {
            fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
        }
        let path = folder.path().join(name);
        let file = fs::File::options().create(true).append(true).open(&path).unwrap();
        file.set_len((megabytes << 20) + 1).unwrap();
        let error = run(folder.path(), &options("F32")).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(&(megabytes << 20).to_string()), "{name}: {error}");
    }
}

#[test]
fn a_token_id_beyond_any_vocabulary_takes_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &llama_config(), &llama_tensors(), "F32");
    let mut tokenizer = model_folder::byte_tokenizer();
    tokenizer["added_tokens"].as_array_mut().unwrap().push(json!({ "id": 16_777_215, "content": "<image>",
        "special": true }));
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let error = run(folder.path(), &options("F32")).unwrap_err().to_string();
    assert!(error.contains("<image>") && error.contains("16777215"), "{error}");
}

#[test]
fn every_token_that_ends_generation_ends_it_after_conversion() {
    let converted = |ids: Value| {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &llama_config(), &llama_tensors(), "F32");
        let path = folder.path().join("tokenizer_config.json");
        fs::write(path, json!({ "add_bos_token": false }).to_string()).unwrap();
        fs::write(folder.path().join("generation_config.json"), json!({ "eos_token_id": ids }).to_string())
            .unwrap();
        let output = folder.path().join("out.gguf");
        let report = convert(folder.path(), &output, &options("F32"), &mut |_| ControlFlow::Continue(()));
        let file = File::open(&output).unwrap();
        let endings: Vec<Option<u32>> = ["eos", "eot", "eom"]
            .iter()
            .map(|key| file.find(&format!("tokenizer.ggml.{key}_token_id")).unwrap())
            .collect();
        let vocabulary = quadriga_llm::tokenizer::Tokenizer::from_file(&file).unwrap();
        let ends: Vec<u32> = (0..8).filter(|token| vocabulary.is_end(*token)).collect();
        (endings, ends, report.unwrap().notes.join("\n"))
    };
    let (keys, ends, notes) = converted(json!([1, 3]));
    assert_eq!((keys, ends), (vec![Some(1), Some(3), None], vec![1, 3]));
    assert!(!notes.contains("eos_token_id"), "{notes}");
    let (keys, ends, notes) = converted(json!([1, 3, 5, 1, 7]));
    assert_eq!((keys, ends), (vec![Some(1), Some(3), Some(5)], vec![1, 3, 5]));
    assert!(notes.contains("token 7") && notes.contains("stop string"), "{notes}");
    assert_eq!(converted(json!(2)).0, [Some(2), None, None]);
}

//! Low-rank adapters: at run time, merged, and refused.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

#[path = "common/model_folder.rs"]
mod model_folder;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model_folder::{TestTensor, llama_config, llama_tensors, safetensors, write};
use quadriga_gguf::{File, Writer};
use quadriga_graph::DType;
use quadriga_llm::{Adapter, Engine, EngineOptions, Model};
use quadriga_models::convert::{ConvertOptions, TargetType, convert};
use quadriga_models::lora::{self, LoraError, merge};
use quadriga_models::quantize::{FileType, QuantizeHooks, QuantizeOptions, QuantizePlan, quantize_file};
use quadriga_runtime::{Backend, Scheduler};
use serde_json::{Value, json};

/// Configuration and weights of a Llama of two layers, 64 wide.
fn llama() -> (Value, Vec<TestTensor>) {
    let mut config = llama_config();
    let mut tensors = llama_tensors();
    for tensor in &mut tensors {
        for dim in tensor.shape.iter_mut().filter(|dim| **dim != 300) {
            *dim *= 8;
        }
        *tensor = TestTensor::new(&tensor.name, &tensor.shape);
        // Small enough that nothing saturates.
        tensor.values.iter_mut().for_each(|value| *value /= 8.0);
    }
    for (key, value) in [("hidden_size", 64), ("intermediate_size", 128)] {
        config[key] = value.into();
    }
    (config, tensors)
}

/// Writes and converts a model.
fn model(folder: &Path) -> PathBuf {
    let (config, tensors) = llama();
    converted(folder, &config, &tensors)
}

fn converted(folder: &Path, config: &Value, tensors: &[TestTensor]) -> PathBuf {
    write(folder, config, tensors, "F32");
    let path = folder.join("model.gguf");
    let options = ConvertOptions { target: TargetType::from_name("F32"), ..ConvertOptions::default() };
    convert(folder, &path, &options, &mut |_| ControlFlow::Continue(())).unwrap();
    path
}

/// Pairs of name, outputs and inputs.
const PAIRS: &[(&str, usize, usize)] = &[
    ("blk.0.attn_q.weight", 64, 64),
    ("blk.0.ffn_up.weight", 128, 64),
    ("blk.1.ffn_down.weight", 64, 128),
    ("blk.1.attn_output.weight", 64, 64),
    ("output.weight", 300, 64),
    ("token_embd.weight", 300, 64),
];

fn adapter(
    folder: &Path,
    name: &str,
    pairs: &[(&str, usize, usize)],
    keys: &[(&str, &str)],
    rank: usize,
) -> PathBuf {
    let path = folder.join(name);
    let bytes = |tensor: &TestTensor| -> Vec<u8> {
        tensor.values.iter().flat_map(|value| (value / 8.0).to_le_bytes()).collect()
    };
    let data: Vec<(String, [usize; 2], Vec<u8>)> = pairs
        .iter()
        .flat_map(|(name, outputs, inputs)| {
            // Rows of the embedding are looked up: the matrices are the other way round there.
            let dims = match *name {
                "token_embd.weight" => [[*outputs, rank], [*inputs, rank]],
                _ => [[rank, *inputs], [*outputs, rank]],
            };
            [("lora_a", dims[0]), ("lora_b", dims[1])].map(|(end, dims)| {
                let full = format!("{name}.{end}");
                let values = bytes(&TestTensor::new(&full, &dims));
                (full, dims, values)
            })
        })
        .collect();
    let mut writer = Writer::new();
    let defaults = [("general.architecture", "llama"), ("general.type", "adapter"), ("adapter.type", "lora")];
    for (key, value) in defaults {
        let value = keys.iter().find(|(own, _)| *own == key).map_or(value, |(_, value)| value);
        writer.set(key, value).unwrap();
    }
    writer.set("adapter.lora.alpha", 8.0f32).unwrap();
    for (name, dims, bytes) in &data {
        writer.tensor_bytes(name, DType::F32, *dims, bytes).unwrap();
    }
    writer.write(&path).unwrap();
    path
}

/// The logits after each of some tokens.
fn logits(model: Model) -> Vec<f32> {
    let cpu: Arc<dyn Backend> = Arc::new(quadriga_cpu::Backend::new().unwrap());
    let options = EngineOptions { context: 32, batch: 4, ..EngineOptions::default() }.cache(DType::F32);
    let mut engine = Engine::new(model, &Scheduler::new([cpu]), options, &mut |_| {}).unwrap();
    let mut rows = Vec::new();
    for batch in [&[1u32, 70, 33, 200][..], &[5], &[299]] {
        engine.feed(batch).unwrap();
        rows.extend_from_slice(engine.logits(0));
    }
    rows
}

fn difference(a: &[f32], b: &[f32]) -> f64 {
    let squares: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let all: f64 = a.iter().map(|a| f64::from(*a).powi(2)).sum();
    (squares / all).sqrt()
}

#[test]
fn an_adapter_at_run_time_equals_the_merged_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = model(folder.path());
    let base = logits(Model::open(&path).unwrap());
    let lora = adapter(folder.path(), "a.gguf", PAIRS, &[], 4);
    let other = adapter(folder.path(), "b.gguf", &PAIRS[..2], &[], 2);
    // Scale 0 is the model itself, to the last bit.
    let zero = Model::open(&path).unwrap().with_adapters(&[Adapter::open(&lora, 0.0).unwrap()]).unwrap();
    assert_eq!(logits(zero.clone()), base);
    assert_eq!(zero.identity(), Model::open(&path).unwrap().identity());
    for adapters in [
        vec![Adapter::open(&lora, 1.0).unwrap()],
        vec![Adapter::open(&lora, -0.5).unwrap(), Adapter::open(&other, 2.0).unwrap()],
    ] {
        let merged = folder.path().join("merged.gguf");
        let changed = merge(&path, &adapters, &merged, &mut |_, _| ControlFlow::Continue(())).unwrap();
        assert_eq!(changed, PAIRS.len());
        let adapted = Model::open(&path).unwrap().with_adapters(&adapters).unwrap();
        assert_ne!(adapted.identity(), Model::open(&path).unwrap().identity());
        let (run, file) = (logits(adapted), logits(Model::open(&merged).unwrap()));
        assert!(difference(&run, &file) < 1e-5, "{}", difference(&run, &file));
        assert!(difference(&base, &file) > 1e-2);
    }
}

#[test]
fn adapters_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = model(folder.path());
    let open = |name: &str, pairs: &[(&str, usize, usize)], keys: &[(&str, &str)]| {
        Adapter::open(adapter(folder.path(), name, pairs, keys, 2), 1.0)
    };
    let with = |adapter: Adapter| {
        Model::open(&path).unwrap().with_adapters(&[adapter]).map(drop).unwrap_err().to_string()
    };
    for (pairs, keys, part) in [
        (&[("blk.0.attn_q.weight", 32, 64)][..], &[][..], "blk.0.attn_q.weight is 64 × 64"),
        (&[("blk.9.attn_q.weight", 64, 64)], &[], "no tensor"),
        (&[("token_embd.weight", 200, 64)], &[], "token_embd.weight is 300 × 64"),
        (&[("blk.0.attn_q.weight", 64, 64)], &[("general.architecture", "qwen2")], "qwen2"),
    ] {
        let error = with(open("c.gguf", pairs, keys).unwrap());
        assert!(error.contains(part), "{error}");
    }
    for (key, value) in [("general.type", "model"), ("adapter.type", "other")] {
        let error = open("d.gguf", PAIRS, &[(key, value)]).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
    assert!(Adapter::open(&path, 1.0).is_err());
    let wrong = open("e.gguf", &[("blk.9.attn_q.weight", 64, 64)], &[]).unwrap();
    let output = folder.path().join("x.gguf");
    let merged = merge(&path, &[wrong], &output, &mut |_, _| ControlFlow::Continue(()));
    assert!(matches!(merged, Err(LoraError::MissingTensor { .. })) && !output.exists());
}

/// Modules of a PEFT adapter: name, outputs and inputs. Rows of queries and keys are in another order in the GGUF file.
const MODULES: &[(&str, usize, usize)] = &[
    ("model.layers.0.self_attn.q_proj", 64, 64),
    ("model.layers.1.self_attn.k_proj", 32, 64),
    ("model.layers.1.self_attn.v_proj", 32, 64),
    ("model.layers.0.mlp.gate_proj", 128, 64),
    ("model.layers.1.mlp.down_proj", 64, 128),
    ("lm_head", 300, 64),
    ("model.embed_tokens", 300, 64),
];

/// The matrices of a module, of this rank.
fn pair((name, outputs, inputs): (&str, usize, usize), rank: usize) -> [TestTensor; 2] {
    let matrix = |part: &str, shape: &[usize]| {
        let mut tensor = TestTensor::new(&format!("base_model.model.{name}.lora_{part}"), shape);
        tensor.values.iter_mut().for_each(|value| *value /= 8.0);
        tensor
    };
    if name.ends_with("embed_tokens") {
        return [matrix("embedding_A", &[rank, outputs]), matrix("embedding_B", &[inputs, rank])];
    }
    let matrix = |part: &str, shape: &[usize]| matrix(&format!("{part}.weight"), shape);
    [matrix("A", &[rank, inputs]), matrix("B", &[outputs, rank])]
}

fn write_peft(folder: &Path, config: &Value, tensors: &[TestTensor]) {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
    std::fs::write(folder.join("adapter_model.safetensors"), safetensors(tensors, "F32")).unwrap();
}

#[test]
fn a_peft_adapter_equals_weights_that_were_changed_before_conversion() {
    let folder = tempfile::tempdir().unwrap();
    let (config, tensors) = llama();
    let path = converted(&folder.path().join("base"), &config, &tensors);
    let file = File::open(&path).unwrap();
    for (options, factor) in [
        (json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 8 }), 2.0),
        (
            json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 6.0, "use_rslora": true, "use_dora": false }),
            3.0,
        ),
        (
            json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 1, "rank_pattern": {},
                    "alpha_pattern": { "(self_attn|mlp)\\..*_proj": 8, "lm_head": 8, "embed_tokens": 8 } }),
            2.0,
        ),
    ] {
        let peft = folder.path().join("peft");
        let mut pairs: Vec<TestTensor> = MODULES.iter().flat_map(|module| pair(*module, 4)).collect();
        // PEFT saves the embedding and the output as they were beside their adapters.
        for (name, outputs, inputs) in &MODULES[5..] {
            let name = format!("base_model.model.{name}.base_layer.weight");
            pairs.push(TestTensor::new(&name, &[*outputs, *inputs]));
        }
        write_peft(&peft, &options, &pairs);
        // The reference: W + factor · B·A, computed on the model's own files.
        let mut changed = tensors.clone();
        for module in MODULES {
            let [a, b] = pair(*module, 4);
            let weight = format!("{}.weight", module.0);
            let weight = changed.iter_mut().find(|tensor| tensor.name == weight).unwrap();
            for (index, value) in weight.values.iter_mut().enumerate() {
                let (row, column) = (index / module.2, index % module.2);
                let product = |k: usize| match module.0 {
                    "model.embed_tokens" => a.values[k * 300 + row] * b.values[column * 4 + k],
                    _ => b.values[row * 4 + k] * a.values[k * module.2 + column],
                };
                *value += factor * (0..4).map(product).sum::<f32>();
            }
        }
        let expected =
            logits(Model::open(converted(&folder.path().join("changed"), &config, &changed)).unwrap());
        for place in [peft.clone(), peft.join("adapter_model.safetensors")] {
            let adapter = lora::open(&place, 1.0, &file).unwrap();
            let merged = folder.path().join("merged.gguf");
            let run =
                logits(Model::open(&path).unwrap().with_adapters(std::slice::from_ref(&adapter)).unwrap());
            assert!(difference(&expected, &run) < 1e-5, "{options} {}", difference(&expected, &run));
            merge(&path, &[adapter], &merged, &mut |_, _| ControlFlow::Continue(())).unwrap();
            let merged = logits(Model::open(&merged).unwrap());
            assert!(difference(&expected, &merged) < 1e-5, "{options} {}", difference(&expected, &merged));
            // As a GGUF file, the adapter is the same.
            let converted = folder.path().join("adapter.gguf");
            assert_eq!(lora::convert(&place, &path, &converted).unwrap(), MODULES.len());
            let adapter = Adapter::open(&converted, 1.0).unwrap();
            assert_eq!(logits(Model::open(&path).unwrap().with_adapters(&[adapter]).unwrap()), run);
        }
    }
}

#[test]
fn peft_adapters_that_cannot_be_read_say_where() {
    let folder = tempfile::tempdir().unwrap();
    let file = File::open(model(folder.path())).unwrap();
    let peft = folder.path().join("peft");
    let lora = json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 8 });
    let good = pair(MODULES[0], 4).to_vec();
    let renamed = |name: &str| {
        let mut tensors = good.clone();
        tensors[0].name = name.to_owned();
        tensors
    };
    let mut infinite = good.clone();
    infinite[1].values[3] = f32::INFINITY;
    for (config, tensors, part) in [
        (json!({ "peft_type": "IA3", "lora_alpha": 8 }), good.clone(), "IA3"),
        (json!({ "peft_type": "LORA", "lora_alpha": 8, "use_dora": true }), good.clone(), "use_dora"),
        (json!({ "peft_type": "LORA" }), good.clone(), "lora_alpha"),
        (
            json!({ "peft_type": "LORA", "lora_alpha": 8, "alpha_pattern": { "(": 1 } }),
            good.clone(),
            "alpha_pattern",
        ),
        (lora.clone(), good[..1].to_vec(), "missing"),
        (lora.clone(), Vec::new(), "no tensors"),
        (lora.clone(), renamed("base_model.model.model.embed_tokens.lora_embedding_A"), "embed_tokens"),
        (
            lora.clone(),
            [pair(MODULES[0], 4)[0].clone(), pair(MODULES[0], 2)[1].clone()].to_vec(),
            "no product",
        ),
        (lora.clone(), pair(("model.layers.7.self_attn.q_proj", 64, 64), 4).to_vec(), "layers.7"),
        (lora.clone(), pair(("model.layers.0.router", 64, 64), 4).to_vec(), "router"),
        (lora.clone(), infinite, "not finite"),
    ] {
        write_peft(&peft, &config, &tensors);
        let error = lora::open(&peft, 1.0, &file).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("adapter_"), "{part}: {error}");
    }
    std::fs::remove_file(peft.join("adapter_model.safetensors")).unwrap();
    let error = lora::open(&peft, 1.0, &file).unwrap_err().to_string();
    assert!(error.contains("adapter_model.safetensors"), "{error}");
}

/// Every type that weights can have: the merged file is as far from the adapter at run time as the type's own error.
#[test]
fn adapters_are_merged_into_every_type() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.gguf");
    // One matrix whose rows are whole blocks of 256, and an adapter of rank 2 for it.
    let values = TestTensor::new("blk.0.attn_q.weight", &[16, 256]);
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let data = bytes(&values.values);
    let mut writer = Writer::new();
    writer.set("general.architecture", "llama").unwrap();
    writer.tensor_bytes(&values.name, DType::F32, [16, 256], &data).unwrap();
    writer.write(&input).unwrap();
    let adapter = adapter(folder.path(), "a.gguf", &[("blk.0.attn_q.weight", 16, 256)], &[], 2);
    let adapter = Adapter::open(adapter, 0.5).unwrap();
    let elements = |path: &Path| {
        let file = File::open(path).unwrap();
        let tensor = file.tensor("blk.0.attn_q.weight").unwrap();
        let mut values = vec![0.0; 16 * 256];
        quadriga_graph::blocks::dequantize(tensor.dtype(), tensor.bytes(), &mut values).unwrap();
        (tensor.dtype(), values)
    };
    let quantize = |from: &Path, to: &Path, dtype: &str| {
        let file = File::open(from).unwrap();
        let options =
            QuantizeOptions { pure: true, ..QuantizeOptions::new(FileType::from_name(dtype).unwrap()) };
        let plan = QuantizePlan::new(&file, &options, None).unwrap();
        let mut hooks = QuantizeHooks { progress: &mut |_| {}, cancelled: &|| false };
        quantize_file(&file, to, &plan, &options, None, &mut hooks).unwrap();
    };
    let merged = |from: &Path| {
        let to = folder.path().join("merged.gguf");
        let changed =
            merge(from, std::slice::from_ref(&adapter), &to, &mut |_, _| ControlFlow::Continue(())).unwrap();
        assert_eq!(changed, 1);
        elements(&to)
    };
    for name in [
        "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_S", "Q4_K_S", "Q5_K_S", "Q6_K",
        "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS", "IQ4_NL", "MXFP4",
        "TQ2_0",
    ] {
        let quantized = folder.path().join("quantized.gguf");
        quantize(&input, &quantized, name);
        let (dtype, before) = elements(&quantized);
        // What the merged file should have: the quantized weights and the product, before they are quantized again.
        let plain = folder.path().join("plain.gguf");
        let data = bytes(&before);
        let mut writer = Writer::new();
        writer.set("general.architecture", "llama").unwrap();
        writer.tensor_bytes(&values.name, DType::F32, [16, 256], &data).unwrap();
        writer.write(&plain).unwrap();
        let (_, expected) = merged(&plain);
        let (kept, found) = merged(&quantized);
        assert_eq!(kept, dtype, "{name}");
        assert!(difference(&before, &expected) > 0.05, "{name}: the adapter changes nothing");
        // As good as quantizing the sum.
        let mut bytes = vec![0; dtype.row_bytes(16 * 256).unwrap()];
        quadriga_models::quantize::quantize_rows(dtype, &expected, 256, None, &mut bytes).unwrap();
        let mut sum = vec![0.0; 16 * 256];
        quadriga_graph::blocks::dequantize(dtype, &bytes, &mut sum).unwrap();
        let (own, best) = (difference(&expected, &found), difference(&expected, &sum));
        assert!(own <= best + 1e-6, "{name}: {own} instead of {best}");
    }
}

/// A Mixtral of three experts, of which two are used.
fn mixtral(folder: &Path) -> PathBuf {
    let (config, tensors) = mixtral_parts();
    converted(folder, &config, &tensors)
}

#[test]
fn adapters_change_each_expert() {
    let folder = tempfile::tempdir().unwrap();
    let path = mixtral(folder.path());
    let lora = folder.path().join("experts.gguf");
    let mut writer = Writer::new();
    for (key, value) in
        [("general.architecture", "llama"), ("general.type", "adapter"), ("adapter.type", "lora")]
    {
        writer.set(key, value).unwrap();
    }
    let pairs = [("gate", 128, 64), ("up", 128, 64), ("down", 64, 128)];
    for (part, outputs, inputs) in pairs {
        for (end, dims) in [("a", [3, 4, inputs]), ("b", [3, outputs, 4])] {
            let name = format!("blk.1.ffn_{part}_exps.weight.lora_{end}");
            let values = TestTensor::new(&name, &dims).values;
            let bytes: Vec<u8> = values.iter().flat_map(|value| (value / 4.0).to_le_bytes()).collect();
            writer.tensor(&name, DType::F32, dims, move |out| out.write_all(&bytes)).unwrap();
        }
    }
    writer.write(&lora).unwrap();
    let adapters = [Adapter::open(&lora, 1.0).unwrap()];
    let merged = folder.path().join("merged.gguf");
    let changed = merge(&path, &adapters, &merged, &mut |_, _| ControlFlow::Continue(())).unwrap();
    assert_eq!(changed, pairs.len());
    let run = logits(Model::open(&path).unwrap().with_adapters(&adapters).unwrap());
    let (file, base) = (logits(Model::open(&merged).unwrap()), logits(Model::open(&path).unwrap()));
    assert!(difference(&run, &file) < 1e-4, "{}", difference(&run, &file));
    assert!(difference(&base, &file) > 1e-2, "{}", difference(&base, &file));
}

/// A tensor of small values.
fn small(name: &str, shape: &[usize]) -> TestTensor {
    let mut tensor = TestTensor::new(name, shape);
    tensor.values.iter_mut().for_each(|value| *value /= 8.0);
    tensor
}

/// Phi-3, whose queries, keys and values are one matrix, and whose gate and up are one.
fn phi3() -> (Value, Vec<TestTensor>) {
    let (mut config, mut tensors) = llama();
    config["architectures"] = json!(["Phi3ForCausalLM"]);
    config["original_max_position_embeddings"] = 64.into();
    let split = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"];
    tensors.retain(|tensor| !split.iter().any(|part| tensor.name.contains(part)));
    for layer in 0..2 {
        let own = format!("model.layers.{layer}");
        tensors.push(small(&format!("{own}.self_attn.qkv_proj.weight"), &[128, 64]));
        tensors.push(small(&format!("{own}.mlp.gate_up_proj.weight"), &[256, 64]));
    }
    (config, tensors)
}

/// Falcon, whose rows of queries, keys and values come in groups.
fn falcon() -> (Value, Vec<TestTensor>) {
    let config = json!({
        "architectures": ["FalconForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_kv_heads": 2, "new_decoder_architecture": true, "vocab_size": 300, "layer_norm_epsilon": 1e-5,
        "alibi": false, "parallel_attn": true, "bias": false, "max_position_embeddings": 64,
    });
    let mut tensors = vec![
        small("transformer.word_embeddings.weight", &[300, 64]),
        small("transformer.ln_f.weight", &[64]),
        small("transformer.ln_f.bias", &[64]),
        small("lm_head.weight", &[300, 64]),
    ];
    for layer in 0..2 {
        for (part, shape) in [
            ("ln_mlp.weight", &[64][..]),
            ("ln_mlp.bias", &[64]),
            ("ln_attn.weight", &[64]),
            ("ln_attn.bias", &[64]),
            ("self_attention.query_key_value.weight", &[128, 64]),
            ("self_attention.dense.weight", &[64, 64]),
            ("mlp.dense_h_to_4h.weight", &[256, 64]),
            ("mlp.dense_4h_to_h.weight", &[64, 256]),
        ] {
            tensors.push(small(&format!("transformer.h.{layer}.{part}"), shape));
        }
    }
    (config, tensors)
}

/// Configuration and weights of a Mixtral of three experts, of which two are used.
fn mixtral_parts() -> (Value, Vec<TestTensor>) {
    let (mut config, mut tensors) = llama();
    config["architectures"] = json!(["MixtralForCausalLM"]);
    config["num_local_experts"] = 3.into();
    config["num_experts_per_tok"] = 2.into();
    tensors.retain(|tensor| !tensor.name.contains(".mlp."));
    for layer in 0..2 {
        let own = format!("model.layers.{layer}.block_sparse_moe");
        tensors.push(small(&format!("{own}.gate.weight"), &[3, 64]));
        for expert in 0..3 {
            for (part, shape) in [("w1", [128, 64]), ("w2", [64, 128]), ("w3", [128, 64])] {
                tensors.push(small(&format!("{own}.experts.{expert}.{part}.weight"), &shape));
            }
        }
    }
    (config, tensors)
}

#[test]
fn peft_adapters_of_fused_matrices_and_experts_run_and_are_merged() {
    let experts: Vec<String> =
        (0..3).map(|expert| format!("model.layers.1.block_sparse_moe.experts.{expert}.w1")).collect();
    let mut modules: Vec<(&str, usize, usize)> =
        experts.iter().map(|name| (name.as_str(), 128, 64)).collect();
    modules.push(("model.layers.0.self_attn.v_proj", 32, 64));
    for (name, (config, tensors), modules) in [
        (
            "phi3",
            phi3(),
            &[("model.layers.0.self_attn.qkv_proj", 128, 64), ("model.layers.1.mlp.gate_up_proj", 256, 64)][..],
        ),
        (
            "falcon",
            falcon(),
            &[
                ("transformer.h.1.self_attention.query_key_value", 128, 64),
                ("transformer.h.0.mlp.dense_h_to_4h", 256, 64),
            ],
        ),
        ("mixtral", mixtral_parts(), &modules),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = converted(&folder.path().join("base"), &config, &tensors);
        let peft = folder.path().join("peft");
        let pairs: Vec<TestTensor> = modules.iter().flat_map(|module| pair(*module, 4)).collect();
        write_peft(&peft, &json!({ "peft_type": "LORA", "r": 4, "lora_alpha": 8 }), &pairs);
        let mut changed = tensors.clone();
        for module in modules {
            let [a, b] = pair(*module, 4);
            let weight = format!("{}.weight", module.0);
            let weight = changed.iter_mut().find(|tensor| tensor.name == weight).unwrap();
            for (index, value) in weight.values.iter_mut().enumerate() {
                let (row, column) = (index / module.2, index % module.2);
                let product = |k: usize| b.values[row * 4 + k] * a.values[k * module.2 + column];
                *value += 2.0 * (0..4).map(product).sum::<f32>();
            }
        }
        let expected =
            logits(Model::open(converted(&folder.path().join("changed"), &config, &changed)).unwrap());
        let base = logits(Model::open(&path).unwrap());
        assert!(difference(&base, &expected) > 1e-2, "{name}: {}", difference(&base, &expected));
        let adapter = lora::open(&peft, 1.0, &File::open(&path).unwrap()).unwrap();
        let run = logits(Model::open(&path).unwrap().with_adapters(std::slice::from_ref(&adapter)).unwrap());
        assert!(difference(&expected, &run) < 1e-4, "{name}: {}", difference(&expected, &run));
        let merged = folder.path().join("merged.gguf");
        merge(&path, &[adapter], &merged, &mut |_, _| ControlFlow::Continue(())).unwrap();
        let merged = logits(Model::open(&merged).unwrap());
        assert!(difference(&expected, &merged) < 1e-4, "{name}: {}", difference(&expected, &merged));
    }
}

/// With tied embeddings an adapter of the embedding leaves the output matrix as it is, at run time as in the merged file.
#[test]
fn an_adapter_of_a_tied_embedding_does_not_change_the_output_matrix() {
    let folder = tempfile::tempdir().unwrap();
    let (mut config, mut tensors) = llama();
    config["tie_word_embeddings"] = true.into();
    tensors.retain(|tensor| tensor.name != "lm_head.weight");
    let path = converted(folder.path(), &config, &tensors);
    assert!(File::open(&path).unwrap().find_tensor("output.weight").is_none());
    let lora = adapter(folder.path(), "a.gguf", &[("token_embd.weight", 300, 64)], &[], 4);
    let adapters = [Adapter::open(lora, 1.0).unwrap()];
    let merged = folder.path().join("merged.gguf");
    merge(&path, &adapters, &merged, &mut |_, _| ControlFlow::Continue(())).unwrap();
    let run = logits(Model::open(&path).unwrap().with_adapters(&adapters).unwrap());
    let (file, base) = (logits(Model::open(&merged).unwrap()), logits(Model::open(&path).unwrap()));
    assert!(difference(&run, &file) < 1e-5, "{}", difference(&run, &file));
    assert!(difference(&base, &file) > 1e-2, "{}", difference(&base, &file));
}

#[test]
fn adapters_with_values_that_are_not_finite_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    for (dtype, value) in
        [(DType::F32, f32::NAN), (DType::F16, f32::INFINITY), (DType::BF16, f32::NEG_INFINITY)]
    {
        for end in ["a", "b"] {
            let path = folder.path().join("damaged.gguf");
            let mut writer = Writer::new();
            let keys =
                [("general.architecture", "llama"), ("general.type", "adapter"), ("adapter.type", "lora")];
            for (key, value) in keys {
                writer.set(key, value).unwrap();
            }
            for (own, dims) in [("a", [4, 64]), ("b", [64, 4])] {
                let mut values = vec![0.25f32; 256];
                if own == end {
                    values[dims[1] * 3] = value;
                }
                let mut bytes = vec![0; dtype.row_bytes(256).unwrap()];
                quadriga_graph::blocks::quantize(dtype, &values, &mut bytes).unwrap();
                let name = format!("blk.0.attn_q.weight.lora_{own}");
                writer.tensor(&name, dtype, dims, move |out| out.write_all(&bytes)).unwrap();
            }
            writer.write(&path).unwrap();
            let error = Adapter::open(&path, 1.0).unwrap_err().to_string();
            let name = format!("blk.0.attn_q.weight.lora_{end}");
            assert!(error.contains(&name) && error.contains("row 3"), "{dtype} {error}");
        }
    }
}

#[test]
fn merged_values_that_the_type_cannot_hold_are_refused_and_the_old_file_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = model(folder.path());
    let lora = adapter(folder.path(), "a.gguf", &[("blk.0.attn_q.weight", 64, 64)], &[], 4);
    let output = folder.path().join("merged.gguf");
    std::fs::write(&output, "old").unwrap();
    let with = |model: &Path, scale: f32| {
        let adapters = [Adapter::open(&lora, scale).unwrap()];
        merge(model, &adapters, &output, &mut |_, _| ControlFlow::Continue(())).unwrap_err()
    };
    let error = with(&path, 3e38);
    assert!(matches!(&error, LoraError::NotFinite { name, .. } if name == "blk.0.attn_q.weight"), "{error}");
    let half = folder.path().join("half.gguf");
    let file = File::open(&path).unwrap();
    let options = QuantizeOptions::new(FileType::from_name("F16").unwrap());
    let plan = QuantizePlan::new(&file, &options, None).unwrap();
    let mut hooks = QuantizeHooks { progress: &mut |_| {}, cancelled: &|| false };
    quantize_file(&file, &half, &plan, &options, None, &mut hooks).unwrap();
    let error = with(&half, 1e7);
    assert!(
        matches!(&error, LoraError::Overflow { name, dtype: DType::F16, .. } if name == "blk.0.attn_q.weight"),
        "{error}"
    );
    assert_eq!(std::fs::read(&output).unwrap(), b"old");
}

/// The container says which activation its models have, where nothing else does.
#[test]
fn a_merged_model_stays_in_powerinfers_container() {
    let folder = tempfile::tempdir().unwrap();
    let plain = File::open(model(folder.path())).unwrap();
    let path = folder.path().join("powerinfer.gguf");
    let mut writer = Writer::powerinfer();
    for (key, value) in plain.metadata() {
        writer.set(key, value).unwrap();
    }
    for tensor in plain.tensors() {
        writer.tensor_bytes(tensor.name(), tensor.dtype(), tensor.shape(), tensor.bytes()).unwrap();
    }
    writer.write(&path).unwrap();
    let lora = adapter(folder.path(), "a.gguf", &PAIRS[..1], &[], 4);
    let merged = folder.path().join("merged.gguf");
    let adapters = [Adapter::open(&lora, 1.0).unwrap()];
    merge(&path, &adapters, &merged, &mut |_, _| ControlFlow::Continue(())).unwrap();
    assert!(File::open(&merged).unwrap().is_powerinfer());
}

//! Low-rank adapters: at run time, merged, and refused.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

#[path = "common/model_folder.rs"]
mod model_folder;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model_folder::{TestTensor, llama_config, llama_tensors, write};
use quadriga_gguf::Writer;
use quadriga_graph::DType;
use quadriga_llm::{Adapter, Engine, EngineOptions, Model};
use quadriga_models::convert::{ConvertOptions, TargetType, convert};
use quadriga_models::lora::{LoraError, merge};
use quadriga_runtime::{Backend, Scheduler};

/// A Llama of two layers, 64 wide.
fn model(folder: &Path) -> PathBuf {
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
    write(folder, &config, &tensors, "F32");
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
            [("lora_a", [rank, *inputs]), ("lora_b", [*outputs, rank])].map(|(end, dims)| {
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
        (&[("token_embd.weight", 300, 64)], &[], "token_embd"),
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

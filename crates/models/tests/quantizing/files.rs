//! Files: types, metadata, options, parts, interruption, and what is refused.

use std::path::Path;

use quadriga_gguf::{File, Writer};
use quadriga_graph::DType;
use quadriga_models::Error;
use quadriga_models::importance::{ImportanceEntry, ImportanceMatrix};
use quadriga_models::quantize::{
    FileType, FitBasis, PrunedLayers, QuantizeError, QuantizeHooks, QuantizeOptions, QuantizePlan,
    TensorType, fit, parse_override, quantize_file,
};

use crate::random::Random;

const WIDTH: usize = 256;

/// A model of two layers as F16, with a norm; its rows are whole blocks of 256.
fn write_model(path: &Path, damage: Option<f32>) {
    let mut random = Random(1);
    let mut writer = Writer::new();
    writer.set("general.architecture", "llama").unwrap();
    writer.set("llama.block_count", 2u32).unwrap();
    writer.set("llama.attention.head_count", 8u32).unwrap();
    writer.set("llama.attention.head_count_kv", 2u32).unwrap();
    writer.set("general.file_type", 1u32).unwrap();
    let mut names = vec!["token_embd.weight".to_owned(), "output.weight".to_owned()];
    for layer in 0..2 {
        for role in ["attn_q", "attn_v", "ffn_down"] {
            names.push(format!("blk.{layer}.{role}.weight"));
        }
    }
    for name in names {
        let mut values = random.weights(24, WIDTH);
        if let Some(damage) = damage.filter(|_| name == "blk.1.attn_v.weight") {
            values[5 * WIDTH + 3] = damage;
        }
        writer
            .tensor(&name, DType::F16, [24, WIDTH], move |out| {
                values.iter().try_for_each(|value| out.write_all(&half::f16::from_f32(*value).to_le_bytes()))
            })
            .unwrap();
    }
    let norm: Vec<u8> = [1.0f32; WIDTH].iter().flat_map(|one| one.to_le_bytes()).collect();
    writer.tensor_bytes("output_norm.weight", DType::F32, [WIDTH], norm.leak()).unwrap();
    writer.write(path).unwrap();
}

fn options(name: &str) -> QuantizeOptions {
    QuantizeOptions { threads: 2, ..QuantizeOptions::new(FileType::from_name(name).unwrap()) }
}

fn run(input: &Path, output: &Path, options: &QuantizeOptions) -> quadriga_models::Result<QuantizePlan> {
    let file = File::open(input)?;
    let plan = QuantizePlan::new(&file, options, None)?;
    let mut hooks = QuantizeHooks { progress: &mut |_| {}, cancelled: &|| false };
    quantize_file(&file, output, &plan, options, None, &mut hooks)?;
    Ok(plan)
}

#[test]
fn a_file_has_the_planned_types_and_the_changed_metadata() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.gguf"), folder.path().join("out.gguf"));
    write_model(&input, None);
    let mut options = options("Q4_K_M");
    options.overrides = vec![
        parse_override("llama.block_count=int:2").unwrap(),
        parse_override("general.name=str:small").unwrap(),
    ];
    options.tensor_types = vec![TensorType::parse(r"blk\.1\.attn_q=q5_k").unwrap()];
    let plan = run(&input, &output, &options).unwrap();
    let file = File::open(&output).unwrap();
    for (tensor, plan) in file.tensors().zip(&plan.tensors) {
        assert_eq!((tensor.name(), tensor.dtype()), (plan.name.as_str(), plan.to));
    }
    let dtype = |name: &str| file.tensor(name).unwrap().dtype();
    assert_eq!(dtype("blk.0.attn_q.weight"), DType::Q4_K);
    assert_eq!(dtype("blk.1.attn_q.weight"), DType::Q5_K);
    assert_eq!(dtype("output.weight"), DType::Q6_K);
    assert_eq!(dtype("output_norm.weight"), DType::F32);
    assert_eq!(file.get::<u32>("general.file_type").unwrap(), 15);
    assert_eq!(file.get::<u32>("general.quantization_version").unwrap(), 2);
    assert_eq!(file.get::<&str>("general.name").unwrap(), "small");
    assert_eq!(file.get::<u32>("llama.block_count").unwrap(), 2);
    assert_eq!(file.byte_len(), std::fs::metadata(&output).unwrap().len());
    assert!(plan.byte_len() < file.byte_len());
}

#[test]
fn a_file_whose_rows_are_too_short_says_what_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.gguf"), folder.path().join("out.gguf"));
    let values: Vec<u8> = (0..24 * 96).flat_map(|i| (i as f32 / 1000.0 - 1.0).to_le_bytes()).collect();
    let mut writer = Writer::new();
    writer.set("general.architecture", "llama").unwrap();
    for name in ["token_embd.weight", "output.weight", "blk.0.attn_q.weight", "blk.0.ffn_down.weight"] {
        writer.tensor_bytes(name, DType::F32, [24, 96], &values).unwrap();
    }
    writer.write(&input).unwrap();
    let plan = run(&input, &output, &options("Q4_K_S")).unwrap();
    assert!(plan.tensors.iter().all(|tensor| tensor.to != DType::Q4_K), "{plan:?}");
    let file = File::open(&output).unwrap();
    let dtype = file.tensor("blk.0.attn_q.weight").unwrap().dtype();
    let id = file.get::<u32>("general.file_type").unwrap();
    assert_eq!(id, FileType::from_name(dtype.name()).unwrap().id());
    assert_ne!(id, FileType::from_name("Q4_K_S").unwrap().id());
}

#[test]
fn threads_and_memory_do_not_change_the_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.gguf");
    write_model(&input, None);
    let mut files = Vec::new();
    for (threads, memory) in [(1, 1), (3, 1), (2, 1 << 30)] {
        let output = folder.path().join(format!("{threads}-{memory}.gguf"));
        run(&input, &output, &QuantizeOptions { threads, memory, ..options("Q5_K_S") }).unwrap();
        files.push(std::fs::read(output).unwrap());
    }
    assert!(files.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn options_choose_types() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.gguf");
    write_model(&input, None);
    let file = File::open(&input).unwrap();
    let types = |options: &QuantizeOptions| {
        let plan = QuantizePlan::new(&file, options, None).unwrap();
        let of = |name: &str| plan.tensors.iter().find(|tensor| tensor.name == name).unwrap().to;
        (of("token_embd.weight"), of("output.weight"), of("blk.1.attn_v.weight"))
    };
    use DType::*;
    assert_eq!(types(&options("Q4_K_M")), (Q4_K, Q6_K, Q6_K));
    assert_eq!(types(&QuantizeOptions { pure: true, ..options("Q4_K_M") }), (Q4_K, Q4_K, Q4_K));
    assert_eq!(types(&QuantizeOptions { leave_output: true, ..options("Q4_K_M") }), (Q4_K, F16, Q6_K));
    let chosen = QuantizeOptions { output_type: Some(Q8_0), embedding_type: Some(Q5_1), ..options("Q4_K_M") };
    assert_eq!(types(&chosen), (Q5_1, Q8_0, Q6_K));
    for wrong in ["attn_v", "=q4_k", "attn_v=q9", "(=q4_k"] {
        assert!(matches!(TensorType::parse(wrong), Err(QuantizeError::TensorType { .. })), "{wrong}");
    }
    for wrong in ["a", "a=int", "a=int:x", "a=list:1", "=int:1"] {
        assert!(matches!(parse_override(wrong), Err(QuantizeError::Override { .. })), "{wrong}");
    }
}

#[test]
fn quantized_tensors_are_quantized_again_only_if_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second, third] = ["a.gguf", "b.gguf", "c.gguf"].map(|name| folder.path().join(name));
    write_model(&first, None);
    run(&first, &second, &options("Q8_0")).unwrap();
    let refused = run(&second, &third, &options("Q4_0")).unwrap_err();
    assert!(refused.to_string().contains("--allow-requantize"), "{refused}");
    run(&second, &third, &QuantizeOptions { allow_requantize: true, ..options("Q4_0") }).unwrap();
    assert_eq!(File::open(&third).unwrap().tensor("blk.0.attn_q.weight").unwrap().dtype(), DType::Q4_0);
}

#[test]
fn a_failed_or_cancelled_run_leaves_the_old_file() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.gguf"), folder.path().join("out.gguf"));
    for damage in [f32::NAN, f32::INFINITY] {
        write_model(&input, Some(damage));
        std::fs::write(&output, "old").unwrap();
        let error = run(&input, &output, &options("Q4_0")).unwrap_err();
        let place = matches!(&error, Error::Quantize(QuantizeError::NotFinite { tensor, row: 5 }) if tensor == "blk.1.attn_v.weight");
        assert!(place, "{error}");
        assert_eq!(std::fs::read(&output).unwrap(), b"old");
    }
    write_model(&input, None);
    let file = File::open(&input).unwrap();
    let plan = QuantizePlan::new(&file, &options("Q4_0"), None).unwrap();
    let asked = std::sync::atomic::AtomicUsize::new(0);
    let cancelled = || asked.fetch_add(1, std::sync::atomic::Ordering::SeqCst) > 3;
    let mut hooks = QuantizeHooks { progress: &mut |_| {}, cancelled: &cancelled };
    let result = quantize_file(&file, &output, &plan, &options("Q4_0"), None, &mut hooks);
    assert!(matches!(result, Err(Error::Quantize(QuantizeError::Cancelled))), "{result:?}");
    assert_eq!(std::fs::read(&output).unwrap(), b"old");
    // Nothing else is left behind.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn the_output_is_not_the_input() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    write_model(&path, None);
    let before = std::fs::read(&path).unwrap();
    let result = run(&path, &path, &options("Q6_K"));
    assert!(matches!(result, Err(Error::Output(_))), "{result:?}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn importance_of_another_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.gguf");
    write_model(&input, None);
    let file = File::open(&input).unwrap();
    let options = options("Q4_K_S");
    let mut matrix = ImportanceMatrix::default();
    let entry = |len: usize| ImportanceEntry { sums: vec![1.0; len], counts: vec![1.0] };
    matrix.entries.insert("blk.0.attn_q.weight".to_owned(), entry(WIDTH));
    let plan = QuantizePlan::new(&file, &options, Some(&matrix)).unwrap();
    let output = folder.path().join("out.gguf");
    let mut weighted = Vec::new();
    let mut progress = |tensor: &quadriga_models::quantize::WrittenTensor| {
        if tensor.weighted {
            weighted.push(tensor.plan.name.clone());
        }
    };
    let mut hooks = QuantizeHooks { progress: &mut progress, cancelled: &|| false };
    let path = Path::new("m.imatrix");
    quantize_file(&file, &output, &plan, &options, Some((&matrix, path)), &mut hooks).unwrap();
    assert_eq!(weighted, ["blk.0.attn_q.weight"]);
    assert_eq!(File::open(&output).unwrap().get::<&str>("quantize.imatrix.file").unwrap(), "m.imatrix");
    matrix.entries.insert("blk.1.attn_q.weight".to_owned(), entry(WIDTH + 1));
    let mut hooks = QuantizeHooks { progress: &mut |_| {}, cancelled: &|| false };
    let error =
        quantize_file(&file, &output, &plan, &options, Some((&matrix, path)), &mut hooks).unwrap_err();
    assert!(error.to_string().contains("blk.1.attn_q.weight"), "{error}");
}

#[test]
fn fitting_uses_the_bytes_that_there_are() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.gguf");
    write_model(&input, None);
    let file = File::open(&input).unwrap();
    let options = options("Q4_K_M");
    let mut earlier = 0;
    for bits in [3.0, 4.5, 6.0, 9.0] {
        let elements: u64 = file.tensors().map(|tensor| tensor.element_count()).sum();
        let limit = (elements as f64 * bits / 8.0) as u64;
        let plan = fit(&file, &options, FitBasis::default(), limit, &|| false).unwrap();
        let bytes = plan.byte_len();
        assert!(bytes <= limit && bytes > limit * 9 / 10, "{bits} bits: {bytes} of {limit}");
        assert!(bytes > earlier);
        earlier = bytes;
    }
    let error = fit(&file, &options, FitBasis::default(), 1000, &|| false).unwrap_err();
    assert!(matches!(error, Error::Quantize(QuantizeError::TooSmall { .. })), "{error}");
}

/// Writes a model of two parts.
fn write_parts(folder: &Path) {
    let bytes = vec![0u8; 2 * 32 * 2];
    for part in 0..2u16 {
        let mut writer = Writer::new();
        if part == 0 {
            writer.set("general.architecture", "llama").unwrap();
        }
        writer.set("split.no", part).unwrap().set("split.count", 2u16).unwrap();
        writer.set("split.tensors.count", 2i32).unwrap();
        let name = format!("blk.{part}.attn_q.weight");
        writer.tensor_bytes(&name, DType::F16, [2, 32], &bytes).unwrap();
        writer.write(folder.join(format!("in-{:05}-of-00002.gguf", part + 1))).unwrap();
    }
}

#[test]
fn parts_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    write_parts(folder.path());
    let input = folder.path().join("in-00001-of-00002.gguf");
    run(&input, &folder.path().join("out.gguf"), &QuantizeOptions { keep_split: true, ..options("Q8_0") })
        .unwrap();
    let file = File::open(folder.path().join("out-00002-of-00002.gguf")).unwrap();
    assert_eq!((file.part_count(), file.tensor_count()), (2, 2));
    assert_eq!(file.tensor("blk.1.attn_q.weight").unwrap().dtype(), DType::Q8_0);
    run(&input, &folder.path().join("one.gguf"), &options("Q8_0")).unwrap();
    let file = File::open(folder.path().join("one.gguf")).unwrap();
    assert_eq!((file.part_count(), file.tensor_count()), (1, 2));
}

/// The values of a model of this architecture, written with F32 tensors of 4 × 256 values.
fn write_small(path: &Path, architecture: &str, kv_heads: &[i32], names: &[&str], value: f32) {
    let values: Vec<u8> = (0..4 * WIDTH)
        .flat_map(|index| (if index == 2 * WIDTH + 9 { value } else { (index as f32).sin() }).to_le_bytes())
        .collect();
    let mut writer = Writer::new();
    writer.set("general.architecture", architecture).unwrap();
    writer.set(&format!("{architecture}.block_count"), kv_heads.len() as u32).unwrap();
    writer.set(&format!("{architecture}.attention.head_count"), 32u32).unwrap();
    writer.set(&format!("{architecture}.attention.head_count_kv"), kv_heads).unwrap();
    for name in names {
        writer.tensor_bytes(name, DType::F32, [4, WIDTH], &values).unwrap();
    }
    writer.write(path).unwrap();
}

/// llama.cpp takes the heads per KV head of the first layer; one without attention has none, so that values get no more bits.
#[test]
fn values_of_hybrid_models_have_the_types_of_llama_cpp() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.gguf");
    let names = ["token_embd.weight", "blk.0.shortconv.in_proj.weight", "blk.1.attn_v.weight"];
    for (kv_heads, mixes) in [
        (&[0, 8][..], [("Q2_K", DType::Q3_K), ("IQ4_XS", DType::IQ4_XS), ("IQ2_M", DType::IQ3_S)]),
        (&[8, 8], [("Q2_K", DType::Q4_K), ("IQ4_XS", DType::Q5_K), ("IQ2_M", DType::Q4_K)]),
    ] {
        write_small(&input, "lfm2", kv_heads, &names, 0.0);
        let file = File::open(&input).unwrap();
        for (mix, expected) in mixes {
            let plan = QuantizePlan::new(&file, &options(mix), None).unwrap();
            let value = plan.tensors.iter().find(|tensor| tensor.name == "blk.1.attn_v.weight").unwrap();
            assert_eq!(value.to, expected, "{mix} {kv_heads:?}");
        }
    }
}

#[test]
fn values_that_a_type_cannot_hold_are_refused_with_the_way_out() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.gguf"), folder.path().join("out.gguf"));
    let names = ["token_embd.weight", "output.weight", "blk.0.ffn_up.weight"];
    write_small(&input, "llama", &[8], &names, -1e9);
    for name in ["Q4_0", "Q8_0", "Q4_K_S", "Q6_K", "IQ4_XS", "F16", "NVFP4"] {
        let error = run(&input, &output, &options(name)).unwrap_err();
        let Error::Quantize(QuantizeError::Overflow { tensor, row: 2, value: -1e9, .. }) = &error else {
            panic!("{name}: {error}")
        };
        assert!(error.to_string().contains(&format!("--tensor-type {tensor}=BF16")), "{error}");
        assert!(!output.exists(), "{name}");
    }
    // The way out.
    let mut with_rule = options("Q8_0");
    with_rule.tensor_types =
        names.iter().map(|name| TensorType::parse(&format!("{name}=BF16")).unwrap()).collect();
    run(&input, &output, &with_rule).unwrap();
    // What the type holds is no error.
    write_small(&input, "llama", &[8], &names, 60_000.0);
    for name in ["Q4_0", "Q8_0", "Q4_K_S", "Q6_K", "IQ4_XS", "F16"] {
        run(&input, &output, &options(name)).unwrap();
    }
}

#[test]
fn a_copy_has_the_same_tensors_and_pruned_layers_are_missing() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.gguf"), folder.path().join("out.gguf"));
    write_model(&input, None);
    let copy = QuantizeOptions { only_copy: true, ..options("F32") };
    run(&input, &output, &copy).unwrap();
    let (old, new) = (File::open(&input).unwrap(), File::open(&output).unwrap());
    assert_eq!(new.get::<u32>("general.file_type").unwrap(), 1);
    for (old, new) in old.tensors().zip(new.tensors()) {
        assert_eq!((old.name(), old.dtype(), old.bytes()), (new.name(), new.dtype(), new.bytes()));
    }
    assert_eq!(old.tensor_count(), new.tensor_count());
    let pruned = PrunedLayers::parse("0").unwrap();
    for options in [
        QuantizeOptions { pruned: pruned.clone(), ..copy.clone() },
        QuantizeOptions { pruned: pruned.clone(), keep_split: true, ..options("Q8_0") },
    ] {
        run(&input, &output, &options).unwrap();
        let new = File::open(&output).unwrap();
        assert_eq!(new.get::<u32>("llama.block_count").unwrap(), 1);
        assert_eq!(new.tensor_count(), old.tensor_count() - 3);
        assert!(new.tensors().all(|tensor| !tensor.name().starts_with("blk.1.")));
        let mut values = [vec![0.0; 24 * WIDTH], vec![0.0; 24 * WIDTH]];
        for (values, (file, name)) in
            values.iter_mut().zip([(&old, "blk.1.attn_v.weight"), (&new, "blk.0.attn_v.weight")])
        {
            let tensor = file.tensor(name).unwrap();
            quadriga_graph::blocks::dequantize(tensor.dtype(), tensor.bytes(), values).unwrap();
        }
        let worst = values[0].iter().zip(&values[1]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 0.05, "{worst}");
    }
    for (layers, part) in [("2", "layers 0 to 1"), ("0,1", "all 2 layers")] {
        let options = QuantizeOptions { pruned: PrunedLayers::parse(layers).unwrap(), ..copy.clone() };
        let error = run(&input, &output, &options).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    // Keys with a number per layer lose those of the layers.
    write_small(&input, "lfm2", &[0, 8, 4], &["token_embd.weight", "blk.2.attn_v.weight"], 0.0);
    let options = QuantizeOptions { pruned: PrunedLayers::parse("1").unwrap(), ..copy };
    run(&input, &output, &options).unwrap();
    let new = File::open(&output).unwrap();
    let list = new.value("lfm2.attention.head_count_kv").unwrap();
    let quadriga_gguf::Value::Array(list) = list else { panic!("{list:?}") };
    let kept: Vec<_> = list.iter().map(|value| value.integer().unwrap()).collect();
    assert_eq!(kept, [0, 4]);
    assert!(new.find_tensor("blk.1.attn_v.weight").is_some());
}

/// The importance matrix has the names of the input, also where layers before them are missing.
#[test]
fn importance_of_layers_that_are_numbered_again_is_that_of_the_input() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.gguf");
    write_model(&input, None);
    let file = File::open(&input).unwrap();
    let mut matrix = ImportanceMatrix::default();
    let entry = ImportanceEntry { sums: vec![1.0; WIDTH], counts: vec![1.0] };
    matrix.entries.insert("blk.1.attn_v.weight".to_owned(), entry);
    let options = QuantizeOptions { pruned: PrunedLayers::parse("0").unwrap(), ..options("Q4_K_S") };
    let plan = QuantizePlan::new(&file, &options, Some(&matrix)).unwrap();
    let mut weighted = Vec::new();
    let mut note = |tensor: &quadriga_models::quantize::WrittenTensor| {
        if tensor.weighted {
            weighted.push(tensor.plan.name.clone());
        }
    };
    let mut hooks = QuantizeHooks { progress: &mut note, cancelled: &|| false };
    let output = folder.path().join("out.gguf");
    let path = folder.path().join("imatrix.gguf");
    quantize_file(&file, &output, &plan, &options, Some((&matrix, &path)), &mut hooks).unwrap();
    assert_eq!(weighted, ["blk.0.attn_v.weight"]);
}

#[test]
fn the_file_type_is_what_most_tensors_are_when_options_chose_all() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.gguf"), folder.path().join("out.gguf"));
    write_model(&input, None);
    // A model without experts has no tensor of MXFP4.
    run(&input, &output, &options("MXFP4_MOE")).unwrap();
    assert_eq!(File::open(&output).unwrap().get::<u32>("general.file_type").unwrap(), 7);
    let mut rules = options("Q8_0");
    rules.tensor_types = vec![TensorType::parse(".=Q4_0").unwrap()];
    run(&input, &output, &rules).unwrap();
    assert_eq!(File::open(&output).unwrap().get::<u32>("general.file_type").unwrap(), 2);
}

#[test]
fn what_killed_runs_left_of_parts_is_removed_and_parts_of_two_runs_are_no_model() {
    let folder = tempfile::tempdir().unwrap();
    write_parts(folder.path());
    let left = folder.path().join(".out.aB3dE6.split.tmp");
    std::fs::create_dir(&left).unwrap();
    let lock = std::fs::File::create(left.join("lock")).unwrap();
    lock.set_modified(std::time::SystemTime::now() - std::time::Duration::from_secs(60)).unwrap();
    drop(lock);
    let input = folder.path().join("in-00001-of-00002.gguf");
    let output = folder.path().join("out.gguf");
    let keep = |name: &str| QuantizeOptions { keep_split: true, ..options(name) };
    run(&input, &output, &keep("Q8_0")).unwrap();
    assert!(!left.exists());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 4);
    // A part that cannot be replaced: the first of the new ones does not take the place of the old one.
    let [first, second] = [1, 2].map(|part| folder.path().join(format!("out-0000{part}-of-00002.gguf")));
    std::fs::remove_file(&second).unwrap();
    std::fs::create_dir_all(second.join("full")).unwrap();
    let error = run(&input, &output, &keep("Q4_0")).unwrap_err();
    assert!(error.to_string().contains("out-00002-of-00002.gguf"), "{error}");
    assert!(!first.exists());
    std::fs::remove_dir_all(&second).unwrap();
    run(&input, &output, &keep("Q4_0")).unwrap();
    assert_eq!(File::open(&first).unwrap().tensor("blk.1.attn_q.weight").unwrap().dtype(), DType::Q4_0);
}

/// Programs that read a key as a float expect 32 bits.
#[test]
fn floats_of_new_keys_have_32_bits_and_others_the_bits_that_they_had() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.gguf"), folder.path().join("out.gguf"));
    let mut writer = Writer::new();
    writer.set("general.architecture", "llama").unwrap();
    writer.set("own.double", 1.0f64).unwrap().set("own.float", 1.0f32).unwrap();
    writer.tensor_bytes("output_norm.weight", DType::F32, [1], &[0; 4]).unwrap();
    writer.write(&input).unwrap();
    let with = |text: &str| {
        let overrides = text.split(' ').map(|text| parse_override(text).unwrap()).collect();
        run(&input, &output, &QuantizeOptions { overrides, ..options("Q8_0") })
    };
    with("own.double=float:0.1 own.float=float:0.1 own.new=float:0.1").unwrap();
    let file = File::open(&output).unwrap();
    use quadriga_gguf::Value;
    assert!(matches!(file.value("own.double"), Some(Value::F64(0.1))));
    for key in ["own.float", "own.new"] {
        assert!(matches!(file.value(key), Some(Value::F32(0.1))), "{key}: {:?}", file.value(key));
    }
    drop(file);
    let error = with("own.new=float:1e300").unwrap_err();
    assert!(error.to_string().contains("own.new"), "{error}");
}

/// What the options fix, and what a tensor is, also where the size is given.
#[test]
fn fitting_keeps_fixed_types_and_those_that_fit() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.gguf"), folder.path().join("out.gguf"));
    // The embedding is the output matrix.
    let write = |dtype: DType, value: f32| {
        let values: Vec<f32> =
            (0..64 * WIDTH).map(|i| if i == 9 { value } else { (i as f32).sin() }).collect();
        let bytes: Vec<u8> = match dtype {
            DType::BF16 => {
                values.iter().flat_map(|value| half::bf16::from_f32(*value).to_le_bytes()).collect()
            }
            _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        };
        let mut writer = Writer::new();
        writer.set("general.architecture", "llama").unwrap().set("llama.block_count", 1u32).unwrap();
        for name in ["token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_up.weight"] {
            writer.tensor_bytes(name, dtype, [64, WIDTH], &bytes).unwrap();
        }
        writer.write(&input).unwrap();
    };
    let fitted = |options: &QuantizeOptions, limit: usize| {
        let file = File::open(&input).unwrap();
        let plan = fit(&file, options, FitBasis::default(), limit as u64, &|| false).unwrap();
        let mut hooks = QuantizeHooks { progress: &mut |_| {}, cancelled: &|| false };
        quantize_file(&file, &output, &plan, options, None, &mut hooks).unwrap();
        plan.tensors.iter().map(|tensor| tensor.to).collect::<Vec<_>>()
    };
    let all = 3 * 64 * WIDTH;
    write(DType::F32, 0.5);
    assert_eq!(fitted(&options("Q4_K_M"), 4 * all), [DType::F32; 3]);
    let fixed = QuantizeOptions { output_type: Some(DType::Q8_0), ..options("Q4_K_M") };
    assert_eq!(fitted(&fixed, 4 * all), [DType::Q8_0, DType::F32, DType::F32]);
    // F16 takes as many bytes as BF16, and cannot hold the value.
    write(DType::BF16, 1e9);
    assert_eq!(fitted(&options("Q4_K_M"), 2 * all), [DType::BF16; 3]);
}

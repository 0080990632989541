//! Reading files: values by type, tensors in place, all parts of a split model.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::path::{Path, PathBuf};

use quadriga_gguf::{Array, Error, File, FormatErrorKind, Summary, Value, ValueType, Writer};
use quadriga_graph::{DType, Weight};
use support::{Raw, small_file, walk};

#[test]
fn values_of_every_type_are_read() {
    let file = File::from_bytes(small_file()).unwrap();
    assert_eq!(file.value("u8"), Some(Value::U8(200)));
    assert_eq!(file.value("i8"), Some(Value::I8(-56)));
    assert_eq!(file.value("u16"), Some(Value::U16(60_000)));
    assert_eq!(file.value("i16"), Some(Value::I16(-3)));
    assert_eq!(file.value("llama.block_count"), Some(Value::U32(2)));
    assert_eq!(file.value("i32"), Some(Value::I32(-4)));
    assert_eq!(file.value("f32"), Some(Value::F32(1.5)));
    assert_eq!(file.value("bool"), Some(Value::Bool(true)));
    assert_eq!(file.value("general.architecture"), Some(Value::String("llama")));
    assert_eq!(file.value("u64"), Some(Value::U64(u64::MAX)));
    assert_eq!(file.value("i64"), Some(Value::I64(i64::MIN)));
    assert_eq!(file.value("f64"), Some(Value::F64(0.1)));
    assert_eq!(file.get::<Vec<&str>>("tokenizer.ggml.tokens").unwrap(), ["a", "", "ü"]);
    let nested = file.get::<Vec<Array<'_>>>("nested").unwrap();
    assert_eq!(nested[0].iter().collect::<Vec<_>>(), [Value::Bool(false), Value::Bool(true)]);
    assert_eq!((nested[1].element_type(), nested[1].len()), (ValueType::U16, 1));
    assert_eq!(file.value("nested").unwrap().to_string(), "[[false, true], [7]]");
}

#[test]
fn numbers_convert_to_any_type_they_fit_in() {
    let file = File::from_bytes(small_file()).unwrap();
    assert_eq!(file.get::<usize>("llama.block_count").unwrap(), 2);
    assert_eq!(file.get::<u8>("llama.block_count").unwrap(), 2);
    assert_eq!(file.get::<i64>("i32").unwrap(), -4);
    assert_eq!(file.get::<f64>("f32").unwrap(), 1.5);
    assert_eq!(file.get::<f32>("f64").unwrap(), 0.1);
    assert_eq!(file.find::<u32>("absent").unwrap(), None);
}

#[test]
fn errors_name_key_expected_type_and_found_type() {
    let file = File::from_bytes(small_file()).unwrap();
    let message = |result: Result<u32, Error>| result.unwrap_err().to_string();
    assert_eq!(message(file.get("absent")), "the file has no key \"absent\"");
    assert_eq!(message(file.get("i32")), "key \"i32\" should be u32, but is i32 -4");
    assert_eq!(message(file.get("f32")), "key \"f32\" should be u32, but is f32 1.5");
    assert_eq!(
        message(file.get("general.architecture")),
        "key \"general.architecture\" should be u32, but is string of 5 bytes"
    );
    assert_eq!(
        file.find::<Vec<f32>>("tokenizer.ggml.tokens").unwrap_err().to_string(),
        "key \"tokenizer.ggml.tokens\" should be array of f32, but is array of 3 string"
    );
    assert_eq!(file.tensor("c").unwrap_err().to_string(), "the file has no tensor \"c\" among its 2");
}

#[test]
fn tensors_have_their_dimensions_outermost_first_and_their_bytes_in_place() {
    let bytes = small_file();
    let file = File::from_bytes(bytes.clone()).unwrap();
    let tensor = file.tensor("b.weight").unwrap();
    assert_eq!((tensor.dtype(), tensor.byte_len()), (DType::F16, 96));
    assert_eq!(tensor.shape().dims(), [1, 3, 16]);
    assert_eq!(tensor.element_count(), 48);
    assert_eq!(tensor.bytes(), &bytes[bytes.len() - 96..]);
    assert_eq!(tensor.offset(), bytes.len() - 96);
    assert_eq!(file.tensors().map(|tensor| tensor.name()).collect::<Vec<_>>(), ["a.weight", "b.weight"]);
}

#[test]
fn tensor_data_outlives_the_file_handle() {
    let file = File::from_bytes(small_file()).unwrap();
    let data = file.tensor("a.weight").unwrap().data();
    drop(file);
    let other = std::thread::spawn(move || data.bytes().to_vec()).join().unwrap();
    assert_eq!(other, (0..32).collect::<Vec<u8>>());
}

#[test]
fn a_tensor_is_a_weight_of_a_graph_without_a_copy() {
    let file = File::from_bytes(small_file()).unwrap();
    let tensor = file.tensor("b.weight").unwrap();
    let weight = Weight::from(tensor);
    assert_eq!((weight.dtype, weight.shape), (DType::F16, [1, 3, 16].into()));
    assert!(weight.data.unwrap().same(&tensor.data()));
}

#[test]
fn version_2_is_read_like_version_3() {
    let mut bytes = small_file();
    bytes[4..8].copy_from_slice(&2u32.to_ne_bytes());
    let file = File::from_bytes(bytes).unwrap();
    assert_eq!(file.version(), 2);
    walk::walk(&file);
}

#[test]
fn tensors_may_lie_in_any_order_with_gaps_between_them() {
    let raw = Raw::file(2, 0).tensor("late", &[8], 0, 96).tensor("early", &[8], 0, 0).data(32, 128);
    let file = File::from_bytes(raw.bytes).unwrap();
    assert_eq!(file.tensor("late").unwrap().bytes()[0], 96);
    assert_eq!(file.tensor("early").unwrap().bytes()[0], 0);
}

#[test]
fn a_path_that_is_no_model_file_is_an_error_with_the_path() {
    let folder = tempfile::tempdir().unwrap();
    let absent = folder.path().join("absent.gguf");
    assert!(matches!(File::open(&absent), Err(Error::Io { action: "open", path, .. }) if path == absent));
    assert!(matches!(File::open(folder.path()), Err(Error::NotAFile { .. })));
    let empty = folder.path().join("empty.gguf");
    std::fs::write(&empty, b"").unwrap();
    let message = File::open(&empty).unwrap_err().to_string();
    assert!(message.contains("empty.gguf: magic at byte 0: the file ends too early"), "{message}");
}

/// Writes one part of a split model with one tensor per part.
fn write_part(path: &Path, keys: &[(&str, i32)], tensor: &str) {
    let mut writer = Writer::new();
    for (key, value) in keys {
        writer.set(key, *value).unwrap();
    }
    writer.tensor_bytes(tensor, DType::I8, [4], tensor.as_bytes()).unwrap();
    writer.write(path).unwrap();
}

fn part_path(folder: &Path, number: usize, count: usize) -> PathBuf {
    folder.join(format!("model-{number:05}-of-{count:05}.gguf"))
}

fn write_split(folder: &Path, count: usize) {
    for number in 0..count {
        let keys = [
            ("split.no", number as i32),
            ("split.count", count as i32),
            ("split.tensors.count", count as i32),
            ("own", number as i32),
        ];
        write_part(&part_path(folder, number + 1, count), &keys, &format!("t{number:03}"));
    }
}

#[test]
fn opening_any_part_of_a_split_model_opens_all_of_it() {
    let folder = tempfile::tempdir().unwrap();
    write_split(folder.path(), 3);
    for number in 1..=3 {
        let file = File::open(part_path(folder.path(), number, 3)).unwrap();
        assert_eq!((file.part_count(), file.tensor_count()), (3, 3));
        assert_eq!(file.get::<i32>("own").unwrap(), 0, "metadata is that of the first part");
        assert_eq!(file.tensor("t002").unwrap().bytes(), b"t002");
        assert_eq!(file.tensor("t002").unwrap().part(), 2);
        assert_eq!(file.paths().count(), 3);
        walk::walk(&file);
    }
}

#[test]
fn an_incomplete_split_model_is_an_error() {
    let open = |change: &dyn Fn(&Path)| {
        let folder = tempfile::tempdir().unwrap();
        write_split(folder.path(), 2);
        change(folder.path());
        File::open(part_path(folder.path(), 1, 2)).unwrap_err()
    };
    let second = |keys: [i32; 3], tensor: &'static str| {
        open(&move |folder: &Path| {
            let names = ["split.no", "split.count", "split.tensors.count"];
            // A negative number stands for a key that is left out.
            let keys: Vec<_> = names.into_iter().zip(keys).filter(|(_, value)| *value >= 0).collect();
            write_part(&part_path(folder, 2, 2), &keys, tensor);
        })
    };
    let kind = |error: Error| match error {
        Error::Format { path: Some(path), error } => (path.file_name().unwrap().to_owned(), error.kind),
        other => panic!("{other}"),
    };
    let absent = open(&|folder| std::fs::remove_file(part_path(folder, 2, 2)).unwrap());
    assert!(absent.to_string().contains("model-00002-of-00002.gguf"), "{absent}");
    let name = "model-00002-of-00002.gguf".into();
    assert_eq!(
        kind(second([0, 2, 2], "t001")),
        (name, FormatErrorKind::SplitNumber { found: 0, expected: 1 })
    );
    assert_eq!(kind(second([1, 3, 2], "t001")).1, FormatErrorKind::SplitCount { found: 3, expected: 2 });
    assert_eq!(kind(second([1, 2, 5], "t001")).1, FormatErrorKind::SplitTensors { found: 2, expected: 5 });
    assert_eq!(kind(second([-1, 2, 2], "t001")).1, FormatErrorKind::SplitKey);
    assert_eq!(kind(second([1, -1, 2], "t001")).1, FormatErrorKind::SplitKey);
    assert_eq!(kind(second([1, 2, -1], "t001")).1, FormatErrorKind::SplitKey);
    assert!(matches!(kind(second([1, 2, 2], "t000")).1, FormatErrorKind::Duplicate { .. }));
}

#[test]
fn a_part_under_another_name_says_how_to_name_it() {
    let folder = tempfile::tempdir().unwrap();
    write_split(folder.path(), 2);
    let renamed = folder.path().join("renamed.gguf");
    std::fs::rename(part_path(folder.path(), 2, 2), &renamed).unwrap();
    let message = File::open(&renamed).unwrap_err().to_string();
    assert!(message.contains("part 2 of 2") && message.contains("NAME-00002-of-00002.gguf"), "{message}");
    let bytes = std::fs::read(&renamed).unwrap();
    assert!(File::from_bytes(bytes).is_err(), "a part alone is not a model");
}

#[test]
fn a_merged_model_with_leftover_split_keys_is_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("joined.gguf");
    write_part(&path, &[("split.no", 0), ("split.count", 0), ("split.tensors.count", 9)], "t000");
    assert_eq!(File::open(&path).unwrap().tensor_count(), 1);
}

#[test]
fn a_summary_has_the_facts_of_the_file() {
    let mut bytes = Vec::new();
    let mut writer = Writer::new();
    writer.set("general.architecture", "llama").unwrap().set("general.name", "Tiny\u{1b}[2J").unwrap();
    writer.set("general.file_type", 15u32).unwrap().set("llama.block_count", 2u32).unwrap();
    writer.set("llama.attention.head_count_kv", [2u32, 4]).unwrap();
    writer.set("tokenizer.ggml.model", "gpt2").unwrap().set("tokenizer.ggml.tokens", ["a", "b"]).unwrap();
    writer.set("tokenizer.ggml.eos_token_id", 1u32).unwrap();
    writer.tensor_bytes("a", DType::F32, [2, 32], &[0; 256]).unwrap();
    writer.tensor_bytes("b", DType::Q8_0, [3, 32], &[0; 102]).unwrap();
    writer.write_to(&mut bytes).unwrap();
    let summary = Summary::of(&File::from_bytes(bytes).unwrap());
    assert_eq!(summary.architecture.as_deref(), Some("llama"));
    assert_eq!(summary.file_type.as_deref(), Some("Q4_K_M"));
    assert_eq!((summary.tensors, summary.parameters, summary.tensor_bytes), (2, 160, 358));
    assert_eq!(summary.types[0].dtype, DType::F32);
    assert_eq!(summary.types[1].bytes, 102);
    let text = summary.to_string();
    for part in [
        "llama",
        "Tiny\\u{1b}[2J",
        "layers           2",
        "2 to 4, by layer",
        "gpt2, 2 tokens, 0 merges, EOS 1",
        "8.50 bits",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}

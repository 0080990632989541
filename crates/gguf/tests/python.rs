//! Interoperability with the Python package gguf: each side reads the files of the other.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use quadriga_gguf::{Error, File, FormatErrorKind, Value, Writer};
use quadriga_graph::{DType, Shape};
use support::walk;

/// A Python with the package installed; set up on first use.
fn python() -> &'static Path {
    static PYTHON: OnceLock<PathBuf> = OnceLock::new();
    PYTHON.get_or_init(|| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/python-env");
        let output = Command::new(&script).output().expect("scripts/python-env runs");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "scripts/python-env could not set up Python with gguf:\n{errors}");
        PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
    })
}

fn run(command: &str, path: &Path) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/interop.py");
    let output = Command::new(python()).arg(script).arg(command).arg(path).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "interop.py {command} failed:\n{errors}");
}

/// The tensors of interop.py.
const TENSORS: [(&str, DType, &[usize]); 8] = [
    ("plain.f32", DType::F32, &[3, 5]),
    ("plain.f16", DType::F16, &[2, 3, 4]),
    ("plain.i8", DType::I8, &[7]),
    ("plain.i64", DType::I64, &[2, 1, 2, 3]),
    ("block.q4_0", DType::Q4_0, &[4, 64]),
    ("block.q8_0", DType::Q8_0, &[3, 32]),
    ("block.q4_k", DType::Q4_K, &[2, 512]),
    ("block.mxfp4", DType::MXFP4, &[2, 32]),
];

fn content(name: &str, dtype: DType, dims: &[usize]) -> Vec<u8> {
    let blocks = dims.iter().product::<usize>() / dtype.block_len();
    (0..blocks * dtype.block_bytes()).map(|index| ((name.len() + index) % 120) as u8).collect()
}

fn tokens() -> Vec<String> {
    (0..1000).map(|index| format!("tök{index}")).collect()
}

#[test]
fn python_reads_our_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ours.gguf");
    let mut writer = Writer::new();
    writer.set("general.architecture", "llama").unwrap().set("general.alignment", 64u32).unwrap();
    writer.set("value.u8", 200u8).unwrap().set("value.i8", -100i8).unwrap();
    writer.set("value.u16", 60_000u16).unwrap().set("value.i16", -30_000i16).unwrap();
    writer.set("value.u32", 4_000_000_000u32).unwrap().set("value.i32", -2_000_000_000i32).unwrap();
    writer.set("value.u64", u64::MAX).unwrap().set("value.i64", i64::MIN).unwrap();
    writer.set("value.f32", 1.5f32).unwrap().set("value.f64", 0.1f64).unwrap();
    writer.set("value.bool", true).unwrap().set("value.string", "grün 🚀").unwrap();
    writer.set("array.i32", [1i32, -2, 3]).unwrap().set("array.f32", [0.5f32, -0.25]).unwrap();
    writer.set("array.bool", [true, false]).unwrap().set("tokenizer.ggml.tokens", tokens()).unwrap();
    for (name, dtype, dims) in TENSORS {
        let bytes = content(name, dtype, dims);
        writer.tensor(name, dtype, Shape::new(dims).unwrap(), move |out| out.write_all(&bytes)).unwrap();
    }
    writer.write(&path).unwrap();
    run("check", &path);
}

fn check(file: &File) {
    let expected = [
        ("value.u8", Value::U8(200)),
        ("value.i8", Value::I8(-100)),
        ("value.u16", Value::U16(60_000)),
        ("value.i16", Value::I16(-30_000)),
        ("value.u32", Value::U32(4_000_000_000)),
        ("value.i32", Value::I32(-2_000_000_000)),
        ("value.u64", Value::U64(u64::MAX)),
        ("value.i64", Value::I64(i64::MIN)),
        ("value.f32", Value::F32(1.5)),
        ("value.f64", Value::F64(0.1)),
        ("value.bool", Value::Bool(true)),
        ("value.string", Value::String("grün 🚀")),
        ("general.architecture", Value::String("llama")),
    ];
    for (key, value) in expected {
        assert_eq!(file.value(key), Some(value), "{key}");
    }
    assert_eq!(file.get::<Vec<i32>>("array.i32").unwrap(), [1, -2, 3]);
    assert_eq!(file.get::<Vec<f32>>("array.f32").unwrap(), [0.5, -0.25]);
    assert_eq!(file.get::<Vec<bool>>("array.bool").unwrap(), [true, false]);
    assert_eq!(file.get::<Vec<&str>>("tokenizer.ggml.tokens").unwrap(), tokens());
    assert_eq!(file.tensor_count(), TENSORS.len());
    for (name, dtype, dims) in TENSORS {
        let tensor = file.tensor(name).unwrap();
        assert_eq!((tensor.dtype(), tensor.shape().dims()), (dtype, dims), "{name}");
        assert_eq!(tensor.bytes(), content(name, dtype, dims), "{name}");
    }
    walk::walk(file);
}

#[test]
fn we_read_files_of_python() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("theirs.gguf");
    run("make", &path);
    check(&File::open(&path).unwrap());
}

#[test]
fn we_read_split_files_of_python() {
    let folder = tempfile::tempdir().unwrap();
    run("split", &folder.path().join("theirs.gguf"));
    for number in 1..=3 {
        let file = File::open(folder.path().join(format!("theirs-{number:05}-of-00003.gguf"))).unwrap();
        assert_eq!(file.part_count(), 3);
        check(&file);
    }
}

#[test]
fn a_file_in_the_other_byte_order_is_a_clear_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("theirs.gguf");
    run("foreign", &path);
    match File::open(&path) {
        Err(Error::Format { error, .. }) => assert_eq!(error.kind, FormatErrorKind::ForeignByteOrder),
        other => panic!("{other:?}"),
    }
}

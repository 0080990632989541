//! The seed corpus of the fuzz target: generated here, and every seed is read.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::{fs, path::Path};

use quadriga_gguf::{File, Writer};
use quadriga_graph::DType;
use support::{Raw, small_file, walk};

fn folder() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/gguf")
}

fn written(make: impl FnOnce(&mut Writer<'_>)) -> Vec<u8> {
    let mut writer = Writer::new();
    make(&mut writer);
    let mut bytes = Vec::new();
    writer.write_to(&mut bytes).unwrap();
    bytes
}

fn part(number: u16) -> Vec<u8> {
    written(|writer| {
        writer.set("split.no", number).unwrap().set("split.count", 2u16).unwrap();
        writer.set("split.tensors.count", 2i32).unwrap();
        writer.tensor_bytes(&format!("t{number}"), DType::I8, [8], &[7; 8]).unwrap();
    })
}

/// The seeds; each has a feature that the others lack.
fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let mut version_2 = small_file();
    version_2[4..8].copy_from_slice(&2u32.to_ne_bytes());
    vec![
        ("empty", written(|_| ())),
        ("every-value-type", small_file()),
        ("version-2", version_2),
        ("two-parts", [part(0), part(1)].concat()),
        (
            "every-tensor-type",
            written(|writer| {
                writer.set("general.alignment", 8u32).unwrap();
                for dtype in DType::all() {
                    let bytes = vec![0; dtype.block_bytes()];
                    writer
                        .tensor(dtype.name(), dtype, [1, 1, dtype.block_len()], move |out| {
                            out.write_all(&bytes)
                        })
                        .unwrap();
                }
            }),
        ),
        (
            "known-keys",
            written(|writer| {
                writer.set("general.architecture", "llama").unwrap().set("general.name", "n").unwrap();
                writer.set("general.file_type", 15u32).unwrap().set("llama.block_count", 1u32).unwrap();
                writer.set("llama.attention.head_count_kv", [1u32, 2]).unwrap();
                writer.set("llama.rope.freq_base", 1e4f32).unwrap();
                writer.set("tokenizer.ggml.model", "gpt2").unwrap().set("tokenizer.ggml.pre", "p").unwrap();
                writer.set("tokenizer.ggml.tokens", ["a", "b", "ab"]).unwrap();
                writer.set("tokenizer.ggml.scores", [0.0f32, -1.0, f32::NAN]).unwrap();
                writer.set("tokenizer.ggml.merges", ["a b"]).unwrap();
                writer.set("tokenizer.ggml.bos_token_id", 1u32).unwrap();
                writer.set("tokenizer.ggml.add_bos_token", true).unwrap();
                writer.tensor_bytes("token_embd.weight", DType::Q8_0, [1, 32], &[1; 34]).unwrap();
            }),
        ),
        (
            "nested-arrays",
            Raw::file(0, 1).key("n", 9).u32(9).u64(1).u32(9).u64(1).u32(8).u64(1).text("x").bytes,
        ),
    ]
}

/// `cargo test -p quadriga-gguf --test corpus -- --ignored` regenerates the corpus.
#[test]
#[ignore = "writes into the source tree"]
fn make_the_seed_corpus() {
    fs::create_dir_all(folder()).unwrap();
    for (name, bytes) in seeds() {
        fs::write(folder().join(name), bytes).unwrap();
    }
}

#[test]
fn every_seed_is_read_and_every_accessor_works() {
    for (name, bytes) in seeds() {
        assert!(bytes.len() <= 4096, "{name} is {} bytes", bytes.len());
        assert_eq!(fs::read(folder().join(name)).ok().as_ref(), Some(&bytes), "{name} is out of date");
        let file = match name {
            "two-parts" => File::from_parts([part(0), part(1)]),
            _ => File::from_bytes(bytes),
        };
        let file = file.unwrap_or_else(|error| panic!("{name}: {error}"));
        walk::walk(&file);
        if name != "two-parts" {
            walk::rewrite(&file);
        }
    }
}

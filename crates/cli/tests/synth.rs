//! Models written by `quadriga synth` can be run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;

use common::{Fixture, output, quadriga};
use quadriga_gguf::File;
use quadriga_graph::DType;

#[test]
fn every_architecture_can_be_run() {
    for architecture in quadriga_llm::models::architectures() {
        let fixture = Fixture::new(&["--arch", architecture, "--type", "q8_0"]);
        let (command, flags): (_, &[&str]) = match architecture.ends_with("bert") {
            true => ("embed", &["hello", "-q"]),
            false => ("run", &["hello", "-n", "3", "-q", "--raw"]),
        };
        let output = output(&mut fixture.command(command, flags)).success();
        assert!(!output.out.is_empty(), "{architecture}: {output:?}");
    }
}

#[test]
fn every_type_can_be_run() {
    let types = DType::all().filter(|dtype| dtype.is_computable());
    let architectures = ["llama", "qwen2", "qwen3"].into_iter().cycle();
    for (dtype, architecture) in types.zip(architectures) {
        // 256 is the largest block length.
        let flags = ["--type", dtype.name(), "--arch", architecture, "--width", "256", "--kv-heads", "2"];
        let fixture = Fixture::new(&flags);
        let file = File::open(&fixture.model).unwrap();
        assert_eq!(file.tensor("blk.0.ffn_up.weight").unwrap().dtype(), dtype);
        // A NaN or an infinity in the logits would be an error.
        let output = output(&mut fixture.command("run", &["hello", "-n", "3", "-q"])).success();
        assert!(!output.out.is_empty(), "{dtype} {architecture}: {output:?}");
    }
}

#[test]
fn a_type_that_rows_do_not_fit_is_replaced_with_a_note() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    let narrow = output(quadriga(["synth", "--type", "q4_k", "-o"]).arg(&path)).success();
    // Two layers of 7 matrices, embedding and output.
    let note = "quadriga: 16 matrices are written as Q5_0 instead of Q4_K, whose rows are whole blocks of 256 elements";
    assert_eq!(narrow.err.trim_end(), note);
    assert_eq!(File::open(&path).unwrap().tensor("blk.0.ffn_up.weight").unwrap().dtype(), DType::Q5_0);
    let wide = output(quadriga(["synth", "--type", "q4_k", "--width", "256", "-o"]).arg(&path)).success();
    assert_eq!(wide.err, "");
    let nowhere = output(&mut quadriga(["synth", "-o", "no/such/folder/x.gguf"]));
    let nowhere = nowhere.failed(1, &["no/such/folder/x.gguf", "No such file"]);
    assert!(!nowhere.err.contains(".tmp"), "{nowhere:?}");
}

#[test]
fn the_same_seed_gives_the_same_file() {
    let bytes = |seed: &str| std::fs::read(Fixture::new(&["--seed", seed]).model).unwrap();
    assert!(bytes("1") == bytes("1"));
    assert!(bytes("1") != bytes("2"));
}

#[test]
fn presets_have_the_shapes_they_are_named_after() {
    let fixture = Fixture::new(&["--preset", "135m", "--layers", "1", "--tied"]);
    let file = File::open(&fixture.model).unwrap();
    assert_eq!(file.tensor("token_embd.weight").unwrap().shape().dims(), [49152, 576]);
    assert_eq!(file.tensor("blk.0.attn_k.weight").unwrap().shape().dims(), [192, 576]);
    assert_eq!(file.tensor("blk.0.ffn_down.weight").unwrap().shape().dims(), [576, 1536]);
    assert!(file.find_tensor("output.weight").is_none());
    let fixture = Fixture::new(&["--preset", "gemma3-270m", "--layers", "6", "--vocab", "300"]);
    let file = File::open(&fixture.model).unwrap();
    assert_eq!(file.tensor("blk.5.attn_q.weight").unwrap().shape().dims(), [1024, 640]);
    assert_eq!(file.tensor("blk.5.attn_k.weight").unwrap().shape().dims(), [256, 640]);
    assert_eq!(file.get::<u64>("gemma3.attention.sliding_window").unwrap(), 512);
}

#[test]
fn invalid_shapes_are_usage_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    for (flags, part) in [
        (&["--heads", "5"][..], "5 heads"),
        (&["--kv-heads", "3"], "--kv-heads 3"),
        (&["--layers", "0"], "--layers is 0"),
        (&["--vocab", "100"], "--no-vocab"),
        (&["--width", "99999999999"], "--width"),
        (&["--arch", "gpt-17"], "--arch gpt-17"),
        (&["--preset", "gemma3-270m", "--arch", "llama"], "--arch llama"),
    ] {
        output(quadriga(["synth", "-o"]).arg(&path).args(flags)).failed(2, &[part]);
    }
    assert!(!path.exists());
    let unknown = output(&mut quadriga(["synth", "-o", "x", "--type", "q9_9"]));
    assert!(unknown.code == Some(2) && unknown.err.contains("iq4_nl"), "{unknown:?}");
}

//! Models written by `quadriga synth` can be run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Fixture, output, quadriga};
use quadriga_gguf::File;
use quadriga_graph::DType;
use quadriga_llm::Model;
use quadriga_llm::models::{self, GraphShape, PageTable, WindowCache};

#[test]
fn every_architecture_can_be_run() {
    for architecture in models::architectures() {
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
fn cuda_has_kernels_for_every_architecture() {
    for architecture in models::architectures() {
        let fixture = Fixture::new(&["--arch", architecture, "--type", "q8_0"]);
        let model = Model::open(&fixture.model).unwrap();
        let all = GraphShape::new(300, 400);
        let shapes = [
            GraphShape { argmax: true, ..GraphShape::new(1, 400) },
            GraphShape::new(9, 400),
            GraphShape { rows: 1, ..all },
            GraphShape { hidden: true, ..all },
            GraphShape { window_cache: Some(WindowCache { slots: 64, rows: 80 }), ..GraphShape::new(7, 400) },
        ];
        // As a server computes them: tokens of eight sequences through page tables, and a prompt.
        let paged = |tokens: usize, sequences: usize| GraphShape {
            page_table: Some(PageTable { rows: 8, pages: 8 }),
            sequences,
            ..GraphShape::new(tokens, 1024)
        };
        let paged = [paged(8, 8), paged(300, 1)].into_iter().filter(|_| !architecture.ends_with("bert"));
        for shape in shapes.into_iter().chain(paged) {
            let graph = model.graph(shape).unwrap();
            for node in graph.node_ids() {
                let refused = quadriga_cuda::supports(&graph, node).err();
                assert!(refused.is_none(), "{architecture}, {shape:?}: {:?}: {refused:?}", graph[node].op());
            }
        }
    }
}

#[test]
fn tied_files_can_be_opened_or_are_not_written() {
    let folder = tempfile::tempdir().unwrap();
    for (number, architecture) in models::architectures().enumerate() {
        let path = folder.path().join(format!("{number}.gguf"));
        let written = output(quadriga(["synth", "--arch", architecture, "--tied", "-o"]).arg(&path));
        match written.code {
            Some(0) => drop(Model::open(&path).unwrap_or_else(|error| panic!("{architecture}: {error}"))),
            _ => drop(written.failed(2, &[architecture, "output matrix of its own"])),
        }
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
    let lines: Vec<&str> = narrow.err.lines().collect();
    assert_eq!(lines[0], note);
    assert!(lines[1].starts_with("wrote ") && lines.len() == 2, "{narrow:?}");
    for part in ["x.gguf: llama, 2 layers, 0.1 M parameters, Q5_0 and F32, ", " KiB"] {
        assert!(lines[1].contains(part), "{part}: {narrow:?}");
    }
    assert_eq!(File::open(&path).unwrap().tensor("blk.0.ffn_up.weight").unwrap().dtype(), DType::Q5_0);
    let wide = output(quadriga(["synth", "--type", "q4_k", "--width", "256", "-o"]).arg(&path)).success();
    assert_eq!(wide.err.lines().count(), 1, "{wide:?}");
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
    assert_eq!(file.get::<u64>("gemma3.context_length").unwrap(), 32_768);
    let flags =
        ["--preset", "gpt-oss-20b", "--layers", "2", "--experts", "4", "--vocab", "300", "--no-vocab"];
    let fixture = Fixture::new(&[&flags[..], &["--context", "2048"]].concat());
    let file = File::open(&fixture.model).unwrap();
    let dtype = |name: &str| file.tensor(name).unwrap().dtype();
    assert_eq!(dtype("blk.0.ffn_up_exps.weight"), DType::MXFP4);
    assert_eq!((dtype("blk.0.attn_q.weight"), dtype("blk.0.ffn_gate_inp.weight")), (DType::Q8_0, DType::F32));
    assert_eq!(file.get::<u64>("gpt-oss.context_length").unwrap(), 2048);
}

#[test]
fn presets_can_be_planned_without_a_file() {
    let plan = |flags: &[&str]| {
        let out = output(quadriga(["plan", "--json", "--device", "cpu"]).args(flags)).success().out;
        let plan: serde_json::Value = serde_json::from_str(&out).unwrap();
        let bytes = |part: &str| plan["backends"][0][part].as_u64().unwrap();
        (bytes("weights") + bytes("mapped"), bytes("state"))
    };
    let preset = plan(&["--preset", "135m", "--type", "q8_0", "-c", "512"]);
    let fixture = Fixture::new(&["--preset", "135m", "--type", "q8_0", "--no-vocab"]);
    assert_eq!(plan(&["-m", fixture.model.to_str().unwrap(), "-c", "512"]), preset);
    // Far more than this machine has.
    let (weights, _) = plan(&["--preset", "gpt-oss-120b", "-c", "1024", "-b", "16"]);
    assert!((55 << 30..65 << 30).contains(&weights), "{weights}");
    let (weights, _) = plan(&["--preset", "671b", "--type", "q4_0", "-c", "1024", "-b", "16"]);
    assert!((345 << 30..360 << 30).contains(&weights), "671 billion of 4.5 bits: {weights}");
    let text = output(&mut quadriga(["plan", "--preset", "7b", "-c", "512"])).success().out;
    assert!(text.contains("context 512"), "{text}");
    output(&mut quadriga(["plan", "--type", "q8_0"])).failed_usage();
}

#[test]
fn experts_need_no_other_options() {
    let fixture = Fixture::new(&["--arch", "llama", "--experts", "8"]);
    let file = File::open(&fixture.model).unwrap();
    assert_eq!(file.get::<u64>("llama.expert_used_count").unwrap(), 2);
    output(&mut fixture.command("run", &["hello", "-n", "2", "-q"])).success();
    let too_many = ["synth", "--arch", "llama", "--experts", "4", "--experts-used", "9", "-o"];
    let failed = output(quadriga(too_many).arg(fixture.path("x.gguf"))).failed(2, &["--experts-used"]);
    assert!(!failed.err.contains("llama.expert"), "{failed:?}");
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

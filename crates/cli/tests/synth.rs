//! Models written by `quadriga synth` can be run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Fixture, output, quadriga};
use quadriga_gguf::File;
use quadriga_graph::DType;
use quadriga_llm::models::{self, ExpandedParts, GraphShape, PageTable, PromptParts, WindowCache};
use quadriga_llm::serving::BatcherOptions;
use quadriga_llm::{EngineOptions, Model};

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

/// Prompts as a server computes them: with expanded latent attention, in parts with recurrent layers, and with a quantized KV cache
/// where heads are whole blocks of it.
fn shapes_of_servers(model: &Model) -> Vec<GraphShape> {
    let mut shapes = Vec::new();
    for cache in [DType::F16, DType::Q8_0, DType::Q5_1] {
        let engine = EngineOptions { sequences: 8, context: 512, batch: 300, ..EngineOptions::default() };
        let options = BatcherOptions { engine: engine.cache(cache), ..BatcherOptions::default() };
        let Ok(options) = options.for_model(model) else {
            assert_ne!(cache, DType::F16);
            continue;
        };
        let largest = options.engine.shape(model, 300, 8, 512);
        shapes.push(largest);
        if model.hyperparameters().latent.is_some() {
            // Beside a token that is generated.
            let parts = ExpandedParts { tokens: 299, pages: 8 };
            shapes.push(GraphShape { expanded: Some(parts), ..largest });
        }
        if model.hyperparameters().recurrent.is_some() {
            let parts = PromptParts { singles: 5, count: 3, length: 150 };
            shapes.push(GraphShape { sequences: 8, parts: Some(parts), ..largest });
        }
    }
    shapes
}

#[test]
fn cuda_has_kernels_for_every_architecture() {
    let (mut expanded, mut parts, mut slots, mut quantized) = (0, 0, 0, 0);
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
        // Experts in slots, which the host observes or does not.
        let has_experts = model.hyperparameters().experts().is_some();
        let of_experts = [1, 40].into_iter().filter(|_| has_experts);
        let of_experts = of_experts.flat_map(|tokens| {
            let shape = GraphShape { expert_slots: 6, ..GraphShape::new(tokens, 400) };
            [shape, GraphShape { observe_experts: false, ..shape }]
        });
        let of_servers = if architecture.ends_with("bert") { Vec::new() } else { shapes_of_servers(&model) };
        for shape in shapes.into_iter().chain(paged).chain(of_experts).chain(of_servers) {
            expanded += usize::from(shape.expanded.is_some());
            parts += usize::from(shape.parts.is_some());
            slots += usize::from(shape.expert_slots > 0);
            quantized += usize::from(shape.cache_keys.is_quantized());
            let graph = model.graph(shape).unwrap();
            for node in graph.node_ids() {
                let refused = quadriga_cuda::supports(&graph, node).err();
                assert!(refused.is_none(), "{architecture}, {shape:?}: {:?}: {refused:?}", graph[node].op());
            }
        }
    }
    for (what, count) in
        [("expanded", expanded), ("parts", parts), ("slots", slots), ("quantized", quantized)]
    {
        assert!(count > 0, "{what}");
    }
}

/// The mean negative log-likelihood of a text.
fn likelihood(flags: &[&str]) -> f64 {
    let fixture = Fixture::new(&[&["--type", "f32"], flags].concat());
    let case = serde_json::json!({ "name": "text", "kind": "nll", "text": "What makes a llama a granite?", "ctx": 24 });
    std::fs::write(fixture.path("cases.jsonl"), case.to_string()).unwrap();
    let cases = fixture.path("cases.jsonl");
    let out = output(fixture.command("eval", &["-q", "--cache-type", "f32"]).arg(cases)).success().out;
    let result: serde_json::Value = serde_json::from_str(out.trim()).unwrap();
    result["nll"].as_f64().unwrap()
}

/// With the same random weights, models of Llama's kind differ by what their architectures add.
#[test]
fn small_models_have_what_distinguishes_their_architecture() {
    let llama = |layers: &str| likelihood(&["--arch", "llama", "--layers", layers]);
    assert_eq!(
        likelihood(&["--arch", "smollm3", "--layers", "3"]),
        llama("3"),
        "the fourth layer is the first"
    );
    let (smollm, granite) = (likelihood(&["--arch", "smollm3"]), likelihood(&["--arch", "granite"]));
    assert!((smollm - llama("4")).abs() > 1e-4, "{smollm}");
    assert!((granite - llama("2")).abs() > 1e-4, "{granite}");
    for (architecture, keys) in [
        ("granite", &["embedding_scale", "residual_scale", "attention.scale", "logit_scale"][..]),
        ("granitemoe", &["embedding_scale", "residual_scale", "attention.scale", "logit_scale"]),
        ("command-r", &["logit_scale"]),
        ("deepseek2", &["rope.scaling.yarn_log_multiplier", "expert_group_count", "expert_weights_scale"]),
    ] {
        let fixture = Fixture::new(&["--arch", architecture]);
        let file = File::open(&fixture.model).unwrap();
        for key in keys {
            assert!(file.value(&format!("{architecture}.{key}")).is_some(), "{architecture}: {key}");
        }
        let selects = file.find_tensor("blk.1.exp_probs_b.bias").is_some();
        assert_eq!(selects, architecture == "deepseek2", "{architecture}");
    }
    for (architecture, windows, layers) in
        [("gemma3", 5, 6), ("gemma3n", 2, 4), ("olmo2", 3, 4), ("smallthinker", 3, 4), ("gemma2", 1, 2)]
    {
        let model = Model::open(&Fixture::new(&["--arch", architecture]).model).unwrap();
        let has = |shares: bool| {
            let of = &model.hyperparameters().layers;
            of.iter()
                .filter(|layer| if shares { layer.shares_cache_of.is_some() } else { layer.window.is_some() })
                .count()
        };
        assert_eq!((has(false), model.hyperparameters().layers.len()), (windows, layers), "{architecture}");
        assert_eq!(has(true), if architecture == "gemma3n" { 2 } else { 0 });
    }
    for architecture in ["bert", "nomic-bert"] {
        let model = Model::open(&Fixture::new(&["--arch", architecture]).model).unwrap();
        assert_eq!(model.file().tensor("token_types.weight").unwrap().shape().dims(), [2, 64]);
        // [CLS] h ##i ! [SEP]
        assert_eq!(model.tokenizer().unwrap().encode_sequence("Hi!", false).len(), 5);
    }
}

/// Groups of experts and layers without a KV cache are left out where the options leave no room for them.
#[test]
fn options_may_ask_for_fewer_experts_and_layers_than_a_small_model_has() {
    for flags in [
        &["--arch", "deepseek2", "--experts", "3"][..],
        &["--arch", "deepseek2", "--experts-used", "4"],
        &["--arch", "gemma3n", "--layers", "1"],
        &["--arch", "smollm3", "--layers", "1"],
    ] {
        drop(Model::open(&Fixture::new(flags).model).unwrap());
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
    let fixture = Fixture::new(&["--preset", "135m", "--layers", "1"]);
    let file = File::open(&fixture.model).unwrap();
    assert_eq!(file.tensor("token_embd.weight").unwrap().shape().dims(), [49152, 576]);
    assert_eq!(file.tensor("blk.0.attn_k.weight").unwrap().shape().dims(), [192, 576]);
    assert_eq!(file.tensor("blk.0.ffn_down.weight").unwrap().shape().dims(), [576, 1536]);
    assert!(file.find_tensor("output.weight").is_none());
    let fixture = Fixture::new(&["--preset", "gemma3-270m", "--layers", "6", "--vocab", "300"]);
    let file = File::open(&fixture.model).unwrap();
    assert_eq!(file.tensor("blk.5.attn_q.weight").unwrap().shape().dims(), [1024, 640]);
    assert_eq!(file.tensor("blk.5.attn_k.weight").unwrap().shape().dims(), [256, 640]);
    assert!(file.find_tensor("output.weight").is_none());
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
    // 135 million weights of 8.5 bits: the embedding is there once.
    assert!((142_000_000..144_500_000).contains(&preset.0), "{preset:?}");
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

/// The published numbers of parameters, without the layers that only predict further tokens; of Qwen 3.5, what follows from the
/// published sizes of layers and experts.
#[test]
fn presets_have_the_parameters_of_their_models() {
    for (preset, published) in [
        ("7b", 6.738e9),
        ("8b", 8.030e9),
        ("70b", 70.55e9),
        ("135m", 134.5e6),
        ("30b-a3b", 30.53e9),
        ("gpt-oss-20b", 20.91e9),
        ("gpt-oss-120b", 116.8e9),
        ("deepseek-v2-lite", 15.71e9),
        ("671b", 671.0e9),
        ("qwen35-35b-a3b", 34.66e9),
        ("gemma3-270m", 268.1e6),
    ] {
        let flags = ["--preset", preset, "--type", "f32", "-c", "64", "-b", "8", "--device", "cpu", "--json"];
        let out = output(quadriga(["plan"]).args(flags)).success().out;
        let plan: serde_json::Value = serde_json::from_str(&out).unwrap();
        let bytes = |part: &str| plan["backends"][0][part].as_f64().unwrap();
        let parameters = (bytes("weights") + bytes("mapped")) / 4.0;
        assert!(
            (parameters / published - 1.0).abs() < 0.01,
            "{preset}: {parameters:e} instead of {published:e}"
        );
    }
}

#[test]
fn presets_of_deepseek_have_what_distinguishes_them() {
    for (preset, groups, multiplier) in [("deepseek-v2-lite", 1, 0.0707), ("671b", 8, 0.1)] {
        let sizes = ["--layers", "4", "--width", "64", "--heads", "4", "--vocab", "300", "--experts", "16"];
        let fixture = Fixture::new(&[&["--preset", preset, "--ffn", "64"], &sizes[..]].concat());
        let file = File::open(&fixture.model).unwrap();
        assert_eq!(file.get::<&str>("deepseek2.rope.scaling.type").unwrap(), "yarn");
        assert_eq!(file.get::<f32>("deepseek2.rope.scaling.yarn_log_multiplier").unwrap(), multiplier);
        assert_eq!(file.get::<u64>("deepseek2.expert_group_count").unwrap(), groups);
        assert_eq!(file.find_tensor("blk.3.exp_probs_b.bias").is_some(), preset == "671b");
        output(&mut fixture.command("run", &["hello", "-n", "2", "-q", "--raw"])).success();
    }
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
        (&["--arch", "mamba2", "--heads", "4"], "--heads: the layers of mamba2 have no attention"),
        (&["--arch", "mamba2", "--kv-heads", "2"], "--kv-heads: the layers of mamba2 have no attention"),
        (&["--arch", "mamba2", "--ffn", "64"], "--ffn: the layers of mamba2 have no feed-forward network"),
    ] {
        output(quadriga(["synth", "-o"]).arg(&path).args(flags)).failed(2, &[part]);
    }
    assert!(!path.exists());
    let unknown = output(&mut quadriga(["synth", "-o", "x", "--type", "q9_9"]));
    assert!(unknown.code == Some(2) && unknown.err.contains("iq4_nl"), "{unknown:?}");
}

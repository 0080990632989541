//! `quadriga quantize`, `imatrix`, `perplexity` and `compare`: results, options, wrong values, and interruption.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{CommandOutput, Fixture, output, quadriga};
use quadriga_gguf::File;
use quadriga_graph::DType;
use serde_json::Value;

/// A model whose rows are whole blocks of 256, with a text of its vocabulary.
fn fixture(dtype: &str) -> (Fixture, PathBuf) {
    let fixture = Fixture::new(&["--type", dtype, "--width", "256", "--heads", "4", "--vocab", "300"]);
    let text = fixture.path("text.txt");
    fs::write(&text, "The quick brown fox jumps over the lazy dog. 0123456789\n".repeat(8)).unwrap();
    (fixture, text)
}

fn run(arguments: &[&str]) -> CommandOutput {
    output(&mut quadriga(arguments))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn types(path: &Path) -> Vec<(String, DType)> {
    File::open(path).unwrap().tensors().map(|tensor| (tensor.name().to_owned(), tensor.dtype())).collect()
}

fn type_of(path: &Path, name: &str) -> DType {
    types(path).into_iter().find(|(own, _)| own == name).unwrap().1
}

#[test]
fn a_file_gets_the_types_of_the_mix_and_is_compared_with_the_input() {
    let (fixture, _) = fixture("f16");
    let out = fixture.path("out.gguf");
    let done = run(&["quantize", text(&fixture.model), text(&out), "q4_k_m", "2"]).success();
    assert!(done.err.contains("wrote") && done.err.contains("bits per weight"), "{done:?}");
    assert!(done.err.contains("KL divergence") && done.err.contains("same most probable token"), "{done:?}");
    assert_eq!(type_of(&out, "blk.0.attn_q.weight"), DType::Q4_K);
    assert_eq!(type_of(&out, "output_norm.weight"), DType::F32);
    let quiet = run(&["quantize", "-q", text(&fixture.model), text(&out), "Q8_0"]).success();
    assert_eq!((quiet.out.as_str(), quiet.err.as_str()), ("", ""));
    let skipped = run(&["quantize", "--no-check", text(&fixture.model), text(&out), "Q8_0"]).success();
    assert!(!skipped.err.contains("KL divergence"), "{skipped:?}");
    // Without a name for the output, as llama.cpp names it.
    run(&["quantize", "-q", text(&fixture.model), "Q6_K"]).success();
    assert_eq!(type_of(&fixture.path("ggml-model-Q6_K.gguf"), "blk.0.ffn_up.weight"), DType::Q6_K);
    // The result runs.
    output(quadriga(["run", "-q", "-n", "2", "--temp", "0", "hi", "-m"]).arg(&out)).success();
}

#[test]
fn options_choose_types_and_metadata() {
    let (fixture, _) = fixture("f16");
    let (model, out) = (text(&fixture.model), fixture.path("out.gguf"));
    let rules = fixture.path("rules.txt");
    fs::write(&rules, "ffn_up=q6_k\nffn_down=q5_k").unwrap();
    let flags = [
        "--tensor-type",
        r"blk\.1\.attn_v=q8_0",
        "--tensor-type-file",
        text(&rules),
        "--output-tensor-type",
        "q5_0",
        "--token-embedding-type",
        "iq4_nl",
        "--override-kv",
        "general.name=str:small",
        "--no-check",
        "-q",
    ];
    output(quadriga(["quantize"]).args(flags).args([model, text(&out), "Q4_K_S"])).success();
    for (name, dtype) in [
        ("blk.0.attn_q.weight", DType::Q4_K),
        ("blk.1.attn_v.weight", DType::Q8_0),
        ("blk.0.ffn_up.weight", DType::Q6_K),
        ("blk.1.ffn_down.weight", DType::Q5_K),
        ("output.weight", DType::Q5_0),
        ("token_embd.weight", DType::IQ4_NL),
    ] {
        assert_eq!(type_of(&out, name), dtype, "{name}");
    }
    assert_eq!(File::open(&out).unwrap().get::<&str>("general.name").unwrap(), "small");
    run(&["quantize", "-q", "--no-check", "--pure", "--leave-output-tensor", model, text(&out), "Q4_K_M"])
        .success();
    assert_eq!(type_of(&out, "blk.0.attn_v.weight"), DType::Q4_K);
    assert_eq!(type_of(&out, "output.weight"), DType::F16);
    // What it would write, and nothing else.
    let none = fixture.path("none.gguf");
    let plan = run(&["quantize", "--dry-run", model, text(&none), "Q4_0"]).success().out;
    assert!(plan.contains("blk.1.ffn_up.weight") && plan.contains("bits per weight"), "{plan}");
    assert!(!none.exists());
    // A pattern that nothing matches is told.
    let unmatched =
        run(&["quantize", "--no-check", "--tensor-type", "xyz=q8_0", model, text(&out), "Q4_0"]).success();
    assert!(unmatched.err.contains("--tensor-type xyz: no tensor"), "{unmatched:?}");
}

#[test]
fn wrong_values_are_refused() {
    let (fixture, file) = fixture("q8_0");
    let (model, out) = (text(&fixture.model), fixture.path("out.gguf"));
    run(&["quantize", model, text(&out), "Q4_KM"]).failed(2, &["Q4_KM", "did you mean Q4_K_M?"]);
    run(&["quantize", model, text(&out), "Xy"]).failed(2, &["\"Xy\" is no type. Types and mixes"]);
    run(&["quantize", model, text(&out), "Q4_0", "many"]).failed(2, &["THREADS", "many"]);
    run(&["quantize", model, text(&out), "Q4_0"]).failed(1, &["already Q8_0", "--allow-requantize"]);
    run(&["quantize", "--tensor-type", "attn_v", model, text(&out), "Q4_0"]).failed(2, &["attn_v"]);
    run(&["quantize", "--tensor-type", "attn_v=q9", model, text(&out), "Q4_0"]).failed(2, &["q9"]);
    run(&["quantize", "--override-kv", "a=list:1", model, text(&out), "Q4_0"]).failed(2, &["a=list:1"]);
    run(&["quantize", "--output-tensor-type", "q9", model, text(&out), "Q4_0"]).failed_usage();
    run(&["quantize", "--fit", "many", model, text(&out)]).failed_usage();
    run(&["quantize", "--vram", model, text(&out), "Q4_0"]).failed_usage();
    run(&["quantize", "--fit", "1G", model, text(&out), "Q4_0"]).failed(2, &["--fit", "IN OUT"]);
    run(&["quantize", model]).failed_usage();
    run(&["quantize", text(&file), text(&out), "Q4_0"]).failed(1, &["text.txt"]);
    run(&["quantize", text(&fixture.path("none")), text(&out), "Q4_0"]).failed(1, &["none"]);
    run(&["quantize", "--allow-requantize", "--imatrix", text(&file), model, text(&out), "Q4_0"])
        .failed(1, &["text.txt", "importance"]);
    assert!(!out.exists());
    run(&["perplexity", "-m", model]).failed_usage();
    run(&["perplexity", "-m", model, "-f", text(&file), "--chunk-size", "0"]).failed_usage();
    run(&["perplexity", "-q", "-m", model, "-f", text(&file), "--chunk-size", "9999"])
        .failed(1, &["tokens", "9999"]);
    run(&["perplexity", "-m", model, "-f", text(&fixture.path("none"))]).failed(1, &["none"]);
    run(&["imatrix", "-m", model]).failed(2, &["-f", "--in-file"]);
    run(&["imatrix", "-m", model, "-f", text(&file), "--chunk-size", "x"]).failed_usage();
    run(&["compare", model]).failed_usage();
    run(&["compare", model, text(&file)]).failed(1, &["text.txt"]);
}

#[test]
fn fitting_keeps_to_the_size_and_uses_it() {
    let (fixture, _) = fixture("f16");
    let out = fixture.path("out.gguf");
    let elements: u64 =
        File::open(&fixture.model).unwrap().tensors().map(|tensor| tensor.element_count()).sum();
    let mut divergences = Vec::new();
    for bits in [4, 9] {
        let size = elements * bits / 8 + 40_000;
        let done = run(&["quantize", "--fit", &size.to_string(), text(&fixture.model), text(&out)]).success();
        let bytes = fs::metadata(&out).unwrap().len();
        assert!(bytes <= size && bytes > size * 85 / 100, "{bits} bits: {bytes} of {size}: {done:?}");
        let number = done.err.split("KL divergence ").nth(1).unwrap().split_whitespace().next().unwrap();
        divergences.push(number.parse::<f64>().unwrap());
    }
    assert!(divergences[0] > divergences[1], "{divergences:?}");
    // The memory of a device holds more than the file: what is left for weights is less.
    let size = (elements * 12 / 8 + 40_000).to_string();
    let planned = |flags: &[&str]| {
        let line =
            [&["quantize", "--dry-run", "-q", "--fit", &size], flags, &[text(&fixture.model), "x"]].concat();
        let plan = run(&line).success().out;
        plan.lines()
            .last()
            .unwrap()
            .rsplit(", ")
            .next()
            .unwrap()
            .split(' ')
            .next()
            .unwrap()
            .parse::<f64>()
            .unwrap()
    };
    assert!(planned(&["--vram", "-c", "64"]) < planned(&[]));
    let small = run(&["quantize", "--fit", "10k", text(&fixture.model), text(&out)])
        .failed(1, &["--fit 10", "at least", "smallest types"]);
    assert!(!small.err.contains(" ,"), "{small:?}");
    run(&["quantize", "--fit", "10k", "--vram", text(&fixture.model), text(&out)])
        .failed(1, &["KV cache and buffers", "-c N"]);
}

#[test]
fn importance_is_computed_merged_resumed_and_used() {
    let (fixture, file) = fixture("f16");
    let (model, all) = (text(&fixture.model), fixture.path("all.gguf"));
    let imatrix = |out: &Path, flags: &[&str]| {
        let common = ["imatrix", "-q", "-m", model, "--chunk-size", "64", "-o", text(out)];
        output(quadriga(common).args(flags))
    };
    let quiet = imatrix(&all, &["-f", text(&file)]).success();
    assert_eq!((quiet.out.as_str(), quiet.err.as_str()), ("", ""));
    let entries = |path: &Path| quadriga_models::importance::ImportanceMatrix::read(path).unwrap();
    let whole = entries(&all);
    assert!(whole.entries.contains_key("blk.1.ffn_down.weight") && whole.chunk_count >= 4, "{whole:?}");
    // Two halves, merged; and one half, continued.
    let (first, rest, merged) = (fixture.path("a.gguf"), fixture.path("b.gguf"), fixture.path("c.gguf"));
    imatrix(&first, &["-f", text(&file), "--chunks", "2"]).success();
    imatrix(&rest, &["-f", text(&file), "--from-chunk", "2"]).success();
    imatrix(&merged, &["--in-file", text(&first), "--in-file", text(&rest)]).success();
    imatrix(&first, &["-f", text(&file), "--resume"]).success();
    for path in [&merged, &first] {
        let other = entries(path);
        assert_eq!(other.chunk_count, whole.chunk_count);
        for (name, entry) in &whole.entries {
            let theirs = &other.entries[name].sums;
            let near = entry.sums.iter().zip(theirs).all(|(a, b)| (a - b).abs() <= 1e-4 * a.abs());
            assert!(near, "{name}");
        }
    }
    let again = imatrix(&first, &["-f", text(&file), "--resume"]).success();
    assert!(again.err.contains("all chunks"), "{again:?}");
    // Fewer chunks than the file has are not all of the text.
    let short = fixture.path("short.gguf");
    imatrix(&short, &["-f", text(&file), "--chunks", "2"]).success();
    let fewer = imatrix(&short, &["-f", text(&file), "--chunks", "1", "--resume"]).success();
    assert!(fewer.err.contains("has 2 chunks") && fewer.err.contains("--chunks 1"), "{fewer:?}");
    // The file says with what it was quantized, and the weights differ.
    let (with, without) = (fixture.path("with.gguf"), fixture.path("without.gguf"));
    run(&["quantize", "-q", "--no-check", "--imatrix", text(&all), model, text(&with), "Q4_K_S"]).success();
    run(&["quantize", "-q", "--no-check", model, text(&without), "Q4_K_S"]).success();
    let (with, without) = (File::open(&with).unwrap(), File::open(&without).unwrap());
    assert_eq!(with.get::<&str>("quantize.imatrix.file").unwrap(), text(&all));
    let name = "blk.0.ffn_up.weight";
    assert_ne!(with.tensor(name).unwrap().bytes(), without.tensor(name).unwrap().bytes());
    // A matrix of another model.
    let other = Fixture::new(&["--type", "f16", "--width", "64", "--vocab", "300"]);
    output(&mut quadriga(["quantize", "-q", "--imatrix", text(&all), text(&other.model), "x.gguf", "Q4_0"]))
        .failed(1, &["importance matrix", "another model"]);
}

#[test]
fn perplexity_is_that_of_eval() {
    let (fixture, file) = fixture("f16");
    let line = ["perplexity", "-q", "--json", "-m", text(&fixture.model), "-f", text(&file), "--chunk-size"];
    let json = |size: &str| -> Value {
        serde_json::from_str(&output(quadriga(line).arg(size)).success().out).unwrap()
    };
    let found = json("50");
    let case = serde_json::json!({ "name": "l", "kind": "nll", "text": fs::read_to_string(&file).unwrap(), "ctx": 50 });
    let mut eval = quadriga(["eval", "-q", "-m", text(&fixture.model), "-"]);
    let eval = crate::common::output_with_input(&mut eval, case.to_string().as_bytes()).success().out;
    let eval: Value = serde_json::from_str(&eval).unwrap();
    let (own, exact) = (found["nll"]["mean"].as_f64().unwrap(), eval["nll"].as_f64().unwrap());
    assert_eq!(found["tokens"], eval["count"], "{found} {eval}");
    assert!((own - exact).abs() <= 1e-4 * exact, "{own} {exact}");
    let plain = run(&[
        "perplexity",
        "-m",
        text(&fixture.model),
        "-f",
        text(&file),
        "--chunk-size",
        "64",
        "--chunks",
        "2",
    ])
    .success();
    assert!(plain.out.starts_with("perplexity ") && plain.out.contains('±'), "{plain:?}");
    assert!(plain.err.contains("chunk 1 of"), "{plain:?}");
    // As users of llama.cpp write it: the context is the chunk.
    let short =
        run(&["perplexity", text(&fixture.model), "-f", text(&file), "-c", "64", "--chunks", "2"]).success();
    assert_eq!(short.out, plain.out);
    assert!(short.out.contains("all tokens but the first of each of 2 chunks of 64"), "{short:?}");
}

#[test]
fn tensors_that_only_one_model_has_are_counted() {
    let (fixture, _) = fixture("f16");
    let less = fixture.path("less.gguf");
    let file = File::open(&fixture.model).unwrap();
    let mut writer = quadriga_gguf::Writer::new();
    for (key, value) in file.metadata() {
        writer.set(key, quadriga_gguf::OwnedValue::from(value)).unwrap();
    }
    for tensor in file.tensors().filter(|tensor| !tensor.name().contains("blk.1.ffn")) {
        writer.tensor_bytes(tensor.name(), tensor.dtype(), tensor.shape(), tensor.bytes()).unwrap();
    }
    writer.write(&less).unwrap();
    let missing = file.tensors().filter(|tensor| tensor.name().contains("blk.1.ffn")).count();
    let found = run(&["compare", text(&fixture.model), text(&less)]).success();
    assert!(
        found.out.contains(&format!("{missing} tensors are only in the reference, such as blk.1.ffn")),
        "{found:?}"
    );
    let found = run(&["compare", "--json", text(&less), text(&fixture.model)]).success();
    let found: Value = serde_json::from_str(&found.out).unwrap();
    assert_eq!(found["unpaired"]["other"].as_array().unwrap().len(), missing);
    let same = run(&["compare", text(&fixture.model), text(&fixture.model)]).success();
    assert!(!same.out.contains("not compared"), "{same:?}");
}

#[test]
fn without_a_type_the_types_are_listed() {
    let (fixture, _) = fixture("f16");
    for rest in [&[][..], &["out.gguf", "Q9"]] {
        let wrong = output(quadriga(["quantize", text(&fixture.model)]).args(rest)).failed_usage();
        assert!(["Q4_K_M", "IQ4_XS", "BF16"].iter().all(|name| wrong.err.contains(name)), "{wrong:?}");
    }
}

#[test]
fn models_are_compared_by_text_and_by_tensor() {
    let (fixture, file) = fixture("f16");
    let (model, out, page) = (text(&fixture.model), fixture.path("out.gguf"), fixture.path("page.html"));
    run(&["quantize", "-q", "--no-check", model, text(&out), "Q4_0"]).success();
    let compare = |flags: &[&str]| {
        output(quadriga(["compare", "-q", "--chunk-size", "64", model, text(&out)]).args(flags)).success().out
    };
    let json: Value = serde_json::from_str(&compare(&["--json", "-f", text(&file)])).unwrap();
    let mean = |part: &str| json["text"][part]["mean"].as_f64().unwrap();
    assert!(mean("divergence") > 0.0 && mean("same_top") <= 1.0, "{json}");
    assert!(json["text"]["divergence"]["margin"].is_number() && json["text"]["quantile99"].is_number());
    let tensors = json["tensors"].as_array().unwrap();
    let tensor = tensors.iter().find(|tensor| tensor["name"] == "blk.0.ffn_up.weight").unwrap();
    let relative = tensor["relative"].as_f64().unwrap();
    assert!(relative > 0.01 && relative < 0.15, "{tensor}");
    // The same model is the same.
    let same = output(&mut quadriga([
        "compare",
        "-q",
        "--json",
        "--chunk-size",
        "64",
        "-f",
        text(&file),
        model,
        model,
    ]));
    let same: Value = serde_json::from_str(&same.success().out).unwrap();
    assert_eq!(
        (same["text"]["divergence"]["mean"].as_f64(), same["text"]["same_top"]["mean"].as_f64()),
        (Some(0.0), Some(1.0))
    );
    let plain = compare(&["-f", text(&file), "--tensors", "--html", text(&page)]);
    for part in [
        "KL divergence, mean",
        "99 %",
        "same most probable token",
        "blk.1.attn_q.weight",
        "RMS error of all weights",
    ] {
        assert!(plain.contains(part), "{part}: {plain}");
    }
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("<svg") && page.contains("blk.1.ffn_down.weight"), "{page}");
    // Without a text, only weights.
    assert!(!compare(&[]).contains("KL divergence"));
    let other = Fixture::new(&["--vocab", "400"]);
    output(&mut quadriga([
        "compare",
        "-q",
        "--chunk-size",
        "64",
        "-f",
        text(&file),
        model,
        text(&other.model),
    ]))
    .failed(1, &["cannot be compared"]);
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_leaves_the_old_file() {
    use std::process::{Command, Stdio};
    let fixture = Fixture::new(&["--type", "f16", "--width", "1024", "--layers", "8", "--vocab", "4000"]);
    let out = fixture.path("out.gguf");
    fs::write(&out, "old").unwrap();
    let count = || fs::read_dir(fixture.folder.path()).unwrap().count();
    let before = count();
    let mut command = quadriga(["quantize", "-t", "1", text(&fixture.model), text(&out), "IQ2_XS"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The temporary file appears when writing begins.
    while count() == before && child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    assert_eq!(fs::read(&out).unwrap(), b"old");
    assert_eq!(count(), before);
}

/// The same model whose prompts begin with a token.
fn with_bos(fixture: &Fixture) -> PathBuf {
    let path = fixture.path("bos.gguf");
    let file = File::open(&fixture.model).unwrap();
    let mut writer = quadriga_gguf::Writer::new();
    for (key, value) in file.metadata().filter(|(key, _)| *key != "tokenizer.ggml.add_bos_token") {
        writer.set(key, quadriga_gguf::OwnedValue::from(value)).unwrap();
    }
    writer.set("tokenizer.ggml.add_bos_token", true).unwrap();
    for tensor in file.tensors() {
        writer.tensor_bytes(tensor.name(), tensor.dtype(), tensor.shape(), tensor.bytes()).unwrap();
    }
    writer.write(&path).unwrap();
    path
}

#[test]
fn chunks_begin_with_the_token_that_prompts_begin_with() {
    let (fixture, file) = fixture("f16");
    let model = with_bos(&fixture);
    let json = |line: &[&str]| -> Value {
        serde_json::from_str(&output(quadriga(line).args(["-q", "--json"])).success().out).unwrap()
    };
    let own = json(&["perplexity", text(&model), "-f", text(&file), "--chunk-size", "50"]);
    // The chunks as cases, with the token in place of the first of each; in the first chunk it is added.
    let bos = File::open(&model).unwrap().get::<u32>("tokenizer.ggml.bos_token_id").unwrap() as usize;
    let tokens =
        File::open(&model).unwrap().get::<Vec<&str>>("tokenizer.ggml.tokens").unwrap()[bos].to_owned();
    let content = fs::read_to_string(&file).unwrap();
    let mut sum = 0.0;
    let mut count = 0.0;
    // A byte of the text is a token.
    let padded: Vec<u8> = [b"?", content.as_bytes()].concat();
    for chunk in padded.chunks_exact(50) {
        let part = format!("{tokens}{}", std::str::from_utf8(&chunk[1..]).unwrap());
        let case =
            serde_json::json!({ "name": "c", "kind": "nll", "text": part, "ctx": 50, "special": true });
        let mut eval = quadriga(["eval", "-q", "-m", text(&model), "-"]);
        let out = crate::common::output_with_input(&mut eval, case.to_string().as_bytes()).success().out;
        let found: Value = serde_json::from_str(&out).unwrap();
        assert_eq!(found["count"], 49, "{found}");
        sum += found["nll"].as_f64().unwrap() * 49.0;
        count += 49.0;
    }
    let (own_nll, exact) = (own["nll"]["mean"].as_f64().unwrap(), sum / count);
    assert_eq!(own["tokens"].as_f64().unwrap(), count);
    assert!((own_nll - exact).abs() <= 1e-4 * exact, "{own_nll} {exact}");
    // compare and imatrix have the same chunks.
    let line = ["compare", text(&model), text(&model), "-f", text(&file), "--chunk-size", "50"];
    let compared = json(&line)["text"]["reference"]["mean"].as_f64().unwrap();
    assert!((compared.ln() - exact).abs() <= 1e-4 * exact, "{compared} {exact}");
    let matrix = |model: &Path| {
        let out = fixture.path("imatrix.gguf");
        run(&["imatrix", "-q", "-m", text(model), "-f", text(&file), "-c", "50", "-o", text(&out)]).success();
        quadriga_models::importance::ImportanceMatrix::read(&out).unwrap()
    };
    let (with, without) = (matrix(&model), matrix(&fixture.model));
    assert_eq!((with.chunk_size, without.chunk_size), (50, 50));
    assert_ne!(with.entries["blk.0.attn_q.weight"].sums, without.entries["blk.0.attn_q.weight"].sums);
}

#[test]
fn the_comparison_at_the_end_keeps_to_the_memory() {
    let (fixture, file) = fixture("f16");
    let (model, out) = (text(&fixture.model), fixture.path("out.gguf"));
    let small = run(&["quantize", "--memory", "1M", model, text(&out), "Q8_0"]).success();
    for part in ["not compared", "1.0 MiB of --memory", "quadriga compare", "-f TEXT"] {
        assert!(small.err.contains(part), "{part}: {small:?}");
    }
    assert!(!small.err.contains("KL divergence"), "{small:?}");
    let large = run(&["quantize", "--memory", "2G", model, text(&out), "Q8_0"]).success();
    assert!(large.err.contains("KL divergence"), "{large:?}");
    // A model in parts is compared as any other.
    let part = fixture.path("part");
    run(&["split", model, text(&part), "--split-max-tensors", "8"]).success();
    let parts = |number: usize| {
        let name = |path: PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
        let found = fs::read_dir(fixture.folder.path()).unwrap().map(|entry| name(entry.unwrap().path()));
        let start = format!("part-{number:05}-of");
        fixture.path(&found.into_iter().find(|name| name.starts_with(&start)).unwrap())
    };
    let kept = run(&["quantize", "--keep-split", text(&parts(1)), text(&out), "Q8_0"]).success();
    assert!(kept.err.contains("KL divergence"), "{kept:?}");
    // Options that would have no effect on a comparison.
    for flags in [&["-m", model][..], &["-hf", "org/x"]] {
        output(quadriga(["compare", model, text(&out)]).args(flags)).failed(2, &["compare A B"]);
    }
    output(quadriga(["compare", model, model]).args(["--lora", text(&file)])).failed(2, &["--lora", "-f"]);
}

#[test]
fn a_resumed_matrix_counts_the_chunks_of_its_own_text() {
    let (fixture, file) = fixture("f16");
    let other = fixture.path("other.txt");
    fs::write(&other, "Some other words, in a text of its own. ".repeat(8)).unwrap();
    let imatrix = |out: &Path, flags: &[&str]| {
        let common = ["imatrix", "-q", "-m", text(&fixture.model), "--chunk-size", "64", "-o", text(out)];
        output(quadriga(common).args(flags)).success()
    };
    let read = |path: &Path| quadriga_models::importance::ImportanceMatrix::read(path).unwrap();
    let [first, whole, resumed] = ["first.gguf", "whole.gguf", "resumed.gguf"].map(|name| fixture.path(name));
    imatrix(&first, &["-f", text(&other)]);
    imatrix(&whole, &["-f", text(&file), "--in-file", text(&first)]);
    imatrix(&resumed, &["-f", text(&file), "--in-file", text(&first), "--chunks", "2"]);
    imatrix(&resumed, &["-f", text(&file), "--resume"]);
    let (whole, resumed) = (read(&whole), read(&resumed));
    assert_eq!((resumed.chunk_count, resumed.text_chunks), (whole.chunk_count, whole.text_chunks));
    assert!(whole.text_chunks < whole.chunk_count && whole.text_chunks > 2, "{whole:?}");
}

#[test]
fn a_fitted_file_is_named_by_the_type_of_most_bytes() {
    let (fixture, _) = fixture("f16");
    let (model, out) = (text(&fixture.model), fixture.path("out.gguf"));
    // As much as Q8_0 takes.
    run(&["quantize", "-q", "--pure", model, text(&out), "Q8_0"]).success();
    let size = (fs::metadata(&out).unwrap().len() + 8192).to_string();
    run(&["quantize", "-q", "--fit", &size, model, text(&out)]).success();
    let id = File::open(&out).unwrap().get::<u32>("general.file_type").unwrap();
    let mut bytes = std::collections::BTreeMap::new();
    for tensor in File::open(&out).unwrap().tensors().filter(|tensor| tensor.dtype() != DType::F32) {
        *bytes.entry(tensor.dtype().name()).or_insert(0) += tensor.byte_len();
    }
    let most = bytes.iter().max_by_key(|(_, bytes)| **bytes).unwrap().0;
    let named = quadriga_models::quantize::FileType::all().find(|found| found.id() == id).unwrap();
    assert_eq!(named.dtype().name(), *most, "{bytes:?}");
    assert_ne!(named.name(), "Q4_K_M");
    // A dry run warns of what the real one does.
    let dry = run(&["quantize", "--dry-run", model, text(&out), "IQ2_XS"]).success();
    assert!(dry.err.contains("without --imatrix"), "{dry:?}");
    // Classes of characters mean what they say.
    let classes =
        ["quantize", "-q", "--tensor-type", r"BLK\.\D=q5_0", "--tensor-type", r"blk\.\d\.ffn_up=q6_k"];
    output(quadriga(classes).args(["--no-check", model, text(&out), "Q8_0"])).success();
    assert_eq!(type_of(&out, "blk.0.ffn_up.weight"), DType::Q6_K);
    assert_eq!(type_of(&out, "blk.0.attn_q.weight"), DType::Q8_0);
}

/// Each tensor begins at a multiple of 32 bytes, which takes bytes between them.
#[test]
fn a_fitted_file_of_many_small_tensors_keeps_to_the_size() {
    let folder = tempfile::tempdir().unwrap();
    let [model, out] = ["in.gguf", "out.gguf"].map(|name| folder.path().join(name));
    let values: Vec<u8> =
        (0..3 * 32).flat_map(|i| half::f16::from_f32((i as f32).sin()).to_le_bytes()).collect();
    let mut writer = quadriga_gguf::Writer::new();
    writer.set("general.architecture", "llama").unwrap();
    for layer in 0..400 {
        writer.tensor_bytes(&format!("blk.{layer}.attn_q.weight"), DType::F16, [3, 32], &values).unwrap();
    }
    writer.write(&model).unwrap();
    let names = fs::metadata(&model).unwrap().len() - 400 * 192;
    for each in [66, 70, 102, 130, 192] {
        let size = names + 5000 + 400 * each;
        let line = ["quantize", "-q", "--no-check", "--fit", &size.to_string(), text(&model), text(&out)];
        run(&line).success();
        let found = fs::metadata(&out).unwrap().len();
        assert!(found <= size, "{found} of {size}");
    }
}

#[test]
fn keys_with_which_the_result_cannot_be_loaded_are_an_error() {
    let (fixture, _) = fixture("f16");
    let (model, out) = (text(&fixture.model), fixture.path("out.gguf"));
    for flags in [&["-q"][..], &["--no-check"], &[]] {
        let wrong = ["--override-kv", "llama.attention.head_count=int:7"];
        let done = output(quadriga(["quantize"]).args(wrong).args(flags).args([model, text(&out), "Q8_0"]));
        assert_eq!(done.code, Some(1), "{done:?}");
        let parts = ["out.gguf", "cannot be loaded", "--override-kv", "kept"];
        assert!(parts.iter().all(|part| done.err.contains(part)), "{done:?}");
        assert!(out.exists());
    }
    run(&["quantize", "-q", "--override-kv", "general.name=str:x", model, text(&out), "Q8_0"]).success();
}

#[test]
fn chunks_beyond_the_trained_context_are_warned_of() {
    let fixture = Fixture::new(&["--context", "64"]);
    let file = fixture.path("text.txt");
    fs::write(&file, "The quick brown fox jumps over the lazy dog. 0123456789\n".repeat(8)).unwrap();
    let measure = |chunk: &str| {
        run(&["perplexity", text(&fixture.model), "-f", text(&file), "--chunk-size", chunk]).success().err
    };
    assert!(measure("128").contains("128 tokens is past the 64 tokens"));
    assert!(!measure("64").contains("past the"));
}

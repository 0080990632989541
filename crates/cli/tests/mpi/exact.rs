//! Divided models against exact results: those of the default model, and those of a dense model for mixtures made of it.

use quadriga_gguf::{File, OwnedValue, Writer};
use quadriga_graph::DType;

use super::*;

/// The cases with these names in a file of their own.
fn cases(folder: &Path, name: &str, wanted: impl Fn(&str, &serde_json::Value) -> bool) -> (PathBuf, usize) {
    let all = quadriga_llm::judge::DEFAULT_MODEL_CASES.lines();
    let found: Vec<&str> = all
        .filter(|line| {
            let case: serde_json::Value = serde_json::from_str(line).unwrap();
            wanted(case["name"].as_str().unwrap(), &case)
        })
        .collect();
    let path = folder.join(name);
    std::fs::write(&path, found.join("\n")).unwrap();
    (path, found.len())
}

/// Judges cases with so many ranks; `more` are further options.
fn judge(family: &Path, (cases, count): &(PathBuf, usize), ranks: usize, how: &str, more: &[&str]) {
    let arguments = ["eval", cases.to_str().unwrap(), "--judge", "-c", "2048", "--parallelism", how];
    let arguments = arguments.into_iter().chain(more.iter().copied());
    let output = CommandOutput::from(mpirun(family, ranks, arguments).output().unwrap()).success();
    assert_eq!(output.out.lines().count(), *count, "{ranks} ranks, {how}: {output:?}");
}

#[test]
fn exact_cases_hold_on_every_division() {
    let folder = tempfile::tempdir().unwrap();
    let named = |file: &str, names: &[&str]| {
        let found = cases(folder.path(), file, |name, _| names.contains(&name));
        assert_eq!(found.1, names.len(), "{names:?}");
        found
    };
    let short = named("short.jsonl", &["math", "capital"]);
    let text = named("text.jsonl", &["austen-512"]);
    let every = cases(folder.path(), "every.jsonl", |_, case| {
        matches!(case["kind"].as_str(), Some("greedy" | "next"))
    });
    assert!(every.1 >= 10, "{}", every.1);
    for (number, family) in families().iter().enumerate() {
        for (ranks, how) in [(1, "auto"), (2, "tensor"), (2, "pipeline"), (4, "pipeline"), (4, "tensor=2")] {
            judge(family, &short, ranks, how, &[]);
        }
        // The second family has what differs between them: how ranks exchange data.
        if number == 0 {
            for (ranks, how) in [(2, "tensor"), (2, "pipeline"), (4, "tensor=2")] {
                judge(family, &every, ranks, how, &[]);
            }
            for how in ["tensor", "pipeline"] {
                judge(family, &text, 2, how, &[]);
            }
        }
    }
}

/// A mixture of experts that computes what a dense model of Llama's layers does: each expert is a copy of its feed-forward, so that any two
/// of them, with weights that add up to one, give its result. The router tells them apart.
fn mixture_of(dense: &Path, mixture: &Path, experts: usize) {
    let file = File::open(dense).unwrap();
    let mut writer = Writer::new();
    for (key, value) in file.metadata() {
        let key = key.replacen("llama.", "granitemoe.", 1);
        match (key.as_str(), value) {
            ("general.architecture", _) => writer.set(&key, "granitemoe"),
            (_, value) => writer.set(&key, OwnedValue::from(value)),
        }
        .unwrap();
    }
    writer.set("granitemoe.expert_count", experts as u32).unwrap();
    writer.set("granitemoe.expert_used_count", 2u32).unwrap();
    let mut routers = 0_u32;
    for tensor in file.tensors() {
        let name = tensor.name();
        let Some(matrix) = ["ffn_gate", "ffn_up", "ffn_down"]
            .iter()
            .find(|matrix| name.ends_with(&format!(".{matrix}.weight")))
        else {
            writer.tensor_bytes(name, tensor.dtype(), tensor.shape(), tensor.bytes()).unwrap();
            continue;
        };
        let [rows, columns] = [tensor.shape().rows(), tensor.shape().cols()];
        let (copies, bytes) = (name.replace(matrix, &format!("{matrix}_exps")), tensor.bytes());
        let written = writer.tensor(&copies, tensor.dtype(), [experts, rows, columns], move |out| {
            (0..experts).try_for_each(|_| out.write_all(bytes))
        });
        written.unwrap();
        if *matrix == "ffn_gate" {
            let name = name.replace("ffn_gate", "ffn_gate_inp");
            let first = routers * (columns * experts) as u32;
            let weight = |i: u32| ((first + i).wrapping_mul(2_654_435_761) >> 16) as f32 / 65_536.0 - 0.5;
            let router: Vec<u8> =
                (0..(columns * experts) as u32).flat_map(|i| weight(i).to_le_bytes()).collect();
            let written =
                writer.tensor(&name, DType::F32, [experts, columns], move |out| out.write_all(&router));
            written.unwrap();
            routers += 1;
        }
    }
    assert!(routers > 0);
    writer.write(mixture).unwrap();
}

/// A mixture of the default model has its exact results, whatever experts a rank has.
#[test]
fn a_mixture_of_copies_of_the_default_model_has_its_exact_results() {
    let folder = tempfile::tempdir().unwrap();
    let short =
        cases(folder.path(), "short.jsonl", |name, _| ["math", "capital", "one-token"].contains(&name));
    let mixture = folder.path().join("mixture.gguf");
    let Some(family) = families().into_iter().next() else { return };
    mixture_of(
        &quadriga_llm::default_model::fetch(None, &mut |_| std::ops::ControlFlow::Continue(())).unwrap(),
        &mixture,
        4,
    );
    let model = ["-m", mixture.to_str().unwrap()];
    for (ranks, how) in
        [(1, "auto"), (2, "tensor"), (2, "pipeline"), (3, "tensor"), (4, "tensor=2,pipeline=2")]
    {
        judge(&family, &short, ranks, how, &model);
    }
}

/// As many ranks as KV heads and experts, which the default model does not have.
#[test]
fn a_mixture_of_copies_scores_texts_as_the_dense_model_does() {
    let dense = Fixture::new(&[
        "--type",
        "q8_0",
        "--layers",
        "4",
        "--heads",
        "4",
        "--kv-heads",
        "4",
        "--width",
        "128",
        "--ffn",
        "128",
    ]);
    let mixture = dense.path("mixture.gguf");
    mixture_of(&dense.model, &mixture, 8);
    let case = dense.path("case.jsonl");
    let text = r#"{"name": "a", "kind": "nll", "ctx": 16, "text": "copies of a dense model, divided among four ranks"}"#;
    std::fs::write(&case, text).unwrap();
    for family in families() {
        let scores_of = |model: &Path, ranks: usize, how: &str| {
            let arguments = ["eval", case.to_str().unwrap(), "-c", "128", "-m", model.to_str().unwrap()];
            scores(&mut mpirun(&family, ranks, arguments.into_iter().chain(["--parallelism", how]))).1
        };
        let wanted = scores_of(&dense.model, 1, "auto");
        for (ranks, how) in [(1, "auto"), (4, "tensor=4"), (4, "tensor=2,pipeline=2"), (4, "pipeline=4")] {
            let found = scores_of(&mixture, ranks, how);
            assert!(wanted.len() > 1 && found.len() == wanted.len(), "{how}");
            for (found, wanted) in found.iter().zip(&wanted) {
                assert!((found - wanted).abs() <= 1e-3 * wanted.abs().max(1.0), "{how}: {found} {wanted}");
            }
        }
    }
}

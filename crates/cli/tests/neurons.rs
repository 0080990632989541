//! `synth --relu`, `neurons` and `--hot-neurons`: counts of active neurons, what they are used for, and where they have no effect.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::path::Path;
use std::process::Command;

fn quadriga(folder: &Path, arguments: &[&str]) -> (bool, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quadriga"));
    let output = command.current_dir(folder).args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

#[test]
fn neurons_are_counted_for_one_model_and_used_where_they_can_be() {
    let folder = tempfile::tempdir().unwrap();
    let run = |arguments: &str| quadriga(folder.path(), &arguments.split(' ').collect::<Vec<_>>());
    let shape = "--layers 2 --width 64 --heads 4 --ffn 256 --vocab 512 --relu --active 0.1 --type f16";
    for (name, seed) in [("relu.gguf", 1), ("other.gguf", 2)] {
        let (ok, _, error) = run(&format!("synth -o {name} --seed {seed} {shape}"));
        assert!(ok, "{error}");
    }
    // Longer than a batch, and than the context.
    std::fs::write(folder.path().join("text"), "a text of some length. ".repeat(40)).unwrap();
    let (ok, _, error) = run("neurons -m relu.gguf -f text -c 256 --device cpu");
    assert!(ok && error.contains("wrote relu.neurons") && error.contains("% of the activations"), "{error}");
    std::fs::write(folder.path().join("other text"), "quite another one; it is shorter! ".repeat(20))
        .unwrap();
    let (ok, _, error) = quadriga(
        folder.path(),
        &[
            "neurons",
            "-m",
            "relu.gguf",
            "-f",
            "other text",
            "-o",
            "other.neurons",
            "--compare",
            "relu.neurons",
            "--device",
            "cpu",
        ],
    );
    let shares: Vec<f64> = error
        .lines()
        .filter_map(|line| line.strip_suffix(" % of the best choice's")?.rsplit(' ').next()?.parse().ok())
        .collect();
    // Repeated phrases have less in common than long texts.
    assert!(ok && shares.len() == 3, "{error}");
    assert!(
        shares.iter().all(|share| (60.0..=100.0).contains(share)),
        "neurons of one text serve another: {error}"
    );
    let (ok, _, error) = run("bench -m other.gguf -p 0 -n 4 -r 1 --device sim --hot-neurons relu.neurons");
    assert!(!ok && error.contains("relu.neurons"), "{error}");
    for (options, reason) in [
        ("--device cpu", "no GPU"),
        ("--device sim -ngl 1", "number of layers"),
        ("--device sim --neurons dense", "exact mode only"),
        ("--device sim", "whole model"),
    ] {
        let (ok, _, error) = run(&format!("plan -m relu.gguf --hot-neurons relu.neurons {options}"));
        let said =
            error.lines().find(|line| line.contains("--hot-neurons has no effect")).unwrap_or_default();
        assert!(ok && said.contains(reason), "{options}: {error}");
    }
}

//! Options that place a model's tensors, in every command that loads a model.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;

use common::{Fixture, output};
use serde_json::Value;

/// A small mixture of experts.
fn mixture() -> Fixture {
    Fixture::new(&["--arch", "qwen3moe", "--layers", "3", "--experts", "4"])
}

/// The layers whose experts are on the CPU.
fn layers_on_cpu(fixture: &Fixture, flags: &[&str]) -> Vec<u64> {
    let all = [&["--device", "sim", "-ngl", "all", "-c", "64", "--json"], flags].concat();
    let json = output(&mut fixture.command("plan", &all)).success().out;
    let json: Value = serde_json::from_str(&json).unwrap();
    let storages = json["storages"].as_array().unwrap().iter();
    let mut layers: Vec<u64> = storages
        .filter(|storage| storage["usage"] == "weight" && storage["backend"] == 1)
        .map(|storage| storage["name"].as_str().unwrap().to_owned())
        .inspect(|name| assert!(name.contains("_exps"), "{name} is on the CPU"))
        .map(|name| name.split('.').nth(1).unwrap().parse().unwrap())
        .collect();
    layers.sort_unstable();
    layers.dedup();
    layers
}

#[test]
fn flags_of_llama_cpp_place_experts() {
    let fixture = mixture();
    for (flags, layers) in [
        (&[][..], &[][..]),
        (&["--cpu-moe"], &[0, 1, 2]),
        (&["-cmoe"], &[0, 1, 2]),
        (&["--n-cpu-moe", "2"], &[0, 1]),
        (&["-ncmoe", "1"], &[0]),
        (&["-ncmoe", "0"], &[]),
        (&["-ot", "exps=CPU"], &[0, 1, 2]),
        (&["-ot", r"blk\.[12]\.ffn_(up|down|gate)_exps=CPU"], &[1, 2]),
        (&["-ot", r"blk\.1.*exps=sim:0", "-ot", r"\.ffn_.*_exps\.=CPU"], &[0, 2]),
        (&["-ot", r"blk\.1.*exps=SIM0,exps=cpu"], &[0, 2]),
    ] {
        assert_eq!(layers_on_cpu(&fixture, flags), layers, "{flags:?}");
    }
}

#[test]
fn all_commands_take_the_flags_and_answers_stay_the_same() {
    let fixture = mixture();
    let answer = |flags: &[&str]| {
        let all = [&["hello", "-n", "6", "--temp", "0", "-q", "-c", "64"], flags].concat();
        output(&mut fixture.command("run", &all)).success().out
    };
    let wanted = answer(&["--device", "cpu"]);
    for flags in
        [&["--cpu-moe"][..], &["-ncmoe", "1"], &["-ot", "attn=CPU"], &["-ngl", "2", "-ot", "exps=sim"]]
    {
        assert_eq!(answer(&[&["--device", "sim"], flags].concat()), wanted, "{flags:?}");
    }
    let rules = ["--device", "sim", "-ngl", "all", "-ot", "exps=CPU", "-q"];
    for (command, flags) in [
        ("chat", &["-n", "2"][..]),
        ("bench", &["-p", "4", "-n", "2", "-r", "1"]),
        ("plan", &[]),
        ("embed", &["hello"]),
    ] {
        output(&mut fixture.command(command, &[&rules, flags].concat())).success();
    }
}

#[test]
fn rules_that_cannot_be_used_are_named() {
    let fixture = mixture();
    let plan = |flags: &[&str]| output(&mut fixture.command("plan", &[&["--device", "sim"], flags].concat()));
    plan(&["-ot", "a(=CPU"]).failed(2, &["a(", "unclosed group", "-ot"]);
    plan(&["-ot", "exps"]).failed(2, &["exps", "REGEX=DEVICE"]);
    plan(&["-ot", "exps=CUDA7"]).failed(2, &["exps", "CUDA7", "sim:0, cpu"]);
    let unused = plan(&["-ot", "exps=CPU,blk.9=CPU"]).success();
    assert!(unused.err.contains("-ot blk.9 has no effect"), "{unused:?}");
    assert!(!unused.err.contains("exps"), "{unused:?}");
    let dense = Fixture::new(&[]);
    for flags in [&["--cpu-moe"][..], &["--n-cpu-moe", "1"]] {
        let plan = output(&mut dense.command("plan", &[&["--device", "sim"], flags].concat())).success();
        assert!(plan.err.contains("has no effect: the model has no experts"), "{plan:?}");
    }
}

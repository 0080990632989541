//! Several GPUs of one machine: layers or parts of every layer on each.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use serde_json::Value;

use crate::common::{Fixture, output};

fn fixture() -> Fixture {
    Fixture::new(&["--layers", "4", "--width", "128", "--heads", "4", "--kv-heads", "4"])
}

/// The bytes of weights and states of each backend.
fn held(fixture: &Fixture, flags: &[&str]) -> Vec<(String, u64)> {
    let all =
        [&["--device", "sim:0,sim:1", "-ngl", "all", "-b", "8", "-c", "64", "--json", "-q"], flags].concat();
    let plan: Value =
        serde_json::from_str(&output(&mut fixture.command("plan", &all)).success().out).unwrap();
    let backends = plan["backends"].as_array().unwrap().iter();
    backends
        .map(|backend| {
            let bytes = |part: &str| backend[part].as_u64().unwrap();
            (backend["backend"].as_str().unwrap().to_owned(), bytes("weights") + bytes("state"))
        })
        .collect()
}

#[test]
fn layers_are_divided_as_the_numbers_say() {
    let fixture = fixture();
    let bytes = |flags: &[&str]| -> Vec<u64> {
        held(&fixture, flags).into_iter().take(2).map(|(_, bytes)| bytes).collect()
    };
    let (even, uneven) = (bytes(&[]), bytes(&["-ts", "4,1"]));
    assert!(even[0] < uneven[0] && even[1] > uneven[1], "{even:?} {uneven:?}");
    assert_eq!(bytes(&["--tensor-split", "1/1"]), even, "as by their rates, which are the same");
    let first = bytes(&["-ts", "1,0"]);
    assert!(first[0] > 0 && first[1] == 0, "{first:?}");
    assert_eq!(bytes(&["-ts", "0,1"])[0], 0);
    assert_eq!(bytes(&["-ts", "1"]), first, "those without a number get none");
    for wrong in ["0,0", "1,-2", "a", "1,,2", "nan,1"] {
        let refused = output(&mut fixture.command("plan", &["--device", "sim", "-ts", wrong])).failed_usage();
        assert!(refused.err.contains("--tensor-split") && refused.err.contains(wrong), "{refused:?}");
    }
    output(&mut fixture.command("plan", &["--device", "sim:0,sim:1", "-ts", "1,1,1"]))
        .failed(2, &["3 numbers for 2 GPUs"]);
}

#[test]
fn one_of_several_gpus_can_have_all() {
    let fixture = fixture();
    let names =
        |flags: &[&str]| -> Vec<String> { held(&fixture, flags).into_iter().map(|(name, _)| name).collect() };
    assert_eq!(names(&["-sm", "none"]), ["sim:0", "cpu"]);
    assert_eq!(names(&["-sm", "none", "-mg", "1"]), ["sim:1", "cpu"]);
    assert_eq!(names(&["-sm", "layer"]), ["sim:0", "sim:1", "cpu"]);
    let two = ["--device", "sim:0,sim:1", "-sm", "none", "-mg", "2"];
    output(&mut fixture.command("plan", &two)).failed(2, &["--main-gpu 2", "2 GPUs"]);
    let unknown = output(&mut fixture.command("plan", &["-sm", "diagonal"])).failed_usage();
    assert!(unknown.err.contains("none, layer or row"), "{unknown:?}");
    let note = output(&mut fixture.command("plan", &["--device", "sim", "-sm", "row", "-mg", "0"])).success();
    assert!(note.err.contains("--split-mode row has no effect: fewer than two GPUs"), "{note:?}");
    assert!(note.err.contains("--main-gpu has no effect"), "{note:?}");
}

#[test]
fn gpus_that_divide_every_layer_give_the_answers_of_one() {
    let fixture = fixture();
    let answer = |command: &str, flags: &[&str]| {
        let all = [&["hello", "-n", "8", "--temp", "0", "-c", "64", "--cache-type", "f32"], flags].concat();
        output(&mut fixture.command(command, &all)).success()
    };
    let wanted = answer("run", &["--device", "cpu", "-q"]).out;
    let rows = ["--device", "sim:0,sim:1", "-sm", "row"];
    let found = answer("run", &[&rows[..], &["-ngl", "all"]].concat());
    assert_eq!(found.out, wanted);
    assert!(found.err.contains("sim:0 has") && found.err.contains("sim:1 has"), "{found:?}");
    assert!(found.err.contains("2 of 4 KV heads"), "{found:?}");
    let uneven = answer("run", &[&rows[..], &["-ngl", "2", "-ts", "3,1"]].concat());
    assert_eq!(uneven.out, wanted);
    assert!(uneven.err.contains("3 of 4 KV heads"), "{uneven:?}");
    // Many requests at once.
    let prompts = fixture.path("prompts.jsonl");
    std::fs::write(&prompts, "{\"prompt\": \"hello\", \"max_tokens\": 4, \"temperature\": 0}\n").unwrap();
    let batch = |flags: &[&str]| {
        let results = fixture.path("results.jsonl");
        let files = [
            prompts.to_str().unwrap(),
            "-o",
            results.to_str().unwrap(),
            "-c",
            "64",
            "--cache-type",
            "f32",
            "-q",
        ];
        output(&mut fixture.command("batch", &[&files[..], flags].concat())).success();
        let text = std::fs::read_to_string(&results).unwrap();
        std::fs::remove_file(results).unwrap();
        serde_json::from_str::<Value>(text.lines().next().unwrap()).unwrap()["text"].clone()
    };
    assert_eq!(batch(&rows), batch(&["--device", "cpu"]));
}

/// GPUs that divide every layer wait for each other: a command that does not start all of them hangs.
#[test]
fn every_command_that_computes_starts_all_gpus_that_divide_every_layer() {
    let fixture = fixture();
    let rows = ["--device", "sim:0,sim:1", "-sm", "row", "-ngl", "all", "-c", "64", "--cache-type", "f32"];
    let one = ["--device", "cpu", "-c", "64", "--cache-type", "f32"];
    let cases = fixture.path("cases.jsonl");
    let case = r#"{"name": "a", "kind": "nll", "ctx": 16, "text": "every layer is divided among two"}"#;
    std::fs::write(&cases, case).unwrap();
    let text = fixture.path("text");
    std::fs::write(&text, "hello ".repeat(40)).unwrap();
    let (cases, text) = (cases.to_str().unwrap(), text.to_str().unwrap());
    let answer = |command: &str, own: &[&str], flags: &[&str]| {
        output(&mut fixture.command(command, &[own, flags].concat())).success().out
    };
    // Vectors differ in the order of sums.
    let vectors = |flags: &[&str]| -> Vec<f64> {
        let printed: Value = serde_json::from_str(&answer("embed", &["a", "b"], flags)).unwrap();
        let all = printed["embeddings"].as_array().unwrap().iter();
        all.flat_map(|one| one["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap())).collect()
    };
    let (found, wanted) = (vectors(&rows), vectors(&one));
    assert!(found.len() == wanted.len() && found.iter().zip(&wanted).all(|(a, b)| (a - b).abs() < 1e-4));
    let sums = |flags: &[&str]| -> f64 {
        let printed: Value = serde_json::from_str(answer("eval", &[cases], flags).trim()).unwrap();
        printed["nll"].as_f64().unwrap_or_else(|| panic!("{printed}"))
    };
    assert!((sums(&rows) - sums(&one)).abs() < 1e-3, "{} {}", sums(&rows), sums(&one));
    for own in [&["-p", "8", "-n", "4", "-r", "1"][..], &["-p", "8", "-n", "4", "-r", "1", "--streams", "2"]]
    {
        assert!(answer("bench", own, &rows).contains("tg") || own.contains(&"--streams"), "{own:?}");
    }
    for (command, own) in [("perplexity", ["-f", text]), ("imatrix", ["-f", text])] {
        // They may refuse parts of a model, but do not wait for ever.
        let ended = output(&mut fixture.command(command, &[&own[..], &rows[..]].concat()));
        assert!(ended.code.is_some(), "{command}: {ended:?}");
    }
    // Its divergence would need a second engine, which the other GPUs do not follow.
    let gated = Fixture::new(&["--layers", "4", "--heads", "4", "--kv-heads", "4"]);
    for (command, own) in [("run", &["hello", "-n", "4"][..]), ("bench", &["-p", "8", "-n", "4", "-r", "1"])]
    {
        let flags = [own, &["--gate-threshold", "0.01"], &rows[..]].concat();
        let found = output(&mut gated.command(command, &flags)).success();
        assert!(found.err.contains("is measured on one rank only"), "{command}: {found:?}");
    }
}

//! Output of `bench`, `plan`, `devices`, `check` and `eval` for small models.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;

use common::{Fixture, output, output_with_input, quadriga};
use serde_json::Value;

#[test]
fn bench_gives_medians_as_a_table_and_as_json() {
    let fixture = Fixture::new(&["--no-vocab"]);
    let flags = ["-p", "40", "-n", "6", "-r", "3", "-d", "10", "-t", "1"];
    let table = output(&mut fixture.command("bench", &flags)).success().out;
    assert!(table.contains("pp40 @ 10") && table.contains("tg6 @ 10"), "{table}");
    let json = output(fixture.command("bench", &flags).arg("--json")).success().out;
    let json: Value = serde_json::from_str(&json).unwrap();
    for (test, n) in [("pp", 40), ("tg", 6)] {
        assert_eq!(json[test]["n"], n);
        assert_eq!(json[test]["samples"].as_array().unwrap().len(), 3);
        assert!(json[test]["tok_s"].as_f64().unwrap() > 0.0 && json[test]["spread"].is_number(), "{json}");
    }
    assert_eq!((&json["threads"], &json["depth"]), (&1.into(), &10.into()));
    assert!(json["load_seconds"].is_number() && json["isa"].is_string() && json["backends"][0] == "cpu");
    let nothing = output(&mut fixture.command("bench", &["-p", "0", "-n", "0"]));
    nothing.failed(2, &["nothing to measure"]);
}

#[test]
fn plan_prints_memory_splits_and_nodes() {
    let fixture = Fixture::new(&[]);
    let text = output(&mut fixture.command("plan", &["-c", "256", "-b", "32"])).success().out;
    assert!(
        text.contains("context 256, batch 32") && text.contains("cpu") && text.contains("split 0"),
        "{text}"
    );
    let nodes = output(&mut fixture.command("plan", &["--nodes"])).success().out;
    assert!(nodes.contains("blk.1."), "{nodes}");
    let json = output(&mut fixture.command("plan", &["--json"])).success().out;
    let json: Value = serde_json::from_str(&json).unwrap();
    // Two layers of keys and values, 4096 slots of 64 f16 values.
    assert_eq!(json["backends"][0]["state"], 2 * 2 * 4096 * 64 * 2);
    let dot = output(&mut fixture.command("plan", &["--dot"])).success().out;
    assert!(dot.starts_with("digraph"), "{dot}");
}

#[test]
fn plan_shows_the_nodes_of_one_split_and_checks_the_plan() {
    let fixture = Fixture::new(&[]);
    let dot = output(&mut fixture.command("plan", &["--split", "0"])).success().out;
    assert!(dot.starts_with("digraph split") && dot.contains("blk.1."), "{dot}");
    let folder = tempfile::tempdir().unwrap();
    let svg = folder.path().join("split.svg");
    let drawn = output(&mut fixture.command("plan", &["--split", "0", "--svg", svg.to_str().unwrap()]));
    assert_eq!(drawn.success().out, "");
    assert!(std::fs::read_to_string(&svg).unwrap().starts_with("<svg"));
    output(&mut fixture.command("plan", &["--split", "7"])).failed(2, &["--split 7", "splits 0 to 0"]);
    let checked = output(&mut fixture.command("plan", &["--check"])).success();
    assert!(checked.err.contains("the plan breaks no rule"), "{}", checked.err);
}

#[test]
fn the_cache_type_decides_its_size() {
    let fixture = Fixture::new(&["--heads", "2"]);
    let state = |cache: &str| {
        let json = output(&mut fixture.command("plan", &["--json", "--cache-type", cache])).success().out;
        serde_json::from_str::<Value>(&json).unwrap()["backends"][0]["state"].as_u64().unwrap()
    };
    assert_eq!(state("f32"), 2 * state("f16"));
    assert_eq!(state("q8_0") * 32, state("f16") * 17);
    let narrow = Fixture::new(&["--heads", "4"]);
    output(&mut narrow.command("plan", &["--cache-type", "q8_0"]))
        .failed(2, &["q8_0", "blocks of 32", "--cache-type f16"]);
}

#[test]
fn devices_lists_the_cpu() {
    let text = output(&mut quadriga(["devices"])).success().out;
    assert!(text.starts_with("cpu ") && text.contains("free"), "{text}");
    let json: Value =
        serde_json::from_str(&output(&mut quadriga(["devices", "--json"])).success().out).unwrap();
    assert_eq!(json["devices"][0]["name"], "cpu");
    assert!(json["devices"][0]["isa"].is_string() && json["devices"][0]["total_bytes"].is_number());
}

#[test]
fn check_runs_the_suite_on_a_device() {
    let report = output(&mut quadriga(["check", "--device", "sim", "--sample", "60"])).success().out;
    assert!(
        report.starts_with("sim:0") && report.contains("mul_mat") && report.contains("total"),
        "{report}"
    );
    let one = output(&mut quadriga(["check", "--guarded", "--sample", "200", "soft_max"])).success().out;
    assert!(one.starts_with("cpu") && !one.contains("mul_mat"), "{one}");
    output(&mut quadriga(["check", "--device", "abacus"])).failed(2, &["no device \"abacus\""]);
    output(&mut quadriga(["check", "no such case"])).failed(2, &["no case matches"]);
    output(&mut quadriga(["check", "sofmax"])).failed(2, &["similar: soft_max"]);
    let normalized =
        output(&mut quadriga(["check", "--guarded", "--sample", "200", "SoftMax"])).success().out;
    assert_eq!(normalized, one);
}

#[test]
fn a_model_can_be_cut_across_devices_at_any_layer() {
    let fixture = Fixture::new(&["--layers", "3", "--type", "f32"]);
    let case = r#"{"name": "l", "kind": "nll", "text": "hello there", "ctx": 5}"#;
    let nll = |flags: &[&str]| {
        let output = output_with_input(fixture.command("eval", flags).arg("-"), case.as_bytes()).success();
        serde_json::from_str::<Value>(&output.out).unwrap()["nll"].as_f64().unwrap()
    };
    let alone = nll(&["--device", "cpu"]);
    for layers in ["0", "1", "2", "3", "4", "all", "auto"] {
        let cut = nll(&["--device", "sim", "-ngl", layers]);
        assert!((cut - alone).abs() < 1e-3 * alone, "-ngl {layers}: {cut} instead of {alone}");
    }
    let two = nll(&["--device", "sim:0,sim:1", "-ngl", "3"]);
    assert!((two - alone).abs() < 1e-3 * alone, "{two} instead of {alone}");
    let twice = output(fixture.command("eval", &["--device", "sim,sim:0"]).arg("-"));
    twice.failed(2, &["sim:0", "twice"]);
}

#[test]
fn layers_fit_a_budget_or_the_error_names_the_number_that_would() {
    let fixture = Fixture::new(&["--layers", "4"]);
    let on_device = |flags: &[&str]| {
        let json = output(fixture.command("plan", &["--device", "sim", "--json"]).args(flags)).success().out;
        let json: Value = serde_json::from_str(&json).unwrap();
        let bytes = |part: &str| json["backends"][0][part].as_u64().unwrap();
        bytes("weights") + bytes("state") + bytes("compute")
    };
    let whole = on_device(&[]);
    let budget = (whole * 2 / 3).to_string();
    let some = on_device(&["--vram-budget", &budget]);
    assert!(some > 0 && some <= whole * 2 / 3, "{some} of {whole}");
    let too_many = ["--device", "sim", "-ngl", "all", "--vram-budget", &budget];
    output(&mut fixture.command("plan", &too_many)).failed(1, &["sim:0", "budget", "would fit"]);
}

#[test]
fn eval_answers_cases_line_by_line() {
    let fixture = Fixture::new(&[]);
    let cases = concat!(
        r#"{"name": "t", "kind": "tokenize", "text": "hi", "special": false, "tokens": [1]}"#,
        "\n\n",
        r#"{"name": "g", "kind": "greedy", "text": "hi", "special": false, "n": 3}"#,
        "\n",
        r#"{"name": "x", "kind": "next", "text": "hi"}"#,
        "\n",
        r#"{"name": "l", "kind": "nll", "text": "hello there", "ctx": 5}"#,
    );
    let output = output_with_input(fixture.command("eval", &[]).arg("-"), cases.as_bytes()).success();
    let rows: Vec<Value> = output.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<&str> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["t", "g", "x", "l"]);
    assert_eq!(rows[0]["tokens"].as_array().unwrap().len(), 2);
    assert_eq!(rows[1]["greedy"].as_array().unwrap().len(), rows[1]["top5"].as_array().unwrap().len());
    assert_eq!(rows[2]["top5"][0].as_array().unwrap().len(), 2);
    assert_eq!(rows[3]["count"], 8);
    let wrong = output_with_input(fixture.command("eval", &[]).arg("-"), b"{\"name\": 3}\n");
    wrong.failed(1, &["line 1", "not a case"]);
}

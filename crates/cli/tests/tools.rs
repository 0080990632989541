//! Output of `bench`, `plan`, `devices`, `check` and `eval` for small models.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Fixture, output, output_with_input, quadriga};
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
    assert!(table.starts_with("model ") && table.contains("\nload "), "{table}");
    let quiet = output(fixture.command("bench", &flags).arg("-q")).success();
    assert!(quiet.err.is_empty() && quiet.out.starts_with("test "), "{quiet:?}");
    assert_eq!(quiet.out.matches('%').count(), 2, "{quiet:?}");
    // One round has no spread.
    let once = ["-p", "4", "-n", "2", "-r", "1", "-q"];
    let table = output(&mut fixture.command("bench", &once)).success().out;
    assert!(table.lines().skip(1).all(|line| line.ends_with(" -")) && !table.contains('%'), "{table}");
    let json = output(fixture.command("bench", &once).arg("--json")).success().out;
    let json: Value = serde_json::from_str(&json).unwrap();
    assert!(json["pp"]["spread"].is_null() && json["tg"]["tok_s"].is_number(), "{json}");
    let nothing = output(&mut fixture.command("bench", &["-p", "0", "-n", "0"]));
    nothing.failed(2, &["nothing to measure"]);
}

#[test]
fn plan_prints_memory_splits_and_nodes() {
    let fixture = Fixture::new(&[]);
    let text = output(&mut fixture.command("plan", &["-c", "256", "-b", "32"])).success().out;
    assert!(
        text.contains("context 256, ")
            && text.contains("batch of 32 tokens")
            && text.contains("cpu")
            && text.contains("split 0"),
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
    let drawn =
        output(&mut fixture.command("plan", &["--split", "0", "--svg", svg.to_str().unwrap()])).success();
    assert_eq!((drawn.out.as_str(), drawn.err), ("", format!("wrote {}\n", svg.display())));
    let quiet =
        output(&mut fixture.command("plan", &["--split", "0", "-q", "--html", svg.to_str().unwrap()]));
    assert_eq!(quiet.success().err, "");
    output(&mut fixture.command("plan", &["--split", "0", "-q", "--svg", svg.to_str().unwrap()])).success();
    assert!(std::fs::read_to_string(&svg).unwrap().starts_with("<svg"));
    output(&mut fixture.command("plan", &["--split", "7"])).failed(2, &["--split 7", "splits 0 to 0"]);
    let checked = output(&mut fixture.command("plan", &["--check"])).success();
    assert!(checked.err.contains("the plan breaks no rule"), "{}", checked.err);
}

#[test]
fn plan_prints_each_byte_count_once_and_says_what_is_streamed() {
    let fixture = Fixture::new(&["--layers", "4", "--width", "256"]);
    let flags = ["--device", "sim", "-ngl", "2", "-c", "256", "-b", "256"];
    let text = output(&mut fixture.command("plan", &flags)).success().out;
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "context 256, KV cache F16, planned for a prompt batch of 256 tokens");
    let columns: Vec<&str> =
        lines[2].split("  ").map(str::trim).filter(|column| !column.is_empty()).collect();
    assert_eq!(columns, ["device", "weights", "mmap", "KV cache", "compute", "total", "free"]);
    assert!(lines[3].starts_with("sim:0 ") && lines[4].starts_with("cpu "), "{text}");
    assert_eq!(text.matches(" computes ").count(), 2, "{text}");
    let streams = text.lines().find(|line| line.starts_with("Each run streams ")).unwrap();
    assert!(streams.contains("weights (") && streams.contains("of layers 0–2"), "{streams}");
    assert!(text.lines().count() <= 24 && !text.contains("state "), "{text}");
    // The streamed copies are named among the nodes.
    let nodes = output(fixture.command("plan", &flags).arg("--nodes")).success().out;
    assert!(nodes.contains("  streams ") && nodes.contains("blk.0.ffn_up.weight from cpu ("), "{nodes}");
    // The two plans differ in the memory that was free when they were made.
    let without_free = |text: &str| -> Vec<String> {
        let lines = text.lines().take(lines.len()).enumerate();
        lines
            .map(
                |(at, line)| {
                    if at == 4 { line.rsplit_once("  ").unwrap().0.trim_end().into() } else { line.into() }
                },
            )
            .collect()
    };
    assert_eq!(without_free(&nodes), without_free(&text));
    let small = output(&mut fixture.command("plan", &["-c", "256", "-q"])).success();
    assert!(small.err.is_empty() && small.out.lines().count() == 4, "{small:?}");
}

#[test]
fn files_of_a_plan_are_written_and_reported() {
    let fixture = Fixture::new(&[]);
    for (option, name, start) in
        [("--html", "p.html", "<!doctype html>"), ("--svg", "p.svg", "<svg"), ("--json", "p.json", "{")]
    {
        let path = fixture.path(name);
        let plan = output(fixture.command("plan", &[option]).arg(&path)).success();
        assert!(plan.out.contains("KV cache") && plan.out.contains("cpu computes"), "{plan:?}");
        assert_eq!(plan.err, format!("wrote {}\n", path.display()));
        assert!(std::fs::read_to_string(&path).unwrap().starts_with(start));
        std::fs::remove_file(&path).unwrap();
        let quiet = output(fixture.command("plan", &["-q", option]).arg(&path)).success();
        assert_eq!((quiet.out.as_str(), quiet.err.as_str()), ("", ""));
        assert!(path.exists());
    }
    let nowhere = output(&mut fixture.command("plan", &["--svg", "no/such/folder/p.svg"]));
    let nowhere = nowhere.failed(1, &["cannot create no/such/folder/p.svg: No such file"]);
    assert!(!nowhere.err.contains(".tmp"), "{nowhere:?}");
}

#[test]
fn a_device_without_layers_is_explained() {
    let fixture = Fixture::new(&[]);
    for (flags, part) in [
        (&["--device", "cpu", "-ngl", "5"][..], "-ngl 5 has no effect: --device cpu names no GPU"),
        (&["--device", "cpu", "--vram-budget", "6G"], "--vram-budget has no effect: no GPU is used"),
        (
            &["--device", "sim", "--vram-budget", "1k"],
            "--vram-budget 1.0 KiB is too small for a single layer",
        ),
    ] {
        let plan = output(&mut fixture.command("plan", flags)).success();
        assert!(plan.err.contains(part), "{plan:?}");
        let quiet = output(fixture.command("plan", flags).arg("-q")).success();
        assert_eq!(quiet.err, "");
    }
    output(&mut fixture.command("plan", &["--device", "sim", "-ngl", "all", "--vram-budget", "1k"]))
        .failed(1, &["sim:0", "budget of 1.0 KiB", "none of its weights would fit", "-ngl", "--vram-budget"]);
}

#[test]
fn the_output_matrix_is_on_the_last_accelerator() {
    let fixture = Fixture::new(&["--layers", "4"]);
    let flags = ["--device", "sim:0,sim:1", "-ngl", "all", "-b", "8", "--json"];
    let json = output(&mut fixture.command("plan", &flags)).success().out;
    let json: Value = serde_json::from_str(&json).unwrap();
    let names: Vec<&str> =
        json["backends"].as_array().unwrap().iter().map(|b| b["backend"].as_str().unwrap()).collect();
    assert_eq!(names, ["sim:0", "sim:1", "cpu"]);
    let device_of = |wanted: &dyn Fn(&str) -> bool| -> Vec<u64> {
        let nodes = json["nodes"].as_array().unwrap().iter();
        let mut devices: Vec<u64> = nodes
            .filter(|node| wanted(node["name"].as_str().unwrap()))
            .map(|node| {
                let split = node["split"].as_u64().unwrap() as usize;
                json["splits"][split]["backend"].as_u64().unwrap()
            })
            .collect();
        devices.dedup();
        devices
    };
    assert_eq!(device_of(&|name| name.starts_with("blk.0.")), [0]);
    assert_eq!(device_of(&|name| name.starts_with("blk.3.ffn_")), [1]);
    assert_eq!(device_of(&|name| name == "logits"), [1]);
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
    let total = |arguments: &[&str]| -> Vec<String> {
        let report = output(quadriga(["check", "--guarded"]).args(arguments)).success().out;
        report.lines().map(str::to_owned).collect()
    };
    // The filter comes first: all of the sample are cases of the operation.
    let row = total(&["--sample", "7", "soft_max"]).into_iter().find(|line| line.starts_with("soft_max"));
    assert!(row.as_ref().is_some_and(|row| row.split_whitespace().nth(1) == Some("7")), "{row:?}");
    let single = total(&["--sample", "1"]);
    let sum = single.iter().find(|line| line.starts_with("total")).unwrap();
    assert_eq!(sum.split_whitespace().nth(1), Some("1"), "{single:?}");
    // States that are not zero when the run begins.
    output(&mut quadriga(["check", "*heads 4/1 of 128, 4097 rows*"])).success();
    // Parts together are the whole.
    let cases = |part: &str| -> usize {
        let report = total(&["soft_max", "--part", part]);
        let sum = report.iter().find(|line| line.starts_with("total")).unwrap();
        sum.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let parts = ["1/3", "2/3", "3/3"].map(cases);
    assert!(parts.iter().all(|part| *part > 0) && parts.iter().sum::<usize>() == cases("1/1"), "{parts:?}");
    // Collectives of one to four ranks, each on a backend of its own.
    for (device, way) in
        [("cpu", None), ("sim", None), ("cpu", Some("--guarded")), ("cpu", Some("--in-place"))]
    {
        let line = ["check", "--device", device, "--sample", "150", "all_gather"];
        let report = output(quadriga(line).args(way)).success().out;
        let row = report.lines().find(|line| line.starts_with("all_gather"));
        let counts: Vec<&str> = row.unwrap_or_default().split_whitespace().skip(1).take(4).collect();
        assert_eq!(counts, ["150", "150", "0", "0"], "{report}");
    }
    output(&mut quadriga(["check", "--device", "abacus"])).failed(2, &["no device \"abacus\""]);
    output(&mut quadriga(["check", "no such case"])).failed(2, &["no case matches"]);
    output(&mut quadriga(["check", "sofmax"])).failed(2, &["similar: soft_max"]);
    // The name of an operation selects no case that only contains it, as in "padding"; a pattern does.
    let operations = |filter: &str| -> Vec<String> {
        let rows = total(&["--sample", "40", filter]).into_iter().skip(2);
        rows.filter_map(|row| row.split_whitespace().next().map(str::to_owned)).collect()
    };
    assert_eq!(operations("add"), ["add", "total"]);
    let pattern = operations("*add*");
    assert!(["add", "conv_2d"].iter().all(|name| pattern.iter().any(|row| row == name)), "{pattern:?}");
    let normalized =
        output(&mut quadriga(["check", "--guarded", "--sample", "200", "SoftMax"])).success().out;
    assert_eq!(normalized, one);
    for device in ["cpu", "sim"] {
        let line = ["check", "--random", "40", "--seed", "7", "--device", device];
        let random = output(&mut quadriga(line)).success().out;
        assert!(random.starts_with("40 random graphs from seed 7 agree with the oracle on"), "{random}");
    }
    let none = output(&mut quadriga(["check", "--random", "0"])).failed_usage();
    assert!(none.err.contains("'0'") && none.err.contains("--random"), "{none:?}");
    assert!(none.err.contains("at least 1"), "{none:?}");
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
    let mut twice = fixture.command("eval", &["--device", "sim,sim:0"]);
    let twice = output_with_input(twice.arg("-"), case.as_bytes());
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
    for empty in [&b""[..], b"\n \n"] {
        output_with_input(fixture.command("eval", &[]).arg("-"), empty)
            .failed(2, &["no cases", "eval --help"]);
    }
    let help = crate::common::output(&mut quadriga(["eval", "--help"])).success().out;
    for part in
        [r#""kind": "tokenize""#, r#""kind": "greedy""#, r#""kind": "next""#, r#""kind": "nll""#, "ctx"]
    {
        assert!(help.contains(part), "{part}: {help}");
    }
    let wrong = output_with_input(fixture.command("eval", &[]).arg("-"), b"{\"name\": 3}\n");
    wrong.failed(1, &["line 1", "not a case"]);
    // A likelihood over no token at all is no result.
    let short = br#"{"name": "s", "kind": "nll", "text": "hi", "ctx": 5}"#;
    output_with_input(fixture.command("eval", &[]).arg("-"), short).failed(1, &["ctx", "tokens in the text"]);
}

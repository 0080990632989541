//! Lists, formats and encoders of `quadriga bench`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Fixture, output};
use serde_json::Value;

#[test]
fn lists_measure_every_combination() {
    let fixture = Fixture::new(&["--no-vocab"]);
    let flags = ["-p", "4,8", "-n", "2", "-d", "0,3", "-t", "1,2", "-r", "1", "-ngl", "0"];
    let bench = |more: &[&str]| output(fixture.command("bench", &flags).args(more)).success().out;
    let rows: Value = serde_json::from_str(&bench(&["-o", "json"])).unwrap();
    let rows = rows.as_array().unwrap();
    let row = |row: &Value| {
        let test = if row["pp"].is_null() { &row["tg"] } else { &row["pp"] };
        (row["threads"].as_u64().unwrap(), row["depth"].as_u64().unwrap(), test["n"].as_u64().unwrap())
    };
    let wanted: Vec<_> = [1, 2]
        .into_iter()
        .flat_map(|t| [0, 3].into_iter().flat_map(move |d| [4, 8, 2].map(|n| (t, d, n))))
        .collect();
    assert_eq!(rows.iter().map(row).collect::<Vec<_>>(), wanted);
    assert!(rows.iter().all(|row| row["gpu_layers"] == "0"));
    let markdown = bench(&["-o", "md"]);
    assert_eq!(markdown.lines().count(), 2 + 12, "{markdown}");
    assert!(markdown.starts_with("| model | size |") && markdown.contains("| pp8 @ 3 |"), "{markdown}");
    let csv = bench(&["-o", "csv"]);
    assert!(csv.lines().count() == 13 && csv.contains("\"tiny\",") && csv.contains("\"tg2 @ 3\""), "{csv}");
    let table = bench(&[]);
    assert!(table.matches("tok/s").count() == 2 && table.contains("(2 threads, "), "{table}");
}

#[test]
fn an_encoder_has_prompts_only() {
    let fixture = Fixture::new(&["--arch", "bert", "--context", "64", "--no-vocab"]);
    let table = output(&mut fixture.command("bench", &["-p", "100,16", "-r", "2"])).success().out;
    assert!(table.contains("pp100") && table.contains("pp16") && !table.contains("tg"), "{table}");
    let json = output(&mut fixture.command("bench", &["-p", "16", "-r", "1", "--json"])).success().out;
    let json: Value = serde_json::from_str(&json).unwrap();
    assert!(json["tg"].is_null() && json["pp"]["tok_s"].as_f64().unwrap() > 0.0, "{json}");
    output(&mut fixture.command("bench", &["-p", "0"])).failed(2, &["encoder only has prompts"]);
}

#[test]
fn a_benchmark_can_do_without_a_warm_up() {
    let fixture = Fixture::new(&["--no-vocab"]);
    let bench =
        output(&mut fixture.command("bench", &["-p", "4", "-n", "0", "-r", "2", "--no-warmup", "--json"]));
    let bench = bench.success();
    let json: Value = serde_json::from_str(&bench.out).unwrap();
    assert_eq!(json["pp"]["samples"].as_array().unwrap().len(), 2);
    assert_eq!(bench.err, "");
    let run = output(&mut Fixture::new(&[]).command("run", &["hi", "-n", "1", "--no-warmup"])).success();
    assert!(run.err.contains("--no-warmup has no effect: only bench warms up"), "{run:?}");
}

#[test]
fn streams_are_measured_together() {
    let fixture = Fixture::new(&["--no-vocab"]);
    let flags = ["--streams", "1,3,8", "-p", "70", "-n", "5", "-r", "2", "-ngl", "0", "-b", "64"];
    let json = output(fixture.command("bench", &flags).arg("--json")).success().out;
    let json: Value = serde_json::from_str(&json).unwrap();
    let rows = json["streams"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| row["n"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 3, 8]);
    for row in rows {
        assert!(
            row["prefill_tok_s"].as_f64().unwrap() > 0.0 && row["decode_tok_s"].as_f64().unwrap() > 0.0,
            "{row}"
        );
        assert_eq!(row["decode"]["samples"].as_array().unwrap().len(), 2);
    }
    let table = output(&mut fixture.command("bench", &flags)).success().out;
    assert!(
        table.contains("streams") && table.contains("pp70 tok/s") && table.lines().count() >= 8,
        "{table}"
    );
    output(&mut fixture.command("bench", &["--streams", "2", "-p", "0"])).failed(2, &["--streams", "-p"]);
    output(&mut fixture.command("bench", &["--streams", "2", "-c", "20"])).failed(2, &["-c 20"]);
}

#[test]
fn requests_that_arrive_at_random_are_measured() {
    let fixture = Fixture::new(&["--no-vocab"]);
    let flags =
        ["--arrivals", "1000", "--requests", "9", "-p", "70", "--shared", "64", "-n", "5", "--parallel", "4"];
    let json = output(fixture.command("bench", &flags).arg("--json")).success().out;
    let json: Value = serde_json::from_str(&json).unwrap();
    for times in ["first_token_ms", "between_tokens_ms"] {
        let [p50, p99] = ["p50", "p99"].map(|p| json[times][p].as_f64().unwrap());
        assert!(p50 > 0.0 && p99 >= p50, "{json}");
    }
    assert!(json["tok_s"].as_f64().unwrap() > 0.0 && json["cached_tokens"].as_u64().unwrap() >= 64, "{json}");
    let table = output(&mut fixture.command("bench", &flags)).success().out;
    assert!(table.contains("to the first token") && table.contains("p99"), "{table}");
    output(&mut fixture.command("bench", &["--arrivals", "5", "-p", "8", "--shared", "8"]))
        .failed(2, &["--shared"]);
}

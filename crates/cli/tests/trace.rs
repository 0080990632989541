//! `--trace` and `--stats`: traces are valid, complete, and add up.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::path::Path;

use crate::common::{Fixture, output, quadriga};
use quadriga_llm::default_model;
use serde_json::Value;

/// A parsed trace file.
struct Events {
    all: Vec<Value>,
    seconds: f64,
}

impl Events {
    /// Reads a file and checks the fields that Chrome's format requires of every event.
    fn read(path: &Path) -> Events {
        let file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let all = file["traceEvents"].as_array().unwrap().clone();
        for event in &all {
            let phase = event["ph"].as_str().unwrap();
            assert!(event["name"].is_string() && event["pid"].is_u64(), "{event}");
            if phase != "M" {
                assert!(event["ts"].as_f64().unwrap() >= 0.0, "{event}");
            }
            match phase {
                // Complete events have their duration.
                "X" => assert!(event["dur"].as_f64().unwrap() >= 0.0 && event["tid"].is_u64(), "{event}"),
                "M" => assert!(event["args"].is_object(), "{event}"),
                "C" => assert!(event["args"].as_object().unwrap().values().all(Value::is_u64), "{event}"),
                "i" => assert_eq!(event["s"], "p", "{event}"),
                "s" | "t" | "f" => assert!(event["id"].is_u64() && event["cat"] == "copy", "{event}"),
                other => panic!("{other}: {event}"),
            }
        }
        Events { all, seconds: file["otherData"]["seconds"].as_f64().unwrap() }
    }

    fn of(&self, phase: &str) -> impl Iterator<Item = &Value> {
        self.all.iter().filter(move |event| event["ph"] == phase)
    }

    fn lane(&self, name: &str) -> u64 {
        let found = self.of("M").find(|e| e["name"] == "thread_name" && e["args"]["name"] == name);
        found.unwrap_or_else(|| panic!("no lane {name}"))["tid"].as_u64().unwrap()
    }

    /// The slices of each lane with start, end and depth. Slices of a lane are disjoint or nested.
    fn lanes(&self) -> BTreeMap<u64, Vec<(f64, f64, usize, &Value)>> {
        let mut lanes: BTreeMap<u64, Vec<(f64, f64, usize, &Value)>> = BTreeMap::new();
        for event in self.of("X") {
            let (start, length) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
            lanes.entry(event["tid"].as_u64().unwrap()).or_default().push((start, start + length, 0, event));
        }
        for slices in lanes.values_mut() {
            slices.sort_by(|a, b| a.0.total_cmp(&b.0).then(b.1.total_cmp(&a.1)));
            let mut open: Vec<f64> = Vec::new();
            for (start, end, depth, event) in slices.iter_mut() {
                // Times are rounded to nanoseconds.
                while open.last().is_some_and(|last| *last <= *start + 2e-3) {
                    open.pop();
                }
                assert!(
                    open.last().is_none_or(|last| *end <= *last + 2e-3),
                    "{event} is not nested in its parent"
                );
                *depth = open.len();
                open.push(*end);
            }
        }
        lanes
    }
}

fn sum<'a>(slices: impl IntoIterator<Item = &'a (f64, f64, usize, &'a Value)>) -> f64 {
    slices.into_iter().map(|(start, end, ..)| (end - start) * 1e-6).sum()
}

#[track_caller]
fn agrees(part: f64, whole: f64, what: &str) {
    assert!((part - whole).abs() <= 0.05 * whole, "{what}: {part} s of {whole} s");
}

#[test]
fn a_trace_of_the_default_model_adds_up() {
    let fixture = tempfile::tempdir().unwrap();
    let path = fixture.path().join("trace.json");
    let model = default_model::fetch(None, &mut |_| ControlFlow::Continue(())).unwrap();
    let mut run =
        quadriga(["run", "-p", "Why is the sky blue?", "-n", "12", "--temp", "0", "--device", "cpu"]);
    run.arg("-m").arg(&model).arg("--trace-ops").arg("--trace").arg(&path);
    output(&mut run).success();
    let events = Events::read(&path);
    let lanes = events.lanes();
    let (host, cpu) = (&lanes[&events.lane("host")], &lanes[&events.lane("cpu")]);
    // The host's slices cover the whole recording.
    agrees(sum(host), events.seconds, "the host's slices");
    // Only the CPU computes: its splits fill the runs, its operations fill the splits.
    let is_run = |event: &Value| event["args"]["seconds"].is_number();
    let runs = sum(host.iter().filter(|(.., event)| is_run(event)));
    let splits = sum(cpu.iter().filter(|(_, _, depth, _)| *depth == 0));
    let operations = sum(cpu.iter().filter(|(_, _, depth, _)| *depth == 1));
    agrees(splits, runs, "splits");
    agrees(operations, splits, "operations");
    assert_eq!(host.iter().filter(|(.., event)| is_run(event)).count(), 12);
    assert_eq!(events.of("i").count(), 11, "an event for every token that was fed back");
    let names: Vec<&str> = cpu.iter().filter_map(|(.., event)| event["name"].as_str()).collect();
    assert!(
        names.contains(&"attention") && names.iter().any(|name| name.starts_with("mul_mat")),
        "{names:?}"
    );
}

#[test]
fn copies_are_flows_between_the_lanes_of_two_devices() {
    let fixture = Fixture::new(&["--layers", "3"]);
    let path = fixture.path("trace.json");
    let flags =
        ["-p", "hello", "-n", "4", "--temp", "0", "--device", "sim", "-ngl", "2", "--trace-ops", "--trace"];
    output(fixture.command("run", &flags).arg(&path)).success();
    let events = Events::read(&path);
    let lanes = events.lanes();
    for name in ["host", "sim:0", "cpu", "sim:0 copies in"] {
        assert!(!lanes[&events.lane(name)].is_empty(), "{name}");
    }
    // Every flow starts, continues and ends in a slice.
    let mut flows: HashMap<u64, Vec<(&str, u64, f64)>> = HashMap::new();
    for event in events.all.iter().filter(|event| event["cat"] == "copy") {
        let (phase, lane) = (event["ph"].as_str().unwrap(), event["tid"].as_u64().unwrap());
        let at = event["ts"].as_f64().unwrap();
        flows.entry(event["id"].as_u64().unwrap()).or_default().push((phase, lane, at));
        assert!(
            lanes[&lane].iter().any(|(start, end, ..)| *start - 2e-3 <= at && at <= *end + 2e-3),
            "{event} is in no slice"
        );
    }
    let copies = events.of("X").filter(|event| event["args"]["bytes"].is_number()).count();
    assert!(copies > 0 && flows.len() == copies, "{copies} copies, {} flows", flows.len());
    for flow in flows.values() {
        let phases: Vec<&str> = flow.iter().map(|(phase, ..)| *phase).collect();
        assert!(phases == ["s", "t", "f"] || phases == ["s", "f"], "{phases:?}");
    }
    let memory = events.of("C").filter(|event| event["name"] == "memory of cpu");
    assert!(memory.filter(|event| event["args"]["compute"].as_u64() > Some(0)).count() > 4);
    // No temporary file is left.
    let left: Vec<_> =
        std::fs::read_dir(fixture.folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().contains("tmp")), "{left:?}");
    let nowhere = output(&mut fixture.command("run", &["-p", "hello", "--trace", "no/such/folder/t.json"]));
    nowhere.failed(1, &["no/such/folder"]);
    output(&mut fixture.command("run", &["-p", "hello", "--trace-ops"])).failed_usage();
}

#[test]
fn statistics_have_time_by_device_split_and_operation() {
    let fixture = Fixture::new(&["--layers", "3"]);
    let flags = ["-p", "hello there", "-n", "6", "--temp", "0", "--device", "sim", "-ngl", "2", "--stats"];
    let text = output(&mut fixture.command("run", &flags)).success().err;
    for part in ["device", "compute", "idle", "token: split 1 on", "mul_mat", "copies of", "not measured"] {
        assert!(text.contains(part), "{part:?} is missing: {text}");
    }
    let json = output(fixture.command("run", &flags).arg("--json")).success().out;
    let stats = &serde_json::from_str::<Value>(&json).unwrap()["stats"];
    assert_eq!(stats["runs"], 6);
    let seconds = |table: &str| -> f64 {
        stats[table].as_object().unwrap().values().map(|row| row["seconds"].as_f64().unwrap()).sum()
    };
    let computing: f64 =
        stats["backends"].as_array().unwrap().iter().map(|b| b["compute"].as_f64().unwrap()).sum();
    assert!((seconds("splits") - computing).abs() < 1e-6);
    assert!(seconds("operations") <= computing && seconds("operations") > 0.0);
    let bench = ["-p", "8", "-n", "2", "-r", "1", "-t", "1", "--stats", "--json"];
    let json: Value =
        serde_json::from_str(&output(&mut fixture.command("bench", &bench)).success().out).unwrap();
    assert_eq!(json["stats"]["runs"], 2 * 3);
}

#[test]
fn limits_are_measured_once_and_stored() {
    let folder = tempfile::tempdir().unwrap();
    let mut measure = quadriga(["devices", "--measure", "--json", "--cache-dir"]);
    let measured: Value = serde_json::from_str(&output(measure.arg(folder.path())).success().out).unwrap();
    let limits = &measured["devices"][0]["limits"];
    assert!(limits["conditions"]["working_set"].as_u64().unwrap() >= 1 << 20, "{limits}");
    for limit in ["read", "cache", "int8", "bf16", "f32"] {
        assert!(limits[limit].as_f64().unwrap() > 1e6, "{limits}");
    }
    let curve = limits["read_curve"].as_array().unwrap();
    assert!(curve.len() > 1 && curve.iter().all(|point| point["rate"].as_f64().unwrap() > 1e6), "{limits}");
    assert!((0.0..1e-2).contains(&limits["launch"].as_f64().unwrap()), "{limits}");
    let kept = output(quadriga(["devices", "--cache-dir"]).arg(folder.path())).success().out;
    assert!(
        kept.contains("8-bit weights") && kept.contains(", cache ") && kept.contains("(spread "),
        "{kept}"
    );
    // They belong to the number of threads that they were measured with.
    let cores = std::thread::available_parallelism().unwrap().get();
    let other = (cores + 1).to_string();
    let other = output(quadriga(["devices", "-t", &other, "--cache-dir"]).arg(folder.path())).success().out;
    let cpu = other.lines().take_while(|line| !line.starts_with("cuda") && !line.starts_with("sim"));
    assert!(!cpu.collect::<String>().contains("8-bit weights"), "{other}");
    let fixture = Fixture::new(&[]);
    let flags = ["-p", "hello", "-n", "2", "--stats", "--device", "cpu", "--cache-dir"];
    let text = output(fixture.command("run", &flags).arg(folder.path())).success().err;
    assert!(text.contains("measured limits") && !text.contains("not measured"), "{text}");
}

//! Trace events and statistics of simulated devices, whose clocks are exact.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use quadriga_graph::{AttentionOptions, DType, Data, GraphBuilder, Weight};
use quadriga_runtime::{Backend, Cost, Detail, DeviceKind, Plan, Scheduler, Trace};
use quadriga_sim::Sim;
use quadriga_view::{ChromeTrace, Conditions, Limits, Statistics, TracedRun};
use serde_json::Value;

/// Two matmuls on one device, two on another; a node takes 2 s, a copy 3 s.
fn run() -> (Vec<Arc<dyn Backend>>, Plan, Trace) {
    let g = GraphBuilder::new();
    let mut x = g.input("x", DType::F32, [4, 8]);
    for layer in 0..4 {
        let _scope = g.scope(&format!("blk.{layer}"));
        let ones = Data::from([1.0f32; 64].as_slice());
        x = g.weight(&format!("w.{layer}"), Weight::with_data(DType::F32, [8, 8], ones)).mul_mat(x);
    }
    g.output("y", x);
    let devices: Vec<Arc<dyn Backend>> =
        ["a", "b"].map(|name| Sim::new(name).node_seconds(2.0).copy_seconds(3.0, 0.0).build()).to_vec();
    let plan = Scheduler::new(devices.clone())
        .place(|name| Some(name.strip_prefix("w.")?.parse::<usize>().ok()? / 2))
        .plan(g.finish().unwrap())
        .unwrap();
    let mut session = plan.session().unwrap();
    session.set("x", [1.0f32; 32].as_slice()).unwrap();
    let trace = session.debug().trace(Detail::Operations).unwrap();
    (devices, plan, trace)
}

#[test]
fn a_trace_has_slices_flows_and_counters_at_exact_times() {
    let (devices, plan, trace) = run();
    let mut file = ChromeTrace::new(Vec::new(), &devices).unwrap();
    for start in [10.0, 40.0] {
        file.run(&TracedRun { plan: &plan, trace: &trace, start, name: "a \"run\"" }).unwrap();
    }
    file.token("\"the\" at 3", 41.0).unwrap();
    let text = String::from_utf8(file.finish(60.0).unwrap()).unwrap();
    let json: Value = serde_json::from_str(&text).unwrap();
    let events = json["traceEvents"].as_array().unwrap();
    let of = |phase: &str| events.iter().filter(|e| e["ph"] == phase).collect::<Vec<_>>();
    let at = |name: &str| -> Vec<(f64, f64)> {
        let named = of("X").into_iter().filter(|e| e["name"] == name);
        named.map(|e| (e["ts"].as_f64().unwrap() / 1e6, e["dur"].as_f64().unwrap() / 1e6)).collect()
    };
    // Copying the input takes 3 s, but it is small and goes through the compute queue, whose clock starts after it; the
    // clock of the other device starts earlier.
    assert_eq!(at("split 0"), [(10.0, 4.0), (40.0, 4.0)]);
    let copied = &at("b#blk.1.mul_mat#1");
    assert_eq!(copied, &[(17.0, 3.0), (47.0, 3.0)]);
    assert_eq!(at("split 1"), [(20.0, 4.0), (50.0, 4.0)]);
    assert_eq!(at("mul_mat").len(), 8);
    assert_eq!(at("a \"run\"").len(), 2);
    let flows: Vec<(&str, f64)> = events
        .iter()
        .filter(|e| e["id"] == 1)
        .map(|e| (e["ph"].as_str().unwrap(), e["ts"].as_f64().unwrap()))
        .collect();
    assert_eq!(flows, [("s", 14e6 - 0.001), ("t", 17e6), ("f", 20e6)]);
    // The counter's peak is the lower bound in the plan.
    let peak = of("C").into_iter().filter(|e| e["name"] == "memory of a");
    let peak = peak.filter_map(|e| e["args"]["compute"].as_u64()).max();
    assert_eq!(peak, Some(plan.explain().backends[0].lower_bound));
    assert_eq!(of("i")[0]["name"], "\"the\" at 3");
    assert_eq!(json["otherData"]["seconds"], 60.0);
}

#[test]
fn statistics_add_up_and_are_compared_with_the_limits() {
    let (devices, plan, trace) = run();
    let mut statistics = Statistics::new(&devices, &limits(&devices, Conditions::default()));
    statistics.add("prompt", &plan, &trace, 1.0);
    statistics.add("token", &plan, &trace, 1.0);
    let splits = statistics.splits();
    let first = &splits["prompt: split 0 on a"];
    assert_eq!((first.count, first.seconds), (1, 4.0));
    // Two matmuls of 4 × 8 by 8 × 8.
    let one = Cost::of(plan.graph(), plan.splits().nodes_of(0)[0]);
    assert_eq!((one.operations, one.traffic), (2 * 4 * 8 * 8, 4 * (32 + 64 + 32)));
    assert_eq!((first.operations, first.traffic), (1024.0, 1024.0));
    assert_eq!((first.min_compute_seconds, first.min_memory_seconds), (2.0, 8.0));
    assert_eq!((first.bandwidth(), first.speed()), (256.0, 256.0));
    let matmuls = &statistics.operations()["mul_mat on b"];
    assert_eq!((matmuls.count, matmuls.seconds), (4, 8.0));
    let text = statistics.to_string();
    for part in ["2 runs", "token: split 1 on b", "2 copies of 128 B on average in 6.0 s", "50 %", "200 %"] {
        assert!(text.contains(part), "{part:?} is missing: {text}");
    }
}

/// Attention over a KV cache of 8 slots; a token that sees half of them costs half.
#[test]
fn attention_counts_the_visible_part_of_the_cache() {
    let g = GraphBuilder::new();
    let q = g.input("q", DType::F32, [1, 2, 1, 8]);
    let [k, v] = ["k", "v"].map(|name| g.input(name, DType::F32, [1, 2, 8, 8]));
    g.output("y", q.attention(k, v, AttentionOptions::new()).sqr());
    let device: Arc<dyn Backend> = Sim::new("a").node_seconds(2.0).build();
    let plan = Scheduler::new([Arc::clone(&device)]).plan(g.finish().unwrap()).unwrap();
    let mut session = plan.session().unwrap();
    for (name, len) in [("q", 16), ("k", 128), ("v", 128)] {
        session.set(name, vec![1.0f32; len].as_slice()).unwrap();
    }
    let trace = session.debug().trace(Detail::Operations).unwrap();
    let [attention, square] = [0, 1].map(|node| Cost::of(plan.graph(), plan.splits().nodes_of(0)[node]));
    let totals = |visible: f64| {
        let mut statistics = Statistics::new(std::slice::from_ref(&device), &[]);
        statistics.add("token", &plan, &trace, visible);
        statistics.splits()["token: split 0 on a"]
    };
    for visible in [1.0, 0.5, 0.0] {
        let totals = totals(visible);
        assert_eq!(totals.traffic, attention.traffic as f64 * visible + square.traffic as f64);
        assert_eq!(totals.operations, attention.operations as f64 * visible + square.operations as f64);
    }
}

/// Limits of 128 B/s and 512 op/s, measured under these conditions.
fn limits(devices: &[Arc<dyn Backend>], conditions: Conditions) -> Vec<Limits> {
    let of = |device: &Arc<dyn Backend>| Limits {
        read: 128.0,
        cache: 1024.0,
        f32: 512.0,
        measured: true,
        conditions,
        ..Limits::nominal(device.name(), &device.device().description, DeviceKind::Simulated)
    };
    devices.iter().map(of).collect()
}

#[test]
fn shares_above_the_peak_and_disturbed_limits_are_marked() {
    let (devices, plan, trace) = run();
    let text = |limits: &[Limits]| {
        let mut statistics = Statistics::new(&devices, limits);
        statistics.add("prompt", &plan, &trace, 1.0);
        statistics.to_string()
    };
    let calm = text(&limits(&devices, Conditions::default()));
    let row = calm.lines().find(|line| line.starts_with("prompt: split 0 on a")).unwrap();
    let columns: Vec<&str> = row.split_whitespace().collect();
    // Twice the memory's limit, half of the arithmetic's: the table has count, time, share, B/s, of peak, op/s, of peak.
    // The share of the time is that of the host's clock.
    assert_eq!(columns.get(5..8), Some(&["1", "4.0", "s"][..]), "{row}");
    assert_eq!(columns.get(10..), Some(&["256", "200", "%!", "256", "50", "%"][..]), "{row}");
    assert!(row.contains("200 %!") && row.contains("50 %"), "{row}");
    assert!(calm.contains("! above the measured limit"), "{calm}");
    assert!(calm.contains("a: measured limits: memory 128B/s, cache 1.0 kB/s;"), "{calm}");
    let busy = Conditions { others: 0.45, ..Conditions::default() };
    let disturbed = text(&limits(&devices, busy));
    assert!(
        disturbed.contains("measured limits, disturbed: other processes used 45 % of the CPUs"),
        "{disturbed}"
    );
    // Without measured limits there are no shares at all.
    let nominal = text(&[]);
    assert!(!nominal.contains('!') && nominal.contains("not measured"), "{nominal}");
}

#[test]
fn limits_of_another_device_are_not_used() {
    let (devices, ..) = run();
    let other = Limits { measured: true, ..Limits::nominal("a", "another machine", DeviceKind::Cpu) };
    assert!(!Limits::of(&*devices[0], std::slice::from_ref(&other)).measured);
    let same = Limits { device: devices[0].device().description, ..other };
    assert!(Limits::of(&*devices[0], &[same]).measured);
}

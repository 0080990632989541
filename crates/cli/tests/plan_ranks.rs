//! `quadriga plan --ranks` says what each rank would hold and how fast all would be, without starting any.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{output, quadriga};
use serde_json::Value;

fn plan(options: &[&str]) -> Value {
    let command = ["plan", "--preset", "8b", "--type", "q4_k", "-c", "4096", "-q", "--json"];
    let out = output(quadriga(command).args(options)).success().out;
    serde_json::from_str(&out).unwrap()
}

#[test]
fn each_rank_holds_at_most_its_share_and_five_percent() {
    for (ranks, tensor, pipeline) in [(2, 2, 1), (8, 8, 1), (8, 4, 2)] {
        let how = format!("tensor={tensor},pipeline={pipeline}");
        let report = plan(&["--ranks", &ranks.to_string(), "--parallelism", &how]);
        let (chosen, alone) = (&report["chosen"], &report["alone"]["ranks"][0]);
        let all = chosen["ranks"].as_array().unwrap();
        assert_eq!((all.len(), chosen["tensor"].as_u64()), (ranks, Some(tensor)));
        for rank in all {
            for part in ["weights", "cache"] {
                let (own, whole) = (rank[part].as_f64().unwrap(), alone[part].as_f64().unwrap());
                assert!(own > 0.0 && own <= 1.05 * whole / ranks as f64, "{how}, {part}: {rank}");
            }
            assert!(rank["sent_per_token"].as_u64().unwrap() > 0, "{rank}");
        }
    }
}

/// Weights and KV cache of the largest rank, as a multiple of its share, with the reasons if that is more than 5 %.
fn largest_share(plan: &Value, alone: &Value) -> (f64, String) {
    let held = |rank: &Value| rank["weights"].as_f64().unwrap() + rank["cache"].as_f64().unwrap();
    let ranks = plan["ranks"].as_array().unwrap();
    let most = ranks.iter().map(held).fold(0.0, f64::max);
    let share = most * ranks.len() as f64 / held(&alone["ranks"][0]);
    let said = plan["largest_share"].as_f64().unwrap();
    assert!((said / share - 1.0).abs() < 1e-9, "{said} is {share}");
    let reasons = plan["uneven"].as_array().unwrap();
    assert_eq!(share > 1.05, !reasons.is_empty(), "{share}: {reasons:?}");
    (share, reasons.iter().map(|reason| reason.as_str().unwrap()).collect::<Vec<_>>().join("; "))
}

#[test]
fn ranks_hold_their_share_of_weights_and_kv_cache_or_the_plan_says_why_not() {
    let tied = "the first and the last stage both have it";
    let heads = "3 KV heads cannot be divided evenly among 2 ranks";
    let layers = "layers, heads and experts are not divided more finely";
    // A model, ranks, and of each division the most and a reason.
    type Divisions = &'static [(&'static str, f64, usize)];
    let reasons = ["", tied, heads, layers];
    let cases: &[(&[&str], &str, Divisions)] = &[
        (&[], "2", &[("tensor=2", 1.16, 2), ("pipeline=2", 1.34, 1)]),
        (&[], "4", &[("tensor=2,pipeline=2", 1.5, 2), ("pipeline=4", 1.38, 1)]),
        (&["--preset", "8b", "--type", "q4_k"], "4", &[("tensor=4", 1.05, 0), ("pipeline=4", 1.05, 0)]),
        (
            &["--preset", "70b", "--type", "q4_0"],
            "8",
            &[("tensor=8", 1.05, 0), ("tensor=2,pipeline=4", 1.05, 0), ("pipeline=8", 1.08, 3)],
        ),
        (
            &["--preset", "671b", "--type", "q4_0"],
            "8",
            &[("tensor=8", 1.05, 0), ("tensor=4,pipeline=2", 1.05, 0)],
        ),
    ];
    for (model, ranks, divisions) in cases {
        for (how, most, reason) in *divisions {
            let options = [
                "plan",
                "-c",
                "4096",
                "-q",
                "--json",
                "--device",
                "cpu",
                "--ranks",
                ranks,
                "--parallelism",
                how,
            ];
            let out = output(quadriga(options).args(*model)).success().out;
            let report: Value = serde_json::from_str(&out).unwrap();
            let (share, why) = largest_share(&report["chosen"], &report["alone"]);
            assert!(share <= *most, "{model:?} on {how}: {share}, {why}");
            assert!(
                why.contains(reasons[*reason]) && why.is_empty() == (*reason == 0),
                "{model:?} on {how}: {why}"
            );
        }
    }
    let out =
        output(&mut quadriga(["plan", "-c", "4096", "-q", "--device", "cpu", "--ranks", "2"])).success().out;
    assert!(out.contains("times its share of weights and KV cache: 3 KV heads"), "{out}");
}

/// Ends hold the embedding and the output matrix, so that they have fewer layers; but of the layers, most memory is KV cache.
#[test]
fn the_kv_cache_decides_how_many_layers_a_stage_has() {
    let layers = |context: &str| -> Vec<usize> {
        let options =
            ["plan", "-q", "--json", "--device", "cpu", "--ranks", "4", "--parallelism", "pipeline", "-c"];
        let out = output(quadriga(options).arg(context)).success().out;
        let report: Value = serde_json::from_str(&out).unwrap();
        let count = |rank: &Value| {
            let numbers: Vec<usize> = rank["holds"]
                .as_str()
                .unwrap()
                .split_whitespace()
                .filter_map(|word| word.parse().ok())
                .collect();
            numbers[1] + 1 - numbers[0]
        };
        report["chosen"]["ranks"].as_array().unwrap().iter().map(count).collect()
    };
    let (short, long) = (layers("64"), layers("8192"));
    assert_eq!((short.iter().sum::<usize>(), long.iter().sum::<usize>()), (30, 30));
    assert!(short[0] <= 3 && long[0] >= 6, "{short:?} {long:?}");
}

#[test]
fn one_rank_is_shown_as_a_machine_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let command =
        ["plan", "--preset", "8b", "--type", "q4_k", "-c", "4096", "--device", "cpu", "--ranks", "4"];
    let tensor = ["--parallelism", "tensor=2,pipeline=2", "--rank", "3"];
    let svg = folder.path().join("rank.svg");
    let shown = output(quadriga(command).args(tensor).arg("--check").arg("--svg").arg(&svg)).success();
    assert!(shown.err.contains("rank 3 of 4 (tensor=2,pipeline=2) has layers"), "{shown:?}");
    assert!(!shown.err.contains("only"), "a quarter fits: {shown:?}");
    assert!(std::fs::read_to_string(&svg).unwrap().contains("all_reduce"), "the picture has collectives");
    let nodes = output(quadriga(command).args(tensor).args(["--nodes", "-q"])).success().out;
    assert!(nodes.contains("all_reduce") && nodes.contains("receive"), "{nodes}");
    let dot = output(quadriga(command).args(tensor).args(["--dot", "-q"])).success().out;
    assert!(dot.starts_with("digraph") && dot.contains("32 × all_reduce"), "{dot}");
    for (wrong, said) in [(&["--svg", "x.svg"][..], "--rank"), (&["--rank", "4"], "ranks 0 to 3")] {
        let refused = output(quadriga(command).args(wrong));
        assert_eq!(refused.code, Some(2), "{refused:?}");
        assert!(refused.err.contains(said), "{refused:?}");
    }
}

#[test]
fn memory_is_said_of_a_ranks_part() {
    let command =
        ["plan", "--preset", "671b", "--type", "q4_0", "-c", "4096", "--device", "cpu", "--ranks", "2"];
    let shown = output(quadriga(command).args(["--parallelism", "pipeline"])).success();
    assert!(!shown.err.contains("cpu needs"), "{}", shown.err);
    assert!(shown.err.contains("quadriga: rank ") && shown.err.contains("this machine has"), "{}", shown.err);
}

#[test]
fn latency_and_bandwidth_are_told_apart() {
    let latency = |link: &str, how: &str| {
        let report = plan(&["--ranks", "8", "--link", link, "--parallelism", how]);
        let rank = &report["chosen"]["ranks"][0];
        let [all, latency] = ["link_seconds", "link_latency_seconds"].map(|of| rank[of].as_f64().unwrap());
        assert!(latency < all);
        (latency, report["chosen"]["exchanges"].as_f64().unwrap())
    };
    // An all-reduce of 8 ranks has 6 steps; the gathered logits have 3.
    let (seconds, exchanges) = latency("25G,10us", "tensor=8");
    assert!(
        (seconds / (10e-6 * (6.0 * (exchanges - 1.0) + 3.0)) - 1.0).abs() < 1e-6,
        "{seconds} {exchanges}"
    );
    assert!((latency("400G,10us", "tensor=8").0 / seconds - 1.0).abs() < 1e-9, "whatever the bandwidth");
}

#[test]
fn the_link_decides_how_ranks_divide_the_model() {
    let fast = plan(&["--ranks", "4", "--link", "200G,2us"]);
    assert_eq!(fast["chosen"]["tensor"], 4, "{fast}");
    let speed = |plan: &Value| plan["decode_tokens_per_second"].as_f64().unwrap();
    assert!(speed(&fast["chosen"]) > 3.0 * speed(&fast["alone"]), "{fast}");
    assert!(speed(&fast["chosen"]) < 4.0 * speed(&fast["alone"]), "{fast}");
    let slow = plan(&["--ranks", "4", "--link", "1M,50ms"]);
    assert_eq!(slow["chosen"]["tensor"], 1, "{slow}");
}

/// Ranks compare divisions before any is planned, by another estimate: it has to come to the same.
#[test]
fn ranks_choose_by_themselves_what_the_plan_explains() {
    let dense: &[&str] = &["--preset", "8b", "--type", "q4_k"];
    let experts: &[&str] = &["--preset", "30b-a3b", "--type", "q4_k"];
    for (model, link, parallel, ranks) in [
        (dense, "25G", "1", "4"),
        (dense, "200G,2us", "1", "4"),
        (dense, "200G,2us", "64", "4"),
        (dense, "2G,10us", "1", "2"),
        (dense, "2G,10us", "64", "2"),
        (dense, "1M,50ms", "1", "4"),
        (dense, "memory", "32", "2"),
        (experts, "25G", "1", "2"),
        (experts, "200G,2us", "32", "4"),
        (experts, "1M,50ms", "32", "4"),
        (experts, "memory", "1", "4"),
    ] {
        let options = ["-c", "4096", "-q", "--json", "--device", "cpu", "-t", "1", "--ranks", ranks];
        let more = ["--link", link, "--parallel", parallel];
        let out = output(quadriga(["plan"]).args(model).args(options).args(more)).success().out;
        let report: Value = serde_json::from_str(&out).unwrap();
        let number = |of: &str| report["chosen"][of].as_u64().unwrap();
        let chosen = format!("tensor={},pipeline={}", number("tensor"), number("pipeline"));
        let speed = |plan: &Value| plan["requests_tokens_per_second"].as_f64().unwrap();
        let others: Vec<String> = report["others"]
            .as_array()
            .unwrap()
            .iter()
            .chain([&report["chosen"]])
            .map(|plan| {
                format!("tensor={},pipeline={}: {:.1} tok/s", plan["tensor"], plan["pipeline"], speed(plan))
            })
            .collect();
        assert_eq!(report["ranks_choose"], chosen, "{model:?} over {link}, {parallel} at once: {others:?}");
    }
}

#[test]
fn the_text_names_parts_speeds_and_what_is_not_possible() {
    let command = ["plan", "--preset", "8b", "--type", "q4_k", "-c", "4096", "--ranks", "64", "-q"];
    output(quadriga(["plan", "--preset", "8b", "--link", "25G"]).arg("-q"))
        .failed(2, &["--link needs --ranks"]);
    let out = output(quadriga(command).args(["--link", "25G"])).success().out;
    assert!(out.contains("64 ranks over 25 Gbit/s and 10 µs: tensor="), "{out}");
    assert!(out.contains("tok/s") && out.contains("sent by a rank"), "{out}");
    assert!(out.contains("tensor=64,pipeline=1: several ranks: layer 0 has 8 KV heads"), "{out}");
}

#[test]
fn ranks_share_kv_heads_only_where_that_is_asked_for() {
    let command = ["plan", "--preset", "gemma3-270m", "-c", "4096", "--ranks", "2", "-q", "--json"];
    let report = |options: &[&str]| -> Value {
        serde_json::from_str(&output(quadriga(command).args(options)).success().out).unwrap()
    };
    let auto = report(&[]);
    assert_eq!((&auto["chosen"]["pipeline"], &auto["chosen"]["shares_keys"]), (&2.into(), &false.into()));
    let shared = report(&["--parallelism", "tensor=2"]);
    assert_eq!(shared["chosen"]["shares_keys"], true, "{shared}");
    let holds = shared["chosen"]["ranks"][1]["holds"].as_str().unwrap();
    assert!(holds.contains("1 of 1 KV heads"), "{holds}");
}

/// Ranks wait for each other after attention and after the feed-forward network, so a rank that must have more heads gets no fewer
/// columns for it: the vocabulary makes up for its memory, as long as the output matrix does not take much longer for it.
#[test]
fn columns_are_even_where_heads_cannot_be() {
    let command = ["plan", "--preset", "135m", "--type", "q4_0", "-c", "4096", "-q", "--json"];
    let out = output(quadriga(command).args(["--ranks", "2", "--parallelism", "tensor=2"])).success().out;
    let report: Value = serde_json::from_str(&out).unwrap();
    let weights = |rank: usize| report["chosen"]["ranks"][rank]["weights"].as_f64().unwrap();
    // Both have all norms.
    let mean = (weights(0) + weights(1)) / 2.0;
    for (rank, heads) in [(0, "2 of 3 KV heads"), (1, "1 of 3 KV heads")] {
        let of = &report["chosen"]["ranks"][rank];
        let holds = of["holds"].as_str().unwrap();
        assert!(holds.contains(heads) && holds.contains("768 of 1536 feed-forward columns"), "{holds}");
        assert!(weights(rank) <= 1.05 * mean, "{of}");
    }
}

/// Limits of the CPU with so many threads: working sets and rates.
fn limits(threads: &str, points: &[(f64, f64)]) -> Value {
    let devices = output(&mut quadriga(["devices", "--json", "-t", threads])).success().out;
    let devices: Value = serde_json::from_str(&devices).unwrap();
    let points: Vec<Value> = points
        .iter()
        .map(|(working_set, rate)| serde_json::json!({ "working_set": working_set, "rate": rate }))
        .collect();
    let cpu = &devices["devices"].as_array().unwrap().iter().find(|device| device["name"] == "cpu").unwrap();
    serde_json::json!({
        "backend": "cpu", "device": cpu["description"], "read": 1e9, "cache": 0.0, "int8": 1e15, "bf16": 1e15, "f32": 1e15,
        "read_curve": points, "launch": 1e-12, "measured": true, "conditions": { "working_set": 0, "cache_bytes": null,
        "spread": 0.0, "others": 0.0, "stolen": 0.0, "has_outlier": false },
    })
}

#[test]
fn ranks_of_one_machine_share_its_memory_and_its_caches() {
    let folder = tempfile::tempdir().unwrap();
    let speedup = |limits: &[Value], link: &str, how: &str| {
        std::fs::write(folder.path().join("limits.json"), serde_json::to_string(limits).unwrap()).unwrap();
        // Eight KV heads: two ranks have equal parts.
        let command =
            ["plan", "--preset", "8b", "--type", "q4_0", "-c", "64", "-q", "--json", "--ranks", "2"];
        let options = ["--device", "cpu", "-t", "1", "--link", link, "--parallelism", how, "--cache-dir"];
        let out = output(quadriga(command).args(options).arg(folder.path())).success().out;
        let report: Value = serde_json::from_str(&out).unwrap();
        let speed = |plan: &Value| plan["decode_tokens_per_second"].as_f64().unwrap();
        speed(&report["chosen"]) / speed(&report["alone"])
    };
    let near =
        |found: f64, wanted: f64| assert!((found / wanted - 1.0).abs() < 0.03, "{found}, not {wanted}");
    let one = limits("1", &[(1e6, 40e9)]);
    // What two threads reach together, each rank has half of; on machines of their own they have all.
    let slow = limits("2", &[(1e6, 50e9)]);
    near(speedup(&[one.clone(), slow.clone()], "memory", "tensor"), 1.25);
    near(speedup(&[one.clone(), slow], "10000T,0.0001us", "tensor"), 2.0);
    near(speedup(std::slice::from_ref(&one), "memory", "tensor"), 2.0);
    // Half of the weights, 2.3 GB, fits a cache that all of them do not fit; stages in turn share it.
    let curve = |rate: f64, scale: f64| [(2.5e9 * scale, 2.0 * rate), (2.6e9 * scale, rate)];
    let cached = [limits("1", &curve(40e9, 1.0)), limits("2", &curve(80e9, 2.0))];
    near(speedup(&cached, "memory", "tensor"), 4.0);
    near(speedup(&cached, "memory", "pipeline"), 1.0);
    near(speedup(&cached, "10000T,0.0001us", "pipeline"), 2.0);
}

#[test]
fn stages_compute_different_requests_at_once() {
    let report =
        plan(&["--ranks", "2", "--parallelism", "pipeline", "--parallel", "32", "--link", "100G,2us"]);
    let speed = |plan: &Value, which: &str| plan[which].as_f64().unwrap();
    let (chosen, alone) = (&report["chosen"], &report["alone"]);
    assert_eq!(chosen["requests"], 32);
    let [one, many] = ["decode_tokens_per_second", "requests_tokens_per_second"]
        .map(|which| speed(chosen, which) / speed(alone, which));
    assert!((0.9..1.1).contains(&one), "stages take turns for one request: {one}");
    assert!((1.6..=2.05).contains(&many), "{many}: {report}");
    // Requests at once change nothing for one of them.
    let single = plan(&["--ranks", "2", "--parallelism", "pipeline", "--link", "100G,2us"]);
    let speeds = [&report, &single].map(|report| speed(&report["chosen"], "decode_tokens_per_second"));
    assert!((speeds[0] / speeds[1] - 1.0).abs() < 1e-9, "{speeds:?}");
    // Sums of 32 tokens after every part of a layer cost more over a slow network than they save; those of one do not.
    let auto = |parallel: &str| {
        plan(&["--ranks", "2", "--parallel", parallel, "--link", "2G,10us"])["chosen"]["tensor"].clone()
    };
    assert_eq!([auto("1"), auto("64")], [2, 1]);
    let command =
        ["plan", "--preset", "8b", "--type", "q4_k", "-c", "4096", "--ranks", "2", "--parallel", "64", "-q"];
    let out = output(quadriga(command).args(["--link", "2G,10us"])).success().out;
    assert!(out.contains("64 at once") && out.contains("Stages compute different requests at once"), "{out}");
}

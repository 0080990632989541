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

#[test]
fn the_text_names_parts_speeds_and_what_is_not_possible() {
    let command = ["plan", "--preset", "8b", "--type", "q4_k", "-c", "4096", "--ranks", "64", "-q"];
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
    assert!(holds.contains("18 of 18 KV heads"), "{holds}");
}

/// Ranks wait for each other after attention and after the feed-forward network, so a rank that must have more heads gets no fewer
/// columns for it: the vocabulary makes up for its memory.
#[test]
fn columns_are_even_where_heads_cannot_be() {
    let command = ["plan", "--preset", "135m", "--type", "q4_0", "-c", "4096", "-q", "--json"];
    let out = output(quadriga(command).args(["--ranks", "2", "--parallelism", "tensor=2"])).success().out;
    let report: Value = serde_json::from_str(&out).unwrap();
    let alone = report["alone"]["ranks"][0]["weights"].as_f64().unwrap();
    for (rank, heads) in [(0, "60 of 90 KV heads"), (1, "30 of 90 KV heads")] {
        let of = &report["chosen"]["ranks"][rank];
        let holds = of["holds"].as_str().unwrap();
        assert!(holds.contains(heads) && holds.contains("23040 of 46080 feed-forward columns"), "{holds}");
        assert!(of["weights"].as_f64().unwrap() <= 1.05 * alone / 2.0, "{of}");
    }
}

//! What `plan` says about KV caches, windows, recurrent states and encoders.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Fixture, output};

fn plan(fixture: &Fixture, flags: &[&str]) -> (String, String) {
    let plan = output(&mut fixture.command("plan", flags)).success();
    (plan.out, plan.err)
}

#[test]
fn windows_say_what_their_checkpoints_take() {
    let fixture = Fixture::new(&["--arch", "gemma3", "--layers", "6", "--context", "8192"]);
    let (text, _) = plan(&fixture, &[]);
    // 1024 slots and 4 checkpoints of 511 rows in 5 layers: keys and values of 64 elements in F16.
    let kept = "sliding windows in 5 layers: 3.7 MiB of KV cache instead of 10.0 MiB, 2.5 MiB of it for 4 checkpoints";
    assert!(text.contains(kept), "{text}");
    // With less room there are fewer checkpoints, not a full cache.
    for (context, checkpoints) in
        [("3100", "4 checkpoints"), ("2200", "2 checkpoints"), ("1600", "1 checkpoint ")]
    {
        let (text, _) = plan(&fixture, &["-c", context]);
        assert!(text.contains(&format!("for {checkpoints}")), "-c {context}: {text}");
    }
    let (text, _) = plan(&fixture, &["-c", "1200"]);
    assert!(!text.contains("sliding"), "{text}");
    let one = Fixture::new(&["--arch", "gemma3", "--layers", "1", "--context", "8192"]);
    assert!(plan(&one, &[]).0.contains("windows in 1 layer: "));
}

#[test]
fn recurrent_states_are_counted() {
    let fixture = Fixture::new(&["--arch", "qwen35"]);
    let (text, _) = plan(&fixture, &[]);
    assert!(text.contains("recurrent states of 3 layers: ") && text.contains("for 4 checkpoints"), "{text}");
    let (text, _) = plan(&fixture, &["--checkpoints", "0"]);
    assert!(text.contains("recurrent states") && !text.contains("checkpoint"), "{text}");
}

#[test]
fn a_latent_cache_has_no_values() {
    let fixture = Fixture::new(&["--arch", "deepseek2"]);
    let (text, notes) = plan(&fixture, &["-ctv", "f32"]);
    assert!(text.starts_with("context 4096, KV cache F16 (latent), "), "{text}");
    assert!(notes.contains("-ctv has no effect"), "{notes}");
    let (text, notes) = plan(&fixture, &["-ctk", "f32"]);
    assert!(text.contains("KV cache F32 (latent)") && notes.is_empty(), "{text} {notes}");
}

#[test]
fn an_encoder_has_no_kv_cache() {
    let fixture = Fixture::new(&["--arch", "bert", "--context", "256"]);
    let (text, notes) = plan(&fixture, &[]);
    let first = "encoder without KV cache, texts of up to 256 tokens, planned for a batch of 512 tokens";
    assert_eq!((text.lines().next().unwrap(), notes.as_str()), (first, ""));
    output(&mut fixture.command("plan", &["-c", "257"])).failed(2, &["-c 257", "256 tokens"]);
    output(&mut fixture.command("run", &["hi"])).failed(1, &["bert is an encoder", "quadriga embed"]);
    let embedded = output(&mut fixture.command("embed", &["hi"])).success();
    assert!(!embedded.err.contains("KV cache"), "{embedded:?}");
}

#[test]
fn pages_of_many_requests_are_planned_and_what_would_fit_is_said() {
    let fixture = Fixture::new(&["--type", "f32"]);
    let plan = |more: &[&str]| {
        let out = output(fixture.command("plan", &["-c", "256"]).args(more)).success().out;
        let line = out.lines().find(|line| line.starts_with("KV cache in ")).map(str::to_owned);
        let cpu = out.lines().find(|line| line.starts_with("cpu")).unwrap();
        (line, cpu.to_owned())
    };
    assert_eq!(plan(&[]).0, None);
    let (line, cpu) = plan(&["--parallel", "4"]);
    let line = line.unwrap();
    assert!(
        line.starts_with("KV cache in 16 pages of 64 tokens: 1024 tokens of up to 4 requests together"),
        "{line}"
    );
    assert!(line.ends_with(" tokens would fit (--kv-tokens)"), "{line}");
    // Two layers, one head of keys and values … whatever the model: twice the pages take twice the memory, but for scrap pages.
    let (_, more) = plan(&["-np", "4", "--kv-tokens", "100000"]);
    assert_ne!(cpu, more);
    output(fixture.command("plan", &["--kv-tokens", "64"]).arg("-q")).failed_usage();
}

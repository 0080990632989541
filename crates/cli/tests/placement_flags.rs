//! Options that place a model's tensors, in every command that loads a model.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Fixture, output};
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
        // As in llama.cpp, the first on the command line that matches decides.
        (&["--cpu-moe", "-ot", "exps=SIM0"], &[0, 1, 2]),
        (&["-ot", "exps=SIM0", "--cpu-moe"], &[]),
        (&["-ncmoe", "1", "-ot", "exps=SIM0"], &[0]),
        (&["-ot", r"blk\.0.*exps=SIM0", "-ncmoe", "2", "-ot", r"blk\.1.*exps=SIM0"], &[1]),
        (&["-ot", r"blk\.2.*exps=CPU", "-cmoe", "-ot", "exps=SIM0"], &[0, 1, 2]),
    ] {
        assert_eq!(layers_on_cpu(&fixture, flags), layers, "{flags:?}");
    }
}

#[test]
fn threads_are_bound_to_numa_nodes_where_there_are_several() {
    let fixture = mixture();
    let one = std::fs::read_dir("/sys/devices/system/node").map_or(0, |nodes| {
        let names = nodes.flatten().map(|node| node.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.strip_prefix("node").is_some_and(|n| n.parse::<u32>().is_ok())).count()
    }) < 2;
    let answer = |flags: &[&str]| {
        let all = [&["hello", "-n", "4", "--temp", "0", "-c", "64", "--device", "cpu"], flags].concat();
        output(&mut fixture.command("run", &all)).success()
    };
    let wanted = answer(&[]);
    for mode in ["distribute", "isolate", "numactl", "Isolate"] {
        let found = answer(&["--numa", mode]);
        assert_eq!(found.out, wanted.out, "{mode}");
        assert!(!one || found.err.contains("has no effect: this machine has one NUMA node"), "{found:?}");
    }
    let unknown = output(&mut fixture.command("run", &["hello", "--numa", "mirror"])).failed_usage();
    assert!(unknown.err.contains("distribute, isolate and numactl"), "{unknown:?}");
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

#[test]
fn plan_shows_the_placement_and_the_speed_to_expect() {
    let fixture = Fixture::new(&["--arch", "qwen3moe", "--layers", "4", "--experts", "8", "--width", "256"]);
    let flags = ["--device", "sim", "-c", "256", "-b", "32", "--cache-dir", "no-such-folder"];
    let plan = |more: &[&str]| output(&mut fixture.command("plan", &[&flags, more].concat())).success().out;
    let text = plan(&["-ngl", "all", "-ncmoe", "3"]);
    let row = |text: &str, name: &str| -> Vec<String> {
        let line = text.lines().find(|line| line.starts_with(name));
        let line = line.unwrap_or_else(|| panic!("{name}: {text}"));
        line.split("  ").skip(1).map(|cell| cell.trim().to_owned()).filter(|cell| !cell.is_empty()).collect()
    };
    assert_eq!(row(&text, "placement "), ["sim:0", "cpu"]);
    let experts = row(&text, "experts ");
    assert!(experts[0].ends_with(", 1 layer") && experts[1].ends_with(", 3 layers"), "{experts:?}");
    for name in ["attention ", "routers ", "KV cache "] {
        let cells = row(&text, name);
        assert!(cells[0].ends_with(", 4 layers") && cells[1] == "–", "{name}: {cells:?}");
    }
    for part in [
        "Estimate: prefill ",
        " tok/s in batches of 32 tokens, decode ",
        "sim:0 assumed",
        "cpu assumed",
        "crossing",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("One more GiB"), "the number of layers is given: {text}");
    // A budget of half the memory: more would help, by a faster estimate.
    let json =
        |more: &[&str]| -> Value { serde_json::from_str(&plan(&[more, &["--json"]].concat())).unwrap() };
    let whole = json(&["-ngl", "all"]);
    let budget = (whole["backends"][0]["total"].as_u64().unwrap() / 2).to_string();
    assert_eq!(whole["placement"]["units"], Value::Array(Vec::new()));
    let half = json(&["--vram-budget", &budget]);
    let next = &half["placement"]["next_gigabyte"];
    assert_eq!(next["device"], "sim:0");
    assert!(next["decode"][1].as_f64().unwrap() > next["decode"][0].as_f64().unwrap(), "{next}");
    assert_eq!(next["decode"][0], half["placement"]["decode_tokens_per_second"]);
    let speed = |plan: &Value| plan["placement"]["decode_tokens_per_second"].as_f64().unwrap();
    assert!(speed(&whole) > speed(&half));
    let units = half["placement"]["units"].as_array().unwrap();
    assert!(
        units.iter().any(|unit| unit["placed"] == true) && units.iter().any(|unit| unit["placed"] == false)
    );
    let text = plan(&["--vram-budget", &budget]);
    assert!(text.contains("One more GiB on sim:0 would hold ") && text.contains(" instead of "), "{text}");
}

/// The speed is that of one request, however many have room.
#[test]
fn the_expected_speed_does_not_depend_on_the_room_for_requests() {
    let fixture = Fixture::new(&["--layers", "3"]);
    let speed = |more: &[&str]| {
        let flags = ["--device", "sim", "-ngl", "all", "-c", "512", "--json"];
        let json = output(fixture.command("plan", &flags).args(more)).success().out;
        let plan: Value = serde_json::from_str(&json).unwrap();
        let estimate = &plan["placement"]["estimate"];
        (estimate["prefill"]["compute"].clone(), plan["placement"]["decode_tokens_per_second"].clone())
    };
    let alone = speed(&[]);
    for room in [&["--parallel", "1", "--kv-tokens", "512"][..], &["--parallel", "8", "--kv-tokens", "65536"]]
    {
        assert_eq!(speed(room), alone, "{room:?}");
    }
}

#[test]
fn measured_rates_are_used() {
    let fixture = mixture();
    let folder = fixture.path("cache");
    std::fs::create_dir_all(&folder).unwrap();
    let plan = |fixture: &Fixture| {
        let flags = ["--device", "sim", "-c", "64", "--json", "--cache-dir", folder.to_str().unwrap()];
        let json = output(&mut fixture.command("plan", &flags)).success().out;
        serde_json::from_str::<Value>(&json).unwrap()
    };
    let before = plan(&fixture);
    assert_eq!(before["placement"]["estimate"]["rates"][1]["measured"], false);
    let cpu = before["backends"][1]["description"].as_str().unwrap();
    let limits = serde_json::json!([{
        "backend": "cpu", "device": cpu, "read": 123e9, "cache": 0.0, "int8": 1e12, "bf16": 1e12, "f32": 1e12,
        "measured": true, "conditions": { "working_set": 0, "cache_bytes": null, "spread": 0.0, "others": 0.0,
        "stolen": 0.0, "has_outlier": false },
    }]);
    std::fs::write(folder.join("limits.json"), limits.to_string()).unwrap();
    let after = plan(&fixture);
    assert_eq!(after["placement"]["estimate"]["rates"][1]["read"], 123e9, "{limits}");
    assert_eq!(after["placement"]["estimate"]["rates"][0]["measured"], false);
}

//! Tensors that are placed by name: `--override-tensor`, `--cpu-moe` and `--n-cpu-moe` put them where llama.cpp's users
//! expect them, and every placement computes the same logits.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::common::{Recipe, distance, engine, logits_of};
use quadriga_graph::{DType, layer_of};
use quadriga_llm::placement::{Devices, PlacedModel, TensorClass, TensorOverride};
use quadriga_llm::{Engine, EngineOptions, Error, GpuLayers, Model, Placement};
use quadriga_runtime::{StorageUse, WeightStreaming};
use quadriga_sim::Sim;

fn options() -> EngineOptions {
    EngineOptions { batch: 8, context: 64, ..EngineOptions::default() }.cache(DType::F32)
}

fn devices(count: usize) -> Devices {
    let sims = (0..count).map(|number| Sim::new(&format!("sim:{number}")).build());
    Devices::new(sims, Arc::new(quadriga_cpu::Backend::builder().threads(1).build().unwrap())).unwrap()
}

fn placement(overrides: &str) -> Placement {
    let overrides =
        if overrides.is_empty() { Vec::new() } else { TensorOverride::parse_list(overrides).unwrap() };
    Placement { overrides, gpu_layers: GpuLayers::All, ..Placement::default() }
}

/// The backends of every weight and state.
fn residence(placed: &PlacedModel) -> BTreeMap<String, Vec<String>> {
    let plan = placed.forecast.explain();
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for storage in &plan.storages {
        if matches!(storage.usage, StorageUse::Weight | StorageUse::State) {
            let backend = plan.backends[storage.backend].bytes.backend.clone();
            found.entry(storage.name.clone()).or_default().push(backend);
        }
    }
    found
}

fn model(name: &str) -> (Recipe, Model) {
    let (_, recipe) = Recipe::with_experts().into_iter().find(|(found, _)| *found == name).unwrap();
    let recipe = Recipe { layers: 3, ..recipe };
    let model = recipe.model();
    (recipe, model)
}

fn is_expert(name: &str) -> bool {
    TensorClass::of_weight(name) == TensorClass::Experts
}

#[test]
fn experts_stay_on_the_cpu_as_in_llama_cpp() {
    for architecture in ["stacked", "fused", "apart", "shared expert with a gate", "sinks and windows"] {
        let (_, model) = model(architecture);
        for layers in [0, 1, 2, 3, 99, usize::MAX] {
            let placement = Placement { cpu_expert_layers: layers, ..placement("") };
            let placed = placement.plan(&model, &devices(1), &options()).unwrap();
            let found = residence(&placed);
            assert!(found.keys().any(|name| is_expert(name)), "{architecture}: {found:?}");
            for (name, backends) in found {
                let on_cpu = is_expert(&name) && layer_of(&name).is_some_and(|layer| layer < layers);
                let expected = if on_cpu { "cpu" } else { "sim:0" };
                assert_eq!(backends, [expected], "{architecture}, {layers} layers: {name}");
            }
        }
    }
}

#[test]
fn batches_are_longer_where_experts_are_streamed() {
    let (_, model) = model("stacked");
    let always = WeightStreaming { operations_per_byte: 0, min_operations: 0 };
    let planned = |streaming_batch: usize, capacity: u64, streaming| {
        let placement = Placement {
            cpu_expert_layers: usize::MAX,
            streaming: Some(streaming),
            streaming_batch,
            ..placement("")
        };
        let cpu = Arc::new(quadriga_cpu::Backend::builder().threads(1).build().unwrap());
        let devices = Devices::new([Sim::new("sim:0").capacity(capacity).build()], cpu).unwrap();
        let (placed, options) = placement.plan_with_context(&model, &devices, &options()).unwrap();
        (placed.forecast, options.batch)
    };
    let (short, batch) = planned(0, 1 << 40, always);
    assert_eq!((short.streams_weights(), batch), (true, 8));
    let (long, batch) = planned(32, 1 << 40, always);
    assert_eq!((long.streams_weights(), batch), (true, 32));
    assert_eq!(planned(4, 1 << 40, always).1, 8, "never shorter than the options say");
    // The batch is no longer than the context, and than memory allows.
    assert_eq!(planned(4096, 1 << 40, always).1, 64);
    let [few, many] = [&short, &long].map(|plan| plan.bytes()[0].total());
    assert!(few < many);
    let capacity = (few + (many - few) / 2) * 10 / 9;
    assert_eq!(planned(32, capacity, always).1, 16);
    // Nothing is streamed: the batch is as before.
    let never = WeightStreaming { min_operations: u64::MAX, ..always };
    let (resident, batch) = planned(32, 1 << 40, never);
    assert_eq!((resident.streams_weights(), batch), (false, 8));
}

#[test]
fn streamed_experts_compute_the_same_logits() {
    for architecture in ["stacked", "fused", "apart", "shared expert with a gate", "sinks and windows"] {
        let (recipe, model) = model(architecture);
        let tokens: Vec<u32> = (0..24).map(|i| (i * 7 + 3) % recipe.vocabulary as u32).collect();
        let always = WeightStreaming { operations_per_byte: 0, min_operations: 0 };
        let logits = |cpu_expert_layers: usize, streaming| {
            let placement = Placement { cpu_expert_layers, streaming: Some(streaming), ..placement("") };
            let placed = placement.plan(&model, &devices(1), &options()).unwrap();
            let selected =
                placed.forecast.splits().copies.iter().filter(|copy| copy.selected_by.is_some()).count();
            assert_eq!(selected > 0, cpu_expert_layers > 0, "{architecture}");
            let mut engine = Engine::new(recipe.model(), &placed.scheduler, options(), &mut |_| {}).unwrap();
            // Several batches: the experts of one are prefetched for the next.
            engine.feed(&tokens).unwrap();
            engine.logits(0).to_vec()
        };
        let resident = logits(0, WeightStreaming { min_operations: u64::MAX, ..always });
        for layers in [1, usize::MAX] {
            // Biases of experts are added on the CPU, which rounds differently.
            let error = distance(&[logits(layers, always)], std::slice::from_ref(&resident));
            assert!(error < 1e-5, "{architecture}, {layers} layers: {error}");
        }
    }
}

#[test]
fn the_first_expression_that_matches_decides() {
    let (_, model) = model("stacked");
    let on = |overrides: &str, layers: usize| {
        let placement = Placement { cpu_expert_layers: layers, ..placement(overrides) };
        residence(&placement.plan(&model, &devices(2), &options()).unwrap())
    };
    let found = on(r"blk\.0\.ffn_up_exps=sim:1,exps=CPU,blk\.2\.attn=SIM0", 0);
    assert_eq!(found["blk.0.ffn_up_exps.weight"], ["sim:1"]);
    assert_eq!(found["blk.0.ffn_down_exps.weight"], ["cpu"]);
    assert_eq!(found["blk.1.ffn_up_exps.weight"], ["cpu"]);
    assert_eq!(found["blk.2.attn_q.weight"], ["sim:0"]);
    // The KV cache is no tensor of the file.
    assert_eq!(on(r"blk\.0\.=CPU", 0)["blk.0.cache_k"], ["sim:0"]);
    assert_eq!(on(r"ffn_up_exps=sim", usize::MAX)["blk.0.ffn_up_exps.weight"], ["sim:0"]);
    assert_eq!(on(r"ffn_up_exps=sim", usize::MAX)["blk.0.ffn_down_exps.weight"], ["cpu"]);
    // Tensors on a device whose layers are on the CPU.
    let device = Placement { gpu_layers: GpuLayers::Count(0), ..placement("attn_=sim1") };
    let found = residence(&device.plan(&model, &devices(2), &options()).unwrap());
    assert_eq!(found["blk.1.attn_output.weight"], ["sim:1"]);
    assert_eq!(found["blk.1.ffn_up_exps.weight"], ["cpu"]);
}

#[test]
fn rows_of_a_fused_matrix_are_placed_by_its_name() {
    let recipe = Recipe { layers: 2, fused_attention: true, ..Recipe::new("phi3") };
    let placed = placement(r"attn_qkv\.weight$=CPU").plan(&recipe.model(), &devices(1), &options()).unwrap();
    let fused: Vec<_> =
        residence(&placed).into_iter().filter(|(name, _)| name.contains("attn_qkv")).collect();
    assert!(!fused.is_empty() && fused.iter().all(|(_, backends)| backends == &["cpu"]), "{fused:?}");
}

#[test]
fn expressions_without_a_tensor_and_unknown_devices_are_named() {
    let (_, model) = model("stacked");
    let plan = |overrides: &str| placement(overrides).plan(&model, &devices(1), &options());
    assert_eq!(
        plan("blk.7=CPU,exps=CPU,token_embd=cpu,ffn_upx=CPU").unwrap().unmatched,
        ["blk.7", "ffn_upx"]
    );
    let error = plan("exps=CUDA1").err().unwrap();
    assert!(matches!(error, Error::TensorOverride { .. }));
    let text = error.to_string();
    assert!(["exps", "CUDA1", "sim:0, cpu"].iter().all(|part| text.contains(part)), "{text}");
}

#[test]
fn every_placement_of_tensors_gives_the_same_logits() {
    let run = |engine: &mut Engine, tokens: &[u32]| {
        let mut rows = logits_of(engine, &tokens[..11]);
        for token in &tokens[11..] {
            rows.extend(logits_of(engine, &[*token]));
        }
        rows
    };
    for architecture in ["stacked", "apart", "shared expert with a gate", "sinks and windows", "groups"] {
        let (recipe, model) = model(architecture);
        let tokens = recipe.tokens(15);
        let wanted = run(&mut engine(model.clone(), options()), &tokens);
        for overrides in [
            "exps=CPU",
            r"blk\.(0|2)\..*exps=CPU",
            "ffn_up_exps=CPU,ffn_down=sim:1",
            "attn=CPU,exps=sim:1",
            "attn_k=CPU",
            "norm=CPU",
            "ffn_gate_inp=CPU",
            "shexp=CPU,output=CPU",
            "output=CPU,token_embd=sim:1",
            ".*=CPU",
        ] {
            for gpu_layers in [GpuLayers::Count(0), GpuLayers::Count(2), GpuLayers::All] {
                let placement = Placement { gpu_layers, ..placement(overrides) };
                let placed = placement.plan(&model, &devices(2), &options()).unwrap();
                let mut engine =
                    Engine::new(model.clone(), &placed.scheduler, options(), &mut |_| {}).unwrap();
                let found = distance(&run(&mut engine, &tokens), &wanted);
                assert!(found < 1e-4, "{architecture}, {overrides}, {gpu_layers:?}: off by {found:.2e}");
            }
        }
    }
}

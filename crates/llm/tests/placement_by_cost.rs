//! Automatic placement: accelerators are filled in order of time saved per byte, within their budgets, and every placement
//! computes the same.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::experts::ExpertRecipe;
use crate::common::{Recipe, distance, engine, logits_of};
use quadriga_conformance::Rng;
use quadriga_graph::DType;
use quadriga_llm::placement::{
    Devices, ExpertCache, ModelPart, PlacedModel, TensorClass, TensorOverride, residence,
};
use quadriga_llm::{Engine, EngineOptions, GpuLayers, Model, Placement};
use quadriga_runtime::{Backend, Rates, ReadCurve};
use quadriga_sim::Sim;

fn options() -> EngineOptions {
    EngineOptions { batch: 8, context: 64, output_rows: 8, ..EngineOptions::default() }.cache(DType::F32)
}

fn on(sims: impl IntoIterator<Item = Arc<dyn Backend>>) -> Devices {
    Devices::new(sims, Arc::new(quadriga_cpu::Backend::builder().threads(1).build().unwrap())).unwrap()
}

fn devices(count: usize) -> Devices {
    on((0..count).map(|number| Sim::new(&format!("sim:{number}")).build()))
}

/// Rates at which tiny models take as long as large ones do: accelerators are fifty times as fast as the CPU.
fn rates() -> Vec<(String, Rates)> {
    let of = |read: f64| Rates {
        read,
        read_curve: ReadCurve::UNKNOWN,
        int8: 1e4 * read,
        bf16: 1e4 * read,
        f32: 1e4 * read,
        link: 1e9,
        rendezvous: 1e-9,
        launch: 0.0,
        measured: true,
    };
    ["sim:0", "sim:1"]
        .map(|name| (name.to_owned(), of(5e7)))
        .into_iter()
        .chain([("cpu".to_owned(), of(1e6))])
        .collect()
}

fn auto(budget: u64) -> Placement {
    Placement { budget: Some(budget), rates: rates(), ..Placement::default() }
}

fn mixture() -> Recipe {
    let experts = ExpertRecipe {
        width: 80,
        normalize: false,
        shared: 56,
        shared_gate: true,
        ..ExpertRecipe::new(8, 2)
    };
    Recipe { layers: 6, experts: Some(experts), biases: true, ..Recipe::new("qwen2moe") }
}

fn total(placed: &PlacedModel, backend: usize) -> u64 {
    placed.forecast.bytes()[backend].total()
}

/// The bytes of a model that is on one accelerator as a whole.
fn whole(model: &Model) -> u64 {
    let all = Placement { gpu_layers: GpuLayers::All, ..Placement::default() };
    // Smaller batches may be packed worse.
    total(&all.plan(model, &devices(1), &options()).unwrap(), 0) + 4096
}

/// A prompt in two batches, then tokens one by one.
fn run(engine: &mut Engine, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut rows = logits_of(engine, &tokens[..11]);
    for token in &tokens[11..] {
        rows.extend(logits_of(engine, &[*token]));
    }
    rows
}

#[test]
fn random_budgets_hold_and_results_stay_the_same() {
    let seed: u64 = std::env::var("QUADRIGA_SEED").map_or(0x5eed, |seed| seed.parse().unwrap());
    println!("seed {seed}");
    let mut random = Rng::new(seed);
    let mut recipes = vec![
        mixture(),
        Recipe { layers: 4, rope_factors: true, ..Recipe::new("llama") },
        Recipe { layers: 3, tied: true, window: Some(6), ..Recipe::new("qwen2") },
    ];
    let some = ["apart", "sinks and windows", "leading dense layer, selection bias", "groups"];
    let experts = Recipe::with_experts().into_iter().filter(|(name, _)| some.contains(name));
    recipes.extend(experts.map(|(_, recipe)| Recipe { layers: 3, ..recipe }));
    let mut with_slots = Vec::new();
    for recipe in recipes {
        let model = recipe.model();
        let tokens = recipe.tokens(14);
        let wanted = run(&mut engine(model.clone(), options()), &tokens);
        let all = whole(&model);
        for round in 0..8 {
            let count = 1 + round % 2;
            let budget = (random.uniform(0.0, 1.1) * all as f64) as u64 / count as u64;
            let context = format!("seed {seed}, {}, {count} × {budget} of {all}", recipe.architecture);
            // A device that has no more memory than the budget.
            let sims = (0..count).map(|number| Sim::new(&format!("sim:{number}")).capacity(budget).build());
            let devices = on(sims);
            // What is fastest, or slots beside a placement in the rest of the budget.
            let cache = if round % 4 < 2 { ExpertCache::Auto } else { ExpertCache::Bytes(budget / 3) };
            let placement = Placement { expert_cache: cache, ..auto(budget) };
            let placed =
                placement.plan(&model, &devices, &options()).unwrap_or_else(|e| panic!("{context}: {e}"));
            for number in 0..count {
                assert!(total(&placed, number) <= budget, "{context}: {} bytes", total(&placed, number));
            }
            // As every session does: with the slots that the plan has room for.
            let with = placed.engine_options(&options());
            let engine = Engine::new(model.clone(), &placed.scheduler, with, &mut |_| {});
            let mut engine = engine.unwrap_or_else(|e| panic!("{context}: {e}"));
            let found = distance(&run(&mut engine, &tokens), &wanted);
            assert!(found < 1e-4, "{context}: off by {found:.2e}");
            let slots = engine.expert_cache().map_or(0, |usage| usage.slots);
            assert_eq!(slots, placed.expert_slots as u64, "{context}");
            if slots > 0 && !with_slots.contains(&recipe.architecture) {
                with_slots.push(recipe.architecture);
            }
        }
    }
    assert!(with_slots.len() >= 3, "slots for {with_slots:?} only");
}

#[test]
fn attention_comes_before_experts() {
    let (model, devices) = (mixture().model(), devices(1));
    let all = whole(&model);
    let mut experts_before = 0;
    for budget in (1..=20).map(|part| all * part / 20) {
        // Without a cache, whose experts all stay on the CPU.
        let placement = Placement { expert_cache: ExpertCache::Bytes(0), ..auto(budget) };
        let placed = placement.plan(&model, &devices, &options()).unwrap();
        let found = residence(&placed.forecast.explain());
        let layers = |class: TensorClass, backend: usize| {
            let here = found.iter().find(|r| r.class == class && r.backend == backend);
            here.map_or(0, |here| here.layers.len())
        };
        let experts = layers(TensorClass::Experts, 0);
        if experts > 0 {
            for class in [
                TensorClass::Attention,
                TensorClass::Router,
                TensorClass::SharedExperts,
                TensorClass::KvCache,
            ] {
                assert_eq!((layers(class, 0), layers(class, 1)), (6, 0), "{class} with {budget} of {all}");
            }
        }
        assert_eq!(experts + layers(TensorClass::Experts, 1), 6);
        assert!(experts >= experts_before, "{experts} layers with {budget} of {all}");
        experts_before = experts;
        // The next expert would not have fit.
        if let Some(next) =
            placed.units.iter().find(|u| matches!(u.part, ModelPart::Experts { .. }) && !u.placed)
            && experts > 0
        {
            assert!(total(&placed, 0) + next.bytes > budget, "{} of {budget}", total(&placed, 0));
        }
    }
    assert_eq!(experts_before, 6);
}

#[test]
fn units_are_ordered_by_their_gain() {
    let (model, devices) = (mixture().model(), devices(1));
    let placed = auto(whole(&model) / 2).plan(&model, &devices, &options()).unwrap();
    assert!(placed.units.len() > 6);
    for pair in placed.units.windows(2) {
        assert!(pair[0].gain_per_byte() >= 0.9 * pair[1].gain_per_byte(), "{pair:?}");
    }
    // At the assumed rates a tiny layer takes less time than a rendezvous: it is not cut.
    let tiny = Placement { rates: Vec::new(), ..auto(whole(&model) / 2) };
    let placed = tiny.plan(&model, &devices, &options()).unwrap();
    let is_cut = |part: ModelPart| matches!(part, ModelPart::Attention { .. } | ModelPart::Experts { .. });
    assert!(!placed.units.is_empty() && placed.units.iter().all(|unit| !is_cut(unit.part)));
}

#[test]
fn two_accelerators_hold_more_than_one() {
    let model = mixture().model();
    let budget = whole(&model) / 3;
    let experts = |count: usize| {
        let placed = auto(budget).plan(&model, &devices(count), &options()).unwrap();
        assert!((0..count).all(|number| total(&placed, number) <= budget));
        let experts = placed.units.iter().filter(|u| matches!(u.part, ModelPart::Experts { .. }));
        experts.filter(|unit| unit.placed).count()
    };
    let [one, two] = [experts(1), experts(2)];
    assert!(two >= 2 * one && one > 0, "{one} layers on one, {two} on two");
}

#[test]
fn overrides_are_kept_and_the_rest_is_filled() {
    let (model, devices) = (mixture().model(), devices(1));
    let overrides = TensorOverride::parse_list(r"blk\.0\..*exps=sim,blk\.1\.attn=CPU").unwrap();
    let placement = Placement { overrides, ..auto(whole(&model) / 2) };
    let placed = placement.plan(&model, &devices, &options()).unwrap();
    let plan = placed.forecast.explain();
    let on = |name: &str| plan.storages.iter().find(|storage| storage.name == name).unwrap().backend;
    assert_eq!((on("blk.0.ffn_up_exps.weight"), on("blk.1.attn_q.weight")), (0, 1));
    assert!(placed.units.iter().any(|unit| unit.part == ModelPart::Experts { layer: 1, count: 8 }));
    assert!(!placed.units.iter().any(|unit| unit.part == ModelPart::Experts { layer: 0, count: 8 }));
}

#[test]
fn more_memory_is_estimated_to_be_faster() {
    let (model, devices) = (mixture().model(), devices(1));
    let all = whole(&model);
    let mut before = 0.0;
    for budget in [0, all / 3, all * 2 / 3, all] {
        // Without slots for experts: expert_slots.rs has those.
        let placement = Placement { expert_cache: ExpertCache::Bytes(0), ..auto(budget) };
        let placed = placement.plan(&model, &devices, &options()).unwrap();
        let estimate = placement.estimate(&model, &devices, &options(), &placed).unwrap();
        let speed = estimate.decode.as_ref().unwrap().tokens_per_second();
        assert!(speed > before, "{speed} tokens per second with {budget} of {all}, {before} with less");
        before = speed;
        let next = placement.next_gigabyte(&model, &devices, &options(), &placed).unwrap();
        assert_eq!(next.is_none(), budget == all);
        if let Some(next) = next {
            assert!(next.decode[1] > next.decode[0] && !next.moves.is_empty(), "{next:?}");
            assert_eq!(next.device, "sim:0");
            let left: Vec<ModelPart> = placed.units.iter().filter(|u| !u.placed).map(|u| u.part).collect();
            assert_eq!(next.moves, left, "a gigabyte holds everything");
        }
    }
}

//! Several accelerators with different memory: each is filled by its own budget, and streaming follows the rates of the devices.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::experts::ExpertRecipe;
use crate::common::{Recipe, distance, engine};
use crate::expert_slots::{cpu, options, run};
use quadriga_graph::DType;
use quadriga_llm::placement::{Devices, ExpertCache, expert_bytes};
use quadriga_llm::{Engine, EngineOptions, GpuLayers, Placement};
use quadriga_runtime::{Rates, ReadCurve, WeightStreaming};
use quadriga_sim::Sim;

/// A mixture of many experts, beside which the rest of the model is small.
fn many() -> Recipe {
    let (_, recipe) = Recipe::with_experts().into_iter().find(|(name, _)| *name == "stacked").unwrap();
    let experts = recipe.experts.map(|experts| ExpertRecipe { count: 40, ..experts });
    Recipe { layers: 6, experts, ..recipe }
}

fn of(read: f64, link: f64) -> Rates {
    Rates {
        read,
        read_curve: ReadCurve::UNKNOWN,
        int8: 1e4 * read,
        bf16: 1e4 * read,
        f32: 1e4 * read,
        link,
        rendezvous: 1e-9,
        launch: 0.0,
        measured: true,
    }
}

/// Rates of two accelerators and the CPU.
fn rates(first: f64, second: f64) -> Vec<(String, Rates)> {
    [("sim:0", first), ("sim:1", second), ("cpu", 1e6)]
        .map(|(name, read)| (name.to_owned(), of(read, 1e9)))
        .to_vec()
}

fn sims(memory: [u64; 2]) -> Devices {
    let sim = |number: usize| Sim::new(&format!("sim:{number}")).capacity(memory[number]).build();
    Devices::new([sim(0), sim(1)], cpu()).unwrap()
}

#[test]
fn a_small_accelerator_takes_no_memory_from_a_large_one() {
    let recipe = many();
    let (model, tokens) = (recipe.model(), recipe.tokens(20));
    let wanted = run(&mut engine(recipe.model(), options(0)), &tokens);
    let one = expert_bytes(&model).unwrap();
    for memory in [[120 * one, 40 * one], [40 * one, 120 * one]] {
        let large = usize::from(memory[1] > memory[0]);
        let small = memory[1 - large];
        for cache in [ExpertCache::Auto, ExpertCache::Bytes(20 * one)] {
            let devices = sims(memory);
            let placement = Placement { expert_cache: cache, rates: rates(5e7, 5e7), ..Placement::default() };
            let placed = placement.plan(&model, &devices, &options(0)).unwrap();
            let context = format!("{memory:?}, {cache:?}: {:?}", placed.expert_slot_bytes);
            assert!(placed.expert_slots > 0, "{context}");
            let used: Vec<u64> = placed.forecast.bytes().iter().map(|bytes| bytes.total()).collect();
            assert!(used[0] <= memory[0] && used[1] <= memory[1], "{context}: {used:?}");
            // More than there would be with two of the small ones.
            assert!(used[large] > small, "{context}: {used:?}");
            if cache == ExpertCache::Auto {
                assert!(used[large] * 10 >= memory[large] * 7, "{context}: {used:?} of {memory:?}");
            }
            let with = placed.engine_options(&options(0));
            let mut engine = Engine::new(recipe.model(), &placed.scheduler, with, &mut |_| {}).unwrap();
            let off = distance(&run(&mut engine, &tokens), &wanted);
            assert!(off < 1e-4, "{context}: off by {off:.2e}");
        }
    }
}

#[test]
fn budgets_of_single_devices_are_kept() {
    let model = many().model();
    let one = expert_bytes(&model).unwrap();
    let devices = sims([1 << 40, 1 << 40]);
    let placement = Placement {
        budget: Some(90 * one),
        device_budgets: vec![None, Some(30 * one)],
        expert_cache: ExpertCache::Bytes(0),
        rates: rates(5e7, 5e7),
        ..Placement::default()
    };
    let placed = placement.plan(&model, &devices, &options(0)).unwrap();
    let used: Vec<u64> = placed.forecast.bytes().iter().map(|bytes| bytes.total()).collect();
    assert!(used[0] > 40 * one && used[0] <= 90 * one, "{used:?} with experts of {one}");
    assert!(used[1] <= 30 * one, "{used:?} with experts of {one}");
}

/// The gigabyte is on one accelerator, the one that computes faster with it, and never makes a plan slower.
#[test]
fn the_next_gigabyte_is_that_of_the_accelerator_for_which_it_helps_most() {
    let model = many().model();
    let one = expert_bytes(&model).unwrap();
    for (rates, wanted) in [(rates(2e7, 8e7), "sim:1"), (rates(8e7, 2e7), "sim:0")] {
        let devices = sims([40 * one, 40 * one]);
        let placement = Placement { rates, ..Placement::default() };
        let placed = placement.plan(&model, &devices, &options(0)).unwrap();
        let with = placed.engine_options(&options(0));
        let next = placement.next_gigabyte(&model, &devices, &with, &placed).unwrap().unwrap();
        assert_eq!(next.device, wanted, "{next:?}");
        assert!(next.decode[1] > next.decode[0] && next.expert_slots > 0, "{next:?}");
    }
}

/// From which batch on weights are streamed follows from the rates of the CPU for their type and of the link, measured or not.
#[test]
fn streaming_follows_the_rates_of_the_cpu_and_the_link() {
    let recipe = Recipe { layers: 2, vocabulary: 512, ..Recipe::wide("llama", DType::F32) };
    let model = recipe.model();
    let streams = |cpu_rates: Rates, link: f64, batch: usize| {
        let devices = Devices::new([Sim::new("sim:0").build()], cpu()).unwrap();
        let rates = vec![("sim:0".to_owned(), of(1e12, link)), ("cpu".to_owned(), cpu_rates)];
        let placement = Placement { gpu_layers: GpuLayers::Count(1), rates, ..Placement::default() };
        let options = EngineOptions { batch, context: 4096, ..EngineOptions::default() };
        placement.plan(&model, &devices, &options).unwrap().forecast.streams_weights()
    };
    // Half an operation per byte and row, of at least 10⁹ operations: 600 rows are 300 operations per byte.
    let host = |f32: f64| Rates { f32, ..of(1e11, 1.0) };
    assert!(streams(host(200e9), 1e9, 600), "200 operations per byte pay");
    assert!(!streams(host(1e13), 1e9, 600), "10,000 do not");
    assert!(streams(host(1e13), 1e11, 600), "over a faster link they do");
    // Only the rate for the type of the model's weights counts.
    assert!(streams(Rates { int8: 1e15, bf16: 1e15, ..host(200e9) }, 1e9, 600));
    // As the caller says, whatever the rates are.
    let devices = Devices::new([Sim::new("sim:0").build()], cpu()).unwrap();
    let never = WeightStreaming { operations_per_byte: u64::MAX, min_operations: 0 };
    let placement = Placement {
        gpu_layers: GpuLayers::Count(1),
        rates: vec![("cpu".to_owned(), host(1e9))],
        streaming: Some(never),
        ..Placement::default()
    };
    let options = EngineOptions { batch: 600, context: 4096, ..EngineOptions::default() };
    assert!(!placement.plan(&model, &devices, &options).unwrap().forecast.streams_weights());
}

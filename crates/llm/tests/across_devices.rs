//! A model that is split across devices computes the same logits as on one device, however it is split; a device that
//! fails leaves the sequences unchanged.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::{Recipe, cpu, distance, engine, logits_of};
use quadriga_graph::DType;
use quadriga_llm::placement::offload;
use quadriga_llm::{Engine, EngineOptions, Model};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_sim::{FaultPoint, Sim};

fn options() -> EngineOptions {
    EngineOptions { cache_keys: DType::F32, cache_values: DType::F32, batch: 8, ..EngineOptions::default() }
}

/// An engine with some layers on the first of two devices.
fn split(model: Model, devices: [Arc<dyn Backend>; 2], on_device: usize) -> Engine {
    let scheduler = Scheduler::new(devices).place(offload(model.hyperparameters(), on_device, 1));
    Engine::new(model, &scheduler, options(), &mut |_| {}).unwrap()
}

fn recipes() -> Vec<Recipe> {
    let mut all = vec![
        Recipe { layers: 3, rope_factors: true, ..Recipe::new("llama") },
        Recipe { layers: 2, tied: true, window: Some(6), ..Recipe::new("qwen2") },
        Recipe { layers: 2, key_length: 32, rope_dims: 32, ..Recipe::new("qwen3") },
    ];
    let experts = Recipe::with_experts().into_iter();
    let some =
        ["apart", "shared expert with a gate", "sinks and windows", "groups", "keys and values in the cache"];
    all.extend(experts.filter(|(name, _)| some.contains(name)).map(|(_, recipe)| recipe));
    all
}

/// A prompt in two batches, then tokens one by one.
fn run(engine: &mut Engine, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut rows = logits_of(engine, &tokens[..13]);
    for token in &tokens[13..] {
        rows.extend(logits_of(engine, &[*token]));
    }
    rows
}

#[test]
fn any_split_between_a_simulated_device_and_the_cpu_gives_the_same_logits() {
    for recipe in recipes() {
        let tokens = recipe.tokens(17);
        let wanted = run(&mut engine(recipe.model(), options()), &tokens);
        for on_device in 0..=recipe.layers + 2 {
            for sim in
                [Sim::new("sim:0"), Sim::new("sim:0").isolated().alignment(256).padding(128).packs_weights()]
            {
                let sim = sim.device();
                let mut engine = split(recipe.model(), [Arc::clone(&sim) as _, cpu(1)], on_device);
                let found = distance(&run(&mut engine, &tokens), &wanted);
                let context = format!("{}, {on_device} layers on the device", recipe.architecture);
                assert!(found < 1e-4, "{context}: off by {found:.2e}");
                assert_eq!(sim.counts().of(FaultPoint::Run) > 0, on_device > 0, "{context}");
                let shares: Vec<u64> =
                    engine.session().plan().unwrap().bytes().iter().map(|bytes| bytes.total()).collect();
                assert_eq!(shares[0] > 0, on_device > 0, "{context}: {shares:?}");
            }
        }
    }
}

/// The happens-before checker sees memory of simulated devices alone: here the host is one, too.
#[test]
fn every_access_between_a_device_and_its_host_is_ordered() {
    for recipe in recipes() {
        let tokens = recipe.tokens(17);
        let wanted = run(&mut engine(recipe.model(), options()), &tokens);
        for on_device in 1..=recipe.layers {
            for device in [Sim::new("sim:0"), Sim::new("sim:0").isolated()] {
                let (device, host) = (device.device(), Sim::new("cpu").synchronous().host().device());
                let devices = [Arc::clone(&device) as Arc<dyn Backend>, Arc::clone(&host) as _];
                let found = distance(&run(&mut split(recipe.model(), devices, on_device), &tokens), &wanted);
                let context = format!("{}, {on_device} layers on the device", recipe.architecture);
                assert!(found < 1e-4, "{context}: off by {found:.2e}");
                assert!(host.counts().of(FaultPoint::Run) > 0, "{context}");
                let unordered = (device.unordered_access(), host.unordered_access());
                assert_eq!(unordered, (None, None), "{context}");
            }
        }
    }
}

#[test]
fn any_split_between_two_cpus_gives_bit_identical_logits() {
    for recipe in recipes() {
        let tokens = recipe.tokens(17);
        let wanted = run(&mut engine(recipe.model(), options()), &tokens);
        for on_device in 0..=recipe.layers + 1 {
            let mut engine = split(recipe.model(), [cpu(1), cpu(1)], on_device);
            assert_eq!(run(&mut engine, &tokens), wanted, "{} cut at {on_device}", recipe.architecture);
        }
    }
}

/// What differs between machines with several devices: their speeds, those of their links, and whether copies between them are direct.
#[test]
fn any_split_between_two_simulated_devices_gives_bit_identical_logits() {
    for recipe in recipes() {
        let tokens = recipe.tokens(17);
        let alone = Sim::new("sim:0").build();
        let scheduler = Scheduler::new([alone, cpu(1)]).place(offload(
            recipe.model().hyperparameters(),
            recipe.layers + 1,
            1,
        ));
        let wanted =
            run(&mut Engine::new(recipe.model(), &scheduler, options(), &mut |_| {}).unwrap(), &tokens);
        for (peers, on_first) in (0..=recipe.layers + 1).flat_map(|first| [(true, first), (false, first)]) {
            let clocks = [("sim:0", 1e-6, 5e-6, 1e-9), ("sim:1", 7e-6, 2e-6, 4e-9)];
            let devices = clocks.map(|(name, node, each, byte)| {
                let sim = Sim::new(name).node_seconds(node).copy_seconds(each, byte);
                if peers { sim.device() } else { sim.without_peers().device() }
            });
            let [first, second] = devices.clone().map(|device| device as Arc<dyn Backend>);
            let found = run(&mut split(recipe.model(), [first, second], on_first), &tokens);
            let context = format!("{} cut at {on_first}, peers: {peers}", recipe.architecture);
            assert_eq!(found, wanted, "{context}");
            let ran = devices.each_ref().map(|device| device.counts().of(FaultPoint::Run) > 0);
            assert_eq!(ran[0], on_first > 0, "{context}");
            assert!(ran[1] || on_first > recipe.layers, "{context}");
            assert_eq!(devices.each_ref().map(|device| device.unordered_access()), [None, None], "{context}");
        }
    }
}

/// Two contexts of one GPU are two devices to the scheduler.
#[cfg(feature = "cuda")]
#[test]
fn any_split_between_two_contexts_of_a_gpu_gives_bit_identical_logits() {
    let device = || quadriga_cuda::Backend::builder(0).own_context(true).build();
    if let Err(reason) = device() {
        println!("skipped, there is no GPU: {reason}");
        return;
    }
    for recipe in recipes() {
        let tokens = recipe.tokens(17);
        let on = |devices: [Arc<dyn Backend>; 2], layers: usize| {
            assert_ne!(devices[0].name(), devices[1].name());
            let [first, second] = devices;
            let placed = offload(recipe.model().hyperparameters(), layers, 1);
            let scheduler = Scheduler::new([first, second, cpu(1)]).place(placed);
            run(&mut Engine::new(recipe.model(), &scheduler, options(), &mut |_| {}).unwrap(), &tokens)
        };
        let pair = || [device().unwrap(), device().unwrap()].map(|gpu| Arc::new(gpu) as Arc<dyn Backend>);
        let wanted = on(pair(), recipe.layers + 1);
        for on_first in 0..=recipe.layers {
            assert_eq!(on(pair(), on_first), wanted, "{} cut at {on_first}", recipe.architecture);
        }
    }
}

#[test]
fn a_failing_device_leaves_the_sequences_unchanged() {
    let recipe = &recipes()[0];
    let tokens = recipe.tokens(17);
    let wanted = run(&mut engine(recipe.model(), options()), &tokens);
    for what in [FaultPoint::Run, FaultPoint::Transfer, FaultPoint::Compile, FaultPoint::Allocation] {
        for after in 0..6 {
            let sim = Sim::new("sim:0").device();
            let mut engine = split(recipe.model(), [Arc::clone(&sim) as _, cpu(1)], 3);
            logits_of(&mut engine, &tokens[..5]);
            sim.fail(what, after);
            // Two batches: the second may fail when the first is done already.
            let result = engine.extend(&crate::common::all_outputs(0, &tokens[5..16]));
            sim.clear_faults();
            let context = format!("{what:?} {after}: {:?}", result.as_ref().err().map(ToString::to_string));
            if result.is_err() {
                assert_eq!(engine.len(0), 5, "{context}");
                engine
                    .extend(&crate::common::all_outputs(0, &tokens[5..16]))
                    .unwrap_or_else(|e| panic!("{context}: {e}"));
            }
            let rows: Vec<Vec<f32>> = (0..11).map(|row| engine.logits(row).to_vec()).collect();
            let found = distance(&rows, &wanted[5..16]);
            assert!(found < 1e-4, "{context}: off by {found:.2e} afterwards");
        }
    }
}

#[test]
fn a_device_that_is_too_small_is_an_error() {
    let model = recipes()[0].model();
    let sim = Sim::new("sim:0").capacity(10_000).build();
    let scheduler = Scheduler::new([sim, cpu(1)]).place(offload(model.hyperparameters(), 4, 1));
    let error = Engine::new(model, &scheduler, options(), &mut |_| {}).err().unwrap();
    assert!(error.to_string().contains("sim:0"), "{error}");
}

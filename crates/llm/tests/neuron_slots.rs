//! Neurons that are divided between the slots of a device and the host give the results of the host alone, whatever is in the
//! slots and whenever an upload arrives or fails.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::{Recipe, distance, engine, logits_of};
use quadriga_conformance::Rng;
use quadriga_graph::DType;
use quadriga_llm::models::{NeuronMode, Neurons};
use quadriga_llm::placement::{Devices, TensorOverride};
use quadriga_llm::{Engine, EngineOptions, GpuLayers, NeuronCounts, Placement};
use quadriga_runtime::{Backend, DeviceKind, Rates};
use quadriga_sim::{FaultPoint, Sim};

fn options(slots: usize, counts: Option<NeuronCounts>) -> EngineOptions {
    let neurons = Neurons { mode: NeuronMode::Exact, slots, ..Neurons::default() };
    let neuron_counts = counts.map(Arc::new);
    EngineOptions { batch: 16, context: 64, neurons, neuron_counts, ..EngineOptions::default() }
        .cache(DType::F32)
}

fn cpu() -> Arc<quadriga_cpu::Backend> {
    Arc::new(quadriga_cpu::Backend::builder().threads(2).build().unwrap())
}

/// An engine with the rows of neurons on the CPU, all else on a device, and slots there for some rows.
fn divided(recipe: &Recipe, device: Arc<dyn Backend>, options: &EngineOptions) -> Engine {
    let model = recipe.model();
    let overrides = TensorOverride::parse_list("ffn_(up|down_t)\\.weight$=CPU").unwrap();
    let placement = Placement { gpu_layers: GpuLayers::All, overrides, ..Placement::default() };
    let placed = placement.plan(&model, &Devices::new([device], cpu()).unwrap(), options).unwrap();
    Engine::new(model, &placed.scheduler, options.clone(), &mut |_| {}).unwrap()
}

/// A prompt that is too long to be divided, a short one that is, then tokens one by one.
fn run(engine: &mut Engine, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut rows = logits_of(engine, &tokens[..11]);
    rows.extend(logits_of(engine, &tokens[11..15]));
    tokens[15..].iter().for_each(|token| rows.extend(logits_of(engine, &[*token])));
    rows
}

fn recipes() -> Vec<(&'static str, Recipe)> {
    let divisible = |(_, recipe): &(&str, Recipe)| recipe.transposed && !recipe.ungated;
    Recipe::rectified().into_iter().filter(divisible).collect()
}

#[test]
fn any_split_of_rows_gives_the_logits_of_the_host() {
    let seed = 23;
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    for (name, recipe) in recipes() {
        let tokens = recipe.tokens(24);
        let wanted = run(&mut engine(recipe.model(), options(0, None)), &tokens);
        let neurons = recipe.layers * recipe.feed_forward;
        for slots in [1, 7, 1 + rng.below(neurons), neurons, usize::MAX] {
            let mut counts = NeuronCounts::new(&recipe.model());
            counts.layers.iter_mut().flatten().for_each(|count| *count = rng.below(100) as u32);
            for counts in [None, Some(counts)] {
                let (given, options) = (counts.is_some(), options(slots, counts));
                let mut engine = divided(&recipe, Sim::new("sim:0").build(), &options);
                let found = distance(&run(&mut engine, &tokens), &wanted);
                assert!(found < 1e-4, "{name}, {slots} slots, counts {given}: off by {found:.2e}");
                let usage = engine.neuron_slots().expect("there are slots");
                assert_eq!(usage.slots, slots.min(neurons) as u64, "{name}");
                assert!(!given || usage.moved == 0, "{name}: {usage:?}");
            }
        }
    }
}

#[test]
fn active_neurons_move_into_slots_while_the_model_runs() {
    let (_, recipe) = recipes().swap_remove(0);
    let token = recipe.tokens(8)[3];
    let repeat = |engine: &mut Engine| -> Vec<Vec<f32>> {
        (0..48).flat_map(|_| logits_of(engine, &[token])).collect()
    };
    let wanted = repeat(&mut engine(recipe.model(), options(0, None)));
    let half = recipe.layers * recipe.feed_forward / 2;
    let mut divided = divided(&recipe, Sim::new("sim:0").build(), &options(half, None));
    let found = distance(&repeat(&mut divided), &wanted);
    assert!(found < 1e-4, "off by {found:.2e}");
    let usage = divided.neuron_slots().unwrap();
    assert!(usage.moved > 0 && usage.hits > 0 && usage.hits < usage.active, "{usage:?}");
    // The neurons that this token activates are there in the end.
    let before = divided.neuron_slots().unwrap();
    logits_of(&mut divided, &[token]);
    let after = divided.neuron_slots().unwrap();
    let share = (after.hits - before.hits) as f64 / (after.active - before.active) as f64;
    assert!(share > 0.8, "{share}: {before:?} {after:?}");
}

#[test]
fn a_fault_of_an_upload_loses_nothing() {
    let (_, recipe) = recipes().swap_remove(0);
    let token = recipe.tokens(8)[5];
    let wanted: Vec<Vec<f32>> = {
        let mut engine = engine(recipe.model(), options(0, None));
        (0..24).flat_map(|_| logits_of(&mut engine, &[token])).collect()
    };
    let mut failed = 0;
    for after in (0..60).step_by(6) {
        let sim = Sim::new("sim:0").device();
        let half = recipe.layers * recipe.feed_forward / 2;
        let mut engine = divided(&recipe, Arc::clone(&sim) as _, &options(half, None));
        let mut rows: Vec<Vec<f32>> = (0..4).flat_map(|_| logits_of(&mut engine, &[token])).collect();
        sim.fail(FaultPoint::Transfer, after);
        while rows.len() < 24 {
            let before = engine.len(0);
            if engine.feed(&[token]).is_err() {
                failed += 1;
                sim.clear_faults();
                assert_eq!(engine.len(0), before, "fault {after}");
                continue;
            }
            rows.push(engine.logits(0).to_vec());
        }
        let found = distance(&rows, &wanted);
        assert!(found < 1e-4, "fault {after}: off by {found:.2e}");
    }
    assert!(failed > 0, "no fault was seen");
}

#[test]
fn an_automatic_placement_fills_what_gates_leave_with_rows() {
    let (_, recipe) = recipes().swap_remove(0);
    let recipe = Recipe { layers: 4, width: 128, feed_forward: 2048, ..recipe };
    let (model, options) = (recipe.model(), options(0, None));
    let tokens = recipe.tokens(24);
    let wanted = run(&mut engine(recipe.model(), options.clone()), &tokens);
    let devices = Devices::new([Sim::new("sim:0").build()], cpu()).unwrap();
    let whole = Placement { gpu_layers: GpuLayers::All, ..Placement::default() };
    let all = whole.plan(&model, &devices, &options).unwrap().forecast.bytes()[0].total();
    // An accelerator that is much faster, and which the CPU never waits for.
    let rates = |kind| Rates { rendezvous: 0.0, ..Rates::assumed(kind) };
    let rates =
        vec![("sim:0".to_owned(), rates(DeviceKind::Gpu)), ("cpu".to_owned(), rates(DeviceKind::Cpu))];
    let mut divided = 0;
    for percent in [40, 60, 80, 95] {
        let placement = Placement {
            budget: Some(all * percent / 100),
            rates: rates.clone(),
            hot_neurons: true,
            ..Placement::default()
        };
        let placed = placement.plan(&model, &devices, &options).unwrap();
        assert!(placed.forecast.bytes()[0].total() <= all * percent / 100, "{percent} %");
        let mut options = options.clone();
        options.neurons.slots = placed.neuron_slots;
        divided += usize::from(placed.neuron_slots > 0);
        let mut engine = Engine::new(model.clone(), &placed.scheduler, options, &mut |_| {}).unwrap();
        let found = distance(&run(&mut engine, &tokens), &wanted);
        assert!(found < 1e-4, "{percent} %: off by {found:.2e}");
    }
    assert!(divided > 0, "no placement has slots");
}

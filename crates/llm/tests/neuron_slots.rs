//! Neurons that are divided between the slots of a device and the host give the results of the host alone, whatever is in the
//! slots and whenever an upload arrives or fails.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::{Recipe, distance, distances, engine, logits_of};
use quadriga_conformance::Rng;
use quadriga_gguf::{File, Writer};
use quadriga_graph::DType;
use quadriga_llm::models::{NeuronMode, Neurons};
use quadriga_llm::placement::{Devices, TensorOverride};
use quadriga_llm::{Adapter, Engine, EngineOptions, GpuLayers, Model, NeuronCounts, Placement};
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
fn divided(model: &Model, device: Arc<dyn Backend>, options: &EngineOptions) -> Engine {
    let overrides = TensorOverride::parse_list("ffn_(up|down_t)\\.weight$=CPU").unwrap();
    let placement = Placement { gpu_layers: GpuLayers::All, overrides, ..Placement::default() };
    let placed = placement.plan(model, &Devices::new([device], cpu()).unwrap(), options).unwrap();
    Engine::new(model.clone(), &placed.scheduler, options.clone(), &mut |_| {}).unwrap()
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
                let mut engine = divided(&recipe.model(), Sim::new("sim:0").build(), &options);
                let found = distance(&run(&mut engine, &tokens), &wanted);
                assert!(found < 1e-4, "{name}, {slots} slots, counts {given}: off by {found:.2e}");
                let usage = engine.neuron_slots().expect("there are slots");
                assert_eq!(usage.slots, slots.min(neurons) as u64, "{name}");
                assert!(!given || usage.moved == 0, "{name}: {usage:?}");
            }
        }
    }
}

/// Gemma 3n's layers with cut gates have slots, the others none.
#[test]
fn rows_of_cut_gates_are_divided() {
    let recipe = Recipe::with_cut_gates();
    let tokens = recipe.tokens(24);
    let mut device_alone = divided(&recipe.model(), Sim::new("sim:0").build(), &options(0, None));
    let wanted = run(&mut device_alone, &tokens);
    for slots in [recipe.layers * recipe.feed_forward / 2, usize::MAX] {
        let mut engine = divided(&recipe.model(), Sim::new("sim:0").build(), &options(slots, None));
        let found = distances(&run(&mut engine, &tokens), &wanted);
        assert!(found.1 < 1e-4, "{slots} slots: off by {found:?}");
        let usage = engine.neuron_slots().expect("there are slots");
        assert!(usage.slots > 0 && usage.hits > 0, "{usage:?}");
        let (layers, _) = recipe.streams.unwrap().cut;
        assert!(usage.slots <= (layers * recipe.feed_forward) as u64, "{usage:?}");
    }
}

/// The model with an adapter of every layer's `ffn_up`.
fn adapted(recipe: &Recipe) -> Model {
    let mut rng = Rng::new(5);
    let mut values = |count: usize| -> Vec<u8> {
        (0..count).flat_map(|_| (rng.uniform(-0.5, 0.5) as f32).to_le_bytes()).collect()
    };
    let (rank, mut tensors) = (2, Vec::new());
    for layer in 0..recipe.layers {
        for (part, dims) in [("lora_a", [rank, recipe.width]), ("lora_b", [recipe.feed_forward, rank])] {
            tensors.push((format!("blk.{layer}.ffn_up.weight.{part}"), dims, values(dims[0] * dims[1])));
        }
    }
    let mut writer = Writer::new();
    let architecture = recipe.model().hyperparameters().architecture;
    writer.set("general.architecture", architecture).unwrap();
    writer.set("general.type", "adapter").unwrap();
    writer.set("adapter.type", "lora").unwrap();
    writer.set("adapter.lora.alpha", 4.0f32).unwrap();
    for (name, dims, bytes) in &tensors {
        writer.tensor_bytes(name, DType::F32, *dims, bytes).unwrap();
    }
    let mut bytes = Vec::new();
    writer.write_to(&mut bytes).unwrap();
    let adapter = Adapter::from_file(&File::from_bytes(bytes).unwrap(), 1.0).unwrap();
    recipe.model().with_adapters(&[adapter]).unwrap()
}

#[test]
fn an_adapter_of_neurons_changes_those_in_slots_too() {
    for (name, recipe) in recipes() {
        let (model, tokens) = (adapted(&recipe), recipe.tokens(24));
        let plain = run(&mut engine(recipe.model(), options(0, None)), &tokens);
        let wanted = run(&mut engine(model.clone(), options(0, None)), &tokens);
        assert!(distance(&plain, &wanted) > 1e-2, "{name}: the adapter changes nothing");
        let half = recipe.layers * recipe.feed_forward / 2;
        let found = run(&mut divided(&model, Sim::new("sim:0").build(), &options(half, None)), &tokens);
        let found = distance(&found, &wanted);
        assert!(found < 1e-4, "{name}: off by {found:.2e}");
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
    let mut divided = divided(&recipe.model(), Sim::new("sim:0").build(), &options(half, None));
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
fn rows_of_divided_neurons_are_counted_once() {
    for (name, recipe) in recipes() {
        let tokens = recipe.tokens(24);
        let neurons = recipe.layers * recipe.feed_forward;
        let used = |slots: usize| {
            let mut options = options(slots, Some(NeuronCounts::new(&recipe.model())));
            options.neurons.observe = true;
            let mut engine = divided(&recipe.model(), Sim::new("sim:0").build(), &options);
            run(&mut engine, &tokens);
            engine.neuron_use().unwrap()
        };
        let whole = used(0);
        assert!(whole.rows > 0 && whole.bytes < whole.dense_bytes, "{name}: {whole:?}");
        for slots in [neurons / 3, neurons] {
            assert_eq!(used(slots), whole, "{name}, {slots} slots");
        }
    }
}

#[test]
fn a_placement_that_cannot_divide_neurons_says_why_and_stays_as_it_is() {
    let (_, recipe) = recipes().swap_remove(0);
    let recipe = Recipe { layers: 4, width: 128, feed_forward: 2048, ..recipe };
    let plain = options(0, None);
    let devices = Devices::new([Sim::new("sim:0").build()], cpu()).unwrap();
    let whole = Placement { gpu_layers: GpuLayers::All, ..Placement::default() };
    let all = whole.plan(&recipe.model(), &devices, &plain).unwrap().forecast.bytes()[0].total();
    let rates = |kind| Rates { rendezvous: 0.0, ..Rates::assumed(kind) };
    let rates =
        vec![("sim:0".to_owned(), rates(DeviceKind::Gpu)), ("cpu".to_owned(), rates(DeviceKind::Cpu))];
    let auto = Placement { budget: Some(all * 6 / 10), rates, ..Placement::default() };
    let mut dense = plain.clone();
    dense.neurons.mode = NeuronMode::Dense;
    let ungated = Recipe::rectified().into_iter().find(|(_, recipe)| recipe.ungated).unwrap().1;
    let some = Placement { gpu_layers: GpuLayers::Count(2), budget: None, ..auto.clone() };
    let paged = EngineOptions { pages: 8, ..plain.clone() };
    for (placement, model, options, reason) in [
        (&auto, recipe.model(), &paged, "pages"),
        (&auto, recipe.model(), &dense, "exact mode only"),
        (&some, recipe.model(), &plain, "number of layers"),
        (&auto, adapted(&recipe), &plain, "adapter"),
        (&auto, ungated.model(), &plain, "rectified gates"),
        (&Placement { budget: Some(2 * all), ..auto.clone() }, recipe.model(), &plain, "whole model"),
    ] {
        let without = placement.plan(&model, &devices, options).unwrap();
        let with = Placement { hot_neurons: true, ..placement.clone() };
        let with = with.plan(&model, &devices, options).unwrap();
        let said = with.neurons_not_divided.unwrap_or("nothing");
        assert!(said.contains(reason), "{reason}: {said}");
        assert_eq!((with.neuron_slots, without.neurons_not_divided), (0, None), "{reason}");
        assert_eq!(with.forecast.bytes()[0].total(), without.forecast.bytes()[0].total(), "{reason}");
    }
    let divided = Placement { hot_neurons: true, ..auto }.plan(&recipe.model(), &devices, &plain).unwrap();
    assert_eq!((divided.neuron_slots > 0, divided.neurons_not_divided), (true, None));
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
        let mut engine = divided(&recipe.model(), Arc::clone(&sim) as _, &options(half, None));
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

/// A device reports only when it is waited for that it could not write the first rows: the engine is not made, or has none of them
/// in a slot.
#[test]
fn a_fault_of_the_first_uploads_leaves_no_unwritten_row_in_a_slot() {
    let (_, recipe) = recipes().swap_remove(0);
    let (model, tokens) = (recipe.model(), recipe.tokens(8));
    let mut host = engine(recipe.model(), options(0, None));
    let wanted: Vec<Vec<f32>> = tokens.iter().flat_map(|token| logits_of(&mut host, &[*token])).collect();
    let half = options(recipe.layers * recipe.feed_forward / 2, None);
    let overrides = TensorOverride::parse_list("ffn_(up|down_t)\\.weight$=CPU").unwrap();
    let placement = Placement { gpu_layers: GpuLayers::All, overrides, ..Placement::default() };
    let make = |device: Arc<dyn Backend>| {
        let placed = placement.plan(&model, &Devices::new([device], cpu()).unwrap(), &half).unwrap();
        Engine::new(model.clone(), &placed.scheduler, half.clone(), &mut |_| {})
    };
    let whole = Sim::new("sim:0").device();
    drop(make(Arc::clone(&whole) as _).unwrap());
    let transfers = whole.counts().of(FaultPoint::Transfer);
    let (mut refused, mut made) = (0, 0);
    for after in (0..transfers + 4).rev().take(40) {
        let sim = Sim::new("sim:0").device();
        sim.fail(FaultPoint::Transfer, after);
        let Ok(mut engine) = make(Arc::clone(&sim) as _) else {
            refused += 1;
            continue;
        };
        made += 1;
        let mut rows = Vec::new();
        while rows.len() < tokens.len() {
            match engine.feed(&[tokens[rows.len()]]) {
                Ok(()) => rows.push(engine.logits(0).to_vec()),
                Err(_) => sim.clear_faults(),
            }
        }
        let found = distance(&rows, &wanted);
        assert!(found < 1e-4, "fault {after} of {transfers}: off by {found:.2e}");
    }
    assert!(refused > 0 && made > 0, "{refused} engines were refused, {made} made");
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

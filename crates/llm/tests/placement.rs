//! Placement of layers on devices: which devices are used, how many layers they hold, and their budgets.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::Recipe;
use quadriga_llm::placement::{DeviceList, DeviceName, Devices};
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::{EngineOptions, Error, Generator, GeneratorOptions, GpuLayers, Model, Placement};
use quadriga_runtime::Backend;
use quadriga_sim::Sim;

fn sims(count: usize) -> Vec<Arc<dyn Backend>> {
    (0..count).map(|number| Sim::new(&format!("sim:{number}")).build()).collect()
}

fn devices(count: usize) -> Devices {
    Devices::new(sims(count), Arc::new(quadriga_cpu::Backend::builder().threads(1).build().unwrap())).unwrap()
}

fn recipe() -> Recipe {
    Recipe { text: true, layers: 4, context: 64, ..Recipe::new("llama") }
}

/// Bytes of weights on each device.
fn weights(model: &Model, devices: &Devices, placement: &Placement) -> Vec<u64> {
    let placed = placement.plan(model, devices, &EngineOptions::default()).unwrap();
    placed.forecast.bytes().iter().map(|bytes| bytes.weights).collect()
}

#[test]
fn a_generator_uses_the_accelerator_it_is_given() {
    let answer = |devices: DeviceList| {
        let options = GeneratorOptions {
            placement: Placement { devices, ..Placement::default() },
            sampling: SamplingOptions { temperature: 0.0, ..SamplingOptions::default() },
            max_tokens: Some(12),
            ..GeneratorOptions::default()
        };
        let mut generator = Generator::new(recipe().model(), options).unwrap();
        let plan = generator.engine().session().plan().unwrap();
        let names: Vec<String> =
            plan.bytes().iter().filter(|b| b.weights > 0).map(|b| b.backend.clone()).collect();
        (generator.answer("the cat").unwrap().text().unwrap(), names)
    };
    let (on_cpu, cpu_only) = answer(DeviceList::Named(vec![DeviceName::Cpu]));
    assert_eq!(cpu_only, ["cpu"]);
    let (text, used) = answer(DeviceList::Open(devices(1)));
    assert!(used.contains(&"sim:0".to_owned()), "{used:?}");
    assert_eq!(text, on_cpu);
}

#[test]
fn more_layers_put_more_weights_on_accelerators() {
    let (model, devices) = (recipe().model(), devices(2));
    let on = |gpu_layers| weights(&model, &devices, &Placement { gpu_layers, ..Placement::default() });
    let mut before = 0;
    for count in 1..=5 {
        let bytes = on(GpuLayers::Count(count));
        assert!(bytes[0] + bytes[1] > before, "{count} layers: {bytes:?}");
        before = bytes[0] + bytes[1];
    }
    assert_eq!(on(GpuLayers::Count(0))[..2], [0, 0]);
    assert_eq!(on(GpuLayers::Count(99)), on(GpuLayers::All));
    assert_eq!(on(GpuLayers::Auto), on(GpuLayers::All), "they fit");
}

#[test]
fn auto_fills_a_budget_and_stays_within_it() {
    let (model, devices) = (recipe().model(), devices(1));
    let options = EngineOptions::default();
    let bytes = |gpu_layers, budget| {
        let placement = Placement { gpu_layers, budget, ..Placement::default() };
        placement.plan(&model, &devices, &options).map(|placed| placed.forecast.bytes()[0].total())
    };
    let all = bytes(GpuLayers::All, None).unwrap();
    let mut before = 0;
    for budget in [all / 4, all / 2, all * 3 / 4, all] {
        let used = bytes(GpuLayers::Auto, Some(budget)).unwrap();
        assert!(used <= budget && used >= before, "{used} of {budget}");
        before = used;
    }
    assert_eq!(before, all);
    assert!(bytes(GpuLayers::All, Some(all / 2)).is_err(), "all layers do not fit half of their memory");
}

#[test]
fn device_names_are_checked() {
    assert_eq!("cpu".parse::<DeviceName>().unwrap(), DeviceName::Cpu);
    assert_eq!("Cuda:3".parse::<DeviceName>().unwrap(), DeviceName::Cuda(3));
    for name in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:1"] {
        assert!(matches!(name.parse::<DeviceName>(), Err(Error::UnknownDevice { .. })), "{name:?}");
    }
    let twice = [sims(1), sims(1)].concat();
    let cpu = Arc::new(quadriga_cpu::Backend::builder().threads(1).build().unwrap());
    let refused = Devices::new(twice, Arc::clone(&cpu));
    assert!(matches!(refused, Err(Error::DuplicateDevice { name }) if name == "sim:0"));
    let refused = Devices::new([Arc::clone(&cpu) as Arc<dyn Backend>], cpu);
    assert!(matches!(refused, Err(Error::DuplicateDevice { name }) if name == "cpu"));
    for (text, layers) in [("ALL", GpuLayers::All), ("auto", GpuLayers::Auto), ("7", GpuLayers::Count(7))] {
        assert_eq!(text.parse::<GpuLayers>().unwrap(), layers);
    }
    assert!("-1".parse::<GpuLayers>().is_err());
}

#[test]
fn queries_that_grow_with_their_position_cost_no_memory_for_the_context() {
    // Those of Llama 4 with ten million tokens of context, which fit where windows are most of it.
    let recipe = Recipe::with_experts().into_iter().map(|(_, recipe)| recipe);
    let recipe = recipe.into_iter().find(|recipe| recipe.architecture == "llama4").unwrap();
    let planned = |context: u32| {
        let model = Recipe { context, ..recipe.clone() }.model();
        let cpu = Arc::new(quadriga_cpu::Backend::builder().threads(1).build().unwrap());
        let devices = Devices::new([Sim::new("sim:0").build()], cpu).unwrap();
        let options = EngineOptions { context: 0, ..EngineOptions::default() };
        let (placed, found) = Placement::default().plan_with_context(&model, &devices, &options).unwrap();
        let weights: u64 = placed.forecast.bytes().iter().map(|bytes| bytes.weights + bytes.mapped).sum();
        (found.context, weights)
    };
    let ((short, few), (long, many)) = (planned(4096), planned(16_384));
    assert_eq!((short, long), (4096, 16_384));
    assert_eq!(few, many, "weights");
}

#[test]
fn the_context_is_that_of_training_where_half_of_the_memory_suffices() {
    let model = Recipe { context: 16_384, ..recipe() }.model();
    let placement = Placement { gpu_layers: GpuLayers::All, ..Placement::default() };
    let planned = |sim: Arc<dyn Backend>, context: usize| {
        let cpu = Arc::new(quadriga_cpu::Backend::builder().threads(1).build().unwrap());
        let options = EngineOptions { context, ..EngineOptions::default() };
        let devices = Devices::new([sim], cpu).unwrap();
        let (placed, found) = placement.plan_with_context(&model, &devices, &options).unwrap();
        (found.context, placed.forecast.bytes()[0].total())
    };
    let (context, needed) = planned(Sim::new("sim:0").build(), 0);
    assert_eq!(context, 16_384);
    let with = |capacity: u64| planned(Sim::new("sim:0").capacity(capacity).build(), 0).0;
    assert_eq!((with(2 * needed), with(2 * needed - 2)), (16_384, 8192));
    assert_eq!(with(needed), 4096, "the default, which has no such limit");
    // A context that was asked for is not changed.
    assert_eq!(planned(Sim::new("sim:0").capacity(2 * needed - 2).build(), 12_000).0, 12_000);
}

//! Experts that are divided between the slots of a device and the host give the results of the host alone, whatever is in
//! the slots and whenever an upload arrives or fails.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::{Arc, Mutex};

use crate::common::experts::ExpertRecipe;
use crate::common::{Recipe, distance, engine, logits_of};
use quadriga_graph::{DType, NodeId};
use quadriga_llm::placement::{ClassResidence, Devices, ExpertCache, TensorClass, expert_bytes, residence};
use quadriga_llm::{Batch, Engine, EngineOptions, GpuLayers, Placement};
use quadriga_runtime::{Backend, Detail, Plan, Rates, ReadCurve, ScheduleStep, WeightStreaming};
use quadriga_sim::{FaultPoint, Sim};

pub(crate) fn options(expert_slots: usize) -> EngineOptions {
    EngineOptions { batch: 16, context: 64, expert_slots, ..EngineOptions::default() }.cache(DType::F32)
}

/// Rates at which tiny models take as long as large ones do; each crossing takes so many seconds.
fn rates(rendezvous: f64) -> Vec<(String, Rates)> {
    let of = |read: f64| Rates {
        read,
        read_curve: ReadCurve::UNKNOWN,
        int8: 1e4 * read,
        bf16: 1e4 * read,
        f32: 1e4 * read,
        link: 1e9,
        rendezvous,
        launch: 0.0,
        measured: true,
    };
    vec![("sim:0".to_owned(), of(5e7)), ("cpu".to_owned(), of(1e6))]
}

pub(crate) fn cpu() -> Arc<quadriga_cpu::Backend> {
    Arc::new(quadriga_cpu::Backend::builder().threads(2).build().unwrap())
}

/// An engine with all experts on the CPU, all else on a device, and slots there for some experts.
pub(crate) fn divided(recipe: &Recipe, device: Arc<dyn Backend>, slots: usize) -> Engine {
    let model = recipe.model();
    let placement =
        Placement { gpu_layers: GpuLayers::All, cpu_expert_layers: usize::MAX, ..Placement::default() };
    let placed = placement.plan(&model, &Devices::new([device], cpu()).unwrap(), &options(slots)).unwrap();
    Engine::new(model, &placed.scheduler, options(slots), &mut |_| {}).unwrap()
}

/// A prompt whose experts nobody observes, a short one, then tokens one by one.
pub(crate) fn run(engine: &mut Engine, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut rows = logits_of(engine, &tokens[..11]);
    rows.extend(logits_of(engine, &tokens[11..15]));
    for token in &tokens[15..] {
        rows.extend(logits_of(engine, &[*token]));
    }
    rows
}

#[test]
fn any_number_of_slots_gives_the_same_logits() {
    for (name, recipe) in Recipe::with_experts() {
        let tokens = recipe.tokens(20);
        let wanted = run(&mut engine(recipe.model(), options(0)), &tokens);
        for slots in [3, usize::MAX] {
            let mut engine = divided(&recipe, Sim::new("sim:0").build(), slots);
            let found = distance(&run(&mut engine, &tokens), &wanted);
            assert!(found < 1e-4, "{name}, {slots} slots: off by {found:.2e}");
            let usage = engine.expert_cache().expect("there are slots");
            assert!(usage.slots > 0 && usage.slots <= slots as u64, "{name}: {usage:?}");
            assert!(usage.lookups > 0, "{name}: {usage:?}");
            if slots == usize::MAX {
                assert_eq!((usage.hits, usage.uploads), (usage.lookups, 0), "{name}: {usage:?}");
            }
        }
    }
}

/// Of a long batch, a device streams the experts that are in no slot, and no others.
#[test]
fn experts_in_slots_are_not_streamed() {
    for (name, recipe) in Recipe::with_experts() {
        let (tokens, model) = (recipe.tokens(20), recipe.model());
        let wanted = run(&mut engine(recipe.model(), options(0)), &tokens);
        let all = divided(&recipe, Sim::new("sim:0").build(), usize::MAX).expert_cache().unwrap().slots;
        for slots in [3, 4 * recipe.layers, usize::MAX] {
            let placement = Placement {
                gpu_layers: GpuLayers::All,
                cpu_expert_layers: usize::MAX,
                streaming: Some(WeightStreaming { operations_per_byte: 0, min_operations: 0 }),
                ..Placement::default()
            };
            let devices = Devices::new([Sim::new("sim:0").build()], cpu()).unwrap();
            let placed = placement.plan(&model, &devices, &options(slots)).unwrap();
            let mut engine =
                Engine::new(recipe.model(), &placed.scheduler, options(slots), &mut |_| {}).unwrap();
            let copied = Arc::new(Mutex::new(Vec::new()));
            let seen = Arc::clone(&copied);
            let observer = move |batch: &Batch<'_>| {
                let selected = batch.trace.copies.iter().filter(|copy| copy.selected);
                seen.lock().unwrap().push(selected.map(|copy| copy.bytes).sum::<usize>());
            };
            engine.observe(Some((Detail::Splits, Box::new(observer))));
            let mut rows = logits_of(&mut engine, &tokens[..11]);
            let first = copied.lock().unwrap()[0];
            assert_eq!(first == 0, slots as u64 >= all, "{name}, {slots} slots: {first} bytes");
            engine.observe(None);
            rows.extend(run_rest(&mut engine, &tokens[11..]));
            let found = distance(&rows, &wanted);
            assert!(found < 1e-4, "{name}, {slots} slots: off by {found:.2e}");
        }
    }
}

fn run_rest(engine: &mut Engine, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut rows = logits_of(engine, &tokens[..4]);
    rows.extend(tokens[4..].iter().flat_map(|token| logits_of(engine, &[*token])));
    rows
}

/// While a token is decoded, device and host wait for each other once each way in a layer, whatever has slots.
#[test]
fn a_layer_has_one_rendezvous_each_way() {
    for (name, recipe) in Recipe::with_experts() {
        for slots in [0, 3, usize::MAX] {
            let mut engine = divided(&recipe, Sim::new("sim:0").build(), slots);
            engine.feed(&recipe.tokens(1)).unwrap();
            let plan = engine.session().plan().unwrap();
            let backends: Vec<usize> = plan.splits().splits.iter().map(|split| split.backend).collect();
            let with_experts = plan
                .splits()
                .splits
                .iter()
                .enumerate()
                .filter(|(number, split)| {
                    let is_expert = |node: &NodeId| plan.graph()[*node].op().name() == "mul_mat_id";
                    split.backend == 1 && plan.splits().nodes_of(*number).iter().any(is_expert)
                })
                .count();
            assert!(with_experts > 0 && with_experts <= recipe.layers, "{name}, {slots} slots: {backends:?}");
            let crossings = backends.windows(2).filter(|pair| pair[0] != pair[1]).count();
            assert!(crossings <= 2 * with_experts, "{name}, {slots} slots: {backends:?}");
        }
    }
}

/// The numbers of splits that have to be done before one may start, by copies, barriers, and the order of each backend's own splits.
fn before(plan: &Plan, split: usize) -> Vec<usize> {
    let splits = plan.splits();
    let (mut found, mut open) = (Vec::new(), vec![split]);
    while let Some(number) = open.pop() {
        let own = &splits.splits[number];
        let copies = own.inputs.iter().chain(&own.after_copies).map(|copy| &splits.copies[*copy]);
        let sources = copies.flat_map(|copy| copy.source.into_iter().chain(copy.after));
        let earlier = (0..number).filter(|other| splits.splits[*other].backend == own.backend);
        for needed in sources.chain(own.after_splits.iter().copied()).chain(earlier) {
            if !found.contains(&needed) {
                found.push(needed);
                open.push(needed);
            }
        }
    }
    found
}

/// While the CPU computes its experts of a layer, the device computes those in slots and the shared expert: it is given that work before
/// the CPU, which the host waits for, and needs nothing of what the CPU computes.
#[test]
fn device_and_cpu_compute_the_experts_of_a_layer_at_once() {
    let (mut slots_beside, mut shared_beside) = (0, 0);
    for (name, recipe) in Recipe::with_experts() {
        for slots in [0, 3, 4 * recipe.layers] {
            let mut engine = divided(&recipe, Sim::new("sim:0").build(), slots);
            engine.feed(&recipe.tokens(1)).unwrap();
            let plan = engine.session().plan().unwrap();
            let graph = plan.graph();
            let issued = |split: usize| {
                plan.order().iter().position(|step| *step == ScheduleStep::Split(split)).unwrap()
            };
            // The splits of a backend that multiply with weights of a layer whose names contain this.
            let splits_with = |backend: usize, layer: usize, part: &str| -> Vec<usize> {
                let has = |node: &NodeId| {
                    let weight = graph.inputs(*node).first().map(|id| graph.name(*id)).unwrap_or_default();
                    weight.starts_with(&format!("blk.{layer}.")) && weight.contains(part)
                };
                let splits = plan.splits().splits.iter().enumerate();
                let own = splits.filter(|(_, split)| split.backend == backend);
                own.map(|(number, _)| number)
                    .filter(|number| plan.splits().nodes_of(*number).iter().any(has))
                    .collect()
            };
            for layer in 0..recipe.layers {
                let on_cpu = splits_with(1, layer, "_exps");
                for (part, count) in [(".slots", &mut slots_beside), ("_shexp", &mut shared_beside)] {
                    for device in splits_with(0, layer, part) {
                        for cpu in &on_cpu {
                            let context = format!("{name}, {slots} slots, layer {layer}, {part}");
                            assert!(!before(plan, device).contains(cpu), "{context}: waits for the CPU");
                            assert!(!before(plan, *cpu).contains(&device), "{context}: the CPU waits for it");
                            assert!(issued(device) < issued(*cpu), "{context}: issued after the CPU's");
                            *count += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(slots_beside > 0 && shared_beside > 0, "{slots_beside} with slots, {shared_beside} shared");
}

#[test]
fn without_a_device_or_without_experts_there_are_no_slots() {
    let (_, recipe) = Recipe::with_experts().into_iter().next().unwrap();
    assert!(engine(recipe.model(), options(4)).expert_cache().is_none());
    let dense = Recipe::new("llama");
    let tokens = dense.tokens(20);
    let wanted = run(&mut engine(dense.model(), options(0)), &tokens);
    let mut engine = divided(&dense, Sim::new("sim:0").build(), 4);
    assert!(engine.expert_cache().is_none());
    assert!(distance(&run(&mut engine, &tokens), &wanted) < 1e-4);
}

/// Repeats one token, so that the same experts are used again and again, until some have moved.
fn settle(engine: &mut Engine, token: u32, steps: usize) -> Vec<Vec<f32>> {
    (0..steps).flat_map(|_| logits_of(engine, &[token])).collect()
}

fn narrow() -> Recipe {
    let (_, recipe) = Recipe::with_experts().into_iter().find(|(name, _)| *name == "stacked").unwrap();
    recipe
}

#[test]
fn experts_in_use_move_into_slots() {
    let recipe = narrow();
    // As many slots as a token uses experts: whatever they have at first is wrong for some token.
    let mut moved = 0;
    for token in recipe.tokens(3) {
        let wanted = settle(&mut engine(recipe.model(), options(0)), token, 24);
        let mut engine = divided(&recipe, Sim::new("sim:0").build(), 2 * recipe.layers);
        let found = distance(&settle(&mut engine, token, 24), &wanted);
        assert!(found < 1e-4, "token {token}: off by {found:.2e}");
        let usage = engine.expert_cache().unwrap();
        moved += usage.uploads;
        assert_eq!(usage.bytes == 0, usage.uploads == 0, "{usage:?}");
    }
    assert!(moved > 0, "nothing moved");
}

#[test]
fn a_fault_of_an_upload_loses_nothing() {
    let recipe = narrow();
    let token = recipe.tokens(8)[3];
    let wanted = settle(&mut engine(recipe.model(), options(0)), token, 24);
    let undisturbed = {
        let mut engine = divided(&recipe, Sim::new("sim:0").build(), 2 * recipe.layers);
        settle(&mut engine, token, 24);
        engine.expert_cache().unwrap().uploads
    };
    assert!(undisturbed > 0, "nothing moves");
    // Faults of a batch, and of an upload alone: that is started again, and no batch fails.
    let (mut failed, mut repeated) = (0, 0);
    for packs in [false, true] {
        for after in 0..60 {
            let sim = Sim::new("sim:0");
            let sim = if packs { sim.packs_weights() } else { sim }.device();
            let mut engine = divided(&recipe, Arc::clone(&sim) as _, 2 * recipe.layers);
            let mut rows = settle(&mut engine, token, 4);
            sim.fail(FaultPoint::Transfer, after);
            let mut batches = 0;
            while rows.len() < 24 {
                let before = engine.len(0);
                let result = engine.feed(&[token]);
                if result.is_err() {
                    batches += 1;
                    sim.clear_faults();
                    assert_eq!(engine.len(0), before, "fault {after}: {:?}", result.err());
                    continue;
                }
                rows.push(engine.logits(0).to_vec());
            }
            let found = distance(&rows, &wanted);
            assert!(found < 1e-4, "fault {after}: off by {found:.2e}");
            failed += batches;
            let uploads = engine.expert_cache().unwrap().uploads;
            repeated += usize::from(batches == 0 && uploads > undisturbed);
        }
    }
    assert!(failed > 0, "no batch failed");
    assert!(repeated > 0, "no upload failed");
}

#[test]
fn a_batch_does_not_need_an_upload_that_cannot_be_started() {
    let recipe = narrow();
    let token = recipe.tokens(8)[3];
    let wanted = settle(&mut engine(recipe.model(), options(0)), token, 24);
    let mut refused = 0;
    for after in 0..60 {
        let sim = Sim::new("sim:0").device();
        let mut engine = divided(&recipe, Arc::clone(&sim) as _, 2 * recipe.layers);
        // An upload that fails loses its staging memory, so that the next one needs new memory; nothing else does.
        let mut rows = settle(&mut engine, token, 4);
        sim.fail(FaultPoint::Transfer, after);
        let transfers = sim.counts().of(FaultPoint::Transfer);
        while rows.len() < 16 && sim.counts().of(FaultPoint::Transfer) <= transfers + after {
            if engine.feed(&[token]).is_ok() {
                rows.push(engine.logits(0).to_vec());
            }
        }
        sim.clear_faults();
        let attempts = sim.counts().of(FaultPoint::Allocation);
        sim.fail(FaultPoint::Allocation, 0);
        while rows.len() < 24 {
            match engine.feed(&[token]) {
                Ok(()) => rows.push(engine.logits(0).to_vec()),
                // The failed transfer may show late; memory that was refused must not show.
                Err(error) => {
                    assert!(!format!("{error:?}").contains("OutOfMemory"), "fault {after}: {error}")
                }
            }
        }
        refused += u64::from(sim.counts().of(FaultPoint::Allocation) > attempts);
        let found = distance(&rows, &wanted);
        assert!(found < 1e-4, "fault {after}: off by {found:.2e}");
    }
    assert!(refused > 0, "no upload was refused");
}

#[test]
fn automatic_placement_gives_what_is_left_to_experts_that_move() {
    let (_, recipe) =
        Recipe::with_experts().into_iter().find(|(name, _)| *name == "shared expert with a gate").unwrap();
    let experts = recipe.experts.map(|experts| ExpertRecipe { count: 40, ..experts });
    let recipe = Recipe { layers: 4, experts, ..recipe };
    let tokens = recipe.tokens(24);
    let wanted = run(&mut engine(recipe.model(), options(0)), &tokens);
    let model = recipe.model();
    let plan = |budget: u64, cache: ExpertCache, device: Arc<dyn Backend>| {
        let placement = Placement {
            budget: Some(budget),
            expert_cache: cache,
            rates: rates(1e-6),
            ..Placement::default()
        };
        placement.plan(&model, &Devices::new([device], cpu()).unwrap(), &options(0)).unwrap()
    };
    let sim = || Sim::new("sim:0").build();
    let whole = plan(1 << 30, ExpertCache::Auto, sim());
    let (all, one) = (whole.forecast.bytes()[0].total(), expert_bytes(&model).unwrap());
    assert!(whole.expert_slots == 0 && one > 0, "everything fits");
    let mut most = 0;
    for part in 4..20 {
        let budget = all * part / 20;
        let device = Sim::new("sim:0").capacity(budget).build();
        let placed = plan(budget, ExpertCache::Auto, Arc::clone(&device));
        if placed.expert_slots == 0 {
            continue;
        }
        most = most.max(placed.expert_slots);
        let resident_experts = placed.resident_experts;
        let with_slots = placed.engine_options(&options(0));
        // The device has no more memory than the budget.
        let mut engine = Engine::new(recipe.model(), &placed.scheduler, with_slots, &mut |_| {}).unwrap();
        let found = distance(&run(&mut engine, &tokens), &wanted);
        assert!(found < 1e-4, "{part} of 20: off by {found:.2e}");
        assert_eq!(engine.expert_cache().unwrap().slots, placed.expert_slots as u64);
        // What is in slots is not computed by the CPU.
        let cpu_seconds = |slots: usize| {
            let placement = Placement { budget: Some(budget), rates: rates(1e-6), ..Placement::default() };
            let devices = Devices::new([sim()], cpu()).unwrap();
            let options = EngineOptions { expert_slots: slots, resident_experts, ..options(0) };
            let estimate = placement.estimate(&model, &devices, &options, &placed).unwrap();
            estimate.decode.unwrap().compute[1]
        };
        assert!(cpu_seconds(placed.expert_slots) < cpu_seconds(0));
        // A gigabyte more is enough for all experts here.
        let placement = Placement { budget: Some(budget), rates: rates(1e-6), ..Placement::default() };
        let devices = Devices::new([sim()], cpu()).unwrap();
        let options = EngineOptions { expert_slots: placed.expert_slots, resident_experts, ..options(0) };
        let next = placement.next_gigabyte(&model, &devices, &options, &placed).unwrap().unwrap();
        assert_eq!(next.expert_slots, 40 * (4 - resident_experts.len()) - placed.expert_slots);
        assert!(next.decode[1] > next.decode[0], "{next:?}");
        assert_eq!(plan(budget, ExpertCache::Bytes(0), sim()).expert_slots, 0, "turned off");
        let some = plan(budget, ExpertCache::Bytes(3 * one), sim());
        assert!((1..=3).contains(&some.expert_slots), "not more than asked for: {}", some.expert_slots);
    }
    assert!(most > 0, "no budget had slots");
}

/// A mixture of many experts, beside which the rest of the model is small.
fn many() -> Recipe {
    let recipe = narrow();
    let experts = recipe.experts.map(|experts| ExpertRecipe { count: 40, ..experts });
    Recipe { layers: 4, experts, ..recipe }
}

#[test]
fn a_batch_without_outputs_needs_no_tables_where_only_the_last_layer_has_a_slot() {
    let recipe = narrow();
    let tokens = recipe.tokens(9);
    let with = |expert_slots: usize| EngineOptions { batch: 3, ..options(expert_slots) };
    let mut host = engine(recipe.model(), with(0));
    host.feed(&tokens).unwrap();
    let model = recipe.model();
    let placement =
        Placement { gpu_layers: GpuLayers::All, cpu_expert_layers: usize::MAX, ..Placement::default() };
    let devices = Devices::new([Sim::new("sim:0").build()], cpu()).unwrap();
    let placed = placement.plan(&model, &devices, &with(0)).unwrap();
    let mut divided = Engine::new(model, &placed.scheduler, with(1), &mut |_| {}).unwrap();
    divided.feed(&tokens).unwrap();
    let rows = |engine: &Engine| vec![engine.logits(0).to_vec()];
    assert!(distance(&rows(&divided), &rows(&host)) < 1e-4);
}

#[test]
fn slots_fit_beside_every_batch_and_context() {
    let recipe = many();
    let (tokens, model) = (recipe.tokens(30), recipe.model());
    let wanted = run(&mut engine(recipe.model(), options(0)), &tokens);
    let one = expert_bytes(&model).unwrap();
    let mut least = 0;
    for (layers, cache) in [
        (GpuLayers::Auto, ExpertCache::Auto),
        (GpuLayers::Auto, ExpertCache::Bytes(20 * one)),
        (GpuLayers::Auto, ExpertCache::Bytes(40 * one)),
        (GpuLayers::All, ExpertCache::Bytes(1 << 40)),
    ] {
        let budget = 70 * one;
        // The experts that are on their way are within the budget, too.
        let device = Sim::new("sim:0").capacity(budget).build();
        let placement = Placement {
            gpu_layers: layers,
            expert_cache: cache,
            budget: Some(budget),
            cpu_expert_layers: usize::MAX,
            rates: rates(1e-6),
            ..Placement::default()
        };
        let devices = Devices::new([device], cpu()).unwrap();
        let open = EngineOptions { context: 0, ..options(0) };
        let (placed, found) = placement.plan_with_context(&model, &devices, &open).unwrap();
        let context =
            format!("{layers:?}, {cache:?}: {} slots, context {}", placed.expert_slots, found.context);
        assert_eq!(found.expert_slots, placed.expert_slots, "{context}");
        assert!(placed.expert_slots > 0, "{context}");
        if layers == GpuLayers::Auto && cache != ExpertCache::Auto {
            assert!(placed.expert_slots >= least, "a larger cache has more slots: {context}");
            least = placed.expert_slots;
        }
        let mut engine = Engine::new(recipe.model(), &placed.scheduler, found, &mut |_| {}).unwrap();
        assert!(distance(&run(&mut engine, &tokens), &wanted) < 1e-4, "{context}");
    }
}

#[test]
fn each_accelerator_has_at_most_the_bytes_of_the_cache() {
    let recipe = many();
    let (tokens, model) = (recipe.tokens(20), recipe.model());
    let wanted = run(&mut engine(recipe.model(), options(0)), &tokens);
    let bytes = 12 * expert_bytes(&model).unwrap();
    for layers in [GpuLayers::Count(2), GpuLayers::All] {
        let placement = Placement {
            gpu_layers: layers,
            expert_cache: ExpertCache::Bytes(bytes),
            cpu_expert_layers: usize::MAX,
            ..Placement::default()
        };
        let sims = [Sim::new("sim:0").build(), Sim::new("sim:1").build()];
        let devices = Devices::new(sims, cpu()).unwrap();
        let (placed, found) = placement.plan_with_context(&model, &devices, &options(0)).unwrap();
        let mut engine = Engine::new(recipe.model(), &placed.scheduler, found, &mut |_| {}).unwrap();
        assert!(distance(&run(&mut engine, &tokens), &wanted) < 1e-4);
        let plan = engine.session().plan().unwrap().explain();
        let mut slots = [0; 3];
        for storage in plan.storages.iter().filter(|storage| storage.name.ends_with(".slots")) {
            slots[storage.backend] += storage.bytes;
        }
        assert!(slots[0] > 0 && slots.iter().all(|own| *own <= bytes + bytes / 64), "{layers:?}: {slots:?}");
    }
}

/// What is chosen is estimated to be no slower than whole layers alone; with crossings that cost much, as many layers are whole
/// as fit, and with crossings that cost nothing there are slots for all.
#[test]
fn experts_are_placed_by_estimated_time() {
    let recipe = many();
    let (tokens, model) = (recipe.tokens(24), recipe.model());
    let wanted = run(&mut engine(recipe.model(), options(0)), &tokens);
    let devices = || Devices::new([Sim::new("sim:0").build()], cpu()).unwrap();
    let whole = Placement::default().plan(&model, &devices(), &options(0)).unwrap();
    let all = whole.forecast.bytes()[0].total();
    // By the seconds of a crossing: how often some experts were in slots, and how often some layers' were resident beside them.
    let mut found = Vec::new();
    for crossing in [1e-9, 1e-3, 1.0] {
        let (mut with_slots, mut mixed) = (0, 0);
        for part in 8..20 {
            let placement =
                Placement { budget: Some(all * part / 20), rates: rates(crossing), ..Placement::default() };
            let speeds = |placement: &Placement| {
                let placed = placement.plan(&model, &devices(), &options(0)).unwrap();
                let options = placed.engine_options(&options(0));
                let estimate = placement.estimate(&model, &devices(), &options, &placed).unwrap();
                (placed, estimate, options)
            };
            let (placed, estimate, with) = speeds(&placement);
            let (_, layers, _) =
                speeds(&Placement { expert_cache: ExpertCache::Bytes(0), ..placement.clone() });
            let context = format!("{crossing} s, {part} of 20: {:?}", placed.expert_options);
            assert!(estimate.request_seconds() <= layers.request_seconds() * 1.0001, "{context}");
            let without = estimate.without_locality().request_seconds();
            assert!(without <= layers.request_seconds() * 1.0201, "{context}");
            assert_eq!(placed.expert_options.iter().filter(|option| option.chosen).count(), 1, "{context}");
            with_slots += usize::from(placed.expert_slots > 0);
            if placed.expert_slots > 0 && !placed.resident_experts.is_empty() {
                mixed += 1;
                let mut engine = Engine::new(recipe.model(), &placed.scheduler, with, &mut |_| {}).unwrap();
                let off = distance(&run(&mut engine, &tokens), &wanted);
                assert!(off < 1e-4, "{context}: off by {off:.2e}");
            }
        }
        found.push((with_slots, mixed));
    }
    // Where crossings are dear, slots are for the layers only that the CPU has a part of in any case.
    assert!(found[0].0 > found[0].1 && found[2].0 == found[2].1, "{found:?}");
    assert!(found.iter().any(|(_, mixed)| *mixed > 0), "{found:?}");
}

/// As in llama.cpp, only the named layers' experts are on the CPU; the others are where they would be without the flag.
#[test]
fn experts_of_layers_that_are_not_named_stay_where_they_fit() {
    let model = many().model();
    let devices = Devices::new([Sim::new("sim:0").build()], cpu()).unwrap();
    for (budget, named) in [(None, 1), (None, 3), (Some(1 << 40), 2)] {
        let placement = Placement { budget, cpu_expert_layers: named, ..Placement::default() };
        let placed = placement.plan(&model, &devices, &options(0)).unwrap();
        let layers = |backend: usize| -> Vec<usize> {
            let parts = residence(&placed.forecast.explain());
            let experts =
                |part: &&ClassResidence| part.class == TensorClass::Experts && part.backend == backend;
            parts.iter().find(experts).map_or_else(Vec::new, |part| part.layers.clone())
        };
        assert_eq!(layers(1), (0..named).collect::<Vec<_>>(), "{named} on the CPU");
        for layer in named..4 {
            assert!(layers(0).contains(&layer), "{named} on the CPU: {:?}", layers(0));
        }
    }
}

/// A device whose link is so slow that an expert is on its way for several steps.
fn slow_link() -> Arc<Sim> {
    Sim::new("sim:0").timed_polls().copy_seconds(0.0, 1e-6).device()
}

/// Tokens that keep to some experts for a while.
fn on_topics(recipe: &Recipe) -> Vec<u32> {
    recipe.tokens(6).into_iter().flat_map(|token| [token; 40]).take(60).collect()
}

/// Feeds tokens one by one; each step's logits, seconds of the device's clock, and the cache afterwards.
fn slow_steps(
    engine: &mut Engine,
    sim: &Sim,
    tokens: &[u32],
) -> Vec<(Vec<f32>, f64, quadriga_llm::ExpertCacheUse)> {
    let step = |token: &u32| {
        let before = sim.host_seconds();
        engine.feed(&[*token]).unwrap();
        let rows = engine.logits(0).to_vec();
        (rows, sim.host_seconds() - before, engine.expert_cache().unwrap())
    };
    tokens.iter().map(step).collect()
}

#[test]
fn uploads_over_a_slow_link_take_several_steps_and_none_waits_for_them() {
    let recipe = many();
    let tokens = on_topics(&recipe);
    let mut host = engine(recipe.model(), options(0));
    let wanted: Vec<Vec<f32>> = tokens.iter().flat_map(|token| logits_of(&mut host, &[*token])).collect();
    let one = expert_bytes(&recipe.model()).unwrap();
    for upload_bytes in [1, 3 * one, 0] {
        let sim = slow_link();
        let slots = 4 * recipe.layers;
        let model = recipe.model();
        let placement =
            Placement { gpu_layers: GpuLayers::All, cpu_expert_layers: usize::MAX, ..Placement::default() };
        let devices = Devices::new([Arc::clone(&sim) as Arc<dyn Backend>], cpu()).unwrap();
        let with = EngineOptions { upload_bytes, ..options(slots) };
        let placed = placement.plan(&model, &devices, &with).unwrap();
        let mut engine = Engine::new(model, &placed.scheduler, with, &mut |_| {}).unwrap();
        let steps = slow_steps(&mut engine, &sim, &tokens);
        let context = format!("{upload_bytes} bytes a step");
        let found: Vec<Vec<f32>> = steps.iter().map(|(rows, ..)| rows.clone()).collect();
        let off = distance(&found, &wanted);
        assert!(off < 1e-4, "{context}: off by {off:.2e}");
        // The first step plans, and loads what nobody had used before.
        let seconds = || steps.iter().skip(1).map(|(_, seconds, _)| *seconds);
        let upload = one as f64 * 1e-6;
        let longest = seconds().fold(0.0, f64::max);
        assert!(longest * 4.0 < upload, "{context}: a step of {longest} s, an expert of {upload} s");
        // In every step there are at most as many uploads as there is room for.
        let uploads: Vec<u64> = steps.iter().map(|(.., usage)| usage.uploads).collect();
        assert!(uploads.last().is_some_and(|all| *all >= 2), "{context}: {uploads:?}");
        if upload_bytes > 0 {
            let most = (upload_bytes / one).max(1);
            assert!(uploads.windows(2).all(|pair| pair[1] - pair[0] <= most), "{context}: {uploads:?}");
            // No more start before one of them has arrived: the time of the uploads is that of the link.
            let all = seconds().sum::<f64>();
            let arrived = *uploads.last().unwrap() - most;
            assert!(arrived as f64 * upload <= all * 1.01, "{context}: {arrived} uploads in {all} s");
        }
    }
}

#[test]
fn faults_of_slow_uploads_lose_nothing() {
    let recipe = many();
    let tokens = on_topics(&recipe);
    let mut host = engine(recipe.model(), options(0));
    let wanted: Vec<Vec<f32>> = tokens.iter().flat_map(|token| logits_of(&mut host, &[*token])).collect();
    let (mut failed, mut uploads) = (0, 0);
    for (case, point) in (0..12).zip([FaultPoint::Transfer, FaultPoint::Run].into_iter().cycle()) {
        let sim = slow_link();
        let mut engine = divided(&recipe, Arc::clone(&sim) as _, 4 * recipe.layers);
        let (mut rows, mut step) = (Vec::new(), 0);
        while rows.len() < tokens.len() {
            step += 1;
            // Somewhere in this step: in its own work, or in an upload that has been going on for some steps.
            if step % 5 == 0 && step < 100 {
                sim.fail(point, (case * 7 + step) as u64 % 40);
            }
            let before = engine.len(0);
            match engine.feed(&[tokens[rows.len()]]) {
                Ok(()) => rows.push(engine.logits(0).to_vec()),
                Err(error) => {
                    failed += 1;
                    sim.clear_faults();
                    assert_eq!(engine.len(0), before, "case {case}, step {step}: {error}");
                }
            }
            assert!(step < 1000, "case {case}");
        }
        let off = distance(&rows, &wanted);
        assert!(off < 1e-4, "case {case}: off by {off:.2e}");
        uploads += engine.expert_cache().unwrap().uploads;
    }
    assert!(failed > 0 && uploads > 0, "{failed} batches failed, {uploads} uploads");
}

//! Where the processors that divide experts compute alike, the results are the same bits, whatever is in the slots; and experts that
//! could not be written at first are in none.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::{Recipe, distance, engine, logits_of};
use crate::expert_slot_quantized::recipes;
use crate::expert_slots::{cpu, options, run};
use quadriga_llm::placement::Devices;
use quadriga_llm::{Engine, GpuLayers, Placement};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_sim::{FaultPoint, Sim};

/// Two backends that compute alike: experts are on the second, slots for some of them and all else on the first.
fn scheduler(backends: [Arc<dyn Backend>; 2]) -> Scheduler {
    Scheduler::new(backends).place(|name| match name {
        "experts_on_host" | "expert_numbers" => Some(1),
        name if name.ends_with(".slots") => Some(0),
        name => name.contains('.').then(|| usize::from(name.contains("_exps"))),
    })
}

fn alike(recipe: &Recipe, backends: [Arc<dyn Backend>; 2], slots: usize) -> Engine {
    Engine::new(recipe.model(), &scheduler(backends), options(slots), &mut |_| {}).unwrap()
}

fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| row.iter().map(|value| value.to_bits()).collect()).collect()
}

/// Tokens that keep to some experts for a while, so that these move.
fn on_topics(recipe: &Recipe) -> Vec<u32> {
    recipe.tokens(4).into_iter().flat_map(|token| [token; 12]).collect()
}

#[test]
fn processors_that_compute_alike_give_the_same_bits_with_any_slots() {
    let sims = || [Sim::new("sim:0").build(), Sim::new("sim:1").host().build()];
    let packing = || [Sim::new("sim:0").packs_weights().build(), Sim::new("sim:1").host().build()];
    let slow = || {
        let device = Sim::new("sim:0").packs_weights().timed_polls().copy_seconds(0.0, 1e-6);
        [device.build(), Sim::new("sim:1").host().build()]
    };
    let (mut moved, mut hits) = (0, [0; 3]);
    // Their tokens use one expert: its result is added to nothing, so that no sum is in another order.
    for (name, recipe) in recipes() {
        let tokens = on_topics(&recipe);
        for (kind, backends) in
            [&sims as &dyn Fn() -> [Arc<dyn Backend>; 2], &packing, &slow].into_iter().enumerate()
        {
            let wanted = bits(&run(&mut alike(&recipe, backends(), 0), &tokens));
            for slots in [2, 5, usize::MAX] {
                let mut engine = alike(&recipe, backends(), slots);
                let found = bits(&run(&mut engine, &tokens));
                let usage = engine.expert_cache().expect("there are slots");
                assert!(found == wanted, "{name}, backends {kind}, {slots} slots: other bits, {usage:?}");
                hits[kind] += usage.hits;
                moved += usage.uploads;
            }
        }
    }
    assert!(moved > 0 && hits.iter().all(|hits| *hits > 0), "{moved} uploads, {hits:?} experts in a slot");
}

/// A device reports only when it is waited for that it could not write the first experts: the engine is not made, or has none of them
/// in a slot.
#[test]
fn a_fault_of_the_first_uploads_leaves_no_unwritten_expert_in_a_slot() {
    let recipe = recipes().swap_remove(0).1;
    let (model, tokens) = (recipe.model(), recipe.tokens(8));
    let mut host = engine(recipe.model(), options(0));
    let wanted: Vec<Vec<f32>> = tokens.iter().flat_map(|token| logits_of(&mut host, &[*token])).collect();
    let placement =
        Placement { gpu_layers: GpuLayers::All, cpu_expert_layers: usize::MAX, ..Placement::default() };
    let make = |device: Arc<dyn Backend>| {
        let devices = Devices::new([device], cpu()).unwrap();
        let placed = placement.plan(&model, &devices, &options(usize::MAX)).unwrap();
        Engine::new(model.clone(), &placed.scheduler, options(usize::MAX), &mut |_| {})
    };
    let whole = Sim::new("sim:0").device();
    drop(make(Arc::clone(&whole) as _).unwrap());
    let transfers = whole.counts().of(FaultPoint::Transfer);
    let (mut refused, mut made) = (0, 0);
    for after in (0..transfers + 4).rev().take(60) {
        let sim = Sim::new("sim:0").device();
        sim.fail(FaultPoint::Transfer, after);
        let Ok(mut engine) = make(Arc::clone(&sim) as _) else {
            refused += 1;
            continue;
        };
        made += 1;
        let (mut rows, mut failed) = (Vec::new(), 0);
        while rows.len() < tokens.len() {
            match engine.feed(&[tokens[rows.len()]]) {
                Ok(()) => rows.push(engine.logits(0).to_vec()),
                Err(error) => {
                    sim.clear_faults();
                    failed += 1;
                    assert!(failed < 20, "fault {after} of {transfers}: {error}");
                }
            }
        }
        let found = distance(&rows, &wanted);
        assert!(found < 1e-4, "fault {after} of {transfers}: off by {found:.2e}");
    }
    assert!(refused > 0 && made > 0, "{refused} engines were refused, {made} made");
}

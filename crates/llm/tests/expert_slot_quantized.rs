//! Plain and quantized experts that move into slots which a device packs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::experts::{ExpertRecipe, Layout};
use crate::common::{QueryNorms, Recipe, distances, engine};
use crate::expert_slots::{cpu, divided, options, run};
use quadriga_graph::DType;
use quadriga_llm::placement::Devices;
use quadriga_llm::{Engine, GpuLayers, Placement};
use quadriga_sim::Sim;

/// Models whose tokens use one expert.
pub(crate) fn recipes() -> Vec<(String, Recipe)> {
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::Q8_0, DType::Q4_0] {
        for (name, layout, shared) in [
            ("stacked", Layout::Stacked, 0),
            ("fused", Layout::Fused, 0),
            ("shared expert", Layout::Stacked, 64),
        ] {
            let experts = ExpertRecipe {
                layout,
                width: 64,
                shared,
                shared_gate: shared > 0,
                normalize: false,
                ..ExpertRecipe::new(6, 1)
            };
            let recipe = match shared {
                0 => Recipe { query_norms: QueryNorms::Head, ..Recipe::wide("qwen3moe", dtype) },
                _ => Recipe { biases: true, ..Recipe::wide("qwen2moe", dtype) },
            };
            let recipe = Recipe { layers: 2, experts: Some(experts), ..recipe };
            all.push((format!("{name} {dtype}"), recipe));
        }
    }
    all
}

/// Tokens that keep to some experts for a while, so that these move.
fn on_topics(recipe: &Recipe) -> Vec<u32> {
    recipe.tokens(4).into_iter().flat_map(|token| [token; 12]).collect()
}

/// Quantized experts move into packed slots and back beside a CPU, whose activations are quantized: within the limits of that.
#[test]
fn quantized_experts_move_into_packed_slots() {
    let mut moved = 0;
    for (name, recipe) in recipes() {
        let tokens = on_topics(&recipe);
        let wanted = run(&mut engine(recipe.model(), options(0)), &tokens);
        let mut resident = {
            let placement = Placement { gpu_layers: GpuLayers::All, ..Placement::default() };
            let devices = Devices::new([Sim::new("sim:0").build()], cpu()).unwrap();
            let placed = placement.plan(&recipe.model(), &devices, &options(0)).unwrap();
            Engine::new(recipe.model(), &placed.scheduler, options(0), &mut |_| {}).unwrap()
        };
        let exact = run(&mut resident, &tokens);
        let mut engine = divided(&recipe, Sim::new("sim:0").packs_weights().build(), 3);
        let found = run(&mut engine, &tokens);
        let usage = engine.expert_cache().unwrap();
        assert!(usage.hits > 0, "{name}: {usage:?}");
        moved += usage.uploads;
        // No further from the device's own results than the CPU is, but for tokens that choose another expert by a hair.
        let [cpu, both] = [&wanted, &found].map(|rows| distances(rows, &exact).1);
        println!("{name}: CPU {cpu:.2e}, divided {both:.2e}");
        assert!(both <= 1.5 * cpu + 1e-4, "{name}: {both:.2e}, the CPU alone {cpu:.2e}");
    }
    assert!(moved > 0, "no expert moved");
}

//! Two models with equal tensor names and shapes, and different weights, on one scheduler.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use crate::common::{Recipe, cpu};
use quadriga_graph::DType;
use quadriga_llm::placement::offload;
use quadriga_llm::{Engine, EngineOptions, Model};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_sim::Sim;

fn device() -> Arc<dyn Backend> {
    Sim::new("sim:0").alignment(256).build()
}

fn engine(model: Model, scheduler: &Scheduler) -> Engine {
    let options = EngineOptions { batch: 8, context: 40, ..EngineOptions::default() };
    Engine::new(model, scheduler, options, &mut |_| {}).unwrap()
}

/// The logits after a prompt and after each of some tokens.
fn logits(engine: &mut Engine, prompt: &[u32]) -> Vec<Vec<f32>> {
    engine.truncate(0, 0);
    let (prompt, rest) = prompt.split_at(9);
    let mut all = Vec::new();
    engine.feed(prompt).unwrap();
    all.push(engine.logits(0).to_vec());
    for token in rest {
        engine.feed(&[*token]).unwrap();
        all.push(engine.logits(0).to_vec());
    }
    all
}

#[test]
fn two_fine_tunes_on_one_scheduler_give_their_own_results() {
    let recipe = Recipe::wide("llama", DType::Q8_0);
    // A fine-tune often has some weights in common with its base: here all but those of one layer.
    let mut tuned = recipe.parts();
    let other = Recipe { seed: 2, ..recipe.clone() }.parts();
    for (mine, theirs) in tuned.tensors.iter_mut().zip(&other.tensors) {
        assert_eq!((&mine.0, &mine.2), (&theirs.0, &theirs.2));
        if mine.0.starts_with("blk.1.") {
            *mine = theirs.clone();
        }
    }
    let models = [recipe.model(), tuned.model().unwrap(), other.model().unwrap()];
    let prompt = recipe.tokens(14);
    let hyper = models[0].hyperparameters().clone();
    let schedulers: [&dyn Fn() -> Scheduler; 3] =
        [&|| Scheduler::new([cpu(1)]), &|| Scheduler::new([device()]), &|| {
            Scheduler::new([device(), cpu(1)]).place(offload(&hyper, 1, 1))
        }];
    for (number, scheduler) in schedulers.iter().enumerate() {
        let alone = models.clone().map(|model| logits(&mut engine(model, &scheduler()), &prompt));
        assert!(alone[0] != alone[1] && alone[1] != alone[2] && alone[0] != alone[2]);
        let shared = scheduler();
        let clone = shared.clone();
        let [first, second, third] = models.clone();
        let mut engines = [engine(first, &shared), engine(second, &shared), engine(third, &clone)];
        for round in 0..2 {
            for (which, wanted) in alone.iter().enumerate() {
                let found = logits(&mut engines[which], &prompt);
                assert_eq!(found, *wanted, "scheduler {number}, round {round}, model {which}");
            }
        }
        // Token by token in turn, as requests to two models would be.
        engines.iter_mut().for_each(|engine| assert_eq!(engine.truncate(0, 0), 0));
        engines.iter_mut().for_each(|engine| engine.feed(&prompt[..9]).unwrap());
        for (step, token) in prompt[9..].iter().enumerate() {
            for (engine, wanted) in engines.iter_mut().zip(&alone) {
                engine.feed(&[*token]).unwrap();
                assert_eq!(engine.logits(0), wanted[step + 1], "scheduler {number}, step {step}");
            }
        }
        // Without the base, and with it loaded again, the others are as they were.
        let [base, mut second, mut third] = engines;
        drop(base);
        assert_eq!(logits(&mut second, &prompt), alone[1], "scheduler {number}");
        let mut base = engine(models[0].clone(), &shared);
        assert_eq!(logits(&mut third, &prompt), alone[2], "scheduler {number}");
        assert_eq!(logits(&mut base, &prompt), alone[0], "scheduler {number}");
        assert_eq!(logits(&mut second, &prompt), alone[1], "scheduler {number}");
    }
}

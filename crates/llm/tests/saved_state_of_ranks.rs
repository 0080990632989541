//! Saving and restoring the KV cache of a sequence of which each rank has a part.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Recipe, logits_of};
use crate::ranks::{f32_options, on_ranks};
use quadriga_conformance::Rng;
use quadriga_llm::{Engine, EngineOptions, Error, Parallelism, StateError};

fn recipe() -> Recipe {
    Recipe { kv_heads: 4, heads: 4, layers: 3, ..Recipe::new("llama") }
}

fn options() -> EngineOptions {
    EngineOptions { sequences: 2, context: 64, ..f32_options() }
}

fn grids() -> [Parallelism; 3] {
    ["tensor=2,pipeline=1", "tensor=1,pipeline=2", "tensor=2,pipeline=2"].map(|grid| grid.parse().unwrap())
}

fn ranks_of(parallelism: Parallelism) -> usize {
    parallelism.tensor.unwrap() * parallelism.pipeline.unwrap()
}

/// What an engine saves after some tokens, and the logits of those that follow.
fn begun(engine: &mut Engine, tokens: &[u32]) -> (Vec<u8>, Vec<Vec<f32>>) {
    engine.feed(&tokens[..30]).unwrap();
    let mut saved = Vec::new();
    engine.save_state(0, &mut saved).unwrap();
    (saved, logits_of(engine, &tokens[30..34]))
}

#[test]
fn ranks_go_on_where_others_have_stopped() {
    let (model, tokens) = (recipe().model(), recipe().tokens(40));
    for parallelism in grids() {
        let size = ranks_of(parallelism);
        let (saved, wanted) =
            on_ranks(&model, size, parallelism, &options(), |engine| begun(engine, &tokens));
        // In the same process, after something else; and in another one.
        on_ranks(&model, size, parallelism, &options(), |engine| {
            for _ in 0..2 {
                engine.truncate(0, 0);
                engine.feed(&tokens[20..25]).unwrap();
                engine.load_state(0, &mut saved.as_slice()).unwrap();
                assert_eq!(engine.tokens(0), &tokens[..30]);
                assert!(logits_of(engine, &tokens[30..34]) == wanted, "{parallelism}");
            }
        });
    }
}

#[test]
fn ranks_that_divide_a_model_differently_refuse_what_others_saved() {
    let (model, tokens) = (recipe().model(), recipe().tokens(40));
    let [first, others @ ..] = grids();
    let (saved, _) = on_ranks(&model, ranks_of(first), first, &options(), |engine| begun(engine, &tokens));
    for parallelism in others {
        on_ranks(&model, ranks_of(parallelism), parallelism, &options(), |engine| {
            engine.feed(&tokens[..5]).unwrap();
            let refused = engine.load_state(0, &mut saved.as_slice()).unwrap_err();
            assert!(matches!(refused, Error::SavedState { source: StateError::OtherModel, .. }), "{refused}");
            assert_eq!(engine.tokens(0), &tokens[..5], "unchanged");
        });
    }
}

#[test]
fn damaged_parts_leave_all_ranks_in_step() {
    let (model, tokens) = (recipe().model(), recipe().tokens(40));
    for (seed, parallelism) in (70..).zip(grids()) {
        on_ranks(&model, ranks_of(parallelism), parallelism, &options(), |engine| {
            let (saved, wanted) = begun(engine, &tokens);
            let mut rng = Rng::new(seed);
            for _ in 0..30 {
                let mut damaged = saved.clone();
                match rng.chance(0.5) {
                    true => damaged.truncate(rng.below(saved.len())),
                    false => damaged[rng.below(saved.len())] ^= 1 << rng.below(8),
                }
                let refused = engine.load_state(0, &mut damaged.as_slice());
                assert!(matches!(refused, Err(Error::SavedState { .. })), "seed {seed}: {refused:?}");
                // Whatever is left of the sequence is the same on all ranks.
                engine.truncate(0, 0);
                engine.feed(&tokens[..30]).unwrap();
                assert!(logits_of(engine, &tokens[30..34]) == wanted, "seed {seed}");
            }
        });
    }
}

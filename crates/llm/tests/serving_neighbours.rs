//! A request's results do not depend on the requests beside it: log-probabilities are the same bits as alone.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::collections::HashMap;

use quadriga_conformance::Rng;
use quadriga_cpu::isa::{Amx, Isa};
use quadriga_graph::DType;
use quadriga_llm::Model;
use quadriga_llm::serving::{Batcher, Event, Request, RequestId, TokenLogprobs};

use crate::common::experts::ExpertRecipe;
use crate::common::serving::{CONTEXT, Spec, batcher, options, recipe, specs};
use crate::common::{Recipe, cpu, recurrent};
use crate::recurrent_models::delta_recipes;

/// Tokens with their log-probabilities, and before them those of the prompt.
type Traced = Vec<(Option<u32>, TokenLogprobs)>;

/// Every architecture with recurrent layers, one of them also with windows, and one without any.
fn models(dtype: DType) -> Vec<Model> {
    // Rows of quantized matrices are whole blocks.
    let even = |experts: ExpertRecipe| match dtype.is_quantized() {
        true => ExpertRecipe { width: 64, shared: experts.shared.min(64).next_multiple_of(64), ..experts },
        false => experts,
    };
    let served = |recipe: Recipe| {
        let experts = recipe.experts.map(even);
        Recipe { text: true, context: CONTEXT as u32, dtype, experts, ..recipe }
    };
    let deltas =
        delta_recipes().into_iter().map(|recipe| recurrent::parts_of(&served(recipe)).model().unwrap());
    let families =
        Recipe::families().into_iter().chain(Recipe::with_experts().into_iter().map(|(_, recipe)| recipe));
    let names = if dtype.is_quantized() { &["lfm2", "lfm2moe"][..] } else { &["mamba2", "lfm2", "lfm2moe"] };
    let families = families.filter(|recipe| names.contains(&recipe.architecture));
    let windows = Recipe::families().into_iter().find(|recipe| recipe.architecture == "lfm2").unwrap();
    let windows = Recipe { window: Some(70), ..windows };
    let others = families.chain([windows, recipe("llama")]);
    deltas.chain(others.map(|recipe| served(recipe).model())).collect()
}

/// Computes steps until all requests are answered; `submit` adds some before each.
fn trace(batcher: &mut Batcher, mut submit: impl FnMut(&mut Batcher) -> bool) -> HashMap<RequestId, Traced> {
    let mut traced: HashMap<RequestId, Traced> = HashMap::new();
    while submit(batcher) || batcher.is_busy() {
        for (id, event) in batcher.step() {
            let own = traced.entry(id).or_default();
            match event {
                Event::Prompt { logprobs } => {
                    own.extend(logprobs.into_iter().map(|of_token| (None, of_token)))
                }
                Event::Token { piece, logprobs } => own.push((Some(piece.token), logprobs.unwrap())),
                Event::Failed(error) => panic!("{error}"),
                Event::Finished(_) | Event::Progress { .. } | Event::Embedding { .. } => {}
            }
        }
        batcher.check().unwrap();
    }
    traced
}

/// A request that finds nothing that others have computed: the kernels of a prompt's last tokens depend on where it begins.
fn request(specs: &[Spec], at: usize, prompts: bool) -> Request {
    let prompt_logprobs = (prompts && at.is_multiple_of(3)).then_some(2);
    Request { logprobs: Some(3), prompt_logprobs, salt: at as u64 + 1, ..specs[at].request() }
}

/// Compares what requests get beside each other with what each gets alone.
fn compare(model: &Model, specs: &[Spec], prompts: bool, seed: u64, context: &str) {
    let mut rng = Rng::new(!seed);
    let mut alone = batcher(model, cpu(1), options(5, 60));
    let mut together = batcher(model, cpu(2), options(5, 60));
    let mut ids = Vec::new();
    let found = trace(&mut together, |batcher| {
        while ids.len() < specs.len() && rng.chance(0.4) {
            ids.push(batcher.submit(request(specs, ids.len(), prompts)).unwrap());
        }
        ids.len() < specs.len()
    });
    assert_eq!(together.state().preempted, 0, "{context}: the pool is too small for this test");
    for (at, id) in ids.iter().enumerate() {
        let mut waiting = Some(request(specs, at, prompts));
        let own = trace(&mut alone, |batcher| {
            waiting.take().is_some_and(|request| batcher.submit(request).is_ok())
        });
        let wanted = own.into_values().next().unwrap();
        for (row, (found, wanted)) in found[id].iter().zip(&wanted).enumerate() {
            assert_eq!(found, wanted, "{context}, seed {seed}, request {at}, row {row}");
        }
        assert_eq!(found[id].len(), wanted.len(), "{context}, seed {seed}, request {at}");
    }
}

#[test]
fn unquantized_models_have_the_same_bits_beside_others_as_alone() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        // On AMX, more than a few rows are multiplied in bf16.
        if dtype != DType::F32 && Isa::detect() == Amx::detect().map_or(Isa::Scalar, Isa::Amx) {
            continue;
        }
        for (kind, model) in models(dtype).into_iter().enumerate() {
            let seed = 400 + kind as u64;
            let specs = specs(&mut Rng::new(seed), 9, model.hyperparameters().vocabulary);
            let context = format!("{} in {dtype}", model.hyperparameters().architecture);
            compare(&model, &specs, true, seed, &context);
        }
    }
}

#[test]
fn quantized_models_have_the_same_bits_in_steps_of_few_rows() {
    for (kind, model) in models(DType::Q8_0).into_iter().enumerate() {
        let seed = 500 + kind as u64;
        let mut specs = specs(&mut Rng::new(seed), 9, model.hyperparameters().vocabulary);
        // With AMX, up to twelve rows: five sequences of two tokens.
        specs.iter_mut().for_each(|spec| spec.prompt.truncate(2));
        let context = format!("{} in q8_0", model.hyperparameters().architecture);
        compare(&model, &specs, false, seed, &context);
    }
}

#[test]
fn as_many_tokens_of_one_sequence_and_of_several_are_different_steps() {
    for model in models(DType::F32) {
        let mut batcher = batcher(&model, cpu(1), options(4, 24));
        let two = (0..2).map(|token| Request { max_tokens: Some(4), ..Request::new(vec![token, 7, 8]) });
        let both: Vec<Request> = two.map(|request| Request { logprobs: Some(1), ..request }).collect();
        for request in both {
            batcher.submit(request).unwrap();
        }
        trace(&mut batcher, |_| false);
        // Two tokens with two outputs, as before, but of one sequence.
        let prompt = Request { max_tokens: Some(1), prompt_logprobs: Some(1), ..Request::new(vec![5, 6]) };
        batcher.submit(Request { logprobs: Some(1), ..prompt }).unwrap();
        let found = trace(&mut batcher, |_| false);
        assert_eq!(found.into_values().map(|own| own.len()).sum::<usize>(), 2);
    }
}

//! Many requests at once of models with latent attention: long parts of prompts attend to expanded keys and values, all other tokens
//! to what is cached, in one step; both compute what an engine without pages does.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::collections::BTreeSet;

use crate::common::experts::ExpertRecipe;
use crate::common::serving::{CONTEXT, batcher, options, random_stream};
use crate::common::{Recipe, cpu, engine, logits_of};
use quadriga_graph::DType;
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{Batcher, BatcherOptions, Event, Request, TokenLogprobs};
use quadriga_llm::{Engine, EngineOptions, Model};
use quadriga_runtime::Scheduler;

/// The forms that the graph of a step has: absorbed and expanded.
type Forms = (bool, bool);

/// A model of each layout of files, with blocks in the rows of its cache. Parts of 53 tokens and more are expanded.
pub(crate) fn recipes() -> Vec<Recipe> {
    let all = Recipe::with_experts().into_iter().map(|(_, recipe)| recipe);
    let of = |separate: bool| {
        let found =
            all.clone().find(|recipe| recipe.latent.is_some_and(|latent| latent.separate == separate));
        let recipe = found.unwrap();
        Recipe {
            text: true,
            context: CONTEXT as u32,
            key_length: 48,
            rope_dims: 32,
            value_length: 24,
            ..recipe
        }
    };
    [false, true].map(of).into()
}

/// The model with a dense network in every layer: rounding may choose other experts.
fn dense(recipe: &Recipe) -> Recipe {
    let experts = recipe.experts.map(|experts| ExpertRecipe { dense: recipe.layers, ..experts });
    Recipe { experts, ..recipe.clone() }
}

fn greedy(prompt: &[u32], salt: u64) -> Request {
    let sampling = SamplingOptions { temperature: 0.0, ..SamplingOptions::default() };
    let request =
        Request { sampling, salt, max_tokens: Some(12), past_end: true, ..Request::new(prompt.to_vec()) };
    Request { logprobs: Some(2), ..request }
}

/// What a request was answered: the log-probabilities of its prompt, if it asked for them, and the tokens with theirs.
#[derive(Clone, Default, PartialEq, Debug)]
struct Traced {
    prompt: Vec<TokenLogprobs>,
    tokens: Vec<u32>,
    logprobs: Vec<TokenLogprobs>,
}

impl Traced {
    /// The log-probabilities of all tokens.
    fn all(&self) -> Vec<f64> {
        self.prompt.iter().chain(&self.logprobs).map(|one| one.logprob).collect()
    }
}

/// The largest difference, or the root mean square where values are rounded in the cache.
fn distance_of(a: &[f64], b: &[f64], cache: DType) -> f64 {
    assert_eq!(a.len(), b.len());
    let off: Vec<f64> = a.iter().zip(b).map(|(a, b)| (a - b).abs()).collect();
    match cache {
        DType::F32 => off.iter().copied().fold(0.0, f64::max),
        _ => (off.iter().map(|off| off * off).sum::<f64>() / off.len() as f64).sqrt(),
    }
}

/// Answers requests, of which each is submitted before a step: the answers, and the forms that steps had.
fn trace(batcher: &mut Batcher, requests: Vec<(usize, Request)>) -> (Vec<Traced>, BTreeSet<Forms>) {
    let mut traced = vec![Traced::default(); requests.len()];
    let mut forms = BTreeSet::new();
    let mut ids = Vec::new();
    let mut waiting = requests.into_iter().peekable();
    for step in 0.. {
        while let Some((_, request)) = waiting.next_if(|(at, _)| *at <= step) {
            ids.push(batcher.submit(request).unwrap());
        }
        if waiting.peek().is_none() && !batcher.is_busy() {
            break;
        }
        for (id, event) in batcher.step() {
            let own = &mut traced[ids.iter().position(|known| *known == id).unwrap()];
            match event {
                Event::Prompt { logprobs } => own.prompt = logprobs,
                Event::Token { piece, logprobs } => {
                    own.tokens.push(piece.token);
                    own.logprobs.push(logprobs.unwrap());
                }
                Event::Failed(error) => panic!("{error}"),
                _ => {}
            }
        }
        batcher.check().unwrap();
        if let Some(plan) = batcher.session().plan() {
            let graph = plan.graph();
            let rows = |name: &str| graph.leaf(name).map_or(0, |id| graph[id].shape().dims()[0]);
            let expanded = rows("expanded_spans");
            forms.insert((expanded < rows("positions"), expanded > 0));
        }
    }
    assert_eq!(batcher.state().preempted, 0);
    (traced, forms)
}

/// Prompts of different lengths, some of which begin alike.
fn prompts(recipe: &Recipe) -> Vec<Vec<u32>> {
    let tokens = recipe.tokens(330);
    let mut prompts: Vec<Vec<u32>> = [(0, 5), (7, 33), (20, 70), (0, 200), (0, 260), (90, 140)]
        .map(|(at, len)| tokens[at..at + len].to_vec())
        .into();
    // The first two pages are those of another prompt.
    prompts.push(tokens[..128].iter().chain(&tokens[200..290]).copied().collect());
    prompts
}

/// The log-probability of each token after the first, by an engine without pages.
fn without_pages(model: &Model, cache: DType, tokens: &[u32]) -> Vec<f64> {
    let options = EngineOptions {
        context: CONTEXT,
        cache_keys: cache,
        cache_values: cache,
        ..EngineOptions::default()
    };
    let rows = logits_of(&mut engine(model.clone(), options), tokens);
    let one = |(row, token): (&Vec<f32>, &u32)| {
        let largest = row.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = row.iter().map(|logit| f64::from(logit - largest).exp()).sum();
        f64::from(row[*token as usize] - largest) - sum.ln()
    };
    rows.iter().zip(&tokens[1..]).map(one).collect()
}

fn with_cache(options: BatcherOptions, cache: DType) -> BatcherOptions {
    BatcherOptions { engine: options.engine.cache(cache), ..options }
}

#[test]
fn parts_of_prompts_are_expanded_beside_tokens_that_are_not() {
    // Where values are rounded in the cache, root mean squares: what is rounded differs in the last bits.
    let limits = [(DType::F32, 1e-4), (DType::F16, 0.005), (DType::Q8_0, 0.03), (DType::Q4_0, 0.15)];
    for (cache, limit) in limits {
        for recipe in recipes() {
            let recipe = if cache == DType::F32 { recipe } else { dense(&recipe) };
            let (model, prompts) = (recipe.model(), prompts(&recipe));
            let context = format!("separate {}, {cache}", recipe.latent.unwrap().separate);
            let requests = || -> Vec<(usize, Request)> {
                let of = |(at, prompt): (usize, &Vec<u32>)| {
                    let logprobs = (at % 2 == 0).then_some(1);
                    // Two at once; the others while those are answered.
                    (2 * at.saturating_sub(1), Request { prompt_logprobs: logprobs, ..greedy(prompt, 0) })
                };
                prompts.iter().enumerate().map(of).collect()
            };
            let mut long = options(5, 60);
            (long.engine.batch, long.engine.output_rows) = (160, 160);
            let (found, forms) =
                trace(&mut batcher(&model, cpu(2), with_cache(long.clone(), cache)), requests());
            assert!(forms.is_superset(&[(true, true), (true, false)].into()), "{context}: {forms:?}");
            // No part of a prompt is long enough: five sequences, and 32 tokens of prompts.
            let mut short = long;
            short.engine.batch = 16;
            let (absorbed, forms) = trace(&mut batcher(&model, cpu(2), with_cache(short, cache)), requests());
            assert_eq!(forms, [(true, false)].into(), "{context}");
            for (at, (found, absorbed)) in found.iter().zip(&absorbed).enumerate() {
                let context = format!("{context}, request {at}");
                let all: Vec<u32> = prompts[at].iter().chain(&found.tokens).copied().collect();
                let wanted = without_pages(&model, cache, &all);
                let own = found.all();
                let off = distance_of(&own, &wanted[wanted.len() - own.len()..], cache);
                println!("{context}: {off:.2e}");
                assert!(off < limit, "{context}: off by {off:.2e}");
                if found.tokens == absorbed.tokens {
                    let off = distance_of(&own, &absorbed.all(), cache);
                    assert!(off < limit, "{context}: {off:.2e} from the absorbed form");
                } else {
                    assert_ne!(cache, DType::F32, "{context}");
                }
            }
        }
    }
}

#[test]
fn any_stream_of_requests_is_answered_as_if_each_were_alone() {
    for (seed, recipe) in (700..).zip(recipes()) {
        let model = recipe.model();
        random_stream(&model, options(5, 24), DType::F32, seed, 10);
        random_stream(&model, BatcherOptions { lookup: 3, ..options(8, 60) }, DType::F32, seed + 10, 10);
    }
}

/// Which form a token's attention has depends on its own prompt: what is generated is always absorbed, and a part of a prompt is expanded
/// if it is long enough by itself.
#[test]
fn what_is_generated_has_the_same_bits_beside_expanded_prompts() {
    for recipe in recipes() {
        let (model, tokens) = (recipe.model(), recipe.tokens(300));
        let mut all = options(6, 60);
        (all.engine.batch, all.engine.output_rows) = (160, 160);
        let requests = || {
            vec![
                (0, greedy(&tokens[..9], 1)),
                (0, greedy(&tokens[30..50], 2)),
                (3, greedy(&tokens[60..120], 3)),
                (3, greedy(&tokens[100..164], 4)),
                (6, greedy(&tokens[..80], 5)),
                (9, greedy(&tokens[140..180], 6)),
                (9, greedy(&tokens[180..240], 7)),
            ]
        };
        let (together, forms) = trace(&mut batcher(&model, cpu(2), all.clone()), requests());
        assert!(forms.contains(&(true, true)), "{forms:?}");
        for (at, (_, request)) in requests().into_iter().enumerate() {
            let (alone, _) = trace(&mut batcher(&model, cpu(1), all.clone()), vec![(0, request)]);
            assert_eq!(together[at], alone[0], "request {at}");
        }
    }
}

#[test]
fn what_is_expanded_at_once_has_no_more_pages_than_the_longest_sequence() {
    let recipe = recipes().swap_remove(0);
    let (model, tokens) = (recipe.model(), recipe.tokens(400));
    // Two pages for each sequence, which both of these prompts have.
    let mut few = options(4, 40);
    (few.engine.context, few.engine.batch) = (128, 160);
    let mut batcher = batcher(&model, cpu(2), few);
    for at in [0, 100] {
        batcher.submit(greedy(&tokens[at..at + 75], at as u64)).unwrap();
    }
    let mut most = 0;
    while batcher.is_busy() {
        batcher.step();
        let graph = batcher.session().plan().unwrap().graph();
        most = most.max(graph.leaf("expanded_pages").map_or(0, |id| graph[id].shape().elements()));
    }
    assert_eq!(most, 2);
}

#[test]
fn a_forecast_has_the_matrices_and_the_memory_of_both_forms() {
    for recipe in recipes() {
        let model = recipe.model();
        let options = options(4, 40).for_model(&model).unwrap();
        let plan = |batch: usize| {
            let options = EngineOptions { batch, ..options.engine.clone() };
            let plan = Engine::forecast(&model, &Scheduler::new([cpu(1)]), options).unwrap();
            plan.graph().to_string()
        };
        let (long, short) = (plan(96), plan(16));
        assert!(long.contains("k_expanded") && long.contains("attn_v_b"), "{long}");
        assert!(!short.contains("k_expanded"));
    }
}

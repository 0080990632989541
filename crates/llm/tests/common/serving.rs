//! Requests, the answers that they get alone, and streams of them.

use std::collections::HashMap;
use std::sync::Arc;

use quadriga_conformance::Rng;
use quadriga_graph::DType;
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{Batcher, BatcherOptions, Event, Request, RequestId, TokenLogprobs};
use quadriga_llm::{EngineOptions, Finish, Generator, GeneratorOptions, Model, Pooling, RequestOptions};
use quadriga_runtime::{Backend, Scheduler};

use super::{Recipe, cpu};

pub const CONTEXT: usize = 400;

pub fn recipe(architecture: &'static str) -> Recipe {
    Recipe { text: true, context: CONTEXT as u32, seed: 7, ..Recipe::new(architecture) }
}

/// What is asked; a request can be made of it any number of times.
#[derive(Clone, Debug)]
pub struct Spec {
    pub prompt: Vec<u32>,
    pub sampling: SamplingOptions,
    pub max_tokens: usize,
    pub stops: Vec<String>,
}

impl Spec {
    pub fn request(&self) -> Request {
        Request {
            sampling: self.sampling.clone(),
            max_tokens: Some(self.max_tokens),
            stops: self.stops.clone(),
            ..Request::new(self.prompt.clone())
        }
    }
}

/// An answer: tokens, text, and how it ended.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub text: String,
    pub finish: Option<Finish>,
}

/// Random prompts, of which several begin alike; greedy and sampled, with penalties and stop strings.
pub fn specs(rng: &mut Rng, count: usize, vocabulary: usize) -> Vec<Spec> {
    let token = |rng: &mut Rng| rng.below(vocabulary) as u32;
    let beginnings: Vec<Vec<u32>> = [0, 70, 130, 200].map(|n| (0..n).map(|_| token(rng)).collect()).into();
    (0..count)
        .map(|_| {
            let mut prompt = beginnings[rng.below(beginnings.len())].clone();
            prompt.extend((0..rng.range(1, 60)).map(|_| token(rng)));
            let greedy = rng.chance(0.4);
            let sampling = SamplingOptions {
                temperature: if greedy { 0.0 } else { 0.9 },
                repeat_penalty: if rng.chance(0.3) { 1.3 } else { 1.0 },
                seed: rng.below(1000) as u64,
                ..SamplingOptions::default()
            };
            let stops = if rng.chance(0.3) { vec!["the".to_owned(), "e".to_owned()] } else { Vec::new() };
            Spec { prompt, sampling, max_tokens: rng.range(1, 50), stops }
        })
        .collect()
}

pub fn engine_options(model_cache: DType) -> EngineOptions {
    EngineOptions { batch: 96, ..EngineOptions::default() }.cache(model_cache)
}

/// The answers that the requests get alone, from a generator without pages.
pub fn alone(model: &Model, specs: &[Spec], cache: DType) -> Vec<Answer> {
    let options =
        GeneratorOptions { engine: engine_options(cache), raw: true, ..GeneratorOptions::default() };
    let mut generator =
        Generator::on(model.clone(), &Scheduler::new([cpu(1)]), options, &mut |_| {}).unwrap();
    let answer = |spec: &Spec| {
        let request = RequestOptions {
            sampling: spec.sampling.clone(),
            reseed: true,
            max_tokens: Some(spec.max_tokens),
            stops: spec.stops.clone(),
            grammar: None,
            reasoning_budget: None,
            hook: None,
        };
        generator.engine_mut().truncate(0, 0);
        let done = generator.continue_with(&spec.prompt, request).unwrap().complete().unwrap();
        Answer { tokens: done.tokens, text: done.text, finish: Some(done.finish) }
    };
    specs.iter().map(answer).collect()
}

pub fn batcher(model: &Model, backend: Arc<dyn Backend>, options: BatcherOptions) -> Batcher {
    Batcher::new(model.clone(), &Scheduler::new([backend]), options, &mut |_| {}).unwrap()
}

pub fn options(sequences: usize, pages: usize) -> BatcherOptions {
    BatcherOptions {
        engine: EngineOptions { sequences, pages, ..engine_options(DType::F32) },
        token_time: None,
        ..BatcherOptions::default()
    }
}

/// Takes in events; what failed is counted.
#[derive(Default)]
pub struct Answers {
    pub answers: HashMap<RequestId, Answer>,
    pub of_prompts: HashMap<RequestId, Vec<TokenLogprobs>>,
    pub vectors: HashMap<RequestId, Vec<f32>>,
    pub failed: Vec<RequestId>,
}

impl Answers {
    pub fn add(&mut self, events: Vec<(RequestId, Event)>) {
        for (id, event) in events {
            let answer = self.answers.entry(id).or_default();
            assert_eq!(answer.finish, None, "an event after the end");
            match event {
                Event::Token { piece, .. } => {
                    answer.tokens.push(piece.token);
                    answer.text.push_str(&piece.text);
                }
                Event::Finished(finished) => {
                    assert_eq!(finished.counts.answer, answer.tokens.len());
                    answer.finish = Some(finished.finish);
                }
                Event::Failed(error) => {
                    println!("{id:?} failed: {error}");
                    self.failed.push(id);
                }
                Event::Prompt { logprobs } => {
                    assert!(self.of_prompts.insert(id, logprobs).is_none(), "log-probabilities came twice");
                }
                Event::Embedding { vector } => {
                    assert!(self.vectors.insert(id, vector).is_none(), "an embedding came twice");
                }
                Event::Progress { .. } => {}
            }
        }
    }
}

/// What a request of a stream is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wish {
    Answer,
    /// An answer, and the log-probabilities of the prompt.
    Logprobs,
    Embedding(Pooling),
}

/// A request of a stream: the number of its spec, and what it is for.
type Asked = (usize, Wish);

impl Wish {
    fn of(self, request: Request) -> Request {
        match self {
            Wish::Answer => request,
            Wish::Logprobs => Request { prompt_logprobs: Some(2), ..request },
            Wish::Embedding(pooling) => Request { embedding: Some(pooling), ..request },
        }
    }
}

/// Log-probabilities and embeddings of requests, each computed alone.
struct Alone<'m> {
    model: &'m Model,
    options: BatcherOptions,
    known: Vec<(Asked, Answers)>,
}

impl Alone<'_> {
    fn check(
        &mut self,
        seed: u64,
        asked: Asked,
        spec: &Spec,
        found: (Option<Vec<TokenLogprobs>>, Option<Vec<f32>>),
    ) {
        if asked.1 == Wish::Answer {
            assert_eq!(found, (None, None), "seed {seed}, {asked:?}");
            return;
        }
        if !self.known.iter().any(|(known, _)| *known == asked) {
            let mut batcher = batcher(self.model, cpu(1), self.options.clone());
            batcher.submit(Request { max_tokens: Some(1), ..asked.1.of(spec.request()) }).unwrap();
            let mut answers = Answers::default();
            while batcher.is_busy() {
                answers.add(batcher.step());
            }
            assert_no_failures(&batcher);
            self.known.push((asked, answers));
        }
        let (_, wanted) = self.known.iter().find(|(known, _)| *known == asked).unwrap();
        let near = |a: f64, b: f64| (a - b).abs() < 1e-4;
        let wanted_logprobs = wanted.of_prompts.values().next().map(Vec::as_slice).unwrap_or_default();
        let found_logprobs = found.0.unwrap_or_default();
        assert_eq!(found_logprobs.len(), wanted_logprobs.len(), "seed {seed}, {asked:?}");
        assert!(
            found_logprobs.iter().zip(wanted_logprobs).all(|(a, b)| near(a.logprob, b.logprob)),
            "seed {seed}, {asked:?}"
        );
        let wanted_vector = wanted.vectors.values().next().map(Vec::as_slice).unwrap_or_default();
        let found_vector = found.1.unwrap_or_default();
        assert_eq!(found_vector.len(), wanted_vector.len(), "seed {seed}, {asked:?}");
        assert!(
            found_vector.iter().zip(wanted_vector).all(|(a, b)| near((*a).into(), (*b).into())),
            "seed {seed}, {asked:?}"
        );
    }
}

/// Submits requests at random times, some for several answers, log-probabilities of the prompt or an embedding; cancels some, and
/// compares all that are answered.
pub fn random_stream(
    model: &Model,
    options: BatcherOptions,
    cache: DType,
    seed: u64,
    count: usize,
) -> Batcher {
    random_stream_with(model, cpu(2), options, cache, seed, count, &mut |_| {})
}

/// The same on a backend, with something that happens before each step.
pub fn random_stream_with(
    model: &Model,
    backend: Arc<dyn Backend>,
    options: BatcherOptions,
    cache: DType,
    seed: u64,
    count: usize,
    before_step: &mut dyn FnMut(&mut Rng),
) -> Batcher {
    let specs = specs(&mut Rng::new(seed), count, model.hyperparameters().vocabulary);
    let wanted = alone(model, &specs, cache);
    serve_stream(model, backend, options, seed, (&specs, &wanted), before_step)
}

/// The same for given requests on a backend, with the answers that they get alone.
pub fn random_stream_on(
    model: &Model,
    backend: Arc<dyn Backend>,
    options: BatcherOptions,
    seed: u64,
    specs: &[Spec],
    wanted: &[Answer],
) -> Batcher {
    serve_stream(model, backend, options, seed, (specs, wanted), &mut |_| {})
}

fn serve_stream(
    model: &Model,
    backend: Arc<dyn Backend>,
    options: BatcherOptions,
    seed: u64,
    (specs, wanted): (&[Spec], &[Answer]),
    before_step: &mut dyn FnMut(&mut Rng),
) -> Batcher {
    stream_through(batcher(model, backend, options), seed, (specs, wanted), before_step)
}

/// Nothing failed that a batcher tries again: otherwise a step that a device refuses, by its happens-before checker or for want of
/// memory, would show in no answer.
#[track_caller]
pub fn assert_no_failures(batcher: &Batcher) {
    let state = batcher.state();
    let failures = (state.failed_steps, state.failed_page_moves, state.failed_guesses);
    assert_eq!(failures, (0, 0, 0), "failed steps, moves of pages, guesses of the draft model");
}

/// The same through a batcher that is there.
pub fn stream_through(
    batcher: Batcher,
    seed: u64,
    requests: (&[Spec], &[Answer]),
    before_step: &mut dyn FnMut(&mut Rng),
) -> Batcher {
    let batcher = faulty_stream_through(batcher, seed, requests, before_step);
    assert_no_failures(&batcher);
    batcher
}

/// The same where devices fail now and then.
pub fn faulty_stream_through(
    mut batcher: Batcher,
    seed: u64,
    (specs, wanted): (&[Spec], &[Answer]),
    before_step: &mut dyn FnMut(&mut Rng),
) -> Batcher {
    let mut rng = Rng::new(!seed);
    let model = batcher.model().clone();
    // Ranks and stages compute what one batcher computes alone, but only in company.
    let is_whole = model.ranks().is_none();
    let options = batcher.options().clone();
    let mut answers = Answers::default();
    let mut ids: HashMap<RequestId, Asked> = HashMap::new();
    let mut leaders = Vec::new();
    let mut cancelled = Vec::new();
    let mut next = 0;
    for _ in 0..100_000 {
        while next < specs.len() && rng.chance(0.4) {
            let (priority, client, salt) =
                (rng.below(2) as i32, rng.below(3) as u64, rng.below(5) as u64 / 4);
            let request = || Request { priority, client, salt, ..specs[next].request() };
            let wish = if is_whole && rng.chance(0.2) { Wish::Logprobs } else { Wish::Answer };
            if rng.chance(0.2) {
                // Several answers to one prompt, of the same seed.
                let requests = (0..rng.range(2, 4)).map(|_| request()).collect();
                let choices = batcher.submit_choices(requests).unwrap();
                leaders.push(choices[0]);
                ids.extend(choices.into_iter().map(|id| (id, (next, Wish::Answer))));
            } else {
                ids.insert(batcher.submit(wish.of(request())).unwrap(), (next, wish));
            }
            if is_whole && rng.chance(0.15) {
                let wish = Wish::Embedding([Pooling::Mean, Pooling::Last, Pooling::Cls][rng.below(3)]);
                ids.insert(batcher.submit(wish.of(request())).unwrap(), (next, wish));
            }
            next += 1;
        }
        if rng.chance(0.02) && !ids.is_empty() {
            let mut all: Vec<RequestId> = ids.keys().copied().collect();
            all.sort_unstable();
            // Now and then the one whose prompt others wait for.
            let leader = leaders.last().copied().filter(|_| rng.chance(0.5));
            let id = leader.unwrap_or(all[rng.below(all.len())]);
            if batcher.cancel(id) {
                cancelled.push(id);
            }
        }
        before_step(&mut rng);
        answers.add(batcher.step());
        batcher.check().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        if next == specs.len() && !batcher.is_busy() {
            break;
        }
    }
    assert!(!batcher.is_busy(), "seed {seed}: {:?}", batcher.state());
    assert_eq!(answers.failed, [], "seed {seed}");
    let options = BatcherOptions { lookup: 0, draft: 0, cache_ram: 0, cache_file: None, ..options };
    let mut alone = Alone { model: &model, options, known: Vec::new() };
    for (id, (index, wish)) in ids {
        let found = answers.answers.remove(&id).unwrap_or_default();
        if !cancelled.contains(&id) {
            let extras = (answers.of_prompts.remove(&id), answers.vectors.remove(&id));
            alone.check(seed, (index, wish), &specs[index], extras);
        }
        if matches!(wish, Wish::Embedding(_)) {
            continue;
        }
        if cancelled.contains(&id) {
            assert!(
                wanted[index].tokens.starts_with(&found.tokens),
                "seed {seed}, cancelled request {index}"
            );
        } else {
            assert_eq!(found, wanted[index], "seed {seed}, request {index}: {:?}", specs[index]);
        }
    }
    let state = batcher.state();
    assert_eq!((state.used_pages, state.running, state.waiting), (0, 0, 0), "seed {seed}");
    batcher
}

/// Answers a request alone; returns its answer and how many tokens of its prompt were found.
pub fn answer(batcher: &mut Batcher, spec: &Spec) -> (Answer, usize) {
    let id = batcher.submit(spec.request()).unwrap();
    let (mut answers, mut cached) = (Answers::default(), 0);
    while batcher.is_busy() {
        let events = batcher.step();
        for (_, event) in &events {
            if let Event::Finished(finished) = event {
                cached = finished.counts.cached;
            }
        }
        answers.add(events);
        batcher.check().unwrap();
    }
    assert_no_failures(batcher);
    (answers.answers.remove(&id).unwrap(), cached)
}

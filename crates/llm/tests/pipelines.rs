//! Stages of a pipeline compute micro-batches at once: answers stay those of one rank, whatever happens meanwhile.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::recorded_rank::RecordedRank;
use crate::common::serving::{Answers, Spec, alone, answer, batcher, options, recipe, specs, stream_through};
use crate::common::{Recipe, cpu, distance, engine, engine_on};
use quadriga_cluster::{Communicator, InProcess, Limits, Operation, Planned, in_process};
use quadriga_conformance::Rng;
use quadriga_graph::DType;
use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::{Batcher, BatcherOptions, CacheFile, Event, Request, RequestId, Service};
use quadriga_llm::{BatchToken, Engine, EngineOptions, Error, Model, Parallelism, Pooling};
use quadriga_llm::{RankResources, RequestLoad};
use quadriga_runtime::{DeviceKind, Rates};

fn model() -> Model {
    Recipe { layers: 4, ..recipe("llama") }.model()
}

/// Runs a function with the batcher of the first of several ranks, which the others follow. `wrapped` is what the first sees of them.
fn on_ranks<T: Send>(
    grid: (usize, usize),
    model: &Model,
    options: &BatcherOptions,
    wrapped: impl FnOnce(InProcess) -> Arc<dyn Communicator>,
    run: impl FnOnce(Batcher) -> T + Send,
) -> T {
    on_ranks_within(Limits::default(), grid, model, options, wrapped, run)
}

/// The same with these limits.
fn on_ranks_within<T: Send>(
    limits: Limits,
    (tensor, pipeline): (usize, usize),
    model: &Model,
    options: &BatcherOptions,
    wrapped: impl FnOnce(InProcess) -> Arc<dyn Communicator>,
    run: impl FnOnce(Batcher) -> T + Send,
) -> T {
    let parallelism = Parallelism { tensor: Some(tensor), pipeline: Some(pipeline), ..Parallelism::AUTO };
    let of = |rank: Arc<dyn Communicator>| {
        batcher(&model.clone().with_ranks(rank, parallelism).unwrap(), cpu(1), options.clone())
    };
    let mut ranks = in_process(tensor * pipeline, limits).into_iter();
    let first = wrapped(ranks.next().unwrap());
    std::thread::scope(|scope| {
        let of = &of;
        let others: Vec<_> =
            ranks.map(|rank| scope.spawn(move || of(Arc::new(rank)).follow_ranks().unwrap())).collect();
        let result = run(of(first));
        others.into_iter().for_each(|other| other.join().unwrap());
        result
    })
}

#[test]
fn the_output_matrix_counts_as_long_as_it_takes() {
    // It is as large as eight of the twelve layers, and both ends have it.
    let model = Recipe { layers: 12, vocabulary: 3840, tied: true, ..Recipe::new("llama") }.model();
    let cache = EngineOptions { context: 64, ..EngineOptions::default() }.cache_rows(&model).unwrap();
    let first_stage = |load, read, int8| {
        let rates = Rates { read, int8, ..Rates::assumed(DeviceKind::Cpu) };
        let ranks = [RankResources { rates: Some(rates), ..RankResources::of_speed(1.0) }; 2];
        let parallelism = Parallelism { load, cache: Some(cache), ..Parallelism::PIPELINE };
        let part = model.clone().with_rank_resources(Arc::new(Planned::new(0, 2, 1)), parallelism, &ranks);
        part.unwrap().ranks().unwrap().describe()
    };
    let many = RequestLoad::constant(32);
    // Ten layers would take as long as two and the matrix, and eight do not hold much more than six.
    assert_eq!(first_stage(many, 1e12, 1e9), "layers 0 to 7");
    // The KV caches of 16 requests are read for longer than all weights.
    assert_eq!(first_stage(many, 1e9, 1e12), "layers 0 to 5");
    // Only parts of a prompt are computed at once, and they have no results.
    assert_eq!(first_stage(RequestLoad::ONE, 1e12, 1e9), "layers 0 to 5");
    assert_eq!(first_stage(RequestLoad::up_to(32), 1e12, 1e9), "layers 0 to 7");
}

#[test]
fn micro_batches_are_answered_as_by_one_rank_while_requests_come_and_go() {
    let model = model();
    for seed in 500..506 {
        let specs = specs(&mut Rng::new(seed), 16, model.hyperparameters().vocabulary);
        let wanted = alone(&model, &specs, DType::F32);
        for (pipeline, lookup, pages, cache_ram) in
            [(2, 0, 9, 0), (2, 3, 40, 0), (3, 2, 12, 1 << 20), (2, 0, 9, 1 << 30), (4, 0, 40, 0)]
        {
            // Few pages, so that sequences are put back while steps of them are in flight, and prefixes go to host memory.
            let options = BatcherOptions { lookup, cache_ram, ..options(6, pages) };
            on_ranks((1, pipeline), &model, &options, as_it_is, |batcher| {
                drop(stream_through(batcher, seed, (&specs, &wanted), &mut |_| {}));
            });
        }
    }
}

fn as_it_is(rank: InProcess) -> Arc<dyn Communicator> {
    Arc::new(rank)
}

/// The most steps that the first rank had passed on and not waited for, and what it did.
fn most_in_flight(log: &[&str]) -> usize {
    let (mut now, mut most) = (0usize, 0);
    for event in log {
        now = if *event == "send" { now + 1 } else { now.saturating_sub(1) };
        most = most.max(now);
    }
    most
}

#[test]
fn the_first_stage_goes_on_while_others_compute() {
    let (model, options) = (model(), options(4, 40));
    // Several answers; and one prompt, whose parts follow each other.
    for requests in [
        (0..4).map(|i| Request { max_tokens: Some(6), ..Request::new(vec![i + 1; 3]) }).collect(),
        vec![Request { max_tokens: Some(1), ..Request::new((0..300).map(|i| i % 90).collect()) }],
    ] as [Vec<Request>; 2]
    {
        for stages in [2, 3] {
            let log = Arc::new(Mutex::new(Vec::new()));
            let recorded = |rank| {
                let log = Arc::clone(&log);
                // Activations are the only messages of this tag.
                let note = move |operation: &Operation<'_>| match operation {
                    Operation::Send { tag: 1, .. } => log.lock().unwrap().push("send"),
                    Operation::Receive { .. } => log.lock().unwrap().push("receive"),
                    _ => {}
                };
                Arc::new(RecordedRank { rank, note }) as Arc<dyn Communicator>
            };
            let requests: Vec<Request> = requests
                .iter()
                .map(|request| Request {
                    max_tokens: request.max_tokens,
                    ..Request::new(request.prompt.clone())
                })
                .collect();
            on_ranks((1, stages), &model, &options, recorded, |mut batcher| {
                requests.into_iter().for_each(|request| assert!(batcher.submit(request).is_ok()));
                while batcher.is_busy() {
                    batcher.step();
                }
            });
            let log = log.lock().unwrap();
            assert_eq!(most_in_flight(&log), stages, "{log:?}");
        }
    }
}

/// Other ranks notice by it when the first does not go on: they hear of it although nobody asks anything.
#[test]
fn a_service_without_requests_tells_other_ranks_that_it_goes_on() {
    let (model, options) = (model(), options(4, 40));
    for grid in [(1, 2), (2, 1)] {
        let (sign, signs) = std::sync::mpsc::channel();
        let recorded = |rank: InProcess| {
            let sign = (rank.rank() == 0).then(|| sign.clone());
            // The first part of a command.
            let note = move |operation: &Operation<'_>| {
                let is_command = match operation {
                    Operation::Send { bytes, .. } => bytes.starts_with(b"QDRC"),
                    Operation::Broadcast { bytes, .. } => bytes.starts_with(b"QDRC"),
                    _ => false,
                };
                if let Some(sign) = sign.as_ref().filter(|_| is_command) {
                    let _ = sign.send(());
                }
            };
            Arc::new(RecordedRank { rank, note }) as Arc<dyn Communicator>
        };
        let limits = Limits { operation: Some(Duration::from_secs(8)), ..Limits::default() };
        on_ranks_within(limits, grid, &model, &options, recorded, move |batcher| {
            let service = Service::start(batcher).unwrap();
            (0..2).for_each(|_| signs.recv().unwrap());
            drop(service);
        });
    }
}

#[test]
fn a_batcher_may_end_while_steps_are_in_flight() {
    let (model, options) = (model(), options(4, 40));
    let spec = &specs(&mut Rng::new(3), 1, model.hyperparameters().vocabulary)[0];
    let wanted = &alone(&model, std::slice::from_ref(spec), DType::F32)[0];
    on_ranks((1, 2), &model, &options, as_it_is, |mut batcher| {
        for round in 0..3 {
            for i in 0..4 {
                batcher.submit(Request::new((0..200).map(|k| (k + i) % 90).collect())).unwrap();
            }
            for _ in 0..4 + round {
                batcher.step();
            }
            assert_eq!(batcher.cancel_all().len(), 4);
            batcher.check().unwrap();
            // What others left in flight changes nothing for the next.
            assert_eq!(answer(&mut batcher, spec).0, *wanted);
        }
        assert!(batcher.release_memory().unwrap());
        for i in 0..4 {
            batcher.submit(Request::new(vec![i + 1; 20])).unwrap();
        }
        batcher.step();
        // Dropped with steps in flight: the others end all the same.
    });
}

#[test]
fn every_request_fails_once_with_the_name_of_a_stage_that_has_ended() {
    let (model, options) = (model(), options(6, 40));
    let ranks = in_process(2, Limits::default());
    let [first, second]: [InProcess; 2] = ranks.try_into().unwrap();
    let of = |rank: InProcess| {
        let divided = model.clone().with_ranks(Arc::new(rank), Parallelism::PIPELINE).unwrap();
        batcher(&divided, cpu(1), options.clone())
    };
    std::thread::scope(|scope| {
        scope.spawn(|| drop(of(second)));
        let mut batcher = of(first);
        let ids: Vec<RequestId> =
            (0..5).map(|i| batcher.submit(Request::new(vec![i + 1; 80])).unwrap()).collect();
        let mut failed = Vec::new();
        while batcher.is_busy() {
            for (id, event) in batcher.step() {
                let Event::Failed(error) = event else { panic!("{event:?}") };
                assert!(matches!(*error, Error::Cluster(_)), "{error}");
                assert!(error.to_string().contains("rank 1"), "{error}");
                failed.push(id);
            }
            batcher.check().unwrap();
        }
        failed.sort_unstable();
        assert_eq!(failed, ids);
    });
}

#[test]
fn prefixes_are_kept_beyond_the_pages_of_all_ranks() {
    let (model, tokens) = (model(), recipe("llama").tokens(900));
    let spec = |tokens: &[u32]| Spec {
        prompt: tokens.to_vec(),
        sampling: SamplingOptions { temperature: 0.0, ..SamplingOptions::default() },
        max_tokens: 20,
        stops: Vec::new(),
    };
    let specs: Vec<Spec> = tokens.chunks(300).map(spec).collect();
    let wanted = alone(&model, &specs, DType::F32);
    let folder = tempfile::tempdir().unwrap();
    for (number, grid) in [(2, 1), (1, 2), (2, 2)].into_iter().enumerate() {
        let path = folder.path().join(number.to_string());
        let file = || Some(CacheFile { path: path.clone(), bytes: 1 << 30 });
        // From host memory; then from the file that the process before has left.
        for (cache_ram, cache_file, cached) in
            [(1 << 30, None, [0, 256]), (0, file(), [0, 256]), (0, file(), [256, 256])]
        {
            let options = BatcherOptions { cache_ram, cache_file, ..options(1, 7) };
            on_ranks(grid, &model, &options, as_it_is, |mut batcher| {
                for (round, cached) in cached.into_iter().enumerate() {
                    for (spec, wanted) in specs.iter().zip(&wanted) {
                        let found = answer(&mut batcher, spec);
                        assert_eq!(found, (wanted.clone(), cached), "{grid:?}, round {round}, {cache_ram}");
                    }
                }
                batcher.save_prefixes();
            });
        }
    }
}

#[test]
fn a_saved_prefix_fits_ranks_that_divide_the_model_alike() {
    let (model, options) = (model(), options(2, 20));
    let spec = &specs(&mut Rng::new(9), 1, 90)[0];
    let spec = Spec { prompt: recipe("llama").tokens(200), ..spec.clone() };
    let wanted = &alone(&model, std::slice::from_ref(&spec), DType::F32)[0];
    let saved = on_ranks((1, 2), &model, &options, as_it_is, |mut batcher| {
        assert_eq!(answer(&mut batcher, &spec).0, *wanted);
        batcher.save_prefix(&spec.prompt).unwrap()
    });
    on_ranks((1, 2), &model, &options, as_it_is, |mut batcher| {
        assert_eq!(batcher.restore_prefix(&saved).unwrap(), 192);
        assert_eq!(answer(&mut batcher, &spec), (wanted.clone(), 192));
    });
    for grid in [(2, 1), (1, 3)] {
        on_ranks(grid, &model, &options, as_it_is, |mut batcher| {
            assert!(matches!(batcher.restore_prefix(&saved), Err(Error::SavedState { .. })));
            assert_eq!(answer(&mut batcher, &spec).0, *wanted, "nothing was changed");
        });
    }
}

/// The log-probabilities of an answer, and of its prompt.
fn logprobs_of(batcher: &mut Batcher, prompt: &[u32]) -> Vec<f64> {
    let request = Request {
        logprobs: Some(3),
        prompt_logprobs: Some(3),
        max_tokens: Some(8),
        ..Request::new(prompt.to_vec())
    };
    batcher.submit(request).unwrap();
    let mut found = Vec::new();
    while batcher.is_busy() {
        for (_, event) in batcher.step() {
            match event {
                Event::Prompt { logprobs } => found.extend(logprobs.iter().map(|token| token.logprob)),
                Event::Token { logprobs: Some(token), .. } => {
                    found.extend(token.top.iter().map(|(_, logprob)| logprob));
                }
                Event::Failed(error) => panic!("{error}"),
                _ => {}
            }
        }
    }
    found
}

#[test]
fn steps_of_one_shape_have_the_same_bits_on_any_number_of_stages() {
    for recipe in [recipe("llama"), Recipe { text: true, context: 400, ..Recipe::wide("llama", DType::Q4_K) }]
    {
        let model = Recipe { layers: 4, ..recipe }.model();
        let options = options(4, 40);
        let prompt: Vec<u32> = (0..60).map(|i| i * 7 % 90).collect();
        let wanted = logprobs_of(&mut batcher(&model, cpu(1), options.clone()), &prompt);
        assert!(wanted.len() > 59);
        for stages in [2, 4] {
            let found = on_ranks((1, stages), &model, &options, as_it_is, |mut batcher| {
                logprobs_of(&mut batcher, &prompt)
            });
            assert!(found == wanted, "{stages} stages");
        }
    }
}

/// The vectors of texts beside answers.
fn embeddings(mut batcher: Batcher) -> Vec<Vec<f32>> {
    let mut ids = Vec::new();
    for (length, pooling) in
        [(3, Pooling::Last), (150, Pooling::Mean), (70, Pooling::Cls), (5, Pooling::None)]
    {
        let text: Vec<u32> = (0..length).map(|i| i * 5 % 90).collect();
        ids.push(batcher.submit(Request { embedding: Some(pooling), ..Request::new(text) }).unwrap());
        batcher.submit(Request { max_tokens: Some(4), ..Request::new(vec![length % 90; 9]) }).unwrap();
    }
    let (mut answers, mut vectors) = (Answers::default(), vec![Vec::new(); ids.len()]);
    while batcher.is_busy() {
        let events = batcher.step();
        for (id, event) in &events {
            if let Event::Embedding { vector } = event {
                vectors[ids.iter().position(|own| own == id).unwrap()] = vector.clone();
            }
        }
        answers.add(events);
        batcher.check().unwrap();
    }
    assert_eq!(answers.failed, []);
    vectors
}

#[test]
fn ranks_embed_texts_beside_answers() {
    let (model, options) = (model(), options(5, 40));
    let wanted = embeddings(batcher(&model, cpu(1), options.clone()));
    for grid in [(2, 1), (1, 2), (1, 3), (2, 2)] {
        let found = on_ranks(grid, &model, &options, as_it_is, embeddings);
        for (found, wanted) in found.iter().zip(&wanted) {
            assert_eq!(found.len(), wanted.len());
            let off = found.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(off < 1e-4, "{grid:?}: {off}");
        }
    }
}

#[test]
fn engines_on_stages_have_hidden_states_and_logits_of_long_prompts() {
    let recipe = Recipe { layers: 4, context: 1000, ..Recipe::new("llama") };
    let (model, tokens) = (recipe.model(), recipe.tokens(700));
    let options = EngineOptions {
        hidden: true,
        output_rows: usize::MAX,
        cache_keys: DType::F32,
        cache_values: DType::F32,
        ..EngineOptions::default()
    };
    // Outputs in some batches, and in others none.
    let batch: Vec<BatchToken> = (0..)
        .zip(&tokens)
        .map(|(i, token)| BatchToken {
            sequence: 0,
            token: *token,
            output: i > 690 || (100..230).contains(&i),
        })
        .collect();
    let rows = |engine: &mut Engine| -> Vec<Vec<f32>> {
        engine.extend(&batch).unwrap();
        let outputs = batch.iter().filter(|token| token.output).count();
        (0..outputs).flat_map(|row| [engine.logits(row).to_vec(), engine.hidden(row).to_vec()]).collect()
    };
    let wanted = rows(&mut engine(model.clone(), options.clone()));
    for stages in [2, 3] {
        let of = |rank: InProcess| {
            let divided = model.clone().with_ranks(Arc::new(rank), Parallelism::PIPELINE).unwrap();
            engine_on(cpu(1), divided, options.clone())
        };
        let mut ranks = in_process(stages, Limits::default()).into_iter();
        let first = ranks.next().unwrap();
        std::thread::scope(|scope| {
            for rank in ranks {
                scope.spawn(|| of(rank).follow().unwrap());
            }
            let off = distance(&rows(&mut of(first)), &wanted);
            assert!(off < 1e-4, "{stages} stages: off by {off:.2e}");
        });
    }
}

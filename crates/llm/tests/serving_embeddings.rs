//! Embeddings in the batches of other requests: the vectors of an embedder, and answers as if there were none.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::common::serving::{Answers, CONTEXT, alone, batcher, engine_options, options, recipe, specs};
use crate::common::{Recipe, cpu};
use quadriga_conformance::Rng;
use quadriga_graph::DType;
use quadriga_llm::serving::{BatcherOptions, Event, Request, RequestId};
use quadriga_llm::{Embedder, EmbedderOptions, EngineOptions, Error, Model, Pooling};
use quadriga_runtime::{Backend, Scheduler};
use quadriga_sim::Sim;

/// All kinds of layers that keep a sequence.
fn models() -> [Model; 3] {
    let windows = Recipe::families().into_iter().find(|recipe| recipe.architecture == "gemma2").unwrap();
    let windows = Recipe { text: true, context: CONTEXT as u32, window: Some(30), ..windows };
    let recurrent = crate::common::recurrent::parts_of(&Recipe { layers: 5, ..recipe("qwen35") });
    [recipe("llama").model(), windows.model(), recurrent.model().unwrap()]
}

fn embedded(model: &Model, pooling: Pooling, text: &[u32]) -> Vec<f32> {
    let engine = EngineOptions { context: CONTEXT, ..engine_options(DType::F32) };
    let options = EmbedderOptions { pooling: Some(pooling), engine, ..EmbedderOptions::default() };
    let mut embedder = Embedder::new(model.clone(), &Scheduler::new([cpu(1)]), options, &mut |_| {}).unwrap();
    embedder.embed_tokens(text).unwrap()
}

#[test]
fn texts_are_embedded_beside_answers() {
    for model in models() {
        for backend in [cpu(2), Sim::new("sim:0").build() as Arc<dyn Backend>] {
            let mut rng = Rng::new(300);
            let specs = specs(&mut rng, 5, 100);
            let wanted = alone(&model, &specs, DType::F32);
            let mut batcher = batcher(&model, backend, options(4, 28));
            let mut answers = Answers::default();
            let mut texts: HashMap<RequestId, (Pooling, Vec<u32>)> = HashMap::new();
            let mut ids = Vec::new();
            for (at, spec) in specs.iter().enumerate() {
                ids.push(batcher.submit(spec.request()).unwrap());
                for pooling in [Pooling::Mean, Pooling::Last, Pooling::Cls, Pooling::None] {
                    // One of a page, of a token, and of several parts.
                    let text = recipe("llama").tokens([64, 1, 150, 30, 230][at]);
                    let request = Request { embedding: Some(pooling), ..Request::new(text.clone()) };
                    texts.insert(batcher.submit(request).unwrap(), (pooling, text));
                }
            }
            let mut vectors: HashMap<RequestId, Vec<f32>> = HashMap::new();
            while batcher.is_busy() {
                let events = batcher.step();
                for (id, event) in &events {
                    if let Event::Embedding { vector } = event {
                        assert!(vectors.insert(*id, vector.clone()).is_none());
                    }
                }
                answers.add(events);
                batcher.check().unwrap();
            }
            assert_eq!(answers.failed, []);
            crate::common::serving::assert_no_failures(&batcher);
            for (id, wanted) in ids.iter().zip(&wanted) {
                assert_eq!(answers.answers[id], *wanted);
            }
            assert_eq!(vectors.len(), texts.len());
            for (id, (pooling, text)) in texts {
                let wanted = embedded(&model, pooling, &text);
                assert_eq!(vectors[&id].len(), wanted.len(), "{pooling:?}");
                let distance = vectors[&id].iter().zip(&wanted).map(|(a, b)| (a - b).abs());
                let distance = distance.fold(0.0, f32::max);
                assert!(distance < 1e-4, "{pooling:?} of {} tokens: {distance}", text.len());
            }
        }
    }
}

#[test]
fn a_text_may_fill_the_context_and_only_encoders_rank() {
    let model = recipe("llama").model();
    let mut batcher = batcher(&model, cpu(1), options(2, 6));
    assert_eq!(batcher.options().engine.context, 384);
    let request = |len: usize, pooling| Request {
        embedding: Some(pooling),
        ..Request::new(recipe("llama").tokens(len))
    };
    let id = batcher.submit(request(384, Pooling::Last)).unwrap();
    let mut found = 0;
    while batcher.is_busy() {
        let events = batcher.step();
        found += events.iter().filter(|(of, e)| *of == id && matches!(e, Event::Embedding { .. })).count();
    }
    assert_eq!(found, 1);
    assert!(matches!(
        batcher.submit(request(385, Pooling::Mean)),
        Err(Error::ContextFull { wanted: 385, .. })
    ));
    assert!(matches!(batcher.submit(request(5, Pooling::Rank)), Err(Error::NoClassificationHead)));
}

/// A text is a prompt like others: where tokens are due, a step has a small part of it.
#[test]
fn long_texts_hold_up_no_answer() {
    let model = recipe("llama").model();
    let paced = BatcherOptions { token_time: Some(Duration::ZERO), ..options(4, 28) };
    let mut batcher = batcher(&model, cpu(1), paced);
    let answer =
        batcher.submit(Request { past_end: true, max_tokens: Some(200), ..Request::new(vec![1, 2, 3]) });
    let answer = answer.unwrap();
    // The pace is learned from a first one.
    let text = |len| Request { embedding: Some(Pooling::Mean), ..Request::new(recipe("llama").tokens(len)) };
    let first = batcher.submit(text(64)).unwrap();
    let ended = |events: &[(RequestId, Event)], id| {
        events.iter().any(|(of, event)| *of == id && matches!(event, Event::Finished(_)))
    };
    while !ended(&batcher.step(), first) {}
    let second = batcher.submit(text(300)).unwrap();
    let mut steps = 0;
    loop {
        let before = batcher.state().computed;
        let events = batcher.step();
        steps += 1;
        let tokens = batcher.state().computed - before;
        assert!(tokens <= 33, "a step of {tokens} tokens");
        let has_token =
            |(of, event): &(RequestId, Event)| *of == answer && matches!(event, Event::Token { .. });
        assert!(events.iter().any(has_token), "the answer waited in step {steps}");
        if ended(&events, second) {
            break;
        }
    }
    assert_eq!(steps, 300_usize.div_ceil(32));
}

//! What a request is told: log-probabilities, progress, stop strings, and events for functions.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::common::cpu;
use crate::common::serving::{batcher, engine_options, options, recipe};
use quadriga_graph::DType;
use quadriga_llm::sampling::{HookError, SamplingHook, SamplingOptions};
use quadriga_llm::serving::{Event, Request, RequestId, Service};
use quadriga_llm::{Error, Finish};

#[test]
fn log_probabilities_are_those_of_the_model() {
    let model = recipe("llama").model();
    let prompt = recipe("llama").tokens(150);
    let mut batcher = batcher(&model, cpu(1), options(2, 20));
    let request = Request {
        max_tokens: Some(3),
        logprobs: Some(4),
        prompt_logprobs: Some(4),
        sampling: SamplingOptions { temperature: 0.0, ..SamplingOptions::default() },
        ..Request::new(prompt.clone())
    };
    batcher.submit(request).unwrap();
    let (mut of_prompt, mut of_tokens) = (Vec::new(), Vec::new());
    while batcher.is_busy() {
        for (_, event) in batcher.step() {
            match event {
                Event::Prompt { logprobs } => of_prompt = logprobs,
                Event::Token { piece, logprobs } => of_tokens.push((piece.token, logprobs.unwrap())),
                Event::Finished(_) | Event::Progress { .. } | Event::Embedding { .. } => {}
                Event::Failed(error) => panic!("{error}"),
            }
        }
    }
    let all: Vec<u32> = prompt.iter().copied().chain(of_tokens.iter().map(|(token, _)| *token)).collect();
    let mut engine = crate::common::engine(model, engine_options(DType::F32));
    let rows = crate::common::logits_of(&mut engine, &all);
    assert_eq!((of_prompt.len(), of_tokens.len()), (149, 3));
    let found = of_prompt.iter().chain(of_tokens.iter().map(|(_, logprobs)| logprobs));
    for ((row, token), found) in rows.iter().zip(&all[1..]).zip(found) {
        let wanted = quadriga_llm::sampling::log_probability(row, *token).unwrap();
        assert!((found.logprob - wanted).abs() < 1e-4, "{} {wanted}", found.logprob);
        let top = quadriga_llm::sampling::top_log_probabilities(row, 4).unwrap();
        assert_eq!(found.top.len(), 4);
        assert!((found.top[0].1 - top[0].1).abs() < 1e-4);
    }
}

#[test]
fn the_log_probabilities_of_a_prompt_come_once_however_often_it_is_put_back() {
    let model = recipe("llama").model();
    // Two sequences of four pages do not fit: one is put back again and again.
    let mut batcher = batcher(&model, cpu(1), options(4, 5));
    let lengths = [150, 150, 120, 1];
    let request = |length: usize| Request {
        max_tokens: Some(100),
        logprobs: Some(1),
        prompt_logprobs: Some(1),
        ..Request::new(recipe("llama").tokens(length))
    };
    let ids: Vec<RequestId> =
        lengths.iter().map(|length| batcher.submit(request(*length)).unwrap()).collect();
    let mut found: HashMap<RequestId, Vec<usize>> = HashMap::new();
    while batcher.is_busy() {
        for (id, event) in batcher.step() {
            match event {
                Event::Prompt { logprobs } => found.entry(id).or_default().push(logprobs.len()),
                Event::Failed(error) => panic!("{error}"),
                _ => {}
            }
        }
    }
    assert!(batcher.state().preempted > 0);
    for (id, length) in ids.iter().zip(lengths) {
        assert_eq!(found[id], [length - 1]);
    }
}

/// A hook that leaves the logits as they are, and notes how many tokens it is told of, and whether they were accepted.
struct Noting(Arc<Mutex<Vec<(bool, usize)>>>);

impl SamplingHook for Noting {
    fn apply(&mut self, tokens: &[u32], _: &mut [f32]) -> Result<(), HookError> {
        self.0.lock().unwrap().push((false, tokens.len()));
        Ok(())
    }

    fn accepted(&mut self, tokens: &[u32]) {
        self.0.lock().unwrap().push((true, tokens.len()));
    }
}

/// A hook hears of each token before the step that computes the next one begins: it may work meanwhile.
#[test]
fn hooks_hear_of_a_token_before_the_next_step() {
    let model = recipe("llama").model();
    let prompt = recipe("llama").tokens(5);
    let mut batcher = batcher(&model, cpu(1), options(2, 20));
    let notes = [(); 2].map(|()| Arc::new(Mutex::new(Vec::new())));
    for notes in &notes {
        let request = Request {
            max_tokens: Some(4),
            hook: Some(Box::new(Noting(Arc::clone(notes)))),
            sampling: SamplingOptions { ignore_eos: true, ..SamplingOptions::default() },
            ..Request::new(prompt.clone())
        };
        batcher.submit(request).unwrap();
    }
    let mut sampled = 0;
    while batcher.is_busy() {
        let events = batcher.step();
        sampled += events.iter().filter(|(_, event)| matches!(event, Event::Token { .. })).count();
        let ended = events.iter().any(|(_, event)| matches!(event, Event::Finished(_)));
        for notes in notes.iter().filter(|_| sampled > 0 && !ended) {
            let notes = notes.lock().unwrap();
            assert!(notes.last().is_none_or(|last| last.0), "{notes:?}");
        }
    }
    assert_eq!(sampled, 8);
    let wanted = [(false, 5), (true, 6), (false, 6), (true, 7), (false, 7), (true, 8), (false, 8)];
    notes.iter().for_each(|notes| assert_eq!(*notes.lock().unwrap(), wanted));
}

/// A hook that leaves the logits as they are, and panics when a token was sampled.
struct PanicsAfterTokens;

impl SamplingHook for PanicsAfterTokens {
    fn apply(&mut self, _: &[u32], _: &mut [f32]) -> Result<(), HookError> {
        Ok(())
    }

    fn accepted(&mut self, _: &[u32]) {
        panic!("a hook of the test");
    }
}

#[test]
fn a_hook_that_panics_ends_its_own_request() {
    let model = recipe("llama").model();
    let service = Service::start(batcher(&model, cpu(1), options(2, 10))).unwrap();
    let other = service.submit(Request { max_tokens: Some(20), ..Request::new(vec![1, 2]) }).unwrap();
    let before = |_: &[u32], _: &mut [f32]| panic!("a hook of the test");
    let hooks: [Box<dyn SamplingHook>; 2] = [Box::new(before), Box::new(PanicsAfterTokens)];
    for hook in hooks {
        let broken = Request { hook: Some(hook), past_end: true, ..Request::new(vec![1, 3]) };
        let last = service.submit(broken).unwrap().last().unwrap();
        assert!(matches!(last, Event::Failed(error) if matches!(*error, Error::HookPanicked)));
    }
    assert!(matches!(other.last(), Some(Event::Finished(finished)) if finished.counts.answer == 20));
}

#[test]
fn events_go_to_functions_and_a_function_that_declines_ends_its_request() {
    let model = recipe("llama").model();
    let service = Service::start(batcher(&model, cpu(1), options(4, 20))).unwrap();
    let (sender, events) = std::sync::mpsc::channel();
    let request = |seed: u64, most: usize| -> (Request, quadriga_llm::serving::EventSink) {
        let sampling = SamplingOptions { seed, ..SamplingOptions::default() };
        let request = Request { sampling, max_tokens: None, ..Request::new(vec![1, 2, 3]) };
        let (sender, mut taken) = (sender.clone(), 0);
        let sink = Box::new(move |event| {
            taken += 1;
            sender.send((seed, event)).is_ok() && taken < most
        });
        (request, sink)
    };
    let (reply, accepted) = std::sync::mpsc::channel();
    service
        .submit_to(vec![request(1, usize::MAX), request(2, 5)], move |ids| reply.send(ids).is_ok())
        .unwrap();
    let ids = accepted.recv().unwrap().unwrap();
    assert_eq!(ids.len(), 2);
    let mut all: Vec<(u64, Event)> = Vec::new();
    while !matches!(all.last(), Some((_, Event::Finished(_)))) {
        all.push(events.recv().unwrap());
    }
    assert_eq!(all.iter().filter(|(seed, _)| *seed == 2).count(), 5);
    assert!(matches!(all.last(), Some((1, Event::Finished(_)))));
    // Refused together.
    let (reply, refused) = std::sync::mpsc::channel();
    let empty = (Request::new(Vec::new()), request(3, 1).1);
    service.submit_to(vec![empty], move |ids| reply.send(ids).is_ok()).unwrap();
    assert!(matches!(refused.recv().unwrap(), Err(Error::EmptyPrompt)));
    // All prompts are accepted together, or none.
    let prompts = |others: Vec<u32>| {
        let (reply, answer) = std::sync::mpsc::channel();
        let prompts = vec![vec![request(5, usize::MAX)], vec![(Request::new(others), request(6, 1).1)]];
        service.submit_prompts_to(prompts, move |ids| reply.send(ids).is_ok()).unwrap();
        answer.recv().unwrap()
    };
    assert!(matches!(prompts(Vec::new()), Err(Error::EmptyPrompt)));
    assert_eq!((service.state().running, service.state().waiting), (0, 0));
    assert_eq!(prompts(vec![1, 2]).unwrap().len(), 2);
    while !matches!(events.recv().unwrap(), (5, Event::Finished(_))) {}
    // Nobody wants them.
    service.submit_to(vec![request(4, usize::MAX)], |_| false).unwrap();
    drop(service.submit(Request { max_tokens: Some(1), ..Request::new(vec![1]) }).unwrap().last());
    assert_eq!((service.state().running, service.state().waiting), (0, 0));
}

#[test]
fn the_state_has_no_request_whose_function_declined() {
    let model = recipe("llama").model();
    let service = Service::start(batcher(&model, cpu(1), options(2, 10))).unwrap();
    let (sender, dropped) = std::sync::mpsc::channel::<()>();
    let sink = Box::new(move |_| {
        let _ = &sender;
        false
    });
    let endless = Request { max_tokens: None, past_end: true, ..Request::new(vec![1, 2, 3]) };
    service.submit_to(vec![(endless, sink)], |ids| ids.is_ok()).unwrap();
    // The request has ended when its function is dropped, and nothing else happens that would count anew.
    assert!(dropped.recv().is_err());
    assert_eq!((service.state().running, service.state().waiting), (0, 0));
}

#[test]
fn prompts_are_reported_as_they_are_computed() {
    let model = recipe("llama").model();
    let prompt = recipe("llama").tokens(250);
    let mut batcher = batcher(&model, cpu(1), options(2, 20));
    let request =
        || Request { max_tokens: Some(2), progress: true, past_end: true, ..Request::new(prompt.clone()) };
    let mut reports = || {
        batcher.submit(request()).unwrap();
        let mut all = Vec::new();
        while batcher.is_busy() {
            for (_, event) in batcher.step() {
                match event {
                    Event::Progress { cached, computed, .. } => all.push(Some((cached, computed))),
                    Event::Token { .. } => all.push(None),
                    _ => {}
                }
            }
        }
        all
    };
    // A step has 96 tokens; then three pages of 64 are found.
    assert_eq!(reports(), [Some((0, 96)), Some((0, 192)), Some((0, 250)), None, None]);
    assert_eq!(reports(), [Some((192, 250)), None, None]);
}

#[test]
fn the_stop_string_that_was_found_is_known() {
    let model = recipe("llama").model();
    let prompt = recipe("llama").tokens(20);
    let mut batcher = batcher(&model, cpu(1), options(2, 20));
    let mut ends = |stops: Vec<String>| {
        let sampling = SamplingOptions { temperature: 0.0, ignore_eos: true, ..SamplingOptions::default() };
        let request = Request { max_tokens: Some(40), stops, sampling, ..Request::new(prompt.clone()) };
        batcher.submit(request).unwrap();
        let (mut text, mut end) = (String::new(), None);
        while batcher.is_busy() {
            for (_, event) in batcher.step() {
                match event {
                    Event::Token { piece, .. } => text.push_str(&piece.text),
                    Event::Finished(finished) => end = Some(finished.finish),
                    _ => {}
                }
            }
        }
        (text, end.unwrap())
    };
    let (text, end) = ends(Vec::new());
    assert_eq!(end, Finish::Length);
    let part: String = text.chars().skip(text.chars().count() / 2).take(3).collect();
    let (before, end) = ends(vec!["\u{1f40e}".to_owned(), part.clone()]);
    assert_eq!(end, Finish::Stop(1));
    assert_eq!(Some(before.as_str()), text.split(&part).next());
}

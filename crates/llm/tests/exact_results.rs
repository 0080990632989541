//! The default model agrees with results that were computed in float64 from the same weights.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::common::judge::{ExactCase, Judgement, cases};
use crate::common::{Parts, cpu, engine_on};
use quadriga_cpu::isa::Isa;
use quadriga_gguf::File;
use quadriga_llm::evaluate::{CaseKind, CaseResult, ResultFields, evaluate};
use quadriga_llm::placement::offload;
use quadriga_llm::sampling::top_log_probabilities;
use quadriga_llm::{BatchToken, Engine, EngineOptions, Model};
use quadriga_runtime::Scheduler;
use quadriga_sim::Sim;

const EXACT: &str = quadriga_llm::judge::DEFAULT_MODEL_CASES;

fn model() -> Model {
    let path = quadriga_llm::default_model::fetch(None, &mut |_| ControlFlow::Continue(())).unwrap();
    Model::open(path).unwrap()
}

fn options() -> EngineOptions {
    EngineOptions { context: 2048, ..EngineOptions::default() }
}

fn judge(engine: &mut Engine, cases: &[ExactCase]) -> Judgement {
    let mut verdict = Judgement::default();
    for exact in cases {
        verdict.add(exact, &evaluate(engine, &exact.case).unwrap());
    }
    verdict
}

/// Greedy cases that are short: enough to notice a kernel that is wrong, and (`capital`, which begins with a near tie)
/// one that is not exact enough.
fn short_cases() -> Vec<ExactCase> {
    let short = ["math", "capital"];
    cases(EXACT).into_iter().filter(|exact| short.contains(&exact.case.name.as_str())).collect()
}

#[test]
fn every_case_holds_on_the_best_instruction_set() {
    let verdict = judge(&mut engine_on(cpu(2), model(), options()), &cases(EXACT));
    println!(
        "mean drift {:.4} nats, mean likelihood error {:.4} %",
        verdict.mean_drift(),
        verdict.mean_likelihood_error() * 100.0
    );
    verdict.assert_holds("the best instruction set", true);
}

#[test]
fn short_cases_hold_on_every_instruction_set_with_one_and_two_threads() {
    for isa in Isa::available() {
        for threads in [1, 2] {
            let backend = quadriga_cpu::Backend::builder().isa(isa).threads(threads).build().unwrap();
            let verdict = judge(&mut engine_on(Arc::new(backend), model(), options()), &short_cases());
            verdict.assert_holds(&format!("{isa} with {threads} threads"), false);
        }
    }
}

/// Every case on every instruction set: `cargo test -- --ignored`, many minutes for the scalar one.
#[test]
#[ignore = "takes minutes"]
fn all_cases_hold_on_every_instruction_set_with_one_and_two_threads() {
    for isa in Isa::available() {
        for threads in [1, 2] {
            let backend = quadriga_cpu::Backend::builder().isa(isa).threads(threads).build().unwrap();
            let verdict = judge(&mut engine_on(Arc::new(backend), model(), options()), &cases(EXACT));
            println!(
                "{isa}, {threads} threads: mean drift {:.4} nats, mean likelihood error {:.4} %",
                verdict.mean_drift(),
                verdict.mean_likelihood_error() * 100.0
            );
            verdict.assert_holds(&format!("{isa} with {threads} threads"), true);
        }
    }
}

/// All greedy cases at once, each in its own sequence, one token of each in every batch.
#[test]
fn cases_hold_when_they_are_batched() {
    let cases: Vec<ExactCase> =
        cases(EXACT).into_iter().filter(|exact| exact.case.kind == CaseKind::Greedy).collect();
    let model = model();
    let tokenizer = model.tokenizer().unwrap();
    let prompts: Vec<Vec<u32>> =
        cases.iter().map(|exact| tokenizer.encode(&exact.case.text, exact.case.special)).collect();
    let options = EngineOptions { context: 128, sequences: cases.len(), batch: 50, ..options() };
    let mut engine = engine_on(cpu(2), model.clone(), options);
    let mut entries: Vec<BatchToken> = Vec::new();
    for (sequence, prompt) in prompts.iter().enumerate() {
        let last = prompt.len() - 1;
        entries.extend(prompt.iter().enumerate().map(|(at, token)| BatchToken {
            sequence,
            token: *token,
            output: at == last,
        }));
    }
    let mut steps: Vec<Vec<Vec<(u32, f64)>>> = vec![Vec::new(); cases.len()];
    while !entries.is_empty() {
        engine.extend(&entries).unwrap();
        let wanted = entries.iter().filter(|entry| entry.output).map(|entry| entry.sequence);
        let mut next = Vec::new();
        for (row, sequence) in wanted.enumerate() {
            let top5 = top_log_probabilities(engine.logits(row), 5).unwrap();
            let token = top5[0].0;
            steps[sequence].push(top5);
            if !tokenizer.is_end(token) && steps[sequence].len() < cases[sequence].case.n {
                next.push(BatchToken { sequence, token, output: true });
            }
        }
        entries = next;
    }
    let mut verdict = Judgement::default();
    for ((exact, tokens), top5) in cases.iter().zip(prompts).zip(steps) {
        let greedy = top5.iter().map(|step| step[0].0).collect();
        let (name, kind) = (exact.case.name.clone(), exact.case.kind);
        verdict.add(exact, &CaseResult { name, kind, result: ResultFields::Greedy { tokens, greedy, top5 } });
    }
    verdict.assert_holds("together", false);
}

#[test]
fn a_case_holds_when_the_model_is_split_between_a_simulated_device_and_the_cpu() {
    let model = model();
    // The simulated device is exact and slow: one block of it, the first or the last.
    for block in [0, 29] {
        let name = format!("blk.{block}.");
        let sim = Sim::new("sim:0").build();
        let scheduler = Scheduler::new([sim, cpu(2)])
            .place(move |weight| weight.contains('.').then(|| usize::from(!weight.starts_with(&name))));
        let mut engine = Engine::new(model.clone(), &scheduler, options(), &mut |_| {}).unwrap();
        judge(&mut engine, &short_cases()).assert_holds(&format!("block {block} on the device"), false);
    }
}

/// Copies of a dense network as experts compute what it does, so that its exact results are theirs: with experts of the first layer in
/// slots of the simulated device, which is exact and slow, and all else on the CPU.
#[test]
fn a_case_holds_when_experts_are_divided_between_slots_of_a_device_and_the_cpu() {
    let path = quadriga_llm::default_model::fetch(None, &mut |_| ControlFlow::Continue(())).unwrap();
    let mut parts = Parts::of(&File::open(path).unwrap(), |_| true);
    let layers = model().hyperparameters().layers.len();
    parts.clone_experts(layers, 3, 1);
    parts.set("llama.expert_count", 3u32);
    parts.set("llama.expert_used_count", 2u32);
    let model = parts.model().unwrap();
    let sim = Sim::new("sim:0").packs_weights().build();
    let scheduler = Scheduler::new([sim, cpu(2)]).place(|name| match name {
        "experts_on_host" | "expert_numbers" => Some(1),
        name if name.ends_with(".slots") => Some(0),
        name => name.contains('.').then_some(1),
    });
    let resident_experts = (1..layers).collect();
    let options = EngineOptions { expert_slots: 2, resident_experts, ..options() };
    let mut engine = Engine::new(model, &scheduler, options, &mut |_| {}).unwrap();
    judge(&mut engine, &short_cases()).assert_holds("two slots", false);
    let usage = engine.expert_cache().expect("there are slots");
    assert!(usage.slots == 2 && usage.hits > 0 && usage.hits < usage.lookups, "{usage:?}");
}

#[test]
fn a_case_holds_when_the_model_is_split_between_two_cpus() {
    let model = model();
    for on_device in [1, 16, 31] {
        let scheduler =
            Scheduler::new([cpu(1), cpu(1)]).place(offload(model.hyperparameters(), on_device, 1));
        let mut engine = Engine::new(model.clone(), &scheduler, options(), &mut |_| {}).unwrap();
        judge(&mut engine, &short_cases()).assert_holds(&format!("{on_device} layers"), false);
    }
}

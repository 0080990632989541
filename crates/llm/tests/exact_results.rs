//! The default model computes what float64 computes from the same weights, within what llama.cpp is allowed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod common;

use std::ops::ControlFlow;
use std::sync::Arc;

use common::judge::{Verdict, cases};
use common::{cpu, engine_on};
use quadriga_cpu::isa::Isa;
use quadriga_llm::evaluate::{Kind, evaluate};
use quadriga_llm::{Engine, EngineOptions, Entry, Model};
use quadriga_runtime::Scheduler;

const EXACT: &str = include_str!("data/smollm2.exact.jsonl");

fn model() -> Model {
    let path = quadriga_llm::default_model::fetch(None, &mut |_| ControlFlow::Continue(())).unwrap();
    Model::open(path).unwrap()
}

fn options() -> EngineOptions {
    EngineOptions { context: 2048, ..EngineOptions::default() }
}

/// Every case, or every few.
fn judge(engine: &mut Engine, one_of: usize) -> Verdict {
    let mut verdict = Verdict::default();
    for exact in cases(EXACT).iter().step_by(one_of) {
        verdict.add(exact, &evaluate(engine, &exact.case).unwrap());
    }
    verdict
}

#[test]
fn every_case_holds_on_the_best_instruction_set() {
    let mut engine = engine_on(cpu(2), model(), options());
    let verdict = judge(&mut engine, 1);
    println!(
        "mean drift {:.4} nats, mean likelihood error {:.4} %",
        verdict.mean_drift(),
        verdict.mean_likelihood_error() * 100.0
    );
    verdict.assert_holds("the best instruction set", true);
}

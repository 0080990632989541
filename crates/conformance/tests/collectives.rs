//! Collectives: every case on CPUs and simulated devices, and what the oracle of several ranks refuses.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_conformance::{
    BackendTarget, Case, Oracle, OracleError, RankOracle, RoundingOracle, Suite, Target, run_cases,
};
use quadriga_graph::{DType, Graph, GraphBuilder, Ranks, Value};
use quadriga_runtime::Backend;
use quadriga_sim::Sim;

const OPERATIONS: [&str; 6] = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "receive"];

fn cases(suite: &Suite) -> impl Iterator<Item = Case> + '_ {
    let chosen = (0..suite.len()).filter(|index| OPERATIONS.contains(&suite.operation(*index).unwrap()));
    chosen.map(|index| suite.case(index).unwrap().unwrap())
}

fn pass(target: &mut dyn Target) {
    let suite = Suite::new();
    let report = run_cases(cases(&suite).map(Ok), target);
    let passed: usize = report.operations.values().map(|totals| totals.passed).sum();
    assert!(report.is_clean() && report.reasons.is_empty(), "{report}");
    assert_eq!(passed, cases(&suite).count());
    assert!(OPERATIONS.iter().all(|operation| report.operations[operation].passed > 0), "{report}");
}

fn cpus() -> Vec<quadriga_cpu::Backend> {
    (1..=4).map(|threads| quadriga_cpu::Backend::builder().threads(threads).build().unwrap()).collect()
}

fn others(backends: &[quadriga_cpu::Backend]) -> impl Iterator<Item = &dyn Backend> {
    backends.iter().skip(1).map(|backend| backend as &dyn Backend)
}

#[test]
fn every_case_is_right_on_the_oracle_with_rounding() {
    pass(&mut RoundingOracle);
}

#[test]
fn every_case_is_right_on_cpus() {
    let cpus = cpus();
    pass(&mut BackendTarget::new(&cpus[0]).with_ranks(others(&cpus)));
    pass(&mut BackendTarget::unfused(&cpus[0]).with_ranks(others(&cpus)));
}

#[test]
fn every_case_is_right_in_place_on_cpus() {
    let cpus = cpus();
    pass(&mut BackendTarget::in_place(&cpus[0]).with_ranks(others(&cpus)));
}

#[test]
fn every_case_is_right_on_simulated_devices() {
    let sims: Vec<_> = (0..4).map(|number| Sim::new(&format!("sim:{number}")).build()).collect();
    let others = || sims.iter().skip(1).map(|sim| &**sim);
    pass(&mut BackendTarget::new(&*sims[0]).with_ranks(others()));
    pass(&mut BackendTarget::in_place(&*sims[0]).with_ranks(others()));
}

#[test]
fn a_target_of_one_rank_says_what_it_does_not_run() {
    let cpus = cpus();
    let suite = Suite::new();
    let report = run_cases(cases(&suite).map(Ok), &mut BackendTarget::new(&cpus[0]));
    assert!(report.is_clean(), "{report}");
    assert!(report.operations["all_reduce"].passed > 0, "one rank sums alone");
    assert!(report.reasons.keys().any(|reason| reason.contains("of 4 ranks")), "{report}");
}

/// The graph of a rank.
fn graph(rank: usize, count: usize, build: impl for<'g> Fn(Value<'g>, Ranks) -> Value<'g>) -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [1, 2]);
    g.output("y", build(x, Ranks { group: 0, rank, count }));
    g.finish().unwrap()
}

fn run(graphs: &[Graph]) -> Result<(), OracleError> {
    let mut oracle = RankOracle::new(graphs)?;
    for rank in 0..graphs.len() {
        oracle.rank(rank)?.set_f32("x", &[1.0, 2.0])?;
    }
    oracle.run()
}

#[test]
fn the_oracle_refuses_ranks_that_do_not_belong_together() {
    let sum = |rank, count| graph(rank, count, |x, ranks| x.all_reduce(ranks));
    run(&[sum(0, 2), sum(1, 2)]).unwrap();
    let text = |graphs: &[Graph]| run(graphs).unwrap_err().to_string();
    let broadcast = graph(1, 2, |x, ranks| x.broadcast(ranks, 0));
    assert!(text(&[sum(0, 2), broadcast]).contains("different things"));
    assert!(text(&[sum(0, 2), sum(0, 2)]).contains("for rank 0 of 2"));
    let none = graph(1, 2, |x, _| x.neg());
    assert!(text(&[sum(0, 2), none.clone()]).contains("rank 0 at"), "rank 1 never comes");
    let receive = |rank, from| graph(rank, 2, move |x, r| x.receive(r, (from, 3), DType::F32, [1, 2]));
    assert!(text(&[receive(0, 1), receive(1, 0)]).contains("wait for each other"));
    let send = graph(0, 2, |x, ranks| x.send(ranks, 1, 4, &[]));
    assert!(text(&[send.clone(), none]).contains("never receives"));
    assert!(text(&[send, receive(1, 0)]).contains("wait"), "another tag");
}

#[test]
fn the_oracle_of_one_rank_computes_collectives_of_one_only() {
    for (count, right) in [(1, true), (2, false)] {
        let graph = graph(0, count, |x, ranks| x.all_reduce(ranks));
        let mut oracle = Oracle::new(&graph).unwrap();
        oracle.set_f32("x", &[1.0, 2.0]).unwrap();
        match oracle.run() {
            Ok(()) => assert!(right && oracle.read("y").unwrap() == [1.0, 2.0]),
            Err(error) => assert!(!right && error.to_string().contains("RankOracle"), "{error}"),
        }
    }
}

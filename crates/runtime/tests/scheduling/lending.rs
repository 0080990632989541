//! Weights that live with the host and are lent to a device for a run.

use quadriga_conformance::Rng;
use quadriga_graph::{Graph, Op};
use quadriga_runtime::{Lending, Reason, Scheduler};

use crate::common::{chain, chain_input, device, host, random_graph};

/// Lends whenever it can.
const ALWAYS: Lending = Lending { operations_per_byte: 0, least_operations: 0 };

fn scheduler(lending: Option<Lending>) -> Scheduler {
    Scheduler::new([device("gpu"), host("cpu")])
        .place(|name| (name.starts_with('w') || name.starts_with('s')).then_some(1))
        .lending(lending)
}

fn run(scheduler: &Scheduler, graph: &Graph) -> Vec<Vec<u8>> {
    let mut session = scheduler.plan(graph).unwrap().session().unwrap();
    let x = chain_input();
    for name in ["x", "z"].into_iter().filter(|name| graph.leaf(name).is_some()) {
        session.set(name, &x).unwrap();
    }
    if graph.leaf("ids").is_some() {
        session.set("ids", &[1i32]).unwrap();
    }
    // The second run meets places that the first one used.
    session.run(&[]).unwrap();
    session.run(&[]).unwrap();
    graph.outputs().iter().map(|(name, _)| session.read::<u8>(name).unwrap()).collect()
}

#[test]
fn products_fetch_the_hosts_weights_where_the_work_is_worth_the_way() {
    let graph = chain(6);
    let plan = scheduler(Some(ALWAYS)).plan(&graph).unwrap();
    assert!(plan.lends());
    for node in graph.node_ids().filter(|node| *graph[*node].op() == Op::MulMat) {
        let decision = plan.decision(node).unwrap();
        assert_eq!(decision.backend, 0);
        assert!(matches!(decision.reason, Reason::Borrows { .. }));
    }
    // The weights stay at home, and pass through the device's arena.
    let bytes = plan.bytes();
    assert_eq!((bytes[0].weights, bytes[1].weights + bytes[1].mapped), (0, 6 * 256));
    assert_eq!(plan.splits().copies.iter().filter(|copy| copy.from == 1 && copy.bytes == 256).count(), 6);
    assert_eq!(run(&scheduler(Some(ALWAYS)), &graph), run(&scheduler(None), &graph));
}

#[test]
fn small_graphs_and_few_rows_leave_weights_at_home() {
    let graph = chain(6);
    assert!(!scheduler(Some(Lending::default())).plan(&graph).unwrap().lends());
    // Four rows: eight operations for each element of four bytes.
    let lending = |operations_per_byte| Some(Lending { operations_per_byte, least_operations: 0 });
    assert!(scheduler(lending(2)).plan(&graph).unwrap().lends());
    assert!(!scheduler(lending(3)).plan(&graph).unwrap().lends());
}

#[test]
fn a_budget_that_loans_would_break_is_kept_without_them() {
    let graph = chain(6);
    let wanted = scheduler(Some(ALWAYS)).plan(&graph).unwrap().bytes()[0].total();
    let plan = scheduler(Some(ALWAYS)).budget(0, wanted).plan(&graph).unwrap();
    assert!(plan.lends());
    let plan = scheduler(Some(ALWAYS)).budget(0, wanted - 1).plan(&graph).unwrap();
    assert!(!plan.lends());
    assert!(plan.bytes()[0].total() < wanted);
}

#[test]
fn results_are_the_same_with_and_without_loans() {
    for seed in 0..60 {
        let graph = random_graph(&mut Rng::new(seed), 30);
        let (with, without) = (run(&scheduler(Some(ALWAYS)), &graph), run(&scheduler(None), &graph));
        assert_eq!(with, without, "seed {seed}");
    }
}

//! Results in the memory of inputs, and a caller's order with barriers, in sessions on a real device. Says so and passes where
//! there is no device.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "tests"
)]

mod common;
#[path = "../../runtime/tests/common/in_place_operations.rs"]
mod in_place_operations;

use quadriga_graph::{DType, Graph, GraphBuilder, NodeId};
use quadriga_runtime::Scheduler;

use common::{cpu, device};
use in_place_operations::check_in_place;

#[test]
fn g3_sessions_compute_every_in_place_operation_in_place() {
    let Some(cuda) = device() else { return };
    check_in_place(&Scheduler::new(vec![cuda]), 1e-5);
}

/// Sums of four multiples of a row, joined at the end.
fn branches() -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [16]);
    let parts: Vec<_> = (0..4).map(|i| x.scale(i as f32 + 1.0).named(&format!("part.{i}"))).collect();
    let sums: Vec<_> =
        parts.iter().enumerate().map(|(i, part)| part.sum().named(&format!("sum.{i}"))).collect();
    g.output("all", sums[0].concat(0, &sums[1..]).named("all"));
    g.finish().unwrap()
}

#[test]
fn g6_orders_and_barriers_hold_between_gpu_and_cpu() {
    let Some(cuda) = device() else { return };
    let graph = branches();
    let node = |name: String| graph[graph.tensor(&name).unwrap()].node().unwrap();
    let [parts, sums] = ["part", "sum"].map(|what| [0, 1, 2, 3].map(|i| node(format!("{what}.{i}"))));
    let last = [node("all".to_owned())];
    let each: Vec<[NodeId; 2]> = (0..4).map(|i| [parts[i], sums[i]]).collect();
    let mut deep: Vec<&[NodeId]> = each.iter().rev().map(<[NodeId; 2]>::as_slice).collect();
    deep.push(&last);
    // Parts 1 and 3 are computed by the CPU, sums 0 and 1: every group but the last has nodes of both, or goes to and fro.
    let backends = vec![cuda, cpu()];
    let scheduler = ["part.1", "part.3", "sum.0", "sum.1"]
        .into_iter()
        .fold(Scheduler::new(backends), |scheduler, name| scheduler.pin_name(name, 1));
    let scheduler = ["part.0", "part.2", "sum.2", "sum.3", "all"]
        .into_iter()
        .fold(scheduler, |scheduler, name| scheduler.pin_name(name, 0));
    let values: Vec<f32> = (0..16).map(|i| i as f32).collect();
    let wide: [&[NodeId]; 3] = [&parts, &sums, &last];
    for (groups, name) in [(&wide[..], "wide"), (&deep, "deep")] {
        let ordered = graph.with_order(groups).unwrap();
        assert_eq!(ordered.barriers().len(), groups.len() - 1, "{name}");
        let plan = scheduler.plan(&ordered).unwrap();
        // No split reaches over a barrier.
        let splits = &plan.splits().splits;
        assert!(splits.len() > groups.len(), "{name}: {} splits", splits.len());
        let mut session = plan.session().unwrap();
        for round in 1..4 {
            let x: Vec<f32> = values.iter().map(|value| value * round as f32).collect();
            session.run(&[("x", &x)]).unwrap();
            let expected = [120.0, 240.0, 360.0, 480.0].map(|sum| sum * round as f32);
            assert_eq!(session.read::<f32>("all").unwrap(), expected, "{name}, round {round}");
        }
    }
    // Without barriers: the same numbers.
    let mut session = scheduler.plan(&graph).unwrap().session().unwrap();
    session.run(&[("x", &values)]).unwrap();
    assert_eq!(session.read::<f32>("all").unwrap(), [120.0, 240.0, 360.0, 480.0]);
}

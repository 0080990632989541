//! Who shares a storage, and who may not.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_graph::{DType, Graph, GraphBuilder, Weight};
use quadriga_runtime::memory::{Inputs, Memory, MemoryPlan, Planner, Request};

fn plan(graph: &Graph, inputs: Inputs) -> MemoryPlan {
    let memories = [Memory::measuring("a", 4, None)];
    Planner::default().plan(&Request { inputs, ..Request::new(graph, &memories) }).unwrap()
}

#[test]
fn g2_g3_views_and_chains_share_one_storage() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [4, 4]);
    let w = g.weight("w", Weight::new(DType::F32, [4, 4]));
    let a = g.mul_mat(w, x);
    let b = a.reshape([16]).silu().reshape([2, 8]).scale(2.0);
    g.output("b", b);
    let graph = g.finish().unwrap();
    let plan = plan(&graph, Inputs::Keep);
    assert_eq!(plan.arena_bytes(0), 128);
    assert_eq!(plan.sharing.in_place_count(&graph), 2);
    println!("{}{plan}{}", plan.sharing.table(&graph), plan.forecast(&graph));
}

//! S5, K3: which tensors are copied, how often, and by which route.

use std::sync::Arc;

use quadriga_graph::{DType, Graph, GraphBuilder, TensorId, Weight};
use quadriga_runtime::{Backend, Plan, Scheduler};
use quadriga_sim::{FaultPoint, Sim};

use crate::common::{chain, chain_input, device, host};
use crate::misbehaving::Misbehaving;

/// One tensor computed on backend 0, and read by many nodes on backend 1.
fn fan_out(readers: usize) -> (Graph, Vec<TensorId>) {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [16]).tanh();
    let mut sum = x.reshape([4, 4]).scale(0.5).reshape([16]);
    let mut there = vec![sum.id()];
    for _ in 0..readers {
        sum = sum.add(x);
        there.push(sum.id());
    }
    g.output("y", sum);
    (g.finish().unwrap(), there)
}

fn pinned(backends: [Arc<dyn Backend>; 2], graph: &Graph, there: &[TensorId]) -> Plan {
    let mut scheduler =
        Scheduler::new(backends).pin_tensor(graph[graph.node_ids().next().unwrap()].output(), 0);
    for id in there {
        scheduler = scheduler.pin_tensor(*id, 1);
    }
    scheduler.plan(graph).unwrap()
}

#[test]
fn x4_a_tensor_read_by_a_thousand_nodes_is_copied_once_whatever_view_they_read() {
    let (graph, there) = fan_out(1000);
    let plan = pinned([device("a"), device("b")], &graph, &there);
    assert_eq!(plan.splits().copies.len(), 1);
    assert_eq!(plan.splits().splits.len(), 2);
    assert_eq!(plan.copy_name(0), "b#reshape#1");
}

fn transfers(backends: [Arc<Sim>; 2]) -> (Vec<f32>, [u64; 2]) {
    let (graph, there) = fan_out(3);
    let dyns: [Arc<dyn Backend>; 2] = [Arc::clone(&backends[0]) as _, Arc::clone(&backends[1]) as _];
    let plan = pinned(dyns, &graph, &there);
    let mut session = plan.session().unwrap();
    let values: Vec<f32> = (0..16).map(|i| i as f32 / 7.0).collect();
    session.run(&[("x", &values)]).unwrap();
    session.run(&[("x", &values)]).unwrap();
    let before = [0, 1].map(|i| backends[i].counts().of(FaultPoint::Transfer));
    session.run(&[]).unwrap();
    let after = [0, 1].map(|i| backends[i].counts().of(FaultPoint::Transfer) - before[i]);
    (session.read("y").unwrap(), after)
}

#[test]
fn k3_the_reader_pulls_else_the_owner_pushes_else_the_copy_is_staged_or_made_by_the_host() {
    let (expected, pull) = transfers([Sim::new("a").device(), Sim::new("b").device()]);
    assert_eq!(pull, [0, 1], "the reader pulls");
    // A backend with host memory cannot copy from the device, so the device copies.
    let (found, push) = transfers([Sim::new("a").device(), Sim::new("b").host().isolated().device()]);
    assert_eq!((found, push), (expected.clone(), [1, 0]), "the owner pushes");
    // Neither can access the other, both can access host memory.
    let lonely = |name| Sim::new(name).without_peers().device();
    let (found, bounce) = transfers([lonely("a"), lonely("b")]);
    assert_eq!((found, bounce), (expected.clone(), [1, 1]), "through staging memory");
    // Both can access only their own memory: the host reads and writes.
    let alone = |name| Sim::new(name).isolated().device();
    let (found, by_host) = transfers([alone("a"), alone("b")]);
    assert_eq!((found, by_host), (expected, [1, 1]), "read and written by the host");
}

#[test]
fn k3_nothing_is_copied_within_one_backend() {
    let (graph, _) = fan_out(5);
    let plan = Scheduler::new([device("a"), device("b")]).plan(&graph).unwrap();
    assert!(plan.splits().copies.is_empty());
}

#[test]
fn a_state_read_on_another_backend_is_copied_again_after_each_write() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [1, 4]);
    let ids = g.input("ids", DType::I32, [1]);
    let state = g.state("s", DType::F32, [2, 4]);
    let before = state.scale(1.0);
    let written = state.set_rows(x, ids);
    let after = written.scale(1.0);
    g.output("before", before);
    g.output("after", after);
    let there = [before.id(), after.id()];
    let graph = g.finish().unwrap();
    for backends in [[device("a"), device("b")], [host("cpu"), device("b")], [device("a"), host("cpu")]] {
        let plan = Scheduler::new(backends)
            .place(|name| (name == "s").then_some(0))
            .pin_tensor(there[0], 1)
            .pin_tensor(there[1], 1)
            .plan(&graph)
            .unwrap();
        assert_eq!(plan.splits().copies.len(), 2);
        // The write waits for the copy of the bytes that it overwrites.
        assert!(plan.splits().splits.iter().any(|split| split.after_copies == [0]));
        let mut session = plan.session().unwrap();
        let mut last = [0.0; 8];
        for round in 1..20 {
            let row = [round as f32; 4];
            session.run(&[("x", &row), ("ids", &[round % 2])]).unwrap();
            assert_eq!(session.read::<f32>("before").unwrap(), last);
            last[(round as usize % 2) * 4..][..4].copy_from_slice(&row);
            assert_eq!(session.read::<f32>("after").unwrap(), last);
        }
    }
}

#[test]
fn memory_of_the_host_is_locked_once_for_each_asynchronous_device_that_copies_it() {
    let locks = |first: Arc<dyn Backend>, second: Arc<dyn Backend>| {
        let devices = [first, second].map(|device| Arc::new(Misbehaving::new(device)));
        let [a, b] = devices.clone().map(|device| device as Arc<dyn Backend>);
        // Odd weights are on the host, and even ones by turns on the two devices.
        let scheduler = Scheduler::new([a, b, host("cpu")]).place(|name| {
            let number: usize = name.strip_prefix("w.")?.parse().ok()?;
            Some([0, 2, 1, 2][number % 4])
        });
        let mut session = scheduler.plan(chain(8)).unwrap().session().unwrap();
        session.run(&[("x", &chain_input())]).unwrap();
        devices.map(|device| device.locks())
    };
    assert_eq!(locks(device("a"), device("b")), [1, 1]);
    assert_eq!(locks(device("a"), host("b")), [1, 0]);
}

#[test]
fn names_of_any_length_name_tensors_copies_and_pins() {
    let [scope, weight, near, far] =
        ["blk", "weight", "near", "far"].map(|name| format!("{name}.{}", "µ".repeat((300 - name.len()) / 2)));
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [1, 16]);
    let inside = g.scope(&scope);
    let w = g.weight(&weight, Weight::with_data(DType::F32, [16, 16], [0.5f32; 256].as_slice()));
    let first = g.mul_mat(w, x).named(&near);
    let second = first.scale(2.0).named(&far);
    drop(inside);
    g.output("y", second);
    let [w, first, second] = [w, first, second].map(|value| value.id());
    let graph = g.finish().unwrap();
    let [near, far] = [near, far].map(|name| format!("{scope}.{name}"));
    let weight = graph.leaf_name(w).unwrap().to_owned();
    for name in [&near, &far, &weight] {
        assert!(name.len() >= 300, "{name}");
    }
    assert_eq!([graph.name(first), graph.name(second)], [near.clone(), far.clone()]);
    for backends in [[device("a"), device("b")], [device("a"), host("b")]] {
        let scheduler = Scheduler::new(backends).pin_name(near.as_str(), 0).pin_name(far.as_str(), 1);
        let plan = scheduler.plan(&graph).unwrap();
        let backend = |id: TensorId| plan.decision(graph[id].node().unwrap()).unwrap().backend;
        assert_eq!([backend(first), backend(second)], [0, 1]);
        assert_eq!(plan.copy_name(0), format!("b#{near}"));
        let (data, json) = (format!("{:?}", plan.explain()), plan.to_json());
        for name in [&near, &far, &weight] {
            assert!(data.contains(name.as_str()) && json.contains(name.as_str()), "{name}");
        }
        let mut session = plan.session().unwrap();
        session.run(&[("x", &[1.0f32; 16])]).unwrap();
        assert_eq!(session.read::<f32>("y").unwrap(), [16.0; 16]);
        assert_eq!(session.tensor(weight.as_str()).unwrap().unwrap().backend.name(), "a");
        // A name that differs in its last letter only is another one.
        let mut other = far.clone();
        other.pop();
        assert!(!matches!(session.tensor(other.as_str()), Ok(Some(_))));
    }
}

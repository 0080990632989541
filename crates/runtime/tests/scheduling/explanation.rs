//! A plan as data: every storage, split and copy.

use std::sync::Arc;

use quadriga_graph::{DType, GraphBuilder, Weight};
use quadriga_runtime::{Backend, Cost, Detail, PLAN_SCHEMA, Scheduler, StorageUse};
use quadriga_sim::Sim;

use crate::common::*;

#[test]
fn storages_add_up_to_the_bytes_of_the_plan() {
    let devices = [Sim::new("a").build(), host("b")];
    let plan = Scheduler::new(devices).place(|name| Some((name > "w.2").into())).plan(chain(6)).unwrap();
    let said = plan.explain();
    assert_eq!(said.schema, PLAN_SCHEMA);
    for (number, backend) in said.backends.iter().enumerate() {
        let mine: Vec<_> = said.storages.iter().filter(|s| s.backend == number).collect();
        let sum = |usage: StorageUse| -> u64 {
            mine.iter().filter(|s| s.usage == usage && !s.mapped).map(|s| s.bytes).sum()
        };
        assert_eq!(sum(StorageUse::Weight), backend.bytes.weights);
        assert_eq!(sum(StorageUse::State), backend.bytes.state);
        assert_eq!(backend.chunks.iter().sum::<u64>(), backend.bytes.compute);
        assert_eq!(backend.total, backend.bytes.total());
        // Storages in use in one step do not overlap, are inside their buffer, and the most bytes are the lower bound.
        let mut most = 0;
        for step in 0..said.steps {
            let mut alive: Vec<_> =
                mine.iter().filter(|s| s.chunk.is_some() && (s.start..s.end).contains(&step)).collect();
            alive.sort_by_key(|s| (s.chunk, s.offset));
            for pair in alive.windows(2) {
                let end = pair[0].offset.unwrap() + pair[0].bytes;
                assert!(pair[0].chunk != pair[1].chunk || end <= pair[1].offset.unwrap(), "{pair:?}");
            }
            for storage in &alive {
                let size = backend.chunks[storage.chunk.unwrap() as usize];
                assert!(storage.offset.unwrap() + storage.bytes <= size, "{storage:?}");
            }
            most = most.max(alive.iter().map(|s| s.bytes).sum());
        }
        assert_eq!(most, backend.lower_bound, "{}", backend.bytes.backend);
    }
}

#[test]
fn nodes_splits_and_copies_refer_to_their_storages() {
    let plan = Scheduler::new([device("a"), device("b")])
        .place(|name| Some((name > "w.1").into()))
        .plan(chain(4))
        .unwrap();
    let said = plan.explain();
    for node in &said.nodes {
        let storage = &said.storages[node.storage.unwrap()];
        assert_eq!(storage.backend, node.decision.backend, "{node:?}");
        assert!((storage.start..storage.end).contains(&(node.node as u32)), "{node:?} {storage:?}");
        assert!(!node.why.is_empty() && !storage.why.is_empty());
    }
    let work = |split: usize| {
        let nodes = said.nodes.iter().filter(|node| node.split == split);
        nodes.map(|node| node.cost).fold(Cost::default(), Cost::and)
    };
    for (number, split) in said.splits.iter().enumerate() {
        assert_eq!(split.cost, work(number));
        assert!(split.cost.operations > 0 && split.first <= split.last);
    }
    let [copy] = said.copies.as_slice() else { panic!("{:?}", said.copies) };
    let place = &said.storages[copy.place];
    assert_eq!((place.usage, place.backend, place.name.as_str()), (StorageUse::Copy, 1, copy.name.as_str()));
    assert!(place.why.contains("split 1 reads it"), "{}", place.why);
    // The JSON has the same fields.
    let json: serde_json::Value = serde_json::from_str(&plan.to_json()).unwrap();
    assert_eq!(json["schema"], PLAN_SCHEMA);
    assert_eq!(json["storages"][copy.place]["usage"], "copy");
    assert_eq!(json["backends"][1]["lower_bound"], said.backends[1].lower_bound);
    assert_eq!(json["splits"][0]["operations"], said.splits[0].cost.operations);
}

#[test]
fn a_run_can_be_timed_by_operation() {
    let sim = Sim::new("a").node_seconds(2.0).build();
    let cpu: Arc<dyn Backend> = Arc::new(quadriga_cpu::Backend::new().unwrap());
    let plan = Scheduler::new([sim, cpu]).place(|name| Some((name > "w.1").into())).plan(chain(4)).unwrap();
    let mut session = plan.session().unwrap();
    session.set("x", &chain_input()).unwrap();
    assert!(session.debug().trace(Detail::Splits).unwrap().operations.is_empty());
    session.set("x", &chain_input()).unwrap();
    let trace = session.debug().trace(Detail::Operations).unwrap();
    let simulated: Vec<_> = trace.operations.iter().filter(|o| o.backend == 0).collect();
    assert_eq!(simulated.len(), 4);
    assert_eq!((simulated[1].start - trace.splits[0].start, simulated[1].seconds), (2.0, 2.0));
    assert_eq!((simulated[0].operation.as_str(), simulated[1].operation.as_str()), ("mul_mat", "tanh"));
    // Steps of the CPU may compute several nodes; together they compute every node once, inside their split.
    let split = trace.splits.iter().find(|split| split.backend == 1).unwrap();
    let mut nodes: Vec<usize> = Vec::new();
    for operation in trace.operations.iter().filter(|o| o.backend == 1) {
        assert!(operation.start >= split.start - 1e-9);
        assert!(operation.start + operation.seconds <= split.start + split.seconds + 1e-9);
        nodes.extend(&operation.nodes);
    }
    nodes.sort_unstable();
    let all: Vec<usize> = plan.splits().nodes_of(split.split).iter().map(|node| node.index()).collect();
    assert_eq!(nodes, all);
}

#[test]
fn scratch_memory_is_listed_with_its_split_and_place() {
    let devices = [Sim::new("a").scratch(100).build(), host("b")];
    let plan = Scheduler::new(devices).place(|name| Some((name > "w.1").into())).plan(chain(4)).unwrap();
    let said = plan.explain();
    let scratches: Vec<_> = said.storages.iter().filter(|s| s.usage == StorageUse::Scratch).collect();
    let [scratch] = scratches.as_slice() else { panic!("{scratches:?}") };
    let split = said.splits.iter().position(|split| split.split.backend == 0).unwrap();
    assert_eq!((scratch.backend, scratch.bytes), (0, 100));
    assert_eq!(scratch.why, format!("scratch memory of split {split}"));
    let end = scratch.offset.unwrap() + scratch.bytes;
    assert!(end <= said.backends[0].chunks[scratch.chunk.unwrap() as usize], "{scratch:?}");
}

#[test]
fn weights_that_are_read_where_the_file_has_them_are_listed_as_mapped() {
    let g = GraphBuilder::new();
    let rows = g.weight("rows", Weight::with_data(DType::F32, [64, 64], vec![0.5f32; 64 * 64].as_slice()));
    g.output("y", rows.get_rows(g.input("ids", DType::I32, [2])));
    let graph = g.finish().unwrap();
    let cpu: Arc<dyn Backend> = Arc::new(quadriga_cpu::Backend::new().unwrap());
    for (backend, mapped) in [(cpu, true), (device("a"), false)] {
        let plan = Scheduler::new(backend).plan(&graph).unwrap();
        let said = plan.explain();
        let storage = said.storages.iter().find(|storage| storage.name == "rows").unwrap();
        assert_eq!((storage.usage, storage.mapped), (StorageUse::Weight, mapped), "{storage:?}");
        assert_eq!(said.backends[0].bytes.mapped > 0, mapped);
        assert!(said.storages.iter().all(|storage| storage.end <= said.steps), "{:?}", said.storages);
    }
}

#[test]
fn weights_in_a_layout_of_the_device_are_listed_as_packed() {
    for (device, packed) in [(Sim::new("packs").packs_weights().build(), true), (device("a"), false)] {
        let said = Scheduler::new(device).plan(chain(2)).unwrap().explain();
        let weights: Vec<_> = said.storages.iter().filter(|s| s.usage == StorageUse::Weight).collect();
        assert!(weights.len() == 2 && weights.iter().all(|weight| weight.packed == packed), "{weights:?}");
    }
    // What packs the first operand of a matmul does not serve the second one.
    let g = GraphBuilder::new();
    let w = g.weight("w", Weight::with_data(DType::F32, [8, 8], vec![0.5f32; 64].as_slice()));
    g.output("y", w.mul_mat(g.input("x", DType::F32, [1, 8])));
    g.output("squares", w.mul_mat(w));
    let packs = Sim::new("packs").packs_weights().build();
    let said = Scheduler::new(packs).plan(g.finish().unwrap()).unwrap().explain();
    assert!(said.storages.iter().all(|storage| !storage.packed), "{:?}", said.storages);
}

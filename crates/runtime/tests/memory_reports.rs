//! What a memory plan says about itself, compared with sums over all storages and steps.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

#[path = "common/random.rs"]
mod random;

use quadriga_conformance::Rng;
use quadriga_graph::{DType, GraphBuilder, TensorId};
use quadriga_runtime::memory::{
    BackendMemory, Extra, Hold, Lifetime, MemoryError, MemoryPlan, MemoryRequest, Planner, StorageOwner,
    TensorLocation,
};

/// All storages in a backend's arena: owner, lifetime, bytes and chunk.
fn storages(plan: &MemoryPlan, backend: usize) -> Vec<(StorageOwner, Lifetime, u64, u32)> {
    let chunk = |location: TensorLocation| match location {
        TensorLocation::Arena { backend: on, chunk, .. } if usize::from(on) == backend => Some(chunk),
        _ => None,
    };
    let mut all = Vec::new();
    for (index, life) in plan.lifetimes.iter().enumerate().filter(|(_, life)| !life.is_empty()) {
        let tensor = TensorId::from_index(index);
        if let Some(chunk) = chunk(plan.location(tensor)) {
            all.push((StorageOwner::Tensor(tensor), *life, plan.bytes[index], chunk));
        }
    }
    for (index, extra) in plan.extras.iter().enumerate() {
        let life = Lifetime { end: extra.lifetime.end.min(plan.horizon), ..extra.lifetime };
        if let Some(chunk) = chunk(plan.extra_location(index)) {
            all.push((StorageOwner::Extra(index), life, extra.bytes, chunk));
        }
    }
    all
}

#[test]
fn the_peak_is_the_first_step_with_the_most_live_bytes() {
    for seed in 0..300 {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let graph = random::graph(&mut rng);
        let lists = random::lists(&mut rng, &graph);
        let memories = lists.memories();
        let plan = Planner::default().plan(&lists.request(&graph, &memories)).unwrap();
        for backend in 0..plan.backends.len() {
            let all = storages(&plan, backend);
            let live = |step: u32| all.iter().filter(move |(_, life, ..)| life.contains(step));
            let bytes = |step: u32| live(step).map(|(_, _, bytes, _)| bytes).sum::<u64>();
            let most = (0..plan.horizon).map(bytes).max().unwrap_or(0);
            let forecast = &plan.forecast(&graph).backends[backend];
            assert_eq!(forecast.waste(), plan.arena_bytes(backend) - plan.backends[backend].lower_bound);
            let step = plan.peak_step(backend);
            assert_eq!(step, (0..plan.horizon).find(|step| bytes(*step) == most).unwrap_or(0));
            let said = plan.live_at(backend, step);
            assert_eq!(said.iter().map(|storage| storage.bytes).sum::<u64>(), most);
            assert_eq!(said.len(), live(step).count());
            assert!(said.is_sorted_by(|a, b| a.bytes >= b.bytes));
            for chunk in 0..plan.backends[backend].chunks.len() {
                let sizes =
                    all.iter().filter(|(.., of)| *of as usize == chunk).map(|(_, _, bytes, _)| *bytes);
                let largest = plan.largest_in(backend, chunk);
                let size =
                    all.iter().find(|(owner, ..)| Some(*owner) == largest).map(|(_, _, bytes, _)| *bytes);
                assert_eq!(size, sizes.max());
            }
        }
    }
}

#[test]
fn the_table_of_storages_lists_every_alias_once() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [4, 8]);
    let square = x.sqr().named("square");
    let view = square.reshape([8, 4]).named("view");
    g.output("y", view.silu().named("silu"));
    let graph = g.finish().unwrap();
    let memories = [BackendMemory::measuring("cpu", 64, None)];
    let plan = Planner::default().plan(&MemoryRequest::new(&graph, &memories)).unwrap();
    assert_eq!(plan.sharing.table(&graph), "square: view (view) silu (in place)\n");
    assert_eq!(plan.sharing.in_place_count(&graph), 1);
}

#[test]
fn requests_with_unknown_backends_or_tensors_are_errors_that_name_them() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [4]);
    g.output("y", x.neg().named("negated"));
    let graph = g.finish().unwrap();
    let memories = [BackendMemory::measuring("a", 64, None), BackendMemory::measuring("b", 64, None)];
    let refuse = |request: MemoryRequest<'_>| Planner::default().plan(&request).unwrap_err();
    let request = || MemoryRequest::new(&graph, &memories);
    let backends = [1, 2];
    assert_eq!(
        refuse(MemoryRequest { backends: &backends, ..request() }),
        MemoryError::UnknownBackend { what: "negated".into(), backend: 2, count: 2 }
    );
    let extra = |backend| Extra { backend, bytes: 1, lifetime: Lifetime { start: 0, end: 1 } };
    assert_eq!(
        refuse(MemoryRequest { extras: &[extra(1), extra(2)], ..request() }),
        MemoryError::UnknownBackend { what: "extra 1".into(), backend: 2, count: 2 }
    );
    let unknown = TensorId::from_index(2);
    let error = MemoryError::UnknownTensor { index: 2, count: 2 };
    assert_eq!(refuse(MemoryRequest { holds: &[Hold { tensor: unknown, until: 0 }], ..request() }), error);
    assert_eq!(refuse(MemoryRequest { external: &[unknown], ..request() }), error);
    assert_eq!(
        refuse(MemoryRequest::new(&graph, &[])),
        MemoryError::Length { what: "memories", expected: 1, found: 0 }
    );
}

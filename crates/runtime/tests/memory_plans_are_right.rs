//! Plans of random graphs: every node reads the bytes that were written, no plan needs more memory than best fit in
//! time order, and the checker agrees with a comparison of all pairs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

#[path = "common/best_fit.rs"]
mod best_fit;
#[path = "common/random.rs"]
mod random;

use quadriga_conformance::Rng;
use quadriga_graph::{Graph, TensorId, TensorKind};
use quadriga_runtime::memory::{
    InputPolicy, MemoryPlan, MemoryRequest, PlanViolation, Planner, TensorLocation, check,
};
use std::collections::HashMap;

/// The chunks of each backend, and memory of its own for each external storage.
#[derive(Default)]
struct Bytes {
    chunks: HashMap<(u16, u32), Vec<u8>>,
    own: HashMap<TensorId, Vec<u8>>,
}

impl Bytes {
    fn at(&mut self, graph: &Graph, plan: Option<&MemoryPlan>, id: TensorId) -> &mut [u8] {
        let tensor = &graph[id];
        let bytes = tensor.bytes();
        if let Some(plan) = plan
            && let TensorLocation::Arena { backend, chunk, offset } = plan.location(id)
        {
            let size = plan.backends[usize::from(backend)].chunks[chunk as usize] as usize;
            let chunk = self.chunks.entry((backend, chunk)).or_insert_with(|| vec![0; size]);
            return &mut chunk[offset as usize..offset as usize + bytes];
        }
        let size = graph[tensor.storage()].bytes();
        let own = self.own.entry(tensor.storage()).or_insert_with(|| vec![0; size]);
        &mut own[tensor.offset()..tensor.offset() + bytes]
    }
}

/// Simulates a run twice, in the planned memory and with separate memory for every storage: writes random bytes as each
/// result, and compares the bytes that every node reads.
fn run(request: &MemoryRequest<'_>, plan: &MemoryPlan, rng: &mut Rng, seed: u64) {
    let graph = request.graph;
    let (mut planned, mut plain) = (Bytes::default(), Bytes::default());
    let write = |planned: &mut Bytes, plain: &mut Bytes, id: TensorId, rng: &mut Rng| {
        let value: Vec<u8> = (0..graph[id].bytes()).map(|_| rng.next_u64() as u8).collect();
        plain.at(graph, None, id).copy_from_slice(&value);
        if plan.location(id) != TensorLocation::Unused {
            planned.at(graph, Some(plan), id).copy_from_slice(&value);
        }
    };
    let same = |planned: &mut Bytes, plain: &mut Bytes, id: TensorId, what: &str| {
        let (is, should) = (planned.at(graph, Some(plan), id), plain.at(graph, None, id));
        assert!(is == should, "seed {seed}: {} was overwritten before {what}\n{graph}", graph.name(id));
    };
    for id in graph.tensor_ids().filter(|id| !matches!(graph[*id].kind(), TensorKind::Computed(_))) {
        write(&mut planned, &mut plain, id, rng);
    }
    for (id, node) in graph.node_ids().zip(graph.nodes()).filter(|(_, node)| !node.op().is_view()) {
        let backend_of = |tensor: TensorId| request.backends[graph[tensor].storage().index()];
        for input in graph.inputs(id) {
            let by_copy = backend_of(*input) != request.backends[node.output().index()]
                && request.holds.iter().any(|hold| hold.tensor == *input);
            if !by_copy {
                same(&mut planned, &mut plain, *input, &graph.node_name(id));
            }
        }
        write(&mut planned, &mut plain, node.output(), rng);
    }
    for (name, output) in graph.outputs() {
        same(&mut planned, &mut plain, *output, name);
    }
    let kept = graph.of_kind(TensorKind::Input).filter(|id| plan.location(*id) != TensorLocation::Unused);
    if request.inputs == InputPolicy::Keep {
        kept.for_each(|input| same(&mut planned, &mut plain, input, "the next run"));
    }
}

/// The high-water mark of ggml's allocator for the storages of one backend.
fn free_list_peak(plan: &MemoryPlan, backend: u16, alignment: u64) -> u64 {
    let mut items: Vec<(u64, u32, u32)> = Vec::new();
    let here = |location: &TensorLocation| match location {
        TensorLocation::Arena { backend: on, .. } => *on == backend,
        _ => false,
    };
    for ((location, life), bytes) in plan.locations.iter().zip(&plan.lifetimes).zip(&plan.bytes) {
        if here(location) && !life.is_empty() {
            items.push((*bytes, life.start, life.end));
        }
    }
    for (extra, _) in plan.extras.iter().zip(&plan.extra_locations).filter(|(_, location)| here(location)) {
        items.push((extra.bytes, extra.lifetime.start, extra.lifetime.end.min(plan.horizon)));
    }
    best_fit::best_fit_peak(&items, alignment)
}

fn check_many(first_seed: u64, graphs: u64) {
    println!("seeds {first_seed}..{}", first_seed + graphs);
    let (mut planner, mut plan) = (Planner::default(), MemoryPlan::default());
    let (mut shared, mut several) = (0, 0);
    for seed in first_seed..first_seed + graphs {
        let mut rng = Rng::new(seed);
        let graph = random::graph(&mut rng);
        // The same graph under four requests: other backends, steps, holds and limits.
        for _ in 0..4 {
            let lists = random::lists(&mut rng, &graph);
            let memories = lists.memories();
            let request = lists.request(&graph, &memories);
            planner.plan_into(&request, &mut plan).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            check(&request, &plan).unwrap_or_else(|e| panic!("seed {seed}: {e}\n{graph}{lists:?}"));
            run(&request, &plan, &mut rng, seed);
            for (number, backend) in plan.backends.iter().enumerate() {
                assert!(backend.arena_bytes() >= backend.lower_bound, "seed {seed}");
                several += usize::from(backend.chunks.len() > 1);
                let (alignment, max) = lists.memories[number];
                if max.is_none() {
                    let free_list = free_list_peak(&plan, number as u16, alignment as u64);
                    let least = if backend.chunks.is_empty() { 0 } else { alignment as u64 };
                    assert!(backend.arena_bytes() <= free_list.max(least), "seed {seed}");
                }
            }
            shared += plan.sharing.in_place_count(&graph);
        }
    }
    assert!(shared as u64 > graphs && several as u64 > graphs / 10, "{shared} in place, {several} in chunks");
}

// 104,000 plans in four tests, which run concurrently.
#[test]
fn plans_of_random_graphs_preserve_every_value_that_is_read_1() {
    check_many(1_000_000, 6_500);
}

#[test]
fn plans_of_random_graphs_preserve_every_value_that_is_read_2() {
    check_many(2_000_000, 6_500);
}

#[test]
fn plans_of_random_graphs_preserve_every_value_that_is_read_3() {
    check_many(3_000_000, 6_500);
}

#[test]
fn plans_of_random_graphs_preserve_every_value_that_is_read_4() {
    check_many(4_000_000, 6_500);
}

/// Whether two storages with overlapping lifetimes overlap in memory, by comparing all pairs.
fn any_pair_overlaps(plan: &MemoryPlan) -> bool {
    let storages: Vec<_> = (0..plan.locations.len())
        .filter(|i| !plan.lifetimes[*i].is_empty())
        .map(|i| (plan.locations[i], plan.lifetimes[i], plan.bytes[i]))
        .collect();
    let bytes = |location: TensorLocation, size: u64| match location {
        TensorLocation::Arena { backend, chunk, offset } => Some((backend, chunk, offset, offset + size)),
        _ => None,
    };
    storages.iter().enumerate().any(|(i, (a, life_a, size_a))| {
        storages[..i].iter().any(|(b, life_b, size_b)| {
            let (Some(a), Some(b)) = (bytes(*a, *size_a), bytes(*b, *size_b)) else { return false };
            life_a.overlaps(*life_b) && (a.0, a.1) == (b.0, b.1) && a.2.max(b.2) < a.3.min(b.3)
        })
    })
}

/// Moves the storage of a root with all its aliases.
fn move_storage(graph: &Graph, plan: &mut MemoryPlan, root: TensorId, to: (u32, u64)) {
    for id in graph.tensor_ids().filter(|id| plan.sharing.root(*id) == Some(root)).collect::<Vec<_>>() {
        if let TensorLocation::Arena { chunk, offset, .. } = &mut plan.locations[id.index()] {
            (*chunk, *offset) = (to.0, to.1 + graph[id].offset() as u64);
        }
    }
}

#[test]
fn the_checker_agrees_with_a_comparison_of_all_pairs() {
    let (mut right, mut wrong) = (0, 0);
    for seed in 0..3000 {
        let mut rng = Rng::new(seed);
        let graph = random::graph(&mut rng);
        let mut lists = random::lists(&mut rng, &graph);
        lists.extras.clear();
        lists.memories.iter_mut().for_each(|(_, max)| *max = None);
        let memories = lists.memories();
        let request = lists.request(&graph, &memories);
        let mut plan = Planner::default().plan(&request).unwrap();
        let roots: Vec<_> = graph.tensor_ids().filter(|id| !plan.lifetimes[id.index()].is_empty()).collect();
        let (Some(from), Some(to)) = (rng.pick(&roots).copied(), rng.pick(&roots).copied()) else { continue };
        let TensorLocation::Arena { backend: from_backend, .. } = plan.location(from) else { continue };
        let TensorLocation::Arena { backend, chunk, offset } = plan.location(to) else { continue };
        let chunks = &plan.backends[usize::from(from_backend)].chunks;
        if from_backend != backend || offset + plan.bytes[from.index()] > chunks[chunk as usize] {
            continue;
        }
        move_storage(&graph, &mut plan, from, (chunk, offset));
        let checked = check(&request, &plan);
        assert_eq!(checked.is_err(), any_pair_overlaps(&plan), "seed {seed}: {checked:?}");
        assert!(
            checked.is_ok() || matches!(checked, Err(PlanViolation::Overlap { .. })),
            "seed {seed}: {checked:?}"
        );
        if checked.is_ok() { right += 1 } else { wrong += 1 }
    }
    assert!(right > 100 && wrong > 100, "{right} right, {wrong} wrong");
}

#[test]
fn corrupted_plans_are_rejected() {
    type Corrupt = fn(&mut MemoryPlan, &mut Rng, TensorId) -> Option<()>;
    let kinds: [(&str, Corrupt); 17] = [
        ("another graph", |plan, _, _| {
            plan.graph.0 ^= 1;
            Some(())
        }),
        ("too few locations", |plan, _, _| plan.locations.pop().map(|_| ())),
        ("too few lifetimes", |plan, _, _| plan.lifetimes.pop().map(|_| ())),
        ("too few sizes", |plan, _, _| plan.bytes.pop().map(|_| ())),
        ("too few backends", |plan, _, _| plan.backends.pop().map(|_| ())),
        ("too few extras", |plan, _, _| plan.extra_locations.pop().map(|_| ())),
        ("an extra on another backend", |plan, _, _| match plan.extra_locations.first_mut()? {
            TensorLocation::Arena { backend, .. } => {
                *backend += 1;
                Some(())
            }
            _ => None,
        }),
        ("a chunk above the limit", |plan, _, _| {
            let limited = plan.backends.iter_mut().find(|backend| backend.chunks.len() > 1)?;
            limited.chunks[0] += 1000;
            Some(())
        }),
        ("no memory", |plan, _, id| match plan.location(id) {
            TensorLocation::Unused => None,
            _ => {
                plan.locations[id.index()] = TensorLocation::Unused;
                Some(())
            }
        }),
        ("external memory", |plan, _, id| match plan.location(id) {
            TensorLocation::Arena { backend, .. } => {
                plan.locations[id.index()] = TensorLocation::External { backend };
                Some(())
            }
            _ => None,
        }),
        ("misaligned, or not at its offset in its source", |plan, _, id| {
            match &mut plan.locations[id.index()] {
                TensorLocation::Arena { offset, .. } => {
                    *offset += 1;
                    Some(())
                }
                _ => None,
            }
        }),
        ("another backend", |plan, _, id| match &mut plan.locations[id.index()] {
            TensorLocation::Arena { backend, .. } | TensorLocation::External { backend } => {
                *backend += 1;
                Some(())
            }
            TensorLocation::Unused => None,
        }),
        ("a chunk that does not exist", |plan, _, id| match &mut plan.locations[id.index()] {
            TensorLocation::Arena { chunk, .. } => {
                *chunk += 1000;
                Some(())
            }
            _ => None,
        }),
        ("a chunk too small", |plan, rng, _| {
            let all: Vec<_> = plan.backends.iter_mut().flat_map(|b| b.chunks.iter_mut()).collect();
            let picked = rng.below(all.len().max(1));
            let chunk = all.into_iter().nth(picked)?;
            // A chunk of one alignment may hold only tensors of zero bytes.
            *chunk = chunk.checked_sub(1).filter(|_| *chunk > 32)?;
            Some(())
        }),
        ("lifetime ends too early", |plan, _, id| {
            let life = &mut plan.lifetimes[id.index()];
            life.end = life.end.checked_sub(1).filter(|_| !life.is_empty())?;
            Some(())
        }),
        ("lifetime starts too late", |plan, _, id| {
            let life = &mut plan.lifetimes[id.index()];
            (!life.is_empty()).then(|| life.start += 1)
        }),
        ("a wrong root", |plan, rng, id| {
            let other = TensorId::from_index(rng.below(plan.locations.len()));
            if plan.sharing.root(id) == Some(other)
                || plan.locations[id.index()] == plan.locations[other.index()]
            {
                return None;
            }
            plan.sharing.roots[id.index()] = other;
            Some(())
        }),
    ];
    // What is said of each, as recorded: the first rule that is broken, with its names and numbers.
    let mut said = 0xcbf2_9ce4_8422_2325_u64;
    for (kind, corrupt) in kinds {
        let mut rejected = 0;
        for seed in 0..400 {
            let mut rng = Rng::new(seed);
            let graph = random::graph(&mut rng);
            let lists = random::lists(&mut rng, &graph);
            let memories = lists.memories();
            let request = lists.request(&graph, &memories);
            let mut plan = Planner::default().plan(&request).unwrap();
            let id = TensorId::from_index(rng.below(graph.tensors().len()));
            if corrupt(&mut plan, &mut rng, id).is_some() {
                let Err(violation) = check(&request, &plan) else {
                    panic!("{kind}, seed {seed}\n{graph}{lists:?}");
                };
                for byte in violation.to_string().bytes() {
                    // FNV-1a.
                    said = (said ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
                }
                rejected += 1;
            }
        }
        assert!(rejected > 50, "{kind}: only {rejected} tried");
    }
    assert_eq!(said, 0x7818_4309_ed65_9e92, "recorded");
}

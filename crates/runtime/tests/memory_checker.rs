//! The memory checker accepts what the planner makes, and names the rule that any other plan breaks: a wrong plan for each.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_graph::{DType, Graph, GraphBuilder, TensorId, Value, Weight};
use quadriga_runtime::memory::{
    BackendMemory, Extra, Hold, InputPolicy, Lifetime, MemoryPlan, MemoryRequest, PlanViolation, Planner,
    TensorLocation, check,
};

const ALIGNMENT: usize = 16;

fn memory(name: &str) -> BackendMemory<'_> {
    BackendMemory::measuring(name, ALIGNMENT, None)
}

fn built(build: impl FnOnce(&GraphBuilder)) -> Graph {
    let g = GraphBuilder::new();
    build(&g);
    g.finish().unwrap()
}

/// An input of 2 × 4 numbers, which are 32 bytes.
fn input<'g>(g: &'g GraphBuilder, name: &str) -> Value<'g> {
    g.input(name, DType::F32, [2, 4])
}

fn weight<'g>(g: &'g GraphBuilder, name: &str) -> Value<'g> {
    g.weight(name, Weight::new(DType::F32, [2, 4]))
}

fn id(graph: &Graph, name: &str) -> TensorId {
    graph.tensor(name).unwrap_or_else(|| panic!("no tensor {name}"))
}

/// A plan that the checker accepts.
fn planned(request: &MemoryRequest<'_>) -> MemoryPlan {
    let plan = Planner::default().plan(request).unwrap();
    check(request, &plan).unwrap();
    plan
}

/// The rule that a plan breaks after a change.
fn broken(request: &MemoryRequest<'_>, change: impl FnOnce(&mut MemoryPlan)) -> PlanViolation {
    let mut plan = planned(request);
    change(&mut plan);
    check(request, &plan).expect_err("the checker accepted a wrong plan")
}

/// Where a tensor begins in its chunk.
fn offset(plan: &MemoryPlan, tensor: TensorId) -> u64 {
    match plan.location(tensor) {
        TensorLocation::Arena { offset, .. } => offset,
        other => panic!("{other:?}"),
    }
}

/// Moves a storage with its views to an offset of chunk 0.
fn move_to(graph: &Graph, plan: &mut MemoryPlan, storage: TensorId, offset: u64) {
    for tensor in graph.tensor_ids().filter(|tensor| graph[*tensor].storage() == storage) {
        let offset = offset + graph[tensor].offset() as u64;
        plan.locations[tensor.index()] = TensorLocation::Arena { backend: 0, chunk: 0, offset };
    }
}

/// A graph whose results all have memory of their own, as matmuls do not run in place: 2 × 2 of them, the last an output.
fn products(count: usize) -> Graph {
    built(|g| {
        let w = g.weight("w", Weight::new(DType::F32, [2, 2]));
        let mut x = g.input("x", DType::F32, [2, 2]);
        for index in 0..count {
            x = w.mul_mat(x).named(&format!("p{index}"));
        }
        g.output("y", x);
    })
}

#[test]
fn tensors_have_the_kind_of_memory_that_they_need() {
    let graph = built(|g| {
        let (x, unused) = (input(g, "x"), input(g, "unused"));
        let a = x.add(weight(g, "w")).named("a");
        let _ = unused.slice(0, 0, 1).named("view");
        g.output("y", a.mean());
    });
    let memories = [memory("a"), memory("b")];
    let request = MemoryRequest::new(&graph, &memories);
    let [x, a, w, unused] = ["x", "a", "w", "unused"].map(|name| id(&graph, name));
    let expected = |tensor: TensorId, location: TensorLocation| match broken(&request, |plan| {
        plan.locations[tensor.index()] = location;
    }) {
        PlanViolation::WrongLocation { tensor: named, expected, .. } => {
            assert_eq!(named, graph.name(tensor));
            expected
        }
        other => panic!("{other}"),
    };
    let arena = TensorLocation::Arena { backend: 0, chunk: 0, offset: 0 };
    for used in [x, a] {
        assert_eq!(expected(used, TensorLocation::Unused), "in an arena");
        assert_eq!(expected(used, TensorLocation::External { backend: 0 }), "in an arena");
    }
    for location in [arena, TensorLocation::Unused] {
        assert_eq!(expected(w, location), "external");
    }
    for location in [arena, TensorLocation::External { backend: 0 }] {
        assert_eq!(expected(unused, location), "without memory, as nothing uses it");
    }
    // Each on the backend of the request.
    for (tensor, location) in [
        (w, TensorLocation::External { backend: 1 }),
        (a, TensorLocation::Arena { backend: 1, chunk: 0, offset: 0 }),
    ] {
        let violation = broken(&request, |plan| plan.locations[tensor.index()] = location);
        let tensor = graph.name(tensor);
        assert_eq!(violation, PlanViolation::WrongBackend { tensor, found: 1, expected: 0 });
    }
    // Memory of the caller's.
    let external = [a];
    let request = MemoryRequest { external: &external, ..request };
    let violation = broken(&request, |plan| plan.locations[a.index()] = arena);
    assert!(matches!(violation, PlanViolation::WrongLocation { expected: "external", .. }), "{violation}");
}

#[test]
fn plans_are_of_the_graph_and_have_all_its_tensors() {
    let graph = products(2);
    let memories = [memory("a")];
    let extras = [Extra { backend: 0, bytes: 8, lifetime: Lifetime::WHOLE }];
    let request = MemoryRequest { extras: &extras, ..MemoryRequest::new(&graph, &memories) };
    let changes: [fn(&mut MemoryPlan); 7] = [
        |plan| plan.graph.0 ^= 1,
        |plan| plan.locations.push(TensorLocation::Unused),
        |plan| _ = plan.lifetimes.pop(),
        |plan| _ = plan.bytes.pop(),
        |plan| _ = plan.sharing.roots.pop(),
        |plan| plan.extra_locations.clear(),
        |plan| plan.backends.clear(),
    ];
    for change in changes {
        assert_eq!(broken(&request, change), PlanViolation::OtherGraph);
    }
}

#[test]
fn storages_are_aligned_and_inside_their_chunk() {
    let graph = products(3);
    let memories = [memory("a")];
    let request = MemoryRequest::new(&graph, &memories);
    let p1 = id(&graph, "p1");
    let of_backend = &planned(&request).backends[0];
    assert_eq!((of_backend.inputs, of_backend.results, &*of_backend.name), (16, 48, "a"));
    let size = of_backend.chunks[0];
    assert_eq!(size, 48, "the input and two products of 16 bytes at a time");
    let moved = |to: u64| broken(&request, |plan| move_to(&graph, plan, p1, to));
    for wrong in [8, size - 8] {
        let misaligned = PlanViolation::Misaligned { what: "p1".to_owned(), offset: wrong, alignment: 16 };
        assert_eq!(moved(wrong), misaligned);
    }
    for outside in [size, u64::MAX - 15] {
        let what = "p1".to_owned();
        let violation = PlanViolation::OutOfBounds { what, chunk: 0, offset: outside, bytes: 16, size };
        assert_eq!(moved(outside), violation);
    }
    let violation = broken(&request, |plan| {
        plan.locations[p1.index()] = TensorLocation::Arena { backend: 0, chunk: 1, offset: 0 };
    });
    assert!(matches!(violation, PlanViolation::OutOfBounds { chunk: 1, size: 0, .. }), "{violation}");
    let violation = broken(&request, |plan| plan.backends[0].chunks[0] -= 1);
    assert!(matches!(violation, PlanViolation::OutOfBounds { size: 47, .. }), "{violation}");
}

#[test]
fn chunks_are_within_the_limit_but_for_one_large_storage() {
    // The input has 16 bytes, as the products.
    let graph = products(3);
    for (limit, most) in [(32, 32), (24, 24), (16, 16), (4, 16)] {
        let memories = [BackendMemory::measuring("a", ALIGNMENT, Some(limit))];
        let request = MemoryRequest::new(&graph, &memories);
        let mut plan = planned(&request);
        plan.backends[0].chunks[0] = most;
        check(&request, &plan).unwrap_or_else(|error| panic!("{most} with a limit of {limit}: {error}"));
        plan.backends[0].chunks[0] = most + 1;
        let (size, limit) = (most + 1, limit as u64);
        let large = PlanViolation::ChunkTooLarge { backend: 0, chunk: 0, size, limit };
        assert_eq!(check(&request, &plan), Err(large));
    }
    // A chunk of one alignment is allowed, as one for storages without bytes has.
    let memories = [memory("a"), BackendMemory::measuring("b", 64, Some(8))];
    let extras = [Extra { backend: 1, bytes: 0, lifetime: Lifetime::WHOLE }];
    let request = MemoryRequest { extras: &extras, ..MemoryRequest::new(&graph, &memories) };
    let mut plan = planned(&request);
    plan.backends[1].chunks = vec![64];
    plan.extra_locations[0] = TensorLocation::Arena { backend: 1, chunk: 0, offset: 0 };
    check(&request, &plan).unwrap();
    plan.backends[1].chunks = vec![65];
    assert!(matches!(check(&request, &plan), Err(PlanViolation::ChunkTooLarge { backend: 1, size: 65, .. })));
}

#[test]
fn views_are_at_their_offset_in_their_source() {
    let graph = built(|g| {
        let x = input(g, "x");
        g.output("y", x.slice(0, 1, 1).named("view").mean());
    });
    let memories = [memory("a")];
    let request = MemoryRequest::new(&graph, &memories);
    let (x, view) = (id(&graph, "x"), id(&graph, "view"));
    let elsewhere = |source: &str| PlanViolation::ViewElsewhere {
        view: "view".to_owned(),
        source_name: source.to_owned(),
    };
    assert_eq!(offset(&planned(&request), view), offset(&planned(&request), x) + 16);
    for wrong in [0, 12, 20, 32] {
        let location = TensorLocation::Arena { backend: 0, chunk: 0, offset: wrong };
        let violation = broken(&request, |plan| plan.locations[view.index()] = location);
        assert_eq!(violation, elsewhere("x"), "{wrong}");
    }
    let violation = broken(&request, |plan| plan.sharing.roots[view.index()] = view);
    assert_eq!(violation, elsewhere("view"));
}

/// What forbids that a result is computed in place, in the memory of `reused`.
fn why(request: &MemoryRequest<'_>, result: &str, reused: &str) -> &'static str {
    let (result, reused) = (id(request.graph, result), id(request.graph, reused));
    let violation = broken(request, |plan| {
        assert_eq!(plan.sharing.root(result), Some(result), "is computed in place already");
        plan.sharing.roots[result.index()] = reused;
        plan.locations[result.index()] = plan.locations[reused.index()];
    });
    match violation {
        PlanViolation::NotInPlace { why, .. } => why,
        other => panic!("{other}"),
    }
}

#[test]
fn results_are_computed_in_place_only_where_nothing_else_needs_the_memory() {
    let memories = [memory("a")];
    let release = InputPolicy::Release;
    let request = |graph| MemoryRequest { inputs: release, ..MemoryRequest::new(graph, &memories) };

    // An input and a result that is not computed from it.
    let graph = built(|g| {
        let (x, z) = (input(g, "x"), input(g, "z"));
        g.output("y", x.mean().named("m").tanh());
        g.output("u", z.mean());
        g.output("v", x.mul(x).named("square").mean());
    });
    assert_eq!(why(&request(&graph), "z", "x"), "it is not computed");
    assert_eq!(why(&request(&graph), "m", "z"), "not exactly one input is in that storage");
    assert_eq!(why(&request(&graph), "m", "x"), "the operation does not run in place on that input");
    assert_eq!(why(&request(&graph), "square", "x"), "not exactly one input is in that storage");

    // Only a part of a storage, or with other strides.
    let graph = built(|g| {
        let (x, z) = (input(g, "x"), g.input("z", DType::F32, [4, 4]));
        g.output("y", x.slice(0, 0, 1).tanh().named("part").mean());
        g.output("u", z.transpose().tanh().named("transposed").mean());
    });
    let layout = "the input has another layout, or is only a part of its storage";
    assert_eq!(why(&request(&graph), "part", "x"), layout);
    assert_eq!(why(&request(&graph), "transposed", "z"), layout);

    // Memory that is the caller's, an output's or a kept input's.
    let graph = built(|g| {
        let (x, z) = (input(g, "x"), input(g, "z"));
        g.output("first", x.tanh().named("a"));
        g.output("y", weight(g, "w").tanh().named("of_weight").mean());
        g.output("z2", z.tanh().named("of_input").mean());
    });
    let taken = "the input has external memory, or is an output";
    let external = [id(&graph, "of_weight")];
    assert_eq!(why(&MemoryRequest { external: &external, ..request(&graph) }, "of_weight", "w"), taken);
    let kept = MemoryRequest { inputs: InputPolicy::Keep, ..request(&graph) };
    assert_eq!(why(&kept, "of_input", "z"), "inputs are kept");
    let graph = built(|g| {
        let a = input(g, "x").mean().named("a");
        g.output("first", a);
        g.output("y", a.tanh().named("of_output"));
    });
    assert_eq!(why(&request(&graph), "of_output", "a"), taken);

    // A later use.
    let graph = built(|g| {
        let (x, z) = (input(g, "x"), input(g, "z"));
        g.output("y", x.tanh().named("a"));
        g.output("b", z.tanh().named("b"));
        g.output("c", z.sqr().named("c"));
    });
    let later = "the input is used elsewhere in that step or later";
    assert_eq!(why(&request(&graph), "b", "z"), later);
    let holds = [Hold { tensor: id(&graph, "x"), until: 0 }];
    let held = MemoryRequest { holds: &holds, ..request(&graph) };
    assert_eq!(why(&held, "a", "x"), later);
}

#[test]
fn in_place_results_begin_where_their_root_does() {
    let graph = built(|g| {
        let x = input(g, "x");
        g.output("y", x.tanh().named("a").sqr().named("b").mean());
    });
    let memories = [memory("a")];
    let request = MemoryRequest { inputs: InputPolicy::Release, ..MemoryRequest::new(&graph, &memories) };
    let [x, a, b] = ["x", "a", "b"].map(|name| id(&graph, name));
    let plan = planned(&request);
    assert_eq!([a, b].map(|tensor| plan.sharing.root(tensor)), [Some(x); 2]);
    assert_eq!(plan.sharing.in_place_count(&graph), 2);
    let elsewhere = broken(&request, |plan| move_to(&graph, plan, a, offset(plan, x) + 16));
    // The root of a root is itself.
    let chain = broken(&request, |plan| plan.sharing.roots[b.index()] = a);
    for violation in [elsewhere, chain] {
        let at_start = "it is not at the start of the storage";
        assert!(
            matches!(&violation, PlanViolation::NotInPlace { why, .. } if *why == at_start),
            "{violation}"
        );
    }
}

#[test]
fn lifetimes_cover_all_uses() {
    let graph = built(|g| {
        let x = input(g, "x");
        let a = x.mean().named("a");
        let b = a.concat(0, &[a]).named("b");
        g.output("b", b.mean());
        g.output("c", x.mean());
        g.output("d", b.mean());
    });
    let memories = [memory("a")];
    let request = MemoryRequest { inputs: InputPolicy::Release, ..MemoryRequest::new(&graph, &memories) };
    let [x, a, b] = ["x", "a", "b"].map(|name| id(&graph, name));
    // mean, concat, mean, mean, mean: x is read last by node 3, a by 1, b by 4.
    let lives = [(x, 0, 4), (a, 0, 2), (b, 1, 5)];
    for (tensor, start, end) in lives {
        let needed = Lifetime { start, end };
        assert_eq!(planned(&request).lifetimes[tensor.index()], needed);
        for planned in [Lifetime { start: start + 1, end }, Lifetime { start, end: end - 1 }] {
            let violation = broken(&request, |plan| plan.lifetimes[tensor.index()] = planned);
            let tensor = graph.name(tensor);
            assert_eq!(violation, PlanViolation::TooShort { tensor, needed, planned });
        }
    }
    // A kept input, an output and a tensor that is held are used longer.
    let kept = MemoryRequest { inputs: InputPolicy::Keep, ..request };
    let holds = [Hold { tensor: a, until: 3 }];
    let held = MemoryRequest { holds: &holds, ..request };
    let output = graph.outputs()[0].1;
    for (request, tensor, start, end) in [(kept, x, 0, 5), (held, a, 0, 4), (request, output, 2, 5)] {
        let planned = Lifetime { start, end: end - 1 };
        let violation = broken(&request, |plan| plan.lifetimes[tensor.index()] = planned);
        let (tensor, needed) = (graph.name(tensor), Lifetime { start, end });
        assert_eq!(violation, PlanViolation::TooShort { tensor, needed, planned });
    }
}

#[test]
fn a_tensor_that_is_copied_away_is_live_as_long_as_it_is_held() {
    let graph = built(|g| {
        let a = input(g, "x").mean().named("a");
        let _ = a.concat(0, &[a]).named("here");
        g.output("there", a.concat(0, &[a]).named("there"));
        g.output("last", input(g, "z").mean());
    });
    let memories = [memory("a"), memory("b")];
    let (a, there) = (id(&graph, "a"), id(&graph, "there"));
    let mut backends = vec![0; graph.tensors().len()];
    backends[there.index()] = 1;
    let request = MemoryRequest { backends: &backends, ..MemoryRequest::new(&graph, &memories) };
    let needed = |holds: &[Hold]| {
        let request = MemoryRequest { holds, ..request };
        match broken(&request, |plan| plan.lifetimes[a.index()] = Lifetime::NEVER) {
            PlanViolation::TooShort { needed, .. } => needed,
            other => panic!("{other}"),
        }
    };
    // Without a hold, the node of the other backend counts.
    assert_eq!(needed(&[]), Lifetime { start: 0, end: 3 });
    for (until, end) in [(0, 2), (1, 2), (3, 4)] {
        assert_eq!(needed(&[Hold { tensor: a, until }]), Lifetime { start: 0, end });
    }
}

#[test]
fn storages_that_are_live_in_the_same_step_have_no_byte_in_common() {
    let graph = built(|g| {
        let [x, y, z] = ["x", "y", "z"].map(|name| input(g, name));
        g.output("u", x.mul(y).mul(z));
    });
    let memories = [memory("a")];
    let request = MemoryRequest::new(&graph, &memories);
    let [x, y] = ["x", "y"].map(|name| id(&graph, name));
    // Both inputs alone, in a larger chunk.
    let with = |at_x: u64, at_y: u64| {
        let mut plan = planned(&request);
        plan.backends[0].chunks[0] += 1000;
        let free = plan.backends[0].chunks[0] / 16 * 16 - 480;
        move_to(&graph, &mut plan, x, free + at_x);
        move_to(&graph, &mut plan, y, free + at_y);
        check(&request, &plan)
    };
    for (at_x, at_y) in [(0, 32), (32, 0), (0, 64)] {
        assert_eq!(with(at_x, at_y), Ok(()));
    }
    for (at_x, at_y) in [(0, 0), (0, 16), (16, 0)] {
        let overlap = with(at_x, at_y);
        assert!(matches!(overlap, Err(PlanViolation::Overlap { step: 0, .. })), "{at_x} {at_y}: {overlap:?}");
    }
}

#[test]
fn memory_is_used_again_from_the_step_after_the_last_use() {
    // p0 is live in steps 0 and 1, p2 in 2 and 3.
    let graph = products(4);
    let memories = [memory("a")];
    let extras = [Extra { backend: 0, bytes: 16, lifetime: Lifetime { start: 1, end: 3 } }];
    let request = MemoryRequest { extras: &extras, ..MemoryRequest::new(&graph, &memories) };
    let place = |storage: &str, over: &str| {
        let mut plan = planned(&request);
        let to = offset(&plan, id(&graph, over));
        move_to(&graph, &mut plan, id(&graph, storage), to);
        check(&request, &plan)
    };
    let mut free = planned(&request);
    free.backends[0].chunks[0] += 160;
    let far = free.backends[0].chunks[0] - 160;
    for (index, name) in ["p0", "p1", "p2", "p3"].into_iter().enumerate() {
        move_to(&graph, &mut free, id(&graph, name), far + 16 * index as u64);
    }
    let mut again = free.clone();
    move_to(&graph, &mut again, id(&graph, "p2"), far);
    check(&request, &again).unwrap();
    let mut early = free.clone();
    move_to(&graph, &mut early, id(&graph, "p1"), far);
    let violation = check(&request, &early).unwrap_err();
    assert!(matches!(violation, PlanViolation::Overlap { step: 1, .. }), "{violation}");
    let overlap = place("p1", "p0").unwrap_err();
    assert!(matches!(overlap, PlanViolation::Overlap { .. }), "{overlap}");

    // Extras, too: live in steps 1 and 2.
    let at = |offset: u64| {
        let mut plan = free.clone();
        plan.extra_locations[0] = TensorLocation::Arena { backend: 0, chunk: 0, offset };
        check(&request, &plan)
    };
    for (index, step) in [(0, 1), (1, 1), (2, 2)] {
        let overlap = at(far + 16 * index).unwrap_err();
        assert!(matches!(overlap, PlanViolation::Overlap { step: s, .. } if s == step), "{overlap}");
    }
    assert_eq!(at(far + 48), Ok(()), "p3 is computed in step 3");
    // One without bytes overlaps nothing, and hides no other overlap.
    let extras = [Extra { backend: 0, bytes: 0, lifetime: Lifetime { start: 0, end: 1 } }];
    let empty = MemoryRequest { extras: &extras, ..request };
    free.extras = extras.to_vec();
    early.extras = extras.to_vec();
    free.extra_locations[0] = TensorLocation::Arena { backend: 0, chunk: 0, offset: far };
    early.extra_locations[0] = free.extra_locations[0];
    assert_eq!(check(&empty, &free), Ok(()));
    assert!(matches!(check(&empty, &early), Err(PlanViolation::Overlap { step: 1, .. })));
    for location in [TensorLocation::Unused, TensorLocation::Arena { backend: 1, chunk: 0, offset: 0 }] {
        let violation = broken(&request, |plan| plan.extra_locations[0] = location);
        assert!(matches!(violation, PlanViolation::WrongLocation { .. }), "{violation}");
    }
}

//! The rules of aliasing and liveness, one by one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_graph::{DType, Graph, GraphBuilder, NodeId, TensorId, Value, Weight};
use quadriga_runtime::memory::{
    BackendMemory, Extra, Hold, InputPolicy, Lifetime, MemoryError, MemoryPlan, MemoryRequest, Planner,
    TensorLocation, barrier_steps, check,
};

const MEMORIES: fn() -> [BackendMemory<'static>; 2] =
    || [BackendMemory::measuring("a", 4, None), BackendMemory::measuring("b", 4, None)];

fn plan_of(request: &MemoryRequest<'_>) -> MemoryPlan {
    let plan = Planner::default().plan(request).unwrap();
    check(request, &plan).unwrap();
    plan
}

fn plan(graph: &Graph, inputs: InputPolicy) -> MemoryPlan {
    plan_of(&MemoryRequest { inputs, ..MemoryRequest::new(graph, &MEMORIES()) })
}

/// A result of 16 elements, computed from an input.
fn fresh<'g>(g: &'g GraphBuilder, name: &str) -> Value<'g> {
    g.input(name, DType::F32, [16]).cast(DType::F32)
}

fn same(plan: &MemoryPlan, a: TensorId, b: TensorId) -> bool {
    plan.sharing.root(a) == plan.sharing.root(b)
}

#[test]
fn g1_memory_is_released_at_the_last_use() {
    let g = GraphBuilder::new();
    let a = fresh(&g, "a");
    let b = a.pad([1]);
    let c = a.slice(0, 0, 4).pad([1]);
    let d = c.concat(0, &[b]);
    g.output("d", d);
    let ids = [a, b, c, d].map(Value::id);
    let graph = g.finish().unwrap();
    let plan = plan(&graph, InputPolicy::Keep);
    let lives = ids.map(|id| plan.lifetimes[id.index()]);
    // Nodes: cast, pad, slice, pad, concat. The reader of the slice extends the lifetime of `a`.
    let expected = [(0, 4), (1, 5), (3, 5), (4, 5)].map(|(start, end)| Lifetime { start, end });
    assert_eq!(lives, expected);
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
    let plan = plan(&graph, InputPolicy::Keep);
    assert_eq!(plan.arena_bytes(0), 128);
    assert_eq!(plan.sharing.in_place_count(&graph), 2);
    assert!(plan.sharing.table(&graph).contains("in place"));
}

#[test]
fn g3_every_in_place_operation_reuses_its_input() {
    type Make = for<'g> fn(&'g GraphBuilder, Value<'g>) -> Value<'g>;
    let operations: [(&str, Make); 13] = [
        ("scale", |_, x| x.scale(2.0)),
        ("diag_mask_inf", |_, x| x.diag_mask_inf(0)),
        ("diag_mask_zero", |_, x| x.diag_mask_zero(0)),
        ("add", |g, x| x.add(g.input("y", DType::F32, [4, 4]))),
        ("add1", |g, x| x.add1(g.input("y", DType::F32, [1]))),
        ("sub", |g, x| x.sub(g.input("y", DType::F32, [4, 4]))),
        ("mul", |g, x| x.mul(g.input("y", DType::F32, [4, 4]))),
        ("div", |g, x| x.div(g.input("y", DType::F32, [4, 4]))),
        ("second input", |g, x| g.input("y", DType::F32, [4, 4]).sub(x)),
        ("sqr, sqrt, log, unary", |_, x| x.sqr().sqrt().log().silu()),
        ("rms_norm", |_, x| x.rms_norm(1e-5)),
        ("soft_max", |_, x| x.soft_max(1.0, None, None)),
        ("swiglu", |g, x| g.input("y", DType::F32, [4, 4]).swiglu(x)),
    ];
    for (name, make) in operations {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [4, 4]).cast(DType::F32);
        let y = make(&g, x);
        g.output("y", y);
        let (x, y) = (x.id(), y.id());
        let graph = g.finish().unwrap();
        let plan = plan(&graph, InputPolicy::Keep);
        assert!(same(&plan, x, y), "{name}");
    }
}

#[test]
fn g3_an_input_that_is_still_needed_is_not_reused_in_place() {
    type Make = for<'g> fn(&'g GraphBuilder, Value<'g>) -> Value<'g>;
    let cases: [(&str, Make); 7] = [
        ("another reader later", |g, x| {
            let y = x.scale(2.0);
            g.output("later", x.pad([1]));
            y
        }),
        ("a view that is read later", |g, x| {
            let view = x.slice(0, 0, 4);
            let y = x.scale(2.0);
            g.output("later", view.pad([1]));
            y
        }),
        ("an output", |g, x| {
            g.output("x", x);
            x.scale(2.0)
        }),
        ("an output through a view", |g, x| {
            g.output("x", x.slice(0, 0, 4));
            x.scale(2.0)
        }),
        ("both inputs", |_, x| x.add(x)),
        ("an operation that is not in place", |_, x| x.pad([0])),
        ("a part of a larger storage", |_, x| x.slice(0, 0, 4).scale(2.0)),
    ];
    for (name, make) in cases {
        let g = GraphBuilder::new();
        let x = fresh(&g, "x");
        let y = make(&g, x);
        g.output("y", y);
        let (x, y) = (x.id(), y.id());
        let graph = g.finish().unwrap();
        assert!(!same(&plan(&graph, InputPolicy::Release), x, y), "{name}");
    }
}

#[test]
fn an_in_place_result_may_be_an_output() {
    let g = GraphBuilder::new();
    let x = fresh(&g, "x");
    let y = x.scale(2.0);
    g.output("y", y);
    let (x, y) = (x.id(), y.id());
    let graph = g.finish().unwrap();
    assert!(same(&plan(&graph, InputPolicy::Keep), x, y));
}

#[test]
fn inputs_are_kept_unless_the_request_releases_them() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [16]);
    g.input("unused", DType::F32, [1000]);
    g.output("y", x.scale(2.0));
    let graph = g.finish().unwrap();
    assert_eq!(plan(&graph, InputPolicy::Keep).arena_bytes(0), 128);
    assert_eq!(plan(&graph, InputPolicy::Release).arena_bytes(0), 64);
    let unused = graph.leaf("unused").unwrap();
    assert_eq!(plan(&graph, InputPolicy::Keep).location(unused), TensorLocation::Unused);
}

#[test]
fn a_result_without_readers_is_live_for_one_step() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [16]);
    let dead = x.pad([16]);
    let dead_id = dead.id();
    let y = x.pad([16]);
    g.output("y", y);
    let y = y.id();
    let graph = g.finish().unwrap();
    let plan = plan(&graph, InputPolicy::Keep);
    assert_eq!(plan.lifetimes[dead_id.index()], Lifetime { start: 0, end: 1 });
    assert_eq!(plan.location(dead_id), plan.location(y));
}

#[test]
fn g4_sharing_never_moves_a_node_to_another_backend() {
    let g = GraphBuilder::new();
    let x = fresh(&g, "x");
    let y = x.scale(2.0);
    g.output("y", y);
    let (x, y) = (x.id(), y.id());
    let graph = g.finish().unwrap();
    let backends: Vec<u16> = graph.tensor_ids().map(|id| u16::from(id == y)).collect();
    let plan = plan_of(&MemoryRequest { backends: &backends, ..MemoryRequest::new(&graph, &MEMORIES()) });
    assert!(!same(&plan, x, y));
    assert!(matches!(plan.location(y), TensorLocation::Arena { backend: 1, .. }));
}

#[test]
fn g5_x10_external_tensors_are_not_planned_and_their_views_are_resolved() {
    let g = GraphBuilder::new();
    let w = g.weight("w", Weight::new(DType::F32, [4, 16]));
    let state = g.state("state", DType::F32, [4, 16]);
    let input = g.input("external", DType::F32, [1, 16]);
    // The first nodes are views of leaves.
    let row = w.slice(0, 1, 1);
    let part = state.slice(0, 2, 1);
    let written = input.copy_into(part);
    let kept = fresh(&g, "x").reshape([1, 16]);
    let y = row.add(written);
    let z = input.scale(2.0);
    g.output("y", y.add(z).add(kept));
    let [row, part, written, input] = [row, part, written, input].map(Value::id);
    let graph = g.finish().unwrap();
    let external = [input];
    let plan = plan_of(&MemoryRequest {
        external: &external,
        inputs: InputPolicy::Release,
        ..MemoryRequest::new(&graph, &MEMORIES())
    });
    for id in [row, part, written, input] {
        assert_eq!(plan.location(id), TensorLocation::External { backend: 0 });
    }
    assert_eq!((plan.backends[0].weights, plan.backends[0].state), (256, 256));
}

#[test]
fn g6_with_barriers_memory_is_released_only_at_a_barrier() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [16]);
    let parts: Vec<_> = (0..4).map(|_| x.pad([16])).collect();
    let sums: Vec<_> = parts.iter().map(|part| part.sum()).collect();
    let all = sums[0].concat(0, &sums[1..]);
    g.output("all", all);
    let graph = g.finish().unwrap();
    let nodes: Vec<NodeId> = graph.node_ids().collect();
    // One part after the other: each pad reuses the memory of the previous one.
    let groups: Vec<Vec<NodeId>> =
        (0..4).flat_map(|i| [vec![nodes[i]], vec![nodes[4 + i]]]).chain([vec![nodes[8]]]).collect();
    let groups: Vec<&[NodeId]> = groups.iter().map(Vec::as_slice).collect();
    let steps = barrier_steps(&graph, &groups).unwrap();
    let one_by_one = plan_of(&MemoryRequest { steps: &steps, ..MemoryRequest::new(&graph, &MEMORIES()) });
    assert_eq!(one_by_one.arena_bytes(0), 64 + 128 + 4 * 4);
    // All parts concurrently: no memory is reused before the barrier.
    let steps = barrier_steps(&graph, &[&nodes[..4], &nodes[4..8], &nodes[8..]]).unwrap();
    let together = plan_of(&MemoryRequest { steps: &steps, ..MemoryRequest::new(&graph, &MEMORIES()) });
    assert_eq!(together.arena_bytes(0), 64 + 4 * 128 + 4 * 4);
    // A node of another graph is an error.
    let error = barrier_steps(&graph, &[&nodes[..4], &[NodeId::from_index(9)]]);
    assert!(matches!(error, Err(MemoryError::Length { what: "nodes", expected: 9, found: 10 })), "{error:?}");
    // So is an order that contradicts the graph.
    let steps = barrier_steps(&graph, &[&nodes[4..8], &nodes[..4], &nodes[8..]]).unwrap();
    let memories = MEMORIES();
    let error =
        Planner::default().plan(&MemoryRequest { steps: &steps, ..MemoryRequest::new(&graph, &memories) });
    assert!(matches!(error, Err(MemoryError::Order { .. })));
}

#[test]
fn a_hold_extends_the_lifetime_of_a_tensor() {
    let g = GraphBuilder::new();
    let x = fresh(&g, "x");
    let y = x.scale(2.0);
    let z = y.pad([1]);
    g.output("z", z);
    let (x, y) = (x.id(), y.id());
    let graph = g.finish().unwrap();
    let memories = MEMORIES();
    let base = MemoryRequest::new(&graph, &memories);
    assert!(same(&plan_of(&base), x, y));
    for until in [1, 2, 7] {
        let holds = [Hold { tensor: x, until }];
        let plan = plan_of(&MemoryRequest { holds: &holds, ..base });
        assert!(!same(&plan, x, y), "held until {until}");
        assert_eq!(plan.lifetimes[x.index()].end, until + 1);
    }
    // A reader on another backend reads a copy: the hold alone decides how long the original is live.
    let backends: Vec<u16> = graph.tensor_ids().map(|id| u16::from(id.index() > x.index())).collect();
    let holds = [Hold { tensor: x, until: 0 }];
    let extras = [Extra { backend: 1, bytes: 64, lifetime: Lifetime { start: 0, end: 2 } }];
    let request = MemoryRequest { backends: &backends, holds: &holds, extras: &extras, ..base };
    let plan = plan_of(&request);
    assert_eq!(plan.lifetimes[x.index()], Lifetime { start: 0, end: 1 });
    assert_eq!(plan.backends[1].extras, 64);
    assert!(matches!(plan.extra_location(0), TensorLocation::Arena { backend: 1, .. }));
}

#[test]
fn invalid_requests_are_errors() {
    let g = GraphBuilder::new();
    let state = g.state("s", DType::F32, [4]);
    let x = g.input("x", DType::F32, [4]);
    let written = x.copy_into(state);
    g.output("y", written.pad([1]));
    let (x, written) = (x.id(), written.id());
    let graph = g.finish().unwrap();
    let memories = MEMORIES();
    let base = MemoryRequest::new(&graph, &memories);
    let refused = |request: MemoryRequest<'_>| Planner::default().plan(&request).unwrap_err();
    assert!(matches!(refused(MemoryRequest { backends: &[0], ..base }), MemoryError::Length { .. }));
    assert!(matches!(refused(MemoryRequest { steps: &[0], ..base }), MemoryError::Length { .. }));
    assert!(matches!(refused(MemoryRequest { memories: &[], ..base }), MemoryError::Length { .. }));
    assert!(matches!(
        refused(MemoryRequest { backends: &[0, 2, 0, 0], ..base }),
        MemoryError::UnknownBackend { .. }
    ));
    assert!(matches!(refused(MemoryRequest { steps: &[0, u32::MAX], ..base }), MemoryError::Step { .. }));
    let far = [Hold { tensor: x, until: u32::MAX }];
    assert!(matches!(refused(MemoryRequest { holds: &far, ..base }), MemoryError::Step { .. }));
    // The last step that there may be.
    let last = u32::MAX - 5;
    let plan = |request: MemoryRequest<'_>| Planner::default().plan(&request);
    for (step, allowed) in [(last, true), (last + 1, false)] {
        let holds = [Hold { tensor: x, until: step }];
        assert_eq!(plan(MemoryRequest { holds: &holds, ..base }).is_ok(), allowed, "{step}");
        let steps = [step; 2];
        assert_eq!(plan(MemoryRequest { steps: &steps, ..base }).is_ok(), allowed, "{step}");
        let extras = [Extra { backend: 0, bytes: 1, lifetime: Lifetime { start: step, end: u32::MAX } }];
        assert_eq!(plan(MemoryRequest { extras: &extras, ..base }).is_ok(), allowed, "{step}");
    }
    let unknown = [TensorId::from_index(99)];
    assert!(matches!(
        refused(MemoryRequest { external: &unknown, ..base }),
        MemoryError::UnknownTensor { .. }
    ));
    let never = [Extra { backend: 0, bytes: 1, lifetime: Lifetime { start: 3, end: 3 } }];
    assert!(matches!(refused(MemoryRequest { extras: &never, ..base }), MemoryError::Step { .. }));
    let huge = [Extra { backend: 0, bytes: u64::MAX, lifetime: Lifetime::WHOLE }];
    assert!(matches!(refused(MemoryRequest { extras: &huge, ..base }), MemoryError::Packing(_)));
    let odd = [BackendMemory::measuring("odd", 24, None)];
    assert!(matches!(refused(MemoryRequest { memories: &odd, ..base }), MemoryError::Alignment { .. }));
    let mut backends = vec![0; 4];
    backends[written.index()] = 1;
    assert!(matches!(
        refused(MemoryRequest { backends: &backends, ..base }),
        MemoryError::ForeignWrite { .. }
    ));
}

/// Lets a plan compute `y` in the storage of `x`, in every other respect as a plan that may do so.
fn share(graph: &Graph, plan: &mut MemoryPlan, x: TensorId, y: TensorId) {
    let root = plan.sharing.root(x).unwrap();
    let old = plan.sharing.root(y).unwrap();
    let life = |id: TensorId| plan.lifetimes[id.index()];
    let (start, end) = (life(root).start.min(life(old).start), life(root).end.max(life(old).end));
    plan.lifetimes[root.index()] = Lifetime { start, end };
    plan.bytes[root.index()] = plan.bytes[root.index()].max(plan.bytes[old.index()]);
    for id in graph.tensor_ids().filter(|id| plan.sharing.root(*id) == Some(old)).collect::<Vec<_>>() {
        plan.sharing.roots[id.index()] = root;
        plan.locations[id.index()] = match plan.location(root) {
            TensorLocation::Arena { backend, chunk, offset } => {
                TensorLocation::Arena { backend, chunk, offset: offset + graph[id].offset() as u64 }
            }
            other => other,
        };
    }
}

#[test]
fn the_checker_names_the_rule_that_an_in_place_result_breaks() {
    type Make = for<'g> fn(&'g GraphBuilder, Value<'g>) -> Value<'g>;
    let (keep, release) = (InputPolicy::Keep, InputPolicy::Release);
    let cases: [(&str, InputPolicy, Make); 8] = [
        ("not exactly one input is in that storage", release, |_, x| x.add(x)),
        ("not exactly one input is in that storage", release, |g, x| {
            g.output("x", x.pad([1]));
            fresh(g, "other").scale(2.0)
        }),
        ("the operation does not run in place on that input", release, |_, x| x.cast(DType::F32)),
        ("the input has another layout, or is only a part", release, |_, x| x.slice(0, 4, 4).scale(2.0)),
        ("the input has external memory, or is an output", release, |g, x| {
            g.output("x", x);
            x.scale(2.0)
        }),
        ("inputs are kept", keep, |g, _| g.input("kept", DType::F32, [16]).scale(2.0)),
        ("the input is used elsewhere in that step or later", release, |g, x| {
            let y = x.scale(2.0);
            g.output("later", x.pad([1]));
            y
        }),
        // A use before the node is no reason against it.
        ("", release, |g, x| {
            g.output("before", x.pad([1]));
            x.scale(2.0)
        }),
    ];
    for (why, inputs, make) in cases {
        let g = GraphBuilder::new();
        let x = fresh(&g, "x");
        let y = make(&g, x);
        g.output("y", y);
        let (x, y) = (x.id(), y.id());
        let graph = g.finish().unwrap();
        let memories = MEMORIES();
        let request = MemoryRequest { inputs, ..MemoryRequest::new(&graph, &memories) };
        let mut plan = plan_of(&request);
        let x = graph.leaf("kept").unwrap_or(x);
        if !same(&plan, x, y) {
            share(&graph, &mut plan, x, y);
        }
        match check(&request, &plan) {
            Ok(()) => assert_eq!(why, ""),
            Err(error) => assert!(!why.is_empty() && error.to_string().contains(why), "{why}: {error}"),
        }
    }
}

#[test]
fn the_checker_refuses_sharing_between_backends_and_of_external_memory() {
    let g = GraphBuilder::new();
    let x = fresh(&g, "x");
    let y = x.scale(2.0);
    g.output("y", y);
    let (x, y) = (x.id(), y.id());
    let graph = g.finish().unwrap();
    let memories = MEMORIES();
    let base = MemoryRequest::new(&graph, &memories);
    let refused =
        |request: &MemoryRequest<'_>, plan: &MemoryPlan| check(request, plan).unwrap_err().to_string();
    // The plan of one backend, for a request with two.
    let backends: Vec<u16> = graph.tensor_ids().map(|id| u16::from(id == y)).collect();
    let mut plan = plan_of(&base);
    assert!(same(&plan, x, y));
    let text = refused(&MemoryRequest { backends: &backends, ..base }, &plan);
    assert!(text.contains("backend"), "{text}");
    // A result that is not at the start of the storage it reuses.
    let TensorLocation::Arena { offset, .. } = &mut plan.locations[y.index()] else { panic!("planned") };
    *offset += 4;
    plan.backends[0].chunks[0] += 4;
    let text = refused(&base, &plan);
    assert!(text.contains("not at the start of the storage"), "{text}");
    // A storage of the caller.
    let external = [x];
    let request = MemoryRequest { external: &external, ..base };
    let mut plan = plan_of(&request);
    share(&graph, &mut plan, x, y);
    let text = refused(&request, &plan);
    assert!(text.contains("\"y\"") || text.contains("in an arena"), "{text}");
}

#[test]
fn two_readers_in_the_last_step_keep_their_input_though_an_earlier_one_comes_after_them() {
    let g = GraphBuilder::new();
    let x = fresh(&g, "x");
    let (a, b, c) = (x.tanh(), x.sqr(), x.neg());
    for (name, y) in [("a", a), ("b", b), ("c", c)] {
        g.output(name, y.pad([1]));
    }
    let [x, a, b, c] = [x, a, b, c].map(Value::id);
    let graph = g.finish().unwrap();
    let memories = MEMORIES();
    // cast, tanh, sqr, neg and three pads: `neg` runs before the others.
    let steps = [0, 2, 2, 1, 3, 3, 3];
    let plan = plan_of(&MemoryRequest { steps: &steps, ..MemoryRequest::new(&graph, &memories) });
    assert!([a, b, c].iter().all(|y| !same(&plan, x, *y)), "{}", plan.sharing.table(&graph));
}

#[test]
fn a_plan_that_is_filled_again_has_nothing_of_the_earlier_one() {
    let graph = |count: usize| {
        let g = GraphBuilder::new();
        (0..count).for_each(|i| g.output(&format!("y{i}"), fresh(&g, &format!("x{i}")).pad([1])));
        g.finish().unwrap()
    };
    let (large, small, memories) = (graph(3), graph(1), MEMORIES());
    let extras = [Extra { backend: 0, bytes: 64, lifetime: Lifetime::WHOLE }];
    let with = |graph| MemoryRequest { extras: &extras, ..MemoryRequest::new(graph, &memories) };
    let (mut planner, mut plan) = (Planner::default(), MemoryPlan::default());
    for request in [with(&large), with(&small), MemoryRequest::new(&small, &memories)] {
        planner.plan_into(&request, &mut plan).unwrap();
        assert_eq!(plan, Planner::default().plan(&request).unwrap());
    }
    let wrong = MemoryRequest { steps: &[0], ..MemoryRequest::new(&small, &memories) };
    planner.plan_into(&wrong, &mut plan).unwrap_err();
    assert!(plan.locations.is_empty() && plan.extras.is_empty() && plan.arena_bytes(0) == 0);
}

//! S7, S8, S11: sessions, from inputs to outputs.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};

use quadriga_graph::{BuildError, DType, Data, Graph, GraphBuilder, Weight};
use quadriga_runtime::{Detail, ModelId, Observed, ObservedRun, PlanKey, RuntimeError, Scheduler, Session};
use quadriga_sim::{FaultPoint, Sim};

use crate::common::{chain, chain_input, device, host};

/// A model of one graph per batch size: a weight, and a state that collects row sums.
fn graph_of_batch(batch: usize) -> Result<Graph, BuildError> {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [batch, 8]);
    let ids = g.input("ids", DType::I32, [batch]);
    let values: Vec<f32> = (0..64).map(|i| (i % 5) as f32).collect();
    let w = g.weight("w", Weight::with_data(DType::F32, [8, 8], Data::from(values.as_slice())));
    let y = g.mul_mat(w, x);
    let seen = g.state("seen", DType::F32, [16, 8]).set_rows(y, ids);
    g.output("y", y);
    g.output("seen", seen);
    g.finish()
}

#[test]
fn s8_inputs_are_set_by_name_or_id_and_outputs_read_by_name_or_id() {
    let graph = chain(2);
    let plan = Scheduler::new([host("cpu")]).plan(&graph).unwrap();
    let mut session = plan.session().unwrap();
    session.run(&[("x", &chain_input())]).unwrap();
    let by_name: Vec<f32> = session.read("y").unwrap();
    session.set(graph.leaf("x").unwrap(), &chain_input()[..]).unwrap();
    session.start().unwrap();
    session.wait().unwrap();
    assert_eq!(session.read::<f32>(graph.output("y").unwrap()).unwrap(), by_name);
    let mut into = vec![0.0f32; 32];
    session.read_into("y", &mut into).unwrap();
    assert_eq!(into, by_name);
}

#[test]
fn wrong_names_types_and_sizes_are_errors_and_change_nothing() {
    let graph = chain(2);
    let mut session = Scheduler::new([device("a")]).plan(&graph).unwrap().session().unwrap();
    assert!(matches!(session.read::<f32>("y"), Err(RuntimeError::NothingRun)));
    assert!(matches!(session.start(), Err(RuntimeError::NotSet { what: "input", .. })));
    session.run(&[("x", &chain_input())]).unwrap();
    let good: Vec<f32> = session.read("y").unwrap();
    let error = session.set("nope", &[0.0f32]).unwrap_err();
    assert_eq!(error.to_string(), "the graph has no input named \"nope\"; there are: x");
    assert!(matches!(session.set("x", &[0i32; 32]), Err(RuntimeError::WrongType { .. })));
    assert!(matches!(session.set("x", &[0f32; 31]), Err(RuntimeError::WrongSize { .. })));
    assert!(matches!(session.read::<i32>("y"), Err(RuntimeError::WrongType { .. })));
    assert!(matches!(session.read::<f32>("x"), Err(RuntimeError::WrongKind { .. })));
    assert!(matches!(session.read::<f32>("nope"), Err(RuntimeError::UnknownName { .. })));
    assert!(matches!(session.read_into("y", &mut [0f32; 3]), Err(RuntimeError::WrongSize { .. })));
    session.run(&[]).unwrap();
    assert_eq!(session.read::<f32>("y").unwrap(), good);
}

#[test]
fn leaves_and_views_of_them_can_be_outputs() {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [2, 4]);
    let w = g.weight("w", Weight::with_data(DType::F32, [2], Data::from(&[5.0f32, 6.0][..])));
    g.output("x", x);
    g.output("part", x.slice(0, 1, 1));
    g.output("w", w);
    g.output("state", g.state("s", DType::F32, [3]));
    g.output("transposed", x.transpose());
    let graph = g.finish().unwrap();
    let mut session = Scheduler::new([device("a"), host("cpu")]).plan(&graph).unwrap().session().unwrap();
    for round in 0..3 {
        let values: Vec<f32> = (0..8).map(|i| (i + round) as f32).collect();
        session.run(&[("x", &values)]).unwrap();
        assert_eq!(session.read::<f32>("x").unwrap(), values);
        assert_eq!(session.read::<f32>("part").unwrap(), values[4..]);
        assert_eq!(session.read::<f32>("w").unwrap(), [5.0, 6.0]);
        assert_eq!(session.read::<f32>("state").unwrap(), [0.0; 3]);
        assert!(matches!(session.read::<f32>("transposed"), Err(RuntimeError::Strided { .. })));
    }
}

#[test]
fn graphs_of_a_session_share_weights_state_and_arena_and_are_found_by_key() {
    let a = Sim::new("a").device();
    // With the check, graphs would be built again.
    let mut session = Session::new(&Scheduler::new(a.clone()).check_plans(false)).unwrap();
    let built = AtomicUsize::new(0);
    let model = ModelId::new();
    let key = |batch: u64| PlanKey::of(&model, [batch, 0, 0, 0]);
    let build = |batch: usize| {
        built.fetch_add(1, Ordering::Relaxed);
        graph_of_batch(batch)
    };
    session.prepare(key(4), || build(4)).unwrap();
    session.run(&[("x", &[1.0f32; 32]), ("ids", &[0, 1, 2, 3])]).unwrap();
    let used = a.used_bytes();
    for round in 0..5 {
        session.prepare(key(1), || build(1)).unwrap();
        session.run(&[("x", &[2.0f32; 8]), ("ids", &[7 + round])]).unwrap();
        session.prepare(key(4), || build(4)).unwrap();
        session.run(&[("x", &[1.0f32; 32]), ("ids", &[0, 1, 2, 3])]).unwrap();
    }
    assert_eq!(built.load(Ordering::Relaxed), 2);
    assert_eq!(a.used_bytes(), used, "the smaller graph fits into the arena of the larger one");
    let seen: Vec<f32> = session.read("seen").unwrap();
    assert!(seen[..32].iter().all(|v| *v != 0.0) && seen[32..56].iter().all(|v| *v == 0.0));
    assert!(seen[56..96].iter().all(|v| *v != 0.0) && seen[96..].iter().all(|v| *v == 0.0));
    // An equal graph is found without a key.
    let compiled = a.counts().of(FaultPoint::Compile);
    session.use_graph(graph_of_batch(4).unwrap()).unwrap();
    assert_eq!(a.counts().of(FaultPoint::Compile), compiled);
    session.clear_state().unwrap();
    session.run(&[("x", &[1.0f32; 32]), ("ids", &[0, 1, 2, 3])]).unwrap();
    assert!(session.read::<f32>("seen").unwrap()[32..].iter().all(|v| *v == 0.0));
}

#[test]
fn inputs_and_results_are_gone_after_another_graph_uses_the_arena() {
    let mut session = Session::new(&Scheduler::new([device("a"), host("cpu")])).unwrap();
    let four = ([1.0f32; 32], [0, 1, 2, 3]);
    let run = |session: &mut Session| session.run(&[("x", &four.0), ("ids", &four.1)]);
    session.prepare(4, || graph_of_batch(4)).unwrap();
    run(&mut session).unwrap();
    let expected: Vec<f32> = session.read("y").unwrap();
    // As long as only this graph is used, its inputs keep their values.
    session.prepare(1, || graph_of_batch(1)).unwrap();
    session.prepare(4, || graph_of_batch(4)).unwrap();
    assert_eq!(session.read::<f32>("y").unwrap(), expected);
    session.set("ids", &four.1).unwrap();
    session.run(&[]).unwrap();
    assert_eq!(session.read::<f32>("y").unwrap(), expected);
    // Then another graph is given inputs, and perhaps run.
    for runs in [false, true] {
        session.prepare(1, || graph_of_batch(1)).unwrap();
        session.set("x", &[2.0f32; 8]).unwrap();
        session.set("ids", &[7]).unwrap();
        if runs {
            session.run(&[]).unwrap();
        }
        session.prepare(4, || graph_of_batch(4)).unwrap();
        assert!(matches!(session.read::<f32>("y"), Err(RuntimeError::Gone { name }) if name == "y"));
        assert!(session.read::<f32>("seen").is_ok(), "a state is not in the arena");
        session.set("x", &four.0).unwrap();
        let error = session.run(&[]).unwrap_err();
        assert!(matches!(&error, RuntimeError::NotSet { name, .. } if name == "ids"), "{error}");
        run(&mut session).unwrap();
        assert_eq!(session.read::<f32>("y").unwrap(), expected);
        session.prepare(1, || graph_of_batch(1)).unwrap();
        assert!(matches!(session.run(&[]), Err(RuntimeError::NotSet { .. })));
        session.prepare(4, || graph_of_batch(4)).unwrap();
    }
}

#[test]
fn the_arena_grows_for_a_larger_graph_and_the_smaller_one_still_works() {
    let a = Sim::new("a").device();
    let mut session = Session::new(&Scheduler::new(a.clone())).unwrap();
    session.prepare(1, || graph_of_batch(1)).unwrap();
    session.run(&[("x", &[2.0f32; 8]), ("ids", &[7])]).unwrap();
    let small: Vec<f32> = session.read("y").unwrap();
    session.prepare(16, || graph_of_batch(16)).unwrap();
    let ids: Vec<i32> = (0..16).collect();
    session.run(&[("x", &[1.0f32; 128]), ("ids", &ids)]).unwrap();
    session.prepare(1, || graph_of_batch(1)).unwrap();
    session.run(&[("x", &[2.0f32; 8]), ("ids", &[7])]).unwrap();
    assert_eq!(session.read::<f32>("y").unwrap(), small);
    let expected = session.memory().bytes(0) + 256;
    assert_eq!(a.used_bytes(), expected, "the old arena is freed; weights are 256 bytes");
}

#[test]
fn a_state_or_weight_without_data_of_another_type_or_shape_is_a_conflict() {
    let build = |rows: usize, dtype: DType, state: usize| {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [1, 8]);
        let w = g.weight("w", Weight::new(dtype, [rows, 8]));
        g.output("y", g.mul_mat(w, x));
        g.output("s", g.state("s", DType::F32, [state]));
        g.finish().unwrap()
    };
    let mut session = Session::new(&Scheduler::new(host("cpu"))).unwrap();
    session.use_graph(build(4, DType::F32, 4)).unwrap();
    let error = session.use_graph(build(4, DType::F16, 4)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "weight w was F32 [4, 8], and is F16 [4, 8] in another graph of the session"
    );
    let error = session.use_graph(build(2, DType::F32, 4)).unwrap_err();
    assert!(matches!(error, RuntimeError::Conflict { what: "weight", .. }), "{error}");
    let error = session.use_graph(build(4, DType::F32, 2)).unwrap_err();
    assert!(matches!(error, RuntimeError::Conflict { what: "state", .. }), "{error}");
    session.use_graph(build(4, DType::F32, 4)).unwrap();
    session.set_weight("w", &[0; 128]).unwrap();
    session.run(&[("x", &[0.0f32; 8])]).unwrap();
}

#[test]
fn constants_of_equal_graphs_may_differ() {
    let build = |value: f32| {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [1]);
        g.output("y", x.add(g.constant("c", DType::F32, [1], Data::from(&[value][..]))));
        g.finish().unwrap()
    };
    assert_eq!(build(1.0).fingerprint(), build(2.0).fingerprint());
    let mut session = Session::new(&Scheduler::new([device("a")])).unwrap();
    for value in [1.0, 2.0, 1.0] {
        session.use_graph(build(value)).unwrap();
        session.run(&[("x", &[10.0f32])]).unwrap();
        assert_eq!(session.read::<f32>("y").unwrap(), [10.0 + value]);
    }
}

#[test]
fn a_weight_with_a_new_use_is_loaded_again_in_a_layout_for_all_uses() {
    let values: Vec<f32> = (0..64).map(|i| i as f32).collect();
    let build = |rows: bool| {
        let g = GraphBuilder::new();
        let w = g.weight("w", Weight::with_data(DType::F32, [8, 8], Data::from(values.as_slice())));
        if rows {
            g.output("y", w.get_rows(g.input("ids", DType::I32, [1])));
        } else {
            g.output("y", g.mul_mat(w, g.input("x", DType::F32, [1, 8])));
        }
        g.finish().unwrap()
    };
    let mut session = Session::new(&Scheduler::new([Sim::new("a").packs_weights().build()])).unwrap();
    let unit = [0.0f32, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    for _ in 0..2 {
        session.use_graph(build(false)).unwrap();
        session.run(&[("x", &unit)]).unwrap();
        assert_eq!(session.read::<f32>("y").unwrap(), [1.0, 9.0, 17.0, 25.0, 33.0, 41.0, 49.0, 57.0]);
        session.use_graph(build(true)).unwrap();
        session.run(&[("ids", &[1])]).unwrap();
        assert_eq!(session.read::<f32>("y").unwrap(), values[8..16]);
    }
}

#[test]
fn weights_without_data_must_be_set() {
    let g = GraphBuilder::new();
    let w = g.weight("w", Weight::new(DType::F32, [2]));
    g.output("y", w.scale(2.0));
    let graph = g.finish().unwrap();
    let mut session = Scheduler::new([device("a")]).plan(&graph).unwrap().session().unwrap();
    let error = session.run(&[]).unwrap_err();
    assert_eq!(error, RuntimeError::NotSet { what: "weight", name: "w".into() });
    assert!(matches!(session.set_weight("w", &[0; 3]), Err(RuntimeError::WrongSize { .. })));
    assert!(matches!(session.set_weight("v", &[0; 8]), Err(RuntimeError::UnknownName { .. })));
    session.set_weight("w", &[1.5f32.to_le_bytes(), 2.5f32.to_le_bytes()].concat()).unwrap();
    session.run(&[]).unwrap();
    assert_eq!(session.read::<f32>("y").unwrap(), [3.0, 5.0]);
}

#[test]
fn two_sessions_of_one_plan_share_weights_and_agree_on_two_threads() {
    let a = Sim::new("a").device();
    let plan = Scheduler::new((a.clone(), host("cpu")))
        .place(|name| Some((name > "w.3").into()))
        .plan(chain(8))
        .unwrap();
    let mut progress = Vec::new();
    let mut one = plan.session_with(&mut |p| progress.push(p)).unwrap();
    assert_eq!(progress.len(), 8);
    assert!(progress.iter().all(|p| p.total == 8 * 256) && progress[7].done == 8 * 256);
    let (weights, used) = (4 * 256, a.used_bytes());
    let mut two = plan.session_with(&mut |_| panic!("the weights are loaded already")).unwrap();
    assert_eq!(a.used_bytes() - used, used - weights);
    let run = |session: &mut Session| {
        let mut all = Vec::new();
        for round in 0..20 {
            let x: Vec<f32> = chain_input().iter().map(|v| v * round as f32 / 20.0).collect();
            session.run(&[("x", &x)]).unwrap();
            all.push(session.read::<f32>("y").unwrap());
        }
        all
    };
    let (first, second) = std::thread::scope(|scope| {
        let other = scope.spawn(|| run(&mut two));
        (run(&mut one), other.join().unwrap())
    });
    assert_eq!(first, second);
    drop((one, two));
    assert_eq!(a.used_bytes(), 0, "weights are freed with the last session");
}

#[test]
fn one_scheduler_plans_graphs_of_any_size_on_many_threads_at_once() {
    let scheduler = Scheduler::new([device("a"), host("cpu")]).place(|name| Some((name > "w.3").into()));
    let text = |layers: usize| format!("{:#}", scheduler.plan(chain(layers)).unwrap());
    let expected: Vec<String> = (1..9).map(text).collect();
    std::thread::scope(|scope| {
        for first in 0..4 {
            let (text, expected) = (&text, &expected);
            scope.spawn(move || {
                for round in 0..100 {
                    let layers = 1 + (first + round * 3) % 8;
                    assert_eq!(text(layers), expected[layers - 1]);
                }
            });
        }
    });
}

#[test]
fn x11_schedulers_and_sessions_free_everything() {
    let a = Sim::new("a").device();
    let graph = chain(3);
    for _ in 0..200 {
        let mut session = Scheduler::new(a.clone()).plan(&graph).unwrap().session().unwrap();
        session.run(&[("x", &chain_input())]).unwrap();
    }
    assert_eq!(a.used_bytes(), 0);
}

#[test]
fn s7_allocated_bytes_equal_the_forecast() {
    let a = Sim::new("a").alignment(128).padding(64).device();
    let graph = graph_of_batch(4).unwrap();
    let plan = Scheduler::new(a.clone()).plan(&graph).unwrap();
    assert_eq!(a.used_bytes(), 0, "planning allocates nothing");
    let session = plan.session().unwrap();
    assert_eq!(a.used_bytes(), plan.bytes()[0].total());
    // S11: the arena's buffers are accessible.
    let arena: u64 = session.memory().arena(0).iter().map(|buffer| buffer.bytes() as u64).sum();
    assert_eq!(arena, plan.bytes()[0].compute);
}

#[test]
fn s7_the_forecast_of_weights_includes_alignment_gaps() {
    for max in [None, Some(256)] {
        let sim = Sim::new("a").alignment(128);
        let a = max.map_or_else(|| Sim::new("a").alignment(128), |max| sim.max_buffer(max)).device();
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [3]);
        let weight = |i: usize| g.weight(&format!("w{i}"), Weight::with_data(DType::F32, [3], vec![0; 12]));
        g.output("y", (0..7).fold(x, |sum, i| sum.add(weight(i))));
        let plan = Scheduler::new(a.clone()).plan(g.finish().unwrap()).unwrap();
        let weights = plan.bytes()[0].weights;
        // Whole buffers: 128 for each but the last, or two to a buffer.
        assert_eq!(weights, if max.is_some() { 3 * (128 + 12) + 12 } else { 6 * 128 + 12 });
        let _session = plan.session().unwrap();
        assert_eq!(a.used_bytes(), plan.bytes()[0].total());
    }
}

#[test]
fn b4_backends_are_notified_of_every_tensor_that_a_session_places_and_releases() {
    let devices = ["a", "b"].map(|name| Sim::new(name).device());
    let scheduler = || Scheduler::new(devices.clone()).place(|n| Some((n > "w.1").into()));
    let placed = || devices.each_ref().map(|d| d.placed_tensors());
    let plan = scheduler().plan(chain(4)).unwrap();
    assert_eq!(placed(), [0, 0], "planning places nothing");
    let mut session = plan.session().unwrap();
    let once = placed();
    // On each device two weights and four results; on the first the input, twice; on the second a copy.
    assert_eq!(once, [2 + 4 + 2, 2 + 4 + 1]);
    session.run(&[("x", &chain_input())]).unwrap();
    assert_eq!(placed(), once);
    let second = scheduler().plan(chain(4)).unwrap().session().unwrap();
    assert_eq!(placed(), once.map(|count| 2 * count));
    drop(second);
    assert_eq!(placed(), once);
    drop(session);
    assert_eq!(placed(), [0, 0]);
}

#[test]
fn a_run_can_be_polled() {
    let a = Sim::new("a").device();
    let mut session = Scheduler::new(a).plan(chain(8)).unwrap().session().unwrap();
    assert!(session.is_done().unwrap(), "nothing was started");
    session.set("x", &chain_input()).unwrap();
    session.start().unwrap();
    while !session.is_done().unwrap() {
        std::hint::spin_loop();
    }
    let polled: Vec<f32> = session.read("y").unwrap();
    session.run(&[("x", &chain_input())]).unwrap();
    assert_eq!(session.read::<f32>("y").unwrap(), polled);
}

#[test]
fn every_node_can_be_observed() {
    let graph = chain(4);
    let plan =
        Scheduler::new([device("a"), host("cpu")]).place(|n| Some((n > "w.1").into())).plan(&graph).unwrap();
    let mut session = plan.session().unwrap();
    session.run(&[("x", &chain_input())]).unwrap();
    let expected: Vec<u8> = session.read("y").unwrap();
    let mut seen = Vec::new();
    let mut observer = |o: Observed<'_>| {
        seen.push((o.plan.graph().node_name(o.node), o.bytes.to_vec()));
        ControlFlow::Continue(())
    };
    assert_eq!(session.debug().observe(&mut observer).unwrap(), ObservedRun::Finished);
    assert_eq!(seen.len(), 8);
    assert_eq!(seen[7].1, expected);
    assert_eq!(session.read::<u8>("y").unwrap(), expected);
    // An intermediate result is the output of a shorter graph.
    let mut short = Scheduler::new([host("cpu")]).plan(chain(1)).unwrap().session().unwrap();
    short.run(&[("x", &chain_input())]).unwrap();
    assert_eq!(seen[1].1, short.read::<u8>("y").unwrap());
}

#[test]
fn s8_a_run_can_be_timed_by_split_copy_and_backend() {
    let devices = ["a", "b"].map(|name| Sim::new(name).node_seconds(2.0).copy_seconds(3.0, 0.0).build());
    let [a, b] = devices;
    let plan = Scheduler::new([a, b, host("cpu")])
        .place(|name| Some(name.strip_prefix("w.")?.parse::<usize>().ok()? / 2))
        .plan(chain(6))
        .unwrap();
    let mut session = plan.session().unwrap();
    session.set("x", &chain_input()).unwrap();
    let trace = session.debug().trace(Detail::Splits).unwrap();
    let splits: Vec<(usize, usize, f64)> =
        trace.splits.iter().map(|s| (s.backend, s.nodes, s.seconds)).collect();
    assert_eq!(splits[..2], [(0, 4, 8.0), (1, 4, 8.0)]);
    assert_eq!((splits[2].0, splits[2].1), (2, 4));
    assert_eq!((trace.copies[0].backend, trace.copies[0].bytes, trace.copies[0].seconds), (1, 128, 3.0));
    assert_eq!(
        (trace.backends[0].compute, trace.backends[1].compute, trace.backends[1].copy),
        (8.0, 8.0, 3.0)
    );
    assert!(trace.splits[1].start >= 11.0 && trace.seconds > 0.0);
    assert!(serde_json::to_string(&trace).unwrap().contains("\"backend\":\"cpu\""));
}

#[test]
fn a_session_dropped_with_runs_in_flight_waits_for_them() {
    let a = Sim::new("a").device();
    let plan = Scheduler::new(a.clone()).plan(chain(20)).unwrap();
    let mut session = plan.session().unwrap();
    let before = a.counts().of(FaultPoint::Run);
    for _ in 0..5 {
        session.set("x", &chain_input()).unwrap();
        session.start().unwrap();
    }
    drop(session);
    assert_eq!(a.counts().of(FaultPoint::Run) - before, 5);
    assert_eq!(a.used_bytes(), 0);
}

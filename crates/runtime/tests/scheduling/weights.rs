//! Weights are identified by their data: models that name their tensors alike do not share them.

use std::cell::Cell;
use std::sync::Arc;

use quadriga_graph::{DType, Data, Graph, GraphBuilder, Weight};
use quadriga_runtime::{Backend, ModelId, PlanKey, RuntimeError, Scheduler, Session};
use quadriga_sim::{FaultPoint, Sim};

use crate::common::{device, host};

const N: usize = 64;

fn backends() -> [Arc<dyn Backend>; 4] {
    let cpu = Arc::new(quadriga_cpu::Backend::new().unwrap());
    [cpu, device("sim"), host("host"), Sim::new("packs").packs_weights().build()]
}

/// y = w x, where every element of w has this value; also reads w in other ways if `more`.
fn model(value: f32, more: bool) -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [1, N]);
    let w = g.weight("w", Weight::with_data(DType::F32, [N, N], vec![value; N * N].as_slice()));
    if more {
        g.output("row", w.get_rows(g.constant("first", DType::I32, [1], [0].as_slice())));
        g.output("transposed", w.transpose().cont());
    }
    g.output("y", w.mul_mat(x));
    g.finish().unwrap()
}

fn run(session: &mut Session) -> f32 {
    session.run(&[("x", &[1.0f32; N])]).unwrap();
    session.read::<f32>("y").unwrap()[0]
}

#[test]
fn two_models_on_one_scheduler_or_its_clone_have_their_own_weights() {
    for backend in backends() {
        let name = backend.name().to_owned();
        assert_eq!(model(1.0, false).fingerprint(), model(2.0, false).fingerprint());
        let scheduler = Scheduler::new(backend);
        let mut one = scheduler.plan(model(1.0, false)).unwrap().session().unwrap();
        assert_eq!(run(&mut one), 64.0, "{name}");
        let mut two = scheduler.plan(model(2.0, false)).unwrap().session().unwrap();
        let mut three = scheduler.clone().plan(model(3.0, false)).unwrap().session().unwrap();
        assert_eq!((run(&mut one), run(&mut two), run(&mut three)), (64.0, 128.0, 192.0), "{name}");
        drop(one);
        let mut four = scheduler.plan(model(4.0, false)).unwrap().session().unwrap();
        assert_eq!((run(&mut two), run(&mut four)), (128.0, 256.0), "{name}");
    }
}

#[test]
fn two_models_in_one_session_have_their_own_weights() {
    for backend in backends() {
        let name = backend.name().to_owned();
        let mut session = Session::new(&Scheduler::new(backend)).unwrap();
        for _ in 0..2 {
            for value in [1.0, 2.0, 3.0] {
                session.use_graph(model(value, false)).unwrap();
                assert_eq!(run(&mut session), 64.0 * value, "{name}, by graph");
            }
        }
        for _ in 0..2 {
            for value in [4, 5] {
                session.prepare(value, || Ok::<_, RuntimeError>(model(value as f32, false))).unwrap();
                assert_eq!(run(&mut session), 64.0 * value as f32, "{name}, by key");
            }
        }
    }
}

#[test]
fn a_key_for_two_graphs_is_an_error() {
    for backend in backends() {
        for checks in [false, true] {
            let scheduler = Scheduler::new(Arc::clone(&backend)).check_plans(checks);
            let graph = |value: f32, more: bool| move || Ok::<_, RuntimeError>(model(value, more));
            let mut session = Session::new(&scheduler).unwrap();
            session.prepare(7, graph(1.0, false)).unwrap();
            assert_eq!(run(&mut session), 64.0);
            for (value, more, words) in [(2.0, false, "w has other bytes"), (1.0, true, "operations")] {
                let error = session.prepare(7, graph(value, more)).unwrap_err();
                assert!(matches!(error, RuntimeError::OtherGraphOfKey { key: [7, 0, 0, 0], .. }), "{error}");
                assert!(error.to_string().contains(words), "{error}");
            }
            // The earlier graph is still the current one, and an equal one is found, whoever owns its bytes.
            assert_eq!(run(&mut session), 64.0);
            session.prepare(7, graph(1.0, false)).unwrap();
            session.prepare(8, graph(2.0, false)).unwrap();
            assert_eq!(run(&mut session), 128.0);
            assert_eq!(session.plan_usage().plans, 2);
        }
    }
}

#[test]
fn equal_keys_of_two_models_are_two_graphs() {
    for backend in backends() {
        for checks in [false, true] {
            let mut session =
                Session::new(&Scheduler::new(Arc::clone(&backend)).check_plans(checks)).unwrap();
            let models = [(ModelId::new(), 1.0), (ModelId::new(), 2.0)];
            let built = Cell::new(0);
            for _ in 0..3 {
                for (id, value) in &models {
                    let graph = || {
                        built.set(built.get() + 1);
                        Ok::<_, RuntimeError>(model(*value, false))
                    };
                    session.prepare(PlanKey::of(id, [7, 0, 0, 0]), graph).unwrap();
                    assert_eq!(run(&mut session), 64.0 * value);
                }
            }
            assert_eq!(built.get(), if checks { 6 } else { 2 }, "a known graph is built to be checked");
        }
    }
}

#[test]
fn a_models_graphs_have_the_same_weights() {
    let mut session = Session::new(&Scheduler::new(device("sim")).check_plans(false)).unwrap();
    let id = ModelId::new();
    let mut prepare = |key: u64, value: f32, more: bool| {
        let graph = || Ok::<_, RuntimeError>(model(value, more));
        session.prepare(PlanKey::of(&id, [key, 0, 0, 0]), graph).map(|()| run(&mut session))
    };
    assert_eq!(prepare(1, 1.0, false), Ok(64.0));
    assert_eq!(prepare(2, 1.0, true), Ok(64.0));
    // The caller takes one id for two models.
    let error = prepare(3, 2.0, false).unwrap_err();
    assert!(matches!(error, RuntimeError::OtherModel { key: [3, 0, 0, 0], .. }), "{error}");
    assert!(error.to_string().contains("w has other bytes"), "{error}");
    assert_eq!(prepare(1, 1.0, false), Ok(64.0));
    // Once its graphs are forgotten, nothing is known of a model.
    session.forget_all().unwrap();
    session.prepare(PlanKey::of(&id, [3, 0, 0, 0]), || Ok::<_, RuntimeError>(model(2.0, false))).unwrap();
    assert_eq!(run(&mut session), 128.0);
}

#[test]
fn the_callback_of_loading_may_load_weights_here_and_on_another_thread() {
    for backend in backends() {
        let name = backend.name().to_owned();
        let scheduler = Scheduler::new(backend);
        let layers = |values: &[f32]| {
            let g = GraphBuilder::new();
            let mut x = g.input("x", DType::F32, [1, N]);
            for (layer, value) in values.iter().enumerate() {
                let data = vec![value / N as f32; N * N];
                let weight = Weight::with_data(DType::F32, [N, N], data.as_slice());
                x = g.weight(&format!("w{layer}"), weight).mul_mat(x);
            }
            g.output("y", x);
            g.finish().unwrap()
        };
        // The callback opens sessions of the model that is being loaded, and of another one.
        let (same, other) = (layers(&[1.0, 2.0, 4.0]), layers(&[1.0, 2.0]));
        let plan = scheduler.plan(same.clone()).unwrap();
        let mut opened = Vec::new();
        let mut done = Vec::new();
        let mut session = plan
            .session_with(&mut |progress| {
                done.push(progress.done);
                for graph in [&same, &other] {
                    let open = || scheduler.plan(graph.clone()).unwrap().session().unwrap();
                    opened.push(open());
                    opened.push(std::thread::scope(|scope| scope.spawn(open).join().unwrap()));
                }
            })
            .unwrap();
        assert_eq!(run(&mut session), 8.0, "{name}");
        assert!(done.len() == 3 && done.is_sorted(), "{name}: {done:?}");
        for (number, session) in opened.iter_mut().enumerate() {
            assert_eq!(run(session), if number % 4 < 2 { 8.0 } else { 2.0 }, "{name}, session {number}");
        }
    }
}

#[test]
fn sessions_that_are_opened_at_once_load_each_weight_once() {
    const SESSIONS: usize = 4;
    let sim = Sim::new("sim").device();
    let graph = Arc::new(crate::common::chain(8));
    let mut alone = Scheduler::new(sim.clone()).plan(&graph).unwrap().session().unwrap();
    alone.run(&[("x", &crate::common::chain_input())]).unwrap();
    let expected = alone.read::<f32>("y").unwrap();
    let weights = 8 * 256;
    let arena = sim.used_bytes() - weights;
    drop(alone);
    let scheduler = Scheduler::new(sim.clone());
    let start = std::sync::Barrier::new(SESSIONS);
    let open = || {
        start.wait();
        let mut session = scheduler.plan(&graph).unwrap().session().unwrap();
        session.run(&[("x", &crate::common::chain_input())]).unwrap();
        assert_eq!(session.read::<f32>("y").unwrap(), expected);
        session
    };
    let sessions: Vec<Session> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..SESSIONS).map(|_| scope.spawn(open)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(sim.used_bytes(), weights + arena * SESSIONS as u64);
    drop(sessions);
    assert_eq!(sim.used_bytes(), 0);
}

#[test]
fn a_model_that_reads_a_weight_in_more_ways_does_not_change_another() {
    for backend in backends() {
        let name = backend.name().to_owned();
        let scheduler = Scheduler::new(backend);
        let mut one = scheduler.plan(model(1.0, false)).unwrap().session().unwrap();
        let before = run(&mut one);
        let mut more = scheduler.plan(model(2.0, true)).unwrap().session().unwrap();
        assert_eq!((run(&mut more), run(&mut one)), (128.0, before), "{name}");
        // The same data, in another session and in the same one.
        let mut same = scheduler.plan(model(1.0, true)).unwrap().session().unwrap();
        assert_eq!((run(&mut same), run(&mut one)), (64.0, before), "{name}");
        one.use_graph(model(2.0, true)).unwrap();
        assert_eq!(run(&mut one), 128.0, "{name}");
        assert_eq!(one.read::<f32>("row").unwrap(), [2.0; N], "{name}");
        one.use_graph(model(1.0, false)).unwrap();
        assert_eq!(run(&mut one), before, "{name}");
    }
}

#[test]
fn equal_weights_are_loaded_once_and_freed_with_their_last_session() {
    let sim = Sim::new("a").device();
    let scheduler = Scheduler::new(sim.clone());
    let one = scheduler.plan(model(1.0, false)).unwrap().session().unwrap();
    let used = sim.used_bytes();
    let rest = used - (N * N * 4) as u64;
    let equal = scheduler.plan(model(1.0, false)).unwrap().session().unwrap();
    assert_eq!(sim.used_bytes(), used + rest, "equal bytes");
    let other = scheduler.plan(model(2.0, false)).unwrap().session().unwrap();
    assert_eq!(sim.used_bytes(), 2 * used + rest, "other bytes");
    drop((one, equal));
    assert_eq!(sim.used_bytes(), used, "the weight of the remaining session");
    drop(other);
    assert_eq!(sim.used_bytes(), 0);
}

#[test]
fn set_weight_is_for_one_session() {
    for backend in backends() {
        let g = GraphBuilder::new();
        let w = g.weight("w", Weight::new(DType::F32, [2]));
        let v = g.weight("v", Weight::with_data(DType::F32, [2], Data::from([1.0f32; 2].as_slice())));
        g.output("y", w.add(v));
        let plan = Scheduler::new(backend).plan(g.finish().unwrap()).unwrap();
        let (mut one, mut two) = (plan.session().unwrap(), plan.session().unwrap());
        let bytes = |value: f32| [value.to_ne_bytes(); 2].concat();
        one.set_weight("w", &bytes(1.0)).unwrap();
        one.run(&[]).unwrap();
        assert!(matches!(two.run(&[]), Err(RuntimeError::NotSet { what: "weight", .. })));
        two.set_weight("w", &bytes(2.0)).unwrap();
        two.run(&[]).unwrap();
        one.run(&[]).unwrap();
        assert_eq!(
            (one.read::<f32>("y").unwrap(), two.read::<f32>("y").unwrap()),
            (vec![2.0; 2], vec![3.0; 2])
        );
        assert!(matches!(one.set_weight("v", &bytes(5.0)), Err(RuntimeError::WrongKind { .. })));
    }
}

/// Reads a weight without data by rows, or in a matmul.
fn unset_weight(rows: bool) -> Graph {
    let g = GraphBuilder::new();
    let w = g.weight("w", Weight::new(DType::F32, [8, 8]));
    let y = if rows {
        w.get_rows(g.constant("first", DType::I32, [1], [0].as_slice()))
    } else {
        w.mul_mat(g.constant("ones", DType::F32, [1, 8], [1.0f32; 8].as_slice()))
    };
    g.output("y", y);
    g.finish().unwrap()
}

#[test]
fn a_weight_without_data_keeps_its_value_in_a_new_layout_and_on_another_backend() {
    let sims = [Sim::new("a").packs_weights().build(), Sim::new("b").packs_weights().build()];
    let mut session = Session::new(&Scheduler::new(sims.clone()).place(|_| None)).unwrap();
    let bytes = [0.5f32.to_ne_bytes(); 64].concat();
    session.use_graph(unset_weight(false)).unwrap();
    session.set_weight("w", &bytes).unwrap();
    session.run(&[]).unwrap();
    assert_eq!(session.read::<f32>("y").unwrap(), [4.0; 8]);
    session.use_graph(unset_weight(true)).unwrap();
    session.run(&[]).unwrap();
    assert_eq!(session.read::<f32>("y").unwrap(), [0.5; 8]);
    session.use_graph(unset_weight(false)).unwrap();
    session.run(&[]).unwrap();
    assert_eq!(session.read::<f32>("y").unwrap(), [4.0; 8]);

    // Forgotten graphs come back with it; a graph that has it on another backend gets it, too.
    session.forget_all().unwrap();
    let scheduler = Scheduler::new(sims);
    let elsewhere = unset_weight(true);
    let pinned = scheduler.clone().pin_tensor(elsewhere.leaf("w").unwrap(), 1).plan(&elsewhere).unwrap();
    session.use_plan(&pinned).unwrap();
    session.run(&[]).unwrap();
    assert_eq!(session.read::<f32>("y").unwrap(), [0.5; 8]);
    session.set_weight("w", &[2.0f32.to_ne_bytes(); 64].concat()).unwrap();
    for (rows, expected) in [(false, 16.0), (true, 2.0)] {
        session.use_graph(unset_weight(rows)).unwrap();
        session.run(&[]).unwrap();
        assert_eq!(session.read::<f32>("y").unwrap(), [expected; 8]);
    }
}

#[test]
fn a_weight_that_cannot_be_set_on_one_backend_keeps_its_value_on_all() {
    let sims = [Sim::new("a").device(), Sim::new("b").device()];
    let backends = sims.clone().map(|sim| sim as Arc<dyn Backend>);
    let graph = unset_weight(true);
    let weight = graph.leaf("w").unwrap();
    let plans = [0, 1].map(|backend| {
        let scheduler = Scheduler::new(backends.clone()).pin_tensor(weight, backend);
        scheduler.plan(&graph).unwrap()
    });
    let bytes = |value: f32| [value.to_ne_bytes(); 64].concat();
    for failing in &sims {
        let mut session = Session::new(&Scheduler::new(backends.clone())).unwrap();
        plans.iter().for_each(|plan| session.use_plan(plan).unwrap());
        // Never set, and set on some backends only: not set.
        failing.fail(FaultPoint::Transfer, 0);
        assert!(matches!(session.set_weight("w", &bytes(1.0)), Err(RuntimeError::Device { .. })));
        for plan in &plans {
            session.use_plan(plan).unwrap();
            assert!(matches!(session.run(&[]), Err(RuntimeError::NotSet { what: "weight", .. })));
        }
        session.set_weight("w", &bytes(2.0)).unwrap();
        failing.fail(FaultPoint::Transfer, 0);
        assert!(matches!(session.set_weight("w", &bytes(3.0)), Err(RuntimeError::Device { .. })));
        for plan in &plans {
            session.use_plan(plan).unwrap();
            session.run(&[]).unwrap();
            assert_eq!(session.read::<f32>("y").unwrap(), [2.0; 8]);
        }
    }
}

/// Two weights: one that models share, and one of their own.
fn sharing_model(own: f32) -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [1, N]);
    let weight = |name: &str, value: f32| {
        g.weight(name, Weight::with_data(DType::F32, [N, N], vec![value; N * N].as_slice()))
    };
    g.output("y", weight("own", own).mul_mat(weight("shared", 1.0).mul_mat(x)));
    g.finish().unwrap()
}

#[test]
fn the_memory_of_a_dropped_model_comes_back_although_another_has_one_of_its_weights() {
    let sim = Sim::new("a").device();
    let scheduler = Scheduler::new(sim.clone());
    let one = scheduler.plan(sharing_model(1.0)).unwrap().session().unwrap();
    let alone = sim.used_bytes();
    let mut two = scheduler.plan(sharing_model(2.0)).unwrap().session().unwrap();
    let equal = scheduler.plan(sharing_model(1.0)).unwrap().session().unwrap();
    let weights = (2 * N * N * 4) as u64;
    assert_eq!(sim.used_bytes(), 3 * alone - weights, "equal models share their weights");
    drop((one, equal));
    assert_eq!(sim.used_bytes(), alone);
    assert_eq!(run(&mut two), (2 * N * N) as f32);
    // Graphs of one session share single weights.
    let used = sim.used_bytes();
    two.use_graph(sharing_model(3.0)).unwrap();
    assert_eq!(sim.used_bytes() - used, weights / 2);
    // Which graph of a session was first does not matter to it.
    two.use_graph(sharing_model(2.0)).unwrap();
    assert_eq!(run(&mut two), (2 * N * N) as f32);
}

#[test]
fn a_graph_that_fails_leaves_neither_weights_nor_states() {
    let graph = |width: usize, state: usize| {
        let g = GraphBuilder::new();
        let unset = g.weight("unset", Weight::new(DType::F32, [width]));
        let v = g.weight("v", Weight::with_data(DType::F32, [width], vec![1.0f32; width].as_slice()));
        g.output("s", g.state("s", DType::F32, [state]).scale(2.0));
        g.output("new", g.state(&format!("s{width}"), DType::F32, [width]).scale(2.0));
        g.output("y", unset.add(v));
        g.finish().unwrap()
    };
    let sim = Sim::new("a").device();
    let mut session = Session::new(&Scheduler::new(sim.clone())).unwrap();
    let simple = || {
        let g = GraphBuilder::new();
        g.output("s", g.state("s", DType::F32, [4]).scale(2.0));
        g.finish().unwrap()
    };
    session.use_graph(simple()).unwrap();
    let used = sim.used_bytes();
    // A state of another shape: nothing is loaded.
    let loads = sim.counts().of(FaultPoint::Allocation);
    let conflict = session.use_graph(graph(8, 5));
    assert!(matches!(conflict, Err(RuntimeError::Conflict { what: "state", .. })), "{conflict:?}");
    assert_eq!((sim.used_bytes(), sim.counts().of(FaultPoint::Allocation)), (used, loads));
    // A failure at any later point.
    for point in [FaultPoint::Allocation, FaultPoint::Transfer, FaultPoint::Compile] {
        for after in 0.. {
            sim.fail(point, after);
            let made = session.use_graph(graph(8 + after as usize, 4));
            sim.clear_faults();
            // The arena may have grown.
            session.forget_all().unwrap();
            session.use_graph(simple()).unwrap();
            if made.is_ok() {
                assert!(after > 0, "{point:?}");
                session = Session::new(&Scheduler::new(sim.clone())).unwrap();
                session.use_graph(simple()).unwrap();
                break;
            }
            assert_eq!(sim.used_bytes(), used, "{point:?} {after}: {made:?}");
        }
    }
}

#[test]
fn of_very_many_keys_for_one_graph_the_last_is_known_and_those_of_other_graphs_are_kept() {
    let mut session = Session::new(&Scheduler::new(host("cpu")).check_plans(false)).unwrap();
    let mut built = Vec::new();
    let models = [ModelId::new(), ModelId::new()];
    let mut prepare = |key: u64, value: f32| {
        session
            .prepare(PlanKey::of(&models[value as usize - 1], [key, 0, 0, 0]), || {
                built.push(key);
                Ok::<_, RuntimeError>(model(value, false))
            })
            .unwrap();
        assert_eq!(run(&mut session), 64.0 * value);
    };
    prepare(1000, 1.0);
    for key in [1001, 1002, 1001] {
        prepare(key, 2.0);
    }
    for key in 0..100 {
        prepare(key, 2.0);
        prepare(key, 2.0);
    }
    prepare(1000, 1.0);
    assert_eq!(built, [1000, 1001, 1002].into_iter().chain(0..100).collect::<Vec<u64>>());
}

#[test]
fn a_weight_that_is_still_to_be_set_survives_the_failure_of_another_graph() {
    let sim = Sim::new("sim").device();
    let mut session = Session::new(&Scheduler::new(sim.clone())).unwrap();
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [1, N]);
    g.output("y", g.weight("own", Weight::new(DType::F32, [N, N])).mul_mat(x));
    session.use_graph(g.finish().unwrap()).unwrap();
    sim.fail(FaultPoint::Compile, 0);
    assert!(session.use_graph(model(1.0, false)).is_err());
    let bytes: Vec<u8> = [2.0f32; N * N].iter().flat_map(|value| value.to_ne_bytes()).collect();
    session.set_weight("own", &bytes).unwrap();
    assert_eq!(run(&mut session), 128.0);
}

#[test]
fn a_weight_in_a_layout_for_more_uses_takes_the_place_of_the_earlier_one() {
    let used_after = |graphs: &[bool]| {
        let sim = Sim::new("packs").packs_weights().device();
        let mut session = Session::new(&Scheduler::new(sim.clone())).unwrap();
        // The graphs share their data, and with it the weight.
        let more = model(3.0, true);
        let data = more.data(more.leaf("w").unwrap()).unwrap().clone();
        let g = GraphBuilder::new();
        let w = g.weight("w", Weight::with_data(DType::F32, [N, N], data));
        g.output("y", w.mul_mat(g.input("x", DType::F32, [1, N])));
        let few = g.finish().unwrap();
        for graph in graphs {
            session.use_graph(if *graph { &more } else { &few }).unwrap();
            assert_eq!(run(&mut session), 192.0);
        }
        sim.used_bytes()
    };
    let one_weight = (4 * N * N) as u64;
    let (alone, both) = (used_after(&[true]), used_after(&[false, true, false]));
    assert!(both < alone + one_weight, "{both} bytes for both graphs, {alone} for one");
}

#[test]
fn a_weight_that_is_read_in_two_places_of_one_operation_is_in_a_layout_for_both() {
    let g = GraphBuilder::new();
    let data: Vec<f32> = (0..N * N).map(|i| (i % 13) as f32 / 13.0).collect();
    let w = g.weight("w", Weight::with_data(DType::F32, [N, N], data.as_slice()));
    g.output("y", w.mul_mat(g.input("x", DType::F32, [1, N])));
    g.output("squares", w.mul_mat(w));
    let graph = g.finish().unwrap();
    let [plain, packs] = [device("sim"), Sim::new("packs").packs_weights().build()].map(|backend| {
        let mut session = Scheduler::new(backend).plan(&graph).unwrap().session().unwrap();
        session.run(&[("x", &[1.0f32; N])]).unwrap();
        [session.read::<f32>("y").unwrap(), session.read("squares").unwrap()]
    });
    assert_eq!(plain, packs);
}

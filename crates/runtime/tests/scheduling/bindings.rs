//! S6: inputs, states and outputs in memory of the caller.

use std::sync::Arc;

use quadriga_graph::{DType, Graph, GraphBuilder, Weight};
use quadriga_runtime::{Backend, BackendError, Region, RuntimeError, Scheduler, Session, Usage};
use quadriga_sim::Sim;

use crate::common::{device, host};

fn cpu() -> Arc<dyn Backend> {
    Arc::new(quadriga_cpu::Backend::builder().threads(2).build().unwrap())
}

/// y = 2 x + s, z = y², s = s + x; `rows` of 64.
fn graph(rows: usize) -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [rows, 64]);
    let s = g.state("s", DType::F32, [1, 64]);
    let y = x.scale(2.0).add(s);
    g.output("y", y);
    g.output("z", y.sqr());
    g.output("s", s.add(x.slice(0, 0, 1)).copy_into(s));
    g.output("w", g.weight("w", Weight::with_data(DType::F32, [2], [1.0f32; 2].as_slice())));
    g.finish().unwrap()
}

fn region(backend: &Arc<dyn Backend>, floats: usize) -> Region {
    let bytes = (4 * floats).next_multiple_of(256);
    Region::new(backend.allocate(bytes, Usage::Compute).unwrap(), 0, bytes).unwrap()
}

fn put(region: &Region, values: &[f32]) {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    region.buffer.write(region.offset, &bytes).unwrap();
}

fn get(region: &Region, floats: usize) -> Vec<f32> {
    let mut bytes = vec![0; 4 * floats];
    region.buffer.read(region.offset, &mut bytes).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
}

#[test]
fn s6_inputs_states_and_outputs_are_used_in_the_callers_memory() {
    for backend in [cpu(), device("a"), host("h")] {
        let name = backend.name().to_owned();
        let [x, s, y] = [region(&backend, 192), region(&backend, 64), region(&backend, 192)];
        let mut session = Session::new(&Scheduler::new(Arc::clone(&backend))).unwrap();
        session.use_graph(graph(3)).unwrap();
        let alone = session.plan().unwrap().bytes()[0].clone();
        let fresh = Session::new(&Scheduler::new(Arc::clone(&backend)));
        let mut session = fresh.unwrap();
        session.bind_leaf("x", x.clone()).unwrap();
        session.bind_leaf("s", s.clone()).unwrap();
        session.bind_output("y", y.clone()).unwrap();
        put(&s, &[10.0; 64]);
        let mut state = 10.0;
        // Graphs that are rebuilt use the same memory.
        for (round, rows) in [3, 1, 2, 3, 1].into_iter().enumerate() {
            session.use_graph(graph(rows)).unwrap();
            if rows == 3 {
                let bytes = &session.plan().unwrap().bytes()[0];
                assert_eq!(bytes.state, 0, "{name}");
                assert!(bytes.compute < alone.compute, "{name}: {bytes:?}, without {alone:?}");
            }
            for again in 0..2 {
                let value = (round * 2 + again) as f32;
                put(&x, &vec![value; rows * 64]);
                session.run(&[]).unwrap();
                let expected = 2.0 * value + state;
                state += value;
                assert_eq!(get(&y, rows * 64), vec![expected; rows * 64], "{name} {round}");
                assert_eq!(session.read::<f32>("y").unwrap(), vec![expected; rows * 64]);
                assert_eq!(session.read::<f32>("z").unwrap(), vec![expected * expected; rows * 64]);
                assert_eq!(get(&s, 64), [state; 64], "{name} {round}");
                assert_eq!(session.read_state::<f32>("s").unwrap(), [state; 64]);
            }
        }
        // To set a bound input writes it there.
        session.set("x", &[7.0f32; 64]).unwrap();
        session.set_at("x", 1, &[8.0f32]).unwrap();
        session.start().unwrap();
        session.wait().unwrap();
        assert_eq!(get(&x, 2), [7.0, 8.0]);
        assert_eq!(get(&y, 2), [14.0 + state, 16.0 + state], "{name}");
        let place = session.tensor("y").unwrap().unwrap().region;
        assert!(Arc::ptr_eq(&place.buffer, &y.buffer));
        // The session is gone, the memory is not.
        drop(session);
        assert_eq!(get(&y, 1), [14.0 + state]);
    }
}

#[test]
fn s6_bound_tensors_draw_their_nodes_to_their_backend() {
    let backends = [device("a"), host("h")];
    let y = region(&backends[1], 64);
    let mut session = Session::new(&Scheduler::new(backends)).unwrap();
    session.bind_output("y", y.clone()).unwrap();
    session.use_graph(graph(1)).unwrap();
    session.run(&[("x", &[1.0f32; 64])]).unwrap();
    assert_eq!(session.tensor("y").unwrap().unwrap().backend.name(), "h");
    assert_eq!(get(&y, 64), [2.0; 64]);
}

#[test]
fn s6_memory_that_does_not_fit_is_refused_and_the_session_still_works() {
    let backend = device("a");
    let mut session = Session::new(&Scheduler::new(Arc::clone(&backend))).unwrap();
    session.use_graph(graph(1)).unwrap();
    session.run(&[("x", &[1.0f32; 64])]).unwrap();
    let good = session.read::<f32>("y").unwrap();
    let foreign = region(&Sim::new("other").build(), 64);
    let refused = |result: Result<(), RuntimeError>| match result {
        Err(RuntimeError::Device { error, .. }) => *error,
        other => panic!("{other:?}"),
    };
    assert!(matches!(refused(session.bind_leaf("x", foreign)), BackendError::Foreign { .. }));
    let shifted = region(&backend, 128).part(16, 256).unwrap();
    assert!(matches!(refused(session.bind_leaf("x", shifted)), BackendError::Failed { .. }));
    let state = session.bind_leaf("s", region(&backend, 64));
    assert!(matches!(state, Err(RuntimeError::Conflict { what: "state", .. })));
    session.run(&[]).unwrap();
    // Too small, or not to be bound: shows when a graph has the name.
    for (name, output) in [("w", true), ("s", true), ("w", false), ("x", false)] {
        let mut session = Session::new(&Scheduler::new(Arc::clone(&backend))).unwrap();
        let place = region(&backend, 32).part(0, 128).unwrap();
        if output { session.bind_output(name, place) } else { session.bind_leaf(name, place) }.unwrap();
        let error = session.use_graph(graph(1)).unwrap_err();
        match name {
            "x" => assert!(matches!(error, RuntimeError::WrongSize { found: 128, .. }), "{error}"),
            _ => assert!(matches!(error, RuntimeError::WrongKind { .. }), "{error}"),
        }
    }
    session.use_graph(graph(1)).unwrap();
    session.clear_state().unwrap();
    session.run(&[("x", &[1.0f32; 64])]).unwrap();
    assert_eq!(session.read::<f32>("y").unwrap(), good);
}

#[test]
fn s6_overlapping_memory_that_a_run_writes_is_refused() {
    for backend in [cpu(), device("a"), host("h")] {
        let whole = region(&backend, 256);
        let part = |at: usize| whole.part(256 * at, 256).unwrap();
        // Two names, the part of each, and whether the graph is refused.
        let cases = [
            (["x", "s"], [0, 0], true),
            (["x", "y"], [1, 1], true),
            (["s", "y"], [0, 0], true),
            (["y", "z"], [2, 2], true),
            (["x", "s"], [0, 1], false),
            (["s", "z"], [2, 1], false),
        ];
        for (names, parts, refused) in cases {
            let mut session = Session::new(&Scheduler::new(Arc::clone(&backend))).unwrap();
            for (name, at) in names.into_iter().zip(parts) {
                let output = name == "y" || name == "z";
                let place = part(at);
                if output { session.bind_output(name, place) } else { session.bind_leaf(name, place) }
                    .unwrap();
            }
            match session.use_graph(graph(1)) {
                Err(RuntimeError::BoundOverlap { name, other }) if refused => {
                    let mut sorted = names;
                    sorted.sort_unstable();
                    assert_eq!([&*name, &*other], sorted);
                }
                other => assert!(other.is_ok() && !refused, "{names:?} {parts:?}: {other:?}"),
            }
        }
        // Inputs may share memory; bytes beyond a tensor are not its own.
        let two_inputs = |outputs: usize| {
            let g = GraphBuilder::new();
            let sum = g.input("a", DType::F32, [64]).add(g.input("b", DType::F32, [64]));
            g.output("one", sum);
            if outputs == 2 {
                g.output("two", sum.reshape([8, 8]));
            }
            g.finish().unwrap()
        };
        let mut session = Session::new(&Scheduler::new(Arc::clone(&backend))).unwrap();
        for name in ["a", "b"] {
            session.bind_leaf(name, whole.part(0, 512).unwrap()).unwrap();
        }
        session.bind_output("one", part(2)).unwrap();
        put(&whole, &[3.0; 64]);
        session.use_graph(two_inputs(1)).unwrap();
        session.run(&[]).unwrap();
        assert_eq!(get(&part(2), 64), [6.0; 64]);
        // One tensor of two names: in one region, not in two.
        session.bind_output("two", part(3)).unwrap();
        let error = session.use_graph(two_inputs(2)).unwrap_err();
        assert!(matches!(error, RuntimeError::BoundTwice { .. }), "{error}");
        session.bind_output("two", part(2)).unwrap();
        session.use_graph(two_inputs(2)).unwrap();
        session.run(&[]).unwrap();
        assert_eq!(session.read::<f32>("two").unwrap(), [6.0; 64]);
    }
}

#[test]
#[allow(unsafe_code, reason = "memory of the caller, by its address")]
fn k7_a_session_uses_memory_at_a_pointer_of_the_caller() {
    let backend = Arc::new(quadriga_cpu::Backend::builder().threads(2).build().unwrap());
    let mut memory = vec![0.0f32; 3 * 64];
    memory[..64].fill(5.0);
    memory[64..128].fill(1.0);
    let pointer = memory.as_mut_ptr();
    // SAFETY: the vector is not used before the buffer is dropped.
    let buffer = unsafe { backend.wrap_pointer(pointer.cast(), 3 * 256, ()) };
    let part = |at: usize| Region::new(Arc::clone(&buffer), 256 * at, 256).unwrap();
    let mut session = Session::new(&Scheduler::new(backend)).unwrap();
    session.bind_leaf("x", part(0)).unwrap();
    session.bind_leaf("s", part(1)).unwrap();
    session.bind_output("y", part(2)).unwrap();
    session.use_graph(graph(1)).unwrap();
    session.run(&[]).unwrap();
    assert_eq!(session.read::<f32>("z").unwrap(), [121.0; 64]);
    drop((session, part(0)));
    drop(buffer);
    assert_eq!(memory, [[5.0; 64], [6.0; 64], [11.0; 64]].concat());
}

#[test]
fn s6_an_input_is_bound_by_its_own_name_and_read_where_it_is() {
    let backends = [device("a"), device("b")];
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [1, 64]);
    g.output("same", x);
    let weight = Weight::with_data(DType::F32, [64, 64], vec![1.0f32; 64 * 64].as_slice());
    g.output("y", g.weight("w", weight).mul_mat(x));
    let graph = g.finish().unwrap();
    let scheduler = Scheduler::new(backends.clone()).place(|name| (name == "w").then_some(1));
    // The memory of an input is not that of an output, even if the output is the input.
    let mut session = Session::new(&scheduler).unwrap();
    session.bind_output("same", region(&backends[1], 64)).unwrap();
    let error = session.use_graph(&graph).unwrap_err();
    assert!(matches!(&error, RuntimeError::WrongKind { name, .. } if name == "same"), "{error}");
    let scheduler = scheduler.pin_name("y", 1);
    for (number, fits) in [(0, false), (1, true)] {
        let place = region(&backends[number], 64);
        put(&place, &[2.0; 64]);
        let mut session = Session::new(&scheduler).unwrap();
        session.bind_leaf("x", place).unwrap();
        match session.use_graph(&graph) {
            Err(error) => {
                let text = error.to_string();
                assert!(matches!(error, RuntimeError::Conflict { what: "input", .. }), "{text}");
                assert!(!fits && text.contains("memory of a") && text.contains("read on b"), "{text}");
            }
            Ok(()) => {
                assert!(fits);
                session.run(&[]).unwrap();
                assert_eq!(session.read::<f32>("y").unwrap(), [128.0; 64]);
            }
        }
    }
}

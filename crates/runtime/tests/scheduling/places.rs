//! B2, B5, K2, K3: where the tensors of a session are; parts of them, and copies between backends.

use std::sync::Arc;

use quadriga_graph::{DType, Graph, GraphBuilder, TensorId, Weight};
use quadriga_runtime::{
    Backend, BackendError, CopyRoute, Layout, Region, RuntimeError, Scheduler, Session, Usage, copy_region,
};
use quadriga_sim::Sim;

use crate::common::{chain, device, host};

fn cpu() -> Arc<dyn Backend> {
    Arc::new(quadriga_cpu::Backend::builder().threads(2).build().unwrap())
}

/// Inputs `x` and `small`, weights, a state and results.
fn graph() -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [4, 64]);
    let w = g.weight("w", Weight::with_data(DType::F32, [64], vec![2.0f32; 64].as_slice()));
    let small = g.input("small", DType::F32, [4]);
    g.output("y", x.mul(w).named("product"));
    g.output("row", x.slice(0, 1, 1));
    g.output("z", small.scale(3.0));
    g.output("s", g.state("s", DType::F32, [4]).add(small));
    g.finish().unwrap()
}

fn x() -> Vec<f32> {
    (0..256).map(|i| i as f32).collect()
}

fn floats(region: &Region) -> Vec<f32> {
    let mut bytes = vec![0; region.bytes];
    region.buffer.read(region.offset, &mut bytes).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
}

#[test]
fn b2_b5_every_tensor_of_a_session_has_a_buffer_an_offset_and_an_aligned_address() {
    for backend in [cpu(), device("a"), host("h")] {
        let name = backend.name().to_owned();
        let alignment = backend.memory().alignment as u64;
        let mut session = Session::new(&Scheduler::new(backend)).unwrap();
        assert!(matches!(session.tensor("y"), Err(RuntimeError::NoPlan)));
        session.use_graph(graph()).unwrap();
        session.run(&[("x", &x()), ("small", &[1.0f32, 2.0, 3.0, 4.0])]).unwrap();
        for tensor in ["x", "small", "w", "s", "y", "z"] {
            let place = session.tensor(tensor).unwrap().unwrap();
            assert_eq!((place.backend.name(), place.region.buffer.backend()), (&*name, &*name));
            assert_eq!(place.layout, Layout::Plain);
            assert!(place.region.offset + place.region.bytes <= place.region.buffer.bytes());
            let address = place.region.buffer.address();
            assert!(address > 0, "{name}: {tensor}");
            if tensor != "w" || name != "cpu" {
                // A mapped weight is where the file has it.
                assert_eq!((address + place.region.offset as u64) % alignment, 0, "{name}: {tensor}");
            }
        }
        let at = |tensor: &str| session.tensor(tensor).unwrap().unwrap().region;
        assert_eq!(floats(&at("x")), x());
        assert_eq!(floats(&at("y"))[..3], [0.0, 2.0, 4.0]);
        assert_eq!(floats(&at("w")), [2.0; 64]);
        assert_eq!(floats(&at("row")), x()[64..128]);
        assert_eq!(
            (at("row").offset - at("x").offset, at("row").bytes),
            (256, 256),
            "a view is part of its source"
        );
        let by_name = session.tensor("product").unwrap().unwrap();
        assert_eq!((by_name.region.offset, by_name.region.bytes), (at("y").offset, at("y").bytes));
        let id = session.plan().unwrap().graph().output("z").unwrap();
        assert_eq!(floats(&session.tensor(id).unwrap().unwrap().region), [3.0, 6.0, 9.0, 12.0]);
        assert!(session.tensor("nope").unwrap().is_none());
        assert!(session.tensor(TensorId::from_index(1000)).unwrap().is_none());
    }
}

#[test]
fn k2_parts_of_inputs_are_set_and_parts_of_outputs_are_read() {
    for backend in [cpu(), device("a"), host("h"), Sim::new("isolated").isolated().build()] {
        let name = backend.name().to_owned();
        let mut session = Session::new(&Scheduler::new(backend)).unwrap();
        session.use_graph(graph()).unwrap();
        assert!(matches!(session.set_at("x", 0, &[1.0f32]), Err(RuntimeError::NotSet { what: "input", .. })));
        let (mut x, mut small) = (x(), vec![1.0f32; 4]);
        session.run(&[("x", &x), ("small", &small)]).unwrap();
        for round in 0..6usize {
            let value = 1000.0 + round as f32;
            // One part, or several, before the next run, or after a new value.
            if round == 4 {
                x.fill(7.0);
                session.set("x", &x).unwrap();
            }
            for at in [3 * round, 100, 255 - round] {
                session.set_at("x", at, &[value]).unwrap();
                x[at] = value;
            }
            session.set_at("small", 2, &[value; 2]).unwrap();
            small[2..].fill(value);
            session.start().unwrap();
            let mut part = [0.0f32; 5];
            session.read_at("y", 98, &mut part).unwrap();
            assert_eq!(
                part.to_vec(),
                x[98..103].iter().map(|x| 2.0 * x).collect::<Vec<_>>(),
                "{name} {round}"
            );
            assert_eq!(session.read::<f32>("y").unwrap(), x.iter().map(|x| 2.0 * x).collect::<Vec<_>>());
            assert_eq!(session.read::<f32>("z").unwrap(), small.iter().map(|x| 3.0 * x).collect::<Vec<_>>());
            // Of bytes.
            let mut bytes = [0u8; 4];
            session.read_at("y", 4 * 100, &mut bytes).unwrap();
            assert_eq!(f32::from_ne_bytes(bytes), 2.0 * value);
        }
        assert!(matches!(session.set_at("x", 256, &[1.0f32]), Err(RuntimeError::WrongSize { .. })));
        assert!(matches!(session.set_at("x", usize::MAX, &[1.0f32]), Err(RuntimeError::WrongSize { .. })));
        assert!(matches!(session.set_at("x", 0, &[1i32]), Err(RuntimeError::WrongType { .. })));
        assert!(matches!(session.read_at("y", 255, &mut [0.0f32; 2]), Err(RuntimeError::WrongSize { .. })));
        assert!(matches!(session.read_at("y", 0, &mut [0i32; 2]), Err(RuntimeError::WrongType { .. })));
        session.run(&[]).unwrap();
        assert_eq!(session.read::<f32>("y").unwrap(), x.iter().map(|x| 2.0 * x).collect::<Vec<_>>());
    }
}

#[test]
fn k2_an_asynchronous_read_is_left_alone_by_a_refused_one() {
    for backend in [cpu(), device("a")] {
        let mut session = Session::new(&Scheduler::new(backend)).unwrap();
        session.use_graph(graph()).unwrap();
        session.run(&[("x", &x()), ("small", &[1.0f32; 4])]).unwrap();
        let one = session.read_async(&["z"]).unwrap();
        session.set("small", &[2.0f32; 4]).unwrap();
        session.start().unwrap();
        let two = session.read_async(&["z"]).unwrap();
        for _ in 0..3 {
            assert!(matches!(session.read_async(&["z", "nope"]), Err(RuntimeError::UnknownName { .. })));
        }
        for (read, expected) in [(one, 3.0f32), (two, 6.0)] {
            let mut bytes = [0; 16];
            session.finish_read(read, &mut bytes).unwrap();
            assert_eq!(bytes[..4], expected.to_ne_bytes());
        }
    }
}

#[test]
fn k3_a_tensor_is_copied_between_the_sessions_of_any_two_backends() {
    let all = || {
        [
            cpu(),
            device("a"),
            host("h"),
            Sim::new("alone").isolated().build(),
            Sim::new("no peers").without_peers().build(),
        ]
    };
    let session = |backend: Arc<dyn Backend>| {
        let mut session = Session::new(&Scheduler::new(backend)).unwrap();
        session.use_graph(graph()).unwrap();
        session.run(&[("x", &x()), ("small", &[5.0f32; 4])]).unwrap();
        session
    };
    let mut routes = Vec::new();
    for from in all() {
        for to in all() {
            let (source, mut target) = (session(Arc::clone(&from)), session(to));
            let place = source.tensor("z").unwrap().unwrap();
            // The output of this name is the sum.
            let leaf = target.plan().unwrap().graph().leaf("s").unwrap();
            let state = target.tensor(leaf).unwrap().unwrap();
            let route =
                copy_region((&*place.backend, &place.region), (&*state.backend, &state.region)).unwrap();
            routes.push(route);
            target.run(&[]).unwrap();
            assert_eq!(
                target.read::<f32>("s").unwrap(),
                [20.0; 4],
                "{} {}",
                from.name(),
                state.backend.name()
            );
        }
    }
    for route in [CopyRoute::Pulled, CopyRoute::Pushed, CopyRoute::Host] {
        assert!(routes.contains(&route), "{route:?} of {routes:?}");
    }
}

#[test]
fn k3_a_copy_to_itself_does_nothing_and_other_sizes_and_overlaps_are_errors() {
    for backend in [cpu(), device("a")] {
        let buffer = backend.allocate(64, Usage::Compute).unwrap();
        let whole = Region::new(buffer, 0, 64).unwrap();
        whole.buffer.write(0, &[3; 64]).unwrap();
        let copy = |from: &Region, to: &Region| copy_region((&*backend, from), (&*backend, to));
        assert_eq!(copy(&whole, &whole), Ok(CopyRoute::Same));
        let (low, high) = (whole.part(0, 32).unwrap(), whole.part(32, 32).unwrap());
        low.buffer.write(0, &[9; 32]).unwrap();
        assert_eq!(copy(&low, &high), Ok(CopyRoute::Pulled));
        let mut bytes = [0; 64];
        whole.buffer.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [9; 64]);
        assert!(matches!(copy(&low, &whole), Err(BackendError::SizeMismatch { .. })));
        let between = whole.part(16, 32).unwrap();
        assert!(matches!(copy(&low, &between), Err(BackendError::Failed { .. })));
    }
}

#[test]
fn s6_pins_by_name_hold_for_graphs_that_are_rebuilt() {
    let build = |rows: usize| {
        let g = GraphBuilder::new();
        let x = g.input("x", DType::F32, [rows, 8]);
        let scope = g.scope("blk.0");
        g.output("y", x.scale(2.0).named("double").tanh().named("act"));
        drop(scope);
        g.finish()
    };
    let scheduler = Scheduler::new([device("a"), host("h")])
        .pin_name("blk.0.act", 1)
        .pin_name("blk.0.double", 0)
        .pin_name("none", 1);
    let mut session = Session::new(&scheduler).unwrap();
    for rows in [1, 2, 3, 1] {
        session.prepare(rows as u64, || build(rows)).unwrap();
        session.run(&[("x", &vec![0.0f32; rows * 8])]).unwrap();
        assert_eq!(session.tensor("y").unwrap().unwrap().backend.name(), "h", "{rows} rows");
        assert_eq!(session.tensor("blk.0.double").unwrap().unwrap().backend.name(), "a");
    }
    let wrong = Scheduler::new([device("a")]).pin_name("x", 1).plan(build(1).unwrap());
    assert!(matches!(wrong, Err(RuntimeError::UnknownBackend { index: 1, .. })));
}

#[test]
fn a_weight_or_input_is_found_where_it_is_read() {
    let plan = Scheduler::new([device("a"), device("b")])
        .place(|name| Some((name > "w.1").into()))
        .plan(chain(4))
        .unwrap();
    let session = plan.session().unwrap();
    for (name, backend) in [("w.0", "a"), ("w.1", "a"), ("w.2", "b"), ("w.3", "b"), ("x", "a"), ("y", "b")] {
        let found = session.tensor(name).unwrap().unwrap();
        assert_eq!((found.backend.name(), found.region.buffer.backend()), (backend, backend), "{name}");
    }
    assert!(session.tensor("nothing").unwrap().is_none());
}

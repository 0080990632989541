//! Slices of weights that are uploaded between runs.

use std::slice;
use std::sync::Arc;

use quadriga_graph::{DType, Data, Graph, GraphBuilder, Weight};
use quadriga_runtime::{Backend, RuntimeError, Scheduler, Session, WeightSlice};
use quadriga_sim::{FaultPoint, Sim};

use crate::common::device;
use crate::misbehaving::Misbehaving;

const EXPERTS: usize = 3;
const WIDTH: usize = 5;

/// The names of the weights, with the rows of each expert.
const WEIGHTS: [(&str, usize); 2] = [("narrow", 2), ("wide", 7)];

/// Each weight times an input of ones, for every expert: outputs by the weights' names. The weights have no data.
fn graph() -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [EXPERTS, 1, WIDTH]);
    let ids: Vec<u8> = (0..EXPERTS as i32).flat_map(i32::to_le_bytes).collect();
    let ids = g.constant("ids", DType::I32, [EXPERTS, 1], ids);
    for (name, rows) in WEIGHTS {
        let weight = g.weight(name, Weight::new(DType::F32, [EXPERTS, rows, WIDTH]));
        g.output(&format!("{name} result"), weight.mul_mat_id(x, ids));
    }
    g.finish().unwrap()
}

/// A session with all weights on one backend.
fn session(backend: Arc<dyn Backend>) -> Session {
    let mut session = Session::new(&Scheduler::new([backend])).unwrap();
    session.use_graph(graph()).unwrap();
    session
}

/// Numbers for one expert of each weight, all of them equal: those of the narrow one, then those of the wide one.
fn numbers(narrow: f32, wide: f32) -> Data {
    let [(_, narrow_rows), (_, wide_rows)] = WEIGHTS;
    let mut numbers = vec![narrow; narrow_rows * WIDTH];
    numbers.resize((narrow_rows + wide_rows) * WIDTH, wide);
    Data::from(numbers.as_slice())
}

/// The slices of both weights for one expert.
fn slices(data: &Data, index: usize) -> [WeightSlice<'_>; 2] {
    let border = 4 * WEIGHTS[0].1 * WIDTH;
    [
        WeightSlice { weight: "narrow", index, data, range: 0..border },
        WeightSlice { weight: "wide", index, data, range: border..data.len() },
    ]
}

/// For each weight the element of its experts that a run found.
fn found(session: &mut Session) -> [Vec<f32>; 2] {
    session.run(&[("x", &[1.0f32; EXPERTS * WIDTH])]).unwrap();
    WEIGHTS.map(|(name, rows)| {
        let results: Vec<f32> = session.read(format!("{name} result").as_str()).unwrap();
        let experts = results.chunks(rows);
        experts
            .map(|rows| {
                assert!(rows.iter().all(|row| *row == rows[0]), "{name}: {rows:?}");
                rows[0] / WIDTH as f32
            })
            .collect()
    })
}

#[test]
fn slices_of_several_weights_arrive_together_and_leave_the_others_as_they_are() {
    // The last one has only what every queue has by default.
    let devices: [Arc<dyn Backend>; 3] = [
        device("sim"),
        Arc::new(quadriga_cpu::Backend::new().unwrap()),
        Arc::new(Misbehaving::new(device("plain"))),
    ];
    for backend in devices {
        let mut session = session(backend);
        assert!(session.upload(&[]).unwrap().is_none(), "there is nothing to upload");
        let all = [numbers(1.0, 2.0), numbers(3.0, 4.0), numbers(5.0, 6.0)];
        let mut started = Vec::new();
        for (index, data) in all.iter().enumerate() {
            started.push(session.upload(&slices(data, index)).unwrap().unwrap());
        }
        assert!(started.is_sorted_by(|a, b| a < b), "each upload is known by itself: {started:?}");
        let applied: Vec<_> =
            session.apply_uploads(true).into_iter().map(|(id, done)| done.map(|()| id).unwrap()).collect();
        assert_eq!(applied, started);
        assert_eq!(found(&mut session), [vec![1.0, 3.0, 5.0], vec![2.0, 4.0, 6.0]]);
        session.upload(&slices(&numbers(7.0, 8.0), 1)).unwrap().unwrap();
        assert_eq!(session.apply_uploads(true).len(), 1);
        assert!(session.apply_uploads(true).is_empty());
        assert_eq!(found(&mut session), [vec![1.0, 7.0, 5.0], vec![2.0, 8.0, 6.0]]);
    }
}

#[test]
fn memory_of_an_upload_is_used_again_by_the_next_one_that_fits() {
    let sim = Sim::new("sim").device();
    let mut session = session(sim.clone());
    let data = numbers(1.0, 2.0);
    let mut upload = |slices: &[WeightSlice<'_>]| {
        session.upload(slices).unwrap().unwrap();
        assert!(session.apply_uploads(true).iter().all(|(_, done)| done.is_ok()));
        session.wait().unwrap();
        sim.used_bytes()
    };
    let [narrow, wide] = slices(&data, 0);
    let small = upload(slice::from_ref(&narrow));
    assert_eq!(upload(slice::from_ref(&narrow)), small);
    let large = upload(&[narrow.clone(), wide.clone()]);
    assert!(large > small);
    assert_eq!((upload(&[wide, narrow.clone()]), upload(&[narrow])), (large, large));
}

#[test]
fn slices_that_do_not_fit_their_weight_are_refused() {
    let mut session = session(device("sim"));
    let data = numbers(1.0, 2.0);
    let [narrow, wide] = slices(&data, 0);
    let bytes = narrow.range.len();
    let mut refused = |slice: WeightSlice<'_>| session.upload(&[slice]).unwrap_err();
    let error = refused(WeightSlice { index: EXPERTS, ..narrow.clone() });
    assert!(matches!(error, RuntimeError::Slice { index: EXPERTS, count: EXPERTS, .. }), "{error}");
    let error = refused(WeightSlice { range: 0..bytes - 1, ..narrow.clone() });
    assert!(
        matches!(error, RuntimeError::WrongSize { expected, found, .. } if (expected, found) == (bytes, bytes - 1))
    );
    let beyond = data.len() - 1..data.len() - 1 + bytes;
    assert!(matches!(
        refused(WeightSlice { range: beyond, ..narrow.clone() }),
        RuntimeError::WrongSize { .. }
    ));
    let error = refused(WeightSlice { weight: "other", ..narrow.clone() });
    assert!(matches!(error, RuntimeError::UnknownName { what: "weight without data", .. }), "{error}");
    // The last slices, and bytes at the end of the data, are no exception.
    let last = WeightSlice { index: EXPERTS - 1, ..wide };
    assert!(session.upload(&[narrow, last]).unwrap().is_some());
}

#[test]
fn the_slices_of_an_upload_are_on_one_device() {
    let scheduler = Scheduler::new([device("a"), device("b")]).place(|name| Some((name == "wide").into()));
    let mut session = Session::new(&scheduler).unwrap();
    session.use_graph(graph()).unwrap();
    let data = numbers(1.0, 2.0);
    let error = session.upload(&slices(&data, 0)).unwrap_err();
    assert!(matches!(&error, RuntimeError::WrongKind { name, .. } if name == "wide"), "{error}");
    // Each device has staging memory of its own, also when that of the other one is free.
    for round in 0..2 {
        for index in 0..EXPERTS {
            let data = numbers((10 * round + index) as f32, (10 * round) as f32 - index as f32);
            for slice in slices(&data, index) {
                session.upload(&[slice]).unwrap().unwrap();
                assert!(session.apply_uploads(true).iter().all(|(_, done)| done.is_ok()));
            }
        }
    }
    assert_eq!(found(&mut session), [vec![10.0, 11.0, 12.0], vec![10.0, 9.0, 8.0]]);
}

#[test]
fn after_a_failure_the_slices_can_be_uploaded_again() {
    let sim = Sim::new("sim").device();
    let mut session = session(sim.clone());
    for index in 0..EXPERTS {
        session.upload(&slices(&numbers(1.0, 2.0), index)).unwrap().unwrap();
        assert!(session.apply_uploads(true).iter().all(|(_, done)| done.is_ok()));
    }
    session.wait().unwrap();
    let data = numbers(3.0, 4.0);
    sim.fail(FaultPoint::Transfer, 0);
    let failed = match session.upload(&slices(&data, 1)) {
        Ok(_) => session.apply_uploads(true).into_iter().filter(|(_, done)| done.is_err()).count(),
        Err(_) => 1,
    };
    assert_eq!(failed, 1);
    assert_eq!(found(&mut session), [vec![1.0; EXPERTS], vec![2.0; EXPERTS]]);
    session.upload(&slices(&data, 1)).unwrap().unwrap();
    let applied = session.apply_uploads(true);
    assert!(matches!(applied.as_slice(), [(_, Ok(()))]), "{applied:?}");
    assert_eq!(found(&mut session), [vec![1.0, 3.0, 1.0], vec![2.0, 4.0, 2.0]]);
}

//! Slices of a weight that are uploaded one by one give what the whole weight gives.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::Arc;

use quadriga_graph::{DType, Data, Graph, GraphBuilder, Weight};
use quadriga_runtime::{Backend, RuntimeError, Scheduler, Session, WeightSlice};
use quadriga_sim::Sim;

const EXPERTS: usize = 5;
const ROWS: usize = 34;
const COLUMNS: usize = 256;

/// Bytes of matrices whose blocks have small scales.
fn matrices(dtype: DType, seed: u32) -> Data {
    let bytes = dtype.row_bytes(COLUMNS).unwrap() * ROWS * EXPERTS;
    let mut state = seed;
    let mut random = || {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        (state >> 16) as u8
    };
    let mut data: Vec<u8> = (0..bytes).map(|_| random()).collect();
    for block in data.chunks_mut(dtype.block_bytes()) {
        match dtype {
            DType::F32 => block.copy_from_slice(&(f32::from(random()) / 256.0 - 0.5).to_le_bytes()),
            // Both begin with a scale in f16.
            _ => block[..2].copy_from_slice(&[random(), 0x20]),
        }
    }
    Data::from(data)
}

fn graph(weight: Weight) -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [EXPERTS, 1, COLUMNS]);
    let ids: Vec<u8> = (0..EXPERTS as i32).flat_map(i32::to_le_bytes).collect();
    let ids = g.constant("ids", DType::I32, [EXPERTS, 1], ids);
    g.output("y", g.weight("w", weight).mul_mat_id(x, ids));
    g.finish().unwrap()
}

fn session(backend: &Arc<dyn Backend>, weight: Weight) -> Session {
    let mut session = Session::new(&Scheduler::new([Arc::clone(backend)])).unwrap();
    session.use_graph(graph(weight)).unwrap();
    session
}

fn run(session: &mut Session) -> Vec<f32> {
    let x: Vec<f32> = (0..EXPERTS * COLUMNS).map(|i| (i % 17) as f32 / 17.0 - 0.4).collect();
    session.run(&[("x", &x)]).unwrap();
    session.read("y").unwrap()
}

fn backends() -> Vec<Arc<dyn Backend>> {
    let cpu = quadriga_cpu::Backend::builder().threads(2).build().unwrap();
    let sims = ["sim:0", "sim:1", "sim:2"].map(Sim::new);
    let [plain, isolated, packing] = sims;
    vec![Arc::new(cpu), plain.build(), isolated.isolated().build(), packing.packs_weights().build()]
}

#[test]
fn slices_give_what_the_whole_weight_gives() {
    for backend in backends() {
        for dtype in [DType::F32, DType::Q4_0, DType::Q8_0] {
            let shape = [EXPERTS, ROWS, COLUMNS];
            let (before, after) = (matrices(dtype, 1), matrices(dtype, 2));
            let slice = before.len() / EXPERTS;
            let mut uploaded = session(&backend, Weight::new(dtype, shape));
            let context = format!("{} {dtype}", backend.name());
            let mut load = |from: &Data, order: &[usize]| {
                let mut started = Vec::new();
                for index in order {
                    let range = index * slice..(index + 1) * slice;
                    let one = WeightSlice { weight: "w", index: *index, data: from, range };
                    started.push(uploaded.upload(&[one]).unwrap().unwrap());
                }
                let applied = uploaded.apply_uploads(true);
                let done: Vec<_> = applied.into_iter().map(|(id, result)| (id, result.is_ok())).collect();
                assert_eq!(done, started.into_iter().map(|id| (id, true)).collect::<Vec<_>>());
                run(&mut uploaded)
            };
            let first = load(&before, &[4, 0, 1, 2, 3]);
            let whole = |data: Data| run(&mut session(&backend, Weight::with_data(dtype, shape, data)));
            assert_eq!(first, whole(before.clone()), "{context}");
            // Some of them anew: the others stay.
            let second = load(&after, &[3, 1]);
            let part = |data: &Data, index: usize| data.slice(index * slice, slice).unwrap();
            let mixed: Vec<Data> =
                (0..EXPERTS).map(|i| part(if i == 1 || i == 3 { &after } else { &before }, i)).collect();
            let mixed = Data::joined(mixed).bytes().into_owned();
            assert_eq!(second, whole(Data::from(mixed)), "{context}");
        }
    }
}

#[test]
fn wrong_slices_are_refused_by_name() {
    let backend = &backends()[1];
    let data = matrices(DType::F32, 1);
    let slice = data.len() / EXPERTS;
    let mut own = session(backend, Weight::new(DType::F32, [EXPERTS, ROWS, COLUMNS]));
    let mut upload = |weight: &str, index: usize, range: std::ops::Range<usize>| {
        own.upload(&[WeightSlice { weight, index, data: &data, range }])
    };
    let error = upload("w", EXPERTS, 0..slice).unwrap_err();
    assert!(matches!(error, RuntimeError::Slice { index: EXPERTS, count: EXPERTS, .. }), "{error}");
    let error = upload("w", 0, 0..slice - 1).unwrap_err();
    assert!(matches!(error, RuntimeError::WrongSize { .. }), "{error}");
    let error = upload("w", 0, data.len() - 1..data.len() - 1 + slice).unwrap_err();
    assert!(matches!(error, RuntimeError::WrongSize { .. }), "{error}");
    let error = upload("v", 0, 0..slice).unwrap_err();
    assert!(error.to_string().contains('v'), "{error}");
    let mut with_data =
        session(backend, Weight::with_data(DType::F32, [EXPERTS, ROWS, COLUMNS], data.clone()));
    let one = WeightSlice { weight: "w", index: 0, data: &data, range: 0..slice };
    assert!(with_data.upload(&[one]).is_err(), "a weight with data is not changed");
}

#[test]
fn a_run_before_any_slice_says_which_weight_is_missing() {
    let backend = &backends()[0];
    let mut own = session(backend, Weight::new(DType::F32, [EXPERTS, ROWS, COLUMNS]));
    let error = own.run(&[("x", &vec![0.0f32; EXPERTS * COLUMNS])]).unwrap_err();
    assert!(error.to_string().contains('w'), "{error}");
}

/// A session on a device, with a limit of uploads in bytes.
fn limited(sim: &Arc<Sim>, limit: u64) -> Session {
    let backend = Arc::clone(sim) as Arc<dyn Backend>;
    let mut own = session(&backend, Weight::new(DType::F32, [EXPERTS, ROWS, COLUMNS]));
    own.limit_uploads(limit);
    own
}

/// Starts uploads of one slice each until no more may be in flight; how many.
fn fill_up(session: &mut Session, data: &Data) -> usize {
    let slice = data.len() / EXPERTS;
    let mut count = 0;
    loop {
        let one = WeightSlice { weight: "w", index: count % EXPERTS, data, range: 0..slice };
        if session.upload(&[one]).unwrap().is_none() {
            return count;
        }
        count += 1;
        assert!(count < 1000);
    }
}

#[test]
fn uploads_in_flight_are_limited_by_bytes_and_memory_is_used_again() {
    let data = matrices(DType::F32, 3);
    let slice = (data.len() / EXPERTS) as u64;
    // Less than one, one, several, and not quite one more.
    for (limit, most) in [(0, 1), (1, 1), (slice - 1, 1), (slice, 1), (4 * slice, 4), (8 * slice - 1, 7)] {
        let sim = Sim::new("sim:0").timed_polls().copy_seconds(1.0, 0.0).device();
        let mut own = limited(&sim, limit);
        let before = sim.used_bytes();
        for round in 0..3 {
            assert_eq!(fill_up(&mut own, &data), most, "limit {limit}, round {round}");
            assert_eq!(sim.used_bytes() - before, most as u64 * slice, "limit {limit}, round {round}");
            assert_eq!(own.apply_uploads(true).len(), most, "limit {limit}, round {round}");
        }
    }
}

#[test]
fn staging_memory_of_small_uploads_makes_way_for_larger_ones() {
    let data = matrices(DType::F32, 5);
    let slice = data.len() / EXPERTS;
    let sim = Sim::new("sim:0").device();
    let limit = 4 * slice as u64;
    let mut own = limited(&sim, limit);
    let before = sim.used_bytes();
    for (count, wanted) in [(1, 4), (2, 2), (3, 1), (5, 1), (1, 1), (4, 1), (2, 1)] {
        let parts: Vec<WeightSlice<'_>> = (0..count)
            .map(|index| WeightSlice {
                weight: "w",
                index,
                data: &data,
                range: index * slice..(index + 1) * slice,
            })
            .collect();
        let mut started = 0;
        while own.upload(&parts).unwrap().is_some() {
            started += 1;
            assert!(started < 100);
        }
        assert!(started >= wanted, "{count} slices: {started} in flight");
        let most = limit.max((count * slice) as u64).max(5 * slice as u64);
        assert!(sim.used_bytes() - before <= most, "{count} slices: {}", sim.used_bytes() - before);
        assert!(own.apply_uploads(true).iter().all(|(_, result)| result.is_ok()));
        // The device has taken the bytes out.
        own.wait().unwrap();
    }
}

#[test]
fn an_upload_arrives_when_its_time_has_come_and_no_run_waits_for_it() {
    let data = matrices(DType::F32, 7);
    // A slice takes as long as ten runs.
    let sim = Sim::new("sim:0").timed_polls().copy_seconds(0.0, 1e-3 / (data.len() / EXPERTS) as f64);
    let sim = sim.node_seconds(1e-4).device();
    let mut own = limited(&sim, 1 << 20);
    assert_eq!(fill_up(&mut own, &data).min(EXPERTS), EXPERTS);
    own.apply_uploads(true);
    let wanted = run(&mut own);
    let slice = data.len() / EXPERTS;
    let began = sim.host_seconds();
    let one = WeightSlice { weight: "w", index: 2, data: &data, range: 2 * slice..3 * slice };
    let upload = own.upload(&[one]).unwrap().unwrap();
    let mut runs = 0;
    let arrived = loop {
        let done = own.apply_uploads(false);
        if !done.is_empty() {
            break done;
        }
        let before = sim.host_seconds();
        run(&mut own);
        let seconds = sim.host_seconds() - before;
        assert!(seconds < 3e-4, "run {runs} took {seconds} s");
        runs += 1;
        assert!(runs < 100);
    };
    assert_eq!(arrived.len(), 1);
    assert!(arrived[0].0 == upload && arrived[0].1.is_ok());
    assert!(runs >= 3 && sim.host_seconds() - began >= 1e-3, "{runs} runs");
    assert_ne!(run(&mut own), wanted, "the slice is another one");
}

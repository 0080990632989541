//! States that are read, written, saved and restored from outside of a run.

use std::fs;
use std::ops::Range;
use std::sync::Arc;

use quadriga_conformance::Rng;
use quadriga_graph::{DType, Graph, GraphBuilder, Shape};
use quadriga_runtime::{Backend, RuntimeError, Scheduler, Session, SnapshotError, WeightStreaming};
use quadriga_sim::{FaultPoint, Sim};

use crate::common::{chain_input, device, host, random_graph};

/// Two states of different types, both written by each run: rows of f32, and f16 sums.
fn graph() -> Graph {
    let g = GraphBuilder::new();
    let x = g.input("x", DType::F32, [1, 8]);
    let ids = g.input("ids", DType::I32, [1]);
    let rows = g.state("rows", DType::F32, [4, 8]).set_rows(x, ids);
    let half = g.state("half", DType::F16, [4, 8]).set_rows(x.scale(2.0), ids);
    g.output("y", rows.sum_rows().add(half.cast(DType::F32).sum_rows()));
    g.finish().unwrap()
}

fn run(session: &mut Session, row: i32) -> Vec<f32> {
    let x: Vec<f32> = (0..8).map(|i| (i + row) as f32 + 1.0).collect();
    session.run(&[("x", &x), ("ids", &[row])]).unwrap();
    session.read("y").unwrap()
}

fn on(backends: impl IntoIterator<Item = Arc<dyn Backend>>, place: fn(&str) -> Option<usize>) -> Scheduler {
    Scheduler::new(backends.into_iter().collect::<Vec<_>>()).place(place)
}

fn nowhere(_: &str) -> Option<usize> {
    None
}

/// The two states on different backends.
fn apart(name: &str) -> Option<usize> {
    ["rows", "half"].iter().position(|state| *state == name)
}

fn schedulers() -> Vec<Scheduler> {
    vec![
        on([Arc::new(quadriga_cpu::Backend::new().unwrap()) as Arc<dyn Backend>], nowhere),
        on([host("cpu")], nowhere),
        on([device("gpu")], nowhere),
        on([device("gpu"), host("cpu")], apart),
        on([Sim::new("a").isolated().build(), device("b"), host("cpu")], apart),
    ]
}

fn snapshot(error: RuntimeError) -> SnapshotError {
    match error {
        RuntimeError::Snapshot(error) => *error,
        other => panic!("{other}"),
    }
}

#[test]
fn saved_states_continue_a_session_wherever_they_are_restored() {
    for (from, first) in schedulers().iter().enumerate() {
        let mut session = first.plan(graph()).unwrap().session().unwrap();
        run(&mut session, 0);
        // A run in flight is part of what is saved.
        session.set("ids", &[2i32]).unwrap();
        session.start().unwrap();
        let saved = session.state_bytes().unwrap();
        let expected = run(&mut session, 1);
        for (to, second) in schedulers().iter().enumerate() {
            let mut session = second.plan(graph()).unwrap().session().unwrap();
            run(&mut session, 3);
            session.restore_state(saved.as_slice()).unwrap();
            assert_eq!(session.state_bytes().unwrap(), saved, "{from} to {to}");
            assert_eq!(run(&mut session, 1), expected, "{from} to {to}");
        }
    }
}

#[test]
fn random_graphs_continue_where_they_were_saved() {
    const ALWAYS: WeightStreaming = WeightStreaming { operations_per_byte: 0, min_operations: 0 };
    for seed in 0..20 {
        let graph = random_graph(&mut Rng::new(seed), 30);
        let odd = |name: &str| name.bytes().last().map(|last| usize::from(last % 2));
        let scheduler =
            Scheduler::new([device("gpu"), host("cpu")]).place(odd).weight_streaming(Some(ALWAYS));
        let start = || {
            let mut session = scheduler.plan(&graph).unwrap().session().unwrap();
            session.set("x", &chain_input()).unwrap();
            session.set("z", &chain_input()).unwrap();
            session
        };
        let run = |session: &mut Session, row: i32| -> Vec<Vec<u8>> {
            session.run(&[("ids", &[row])]).unwrap();
            graph.outputs().iter().map(|(name, _)| session.read::<u8>(name).unwrap()).collect()
        };
        let mut session = start();
        run(&mut session, 1);
        run(&mut session, 2);
        let saved = session.state_bytes().unwrap();
        let expected = run(&mut session, 0);
        let mut other = start();
        other.restore_state(saved.as_slice()).unwrap();
        assert_eq!(run(&mut other, 0), expected, "seed {seed}");
    }
}

#[test]
fn parts_of_states_are_read_and_written_by_element_or_byte() {
    for scheduler in schedulers() {
        let mut session = scheduler.plan(graph()).unwrap().session().unwrap();
        let states = session.states();
        let names: Vec<&str> = states.iter().map(|state| state.name.as_str()).collect();
        assert_eq!(names, ["half", "rows"]);
        assert_eq!((states[0].dtype, states[0].shape.dims(), states[0].bytes), (DType::F16, &[4, 8][..], 64));
        session.write_state_at("rows", 8, &[5.0f32; 8]).unwrap();
        session.write_state_at("rows", 60, &[0u8, 0, 0, 0]).unwrap();
        let mut row = [0f32; 10];
        session.read_state_at("rows", 7, &mut row).unwrap();
        assert_eq!(row, [0.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 0.0, 0.0]);
        session.write_state("half", &[1u8; 64]).unwrap();
        assert_eq!(session.read_state::<u8>("half").unwrap(), [1; 64]);
        // The next run sees what was written: seven fives, one in the first row.
        session.run(&[("x", &[1.0f32; 8]), ("ids", &[0i32])]).unwrap();
        let y: Vec<f32> = session.read("y").unwrap();
        assert!((y[0] - 24.0).abs() < 1e-6 && (y[1] - 35.0).abs() < 1e-3, "{y:?}");

        let before = session.state_bytes().unwrap();
        let error = session.read_state::<f32>("nope").unwrap_err();
        assert_eq!(error.to_string(), "the graph has no state named \"nope\"; there are: half, rows");
        assert!(matches!(session.read_state::<i32>("rows"), Err(RuntimeError::WrongType { .. })));
        assert!(matches!(session.write_state("rows", &[0i32; 32]), Err(RuntimeError::WrongType { .. })));
        assert!(matches!(session.write_state("rows", &[0f32; 31]), Err(RuntimeError::WrongSize { .. })));
        for first in [25, 32, usize::MAX / 4, usize::MAX] {
            assert!(matches!(
                session.write_state_at("rows", first, &[0f32; 8]),
                Err(RuntimeError::Device { .. })
            ));
            assert!(matches!(
                session.read_state_at("rows", first, &mut row),
                Err(RuntimeError::Device { .. })
            ));
        }
        assert_eq!(session.state_bytes().unwrap(), before);
    }
}

#[test]
fn only_the_chosen_bytes_are_saved_and_restored() {
    let mut session = Scheduler::new(device("gpu")).plan(graph()).unwrap().session().unwrap();
    run(&mut session, 0);
    run(&mut session, 1);
    let all = session.state_bytes().unwrap().len();
    let mut saved = Vec::new();
    // The first row of each state, and the last one of `rows`.
    let parts = |state: &quadriga_runtime::StateInfo| match state.name.as_str() {
        "rows" => vec![0..32, 96..128],
        _ => std::iter::once(0..16).collect(),
    };
    session.save_state_parts(&mut saved, parts).unwrap();
    // 80 of 192 bytes; one more range has 16 bytes of header.
    assert_eq!(all - saved.len(), 192 - 80 - 16);
    let first: Vec<f32> = session.read_state("rows").unwrap();
    session.write_state("rows", &[7.0f32; 32]).unwrap();
    session.restore_state(saved.as_slice()).unwrap();
    let rows: Vec<f32> = session.read_state("rows").unwrap();
    assert_eq!((&rows[..8], &rows[8..24], &rows[24..]), (&first[..8], &[7.0; 16][..], &[0.0; 8][..]));

    // Empty ranges are not written.
    let mut same = Vec::new();
    session.restore_state(saved.as_slice()).unwrap();
    session
        .save_state_parts(&mut same, |state| {
            parts(state)
                .into_iter()
                .flat_map(|range| [range.start..range.start, range.clone(), range.end..range.end])
        })
        .unwrap();
    assert_eq!(same.len(), saved.len());
    session.restore_state(same.as_slice()).unwrap();

    let bad: [&[Range<usize>]; 4] =
        [&[0..0, 0..129], &[4..8, 0..4], &[0..8, 4..12], &[Range { start: 8, end: 4 }]];
    for ranges in bad {
        let saved = session.save_state_parts(Vec::new(), |state| match state.name.as_str() {
            "rows" => ranges.to_vec(),
            _ => Vec::new(),
        });
        assert!(matches!(snapshot(saved.unwrap_err()), SnapshotError::Range { .. }), "{ranges:?}");
    }
}

#[test]
fn other_states_are_refused_by_name_type_and_shape() {
    let one = |name: &str, dtype, dims: [usize; 2]| {
        let g = GraphBuilder::new();
        let s = g.state(name, dtype, dims);
        g.output("s", s);
        let mut session = Scheduler::new(host("cpu")).plan(g.finish().unwrap()).unwrap().session().unwrap();
        session.run(&[]).unwrap();
        session
    };
    let saved = one("s", DType::F32, [4, 8]).state_bytes().unwrap();
    let refuse = |session: &mut Session| snapshot(session.restore_state(saved.as_slice()).unwrap_err());
    assert!(one("s", DType::F32, [4, 8]).restore_state(saved.as_slice()).is_ok());
    let error = refuse(&mut one("s", DType::F32, [8, 4]));
    assert_eq!(error.to_string(), "state s is F32 [8, 4] in the session, but was saved as F32 [4, 8]");
    let error = refuse(&mut one("s", DType::F16, [4, 8]));
    assert_eq!(error.to_string(), "state s is F16 [4, 8] in the session, but was saved as F32 [4, 8]");
    // Names are compared in order: the first that is on one side only is reported.
    assert_eq!(refuse(&mut one("t", DType::F32, [4, 8])), SnapshotError::Unknown { name: "s".into() });
    assert_eq!(refuse(&mut one("r", DType::F32, [4, 8])), SnapshotError::Missing { name: "r".into() });
    let mut empty = Session::new(&Scheduler::new(host("cpu"))).unwrap();
    assert_eq!(refuse(&mut empty), SnapshotError::Unknown { name: "s".into() });
    let mut two = Scheduler::new(host("cpu")).plan(graph()).unwrap().session().unwrap();
    let nothing = empty.state_bytes().unwrap();
    let error = snapshot(two.restore_state(nothing.as_slice()).unwrap_err());
    assert_eq!(error, SnapshotError::Missing { name: "half".into() });
}

#[test]
fn damaged_and_hostile_bytes_are_refused_and_change_nothing() {
    let mut session = on([device("gpu"), host("cpu")], apart).plan(graph()).unwrap().session().unwrap();
    run(&mut session, 0);
    let saved = session.state_bytes().unwrap();
    run(&mut session, 1);
    let before = session.state_bytes().unwrap();
    let mut refuse = |bytes: &[u8]| {
        let error = snapshot(session.restore_state(bytes).unwrap_err());
        assert_eq!(session.state_bytes().unwrap(), before);
        error
    };
    for length in 0..saved.len() {
        assert_eq!(refuse(&saved[..length]), SnapshotError::Truncated, "{length} bytes");
    }
    for at in 0..saved.len() {
        let mut bytes = saved.clone();
        bytes[at] ^= 0x41;
        refuse(&bytes);
    }
    let mut other = saved.clone();
    other[8] = 2;
    assert_eq!(refuse(&other), SnapshotError::Version { found: 2, known: 1 });
    assert_eq!(refuse(b"GGUF\x03\0\0\0 and so on"), SnapshotError::NotSavedStates);
    // Enormous counts and lengths in otherwise well-formed headers: names, ranks, extents, ranges.
    for at in (8..100).step_by(4) {
        let mut bytes = saved.clone();
        bytes[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        refuse(&bytes);
    }
    // An empty range, of which there could be any number: that of `half`, after name, type, rank, extents and count.
    let mut empty = saved.clone();
    let bytes_of_range = 16 + 4 + 4 + 4 + 4 + 2 * 8 + 4 + 8;
    assert_eq!(empty[bytes_of_range..bytes_of_range + 8], 64u64.to_le_bytes());
    empty[bytes_of_range..bytes_of_range + 8].fill(0);
    assert_eq!(refuse(&empty), SnapshotError::Damaged { what: "a range is empty" });
    // Bytes after the end belong to the reader's owner.
    let mut longer = saved.clone();
    longer.extend(b"more");
    let mut reader = longer.as_slice();
    session.restore_state(&mut reader).unwrap();
    assert_eq!(reader, b"more");
    assert_eq!(session.state_bytes().unwrap(), saved);
}

#[test]
fn a_device_that_fails_while_restoring_leaves_the_old_states() {
    let sim = Sim::new("gpu").device();
    let mut session = Scheduler::new(sim.clone()).plan(graph()).unwrap().session().unwrap();
    run(&mut session, 0);
    let saved = session.state_bytes().unwrap();
    run(&mut session, 1);
    let before = session.state_bytes().unwrap();
    for transfer in 0..4 {
        sim.fail(FaultPoint::Transfer, transfer);
        let error = session.restore_state(saved.as_slice()).unwrap_err();
        assert!(matches!(error, RuntimeError::Device { .. }), "{error}");
        assert_eq!(session.state_bytes().unwrap(), before, "transfer {transfer}");
    }
    session.restore_state(saved.as_slice()).unwrap();
    assert_eq!(session.state_bytes().unwrap(), saved);
    // So does saving: the caller gets an error, and the session goes on.
    sim.fail(FaultPoint::Transfer, 1);
    assert!(session.state_bytes().is_err());
    assert_eq!(session.state_bytes().unwrap(), saved);
}

#[test]
fn files_are_replaced_only_when_complete() {
    let sim = Sim::new("gpu").device();
    let mut session = Scheduler::new(sim.clone()).plan(graph()).unwrap().session().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("states");
    let files = || fs::read_dir(folder.path()).unwrap().count();
    run(&mut session, 0);
    let saved = session.state_bytes().unwrap();
    session.save_state_file(&path).unwrap();
    assert_eq!(fs::read(&path).unwrap(), saved);
    run(&mut session, 1);
    sim.fail(FaultPoint::Transfer, 1);
    assert!(session.save_state_file(&path).is_err());
    assert_eq!((fs::read(&path).unwrap(), files()), (saved.clone(), 1));
    session.restore_state_file(&path).unwrap();
    assert_eq!(session.state_bytes().unwrap(), saved);
    run(&mut session, 2);
    session.save_state_file(&path).unwrap();
    assert_ne!(fs::read(&path).unwrap(), saved);
    assert_eq!(files(), 1);

    let before = session.state_bytes().unwrap();
    let mut longer = saved.clone();
    longer.push(0);
    fs::write(&path, &longer).unwrap();
    let error = snapshot(session.restore_state_file(&path).unwrap_err());
    assert_eq!(error, SnapshotError::TrailingBytes);
    fs::write(&path, &saved[..saved.len() - 1]).unwrap();
    assert_eq!(snapshot(session.restore_state_file(&path).unwrap_err()), SnapshotError::Truncated);
    let missing = folder.path().join("no/such/file");
    let error = session.restore_state_file(&missing).unwrap_err().to_string();
    assert!(error.starts_with("cannot open the saved states (") && error.contains("no/such/file"), "{error}");
    let error = session.save_state_file(&missing).unwrap_err().to_string();
    assert!(error.starts_with("cannot create the saved states ("), "{error}");
    assert_eq!(session.state_bytes().unwrap(), before);
}

#[cfg(unix)]
#[test]
fn links_stay_links_and_pipes_are_written_to() {
    use std::os::unix::fs::symlink;
    let mut session = Scheduler::new(host("cpu")).plan(graph()).unwrap().session().unwrap();
    run(&mut session, 0);
    let saved = session.state_bytes().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("data")).unwrap();
    fs::write(at("data/states"), b"old").unwrap();
    // To a file, to a link, and to a file that is not there yet.
    symlink("data/states", at("link")).unwrap();
    symlink("link", at("link of link")).unwrap();
    symlink("data/new", at("link to nothing")).unwrap();
    for (link, file) in
        [("link", "data/states"), ("link of link", "data/states"), ("link to nothing", "data/new")]
    {
        session.save_state_file(at(link)).unwrap();
        assert!(fs::symlink_metadata(at(link)).unwrap().is_symlink(), "{link}");
        assert_eq!(fs::read(at(file)).unwrap(), saved, "{link}");
        fs::write(at(file), b"old").unwrap();
    }
    symlink("loop", at("loop")).unwrap();
    assert!(matches!(snapshot(session.save_state_file(at("loop")).unwrap_err()), SnapshotError::Io { .. }));
    assert_eq!(fs::read_dir(at("data")).unwrap().count(), 2, "no temporary files");

    let pipe = at("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    // Opened by both sides, so that neither waits for the other.
    let mut reader = fs::OpenOptions::new().read(true).write(true).open(&pipe).unwrap();
    session.save_state_file(&pipe).unwrap();
    let mut bytes = vec![0; saved.len()];
    std::io::Read::read_exact(&mut reader, &mut bytes).unwrap();
    assert_eq!(bytes, saved);
    assert!(!fs::metadata(&pipe).unwrap().is_file());
}

#[test]
fn saved_ranges_must_be_in_order_and_inside_their_state() {
    let mut session = Scheduler::new(device("gpu")).plan(graph()).unwrap().session().unwrap();
    run(&mut session, 0);
    let mut bytes = Vec::new();
    let parts = |state: &quadriga_runtime::StateInfo| match state.name.as_str() {
        "rows" => vec![16..40, 64..88],
        _ => Vec::new(),
    };
    session.save_state_parts(&mut bytes, parts).unwrap();
    let second = [64u64.to_le_bytes(), 24u64.to_le_bytes()].concat();
    let at = bytes.windows(16).position(|window| window == second).unwrap();
    // The second range begins within the first, ends behind the state, or beyond all numbers.
    for (start, length) in [(39u64, 24u64), (0, 24), (105, 24), (64, 65), (u64::MAX, 24)] {
        let mut wrong = bytes.clone();
        wrong[at..at + 16].copy_from_slice(&[start.to_le_bytes(), length.to_le_bytes()].concat());
        let error = snapshot(session.restore_state(wrong.as_slice()).unwrap_err());
        assert_eq!(
            error,
            SnapshotError::Damaged { what: "a range is outside its state" },
            "{start}, {length}"
        );
    }
    session.restore_state(bytes.as_slice()).unwrap();
}

#[test]
fn states_of_every_rank_are_saved_and_restored() {
    let g = GraphBuilder::new();
    let shapes: [&[usize]; 4] = [&[6], &[2, 3], &[1, 2, 3], &[3, 1, 2, 1]];
    for (rank, dims) in (1..).zip(shapes) {
        let state = g.state(&format!("s{rank}"), DType::F32, Shape::new(dims).unwrap());
        g.output(&format!("y{rank}"), state.scale(2.0).copy_into(state));
    }
    let mut session = Scheduler::new(device("a")).plan(g.finish().unwrap()).unwrap().session().unwrap();
    for rank in 1..=4 {
        session.write_state(&format!("s{rank}"), &[rank as f32; 6]).unwrap();
    }
    let saved = session.state_bytes().unwrap();
    session.run(&[]).unwrap();
    session.restore_state(saved.as_slice()).unwrap();
    for rank in 1..=4 {
        assert_eq!(session.read_state::<f32>(&format!("s{rank}")).unwrap(), [rank as f32; 6]);
    }
}

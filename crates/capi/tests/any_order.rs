//! Objects are used and freed in random order: what is left works, what is freed is an error, and nothing is left at the end.
#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use std::ffi::CStr;
use std::ptr::{null, null_mut};

use quadriga_c::*;
use quadriga_conformance::Rng;

/// Cases of the property test; each prints its seed when it fails.
const CASES: u64 = 40;

fn error() -> Box<qd_error> {
    Box::new(qd_error { code: QD_STATUS_OK, message: [0; QD_ERROR_MESSAGE_BYTES] })
}

fn text(error: &qd_error) -> String {
    // SAFETY: the library ends messages with NUL.
    unsafe { CStr::from_ptr(error.message.as_ptr()) }.to_string_lossy().into_owned()
}

/// All handles of a run; null once they are freed.
struct Objects {
    cpu: *mut qd_backend,
    graph: *mut qd_graph,
    scheduler: *mut qd_scheduler,
    plan: *mut qd_plan,
    session: *mut qd_session,
}

fn made() -> Objects {
    let mut e = error();
    let cpu = qd_backend_cpu(1, Some(&mut e));
    let builder = qd_builder_new(Some(&mut e));
    let dims = [2usize, 3];
    // SAFETY: texts end with NUL, and the arrays have the lengths that are given.
    unsafe {
        let x = qd_input(builder, c"x".as_ptr(), QD_DTYPE_F32, dims.as_ptr(), 2);
        qd_output(builder, c"y".as_ptr(), qd_add(builder, qd_sqr(builder, x), x));
    }
    let graph = qd_builder_finish(builder, Some(&mut e));
    assert!(!graph.is_null(), "{}", text(&e));
    qd_builder_free(builder);
    let backends = [cpu.cast_const()];
    // SAFETY: the array has the length that is given.
    let scheduler = unsafe { qd_scheduler_new(backends.as_ptr(), 1, Some(&mut e)) };
    let plan = qd_scheduler_plan(scheduler, graph, Some(&mut e));
    let session = qd_session_new(plan, Some(&mut e));
    assert!(!session.is_null(), "{}", text(&e));
    Objects { cpu, graph, scheduler, plan, session }
}

/// Runs a session; whether it could.
fn runs(session: *mut qd_session, input: f32) -> bool {
    let (mut e, x, mut y) = (error(), [input; 6], [0f32; 6]);
    // SAFETY: texts end with NUL, and the arrays have the lengths that are given.
    let status = unsafe {
        match qd_session_set(session, c"x".as_ptr(), x.as_ptr().cast(), 24, Some(&mut e)) {
            QD_STATUS_OK => match qd_session_run(session, Some(&mut e)) {
                QD_STATUS_OK => {
                    qd_session_read(session, c"y".as_ptr(), y.as_mut_ptr().cast(), 24, None, Some(&mut e))
                }
                status => status,
            },
            status => status,
        }
    };
    if status == QD_STATUS_OK {
        assert_eq!(y, [input * input + input; 6]);
    } else {
        assert_eq!(status, QD_STATUS_INVALID_HANDLE, "{}", text(&e));
    }
    status == QD_STATUS_OK
}

#[test]
fn objects_are_freed_in_any_order_and_keep_what_they_need() {
    for seed in 0..CASES {
        let mut rng = Rng::new(seed);
        let o = made();
        let mut left = vec![0, 1, 2, 3, 4];
        while !left.is_empty() {
            let which = left.swap_remove(rng.below(left.len()));
            // Twice: freeing a freed handle does nothing.
            for _ in 0..2 {
                match which {
                    0 => qd_backend_free(o.cpu),
                    1 => qd_graph_free(o.graph),
                    2 => qd_scheduler_free(o.scheduler),
                    3 => qd_plan_free(o.plan),
                    _ => qd_session_free(o.session),
                }
            }
            assert_eq!(runs(o.session, seed as f32), left.contains(&4), "seed {seed}, left {left:?}");
            let again = qd_session_new(o.plan, None);
            assert_eq!(!again.is_null(), left.contains(&3), "seed {seed}, left {left:?}");
            assert_eq!(runs(again, 2.0), left.contains(&3), "seed {seed}, left {left:?}");
            qd_session_free(again);
            let planned = qd_scheduler_plan(o.scheduler, o.graph, None);
            let possible = left.contains(&1) && left.contains(&2);
            assert_eq!(!planned.is_null(), possible, "seed {seed}, left {left:?}");
            qd_plan_free(planned);
        }
    }
}

#[test]
fn threads_share_a_session_and_are_told_when_it_is_busy() {
    let o = made();
    let session = o.session.expose_provenance();
    let counts: Vec<(usize, usize)> = std::thread::scope(|scope| {
        let ask = || {
            let session = std::ptr::with_exposed_provenance_mut::<qd_session>(session);
            let (mut done, mut busy) = (0, 0);
            while done < 20 {
                match qd_session_run(session, None) {
                    QD_STATUS_OK => done += 1,
                    QD_STATUS_BUSY => busy += 1,
                    other => panic!("{other}"),
                }
            }
            (done, busy)
        };
        let x = [1f32; 6];
        // SAFETY: the text ends with NUL, and the array has 24 bytes.
        let set = unsafe { qd_session_set(o.session, c"x".as_ptr(), x.as_ptr().cast(), 24, None) };
        assert_eq!(set, QD_STATUS_OK);
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread")).collect()
    });
    assert!(counts.iter().all(|(done, _)| *done == 20));
    qd_session_free(o.session);
    qd_plan_free(o.plan);
    qd_scheduler_free(o.scheduler);
    qd_graph_free(o.graph);
    qd_backend_free(o.cpu);
}

#[test]
fn messages_are_cut_after_a_whole_character() {
    let mut e = error();
    let long = format!("{}\0", "ä".repeat(QD_ERROR_MESSAGE_BYTES));
    // SAFETY: the text ends with NUL.
    unsafe { qd_error_set(Some(&mut e), 7, long.as_ptr().cast()) };
    assert_eq!((e.code, text(&e)), (7, "ä".repeat((QD_ERROR_MESSAGE_BYTES - 1) / 2)));
    // SAFETY: NULL is allowed.
    unsafe { qd_error_set(Some(&mut e), 8, null()) };
    assert_eq!((e.code, text(&e)), (8, String::new()));
}

#[test]
fn older_and_newer_structures_of_parameters_are_told_apart() {
    let mut e = error();
    let mut params = qd_model_default_params();
    // Only the first two fields: those of an older header.
    params.struct_size = 2 * size_of::<usize>();
    params.offline = 12345;
    // SAFETY: the text ends with NUL, and the parameters have as many bytes as they say.
    let model = unsafe { qd_model_open(c"/nonexistent.gguf".as_ptr(), &params, Some(&mut e)) };
    assert_eq!((model, e.code), (null_mut(), QD_STATUS_NOT_FOUND), "{}", text(&e));
    params.struct_size = size_of::<qd_model_params>() + 8;
    // SAFETY: as above; a size that is too large is refused before anything else is read.
    let model = unsafe { qd_model_open(c"/nonexistent.gguf".as_ptr(), &params, Some(&mut e)) };
    assert_eq!((model, e.code), (null_mut(), QD_STATUS_INVALID_ARGUMENT), "{}", text(&e));
}

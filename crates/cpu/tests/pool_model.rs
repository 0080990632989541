//! The pool model-checked with loom: every interleaving of small runs.
#![cfg(loom)]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::atomic::{AtomicUsize, Ordering};

use quadriga_cpu::internals::pool::{Latches, Pool, Stopped};

fn model(check: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(check);
}

#[test]
fn two_steps_with_a_barrier_between_and_a_second_run() {
    model(|| {
        let pool = Pool::new(2).unwrap();
        for _ in 0..2 {
            let (first, second) = (AtomicUsize::new(0), AtomicUsize::new(0));
            pool.run(&|worker| {
                worker.chunks(2, |i| {
                    first.fetch_add(i + 1, Ordering::Relaxed);
                });
                worker.barrier()?;
                assert_eq!(first.load(Ordering::Relaxed), 3);
                worker.chunks(1, |_| {
                    second.fetch_add(1, Ordering::Relaxed);
                });
                Ok::<(), Stopped>(())
            })
            .unwrap();
            assert_eq!(second.load(Ordering::Relaxed), 1);
        }
    });
}

#[test]
fn a_failure_opens_the_barrier() {
    model(|| {
        let pool = Pool::new(2).unwrap();
        let result = pool.run(&|worker| {
            if worker.index() == 1 {
                return Err(Stopped::Panicked("x".into()));
            }
            worker.barrier()
        });
        assert_eq!(result, Err(Stopped::Panicked("x".into())));
    });
}

#[test]
fn three_threads_pass_two_barriers() {
    model(|| {
        let pool = Pool::new(3).unwrap();
        let sum = AtomicUsize::new(0);
        pool.run(&|worker| {
            sum.fetch_add(1, Ordering::Relaxed);
            worker.barrier()?;
            assert_eq!(sum.load(Ordering::Relaxed), 3);
            worker.barrier()
        })
        .unwrap();
    });
}

#[test]
fn a_latch_opens_for_those_who_wait_and_what_was_written_before_is_visible() {
    model(|| {
        let pool = Pool::new(2).unwrap();
        let latches = Latches::new(1);
        let written = AtomicUsize::new(0);
        pool.run(&|worker| {
            worker.chunks(2, |_| {
                // Relaxed: only the latch orders it.
                written.fetch_add(1, Ordering::Relaxed);
                if latches.arrive(0, 2) {
                    worker.open(&latches, 0);
                }
            });
            worker.wait_until(|| latches.is_open(0))?;
            assert_eq!(written.load(Ordering::Relaxed), 2);
            Ok::<(), Stopped>(())
        })
        .unwrap();
    });
}

#[test]
fn the_last_chunk_resets_the_latches_for_the_next_step() {
    model(|| {
        let pool = Pool::new(2).unwrap();
        let latches = Latches::new(2);
        pool.run(&|worker| {
            for _ in 0..2 {
                worker.chunks(1, |_| worker.open(&latches, 0));
                let mut waited = Ok(());
                worker.chunks(2, |_| {
                    waited = worker.wait_until(|| latches.is_open(0));
                    if latches.arrive(1, 2) {
                        latches.reset();
                    }
                });
                waited?;
                worker.barrier()?;
            }
            Ok::<(), Stopped>(())
        })
        .unwrap();
    });
}

#[test]
fn a_failure_wakes_those_who_wait_for_a_latch() {
    model(|| {
        let pool = Pool::new(2).unwrap();
        let latches = Latches::new(1);
        let result = pool.run(&|worker| {
            if worker.index() == 1 {
                return Err(Stopped::Panicked("x".into()));
            }
            worker.wait_until(|| latches.is_open(0))
        });
        assert_eq!(result, Err(Stopped::Panicked("x".into())));
    });
}

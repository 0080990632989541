//! The pool model-checked with loom: every interleaving of small runs.
#![cfg(loom)]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::atomic::{AtomicUsize, Ordering};

use quadriga_cpu::internals::pool::{Pool, Stopped};

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

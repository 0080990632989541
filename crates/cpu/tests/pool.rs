//! The thread pool: every chunk runs once, barriers order memory, and failures neither deadlock nor leave threads behind.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::atomic::{AtomicUsize, Ordering};

use quadriga_cpu::internals::pool::{Latches, Pool, PoolError, Stopped, Worker};

const COUNTS: [usize; 4] = [1, 2, 3, 8];

fn counters(n: usize) -> Vec<AtomicUsize> {
    (0..n).map(|_| AtomicUsize::new(0)).collect()
}

fn every_chunk_once(worker: &Worker<'_>, steps: &[Vec<AtomicUsize>]) -> Result<(), Stopped> {
    for step in steps {
        worker.chunks(step.len(), |i| {
            step[i].fetch_add(1, Ordering::Relaxed);
        });
        worker.barrier()?;
        assert!(step.iter().all(|c| c.load(Ordering::Relaxed) == 1));
    }
    Ok(())
}

#[test]
fn every_chunk_of_every_step_is_done_once() {
    for threads in COUNTS {
        let pool = Pool::new(threads).unwrap();
        for run in 0..50 {
            let steps: Vec<_> = (0..20).map(|i| counters((i * 7 + run) % 23)).collect();
            pool.run(&|worker| every_chunk_once(worker, &steps)).unwrap();
        }
    }
}

#[test]
fn steps_without_a_barrier_between_them_run_every_chunk_once() {
    for threads in COUNTS {
        let pool = Pool::new(threads).unwrap();
        let steps: Vec<_> = (0..200).map(|i| counters(i % 5)).collect();
        pool.run(&|worker| {
            for step in &steps {
                worker.chunks(step.len(), |i| {
                    step[i].fetch_add(1, Ordering::Relaxed);
                });
            }
            Ok::<(), Stopped>(())
        })
        .unwrap();
        assert!(steps.iter().flatten().all(|c| c.load(Ordering::Relaxed) == 1));
    }
}

#[test]
fn the_count_can_change_between_runs() {
    let pool = Pool::new(1).unwrap();
    for threads in [3, 1, 8, 2, 2, 8, 1] {
        pool.set_threads(threads).unwrap();
        assert_eq!(pool.threads(), threads);
        let seen = counters(threads);
        let steps: Vec<_> = (0..10).map(|_| counters(17)).collect();
        pool.run(&|worker| {
            assert_eq!(worker.threads(), threads);
            seen[worker.index()].fetch_add(1, Ordering::Relaxed);
            every_chunk_once(worker, &steps)
        })
        .unwrap();
        assert!(seen.iter().all(|c| c.load(Ordering::Relaxed) == 1));
    }
    assert!(matches!(pool.set_threads(0), Err(PoolError::Count(0))));
    assert_eq!(pool.threads(), 1);
}

#[test]
fn callers_on_several_threads_share_one_pool() {
    for threads in COUNTS {
        let pool = Pool::new(threads).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..30 {
                        let steps: Vec<_> = (0..5).map(|_| counters(9)).collect();
                        pool.run(&|worker| every_chunk_once(worker, &steps)).unwrap();
                    }
                });
            }
        });
    }
}

#[test]
fn a_panic_becomes_an_error_and_the_pool_stays_usable() {
    for threads in COUNTS {
        let pool = Pool::new(threads).unwrap();
        let result = pool.run(&|worker| {
            worker.chunks(100, |i| assert!(i != 37, "chunk 37 is bad"));
            worker.barrier()?;
            worker.barrier()
        });
        assert!(matches!(result, Err(Stopped::Panicked(text)) if text.contains("chunk 37 is bad")));
        let steps = vec![counters(40)];
        pool.run(&|worker| every_chunk_once(worker, &steps)).unwrap();
    }
}

#[derive(Debug, PartialEq)]
enum Failure {
    Stopped(Stopped),
    Index(usize),
}

impl From<Stopped> for Failure {
    fn from(stopped: Stopped) -> Failure {
        Failure::Stopped(stopped)
    }
}

#[test]
fn the_first_error_is_the_one_returned() {
    for threads in COUNTS {
        let pool = Pool::new(threads).unwrap();
        let result = pool.run(&|worker| {
            worker.try_chunks(50, |i| if i == 20 { Err(Failure::Index(i)) } else { Ok(()) })?;
            worker.barrier()?;
            Ok(())
        });
        assert_eq!(result, Err(Failure::Index(20)));
    }
}

#[test]
fn a_run_inside_a_run_uses_one_thread() {
    let pool = Pool::new(3).unwrap();
    pool.run(&|_| {
        pool.run(&|inner| {
            assert_eq!(inner.threads(), 1);
            every_chunk_once(inner, &[counters(4)])
        })
    })
    .unwrap();
}

/// Counts itself as dropped; the job below must never see that while it borrows it.
struct Borrowed<'a>(&'a AtomicUsize);

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[derive(Debug)]
struct PanicsOnConversion;

impl From<Stopped> for PanicsOnConversion {
    fn from(_: Stopped) -> PanicsOnConversion {
        panic!("From<Stopped> panics")
    }
}

#[test]
fn a_panic_in_the_error_conversion_leaves_no_thread_inside_the_job() {
    let pool = Pool::new(2).unwrap();
    let (dropped, used_after_drop) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let borrowed = Borrowed(&dropped);
        let _ = pool.run::<PanicsOnConversion>(&|worker| {
            if worker.index() == 0 {
                panic!("job")
            }
            for _ in 0..50 {
                std::thread::sleep(std::time::Duration::from_millis(1));
                used_after_drop.fetch_add(borrowed.0.load(Ordering::SeqCst), Ordering::SeqCst);
            }
            Ok(())
        });
    }));
    assert!(caught.is_err(), "the panic of From<Stopped> reaches the caller");
    // A thread that was still inside the job would count its uses until here.
    std::thread::sleep(std::time::Duration::from_millis(80));
    assert_eq!(used_after_drop.load(Ordering::SeqCst), 0);
    pool.run(&|_| Ok::<(), Stopped>(())).unwrap();
}

#[derive(Debug)]
struct PanicsOnDrop;

impl Drop for PanicsOnDrop {
    fn drop(&mut self) {
        panic!("the drop panics")
    }
}

impl From<Stopped> for PanicsOnDrop {
    fn from(_: Stopped) -> PanicsOnDrop {
        PanicsOnDrop
    }
}

/// Runs `body` on a thread of its own; panics if it takes longer than a few seconds.
fn finishes(body: impl FnOnce() + Send + 'static) {
    let (done, finished) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        body();
        done.send(()).unwrap();
    });
    finished.recv_timeout(std::time::Duration::from_secs(20)).expect("the pool hangs");
}

#[test]
fn payloads_and_errors_whose_drop_panics_end_the_run() {
    for failing in 0..2 {
        finishes(move || {
            let pool = Pool::new(2).unwrap();
            let result = pool.run::<Stopped>(&|worker| {
                if worker.index() == failing {
                    std::panic::panic_any(PanicsOnDrop)
                }
                Ok(())
            });
            assert!(matches!(result, Err(Stopped::Panicked(_))));
            // Both workers fail: the error of the second is dropped inside the pool.
            let result = pool.run::<PanicsOnDrop>(&|_| Err(PanicsOnDrop));
            std::mem::forget(result);
            pool.run(&|_| Ok::<(), Stopped>(())).unwrap();
        });
    }
}

#[test]
fn a_job_can_read_the_number_of_threads_but_not_change_it() {
    finishes(|| {
        let pool = Pool::new(2).unwrap();
        pool.run(&|_| {
            assert_eq!(pool.threads(), 2);
            assert!(matches!(pool.set_threads(3), Err(PoolError::InsideJob)));
            Ok::<(), Stopped>(())
        })
        .unwrap();
        pool.set_threads(3).unwrap();
        assert_eq!(pool.threads(), 3);
    });
}

thread_local! {
    /// The pool that [`UsesThePool`] uses.
    static POOL: std::cell::Cell<Option<&'static Pool>> = const { std::cell::Cell::new(None) };
}

#[derive(Debug)]
struct UsesThePool(usize);

impl From<Stopped> for UsesThePool {
    fn from(_: Stopped) -> UsesThePool {
        let pool = POOL.get().unwrap();
        let count = AtomicUsize::new(0);
        let counted = pool.run(&|_| {
            count.fetch_add(1, Ordering::Relaxed);
            Ok::<(), Stopped>(())
        });
        counted.unwrap();
        pool.set_threads(pool.threads() + 1).unwrap();
        UsesThePool(count.into_inner())
    }
}

#[test]
fn an_error_conversion_can_use_the_pool() {
    finishes(|| {
        let pool: &'static Pool = Box::leak(Box::new(Pool::new(2).unwrap()));
        POOL.set(Some(pool));
        let failed = pool.run::<UsesThePool>(&|_| panic!("job")).unwrap_err();
        assert_eq!((failed.0, pool.threads()), (2, 3));
    });
}

#[test]
fn chunks_that_wait_for_latches_see_what_was_written_before_they_opened() {
    const JOBS: usize = 7;
    for threads in COUNTS {
        let pool = Pool::new(threads).unwrap();
        let (latches, chunks) = (Latches::new(JOBS + 1), 3 * threads);
        for run in 0..100 {
            let written = counters(JOBS * chunks);
            let sums = counters(JOBS);
            pool.run(&|worker| {
                worker.chunks(JOBS * chunks, |unit| {
                    written[unit].store(unit + run, Ordering::Relaxed);
                    if latches.arrive(unit % JOBS, chunks) {
                        worker.open(&latches, unit % JOBS);
                    }
                });
                worker.try_chunks(JOBS, |job| {
                    worker.wait_until(|| latches.is_open(job))?;
                    let of_job = (0..chunks).map(|chunk| chunk * JOBS + job);
                    let sum = of_job.map(|unit| written[unit].load(Ordering::Relaxed)).sum();
                    sums[job].store(sum, Ordering::Relaxed);
                    if latches.arrive(JOBS, JOBS) {
                        latches.reset();
                    }
                    Ok::<(), Stopped>(())
                })
            })
            .unwrap();
            for (job, sum) in sums.iter().enumerate() {
                let right: usize = (0..chunks).map(|chunk| chunk * JOBS + job + run).sum();
                assert_eq!(sum.load(Ordering::Relaxed), right, "{threads} threads, run {run}, job {job}");
            }
        }
    }
}

#[test]
fn a_panic_or_an_error_wakes_workers_that_wait_for_a_latch() {
    for threads in [2, 3, 8] {
        let pool = Pool::new(threads).unwrap();
        let latches = Latches::new(1);
        for run in 0..20 {
            let result = pool.run(&|worker| {
                if worker.index() == run % threads {
                    assert!(run % 2 == 0, "no latch");
                    return Err(Stopped::Panicked("no latch".into()));
                }
                worker.wait_until(|| latches.is_open(0))
            });
            let Err(Stopped::Panicked(message)) = result else { panic!("{result:?}") };
            assert!(message.contains("no latch"), "{message}");
        }
    }
    let alone = Pool::new(1).unwrap();
    let latches = Latches::new(1);
    assert!(
        alone.run(&|worker| worker.wait_until(|| latches.is_open(0))).is_err(),
        "it would wait for itself"
    );
}

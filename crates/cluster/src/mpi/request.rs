//! Operations on their way to the communication thread, and their results on the way back.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::error::ClusterError;
use crate::operation::{Operation, Reduction};
use crate::watch::lock;

/// An operation whose memory is borrowed until it is [done](Done): the caller waits for that. A message is a copy: nobody waits
/// until it has arrived.
pub(super) enum RawOperation {
    AllReduce { values: *mut f32, count: c_int, reduction: Reduction },
    AllGather { part: *const u8, count: c_int, lengths: Vec<c_int>, starts: Vec<c_int>, whole: *mut u8 },
    ReduceScatter { values: *const f32, lengths: Vec<c_int>, part: *mut f32 },
    Broadcast { bytes: *mut u8, count: c_int, root: c_int },
    Send { bytes: Vec<u8>, count: c_int, to: c_int, tag: c_int },
    Receive { bytes: *mut u8, count: c_int, from: c_int, tag: c_int },
}

// SAFETY: the memory is borrowed by the thread that waits for the operation, which does not touch it meanwhile.
unsafe impl Send for RawOperation {}

impl RawOperation {
    /// The operation without its lifetime. The caller keeps the memory borrowed until the operation is done.
    pub(super) fn new(operation: Operation<'_>) -> Result<RawOperation, ClusterError> {
        let name = operation.name();
        let int = |number: usize| {
            let reason = || format!("{number} elements at once, of {} at most", c_int::MAX);
            c_int::try_from(number).map_err(|_| ClusterError::Invalid { operation: name, reason: reason() })
        };
        let ints =
            |numbers: &[usize]| numbers.iter().map(|number| int(*number)).collect::<Result<Vec<c_int>, _>>();
        Ok(match operation {
            Operation::AllReduce { values, reduction } => {
                RawOperation::AllReduce { values: values.as_mut_ptr(), count: int(values.len())?, reduction }
            }
            Operation::AllGather { part, lengths, whole } => {
                let starts: Vec<usize> =
                    (0..lengths.len()).map(|rank| lengths.iter().take(rank).sum()).collect();
                RawOperation::AllGather {
                    part: part.as_ptr(),
                    count: int(part.len())?,
                    lengths: ints(lengths)?,
                    starts: ints(&starts)?,
                    whole: whole.as_mut_ptr(),
                }
            }
            Operation::ReduceScatter { values, lengths, part } => RawOperation::ReduceScatter {
                values: values.as_ptr(),
                lengths: ints(lengths)?,
                part: part.as_mut_ptr(),
            },
            Operation::Broadcast { bytes, root } => RawOperation::Broadcast {
                bytes: bytes.as_mut_ptr(),
                count: int(bytes.len())?,
                root: int(root)?,
            },
            Operation::Send { bytes, to, tag } => RawOperation::Send {
                bytes: bytes.to_vec(),
                count: int(bytes.len())?,
                to: int(to)?,
                tag: c_int::from(tag),
            },
            Operation::Receive { bytes, from, tag } => RawOperation::Receive {
                bytes: bytes.as_mut_ptr(),
                count: int(bytes.len())?,
                from: int(from)?,
                tag: c_int::from(tag),
            },
        })
    }

    /// Whether nobody waits for it.
    pub(super) fn is_send(&self) -> bool {
        matches!(self, RawOperation::Send { .. })
    }

    /// Whether all ranks of the communicator call it.
    pub(super) fn is_collective(&self) -> bool {
        !matches!(self, RawOperation::Send { .. } | RawOperation::Receive { .. })
    }
}

/// The result of a command, when it has one.
#[derive(Default)]
pub(super) struct Done {
    done: AtomicBool,
    result: Mutex<Option<Result<(), ClusterError>>>,
    changed: Condvar,
}

impl Done {
    pub(super) fn set(&self, result: Result<(), ClusterError>) {
        lock(&self.result).get_or_insert(result);
        self.done.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    /// Waits for the result, but no longer than a time.
    pub(super) fn wait_for(&self, limit: Duration) -> Option<Result<(), ClusterError>> {
        let empty = |result: &mut Option<Result<(), ClusterError>>| result.is_none();
        let waited = self.changed.wait_timeout_while(lock(&self.result), limit, empty);
        waited.unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    /// Waits for the result as long as it takes: it polls for a few microseconds, then sleeps.
    pub(super) fn wait(&self) -> Result<(), ClusterError> {
        for _ in 0..200 {
            if self.done.load(Ordering::Acquire) {
                break;
            }
            std::hint::spin_loop();
        }
        let mut result = lock(&self.result);
        loop {
            if let Some(result) = &*result {
                return result.clone();
            }
            result = self.changed.wait(result).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

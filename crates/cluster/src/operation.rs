//! What ranks do together, as data.

use crate::error::ClusterError;

/// How the values of ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// The sum, in the order of ranks where the communicator says so.
    Sum,
    /// The largest.
    Max,
}

/// An operation of a [`Communicator`](crate::Communicator), with the memory that it reads and writes. All ranks call the same
/// collectives in the same order, with the same lengths; sends and receives match in pairs.
#[derive(Debug)]
pub enum Operation<'a> {
    /// Each rank gets the reduction of all ranks' values.
    AllReduce {
        /// This rank's values, then the result.
        values: &'a mut [f32],
        /// How values become one.
        reduction: Reduction,
    },
    /// Each rank gets the parts of all ranks, one after the other.
    AllGather {
        /// This rank's part.
        part: &'a [u8],
        /// The bytes of each rank's part.
        lengths: &'a [usize],
        /// All parts.
        whole: &'a mut [u8],
    },
    /// Each rank gets its part of the sum of all ranks' values.
    ReduceScatter {
        /// This rank's values.
        values: &'a [f32],
        /// The values of each rank's part.
        lengths: &'a [usize],
        /// This rank's part of the sum.
        part: &'a mut [f32],
    },
    /// Each rank gets the bytes of one.
    Broadcast {
        /// The bytes: read on the root, written on others.
        bytes: &'a mut [u8],
        /// The rank that has the bytes.
        root: usize,
    },
    /// Sends bytes to a rank that receives as many with the same tag. They are copied: a send does not wait for its receiver, which
    /// may be computing something else.
    Send {
        /// The bytes.
        bytes: &'a [u8],
        /// The receiver.
        to: usize,
        /// Distinguishes messages between the same two ranks.
        tag: u16,
    },
    /// Receives bytes. Messages of one rank arrive in the order of its sends.
    Receive {
        /// Where they are written.
        bytes: &'a mut [u8],
        /// The sender.
        from: usize,
        /// The sender's tag.
        tag: u16,
    },
}

impl Operation<'_> {
    /// The operation's name.
    pub fn name(&self) -> &'static str {
        match self {
            Operation::AllReduce { .. } => "all-reduce",
            Operation::AllGather { .. } => "all-gather",
            Operation::ReduceScatter { .. } => "reduce-scatter",
            Operation::Broadcast { .. } => "broadcast",
            Operation::Send { .. } => "send",
            Operation::Receive { .. } => "receive",
        }
    }

    /// An error if ranks or lengths cannot be right.
    pub(crate) fn check(&self, rank: usize, size: usize) -> Result<(), ClusterError> {
        let invalid = |reason: String| Err(ClusterError::Invalid { operation: self.name(), reason });
        let peer = |peer: usize| {
            if peer >= size {
                return invalid(format!("there is no rank {peer} of {size}"));
            }
            if peer == rank {
                return invalid(format!("rank {rank} and its peer are the same"));
            }
            Ok(())
        };
        let parts = |lengths: &[usize], part: usize, whole: usize| {
            if lengths.len() != size {
                return invalid(format!("{} lengths for {size} ranks", lengths.len()));
            }
            if lengths.iter().sum::<usize>() != whole {
                return invalid(format!("parts of {lengths:?} are not {whole}"));
            }
            match lengths.get(rank) {
                Some(length) if *length == part => Ok(()),
                length => invalid(format!("a part of {part} on rank {rank}, instead of {length:?}")),
            }
        };
        match self {
            Operation::AllReduce { .. } => Ok(()),
            Operation::AllGather { part, lengths, whole } => parts(lengths, part.len(), whole.len()),
            Operation::ReduceScatter { values, lengths, part } => parts(lengths, part.len(), values.len()),
            Operation::Broadcast { root, .. } if *root < size => Ok(()),
            Operation::Broadcast { root, .. } => invalid(format!("there is no rank {root} of {size}")),
            Operation::Send { to, .. } => peer(*to),
            Operation::Receive { from, .. } => peer(*from),
        }
    }

    /// What a rank alone does: results are its own values.
    pub(crate) fn alone(self) {
        match self {
            Operation::AllGather { part, whole, .. } => whole.copy_from_slice(part),
            Operation::ReduceScatter { values, part, .. } => part.copy_from_slice(values),
            _ => {}
        }
    }
}

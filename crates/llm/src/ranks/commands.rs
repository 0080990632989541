//! What the first rank tells the others to compute, as messages.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use quadriga_cluster::{ClusterError, Communicator, Operation, Wait};

use crate::{Error, Result};

/// The way of messages from the first rank to all others.
pub(crate) struct CommandChannel {
    communicator: Arc<dyn Communicator>,
    /// Stages of a pipeline take messages when they come to them, by this tag. Without, all ranks take each one together.
    tag: Option<u16>,
    /// Whether the next message of the first rank comes within the limit of a step.
    regular: AtomicBool,
}

/// Bytes of the first part of a message: a decode step needs no second one.
const FIRST: usize = 64;
/// What each message begins with, before its length. Ranks that do not follow, but exchange something else, are told apart by it: the
/// bytes of that have no meaning as a length.
const MARK: [u8; 4] = *b"QDRC";

impl CommandChannel {
    pub(super) fn new(communicator: Arc<dyn Communicator>, tag: Option<u16>) -> CommandChannel {
        CommandChannel { communicator, tag, regular: AtomicBool::new(false) }
    }

    /// On the first rank: sends a message to all others.
    pub(crate) fn send(&self, mut message: Vec<u8>) -> Result<()> {
        Ok(self.exchange(&mut message)?)
    }

    /// On other ranks: waits for the next message of the first.
    pub(crate) fn next(&self) -> Result<Vec<u8>> {
        let mut message = Vec::new();
        self.exchange(&mut message)?;
        Ok(message)
    }

    /// On other ranks: whether the first sends messages [regularly](CommandChannel::interval) from now on. Until it says so, it may have
    /// nothing to compute for hours.
    pub(crate) fn expect_regularly(&self, regular: bool) {
        self.regular.store(regular, Ordering::Relaxed);
    }

    /// How often the first rank sends a message where it sends them regularly; `None` where steps have no limit.
    pub(crate) fn interval(&self) -> Option<Duration> {
        self.communicator.limits().operation.map(|limit| limit / 8)
    }

    /// That a message cannot be read.
    pub(crate) fn unreadable() -> Error {
        ClusterError::Disagreement("a message of rank 0 cannot be read; is it another version?".into()).into()
    }

    /// A message's length and first bytes, then the rest, if there is any.
    fn exchange(&self, message: &mut Vec<u8>) -> std::result::Result<(), ClusterError> {
        let mut first = [0u8; FIRST];
        let length = u32::try_from(message.len()).map_err(|_| ClusterError::Invalid {
            operation: "command",
            reason: format!("{} bytes are too many for a message to other ranks", message.len()),
        })?;
        let head = MARK.into_iter().chain(length.to_le_bytes()).chain(message.iter().copied());
        first.iter_mut().zip(head).for_each(|(to, from)| *to = from);
        let limit = self.communicator.limits().operation.filter(|_| self.regular.load(Ordering::Relaxed));
        let wait = Wait { what: "waiting for a command of rank 0", limit };
        self.pass(&mut first, |ranks, operation| ranks.run_within(operation, wait))?;
        let (head, start) = first.split_at(8);
        let (mark, length) = head.split_at(MARK.len());
        if mark != MARK {
            return Err(self.refuse());
        }
        let length = length.try_into().map_or(0, u32::from_le_bytes) as usize;
        if self.communicator.rank() != 0 {
            message.clear();
            message.extend(start.iter().take(length));
            message.resize(length, 0);
        }
        match message.get_mut(start.len()..) {
            Some(rest) if !rest.is_empty() => self.pass(rest, |ranks, operation| ranks.run(operation)),
            _ => Ok(()),
        }
    }

    /// That another rank does not send what this one waits for: an error that ends all of them.
    fn refuse(&self) -> ClusterError {
        let error = ClusterError::Disagreement(format!(
            "rank {} waits for a command of rank 0, which exchanges something else",
            self.communicator.rank()
        ));
        self.communicator.fail(&error.to_string());
        error
    }

    /// Passes bytes of the first rank on to all others, which wait for them with `receive`.
    fn pass(
        &self,
        bytes: &mut [u8],
        receive: impl Fn(&dyn Communicator, Operation<'_>) -> std::result::Result<(), ClusterError>,
    ) -> std::result::Result<(), ClusterError> {
        match (self.communicator.rank(), self.tag) {
            (0, None) => self.communicator.broadcast(bytes, 0),
            (0, Some(tag)) => (1..self.communicator.size())
                .try_for_each(|to| self.communicator.run(Operation::Send { bytes, to, tag })),
            (_, None) => receive(&*self.communicator, Operation::Broadcast { bytes, root: 0 }),
            (_, Some(tag)) => receive(&*self.communicator, Operation::Receive { bytes, from: 0, tag }),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use quadriga_cluster::{Limits, in_process};

    use super::*;

    #[test]
    fn messages_of_any_length_reach_all_ranks_in_order() {
        let messages: Vec<Vec<u8>> = [0, 1, 55, 56, 57, 5000].map(|length| vec![length as u8; length]).into();
        for tag in [None, Some(9)] {
            let channels = in_process(3, Limits::default()).into_iter();
            let mut channels = channels.map(|rank| CommandChannel::new(Arc::new(rank), tag));
            let first = channels.next().unwrap();
            std::thread::scope(|scope| {
                for other in channels {
                    let messages = &messages;
                    scope.spawn(move || {
                        messages.iter().for_each(|message| assert_eq!(other.next().unwrap(), *message));
                    });
                }
                messages.iter().for_each(|message| first.send(message.clone()).unwrap());
            });
        }
    }

    /// While the first rank may have nothing to compute, it is waited for; once it sends regularly, no longer than for a step.
    #[test]
    fn a_first_rank_that_stops_to_send_regularly_is_named() {
        for tag in [None, Some(9)] {
            let limits = Limits { operation: Some(Duration::from_millis(1)), ..Limits::default() };
            let channels: Vec<CommandChannel> = in_process(2, limits)
                .into_iter()
                .map(|rank| CommandChannel::new(Arc::new(rank), tag))
                .collect();
            assert_eq!(channels[0].interval(), Some(limits.operation.unwrap() / 8));
            channels[1].expect_regularly(true);
            let error = channels[1].next().unwrap_err().to_string();
            assert!(error.contains("waiting for a command of rank 0 did not end"), "{error}");
            assert!(error.contains("rank 0 did not take part"), "{error}");
        }
    }

    /// A rank that begins to divide a model, while the others follow the engine of one.
    #[test]
    fn what_is_no_command_is_an_error_and_no_length() {
        for tag in [None, Some(9)] {
            let mut ranks = in_process(2, Limits::default()).into_iter().map(Arc::new);
            let (first, other) = (ranks.next().unwrap(), ranks.next().unwrap());
            let channel = CommandChannel::new(other, tag);
            let error = std::thread::scope(|scope| {
                let waits = scope.spawn(move || channel.next().unwrap_err().to_string());
                let mut bytes = [0xff; FIRST];
                let sent = match tag {
                    None => first.broadcast(&mut bytes, 0),
                    Some(tag) => first.run(Operation::Send { bytes: &bytes, to: 1, tag }),
                };
                // The other rank may have ended all of them before this one is done.
                drop(sent);
                waits.join().unwrap()
            });
            assert!(error.contains("rank 1 waits for a command of rank 0"), "{error}");
            assert!(first.failure().is_some());
        }
    }
}

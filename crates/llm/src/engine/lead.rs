//! What the first rank tells the others to compute: one message for each call of its engine.

use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;

use quadriga_cluster::{ClusterError, Communicator};

use super::BatchToken;
use crate::{Error, Result};

/// A call of the engine that every rank makes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum RankCommand {
    Extend(Vec<BatchToken>),
    Truncate { sequence: usize, len: usize },
    End,
}

/// Bytes of the first part of a message: a decode step needs no second one.
const FIRST: usize = 64;

const EXTEND: u8 = 1;
const TRUNCATE: u8 = 2;
/// The message of an engine that ends.
pub(crate) const END: u8 = 3;

impl RankCommand {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            RankCommand::Extend(tokens) => {
                bytes.push(EXTEND);
                for BatchToken { sequence, token, output } in tokens {
                    bytes.extend((*sequence as u32).to_le_bytes());
                    bytes.extend(token.to_le_bytes());
                    bytes.push(u8::from(*output));
                }
            }
            RankCommand::Truncate { sequence, len } => {
                bytes.push(TRUNCATE);
                bytes.extend((*sequence as u64).to_le_bytes());
                bytes.extend((*len as u64).to_le_bytes());
            }
            RankCommand::End => bytes.push(END),
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<RankCommand> {
        let (kind, rest) = bytes.split_first()?;
        let word = |bytes: &[u8]| Some(u64::from_le_bytes(bytes.try_into().ok()?) as usize);
        Some(match *kind {
            EXTEND => {
                let token = |bytes: &[u8]| {
                    let half =
                        |range: Range<usize>| Some(u32::from_le_bytes(bytes.get(range)?.try_into().ok()?));
                    let (sequence, token) = (half(0..4)? as usize, half(4..8)?);
                    Some(BatchToken { sequence, token, output: *bytes.get(8)? != 0 })
                };
                RankCommand::Extend(rest.chunks(9).map(token).collect::<Option<_>>()?)
            }
            TRUNCATE => RankCommand::Truncate { sequence: word(rest.get(..8)?)?, len: word(rest.get(8..)?)? },
            END => RankCommand::End,
            _ => return None,
        })
    }
}

/// The first rank's side. The others are told when it is dropped, and those of this process have ended then.
pub(crate) struct Leader {
    communicator: Arc<dyn Communicator>,
    followers: Vec<JoinHandle<()>>,
}

impl Leader {
    pub(crate) fn new(communicator: &Arc<dyn Communicator>, followers: Vec<JoinHandle<()>>) -> Leader {
        Leader { communicator: Arc::clone(communicator), followers }
    }

    pub(crate) fn tell(&self, command: &RankCommand) -> Result<()> {
        self.send(command.encode())
    }

    /// Sends a message that the others get from [`next_message`].
    pub(crate) fn send(&self, mut message: Vec<u8>) -> Result<()> {
        Ok(exchange(&*self.communicator, &mut message)?)
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        // Where this fails, the others have ended, or end with the same error.
        drop(self.tell(&RankCommand::End));
        for follower in self.followers.drain(..) {
            // One that panicked has ended, too.
            drop(follower.join());
        }
    }
}

/// What the first rank tells next.
pub(crate) fn next_command(communicator: &dyn Communicator) -> Result<RankCommand> {
    RankCommand::decode(&next_message(communicator)?).ok_or_else(unreadable)
}

/// The next message of the first rank; that it has ended is [`END`] alone.
pub(crate) fn next_message(communicator: &dyn Communicator) -> Result<Vec<u8>> {
    let mut message = Vec::new();
    exchange(communicator, &mut message)?;
    Ok(message)
}

/// That a message cannot be read.
pub(crate) fn unreadable() -> Error {
    ClusterError::Disagreement("a message of rank 0 cannot be read; is it another version?".into()).into()
}

/// A message of the first rank to all: its length and first bytes, then the rest, if there is any.
fn exchange(communicator: &dyn Communicator, message: &mut Vec<u8>) -> std::result::Result<(), ClusterError> {
    let mut first = [0u8; FIRST];
    let head = (message.len() as u64).to_le_bytes().into_iter().chain(message.iter().copied());
    first.iter_mut().zip(head).for_each(|(to, from)| *to = from);
    communicator.broadcast(&mut first, 0)?;
    let (length, start) = first.split_at(8);
    let length = length.try_into().map_or(0, u64::from_le_bytes) as usize;
    if communicator.rank() != 0 {
        message.clear();
        message.extend(start.iter().take(length));
        message.resize(length, 0);
    }
    match message.get_mut(start.len()..) {
        Some(rest) if !rest.is_empty() => communicator.broadcast(rest, 0),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use quadriga_cluster::{Limits, in_process};

    use super::*;

    #[test]
    fn every_command_arrives_as_it_was_sent() {
        let token =
            |i: u32| BatchToken { sequence: i as usize % 3, token: i * 7, output: i.is_multiple_of(2) };
        let commands = [
            RankCommand::Extend(vec![token(1)]),
            RankCommand::Extend((0..500).map(token).collect()),
            RankCommand::Extend(Vec::new()),
            RankCommand::Truncate { sequence: 2, len: 1 << 40 },
        ];
        let mut ranks = in_process(2, Limits::default()).into_iter();
        let (first, second) = (ranks.next().unwrap(), ranks.next().unwrap());
        let received = std::thread::spawn(move || {
            let mut received = Vec::new();
            while received.last() != Some(&RankCommand::End) {
                received.push(next_command(&second).unwrap());
            }
            received
        });
        let first: Arc<dyn Communicator> = Arc::new(first);
        let leader = Leader::new(&first, Vec::new());
        commands.iter().for_each(|command| leader.tell(command).unwrap());
        drop(leader);
        let received = received.join().unwrap();
        assert_eq!(received[..4], commands);
        assert_eq!(received[4], RankCommand::End);
    }
}

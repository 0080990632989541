//! What the first rank tells the others to compute: one message for each call of its engine.

use std::ops::Range;
use std::thread::JoinHandle;
use std::time::Duration;

use super::BatchToken;
use crate::ranks::CommandChannel;
use crate::{RankShare, Result};

/// A call of the engine that every rank makes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum RankCommand {
    Extend(Vec<BatchToken>),
    Truncate {
        sequence: usize,
        len: usize,
    },
    /// Keeps a checkpoint of a sequence.
    Checkpoint {
        sequence: usize,
    },
    /// Sends this rank's part of a sequence's KV cache to the first.
    Save {
        sequence: usize,
    },
    /// Receives this rank's part of a sequence's KV cache.
    Load {
        sequence: usize,
    },
    End,
}

const EXTEND: u8 = 1;
const TRUNCATE: u8 = 2;
/// The message of an engine that ends.
pub(crate) const END: u8 = 3;
const SAVE: u8 = 4;
const LOAD: u8 = 5;
const CHECKPOINT: u8 = 6;

impl RankCommand {
    fn encode(&self) -> Vec<u8> {
        let of_sequence = |kind: u8, sequence: usize| -> Vec<u8> {
            std::iter::once(kind).chain((sequence as u64).to_le_bytes()).collect()
        };
        match self {
            RankCommand::Extend(tokens) => {
                let mut bytes = vec![EXTEND];
                for BatchToken { sequence, token, output } in tokens {
                    bytes.extend((*sequence as u32).to_le_bytes());
                    bytes.extend(token.to_le_bytes());
                    bytes.push(u8::from(*output));
                }
                bytes
            }
            RankCommand::Truncate { sequence, len } => {
                let mut bytes = of_sequence(TRUNCATE, *sequence);
                bytes.extend((*len as u64).to_le_bytes());
                bytes
            }
            RankCommand::Checkpoint { sequence } => of_sequence(CHECKPOINT, *sequence),
            RankCommand::Save { sequence } => of_sequence(SAVE, *sequence),
            RankCommand::Load { sequence } => of_sequence(LOAD, *sequence),
            RankCommand::End => vec![END],
        }
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
            CHECKPOINT => RankCommand::Checkpoint { sequence: word(rest)? },
            SAVE => RankCommand::Save { sequence: word(rest)? },
            LOAD => RankCommand::Load { sequence: word(rest)? },
            END => RankCommand::End,
            _ => return None,
        })
    }
}

/// The first rank's side. The others are told when it is dropped, and those of this process have ended then.
pub(crate) struct Leader {
    commands: CommandChannel,
    followers: Vec<JoinHandle<()>>,
}

impl Leader {
    pub(crate) fn new(ranks: &RankShare) -> Leader {
        Leader { commands: ranks.commands(), followers: ranks.take_followers() }
    }

    pub(crate) fn tell(&self, command: &RankCommand) -> Result<()> {
        self.send(command.encode())
    }

    /// Sends a message that the others get from [`CommandChannel::next`].
    pub(crate) fn send(&self, message: Vec<u8>) -> Result<()> {
        self.commands.send(message)
    }

    /// As [`CommandChannel::interval`].
    pub(crate) fn interval(&self) -> Option<Duration> {
        self.commands.interval()
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
pub(crate) fn next_command(commands: &CommandChannel) -> Result<RankCommand> {
    RankCommand::decode(&commands.next()?).ok_or_else(CommandChannel::unreadable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_read_as_it_was_written() {
        let token =
            |i: u32| BatchToken { sequence: i as usize % 3, token: i * 7, output: i.is_multiple_of(2) };
        let commands = [
            RankCommand::Extend(vec![token(1)]),
            RankCommand::Extend((0..500).map(token).collect()),
            RankCommand::Extend(Vec::new()),
            RankCommand::Truncate { sequence: 2, len: 1 << 40 },
            RankCommand::Checkpoint { sequence: 4 },
            RankCommand::Save { sequence: 3 },
            RankCommand::Load { sequence: 1 },
            RankCommand::End,
        ];
        for command in commands {
            assert_eq!(RankCommand::decode(&command.encode()), Some(command));
        }
    }
}

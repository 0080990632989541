//! Saving and restoring the KV cache of a sequence on several ranks: each has a part of it, which the first writes and reads.

use std::io::{Read, Write};

use super::Engine;
use super::lead::RankCommand;
use crate::state_error::StateError;
use crate::{Error, Result};

impl Engine {
    /// The parts that other ranks have of a sequence's KV cache.
    pub(super) fn collect_states(&mut self, sequence: usize) -> Result<Vec<Vec<u8>>> {
        let Some(ranks) = self.model.ranks().cloned() else { return Ok(Vec::new()) };
        self.tell(|| RankCommand::Save { sequence })?;
        (1..ranks.grid().ranks()).map(|from| ranks.receive_saved(from)).collect()
    }

    /// On other ranks: sends this rank's part to the first.
    pub(super) fn send_state(&mut self, sequence: usize) -> Result<()> {
        let mut saved = Vec::new();
        let result = self.save_own_state(sequence, &mut saved);
        let Some(ranks) = self.model.ranks() else { return result };
        ranks.together(result.and_then(|()| ranks.send_saved(&saved, 0)))
    }

    /// Gives other ranks their parts of a sequence's KV cache. After an error the sequence is empty on all of them.
    pub(super) fn distribute_states(&mut self, sequence: usize, reader: &mut dyn Read) -> Result<()> {
        let Some(ranks) = self.model.ranks().cloned() else { return Ok(()) };
        let others = 1..ranks.grid().ranks();
        let read = read_states(others.len(), reader).and_then(|parts| {
            self.tell(|| RankCommand::Load { sequence })?;
            others.clone().zip(&parts).try_for_each(|(to, part)| ranks.send_saved(part, to))?;
            let answers: Vec<Vec<u8>> =
                others.clone().map(|from| ranks.receive_saved(from)).collect::<Result<_>>()?;
            // Every rank has answered before one of them counts.
            match answers.into_iter().find(|answer| !answer.is_empty()) {
                None => Ok(()),
                Some(_) => Err(StateError::Damaged { what: "the part of a rank cannot be read" }.into()),
            }
        });
        if read.is_err() {
            self.truncate(sequence, 0);
        }
        read
    }

    /// On other ranks: restores this rank's part, and answers why it could not.
    pub(super) fn receive_state(&mut self, sequence: usize) -> Result<()> {
        let Some(ranks) = self.model.ranks().cloned() else { return Ok(()) };
        let saved = ranks.receive_saved(0)?;
        let mut rest = saved.as_slice();
        let answer = match self.load_own_state(sequence, &mut rest) {
            Ok(()) => String::new(),
            Err(error @ Error::SavedState { .. }) => error.to_string(),
            Err(error) => return ranks.together(Err(error)),
        };
        ranks.send_saved(answer.as_bytes(), 0)
    }
}

/// Writes the parts of other ranks, each after its length.
pub(super) fn write_states(parts: &[Vec<u8>], writer: &mut dyn Write) -> Result<()> {
    for part in parts {
        let length = (part.len() as u64).to_le_bytes();
        writer.write_all(&length).and_then(|()| writer.write_all(part)).map_err(StateError::write)?;
    }
    Ok(writer.flush().map_err(StateError::write)?)
}

/// Reads so many parts.
fn read_states(count: usize, reader: &mut dyn Read) -> Result<Vec<Vec<u8>>> {
    let mut parts = Vec::new();
    for _ in 0..count {
        let (mut length, mut part) = ([0; 8], Vec::new());
        reader.read_exact(&mut length).map_err(StateError::read)?;
        let length = u64::from_le_bytes(length);
        // The length may be anything: no more is allocated than there is.
        let read = Read::take(&mut *reader, length).read_to_end(&mut part).map_err(StateError::read)?;
        if read as u64 != length {
            return Err(StateError::Truncated.into());
        }
        parts.push(part);
    }
    Ok(parts)
}

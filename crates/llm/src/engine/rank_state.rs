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

    /// Gives other ranks their parts of a sequence's KV cache. This one has `window_rows` of it in layers with a window. After an error the
    /// sequence is empty on all of them.
    pub(super) fn distribute_states(
        &mut self,
        sequence: usize,
        window_rows: usize,
        reader: &mut dyn Read,
    ) -> Result<()> {
        let Some(ranks) = self.model.ranks().cloned() else { return Ok(()) };
        let others = 1..ranks.grid().ranks();
        let read = read_states(others.len(), reader).and_then(|parts| {
            self.tell(|| RankCommand::Load { sequence })?;
            others.clone().zip(&parts).try_for_each(|(to, part)| ranks.send_saved(part, to))?;
            let answers: Vec<Vec<u8>> =
                others.clone().map(|from| ranks.receive_saved(from)).collect::<Result<_>>()?;
            // Every rank has answered before one of them counts.
            let loaded: Option<Vec<usize>> = answers.iter().map(|answer| rows_of_answer(answer)).collect();
            let rows = loaded.iter().flatten().copied().fold(window_rows, usize::min);
            let message = (rows as u64).to_le_bytes();
            others.clone().try_for_each(|to| ranks.send_saved(&message, to))?;
            self.windows.replace(sequence, self.len(sequence), rows);
            match loaded {
                Some(_) => Ok(()),
                None => Err(StateError::Damaged { what: "the part of a rank cannot be read" }.into()),
            }
        });
        if read.is_err() {
            self.truncate(sequence, 0);
        }
        read
    }

    /// On other ranks: restores this rank's part, and answers how many rows layers with a window have, or why there are none. All go on
    /// with the fewest: a stage without such layers forgets as the others do.
    pub(super) fn receive_state(&mut self, sequence: usize) -> Result<()> {
        let Some(ranks) = self.model.ranks().cloned() else { return Ok(()) };
        let saved = ranks.receive_saved(0)?;
        let mut rest = saved.as_slice();
        let answer = match self.load_own_state(sequence, &mut rest) {
            Ok(rows) => [&[LOADED][..], &(rows as u64).to_le_bytes()].concat(),
            Err(error @ Error::SavedState { .. }) => error.to_string().into_bytes(),
            Err(error) => return ranks.together(Err(error)),
        };
        ranks.send_saved(&answer, 0)?;
        if let Some(rows) = ranks.receive_saved(0)?.first_chunk() {
            self.windows.replace(sequence, self.len(sequence), u64::from_le_bytes(*rows) as usize);
        }
        Ok(())
    }
}

/// The first byte of an answer that a rank's part was restored: no text begins with it.
const LOADED: u8 = 0;

/// The rows of windows that a rank has restored; `None` if it could not.
fn rows_of_answer(answer: &[u8]) -> Option<usize> {
    let (LOADED, rows) = answer.split_first().map(|(first, rest)| (*first, rest))? else { return None };
    Some(u64::from_le_bytes(*rows.first_chunk()?) as usize)
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

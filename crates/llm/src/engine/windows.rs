//! The window layers' own KV cache: which slots a sequence uses, how far it can go back, and which rows must be copied for
//! that. This file touches no memory.
//!
//! A sequence has a contiguous range of slots, in the order of positions, so that spans stay plain ranges. When it is
//! full, the rows that the next token needs are copied to its front. A checkpoint is a copy of those rows, behind the
//! slots of all sequences.

/// The window layers' slots of all sequences, and checkpoints of them.
pub(super) struct Windows {
    /// Slots of a sequence in the layers' own cache; `None` if they use the full one, where a position is a slot.
    own_slots: Option<usize>,
    /// Earlier positions that the next token attends to: one less than the window.
    needed: usize,
    sequences: Vec<WindowSequence>,
}

#[derive(Clone, Default)]
struct WindowSequence {
    /// The first position that has rows.
    first: usize,
    /// The checkpoint, by number and length, whose rows must be copied before the sequence can continue.
    restore: Option<(usize, usize)>,
    /// Whether a failure has left unknown rows.
    damaged: bool,
    /// The length that each checkpoint belongs to; `None` if it is free.
    checkpoints: Vec<Option<usize>>,
}

/// Rows to copy within the window layers' cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RowCopy {
    /// The first row.
    pub(super) from: usize,
    /// Where it goes.
    pub(super) to: usize,
    /// The number of rows.
    pub(super) count: usize,
}

impl Windows {
    /// Windows of so many positions, 0 if the model has none.
    pub(super) fn new(
        sequences: usize,
        checkpoints: usize,
        window: usize,
        own_slots: Option<usize>,
    ) -> Windows {
        let empty = WindowSequence { checkpoints: vec![None; checkpoints], ..WindowSequence::default() };
        Windows { own_slots, needed: window.saturating_sub(1), sequences: vec![empty; sequences] }
    }

    /// Rows that one copy moves at most.
    pub(super) fn needed(&self) -> usize {
        self.needed
    }

    /// The slot of a position in the layers' own cache; `None` if there is none.
    pub(super) fn slot(&self, sequence: usize, position: usize) -> Option<usize> {
        let first = self.sequences.get(sequence)?.first;
        Some(sequence * self.own_slots? + position.saturating_sub(first))
    }

    /// The first position that has rows.
    pub(super) fn first(&self, sequence: usize) -> usize {
        self.sequences.get(sequence).map_or(0, |sequence| sequence.first)
    }

    /// Whether a sequence of `len` tokens can get `added` more without a copy.
    pub(super) fn fits(&self, sequence: usize, len: usize, added: usize) -> bool {
        self.own_slots.is_none_or(|slots| len + added - self.first(sequence).min(len) <= slots)
    }

    /// The copy to the front that makes room; it is noted as done.
    pub(super) fn compact(&mut self, sequence: usize, len: usize) -> Option<RowCopy> {
        let (from, count) = self.latest_rows(sequence, len)?;
        let to = self.slot(sequence, self.first(sequence))?;
        self.sequences.get_mut(sequence)?.first = len - count;
        Some(RowCopy { from, to, count })
    }

    /// The longest prefix of at most `len` tokens from which a sequence can continue.
    pub(super) fn retained(&self, sequence: usize, len: usize) -> usize {
        match self.sequences.get(sequence) {
            Some(state) if !state.can_continue(len, self.needed) => {
                state.checkpoints.iter().flatten().copied().filter(|found| *found <= len).max().unwrap_or(0)
            }
            _ => len,
        }
    }

    /// Truncates a sequence to a length that [`Windows::retained`] has returned, or to nothing. Rows of a checkpoint may have
    /// to be restored for it.
    pub(super) fn truncate(&mut self, sequence: usize, len: usize) {
        let needed = self.needed;
        let Some(state) = self.sequences.get_mut(sequence) else { return };
        if !state.can_continue(len, needed) {
            state.restore =
                state.checkpoints.iter().position(|found| *found == Some(len)).map(|number| (number, len));
            state.first = len.saturating_sub(needed);
            state.damaged = false;
        }
        state
            .checkpoints
            .iter_mut()
            .filter(|found| found.is_some_and(|found| found > len))
            .for_each(|found| *found = None);
    }

    /// Notes that the rows of a sequence are unknown after a failure.
    pub(super) fn damage(&mut self, sequence: usize) {
        if let Some(state) = self.sequences.get_mut(sequence) {
            state.damaged = true;
        }
    }

    /// Notes that the rows of a sequence of `len` tokens were written from outside: the latest `rows` of them.
    pub(super) fn replace(&mut self, sequence: usize, len: usize, rows: usize) {
        if let Some(state) = self.sequences.get_mut(sequence) {
            let checkpoints = vec![None; state.checkpoints.len()];
            *state =
                WindowSequence { first: len.saturating_sub(rows), checkpoints, ..WindowSequence::default() };
        }
    }

    /// The copy that a truncated sequence needs before it continues.
    pub(super) fn restoring(&self, sequence: usize) -> Option<RowCopy> {
        let (number, length) = self.sequences.get(sequence)?.restore?;
        let (from, to) = (self.kept_rows(sequence, number)?, sequence * self.own_slots?);
        Some(RowCopy { from, to, count: length.min(self.needed) })
    }

    /// Notes that [`Windows::restoring`] was done.
    pub(super) fn restored(&mut self, sequence: usize) {
        if let Some(state) = self.sequences.get_mut(sequence) {
            state.restore = None;
        }
    }

    /// The copy that makes a checkpoint of a sequence of `len` tokens; `None` if there is one, or none can be made.
    pub(super) fn checkpoint(&mut self, sequence: usize, len: usize) -> Option<RowCopy> {
        let (from, count) = self.latest_rows(sequence, len)?;
        let state = self.sequences.get_mut(sequence)?;
        if len == 0 || state.checkpoints.contains(&Some(len)) {
            return None;
        }
        let number = state.free_or_cheapest()?;
        *state.checkpoints.get_mut(number)? = Some(len);
        Some(RowCopy { from, to: self.kept_rows(sequence, number)?, count })
    }

    /// Forgets a checkpoint whose copy has failed.
    pub(super) fn forget(&mut self, sequence: usize, len: usize) {
        if let Some(state) = self.sequences.get_mut(sequence) {
            state.checkpoints.iter_mut().filter(|found| **found == Some(len)).for_each(|found| *found = None);
        }
    }

    /// The first slot and the number of the rows that a token at position `len` needs.
    fn latest_rows(&self, sequence: usize, len: usize) -> Option<(usize, usize)> {
        let count = self.needed.min(len.checked_sub(self.first(sequence))?);
        Some((self.slot(sequence, len - count)?, count))
    }

    /// The first row of a checkpoint.
    fn kept_rows(&self, sequence: usize, number: usize) -> Option<usize> {
        let each = self.sequences.get(sequence)?.checkpoints.len();
        Some(self.sequences.len() * self.own_slots? + (sequence * each + number) * self.needed)
    }
}

impl WindowSequence {
    /// Whether the rows that a token at position `len` needs are there.
    fn can_continue(&self, len: usize, needed: usize) -> bool {
        !self.damaged && (self.first == 0 || self.first + needed <= len)
    }

    /// A checkpoint that is free, or else the one whose loss costs least: the fewest tokens after the checkpoint before it.
    fn free_or_cheapest(&self) -> Option<usize> {
        let cost = |checkpoint: Option<usize>| {
            let len = checkpoint?;
            let earlier = self.checkpoints.iter().flatten().filter(|other| **other < len).max();
            Some(len - earlier.copied().unwrap_or(0))
        };
        (0..self.checkpoints.len()).min_by_key(|number| self.checkpoints.get(*number).copied().and_then(cost))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use quadriga_conformance::Rng;

    use super::*;

    /// Copies rows, each of which holds the text up to its position.
    fn copy(rows: &mut [Vec<u32>], copy: RowCopy) {
        let copied: Vec<Vec<u32>> = rows[copy.from..][..copy.count].to_vec();
        rows[copy.to..][..copy.count].clone_from_slice(&copied);
    }

    /// Random calls on rows that hold the text up to their position: the rows that a token needs are always there.
    #[test]
    fn every_token_finds_the_rows_that_it_needs() {
        for seed in 0..300 {
            let mut rng = Rng::new(seed);
            let (sequences, checkpoints, batch) = (rng.range(1, 3), rng.range(0, 4), rng.range(1, 6));
            let window = rng.range(1, 9);
            let slots = window - 1 + batch + rng.range(0, 5);
            let mut windows = Windows::new(sequences, checkpoints, window, Some(slots));
            let mut rows = vec![Vec::new(); sequences * (slots + checkpoints * (window - 1))];
            let mut texts = vec![Vec::new(); sequences];
            for _ in 0..120 {
                let sequence = rng.below(sequences);
                let len = texts[sequence].len();
                match rng.below(8) {
                    0 | 1 => {
                        let to = rng.range(0, len + 1);
                        let retained = windows.retained(sequence, to.min(len));
                        windows.truncate(sequence, retained);
                        assert!(retained <= to.min(len), "seed {seed}");
                        texts[sequence].truncate(retained);
                        continue;
                    }
                    2 => {
                        for sequence in 0..sequences {
                            restore(&mut windows, &mut rows, sequence);
                        }
                        if let Some(rows_to_copy) = windows.checkpoint(sequence, len) {
                            copy(&mut rows, rows_to_copy);
                            assert_eq!(windows.retained(sequence, len), len, "seed {seed}");
                        }
                        continue;
                    }
                    _ => {}
                }
                for sequence in 0..sequences {
                    restore(&mut windows, &mut rows, sequence);
                }
                let added = rng.range(1, batch);
                if !windows.fits(sequence, len, added)
                    && let Some(rows_to_copy) = windows.compact(sequence, len)
                {
                    copy(&mut rows, rows_to_copy);
                }
                assert!(windows.fits(sequence, len, added), "seed {seed}");
                for _ in 0..added {
                    let text: &mut Vec<u32> = &mut texts[sequence];
                    for position in (text.len() + 1).saturating_sub(window)..text.len() {
                        let slot = windows.slot(sequence, position).unwrap();
                        assert_eq!(rows[slot], text[..=position], "seed {seed}");
                    }
                    text.push(rng.below(1000) as u32);
                    let slot = windows.slot(sequence, text.len() - 1).unwrap();
                    assert!((sequence * slots..(sequence + 1) * slots).contains(&slot), "seed {seed}");
                    rows[slot].clone_from(text);
                }
            }
        }
    }

    fn restore(windows: &mut Windows, rows: &mut [Vec<u32>], sequence: usize) {
        if let Some(rows_to_copy) = windows.restoring(sequence) {
            copy(rows, rows_to_copy);
            windows.restored(sequence);
        }
    }
}

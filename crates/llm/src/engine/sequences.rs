//! The number of tokens that each sequence has in the KV cache.

/// Lengths of all sequences, and their lengths before the latest append, to which a failure returns.
pub(super) struct Sequences {
    lengths: Vec<usize>,
    before: Vec<usize>,
}

impl Sequences {
    pub(super) fn new(count: usize) -> Sequences {
        Sequences { lengths: vec![0; count], before: vec![0; count] }
    }

    /// The tokens of a sequence; 0 for one that does not exist.
    pub(super) fn len(&self, sequence: usize) -> usize {
        self.lengths.get(sequence).copied().unwrap_or(0)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lengths.iter().all(|length| *length == 0)
    }

    /// Marks the state that [`Sequences::roll_back`] returns to.
    pub(super) fn begin(&mut self) {
        self.before.clone_from(&self.lengths);
    }

    pub(super) fn roll_back(&mut self) {
        self.lengths.clone_from(&self.before);
    }

    /// Appends a token and returns its position; `None` if the sequence does not exist.
    pub(super) fn append(&mut self, sequence: usize) -> Option<usize> {
        let length = self.lengths.get_mut(sequence)?;
        *length += 1;
        Some(*length - 1)
    }

    /// Removes the last token of a sequence.
    pub(super) fn pop(&mut self, sequence: usize) {
        if let Some(length) = self.lengths.get_mut(sequence) {
            *length = length.saturating_sub(1);
        }
    }

    /// Removes a sequence's tokens from position `len` on, for good: a failure does not bring them back.
    pub(super) fn truncate(&mut self, sequence: usize, len: usize) {
        for lengths in [&mut self.lengths, &mut self.before] {
            if let Some(length) = lengths.get_mut(sequence) {
                *length = (*length).min(len);
            }
        }
    }
}

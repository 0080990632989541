//! The tokens that each sequence has in the KV cache.

/// Tokens of all sequences, and their numbers before the latest append, to which a failure returns.
pub(super) struct Sequences {
    tokens: Vec<Vec<u32>>,
    before: Vec<usize>,
}

impl Sequences {
    pub(super) fn new(count: usize) -> Sequences {
        Sequences { tokens: vec![Vec::new(); count], before: vec![0; count] }
    }

    /// The tokens of a sequence; none for one that does not exist.
    pub(super) fn tokens(&self, sequence: usize) -> &[u32] {
        self.tokens.get(sequence).map_or(&[], Vec::as_slice)
    }

    /// The number of tokens of a sequence.
    pub(super) fn len(&self, sequence: usize) -> usize {
        self.tokens(sequence).len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tokens.iter().all(Vec::is_empty)
    }

    /// Marks the state that a failure returns to.
    pub(super) fn begin(&mut self) {
        self.before.clear();
        self.before.extend(self.tokens.iter().map(Vec::len));
    }

    /// The number of a sequence's tokens at the latest [`Sequences::begin`].
    pub(super) fn before(&self, sequence: usize) -> usize {
        self.before.get(sequence).copied().unwrap_or(0)
    }

    /// Appends a token and returns its position; `None` if the sequence does not exist.
    pub(super) fn append(&mut self, sequence: usize, token: u32) -> Option<usize> {
        let tokens = self.tokens.get_mut(sequence)?;
        tokens.push(token);
        Some(tokens.len() - 1)
    }

    /// Removes the last token of a sequence.
    pub(super) fn pop(&mut self, sequence: usize) {
        if let Some(tokens) = self.tokens.get_mut(sequence) {
            tokens.pop();
        }
    }

    /// Removes a sequence's tokens from position `len` on, for good: a failure does not bring them back.
    pub(super) fn truncate(&mut self, sequence: usize, len: usize) {
        if let (Some(tokens), Some(before)) = (self.tokens.get_mut(sequence), self.before.get_mut(sequence)) {
            tokens.truncate(len);
            *before = (*before).min(len);
        }
    }

    /// Replaces the tokens of a sequence, for good.
    pub(super) fn replace(&mut self, sequence: usize, tokens: Vec<u32>) {
        if let (Some(old), Some(before)) = (self.tokens.get_mut(sequence), self.before.get_mut(sequence)) {
            *before = tokens.len();
            *old = tokens;
        }
    }
}

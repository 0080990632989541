//! A token that may be sampled.

use std::cmp::Ordering;

/// A token and its logit.
#[derive(Clone, Copy, Debug)]
pub(super) struct TokenCandidate {
    pub(super) token: u32,
    pub(super) logit: f32,
}

impl TokenCandidate {
    /// By logit, largest first, then by token (both zeros are equal). There are no ties, so that results do not depend
    /// on the sorting algorithm.
    pub(super) fn order(&self, other: &TokenCandidate) -> Ordering {
        (other.logit + 0.0).total_cmp(&(self.logit + 0.0)).then(self.token.cmp(&other.token))
    }
}

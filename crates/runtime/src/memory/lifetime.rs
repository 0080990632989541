//! Lifetimes as ranges of steps.

use std::fmt;

/// A half-open range of steps, `start..end`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Lifetime {
    /// The first step.
    pub start: u32,
    /// One past the last step. The lifetime is empty if this is not after `start`.
    pub end: u32,
}

impl Lifetime {
    /// The whole run.
    pub const WHOLE: Lifetime = Lifetime { start: 0, end: u32::MAX };

    /// An empty lifetime.
    pub const NEVER: Lifetime = Lifetime { start: 0, end: 0 };

    /// Whether it contains no step.
    pub fn is_empty(self) -> bool {
        self.start >= self.end
    }

    /// Whether it contains a step.
    pub fn contains(self, step: u32) -> bool {
        (self.start..self.end).contains(&step)
    }

    /// Whether the two have a step in common.
    pub fn overlaps(self, other: Lifetime) -> bool {
        self.start.max(other.start) < self.end.min(other.end)
    }
}

impl fmt::Display for Lifetime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

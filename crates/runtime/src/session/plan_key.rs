//! The keys by which a caller finds the graphs of a session.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};

/// Stands for one set of weights in [keys](PlanKey::of). Whoever holds a model makes one for it; it cannot be copied, so that a copy
/// of a model, which may get other weights, has one of its own.
#[derive(Debug, PartialEq, Eq)]
pub struct ModelId(NonZeroU64);

impl ModelId {
    /// Another one than all others of this process.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "two defaults differ")]
    pub fn new() -> ModelId {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        ModelId(NonZeroU64::new(number).unwrap_or(NonZeroU64::MAX))
    }
}

/// The caller's key of a graph: a few numbers, such as tokens in the batch and length of the KV cache, and of which model it is.
///
/// A key of a model ([`PlanKey::of`]) finds its graph without building it, since it says which weights the graph has. Numbers
/// alone do not: with them the graph is built each time, and compared. So a session never computes with the weights of another model
/// that has equal numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct PlanKey {
    pub(super) model: Option<NonZeroU64>,
    pub(super) numbers: [u64; 4],
}

impl PlanKey {
    /// The key of a model's graph.
    pub fn of(model: &ModelId, numbers: [u64; 4]) -> PlanKey {
        PlanKey { model: Some(model.0), numbers }
    }
}

impl From<[u64; 4]> for PlanKey {
    fn from(numbers: [u64; 4]) -> PlanKey {
        PlanKey { model: None, numbers }
    }
}

impl From<u64> for PlanKey {
    fn from(a: u64) -> PlanKey {
        PlanKey::from([a, 0, 0, 0])
    }
}

impl From<(usize, usize)> for PlanKey {
    fn from((a, b): (usize, usize)) -> PlanKey {
        PlanKey::from([a as u64, b as u64, 0, 0])
    }
}

impl From<(usize, usize, usize)> for PlanKey {
    fn from((a, b, c): (usize, usize, usize)) -> PlanKey {
        PlanKey::from([a as u64, b as u64, c as u64, 0])
    }
}

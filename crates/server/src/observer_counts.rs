//! How many of the references to a model are those of observers.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The observers of a model.
#[derive(Default)]
pub(crate) struct ObserverCounts {
    now: AtomicUsize,
    ever: AtomicUsize,
}

impl ObserverCounts {
    /// Counts one that has its reference.
    pub(crate) fn come(&self) {
        // First, so that whoever compares the counts sees that it came.
        self.ever.fetch_add(1, Ordering::SeqCst);
        self.now.fetch_add(1, Ordering::SeqCst);
    }

    /// One leaves, and still has its reference.
    pub(crate) fn leave(&self) {
        self.now.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether all references but one are those of observers. `between` runs between the two counts.
    pub(crate) fn are_all_others(&self, references: impl Fn() -> usize, mut between: impl FnMut()) -> bool {
        loop {
            let before = self.ever.load(Ordering::SeqCst);
            // First: an observer that leaves meanwhile is then taken for a user, and not a user for an observer.
            let references = references();
            between();
            let observers = self.now.load(Ordering::SeqCst);
            // One that came meanwhile is none of the references.
            if self.ever.load(Ordering::SeqCst) == before {
                return references <= 1 + observers;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Whatever happens while the counts are read.
    #[test]
    fn a_model_that_is_used_is_never_taken_for_an_idle_one() {
        let model = Arc::new(ObserverCounts::default());
        let observe = || {
            let reference = Arc::clone(&model);
            reference.come();
            reference
        };
        let references = || Arc::strong_count(&model);
        let mut observer = Some(observe());
        assert!(model.are_all_others(references, || ()));
        let user = Arc::clone(&model);
        assert!(!model.are_all_others(references, || ()));
        let leaves = || {
            if let Some(observer) = observer.take() {
                observer.leave();
            }
        };
        assert!(!model.are_all_others(references, leaves));
        let mut come = None;
        let comes = || {
            come.get_or_insert_with(observe);
        };
        assert!(!model.are_all_others(references, comes));
        drop(user);
        assert!(model.are_all_others(references, || ()));
    }
}

//! References to loaded models that keep none of them loaded: what metrics, lists and pages look at for a moment.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::model::ServedModel;

/// A model that somebody looks at. It is no request: a model that is only looked at is idle, and makes room for others.
pub struct ObservedModel(Arc<ServedModel>);

impl ObservedModel {
    /// Another reference to a model.
    pub(crate) fn of(served: &Arc<ServedModel>) -> ObservedModel {
        ObservedModel::new(Arc::clone(served))
    }

    pub(crate) fn new(served: Arc<ServedModel>) -> ObservedModel {
        served.observers.come();
        ObservedModel(served)
    }

    /// The model as one that is used: as long as the reference lives, the model does not make room.
    pub fn to_used(&self) -> Arc<ServedModel> {
        Arc::clone(&self.0)
    }

    /// Whether nobody uses the model of a registry, which has a reference of its own. Observers that are just coming or leaving may count as
    /// users for an instant, never the other way round: each is counted only while it has its reference.
    pub(crate) fn is_idle(served: &Arc<ServedModel>) -> bool {
        served.observers.are_all_others(|| Arc::strong_count(served), || ())
    }
}

/// The observers of a model.
#[derive(Default)]
pub(crate) struct ObserverCounts {
    now: AtomicUsize,
    ever: AtomicUsize,
}

impl ObserverCounts {
    fn come(&self) {
        // First, so that whoever compares the counts sees that it came.
        self.ever.fetch_add(1, Ordering::SeqCst);
        self.now.fetch_add(1, Ordering::SeqCst);
    }

    fn leave(&self) {
        self.now.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether all references but one are those of observers. `between` runs between the two counts.
    fn are_all_others(&self, references: impl Fn() -> usize, mut between: impl FnMut()) -> bool {
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

impl Clone for ObservedModel {
    fn clone(&self) -> ObservedModel {
        ObservedModel::of(&self.0)
    }
}

impl Deref for ObservedModel {
    type Target = ServedModel;

    fn deref(&self) -> &ServedModel {
        &self.0
    }
}

impl Drop for ObservedModel {
    fn drop(&mut self) {
        // Before its reference goes.
        self.0.observers.leave();
    }
}

#[cfg(test)]
mod tests {
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

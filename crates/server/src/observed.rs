//! References to loaded models that keep none of them loaded: what metrics, lists and pages look at for a moment.

use std::ops::Deref;
use std::sync::Arc;

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

    /// Frees a model on this thread, which may wait, unless somebody uses it. The memory of its engine is free then, also while
    /// somebody looks at it.
    pub(crate) fn free(served: Arc<ServedModel>) {
        if ObservedModel::is_idle(&served) {
            served.end_engine();
        }
        ServedModel::end_if_last(served);
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

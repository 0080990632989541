//! What models are doing, and what becomes of them, for those who follow it.

use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{Receiver, Sender};

/// The most who follow at a time.
const MOST: usize = 64;

/// Changes that are kept for those who have not read them yet, whoever they are.
const KEPT: usize = 64;

/// What a model is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ModelState {
    /// It is in no memory.
    Unloaded,
    /// It is being loaded.
    Loading,
    /// It answers requests.
    Loaded,
}

impl ModelState {
    /// The name that llama-server gives it.
    pub fn name(self) -> &'static str {
        match self {
            ModelState::Unloaded => "unloaded",
            ModelState::Loading => "loading",
            ModelState::Loaded => "loaded",
        }
    }
}

/// What a model is doing from now on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ModelChange {
    pub(crate) model: String,
    pub(crate) state: ModelState,
    /// Whether it could not be loaded.
    pub(crate) failed: bool,
}

impl ModelChange {
    pub(crate) fn new(model: &str, state: ModelState) -> ModelChange {
        ModelChange { model: model.to_owned(), state, failed: false }
    }
}

/// Tells changes to all who follow them. Nobody is waited for.
#[derive(Clone, Debug)]
pub(crate) struct ModelChanges(Sender<ModelChange>);

impl Default for ModelChanges {
    fn default() -> ModelChanges {
        ModelChanges(Sender::new(KEPT))
    }
}

impl ModelChanges {
    pub(crate) fn tell(&self, change: ModelChange) {
        // Nobody may follow.
        let _ = self.0.send(change);
    }

    /// Follows what comes from now on, unless too many do. To be called by one at a time.
    pub(crate) fn subscribe(&self) -> Option<Subscription> {
        (self.0.receiver_count() < MOST).then(|| Subscription(self.0.subscribe()))
    }

    pub(crate) fn subscribers(&self) -> usize {
        self.0.receiver_count()
    }
}

/// Changes that somebody follows.
#[derive(Debug)]
pub(crate) struct Subscription(Receiver<ModelChange>);

/// What a follower learns.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Learned {
    /// A change.
    Change(ModelChange),
    /// There were more changes than are kept: the state of all models is to be looked at.
    Missed,
}

impl Subscription {
    /// The next change; `None` if no other will come.
    pub(crate) async fn next(&mut self) -> Option<Learned> {
        match self.0.recv().await {
            Ok(change) => Some(Learned::Change(change)),
            Err(RecvError::Lagged(_)) => Some(Learned::Missed),
            Err(RecvError::Closed) => None,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_read_holds_nothing() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let changes = ModelChanges::default();
        let (mut slow, mut prompt) = (changes.subscribe().unwrap(), changes.subscribe().unwrap());
        let change = |number: usize| ModelChange::new(&number.to_string(), ModelState::Loaded);
        runtime.block_on(async {
            for number in 0..10 * KEPT {
                changes.tell(change(number));
                assert_eq!(prompt.next().await, Some(Learned::Change(change(number))));
            }
            assert_eq!(slow.next().await, Some(Learned::Missed));
            // The latest are there.
            assert_eq!(slow.next().await, Some(Learned::Change(change(9 * KEPT))));
        });
        let others: Vec<Subscription> = (2..MOST).filter_map(|_| changes.subscribe()).collect();
        assert_eq!((others.len(), changes.subscribers()), (MOST - 2, MOST));
        assert!(changes.subscribe().is_none());
        drop(slow);
        assert!(changes.subscribe().is_some());
    }
}

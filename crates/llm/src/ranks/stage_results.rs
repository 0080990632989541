//! Results of steps on their way from the last stage of a pipeline to the first rank.
//!
//! They are sent by the last stage's graph, and received outside of the first rank's: it goes on with the next step while the other
//! stages compute. Steps are computed, and so answered, in one order.

use quadriga_cluster::Operation;

use super::{Message, RankShare};
use crate::Result;

/// A tensor of results, or what stands for them. The numbers are tags of messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StageResult {
    /// The hidden states of output rows.
    Hidden = 2,
    /// The logits of output rows.
    Logits = 3,
    /// The argmax of each row's logits, as I32.
    Argmax = 4,
    /// The sum of each row's logits: finite only if all of them are.
    Sums = 5,
    /// Nothing: a step without outputs is computed.
    Done = 6,
}

impl RankShare {
    /// The steps that are computed at once, each by another stage: as many as there are stages.
    pub(crate) fn steps_in_flight(&self) -> usize {
        self.grid.pipeline.max(1)
    }

    /// The rank that sends the results to the first, where that has not the last layers.
    fn sender_of_results(&self) -> Option<usize> {
        (self.grid.pipeline > 1).then(|| self.grid.ranks() - self.grid.tensor)
    }

    /// Whether this rank sends the results to the first.
    pub(crate) fn sends_results(&self) -> bool {
        self.sender_of_results() == Some(self.rank())
    }

    /// That a rank of the last stage sends results to the first.
    pub(crate) fn send_result(&self, result: StageResult) -> Option<Message> {
        self.sends_results().then(|| self.message(0, result as u16))
    }

    /// On the rank that sends results: tells the first that a step without any is computed.
    pub(crate) fn send_done(&self) -> Result<()> {
        if self.sends_results() {
            let tag = StageResult::Done as u16;
            self.communicator().run(Operation::Send { bytes: &[], to: 0, tag })?;
        }
        Ok(())
    }

    /// Waits for the next results of the last stage: those of the oldest step that was not waited for.
    pub(crate) fn receive_result(&self, result: StageResult, bytes: &mut [u8]) -> Result<()> {
        if let Some(from) = self.sender_of_results() {
            self.communicator().run(Operation::Receive { bytes, from, tag: result as u16 })?;
        }
        Ok(())
    }
}

//! Batches on a pipeline: while later stages compute one, the first rank goes on with the next.

use std::collections::VecDeque;

use super::Engine;
use crate::Result;
use crate::ranks::StageResult;

/// The output rows of batches that later stages still compute, oldest first.
#[derive(Default)]
pub(super) struct Unanswered {
    batches: VecDeque<usize>,
    /// Output rows that have arrived.
    received: usize,
}

/// Fewer tokens than this are not worth a batch of their own.
const LEAST_TOKENS: usize = 64;

/// How often a prompt is cut for each stage, if it is long enough: stages wait for their first batch, and after their last.
const BATCHES_OF_STAGE: usize = 4;

/// The tokens of a prompt that a batch has, so that all stages have something to do: a power of two, as long as that is fewer than
/// `most`.
pub(crate) fn pipelined_batch(tokens: usize, stages: usize, most: usize) -> usize {
    if stages <= 1 {
        return most;
    }
    let even = (tokens / (BATCHES_OF_STAGE * stages)).max(LEAST_TOKENS);
    // The largest power of two below.
    (1 << even.ilog2()).min(most).max(1)
}

impl Engine {
    /// The stages that compute batches at once.
    pub(super) fn stages(&self) -> usize {
        self.model.ranks().map_or(1, |ranks| ranks.steps_in_flight())
    }

    /// Notes that the first of several stages has computed a batch. Waits for an earlier one if too many are in flight. `false` if
    /// this rank has the results itself.
    pub(super) fn pass_on(&mut self, rows: usize, unanswered: &mut Unanswered) -> Result<bool> {
        if self.stages() <= 1 {
            return Ok(false);
        }
        self.session.wait()?;
        unanswered.batches.push_back(rows);
        if unanswered.batches.len() > self.stages() {
            self.receive_batch(unanswered)?;
        }
        Ok(true)
    }

    /// On a rank after the first: tells that a batch without results is computed, if this rank sends the others'.
    pub(super) fn report_done(&self, rows: usize) -> Result<()> {
        match self.model.ranks().filter(|_| rows == 0) {
            Some(ranks) => ranks.send_done(),
            None => Ok(()),
        }
    }

    /// Waits for the results of all batches in flight.
    pub(super) fn receive_batches(&mut self, unanswered: &mut Unanswered) -> Result<()> {
        while !unanswered.batches.is_empty() {
            self.receive_batch(unanswered)?;
        }
        Ok(())
    }

    fn receive_batch(&mut self, unanswered: &mut Unanswered) -> Result<()> {
        let (Some(rows), Some(ranks)) = (unanswered.batches.pop_front(), self.model.ranks()) else {
            return Ok(());
        };
        if rows == 0 {
            return ranks.receive_result(StageResult::Done, &mut []);
        }
        let own = unanswered.received..unanswered.received + rows;
        unanswered.received += rows;
        let hyper = self.model.hyperparameters();
        for (result, values, width, wanted) in [
            (StageResult::Hidden, &mut self.hidden, hyper.width, self.options.hidden),
            (StageResult::Logits, &mut self.logits, hyper.vocabulary, self.options.logits),
        ] {
            if let Some(into) = values.get_mut(own.start * width..own.end * width).filter(|_| wanted) {
                ranks.receive_result(result, bytemuck::cast_slice_mut(into))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::pipelined_batch;

    #[test]
    fn prompts_are_cut_for_stages_but_not_into_crumbs() {
        assert_eq!(pipelined_batch(4000, 1, 512), 512, "one stage has no use for it");
        assert_eq!(pipelined_batch(10, 2, 512), 64);
        assert_eq!(pipelined_batch(512, 2, 512), 64);
        assert_eq!(pipelined_batch(2100, 2, 512), 256);
        assert_eq!(pipelined_batch(1 << 20, 4, 512), 512);
        assert_eq!(pipelined_batch(1 << 20, 4, 8), 8);
        assert_eq!(pipelined_batch(0, 3, 1), 1);
    }
}

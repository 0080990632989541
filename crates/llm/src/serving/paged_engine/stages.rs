//! Steps on a pipeline: the first stage passes a step on, and goes on with the next while the others compute it.
//!
//! All stages compute all steps, and copies of pages, in the order in which the first rank told them. So the pages of a sequence that
//! ends while a step of it is in flight may be given away at once: whatever that step still writes there is written before any
//! later step reads or writes.

use quadriga_runtime::PendingRead;

use super::step_results::checked_argmax;
use super::{PagedEngine, StepInFlight};
use crate::Result;
use crate::engine::resize;
use crate::models::GraphShape;
use crate::ranks::StageResult;

impl PagedEngine {
    /// The most steps in flight that are useful: one for each stage.
    pub(in crate::serving) fn stages(&self) -> usize {
        self.ranks().map_or(1, |ranks| ranks.steps_in_flight())
    }

    /// This rank's part of a step is computed: on the first rank, its results are waited for later.
    pub(super) fn pass_on(&mut self, shape: GraphShape) -> Result<()> {
        if self.follows() {
            return match self.ranks().filter(|_| shape.rows == 0) {
                Some(ranks) => ranks.send_done(),
                None => Ok(()),
            };
        }
        let (output_rows, logits) = (std::mem::take(&mut self.output_rows), Vec::new());
        let read: Option<PendingRead> = None;
        self.passed_on.push_back(StepInFlight { shape, output_rows, logits, read });
        Ok(())
    }

    /// Waits for the results of the oldest step that was passed on.
    pub(super) fn receive_results(&mut self) -> Result<()> {
        let Some(StepInFlight { shape, output_rows, .. }) = self.passed_on.pop_front() else { return Ok(()) };
        self.clear_outputs();
        let Some(ranks) = self.model.ranks() else { return Ok(()) };
        let hyper = self.model.hyperparameters();
        if shape.rows == 0 {
            return ranks.receive_result(StageResult::Done, &mut []);
        }
        if shape.hidden {
            resize(&mut self.hidden, shape.rows, hyper.width)?;
            ranks.receive_result(StageResult::Hidden, bytemuck::cast_slice_mut(&mut self.hidden))?;
        }
        self.output_rows = output_rows;
        if shape.argmax {
            let (mut tokens, mut sums) = (vec![0i32; shape.rows], vec![0f32; shape.rows]);
            ranks.receive_result(StageResult::Argmax, bytemuck::cast_slice_mut(&mut tokens))?;
            ranks.receive_result(StageResult::Sums, bytemuck::cast_slice_mut(&mut sums))?;
            self.argmax.extend(tokens.into_iter().zip(sums).map(checked_argmax));
            return Ok(());
        }
        let rows = shape.logit_rows.min(shape.rows);
        resize(&mut self.logits, rows, hyper.vocabulary)?;
        if rows > 0 {
            ranks.receive_result(StageResult::Logits, bytemuck::cast_slice_mut(&mut self.logits))?;
        }
        self.loaded = vec![true; rows];
        Ok(())
    }

    /// Waits for all steps that were passed on, and forgets their results.
    pub(super) fn drain(&mut self) {
        while !self.passed_on.is_empty() {
            // After a failure of a rank nothing comes any more, and nothing waits.
            drop(self.receive_results());
        }
    }
}

impl Drop for PagedEngine {
    /// Results that nobody took would keep ranks from ending.
    fn drop(&mut self) {
        self.drain();
    }
}

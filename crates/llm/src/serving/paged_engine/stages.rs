//! Steps on a pipeline: the first stage passes a step on, and goes on with the next while the others compute it.
//!
//! All stages compute all steps, and copies of pages, in the order in which the first rank told them. So the pages of a sequence that
//! ends while a step of it is in flight may be given away at once: whatever that step still writes there is written before any
//! later step reads or writes.

use quadriga_runtime::PendingRead;

use super::step_results::checked_argmax;
use super::{PagedEngine, StepInFlight};
use crate::engine::resize;
use crate::models::GraphShape;
use crate::ranks::StageResult;
use crate::{LogitsError, Result};

/// The results of a step.
#[derive(Default)]
pub(super) struct StepAnswer {
    output_rows: Vec<usize>,
    argmax: Vec<Result<u32, LogitsError>>,
    logits: Vec<f32>,
    /// The rows of the logits.
    rows: usize,
    hidden: Vec<f32>,
}

/// A step of a model with recurrent layers that later stages compute, in groups.
pub(in crate::serving) struct PassedStep {
    /// Of each group the numbers of its outputs among all of the step.
    pub(in crate::serving) groups: Vec<Vec<usize>>,
    /// Whether hidden states are among them.
    pub(in crate::serving) embeds: bool,
}

impl PagedEngine {
    /// The most steps in flight that are useful: one for each stage.
    pub(in crate::serving) fn stages(&self) -> usize {
        self.ranks().map_or(1, |ranks| ranks.steps_in_flight())
    }

    /// Whether other ranks have layers after this one's, or before them.
    pub(in crate::serving) fn has_stages(&self) -> bool {
        self.stages() > 1
    }

    /// Notes that all groups of a step of a model with recurrent layers were passed on.
    pub(in crate::serving) fn pass_on_step(&mut self, groups: Vec<Vec<usize>>, embeds: bool) {
        if !self.follows() {
            self.passed_steps.push_back(PassedStep { groups, embeds });
        }
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
    pub(in crate::serving) fn receive_results(&mut self) -> Result<()> {
        self.clear_outputs();
        let answer = match self.answered.pop_front() {
            Some(answer) => answer?,
            None => self.receive_answer()?,
        };
        let StepAnswer { output_rows, argmax, logits, rows, hidden } = answer;
        (self.output_rows, self.argmax, self.logits, self.hidden) = (output_rows, argmax, logits, hidden);
        self.loaded = vec![true; rows];
        Ok(())
    }

    /// Receives the results of the oldest step into the memory of those of an earlier one.
    fn receive_answer(&mut self) -> Result<StepAnswer> {
        let (logits, hidden) = (std::mem::take(&mut self.logits), std::mem::take(&mut self.hidden));
        let mut answer = StepAnswer { logits, hidden, ..StepAnswer::default() };
        let Some(StepInFlight { shape, output_rows, .. }) = self.passed_on.pop_front() else {
            return Ok(answer);
        };
        let Some(ranks) = self.model.ranks() else { return Ok(answer) };
        let hyper = self.model.hyperparameters();
        if shape.rows == 0 {
            ranks.receive_result(StageResult::Done, &mut [])?;
            return Ok(answer);
        }
        if shape.hidden {
            resize(&mut answer.hidden, shape.rows, hyper.width)?;
            ranks.receive_result(StageResult::Hidden, bytemuck::cast_slice_mut(&mut answer.hidden))?;
        }
        answer.output_rows = output_rows;
        if shape.argmax {
            let (mut tokens, mut sums) = (vec![0i32; shape.rows], vec![0f32; shape.rows]);
            ranks.receive_result(StageResult::Argmax, bytemuck::cast_slice_mut(&mut tokens))?;
            ranks.receive_result(StageResult::Sums, bytemuck::cast_slice_mut(&mut sums))?;
            answer.argmax = tokens.into_iter().zip(sums).map(checked_argmax).collect();
            return Ok(answer);
        }
        answer.rows = shape.logit_rows.min(shape.rows);
        resize(&mut answer.logits, answer.rows, hyper.vocabulary)?;
        if answer.rows > 0 {
            ranks.receive_result(StageResult::Logits, bytemuck::cast_slice_mut(&mut answer.logits))?;
        }
        Ok(answer)
    }

    /// Receives the results of all steps that were passed on, and keeps them for [`PagedEngine::finish`]: the next message of the last
    /// stage is another one then.
    pub(super) fn settle(&mut self) {
        while !self.passed_on.is_empty() {
            let answer = self.receive_answer();
            self.answered.push_back(answer);
        }
    }

    /// Waits for all steps that were passed on, and forgets their results.
    pub(super) fn drain(&mut self) {
        self.settle();
        self.answered.clear();
        self.passed_steps.clear();
    }
}

impl Drop for PagedEngine {
    /// Results that nobody took would keep ranks from ending.
    fn drop(&mut self) {
        self.drain();
    }
}

//! Micro-batches: on a pipeline, the running sequences are divided into as many steps as there are stages, so that each stage has one
//! to compute. A sequence is in one of them at a time, except for parts of a prompt, which follow each other through the stages.

use std::collections::{HashSet, VecDeque};

use super::super::request::RequestId;
use super::{Batcher, BegunStep, StepPart, prompt_tokens};
use crate::engine::pipelined_batch;

/// The steps that stages of a pipeline compute.
#[derive(Default)]
pub(super) struct MicroBatches {
    /// Oldest first: their results come in this order.
    in_flight: VecDeque<Vec<StepPart>>,
    /// Steps so far.
    begun: u64,
}

impl Batcher {
    /// Begins steps until every stage has one, and returns the oldest. `None` if there is nothing to compute.
    pub(super) fn begin_micro_batches(&mut self) -> Option<BegunStep> {
        let (mut begun, mut prompts) = (0, 0);
        while self.micro_batches.in_flight.len() < self.engine.stages() {
            let mut parts = self.choose();
            if parts.is_empty() {
                break;
            }
            if let Err(error) = self.start(&mut parts) {
                return Some(BegunStep { parts, failed: Some(error), paced: None, guesses: false });
            }
            self.micro_batches.begun += 1;
            for part in &parts {
                let Some(sequence) = self.running.get_mut(part.index) else { continue };
                // Guesses are not known tokens.
                sequence.in_flight += part.tokens.min(sequence.remaining());
                sequence.latest_step = self.micro_batches.begun;
            }
            begun += 1;
            prompts += prompt_tokens(&parts);
            self.micro_batches.in_flight.push_back(parts);
        }
        let parts = self.micro_batches.in_flight.pop_front()?;
        // This call takes the time of the step that began, unless its stages wait for the prompt of the one that ends.
        let is_plain = begun == 1 && (prompts > 0 || prompt_tokens(&parts) == 0);
        let guesses = self.payoff.guesses();
        Some(BegunStep { parts, failed: None, paced: is_plain.then_some(prompts), guesses })
    }

    /// The sequences whose turn it is on a pipeline: an even part of those that run, first those that waited longest. `None` where
    /// there is one stage: all.
    pub(super) fn micro_batch(&self) -> Option<HashSet<RequestId>> {
        let stages = self.engine.stages();
        if stages <= 1 {
            return None;
        }
        let recurrent = self.is_recurrent();
        let mut ready: Vec<(u64, RequestId)> = self
            .running
            .iter()
            .filter(|sequence| sequence.remaining() > 0)
            // The state after a part of a prompt is kept for others when its results are there.
            .filter(|sequence| sequence.in_flight == 0 || !recurrent)
            .map(|sequence| (sequence.latest_step, sequence.id))
            .collect();
        ready.sort_unstable();
        // Some are left for the other stages that have nothing to do; and no step has more than its share, so that those that join
        // or leave do not make one large and another small for ever.
        let free = stages.saturating_sub(self.micro_batches.in_flight.len()).max(1);
        let most = ready.len().div_ceil(free).min(self.running.len().div_ceil(stages));
        Some(ready.into_iter().take(most).map(|(_, id)| id).collect())
    }

    /// Whether stages still compute something.
    pub(super) fn has_steps_in_flight(&self) -> bool {
        !self.micro_batches.in_flight.is_empty()
    }

    /// The most tokens of prompts in a step: on a pipeline few enough for each stage to have some.
    pub(super) fn prompt_part(&self) -> usize {
        let prompts = self.running.iter().filter(|sequence| !sequence.is_decoding());
        let tokens = prompts.map(|sequence| sequence.remaining()).sum();
        pipelined_batch(tokens, self.engine.stages(), usize::MAX)
    }

    /// A step has failed: adds what else is in flight to its parts. Nothing is in flight then.
    pub(super) fn fail_micro_batches(&mut self, parts: &mut Vec<StepPart>) {
        if self.engine.stages() <= 1 {
            return;
        }
        parts.extend(std::mem::take(&mut self.micro_batches.in_flight).into_iter().flatten());
        // A prompt may have several parts; its sequence fails once.
        let mut seen = HashSet::new();
        parts.retain(|part| self.index_of_part(part).is_some() && seen.insert(part.id));
        self.forget_micro_batches();
    }

    /// Waits for what is in flight, and forgets it.
    pub(super) fn forget_micro_batches(&mut self) {
        if self.engine.stages() <= 1 {
            return;
        }
        self.micro_batches.in_flight.clear();
        self.engine.discard();
        self.running.iter_mut().for_each(|sequence| sequence.in_flight = 0);
    }

    /// An error unless sequences and steps agree on what is in flight.
    pub(super) fn check_micro_batches(&self) -> Result<(), String> {
        for sequence in self.running.iter().filter(|_| self.engine.stages() > 1) {
            let own = |part: &&StepPart| part.id == sequence.id && part.restarts == sequence.restarts;
            let parts: Vec<&StepPart> = self.micro_batches.in_flight.iter().flatten().filter(own).collect();
            let guesses = if parts.iter().any(|part| !part.prompt) { sequence.draft.len() } else { 0 };
            let tokens = parts.iter().map(|part| part.tokens).sum::<usize>();
            if tokens != sequence.in_flight + guesses {
                let in_flight = sequence.in_flight;
                return Err(format!("{:?} has {in_flight} tokens in flight, not {tokens}", sequence.id));
            }
            if parts.len() > 1 && parts.iter().any(|part| !part.prompt) {
                return Err(format!("a token of {:?} is in two steps", sequence.id));
            }
        }
        Ok(())
    }
}

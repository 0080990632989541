//! Steps that a device begins before the host knows the results of the previous one.

use super::super::page_pool::PageId;
use super::super::paged_engine::{StepSequence, StepToken, bucket};
use super::{Batcher, StepPart};
use crate::Result;

impl Batcher {
    /// The step that runs ahead, if anybody needs it.
    pub(super) fn take_ahead(&mut self) -> Option<Vec<StepPart>> {
        let parts = self.ahead.take()?;
        if parts.iter().any(|part| self.index_near(part.id, part.index).is_some()) {
            return Some(parts);
        }
        self.engine.discard();
        None
    }

    /// Lets the device go on with the next step of all sequences before the host knows what it found in this one.
    pub(super) fn follow(&mut self, parts: &[StepPart]) -> Result<Option<Vec<StepPart>>> {
        if self.engine.stages() > 1 {
            return Ok(None);
        }
        let guesses = self.payoff.guesses() && (self.options.lookup > 0 || self.draft.is_some());
        // Windows give pages back after each step.
        if guesses || self.windows.is_some() || parts.iter().any(|part| part.prompt || part.tokens != 1) {
            return Ok(None);
        }
        let context = self.options.engine.context;
        let mut next: Vec<StepPart> = Vec::with_capacity(parts.len());
        let (mut running, mut going_on, mut missing) = (0, 0, 0);
        for part in parts {
            let index = self.index_near(part.id, part.index);
            let sequence = index.and_then(|index| self.running.get(index));
            let (Some(index), Some(sequence)) = (index, sequence) else {
                next.push(StepPart { index: usize::MAX, ..*part });
                continue;
            };
            running += 1;
            if !sequence.is_greedy() {
                return Ok(None);
            }
            if sequence.ends_with_next(context) {
                next.push(StepPart { index: usize::MAX, ..*part });
                continue;
            }
            going_on += 1;
            missing += sequence.missing_pages(sequence.computed + 2);
            next.push(StepPart { index, ..*part });
        }
        // Others wait for their first step, or the rows of those that ended are too many, or somebody would be put back.
        if running < self.running.len()
            || going_on == 0
            || bucket(going_on) < bucket(parts.len())
            || missing > self.pool.available()
        {
            return Ok(None);
        }
        for part in &next {
            let missing = self
                .running
                .get(part.index)
                .map_or(0, |sequence| sequence.missing_pages(sequence.computed + 2));
            let pages: Vec<PageId> = (0..missing).map_while(|_| self.take_page()).collect();
            if let Some(sequence) = self.running.get_mut(part.index) {
                sequence.pages.extend(pages);
            }
        }
        let sequence = |part: &StepPart| self.running.get(part.index);
        let tokens: Vec<StepToken> = (0..)
            .zip(&next)
            .map(|(number, part)| match sequence(part) {
                Some(sequence) => StepToken {
                    token: 0,
                    position: sequence.computed + 1,
                    sequence: number,
                    output: true,
                    hidden: false,
                    logits: false,
                },
                None => StepToken::UNUSED,
            })
            .collect();
        let tables: Vec<StepSequence<'_>> = next
            .iter()
            .map(|part| match sequence(part) {
                Some(sequence) => {
                    StepSequence { pages: &sequence.pages, lane: sequence.lane, ..StepSequence::NONE }
                }
                None => StepSequence::NONE,
            })
            .collect();
        Ok(self.engine.follow(&tokens, &tables)?.then_some(next))
    }
}

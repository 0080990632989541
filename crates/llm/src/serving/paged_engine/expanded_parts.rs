//! Steps in which the latent attention of some parts of prompts is expanded: those are the last tokens.

use quadriga_graph::PAGE_SLOTS;

use super::step_sizes::{bucket, coarse_bucket};
use super::{PagedEngine, StepToken};
use crate::models::{ExpandedParts, GraphShape};

/// What takes the place of a token between those whose attention is absorbed and those whose is expanded.
const GAP: StepToken = StepToken { output: false, ..StepToken::UNUSED };

/// A step whose tokens are computed in another order.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct DividedStep {
    /// The numbers of the tokens whose attention is absorbed, and of those whose is expanded.
    absorbed: Vec<usize>,
    expanded: Vec<usize>,
    /// The pages that the latter see.
    pages: usize,
}

impl DividedStep {
    /// Divides a step by the number of pages that each part is expanded over; `None` if none is.
    fn new(tokens: &[StepToken], pages_of: impl FnMut(&[StepToken]) -> Option<usize>) -> Option<DividedStep> {
        let mut divided = DividedStep { absorbed: Vec::new(), expanded: Vec::new(), pages: 0 };
        let (mut first, mut pages_of) = (0, pages_of);
        for own in tokens.chunk_by(|a, b| a.sequence == b.sequence) {
            let numbers = first..first + own.len();
            first = numbers.end;
            match pages_of(own) {
                Some(pages) => {
                    divided.pages += pages;
                    divided.expanded.extend(numbers);
                }
                None => divided.absorbed.extend(numbers),
            }
        }
        (!divided.expanded.is_empty()).then_some(divided)
    }

    /// The tokens in the order of the graph, and the shape of it, with at most so many pages that are expanded. What fills up either
    /// group is after its tokens.
    pub(super) fn arrange(
        &self,
        tokens: &[StepToken],
        shape: GraphShape,
        most: usize,
    ) -> (Vec<StepToken>, GraphShape) {
        let left = shape.tokens.saturating_sub(self.expanded.len());
        let absorbed = bucket(self.absorbed.len()).min(left).max(self.absorbed.len());
        let of = |numbers: &[usize]| -> Vec<StepToken> {
            numbers.iter().filter_map(|number| tokens.get(*number)).copied().collect()
        };
        let mut arranged = of(&self.absorbed);
        arranged.resize(absorbed, GAP);
        arranged.extend(of(&self.expanded));
        let pages = coarse_bucket(self.pages).min(most).max(self.pages);
        let parts = ExpandedParts { tokens: shape.tokens.saturating_sub(absorbed), pages };
        (arranged, GraphShape { expanded: Some(parts), ..shape })
    }

    /// The row of each output in the order of the step's own tokens, of those in the order of the graph.
    pub(super) fn restore(&self, tokens: &[StepToken], rows: &[usize]) -> Vec<usize> {
        let order = self.absorbed.iter().chain(&self.expanded);
        let outputs = order.filter(|number| tokens.get(**number).is_some_and(|token| token.output));
        let mut restored: Vec<(usize, usize)> = outputs.copied().zip(rows.iter().copied()).collect();
        restored.sort_unstable();
        restored.into_iter().map(|(_, row)| row).collect()
    }
}

impl PagedEngine {
    /// Divides a step if some of its parts of prompts attend to the expanded keys and values of all heads: each decides by its own
    /// tokens and pages, as long as those of all together are no more than the longest sequence may have.
    pub(super) fn divide(&self, tokens: &[StepToken]) -> Option<DividedStep> {
        self.model.hyperparameters().latent?;
        let mut left = self.expanded_pages();
        DividedStep::new(tokens, |own| {
            let last = own.last().filter(|token| token.sequence != usize::MAX)?;
            let pages = last.position / PAGE_SLOTS + 1;
            if pages > left || !self.options.expands(&self.model, own.len(), pages * PAGE_SLOTS) {
                return None;
            }
            left -= pages;
            Some(pages)
        })
    }

    /// The most pages that are expanded in a step.
    pub(super) fn expanded_pages(&self) -> usize {
        self.options.context.div_ceil(PAGE_SLOTS)
    }

    /// The smallest step with both forms, if there are such steps: its graph has the matrices of all.
    pub(super) fn smallest_expanded(&self, shape: GraphShape) -> Option<GraphShape> {
        let slots = self.expanded_pages() * PAGE_SLOTS;
        let expands = self.options.expands(&self.model, self.options.batch, slots);
        expands.then(|| {
            let parts = ExpandedParts { tokens: 1, pages: 1 };
            GraphShape { tokens: 2, expanded: Some(parts), ..shape }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_are_expanded_come_last_and_outputs_keep_their_order() {
        let of = |sequence: usize, output: bool| StepToken { sequence, output, ..StepToken::UNUSED };
        // A part of three tokens with two outputs, a token, a part of two, a token.
        let tokens =
            [of(0, false), of(0, true), of(0, true), of(1, true), of(2, false), of(2, true), of(3, true)];
        let pages = |own: &[StepToken]| (own.len() > 1).then_some(own.len());
        let divided = DividedStep::new(&tokens, pages).unwrap();
        assert_eq!(
            (divided.pages, &*divided.absorbed, &*divided.expanded),
            (5, &[3, 6][..], &[0, 1, 2, 4, 5][..])
        );
        let (arranged, shape) = divided.arrange(&tokens, GraphShape::new(8, 256), 9);
        assert_eq!(shape.expanded, Some(ExpandedParts { tokens: 6, pages: 6 }));
        let sequences: Vec<usize> = arranged.iter().map(|token| token.sequence).collect();
        assert_eq!(sequences, [1, 3, 0, 0, 0, 2, 2]);
        // Outputs by their rows: those of sequences 1 and 3, two of 0, one of 2.
        assert_eq!(divided.restore(&tokens, &[0, 1, 3, 4, 6]), [3, 4, 0, 6, 1]);
        assert_eq!(DividedStep::new(&tokens, |_| None), None);
    }

    #[test]
    fn gaps_have_no_output_and_leave_room_for_all_tokens() {
        let of = |sequence: usize| StepToken { sequence, ..StepToken::UNUSED };
        let tokens: Vec<StepToken> = [0, 1, 2, 3, 4, 4, 4, 4, 4, 4].map(of).into();
        let divided = DividedStep::new(&tokens, |own| (own.len() > 1).then_some(1)).unwrap();
        let groups = |len: usize| {
            let (arranged, shape) = divided.arrange(&tokens[..], GraphShape::new(len, 256), 1);
            let parts = shape.expanded.unwrap();
            assert_eq!((shape.tokens, parts.pages), (len, 1));
            assert!(arranged.len() <= len && parts.tokens >= 6);
            assert_eq!(arranged.iter().filter(|token| token.output).count(), 10);
            let rows: Vec<_> = arranged.iter().map(|token| token.sequence).collect();
            assert_eq!(&rows[len - parts.tokens..][..6], &[4; 6]);
            len - parts.tokens
        };
        assert_eq!((groups(10), groups(12)), (4, 4));
        let few: Vec<StepToken> = [0, 1, 2, 3, 5, 4, 4, 4, 4, 4, 4].map(of).into();
        let divided = DividedStep::new(&few, |own| (own.len() > 1).then_some(1)).unwrap();
        let (arranged, shape) = divided.arrange(&few, GraphShape::new(16, 256), 1);
        assert_eq!(shape.expanded, Some(ExpandedParts { tokens: 8, pages: 1 }));
        assert!(arranged[5..8].iter().all(|token| *token == GAP));
    }
}

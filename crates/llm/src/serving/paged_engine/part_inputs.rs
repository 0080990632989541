//! Steps of models with recurrent layers in which some sequences have one token, and others a part of a prompt.

use super::step_sizes::bucket;
use super::{PagedEngine, StepToken};
use crate::models::PromptParts;

/// The fewest tokens that parts are computed with: as many as a chunk of the delta rule has.
const MIN_PART: usize = 16;

impl PagedEngine {
    /// How many sequences of a step have one token, and how many have several. `None` if one sequence has all tokens, if each has one,
    /// or if the model has no recurrent layers.
    pub(super) fn prompt_parts(&self, tokens: &[StepToken]) -> Option<PromptParts> {
        if !self.recurrent {
            return None;
        }
        let mut parts = PromptParts { singles: 0, count: 0, length: 0 };
        for own in tokens.chunk_by(|a, b| a.sequence == b.sequence) {
            match own.len() {
                1 => parts.singles += 1,
                len => {
                    parts.count += 1;
                    parts.length = parts.length.max(len);
                }
            }
        }
        (parts.count > 0 && parts.singles + parts.count > 1).then_some(parts)
    }

    /// The sizes that such a step comes in. Lanes without a sequence have the states of what only fills it up, so that there may not be
    /// more of these.
    pub(super) fn padded_parts(&self, parts: PromptParts) -> PromptParts {
        let PromptParts { singles, count, length } = parts;
        let most = self.options().sequences.saturating_sub(count);
        PromptParts {
            singles: bucket(singles).min(most).max(singles),
            count,
            length: bucket(length.max(MIN_PART)),
        }
    }
}

/// Where the tokens of a step are that has sequences of one token and parts of prompts: the values of the graph's inputs.
#[derive(Default)]
pub(super) struct PartRows {
    single_rows: Vec<i32>,
    part_rows: Vec<i32>,
    part_ends: Vec<i32>,
    part_order: Vec<i32>,
    /// For each sequence of the graph, the number of its rows of states.
    states: Vec<usize>,
}

impl PartRows {
    /// Fills the inputs of a graph of `rows` tokens. A convolution remembers `before` tokens.
    pub(super) fn fill(&mut self, tokens: &[StepToken], rows: usize, shape: PromptParts, before: usize) {
        let PromptParts { singles, count, length } = shape;
        self.single_rows.clear();
        self.part_ends.clear();
        self.part_rows.clear();
        self.part_rows.resize(length * count, rows as i32);
        self.part_order.clear();
        let (mut of_singles, mut of_parts) = (Vec::new(), Vec::new());
        for (sequence, own) in tokens.chunk_by(|a, b| a.sequence == b.sequence).enumerate() {
            let first = self.part_order.len();
            if own.len() == 1 {
                self.part_order.push(of_singles.len() as i32);
                self.single_rows.push(first as i32);
                of_singles.push(sequence);
                continue;
            }
            let part = of_parts.len();
            of_parts.push(sequence);
            for token in 0..own.len() {
                let at = token * count + part;
                self.part_order.push((singles + at) as i32);
                if let Some(row) = self.part_rows.get_mut(at) {
                    *row = (first + token) as i32;
                }
            }
            let ends = own.len()..own.len() + before;
            self.part_ends.extend(ends.map(|row| (row * count + part) as i32));
        }
        // Rows without a token have any result. Sequences that are none go on from a row of their own.
        self.part_order.resize(rows, 0);
        let mut unused = of_singles.len() + of_parts.len()..;
        let padding = singles.saturating_sub(of_singles.len());
        self.single_rows.resize(singles, 0);
        self.states.clear();
        self.states.extend(of_singles);
        self.states.extend(unused.by_ref().take(padding));
        self.states.extend(of_parts);
    }

    /// Of the rows of states of a step, those of a sequence of the graph.
    pub(super) fn state(&self, sequence: usize) -> usize {
        self.states.get(sequence).copied().unwrap_or(usize::MAX)
    }

    /// The inputs by name.
    pub(super) fn inputs(&self, shape: PromptParts) -> impl Iterator<Item = (&'static str, &[i32])> {
        let singles = (shape.singles > 0).then_some(("single_rows", self.single_rows.as_slice()));
        let parts = [
            ("part_rows", self.part_rows.as_slice()),
            ("part_ends", self.part_ends.as_slice()),
            ("part_order", self.part_order.as_slice()),
        ];
        singles.into_iter().chain(parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_beside_each_other_and_results_are_found_in_their_order() {
        let of = |sequence: usize| StepToken { sequence, ..StepToken::UNUSED };
        // Sequences of 2, 1, 3 and 1 tokens; a convolution that remembers two.
        let tokens: Vec<StepToken> = [0, 0, 1, 2, 2, 2, 3].map(of).into();
        let shape = PromptParts { singles: 3, count: 2, length: 4 };
        let mut rows = PartRows::default();
        rows.fill(&tokens, 8, shape, 2);
        assert_eq!(rows.single_rows, [2, 6, 0]);
        assert_eq!(rows.part_rows, [0, 3, 1, 4, 8, 5, 8, 8]);
        // After two rows that are remembered: rows 2 and 3 of the first part, 3 and 4 of the second.
        assert_eq!(rows.part_ends, [4, 6, 7, 9]);
        assert_eq!(rows.part_order, [3, 5, 0, 4, 6, 8, 1, 0]);
        assert_eq!(rows.states, [1, 3, 4, 0, 2]);
    }
}

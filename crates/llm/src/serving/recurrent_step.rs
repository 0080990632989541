//! Steps of models with recurrent layers: which tokens are computed at once, and which states they read and write.

use super::page_pool::PrefixId;
use super::paged_engine::{PagedEngine, PassedStep, StepSequence, StepToken, Wanted};
use crate::Result;
use crate::engine::{MAX_PARTS, WASTED_PARTS, resize};
use crate::hyperparameters::Hyperparameters;

/// Tokens that are computed at once.
#[derive(Default)]
struct StepGroup<'s> {
    /// The tokens, whose sequences are numbered within the group.
    tokens: Vec<StepToken>,
    sequences: Vec<StepSequence<'s>>,
    /// The number of each output among all outputs of the step.
    outputs: Vec<usize>,
}

impl<'s> StepGroup<'s> {
    fn add(&mut self, tokens: &[StepToken], sequence: &StepSequence<'s>, first_output: usize) {
        let number = self.sequences.len();
        self.tokens.extend(tokens.iter().map(|token| StepToken { sequence: number, ..*token }));
        self.outputs.extend(first_output..first_output + tokens.iter().filter(|token| token.output).count());
        self.sequences.push(*sequence);
    }
}

/// The groups of a step: one, unless parts of prompts differ so much in their lengths, or are so many, that recurrent layers would
/// compute too much in vain. Sequences with one token are in the first group: what only fills that up writes to rows that others of
/// the step write afterwards.
fn groups<'s>(tokens: &[StepToken], sequences: &[StepSequence<'s>]) -> Vec<StepGroup<'s>> {
    let parts: Vec<&[StepToken]> = tokens.chunk_by(|a, b| a.sequence == b.sequence).collect();
    let numbers = group_numbers(&parts);
    let mut groups: Vec<StepGroup<'s>> = Vec::new();
    groups.resize_with(numbers.iter().max().map_or(0, |last| last + 1), StepGroup::default);
    // In the order of the step: the outputs of a single group are then those of the step.
    let mut outputs = 0;
    for (own, number) in parts.into_iter().zip(numbers) {
        let sequence = own.first().and_then(|token| sequences.get(token.sequence));
        if let Some((sequence, group)) = sequence.zip(groups.get_mut(number)) {
            group.add(own, sequence, outputs);
        }
        outputs += own.iter().filter(|token| token.output).count();
    }
    groups
}

/// The number of the group of each sequence.
fn group_numbers(parts: &[&[StepToken]]) -> Vec<usize> {
    let mut numbers = vec![0; parts.len()];
    let mut several: Vec<(usize, &mut usize)> =
        parts.iter().map(|own| own.len()).zip(&mut numbers).filter(|(tokens, _)| *tokens > 1).collect();
    // Longest first: each group begins with its longest part.
    several.sort_by_key(|(tokens, _)| std::cmp::Reverse(*tokens));
    let (mut number, mut size) = (0, GroupSize::default());
    for (tokens, own) in several {
        if !size.with(tokens).is_computed_at_once() {
            (number, size) = (number + 1, GroupSize::default());
        }
        size = size.with(tokens);
        *own = number;
    }
    numbers
}

/// The parts of prompts of a group.
#[derive(Clone, Copy, Default)]
struct GroupSize {
    parts: usize,
    tokens: usize,
    longest: usize,
}

impl GroupSize {
    /// With another part.
    fn with(self, tokens: usize) -> GroupSize {
        GroupSize { parts: self.parts + 1, tokens: self.tokens + tokens, longest: self.longest.max(tokens) }
    }

    fn is_computed_at_once(self) -> bool {
        self.parts <= MAX_PARTS && self.parts * self.longest <= WASTED_PARTS * self.tokens
    }
}

/// Copies a row of results; nothing where there is none.
fn put_row(results: &mut [f32], len: usize, row: usize, values: &[f32]) {
    let into = results.chunks_mut(len.max(1)).nth(row);
    into.into_iter().flatten().zip(values).for_each(|(into, value)| *into = *value);
}

/// The outputs of all groups of a step. Those of a single one stay where they are.
#[derive(Default)]
struct JoinedOutputs {
    several: bool,
    count: usize,
    embeds: bool,
    logits: Vec<f32>,
    hidden: Vec<f32>,
}

impl JoinedOutputs {
    fn new(groups: &[StepGroup<'_>], embeds: bool) -> JoinedOutputs {
        let count = groups.iter().map(|group| group.outputs.len()).sum();
        JoinedOutputs { several: groups.len() > 1, count, embeds, ..JoinedOutputs::default() }
    }

    /// Adds those of a group, which the engine has.
    fn add(&mut self, engine: &mut PagedEngine, outputs: &[usize]) -> Result<()> {
        if !self.several {
            return Ok(());
        }
        let Hyperparameters { vocabulary, width, .. } = *engine.model().hyperparameters();
        resize(&mut self.logits, self.count, vocabulary)?;
        resize(&mut self.hidden, if self.embeds { self.count } else { 0 }, width)?;
        for (own, output) in outputs.iter().enumerate() {
            put_row(&mut self.logits, vocabulary, *output, engine.logits(own)?);
            put_row(&mut self.hidden, width, *output, engine.hidden(own));
        }
        Ok(())
    }

    /// Gives the engine those of all groups.
    fn finish(self, engine: &mut PagedEngine) {
        if self.several {
            engine.set_outputs(self.logits, self.hidden, self.count);
        }
    }
}

impl PagedEngine {
    /// Computes a step of a model with recurrent layers: one token of each sequence, and parts of prompts of about the same length.
    /// On a pipeline all of them are passed on, and their results waited for later.
    pub(super) fn run_recurrent(
        &mut self,
        tokens: &[StepToken],
        sequences: &[StepSequence<'_>],
        wanted: Wanted,
    ) -> Result<()> {
        let groups = groups(tokens, sequences);
        let embeds = tokens.iter().any(|token| token.output && token.hidden);
        let mut joined = JoinedOutputs::new(&groups, embeds);
        let mut written: Vec<(usize, usize)> = Vec::new();
        for group in &groups {
            let rows = self.choose_rows(group, &written);
            self.set_state_rows(&rows, &group.sequences);
            // The outputs of several groups are joined on the host.
            let wanted = if groups.len() > 1 { Wanted::AllLogits } else { wanted };
            self.start_together(&group.tokens, &group.sequences, wanted)?;
            if !self.has_stages() {
                self.finish()?;
                joined.add(self, &group.outputs)?;
            }
            written.extend(group.sequences.iter().zip(rows).map(|(sequence, [_, to])| (sequence.lane, to)));
        }
        match self.has_stages() {
            true => self.pass_on_step(groups.into_iter().map(|group| group.outputs).collect(), embeds),
            false => joined.finish(self),
        }
        // Only now: after an error, the whole step is computed again.
        self.note_states(written);
        if self.has_stages() {
            // Ranks of a pipeline end with one.
            self.keep_states();
        }
        Ok(())
    }

    /// Waits for the results of the oldest step that was passed on: those of all its groups.
    pub(super) fn receive_step(&mut self, PassedStep { groups, embeds }: PassedStep) -> Result<()> {
        let (several, count) = (groups.len() > 1, groups.iter().map(Vec::len).sum());
        let mut joined = JoinedOutputs { several, count, embeds, ..JoinedOutputs::default() };
        for outputs in &groups {
            self.receive_results()?;
            joined.add(self, outputs)?;
        }
        joined.finish(self);
        Ok(())
    }

    /// The rows of states that each sequence of a group reads and writes.
    fn choose_rows(&mut self, group: &StepGroup<'_>, written: &[(usize, usize)]) -> Vec<[usize; 2]> {
        let mut taken: Vec<usize> = written.iter().map(|(_, row)| *row).collect();
        let states = self.states_mut();
        let mut rows = Vec::with_capacity(group.sequences.len());
        for StepSequence { lane, checkpoint, .. } in &group.sequences {
            let kept = checkpoint.and_then(|kind| states.take(kind, &taken));
            let to = kept.unwrap_or_else(|| states.other_row(*lane));
            taken.push(to);
            rows.push([states.row(*lane), to]);
        }
        rows
    }

    /// Notes which rows of states the next batch reads and writes. Sequences that only fill it up begin anew, and write to rows of
    /// lanes that have no part in it and hold no state.
    fn set_state_rows(&mut self, rows: &[[usize; 2]], sequences: &[StepSequence<'_>]) {
        let lanes = self.options().sequences;
        let unused = (0..lanes).filter(|lane| !sequences.iter().any(|sequence| sequence.lane == *lane));
        let padding: Vec<[usize; 2]> = unused.map(|lane| [0, self.states_mut().other_row(lane)]).collect();
        self.set_pieces(rows.iter().chain(&padding));
    }

    /// Gives a lane the state after a prefix. False if there is none.
    pub(super) fn start_from(&mut self, lane: usize, prefix: PrefixId) -> bool {
        self.states_mut().start_from(lane, prefix)
    }

    /// Whether there is a state after a prefix.
    pub(super) fn has_state(&self, prefix: PrefixId) -> bool {
        self.states().has(prefix)
    }

    /// Makes the state of a lane findable, if its latest step was to keep it. False if it is not, or another one is.
    pub(super) fn publish_state(&mut self, lane: usize, prefix: PrefixId) -> bool {
        self.states_mut().publish(lane, prefix)
    }

    /// Forgets the state after a prefix.
    pub(super) fn forget_state(&mut self, prefix: PrefixId) {
        self.states_mut().forget(prefix);
    }

    /// Forgets the recurrent state of a lane.
    pub(super) fn reset_lane(&mut self, lane: usize) {
        self.states_mut().set(lane, 0);
    }
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;

    fn groups_of(lengths: &[usize]) -> Vec<(Vec<usize>, Vec<usize>)> {
        let of = |sequence: usize| StepToken { sequence, ..StepToken::UNUSED };
        let last = |(at, len): (usize, &usize)| {
            let tokens = vec![StepToken { output: false, ..of(at) }; len - 1];
            tokens.into_iter().chain([of(at)])
        };
        let tokens: Vec<StepToken> = lengths.iter().enumerate().flat_map(last).collect();
        let sequences: Vec<StepSequence<'_>> =
            (0..lengths.len()).map(|lane| StepSequence { lane, ..StepSequence::NONE }).collect();
        let groups = groups(&tokens, &sequences);
        for group in &groups {
            let numbers: Vec<usize> = group.tokens.iter().map(|token| token.sequence).collect();
            assert!(numbers.is_sorted() && numbers.last() == Some(&(group.sequences.len() - 1)));
        }
        let lanes = |group: &StepGroup<'_>| group.sequences.iter().map(|sequence| sequence.lane).collect();
        groups.iter().map(|group| (lanes(group), group.outputs.clone())).collect()
    }

    #[test]
    fn parts_of_about_the_same_length_are_computed_with_all_single_tokens() {
        assert_eq!(groups_of(&[1, 1, 1]), [(vec![0, 1, 2], vec![0, 1, 2])]);
        assert_eq!(groups_of(&[5]), [(vec![0], vec![0])]);
        assert_eq!(groups_of(&[1, 30, 1, 40]), [(vec![0, 1, 2, 3], vec![0, 1, 2, 3])]);
        // For 100 and 2 tokens, 200 are computed; for two more of 2 tokens it would be 300.
        let apart = [(vec![0, 1, 4], vec![0, 1, 4]), (vec![2, 3], vec![2, 3])];
        assert_eq!(groups_of(&[2, 100, 2, 2, 1]), apart);
        assert_eq!(groups_of(&[30, 100, 100, 30]).len(), 1);
        assert_eq!(groups_of(&[20; MAX_PARTS]).len(), 1);
        assert_eq!(groups_of(&[20; MAX_PARTS + 1]).len(), 2);
    }
}

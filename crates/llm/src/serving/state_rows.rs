//! Which rows of the recurrent states hold which sequence, and which are checkpoints of prefixes.
//!
//! A running sequence has a lane with two rows: a step reads the one that holds its state and writes the other, so that a step
//! that fails has changed nothing. A step that ends with a page can write a row of the checkpoints instead: then the sequence
//! goes on from there, and so does every later one that begins with the same tokens, without any copy. Row 0 is the state of an
//! empty sequence, and is never written.

use std::collections::HashMap;

use super::page_pool::PrefixId;
use crate::engine::STATES_OF_SEQUENCE;

/// What a recurrent state is kept after.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum KeptState {
    /// Whole pages of a prompt.
    Prompt,
    /// Whole pages of a prompt and its answer.
    Answer,
}

/// The rows of recurrent states. All methods are pure bookkeeping.
pub(super) struct StateRows {
    /// The row that holds the state of each lane.
    lanes: Vec<usize>,
    checkpoints: Vec<Checkpoint>,
    /// The most checkpoints that are states of answers: the others are left to prompts, which conversations return to where an
    /// answer is regenerated, a message is edited, or reasoning is left out.
    answers: usize,
    /// The checkpoint after each prefix.
    findable: HashMap<PrefixId, usize>,
    clock: u64,
}

#[derive(Clone, Default, Debug)]
struct Checkpoint {
    /// What it is the state after; `None` if it holds nothing that can be found.
    prefix: Option<PrefixId>,
    /// Whether it was taken for the state of an answer.
    answer: bool,
    /// Lanes whose state this is.
    users: usize,
    /// When it was used last.
    used: u64,
}

impl StateRows {
    /// Rows for some lanes, all of them empty, and for some checkpoints: one for the prompt of each lane, as far as there are so
    /// many.
    pub(super) fn new(lanes: usize, checkpoints: usize) -> StateRows {
        StateRows {
            lanes: vec![0; lanes],
            checkpoints: vec![Checkpoint::default(); checkpoints],
            answers: checkpoints.saturating_sub(lanes),
            findable: HashMap::new(),
            clock: 0,
        }
    }

    /// The row of the first checkpoint.
    fn first_checkpoint(&self) -> usize {
        1 + STATES_OF_SEQUENCE * self.lanes.len()
    }

    fn checkpoint_at(&mut self, row: usize) -> Option<&mut Checkpoint> {
        let first = self.first_checkpoint();
        self.checkpoints.get_mut(row.checked_sub(first)?)
    }

    /// The row that holds the state of a lane.
    pub(super) fn row(&self, lane: usize) -> usize {
        self.lanes.get(lane).copied().unwrap_or(0)
    }

    /// A row of a lane that does not hold its state.
    pub(super) fn other_row(&self, lane: usize) -> usize {
        let first = 1 + STATES_OF_SEQUENCE * lane;
        if self.row(lane) == first { first + 1 } else { first }
    }

    /// From now on, a row holds the state of a lane.
    pub(super) fn set(&mut self, lane: usize, row: usize) {
        let before = self.row(lane);
        if let Some(checkpoint) = self.checkpoint_at(before) {
            checkpoint.users = checkpoint.users.saturating_sub(1);
        }
        if let Some(checkpoint) = self.checkpoint_at(row) {
            checkpoint.users += 1;
        }
        if let Some(lane) = self.lanes.get_mut(lane) {
            *lane = row;
        }
    }

    /// Whether there is a checkpoint after a prefix.
    pub(super) fn has(&self, prefix: PrefixId) -> bool {
        self.findable.contains_key(&prefix)
    }

    /// Gives a lane the state after a prefix. False if there is none.
    pub(super) fn start_from(&mut self, lane: usize, prefix: PrefixId) -> bool {
        let Some(at) = self.findable.get(&prefix).copied() else { return false };
        self.clock += 1;
        let clock = self.clock;
        if let Some(checkpoint) = self.checkpoints.get_mut(at) {
            checkpoint.used = clock;
        }
        self.set(lane, self.first_checkpoint() + at);
        true
    }

    /// The row of a checkpoint that may be overwritten: one that holds nothing, or the one that was not used for the longest time,
    /// of answers where these have as many as they may. What it held cannot be found any more. `None` if all that it may be hold the
    /// states of lanes, or are in `taken`.
    pub(super) fn take(&mut self, kind: KeptState, taken: &[usize]) -> Option<usize> {
        let first = self.first_checkpoint();
        let is_taken = |at: usize| taken.contains(&(first + at));
        let holds = |at: usize, own: &Checkpoint| own.prefix.is_some() || own.users > 0 || is_taken(at);
        let all = || self.checkpoints.iter().enumerate();
        let answers = all().filter(|(at, own)| own.answer && holds(*at, own)).count();
        let only_answers = kind == KeptState::Answer && answers >= self.answers;
        let unused = all().filter(|(at, own)| own.users == 0 && !is_taken(*at));
        let unused = unused.filter(|(_, own)| !only_answers || own.answer && own.prefix.is_some());
        let (at, _) = unused.min_by_key(|(_, own)| (own.prefix.is_some(), own.used))?;
        let own = self.checkpoints.get_mut(at)?;
        own.answer = kind == KeptState::Answer;
        if let Some(prefix) = own.prefix.take() {
            self.findable.remove(&prefix);
        }
        Some(first + at)
    }

    /// Makes the state of a lane findable as the one after a prefix, if it is in a row of the checkpoints. False if it is not, or
    /// if there is another one.
    pub(super) fn publish(&mut self, lane: usize, prefix: PrefixId) -> bool {
        let row = self.row(lane);
        let Some(at) = row.checked_sub(self.first_checkpoint()) else { return false };
        self.clock += 1;
        let clock = self.clock;
        if self.findable.contains_key(&prefix) {
            return false;
        }
        if let Some(checkpoint) = self.checkpoints.get_mut(at).filter(|own| own.prefix.is_none()) {
            (checkpoint.prefix, checkpoint.used) = (Some(prefix), clock);
            self.findable.insert(prefix, at);
            return true;
        }
        false
    }

    /// Forgets the checkpoint after a prefix. Lanes whose state it is go on.
    pub(super) fn forget(&mut self, prefix: PrefixId) {
        if let Some(checkpoint) = self.findable.remove(&prefix).and_then(|at| self.checkpoints.get_mut(at)) {
            checkpoint.prefix = None;
        }
    }

    /// An error unless the users of each checkpoint are the lanes whose state it is, and what is findable is there.
    pub(super) fn check(&self) -> Result<(), String> {
        let first = self.first_checkpoint();
        for (at, checkpoint) in self.checkpoints.iter().enumerate() {
            let users = self.lanes.iter().filter(|row| **row == first + at).count();
            if users != checkpoint.users {
                return Err(format!("checkpoint {at} has {} users, {users} were found", checkpoint.users));
            }
            if checkpoint.prefix.is_some_and(|prefix| self.findable.get(&prefix) != Some(&at)) {
                return Err(format!("checkpoint {at} cannot be found"));
            }
        }
        let answers = self.checkpoints.iter().filter(|own| own.answer && own.prefix.is_some()).count();
        if answers > self.answers {
            return Err(format!("{answers} checkpoints are of answers, {} may be", self.answers));
        }
        let known = self.checkpoints.iter().filter(|checkpoint| checkpoint.prefix.is_some()).count();
        if known != self.findable.len() {
            return Err(format!("{} checkpoints are found, {known} are there", self.findable.len()));
        }
        for (lane, row) in self.lanes.iter().enumerate() {
            let own = 1 + STATES_OF_SEQUENCE * lane;
            if *row != 0 && *row < first && !(own..own + STATES_OF_SEQUENCE).contains(row) {
                return Err(format!("lane {lane} has row {row} of another one"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use quadriga_conformance::Rng;

    use super::*;
    use crate::serving::page_pool::PagePool;

    /// Every row's content is known: the tokens after which it is the state.
    #[test]
    fn any_history_gives_every_sequence_its_own_state() {
        for seed in 0..60 {
            let mut rng = Rng::new(seed);
            let (lanes, checkpoints) = (rng.range(1, 5), rng.below(7));
            let mut rows = StateRows::new(lanes, checkpoints);
            let mut contents: Vec<Vec<u64>> = vec![Vec::new(); 1 + 2 * lanes + checkpoints];
            let mut texts: Vec<Vec<u64>> = vec![Vec::new(); lanes];
            // Prefixes by their text: few, so that they are met again.
            let prefix = |text: &[u64]| PagePool::root(text.iter().fold(1, |all, token| all * 3 + token));
            for _ in 0..300 {
                let lane = rng.below(lanes);
                match rng.below(4) {
                    0 => {
                        rows.set(lane, 0);
                        texts[lane].clear();
                        let wanted: Vec<u64> = (0..rng.range(1, 3)).map(|_| rng.below(2) as u64).collect();
                        if rows.start_from(lane, prefix(&wanted)) {
                            texts[lane] = wanted;
                        }
                    }
                    1 => {
                        let text = &texts[lane];
                        if !text.is_empty() {
                            rows.forget(prefix(text));
                        }
                    }
                    _ => {
                        assert_eq!(contents[rows.row(lane)], texts[lane], "seed {seed}");
                        let mut text = texts[lane].clone();
                        text.push(rng.below(2) as u64);
                        let kind = if rng.chance(0.5) { KeptState::Prompt } else { KeptState::Answer };
                        let keeps = rng.chance(0.5).then(|| rows.take(kind, &[])).flatten();
                        let to = keeps.unwrap_or_else(|| rows.other_row(lane));
                        assert!(to != 0 && to != rows.row(lane), "seed {seed}");
                        contents[to] = text.clone();
                        // A step that fails is computed again.
                        if rng.chance(0.8) {
                            rows.set(lane, to);
                            if keeps.is_some() {
                                rows.publish(lane, prefix(&text));
                            }
                            texts[lane] = text;
                        }
                    }
                }
                rows.check().unwrap();
                for (lane, text) in texts.iter().enumerate() {
                    assert_eq!(contents[rows.row(lane)], *text, "seed {seed}");
                }
            }
        }
    }

    #[test]
    fn answers_leave_each_lane_a_checkpoint_for_its_prompt() {
        let prefix = |number: u64| PagePool::root(number);
        let mut rows = StateRows::new(2, 3);
        let mut keep = |kind: KeptState, number: u64| {
            let row = rows.take(kind, &[]);
            if let Some(row) = row {
                rows.set(0, row);
                assert!(rows.publish(0, prefix(number)));
                // The lane goes on in a row of its own.
                rows.set(0, rows.other_row(0));
            }
            rows.check().unwrap();
            [1, 2, 3, 4, 5, 6].map(|number| rows.has(prefix(number)))
        };
        keep(KeptState::Prompt, 1);
        keep(KeptState::Answer, 2);
        assert_eq!(keep(KeptState::Prompt, 3), [true, true, true, false, false, false]);
        assert_eq!(keep(KeptState::Answer, 4), [true, false, true, true, false, false]);
        // A prompt takes the one that was not used for the longest time.
        assert_eq!(keep(KeptState::Prompt, 5), [false, false, true, true, true, false]);
        assert_eq!(keep(KeptState::Answer, 6), [false, false, true, false, true, true]);
        // Without room for answers none is kept.
        let mut rows = StateRows::new(2, 2);
        assert!(rows.take(KeptState::Answer, &[]).is_none());
        assert!(rows.take(KeptState::Prompt, &[]).is_some());
    }
}

//! Branch and bound: is there a packing within a given capacity?
//!
//! The search places items from the bottom up. For each unplaced item it keeps the *lowest* offset that is still
//! possible; the *skyline* at a section is the minimum of these over the section's items. A range of sections with
//! equal skyline between higher ones is a *niche*: an item at the bottom of a niche must fit between its sides, and
//! nothing can be placed below it. So at any section of a niche there are few branches: one of the live items that fit
//! into the niche is placed at the skyline, or none is, and then each of them rests on another item. The search picks
//! the section with the fewest branches and tries them in turn.
//!
//! Pruning:
//! - a branch fails at a section where skyline and unplaced bytes together exceed the capacity; where they equal it, no
//!   gap is allowed;
//! - unplaced items whose lifetimes no longer connect them form separate *components*, which are solved independently;
//! - a failed component is memoized by its items and their lowest offsets.
//!
//! With several chunks (see [`boundaries`](super::boundaries)) lowest offsets are moved up so that no item crosses a
//! chunk boundary.
//!
//! Running times are heavy-tailed: a wrong decision near the root costs an exponential search below it. So the search
//! restarts: it runs with each of several [branching rules](branching_rule) under a small step limit, then under a
//! larger one, and so on; memoized failures carry over.

mod branch_point;
mod branching_rule;
mod decide;
mod search_state;

use super::boundaries::ChunkBoundaries;
use super::timeline::Timeline;
use branching_rule::RULES;
use decide::{Frame, FrameAction, FrameEvent};
use search_state::SearchState;

/// The most items that are searched.
pub(super) const MAX_ITEMS: usize = 2048;
/// The greatest search depth; a branch beyond it counts as unknown.
const MAX_DEPTH: usize = 4 * MAX_ITEMS;
/// The step limit per item of the first restarts.
const FIRST_LIMIT: u64 = 1000;

/// Whether a packing within a capacity exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Feasibility {
    /// Yes: with this peak, at the offsets written.
    Feasible(u64),
    /// No.
    Infeasible,
    /// The steps ran out first.
    Unknown,
}

/// The outcome of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Feasible,
    Infeasible,
    Unknown,
}

/// The search, with its working memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Exact {
    state: SearchState,
    frames: Vec<Frame>,
}

impl Exact {
    /// Reads the items. False if they are too many for this search, or some are larger than a chunk.
    pub(crate) fn read(&mut self, timeline: &Timeline, boundaries: &ChunkBoundaries) -> bool {
        if timeline.items.len() > MAX_ITEMS || boundaries.has_large() {
            return false;
        }
        self.state.read(timeline, boundaries);
        true
    }

    /// The greatest common divisor of all sizes; offsets that are no multiple of it need not be tried.
    pub(crate) fn unit(&self) -> u64 {
        self.state.unit
    }

    /// Searches for a packing within `capacity`, in at most `steps` steps (items visited). Returns the result and the
    /// steps taken. The seed decides which branching rule comes first.
    pub(crate) fn solve(
        &mut self,
        capacity: u64,
        steps: u64,
        seed: u64,
        offsets: &mut Vec<u64>,
    ) -> (Feasibility, u64) {
        self.state.begin(capacity, steps);
        let mut limit = FIRST_LIMIT * self.state.items.len() as u64;
        let mut spent = 0;
        loop {
            for attempt in 0..RULES.len() as u64 {
                let rule = RULES.get(((attempt + seed % 64) % RULES.len() as u64) as usize);
                self.state.restart(rule.copied().unwrap_or_default(), limit.min(steps - spent));
                let outcome = self.run();
                // At least one step a run, so that runs which end by their depth do not repeat forever.
                spent += self.state.spent.max(1);
                match outcome {
                    Outcome::Feasible => return (Feasibility::Feasible(self.state.write(offsets)), spent),
                    Outcome::Infeasible => return (Feasibility::Infeasible, spent),
                    Outcome::Unknown if spent >= steps => return (Feasibility::Unknown, spent),
                    Outcome::Unknown => {}
                }
            }
            limit = limit.saturating_mul(4);
        }
    }

    /// One run: branches until all items are placed, no branch is left, or the limit is reached.
    ///
    /// Frames are kept in a vector, because the search may be deeper than the thread's stack allows.
    fn run(&mut self) -> Outcome {
        self.frames.clear();
        self.frames.push(self.state.whole());
        let mut event = FrameEvent::Begin;
        while let Some(frame) = self.frames.last_mut() {
            match self.state.decide(frame, event) {
                FrameAction::Push(deeper) if self.frames.len() < MAX_DEPTH => {
                    self.frames.push(deeper);
                    event = FrameEvent::Begin;
                }
                FrameAction::Push(_) => event = FrameEvent::Ended(Outcome::Unknown),
                FrameAction::Done(outcome) => {
                    self.frames.pop();
                    event = FrameEvent::Ended(outcome);
                }
            }
        }
        match event {
            FrameEvent::Ended(outcome) => outcome,
            FrameEvent::Begin => Outcome::Unknown,
        }
    }
}

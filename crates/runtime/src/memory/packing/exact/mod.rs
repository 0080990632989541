//! Exact packing: does everything fit below a given capacity?
//!
//! The search builds the pile from the bottom. What it knows of an item that is not placed yet is the *lowest* offset
//! that is left for it; the *floor* of a section is the least of these over its items. A range of sections with one
//! floor between higher ones is a *valley*: whatever comes to lie on its floor has to fit between its walls, and nothing
//! can ever come below it. So at any section of a valley there are few possibilities: one of the items that are alive
//! there and fit into the valley lies on the floor, or none does, and then each of them lies on another item. The search
//! takes the section with the fewest possibilities and tries them in turn.
//!
//! Three things keep it short:
//! - a section whose floor and remaining items together exceed the capacity ends a branch; where they just fill it,
//!   nothing may be left empty there;
//! - items that no longer share time with each other fall apart into *components*, which are solved on their own;
//! - a component that failed is remembered by its items and their lowest offsets, and never tried again.
//!
//! Where no item may lie across a wall (see [`walls`](super::walls)), lowest offsets are moved up to where it does not.
//!
//! Such searches are over soon or never: a bad decision at the bottom cannot be mended at the top. So it is run in many
//! *styles* with a small limit, then with a larger one, and so on; failures are remembered from run to run.

mod decide;
mod state;
mod style;
mod valley;

use super::timeline::Timeline;
use super::walls::Walls;
use decide::{Action, Event, Frame};
use state::State;
use style::STYLES;

/// The most items that are considered together.
const ITEMS: usize = 2048;
/// The longest chain of decisions that is followed; beyond it the answer is "unknown".
const DEPTH: usize = 4 * ITEMS;
/// The steps of the first runs, for each item; later runs get more.
const FIRST_LIMIT: u64 = 1000;

/// What a search for a packing below a capacity found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// A packing with this peak, which is now in the offsets.
    Fits(u64),
    /// There is none.
    Impossible,
    /// The steps ran out first.
    Unknown,
}

/// How a frame ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Fits,
    Impossible,
    Unknown,
}

/// The search, with its working memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Exact {
    state: State,
    frames: Vec<Frame>,
}

impl Exact {
    /// Reads the items. False when there are too many for this search, or some have chunks of their own.
    pub(crate) fn read(&mut self, timeline: &Timeline, walls: &Walls) -> bool {
        if timeline.items.len() > ITEMS || walls.has_large() {
            return false;
        }
        self.state.read(timeline, walls);
        true
    }

    /// The unit in which peaks grow: sizes are multiples of it, and so are all offsets worth trying.
    pub(crate) fn unit(&self) -> u64 {
        self.state.unit
    }

    /// Looks for a packing below `capacity`, taking at most `steps` steps; a step is a look at one item. Returns the
    /// verdict and the steps taken. The seed decides with which style to begin.
    pub(crate) fn solve(
        &mut self,
        capacity: u64,
        steps: u64,
        seed: u64,
        offsets: &mut Vec<u64>,
    ) -> (Verdict, u64) {
        self.state.begin(capacity, steps);
        let mut limit = FIRST_LIMIT * self.state.items.len() as u64;
        let mut spent = 0;
        loop {
            for turn in 0..STYLES.len() as u64 {
                let style = STYLES.get(((turn + seed % 64) % STYLES.len() as u64) as usize);
                self.state.restart(style.copied().unwrap_or_default(), limit.min(steps - spent));
                let answer = self.run();
                // Every run counts, so that runs which end by their depth alone come to an end.
                spent += self.state.spent.max(1);
                match answer {
                    Answer::Fits => return (Verdict::Fits(self.state.write(offsets)), spent),
                    Answer::Impossible => return (Verdict::Impossible, spent),
                    Answer::Unknown if spent >= steps => return (Verdict::Unknown, spent),
                    Answer::Unknown => {}
                }
            }
            limit = limit.saturating_mul(4);
        }
    }

    /// One run: decides until everything is placed, nothing is left to try, or the limit is reached.
    ///
    /// The chain of decisions is kept in `frames` and not on the thread's stack, whose size nobody knows.
    fn run(&mut self) -> Answer {
        self.frames.clear();
        self.frames.push(self.state.whole());
        let mut event = Event::Begin;
        while let Some(frame) = self.frames.last_mut() {
            match self.state.decide(frame, event) {
                Action::Push(deeper) if self.frames.len() < DEPTH => {
                    self.frames.push(deeper);
                    event = Event::Begin;
                }
                Action::Push(_) => event = Event::Ended(Answer::Unknown),
                Action::Done(answer) => {
                    self.frames.pop();
                    event = Event::Ended(answer);
                }
            }
        }
        match event {
            Event::Ended(answer) => answer,
            Event::Begin => Answer::Unknown,
        }
    }
}

//! Which requests run: waiting ones start when there is room, and running ones are put back for want of pages.

use std::cmp::Reverse;

use super::super::page_pool::PageId;
use super::super::request::RequestId;
use super::super::sequence::Sequence;
use super::super::window_pages::WindowPool;
use super::Batcher;

/// A prompt is computed to its end before that of another client, unless it takes longer than so many batches.
const TURN: u64 = 4;

/// The prompt whose turn it is.
#[derive(Clone, Copy)]
pub(super) struct Turn {
    pub(super) id: RequestId,
    /// Tokens that had been computed for its client when its turn began.
    served: u64,
}

impl Batcher {
    /// Starts waiting requests, as long as there are lanes for them, and pages for all that is known of them.
    pub(super) fn admit(&mut self) {
        self.choose_overdue();
        while !self.lanes.is_empty() {
            let Some(at) = self.next_waiting() else { return };
            let mut sequence = self.waiting.remove(at);
            self.find_prefix(&mut sequence);
            // Room for the next token, too, and for the prompts that are being computed.
            let needed = sequence.missing_pages(sequence.tokens.len() + 1) + self.promised_pages();
            if needed > self.pool.available() && !self.running.is_empty() {
                self.release_pages(&mut sequence);
                self.waiting.insert(at, sequence);
                return;
            }
            let Some(lane) = self.lanes.pop() else { return };
            // Only now: it would be copied for nothing, and again in the next step.
            self.copy_last_page(&mut sequence);
            sequence.lane = lane;
            self.start_state(&mut sequence);
            self.state.cached += sequence.count_found() as u64;
            self.running.push(sequence);
        }
    }

    /// Pages that the prompts of running sequences have yet to take.
    fn promised_pages(&self) -> usize {
        let prompts = self.running.iter().filter(|sequence| !sequence.is_decoding());
        prompts.map(|sequence| sequence.missing_pages(sequence.tokens.len() + 1)).sum()
    }

    /// The place of the request to start next.
    pub(super) fn next_waiting(&self) -> Option<usize> {
        let ready = self.waiting.iter().enumerate().filter(|(_, sequence)| self.is_ready(sequence));
        ready.min_by_key(|(_, sequence)| self.rank(sequence)).map(|(at, _)| at)
    }

    /// Chooses a request that got no token for very long: one at a time comes before all others until it ends, so that urgent ones
    /// wait for one and not for a long queue.
    fn choose_overdue(&mut self) {
        let all = || self.waiting.iter().chain(&self.running);
        if self.overdue.is_some_and(|id| all().any(|sequence| sequence.id == id)) {
            return;
        }
        let is_late = |sequence: &&Sequence| {
            self.state.steps.saturating_sub(sequence.waiting_since) >= self.options.patience
        };
        let waiting = self.waiting.iter().filter(is_late).filter(|sequence| self.is_ready(sequence));
        let late = waiting.chain(self.running.iter().filter(is_late));
        self.overdue = late.min_by_key(|sequence| (sequence.waiting_since, sequence.id)).map(|late| late.id);
    }

    /// Which of several prompts is started, and computed, first: by priority, then of the client that got least, then in their
    /// order. The one that is overdue comes before all.
    fn rank(&self, sequence: &Sequence) -> impl Ord + use<> {
        let served = self.served.get(&sequence.client).copied().unwrap_or(0);
        let served = self.turn.filter(|turn| turn.id == sequence.id).map_or(served, |turn| turn.served);
        (self.overdue != Some(sequence.id), Reverse(sequence.priority), served, sequence.id)
    }

    /// Sorts running sequences, each with its place, in the order in which their prompts are computed.
    pub(super) fn sort_prompts(&mut self, prompts: &mut [(usize, RequestId)]) {
        let most = TURN.saturating_mul(self.options.engine.batch as u64);
        let served = |turn: &Turn| {
            let client = self.index_of(turn.id).and_then(|at| self.running.get(at))?.client;
            self.served.get(&client).copied()
        };
        let is_over =
            |turn: &Turn| served(turn).is_none_or(|served| served.saturating_sub(turn.served) >= most);
        if self.turn.as_ref().is_some_and(is_over) {
            self.turn = None;
        }
        prompts.sort_by_cached_key(|(index, id)| {
            // Others may have been put back since.
            let index = self.index_near(*id, *index)?;
            self.running.get(index).map(|sequence| self.rank(sequence))
        });
    }

    /// Notes that a prompt is the first one of a step.
    pub(super) fn note_turn(&mut self, sequence: RequestId, client: u64) {
        if self.turn.is_none_or(|turn| turn.id != sequence) {
            self.turn = Some(Turn { id: sequence, served: self.served.get(&client).copied().unwrap_or(0) });
        }
    }

    /// Whether nobody else is about to compute the prompt of a waiting sequence.
    pub(super) fn is_ready(&self, sequence: &Sequence) -> bool {
        let Some(leader) = sequence.leader else { return true };
        match self.running.iter().find(|running| running.id == leader) {
            Some(running) => running.has_prompt(),
            None => !self.waiting.iter().any(|waiting| waiting.id == leader),
        }
    }

    /// Takes the pages for the next tokens of a running sequence, and puts younger sequences back until there are enough. False
    /// if it was put back itself, or has to wait for a step in flight.
    pub(super) fn ensure_pages(&mut self, id: RequestId, index: usize, tokens: usize) -> bool {
        loop {
            let Some(index) = self.index_near(id, index) else { return false };
            let Some(sequence) = self.running.get_mut(index) else { return false };
            let guesses = if tokens == 1 { sequence.draft.len() } else { 0 };
            if sequence.missing_pages(sequence.next_position() + tokens + guesses) > self.pool.available() {
                sequence.draft.clear();
            }
            let guesses = if tokens == 1 { sequence.draft.len() } else { 0 };
            let end = sequence.next_position() + tokens + guesses;
            let missing = sequence.missing_pages(end);
            let takes = |windows: &mut WindowPool| {
                let missing = windows.missing(&sequence.window_pages, end);
                windows.take(&mut sequence.window_pages, missing)
            };
            let enough = missing <= self.pool.available();
            let windows_enough = !enough || self.windows.as_mut().is_none_or(takes);
            if enough && windows_enough {
                let pages: Vec<PageId> = (0..missing).map_while(|_| self.take_page()).collect();
                if let Some(sequence) = self.running.get_mut(index) {
                    sequence.pages.extend(pages);
                }
                return true;
            }
            // Pages of windows suffice for the tokens of one step: those in flight give theirs back.
            if !windows_enough && self.has_steps_in_flight() {
                return false;
            }
            self.preempt();
        }
    }

    /// Puts back the running sequence of the lowest priority: of the client that has most of those the youngest. Its full pages
    /// stay findable for as long as nobody needs their memory. The one that is overdue keeps its pages.
    pub(super) fn preempt(&mut self) {
        let key = |sequence: &Sequence| {
            let is_older = |other: &&Sequence| {
                (other.client, other.priority) == (sequence.client, sequence.priority)
                    && other.id < sequence.id
            };
            let older = self.running.iter().filter(is_older).count();
            (self.overdue == Some(sequence.id), sequence.priority, Reverse(older), Reverse(sequence.id))
        };
        let numbered = self.running.iter().enumerate();
        let Some((at, _)) = numbered.min_by_key(|(_, sequence)| key(sequence)) else { return };
        let mut sequence = self.running.remove(at);
        self.release_pages(&mut sequence);
        self.release_lane(sequence.lane);
        self.state.preempted += 1;
        self.waiting.push(sequence);
    }
}

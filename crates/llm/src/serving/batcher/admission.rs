//! Which requests run: waiting ones start when there is room, and running ones are put back for want of pages.

use super::super::page_pool::PageId;
use super::super::request::RequestId;
use super::super::sequence::Sequence;
use super::super::window_pages::WindowPool;
use super::Batcher;

impl Batcher {
    /// Starts waiting requests, as long as there are lanes for them, and pages for all that is known of them.
    pub(super) fn admit(&mut self) {
        while !self.lanes.is_empty() {
            let Some(at) = self.next_waiting() else { return };
            let mut sequence = self.waiting.remove(at);
            self.find_prefix(&mut sequence);
            self.copy_last_page(&mut sequence);
            // Room for the next token, too.
            let needed = sequence.missing_pages(sequence.tokens.len() + 1);
            if needed > self.pool.available() && !self.running.is_empty() {
                self.release_pages(&mut sequence);
                self.waiting.insert(at, sequence);
                return;
            }
            let Some(lane) = self.lanes.pop() else { return };
            sequence.lane = lane;
            self.start_state(&mut sequence);
            self.state.cached += sequence.count_found() as u64;
            self.running.push(sequence);
        }
    }

    /// The place of the request to start next: by priority, then of the client that got least, then in their order. One that
    /// has waited for very long comes first.
    pub(super) fn next_waiting(&self) -> Option<usize> {
        let key = |sequence: &Sequence| {
            let served = self.served.get(&sequence.client).copied().unwrap_or(0);
            let is_patient = self.state.steps.saturating_sub(sequence.waiting_since) < self.options.patience;
            (is_patient, std::cmp::Reverse(sequence.priority), served, sequence.id)
        };
        let ready = self.waiting.iter().enumerate().filter(|(_, sequence)| self.is_ready(sequence));
        ready.min_by_key(|(_, sequence)| key(sequence)).map(|(at, _)| at)
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

    /// Puts back the running sequence of the lowest priority, of several the youngest. Its full pages stay findable for as long
    /// as nobody needs their memory.
    pub(super) fn preempt(&mut self) {
        let key = |sequence: &Sequence| (sequence.priority, std::cmp::Reverse(sequence.id));
        let numbered = self.running.iter().enumerate();
        let Some((at, _)) = numbered.min_by_key(|(_, sequence)| key(sequence)) else { return };
        let mut sequence = self.running.remove(at);
        self.release_pages(&mut sequence);
        self.release_lane(sequence.lane);
        self.state.preempted += 1;
        sequence.waiting_since = self.state.steps;
        self.waiting.push(sequence);
    }
}

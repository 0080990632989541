//! Common prefixes of sequences: pages that are found, shared and copied instead of computed.

use quadriga_graph::PAGE_SLOTS;

use super::super::page_file::PageFile;
use super::super::page_pool::{PagePool, PrefixId};
use super::super::sequence::Sequence;
use super::Batcher;

impl Batcher {
    /// Takes pages that hold the beginning of a sequence. The last token is computed in any case: its logits are needed.
    pub(super) fn find_prefix(&mut self, sequence: &mut Sequence) {
        let mut prefix = match sequence.prefix {
            Some(prefix) => prefix,
            None => PagePool::root(sequence.salt),
        };
        // Only whole pages from where its own pages end.
        if sequence.may_share()
            && sequence.in_flight == 0
            && sequence.computed == sequence.pages.len() * PAGE_SLOTS
            && sequence.published == sequence.pages.len()
        {
            let (last, before) = (sequence.tokens.len().saturating_sub(1), sequence.computed);
            let mut prefixes = Vec::new();
            let first = sequence.pages.len();
            while let Some(tokens) = sequence.tokens.get(sequence.computed..last)
                && let Some((page, next)) = self.find_page(prefix, tokens)
            {
                prefixes.push(std::mem::replace(&mut prefix, next));
                sequence.pages.push(page);
                sequence.published += 1;
                sequence.computed += PAGE_SLOTS;
            }
            // What begins alike twice may do so again: next time there will be a recurrent state.
            sequence.shared = sequence.shared.max(sequence.computed);
            // Only as far as there is everything that the next token needs.
            while !prefixes.is_empty() && !self.can_go_on(sequence, first, &prefixes, prefix) {
                prefix = prefixes.pop().unwrap_or(prefix);
                sequence.published -= 1;
                sequence.computed -= PAGE_SLOTS;
                if let Some(page) = sequence.pages.pop() {
                    self.pool.release(page);
                }
            }
            if sequence.computed > before {
                sequence.starts_from = self.is_recurrent().then_some(prefix);
                if let Some(windows) = &mut self.windows {
                    let pages = sequence.tokens.chunks(PAGE_SLOTS).enumerate().skip(first).zip(&prefixes);
                    let found = pages.map(|((number, tokens), prefix)| (number, *prefix, tokens));
                    windows.share(&mut sequence.window_pages, found, sequence.computed);
                    if sequence.computed == sequence.end_of_prompt_pages() {
                        windows.keep(&sequence.window_pages, sequence.computed);
                    }
                }
            }
            sequence.found += sequence.computed - before;
        }
        sequence.prefix = Some(prefix);
    }

    /// Whether a sequence can go on after the pages that it has, of which those from `first` on were found after `prefixes`: its
    /// window's pages and its recurrent state are there, too.
    pub(super) fn can_go_on(
        &self,
        sequence: &Sequence,
        first: usize,
        prefixes: &[PrefixId],
        end: PrefixId,
    ) -> bool {
        if self.is_recurrent() && !self.engine.has_state(end) {
            return false;
        }
        let Some(windows) = &self.windows else { return true };
        let seen = windows.first_page(sequence.computed).max(first);
        let pages = sequence.tokens.chunks(PAGE_SLOTS).skip(first).zip(prefixes);
        pages.skip(seen - first).all(|(tokens, prefix)| windows.has(*prefix, tokens))
    }

    /// Gives the lane of a sequence the recurrent state after the prefix that was found for it.
    pub(super) fn start_state(&mut self, sequence: &mut Sequence) {
        if let Some(prefix) = sequence.starts_from.take() {
            self.engine.start_from(sequence.lane, prefix);
        }
    }

    /// A prompt that another sequence has computed meanwhile is not computed again.
    pub(super) fn share_ahead(&mut self, index: usize) {
        if index >= self.running.len() {
            return;
        }
        let mut sequence = self.running.swap_remove(index);
        self.find_prefix(&mut sequence);
        self.start_state(&mut sequence);
        self.state.cached += sequence.count_found() as u64;
        self.running.push(sequence);
        let last = self.running.len() - 1;
        self.running.swap(index, last);
    }

    /// Copies the page in which the prompt ends from the sequence that has computed it. All but the last token is there then.
    pub(super) fn copy_last_page(&mut self, sequence: &mut Sequence) {
        let before = sequence.pages.len();
        let last = sequence.prompt() - 1;
        let leader =
            sequence.leader.and_then(|leader| self.running.iter().find(|running| running.id == leader));
        let Some(from) =
            leader.filter(|leader| leader.has_prompt()).and_then(|leader| leader.pages.get(before).copied())
        else {
            return;
        };
        let shares = sequence.may_share() && self.engine.model().hyperparameters().recurrent.is_none();
        let is_next = sequence.computed == before * PAGE_SLOTS
            && sequence.computed < last
            && last / PAGE_SLOTS == before;
        if !shares || !is_next {
            return;
        }
        let Some(page) = self.take_page() else { return };
        let copied = self.engine.copy_page(from, page);
        if !self.note_page_move(&copied) || !self.copy_window_page(sequence, before) {
            // The tokens are computed instead.
            self.pool.release(page);
            return;
        }
        sequence.pages.push(page);
        sequence.found += last - sequence.computed;
        sequence.computed = last;
    }

    /// Copies the page of a number of layers with a window from the sequence that has computed it, where those have pages of their own.
    pub(super) fn copy_window_page(&mut self, sequence: &mut Sequence, number: usize) -> bool {
        let Some(windows) = &mut self.windows else { return true };
        let leader = self.running.iter().find(|running| Some(running.id) == sequence.leader);
        let Some(from) = leader.and_then(|leader| leader.window_pages.get(number)) else { return false };
        if sequence.window_pages.end() != number || !windows.take(&mut sequence.window_pages, 1) {
            return false;
        }
        let Some(to) = sequence.window_pages.get(number) else {
            windows.pop(&mut sequence.window_pages);
            return false;
        };
        let copied = self.engine.copy_window_page(from, to);
        if copied.is_err() {
            windows.pop(&mut sequence.window_pages);
        }
        self.note_page_move(&copied)
    }

    /// Makes pages findable that are complete.
    pub(super) fn publish(&mut self, index: usize) {
        let recurrent = self.is_recurrent();
        let Some(sequence) = self.running.get_mut(index) else { return };
        while let Some(prefix) = sequence.prefix {
            let first = sequence.published * PAGE_SLOTS;
            let Some(tokens) =
                sequence.tokens.get(first..sequence.computed).filter(|t| t.len() >= PAGE_SLOTS)
            else {
                return;
            };
            let Some(page) = sequence.pages.get(sequence.published) else { return };
            let Some(next) = self.pool.publish(*page, prefix, tokens) else { return };
            if let Some(windows) = &mut self.windows {
                windows.publish(&sequence.window_pages, sequence.published, (prefix, tokens), next);
                let end = (sequence.published + 1) * PAGE_SLOTS;
                if end == sequence.end_of_prompt_pages() {
                    windows.keep(&sequence.window_pages, end);
                }
            }
            sequence.prefix = Some(next);
            sequence.published += 1;
            // Of an answer, only the latest recurrent state is kept.
            if recurrent
                && sequence.computed == sequence.published * PAGE_SLOTS
                && self.engine.publish_state(sequence.lane, next)
                && let Some(earlier) = sequence.note_kept(next)
            {
                self.engine.forget_state(earlier);
            }
        }
    }

    /// Forgets all prefixes that no running sequence uses: in the KV cache, in host memory and in the cache file.
    pub fn clear_prefixes(&mut self) {
        self.pool.clear();
        self.host.clear();
        let cleared = self.file.as_mut().map_or(Ok(()), PageFile::clear);
        if !self.note_page_move(&cleared) {
            // As after any other error of the file.
            self.file = None;
        }
        if let Some(windows) = &mut self.windows {
            windows.clear();
        }
    }
}

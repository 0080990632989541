//! Pages of layers with a sliding window, where those are apart from the pages of the other layers: a sequence has only the ones
//! that its window still reaches.

use quadriga_graph::PAGE_SLOTS;

use super::page_pool::{PageId, PagePool, PrefixId, PrefixKey};
use crate::engine::{EngineOptions, SCRAP_PAGES};
use crate::hyperparameters::{Hyperparameters, WindowSpan};

/// The pages of one sequence. Earlier ones were given back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct WindowPages {
    /// The number of the first page that it has.
    first: usize,
    pages: Vec<PageId>,
}

impl WindowPages {
    /// One past the number of the last page.
    pub(super) fn end(&self) -> usize {
        self.first + self.pages.len()
    }

    /// The pages of a sequence, from this number on.
    pub(super) fn new(first: usize, pages: Vec<PageId>) -> WindowPages {
        WindowPages { first, pages }
    }

    /// The number of the first page, and the pages from there on.
    pub(super) fn parts(&self) -> (usize, &[PageId]) {
        (self.first, &self.pages)
    }

    /// The page of a number.
    pub(super) fn get(&self, number: usize) -> Option<PageId> {
        self.pages.get(number.checked_sub(self.first)?).copied()
    }
}

/// The pages of all sequences.
pub(super) struct WindowPool {
    pool: PagePool,
    span: WindowSpan,
}

impl WindowPool {
    /// The pages that an engine of these options has for window layers; `None` if they have none of their own.
    pub(super) fn new(options: &EngineOptions, hyper: &Hyperparameters) -> Option<WindowPool> {
        let pool = PagePool::new(SCRAP_PAGES, options.window_pages(hyper)?);
        Some(WindowPool { pool: pool.keeping(options.kept_window_pages(hyper)), span: hyper.window_span()? })
    }

    /// The number of the first page that the token at a position sees.
    pub(super) fn first_page(&self, position: usize) -> usize {
        self.span.first(position) / PAGE_SLOTS
    }

    /// Whether the page after a prefix can be found.
    pub(super) fn has(&self, prefix: PrefixId, tokens: &[u32]) -> bool {
        self.pool.known(prefix, tokens).is_some()
    }

    /// Adds the pages of `found` to a sequence that goes on after them: the number of each, what is before it, and its tokens.
    /// Those that its window does not reach are left out.
    pub(super) fn share<'t>(
        &mut self,
        own: &mut WindowPages,
        found: impl Iterator<Item = (usize, PrefixId, &'t [u32])>,
        next: usize,
    ) {
        let first = self.first_page(next);
        self.release_before(own, next);
        for (number, prefix, tokens) in found.filter(|(number, ..)| *number >= first) {
            if own.pages.is_empty() {
                own.first = number;
            }
            if let Some((page, _)) = self.pool.find(prefix, tokens) {
                own.pages.push(page);
            }
        }
    }

    /// Pages that a sequence lacks for positions up to `len`.
    pub(super) fn missing(&self, own: &WindowPages, len: usize) -> usize {
        len.div_ceil(PAGE_SLOTS).saturating_sub(own.end())
    }

    /// Pages that can be taken.
    pub(super) fn available(&self) -> usize {
        self.pool.available()
    }

    /// Adds new pages to a sequence. False if there are not enough: then it gets none.
    pub(super) fn take(&mut self, own: &mut WindowPages, count: usize) -> bool {
        if count > self.pool.available() {
            return false;
        }
        own.pages.extend((0..count).map_while(|_| self.pool.take().map(|taken| taken.page)));
        true
    }

    /// Makes a page of a sequence findable, under the place in the tree that the other layers' page has.
    pub(super) fn publish(
        &mut self,
        own: &WindowPages,
        number: usize,
        key: (PrefixId, &[u32]),
        end: PrefixId,
    ) {
        let (parent, tokens) = key;
        if let (Some(page), Some(key)) = (own.get(number), PrefixKey::new(parent, tokens)) {
            self.pool.publish_as(page, key, end);
        }
    }

    /// Keeps the published pages that a sequence which goes on after `end` tokens of this one needs, longer than others.
    pub(super) fn keep(&mut self, own: &WindowPages, end: usize) {
        let numbers = self.first_page(end)..end / PAGE_SLOTS;
        numbers.filter_map(|number| own.get(number)).for_each(|page| self.pool.keep(page));
    }

    /// Gives back the last page of a sequence.
    pub(super) fn pop(&mut self, own: &mut WindowPages) {
        if let Some(page) = own.pages.pop() {
            self.pool.release(page);
        }
    }

    /// Gives back the pages that the token at position `next`, and all that follow, do not see.
    pub(super) fn release_before(&mut self, own: &mut WindowPages, next: usize) {
        let gone = self.first_page(next).saturating_sub(own.first).min(own.pages.len());
        own.pages.drain(..gone).for_each(|page| self.pool.release(page));
        own.first += gone;
    }

    /// Gives back all pages of a sequence.
    pub(super) fn release_all(&mut self, own: &mut WindowPages) {
        own.pages.drain(..).rev().for_each(|page| self.pool.release(page));
        own.first = 0;
    }

    /// Forgets all prefixes that nobody uses.
    pub(super) fn clear(&mut self) {
        self.pool.clear();
    }

    /// An error unless every page is where it belongs, and no sequence would write to a page that is shared: of each, its pages and
    /// the number of tokens that are computed.
    pub(super) fn check<'t>(
        &self,
        sequences: impl Iterator<Item = (&'t WindowPages, usize)> + Clone,
    ) -> Result<(), String> {
        self.pool.check(sequences.clone().map(|(own, _)| own.pages.as_slice()))?;
        for (own, computed) in sequences {
            let shared = (computed / PAGE_SLOTS..own.end()).filter_map(|number| own.get(number));
            if let Some(page) = shared.into_iter().find(|page| !self.pool.is_writable(*page)) {
                return Err(format!("window page {page} would be written, and is shared"));
            }
            if own.first > self.first_page(computed) && !own.pages.is_empty() {
                return Err(format!("window pages from {} on, after {computed} tokens", own.first));
            }
        }
        Ok(())
    }
}

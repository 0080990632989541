//! Pages of the KV cache as bytes and as rows: read, written and copied.

use quadriga_graph::PAGE_SLOTS;
use quadriga_runtime::PlanKey;

use super::super::page_pool::PageId;
use super::PagedEngine;
use crate::Result;
use crate::engine::{SCRAP_PAGES, row_copies};
use crate::models::PageTable;

/// The keys of the graphs that copy a page, of all layers or of those with a window: no step is this large.
const COPY_KEYS: [[u64; 4]; 2] = [[u64::MAX; 4], [u64::MAX - 1; 4]];

impl PagedEngine {
    /// The bytes of a page in all states, of all ranks.
    pub(in crate::serving) fn page_bytes(&self) -> usize {
        match self.rank_page_bytes.is_empty() {
            true => self.own_page_bytes(),
            false => self.rank_page_bytes.iter().sum(),
        }
    }

    /// The bytes of a page in this rank's states.
    pub(super) fn own_page_bytes(&self) -> usize {
        self.page_parts().iter().map(|(_, bytes)| bytes).sum()
    }

    /// The states that have rows for slots: their names, and the bytes of a page.
    pub(super) fn page_parts(&self) -> Vec<(String, usize)> {
        self.parts_of(
            self.options.paged_shape(&self.model, 1, 1, PageTable { rows: 1, pages: 1 }).cache_slots,
        )
    }

    pub(super) fn parts_of(&self, slots: usize) -> Vec<(String, usize)> {
        let mut states = self.session.states();
        states.retain(|state| state.shape.dims().first() == Some(&slots));
        states.into_iter().map(|state| (state.name, state.bytes / slots.max(1) * PAGE_SLOTS)).collect()
    }

    /// Reads the keys and values of a page: on the first of several ranks the parts of all, one after the other.
    pub(in crate::serving) fn read_page(&mut self, page: PageId) -> Result<Vec<u8>> {
        // What comes from a rank comes in order: first the results of its steps.
        self.settle();
        self.tell_read(page)?;
        let read = self.read_own_page(page);
        let read = match self.ranks() {
            Some(ranks) => read.and_then(|own| ranks.collect_parts(own, &self.rank_page_bytes)),
            None => read,
        };
        self.together(read)
    }

    fn read_own_page(&mut self, page: PageId) -> Result<Vec<u8>> {
        self.secure_results()?;
        let mut content = Vec::with_capacity(self.own_page_bytes());
        for (name, bytes) in self.page_parts() {
            let start = content.len();
            content.resize(start + bytes, 0);
            if let Some(into) = content.get_mut(start..) {
                self.session.read_state_at(&name, page as usize * bytes, into)?;
            }
        }
        Ok(content)
    }

    /// Writes what [`PagedEngine::read_page`] has read, to the same page or to another one. Ranks after the first get their part from
    /// that.
    pub(in crate::serving) fn write_page(&mut self, page: PageId, content: &[u8]) -> Result<()> {
        let Some(ranks) = self.ranks().cloned() else { return self.write_own_page(page, content) };
        self.tell_write(page)?;
        let own = ranks.distribute_parts(content, &self.rank_page_bytes);
        let written = own.and_then(|own| self.write_own_page(page, &own));
        self.together(written)
    }

    fn write_own_page(&mut self, page: PageId, content: &[u8]) -> Result<()> {
        self.secure_results()?;
        let mut rest = content;
        for (name, bytes) in self.page_parts() {
            let Some((part, after)) = rest.split_at_checked(bytes) else { break };
            self.session.write_state_at(&name, page as usize * bytes, part)?;
            rest = after;
        }
        Ok(())
    }

    /// Copies a page, on the devices that have it.
    pub(in crate::serving) fn copy_page(&mut self, from: PageId, to: PageId) -> Result<()> {
        let [key, _] = COPY_KEYS;
        self.tell_copy(from, to)?;
        let copied = self.copy_rows(key, &self.page_parts(), from, to);
        self.together(copied)
    }

    /// Copies a page of layers with a window that have pages of their own.
    pub(in crate::serving) fn copy_window_page(&mut self, from: PageId, to: PageId) -> Result<()> {
        let [_, key] = COPY_KEYS;
        let slots = self.options.window_pages(self.model.hyperparameters()).unwrap_or(0) + SCRAP_PAGES;
        self.tell_copy_window(from, to)?;
        let copied = self.copy_rows(key, &self.parts_of(slots * PAGE_SLOTS), from, to);
        self.together(copied)
    }

    pub(super) fn copy_rows(
        &mut self,
        key: [u64; 4],
        parts: &[(String, usize)],
        from: PageId,
        to: PageId,
    ) -> Result<()> {
        self.secure_results()?;
        let mut states = self.session.states();
        states.retain(|state| parts.iter().any(|(name, _)| *name == state.name));
        if states.is_empty() {
            return Ok(());
        }
        self.session.prepare_with(
            PlanKey::of(self.model.id(), key),
            || row_copies(&states, PAGE_SLOTS),
            &mut |_| {},
        )?;
        for (name, page) in [("from", from), ("to", to)] {
            let first = page as usize * PAGE_SLOTS;
            let rows: Vec<i32> = (first..first + PAGE_SLOTS).map(|row| row as i32).collect();
            self.session.set(name, rows.as_slice())?;
        }
        let started = self.session.start();
        // After an error, too: whatever a device still does with the pages has ended then.
        let waited = self.session.wait();
        started?;
        Ok(waited?)
    }
}

//! Pages beyond the KV cache: prefixes in host memory and in the cache file.

use super::super::page_pool::{PageId, PrefixId, PrefixKey};
use super::Batcher;

impl Batcher {
    /// The page that holds the first of `tokens` after a prefix, with one more user: from the KV cache, or brought back from host
    /// memory.
    pub(super) fn find_page(&mut self, prefix: PrefixId, tokens: &[u32]) -> Option<(PageId, PrefixId)> {
        if let Some(found) = self.pool.find(prefix, tokens) {
            return Some(found);
        }
        let in_file = |key: &PrefixKey| self.file.as_ref().is_some_and(|file| file.has(key));
        let key = PrefixKey::new(prefix, tokens).filter(|key| self.host.has(key) || in_file(key))?;
        let page = self.take_page()?;
        // Making room may have moved it from host memory to the file, or dropped it.
        let Some((next, content)) = self.host.remove(&key).or_else(|| self.read_file(&key)) else {
            self.pool.release(page);
            return None;
        };
        let written = self.engine.write_page(page, &content);
        if !self.note_page_move(&written) || !self.pool.publish_as(page, key, next) {
            // It is computed again.
            self.pool.release(page);
            return None;
        }
        Some((page, next))
    }

    /// Takes a page. A prefix that it held goes to host memory.
    pub(super) fn take_page(&mut self) -> Option<PageId> {
        let taken = self.pool.take()?;
        if let Some((key, prefix)) = taken.evicted
            && (self.options.cache_ram > 0 || self.file.is_some())
        {
            let read = self.engine.read_page(taken.page);
            self.note_page_move(&read);
            let dropped = read.map_or_else(|_| Vec::new(), |content| self.host.insert(key, prefix, content));
            for (key, prefix, content) in dropped {
                self.write_file(key, prefix, &content);
            }
        }
        Some(taken.page)
    }

    /// Counts a move of a page that failed; whether it did not. Nobody needs to hear of it: what the page held is computed again.
    pub(super) fn note_page_move<T, E>(&mut self, moved: &Result<T, E>) -> bool {
        self.state.failed_page_moves += u64::from(moved.is_err());
        moved.is_ok()
    }

    pub(super) fn read_file(&mut self, key: &PrefixKey) -> Option<(PrefixId, Vec<u8>)> {
        let read = self.file.as_mut()?.read(key);
        self.note_page_move(&read);
        read.ok().flatten()
    }

    /// Keeps a page in the file. After an error, such as a full disk, the file is not used any more.
    pub(super) fn write_file(&mut self, key: PrefixKey, prefix: PrefixId, content: &[u8]) {
        let Some(file) = &mut self.file else { return };
        let written = file.insert(key, prefix, content);
        if !self.note_page_move(&written) {
            self.file = None;
        }
    }

    /// Writes all prefixes that no running sequence uses to the cache file, for the next process. Returns whether there is a file
    /// that has them.
    pub fn save_prefixes(&mut self) -> bool {
        let host: Vec<_> =
            self.host.iter().map(|(key, prefix, content)| (key.clone(), prefix, content.to_vec())).collect();
        for (key, prefix, content) in host {
            self.write_file(key, prefix, &content);
        }
        let unused: Vec<_> = self.pool.unused().collect();
        for (page, key, prefix) in unused {
            // A device that failed is not waited for again with every page.
            if self.file.is_none() {
                break;
            }
            let read = self.engine.read_page(page);
            self.note_page_move(&read);
            let Ok(content) = read else { break };
            self.write_file(key, prefix, &content);
        }
        self.file.is_some()
    }
}

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
        if self.engine.write_page(page, &content).is_err() || !self.pool.publish_as(page, key, next) {
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
            && let Ok(content) = self.engine.read_page(taken.page)
        {
            for (key, prefix, content) in self.host.insert(key, prefix, content) {
                self.write_file(key, prefix, &content);
            }
        }
        Some(taken.page)
    }

    pub(super) fn read_file(&mut self, key: &PrefixKey) -> Option<(PrefixId, Vec<u8>)> {
        // What cannot be read is computed again.
        self.file.as_mut()?.read(key).ok().flatten()
    }

    /// Keeps a page in the file. After an error, such as a full disk, the file is not used any more.
    pub(super) fn write_file(&mut self, key: PrefixKey, prefix: PrefixId, content: &[u8]) {
        if let Some(file) = &mut self.file
            && file.insert(key, prefix, content).is_err()
        {
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
            if self.file.is_some()
                && let Ok(content) = self.engine.read_page(page)
            {
                self.write_file(key, prefix, &content);
            }
        }
        self.file.is_some()
    }
}

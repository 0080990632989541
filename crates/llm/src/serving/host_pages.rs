//! Prefixes in host memory: pages whose place in the KV cache was needed, kept so that a conversation that comes back later is
//! not computed again.

use std::collections::{BTreeMap, HashMap};

use super::page_pool::{PrefixId, PrefixKey};

/// Pages in host memory, up to a number of bytes; the least recently used is dropped first.
pub(super) struct HostPages {
    limit: u64,
    bytes: u64,
    pages: HashMap<PrefixKey, HostPage>,
    /// By the time of their latest use.
    order: BTreeMap<u64, PrefixKey>,
    clock: u64,
}

/// A page that is no longer kept, with its content.
pub(super) type DroppedPage = (PrefixKey, PrefixId, Vec<u8>);

struct HostPage {
    prefix: PrefixId,
    /// The rows of the page in each state, in the order of the session's states.
    content: Vec<u8>,
    used: u64,
}

impl HostPages {
    /// No pages, and room for so many bytes.
    pub(super) fn new(limit: u64) -> HostPages {
        HostPages { limit, bytes: 0, pages: HashMap::new(), order: BTreeMap::new(), clock: 0 }
    }

    /// The bytes of all pages.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Drops all pages.
    pub(super) fn clear(&mut self) {
        self.pages.clear();
        self.order.clear();
        self.bytes = 0;
    }

    /// Keeps a page. Returns those for which there is no more room: it may be one of them.
    pub(super) fn insert(&mut self, key: PrefixKey, prefix: PrefixId, content: Vec<u8>) -> Vec<DroppedPage> {
        self.remove(&key);
        let bytes = content.len() as u64;
        let mut dropped = Vec::new();
        while self.bytes + bytes > self.limit {
            let Some((_, oldest)) = self.order.pop_first() else {
                dropped.push((key, prefix, content));
                return dropped;
            };
            if let Some(page) = self.pages.remove(&oldest) {
                self.bytes -= page.content.len() as u64;
                dropped.push((oldest, page.prefix, page.content));
            }
        }
        self.clock += 1;
        self.bytes += bytes;
        self.order.insert(self.clock, key.clone());
        self.pages.insert(key, HostPage { prefix, content, used: self.clock });
        dropped
    }

    /// All pages, the least recently used first.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&PrefixKey, PrefixId, &[u8])> {
        self.order.values().filter_map(|key| {
            let page = self.pages.get(key)?;
            Some((key, page.prefix, page.content.as_slice()))
        })
    }

    /// A page, without using it.
    pub(super) fn has(&self, key: &PrefixKey) -> bool {
        self.pages.contains_key(key)
    }

    /// Takes a page out: it goes back to the KV cache.
    pub(super) fn remove(&mut self, key: &PrefixKey) -> Option<(PrefixId, Vec<u8>)> {
        let page = self.pages.remove(key)?;
        self.order.remove(&page.used);
        self.bytes -= page.content.len() as u64;
        Some((page.prefix, page.content))
    }
}

#[cfg(test)]
mod tests {
    use quadriga_graph::PAGE_SLOTS;

    use super::super::page_pool::PagePool;
    use super::*;

    #[test]
    fn the_oldest_pages_are_dropped_where_there_is_no_room() {
        let root = PagePool::root(0);
        let key = |number: u32| PrefixKey::new(root, &[number; PAGE_SLOTS]).unwrap();
        let mut host = HostPages::new(100);
        for number in 0..4 {
            let dropped = host.insert(key(number), root, vec![number as u8; 30]);
            let wanted = if number == 3 { vec![(key(0), root, vec![0; 30])] } else { Vec::new() };
            assert_eq!(dropped, wanted);
        }
        assert_eq!(host.bytes(), 90);
        assert!(!host.has(&key(0)) && host.has(&key(1)));
        // The same page again takes its room once.
        assert!(host.insert(key(1), root, vec![9; 40]).is_empty());
        assert_eq!(host.bytes(), 100);
        assert_eq!(host.remove(&key(1)).unwrap().1, vec![9; 40]);
        assert!(host.remove(&key(1)).is_none());
        // What does not fit even alone is not kept, and nothing is left in its way.
        let dropped: Vec<PrefixKey> =
            host.insert(key(5), root, vec![0; 101]).into_iter().map(|(key, ..)| key).collect();
        assert_eq!(dropped, [key(2), key(3), key(5)]);
        assert!(!host.has(&key(5)));
        assert_eq!(host.bytes(), 0);
    }
}

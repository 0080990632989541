//! The pages of a KV cache: which are free, how many sequences use each, and which hold a prefix that may be used again.
//!
//! Prefixes form a tree: a page of tokens that follows another one. A page whose tokens are complete can be *published*:
//! then sequences that begin alike find it, also while others use it. Nobody writes to a published page. When its last user
//! releases it, it stays findable until its memory is needed; of such pages the least recently used is taken first, but those that
//! are to be kept after others, as far as they are not too many.

use std::collections::{BTreeMap, HashMap};

use quadriga_graph::PAGE_SLOTS;

/// A page of the KV cache, by its number.
pub(crate) type PageId = u32;

/// A place in the tree of prefixes: all tokens up to the end of a page. Never used twice.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum PrefixId {
    /// Before the first token of texts with this salt.
    Root { salt: u64 },
    /// The end of a page.
    Page(u64),
}

impl PrefixId {
    /// The number of the end of a page.
    pub(crate) fn number(self) -> Option<u64> {
        match self {
            PrefixId::Root { .. } => None,
            PrefixId::Page(number) => Some(number),
        }
    }
}

/// The key of a page in the tree: what comes before it, and its tokens. Compared in full, so that no two texts are mixed up.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct PrefixKey {
    parent: PrefixId,
    tokens: Box<[u32]>,
}

/// A page that was taken, and the prefix that it held until then.
#[derive(Debug)]
pub(crate) struct TakenPage {
    pub(crate) page: PageId,
    /// The page's bytes are still there.
    pub(crate) evicted: Option<(PrefixKey, PrefixId)>,
}

#[derive(Clone, Default)]
struct Page {
    users: usize,
    published: Option<(PrefixKey, PrefixId)>,
    /// Whether other prefixes are evicted before this one.
    kept: bool,
    /// When its last user released it.
    released: u64,
}

/// The pages of a KV cache. All methods are pure bookkeeping.
pub(crate) struct PagePool {
    /// Pages before this one are not given away.
    first: usize,
    pages: Vec<Page>,
    free: Vec<PageId>,
    /// Published pages, used or not.
    findable: HashMap<PrefixKey, PageId>,
    /// Published pages without users, by the time of their release.
    unused: BTreeMap<u64, PageId>,
    /// The most pages without users that are kept longer than others.
    kept: usize,
    clock: u64,
    next_prefix: u64,
}

impl PagePool {
    /// The pages from `first` on, `count` of them, all free.
    pub(crate) fn new(first: usize, count: usize) -> PagePool {
        let pages = first + count;
        PagePool {
            first,
            pages: vec![Page::default(); pages],
            free: (first..pages).rev().map(|page| page as PageId).collect(),
            findable: HashMap::new(),
            unused: BTreeMap::new(),
            kept: 0,
            clock: 0,
            next_prefix: 0,
        }
    }

    /// This pool, in which so many pages without users are [kept](PagePool::keep) longer than others.
    pub(crate) fn keeping(self, kept: usize) -> PagePool {
        PagePool { kept, ..self }
    }

    /// Other prefixes are evicted before that of a published page.
    pub(crate) fn keep(&mut self, page: PageId) {
        if let Some(page) = self.pages.get_mut(page as usize).filter(|page| page.published.is_some()) {
            page.kept = true;
        }
    }

    /// The page to evict: the one that was not used for the longest time among those that are not kept, or among the kept ones
    /// where there are too many.
    fn to_evict(&self) -> Option<u64> {
        let is_kept = |page: PageId| self.pages.get(page as usize).is_some_and(|page| page.kept);
        if self.kept > 0 {
            let kept = self.unused.values().filter(|page| is_kept(**page)).count();
            let from_kept = kept > self.kept;
            let found = self.unused.iter().find(|(_, page)| is_kept(**page) == from_kept);
            if let Some((released, _)) = found {
                return Some(*released);
            }
        }
        self.unused.keys().next().copied()
    }

    /// Pages that can be taken: the free ones, and those that only hold a prefix.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.unused.len()
    }

    /// Published pages without users.
    pub(crate) fn cached(&self) -> usize {
        self.unused.len()
    }

    /// The empty prefix. Texts with different salts share nothing.
    pub(crate) fn root(salt: u64) -> PrefixId {
        PrefixId::Root { salt }
    }

    /// Numbers up to this one are in use elsewhere: in a file of an earlier process.
    pub(crate) fn skip_prefixes(&mut self, last: u64) {
        self.next_prefix = self.next_prefix.max(last);
    }

    /// Published pages without users, in the order in which they were released.
    pub(crate) fn unused(&self) -> impl Iterator<Item = (PageId, PrefixKey, PrefixId)> {
        self.unused.values().filter_map(|page| {
            let (key, prefix) = self.pages.get(*page as usize)?.published.clone()?;
            Some((*page, key, prefix))
        })
    }

    fn new_prefix(&mut self) -> PrefixId {
        self.next_prefix += 1;
        PrefixId::Page(self.next_prefix)
    }

    /// Finds the page that holds the first of `tokens` after `parent`, and adds a user to it.
    pub(crate) fn find(&mut self, parent: PrefixId, tokens: &[u32]) -> Option<(PageId, PrefixId)> {
        let key = PrefixKey::new(parent, tokens)?;
        let page = *self.findable.get(&key)?;
        let entry = self.pages.get_mut(page as usize)?;
        let (_, prefix) = entry.published.as_ref()?;
        let prefix = *prefix;
        if entry.users == 0 {
            self.unused.remove(&entry.released);
        }
        entry.users += 1;
        Some((page, prefix))
    }

    /// Takes a page for one user: a free one, or one that only holds a prefix, which was not used for the longest time.
    pub(crate) fn take(&mut self) -> Option<TakenPage> {
        let (page, evicted) = match self.free.pop() {
            Some(page) => (page, None),
            None => {
                let page = self.unused.remove(&self.to_evict()?)?;
                let published = self.pages.get_mut(page as usize).and_then(|page| {
                    page.kept = false;
                    page.published.take()
                });
                if let Some((key, _)) = &published {
                    self.findable.remove(key);
                }
                (page, published)
            }
        };
        self.pages.get_mut(page as usize)?.users = 1;
        Some(TakenPage { page, evicted })
    }

    /// Makes a page findable whose tokens are complete, and returns the place of its end. If another page holds the same
    /// prefix already, that one stays the one to be found.
    pub(crate) fn publish(&mut self, page: PageId, parent: PrefixId, tokens: &[u32]) -> Option<PrefixId> {
        let prefix = self.known(parent, tokens);
        let prefix = match prefix {
            Some(prefix) => return Some(prefix),
            None => self.new_prefix(),
        };
        self.publish_as(page, PrefixKey::new(parent, tokens)?, prefix).then_some(prefix)
    }

    /// The place of the end of a page that is findable.
    pub(crate) fn known(&self, parent: PrefixId, tokens: &[u32]) -> Option<PrefixId> {
        let page = self.findable.get(&PrefixKey::new(parent, tokens)?)?;
        let (_, prefix) = self.pages.get(*page as usize)?.published.as_ref()?;
        Some(*prefix)
    }

    /// Publishes a page under a place in the tree that it had before, when its bytes have been brought back.
    pub(crate) fn publish_as(&mut self, page: PageId, key: PrefixKey, prefix: PrefixId) -> bool {
        let Some(entry) = self.pages.get_mut(page as usize) else { return false };
        if entry.users == 0 || entry.published.is_some() || self.findable.contains_key(&key) {
            return false;
        }
        entry.published = Some((key.clone(), prefix));
        self.findable.insert(key, page);
        true
    }

    /// Removes a user. The pages of a sequence are released from the last to the first, so that prefixes are lost from their end.
    pub(crate) fn release(&mut self, page: PageId) {
        let Some(entry) = self.pages.get_mut(page as usize) else { return };
        let Some(users) = entry.users.checked_sub(1) else { return };
        entry.users = users;
        if users > 0 {
            return;
        }
        if entry.published.is_some() {
            self.clock += 1;
            entry.released = self.clock;
            self.unused.insert(self.clock, page);
        } else {
            self.free.push(page);
        }
    }

    /// Whether a page may be written: it has one user, and is not published.
    pub(crate) fn is_writable(&self, page: PageId) -> bool {
        self.pages.get(page as usize).is_some_and(|page| page.users == 1 && page.published.is_none())
    }

    /// Forgets all prefixes that nobody uses.
    pub(crate) fn clear(&mut self) {
        while let Some((_, page)) = self.unused.pop_first() {
            if let Some(entry) = self.pages.get_mut(page as usize)
                && let Some((key, _)) = entry.published.take()
            {
                entry.kept = false;
                self.findable.remove(&key);
            }
            self.free.push(page);
        }
    }

    /// An error unless every page is where it belongs, and its users are those of `tables`: the pages of all sequences.
    pub(crate) fn check<'t>(&self, tables: impl Iterator<Item = &'t [PageId]>) -> Result<(), String> {
        let mut users: HashMap<PageId, usize> = HashMap::new();
        for page in tables.flatten() {
            *users.entry(*page).or_default() += 1;
        }
        let mut places: HashMap<PageId, &str> = HashMap::new();
        let lists = self.free.iter().map(|page| (page, "free"));
        for (page, place) in lists.chain(self.unused.values().map(|page| (page, "unused"))) {
            if let Some(other) = places.insert(*page, place) {
                return Err(format!("page {page} is {place} and {other}"));
            }
        }
        for (page, entry) in self.pages.iter().enumerate() {
            let id = page as PageId;
            let used = users.get(&id).copied().unwrap_or(0);
            if entry.users != used {
                return Err(format!("page {page} has {} users, {used} were found", entry.users));
            }
            let place = places.get(&id).copied();
            let wanted = match (&entry.published, used) {
                (Some(_), 0) => Some("unused"),
                (None, 0) => Some("free"),
                _ => None,
            };
            if entry.kept && entry.published.is_none() {
                return Err(format!("page {page} is kept and holds no prefix"));
            }
            if place != wanted && page >= self.first {
                return Err(format!("page {page} is {place:?}, it should be {wanted:?}"));
            }
            if let Some((key, _)) = &entry.published
                && self.findable.get(key) != Some(&id)
            {
                return Err(format!("page {page} is published and cannot be found"));
            }
        }
        let published = self.pages.iter().filter(|page| page.published.is_some()).count();
        if published != self.findable.len() {
            return Err(format!("{} pages are found, {published} are published", self.findable.len()));
        }
        Ok(())
    }
}

impl PrefixKey {
    /// The key of the first page of `tokens` after `parent`; `None` if they are too few.
    pub(crate) fn new(parent: PrefixId, tokens: &[u32]) -> Option<PrefixKey> {
        Some(PrefixKey { parent, tokens: tokens.get(..PAGE_SLOTS)?.into() })
    }

    /// What comes before the page.
    pub(crate) fn parent(&self) -> PrefixId {
        self.parent
    }

    /// The tokens of the page.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }
}

#[cfg(test)]
mod tests {
    use quadriga_conformance::Rng;

    use super::*;

    fn tokens(number: u32) -> Vec<u32> {
        vec![number; PAGE_SLOTS]
    }

    #[test]
    fn prefixes_are_found_by_all_their_tokens_and_what_is_before_them() {
        let mut pool = PagePool::new(2, 4);
        let (root, salted) = (PagePool::root(0), PagePool::root(7));
        let [first, second] = [(); 2].map(|()| pool.take().unwrap().page);
        assert!(first >= 2 && second >= 2 && first != second);
        let a = pool.publish(first, root, &tokens(1)).unwrap();
        let b = pool.publish(second, a, &tokens(2)).unwrap();
        assert_eq!(pool.find(root, &tokens(1)), Some((first, a)));
        assert_eq!(pool.find(a, &[tokens(2), tokens(9)].concat()), Some((second, b)));
        assert_eq!(pool.find(root, &tokens(2)), None);
        assert_eq!(pool.find(salted, &tokens(1)), None);
        assert_eq!(pool.find(root, &tokens(1)[1..]), None);
        assert!(!pool.is_writable(first));
        // Another page with the same tokens continues the same prefix; it is not published itself.
        let third = pool.take().unwrap().page;
        assert_eq!(pool.publish(third, root, &tokens(1)), Some(a));
        assert!(pool.is_writable(third));
        assert_eq!(pool.find(root, &tokens(1)), Some((first, a)));
        pool.check([&[first, second][..], &[first, second], &[third], &[first]].into_iter()).unwrap();
        assert!(pool.check([&[first][..]].into_iter()).is_err());
    }

    #[test]
    fn kept_pages_are_evicted_after_others_as_far_as_they_are_not_too_many() {
        let mut pool = PagePool::new(0, 5).keeping(2);
        let root = PagePool::root(0);
        let pages = [1, 2, 3, 4, 5].map(|number| {
            let page = pool.take().unwrap().page;
            // Nothing is kept before it holds a prefix.
            pool.keep(page);
            pool.publish(page, root, &tokens(number)).unwrap();
            page
        });
        [0, 2, 3].into_iter().for_each(|at: usize| pool.keep(pages[at]));
        pages.into_iter().for_each(|page| pool.release(page));
        pool.check([].into_iter()).unwrap();
        // Of three, the first is too much; then the others go before the kept ones.
        let order: [PageId; 5] = [(); 5].map(|()| pool.take().unwrap().page);
        assert_eq!(order, [0, 1, 4, 2, 3].map(|at: usize| pages[at]));
    }

    #[test]
    fn the_prefix_that_was_released_first_is_evicted_first() {
        let mut pool = PagePool::new(0, 3);
        let root = PagePool::root(0);
        let pages = [1, 2, 3].map(|number| {
            let page = pool.take().unwrap().page;
            pool.publish(page, root, &tokens(number)).unwrap();
            page
        });
        assert!(pool.take().is_none());
        for page in [1, 0, 2].map(|at| pages[at]) {
            pool.release(page);
        }
        assert_eq!((pool.available(), pool.cached()), (3, 3));
        // In use again, it is not evicted.
        pool.find(root, &tokens(2)).unwrap();
        let taken = pool.take().unwrap();
        let (key, prefix) = taken.evicted.unwrap();
        assert_eq!((taken.page, key), (pages[0], PrefixKey::new(root, &tokens(1)).unwrap()));
        assert_eq!(pool.find(root, &tokens(1)), None);
        // Brought back under its old place.
        let key = PrefixKey::new(root, &tokens(1)).unwrap();
        assert!(pool.publish_as(taken.page, key.clone(), prefix));
        assert!(!pool.publish_as(taken.page, key, prefix));
        assert_eq!(pool.find(root, &tokens(1)), Some((pages[0], prefix)));
        pool.clear();
        assert_eq!((pool.available(), pool.cached()), (1, 0));
        assert_eq!(pool.find(root, &tokens(3)), None);
    }

    #[test]
    fn any_history_keeps_every_page_where_it_belongs() {
        for seed in 0..40 {
            let mut rng = Rng::new(seed);
            let mut pool = PagePool::new(rng.below(3), rng.range(1, 12));
            let total = pool.available();
            // Each table: its pages, the place of the end of its published ones, and whether the last one is published.
            let mut tables: Vec<(Vec<PageId>, PrefixId)> = Vec::new();
            for _ in 0..400 {
                match rng.below(5) {
                    0 => {
                        tables.push((Vec::new(), PagePool::root(rng.below(2) as u64)));
                    }
                    1 | 2 if !tables.is_empty() => {
                        let at = rng.below(tables.len());
                        let (pages, prefix) = &mut tables[at];
                        let text = tokens(rng.below(3) as u32);
                        if let Some((page, next)) = pool.find(*prefix, &text) {
                            pages.push(page);
                            *prefix = next;
                        } else if let Some(taken) = pool.take() {
                            assert!(!pages.contains(&taken.page), "seed {seed}");
                            pages.push(taken.page);
                            *prefix = pool.publish(taken.page, *prefix, &text).unwrap();
                        }
                    }
                    3 if !tables.is_empty() => {
                        let (pages, _) = tables.swap_remove(rng.below(tables.len()));
                        pages.into_iter().rev().for_each(|page| pool.release(page));
                    }
                    4 if rng.chance(0.1) => pool.clear(),
                    _ => {}
                }
                let checked = pool.check(tables.iter().map(|(pages, _)| pages.as_slice()));
                checked.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            }
            for (pages, _) in tables {
                pages.into_iter().rev().for_each(|page| pool.release(page));
            }
            assert_eq!(pool.available(), total, "seed {seed}");
        }
    }
}

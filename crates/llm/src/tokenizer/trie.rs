//! A trie of byte strings, to find those that a text starts with.

use rustc_hash::FxHashMap;

/// A trie over bytes; each string has a token.
#[derive(Clone, Debug, Default)]
pub(super) struct Trie {
    edges: FxHashMap<(u32, u8), u32>,
    tokens: Vec<Option<u32>>,
}

impl Trie {
    /// Adds a string; a later one replaces an equal earlier one. The empty string is ignored.
    pub(super) fn insert(&mut self, text: &[u8], token: u32) {
        if text.is_empty() {
            return;
        }
        if self.tokens.is_empty() {
            self.tokens.push(None);
        }
        let mut node = 0;
        for &byte in text {
            let fresh = u32::try_from(self.tokens.len()).unwrap_or(u32::MAX);
            node = *self.edges.entry((node, byte)).or_insert(fresh);
            if node == fresh {
                self.tokens.push(None);
            }
        }
        if let Some(slot) = self.tokens.get_mut(node as usize) {
            *slot = Some(token);
        }
    }

    /// Whether it holds no string.
    pub(super) fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Length and token of every string that `text` starts with, shortest first.
    pub(super) fn prefixes<'a>(&'a self, text: &'a [u8]) -> impl Iterator<Item = (usize, u32)> + 'a {
        let mut node = 0;
        text.iter()
            .enumerate()
            .map_while(move |(at, &byte)| {
                node = *self.edges.get(&(node, byte))?;
                Some((at + 1, self.tokens.get(node as usize).copied().flatten()))
            })
            .filter_map(|(length, token)| token.map(|token| (length, token)))
    }

    /// Length and token of the longest string that `text` starts with.
    pub(super) fn longest(&self, text: &[u8]) -> Option<(usize, u32)> {
        self.prefixes(text).last()
    }
}

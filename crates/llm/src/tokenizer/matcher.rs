//! Finds tokens in a text in time proportional to its length, whatever the tokens (Aho and Corasick's automaton).
//!
//! A state stands for the bytes that lead to it. It takes 13 bytes, and there is at most one for each byte of the
//! tokens' texts. States are numbered in preorder, so that the first child of a state is the next one.

use crate::{Error, Result};

/// No state and no match.
const NONE: u32 = u32::MAX;
/// The flag of a state with children.
const HAS_CHILD: u32 = 1 << 31;

/// A token that ends at a state.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) token: u32,
    /// The length of its text in bytes.
    pub(super) length: u32,
    /// Whether it is recognised in any text.
    pub(super) always: bool,
    /// Whether it or a shorter one that ends there, too, is not.
    pub(super) has_control: bool,
    /// The next shorter one that ends there, too.
    shorter: u32,
    /// Itself or the next shorter one that is recognised in any text.
    nearest_always: u32,
}

/// The direction in which a text is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Direction {
    /// Matches are found where they end.
    Forward,
    /// Matches are found where they begin.
    Backward,
}

/// An automaton for a set of texts.
#[derive(Debug)]
pub(super) struct Matcher {
    direction: Direction,
    /// The byte that leads to each state.
    labels: Vec<u8>,
    /// The next child of the same parent, and [`HAS_CHILD`].
    siblings: Vec<u32>,
    /// The state of the longest proper suffix.
    suffixes: Vec<u32>,
    /// The longest token that ends at the state.
    longest: Vec<u32>,
    found: Vec<Found>,
    /// The child of the first state for each byte: there can be many.
    roots: Box<[u32; 256]>,
}

impl Matcher {
    /// An automaton for tokens with their texts, and whether they are recognised in any text. Of equal texts the last
    /// one counts; empty texts are ignored.
    pub(super) fn new(direction: Direction, tokens: &[(&[u8], u32, bool)]) -> Result<Matcher> {
        let byte = |text: &[u8], at: usize| match direction {
            Direction::Forward => text.get(at).copied(),
            Direction::Backward => text.len().checked_sub(at + 1).and_then(|at| text.get(at).copied()),
        };
        let mut order: Vec<u32> = (0..tokens.len() as u32).collect();
        let text = |i: u32| tokens.get(i as usize).map_or(&[][..], |token| token.0);
        match direction {
            Direction::Forward => order.sort_by(|&a, &b| text(a).cmp(text(b))),
            Direction::Backward => order.sort_by(|&a, &b| text(a).iter().rev().cmp(text(b).iter().rev())),
        }
        let common = |a: &[u8], b: &[u8]| {
            (0..a.len().min(b.len())).take_while(|&at| byte(a, at) == byte(b, at)).count()
        };
        let mut states = 1usize;
        let mut before: &[u8] = &[];
        for &i in &order {
            states += text(i).len() - common(before, text(i));
            before = text(i);
        }
        if states >= HAS_CHILD as usize {
            let reason = format!("its special tokens have {states} bytes, which is too many");
            return Err(Error::Vocabulary { reason });
        }
        let mut made = Matcher {
            direction,
            labels: Vec::with_capacity(states),
            siblings: Vec::with_capacity(states),
            suffixes: Vec::new(),
            longest: Vec::with_capacity(states),
            found: Vec::with_capacity(tokens.len()),
            roots: Box::new([NONE; 256]),
        };
        made.push(0);
        // The states of the text before, by depth.
        let mut path = vec![0u32];
        let mut before: &[u8] = &[];
        for &i in &order {
            let Some(&(text, token, always)) = tokens.get(i as usize) else { continue };
            if text.is_empty() {
                continue;
            }
            let shared = common(before, text);
            // The last child so far of the state where the texts part.
            let mut brother = path.get(shared + 1).copied();
            path.truncate(shared + 1);
            for at in shared..text.len() {
                let Some(label) = byte(text, at) else { break };
                let state = made.push(label);
                match brother.take() {
                    Some(brother) => made.set_sibling(brother, state),
                    None => made.set_has_child(path.last().copied().unwrap_or(0)),
                }
                path.push(state);
            }
            before = text;
            let end = path.last().copied().unwrap_or(0);
            let number = made.found.len() as u32;
            // Equal texts keep their order: the last one is found, and in any text the last that is meant for it.
            let equal = made.found_at(get(&made.longest, end)).map_or(NONE, |found| found.nearest_always);
            let nearest_always = if always { number } else { equal };
            made.found.push(Found {
                token,
                length: text.len() as u32,
                always,
                has_control: !always,
                shorter: NONE,
                nearest_always,
            });
            set(&mut made.longest, end, number);
        }
        let mut child = made.first_child(0);
        while child != NONE {
            let label = usize::from(made.label(child));
            if let Some(slot) = made.roots.get_mut(label) {
                *slot = child;
            }
            child = made.sibling(child);
        }
        made.link();
        Ok(made)
    }

    /// Whether it holds no text.
    pub(super) fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// Calls `each` with every position at which tokens end (or begin, if it reads backward) and the longest of them.
    pub(super) fn scan(&self, text: &[u8], mut each: impl FnMut(usize, Found)) {
        if self.is_empty() {
            return;
        }
        let mut state = 0;
        let mut read = |at: usize, byte: u8| {
            state = self.next(state, byte);
            if let Some(found) = self.found_at(get(&self.longest, state)) {
                each(at, found);
            }
        };
        match self.direction {
            Direction::Forward => text.iter().enumerate().for_each(|(at, &byte)| read(at + 1, byte)),
            Direction::Backward => text.iter().enumerate().rev().for_each(|(at, &byte)| read(at, byte)),
        }
    }

    /// The next shorter token at the same position.
    pub(super) fn shorter(&self, found: Found) -> Option<Found> {
        self.found_at(found.shorter)
    }

    /// The token itself or the next shorter one that is recognised in any text.
    pub(super) fn always(&self, found: Found) -> Option<Found> {
        self.found_at(found.nearest_always)
    }

    fn found_at(&self, number: u32) -> Option<Found> {
        self.found.get(number as usize).copied()
    }

    fn push(&mut self, label: u8) -> u32 {
        let state = self.labels.len() as u32;
        self.labels.push(label);
        self.siblings.push(NONE & !HAS_CHILD);
        self.longest.push(NONE);
        state
    }

    fn label(&self, state: u32) -> u8 {
        self.labels.get(state as usize).copied().unwrap_or(0)
    }

    fn sibling(&self, state: u32) -> u32 {
        let sibling = get(&self.siblings, state) & !HAS_CHILD;
        if sibling == NONE & !HAS_CHILD { NONE } else { sibling }
    }

    fn set_sibling(&mut self, state: u32, sibling: u32) {
        let flag = get(&self.siblings, state) & HAS_CHILD;
        set(&mut self.siblings, state, sibling | flag);
    }

    fn set_has_child(&mut self, state: u32) {
        let sibling = get(&self.siblings, state);
        set(&mut self.siblings, state, sibling | HAS_CHILD);
    }

    fn first_child(&self, state: u32) -> u32 {
        if get(&self.siblings, state) & HAS_CHILD == 0 || state == NONE { NONE } else { state + 1 }
    }

    fn child(&self, state: u32, byte: u8) -> u32 {
        if state == 0 {
            return self.roots.get(usize::from(byte)).copied().unwrap_or(NONE);
        }
        let mut child = self.first_child(state);
        while child != NONE && self.label(child) != byte {
            child = self.sibling(child);
        }
        child
    }

    /// The state of the longest suffix of the text so far and `byte` that begins a token.
    fn next(&self, mut state: u32, byte: u8) -> u32 {
        loop {
            let child = self.child(state, byte);
            if child != NONE {
                return child;
            }
            if state == 0 {
                return 0;
            }
            state = get(&self.suffixes, state);
        }
    }

    /// Links each state with its longest proper suffix, and with the tokens that end at suffixes; by depth.
    fn link(&mut self) {
        self.suffixes = vec![0; self.labels.len()];
        let mut level = Vec::new();
        let mut child = self.first_child(0);
        while child != NONE {
            level.push((child, 0));
            child = self.sibling(child);
        }
        let mut next_level = Vec::new();
        while !level.is_empty() {
            for &(state, parent) in &level {
                let suffix = match parent {
                    0 => 0,
                    parent => self.next(get(&self.suffixes, parent), self.label(state)),
                };
                set(&mut self.suffixes, state, suffix);
                let shorter = get(&self.longest, suffix);
                let own = get(&self.longest, state);
                if own == NONE {
                    set(&mut self.longest, state, shorter);
                } else {
                    let below = self.found_at(shorter).map_or(NONE, |found| found.nearest_always);
                    let control_below = self.found_at(shorter).is_some_and(|found| found.has_control);
                    if let Some(found) = self.found.get_mut(own as usize) {
                        found.shorter = shorter;
                        found.has_control |= control_below;
                        if found.nearest_always == NONE {
                            found.nearest_always = below;
                        }
                    }
                }
                let mut child = self.first_child(state);
                while child != NONE {
                    next_level.push((child, state));
                    child = self.sibling(child);
                }
            }
            std::mem::swap(&mut level, &mut next_level);
            next_level.clear();
        }
    }
}

fn get(values: &[u32], at: u32) -> u32 {
    values.get(at as usize).copied().unwrap_or(NONE)
}

fn set(values: &mut [u32], at: u32, value: u32) {
    if let Some(slot) = values.get_mut(at as usize) {
        *slot = value;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::{Direction, Matcher};

    #[test]
    fn control_tokens_are_known_without_walking_to_all_shorter_tokens() {
        // Each of them is a control token or not, in every combination.
        let texts = ["a", "b", "aa", "ab", "ba", "aab", "aba", "baa", "abab"];
        let searched = b"abaababbaaabab";
        for control in 0..1u32 << texts.len() {
            let tokens: Vec<(&[u8], u32, bool)> =
                (0..).zip(texts).map(|(i, text)| (text.as_bytes(), i, control >> i & 1 == 0)).collect();
            for direction in [Direction::Forward, Direction::Backward] {
                let matcher = Matcher::new(direction, &tokens).unwrap();
                matcher.scan(searched, |at, found| {
                    let mut chain = std::iter::successors(Some(found), |found| matcher.shorter(*found));
                    assert_eq!(found.has_control, chain.any(|found| !found.always), "{control:b} at {at}");
                });
            }
        }
    }
}

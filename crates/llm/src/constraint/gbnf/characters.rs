//! Sets of characters.

/// A set of characters as ranges, in order and apart from each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CharacterSet(Vec<(char, char)>);

impl CharacterSet {
    /// The characters of some ranges.
    pub(super) fn new(mut ranges: Vec<(char, char)>) -> CharacterSet {
        ranges.sort_unstable();
        let mut merged: Vec<(char, char)> = Vec::with_capacity(ranges.len());
        for (first, last) in ranges {
            match merged.last_mut() {
                Some(before) if first <= before.1 || Some(first) == next(before.1) => {
                    before.1 = before.1.max(last);
                }
                _ => merged.push((first, last)),
            }
        }
        CharacterSet(merged)
    }

    /// All characters.
    pub(super) fn any() -> CharacterSet {
        CharacterSet(vec![('\0', char::MAX)])
    }

    /// All other characters.
    pub(super) fn complement(&self) -> CharacterSet {
        let mut ranges = Vec::with_capacity(self.0.len() + 1);
        let mut from = Some('\0');
        for &(first, last) in &self.0 {
            if let Some((from, to)) = from.zip(previous(first)).filter(|(from, to)| from <= to) {
                ranges.push((from, to));
            }
            from = next(last);
        }
        ranges.extend(from.map(|from| (from, char::MAX)));
        CharacterSet(ranges)
    }

    pub(super) fn ranges(&self) -> &[(char, char)] {
        &self.0
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The character after one.
pub(super) fn next(letter: char) -> Option<char> {
    (letter..=char::MAX).nth(1)
}

fn previous(letter: char) -> Option<char> {
    ('\0'..=letter).nth_back(1)
}

#[cfg(test)]
mod tests {
    use super::CharacterSet;

    #[test]
    fn a_complement_has_all_other_characters() {
        let set =
            CharacterSet::new(vec![('b', 'd'), ('a', 'a'), ('\u{d7ff}', '\u{e000}'), ('x', 'z'), ('y', 'y')]);
        assert_eq!(set.ranges(), [('a', 'd'), ('x', 'z'), ('\u{d7ff}', '\u{e000}')]);
        let rest = set.complement();
        assert_eq!(rest.ranges(), [('\0', '`'), ('e', 'w'), ('{', '\u{d7fe}'), ('\u{e001}', char::MAX)]);
        assert_eq!(rest.complement(), set);
        assert!(CharacterSet::any().complement().is_empty());
        assert_eq!(CharacterSet::new(Vec::new()).complement(), CharacterSet::any());
    }
}

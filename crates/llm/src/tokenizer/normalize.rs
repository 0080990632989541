//! Normalization of text for unigram vocabularies: SentencePiece's compiled replacements, then spaces.

use super::sentence_piece::SPACE;
use crate::{Error, Result};

/// The replacements are a double-array trie, followed by the replacement texts, each terminated by a zero byte.
#[derive(Clone, Debug)]
pub(super) struct Normalizer {
    units: Vec<u32>,
    texts: Vec<u8>,
    prefix: bool,
    merge_spaces: bool,
}

impl Normalizer {
    pub(super) fn new(table: &[u8], prefix: bool, merge_spaces: bool) -> Result<Normalizer> {
        let mut normalizer = Normalizer { units: Vec::new(), texts: Vec::new(), prefix, merge_spaces };
        if table.is_empty() {
            return Ok(normalizer);
        }
        let wrong = || Error::Vocabulary {
            reason: format!("its table of replacements ({} bytes) contradicts its length", table.len()),
        };
        let (size, rest) = table.split_first_chunk::<4>().ok_or_else(wrong)?;
        let (units, texts) = rest.split_at_checked(u32::from_le_bytes(*size) as usize).ok_or_else(wrong)?;
        let (units, []) = units.as_chunks::<4>() else { return Err(wrong()) };
        normalizer.units = units.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
        normalizer.texts = texts.to_vec();
        Ok(normalizer)
    }

    /// The text as the vocabulary wants it. `kept` are positions and lengths of tokens that are not replaced, last
    /// first.
    pub(super) fn normalize(&self, text: &str, kept: &[(usize, usize)]) -> String {
        let mut result = Vec::with_capacity(text.len() + SPACE.len());
        let mut in_word = false;
        let mut prefixed = false;
        let mut rest = text;
        let mut kept = kept.iter().rev().copied().peekable();
        while let Some(letter) = rest.chars().next() {
            let at = text.len() - rest.len();
            while kept.next_if(|(start, _)| *start < at).is_some() {}
            let token = kept.next_if(|(start, _)| *start == at).map(|(_, length)| length);
            let (length, replacement) = self.step(rest, letter, token);
            for &byte in replacement {
                if byte == b' ' {
                    in_word = false;
                    if !self.merge_spaces {
                        result.extend_from_slice(SPACE.as_bytes());
                    }
                    continue;
                }
                if !in_word && ((self.prefix && !prefixed) || self.merge_spaces) {
                    result.extend_from_slice(SPACE.as_bytes());
                    prefixed = true;
                }
                in_word = true;
                result.push(byte);
            }
            rest = rest.get(length..).unwrap_or_default();
        }
        // A malicious table can contain replacements that are not UTF-8.
        String::from_utf8_lossy(&result).into_owned()
    }

    /// The number of bytes that are replaced next, and their replacement.
    fn step<'a>(&'a self, text: &'a str, letter: char, kept: Option<usize>) -> (usize, &'a [u8]) {
        let bytes = text.as_bytes();
        let own = |length: usize| (length, bytes.get(..length).unwrap_or_default());
        if let Some(length) = kept {
            return own(length);
        }
        match self.replacement(bytes) {
            Some((length, replacement)) if text.is_char_boundary(length) => (length, replacement),
            _ => own(letter.len_utf8()),
        }
    }

    /// Length and replacement of the longest prefix of the text that is in the table.
    fn replacement(&self, text: &[u8]) -> Option<(usize, &[u8])> {
        let offset = |unit: u32| ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize;
        let mut found = None;
        let mut at = offset(*self.units.first()?);
        for (index, &byte) in text.iter().enumerate() {
            at ^= usize::from(byte);
            let Some(&unit) = self.units.get(at) else { break };
            if byte == 0 || unit & (1 << 31 | 0xff) != u32::from(byte) {
                break;
            }
            at ^= offset(unit);
            if unit & (1 << 8) != 0 {
                let Some(&leaf) = self.units.get(at) else { break };
                found = Some((index + 1, leaf & !(1 << 31)));
            }
        }
        let (length, start) = found?;
        let replacing = self.texts.get(start as usize..)?;
        let end = replacing.iter().position(|&byte| byte == 0)?;
        Some((length, replacing.get(..end)?))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;
    use quadriga_conformance::Rng;
    use std::collections::BTreeMap;

    /// A unit of the trie without its leaf flag: a label, and the distance to its children's block, in multiples of 256
    /// where that is possible and asked for.
    fn unit(label: u8, offset: usize, long: bool) -> u32 {
        if long && offset.is_multiple_of(256) {
            (offset as u32 >> 8) << 10 | 1 << 9 | u32::from(label)
        } else {
            (offset as u32) << 10 | u32::from(label)
        }
    }

    /// The table of some replacements: every node of the trie has a block of 256 units for its children.
    fn table(replacements: &[(&str, &str)], rng: &mut Rng) -> Vec<u8> {
        let mut texts = Vec::new();
        // Prefix of a key, its block, and the text if it is a key.
        let mut nodes: BTreeMap<Vec<u8>, (usize, Option<usize>)> = BTreeMap::from([(Vec::new(), (0, None))]);
        for (from, to) in replacements {
            for end in 1..=from.len() {
                nodes.entry(from.as_bytes()[..end].to_vec()).or_default();
            }
            nodes.get_mut(from.as_bytes()).unwrap().1 = Some(texts.len());
            texts.extend_from_slice(to.as_bytes());
            texts.push(0);
        }
        for (number, (prefix, node)) in nodes.iter_mut().enumerate() {
            // The low byte of a block's address is that of its own unit's label, so that the distance has none.
            node.0 = (number + 1) * 256 + usize::from(prefix.last().copied().unwrap_or(0));
        }
        // Units that belong to nothing have a label that no byte matches.
        let mut units = vec![1 << 31; (nodes.len() + 1) * 256];
        for (prefix, (block, leaf)) in &nodes {
            let (at, label) = match prefix.split_last() {
                None => (0, 0),
                Some((last, parent)) => (nodes[parent].0 ^ usize::from(*last), *last),
            };
            units[at] = unit(label, at ^ block, rng.chance(0.5));
            if let Some(text) = leaf {
                units[at] |= 1 << 8;
                units[*block] = 1 << 31 | *text as u32;
            }
        }
        let mut table = (units.len() as u32 * 4).to_le_bytes().to_vec();
        table.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
        table.extend(texts);
        table
    }

    /// The slow way: the longest key at each position, then spaces.
    fn expected(
        text: &str,
        replacements: &[(&str, &str)],
        kept: &[(usize, usize)],
        prefix: bool,
        merge: bool,
    ) -> String {
        let (mut replaced, mut at) = (String::new(), 0);
        while at < text.len() {
            let rest = &text[at..];
            let token = kept.iter().find(|(start, _)| *start == at).map(|(_, length)| &rest[..*length]);
            let keys = replacements.iter().filter(|(from, _)| rest.starts_with(from));
            let (from, to) = match (token, keys.max_by_key(|(from, _)| from.len())) {
                (Some(token), _) => (token, token),
                (None, Some(found)) => *found,
                (None, None) => {
                    let letter = &rest[..rest.chars().next().unwrap().len_utf8()];
                    (letter, letter)
                }
            };
            replaced.push_str(to);
            at += from.len();
        }
        if merge {
            return replaced
                .split(' ')
                .filter(|word| !word.is_empty())
                .map(|word| format!("{SPACE}{word}"))
                .collect();
        }
        let first = replaced.find(|letter| letter != ' ').filter(|_| prefix);
        if let Some(first) = first {
            replaced.insert(first, ' ');
        }
        replaced.replace(' ', SPACE)
    }

    #[test]
    fn replacements_are_those_of_the_longest_keys() {
        let pool = [
            ("a", "A"),
            ("ab", "x"),
            ("abc", ""),
            ("abcd", "word"),
            ("ä", "ae"),
            ("  ", " "),
            ("\t", " "),
            ("ﬁ", "fi"),
            ("b", "bb "),
            ("é", "e"),
            ("日本", "Japan"),
            ("日", "day"),
            ("...", "…"),
            ("cd", " c d "),
        ];
        for seed in 0..300 {
            println!("seed {seed}");
            let mut rng = Rng::new(seed);
            let chosen: Vec<(&str, &str)> = pool.into_iter().filter(|_| rng.chance(0.6)).collect();
            let table = if chosen.is_empty() { Vec::new() } else { table(&chosen, &mut rng) };
            let letters = ["a", "b", "c", "d", "ä", "é", "日", "本", "ﬁ", " ", " ", "\t", ".", "\0", "z"];
            let text: String = (0..rng.below(25)).map(|_| *rng.pick(&letters).unwrap()).collect();
            // Tokens of one to three letters that are kept, last first, without overlaps.
            let (mut kept, mut free) = (Vec::new(), 0);
            let starts: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
            for (index, &at) in starts.iter().enumerate() {
                if at >= free && rng.chance(0.1) {
                    let end = starts.get(index + rng.range(1, 3)).copied().unwrap_or(text.len());
                    kept.insert(0, (at, end - at));
                    free = end;
                }
            }
            for (prefix, merge) in [(false, false), (true, false), (false, true), (true, true)] {
                let normalizer = Normalizer::new(&table, prefix, merge).unwrap();
                let found = normalizer.normalize(&text, &kept);
                assert_eq!(
                    found,
                    expected(&text, &chosen, &kept, prefix, merge),
                    "{text:?} {chosen:?} {kept:?}"
                );
            }
        }
    }

    #[test]
    fn damaged_tables_are_refused_or_replace_nothing() {
        let good = table(&[("a", "b")], &mut Rng::new(1));
        let fails = |table: &[u8]| Normalizer::new(table, false, false).is_err();
        assert!(fails(&good[..3]) && fails(&good[..4]) && fails(&good[..100]) && !fails(&good));
        let mut odd = good.clone();
        odd[0] += 1;
        assert!(fails(&odd), "units have four bytes");
        // Without its texts, or without their ends, a table replaces nothing.
        for cut in 1..=2 {
            let normalizer = Normalizer::new(&good[..good.len() - cut], false, false).unwrap();
            assert_eq!(normalizer.normalize("a", &[]), "a");
        }
    }
}

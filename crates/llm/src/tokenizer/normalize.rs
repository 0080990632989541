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

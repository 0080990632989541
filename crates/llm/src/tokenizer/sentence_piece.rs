//! SentencePiece's BPE (`tokenizer.ggml.model = llama`): characters of the whole text are merged by score, and
//! characters without a token become byte tokens.

use rustc_hash::FxHashMap;

use super::bytes::hexadecimal;
use super::merge::Merger;
use super::vocabulary::{TokenType, Vocabulary};

/// The character for a space in these vocabularies.
pub(super) const SPACE: &str = "\u{2581}";

/// No token.
const NONE: u32 = u32::MAX;

#[derive(Debug)]
pub(super) struct SentencePiece {
    /// Token and merge rank (better scores have smaller ranks) of each text.
    words: FxHashMap<Box<[u8]>, (u32, u32)>,
    longest: usize,
    bytes: Box<[Option<u32>; 256]>,
    has_bytes: bool,
    unknown: Option<u32>,
}

impl SentencePiece {
    pub(super) fn new(vocabulary: &Vocabulary) -> SentencePiece {
        let mut words = FxHashMap::default();
        let mut bytes = Box::new([None; 256]);
        let mut longest = 0;
        for (token, text) in (0u32..).zip(&vocabulary.tokens) {
            match vocabulary.token_type(token) {
                TokenType::Byte => {
                    if let Some(slot) = hexadecimal(text).and_then(|byte| bytes.get_mut(usize::from(byte))) {
                        *slot = Some(token);
                    }
                }
                TokenType::Control | TokenType::Unknown => {}
                TokenType::Normal | TokenType::UserDefined | TokenType::Unused if !text.is_empty() => {
                    longest = longest.max(text.len());
                    words.insert(text.as_bytes().into(), (token, rank(vocabulary.score(token))));
                }
                _ => {}
            }
        }
        let has_bytes = bytes.iter().any(Option::is_some);
        SentencePiece { words, longest, bytes, has_bytes, unknown: vocabulary.unknown }
    }

    /// Appends the tokens of a text whose spaces are already [`SPACE`].
    pub(super) fn encode(&self, text: &str, tokens: &mut Vec<u32>) {
        let bytes = text.as_bytes();
        let token = |start: usize, end: usize| {
            if end - start > self.longest {
                return None;
            }
            self.words.get(bytes.get(start..end)?).copied()
        };
        let mut merger = Merger::default();
        for (start, letter) in text.char_indices() {
            let end = start + letter.len_utf8();
            merger.push(start, end, token(start, end).map_or(NONE, |(token, _)| token));
        }
        merger.merge(|left, right| token(left.start, right.end).map(|(token, rank)| (rank, token)));
        let mut after_unknown = false;
        for segment in merger.segments() {
            if segment.symbol != NONE {
                tokens.push(segment.symbol);
                after_unknown = false;
            } else if self.has_bytes {
                for &byte in bytes.get(segment.start..segment.end).unwrap_or_default() {
                    let own = self.bytes.get(usize::from(byte)).copied().flatten();
                    tokens.extend(own.or(self.unknown));
                }
            } else if !after_unknown {
                tokens.extend(self.unknown); // One for the whole run, as SentencePiece does.
                after_unknown = true;
            }
        }
    }
}

/// An integer that is smaller for greater scores.
fn rank(score: f32) -> u32 {
    let bits = (score + 0.0).to_bits();
    if bits >> 31 == 0 { !(bits | 0x8000_0000) } else { bits }
}

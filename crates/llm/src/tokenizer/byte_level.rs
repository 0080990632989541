//! Byte-level BPE (`tokenizer.ggml.model = gpt2`): a pre-tokenizer splits the text into words, whose bytes are merged
//! by rank. Some vocabularies (`gemma4`) consist of characters instead, with byte tokens for all others.

use rustc_hash::FxHashMap;

use super::bytes::{Alphabet, hexadecimal};
use super::merge::Merger;
use super::pre_tokenizer::PreTokenizer;
use super::sentence_piece::SPACE;
use super::vocabulary::{TokenType, Vocabulary};
use crate::Result;

/// The longest word that is kept in the cache while a text is encoded: longer ones rarely repeat.
const MAX_CACHED_LENGTH: usize = 48;

#[derive(Debug)]
pub(super) struct ByteLevel {
    pub(super) pre_tokenizer: PreTokenizer,
    /// Symbols below this are tokens; symbols from here on occur in merges only.
    token_count: u32,
    /// The symbol of each byte; in a vocabulary of characters, the token of bytes that are in no token.
    alphabet: Box<[u32; 256]>,
    /// The symbols of texts; filled only in a vocabulary of characters, or if the pre-tokenizer ignores merges.
    words: FxHashMap<Box<[u8]>, u32>,
    /// Rank and merged symbol of each pair of adjacent symbols.
    merges: FxHashMap<(u32, u32), (u32, u32)>,
}

impl ByteLevel {
    pub(super) fn new(vocabulary: &Vocabulary, letters: &Alphabet) -> Result<ByteLevel> {
        // This tokenizer model is the name of its pre-tokenizer, too.
        let own = (vocabulary.model == "gemma4").then_some("gemma4");
        let pre_tokenizer = PreTokenizer::named(own.or(vocabulary.pre.as_deref()))?;
        let decode_onto = |text: &str, bytes: &mut Vec<u8>| {
            if pre_tokenizer.characters {
                bytes.extend_from_slice(text.as_bytes());
                return true;
            }
            letters.decode_onto(text, bytes)
        };
        let token_count = vocabulary.tokens.len() as u32;
        let mut symbols = Symbols { numbers: FxHashMap::default(), next: token_count };
        symbols.numbers.reserve(vocabulary.tokens.len());
        let mut alphabet = Box::new([u32::MAX; 256]);
        for (token, text) in (0u32..).zip(&vocabulary.tokens) {
            let token_type = vocabulary.token_type(token);
            if pre_tokenizer.characters
                && let Some(byte) = hexadecimal(text)
            {
                if let Some(slot) = alphabet.get_mut(usize::from(byte)) {
                    *slot = token;
                }
                continue;
            }
            let mut bytes = Vec::with_capacity(text.len());
            let ordinary = !matches!(token_type, TokenType::Control | TokenType::Unknown);
            if ordinary && !text.is_empty() && decode_onto(text, &mut bytes) {
                symbols.numbers.insert(bytes.into(), token);
            }
        }
        let whole_words = pre_tokenizer.ignore_merges && !pre_tokenizer.characters;
        let mut words = if whole_words { symbols.numbers.clone() } else { FxHashMap::default() };
        if !pre_tokenizer.characters {
            for (byte, slot) in (0..=u8::MAX).zip(alphabet.iter_mut()) {
                *slot = symbols.number(&[byte]);
            }
        }
        let mut merges = FxHashMap::default();
        let mut merged = Vec::new();
        merges.reserve(vocabulary.merges.len());
        for (rank, merge) in (0u32..).zip(&vocabulary.merges) {
            // Some files have a space as the first character of a merge: the separator comes after it.
            let second = merge.chars().next().map_or(0, char::len_utf8);
            let Some(space) = merge.get(second..).and_then(|rest| rest.find(' ')) else { continue };
            let (left, right) = merge.split_at(second + space);
            // Left and right in one buffer: the whole is the merged symbol.
            merged.clear();
            let known = decode_onto(left, &mut merged);
            let middle = merged.len();
            if !known || !right.get(1..).is_some_and(|right| decode_onto(right, &mut merged)) {
                continue; // No text contains these characters.
            }
            let (left, right) = merged.split_at(middle);
            if left.is_empty() || right.is_empty() {
                continue;
            }
            let pair = (symbols.number(left), symbols.number(right));
            let merged = symbols.number(&merged);
            merges.entry(pair).or_insert((rank, merged));
        }
        if pre_tokenizer.characters {
            words = symbols.numbers;
        }
        Ok(ByteLevel { pre_tokenizer, token_count, alphabet, words, merges })
    }

    /// Appends the tokens of a text without special tokens. Bytes that are not in the vocabulary are dropped.
    pub(super) fn encode(&self, text: &str, tokens: &mut Vec<u32>) {
        if self.pre_tokenizer.characters {
            self.encode_words(&text.replace(' ', SPACE), tokens);
        } else {
            self.encode_words(text, tokens);
        }
    }

    fn encode_words(&self, text: &str, tokens: &mut Vec<u32>) {
        let mut merger = Merger::default();
        let mut cached: FxHashMap<&str, (usize, usize)> = FxHashMap::default();
        self.pre_tokenizer.split(text, &mut |word| {
            if let Some(&(start, end)) = cached.get(word) {
                tokens.extend_from_within(start..end);
                return;
            }
            let start = tokens.len();
            self.encode_word(word, &mut merger, tokens);
            if word.len() <= MAX_CACHED_LENGTH {
                cached.insert(word, (start, tokens.len()));
            }
        });
    }

    fn encode_word(&self, word: &str, merger: &mut Merger, tokens: &mut Vec<u32>) {
        if let Some(token) = self.whole_word(word) {
            tokens.push(token);
            return;
        }
        let bytes = word.as_bytes();
        merger.clear();
        if self.pre_tokenizer.characters {
            for (at, letter) in word.char_indices() {
                let end = at + letter.len_utf8();
                let symbol = bytes.get(at..end).and_then(|letter| self.words.get(letter));
                merger.push(at, end, symbol.copied().unwrap_or(u32::MAX));
            }
        } else {
            for (at, &byte) in bytes.iter().enumerate() {
                merger.push(at, at + 1, self.symbol(byte));
            }
        }
        merger.merge(|left, right| self.merges.get(&(left.symbol, right.symbol)).copied());
        for segment in merger.segments() {
            if segment.symbol < self.token_count {
                tokens.push(segment.symbol);
            } else {
                let bytes = bytes.get(segment.start..segment.end).unwrap_or_default();
                let known =
                    bytes.iter().map(|&byte| self.symbol(byte)).filter(|&symbol| symbol < self.token_count);
                tokens.extend(known);
            }
        }
    }

    /// The token of a word that is not made by merges.
    fn whole_word(&self, word: &str) -> Option<u32> {
        let rules = &self.pre_tokenizer;
        let line_ends = || rules.ignore_merges_of_line_ends && word.bytes().all(|byte| byte == b'\n');
        if !rules.ignore_merges && !line_ends() {
            return None;
        }
        self.words.get(word.as_bytes()).copied().filter(|&symbol| symbol < self.token_count)
    }

    fn symbol(&self, byte: u8) -> u32 {
        self.alphabet.get(usize::from(byte)).copied().unwrap_or(u32::MAX)
    }
}

/// Symbols of byte strings: the token, or a new number beyond the vocabulary.
struct Symbols {
    numbers: FxHashMap<Box<[u8]>, u32>,
    next: u32,
}

impl Symbols {
    fn number(&mut self, bytes: &[u8]) -> u32 {
        if let Some(&number) = self.numbers.get(bytes) {
            return number;
        }
        let number = self.next;
        self.next = self.next.saturating_add(1);
        self.numbers.insert(bytes.into(), number);
        number
    }
}

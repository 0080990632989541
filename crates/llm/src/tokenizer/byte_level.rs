//! Byte-level byte-pair encoding (`tokenizer.ggml.model = gpt2`): words by rule, then merges by rank.

use rustc_hash::FxHashMap;

use super::bytes::Alphabet;
use super::merge::Merger;
use super::split::Splitter;
use super::vocabulary::{TokenType, Vocabulary};
use crate::Result;

/// Words longer than this are not remembered while a text is encoded: they hardly come twice.
const REMEMBERED: usize = 48;

#[derive(Debug)]
pub(super) struct ByteLevel {
    pub(super) splitter: Splitter,
    /// Symbols are numbered: first the tokens, then what only merges mention. This is where the second kind begins.
    token_count: u32,
    /// What each byte is called.
    alphabet: Box<[u32; 256]>,
    /// The token that is exactly these bytes; filled only for rules that look at whole words first.
    words: FxHashMap<Box<[u8]>, u32>,
    /// What two neighbouring symbols become: rank and symbol.
    merges: FxHashMap<(u32, u32), (u32, u32)>,
}

impl ByteLevel {
    pub(super) fn new(vocabulary: &Vocabulary, letters: &Alphabet) -> Result<ByteLevel> {
        let splitter = Splitter::named(vocabulary.pre.as_deref())?;
        let token_count = vocabulary.tokens.len() as u32;
        let mut symbols = Symbols { numbers: FxHashMap::default(), next: token_count };
        symbols.numbers.reserve(vocabulary.tokens.len());
        for (token, text) in (0u32..).zip(&vocabulary.tokens) {
            let ordinary = !matches!(vocabulary.token_type(token), TokenType::Control | TokenType::Unknown);
            if let (true, Some(bytes)) = (ordinary && !text.is_empty(), letters.decode(text)) {
                symbols.numbers.insert(bytes.into(), token);
            }
        }
        let words = if splitter.ignore_merges { symbols.numbers.clone() } else { FxHashMap::default() };
        let mut alphabet = Box::new([0; 256]);
        for (byte, slot) in (0..=u8::MAX).zip(alphabet.iter_mut()) {
            *slot = symbols.number(&[byte]);
        }
        let mut merges = FxHashMap::default();
        let mut merged = Vec::new();
        merges.reserve(vocabulary.merges.len());
        for (rank, merge) in (0u32..).zip(&vocabulary.merges) {
            // The first character may itself be a space in files of a careless writer: the separator comes after it.
            let second = merge.chars().next().map_or(0, char::len_utf8);
            let Some(space) = merge.get(second..).and_then(|rest| rest.find(' ')) else { continue };
            let (left, right) = merge.split_at(second + space);
            // Both in one buffer: the merged symbol is all of it.
            merged.clear();
            let known = letters.decode_onto(left, &mut merged);
            let middle = merged.len();
            if !known || !right.get(1..).is_some_and(|right| letters.decode_onto(right, &mut merged)) {
                continue; // A merge of what no text can contain never happens.
            }
            let (left, right) = merged.split_at(middle);
            if left.is_empty() || right.is_empty() {
                continue;
            }
            let pair = (symbols.number(left), symbols.number(right));
            let merged = symbols.number(&merged);
            merges.entry(pair).or_insert((rank, merged));
        }
        Ok(ByteLevel { splitter, token_count, alphabet, words, merges })
    }

    /// Appends the tokens of a text without special tokens. A byte that the vocabulary lacks is left out.
    pub(super) fn encode(&self, text: &str, tokens: &mut Vec<u32>) {
        let mut merger = Merger::default();
        let mut remembered: FxHashMap<&str, (usize, usize)> = FxHashMap::default();
        self.splitter.split(text, &mut |word| {
            if let Some(&(start, end)) = remembered.get(word) {
                tokens.extend_from_within(start..end);
                return;
            }
            let start = tokens.len();
            self.encode_word(word.as_bytes(), &mut merger, tokens);
            if word.len() <= REMEMBERED {
                remembered.insert(word, (start, tokens.len()));
            }
        });
    }

    fn encode_word(&self, word: &[u8], merger: &mut Merger, tokens: &mut Vec<u32>) {
        if self.splitter.ignore_merges
            && let Some(&token) = self.words.get(word)
        {
            tokens.push(token);
            return;
        }
        merger.clear();
        for (at, &byte) in word.iter().enumerate() {
            merger.push(at, at + 1, self.symbol(byte));
        }
        merger.merge(|left, right| self.merges.get(&(left.symbol, right.symbol)).copied());
        for piece in merger.pieces() {
            if piece.symbol < self.token_count {
                tokens.push(piece.symbol);
            } else {
                let bytes = word.get(piece.start..piece.end).unwrap_or_default();
                let known =
                    bytes.iter().map(|&byte| self.symbol(byte)).filter(|&symbol| symbol < self.token_count);
                tokens.extend(known);
            }
        }
    }

    fn symbol(&self, byte: u8) -> u32 {
        self.alphabet.get(usize::from(byte)).copied().unwrap_or(u32::MAX)
    }
}

/// Numbers for byte strings: a token's own number, or a fresh one beyond the vocabulary.
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

//! WordPiece (`tokenizer.ggml.model = bert`): text is normalized and split at white space and punctuation, and each
//! word becomes the longest tokens that it begins with.
//!
//! In GGUF files, tokens at the start of a word begin with U+2581, and those within a word have no `##`.

use regex::Regex;
use rustc_hash::FxHashMap;
use unicode_normalization::UnicodeNormalization;

use super::sentence_piece::SPACE;
use super::vocabulary::{TokenType, Vocabulary};
use crate::{Error, Result};

/// Words of more characters are unknown, as in the published models.
const MAX_WORD: usize = 100;

#[derive(Debug)]
pub(super) struct WordPiece {
    words: FxHashMap<Box<str>, u32>,
    /// The number of bytes of the longest token.
    longest: usize,
    unknown: Option<u32>,
    lowercase: bool,
    strip_accents: bool,
    punctuation: Regex,
    /// Control characters, and characters that are not assigned.
    removed: Regex,
    accent: Regex,
}

impl WordPiece {
    pub(super) fn new(vocabulary: &Vocabulary) -> Result<WordPiece> {
        let class = |class: &str| {
            Regex::new(class).map_err(|error| Error::Vocabulary { reason: format!("{class}: {error}") })
        };
        let ordinary = |token: &(u32, &String)| {
            !matches!(vocabulary.token_type(token.0), TokenType::Control | TokenType::Unknown)
        };
        let words: FxHashMap<Box<str>, u32> = (0u32..)
            .zip(&vocabulary.tokens)
            .filter(ordinary)
            .map(|(token, text)| (text.as_str().into(), token))
            .collect();
        let lowercase = vocabulary.lowercase.unwrap_or(true);
        Ok(WordPiece {
            longest: words.keys().map(|text| text.len()).max().unwrap_or(0),
            words,
            unknown: vocabulary.unknown,
            lowercase,
            strip_accents: vocabulary.strip_accents.unwrap_or(lowercase),
            punctuation: class(r"\p{P}")?,
            removed: class(r"\p{C}")?,
            accent: class(r"\p{Mn}")?,
        })
    }

    /// Appends the tokens of a text without special tokens.
    pub(super) fn encode(&self, text: &str, tokens: &mut Vec<u32>) {
        let mut word = String::new();
        let mut finish = |word: &mut String| {
            self.encode_word(word, tokens);
            word.clear();
        };
        let mut add = |letter: char| {
            if letter.is_whitespace() {
                return finish(&mut word);
            }
            let alone = is_ideograph(letter) || is_a(&self.punctuation, char::is_ascii_punctuation, letter);
            if alone {
                finish(&mut word);
            }
            if self.lowercase {
                word.extend(letter.to_lowercase());
            } else {
                word.push(letter);
            }
            if alone {
                finish(&mut word);
            }
        };
        let kept = |letter: &char| {
            letter.is_whitespace()
                || !(*letter == char::REPLACEMENT_CHARACTER
                    || is_a(&self.removed, char::is_ascii_control, *letter))
        };
        let letters = text.chars().filter(kept);
        if self.strip_accents {
            letters.nfd().filter(|letter| !is_a(&self.accent, |_| false, *letter)).for_each(add);
        } else {
            letters.for_each(&mut add);
        }
        self.encode_word(&word, tokens);
    }

    fn encode_word(&self, word: &str, tokens: &mut Vec<u32>) {
        if word.is_empty() {
            return;
        }
        let start = tokens.len();
        let spelled = format!("{SPACE}{word}");
        let mut rest = spelled.as_str();
        if word.chars().nth(MAX_WORD).is_some() {
            rest = "";
        }
        while !rest.is_empty() {
            let Some((token, length)) = self.longest_prefix(rest) else {
                tokens.truncate(start);
                break;
            };
            tokens.push(token);
            rest = rest.get(length..).unwrap_or_default();
        }
        if tokens.len() == start {
            tokens.extend(self.unknown);
        }
    }

    /// The longest token that a text begins with, and its length.
    fn longest_prefix(&self, text: &str) -> Option<(u32, usize)> {
        let ends = (1..=text.len().min(self.longest)).rev();
        ends.filter_map(|end| Some((*self.words.get(text.get(..end)?)?, end))).next()
    }
}

/// Whether a character is in a class, with a faster rule for ASCII.
fn is_a(class: &Regex, ascii: impl Fn(&char) -> bool, letter: char) -> bool {
    if letter.is_ascii() { ascii(&letter) } else { class.is_match(letter.encode_utf8(&mut [0; 4])) }
}

/// Whether a character is one of the ideographs that are words of their own: the unified ones of Unicode 8 (published
/// code leaves out U+2B820 to U+2B91F), and the compatibility ones.
fn is_ideograph(letter: char) -> bool {
    matches!(
        letter,
        '\u{4E00}'..='\u{9FFF}'
            | '\u{3400}'..='\u{4DBF}'
            | '\u{20000}'..='\u{2A6DF}'
            | '\u{2A700}'..='\u{2B73F}'
            | '\u{2B740}'..='\u{2B81F}'
            | '\u{2B920}'..='\u{2CEAF}'
            | '\u{F900}'..='\u{FAFF}'
            | '\u{2F800}'..='\u{2FA1F}'
    )
}

//! Tokenizers: text to tokens and back, with the vocabulary of a model file.
//!
//! Four tokenizer models are supported: byte-level BPE (`gpt2`) with named pre-tokenizers, and its variant on characters
//! (`gemma4`), SentencePiece's BPE by scores (`llama`), unigram (`t5`), and WordPiece (`bert`). They need tables of
//! Unicode only, and run in O(n log n) whatever the text.
//!
//! ```
//! use quadriga_llm::tokenizer::{Tokenizer, TokenType, Vocabulary};
//!
//! let vocabulary = Vocabulary {
//!     model: "gpt2".into(),
//!     pre: Some("gpt-2".into()),
//!     tokens: ["h", "i", "hi", "<|end|>"].map(String::from).to_vec(),
//!     types: vec![TokenType::Normal, TokenType::Normal, TokenType::Normal, TokenType::Control],
//!     merges: vec!["h i".into()],
//!     ..Vocabulary::default()
//! };
//! let tokenizer = Tokenizer::new(vocabulary)?;
//! assert_eq!(tokenizer.encode("hih<|end|>", true), [2, 0, 3]);
//! assert_eq!(tokenizer.decode(&[2, 0])?, "hih");
//! # Ok::<(), quadriga_llm::Error>(())
//! ```

mod byte_level;
mod bytes;
mod endings;
mod from_file;
mod matcher;
mod merge;
mod normalize;
mod pre_tokenizer;
mod sentence_piece;
mod stream;
mod unigram;
mod vocabulary;
mod word_piece;

pub use endings::is_known_ending;
pub use stream::Detokenizer;
pub(crate) use stream::Pending;
pub use vocabulary::{TokenType, Vocabulary};

use byte_level::ByteLevel;
use bytes::Alphabet;
use endings::mark_endings;
use matcher::{Direction, Found, Matcher};
use normalize::Normalizer;
use pre_tokenizer::DefaultBos;
use rustc_hash::FxHashSet;
use sentence_piece::{SPACE, SentencePiece};
use unigram::Unigram;
use word_piece::WordPiece;

use crate::{Error, Result};

#[derive(Debug)]
enum TokenizerKind {
    ByteLevel(ByteLevel),
    SentencePiece(SentencePiece),
    Unigram(Unigram, Normalizer),
    WordPiece(WordPiece),
}

/// Whether control tokens that are spelled out in a text become those tokens.
#[derive(Clone, Copy)]
pub(crate) enum ControlTokens<'a> {
    /// They do.
    Parsed,
    /// They are plain text.
    Text,
    /// They do where `allow` agrees with position, token and length; it is asked at positions with `at` only.
    ParsedWhere { at: &'a dyn Fn(usize) -> bool, allow: &'a dyn Fn(usize, u32, usize) -> bool },
}

/// A part of a text: plain text, or a special token that is spelled out in it.
enum Fragment<'t> {
    Text(&'t str),
    Token(u32),
}

/// White space in the sense of C.
fn ascii_space(letter: char) -> bool {
    matches!(letter, ' ' | '\t'..='\r')
}

/// Encodes text as tokens, and decodes tokens to text.
///
/// ```no_run
/// use quadriga_llm::Model;
///
/// let model = Model::open("model.gguf")?;
/// let tokenizer = model.tokenizer()?;
/// let tokens = tokenizer.encode("Hello, world!", false);
/// assert_eq!(tokenizer.decode(&tokens)?, "Hello, world!");
/// # Ok::<(), quadriga_llm::Error>(())
/// ```
#[derive(Debug)]
pub struct Tokenizer {
    vocabulary: Vocabulary,
    kind: TokenizerKind,
    /// Special tokens: user-defined tokens, which are recognised in any text, and control tokens.
    special: Matcher,
    /// The bytes of each token's text; empty for control and unused tokens.
    pieces: Vec<Box<[u8]>>,
    endings: FxHashSet<u32>,
    add_bos: bool,
    /// The token at the end of a sequence that is not continued: end-of-text or separator.
    last: Option<u32>,
    add_space_prefix: bool,
}

impl Tokenizer {
    /// Checks a vocabulary and builds its tokenizer.
    pub fn new(mut vocabulary: Vocabulary) -> Result<Tokenizer> {
        vocabulary.check()?;
        let endings = mark_endings(&mut vocabulary);
        let letters = Alphabet::new();
        let (kind, add_bos) = match vocabulary.model.as_str() {
            "gpt2" | "gemma4" => {
                let kind = ByteLevel::new(&vocabulary, &letters)?;
                let add_bos = kind.pre_tokenizer.add_bos;
                (TokenizerKind::ByteLevel(kind), add_bos)
            }
            "llama" => (TokenizerKind::SentencePiece(SentencePiece::new(&vocabulary)), DefaultBos::Yes),
            "t5" => {
                let prefix = vocabulary.add_space_prefix.unwrap_or(false);
                let normalizer =
                    Normalizer::new(&vocabulary.replacements, prefix, vocabulary.remove_extra_spaces)?;
                (TokenizerKind::Unigram(Unigram::new(&vocabulary)?, normalizer), DefaultBos::No)
            }
            "bert" => (TokenizerKind::WordPiece(WordPiece::new(&vocabulary)?), DefaultBos::Always),
            _ => {
                let known = "gpt2, gemma4, llama, t5, bert".to_owned();
                return Err(Error::UnknownTokenizer { model: vocabulary.model, known });
            }
        };
        let mut special = Vec::new();
        let mut pieces = Vec::with_capacity(vocabulary.tokens.len());
        for (token, text) in (0u32..).zip(&vocabulary.tokens) {
            let token_type = vocabulary.token_type(token);
            match token_type {
                TokenType::UserDefined => special.push((text.as_bytes(), token, true)),
                TokenType::Control | TokenType::Unknown => special.push((text.as_bytes(), token, false)),
                TokenType::Normal | TokenType::Unused | TokenType::Byte => {}
            }
            pieces.push(piece(&kind, &letters, token_type, text).into());
        }
        let special = Matcher::new(Direction::Backward, &special)?;
        let add_bos = match (add_bos, vocabulary.add_bos) {
            (DefaultBos::Always, _) | (DefaultBos::Yes, None) => vocabulary.bos.is_some(),
            (DefaultBos::No, None) => false,
            (_, Some(add_bos)) => add_bos,
        };
        let last = match kind {
            TokenizerKind::WordPiece(_) => vocabulary.separator,
            TokenizerKind::Unigram(..) => vocabulary.eos.filter(|_| vocabulary.add_eos.unwrap_or(true)),
            _ => vocabulary.eos.filter(|_| vocabulary.add_eos.unwrap_or(false)),
        };
        let sentence_piece = matches!(kind, TokenizerKind::SentencePiece(_));
        let add_space_prefix = vocabulary.add_space_prefix.unwrap_or(sentence_piece);
        Ok(Tokenizer { vocabulary, kind, special, pieces, endings, add_bos, last, add_space_prefix })
    }

    /// Encodes a text, without a beginning-of-text token. With `special`, control tokens that are spelled out in the
    /// text become those tokens; without, they are plain text, so that a user's input cannot inject control tokens.
    /// Bytes for which a byte-level vocabulary has no token are dropped.
    pub fn encode(&self, text: &str, special: bool) -> Vec<u32> {
        self.encode_where(text, if special { ControlTokens::Parsed } else { ControlTokens::Text })
    }

    /// Encodes a text with control tokens at some positions only.
    pub(crate) fn encode_where(&self, text: &str, control: ControlTokens<'_>) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(text.len() / 3);
        let mut after_special = true;
        let mut strips = false;
        for fragment in self.fragments(text, control) {
            match fragment {
                Fragment::Token(token) => tokens.push(token),
                Fragment::Text(text) => {
                    let text = if strips { text.trim_start_matches(ascii_space) } else { text };
                    if !text.is_empty() {
                        self.encode_text(text, after_special, &mut tokens);
                    }
                }
            }
            strips = matches!(fragment, Fragment::Token(token) if self.strips_after(token));
            after_special = matches!(fragment, Fragment::Token(_));
        }
        tokens
    }

    /// Whether white space after a special token is dropped.
    fn strips_after(&self, token: u32) -> bool {
        self.vocabulary.strip_after_special
            && self
                .vocabulary
                .tokens
                .get(token as usize)
                .is_some_and(|text| !["<unk>", "<s>", "<|endoftext|>"].contains(&text.as_str()))
    }

    /// Positions and lengths of the control tokens that are spelled out in a text, as [`encode`](Self::encode) finds
    /// them, and the tokens.
    pub(crate) fn control_tokens(&self, text: &str) -> Vec<(usize, usize, u32)> {
        let mut at = 0;
        let mut found = Vec::new();
        for fragment in self.fragments(text, ControlTokens::Parsed) {
            let length = match fragment {
                Fragment::Text(text) => text.len(),
                Fragment::Token(token) => {
                    let length = self.vocabulary.tokens.get(token as usize).map_or(0, String::len);
                    if self.vocabulary.token_type(token) != TokenType::UserDefined {
                        found.push((at, length, token));
                    }
                    length
                }
            };
            at += length;
        }
        found
    }

    /// The positions at which any control token begins, overlapping ones included.
    pub(crate) fn control_starts(&self, text: &str) -> Vec<usize> {
        let mut starts = Vec::new();
        self.special.scan(text.as_bytes(), |at, found| {
            if found.has_control {
                starts.push(at);
            }
        });
        starts.reverse();
        starts
    }

    /// The control tokens among some tokens, without the one for unknown text.
    pub(crate) fn control_among(&self, tokens: &[u32]) -> Vec<u32> {
        let control = |token: &u32| {
            self.vocabulary.token_type(*token) == TokenType::Control
                && Some(*token) != self.vocabulary.unknown
        };
        tokens.iter().copied().filter(control).collect()
    }

    /// The text of a control token, which it has in templates but not in decoded text.
    pub(crate) fn control_text(&self, token: u32) -> Option<&str> {
        let text = self.vocabulary.tokens.get(token as usize)?;
        (self.vocabulary.token_type(token) == TokenType::Control).then_some(text.as_str())
    }

    /// The texts of the control tokens.
    pub(crate) fn control_texts(&self) -> impl Iterator<Item = &str> {
        let control =
            |token: u32| matches!(self.vocabulary.token_type(token), TokenType::Control | TokenType::Unknown);
        (0u32..)
            .zip(&self.vocabulary.tokens)
            .filter(move |(token, _)| control(*token))
            .map(|(_, text)| text.as_str())
    }

    /// Encodes a whole prompt: as [`encode`](Self::encode), with the beginning-of-text token first if the vocabulary
    /// uses one and the text does not start with it.
    pub fn encode_prompt(&self, text: &str, special: bool) -> Vec<u32> {
        self.with_bos(self.encode(text, special))
    }

    /// The tokens of a prompt with the beginning-of-text token first, if the vocabulary uses one.
    pub(crate) fn with_bos(&self, mut tokens: Vec<u32>) -> Vec<u32> {
        if let (true, Some(bos)) = (self.add_bos, self.vocabulary.bos)
            && tokens.first() != Some(&bos)
        {
            tokens.insert(0, bos);
        }
        tokens
    }

    /// Encodes a whole sequence that is not continued, such as a text to embed: as
    /// [`encode_prompt`](Self::encode_prompt), with the end-of-text or separator token last if the vocabulary uses one and
    /// the text does not end with it.
    ///
    /// ```
    /// use quadriga_llm::tokenizer::{Tokenizer, TokenType, Vocabulary};
    ///
    /// let vocabulary = Vocabulary {
    ///     model: "bert".into(),
    ///     tokens: ["[UNK]", "[CLS]", "[SEP]", "\u{2581}hi", "s"].map(String::from).to_vec(),
    ///     types: [TokenType::Unknown, TokenType::Control, TokenType::Control].to_vec(),
    ///     bos: Some(1),
    ///     separator: Some(2),
    ///     unknown: Some(0),
    ///     ..Vocabulary::default()
    /// };
    /// # let vocabulary = Vocabulary { types: [vocabulary.types, vec![TokenType::Normal; 2]].concat(), ..vocabulary };
    /// assert_eq!(Tokenizer::new(vocabulary)?.encode_sequence("His", false), [1, 3, 4, 2]);
    /// # Ok::<(), quadriga_llm::Error>(())
    /// ```
    pub fn encode_sequence(&self, text: &str, special: bool) -> Vec<u32> {
        let mut tokens = self.encode_prompt(text, special);
        if let Some(last) = self.last
            && tokens.last() != Some(&last)
        {
            tokens.push(last);
        }
        tokens
    }

    /// The token that ends a sequence, an end-of-text or separator token, if the vocabulary uses one.
    pub fn sequence_end(&self) -> Option<u32> {
        self.last
    }

    /// Encodes two texts as one sequence that is not continued, such as a query and a document: the first with what
    /// [`encode_sequence`](Self::encode_sequence) adds, a separator if the vocabulary uses one there, then the second without
    /// a beginning.
    pub fn encode_pair(&self, first: &str, second: &str) -> Vec<u32> {
        let (mut tokens, second) = (self.encode_sequence(first, false), self.encode_sequence(second, false));
        if self.vocabulary.add_separator == Some(true) && !matches!(self.kind, TokenizerKind::WordPiece(_)) {
            tokens.extend(self.vocabulary.separator.or(self.vocabulary.eos));
        }
        let repeats = self.add_bos && self.vocabulary.bos.is_some_and(|bos| second.first() == Some(&bos));
        tokens.extend(second.iter().skip(usize::from(repeats)));
        tokens
    }

    /// Decodes tokens to text. Control tokens have no text, and bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        let mut stream = Detokenizer::new(self);
        let mut text = String::new();
        for &token in tokens {
            text.push_str(&stream.push(token)?);
        }
        text.push_str(&stream.finish());
        // Encoding added this space.
        let space_added = self.add_space_prefix || matches!(self.kind, TokenizerKind::WordPiece(_));
        if space_added && text.starts_with(' ') {
            text.remove(0);
        }
        Ok(text)
    }

    /// The bytes of a token's text, which may be part of a character; empty for control tokens.
    pub fn piece(&self, token: u32) -> Result<&[u8]> {
        self.pieces
            .get(token as usize)
            .map(AsRef::as_ref)
            .ok_or(Error::Token { token, count: self.pieces.len() })
    }

    /// The size of the vocabulary.
    pub fn token_count(&self) -> usize {
        self.pieces.len()
    }

    /// Whether a token ends the generation.
    pub fn is_end(&self, token: u32) -> bool {
        self.endings.contains(&token)
    }

    /// All tokens that end the generation, in no particular order.
    pub fn end_tokens(&self) -> impl Iterator<Item = u32> {
        self.endings.iter().copied()
    }

    /// Whether prompts begin with the beginning-of-text token.
    pub fn adds_bos(&self) -> bool {
        self.add_bos
    }

    /// The vocabulary.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    fn encode_text(&self, text: &str, after_special: bool, tokens: &mut Vec<u32>) {
        match &self.kind {
            TokenizerKind::ByteLevel(kind) => kind.encode(text, tokens),
            TokenizerKind::SentencePiece(kind) => {
                let mut spaced = text.replace(' ', SPACE);
                if self.add_space_prefix && after_special {
                    spaced.insert_str(0, SPACE);
                }
                kind.encode(&spaced, tokens);
            }
            TokenizerKind::WordPiece(kind) => kind.encode(text, tokens),
            TokenizerKind::Unigram(kind, normalizer) => {
                kind.encode(&normalizer.normalize(text, &self.user_defined(text)), tokens)
            }
        }
    }

    /// Positions and lengths of the longest user-defined token that begins at each position, last first.
    fn user_defined(&self, text: &str) -> Vec<(usize, usize)> {
        let mut found = Vec::new();
        self.special.scan(text.as_bytes(), |at, token| {
            found.extend(self.special.always(token).map(|token| (at, token.length as usize)));
        });
        found
    }

    /// Splits a text at the special tokens that are spelled out in it: leftmost first, the longest of several.
    fn fragments<'t>(&self, text: &'t str, control: ControlTokens<'_>) -> Vec<Fragment<'t>> {
        // The longest token at each position, last first.
        let mut matches: Vec<(usize, Found)> = Vec::new();
        self.special.scan(text.as_bytes(), |at, longest| {
            let allowed = match control {
                ControlTokens::Parsed => Some(longest),
                ControlTokens::Text => self.special.always(longest),
                ControlTokens::ParsedWhere { at: here, allow } if here(at) => {
                    std::iter::successors(Some(longest), |found| self.special.shorter(*found))
                        .find(|found| found.always || allow(at, found.token, found.length as usize))
                }
                ControlTokens::ParsedWhere { .. } => self.special.always(longest),
            };
            matches.extend(allowed.map(|found| (at, found)));
        });
        let mut fragments = Vec::new();
        let mut from = 0;
        while let Some((at, found)) = matches.pop() {
            if at < from {
                continue; // Within the token before.
            }
            // The text of a token consists of whole characters, so both ends are character boundaries.
            fragments.extend(text.get(from..at).filter(|before| !before.is_empty()).map(Fragment::Text));
            fragments.push(Fragment::Token(found.token));
            from = at + found.length as usize;
        }
        fragments.extend(text.get(from..).filter(|rest| !rest.is_empty()).map(Fragment::Text));
        fragments
    }
}

/// The bytes of a token's text.
fn piece(kind: &TokenizerKind, letters: &Alphabet, token_type: TokenType, text: &str) -> Vec<u8> {
    match token_type {
        TokenType::Control | TokenType::Unknown | TokenType::Unused => Vec::new(),
        TokenType::UserDefined => text.as_bytes().to_vec(),
        TokenType::Byte => {
            bytes::hexadecimal(text).map_or_else(|| text.as_bytes().to_vec(), |byte| vec![byte])
        }
        TokenType::Normal => match kind {
            TokenizerKind::ByteLevel(kind) if !kind.pre_tokenizer.characters => {
                letters.decode(text).unwrap_or_else(|| text.as_bytes().to_vec())
            }
            _ => text.replace(SPACE, " ").into_bytes(),
        },
    }
}

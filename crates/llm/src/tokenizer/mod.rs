//! Text to tokens and back, from the vocabulary that a model file carries.
//!
//! Three kinds are known: byte-level byte-pair encoding (`gpt2`) with the pre-tokenizers that vocabularies name,
//! SentencePiece's byte-pair encoding by scores (`llama`), and unigram (`t5`). All of it is written here on top of
//! `regex` alone: a general tokenizer library would bring a hundred crates, a C++ regular-expression engine and
//! time that can grow faster than the text, for three algorithms of a page each.
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
mod from_file;
mod merge;
mod normalize;
mod sentence_piece;
mod split;
mod stream;
mod trie;
mod unigram;
mod vocabulary;

pub use stream::Detokenizer;
pub(crate) use stream::Pending;
pub use vocabulary::{TokenType, Vocabulary};

use byte_level::ByteLevel;
use bytes::Alphabet;
use normalize::Normalizer;
use rustc_hash::FxHashSet;
use sentence_piece::{SPACE, SentencePiece};
use trie::Trie;
use unigram::Unigram;

use crate::{Error, Result};

/// Texts of tokens that end a generation, whatever else the file says about them.
const ENDINGS: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

#[derive(Debug)]
enum Kind {
    ByteLevel(ByteLevel),
    SentencePiece(SentencePiece),
    Unigram(Unigram, Normalizer),
}

/// A stretch of text, or a token that was written out in it.
enum Fragment<'t> {
    Text(&'t str),
    Token(u32),
}

/// Turns text into tokens and tokens into text.
#[derive(Debug)]
pub struct Tokenizer {
    vocabulary: Vocabulary,
    kind: Kind,
    /// User-defined tokens, which are found in any text.
    always: Trie,
    /// These and control tokens, which are found when asked for.
    special: Trie,
    /// What each token prints; empty for unused ones.
    pieces: Vec<Box<[u8]>>,
    endings: FxHashSet<u32>,
    add_bos: bool,
    add_space_prefix: bool,
}

impl Tokenizer {
    /// Checks a vocabulary and prepares it for use.
    pub fn new(mut vocabulary: Vocabulary) -> Result<Tokenizer> {
        vocabulary.check()?;
        let endings = mark_endings(&mut vocabulary);
        let letters = Alphabet::new();
        let (kind, add_bos, add_space_prefix) = match vocabulary.model.as_str() {
            "gpt2" => {
                let kind = ByteLevel::new(&vocabulary, &letters)?;
                let add_bos = kind.splitter.add_bos;
                (Kind::ByteLevel(kind), add_bos, false)
            }
            "llama" => (Kind::SentencePiece(SentencePiece::new(&vocabulary)), true, true),
            "t5" => {
                let prefix = vocabulary.add_space_prefix.unwrap_or(false);
                let normalizer =
                    Normalizer::new(&vocabulary.replacements, prefix, vocabulary.remove_extra_spaces)?;
                (Kind::Unigram(Unigram::new(&vocabulary), normalizer), false, false)
            }
            _ => {
                let known = "gpt2, llama, t5".to_owned();
                return Err(Error::UnknownTokenizer { model: vocabulary.model, known });
            }
        };
        let (mut always, mut special) = (Trie::default(), Trie::default());
        let mut pieces = Vec::with_capacity(vocabulary.tokens.len());
        for (token, text) in (0u32..).zip(&vocabulary.tokens) {
            let token_type = vocabulary.token_type(token);
            match token_type {
                TokenType::UserDefined => {
                    always.insert(text.as_bytes(), token);
                    special.insert(text.as_bytes(), token);
                }
                TokenType::Control | TokenType::Unknown => special.insert(text.as_bytes(), token),
                TokenType::Normal | TokenType::Unused | TokenType::Byte => {}
            }
            pieces.push(piece(&kind, &letters, token_type, text).into());
        }
        let add_bos = vocabulary.add_bos.unwrap_or(add_bos && vocabulary.bos.is_some());
        let add_space_prefix = vocabulary.add_space_prefix.unwrap_or(add_space_prefix);
        Ok(Tokenizer { vocabulary, kind, always, special, pieces, endings, add_bos, add_space_prefix })
    }

    /// The tokens of a text, without a beginning-of-text token. With `special`, control tokens that are written out in
    /// the text become those tokens; without, they are text like any other, so that what a user types cannot steer the
    /// model. A byte that a byte-level vocabulary has no token for is left out.
    pub fn encode(&self, text: &str, special: bool) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(text.len() / 3);
        let mut after_special = true;
        for fragment in self.fragments(text, if special { &self.special } else { &self.always }) {
            match fragment {
                Fragment::Token(token) => tokens.push(token),
                Fragment::Text(text) => self.encode_text(text, after_special, &mut tokens),
            }
            after_special = matches!(fragment, Fragment::Token(_));
        }
        tokens
    }

    /// The tokens of a whole prompt: [`encode`](Self::encode) with the beginning-of-text token before it, if the
    /// vocabulary wants one and the text does not already start with it.
    pub fn encode_prompt(&self, text: &str, special: bool) -> Vec<u32> {
        let mut tokens = self.encode(text, special);
        if let (true, Some(bos)) = (self.add_bos, self.vocabulary.bos)
            && tokens.first() != Some(&bos)
        {
            tokens.insert(0, bos);
        }
        tokens
    }

    /// The text of tokens. Control tokens print nothing, and bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        let mut stream = Detokenizer::new(self);
        let mut text = String::new();
        for &token in tokens {
            text.push_str(&stream.push(token)?);
        }
        text.push_str(&stream.finish());
        // The space that encoding put in front is not part of the text.
        if self.add_space_prefix && text.starts_with(' ') {
            text.remove(0);
        }
        Ok(text)
    }

    /// The bytes that a token prints: perhaps part of a character, nothing for control tokens.
    pub fn piece(&self, token: u32) -> Result<&[u8]> {
        self.pieces
            .get(token as usize)
            .map(AsRef::as_ref)
            .ok_or(Error::Token { token, count: self.pieces.len() })
    }

    /// How many tokens there are.
    pub fn token_count(&self) -> usize {
        self.pieces.len()
    }

    /// Whether a token ends a generation.
    pub fn is_end(&self, token: u32) -> bool {
        self.endings.contains(&token)
    }

    /// Whether prompts begin with the beginning-of-text token.
    pub fn adds_bos(&self) -> bool {
        self.add_bos
    }

    /// The vocabulary that this was made of.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    fn encode_text(&self, text: &str, after_special: bool, tokens: &mut Vec<u32>) {
        match &self.kind {
            Kind::ByteLevel(kind) => kind.encode(text, tokens),
            Kind::SentencePiece(kind) => {
                let mut spaced = text.replace(' ', SPACE);
                if self.add_space_prefix && after_special {
                    spaced.insert_str(0, SPACE);
                }
                kind.encode(&spaced, tokens);
            }
            Kind::Unigram(kind, normalizer) => kind.encode(&normalizer.normalize(text, &self.always), tokens),
        }
    }

    /// Cuts a text at the tokens that are written out in it, the leftmost first and of several the longest.
    fn fragments<'t>(&self, text: &'t str, marked: &Trie) -> Vec<Fragment<'t>> {
        let mut fragments = Vec::new();
        let mut rest = text;
        let mut at = 0;
        while !marked.is_empty() && at < rest.len() {
            let found = rest.as_bytes().get(at..).and_then(|bytes| marked.longest(bytes));
            let Some((length, token)) = found else {
                at += 1;
                continue;
            };
            // Texts of tokens are whole characters, so both ends lie between characters.
            let (Some(before), Some(after)) = (rest.get(..at), rest.get(at + length..)) else { break };
            if !before.is_empty() {
                fragments.push(Fragment::Text(before));
            }
            fragments.push(Fragment::Token(token));
            (rest, at) = (after, 0);
        }
        if !rest.is_empty() {
            fragments.push(Fragment::Text(rest));
        }
        fragments
    }
}

/// Finds the tokens that end a generation, and makes those control tokens that go by a well-known name.
fn mark_endings(vocabulary: &mut Vocabulary) -> FxHashSet<u32> {
    let mut endings: FxHashSet<u32> = [vocabulary.eos, vocabulary.eot].into_iter().flatten().collect();
    vocabulary.types.resize(vocabulary.tokens.len(), TokenType::Normal);
    for ((token, text), token_type) in (0u32..).zip(&vocabulary.tokens).zip(&mut vocabulary.types) {
        if ENDINGS.contains(&text.as_str()) {
            endings.insert(token);
            *token_type = TokenType::Control;
        }
    }
    endings
}

/// What a token prints.
fn piece(kind: &Kind, letters: &Alphabet, token_type: TokenType, text: &str) -> Vec<u8> {
    match token_type {
        TokenType::Control | TokenType::Unknown | TokenType::Unused => Vec::new(),
        TokenType::UserDefined => text.as_bytes().to_vec(),
        TokenType::Byte => {
            bytes::hexadecimal(text).map_or_else(|| text.as_bytes().to_vec(), |byte| vec![byte])
        }
        TokenType::Normal => match kind {
            Kind::ByteLevel(_) => letters.decode(text).unwrap_or_else(|| text.as_bytes().to_vec()),
            Kind::SentencePiece(_) | Kind::Unigram(..) => text.replace(SPACE, " ").into_bytes(),
        },
    }
}

//! A vocabulary as plain data.

use crate::{Error, Result};

/// The type of a token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenType {
    /// Ordinary text.
    #[default]
    Normal,
    /// Stands for text that is not in the vocabulary.
    Unknown,
    /// A control token, which plain text is never encoded as.
    Control,
    /// Text that is never split.
    UserDefined,
    /// An unused token.
    Unused,
    /// One byte, written like `<0x0A>`.
    Byte,
}

impl TokenType {
    /// The type with this number in a GGUF file. Unknown numbers are ordinary text.
    pub fn from_id(id: i64) -> TokenType {
        match id {
            2 => TokenType::Unknown,
            3 => TokenType::Control,
            4 => TokenType::UserDefined,
            5 => TokenType::Unused,
            6 => TokenType::Byte,
            _ => TokenType::Normal,
        }
    }
}

/// The data of a tokenizer. The names follow the `tokenizer.ggml.*` keys of GGUF files.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Vocabulary {
    /// The tokenizer model: `gpt2` (byte-level BPE), `gemma4` (BPE on characters), `llama` (SentencePiece BPE), `t5`
    /// (unigram) or `bert` (WordPiece).
    pub model: String,
    /// The name of the pre-tokenizer; byte-level vocabularies only.
    pub pre: Option<String>,
    /// The text of each token. Of equal texts the last one is used; an empty text is never matched.
    pub tokens: Vec<String>,
    /// The score of each token, or empty.
    pub scores: Vec<f32>,
    /// The type of each token, or empty if all are ordinary text.
    pub types: Vec<TokenType>,
    /// Merges: pairs of texts separated by a space, best first; byte-level vocabularies only.
    pub merges: Vec<String>,
    /// The beginning-of-text token.
    pub bos: Option<u32>,
    /// The end-of-text token.
    pub eos: Option<u32>,
    /// The end-of-turn token.
    pub eot: Option<u32>,
    /// The end-of-message token.
    pub eom: Option<u32>,
    /// The unknown token.
    pub unknown: Option<u32>,
    /// The token between and, with WordPiece, after sequences.
    pub separator: Option<u32>,
    /// Whether prompts begin with `bos`; `None` is the default of the tokenizer model.
    pub add_bos: Option<bool>,
    /// Whether sequences that are not continued end with `eos`; `None` is the default of the tokenizer model.
    pub add_eos: Option<bool>,
    /// Whether a separator is added between the two texts of a pair, beside the end of the first; `None` is false.
    pub add_separator: Option<bool>,
    /// Whether white space after special tokens is dropped, as Phi-3's tokenizer does: not after the tokens `<unk>`, `<s>` and
    /// `<|endoftext|>`.
    pub strip_after_special: bool,
    /// Whether a space is added before text; `None` is the default of the tokenizer model.
    pub add_space_prefix: Option<bool>,
    /// Whether runs of spaces are collapsed (unigram only).
    pub remove_extra_spaces: bool,
    /// Whether text becomes lower case (WordPiece only); `None` is true.
    pub lowercase: Option<bool>,
    /// Whether accents are removed (WordPiece only); `None` if text becomes lower case.
    pub strip_accents: Option<bool>,
    /// SentencePiece's compiled normalization table (unigram only), or empty.
    pub replacements: Vec<u8>,
}

impl Vocabulary {
    /// The type of a token.
    pub(crate) fn token_type(&self, token: u32) -> TokenType {
        self.types.get(token as usize).copied().unwrap_or_default()
    }

    /// The score of a token, 0 without scores.
    pub(super) fn score(&self, token: u32) -> f32 {
        self.scores.get(token as usize).copied().unwrap_or_default()
    }

    /// An error if the vocabulary is inconsistent.
    pub(super) fn check(&self) -> Result<()> {
        let wrong = |reason: String| Err(Error::Vocabulary { reason });
        let count = self.tokens.len();
        if count == 0 {
            return wrong("it has no tokens".to_owned());
        }
        // Merges have symbols beyond the tokens: at most three each.
        let max_symbols = count.saturating_add(self.merges.len().saturating_mul(3)).saturating_add(256);
        if u32::try_from(max_symbols).is_err() {
            return wrong(format!("{count} tokens and {} merges are too many", self.merges.len()));
        }
        if !self.scores.is_empty() && self.scores.len() < count {
            return wrong(format!("{} scores for {count} tokens", self.scores.len()));
        }
        if !self.types.is_empty() && self.types.len() < count {
            return wrong(format!("{} token types for {count} tokens", self.types.len()));
        }
        if let Some(token) = self.scores.iter().take(count).position(|score| score.is_nan()) {
            return wrong(format!("the score of token {token} is NaN"));
        }
        let named = [
            ("beginning", self.bos),
            ("end", self.eos),
            ("end-of-turn", self.eot),
            ("end-of-message", self.eom),
            ("unknown", self.unknown),
            ("separator", self.separator),
        ];
        for (name, token) in named {
            if let Some(token) = token.filter(|&token| token as usize >= count) {
                return wrong(format!("the {name} token is {token}, but there are only {count} tokens"));
            }
        }
        if self.add_bos == Some(true) && self.bos.is_none() {
            return wrong("prompts begin with a beginning-of-text token, but there is none".to_owned());
        }
        Ok(())
    }
}

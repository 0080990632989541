//! A vocabulary as plain data, however it was come by.

use crate::{Error, Result};

/// What a token is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenType {
    /// Ordinary text.
    #[default]
    Normal,
    /// Stands for what the vocabulary cannot say.
    Unknown,
    /// Steers the model; never the result of ordinary text.
    Control,
    /// Text that is always kept in one piece.
    UserDefined,
    /// A place without use.
    Unused,
    /// One byte, written like `<0x0A>`.
    Byte,
}

impl TokenType {
    /// The type with this number in a GGUF file. Numbers without a meaning are ordinary text, as in other readers.
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

/// Everything a tokenizer is made of. The names follow the `tokenizer.ggml.*` keys of GGUF files.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Vocabulary {
    /// The kind: `gpt2` (byte-level), `llama` (SentencePiece) or `t5` (unigram).
    pub model: String,
    /// The name of the pre-tokenizer; byte-level vocabularies only.
    pub pre: Option<String>,
    /// The text of each token. Of equal texts the last one counts; an empty text is never matched.
    pub tokens: Vec<String>,
    /// The score of each token, or empty.
    pub scores: Vec<f32>,
    /// The type of each token, or empty when all are ordinary.
    pub types: Vec<TokenType>,
    /// Pairs of texts separated by a space, best first; byte-level vocabularies only. Pairs that no text can contain
    /// are ignored.
    pub merges: Vec<String>,
    /// The token that begins a text.
    pub bos: Option<u32>,
    /// The token that ends a text.
    pub eos: Option<u32>,
    /// The token that ends a turn of a chat.
    pub eot: Option<u32>,
    /// The token for what the vocabulary cannot say.
    pub unknown: Option<u32>,
    /// Whether a text is to begin with `bos`; `None` leaves it to the kind.
    pub add_bos: Option<bool>,
    /// Whether text is to start with a space; `None` leaves it to the kind.
    pub add_space_prefix: Option<bool>,
    /// Whether runs of spaces count as one (unigram only).
    pub remove_extra_spaces: bool,
    /// SentencePiece's compiled table of replacements that come before anything else (unigram only), or empty.
    pub replacements: Vec<u8>,
}

impl Vocabulary {
    /// The type of a token.
    pub(super) fn token_type(&self, token: u32) -> TokenType {
        self.types.get(token as usize).copied().unwrap_or_default()
    }

    /// The score of a token, 0 without scores.
    pub(super) fn score(&self, token: u32) -> f32 {
        self.scores.get(token as usize).copied().unwrap_or_default()
    }

    /// Finds contradictions that would make results meaningless.
    pub(super) fn check(&self) -> Result<()> {
        let wrong = |reason: String| Err(Error::Vocabulary { reason });
        let count = self.tokens.len();
        if count == 0 {
            return wrong("it has no tokens".to_owned());
        }
        // Symbols beyond the tokens are numbered too: at most three for a merge.
        let most = count.saturating_add(self.merges.len().saturating_mul(3)).saturating_add(256);
        if u32::try_from(most).is_err() {
            return wrong(format!("{count} tokens and {} merges are too many", self.merges.len()));
        }
        if !self.scores.is_empty() && self.scores.len() < count {
            return wrong(format!("{} scores for {count} tokens", self.scores.len()));
        }
        if !self.types.is_empty() && self.types.len() < count {
            return wrong(format!("{} token types for {count} tokens", self.types.len()));
        }
        if let Some(token) = self.scores.iter().take(count).position(|score| score.is_nan()) {
            return wrong(format!("the score of token {token} is not a number"));
        }
        let named = [
            ("beginning", self.bos),
            ("end", self.eos),
            ("end-of-turn", self.eot),
            ("unknown", self.unknown),
        ];
        for (name, token) in named {
            if let Some(token) = token.filter(|&token| token as usize >= count) {
                return wrong(format!("the {name} token is {token}, but there are only {count} tokens"));
            }
        }
        if self.add_bos == Some(true) && self.bos.is_none() {
            return wrong("text is to begin with a token that is not named".to_owned());
        }
        Ok(())
    }
}

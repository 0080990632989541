//! A model's vocabulary as the compiler takes it: a trie of the bytes of all tokens.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use crate::tokenizer::{TokenType, Tokenizer};
use crate::{Error, Result};

/// Bytes of a token. Longer ones are never generated: the trie recurses over them.
const MAX_TOKEN: usize = 1024;

/// The first number that is no token in a trie.
const MAX_TOKENS: usize = 0xff_ffff;

/// The trie of a vocabulary.
pub(super) struct TokenTrie {
    trie: TokTrie,
}

impl TokenTrie {
    /// The trie of a tokenizer's vocabulary.
    pub(super) fn env(tokenizer: &Tokenizer) -> Result<TokEnv> {
        let count = tokenizer.token_count();
        let size = u32::try_from(count).ok().filter(|_| count < MAX_TOKENS);
        let size = size.ok_or_else(|| Error::Vocabulary {
            reason: format!("constraints are supported for fewer than {MAX_TOKENS} tokens, not {count}"),
        })?;
        let words: Vec<Vec<u8>> = (0..size).map(|token| word(tokenizer, token)).collect();
        let mut endings: Vec<TokenId> = tokenizer.end_tokens().collect();
        endings.sort_unstable();
        let end = endings.first().copied();
        let trie = TokTrie::from(&TokRxInfo::new(size, end.unwrap_or(toktrie::INVALID_TOKEN)), &words);
        let trie = if endings.is_empty() { trie } else { trie.with_eos_tokens(&endings) };
        Ok(Arc::new(TokenTrie { trie }))
    }
}

/// Control tokens and others that are never split, by their text.
pub(super) fn special_tokens(tokenizer: &Tokenizer) -> FxHashMap<String, u32> {
    let vocabulary = tokenizer.vocabulary();
    let is_special =
        |token| matches!(vocabulary.token_type(token), TokenType::Control | TokenType::UserDefined);
    let tokens = (0u32..).zip(&vocabulary.tokens).filter(|(token, _)| is_special(*token));
    tokens.map(|(token, text)| (text.clone(), token)).collect()
}

/// The bytes of a token: its text, or a byte that is in no text and the name of a control token.
fn word(tokenizer: &Tokenizer, token: u32) -> Vec<u8> {
    let vocabulary = tokenizer.vocabulary();
    let word = match vocabulary.token_type(token) {
        TokenType::Control | TokenType::Unknown => {
            let name = vocabulary.tokens.get(token as usize).map_or(&[][..], |text| text.as_bytes());
            [&[TokTrie::SPECIAL_TOKEN_MARKER], name].concat()
        }
        _ => tokenizer.piece(token).unwrap_or_default().to_vec(),
    };
    // A byte token of FF would be taken for the beginning of a control token; it is in no UTF-8 text.
    let is_marker = word.len() == 1 && word.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER);
    if is_marker || word.len() > MAX_TOKEN { Vec::new() } else { word }
}

impl TokenizerEnv for TokenTrie {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.greedy_tokenize(bytes)
    }

    /// The model may write a text in any tokens: masks have all that continue it.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

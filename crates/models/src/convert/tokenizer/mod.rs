//! Tokenizers: `tokenizer.json` or `tokenizer.model` to the `tokenizer.*` keys of GGUF files.

mod json;
mod normalizer;
mod pre_tokenizer;
mod sentence_piece;
mod special;

use std::path::Path;

use quadriga_gguf::OwnedValue;
use serde_json::{Map, Value};

pub use self::json::parse as parse_tokenizer_json;
pub(super) use self::pre_tokenizer::known as known_pre_tokenizers;
use super::config::{Config, MAX_LIST, MAX_SETTINGS, read_object, read_text};
use super::error::{ConvertError, ConvertResult, is_regular};

/// The type of a token, as files number them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
#[allow(missing_docs, reason = "the names are those of the format")]
pub enum TokenKind {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

/// A token of a vocabulary.
#[derive(Clone, Debug, PartialEq)]
pub struct VocabularyToken {
    /// The text, as the kind of tokenizer spells it.
    pub text: String,
    /// The score; 0 where the kind of tokenizer has none.
    pub score: f32,
    /// The type.
    pub kind: TokenKind,
}

/// The vocabulary of a tokenizer, and what else its keys need.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvertedVocabulary {
    /// The tokenizer model in GGUF files: `gpt2`, `llama`, `t5` or `bert`.
    pub model: &'static str,
    /// The name of the pre-tokenizer, if its rules are known.
    pub pre: Result<&'static str, String>,
    /// The tokens; ids without one are `None`.
    pub tokens: Vec<Option<VocabularyToken>>,
    /// Merges, best first.
    pub merges: Vec<String>,
    /// Keys and values after `tokenizer.ggml.`.
    pub keys: Vec<(&'static str, OwnedValue)>,
    /// What the user should know about the result.
    pub notes: Vec<String>,
}

/// The most tokens that a vocabulary may have, four times those of the largest: memory is taken up to the highest id.
const MAX_TOKENS: usize = 1 << 21;

impl ConvertedVocabulary {
    fn new(model: &'static str) -> ConvertedVocabulary {
        ConvertedVocabulary {
            model,
            pre: Ok("default"),
            tokens: Vec::new(),
            merges: Vec::new(),
            keys: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Puts a token at its id; an error if that is beyond any vocabulary.
    fn put(&mut self, id: u64, token: VocabularyToken) -> Result<(), String> {
        let place = usize::try_from(id).ok().filter(|id| *id < MAX_TOKENS);
        let place = place.ok_or_else(|| {
            let text: String = token.text.chars().take(60).collect();
            format!("token {text:?} has the id {id}; ids up to {} are supported", MAX_TOKENS - 1)
        })?;
        if self.tokens.len() <= place {
            self.tokens.resize(place + 1, None);
        }
        if let Some(slot) = self.tokens.get_mut(place) {
            *slot = Some(token);
        }
        Ok(())
    }

    /// The id of a token.
    fn id_of(&self, text: &str) -> Option<u32> {
        let found =
            self.tokens.iter().position(|token| token.as_ref().is_some_and(|token| token.text == text));
        found.and_then(|id| u32::try_from(id).ok())
    }
}

/// The files of a tokenizer.
pub(super) struct TokenizerFiles {
    pub(super) json: Option<Map<String, Value>>,
    pub(super) config: Map<String, Value>,
    /// Texts and ids of tokens that were added to the model's own, in folders of older tools.
    pub(super) added: Map<String, Value>,
    pub(super) generation: Map<String, Value>,
    pub(super) template: Option<String>,
}

impl TokenizerFiles {
    fn read(folder: &Path) -> ConvertResult<TokenizerFiles> {
        let object = |name: &str, most: u64| -> ConvertResult<Option<Map<String, Value>>> {
            let path = folder.join(name);
            if is_regular(&path)? { read_object(&path, most).map(Some) } else { Ok(None) }
        };
        let mut template = None;
        for name in ["chat_template.jinja", "chat_template.j2"] {
            let path = folder.join(name);
            if template.is_none() && is_regular(&path)? {
                template = Some(read_text(&path, MAX_SETTINGS)?);
            }
        }
        let template = match template {
            Some(template) => Some(template),
            None => object("chat_template.json", MAX_SETTINGS)?
                .and_then(|object| object.get("chat_template").and_then(Value::as_str).map(str::to_owned)),
        };
        Ok(TokenizerFiles {
            json: object("tokenizer.json", MAX_LIST)?,
            config: object("tokenizer_config.json", MAX_LIST)?.unwrap_or_default(),
            added: object("added_tokens.json", MAX_LIST)?.unwrap_or_default(),
            generation: object("generation_config.json", MAX_SETTINGS)?.unwrap_or_default(),
            template,
        })
    }

    /// Whether the chat template has a token in it, or the tokenizer puts it into texts.
    fn mentions(&self, text: &str) -> bool {
        let own = self.config.get("chat_template").map(Value::to_string);
        let templates = self.template.iter().chain(&own);
        templates.into_iter().any(|template| template.contains(text))
            || special::names(&self.config).any(|name| name == text)
    }
}

/// The `tokenizer.*` keys of a folder's tokenizer.
pub(super) struct TokenizerKeys {
    pub(super) keys: Vec<(String, OwnedValue)>,
    /// How many tokens there are.
    pub(super) tokens: usize,
    /// What the user should know about the result.
    pub(super) notes: Vec<String>,
}

/// The `tokenizer.*` keys of a folder's tokenizer. `rows` is the size of the embedding, and
/// `pre` a pre-tokenizer's name that replaces the detected one.
pub(super) fn keys(
    folder: &Path,
    config: &Config,
    architecture: &str,
    rows: usize,
    pre: Option<&str>,
) -> ConvertResult<TokenizerKeys> {
    let files = TokenizerFiles::read(folder)?;
    let model_path = folder.join("tokenizer.model");
    let has_pieces = is_regular(&model_path)?;
    let mut vocabulary = match &files.json {
        Some(json) => {
            let mut vocabulary = json::parse(json, "tokenizer.json")?;
            // The scores of SentencePiece's own file are exact.
            if vocabulary.model == "llama" && has_pieces {
                let own = sentence_piece::open(&model_path)?;
                if own.model == "llama" {
                    let added = std::mem::replace(&mut vocabulary, own);
                    add_missing(&mut vocabulary, added);
                }
            }
            vocabulary
        }
        None if has_pieces => sentence_piece::open(&model_path)?,
        None => {
            let missing = "neither tokenizer.json nor tokenizer.model is in the folder".to_owned();
            return Err(ConvertError::Tokenizer { missing });
        }
    };
    special::add_listed_tokens(&mut vocabulary, &files)?;
    special::add_tokens_of_config(&mut vocabulary, &files.config)?;
    let (found, mut notes) = (vocabulary.tokens.len(), std::mem::take(&mut vocabulary.notes));
    notes.extend(leave_out_beyond(&mut vocabulary, &files, rows)?);
    vocabulary.tokens.resize(rows, None);
    notes.extend(rows_without_token(&vocabulary));
    let pre = match (pre, &vocabulary.pre) {
        (Some(name), _) => name.to_owned(),
        (None, Ok(name)) => pre_tokenizer::for_architecture(name, architecture).to_owned(),
        (None, Err(rules)) => {
            let known = known_pre_tokenizers().join(", ");
            return Err(ConvertError::PreTokenizer { rules: rules.clone(), known });
        }
    };
    let keys = special::keys(&mut vocabulary, &files, config, rows)?;
    notes.append(&mut vocabulary.notes);
    let mut pairs = vec![
        ("tokenizer.ggml.model".to_owned(), vocabulary.model.into()),
        ("tokenizer.ggml.pre".to_owned(), pre.into()),
    ];
    let mut texts = Vec::with_capacity(rows);
    let mut kinds = Vec::with_capacity(rows);
    let mut scores = Vec::with_capacity(rows);
    for (id, token) in vocabulary.tokens.into_iter().enumerate() {
        let token = token.unwrap_or_else(|| VocabularyToken {
            text: format!("[PAD{id}]"),
            score: -10_000.0,
            kind: TokenKind::Unused,
        });
        texts.push(token.text);
        kinds.push(token.kind as i32);
        scores.push(token.score);
    }
    pairs.push(("tokenizer.ggml.tokens".to_owned(), texts.into()));
    if matches!(vocabulary.model, "llama" | "t5") {
        pairs.push(("tokenizer.ggml.scores".to_owned(), scores.into()));
    }
    pairs.push(("tokenizer.ggml.token_type".to_owned(), kinds.into()));
    if vocabulary.model == "gpt2" {
        pairs.push(("tokenizer.ggml.merges".to_owned(), vocabulary.merges.into()));
    }
    pairs.extend(vocabulary.keys.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)));
    pairs.extend(keys);
    Ok(TokenizerKeys { keys: pairs, tokens: found, notes })
}

/// Removes tokens for which the embedding has no row, and says which. An error for those that texts can contain; special tokens of
/// which neither the template nor another key knows are left out, as files of text models have some of their siblings with images.
fn leave_out_beyond(
    vocabulary: &mut ConvertedVocabulary,
    files: &TokenizerFiles,
    rows: usize,
) -> ConvertResult<Option<String>> {
    let tokens = vocabulary.tokens.len();
    if tokens <= rows {
        return Ok(None);
    }
    let beyond = vocabulary.tokens.split_off(rows);
    let beyond: Vec<(usize, VocabularyToken)> =
        (rows..).zip(beyond).filter_map(|(id, token)| Some((id, token?))).collect();
    let needed = |token: &VocabularyToken| token.kind != TokenKind::Control || files.mentions(&token.text);
    if let Some((id, token)) = beyond.iter().find(|(_, token)| needed(token)) {
        return Err(ConvertError::TokensBeyondRows { tokens, rows, id: *id, text: token.text.clone() });
    }
    Ok(beyond.first().map(|(id, token)| {
        let more = beyond.len() - 1;
        let others = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!(
            "special token {id}, {:?},{others} left out: the tokenizer has {tokens} tokens, the embedding {rows} rows",
            token.text
        )
    }))
}

/// Says how many rows of the embedding have no token: most are padding, but a token of a file that is missing is one, too.
fn rows_without_token(vocabulary: &ConvertedVocabulary) -> Option<String> {
    let first = vocabulary.tokens.iter().position(Option::is_none)?;
    let count = vocabulary.tokens.iter().filter(|token| token.is_none()).count();
    let rows = vocabulary.tokens.len();
    Some(format!("{count} of the {rows} rows of the embedding have no token, the first is row {first}"))
}

/// Adds tokens of another vocabulary that are not ordinary text, or are beyond the end.
fn add_missing(vocabulary: &mut ConvertedVocabulary, other: ConvertedVocabulary) {
    for (id, token) in other.tokens.into_iter().enumerate() {
        let Some(token) = token else { continue };
        let known = vocabulary.tokens.get(id).and_then(Option::as_ref);
        let is_special = matches!(token.kind, TokenKind::Control | TokenKind::UserDefined);
        if known.is_none() || is_special {
            let _ = vocabulary.put(id as u64, token); // The id was accepted before.
        }
    }
}

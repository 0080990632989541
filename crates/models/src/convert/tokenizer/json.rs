//! `tokenizer.json`: BPE, unigram and WordPiece models of Hugging Face's tokenizers.

use serde_json::{Map, Value};

use super::super::error::{ConvertError, ConvertResult, invalid};
use super::special::looks_special;
use super::{ConvertedVocabulary, TokenKind, VocabularyToken};
use super::{normalizer, pre_tokenizer};

/// Reads a tokenizer; `file` names it in errors.
pub fn parse(json: &Map<String, Value>, file: &str) -> ConvertResult<ConvertedVocabulary> {
    let Some(Value::Object(model)) = json.get("model") else {
        return Err(invalid(file, "model", "it is missing, or no object"));
    };
    let kind = match model.get("type").and_then(Value::as_str) {
        Some(kind) => kind,
        // Old files do not name it.
        None if model.contains_key("merges") => "BPE",
        None if model.get("vocab").is_some_and(Value::is_array) => "Unigram",
        None => "WordPiece",
    };
    let mut vocabulary = match kind {
        "BPE" => bpe(json, model, file)?,
        "Unigram" => unigram(json, model, file)?,
        "WordPiece" => word_piece(json, model, file)?,
        other => {
            let missing = format!("models of type {other:?}; BPE, Unigram and WordPiece are known");
            return Err(ConvertError::Tokenizer { missing });
        }
    };
    normalizer::check(&mut vocabulary, json)?;
    added_tokens(&mut vocabulary, json, file)?;
    if vocabulary.model == "bert" {
        spell_as_phantoms(&mut vocabulary);
    }
    Ok(vocabulary)
}

/// The vocabulary as an object of texts and ids.
fn texts(vocabulary: &mut ConvertedVocabulary, model: &Map<String, Value>, file: &str) -> ConvertResult<()> {
    let Some(Value::Object(texts)) = model.get("vocab") else {
        return Err(invalid(file, "model.vocab", "it is missing, or no object"));
    };
    for (text, id) in texts {
        let place = || format!("model.vocab[{text:?}]");
        let id = id.as_u64().ok_or_else(|| invalid(file, place(), "the id is no whole number"))?;
        let token = VocabularyToken { text: text.clone(), score: 0.0, kind: TokenKind::Normal };
        vocabulary.put(id, token).map_err(|reason| invalid(file, place(), reason))?;
    }
    Ok(())
}

fn bpe(
    json: &Map<String, Value>,
    model: &Map<String, Value>,
    file: &str,
) -> ConvertResult<ConvertedVocabulary> {
    let pairs = merges(model, file)?;
    let rules = pre_tokenizer::rules(json.get("pre_tokenizer").unwrap_or(&Value::Null));
    let byte_level = rules.iter().any(|rule| rule.starts_with("bytes"));
    let flag = |key: &str| model.get(key).and_then(Value::as_bool).unwrap_or(false);
    if byte_level {
        let mut vocabulary = ConvertedVocabulary::new("gpt2");
        texts(&mut vocabulary, model, file)?;
        vocabulary.pre = pre_tokenizer::detect(&rules, flag("ignore_merges"));
        // A space within a symbol would separate the two of a merge.
        let spelled = |part: &str| part.replace(' ', "\u{120}");
        vocabulary.merges = pairs.iter().map(|(a, b)| format!("{} {}", spelled(a), spelled(b))).collect();
        return Ok(vocabulary);
    }
    if !flag("byte_fallback") {
        let missing = format!(
            "BPE that is neither byte-level nor has byte fallback (pre_tokenizer: {})",
            if rules.is_empty() { "none".to_owned() } else { rules.join(", ") }
        );
        return Err(ConvertError::Tokenizer { missing });
    }
    // SentencePiece's BPE merges by the score of the result: the earlier a merge, the higher.
    let mut vocabulary = ConvertedVocabulary::new("llama");
    texts(&mut vocabulary, model, file)?;
    let mut ranks = std::collections::HashMap::new();
    for (a, b) in &pairs {
        let next = ranks.len();
        ranks.entry(format!("{a}{b}")).or_insert(next);
    }
    let unknown = model.get("unk_token").and_then(Value::as_str).map(str::to_owned);
    let last = ranks.len();
    for (id, token) in vocabulary.tokens.iter_mut().enumerate() {
        let Some(token) = token else { continue };
        if is_byte(&token.text) {
            token.kind = TokenKind::Byte;
        } else if Some(&token.text) == unknown.as_ref() {
            token.kind = TokenKind::Unknown;
        } else {
            token.score = -(ranks.get(&token.text).copied().unwrap_or(last + id) as f32);
        }
    }
    vocabulary.keys.push(("add_space_prefix", prepends_space(json).into()));
    Ok(vocabulary)
}

/// Merges as pairs: texts with a space between them, or lists of two.
fn merges(model: &Map<String, Value>, file: &str) -> ConvertResult<Vec<(String, String)>> {
    let list = match model.get("merges") {
        Some(Value::Array(list)) => list,
        None => return Ok(Vec::new()),
        Some(_) => return Err(invalid(file, "model.merges", "it is no list")),
    };
    let pair = |(index, merge): (usize, &Value)| {
        let parts = match merge {
            Value::String(text) => text.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())),
            Value::Array(parts) => match parts.as_slice() {
                [Value::String(a), Value::String(b)] => Some((a.clone(), b.clone())),
                _ => None,
            },
            _ => None,
        };
        parts.ok_or_else(|| invalid(file, format!("model.merges[{index}]"), "it is not two texts"))
    };
    list.iter().enumerate().map(pair).collect()
}

fn unigram(
    json: &Map<String, Value>,
    model: &Map<String, Value>,
    file: &str,
) -> ConvertResult<ConvertedVocabulary> {
    let mut vocabulary = ConvertedVocabulary::new("t5");
    let Some(Value::Array(list)) = model.get("vocab") else {
        return Err(invalid(file, "model.vocab", "it is missing, or no list"));
    };
    let unknown = model.get("unk_id").and_then(Value::as_u64);
    for (index, entry) in list.iter().enumerate() {
        let place = || format!("model.vocab[{index}]");
        let (text, score) = match entry.as_array().map(Vec::as_slice) {
            Some([Value::String(text), score]) => (text, score.as_f64()),
            _ => return Err(invalid(file, place(), "it is not a text and a score")),
        };
        let Some(score) = score else { return Err(invalid(file, place(), "the score is not a number")) };
        let kind = match () {
            () if Some(index as u64) == unknown => TokenKind::Unknown,
            () if is_byte(text) => TokenKind::Byte,
            () => TokenKind::Normal,
        };
        let token = VocabularyToken { text: text.clone(), score: score as f32, kind };
        vocabulary.put(index as u64, token).map_err(|reason| invalid(file, place(), reason))?;
    }
    vocabulary.keys.push(("add_space_prefix", prepends_space(json).into()));
    vocabulary.keys.push(("remove_extra_whitespaces", true.into()));
    if let Some(table) = find_text(json.get("normalizer"), "precompiled_charsmap") {
        let bytes = base64(table)
            .ok_or_else(|| invalid(file, "normalizer.precompiled_charsmap", "it is not base64"))?;
        vocabulary.keys.push(("precompiled_charsmap", bytes.into()));
    }
    Ok(vocabulary)
}

fn word_piece(
    json: &Map<String, Value>,
    model: &Map<String, Value>,
    file: &str,
) -> ConvertResult<ConvertedVocabulary> {
    let mut vocabulary = ConvertedVocabulary::new("bert");
    texts(&mut vocabulary, model, file)?;
    let prefix = model.get("continuing_subword_prefix").and_then(Value::as_str).unwrap_or("##");
    if prefix != "##" {
        let missing = format!("WordPiece with the prefix {prefix:?} for parts of words; ## is known");
        return Err(ConvertError::Tokenizer { missing });
    }
    if let Some(Value::Object(normalizer)) = json.get("normalizer") {
        for (key, name) in
            [("lowercase", "normalizer.lowercase"), ("strip_accents", "normalizer.strip_accents")]
        {
            if let Some(flag) = normalizer.get(key).and_then(Value::as_bool) {
                vocabulary.keys.push((name, flag.into()));
            }
        }
    }
    Ok(vocabulary)
}

/// Words begin with U+2581 in files, and their other parts with nothing.
fn spell_as_phantoms(vocabulary: &mut ConvertedVocabulary) {
    for token in vocabulary.tokens.iter_mut().flatten() {
        if token.kind != TokenKind::Control {
            token.text = match token.text.strip_prefix("##") {
                Some(part) => part.to_owned(),
                None => format!("\u{2581}{}", token.text),
            };
        }
    }
}

/// Tokens that were added to the model's own.
fn added_tokens(
    vocabulary: &mut ConvertedVocabulary,
    json: &Map<String, Value>,
    file: &str,
) -> ConvertResult<()> {
    let Some(Value::Array(added)) = json.get("added_tokens") else { return Ok(()) };
    for (index, token) in added.iter().enumerate() {
        let place = || format!("added_tokens[{index}]");
        let id = token.get("id").and_then(Value::as_u64);
        let (Some(id), Some(text)) = (id, token.get("content").and_then(Value::as_str)) else {
            return Err(invalid(file, place(), "it has no id or no content"));
        };
        let special = token.get("special").and_then(Value::as_bool).unwrap_or(false);
        vocabulary.add(id, text, special).map_err(|reason| invalid(file, place(), reason))?;
    }
    Ok(())
}

impl ConvertedVocabulary {
    /// Adds a token that text is split at.
    pub(super) fn add(&mut self, id: u64, text: &str, special: bool) -> Result<(), String> {
        let known = usize::try_from(id).ok().and_then(|id| self.tokens.get(id)?.as_ref());
        let is_unknown = known.is_some_and(|token| token.kind == TokenKind::Unknown);
        let kind = match () {
            () if is_unknown => TokenKind::Unknown,
            () if special || looks_special(text) => TokenKind::Control,
            () => TokenKind::UserDefined,
        };
        let text =
            if kind == TokenKind::UserDefined { text.replace('\u{2581}', " ") } else { text.to_owned() };
        let score = if self.model == "gpt2" || self.model == "bert" { 0.0 } else { -1000.0 };
        self.put(id, VocabularyToken { text, score, kind })
    }
}

/// `<0x0A>` and the like.
pub(super) fn is_byte(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Whether a space is put before text: by a normalizer, or by the pre-tokenizer.
fn prepends_space(json: &Map<String, Value>) -> bool {
    fn steps(value: &Value) -> Vec<&Value> {
        let inner = ["normalizers", "pretokenizers"].iter().find_map(|key| value.get(key)?.as_array());
        inner.map_or_else(|| vec![value], |list| list.iter().flat_map(steps).collect())
    }
    let all = ["normalizer", "pre_tokenizer"].iter().filter_map(|key| json.get(*key)).flat_map(steps);
    let mut prepends = false;
    for step in all {
        match step.get("type").and_then(Value::as_str) {
            Some("Prepend") => prepends |= step.get("prepend").and_then(Value::as_str) == Some("\u{2581}"),
            Some("Metaspace") => {
                let scheme = step.get("prepend_scheme").and_then(Value::as_str);
                let old = step.get("add_prefix_space").and_then(Value::as_bool);
                prepends |= scheme.map_or(old.unwrap_or(true), |scheme| scheme != "never");
            }
            _ => {}
        }
    }
    prepends
}

/// A text somewhere within a value.
fn find_text<'v>(value: Option<&'v Value>, key: &str) -> Option<&'v str> {
    match value? {
        Value::Object(object) => match object.get(key).and_then(Value::as_str) {
            Some(text) => Some(text),
            None => object.values().find_map(|inner| find_text(Some(inner), key)),
        },
        Value::Array(list) => list.iter().find_map(|inner| find_text(Some(inner), key)),
        _ => None,
    }
}

/// Decodes base64.
fn base64(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0u32, 0);
    for letter in text.bytes().filter(|letter| *letter != b'=') {
        let value = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' | b'-' => 62,
            b'/' | b'_' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> ConvertResult<ConvertedVocabulary> {
        parse(&serde_json::from_str(text).unwrap(), "tokenizer.json")
    }

    #[test]
    fn byte_level_bpe() {
        let vocabulary = parsed(
            r#"{"added_tokens":[{"id":3,"content":"<|end|>","special":true},{"id":5,"content":"tool","special":false}],
            "pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Digits","individual_digits":true},
            {"type":"ByteLevel","use_regex":true}]},
            "model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}}"#,
        )
        .unwrap();
        assert_eq!((vocabulary.model, vocabulary.pre.as_deref()), ("gpt2", Ok("smollm")));
        assert_eq!(vocabulary.merges, ["a b"]);
        let kinds: Vec<_> =
            vocabulary.tokens.iter().map(|token| token.as_ref().map(|token| token.kind)).collect();
        let normal = Some(TokenKind::Normal);
        assert_eq!(
            kinds,
            [normal, normal, normal, Some(TokenKind::Control), None, Some(TokenKind::UserDefined)]
        );
    }

    #[test]
    fn bpe_with_byte_fallback_gets_scores_by_its_merges() {
        let vocabulary = parsed(
            r#"{"normalizer":{"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"▁"}]},
            "model":{"type":"BPE","byte_fallback":true,"unk_token":"<unk>",
            "vocab":{"<unk>":0,"<0x0A>":1,"a":2,"b":3,"ab":4,"aab":5},"merges":[["a","ab"],["a","b"]]}}"#,
        )
        .unwrap();
        let token = |id: usize| vocabulary.tokens[id].as_ref().unwrap();
        assert_eq!((token(0).kind, token(1).kind), (TokenKind::Unknown, TokenKind::Byte));
        assert!(token(5).score > token(4).score && token(4).score > token(2).score);
        assert!(vocabulary.keys.contains(&("add_space_prefix", true.into())));
    }

    #[test]
    fn unigram_and_word_piece() {
        let unigram = parsed(
            r#"{"normalizer":{"type":"Precompiled","precompiled_charsmap":"AAEC"},
            "model":{"type":"Unigram","unk_id":0,"vocab":[["<unk>",0.0],["▁a",-1.5]]}}"#,
        )
        .unwrap();
        assert_eq!((unigram.model, unigram.tokens[1].as_ref().unwrap().score), ("t5", -1.5));
        assert!(unigram.keys.contains(&("precompiled_charsmap", vec![0u8, 1, 2].into())));
        let pieces = parsed(
            r###"{"added_tokens":[{"id":0,"content":"[CLS]","special":true}],"normalizer":{"type":"BertNormalizer","lowercase":true},
            "model":{"type":"WordPiece","vocab":{"[CLS]":0,"un":1,"##able":2}}}"###,
        )
        .unwrap();
        let texts: Vec<_> = pieces.tokens.iter().map(|token| token.as_ref().unwrap().text.as_str()).collect();
        assert_eq!(texts, ["[CLS]", "\u{2581}un", "able"]);
    }

    #[test]
    fn broken_files_are_refused_at_their_place() {
        for (text, part) in [
            ("{}", "model"),
            (r#"{"model":{"type":"WordLevel","vocab":{}}}"#, "WordLevel"),
            (
                r#"{"model":{"type":"BPE","vocab":{"a":-1},"merges":[]},"pre_tokenizer":{"type":"ByteLevel"}}"#,
                "model.vocab[\"a\"]",
            ),
            (
                r#"{"model":{"type":"BPE","vocab":{"a":99999999999},"merges":[]},"pre_tokenizer":{"type":"ByteLevel"}}"#,
                "99999999999",
            ),
            (
                r#"{"model":{"type":"BPE","vocab":{},"merges":["ab"]},"pre_tokenizer":{"type":"ByteLevel"}}"#,
                "model.merges[0]",
            ),
            (r#"{"model":{"type":"BPE","vocab":{},"merges":[]}}"#, "neither byte-level"),
            (r#"{"model":{"type":"Unigram","vocab":[["a"]]}}"#, "model.vocab[0]"),
            (r#"{"added_tokens":[{"id":1}],"model":{"type":"WordPiece","vocab":{}}}"#, "added_tokens[0]"),
        ] {
            let error = parsed(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}

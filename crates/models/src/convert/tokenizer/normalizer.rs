//! What a `tokenizer.json` does to text before it is split. Files have no keys for most of it: what would be left out is refused,
//! because the same text would get other tokens.

use serde_json::{Map, Value};

use super::super::error::{ConvertError, ConvertResult};
use super::ConvertedVocabulary;

/// The mark that stands for a space in SentencePiece's vocabularies.
const SPACE: &str = "\u{2581}";

/// Checks the normalizer, and the spaces that a byte-level pre-tokenizer puts before text. What makes no difference to most text
/// is noted.
pub(super) fn check(vocabulary: &mut ConvertedVocabulary, json: &Map<String, Value>) -> ConvertResult<()> {
    let byte_level = vocabulary.model == "gpt2";
    let mut missing = Vec::new();
    for step in json.get("normalizer").into_iter().flat_map(steps) {
        let kind = step.get("type").and_then(Value::as_str).unwrap_or("without a type");
        let known = match vocabulary.model {
            "gpt2" => kind == "NFC",
            "llama" => is_space_mark(step, kind),
            "t5" => is_space_mark(step, kind) || is_white_space(step, kind) || kind == "Precompiled",
            _ => kind == "BertNormalizer",
        };
        if !known {
            missing.push(format!("the normalizer {}", described(step, kind)));
        } else if kind == "NFC" {
            vocabulary.notes.push(
                "the normalizer NFC of tokenizer.json is left out: text that is not in this form gets other tokens"
                    .to_owned(),
            );
        }
    }
    let spaces = json.get("pre_tokenizer").into_iter().flat_map(steps).any(|step| {
        step.get("type").and_then(Value::as_str) == Some("ByteLevel")
            && step.get("add_prefix_space").and_then(Value::as_bool) == Some(true)
    });
    if byte_level && spaces {
        missing.push("a pre-tokenizer ByteLevel with add_prefix_space, a space before text".to_owned());
    }
    match missing.is_empty() {
        true => Ok(()),
        false => Err(ConvertError::Tokenizer { missing: missing.join(", ") }),
    }
}

/// The steps of a normalizer or pre-tokenizer, in order.
fn steps(value: &Value) -> Vec<&Value> {
    let inner = ["normalizers", "pretokenizers"].iter().find_map(|key| value.get(key)?.as_array());
    match inner {
        Some(list) => list.iter().flat_map(steps).collect(),
        None if value.is_null() => Vec::new(),
        None => vec![value],
    }
}

fn text<'v>(step: &'v Value, key: &str) -> Option<&'v str> {
    step.get(key).and_then(Value::as_str)
}

fn pattern<'v>(step: &'v Value, kind: &str) -> Option<&'v str> {
    step.get("pattern").and_then(|pattern| text(pattern, kind))
}

/// Whether a step writes spaces as SentencePiece does, which tokenizers of files do by themselves.
fn is_space_mark(step: &Value, kind: &str) -> bool {
    match kind {
        "Prepend" => text(step, "prepend") == Some(SPACE),
        "Replace" => pattern(step, "String") == Some(" ") && text(step, "content") == Some(SPACE),
        _ => false,
    }
}

/// Whether a step removes white space as `remove_extra_whitespaces` does.
fn is_white_space(step: &Value, kind: &str) -> bool {
    let content = text(step, "content");
    kind == "Strip"
        || kind == "Replace"
            && pattern(step, "Regex") == Some(" {2,}")
            && (content == Some(" ") || content == Some(SPACE))
}

/// A step by its type, and what it replaces.
fn described(step: &Value, kind: &str) -> String {
    match pattern(step, "String").or_else(|| pattern(step, "Regex")) {
        Some(pattern) => format!("{kind} of {pattern:?} by {:?}", text(step, "content").unwrap_or_default()),
        None => kind.to_owned(),
    }
}

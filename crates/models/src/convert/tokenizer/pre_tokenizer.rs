//! Which pre-tokenizer of GGUF files splits text as the rules of a `tokenizer.json` do.

use serde_json::Value;

/// Contractions in either case, then words, digits, marks and white space: what follows GPT-4's expression.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const BLOOM: &str = r" ?[^(\s|[.,!?…。，、।۔،])]+";

/// What words of GPT-2 are cut by.
const GPT2_BYTES: &str = "bytes by GPT-2's words";
const BYTES: &str = "bytes";
const SINGLE_DIGITS: &str = "single digits";

/// Rules in order, and the name of the pre-tokenizer. A rule that ends in … stands for all that begin so.
const KNOWN: &[(&[&str], &str)] = &[
    (&[GPT2_BYTES], "gpt-2"),
    (&[SINGLE_DIGITS, GPT2_BYTES], "smollm"),
    (&[LLAMA3, BYTES], "llama-bpe"),
    (&[QWEN2, BYTES], "qwen2"),
    (&[QWEN35, BYTES], "qwen35"),
    (&[TEKKEN, BYTES], "tekken"),
    (&[GPT4O, BYTES], "gpt-4o"),
    (&[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3, BYTES], "deepseek-v3"),
    (
        &[
            r"[\r\n]",
            r"\s?[A-Za-zµÀ-ÖØ-ö…",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-퟿]+",
            SINGLE_DIGITS,
            BYTES,
        ],
        "deepseek-llm",
    ),
    (&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", SINGLE_DIGITS, BYTES], "deepseek-coder"),
    (&["punctuation", GPT2_BYTES, "digits", "[0-9][0-9][0-9]"], "falcon"),
    (&[BLOOM, BYTES], "bloom"),
];

/// The names that are detected.
pub(crate) fn known() -> Vec<&'static str> {
    KNOWN.iter().map(|(_, name)| *name).collect()
}

/// The rules of a pre-tokenizer, in order.
pub(super) fn rules(value: &Value) -> Vec<String> {
    let Some(kind) = value.get("type").and_then(Value::as_str) else { return Vec::new() };
    let flag = |key: &str, default: bool| value.get(key).and_then(Value::as_bool).unwrap_or(default);
    match kind {
        "Sequence" => {
            let steps = value.get("pretokenizers").and_then(Value::as_array);
            steps.into_iter().flatten().flat_map(rules).collect()
        }
        "ByteLevel" => vec![if flag("use_regex", true) { GPT2_BYTES } else { BYTES }.to_owned()],
        "Digits" => vec![if flag("individual_digits", false) { SINGLE_DIGITS } else { "digits" }.to_owned()],
        "Punctuation" => vec!["punctuation".to_owned()],
        "Split" => {
            let pattern = value.get("pattern");
            let pattern = pattern.and_then(|pattern| pattern.get("Regex").or_else(|| pattern.get("String")));
            vec![pattern.and_then(Value::as_str).unwrap_or("Split").to_owned()]
        }
        other => vec![other.to_owned()],
    }
}

/// The name of the pre-tokenizer with these rules, or the rules as text. Names say, too, whether words that are tokens are
/// merged all the same.
pub(super) fn detect(rules: &[String], ignores_merges: bool) -> Result<&'static str, String> {
    let matches = |known: &[&str]| {
        known.len() == rules.len()
            && known.iter().zip(rules).all(|(known, rule)| match known.strip_suffix('…') {
                Some(start) => rule.starts_with(start),
                None => rule == known,
            })
    };
    match KNOWN.iter().find(|(known, _)| matches(known)).map(|(_, name)| *name) {
        Some("llama-bpe") if !ignores_merges => Ok("dbrx"),
        Some(name) => Ok(name),
        None => Err(if rules.is_empty() { "none".to_owned() } else { rules.join(" · ") }),
    }
}

/// The name by which files of an architecture call the same rules.
pub(super) fn for_architecture<'n>(name: &'n str, architecture: &str) -> &'n str {
    match (name, architecture) {
        ("smollm", "command-r") => "command-r",
        ("smollm", "granite" | "granitemoe") => "refact",
        ("llama-bpe", "glm4" | "glm4moe" | "deepseek2") => "glm4",
        ("gpt-4o", "llama4") => "llama4",
        ("llama-bpe", "lfm2" | "lfm2moe") => "lfm2",
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_detected_name_is_known_to_the_tokenizer() {
        use quadriga_llm::tokenizer::{Tokenizer, Vocabulary};
        let architectures = ["llama", "command-r", "granite", "glm4", "llama4", "lfm2"];
        for name in known().into_iter().chain(["dbrx"]) {
            for architecture in architectures {
                let pre = for_architecture(name, architecture).to_owned();
                let vocabulary = Vocabulary {
                    model: "gpt2".to_owned(),
                    pre: Some(pre.clone()),
                    tokens: vec!["a".to_owned()],
                    ..Vocabulary::default()
                };
                assert!(Tokenizer::new(vocabulary).is_ok(), "{pre}");
            }
        }
    }

    #[test]
    fn unknown_rules_are_named() {
        let rules = rules(&serde_json::json!({ "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": "[a-z]+" } }, { "type": "ByteLevel", "use_regex": false } ] }));
        assert_eq!(detect(&rules, false), Err("[a-z]+ · bytes".to_owned()));
        assert_eq!(detect(&[LLAMA3.to_owned(), BYTES.to_owned()], true), Ok("llama-bpe"));
        assert_eq!(detect(&[LLAMA3.to_owned(), BYTES.to_owned()], false), Ok("dbrx"));
    }
}

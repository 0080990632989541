//! Special tokens, whether they are added to texts, and the chat template.

use quadriga_gguf::OwnedValue;
use quadriga_llm::tokenizer::is_known_ending;
use serde_json::{Map, Value};

use super::super::config::Config;
use super::super::error::{ConvertResult, invalid};
use super::{ConvertedVocabulary, TokenizerFiles};

/// Special tokens in `tokenizer_config.json` and `config.json`, and their names in GGUF files.
const SPECIAL: [(&str, &str); 7] = [
    ("bos", "bos"),
    ("eos", "eos"),
    ("unk", "unknown"),
    ("sep", "seperator"),
    ("pad", "padding"),
    ("cls", "cls"),
    ("mask", "mask"),
];

/// Whether a text is spelled like a control token, though its file does not call it one.
pub(super) fn looks_special(text: &str) -> bool {
    let between =
        |start: &str, end: &str| text.starts_with(start) && text.ends_with(end) && text.len() > start.len();
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&text)
        || between("<|", "|>")
        || between("<｜", "｜>")
        || between("<unused", ">")
}

/// Adds the tokens of `added_tokens.json`. What `tokenizer.json` says about an id comes first; SentencePiece's own files know
/// nothing of added tokens, which may take the place of a piece there.
pub(super) fn add_listed_tokens(
    vocabulary: &mut ConvertedVocabulary,
    files: &TokenizerFiles,
) -> ConvertResult<()> {
    let listed = files.config.get("additional_special_tokens").and_then(Value::as_array);
    let is_listed = |text: &str| {
        let own = |token: &Value| token.as_str().or_else(|| token.get("content")?.as_str()) == Some(text);
        listed.is_some_and(|list| list.iter().any(own))
    };
    for (text, id) in &files.added {
        let wrong = |reason: &str| invalid("added_tokens.json", format!("{text:?}"), reason);
        let id = id.as_u64().ok_or_else(|| wrong("the id is no whole number"))?;
        let known = usize::try_from(id).ok().and_then(|id| vocabulary.tokens.get(id)?.as_ref());
        if known.is_some_and(|known| files.json.is_some() || known.text == *text) {
            continue;
        }
        let special = is_listed(text)
            || SPECIAL
                .iter()
                .any(|(name, _)| content(&files.config, &format!("{name}_token")) == Some(text.as_str()));
        vocabulary.add(id, text, special).map_err(|reason| wrong(&reason))?;
    }
    Ok(())
}

/// Adds the tokens of `added_tokens_decoder`, as far as `tokenizer.json` does not have them.
pub(super) fn add_tokens_of_config(
    vocabulary: &mut ConvertedVocabulary,
    config: &Map<String, Value>,
) -> ConvertResult<()> {
    let Some(Value::Object(added)) = config.get("added_tokens_decoder") else { return Ok(()) };
    for (id, token) in added {
        let place = || format!("added_tokens_decoder[{id:?}]");
        let wrong = |reason: &str| invalid("tokenizer_config.json", place(), reason);
        let number: u64 = id.parse().map_err(|_| wrong("the id is no whole number"))?;
        let Some(text) = token.get("content").and_then(Value::as_str) else {
            return Err(wrong("it has no content"));
        };
        let special = token.get("special").and_then(Value::as_bool).unwrap_or(false);
        vocabulary.add(number, text, special).map_err(|reason| wrong(&reason))?;
    }
    Ok(())
}

/// The text of a special token: a text, or an object with its content.
fn content<'c>(config: &'c Map<String, Value>, key: &str) -> Option<&'c str> {
    let value = config.get(key)?;
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// The special tokens that texts contain: all but those of padding.
pub(super) fn names(config: &Map<String, Value>) -> impl Iterator<Item = &str> {
    let others = SPECIAL.iter().filter(|(name, _)| *name != "pad");
    others.filter_map(|(name, _)| content(config, &format!("{name}_token")))
}

/// The steps of the post-processor, which adds special tokens.
fn processors(json: &Map<String, Value>) -> Vec<&Value> {
    let Some(processor) = json.get("post_processor") else { return Vec::new() };
    match processor.get("processors").and_then(Value::as_array) {
        Some(list) => list.iter().collect(),
        None => vec![processor],
    }
}

/// The special token at the start or the end of a template.
fn template_token(step: &Value, last: bool) -> Option<&str> {
    let single = step.get("single")?.as_array()?;
    let end = if last { single.last() } else { single.first() };
    end.filter(|_| single.len() > 1)?.get("SpecialToken")?.get("id")?.as_str()
}

/// The keys of special tokens and of the template. Ids beyond `rows` are left out.
pub(super) fn keys(
    vocabulary: &mut ConvertedVocabulary,
    files: &TokenizerFiles,
    config: &Config,
    rows: usize,
) -> ConvertResult<Vec<(String, OwnedValue)>> {
    let mut texts: Vec<(&str, Option<String>)> = SPECIAL
        .iter()
        .map(|(name, _)| (*name, content(&files.config, &format!("{name}_token")).map(str::to_owned)))
        .collect();
    let text = |texts: &[(&str, Option<String>)], name: &str| {
        texts.iter().find(|(known, _)| *known == name).and_then(|(_, text)| text.clone())
    };
    // Encoders begin with [CLS] and end with [SEP].
    for (name, other) in [("bos", "cls"), ("eos", "sep")] {
        if text(&texts, name).is_none() {
            let other = text(&texts, other);
            texts.iter_mut().filter(|(known, _)| *known == name).for_each(|(_, text)| *text = other.clone());
        }
    }
    let (mut add_bos, mut add_eos, mut add_sep) = (None, None, None);
    for step in files.json.iter().flat_map(processors) {
        match step.get("type").and_then(Value::as_str) {
            Some("TemplateProcessing") => {
                if let Some(first) = template_token(step, false) {
                    add_bos =
                        Some([text(&texts, "bos"), text(&texts, "cls")].contains(&Some(first.to_owned())));
                }
                if let Some(last) = template_token(step, true) {
                    add_eos = Some(text(&texts, "eos").as_deref() == Some(last));
                }
            }
            Some("RobertaProcessing") => (add_bos, add_eos, add_sep) = (Some(true), Some(true), Some(true)),
            _ => {}
        }
    }
    let flag = |key: &str| files.config.get(key).and_then(Value::as_bool);
    let mut found = Vec::new();
    for ((name, text), (_, key)) in texts.iter().zip(SPECIAL) {
        let own = text.as_ref().and_then(|text| vocabulary.id_of(text));
        let number = |value: &Value| value.as_u64().or_else(|| value.get(0)?.as_u64());
        let from_config = || config.value(&[&format!("{name}_token_id")]).and_then(number);
        let from_generation = || files.generation.get(&format!("{name}_token_id")).and_then(number);
        let id = own.map(u64::from).or_else(from_config).or_else(from_generation);
        if let Some(id) = id.filter(|id| *id < rows as u64) {
            found.push((format!("tokenizer.ggml.{key}_token_id"), (id as u32).into()));
        }
    }
    found.extend(further_endings(vocabulary, files, config, &found));
    // Others have it from their own rules.
    let prefix = flag("add_prefix_space").filter(|_| vocabulary.model == "gpt2");
    for (key, value) in [
        ("add_space_prefix", prefix),
        ("add_bos_token", flag("add_bos_token").or(add_bos)),
        ("add_eos_token", flag("add_eos_token").or(add_eos)),
        ("add_sep_token", add_sep),
    ] {
        if let Some(value) = value {
            found.push((format!("tokenizer.ggml.{key}"), value.into()));
        }
    }
    found.extend(template(files));
    Ok(found)
}

/// Keys for the tokens that end generation beside `eos`, by `generation_config.json` and `config.json`. Programs find well-known
/// ones by their texts; of others, a file can name two, and a note says which it cannot.
fn further_endings(
    vocabulary: &mut ConvertedVocabulary,
    files: &TokenizerFiles,
    config: &Config,
    found: &[(String, OwnedValue)],
) -> Vec<(String, OwnedValue)> {
    let eos = found.iter().find(|(key, _)| key == "tokenizer.ggml.eos_token_id").map(|(_, id)| id.clone());
    let lists = [files.generation.get("eos_token_id"), config.value(&["eos_token_id"])];
    let ids = lists.into_iter().flatten().flat_map(|value| match value {
        Value::Array(list) => list.as_slice(),
        value => std::slice::from_ref(value),
    });
    let mut further: Vec<(u32, String)> = Vec::new();
    for id in ids.filter_map(|id| u32::try_from(id.as_u64()?).ok()) {
        let Some(Some(token)) = vocabulary.tokens.get(id as usize) else { continue };
        let is_new = eos != Some(id.into()) && further.iter().all(|(known, _)| *known != id);
        if is_new && !is_known_ending(&token.text) {
            further.push((id, token.text.clone()));
        }
    }
    let named = further.iter().zip(["eot", "eom"]);
    let keys = named.map(|((id, _), key)| (format!("tokenizer.ggml.{key}_token_id"), (*id).into())).collect();
    for (id, text) in further.iter().skip(2) {
        vocabulary.notes.push(format!(
            "token {id}, {text:?}, ends generation by eos_token_id, but a GGUF file cannot name more than three such tokens; \
             give it as a stop string"
        ));
    }
    keys
}

/// The chat template, and those with names of their own.
fn template(files: &TokenizerFiles) -> Vec<(String, OwnedValue)> {
    let key = "tokenizer.chat_template";
    match files.config.get("chat_template") {
        Some(Value::String(text)) => vec![(key.to_owned(), text.as_str().into())],
        Some(Value::Array(list)) => {
            let named = list
                .iter()
                .filter_map(|entry| Some((entry.get("name")?.as_str()?, entry.get("template")?.as_str()?)));
            let mut names = Vec::new();
            let mut found = Vec::new();
            for (name, template) in named {
                if name == "default" {
                    found.push((key.to_owned(), template.into()));
                } else if name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
                    names.push(name);
                    found.push((format!("{key}.{name}"), template.into()));
                }
            }
            if !names.is_empty() {
                found.push(("tokenizer.chat_templates".to_owned(), names.into()));
            }
            found
        }
        _ => files.template.iter().map(|text| (key.to_owned(), text.as_str().into())).collect(),
    }
}

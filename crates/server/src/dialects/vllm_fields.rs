//! Fields that vLLM adds to OpenAI's requests: which tokens an answer may have, where it ends, and what is told of its prompt.

use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;

use quadriga_llm::AnswerRules;
use serde_json::{Value, json};

use super::sampling_fields::{line_rules, line_schema, short_texts};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::{Generation, PromptSide, PromptTruncation};
use crate::model::ServedModel;
use crate::openapi::schema::{
    any_of, count, count_between, filled_list, flag, list, nothing, one_of, text, token, with,
};

/// The most stop tokens of a request: every token is compared with them.
const MAX_STOP_TOKENS: usize = 512;

/// The most log-probabilities that are reported for a token of a prompt, beside its own.
const MAX_PROMPT_LOGPROBS: usize = 20;

/// The most characters of a salt.
const MAX_SALT: usize = 1024;

/// Fields that are refused, unless their value turns them off.
const REFUSED: [&str; 7] = [
    "use_beam_search",
    "chat_template",
    "logprob_token_ids",
    "logits_processors",
    "repetition_detection",
    "return_tokens_as_token_ids",
    "prompt_embeds",
];

/// Adds these fields of a request to what is asked for, and those of llama-server that are rules of an answer, too.
pub(crate) fn apply(
    fields: &Fields<'_>,
    served: &ServedModel,
    generation: Generation,
) -> Result<Generation, ApiError> {
    refuse(fields, &REFUSED)?;
    let rules = rules(fields, served)?;
    if let Some(most) = generation.max_tokens.filter(|most| *most < rules.min_tokens) {
        let problem = format!("is {}, more than the largest number of tokens, {most}", rules.min_tokens);
        return Err(fields.error("min_tokens", problem));
    }
    Ok(Generation { rules, truncation: truncation(fields)?, cache_salt: cache_salt(fields)?, ..generation })
}

/// Refuses fields that are there with a value that asks for something.
pub(crate) fn refuse(fields: &Fields<'_>, names: &[&str]) -> Result<(), ApiError> {
    let asks = |name: &&&str| match fields.value(name) {
        None | Some(Value::Null | Value::Bool(false)) => false,
        Some(Value::String(text)) => !text.is_empty(),
        Some(Value::Array(list)) => !list.is_empty(),
        Some(Value::Object(object)) => !object.is_empty(),
        Some(Value::Bool(true) | Value::Number(_)) => true,
    };
    match names.iter().find(asks) {
        Some(name) => Err(fields.error(name, "is not supported; leave it out")),
        None => Ok(()),
    }
}

fn rules(fields: &Fields<'_>, served: &ServedModel) -> Result<AnswerRules, ApiError> {
    let stop_tokens = tokens(fields, "stop_token_ids", served)?.unwrap_or_default();
    if stop_tokens.len() > MAX_STOP_TOKENS {
        let problem = format!("has {} tokens; at most {MAX_STOP_TOKENS} are allowed", stop_tokens.len());
        return Err(fields.error("stop_token_ids", problem));
    }
    let allowed_tokens = tokens(fields, "allowed_token_ids", served)?;
    if allowed_tokens.as_ref().is_some_and(Vec::is_empty) {
        return Err(fields.error("allowed_token_ids", "is empty; it must have a token"));
    }
    let shows_control = fields.flag("skip_special_tokens")?.is_some_and(|skipped| !skipped);
    Ok(AnswerRules {
        allowed_tokens,
        banned_sequences: banned_words(fields, served)?,
        stop_tokens,
        min_tokens: fields.count("min_tokens")?.unwrap_or(0),
        keep_stop: fields.flag("include_stop_str_in_output")?.unwrap_or(false),
        control_text: shows_control,
        lines: line_rules(fields)?,
    })
}

/// A list of tokens of the model's vocabulary, each of them once.
fn tokens(fields: &Fields<'_>, name: &str, served: &ServedModel) -> Result<Option<Vec<u32>>, ApiError> {
    let count = served.model.hyperparameters().vocabulary;
    let Some(list) = fields.list(name)? else { return Ok(None) };
    let token = |value: &Value| {
        let token = value.as_u64().and_then(|token| u32::try_from(token).ok());
        token.filter(|token| (*token as usize) < count).ok_or_else(|| {
            fields
                .error(name, format!("has {value}; it must have tokens of the vocabulary, which has {count}"))
        })
    };
    let mut tokens = list.iter().map(token).collect::<Result<Vec<u32>, ApiError>>()?;
    tokens.sort_unstable();
    tokens.dedup();
    Ok(Some(tokens))
}

/// The tokens of words that must not be generated: as they begin a text, and as they follow a space.
fn banned_words(fields: &Fields<'_>, served: &ServedModel) -> Result<Vec<Vec<u32>>, ApiError> {
    const NAME: &str = "bad_words";
    let Some(words) = short_texts(fields, NAME)? else { return Ok(Vec::new()) };
    let tokenizer = served.model.tokenizer()?;
    let mut all = Vec::new();
    for word in words {
        let word = word.trim_start();
        if word.is_empty() {
            return Err(fields.error(NAME, "has an empty word"));
        }
        all.extend([tokenizer.encode(word, false), tokenizer.encode(&format!(" {word}"), false)]);
    }
    all.sort_unstable();
    all.dedup();
    Ok(all)
}

/// How much of a prompt is used.
fn truncation(fields: &Fields<'_>) -> Result<Option<PromptTruncation>, ApiError> {
    const NAME: &str = "truncate_prompt_tokens";
    let side = match fields.one_of("truncation_side", &["left", "right"])? {
        Some("right") => PromptSide::Beginning,
        _ => PromptSide::End,
    };
    Ok(match fields.integer(NAME)? {
        None => None,
        Some(-1) => Some(PromptTruncation { tokens: None, kept: side }),
        Some(number) => match usize::try_from(number) {
            Ok(tokens) if tokens > 0 => Some(PromptTruncation { tokens: Some(tokens), kept: side }),
            _ => {
                let problem = format!("is {number}; it must be 1 or more, or -1 for as many as fit");
                return Err(fields.error(NAME, problem));
            }
        },
    })
}

/// What keeps the prompt's prefixes in the KV cache apart from those of requests without the same text.
fn cache_salt(fields: &Fields<'_>) -> Result<u64, ApiError> {
    const NAME: &str = "cache_salt";
    static STATE: OnceLock<RandomState> = OnceLock::new();
    let Some(salt) = fields.text(NAME)? else { return Ok(0) };
    if salt.is_empty() || salt.chars().count() > MAX_SALT {
        return Err(fields.error(NAME, format!("must have from 1 to {MAX_SALT} characters")));
    }
    // Zero is that of requests without one.
    Ok(STATE.get_or_init(RandomState::new).hash_one(salt) | 1)
}

/// The number of most probable tokens that are reported at each token of the prompt. Streams have none.
pub(crate) fn prompt_logprobs(fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    const NAME: &str = "prompt_logprobs";
    let Some(top) = fields.count(NAME)? else { return Ok(None) };
    if top > MAX_PROMPT_LOGPROBS {
        return Err(fields.error(NAME, format!("must be from 0 to {MAX_PROMPT_LOGPROBS}")));
    }
    match fields.flag("stream")? {
        Some(true) => Err(fields.error(NAME, "cannot be used with stream")),
        _ => Ok(Some(top)),
    }
}

/// The schema of fields that [`refuse`] reads: the values that turn them off.
pub(crate) fn refused_schema(names: &[&str]) -> Value {
    names.iter().map(|name| ((*name).to_owned(), nothing())).collect()
}

/// The schema of the fields that [`apply`] reads.
pub(crate) fn schema() -> Value {
    let fields = json!({
        "stop_token_ids": list(token()),
        "allowed_token_ids": filled_list(token()),
        "bad_words": any_of([text(), list(text())]),
        "min_tokens": count(),
        "include_stop_str_in_output": flag(),
        "skip_special_tokens": flag(),
        "truncate_prompt_tokens": { "type": "integer", "minimum": -1, "maximum": 9_000_000_000_000_000_i64, "not": { "const": 0 } },
        "truncation_side": one_of(&["left", "right"]),
        "cache_salt": { "type": "string", "minLength": 1, "maxLength": MAX_SALT },
    });
    with(with(fields, refused_schema(&REFUSED)), line_schema())
}

/// The schema of what chat completions and completions tell of tokens.
pub(crate) fn token_schema() -> Value {
    json!({
        "prompt_logprobs": count_between(0, MAX_PROMPT_LOGPROBS),
        "return_token_ids": flag(),
        "add_special_tokens": flag(),
    })
}

//! Sampling options by the names that OpenAI, vLLM and llama-server share.

use std::collections::BTreeMap;
use std::time::Duration;

use quadriga_llm::LineRules;
use quadriga_llm::sampling::{DryOptions, SamplingOptions};
use serde_json::{Value, json};

use crate::call::random_seed;
use crate::error::{ApiError, quoted};
use crate::fields::Fields;
use crate::model::ServedModel;
use crate::openapi::schema::{
    any_of, between, count, flag, integer, list, number, off, request, text, texts, token,
};

/// The sampling options of a request, with the server's defaults where it has none of its own.
pub fn sampling(fields: &Fields<'_>, served: &ServedModel) -> Result<SamplingOptions, ApiError> {
    let defaults = &served.defaults.sampling;
    let float = |name: &str, default: f32| Ok::<_, ApiError>(fields.float(name)?.unwrap_or(default));
    let aliased = |name: &str, alias: &str, default: f32| {
        Ok::<_, ApiError>(fields.float(name)?.or(fields.float(alias)?).unwrap_or(default))
    };
    let mut options = SamplingOptions {
        temperature: float("temperature", defaults.temperature)?,
        // As everywhere, 0 and negative numbers keep all tokens.
        top_k: fields.integer("top_k")?.map_or(defaults.top_k, |k| usize::try_from(k).unwrap_or(0)),
        top_p: float("top_p", defaults.top_p)?,
        min_p: float("min_p", defaults.min_p)?,
        typical_p: float("typical_p", defaults.typical_p)?,
        top_n_sigma: float("top_n_sigma", defaults.top_n_sigma)?,
        xtc_probability: float("xtc_probability", defaults.xtc_probability)?,
        xtc_threshold: float("xtc_threshold", defaults.xtc_threshold)?,
        repeat_penalty: aliased("repeat_penalty", "repetition_penalty", defaults.repeat_penalty)?,
        repeat_last_n: last_n(fields, "repeat_last_n", if_repetition(fields, defaults.repeat_last_n))?,
        presence_penalty: float("presence_penalty", defaults.presence_penalty)?,
        frequency_penalty: float("frequency_penalty", defaults.frequency_penalty)?,
        dry: DryOptions {
            multiplier: float("dry_multiplier", defaults.dry.multiplier)?,
            base: float("dry_base", defaults.dry.base)?,
            allowed_length: fields.count("dry_allowed_length")?.unwrap_or(defaults.dry.allowed_length),
            last_n: last_n(fields, "dry_penalty_last_n", defaults.dry.last_n)?,
            sequence_breakers: short_texts(fields, "dry_sequence_breakers")?
                .unwrap_or_else(|| defaults.dry.sequence_breakers.clone()),
        },
        logit_bias: logit_bias(fields, served)?,
        ignore_eos: fields.flag("ignore_eos")?.unwrap_or(defaults.ignore_eos),
        seed: seed(fields, served)?,
    };
    // A wrong value is refused although its sampler may be off.
    options.check()?;
    keep_samplers(fields, &mut options)?;
    Ok(options)
}

/// The samplers that can be turned off, with llama-server's letters for them.
const SAMPLERS: [(&str, char); 9] = [
    ("penalties", 'e'),
    ("dry", 'd'),
    ("top_n_sigma", 's'),
    ("top_k", 'k'),
    ("typ_p", 'y'),
    ("top_p", 'p'),
    ("min_p", 'm'),
    ("xtc", 'x'),
    ("temperature", 't'),
];

/// The schema of a list of samplers.
fn samplers_schema() -> Value {
    let letters: String = SAMPLERS.iter().map(|(_, letter)| letter).collect();
    any_of([
        json!({ "type": "string", "pattern": format!("^[{letters}]*$") }),
        list(json!({ "enum": SAMPLERS.map(|(name, _)| name) })),
    ])
}

/// Turns off the samplers that a list of llama-server's names leaves out. Their order is always the same.
fn keep_samplers(fields: &Fields<'_>, options: &mut SamplingOptions) -> Result<(), ApiError> {
    const NAME: &str = "samplers";
    let all = SAMPLERS;
    let kept = |wanted: &str| match fields.value(NAME) {
        Some(Value::String(letters)) => {
            all.iter().any(|(name, letter)| *name == wanted && letters.contains(*letter))
        }
        Some(Value::Array(names)) => names
            .iter()
            .filter_map(Value::as_str)
            .any(|name| name == wanted || (name == "typical_p" && wanted == "typ_p")),
        _ => true,
    };
    let Some(given) = fields.texts(NAME)? else { return Ok(()) };
    // Those of llama-server that need no turning off, and other spellings of those above.
    let is_known = |name: &str| {
        all.iter().any(|(known, _)| *known == name) || ["typical_p", "infill", "adaptive_p"].contains(&name)
    };
    let unknown = match fields.value(NAME) {
        Some(Value::String(letters)) => {
            let is_known = |letter: &char| all.iter().any(|(_, known)| known == letter) || *letter == 'i';
            letters.chars().find(|letter| !is_known(letter)).map(String::from)
        }
        _ => given.into_iter().find(|name| !is_known(name)),
    };
    if let Some(name) = unknown {
        let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
        return Err(fields.error(NAME, format!("has {}; known are {}", quoted(&name), names.join(", "))));
    }
    if !kept("penalties") {
        (options.repeat_penalty, options.presence_penalty, options.frequency_penalty) = (1.0, 0.0, 0.0);
    }
    if !kept("dry") {
        options.dry.multiplier = 0.0;
    }
    if !kept("top_n_sigma") {
        options.top_n_sigma = 0.0;
    }
    if !kept("top_k") {
        options.top_k = 0;
    }
    if !kept("typ_p") {
        options.typical_p = 1.0;
    }
    if !kept("top_p") {
        options.top_p = 1.0;
    }
    if !kept("min_p") {
        options.min_p = 0.0;
    }
    if !kept("xtc") {
        options.xtc_probability = 0.0;
    }
    if !kept("temperature") {
        options.temperature = 1.0;
    }
    Ok(())
}

/// Refuses what llama-server has and the engine has not, unless its value is the one that turns it off.
pub fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), ApiError> {
    let refused = |name: &str| Err(fields.error(name, "is not supported; leave it out"));
    if fields.integer("mirostat")?.unwrap_or(0) > 0 {
        return refused("mirostat");
    }
    if fields.number("dynatemp_range")?.unwrap_or(0.0) > 0.0 {
        return refused("dynatemp_range");
    }
    if fields.number("adaptive_target")?.unwrap_or(-1.0) >= 0.0 {
        return refused("adaptive_target");
    }
    for name in ["post_sampling_probs", "grammar_lazy"] {
        if fields.flag(name)?.unwrap_or(false) {
            return refused(name);
        }
    }
    if fields.flag("parse_tool_calls")? == Some(false) {
        return refused("parse_tool_calls");
    }
    if fields.integer("min_keep")?.unwrap_or(0) > 1 {
        return refused("min_keep");
    }
    for name in ["reasoning_budget_message", "generation_prompt"] {
        if fields.text(name)?.is_some_and(|text| !text.is_empty()) {
            return refused(name);
        }
    }
    for name in ["grammar_triggers", "preserved_tokens"] {
        if fields.list(name)?.is_some_and(|list| !list.is_empty()) {
            return refused(name);
        }
    }
    // They say what is kept when the context is shifted, which it never is.
    for name in ["n_keep", "n_discard"] {
        fields.integer(name)?;
    }
    let is_used = |adapter: &Fields<'_>| Ok::<_, ApiError>(adapter.number("scale")? != Some(0.0));
    for adapter in fields.objects("lora")?.unwrap_or_default() {
        if is_used(&adapter)? {
            return refused("lora");
        }
    }
    Ok(())
}

/// Where an answer ends at one of its lines: llama-server's fields for completions in editors.
pub(crate) fn line_rules(fields: &Fields<'_>) -> Result<LineRules, ApiError> {
    // It limits nothing in llama-server either.
    fields.number("t_max_prompt_ms")?;
    let time = fields.number("t_max_predict_ms")?.filter(|milliseconds| *milliseconds > 0.0);
    Ok(LineRules {
        min_indent: usize::try_from(fields.integer("n_indent")?.unwrap_or(0)).unwrap_or(0),
        // More time than there is limits nothing.
        time: time.and_then(|milliseconds| Duration::try_from_secs_f64(milliseconds / 1e3).ok()),
    })
}

/// The schema of the fields that [`line_rules`] reads.
pub(crate) fn line_schema() -> Value {
    json!({ "n_indent": integer(), "t_max_predict_ms": number(), "t_max_prompt_ms": number() })
}

/// The schema of the fields that [`refuse_unsupported`] reads: the values that turn them off.
pub(crate) fn unsupported_schema() -> Value {
    let not_positive = || json!({ "type": "integer", "minimum": -9_000_000_000_000_000_i64, "maximum": 0 });
    let unused = request(&["scale"], json!({ "scale": { "type": "number", "enum": [0] } }), []);
    json!({
        "mirostat": not_positive(),
        "dynatemp_range": { "type": "number", "maximum": 0 },
        "adaptive_target": { "type": "number", "exclusiveMaximum": 0 },
        "post_sampling_probs": off(),
        "grammar_lazy": off(),
        "parse_tool_calls": { "type": "boolean", "enum": [true] },
        "min_keep": { "type": "integer", "minimum": -9_000_000_000_000_000_i64, "maximum": 1 },
        "reasoning_budget_message": { "type": "string", "maxLength": 0 },
        "generation_prompt": { "type": "string", "maxLength": 0 },
        "grammar_triggers": { "type": "array", "maxItems": 0 },
        "preserved_tokens": { "type": "array", "maxItems": 0 },
        "n_keep": integer(),
        "n_discard": integer(),
        "lora": list(unused),
    })
}

/// The schema of the fields that [`sampling`] reads.
pub(crate) fn schema() -> Value {
    let share = || between(0.0, 1.0);
    let positive_share = || json!({ "type": "number", "exclusiveMinimum": 0, "maximum": 1 });
    let last_n = || json!({ "type": "integer", "minimum": -1, "maximum": 9_000_000_000_000_000_i64 });
    let any = || between(-1e30, 1e30);
    json!({
        "temperature": between(0.0, 1e30),
        "top_k": integer(),
        "top_p": share(),
        "min_p": share(),
        "typical_p": positive_share(),
        "top_n_sigma": any(),
        "xtc_probability": share(),
        "xtc_threshold": share(),
        "repeat_penalty": { "type": "number", "exclusiveMinimum": 0, "maximum": 1e30 },
        "repetition_penalty": { "type": "number", "exclusiveMinimum": 0, "maximum": 1e30 },
        "repeat_last_n": last_n(),
        "presence_penalty": any(),
        "frequency_penalty": any(),
        "dry_multiplier": between(0.0, 1e30),
        "dry_base": any(),
        "dry_allowed_length": count(),
        "dry_penalty_last_n": last_n(),
        "dry_sequence_breakers": texts(),
        "logit_bias": logit_bias_schema(),
        "ignore_eos": flag(),
        "samplers": samplers_schema(),
        "seed": seed_schema(),
    })
}

/// The schema of logit bias: an object, or pairs.
fn logit_bias_schema() -> Value {
    let bias = || any_of([json!({ "type": "number" }), off()]);
    let pair = json!({ "type": "array", "minItems": 2, "maxItems": 2, "prefixItems": [any_of([text(), token()]), bias()] });
    any_of([json!({ "type": "object", "additionalProperties": bias() }), list(pair)])
}

/// The schema of a seed, which may be larger than other numbers.
fn seed_schema() -> Value {
    json!({ "type": "integer", "minimum": -9_000_000_000_000_000_i64, "maximum": u64::MAX })
}

/// The seed: without one that of the server, if it has one. It is random otherwise, and if it is -1.
fn seed(fields: &Fields<'_>, served: &ServedModel) -> Result<u64, ApiError> {
    let seed = match fields.value("seed") {
        // Larger numbers than those of i64 occur, too.
        Some(value) => value.as_u64().map(Ok).or_else(|| {
            let seed = fields.integer("seed").transpose()?;
            Some(seed.map(|seed| if seed == -1 { random_seed() } else { seed as u64 }))
        }),
        None => None,
    };
    seed.unwrap_or_else(|| Ok(served.seed.unwrap_or_else(random_seed)))
}

/// The tokens that count for penalties by default: for vLLM's name of the repetition penalty all, as there.
fn if_repetition(fields: &Fields<'_>, default: usize) -> usize {
    match fields.has("repetition_penalty") && !fields.has("repeat_penalty") {
        true => usize::MAX,
        false => default,
    }
}

/// A number of recent tokens; -1 for all.
fn last_n(fields: &Fields<'_>, name: &str, default: usize) -> Result<usize, ApiError> {
    match fields.integer(name)? {
        None => Ok(default),
        Some(-1) => Ok(usize::MAX),
        Some(number) => usize::try_from(number)
            .map_err(|_| fields.error(name, format!("is {number}; it must be -1 or more"))),
    }
}

/// Logit bias: `{"15043": -1}`, or pairs of a token or text and a number, or `false` to ban it.
fn logit_bias(fields: &Fields<'_>, served: &ServedModel) -> Result<BTreeMap<u32, f32>, ApiError> {
    const NAME: &str = "logit_bias";
    let mut all = served.defaults.sampling.logit_bias.clone();
    let count = served.model.hyperparameters().vocabulary;
    let mut add = |tokens: Vec<u32>, bias: &Value| {
        let bias = match bias {
            Value::Bool(false) => Some(f32::NEG_INFINITY),
            bias => bias.as_f64().map(|bias| bias as f32),
        };
        let bias = bias.ok_or_else(|| fields.error(NAME, "must have numbers for values"))?;
        for token in tokens {
            if token as usize >= count {
                return Err(fields.error(NAME, format!("has the token {token}; the vocabulary has {count}")));
            }
            all.insert(token, bias);
        }
        Ok(())
    };
    let mut left = MAX_TEXT_BYTES;
    let mut texts = |text: &str| -> Result<Vec<u32>, ApiError> {
        left = left.checked_sub(text.len()).ok_or_else(|| {
            fields.error(NAME, format!("has texts of more than {MAX_TEXT_BYTES} bytes together"))
        })?;
        Ok(served.model.tokenizer()?.encode(text, true))
    };
    let number = |value: &Value| value.as_u64().and_then(|token| u32::try_from(token).ok());
    match fields.value(NAME) {
        None => {}
        Some(Value::Object(object)) => {
            for (token, bias) in object {
                let tokens = match token.parse() {
                    Ok(token) => vec![token],
                    Err(_) => texts(token)?,
                };
                add(tokens, bias)?;
            }
        }
        Some(Value::Array(pairs)) => {
            for pair in pairs {
                match pair.as_array().map(Vec::as_slice) {
                    Some([Value::String(text), bias]) => add(texts(text)?, bias)?,
                    Some([token, bias]) => {
                        let token =
                            number(token).ok_or_else(|| fields.error(NAME, "must have tokens or texts"))?;
                        add(vec![token], bias)?;
                    }
                    _ => return Err(fields.error(NAME, "must be an object or a list of pairs")),
                }
            }
        }
        Some(_) => return Err(fields.error(NAME, "must be an object or a list of pairs")),
    }
    Ok(all)
}

/// The largest number of tokens of an answer: the first of these fields that is there. Some negative numbers may stand for no limit.
pub fn max_tokens(
    fields: &Fields<'_>,
    names: &[&str],
    unlimited: &[i64],
    served: &ServedModel,
) -> Result<Option<usize>, ApiError> {
    let mut found = None;
    for name in names {
        let Some(number) = fields.integer(name)? else { continue };
        let limit = usize::try_from(number).ok();
        if limit.is_none() && !unlimited.contains(&number) {
            let without = match unlimited {
                [] => String::new(),
                [first, ..] => format!(", or {first} for no limit"),
            };
            return Err(fields.error(name, format!("is {number}; it must be 0 or more{without}")));
        }
        found.get_or_insert(limit);
    }
    Ok(found.unwrap_or(served.defaults.max_tokens))
}

/// What stands for no limit in the interface of llama-server, and so for its clients in that of OpenAI.
pub const NO_LIMIT: &[i64] = &[-1];

/// The schema of a largest number of tokens that may be [`NO_LIMIT`].
pub(crate) fn limit_schema(least: i64) -> Value {
    json!({ "type": "integer", "minimum": least, "maximum": 9_000_000_000_000_000_i64 })
}

/// The most strings of a list that every token is compared with, and their bytes: the engine does that for all requests, and each
/// choice has them.
const MAX_TEXTS: usize = 512;
const MAX_TEXT_BYTES: usize = 64 << 10;

/// A string or a list of strings that every token is compared with.
pub(super) fn short_texts(fields: &Fields<'_>, name: &str) -> Result<Option<Vec<String>>, ApiError> {
    let Some(texts) = fields.texts(name)? else { return Ok(None) };
    let bytes: usize = texts.iter().map(String::len).sum();
    if texts.len() > MAX_TEXTS || bytes > MAX_TEXT_BYTES {
        let problem = format!(
            "has {} strings with {bytes} bytes; at most {MAX_TEXTS} with {MAX_TEXT_BYTES} bytes are allowed",
            texts.len()
        );
        return Err(fields.error(name, problem));
    }
    Ok(Some(texts))
}

/// The stop strings of a request, beside those of the server.
pub fn stops(fields: &Fields<'_>, name: &str, served: &ServedModel) -> Result<Vec<String>, ApiError> {
    let mut stops = short_texts(fields, name)?.unwrap_or_default();
    stops.retain(|stop| !stop.is_empty());
    stops.extend(served.defaults.stops.iter().cloned());
    Ok(stops)
}

//! A whole answer of `/completion`.

use quadriga_llm::sampling::SamplingOptions;
use serde_json::{Map, Value, json};

use super::completion_options::AnswerOptions;
use crate::answer_tokens::{AnswerToken, TokenPart};
use crate::dialects::openai::logprobs::{finite, is_reported};
use crate::dialects::prompt_fields;
use crate::dialects::timings::timings;
use crate::generation::{Choice, Done, FinishReason, Generation};
use crate::model::ServedModel;

/// The answer, with everything that is known about it.
pub(super) fn final_answer(served: &ServedModel, choice: &Choice, options: &AnswerOptions) -> Value {
    let text = format!("{}{}", choice.reasoning, choice.text);
    let has_new_line = text.contains('\n');
    let tokens: Vec<u32> = match options.return_tokens {
        true => choice.tokens.iter().filter(|token| is_shown(token)).map(|token| token.token).collect(),
        false => Vec::new(),
    };
    let mut answer = ending(served, &choice.done, options, has_new_line);
    let found: Vec<Value> = choice.tokens.iter().filter_map(|token| probability(served, token)).collect();
    if choice.has_logprobs() {
        answer.insert("completion_probabilities".to_owned(), found.into());
    }
    answer.insert("content".to_owned(), text.into());
    answer.insert("tokens".to_owned(), tokens.into());
    answer.into()
}

/// The last object of an answer, without its text.
pub(super) fn ending(
    served: &ServedModel,
    done: &Done,
    options: &AnswerOptions,
    has_new_line: bool,
) -> Map<String, Value> {
    let (stop_type, word) = match &done.finish {
        FinishReason::End | FinishReason::ToolCalls => ("eos", ""),
        FinishReason::Stop(word) => ("word", word.as_deref().unwrap_or_default()),
        FinishReason::StopToken(_) => ("word", ""),
        FinishReason::Length | FinishReason::Context => ("limit", ""),
    };
    let prompt = options.prompts.get(done.choice / options.choices.max(1));
    let answer = json!({
        "index": done.choice,
        "content": "",
        "tokens": [],
        "id_slot": done.slot,
        "stop": true,
        "model": served.name,
        "tokens_predicted": done.counts.answer,
        "tokens_evaluated": done.counts.prompt,
        "tokens_cached": done.counts.cached,
        "generation_settings": options.settings,
        "prompt": prompt.map(|prompt| prompt_fields::shown(served, prompt)),
        "has_new_line": has_new_line,
        "truncated": false,
        "stop_type": stop_type,
        "stopping_word": word,
        "timings": timings(done),
    });
    match answer {
        Value::Object(answer) => answer,
        _ => Map::new(),
    }
}

/// Whether a token is in the answer, or between its parts.
pub(super) fn is_shown(token: &AnswerToken) -> bool {
    token.part != TokenPart::Hidden
}

/// A token with its log-probability and those of the most probable ones, if that is reported.
pub(super) fn probability(served: &ServedModel, token: &AnswerToken) -> Option<Value> {
    let is_wanted = is_shown(token) && is_reported(served, token.token);
    let (token, found) = (token.token, token.logprobs.as_ref().filter(|_| is_wanted)?);
    let one = |token: u32, logprob: f64| {
        let bytes = served.token_bytes(token);
        json!({
            "id": token,
            "token": String::from_utf8_lossy(&bytes),
            "bytes": bytes,
            "logprob": finite(logprob),
        })
    };
    let mut value = one(token, found.logprob);
    let top: Vec<Value> = found.top.iter().map(|(token, logprob)| one(*token, *logprob)).collect();
    if let Some(object) = value.as_object_mut() {
        object.insert("top_logprobs".to_owned(), top.into());
    }
    Some(value)
}

/// The fields of an answer that are asked for, by paths such as `generation_settings/n_predict`; all if there are none.
pub(super) fn selected(answer: Value, paths: &[String]) -> Value {
    if paths.is_empty() {
        return answer;
    }
    let find = |path: &String| {
        let found = path.split('/').try_fold(&answer, |value, name| value.get(name));
        found.map(|value| (path.clone(), value.clone()))
    };
    Value::Object(paths.iter().filter_map(find).collect())
}

/// The options of a request by llama-server's names.
pub(super) fn generation_settings(generation: &Generation) -> Value {
    let Generation { sampling, max_tokens, stops, logprobs, .. } = generation;
    settings(sampling, *max_tokens, stops, *logprobs)
}

/// The same of the parts that the engine has of them.
pub(super) fn settings(
    sampling: &SamplingOptions,
    max_tokens: Option<usize>,
    stops: &[String],
    logprobs: Option<usize>,
) -> Value {
    let number = |count: usize| i64::try_from(count).unwrap_or(-1);
    json!({
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
        "top_n_sigma": sampling.top_n_sigma,
        "xtc_probability": sampling.xtc_probability,
        "xtc_threshold": sampling.xtc_threshold,
        "repeat_penalty": sampling.repeat_penalty,
        "repeat_last_n": number(sampling.repeat_last_n),
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "dry_multiplier": sampling.dry.multiplier,
        "dry_base": sampling.dry.base,
        "dry_allowed_length": number(sampling.dry.allowed_length),
        "dry_penalty_last_n": number(sampling.dry.last_n),
        "dry_sequence_breakers": sampling.dry.sequence_breakers,
        "ignore_eos": sampling.ignore_eos,
        "stop": stops,
        "n_predict": max_tokens.map_or(-1, number),
        "max_tokens": max_tokens.map_or(-1, number),
        "n_probs": logprobs.unwrap_or(0),
    })
}

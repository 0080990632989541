//! `/completion`: text that continues prompts.

use std::sync::Arc;

use axum::response::Response;
use serde_json::{Value, json};

use super::completion_answer::{final_answer, generation_settings, selected};
use super::completion_options::AnswerOptions;
use super::completion_stream::CompletionStream;
use crate::call::Call;
use crate::dialects::openai::request_fields::{check_stream, choices, priority, slot, sse_ping};
use crate::dialects::openai::schemas;
use crate::dialects::{format_fields, openai, prompt_fields, sampling_fields, vllm_fields};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::{Choice, Generation, Prompt};
use crate::model::ServedModel;
use crate::openapi::schema::{self, answer, any_of, count, count_between, flag, list, text};
use crate::prompt::check_prompts;
use crate::stream::{self, StreamFormat};

/// Fields that are refused, unless their value turns them off.
const REFUSED: &[&str] = &["prompt_logprobs", "return_token_ids"];

/// The most log-probabilities that are reported for a token.
const MAX_PROBABILITIES: usize = 1000;

/// Continues prompts.
pub async fn completion(call: Call) -> Result<Response, ApiError> {
    let served = call.model().await?;
    let fields = call.fields();
    let prompts = prompt_fields::prompts(&fields, "prompt")?;
    respond(call, &served, prompts).await
}

/// `/completions`: a request with a model, which OpenAI's clients always name, is one of OpenAI's.
pub async fn completion_or_openai(call: Call) -> Result<Response, ApiError> {
    match call.fields().has("model") {
        true => openai::completions::completions(call).await,
        false => completion(call).await,
    }
}

/// Answers a request for these prompts.
pub(super) async fn respond(
    call: Call,
    served: &Arc<ServedModel>,
    prompts: Vec<Prompt>,
) -> Result<Response, ApiError> {
    let fields = call.fields();
    let (mut generations, mut options) = parse_with(&fields, served, prompts)?;
    let streams = fields.flag("stream")?.unwrap_or(false);
    let truncated = generations.iter().any(|generation| generation.truncation.is_some());
    generations.iter_mut().for_each(|generation| generation.streamed = streams);
    let ping = sse_ping(&fields, call.app.limits().ping)?;
    let running = served.generate_all(generations, &call.parsed()).await?;
    if truncated {
        options.prompts = running.prompts().iter().cloned().map(Prompt::Tokens).collect();
    }
    if streams {
        let encoder = CompletionStream::new(&running, options);
        return Ok(stream::respond(running, encoder, StreamFormat::Events, ping));
    }
    let served = Arc::clone(served);
    let write = move |answers: &[Choice]| {
        let one = |choice| selected(final_answer(&served, choice, &options), &options.response_fields);
        let mut all: Vec<Value> = answers.iter().map(one).collect();
        Ok(if all.len() == 1 { all.swap_remove(0) } else { all.into() })
    };
    running.finish().await?.written(write).await
}

/// The request as [`Generation`]s.
pub fn parse(fields: &Fields<'_>, served: &Arc<ServedModel>) -> Result<Vec<Generation>, ApiError> {
    let prompts = prompt_fields::prompts(fields, "prompt")?;
    Ok(parse_with(fields, served, prompts)?.0)
}

pub(super) fn parse_with(
    fields: &Fields<'_>,
    served: &Arc<ServedModel>,
    prompts: Vec<Prompt>,
) -> Result<(Vec<Generation>, AnswerOptions), ApiError> {
    sampling_fields::refuse_unsupported(fields)?;
    vllm_fields::refuse(fields, REFUSED)?;
    check_stream(fields)?;
    let choices = choices(fields)?;
    let probabilities = probabilities(fields)?;
    let (timings_per_token, return_progress) = (
        fields.flag("timings_per_token")?.unwrap_or(false),
        fields.flag("return_progress")?.unwrap_or(false),
    );
    let template = Generation {
        sampling: sampling_fields::sampling(fields, served)?,
        max_tokens: sampling_fields::max_tokens(
            fields,
            &["n_predict", "max_tokens", "max_completion_tokens"],
            sampling_fields::NO_LIMIT,
            served,
        )?,
        stops: sampling_fields::stops(fields, "stop", served)?,
        choices,
        logprobs: probabilities,
        logprobs_field: "n_probs",
        constraint: format_fields::constraint(fields)?,
        constraint_field: format_fields::constraint_field(fields),
        slot: slot(fields, served)?,
        priority: priority(fields)?,
        shares_prefix: fields.flag("cache_prompt")?.unwrap_or(true),
        progress: timings_per_token || return_progress,
        ..Generation::new(Prompt::Tokens(Vec::new()))
    };
    let template = vllm_fields::apply(fields, served, template)?;
    check_prompts(served, &template, &prompts)?;
    let options = AnswerOptions {
        return_tokens: fields.flag("return_tokens")?.unwrap_or(false),
        timings_per_token,
        return_progress,
        response_fields: fields.texts("response_fields")?.unwrap_or_default(),
        settings: generation_settings(&template),
        // Those that are cut are shown as they are used.
        prompts: if template.truncation.is_some() { Vec::new() } else { prompts.clone() },
        choices,
    };
    let generations = prompts.into_iter().map(|prompt| Generation { prompt, ..template.clone() }).collect();
    Ok((generations, options))
}

/// The number of most probable tokens that are reported with each token.
fn probabilities(fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let mut found = None;
    for name in ["n_probs", "logprobs"] {
        let Some(count) = fields.count(name)? else { continue };
        if count > MAX_PROBABILITIES {
            return Err(fields.error(name, format!("must be from 0 to {MAX_PROBABILITIES}")));
        }
        found.get_or_insert(count);
    }
    Ok(found.filter(|count| *count > 0))
}

/// The fields of a request beside its prompt.
fn request_fields() -> Value {
    json!({
        "n_probs": count_between(0, MAX_PROBABILITIES),
        "logprobs": count_between(0, MAX_PROBABILITIES),
        "return_tokens": flag(),
        "response_fields": schema::texts(),
    })
}

/// Fields that requests for text share with OpenAI's.
pub(super) fn shared_fields() -> [Value; 9] {
    [
        schemas::common(),
        schemas::completion_fields(),
        request_fields(),
        sampling_fields::schema(),
        sampling_fields::unsupported_schema(),
        vllm_fields::refused_schema(REFUSED),
        format_fields::response_format_schema(),
        format_fields::grammar_schema(),
        vllm_fields::schema(),
    ]
}

/// The body of `/completion`.
pub(super) fn request_schema() -> Value {
    let prompt = json!({ "prompt": prompt_fields::schema() });
    schema::request(&["prompt"], prompt, shared_fields())
}

/// The body of `/completions`: that of OpenAI if it names a model.
pub(super) fn either_request_schema() -> Value {
    let own = schema::with_field(request_schema(), "model", json!({ "type": "null" }));
    any_of([own, schema::requiring(schemas::completion_request(), "model", text())])
}

/// The answer of `/completions`.
pub(super) fn either_answer_schema() -> Value {
    any_of([answer_schema(), schemas::completion()])
}

/// An answer, or a list of them for several prompts; `response_fields` leaves some of it out.
pub(super) fn answer_schema() -> Value {
    let one = json!({
        "type": "object",
        "properties": {
            "index": count(),
            "content": text(),
            "tokens": list(schema::token()),
            "id_slot": count(),
            "stop": flag(),
            "model": text(),
            "tokens_predicted": count(),
            "tokens_evaluated": count(),
            "tokens_cached": count(),
            "generation_settings": schema::any_object(),
            "prompt": text(),
            "truncated": flag(),
            "stop_type": schema::one_of(&["none", "eos", "limit", "word"]),
            "stopping_word": text(),
            "timings": crate::dialects::timings::schema(),
            "completion_probabilities": list(answer(json!({ "id": schema::token(), "token": text() }))),
        },
    });
    any_of([one.clone(), list(one)])
}

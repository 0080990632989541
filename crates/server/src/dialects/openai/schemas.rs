//! The schemas of requests and answers.

use serde_json::{Value, json};

use super::logprobs::MAX_TOP_LOGPROBS;
use super::messages;
use super::request_fields::{
    EFFORTS, REASONING_BUDGETS, REFUSED_OF_CHATS, REFUSED_OF_RESPONSES, STORED, VERBOSITIES,
};
use crate::dialects::{format_fields, prompt_fields, sampling_fields, timings, vllm_fields};
use crate::openapi::schema::{
    answer, any_object, any_of, count, count_between, filled_list, flag, integer, list, null, nullable,
    number, off, one_of, other_type, request, text, texts, tool_name, with_field,
};
use crate::prompt::MAX_CHOICES;
use crate::reasoning_output::ReasoningOutput;

/// Fields that all requests for text have.
pub(crate) fn common() -> Value {
    let range = i64::from(i32::MAX);
    json!({
        "model": text(),
        "stream": flag(),
        "stream_options": request(
            &[],
            json!({ "include_usage": flag(), "continuous_usage_stats": flag() }),
            [],
        ),
        "return_progress": flag(),
        "timings_per_token": flag(),
        "stop": texts(),
        "priority": { "type": "integer", "minimum": -range, "maximum": range },
        "sse_ping_interval": integer(),
        "cache_prompt": flag(),
    })
}

/// Fields of chat completions and completions, those of llama-server among them.
pub(crate) fn completion_fields() -> Value {
    json!({
        "n": count_between(1, MAX_CHOICES),
        "n_cmpl": count_between(1, MAX_CHOICES),
        "max_tokens": sampling_fields::limit_schema(-1),
        "max_completion_tokens": sampling_fields::limit_schema(-1),
        "n_predict": sampling_fields::limit_schema(-1),
        "id_slot": super::request_fields::slot_schema(),
    })
}

/// The most tokens of reasoning, by all names.
fn reasoning_budgets() -> Value {
    REASONING_BUDGETS.iter().map(|name| ((*name).to_owned(), integer())).collect()
}

/// The body of a chat completion.
pub(super) fn chat_request() -> Value {
    let own = json!({
        "messages": filled_list(message()),
        "logprobs": flag(),
        "top_logprobs": count_between(0, MAX_TOP_LOGPROBS),
        "reasoning_effort": one_of(EFFORTS),
        "modalities": any_of([one_of(&["text"]), list(one_of(&["text"]))]),
        "verbosity": one_of(VERBOSITIES),
        "include_reasoning": flag(),
        "reasoning_format": one_of(&ReasoningOutput::NAMES),
        "chat_template_kwargs": any_object(),
        "documents": list(any_object()),
        "add_generation_prompt": flag(),
        "continue_final_message": flag(),
    });
    request(
        &["messages"],
        own,
        [
            common(),
            completion_fields(),
            reasoning_budgets(),
            sampling_fields::schema(),
            sampling_fields::unsupported_schema(),
            vllm_fields::refused_schema(REFUSED_OF_CHATS),
            format_fields::schema(),
            format_fields::grammar_schema(),
            vllm_fields::schema(),
            vllm_fields::token_schema(),
        ],
    )
}

pub(crate) fn message() -> Value {
    let content = messages::content_schema();
    let function =
        request(&["name"], json!({ "name": text(), "arguments": any_of([text(), any_object()]) }), []);
    let call = request(&["function"], json!({ "id": text(), "function": function }), []);
    let roles = ["system", "developer", "user", "tool", "function"];
    let other = json!({ "role": one_of(&roles), "content": content, "tool_call_id": text(), "name": text() });
    let own = json!({
        "role": one_of(&["assistant"]),
        "content": content,
        "reasoning_content": text(),
        "reasoning": text(),
    });
    let with_calls =
        json!({ "role": one_of(&["assistant"]), "content": content, "tool_calls": filled_list(call) });
    any_of([
        request(&["role", "content"], other, []),
        request(&["role", "content"], own, []),
        request(&["role", "tool_calls"], with_calls, []),
    ])
}

/// A chat completion.
pub(super) fn chat() -> Value {
    let message = answer(json!({
        "role": one_of(&["assistant"]),
        "content": nullable(&text()),
        "refusal": json!({ "type": "null" }),
    }));
    let function = answer(json!({ "name": text(), "arguments": text() }));
    let call = answer(json!({ "id": text(), "type": one_of(&["function"]), "function": function }));
    let message = with_field(message, "reasoning_content", text());
    let message = with_field(message, "tool_calls", filled_list(call));
    let choice = json!({
        "index": count(),
        "message": message,
        "logprobs": nullable(&any_object()),
        "finish_reason": one_of(&["stop", "length", "tool_calls"]),
    });
    answer(head("chat.completion", choice))
}

fn head(object: &str, choice: Value) -> Value {
    json!({
        "id": text(),
        "object": one_of(&[object]),
        "created": count(),
        "model": text(),
        "choices": list(answer(choice)),
        "usage": usage(),
        "system_fingerprint": text(),
        "timings": timings::schema(),
    })
}

fn usage() -> Value {
    answer(json!({
        "prompt_tokens": count(),
        "completion_tokens": count(),
        "total_tokens": count(),
        "prompt_tokens_details": answer(json!({ "cached_tokens": count() })),
        "completion_tokens_details": answer(json!({ "reasoning_tokens": count() })),
    }))
}

/// The body of a completion.
pub(crate) fn completion_request() -> Value {
    let own = json!({
        "prompt": prompt_fields::schema(),
        "logprobs": count_between(0, super::completions::MAX_LOGPROBS),
        "echo": flag(),
        "best_of": count(),
        "suffix": text(),
    });
    request(
        &["prompt"],
        own,
        [
            common(),
            completion_fields(),
            sampling_fields::schema(),
            sampling_fields::unsupported_schema(),
            format_fields::response_format_schema(),
            format_fields::grammar_schema(),
            vllm_fields::schema(),
            vllm_fields::token_schema(),
        ],
    )
}

/// A completion.
pub(crate) fn completion() -> Value {
    let choice = json!({
        "index": count(),
        "text": text(),
        "logprobs": nullable(&any_object()),
        "finish_reason": one_of(&["stop", "length"]),
    });
    answer(head("text_completion", choice))
}

/// The body of a request for embeddings.
pub(crate) fn embedding_request() -> Value {
    let fields = json!({
        "input": super::embeddings::input_schema(),
        "model": text(),
        "encoding_format": one_of(&["float", "base64"]),
        "dimensions": { "type": "integer", "minimum": 1, "maximum": 1_000_000 },
    });
    request(&["input"], fields, [])
}

/// Embeddings.
pub(crate) fn embeddings() -> Value {
    let one = json!({
        "object": one_of(&["embedding"]),
        "index": count(),
        "embedding": any_of([list(number()), text()]),
    });
    answer(json!({
        "object": one_of(&["list"]),
        "model": text(),
        "data": list(answer(one)),
        "usage": answer(json!({ "prompt_tokens": count(), "total_tokens": count() })),
    }))
}

/// The body of a response.
pub(super) fn response_request() -> Value {
    let content = messages::content_schema();
    let thoughts = list(request(&[], json!({ "text": text() }), []));
    let items = [
        request(
            &["role", "content"],
            json!({
                "type": one_of(&["message"]),
                "role": one_of(&["system", "developer", "user", "assistant"]),
                "content": content.clone(),
            }),
            [],
        ),
        request(
            &["type", "name"],
            json!({
                "type": one_of(&["function_call"]),
                "call_id": text(),
                "name": text(),
                "arguments": any_of([text(), any_object()]),
            }),
            [],
        ),
        request(
            &["type"],
            json!({ "type": one_of(&["reasoning"]), "content": thoughts.clone(), "summary": thoughts }),
            [],
        ),
        request(
            &["type", "call_id", "output"],
            json!({
                "type": one_of(&["function_call_output"]),
                "call_id": text(),
                "output": content,
            }),
            [],
        ),
    ];
    let others = super::response_input::other_items_schema();
    let item = json!({ "anyOf": items.into_iter().chain(others).collect::<Vec<_>>() });
    let tool = request(
        &["type", "name"],
        json!({
            "type": one_of(&["function"]),
            "name": tool_name(),
            "description": text(),
            "parameters": any_object(),
            "strict": flag(),
        }),
        [],
    );
    let tool = any_of([tool, other_type("function")]);
    let format = any_of([
        request(&["type"], json!({ "type": one_of(&["text", "json_object"]) }), []),
        request(
            &["type", "schema"],
            json!({
                "type": one_of(&["json_schema"]),
                "name": text(),
                "schema": any_object(),
                "strict": flag(),
            }),
            [],
        ),
    ]);
    let own = json!({
        "input": any_of([text(), filled_list(item)]),
        "instructions": text(),
        "max_output_tokens": count(),
        "tools": list(tool),
        "tool_choice": format_fields::tool_choice_schema(),
        "parallel_tool_calls": flag(),
        "reasoning": request(&[], json!({ "effort": one_of(EFFORTS) }), []),
        "chat_template_kwargs": any_object(),
        "text": request(&[], json!({ "format": format, "verbosity": one_of(VERBOSITIES) }), []),
        "truncation": one_of(&["auto", "disabled"]),
        "metadata": metadata(),
        "top_logprobs": count_between(0, MAX_TOP_LOGPROBS),
        "include": list(text()),
        "background": off(),
        "user": text(),
        "safety_identifier": text(),
        "prompt_cache_key": text(),
    });
    let stored: Value = STORED.iter().map(|name| ((*name).to_owned(), null())).collect();
    request(
        &["input"],
        own,
        [
            common(),
            reasoning_budgets(),
            stored,
            sampling_fields::schema(),
            sampling_fields::unsupported_schema(),
            vllm_fields::schema(),
            vllm_fields::refused_schema(REFUSED_OF_RESPONSES),
        ],
    )
}

/// A response.
pub(super) fn response() -> Value {
    answer(json!({
        "id": text(),
        "object": one_of(&["response"]),
        "created_at": count(),
        "completed_at": nullable(&count()),
        "status": one_of(&["completed", "incomplete", "failed", "in_progress"]),
        "error": nullable(&any_object()),
        "incomplete_details": nullable(&any_object()),
        "instructions": nullable(&text()),
        "max_output_tokens": nullable(&count()),
        "metadata": metadata(),
        "model": text(),
        "output": list(answer(json!({
            "id": text(),
            "type": one_of(&["message", "reasoning", "function_call"]),
            "status": text(),
        }))),
        "parallel_tool_calls": flag(),
        "previous_response_id": json!({ "type": "null" }),
        "temperature": number(),
        "text": any_object(),
        "tools": list(any_object()),
        "top_p": number(),
        "truncation": one_of(&["disabled"]),
        "usage": answer(json!({
            "input_tokens": count(),
            "input_tokens_details": answer(json!({ "cached_tokens": count() })),
            "output_tokens": count(),
            "output_tokens_details": answer(json!({ "reasoning_tokens": count() })),
            "total_tokens": count(),
        })),
    }))
}

/// A model.
pub(super) fn model() -> Value {
    let model = answer(json!({
        "id": text(),
        "object": one_of(&["model"]),
        "created": count(),
        "owned_by": text(),
    }));
    // Where there are several models.
    let status = answer(json!({ "value": one_of(&["unloaded", "loading", "loaded"]) }));
    let kinds = || list(text());
    let architecture = answer(json!({ "input_modalities": kinds(), "output_modalities": kinds() }));
    let model = with_field(with_field(model, "status", status), "architecture", architecture);
    // For requests with the header `anthropic-version`.
    let model = with_field(model, "type", one_of(&["model"]));
    with_field(with_field(model, "display_name", text()), "created_at", text())
}

/// All models.
pub(super) fn models() -> Value {
    answer(json!({ "object": one_of(&["list"]), "data": list(model()) }))
}

/// Pairs of a client, which come back with a response.
fn metadata() -> Value {
    json!({
        "type": "object",
        "maxProperties": 16,
        "propertyNames": { "maxLength": 64 },
        "additionalProperties": { "type": "string", "maxLength": 512 },
    })
}
